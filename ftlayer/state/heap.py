"""Keyed state in ordinary Python objects: as fast as a dict, as large as memory, gone with the process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, TypeVar

from ftlayer.checkpoint.snapshots import OperatorState, Redistribution
from ftlayer.common.printable import described
from ftlayer.errors import ConfigError, IncompatibleCheckpointError, StateSerializationError
from ftlayer.functions.keyed import Key, StateCache
from ftlayer.state.snapshots.serializer import Serializer, unpack, unreadable
from ftlayer.state.tables.declarations import StateDeclarations, TimerService

logger = logging.getLogger(__name__)


class SubtaskOperatorStates:
    """The operator state of one operator in one subtask: `ftlayer.functions.keyed.OperatorStates`."""

    def __init__(self, uid: str) -> None:
        self._uid = uid
        self._states: dict[str, tuple[Redistribution, Any]] = {}
        self._logged: Callable[[Any], Any] | None = None
        self.declarations = StateDeclarations()

    def list(self, name: str, *, union: bool = False) -> list[Any]:
        self.declarations.ask(name)
        found: list[Any] = self._state(name, Redistribution.UNION if union else Redistribution.SPLIT, list)
        return found

    def broadcast(self, name: str) -> dict[Any, Any]:
        self.declarations.ask(name)
        found: dict[Any, Any] = self._state(name, Redistribution.BROADCAST, dict)
        return found

    def log_changes(self, logged: Callable[[Any], Any]) -> None:
        """Give out ``logged(state)`` in the place of each; called before the first is asked for, behind `restore`."""
        self._logged = logged
        self._states = {name: (kind, logged(state)) for name, (kind, state) in self._states.items()}

    def opened(self) -> None:
        """All functions are open; IncompatibleCheckpointError if a declared state is gone."""
        self.declarations.opened()
        gone = self.declarations.gone(self._has_items)
        if gone:
            raise IncompatibleCheckpointError(
                f"{self._uid!r} does not ask for the operator state {gone[0]!r} in `open`, and the program that took "
                "the checkpoint did. Ask for it there, under the name that it had, or, if it may be dropped, name it: "
                f"allow_unclaimed_state=[{f'{self._uid}/{gone[0]}'!r}]"
            )

    def look_for_renamed(self) -> bool:
        """Warn, once, if a state begins anew beside others that wait to be asked for. Whether one does wait."""
        found = self.declarations.maybe_renamed(self._has_items)
        if found is not None:
            logger.warning(
                "%r begins the operator state %s. The checkpoint holds %s, which was not asked for yet, and which no "
                "`open` asks for: it is kept. If it was renamed, give it the name that it had and restore again",
                self._uid,
                *(", ".join(map(repr, names)) for names in found),
            )
        return self.declarations.waits

    def _has_items(self, name: str) -> bool:
        return bool(self._states[name][1])

    def _state(self, name: str, wanted: Redistribution, make: Callable[[], Any]) -> Any:
        kind, state = self._states.setdefault(name, (wanted, self._new(make)))
        if kind is wanted:
            return state
        if self.declarations.is_restored(name):
            raise IncompatibleCheckpointError(
                f"{self._uid!r} asks for the operator state {name!r} as {wanted}, and the checkpoint holds it as "
                f"{kind}; give the new state another name"
            )
        raise ConfigError(
            f"{self._uid!r} uses the operator state {name!r} as {kind} and as {wanted}; give each its own name"
        )

    def _new(self, make: Callable[[], Any]) -> Any:
        return make() if self._logged is None else self._logged(make())

    def restore(self, states: Iterable[OperatorState]) -> None:
        for saved in states:
            kind = Redistribution(saved.redistribution)
            self.declarations.restored(saved.name, saved.declared)
            items = [self._unpacked(saved.name, item) for item in saved.items]
            if kind is Redistribution.BROADCAST:
                self._state(saved.name, kind, dict).update(items)
            else:
                self._state(saved.name, kind, list).extend(items)

    def snapshot(self, serializer: Serializer) -> Iterator[OperatorState]:
        """Write every state out as it is now; `StateSerializationError`. Meant for small states: it is not lazy."""
        for name, (kind, state) in self._states.items():
            # Past a log of changes: it has no use for what a snapshot reads.
            values = dict.items(state) if kind is Redistribution.BROADCAST else list.__iter__(state)
            yield OperatorState(
                self._uid,
                name,
                kind,
                tuple([self._packed(serializer, name, value) for value in values]),
                self.declarations.is_declared(name),
            )

    def _unpacked(self, name: str, item: bytes) -> Any:
        try:
            return unpack(item)
        except Exception as error:
            raise unreadable(f"operator {self._uid!r}, state {name!r}", error) from error

    def _packed(self, serializer: Serializer, name: str, value: Any) -> bytes:
        try:
            return serializer.pack(value)
        except Exception as error:
            raise StateSerializationError(
                f"operator {self._uid!r}, state {name!r}: a {type(value).__name__} cannot be written "
                f"({described(error)})"
            ) from error


_NOTHING: Mapping[Any, Any] = MappingProxyType({})


class HeapList:
    def __init__(self) -> None:
        self._lists: dict[Key, list[Any]] = {}

    def __len__(self) -> int:
        return len(self._lists)

    def size(self, key: Key) -> int:
        return len(self._lists.get(key, ()))

    def get(self, key: Key) -> list[Any]:
        return list(self._lists.get(key, ()))

    def extend(self, key: Key, values: Iterable[Any]) -> None:
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
        return self._operators.setdefault(uid, SubtaskOperatorStates(uid))
