"""The format "entries" of a piece of state, which every backend can read.

Blocks of up to `BLOCK_ENTRIES` entries of one table, then an index of them, then the index's length and a mark. A
block holds the key group of each entry, packed keys and packed values; without values its keys are deleted. The
index tells each block's range of groups, so that one who needs some groups reads some blocks: entries are ordered
by group within runs of `RUN_ENTRIES`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgpack
import numpy as np

from ftlayer.checkpoint.snapshots import TableInfo
from ftlayer.config import MIB
from ftlayer.errors import CheckpointDamagedError, StateSerializationError
from ftlayer.functions.keyed import Key
from ftlayer.records.ids import I64Array
from ftlayer.state.snapshots.serializer import Serializer, bytes_header
from ftlayer.state.snapshots.view import Part
from ftlayer.state.tables.groups import KeyGroups, U16Array

FORMAT = "entries"
BLOCK_ENTRIES = 1_000
BLOCK_BYTES = MIB
"""Of its keys, and of its values: hardly more. To pack so much takes less than a millisecond, for which the
interpreter is kept."""

RUN_ENTRIES = 32_000

_END = struct.Struct("<Q4s")
_MARK = b"FTE1"
_LITTLE_U16 = np.dtype("<u2")
_NONE: bytes = msgpack.packb(None)


@dataclass(frozen=True, slots=True)
class Block:
    """Entries of one table: uint16[n] groups, packed arrays of n keys and n values. No values: they are deleted."""

    table: int
    groups: U16Array
    keys: bytes
    values: bytes | None


class EntriesWriter:
    """Puts a piece together, chunk by chunk."""

    def __init__(self) -> None:
        self.entries = 0
        self._index: list[tuple[int, int, int, int, int]] = []
        self._offset = 0

    def block(self, block: Block) -> Iterator[bytes]:
        """Return a block's bytes: its values, most of them, as they are."""
        raw = block.groups.astype(_LITTLE_U16, copy=False).tobytes()
        head: bytes = msgpack.packb([raw, block.keys, None])[:-1]
        if block.values is None:
            chunks = [head + _NONE]
        else:
            chunks = [head + bytes_header(len(block.values)), block.values]
        size = sum(map(len, chunks))
        self._index.append(
            (block.table, int(block.groups.min()), int(block.groups.max()), self._offset, size)
        )
        self._offset += size
        self.entries += len(block.groups)
        yield from chunks

    def end(self) -> bytes:
        """Return what comes behind the last block."""
        index: bytes = msgpack.packb(self._index)
        return index + _END.pack(len(index), _MARK)


class TableEncoder:
    """Turns keys and values of one table into blocks."""

    def __init__(self, info: TableInfo, groups: KeyGroups, serializer: Serializer) -> None:
        self._info = info
        self._groups = groups
        self._serializer = serializer

    def blocks(
        self, parts: Iterable[Part], pace: Callable[[], None], *, deletions: bool = True
    ) -> Iterator[Block]:
        """Encode entries; ``deletions``: and keys that were deleted. `StateSerializationError`."""
        keys: list[Key] = []
        values: list[Any] = []
        deleted: list[Key] = []
        for part in parts:
            keys += part.keys
            values += part.values
            if deletions:
                deleted += part.deleted
            pace()
            if len(keys) + len(deleted) >= RUN_ENTRIES:
                yield from self._run(keys, values, pace)
                yield from self._run(deleted, None, pace)
                keys, values, deleted = [], [], []
        yield from self._run(keys, values, pace)
        yield from self._run(deleted, None, pace)

    def _run(self, keys: list[Key], values: list[Any] | None, pace: Callable[[], None]) -> Iterator[Block]:
        groups = self._groups.of(keys)
        order = np.argsort(groups, kind="stable").astype(np.int64, copy=False)
        first = 0
        while first < len(keys):
            places, packed_keys, packed_values = self._block(
                keys, values, order[first : first + BLOCK_ENTRIES]
            )
            first += len(places)
            yield Block(self._info.number, groups[places], packed_keys, packed_values)
            pace()

    def _block(
        self, keys: list[Key], values: list[Any] | None, places: I64Array
    ) -> tuple[I64Array, bytes, bytes | None]:
        """Pack keys and values at the first of these places, as many as a block takes; returns the places too."""
        packed_values = None
        while True:
            packed_keys, count = self._packed(keys, keys, places)
            places = places[:count]
            if values is not None:
                packed_values, count = self._packed(keys, values, places)
            if count == len(places):
                return places, packed_keys, packed_values
            places = places[:count]

    def _packed(self, keys: list[Key], values: list[Any], places: I64Array) -> tuple[bytes, int]:
        try:
            return self._serializer.pack_some(values, places, BLOCK_BYTES)
        except Exception as error:
            for place in places.tolist():
                self._check(keys[place], values[place])
            raise StateSerializationError(
                f"operator {self._info.operator!r}, table {self._info.name!r}: {error}"
            ) from error

    def _check(self, key: Key, value: Any) -> None:
        try:
            self._serializer.pack(value)
        except Exception as error:
            raise StateSerializationError(
                f"operator {self._info.operator!r}, table {self._info.name!r}, key {key!r:.100}: "
                f"a {type(value).__qualname__} cannot be written ({type(error).__name__}: {error})"
            ) from error


def read_blocks(file: BinaryIO, wanted: Callable[[int, int, int], bool], name: str) -> Iterator[Block]:
    """Read those blocks of a piece for which ``wanted(table, first group, last group)``.

    ``name`` says in errors what is read. Raises CheckpointDamagedError for what is no such piece.
    """
    for table, first, last, offset, length in _read_index(file, name):
        if wanted(table, first, last):
            file.seek(offset)
            raw, keys, values = msgpack.unpackb(_read(file, length, name))
            yield Block(table, np.frombuffer(raw, _LITTLE_U16).astype(np.uint16, copy=False), keys, values)


def _read_index(file: BinaryIO, name: str) -> list[tuple[int, int, int, int, int]]:
    end = file.seek(0, 2)
    if end < _END.size:
        raise CheckpointDamagedError(f"{name} is cut off: {end} bytes")
    file.seek(end - _END.size)
    length, mark = _END.unpack(_read(file, _END.size, name))
    if mark != _MARK or length > end - _END.size:
        raise CheckpointDamagedError(f"{name} is no piece of state")
    file.seek(end - _END.size - length)
    index: list[tuple[int, int, int, int, int]] = msgpack.unpackb(_read(file, length, name))
    return index


def _read(file: BinaryIO, length: int, name: str) -> bytes:
    data = file.read(length)
    if len(data) != length:
        raise CheckpointDamagedError(f"{name} is cut off")
    return data
