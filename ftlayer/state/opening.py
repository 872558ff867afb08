"""Opens the state backend that a job's options ask for, with the state that it begins with."""

from __future__ import annotations

from collections import defaultdict

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.pieces import Scope
from ftlayer.checkpoint.snapshots import KeyedSnapshot, OperatorState, SubtaskRestore, TableInfo
from ftlayer.checkpoint.storage.contract import SlotStorage
from ftlayer.errors import IncompatibleCheckpointError
from ftlayer.state.backend import LayeredBackend
from ftlayer.state.contract import BackendSpec, CheckpointedBackend
from ftlayer.state.lmdb import layout as lmdb_layout
from ftlayer.state.snapshots import entries, serializer
from ftlayer.state.snapshots.changelog import Changelog
from ftlayer.state.snapshots.compaction import Compaction
from ftlayer.state.snapshots.entries import Block
from ftlayer.state.snapshots.restoring import (
    BlocksOf,
    TimersRestored,
    blocks_of_entries,
    claimed,
    decoded,
    own_part,
    wanted_blocks,
)
from ftlayer.state.tables.keyed import TIMERS
from ftlayer.state.tables.layers import DELETED, LayeredTable
from ftlayer.state.tables.memory import max_kept


def open_backend(
    config: CheckpointConfig,
    spec: BackendSpec,
    restore: SubtaskRestore | None,
    storage: SlotStorage,
    location: str,
) -> CheckpointedBackend:
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
            # Paths are of one run's directory. What belongs to a checkpoint alone goes with it, as timers do.
            is_here = bool(location) and location == storage.location
            if changelog is not None and is_own and is_here and restoring.is_shared:
                pieces = restore.keyed[0].pieces
                changelog.begin_with([part for part in pieces if part.piece.scope is Scope.SHARED])
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
