"""The state backend of a subtask that takes part in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import thread_time
from typing import Any

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.pieces import Scope
from ftlayer.checkpoint.snapshots import KeyedSnapshot, OperatorState, TableInfo
from ftlayer.checkpoint.storage.contract import PieceWriter
from ftlayer.errors import CheckpointDamagedError
from ftlayer.functions.keyed import Key
from ftlayer.state.contract import BackendSpec, Frozen
from ftlayer.state.operators import SubtaskOperatorStates
from ftlayer.state.snapshots import serializer
from ftlayer.state.snapshots.changelog import Changelog
from ftlayer.state.snapshots.compaction import Compaction
from ftlayer.state.snapshots.frozen import FrozenState, StateView, StateWriter
from ftlayer.state.snapshots.lineage import PieceLineage, Written
from ftlayer.state.snapshots.migrating import Migrations
from ftlayer.state.snapshots.pace import Pace
from ftlayer.state.snapshots.view import TableView, TimersView
from ftlayer.state.subtask import SubtaskState
from ftlayer.state.tables.groups import KeyGroups
from ftlayer.state.tables.keyed import OperatorTables
from ftlayer.state.tables.layers import Layer, LayeredTable, Sharing
from ftlayer.state.tables.memory import max_kept
from ftlayer.state.tables.timers import TimerService
from ftlayer.state.upkeep import Spilling, StateUpkeep

MAX_FRONT = 100_000
"""Keys that are touched before they become a layer without a barrier: what a barrier has to move stays small."""

LOG_ENTRIES = 5_000
"""Keys that are touched before they are written to the changelog without a barrier."""

LOG_MS = 250
"""Time between two such writes: a key that changes all the time is not written more often."""


class LayeredBackend:
    """State in memory, and below it in a store if there is one: `ftlayer.state.contract.CheckpointedBackend`."""

    copies = True

    def __init__(
        self,
        config: CheckpointConfig,
        spec: BackendSpec,
        compaction: Compaction,
        spilling: Spilling | None = None,
        changelog: Changelog | None = None,
    ) -> None:
        self._spec = spec
        self._compaction = compaction
        self._spilling = spilling
        self._sharing = Sharing()
        migrations = Migrations(config.migrations, config.allow_unclaimed_state)
        self.subtask = SubtaskState(spec, migrations, self._new_table)
        self._upkeep = StateUpkeep(self.subtask.tables, self._sharing, spilling)
        self._freezes = 0
        self._lineage: PieceLineage | None = None
        self._changelog = changelog
        if config.incremental and changelog is None:
            self._lineage = PieceLineage(config.max_space_amplification, max_kept(config))
        self._materializing = False
        self._log_from_ms = 0
        self._snapshots = 0
        self._serializer = serializer.Serializer()
        self._timer_readers = 0
        self._tended_s = thread_time()

    # ------------------------------------------------------------ what operators use

    def state(self, uid: str) -> OperatorTables:
        return self.subtask.state(uid)

    def timers(self, uid: str) -> TimerService:
        return self.subtask.timers(uid)

    def operators(self, uid: str) -> SubtaskOperatorStates:
        return self.subtask.operators(uid)

    def opened(self) -> None:
        self.subtask.opened()

    def filled(self, keys: Collection[Key], values: Collection[Any]) -> None:
        self._upkeep.filled(keys, values)

    def _new_table(self, info: TableInfo, groups: KeyGroups) -> LayeredTable:
        store = None if self._spilling is None else self._spilling.store(info, groups)
        table = LayeredTable(f"operator {info.operator!r}, table {info.name!r}", self._sharing, store)
        self._upkeep.made(table)
        return table

    # ------------------------------------------------------------ snapshots

    def freeze(self, barrier: Barrier, now_ms: int = 0) -> Frozen:
        """Freeze the state for a snapshot: keyed state in layers, operator state as bytes. See the contract.

        `StateSerializationError` for operator state that cannot be written.
        """
        for cache in self.subtask.caches():
            cache.write_back()
        operators = tuple(
            [saved for states in self.subtask.all_operators() for saved in states.snapshot(self._serializer)]
        )
        self._push()
        view = self._view(with_timers=True, now_ms=now_ms)
        self._timer_readers += 1
        if barrier.kind is SnapshotKind.CHECKPOINT:
            if self._lineage is not None:
                return self._planned(self._lineage, barrier, view, operators)
            if self._changelog is not None and barrier.full:
                self._changelog.begin_anew()
            elif self._changelog is not None:
                return self._logged(self._changelog, barrier.checkpoint, view, operators)

        def write(writer: PieceWriter, pace: Pace) -> KeyedSnapshot | None:
            out = StateWriter(writer, barrier.checkpoint, Scope.EXCLUSIVE, pace)
            if view.store is None or barrier.kind is SnapshotKind.SAVEPOINT:
                return view.snapshot(out.portable(view))
            return view.snapshot([*out.full(view), *out.timers(view)])

        return self._frozen(write, operators, reads_base=True)

    def _planned(
        self, lineage: PieceLineage, barrier: Barrier, view: StateView, operators: tuple[OperatorState, ...]
    ) -> FrozenState:
        checkpoint = barrier.checkpoint
        plan = lineage.plan(self._freezes, checkpoint, full=barrier.full)
        tables = self.subtask.by_number()

        def write(writer: PieceWriter, pace: Pace) -> KeyedSnapshot | None:
            out = StateWriter(writer, checkpoint, Scope.SHARED, pace)
            base = plan.base
            if base is None:
                pieces = out.full(view)
                full = len(pieces)
            else:
                try:
                    pieces = self._compaction.moved(writer, base.pieces, plan.moved, checkpoint, pace)
                except CheckpointDamagedError:
                    lineage.distrust(base)
                    raise
                pieces += out.changes(plan.layers, tables, view.now_ms)
                full = base.full
            wasteful = self._compaction.wasteful(writer, pieces)
            lineage.wrote(checkpoint, Written(plan.freeze, tuple(pieces), full), wasteful)
            own = StateWriter(writer, checkpoint, Scope.EXCLUSIVE, pace)
            return view.snapshot([*pieces, *own.timers(view)])

        return self._frozen(write, operators, reads_base=plan.base is None)

    def _logged(
        self, changelog: Changelog, checkpoint: int, view: StateView, operators: tuple[OperatorState, ...]
    ) -> FrozenState:
        rest = changelog.plan(self._freezes)

        def write(writer: PieceWriter, pace: Pace) -> KeyedSnapshot | None:
            own = StateWriter(writer, checkpoint, Scope.EXCLUSIVE, pace)
            pieces = own.full(view) if rest is None else rest(pace)
            return view.snapshot([*pieces, *own.timers(view)])

        return self._frozen(write, operators, reads_base=rest is None, finish=changelog.done)

    def _frozen(
        self,
        write: Callable[[PieceWriter, Pace], KeyedSnapshot | None],
        operators: tuple[OperatorState, ...],
        *,
        reads_base: bool,
        finish: Callable[[], None] | None = None,
    ) -> FrozenState:
        self._snapshots += 1
        self._sharing.base_readers += reads_base
        self._count_readers()

        def release() -> None:
            self._snapshots -= 1
            self._sharing.base_readers -= reads_base
            self._count_readers()
            self._timer_readers -= 1
            if not self._timer_readers:
                for _, _, service in self.subtask.all_timers():
                    service.thaw()
            if finish is not None:
                finish()

        return FrozenState(write, operators, release)

    def _count_readers(self) -> None:
        """Count who reads layers. The changelog's thread finishes by itself, so this may be more than there are."""
        logged = 0 if self._changelog is None else self._changelog.readers()
        self._sharing.readers = self._snapshots + logged

    def _push(self) -> None:
        """Move all fronts into layers."""
        self._freezes += 1
        layers: dict[int, Layer] = {}
        measured = self._upkeep.measures or self._lineage is not None or self._changelog is not None
        for info, _, table in self.subtask.tables:
            layer = table.freeze()
            if layer is not None:
                layers[info.number] = layer
                if measured:
                    layer.measure()
        self._upkeep.pushed(layers.values())
        if self._lineage is not None and layers:
            self._lineage.pushed(self._freezes, layers)
        if self._changelog is not None and layers:
            self._changelog.pushed(self._freezes, layers, self.subtask.by_number())
            self._count_readers()

    def _view(self, *, with_timers: bool, now_ms: int = 0) -> StateView:
        spilling = self._spilling
        timers = [
            TimersView(info, groups, *service.freeze())
            for info, groups, service in (self.subtask.all_timers() if with_timers else ())
        ]
        return StateView(
            self._spec.first_group,
            self._spec.end_group,
            tuple(
                [
                    TableView(self.subtask.as_saved(info), groups, table.layers, table.base)
                    for info, groups, table in self.subtask.tables
                ]
            ),
            tuple(timers),
            now_ms,
            None if spilling is None or spilling.is_empty() else spilling.view,
        )

    def completed(self, checkpoint: int) -> None:
        """Build on this checkpoint from now on."""
        if self._lineage is not None:
            self._lineage.completed(checkpoint)

    def aborted(self, checkpoint: int) -> None:
        """Never build on this checkpoint."""
        if self._lineage is not None:
            self._lineage.aborted(checkpoint)

    # ------------------------------------------------------------ between batches

    @property
    def is_full(self) -> bool:
        """Whether memory holds so much that the task is to take no input before `tend` has made room."""
        return self._upkeep.is_full

    def tend(self, now_ms: int, handled: int = 0) -> None:
        """Do a bit of what keeps layers few and memory small; a part of the time that batches take.

        Where the input waits for it, as much as can be done in a few milliseconds.
        """
        self.subtask.look_for_renamed()
        for cache in self.subtask.caches():
            cache.tend()
        used_s = thread_time() - self._tended_s
        touched = sum(table.touched() for _, _, table in self.subtask.tables)
        if touched > MAX_FRONT or self._upkeep.is_front_large(handled):
            self._push()
        elif self._changelog is not None:
            self._tend_log(self._changelog, touched, now_ms)
        self._upkeep.merge_and_spill(used_s)
        self._tended_s = thread_time()

    def _tend_log(self, changelog: Changelog, touched: int, now_ms: int) -> None:
        if self._materializing and not changelog.is_materializing:
            self._materializing = False
            self._sharing.base_readers -= 1
        # While a base is written nothing of it is moved to disk, for which the input may wait.
        if not self._materializing and not self.is_full and changelog.is_due(now_ms):
            self._push()
            self._materializing = True
            self._sharing.base_readers += 1
            changelog.materialize(self._freezes, self._view(with_timers=False))
        elif touched > LOG_ENTRIES and now_ms >= self._log_from_ms:
            self._push()
            self._log_from_ms = now_ms + LOG_MS
        self._count_readers()

    def close(self) -> None:
        """Give everything up."""
        if self._changelog is not None:
            self._changelog.close()
        if self._spilling is not None:
            self._spilling.close()
