"""The state backend of a subtask that takes part in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from time import thread_time
from typing import Any, Protocol

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.pieces import Scope
from ftlayer.checkpoint.snapshots import KeyedSnapshot, OperatorState, TableInfo
from ftlayer.checkpoint.storage.contract import PieceWriter
from ftlayer.errors import CheckpointDamagedError, ConfigError
from ftlayer.functions.keyed import Key
from ftlayer.state.contract import BackendSpec, Frozen
from ftlayer.state.operators import SubtaskOperatorStates
from ftlayer.state.snapshots import serializer
from ftlayer.state.snapshots.changelog import Changelog
from ftlayer.state.snapshots.compaction import Compaction
from ftlayer.state.snapshots.frozen import FrozenState, StateView, StateWriter, StoreView
from ftlayer.state.snapshots.lineage import PieceLineage, Written
from ftlayer.state.snapshots.migrating import Migrations
from ftlayer.state.snapshots.pace import Pace
from ftlayer.state.snapshots.view import TableView, TimersView
from ftlayer.state.tables import memory
from ftlayer.state.tables.footprint import footprint
from ftlayer.state.tables.groups import KeyGroups
from ftlayer.state.tables.keyed import TIMERS, OperatorTables
from ftlayer.state.tables.layers import Layer, LayeredTable, Sharing, Store
from ftlayer.state.tables.memory import FrontGauge, StateMemory, max_kept
from ftlayer.state.tables.merging import Merger
from ftlayer.state.tables.timers import TimerService

MAX_FRONT = 100_000
"""Keys that are touched before they become a layer without a barrier: what a barrier has to move stays small."""

LOG_ENTRIES = 5_000
"""Keys that are touched before they are written to the changelog without a barrier."""

LOG_MS = 250
"""Time between two such writes: a key that changes all the time is not written more often."""


_MERGING = 0.25
"""Part of the processor's time that merging takes at most. To use a key takes ten times as long as to merge it."""

_MOST_MOVING = 3.0
"""Time that is taken for moving at most, as a multiple of what the task has used since the last time …"""

_WAITING_S = 0.02
"""… and while its input waits for that."""


class Spilling(Protocol):
    """What keeps the stores below the tables, and moves into them what is too much for memory."""

    def store(self, info: TableInfo, groups: KeyGroups) -> Store:
        """Return the store of a new table."""

    def view(self, tables: Sequence[TableView]) -> StoreView:
        """Return what is in the stores, for a snapshot; called in its thread."""

    def is_empty(self) -> bool:
        """Whether nothing was ever moved into a store."""

    def move(self, tables: Sequence[tuple[TableInfo, KeyGroups, LayeredTable]]) -> int:
        """Move some entries of bases into the stores, or prepare for it: a few milliseconds.

        Returns the bytes of memory that they took up. Called while neither is read.
        """

    def close(self) -> None:
        """Remove the stores."""


class LayeredBackend:
    """State in memory, and below it in a store if there is one: `ftlayer.state.contract.CheckpointedBackend`."""

    def __init__(
        self,
        config: CheckpointConfig,
        spec: BackendSpec,
        compaction: Compaction,
        spilling: Spilling | None = None,
        changelog: Changelog | None = None,
    ) -> None:
        self._spec = spec
        self.migrations = Migrations(config.migrations, config.allow_unclaimed_state)
        self._waits = False
        self._compaction = compaction
        self._spilling = spilling
        self._sharing = Sharing()
        self._states: dict[str, OperatorTables] = {}
        self._timers: dict[str, tuple[TableInfo, TimerService]] = {}
        self._operators: dict[str, SubtaskOperatorStates] = {}
        self._groups: dict[str, KeyGroups] = {}
        self._tables: list[tuple[TableInfo, KeyGroups, LayeredTable]] = []
        self._mergers: list[Merger] = []
        self._numbers: dict[tuple[str, str, bool], int] = {}
        self._next_number = 0
        self._freezes = 0
        self._memory: StateMemory | None = None if spilling is None else StateMemory(memory.MAX_BYTES)
        self._gauges: list[FrontGauge] = []
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
        """Return the keyed state of an operator, the same at every call; ConfigError for one without keys."""
        found = self._states.get(uid)
        if found is None:
            self._key_groups(uid)
            found = self._states[uid] = OperatorTables(uid, lambda name, kind: self._create(uid, name, kind))
        return found

    def timers(self, uid: str) -> TimerService:
        """Return the timers of an operator, the same at every call; ConfigError for one without keys."""
        found = self._timers.get(uid)
        if found is None:
            self._key_groups(uid)
            found = self._timers[uid] = self._info(uid, TIMERS, TIMERS), TimerService()
        return found[1]

    def operators(self, uid: str) -> SubtaskOperatorStates:
        """Return the operator state of an operator, the same at every call."""
        return self._operators.setdefault(uid, SubtaskOperatorStates(uid))

    def _create(self, uid: str, name: str, kind: str) -> LayeredTable:
        info, groups = self._info(uid, name, kind), self._key_groups(uid)
        store = None if self._spilling is None else self._spilling.store(info, groups)
        table = LayeredTable(f"operator {uid!r}, table {name!r}", self._sharing, store)
        self._tables.append((info, groups, table))
        self._mergers.append(Merger(table, self._sharing, self._memory))
        if self._memory is not None:
            self._gauges.append(FrontGauge(table))
        return table

    def _info(self, uid: str, name: str, kind: str) -> TableInfo:
        number = self._numbers.get((uid, name, kind == TIMERS))
        if number is None:
            number = self._next_number
            self._next_number += 1
        version = self.migrations.version(uid, name)
        return TableInfo(number, uid, name, kind, serializer.NAME, serializer.VERSION, version)

    def _key_groups(self, uid: str) -> KeyGroups:
        found = self._groups.get(uid)
        if found is None:
            try:
                keys = self._spec.keys[uid]
            except KeyError:
                raise ConfigError(f"{uid!r} asks for keyed state and has no key columns") from None
            found = self._groups[uid] = KeyGroups(uid, keys, self._spec.max_parallelism)
        return found

    def opened(self) -> None:
        """All functions are open; IncompatibleCheckpointError for a declared state that is gone.

        `ConfigError` for a migration of a state that there is not.
        """
        for uid, keyed in self._states.items():
            # Before a state is missed whose new name is misspelled.
            self.migrations.check_declared(uid, keyed.declarations)
        for states in self._all_states():
            states.opened()

    def _all_states(self) -> list[OperatorTables | SubtaskOperatorStates]:
        return [*self._states.values(), *self._operators.values()]

    # ------------------------------------------------------------ restoring

    def number_as(self, tables: Sequence[TableInfo]) -> None:
        """Give tables that are yet to come the numbers that they had in a snapshot."""
        self._numbers = {(i.operator, i.name, i.kind == TIMERS): i.number for i in tables}
        self._next_number = max((info.number + 1 for info in tables), default=0)

    def claim(self, info: TableInfo) -> None:
        """A snapshot that is restored has this table, with or without entries."""
        self._waits = True
        self.restored_table(info)
        self.state(info.operator).declarations.restored(info.name, info.declared)

    def restored_table(self, info: TableInfo) -> tuple[KeyGroups, LayeredTable]:
        """Return the table for what a checkpoint holds of one; its base may be filled as long as it is not in use."""
        table = self.state(info.operator).restored(info.name, info.kind)
        return self._key_groups(info.operator), table

    def filled(self, keys: Collection[Key], values: Collection[Any]) -> None:
        """These are in a base now, while the backend is filled: what is too much for memory is moved into stores."""
        if self._memory is not None:
            self._memory.grew(footprint(keys, values))
            self._spill(None)

    def restored_operators(self, uid: str) -> SubtaskOperatorStates:
        """Return the operator state of an operator, to be filled."""
        self._waits = True
        return self.operators(uid)

    def restored_timers(self, info: TableInfo) -> tuple[KeyGroups, TimerService]:
        """Return the timers of an operator, to be filled."""
        service = self.timers(info.operator)
        return self._key_groups(info.operator), service

    # ------------------------------------------------------------ snapshots

    def freeze(self, barrier: Barrier, now_ms: int = 0) -> Frozen:
        """Freeze the state for a snapshot: keyed state in layers, operator state as bytes. See the contract.

        `StateSerializationError` for operator state that cannot be written.
        """
        operators = tuple(
            [saved for states in self._operators.values() for saved in states.snapshot(self._serializer)]
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
        tables = self._by_number()

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
                for _, service in self._timers.values():
                    service.thaw()
            if finish is not None:
                finish()

        return FrozenState(write, operators, release)

    def _count_readers(self) -> None:
        """Count who reads layers. The changelog's thread finishes by itself, so this may be more than there are."""
        logged = 0 if self._changelog is None else self._changelog.readers()
        self._sharing.readers = self._snapshots + logged

    def _by_number(self) -> dict[int, tuple[TableInfo, KeyGroups]]:
        return {info.number: (info, groups) for info, groups, _ in self._tables}

    def _push(self) -> None:
        """Move all fronts into layers."""
        self._freezes += 1
        layers: dict[int, Layer] = {}
        for info, _, table in self._tables:
            layer = table.freeze()
            if layer is not None:
                layers[info.number] = layer
                self._frozen_layer(layer)
        if self._memory is not None:
            self._memory.front = 0
        for gauge in self._gauges:
            gauge.frozen()
        if self._lineage is not None and layers:
            self._lineage.pushed(self._freezes, layers)
        if self._changelog is not None and layers:
            self._changelog.pushed(self._freezes, layers, self._by_number())
            self._count_readers()

    def _frozen_layer(self, layer: Layer) -> None:
        if self._memory is not None or self._lineage is not None or self._changelog is not None:
            layer.measure()
        if self._memory is not None:
            self._memory.layers += layer.bytes

    def _view(self, *, with_timers: bool, now_ms: int = 0) -> StateView:
        spilling = self._spilling
        timers = [
            TimersView(info, self._groups[info.operator], *service.freeze())
            for info, service in (self._timers.values() if with_timers else ())
        ]
        return StateView(
            self._spec.first_group,
            self._spec.end_group,
            tuple(
                [TableView(self._saved(info), groups, t.layers, t.base) for info, groups, t in self._tables]
            ),
            tuple(timers),
            now_ms,
            None if spilling is None or spilling.is_empty() else spilling.view,
        )

    def _saved(self, info: TableInfo) -> TableInfo:
        return replace(info, declared=self._states[info.operator].declarations.is_declared(info.name))

    def completed(self, checkpoint: int) -> None:
        """Build on this checkpoint from now on."""
        if self._lineage is not None:
            self._lineage.completed(checkpoint)

    def aborted(self, checkpoint: int) -> None:
        """Never build on this checkpoint."""
        if self._lineage is not None:
            self._lineage.aborted(checkpoint)

    # ------------------------------------------------------------ between batches

    def _look_for_renamed(self) -> None:
        if self._waits:
            waiting = [states.look_for_renamed() for states in self._all_states()]
            self._waits = any(waiting)

    @property
    def is_full(self) -> bool:
        """Whether memory holds so much that the task is to take no input before `tend` has made room."""
        return self._memory is not None and self._memory.is_full

    def tend(self, now_ms: int, handled: int = 0) -> None:
        """Do a bit of what keeps layers few and memory small; a part of the time that batches take.

        Where the input waits for it, as much as can be done in a few milliseconds.
        """
        self._look_for_renamed()
        used_s = thread_time() - self._tended_s
        touched = sum(table.touched() for _, _, table in self._tables)
        if touched > MAX_FRONT or self._is_front_large(handled):
            self._push()
        elif self._changelog is not None:
            self._tend_log(self._changelog, touched, now_ms)
        least_s = _WAITING_S if self.is_full else 0.0
        self._merge(max(_MERGING * used_s, least_s))
        if not self._sharing.base_readers:
            self._spill(thread_time(), used_s, least_s)
        self._tended_s = thread_time()

    def _is_front_large(self, handled: int) -> bool:
        if self._memory is None:
            return False
        for gauge in self._gauges:
            gauge.look(handled)
        self._memory.front = sum(gauge.bytes for gauge in self._gauges)
        # While a base is read nothing can be moved on: more layers would only have to be joined.
        return not self._sharing.base_readers and self._memory.is_front_large

    def _merge(self, most_s: float) -> None:
        """Merge for a part of the time that the task has used, so that layers stay few whatever a batch is."""
        until_s = thread_time() + most_s
        for merger in self._mergers:
            while merger.step() and thread_time() < until_s:
                pass

    def _spill(self, from_s: float | None, used_s: float = 0.0, least_s: float = 0.0) -> None:
        """Move what is too much, the more of it the longer; ``from_s`` None: all of it.

        How long is told by ``used_s``, so that what comes is moved at last, whatever a batch is.
        """
        if self._memory is None or self._spilling is None:
            return
        pressure: float | None = None
        while excess := self._memory.excess(self._bytes_of_bases):
            if pressure is None:
                pressure = excess / memory.MAX_BYTES
            if not any(table.base for _, _, table in self._tables):
                self._memory.emptied()
                return
            self._memory.moved(self._spilling.move(self._tables))
            if from_s is not None:
                most_s = max(used_s * min(pressure, _MOST_MOVING), least_s)
                if thread_time() - from_s >= most_s:
                    return

    def _bytes_of_bases(self) -> int:
        return sum(footprint(table.base.keys(), table.base.values()) for _, _, table in self._tables)

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
