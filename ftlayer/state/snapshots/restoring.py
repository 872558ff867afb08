"""Fills a backend with what a checkpoint holds of its key groups and operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np

from ftlayer.checkpoint.snapshots import KeyedSnapshot, StatePiece, TableInfo
from ftlayer.checkpoint.storage.contract import SlotStorage
from ftlayer.errors import CheckpointDamagedError, IncompatibleCheckpointError
from ftlayer.functions.keyed import Key
from ftlayer.state.contract import BackendSpec
from ftlayer.state.snapshots import serializer
from ftlayer.state.snapshots.entries import Block, read_blocks
from ftlayer.state.snapshots.migrating import Migrations
from ftlayer.state.snapshots.serializer import array_header, split_array, unpack, unreadable
from ftlayer.state.tables.groups import KeyGroups
from ftlayer.state.tables.keyed import LIST, MAP, TIMERS, VALUE
from ftlayer.state.tables.timers import TimerService

BlocksOf = Callable[[StatePiece, Callable[[int, int, int], bool]], Iterator[Block]]
"""``blocks(piece, wanted)``: those blocks of a piece for which ``wanted(table, first group, last group)``."""


def blocks_of_entries(storage: SlotStorage, location: str) -> BlocksOf:
    """Return what reads pieces of the format "entries"."""

    def blocks(piece: StatePiece, wanted: Callable[[int, int, int], bool]) -> Iterator[Block]:
        name = piece.piece.path or f"a piece of state of checkpoint {piece.checkpoint}"
        with storage.open(location, piece.piece) as file:
            yield from read_blocks(file, wanted, name)

    return blocks


def claimed(snapshot: KeyedSnapshot, spec: BackendSpec, migrations: Migrations) -> dict[int, TableInfo]:
    """Return the tables, by number, of operators that the subtask has, with their present names.

    IncompatibleCheckpointError for those that cannot be read here.
    """
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
            (self._service.add_processing if processing else self._service.add_event)(key, time_ms)
