"""Copies of LMDB environments: written into a snapshot as they are, and read entry by entry."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import lmdb
import numpy as np

from ftlayer.checkpoint.snapshots import StatePiece
from ftlayer.checkpoint.storage.contract import SlotStorage
from ftlayer.config import MIB
from ftlayer.errors import CheckpointDamagedError, CheckpointStorageError
from ftlayer.state.entries import BLOCK_ENTRIES, Block
from ftlayer.state.lmdb_layout import Entry, entry_of
from ftlayer.state.restoring import BlocksOf
from ftlayer.state.serializer import array_header
from ftlayer.state.view import SLICE

CHUNK = MIB
MAX_BLOCK_BYTES = MIB

BUCKETS = 64
"""Ranges of key groups whose entries are gathered at a time, so that what is in one block lies close together."""

_SET_PIPE_SIZE = getattr(fcntl, "F_SETPIPE_SZ", 1031)


def copied(env: Any, pace: Callable[[], None]) -> Iterator[bytes]:
    """Return a compacted copy of an environment in chunks.

    It is made by LMDB in a thread that does not hold the interpreter, through a pipe: when this is given up, or
    ``pace`` raises, the pipe is closed and LMDB stops at its next write.
    """
    out, into = os.pipe()
    fcntl.fcntl(into, _SET_PIPE_SIZE, CHUNK)
    failed: list[BaseException] = []

    def copy() -> None:
        try:
            env.copyfd(into, compact=True)
        except lmdb.Error as error:
            failed.append(error)
        finally:
            os.close(into)

    thread = Thread(target=copy, name="ftlayer-state-copy", daemon=True)
    thread.start()
    try:
        while chunk := os.read(out, CHUNK):
            yield chunk
            pace()
    finally:
        os.close(out)
        thread.join()
    if failed:
        raise CheckpointStorageError(f"the LMDB environment cannot be copied: {failed[0]}") from failed[0]


def grouped_blocks(
    entries: Iterable[Entry], max_parallelism: int, pace: Callable[[], None]
) -> Iterator[Block]:
    """Put entries of one table into blocks, each of key groups that lie close together."""
    buckets: dict[int, _Bucket] = {}
    for number, entry in enumerate(entries):
        place = entry.group * BUCKETS // max_parallelism
        bucket = buckets.setdefault(place, _Bucket())
        bucket.add(entry)
        if len(bucket.entries) >= BLOCK_ENTRIES or bucket.bytes >= MAX_BLOCK_BYTES:
            yield buckets.pop(place).block()
        if number % SLICE == 0:
            pace()
    for bucket in buckets.values():
        yield bucket.block()


class _Bucket:
    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.bytes = 0

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)
        self.bytes += len(entry.key) + len(entry.value)

    def block(self) -> Block:
        entries = self.entries
        header = array_header(len(entries))
        return Block(
            entries[0].table,
            np.array([entry.group for entry in entries], np.uint16),
            header + b"".join([entry.key for entry in entries]),
            header + b"".join([entry.value for entry in entries]),
        )


def blocks_of_copies(storage: SlotStorage, location: str, directory: str | None) -> BlocksOf:
    """Return what reads pieces of the format "lmdb"; they are fetched into a temporary directory."""

    def blocks(piece: StatePiece, wanted: Callable[[int, int, int], bool]) -> Iterator[Block]:
        with TemporaryDirectory(prefix="ftlayer-restore-", dir=directory) as name:
            path = Path(name) / "copy.mdb"
            storage.fetch(location, piece.piece, path)
            with opened_copy(path) as env, env.begin() as txn, txn.cursor() as cursor:
                by_table: dict[int, _Bucket] = {}
                for key, value in cursor:
                    entry = entry_of(key, value)
                    if wanted(entry.table, entry.group, entry.group):
                        bucket = by_table.setdefault(entry.table, _Bucket())
                        bucket.add(entry)
                        if len(bucket.entries) >= BLOCK_ENTRIES or bucket.bytes >= MAX_BLOCK_BYTES:
                            yield by_table.pop(entry.table).block()
                for bucket in by_table.values():
                    yield bucket.block()

    return blocks


def opened_copy(path: Path) -> Any:
    """Open a copied environment for reading; CheckpointDamagedError if it is none."""
    try:
        return lmdb.open(
            str(path), subdir=False, readonly=True, lock=False, map_size=max(path.stat().st_size, MIB)
        )
    except lmdb.Error as error:
        raise CheckpointDamagedError(f"a copied LMDB environment cannot be read: {error}") from error
