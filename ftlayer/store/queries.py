"""Queries in a store: who runs them, and how far they have come."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftlayer.errors import StoreDamagedError
from ftlayer.store.kv import ReadTransaction, WriteTransaction
from ftlayer.store.rows import pack, unpack

_QUERY = b"query/"


@dataclass(frozen=True, slots=True)
class QueryRecord:
    """A query. Batch ids are -1 where there was none yet."""

    number: int
    epoch: int
    run: str
    streams: tuple[str, ...]
    last_sealed: int = -1
    last_committed: int = -1


def get_query(txn: ReadTransaction, name: str) -> QueryRecord | None:
    """Return the query called ``name``, or None."""
    value = txn.get("meta", _QUERY + name.encode())
    return None if value is None else _decode(value)


def put_query(txn: WriteTransaction, name: str, record: QueryRecord) -> None:
    """Store a query."""
    values = [
        record.number,
        record.epoch,
        record.run,
        record.streams,
        record.last_sealed,
        record.last_committed,
    ]
    txn.put("meta", _QUERY + name.encode(), pack(values))


def all_queries(txn: ReadTransaction) -> Iterator[tuple[str, QueryRecord]]:
    """Iterate over all queries by name."""
    for key, value in txn.scan("meta", _QUERY, b"query0"):  # "0" comes after "/"
        yield bytes(key)[len(_QUERY) :].decode(), _decode(value)


def _decode(value: bytes | memoryview) -> QueryRecord:
    try:
        number, epoch, run, streams, sealed, committed = unpack(value)
        return QueryRecord(number, epoch, run, tuple(streams), sealed, committed)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"a query of the store cannot be read: {error}") from error
