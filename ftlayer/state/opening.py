"""Opens the state backend that a job's options ask for, with the state that it begins with."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from time import thread_time
from typing import TYPE_CHECKING, Any

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import KeyedSnapshot, OperatorState, Scope, SubtaskRestore, TableInfo
from ftlayer.checkpoint.storage.opening import SlotStorage
from ftlayer.checkpoint.storage.writer import PieceWriter
from ftlayer.errors import CheckpointDamagedError, ConfigError, IncompatibleCheckpointError
from ftlayer.functions.keyed import Key, StateCache
from ftlayer.state.contract import BackendSpec, Frozen
from ftlayer.state.heap import SubtaskOperatorStates
from ftlayer.state.lmdb import copies as lmdb_layout
from ftlayer.state.snapshots import entries, serializer
from ftlayer.state.snapshots.changelog import (
    Changelog,
    Compaction,
    FrozenState,
    Pace,
    PieceLineage,
    StateView,
    StateWriter,
    Written,
)
from ftlayer.state.snapshots.entries import (
    Block,
    BlocksOf,
    Migrations,
    TableView,
    TimersRestored,
    TimersView,
    blocks_of_entries,
    claimed,
    decoded,
    own_part,
    wanted_blocks,
)
from ftlayer.state.tables import layers as memory
from ftlayer.state.tables.declarations import TIMERS, OperatorTables, TimerService
from ftlayer.state.tables.layers import (
    DELETED,
    FrontGauge,
    KeyGroups,
    Layer,
    LayeredTable,
    Sharing,
    StateMemory,
    footprint,
    max_kept,
    merged,
    sliced,
)

if TYPE_CHECKING:
    from ftlayer.state.lmdb.stores import LmdbStores


class SubtaskState:
    """Keyed states, timers and operator states of a subtask, by the uid of their operator.

    Attributes:
        migrations: what the job's options say of states that were renamed or changed.
        tables: all tables of keyed states, in the order in which they were made.
    """

    def __init__(
        self,
        spec: BackendSpec,
        migrations: Migrations,
        new_table: Callable[[TableInfo, KeyGroups], LayeredTable],
    ) -> None:
        """``new_table`` makes the table of a keyed state."""
        self.migrations = migrations
        self.tables: list[tuple[TableInfo, KeyGroups, LayeredTable]] = []
        self._spec = spec
        self._new_table = new_table
        self._states: dict[str, OperatorTables] = {}
        self._timers: dict[str, tuple[TableInfo, TimerService]] = {}
        self._operators: dict[str, SubtaskOperatorStates] = {}
        self._groups: dict[str, KeyGroups] = {}
        self._numbers: dict[tuple[str, str, bool], int] = {}
        self._next_number = 0
        self._waits = False

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
        return self._operators.setdefault(uid, SubtaskOperatorStates(uid))

    def opened(self) -> None:
        """All functions are open: what was declared has to be there, and have the migrations that are given."""
        for uid, keyed in self._states.items():
            # Before a state is missed whose new name is misspelled.
            self.migrations.check_declared(uid, keyed.declarations)
        for states in self._all_states():
            states.opened()

    def _all_states(self) -> list[OperatorTables | SubtaskOperatorStates]:
        return [*self._states.values(), *self._operators.values()]

    def look_for_renamed(self) -> None:
        if self._waits:
            waiting = [states.look_for_renamed() for states in self._all_states()]
            self._waits = any(waiting)

    def number_as(self, tables: Sequence[TableInfo]) -> None:
        """Give tables that are yet to come the numbers that they had in a snapshot."""
        self._numbers = {(i.operator, i.name, i.kind == TIMERS): i.number for i in tables}
        self._next_number = max((info.number + 1 for info in tables), default=0)

    def claim(self, info: TableInfo) -> None:
        """A snapshot that is restored has this table, with or without entries."""
        self._waits = True
        self.restored_table(info)
        state = self.state(info.operator)
        state.declarations.restored(info.name, info.declared)
        if info.state_version == self.migrations.version(info.operator, info.name):
            state.restored_values(info.name, info.values)

    def restored_table(self, info: TableInfo) -> tuple[KeyGroups, LayeredTable]:
        """Return the table for what a checkpoint holds of one; its base may be filled as long as it is not in use."""
        table = self.state(info.operator).restored(info.name, info.kind)
        return self._key_groups(info.operator), table

    def restored_operators(self, uid: str) -> SubtaskOperatorStates:
        self._waits = True
        return self.operators(uid)

    def restored_timers(self, info: TableInfo) -> tuple[KeyGroups, TimerService]:
        service = self.timers(info.operator)
        return self._key_groups(info.operator), service

    def all_operators(self) -> Iterable[SubtaskOperatorStates]:
        return self._operators.values()

    def all_timers(self) -> list[tuple[TableInfo, KeyGroups, TimerService]]:
        return [(info, self._groups[info.operator], service) for info, service in self._timers.values()]

    def caches(self) -> list[StateCache]:
        return [cache for state in self._states.values() for cache in state.caches]

    def by_number(self) -> dict[int, tuple[TableInfo, KeyGroups]]:
        return {info.number: (info, groups) for info, groups, _ in self.tables}

    def as_saved(self, info: TableInfo) -> TableInfo:
        state = self._states[info.operator]
        declared = state.declarations.is_declared(info.name)
        return replace(info, declared=declared, values=state.described(info.name))

    def _create(self, uid: str, name: str, kind: str) -> LayeredTable:
        info, groups = self._info(uid, name, kind), self._key_groups(uid)
        table = self._new_table(info, groups)
        self.tables.append((info, groups, table))
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


# Keeps the layers of a table few, by bits of some milliseconds: merged into an unread base, else into one another.


SLICE = 5_000
"""Entries that are moved into a base in one call: about a millisecond."""

MAX_LAYERS = 6
"""Layers of a table while its base is read. Each of them makes looking a key up slower. Where the input waits for
memory there is one: a key that is written again and again is in each of them."""


class Merger:
    def __init__(self, table: LayeredTable, sharing: Sharing, memory: StateMemory | None = None) -> None:
        """``memory`` is told what comes into bases; layers are measured for it."""
        self._table = table
        self._sharing = sharing
        self._memory = memory
        self._moving: tuple[Layer, Iterator[list[tuple[Key, Any]]]] | None = None
        self._uncounted = 0
        self._joining: tuple[Layer, Layer, Iterator[Layer | None]] | None = None

    def step(self) -> bool:
        layers = self._table.layers
        if not layers:
            return False
        if not self._sharing.base_readers:
            self._joining = None
            self._into_base(layers[-1])
            return True
        if self._joining is None:
            # The oldest stays alone while it is moved.
            free = layers if self._moving is None else layers[:-1]
            is_full = self._memory is not None and self._memory.is_full
            if len(free) <= (1 if is_full else MAX_LAYERS):
                return False
            self._joining = _smallest(free)
        self._join(*self._joining)
        return True

    def _into_base(self, oldest: Layer) -> None:
        base = self._table.base
        has_store = self._table.store is not None
        if self._moving is None or self._moving[0] is not oldest:
            if not has_store and len(oldest) <= SLICE:
                base.update(oldest.values)
                for key in oldest.deleted:
                    if key not in oldest.values:
                        base.pop(key, None)
                self._done(oldest)
                return
            # Begun anew if the layer was joined with another meanwhile: what was moved is moved again.
            self._moving = oldest, sliced(oldest.changes(), SLICE)
            self._uncounted = oldest.bytes
        part = next(self._moving[1], None)
        if part is None:
            self._count(self._uncounted)
            self._done(oldest)
        else:
            base.update(part)
            self._count(-(-oldest.bytes * len(part) // len(oldest)))
            if not has_store:
                for key in [key for key, value in part if value is DELETED]:
                    del base[key]

    def _count(self, size: int) -> None:
        """So much of the layer has come into the base: not before, for bases may be measured between two slices."""
        size = min(size, self._uncounted)
        self._uncounted -= size
        if self._memory is not None:
            self._memory.grew(size)

    def _done(self, layer: Layer) -> None:
        self._moving = None
        self._table.replace_layers([layer], [])
        if self._memory is not None:
            self._memory.layers -= layer.bytes

    def _join(self, newer: Layer, older: Layer, joining: Iterator[Layer | None]) -> None:
        joined = next(joining)
        if joined is not None:
            self._joining = None
            self._table.replace_layers([newer, older], [joined])
            if self._memory is not None:
                joined.measure()
                self._memory.layers += joined.bytes - newer.bytes - older.bytes


def _smallest(layers: tuple[Layer, ...]) -> tuple[Layer, Layer, Iterator[Layer | None]]:
    at = min(range(len(layers) - 1), key=lambda place: len(layers[place]) + len(layers[place + 1]))
    newer, older = layers[at], layers[at + 1]
    return newer, older, merged(older, newer, SLICE)


_MERGING = 0.25
"""Part of the processor's time that merging takes at most. To use a key takes ten times as long as to merge it."""

_MOST_MOVING = 3.0
"""Time that is taken for moving at most, as a multiple of what the task has used since the last time …"""

_WAITING_S = 0.02
"""… and while its input waits for that."""


class StateUpkeep:
    """Merges layers, and moves what is too much for memory into the stores below the tables, if there are any."""

    def __init__(
        self,
        tables: Sequence[tuple[TableInfo, KeyGroups, LayeredTable]],
        sharing: Sharing,
        spilling: LmdbStores | None,
    ) -> None:
        """``tables`` are all that there are, those that are still to come too."""
        self._tables = tables
        self._sharing = sharing
        self._spilling = spilling
        self._memory: StateMemory | None = None if spilling is None else StateMemory(memory.MAX_BYTES)
        self._mergers: list[Merger] = []
        self._gauges: list[FrontGauge] = []

    def made(self, table: LayeredTable) -> None:
        self._mergers.append(Merger(table, self._sharing, self._memory))
        if self._memory is not None:
            self._gauges.append(FrontGauge(table))

    @property
    def is_full(self) -> bool:
        """Whether memory holds so much that no input is to be taken before `merge_and_spill` has made room."""
        return self._memory is not None and self._memory.is_full

    @property
    def measures(self) -> bool:
        return self._memory is not None

    def pushed(self, layers: Collection[Layer]) -> None:
        """All fronts have become these layers, which are measured."""
        if self._memory is not None:
            self._memory.layers += sum(layer.bytes for layer in layers)
            self._memory.front = 0
        for gauge in self._gauges:
            gauge.frozen()

    def filled(self, keys: Collection[Key], values: Collection[Any]) -> None:
        """These are in a base now, while the backend is filled: what is too much for memory is moved into stores."""
        if self._memory is not None:
            self._memory.grew(footprint(keys, values))
            self._spill(None)

    def merge_and_spill(self, used_s: float) -> None:
        """Do a part of what there is, by ``used_s`` since the last call; if input waits, some milliseconds of it."""
        least_s = _WAITING_S if self.is_full else 0.0
        self._merge(max(_MERGING * used_s, least_s))
        if not self._sharing.base_readers:
            self._spill(thread_time(), used_s, least_s)

    def is_front_large(self, handled: int) -> bool:
        """Whether fronts take up so much that they are better layers now; ``handled``: records since the last call."""
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
        """Move what is too much, as much as ``used_s`` and the excess say; ``from_s`` None: all of it."""
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


MAX_FRONT = 100_000
"""Keys that are touched before they become a layer without a barrier: what a barrier has to move stays small."""

LOG_ENTRIES = 5_000
"""Keys that are touched before they are written to the changelog without a barrier."""

LOG_MS = 250
"""Time between two such writes: a key that changes all the time is not written more often."""


class LayeredBackend:
    """A `ftlayer.functions.keyed.Backend` in memory, maybe above a store; for the task's thread, but for `Frozen`."""

    copies = True

    def __init__(
        self,
        config: CheckpointConfig,
        spec: BackendSpec,
        compaction: Compaction,
        spilling: LmdbStores | None = None,
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

    def state(self, uid: str) -> OperatorTables:
        return self.subtask.state(uid)

    def timers(self, uid: str) -> TimerService:
        return self.subtask.timers(uid)

    def operators(self, uid: str) -> SubtaskOperatorStates:
        return self.subtask.operators(uid)

    def opened(self) -> None:
        """All functions are open: what is asked for later is not declared. Raises `IncompatibleCheckpointError`."""
        self.subtask.opened()

    def filled(self, keys: Collection[Key], values: Collection[Any]) -> None:
        self._upkeep.filled(keys, values)

    def _new_table(self, info: TableInfo, groups: KeyGroups) -> LayeredTable:
        store = None if self._spilling is None else self._spilling.store(info, groups)
        table = LayeredTable(f"operator {info.operator!r}, table {info.name!r}", self._sharing, store)
        self._upkeep.made(table)
        return table

    def freeze(self, barrier: Barrier, now_ms: int = 0) -> Frozen:
        """Freeze the state for a snapshot: keyed state in layers, operator state as bytes.

        It takes a few milliseconds at most. Several may be out at a time. ``now_ms``: processing time. Values with a
        time to live that are over by then may be left out; 0: none are. `StateSerializationError` for operator state
        that cannot be written.
        """
        for cache in self.subtask.caches():
            cache.write_back()
        states = self.subtask.all_operators()
        operators = tuple(saved for each in states for saved in each.snapshot(self._serializer))
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
                TableView(self.subtask.as_saved(info), groups, table.layers, table.base)
                for info, groups, table in self.subtask.tables
            ),
            tuple(timers),
            now_ms,
            None if spilling is None or spilling.is_empty() else spilling.view,
        )

    def completed(self, checkpoint: int) -> None:
        """The checkpoint is complete: what it refers to stays, and later ones may build on it."""
        if self._lineage is not None:
            self._lineage.completed(checkpoint)

    def aborted(self, checkpoint: int) -> None:
        """The checkpoint was given up: nothing may build on it."""
        if self._lineage is not None:
            self._lineage.aborted(checkpoint)

    @property
    def is_full(self) -> bool:
        return self._upkeep.is_full

    def tend(self, now_ms: int, handled: int = 0) -> None:
        """Keep layers few and memory small, for a part of the time of the ``handled`` records since the last call.

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
        if self._changelog is not None:
            self._changelog.close()
        if self._spilling is not None:
            self._spilling.close()


def open_backend(
    config: CheckpointConfig,
    spec: BackendSpec,
    restore: SubtaskRestore | None,
    storage: SlotStorage,
    location: str,
) -> LayeredBackend:
    """Return a backend that holds what ``restore`` has of the subtask's key groups and operators.

    ``location`` is the directory that the pieces' paths are relative to. State of operators that are not in
    ``spec.keys`` is passed over (operator state is taken as it is).

    Raises `IncompatibleCheckpointError` for state that cannot be read here, and what the storage raises.
    """
    directory = spec.directory or config.state_directory
    stores = None
    if config.backend == "lmdb":
        # Late: no other slot is to pay for the import.
        from ftlayer.state.lmdb.stores import LmdbStores

        stores = LmdbStores(directory)
    changelog = None
    compaction = Compaction(storage, spec)
    if config.changelog:
        changelog = Changelog(
            storage,
            compaction,
            config.materialization_interval_ms,
            config.max_space_amplification,
            max_kept(config),
            empty=restore is None or not restore.keyed,
        )
    backend = LayeredBackend(config, spec, compaction, stores, changelog)
    try:
        if restore is not None:
            from ftlayer.state.lmdb.copies import blocks_of_copies

            readers = {
                entries.FORMAT: blocks_of_entries(storage, location),
                lmdb_layout.FORMAT: blocks_of_copies(storage, location, directory),
            }
            restoring = _Restoring(backend, spec, readers)
            is_own = restoring.is_just_own(restore)
            if is_own:
                backend.subtask.number_as(restore.keyed[0].tables)
            if is_own and stores is not None and restoring.can_adopt(restore):
                copy = restore.keyed[0].pieces[0].piece
                storage.fetch(location, copy, stores.local_path() / lmdb_layout.DATA)
                stores.adopt()
                restoring.run(restore, adopted=1)
            else:
                restoring.run(restore)
            if changelog is not None and is_own and restoring.is_shared:
                # What belongs to a checkpoint alone goes with it, as timers do.
                parts = [part for part in restore.keyed[0].pieces if part.piece.scope is Scope.SHARED]
                pieces = storage.adopt(location, [part.piece for part in parts])
                if pieces is not None:
                    now = zip(parts, pieces, strict=True)
                    changelog.begin_with([replace(part, piece=piece) for part, piece in now])
    except BaseException:
        backend.close()
        raise
    return backend


class _Restoring:
    def __init__(self, backend: LayeredBackend, spec: BackendSpec, readers: dict[str, BlocksOf]) -> None:
        self._backend = backend
        self._spec = spec
        self._readers = readers
        self._timers: dict[str, TimersRestored] = {}
        # Whether all state but timers lies in pieces that outlive their checkpoint.
        self.is_shared = True

    def can_adopt(self, restore: SubtaskRestore) -> bool:
        """Whether a copied environment comes first, so that the subtask can go on with the file."""
        pieces = restore.keyed[0].pieces
        return bool(pieces and pieces[0].format == lmdb_layout.FORMAT)

    def is_just_own(self, restore: SubtaskRestore) -> bool:
        """Whether there is one snapshot, which holds just what the subtask is to have, as it is written now."""
        if len(restore.keyed) != 1:
            return False
        (snapshot,) = restore.keyed
        groups = (self._spec.first_group, self._spec.end_group)
        return bool(
            (snapshot.first_group, snapshot.end_group) == groups
            and len(claimed(snapshot, self._spec, self._backend.subtask.migrations)) == len(snapshot.tables)
            and not any(map(self._backend.subtask.migrations.changes, snapshot.tables))
            and all(info.version == serializer.VERSION for info in snapshot.tables)
        )

    def run(self, restore: SubtaskRestore, adopted: int = 0) -> None:
        """Fill the backend; it has the first ``adopted`` pieces already."""
        for snapshot in restore.keyed:
            self._keyed(snapshot, adopted)
        for timers in self._timers.values():
            timers.set()
        by_operator: dict[str, list[OperatorState]] = defaultdict(list)
        for state in restore.operators:
            if not self._backend.subtask.migrations.is_left_behind(state.operator, state.name):
                by_operator[state.operator].append(state)
        for uid, states in by_operator.items():
            self._backend.subtask.restored_operators(uid).restore(states)

    def _keyed(self, snapshot: KeyedSnapshot, adopted: int) -> None:
        tables = claimed(snapshot, self._spec, self._backend.subtask.migrations)
        for info in tables.values():
            if info.kind == TIMERS:
                self._backend.subtask.restored_timers(info)
            else:
                self._backend.subtask.claim(info)
        for piece in snapshot.pieces[:adopted]:
            self.is_shared = piece.piece.scope is Scope.SHARED
        for piece in snapshot.pieces[adopted:]:
            read = self._readers.get(piece.format)
            if read is None:
                raise IncompatibleCheckpointError(
                    f"a piece of state has the format {piece.format!r}, which this version of ftlayer cannot read"
                )
            for block in read(piece, wanted_blocks(self._spec, tables)):
                if piece.piece.scope is not Scope.SHARED and tables[block.table].kind != TIMERS:
                    self.is_shared = False
                own = own_part(block, self._spec)
                if own is not None:
                    self._fill(own, tables[block.table])

    def _fill(self, block: Block, info: TableInfo) -> None:
        if info.kind == TIMERS:
            groups, service = self._backend.subtask.restored_timers(info)
            keys, values = decoded(block, info, groups)
            self._timers.setdefault(info.operator, TimersRestored(service)).add(keys, values or [])
            return
        groups, table = self._backend.subtask.restored_table(info)
        keys, values = decoded(block, info, groups)
        if values is not None:
            values = self._backend.subtask.migrations.migrated(info, keys, values)
        _put(table, keys, values)
        self._backend.filled(keys, values or ())


def _put(table: LayeredTable, keys: list[object], values: list[object] | None) -> None:
    if values is not None:
        table.base.update(zip(keys, values, strict=True))
    else:
        for key in keys:
            if table.store is None:
                table.base.pop(key, None)
            else:
                table.base[key] = DELETED
