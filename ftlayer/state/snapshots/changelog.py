"""Changes written all the time, so that at a barrier only the last of them are left to write.

Layers are frozen between barriers as well, and a thread writes them with a writer that belongs to no checkpoint. A
snapshot is what was last written in full (the *materialized* state) and the log since. Whether a checkpoint
completes makes no difference to the log.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from threading import Condition, Lock, Thread

from ftlayer.checkpoint.pieces import Scope
from ftlayer.checkpoint.snapshots import StatePiece, TableInfo
from ftlayer.checkpoint.storage.contract import SlotStorage
from ftlayer.config import MIB
from ftlayer.errors import CheckpointDamagedError, CheckpointError, SnapshotCancelledError
from ftlayer.state.snapshots.compaction import Compaction
from ftlayer.state.snapshots.frozen import StateView, StateWriter
from ftlayer.state.snapshots.lineage import Written
from ftlayer.state.snapshots.pace import Pace
from ftlayer.state.tables.groups import KeyGroups
from ftlayer.state.tables.layers import Layer

NO_CHECKPOINT = 0
"""`StatePiece.checkpoint` of what was written for none."""

MAX_PIECES = 500
"""Pieces of the log; with more, the state is materialized before its time."""

MIN_BYTES = 4 * MIB
"""A log up to this size is never too long."""

Tables = Mapping[int, tuple[TableInfo, KeyGroups]]

logger = logging.getLogger(__name__)


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
        """Begin a log.

        ``interval_ms``: between two materializations. ``amplification``: bytes of all pieces ÷ bytes of the
        materialized ones, at most. ``max_kept``: bytes of layers that may wait. ``empty``: there is no state yet.
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

    # ------------------------------------------------------------ the log

    def pushed(self, freeze: int, layers: dict[int, Layer], tables: Tables) -> None:
        """Layers were frozen, by table; they are written soon."""
        with self._changed:
            self._pending.append(_Pending(freeze, layers, tables))
            waiting = sum(layer.bytes for entry in self._pending for layer in entry.layers.values())
            if waiting > self._max_kept:
                # The storage does not take them. The next snapshot is a full one, which says so if it still fails.
                self._begin_anew()
            self._changed.notify_all()
        self._start()

    def readers(self) -> int:
        """Return how many layers are still to be read."""
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

    # ------------------------------------------------------------ snapshots

    def plan(self, freeze: int) -> Callable[[Pace], list[StatePiece]] | None:
        """Return what writes the rest and returns all pieces, in any thread; None: the state has to be written.

        `done` has to follow.
        """
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
        """Build on nothing that is written: a checkpoint is full that others are to share nothing with.

        What it is full without, no completed checkpoint may refer to soon, so that it is removed.
        """
        with self._changed:
            self._begin_anew()

    def _begin_anew(self) -> None:
        """Forget the log: the next snapshot is a full one."""
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

    # ------------------------------------------------------------ materialization

    def is_due(self, now_ms: int) -> bool:
        """Whether the state is to be materialized now."""
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
