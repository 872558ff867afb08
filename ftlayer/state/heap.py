"""Keyed state in ordinary Python objects: as fast as a dict, as large as memory, gone with the process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, TypeVar

from ftlayer.errors import ConfigError
from ftlayer.functions.keyed import Key, StateCache
from ftlayer.state.operators import SubtaskOperatorStates
from ftlayer.state.tables.declarations import TimerService

_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class HeapList:
    def __init__(self) -> None:
        self._lists: dict[Key, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._lists)

    def size(self, key: Key) -> int:
        return len(self._lists.get(key, ()))

    def get(self, key: Key) -> list[Any]:
        """Return a list of the values, the caller's own."""
        return list(self._lists.get(key, ()))

    def extend(self, key: Key, values: Iterable[Any]) -> None:
        """Add values; all of them, or, if iterating over them raises, none."""
        more = list(values)
        if more:
            self._lists.setdefault(key, []).extend(more)

    def clear(self, key: Key) -> None:
        self._lists.pop(key, None)


class HeapMap:
    def __init__(self) -> None:
        self._maps: dict[Key, dict[Any, Any]] = {}

    def __len__(self) -> int:
        return len(self._maps)

    def keys(self) -> Iterable[Key]:
        return self._maps.keys()

    def items(self, key: Key) -> Mapping[Any, Any]:
        return self._maps.get(key, _NOTHING)

    def put(self, key: Key, field: Any, value: Any) -> None:
        found = self._maps.get(key)
        if found is None:
            self._maps[key] = {field: value}
        else:
            found[field] = value

    def remove(self, key: Key, field: Any) -> None:
        found = self._maps.get(key)
        if found is None:
            raise KeyError(field)
        del found[field]
        if not found:
            del self._maps[key]

    def clear(self, key: Key) -> None:
        self._maps.pop(key, None)


_Table = TypeVar("_Table", dict[Key, Any], HeapList, HeapMap)


class HeapState:
    def __init__(self) -> None:
        self._tables: dict[str, dict[Key, Any] | HeapList | HeapMap] = {}

    def values(self, name: str) -> MutableMapping[Key, Any]:
        return self._table(name, dict)

    def lists(self, name: str) -> HeapList:
        return self._table(name, HeapList)

    def maps(self, name: str) -> HeapMap:
        return self._table(name, HeapMap)

    def describe(self, name: str, values: str) -> None:
        """Nothing is restored."""

    def cache(self, cache: StateCache) -> None:
        """There are no snapshots: it may keep all of it."""

    def _table(self, name: str, kind: type[_Table]) -> _Table:
        table = self._tables.setdefault(name, kind())
        if not isinstance(table, kind):
            raise ConfigError(
                f"the state {name!r} is used as a {_KINDS[kind]} and as a {_KINDS[type(table)]}; "
                "give each its own name"
            )
        return table


_KINDS: dict[type, str] = {dict: "value", HeapList: "list", HeapMap: "map"}


class HeapBackend:
    """State and timers of every operator of a subtask, without checkpoints: `ftlayer.functions.keyed.Backend`."""

    copies = False

    def __init__(self) -> None:
        self._states: dict[str, HeapState] = {}
        self._timers: dict[str, TimerService] = {}
        self._operators: dict[str, SubtaskOperatorStates] = {}

    def state(self, uid: str) -> HeapState:
        return self._states.setdefault(uid, HeapState())

    def timers(self, uid: str) -> TimerService:
        return self._timers.setdefault(uid, TimerService())

    def operators(self, uid: str) -> SubtaskOperatorStates:
        """Return the operator state of an operator, the same at every call."""
        return self._operators.setdefault(uid, SubtaskOperatorStates(uid))
