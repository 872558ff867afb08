"""Changes written all the time, so that at a barrier only the last of them are left to write.

Layers are frozen between barriers as well, and a thread writes them with a writer that belongs to no checkpoint. A
snapshot is what was last written in full (the *materialized* state) and the log since. Whether a checkpoint
completes makes no difference to the log.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from threading import Condition, Lock, Thread
from typing import Any, Protocol, TypeVar

from ftlayer.checkpoint.snapshots import KeyedSnapshot, OperatorState, Scope, StatePiece, TableInfo
from ftlayer.checkpoint.storage.opening import SlotStorage
from ftlayer.checkpoint.storage.writer import PieceWriter
from ftlayer.config import MIB
from ftlayer.errors import CheckpointDamagedError, CheckpointError, SnapshotCancelledError
from ftlayer.functions.keyed import holds_stamped, is_expired
from ftlayer.state.contract import BackendSnapshot, BackendSpec
from ftlayer.state.snapshots import entries
from ftlayer.state.snapshots.entries import (
    Block,
    EntriesWriter,
    Part,
    TableEncoder,
    TableView,
    TimersView,
    newest_of,
)
from ftlayer.state.snapshots.serializer import Serializer
from ftlayer.state.tables.declarations import LIST, MAP, VALUE
from ftlayer.state.tables.layers import DELETED, KeyGroups, Layer

logger = logging.getLogger(__name__)


# Which pieces the next incremental snapshot can build on, and which layers it has to write itself.
#
# Freezes are numbered; a layer has the number of the freeze that made it. A snapshot of freeze n on top of a completed
# checkpoint of freeze m refers to that one's pieces and writes one more, of the layers m < number <= n. What was
# written for a checkpoint that did not complete is never built on: its layers are written again.
#
# When a checkpoint completes, pieces that only older ones refer to are removed. So while others are under way, of
# which any may complete first, a snapshot builds on what all of them build on, and on nothing if one of them is full,
# or writes pieces anew that others would go on to refer to.


MAX_SNAPSHOT_PIECES = 50
"""Pieces of a snapshot: each has to be found and opened when it is restored."""


@dataclass(frozen=True, slots=True)
class Written:
    """The pieces that hold the state at a freeze; the first ``full`` of them are a full snapshot."""

    freeze: int
    pieces: tuple[StatePiece, ...]
    full: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write for a freeze: layers, newest first, behind ``base`` (None: all), with ``moved`` files anew."""

    freeze: int
    base: Written | None
    layers: Mapping[int, tuple[Layer, ...]]
    moved: frozenset[str] = frozenset()


class PieceLineage:
    """Belongs to the task's thread, save `wrote` and `distrust`."""

    def __init__(self, max_space_amplification: float, max_kept: int) -> None:
        """Bounds: bytes of all pieces ÷ of the full ones (0: none), and bytes of layers that are kept."""
        self._amplification = max_space_amplification
        self._max_kept = max_kept
        self._layers: list[tuple[int, dict[int, Layer]]] = []
        self._kept = 0
        self._completed: tuple[int, Written] | None = None
        self._under_way: dict[int, Written | None] = {}
        self._written: dict[int, Written] = {}
        self._wasteful: frozenset[str] = frozenset()
        self._distrusted: Written | None = None

    def pushed(self, freeze: int, layers: dict[int, Layer]) -> None:
        if self._completed is None and not self._under_way:
            # Nothing to build on is under way: the next snapshot is full anyway.
            return
        self._layers.append((freeze, layers))
        self._kept += sum(layer.bytes for layer in layers.values())
        if self._kept > self._max_kept:
            self._forget()

    def plan(self, freeze: int, checkpoint: int, *, full: bool = False) -> Plan:
        """Return how the freeze is written for ``checkpoint``; ``full``: on top of nothing."""
        base = None if full else self._base()
        if base is None:
            self._under_way[checkpoint] = None
            return Plan(freeze, None, {})
        moved = self._wasteful.intersection(part.piece.path for part in base.pieces)
        self._under_way[checkpoint] = None if moved else base
        newer = [tables for number, tables in reversed(self._layers) if base.freeze < number <= freeze]
        tables = {table for layers in newer for table in layers}
        layers = {t: tuple([layers[t] for layers in newer if t in layers]) for t in sorted(tables)}
        return Plan(freeze, base, layers, moved)

    def _base(self) -> Written | None:
        if self._completed is None:
            return None
        bases = list(self._under_way.values()) or [self._completed[1]]
        base = bases[0]
        if base is None or any(other is not base for other in bases) or self._is_too_much(base):
            return None
        if base is self._distrusted:
            return None
        return base

    def wrote(self, checkpoint: int, written: Written, wasteful: Iterable[str]) -> None:
        """The snapshot was written; ``wasteful``: files that its pieces had better not lie in. In any thread."""
        self._written[checkpoint] = written
        self._wasteful = frozenset(wasteful)

    def distrust(self, base: Written) -> None:
        """Build on this never more: it cannot be read. In any thread."""
        self._distrusted = base

    def completed(self, checkpoint: int) -> None:
        written = self._written.get(checkpoint)
        is_known = checkpoint in self._under_way
        for older in [number for number in {*self._under_way, *self._written} if number <= checkpoint]:
            self.aborted(older)
        if written is None or not is_known:
            return
        self._completed = (checkpoint, written) if written.pieces else None
        needed = [base.freeze for base in self._under_way.values() if base is not None]
        first = min([written.freeze, *needed])
        while self._layers and self._layers[0][0] <= first:
            self._kept -= sum(layer.bytes for layer in self._layers.pop(0)[1].values())

    def aborted(self, checkpoint: int) -> None:
        self._under_way.pop(checkpoint, None)
        self._written.pop(checkpoint, None)

    def _is_too_much(self, written: Written) -> bool:
        lengths = [part.piece.length for part in written.pieces]
        grown = self._amplification and sum(lengths) > self._amplification * sum(lengths[: written.full])
        return bool(grown) or len(lengths) >= MAX_SNAPSHOT_PIECES

    def _forget(self) -> None:
        """Keep no layers; the next snapshots are full, until one of them completes."""
        self._layers = []
        self._kept = 0
        self._completed = None
        self._under_way = {}


CHUNK = MIB


class Compaction:
    """The pieces of one backend in the files that it shares with others of its slot. In any thread."""

    def __init__(self, storage: SlotStorage, spec: BackendSpec) -> None:
        self._storage = storage
        self._owner = f"{' '.join(sorted(spec.keys))}/{spec.first_group}"

    def wasteful(self, writer: PieceWriter, parts: Iterable[StatePiece]) -> set[str]:
        """Return the files among those of ``parts`` that waste too much; ``parts`` are what is needed from now on."""
        return writer.wasteful(
            self._owner, [part.piece for part in parts if part.piece.scope is Scope.SHARED]
        )

    def moved(
        self,
        writer: PieceWriter,
        parts: Iterable[StatePiece],
        paths: Collection[str],
        checkpoint: int,
        pace: Callable[[], None],
    ) -> list[StatePiece]:
        """Return ``parts``, those in ``paths`` written once more; `CheckpointDamagedError` for a wrong one."""

        def chunks(part: StatePiece) -> Iterator[bytes]:
            with self._storage.open(self._storage.location, part.piece) as file:
                for chunk in iter(partial(file.read, CHUNK), b""):
                    yield chunk
                    pace()

        return [
            replace(part, piece=writer.write(chunks(part), Scope.SHARED), checkpoint=checkpoint)
            if part.piece.path in paths
            else part
            for part in parts
        ]


HEAD_START_S = 0.03
"""Small snapshots are written without a pause."""

PAUSE_S = 0.0001
"""Long enough for the task's thread to take the interpreter, which it then keeps for `sys.getswitchinterval()`."""

GIVING_WAY = 4
"""Added to the nice value: two fifths of the processor's time that a task gets which has just as much to do."""

_Result = TypeVar("_Result")


class Pace:
    """Called after every bit of work, a millisecond or less; raises `SnapshotCancelledError` when it is given up."""

    def __init__(self, cancelled: Callable[[], bool]) -> None:
        self._cancelled = cancelled
        self._pauses_from = time.perf_counter() + HEAD_START_S

    def __call__(self) -> None:
        """Look whether to go on, and let the task's thread have its turn."""
        if self._cancelled():
            raise SnapshotCancelledError("the snapshot was given up while it was written")
        if time.perf_counter() > self._pauses_from:
            time.sleep(PAUSE_S)


def giving_way(work: Callable[[], _Result]) -> _Result:
    """Do work that hardly needs the interpreter in a thread that tasks go before, where the system has such threads.

    The thread that holds the interpreter does not give way, and the process does not wait for it at its end.
    """
    outcome: Future[_Result] = Future()

    def run() -> None:
        _give_way()
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            outcome.set_exception(error)

    threading.Thread(target=run, name="ftlayer-copy", daemon=True).start()
    return outcome.result()


def _give_way() -> None:
    if sys.platform == "linux":
        # A nice value belongs to a thread there. Without the right to it the thread is one as others are.
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, nice + GIVING_WAY)


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
    def __init__(
        self,
        write: Callable[[PieceWriter, Pace], KeyedSnapshot | None],
        operators: tuple[OperatorState, ...],
        release: Callable[[], None],
    ) -> None:
        self._write = write
        self._operators = operators
        self._release = release

    def write(self, writer: PieceWriter, cancelled: Callable[[], bool]) -> BackendSnapshot:
        pace = Pace(cancelled)
        pace()
        return BackendSnapshot(self._write(writer, pace), self._operators)

    def release(self) -> None:
        self._release()


def unexpired(info: TableInfo, parts: Iterable[Part], now_ms: int) -> Iterator[Part]:
    """Return ``parts`` of a table without values whose time to live is over at ``now_ms``; the table itself keeps them.

    A key of which nothing is left counts as deleted: an older value below may have a longer time.
    """
    if not holds_stamped(info.name):
        yield from parts
        return
    rest = _RESTS[info.kind]
    for part in parts:
        left = [(key, rest(value, now_ms)) for key, value in zip(part.keys, part.values, strict=True)]
        kept = [pair for pair in left if pair[1] is not DELETED]
        gone = [key for key, value in left if value is DELETED]
        yield Part([key for key, _ in kept], [value for _, value in kept], part.deleted + gone)


def _rest_of_map(items: Any, now_ms: int) -> Any:
    left = {field: stamped for field, stamped in items.items() if not is_expired(stamped, now_ms)}
    return left or DELETED


_RESTS: dict[str, Callable[[Any, int], Any]] = {
    VALUE: lambda stamped, now_ms: DELETED if is_expired(stamped, now_ms) else stamped,
    LIST: lambda values, now_ms: [each for each in values if not is_expired(each, now_ms)] or DELETED,
    MAP: _rest_of_map,
}


NO_CHECKPOINT = 0
"""`StatePiece.checkpoint` of what was written for none."""

MAX_PIECES = 500
"""Pieces of the log; with more, the state is materialized before its time."""

MIN_BYTES = 4 * MIB
"""A log up to this size is never too long."""

Tables = Mapping[int, tuple[TableInfo, KeyGroups]]


@dataclass(slots=True)
class _Pending:
    freeze: int
    layers: dict[int, Layer]
    tables: Tables
    is_last: bool = False


class Changelog:
    """The log of one backend. Belongs to the task's thread, save what says otherwise."""

    def __init__(
        self,
        storage: SlotStorage,
        compaction: Compaction,
        interval_ms: int,
        amplification: float,
        max_kept: int,
        *,
        empty: bool,
    ) -> None:
        """Begin a log; ``interval_ms`` between materializations, ``empty``: there is no state yet.

        ``amplification``: bytes of all pieces ÷ of the materialized ones, at most; ``max_kept``: bytes that may wait.
        """
        self._storage = storage
        self._compaction = compaction
        self._interval_ms = interval_ms
        self._amplification = amplification
        self._max_kept = max_kept
        self._materialized = Written(0, ()) if empty else None
        self._due_ms: int | None = None
        self._pieces: list[tuple[int, StatePiece]] = []
        self._pending: list[_Pending] = []
        self._begun = 0
        self._materializing: tuple[int, StateView, int] | None = None
        self._plans = 0
        self._wasteful: set[str] = set()
        # What was written anew, while there are plans that know it as it was.
        self._moved: dict[StatePiece, StatePiece] = {}
        self._closed = False
        self._changed = Condition()
        self._writing = Lock()
        self._thread: Thread | None = None

    def begin_with(self, pieces: Iterable[StatePiece]) -> None:
        """The state is what these pieces of this run hold, before it is changed for the first time."""
        self._materialized = Written(0, tuple(pieces))

    def pushed(self, freeze: int, layers: dict[int, Layer], tables: Tables) -> None:
        with self._changed:
            self._pending.append(_Pending(freeze, layers, tables))
            waiting = sum(layer.bytes for entry in self._pending for layer in entry.layers.values())
            if waiting > self._max_kept:
                # The storage does not take them. The next snapshot is a full one, which says so if it still fails.
                self._begin_anew()
            self._changed.notify_all()
        self._start()

    def readers(self) -> int:
        with self._changed:
            return len(self._pending) + (self._materializing is not None)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = Thread(target=self._run, name="ftlayer-changelog", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Write what waits; what cannot be written stays, and the next snapshot tries again and says so."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._pending or self._materializing)
                if self._closed:
                    return
                last = self._pending[-1].freeze if self._pending else 0
            pace = Pace(lambda: self._closed)
            try:
                self._write_up_to(last, pace)
                self._materialize(pace)
            except SnapshotCancelledError:
                return
            except CheckpointError as error:
                logger.warning("the changelog cannot be written, the next snapshot tries again: %s", error)
                with self._changed:
                    self._materializing = None
                    self._changed.wait_for(lambda: self._closed, timeout=1.0)

    def _write_up_to(self, freeze: int, pace: Pace) -> None:
        with self._writing:
            while True:
                with self._changed:
                    joined: list[_Pending] = []
                    for entry in self._pending:
                        if entry.freeze > freeze:
                            break
                        joined.append(entry)
                        if entry.is_last:
                            break
                if not joined:
                    return
                self._write(joined, pace)

    def _write(self, joined: list[_Pending], pace: Pace) -> None:
        writer = self._storage.log_writer()
        numbers = sorted({number for entry in joined for number in entry.layers})
        layers = {
            number: [entry.layers[number] for entry in reversed(joined) if number in entry.layers]
            for number in numbers
        }
        out = StateWriter(writer, NO_CHECKPOINT, Scope.SHARED, pace)
        pieces = out.changes(layers, joined[-1].tables)
        writer.sync()
        with self._changed:
            # Unless it was all dropped meanwhile.
            if self._pending[: len(joined)] == joined:
                del self._pending[: len(joined)]
                self._pieces += [(joined[-1].freeze, piece) for piece in pieces]

    def plan(self, freeze: int) -> Callable[[Pace], list[StatePiece]] | None:
        """Return what writes the rest and returns all pieces, in any thread, before `done`; None: write the state."""
        with self._changed:
            self._plans += 1
            base, begun = self._materialized, self._begun
            if base is None:
                return None
            if self._pending:
                # What comes behind the barrier is not to be in one piece with what was before.
                self._pending[-1].is_last = True

        def write(pace: Pace) -> list[StatePiece]:
            self._write_up_to(freeze, pace)
            with self._changed:
                if begun != self._begun:
                    raise SnapshotCancelledError(
                        "the changelog was begun anew while the snapshot was written"
                    )
                log = [piece for number, piece in self._pieces if base.freeze < number <= freeze]
            return self._compacted([*base.pieces, *log], begun, pace)

        return write

    def _compacted(self, known: list[StatePiece], begun: int, pace: Pace) -> list[StatePiece]:
        """Return the pieces as they are now, having moved those that lie in wasteful files."""
        parts = [self._moved.get(part, part) for part in known]
        writer = self._storage.log_writer()
        try:
            moved = self._compaction.moved(writer, parts, self._wasteful, NO_CHECKPOINT, pace)
        except CheckpointDamagedError:
            with self._changed:
                if begun == self._begun:
                    self._begin_anew()
            raise
        writer.sync()
        with self._changed:
            self._moved.update(zip(known, moved, strict=True))
        self._wasteful = self._compaction.wasteful(writer, moved)
        return moved

    def begin_anew(self) -> None:
        """Build on nothing that is written: a full checkpoint, and those behind it, share nothing with earlier ones."""
        with self._changed:
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._begun += 1
        self._pending.clear()
        self._materialized = None
        self._due_ms = None

    def done(self) -> None:
        """What `plan` returned is not called any more."""
        with self._changed:
            self._plans -= 1
            if not self._plans:
                first = 0 if self._materialized is None else self._materialized.freeze
                moved, self._moved = self._moved, {}
                self._pieces = [(n, moved.get(piece, piece)) for n, piece in self._pieces if n > first]
                if self._materialized is not None:
                    now = tuple([moved.get(part, part) for part in self._materialized.pieces])
                    self._materialized = replace(self._materialized, pieces=now)

    def is_due(self, now_ms: int) -> bool:
        with self._changed:
            if self._materializing is not None:
                return False
            if self._materialized is None:
                return True
            if self._due_ms is None:
                self._due_ms = now_ms + self._interval_ms
            log = [piece for number, piece in self._pieces if number > self._materialized.freeze]
            if not log:
                return False
            base = sum(part.piece.length for part in self._materialized.pieces)
            most = max(MIN_BYTES, self._amplification * base)
            grown = self._amplification and sum(part.piece.length for part in log) > most
            return bool(grown) or len(log) >= MAX_PIECES or now_ms >= self._due_ms

    def materialize(self, freeze: int, view: StateView) -> None:
        """Write all state, in the log's own thread. The view is read as long as `is_materializing`."""
        with self._changed:
            self._materializing = freeze, view, self._begun
            self._due_ms = None
            self._changed.notify_all()
        self._start()

    @property
    def is_materializing(self) -> bool:
        """Whether the view that was given to `materialize` is still read."""
        return self._materializing is not None

    def _materialize(self, pace: Pace) -> None:
        job = self._materializing
        if job is None:
            return
        freeze, view, begun = job
        writer = self._storage.log_writer()
        pieces = StateWriter(writer, NO_CHECKPOINT, Scope.SHARED, pace).full(view)
        writer.sync()
        with self._changed:
            if begun == self._begun:
                self._materialized = Written(freeze, tuple(pieces))
            # Else what was to follow it is dropped. All of it is materialized once more.
            self._materializing = None

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
