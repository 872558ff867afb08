"""What the operators of a subtask have asked for, and what a checkpoint held of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ftlayer.checkpoint.snapshots import TableInfo
from ftlayer.errors import ConfigError
from ftlayer.functions.keyed import StateCache
from ftlayer.state.contract import BackendSpec
from ftlayer.state.operators import SubtaskOperatorStates
from ftlayer.state.snapshots import serializer
from ftlayer.state.snapshots.migrating import Migrations
from ftlayer.state.tables.groups import KeyGroups
from ftlayer.state.tables.keyed import TIMERS, OperatorTables
from ftlayer.state.tables.layers import LayeredTable
from ftlayer.state.tables.timers import TimerService


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

    def look_for_renamed(self) -> None:
        """Warn, once, of states that may have been renamed; see `OperatorTables.look_for_renamed`."""
        if self._waits:
            waiting = [states.look_for_renamed() for states in self._all_states()]
            self._waits = any(waiting)

    # ------------------------------------------------------------ restoring

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
        """Return the operator state of an operator, to be filled."""
        self._waits = True
        return self.operators(uid)

    def restored_timers(self, info: TableInfo) -> tuple[KeyGroups, TimerService]:
        """Return the timers of an operator, to be filled."""
        service = self.timers(info.operator)
        return self._key_groups(info.operator), service

    # ------------------------------------------------------------ for snapshots

    def all_operators(self) -> Iterable[SubtaskOperatorStates]:
        """Return the operator states of all operators."""
        return self._operators.values()

    def all_timers(self) -> list[tuple[TableInfo, KeyGroups, TimerService]]:
        return [(info, self._groups[info.operator], service) for info, service in self._timers.values()]

    def caches(self) -> list[StateCache]:
        """Return what has some of the state in a form of its own."""
        return [cache for state in self._states.values() for cache in state.caches]

    def by_number(self) -> dict[int, tuple[TableInfo, KeyGroups]]:
        return {info.number: (info, groups) for info, groups, _ in self.tables}

    def as_saved(self, info: TableInfo) -> TableInfo:
        """Return a table as a snapshot tells of it."""
        state = self._states[info.operator]
        declared = state.declarations.is_declared(info.name)
        return replace(info, declared=declared, values=state.described(info.name))

    # ------------------------------------------------------------ inside

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
