"""The keyed state of one operator in tables that can be frozen: `ftlayer.functions.keyed.KeyedState`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ftlayer.errors import ConfigError, IncompatibleCheckpointError
from ftlayer.functions.ttl import plain_name
from ftlayer.state.layers import LayeredTable
from ftlayer.state.tables import LayeredList, LayeredMap

VALUE, LIST, MAP, TIMERS = "value", "list", "map", "timers"


class OperatorTables:
    """The tables of one operator, by name."""

    def __init__(self, uid: str, create: Callable[[str, str], LayeredTable]) -> None:
        """``create(name, kind)`` makes a table."""
        self._uid = uid
        self._create = create
        self._tables: dict[str, tuple[str, LayeredTable, Any]] = {}
        self._restored: set[str] = set()
        self._asked: set[str] = set()

    def values(self, name: str) -> LayeredTable:
        """Return the table of single values of this name."""
        return self._table(name, VALUE)[0]

    def lists(self, name: str) -> LayeredList:
        """Return the table of lists of this name."""
        found: LayeredList = self._table(name, LIST)[1]
        return found

    def maps(self, name: str) -> LayeredMap:
        """Return the table of mappings of this name."""
        found: LayeredMap = self._table(name, MAP)[1]
        return found

    def restored(self, name: str, kind: str) -> LayeredTable:
        """Return the table for what a checkpoint holds; IncompatibleCheckpointError if it holds two kinds."""
        table = self._found(name, kind)[0]
        self._restored.add(name)
        return table

    @property
    def unasked(self) -> set[str]:
        """The restored states that the operator has not asked for yet."""
        return self._restored - self._asked

    def check_asked(self) -> None:
        """Raise IncompatibleCheckpointError if it uses a state that is new while one of the checkpoint lies idle."""
        new = sorted(self._asked - self._restored)
        if not new:
            return
        idle = sorted(name for name in self.unasked if self._tables[name][1])
        if not idle:
            self._asked |= self.unasked
            return
        raise IncompatibleCheckpointError(
            f"{self._uid!r} begins the state {', '.join(map(repr, new))} and does not use "
            f"{', '.join(map(repr, idle))}, which the checkpoint holds. Was it renamed? Then migrations need "
            f"StateMigration({self._uid!r}, {plain_name(new[0])!r}, renamed_from={plain_name(idle[0])!r}). If it is "
            "used later on, ask for it in `open`. If it may be dropped, name it: allow_unclaimed_state="
            f"[{f'{self._uid}/{plain_name(idle[0])}'!r}]"
        )

    def _table(self, name: str, kind: str) -> tuple[LayeredTable, Any]:
        self._asked.add(name)
        return self._found(name, kind)

    def _found(self, name: str, kind: str) -> tuple[LayeredTable, Any]:
        found = self._tables.get(name)
        if found is None:
            table = self._create(name, kind)
            found = self._tables[name] = kind, table, _WRAPPERS[kind](table)
        elif found[0] != kind:
            if name in self._restored:
                raise IncompatibleCheckpointError(
                    f"{self._uid!r} uses the state {name!r} as a {kind}, and the checkpoint holds it as a {found[0]}; "
                    "give the new state another name, or restore without the operator's state under another uid"
                )
            raise ConfigError(
                f"the state {name!r} is used as a {kind} and as a {found[0]}; give each its own name"
            )
        return found[1], found[2]


_WRAPPERS: dict[str, Callable[[LayeredTable], Any]] = {
    VALUE: lambda table: table,
    LIST: LayeredList,
    MAP: LayeredMap,
}
