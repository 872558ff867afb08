"""Copies of LMDB environments: written into a snapshot as they are, and read entry by entry."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, NamedTuple

import lmdb
import msgpack
import numpy as np

from ftlayer.checkpoint.snapshots import StatePiece
from ftlayer.checkpoint.storage.opening import SlotStorage
from ftlayer.config import MIB
from ftlayer.errors import CheckpointDamagedError, CheckpointStorageError
from ftlayer.state.snapshots.entries import BLOCK_ENTRIES, SLICE, Block, BlocksOf
from ftlayer.state.snapshots.serializer import array_header

# How entries lie in an LMDB environment.
#
# Key: the table's number, 2 bytes big-endian, then the packed key. A key longer than LMDB takes is replaced by a mark
# and its BLAKE2b digest. Value: the entry's key group, 2 bytes little-endian, then the packed value, with the packed
# key before it where that was replaced. The group is not part of the key, since to compute that of a single key takes
# many times as long as to look the key up; it is needed only when state is moved.


FORMAT = "lmdb"
"""Of a `StatePiece` that is a copy of an environment."""

DATA = "data.mdb"
"""The file of an environment, in its directory."""

TABLE = struct.Struct(">H")
GROUP = struct.Struct("<H")

MAX_KEY = 500
"""Bytes of a key in LMDB, which takes 511."""

_REPLACED = b"\xc1"
"""The one byte that nothing packed begins with."""


class StoredEntry(NamedTuple):
    table: int
    group: int
    key: bytes
    value: bytes


def stored_key(table: bytes, packed: bytes) -> bytes:
    if len(packed) + len(table) <= MAX_KEY:
        return table + packed
    return table + _REPLACED + blake2b(packed, digest_size=32).digest()


def is_replaced(stored: bytes) -> bool:
    """Whether an LMDB key has a digest in place of the packed key."""
    return stored[TABLE.size : TABLE.size + 1] == _REPLACED


def stored_value(group: int, packed_key: bytes, packed_value: bytes) -> bytes:
    """Return the LMDB value. ``packed_key`` is of no use where it is in the LMDB key."""
    if len(packed_key) + TABLE.size <= MAX_KEY:
        return GROUP.pack(group) + packed_value
    return GROUP.pack(group) + packed_key + packed_value


def value_of(key: bytes, value: memoryview) -> memoryview:
    body = value[GROUP.size :]
    return body[_first_length(body) :] if is_replaced(key) else body


def entry_of(key: bytes, value: bytes) -> StoredEntry:
    (table,) = TABLE.unpack_from(key)
    (group,) = GROUP.unpack_from(value)
    if not is_replaced(key):
        return StoredEntry(table, group, key[TABLE.size :], value[GROUP.size :])
    end = GROUP.size + _first_length(value[GROUP.size :])
    return StoredEntry(table, group, value[GROUP.size : end], value[end:])


def _first_length(packed: bytes | memoryview) -> int:
    reader = msgpack.Unpacker(max_buffer_size=0)
    reader.feed(packed)
    reader.skip()
    length: int = reader.tell()
    return length


CHUNK = 2 * MIB
"""Fits into a processor's cache: it is written and hashed next."""

MOST_FREE = 2.0
"""A copy without free pages is made of a file that is more than so many times as large as what is in it …"""

FEW_PAGES = 1_000
"""… and has more than so many free pages."""

MAX_BLOCK_BYTES = MIB

BUCKETS = 64
"""Ranges of key groups whose entries are gathered at a time, so that what is in one block lies close together."""


def copied(env: Any, directory: Path, pace: Callable[[], None]) -> Iterator[bytes]:
    """Return a copy of an environment, which must not be written meanwhile, in chunks.

    The file as it is takes a fiftieth of the time of one without free pages, which is made where most of it is free.
    """
    stat, info = env.stat(), env.info()
    pages = info["last_pgno"] + 1
    pace()
    if pages > MOST_FREE * (stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]) + FEW_PAGES:
        yield from _compacted(env, directory, pace)
        return
    left = pages * stat["psize"]
    with (directory / DATA).open("rb", buffering=0) as file:
        while left and (chunk := file.read(min(left, CHUNK))):
            left -= len(chunk)
            yield chunk
            pace()


def _compacted(env: Any, directory: Path, pace: Callable[[], None]) -> Iterator[bytes]:
    """Return a copy without free pages, by way of a temporary file.

    LMDB makes the file in one go, without the interpreter and without looking at ``pace``. (A pipe would need no
    file. But each read of it, of 1 MiB at most, has to wait for a busy interpreter: 50 MB/s.)
    """
    with TemporaryFile(dir=directory, buffering=0) as file:
        try:
            env.copyfd(file.fileno(), compact=True)
        except lmdb.Error as error:
            raise CheckpointStorageError(
                f"the state in {directory} cannot be copied for a snapshot: {error}; is its disk full?"
            ) from error
        file.seek(0)
        while chunk := file.read(CHUNK):
            yield chunk
            pace()


def grouped_blocks(
    entries: Iterable[StoredEntry], max_parallelism: int, pace: Callable[[], None]
) -> Iterator[Block]:
    """Put entries of one table into blocks, each of key groups that lie close together."""

    def paced() -> Iterator[tuple[int, StoredEntry]]:
        for number, entry in enumerate(entries):
            yield entry.group * BUCKETS // max_parallelism, entry
            if number % SLICE == 0:
                pace()

    return _blocks(paced())


def _blocks(placed: Iterable[tuple[int, StoredEntry]]) -> Iterator[Block]:
    buckets: dict[int, _Bucket] = {}
    for place, entry in placed:
        bucket = buckets.setdefault(place, _Bucket())
        bucket.add(entry)
        if len(bucket.entries) >= BLOCK_ENTRIES or bucket.bytes >= MAX_BLOCK_BYTES:
            yield buckets.pop(place).block()
    for bucket in buckets.values():
        yield bucket.block()


class _Bucket:
    def __init__(self) -> None:
        self.entries: list[StoredEntry] = []
        self.bytes = 0

    def add(self, entry: StoredEntry) -> None:
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
                entries = (entry_of(key, value) for key, value in cursor)
                yield from _blocks(
                    (entry.table, entry) for entry in entries if wanted(entry.table, entry.group, entry.group)
                )

    return blocks


def opened_copy(path: Path) -> Any:
    """Open a copied environment for reading; CheckpointDamagedError if it is none."""
    try:
        return lmdb.open(
            str(path), subdir=False, readonly=True, lock=False, map_size=max(path.stat().st_size, MIB)
        )
    except lmdb.Error as error:
        raise CheckpointDamagedError(f"a copied LMDB environment cannot be read: {error}") from error
