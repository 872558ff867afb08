"""Topologies in a store: which run has claimed each."""

from __future__ import annotations

from collections.abc import Iterator

from ftlayer.errors import StoreDamagedError
from ftlayer.store.kv import ReadTransaction, WriteTransaction

_JOB = b"job/"


def put_job(txn: WriteTransaction, name: str, run: str) -> None:
    """Store which run a topology belongs to."""
    txn.put("meta", _JOB + name.encode(), run.encode())


def all_jobs(txn: ReadTransaction) -> Iterator[tuple[str, str]]:
    """Iterate over all topologies that were claimed: (name, run)."""
    for key, value in txn.scan("meta", _JOB, b"job0"):  # "0" comes after "/"
        try:
            yield bytes(key)[len(_JOB) :].decode(), bytes(value).decode()
        except UnicodeDecodeError as error:
            raise StoreDamagedError(f"the run of a topology in the store cannot be read: {error}") from error
