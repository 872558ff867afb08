"""The format "entries" of a piece of state, which every backend can read.

Blocks of up to `BLOCK_ENTRIES` entries of one table, then an index of them, then the index's length and a mark. A
block holds the key group of each entry, packed keys and packed values; without values its keys are deleted. The
index tells each block's range of groups, so that one who needs some groups reads some blocks: entries are ordered
by group within runs of `RUN_ENTRIES`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

import msgpack
import numpy as np

from ftlayer.checkpoint.options import FIRST_VERSION, StateMigration
from ftlayer.checkpoint.snapshots import KeyedSnapshot, StatePiece, TableInfo
from ftlayer.checkpoint.storage.opening import SlotStorage
from ftlayer.common.checks import check_named
from ftlayer.common.printable import described
from ftlayer.config import MIB
from ftlayer.errors import (
    CheckpointDamagedError,
    ConfigError,
    IncompatibleCheckpointError,
    StateSerializationError,
)
from ftlayer.functions.keyed import Key, holds_stamped, plain_name
from ftlayer.records.ids import I64Array
from ftlayer.records.kernels import native
from ftlayer.state.contract import BackendSpec
from ftlayer.state.snapshots import serializer
from ftlayer.state.snapshots.serializer import (
    Serializer,
    array_header,
    bytes_header,
    split_array,
    unpack,
    unreadable,
)
from ftlayer.state.tables.declarations import (
    LIST,
    MAP,
    TIMERS,
    VALUE,
    Buckets,
    StateDeclarations,
    TimerService,
)
from ftlayer.state.tables.layers import DELETED, KeyGroups, Layer, U16Array, sliced


class Migrations:
    """What `CheckpointConfig.migrations` and ``allow_unclaimed_state`` say, by operator and table."""

    def __init__(self, migrations: Sequence[StateMigration], allowed: bool | tuple[str, ...] = False) -> None:
        self._by_name = {(one.operator, one.state): one for one in migrations}
        self._renamed = {
            (one.operator, one.renamed_from): one.state for one in migrations if one.renamed_from
        }
        self._allowed = () if isinstance(allowed, bool) else allowed

    def version(self, operator: str, table: str) -> int:
        found = self._by_name.get((operator, plain_name(table)))
        return FIRST_VERSION if found is None else found.version

    def check_declared(self, operator: str, declarations: StateDeclarations) -> None:
        """Raise `ConfigError` for a migration of a state that an operator, if it asks for any in `open`, has not."""
        declared = set(map(plain_name, declarations.declared))
        if not declared:
            return
        known = declared | set(map(plain_name, declarations.held))
        for named, state in self._by_name:
            if named == operator and state not in known:
                try:
                    check_named(state, known, f"migrations: operator {operator!r} has no state")
                except ConfigError as error:
                    raise ConfigError(
                        f"{error}. If it is asked for with a record only, ask for it in `open` too"
                    ) from None

    def is_left_behind(self, operator: str, table: str) -> bool:
        """Whether a restore is to leave a state behind. With a time to live it has another name than without."""
        return f"{operator}/{table}" in self._allowed

    def present(self, info: TableInfo) -> TableInfo:
        """Return a table of a checkpoint under its present name; IncompatibleCheckpointError for a later version."""
        if info.kind == TIMERS:
            return info
        plain = plain_name(info.name)
        name = self._renamed.get((info.operator, plain))
        found = info if name is None else replace(info, name=name + info.name[len(plain) :])
        now = self.version(found.operator, found.name)
        if found.state_version > now:
            raise IncompatibleCheckpointError(
                f"operator {info.operator!r}, state {plain!r}: the checkpoint holds version {info.state_version} of "
                f"it, and this program has version {now}; restore with the program that wrote it, or a later one"
            )
        return found

    def changes(self, info: TableInfo) -> bool:
        found = self.present(info)
        return found.name != info.name or (info.kind != TIMERS and self._is_older(found))

    def migrated(self, info: TableInfo, keys: list[Key], values: list[Any]) -> list[Any]:
        """Return values in their present version; `IncompatibleCheckpointError` where the user's function raises."""
        if not self._is_older(info):
            return values
        migrate = self._by_name[info.operator, plain_name(info.name)].migrate
        stamped = holds_stamped(info.name)

        def one(value: Any) -> Any:
            if stamped:
                until, inner = value
                return until, migrate(inner, info.state_version)
            return migrate(value, info.state_version)

        whole = _WHOLES[info.kind]
        migrated = []
        for key, value in zip(keys, values, strict=True):
            try:
                migrated.append(whole(value, one))
            except Exception as error:
                raise IncompatibleCheckpointError(
                    f"operator {info.operator!r}, state {plain_name(info.name)!r}, key {key!r:.100}: its "
                    f"migration from version {info.state_version} to {self.version(info.operator, info.name)} failed "
                    f"({described(error)})"
                ) from error
        return migrated

    def _is_older(self, info: TableInfo) -> bool:
        return info.state_version < self.version(info.operator, info.name)


_WHOLES: dict[str, Callable[[Any, Callable[[Any], Any]], Any]] = {
    VALUE: lambda value, one: one(value),
    LIST: lambda values, one: [one(value) for value in values],
    MAP: lambda items, one: {field: one(value) for field, value in items.items()},
}


SLICE = 1_000
"""Entries that are handled in one go, without giving the interpreter to the task's thread."""


@dataclass(frozen=True, slots=True)
class Part:
    """A few entries of a table: keys with their values, and keys that were deleted."""

    keys: list[Key]
    values: list[Any]
    deleted: list[Key]


@dataclass(frozen=True, slots=True)
class TableView:
    """One table at a freeze: its layers then, the newest first, and its base, which stays as long as it is read."""

    info: TableInfo
    groups: KeyGroups
    layers: tuple[Layer, ...]
    base: dict[Key, Any]

    def parts(self) -> Iterator[Part]:
        return newest_of([layer.changes() for layer in self.layers], self.base)


@dataclass(frozen=True, slots=True)
class TimersView:
    info: TableInfo
    groups: KeyGroups
    event: Buckets
    processing: Buckets

    def parts(self) -> Iterator[Part]:
        """Return timers: for a key [is of processing time, time, place in the order of setting]."""
        for processing, buckets in ((False, self.event), (True, self.processing)):
            timers = ((key, time_ms) for time_ms, bucket in buckets.items() for key in bucket)
            for number, part in enumerate(sliced(timers, SLICE)):
                first = number * SLICE
                values = [[processing, time_ms, first + place] for place, (_, time_ms) in enumerate(part)]
                yield Part([key for key, _ in part], values, [])


def newest_of(
    newest_first: Sequence[Iterable[tuple[Key, Any]]], base: dict[Key, Any] | None = None
) -> Iterator[Part]:
    """Return entries bit by bit, of each key the first; ``base`` comes last, has each once, does not change."""
    seen: dict[Key, None] = {}
    last = len(newest_first) - 1 if base is None else len(newest_first)
    for place, pairs in enumerate(newest_first):
        for part in sliced(pairs, SLICE):
            new = [pair for pair in part if pair[0] not in seen] if place else part
            kept = [pair for pair in new if pair[1] is not DELETED]
            deleted = [key for key, value in new if value is DELETED] if len(kept) < len(new) else []
            if place != last:
                seen.update(dict.fromkeys([pair[0] for pair in new]))
            if new:
                yield Part([pair[0] for pair in kept], [pair[1] for pair in kept], deleted)
    at = -1 if base is None else 0
    while base is not None and at >= 0:
        at, keys, values, deleted = native.dict_part(base, at, SLICE, seen, DELETED)
        if keys or deleted:
            yield Part(keys, values, deleted)


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
        index: bytes = msgpack.packb(self._index)
        return index + _END.pack(len(index), _MARK)


class TableEncoder:
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
                packed_value(self._serializer, self._info, keys[place], values[place])
            raise StateSerializationError(
                f"operator {self._info.operator!r}, table {self._info.name!r}: {error}"
            ) from error


def packed_value(packer: Serializer, info: TableInfo, key: Key, value: Any) -> bytes:
    """Return the bytes of a key's value; `StateSerializationError` names the key of one that cannot be written."""
    try:
        return packer.pack(value)
    except Exception as error:
        raise StateSerializationError(
            f"operator {info.operator!r}, table {info.name!r}, key {key!r:.100}: "
            f"a {type(value).__qualname__} cannot be written ({described(error)})"
        ) from error


def read_blocks(file: BinaryIO, wanted: Callable[[int, int, int], bool], name: str) -> Iterator[Block]:
    """Read blocks for which ``wanted(table, first group, last group)``; `CheckpointDamagedError` calls it ``name``."""
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


BlocksOf = Callable[[StatePiece, Callable[[int, int, int], bool]], Iterator[Block]]
"""``blocks(piece, wanted)``: those blocks of a piece for which ``wanted(table, first group, last group)``."""


def blocks_of_entries(storage: SlotStorage, location: str) -> BlocksOf:
    def blocks(piece: StatePiece, wanted: Callable[[int, int, int], bool]) -> Iterator[Block]:
        name = piece.piece.path or f"a piece of state of checkpoint {piece.checkpoint}"
        with storage.open(location, piece.piece) as file:
            yield from read_blocks(file, wanted, name)

    return blocks


def claimed(snapshot: KeyedSnapshot, spec: BackendSpec, migrations: Migrations) -> dict[int, TableInfo]:
    """Return the subtask's tables, by number, under their present names, or raise `IncompatibleCheckpointError`."""
    tables = {
        info.number: migrations.present(info)
        for info in snapshot.tables
        if info.operator in spec.keys
        and (info.kind == TIMERS or not migrations.is_left_behind(info.operator, info.name))
    }
    for info in tables.values():
        if info.serializer != serializer.NAME or info.version > serializer.VERSION:
            raise IncompatibleCheckpointError(
                f"operator {info.operator!r}, table {info.name!r}: written with the serializer {info.serializer} "
                f"{info.version}; this version of ftlayer has {serializer.NAME} {serializer.VERSION}: "
                "restore with the version that wrote it, or a later one"
            )
        if info.kind not in (VALUE, LIST, MAP, TIMERS):
            raise IncompatibleCheckpointError(
                f"operator {info.operator!r}, table {info.name!r}: state of the kind {info.kind!r} is not known to "
                "this version of ftlayer; restore with the version that wrote it, or a later one"
            )
    return tables


def wanted_blocks(spec: BackendSpec, tables: dict[int, TableInfo]) -> Callable[[int, int, int], bool]:
    """Return which blocks of a snapshot's pieces hold something of the subtask."""

    def wanted(table: int, first: int, last: int) -> bool:
        return table in tables and last >= spec.first_group and first < spec.end_group

    return wanted


def own_part(block: Block, spec: BackendSpec) -> Block | None:
    """Return the entries of the subtask's key groups; None without any."""
    own = (block.groups >= spec.first_group) & (block.groups < spec.end_group)
    if own.all():
        return block
    if not own.any():
        return None
    places = np.flatnonzero(own).tolist()
    values = None if block.values is None else _picked(block.values, places)
    return Block(block.table, block.groups[own], _picked(block.keys, places), values)


def _picked(packed: bytes, places: list[int]) -> bytes:
    items = split_array(packed)
    return array_header(len(places)) + b"".join([items[place] for place in places])


def decoded(block: Block, info: TableInfo, groups: KeyGroups) -> tuple[list[Key], list[Any] | None]:
    """Return keys and values of a block; None for values: the keys are deleted."""
    try:
        keys = groups.found_again(unpack(block.keys))
        values = None if block.values is None else unpack(block.values)
    except Exception as error:
        raise unreadable(f"operator {info.operator!r}, table {info.name!r}", error) from error
    if values is not None and len(values) != len(keys):
        raise CheckpointDamagedError(f"operator {info.operator!r}, table {info.name!r}: keys without values")
    return keys, values


class TimersRestored:
    """Collects the timers of one operator, and sets them in the order in which they were set."""

    def __init__(self, service: TimerService) -> None:
        self._service = service
        self._found: list[tuple[int, bool, int, Key]] = []

    def add(self, keys: list[Key], values: list[Any]) -> None:
        self._found += [
            (cast(int, order), processing, time_ms, key)
            for key, (processing, time_ms, order) in zip(keys, values, strict=True)
        ]

    def set(self) -> None:
        self._found.sort(key=lambda timer: timer[0])
        for _, processing, time_ms, key in self._found:
            (self._service.processing if processing else self._service.event).add(key, time_ms)
