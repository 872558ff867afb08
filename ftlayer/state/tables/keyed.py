"""The keyed state of one operator in tables that can be frozen: `ftlayer.functions.keyed.KeyedState`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ftlayer.errors import ConfigError, IncompatibleCheckpointError
from ftlayer.functions.keyed import Key, StateCache
from ftlayer.functions.ttl import plain_name
from ftlayer.functions.values import ATOMS, is_immutable
from ftlayer.state.tables.declarations import StateDeclarations
from ftlayer.state.tables.layers import NOTHING, LayeredTable

logger = logging.getLogger(__name__)

VALUE, LIST, MAP, TIMERS = "value", "list", "map", "timers"


_NO_ITEMS: Mapping[Any, Any] = MappingProxyType({})


class OperatorTables:
    """The tables of one operator, by name.

    Attributes:
        declarations: which of them the program asks for.
        caches: what has some of its state in a form of its own.
    """

    def __init__(self, uid: str, create: Callable[[str, str], LayeredTable]) -> None:
        """``create(name, kind)`` makes a table."""
        self._uid = uid
        self._create = create
        self._tables: dict[str, tuple[str, LayeredTable, Any]] = {}
        self.declarations = StateDeclarations()
        self.caches: list[StateCache] = []
        # What is said of values: by this program, and by the checkpoint where its version is the present one.
        self._described: dict[str, str] = {}
        self._restored: dict[str, str] = {}

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
        return self._found(name, kind)[0]

    def describe(self, name: str, values: str) -> None:
        self._described[name] = values

    def described(self, name: str) -> str:
        """Return what this program says of a table's values; "" if nothing."""
        return self._described.get(name, "")

    def restored_values(self, name: str, values: str) -> None:
        """A checkpoint says so of a table's values, which are not migrated."""
        self._restored[name] = values

    def cache(self, cache: StateCache) -> None:
        self.caches.append(cache)

    def opened(self) -> None:
        """All functions are open; IncompatibleCheckpointError if a declared state is gone, or of other values."""
        self.declarations.opened()
        for name, values in self._restored.items():
            differs = values != self.described(name) and name in self.declarations.declared
            if differs and self._has_entries(name):
                raise IncompatibleCheckpointError(self._differs(name, values))
        gone = self.declarations.gone(self._has_entries)
        if gone:
            raise IncompatibleCheckpointError(self._gone(gone[0]))

    def look_for_renamed(self) -> bool:
        """Warn, once, if a state begins anew beside others that wait to be asked for. Whether one does wait."""
        found = self.declarations.maybe_renamed(self._has_entries)
        if found is not None:
            logger.warning(
                "%r begins the state %s. The checkpoint holds %s, which was not asked for yet, and which no `open` "
                "asks for: it is kept. If it was renamed, give StateMigration(%r, ..., renamed_from=...) and restore "
                "again",
                self._uid,
                *(", ".join(map(repr, names)) for names in found),
                self._uid,
            )
        return self.declarations.waits

    def _has_entries(self, name: str) -> bool:
        return bool(self._tables[name][1])

    def _gone(self, name: str) -> str:
        plain = plain_name(name)
        new = next(iter(self.declarations.new()), None)
        if new is None:
            what = "If it was renamed, migrations need StateMigration"
            what += f"({self._uid!r}, its new name, renamed_from={plain!r})"
        elif plain_name(new) == plain:
            what = "With a time to live it is another state than without: what it holds is not carried over"
        else:
            what = f"{new!r} is new. Was it renamed? Then migrations need "
            what += f"StateMigration({self._uid!r}, {plain_name(new)!r}, renamed_from={plain!r})"
        return (
            f"{self._uid!r} does not ask for the state {name!r} in `open`, and the program that took the checkpoint "
            f"did. {what}. If it is still used, ask for it in `open`. If it may be dropped, name it: "
            f"allow_unclaimed_state=[{f'{self._uid}/{name}'!r}]"
        )

    def _differs(self, name: str, values: str) -> str:
        held, now = values or "what a function made of it", self.described(name)
        return (
            f"{self._uid!r} keeps {now or 'what a function makes of it'} as its state {name!r}, and the checkpoint "
            f"holds {held}. To go on with it, migrations need StateMigration({self._uid!r}, {name!r}, version=…, "
            "migrate=…), which makes one of the other; to begin anew, name it: "
            f"allow_unclaimed_state=[{f'{self._uid}/{name}'!r}]"
        )

    def _table(self, name: str, kind: str) -> tuple[LayeredTable, Any]:
        self.declarations.ask(name)
        return self._found(name, kind)

    def _found(self, name: str, kind: str) -> tuple[LayeredTable, Any]:
        found = self._tables.get(name)
        if found is None:
            table = self._create(name, kind)
            found = self._tables[name] = kind, table, _WRAPPERS[kind](table)
        elif found[0] != kind:
            if self.declarations.is_restored(name):
                raise IncompatibleCheckpointError(
                    f"{self._uid!r} uses the state {name!r} as a {kind}, and the checkpoint holds it as a {found[0]}; "
                    "give the new state another name, or restore without the operator's state under another uid"
                )
            raise ConfigError(
                f"the state {name!r} is used as a {kind} and as a {found[0]}; give each its own name"
            )
        return found[1], found[2]


# ---------------------------------------------------------------- lists and maps over a table


class LayeredList:
    """Lists by key: `ftlayer.functions.keyed.ListTable`."""

    def __init__(self, table: LayeredTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def size(self, key: Key) -> int:
        found = self._table.read(key)
        return 0 if found is NOTHING else len(found)

    def get(self, key: Key) -> list[Any]:
        """Return a list of the values, the caller's own."""
        found = self._table.read(key)
        if found is NOTHING:
            return []
        if not (ATOMS.issuperset(map(type, found)) or all(map(is_immutable, found))):
            self._table.lend(key)
            found = self._table.read(key)
        return list(found)

    def extend(self, key: Key, values: Iterable[Any]) -> None:
        """Add values; all of them, or, if iterating over them raises, none."""
        more = list(values)
        if not more:
            return
        found = self._table.own(key)
        if found is NOTHING:
            self._table[key] = more
        else:
            found.extend(more)

    def clear(self, key: Key) -> None:
        self._table.discard(key)


class LayeredMap:
    """Mappings by key: `ftlayer.functions.keyed.MapTable`."""

    def __init__(self, table: LayeredTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def keys(self) -> Iterable[Key]:
        return iter(self._table)

    def items(self, key: Key) -> Mapping[Any, Any]:
        """Return the items, not to be changed, and valid until the next change."""
        found: Any = self._table.read(key)
        return _NO_ITEMS if found is NOTHING else found

    def put(self, key: Key, field: Any, value: Any) -> None:
        found = self._table.own(key)
        if found is NOTHING:
            self._table[key] = {field: value}
        else:
            found[field] = value

    def remove(self, key: Key, field: Any) -> None:
        """Remove one item; KeyError if there is none."""
        found = self._table.read(key)
        if found is NOTHING or field not in found:
            raise KeyError(field)
        if len(found) == 1:
            self._table.discard(key)
        else:
            del self._table.own(key)[field]

    def clear(self, key: Key) -> None:
        self._table.discard(key)


_WRAPPERS: dict[str, Callable[[LayeredTable], Any]] = {
    VALUE: lambda table: table,
    LIST: LayeredList,
    MAP: LayeredMap,
}
