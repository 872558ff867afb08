"""Writes keyed state as it was at a freeze: in full, as what has changed, or on top of what is written already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ftlayer.checkpoint.pieces import Scope
from ftlayer.checkpoint.snapshots import KeyedSnapshot, OperatorState, StatePiece, TableInfo
from ftlayer.checkpoint.storage.contract import PieceWriter
from ftlayer.functions.ttl import holds_stamped, is_expired
from ftlayer.state.contract import BackendSnapshot
from ftlayer.state.snapshots import entries
from ftlayer.state.snapshots.entries import Block, EntriesWriter, TableEncoder
from ftlayer.state.snapshots.pace import Pace
from ftlayer.state.snapshots.serializer import Serializer
from ftlayer.state.snapshots.view import Part, TableView, TimersView, newest_of
from ftlayer.state.tables.groups import KeyGroups
from ftlayer.state.tables.keyed import LIST, MAP
from ftlayer.state.tables.layers import DELETED, Layer


class StoreView(Protocol):
    """What lies below the tables' bases; it is not written while it is read."""

    def blocks(self, pace: Callable[[], None]) -> Iterator[Block]:
        """Return what no base or layer knows of."""

    def copy(
        self, writer: PieceWriter, scope: Scope, checkpoint: int, pace: Callable[[], None]
    ) -> StatePiece:
        """Write all of it as one piece in its own format."""


@dataclass(frozen=True, slots=True)
class StateView:
    """All keyed state and timers of a backend at a freeze; what is over at ``now_ms`` is of no use (0: nothing is)."""

    first_group: int
    end_group: int
    tables: tuple[TableView, ...]
    timers: tuple[TimersView, ...]
    now_ms: int
    store: Callable[[Sequence[TableView]], StoreView] | None = None

    @property
    def infos(self) -> tuple[TableInfo, ...]:
        return (*(table.info for table in self.tables), *(timers.info for timers in self.timers))

    def snapshot(self, pieces: Sequence[StatePiece]) -> KeyedSnapshot | None:
        """Return the snapshot that these pieces are; None without any table."""
        if not self.infos:
            return None
        return KeyedSnapshot(self.first_group, self.end_group, self.infos, tuple(pieces))


class StateWriter:
    """Writes views for one checkpoint. Every method returns pieces, none of them empty."""

    def __init__(self, writer: PieceWriter, checkpoint: int, scope: Scope, pace: Pace) -> None:
        self._writer = writer
        self._checkpoint = checkpoint
        self._scope = scope
        self._pace = pace
        self._serializer = Serializer()

    def portable(self, view: StateView) -> list[StatePiece]:
        """Write everything, timers included, as one piece that every backend can read."""
        return self._piece(self._portable_blocks(view))

    def full(self, view: StateView) -> list[StatePiece]:
        """Write everything but timers; what is in a store in the store's own format."""
        if view.store is None:
            return self._piece(self._memory_blocks(view, deletions=False))
        store = view.store(view.tables)
        below = store.copy(self._writer, self._scope, self._checkpoint, self._pace)
        return [below, *self._piece(self._memory_blocks(view, deletions=True))]

    def changes(
        self,
        layers: Mapping[int, Sequence[Layer]],
        tables: Mapping[int, tuple[TableInfo, KeyGroups]],
        now_ms: int = 0,
    ) -> list[StatePiece]:
        """Write what the layers of each table, the newest first, have changed; ``now_ms`` as in `StateView`."""
        return self._piece(self._change_blocks(layers, tables, now_ms))

    def timers(self, view: StateView) -> list[StatePiece]:
        """Write the timers, which are always complete: in one piece of a snapshot, referred to by no other."""
        return self._piece(self._timer_blocks(view))

    # ------------------------------------------------------------ blocks

    def _portable_blocks(self, view: StateView) -> Iterator[Block]:
        yield from self._memory_blocks(view, deletions=False)
        if view.store is not None:
            yield from view.store(view.tables).blocks(self._pace)
        yield from self._timer_blocks(view)

    def _memory_blocks(self, view: StateView, *, deletions: bool) -> Iterator[Block]:
        for table in view.tables:
            encoder = TableEncoder(table.info, table.groups, self._serializer)
            left = unexpired(table.info, table.parts(), view.now_ms)
            yield from encoder.blocks(left, self._pace, deletions=deletions)

    def _timer_blocks(self, view: StateView) -> Iterator[Block]:
        for timers in view.timers:
            encoder = TableEncoder(timers.info, timers.groups, self._serializer)
            yield from encoder.blocks(timers.parts(), self._pace)

    def _change_blocks(
        self,
        layers: Mapping[int, Sequence[Layer]],
        tables: Mapping[int, tuple[TableInfo, KeyGroups]],
        now_ms: int,
    ) -> Iterator[Block]:
        for number, own in layers.items():
            info, groups = tables[number]
            encoder = TableEncoder(info, groups, self._serializer)
            parts = newest_of([layer.changes() for layer in own])
            yield from encoder.blocks(unexpired(info, parts, now_ms), self._pace)

    def _piece(self, blocks: Iterator[Block]) -> list[StatePiece]:
        first = next(blocks, None)
        if first is None:
            return []
        out = EntriesWriter()

        def chunks() -> Iterator[bytes]:
            yield from out.block(first)
            for block in blocks:
                yield from out.block(block)
            yield out.end()

        piece = self._writer.write(chunks(), self._scope)
        return [StatePiece(entries.FORMAT, piece, out.entries, self._checkpoint)]


class FrozenState:
    """State at a barrier: `ftlayer.state.contract.Frozen`."""

    def __init__(
        self,
        write: Callable[[PieceWriter, Pace], KeyedSnapshot | None],
        operators: tuple[OperatorState, ...],
        release: Callable[[], None],
    ) -> None:
        """``write`` is called by `write`, ``release`` once by `release`."""
        self._write = write
        self._operators = operators
        self._release = release

    def write(self, writer: PieceWriter, cancelled: Callable[[], bool]) -> BackendSnapshot:
        """Write the snapshot. See the contract; the pieces are to be synced by the writer's owner."""
        pace = Pace(cancelled)
        pace()
        return BackendSnapshot(self._write(writer, pace), self._operators)

    def release(self) -> None:
        """Give up what is kept for it."""
        self._release()


def unexpired(info: TableInfo, parts: Iterable[Part], now_ms: int) -> Iterator[Part]:
    """Return ``parts`` of a table without values with a time to live that is over at ``now_ms``, as a read then would.

    The table itself stays as it is: a value that is over is removed when its key is used (`ftlayer.functions.ttl`).
    A key of which nothing is left counts as deleted, since an older value may lie below that is not over: it was
    written with a longer time.
    """
    if not holds_stamped(info.name):
        yield from parts
        return
    rest = _RESTS.get(info.kind, _rest_of_value)
    for part in parts:
        left = [(key, rest(value, now_ms)) for key, value in zip(part.keys, part.values, strict=True)]
        kept = [pair for pair in left if pair[1] is not DELETED]
        gone = [key for key, value in left if value is DELETED]
        yield Part([key for key, _ in kept], [value for _, value in kept], part.deleted + gone)


def _rest_of_value(stamped: Any, now_ms: int) -> Any:
    return DELETED if is_expired(stamped, now_ms) else stamped


def _rest_of_list(values: Any, now_ms: int) -> Any:
    left = [stamped for stamped in values if not is_expired(stamped, now_ms)]
    return left or DELETED


def _rest_of_map(items: Any, now_ms: int) -> Any:
    left = {field: stamped for field, stamped in items.items() if not is_expired(stamped, now_ms)}
    return left or DELETED


_RESTS: dict[str, Callable[[Any, int], Any]] = {LIST: _rest_of_list, MAP: _rest_of_map}
