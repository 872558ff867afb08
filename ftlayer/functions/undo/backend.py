"""A state backend whose users' changes can be taken back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, SupportsIndex

from ftlayer.functions.keyed import Backend, Key, KeyedState, OperatorStates, StateCache, Timers
from ftlayer.functions.undo.log import Changes, Uncopied, UndoLog
from ftlayer.functions.undo.tables import ABSENT, UndoLists, UndoMaps, UndoValues
from ftlayer.functions.values import ATOMS, is_immutable

# Operator state whose changes go into an undo log: lists and mappings that users change in place.
#
# They are a `list` and a `dict` in all that reads them. An item that can be changed itself is copied, with all others,
# when one is read for the first time in a batch.


def logged(state: Any, log: Changes) -> UndoItems | UndoBroadcast:
    """Return a list, or a mapping, of operator state with changes that go into ``log``."""
    return UndoBroadcast(state, log) if isinstance(state, dict) else UndoItems(state, log)


class UndoItems(list[Any]):
    __slots__ = ("_log",)

    def __init__(self, items: Iterable[Any], log: Changes) -> None:
        super().__init__(items)
        self._log = log

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self._read(found if isinstance(place, slice) else (found,))
        return found

    def __iter__(self) -> Iterator[Any]:
        self._read(super().__iter__())
        return super().__iter__()

    def append(self, item: Any) -> None:
        self._log.add((self._cut, None, len(self)))
        super().append(item)

    def extend(self, items: Iterable[Any]) -> None:
        self._log.add((self._cut, None, len(self)))
        super().extend(items)

    def __iadd__(self, items: Iterable[Any]) -> UndoItems:  # type: ignore[misc]
        self.extend(items)
        return self

    def __imul__(self, times: SupportsIndex) -> UndoItems:
        self._changes()
        super().__imul__(times)
        return self

    def __setitem__(self, place: Any, item: Any) -> None:
        self._changes()
        super().__setitem__(place, item)

    def __delitem__(self, place: Any) -> None:
        self._changes()
        super().__delitem__(place)

    def insert(self, place: SupportsIndex, item: Any) -> None:
        self._changes()
        super().insert(place, item)

    def pop(self, place: SupportsIndex = -1) -> Any:
        found = self[place]
        self._changes()
        super().__delitem__(place)
        return found

    def remove(self, item: Any) -> None:
        self._changes()
        super().remove(item)

    def clear(self) -> None:
        self._changes()
        super().clear()

    def reverse(self) -> None:
        self._changes()
        super().reverse()

    def sort(self, *, key: Callable[[Any], Any] | None = None, reverse: bool = False) -> None:
        self._changes()
        super().sort(key=key, reverse=reverse)

    def _read(self, items: Iterable[Any]) -> None:
        if not all(type(item) in ATOMS or is_immutable(item) for item in items):
            self._log.read(self._replace, None, super().copy(), id(self))

    def _changes(self) -> None:
        self._log.add((self._replace, None, super().copy()))

    def _cut(self, _: None, size: int) -> None:
        super().__delitem__(slice(size, None))

    def _replace(self, _: None, items: list[Any]) -> None:
        super().__setitem__(slice(None), items)


class UndoBroadcast(dict[Any, Any]):
    __slots__ = ("_log",)

    def __init__(self, items: dict[Any, Any], log: Changes) -> None:
        super().__init__(items)
        self._log = log

    def __getitem__(self, field: Any) -> Any:
        return self._read(field, super().__getitem__(field))

    def get(self, field: Any, default: Any = None) -> Any:
        try:
            return self[field]
        except KeyError:
            return default

    def values(self) -> Any:
        self._read_all()
        return super().values()

    def items(self) -> Any:
        self._read_all()
        return super().items()

    def __setitem__(self, field: Any, value: Any) -> None:
        self._changes(field)
        super().__setitem__(field, value)

    def __delitem__(self, field: Any) -> None:
        self._changes(field)
        super().__delitem__(field)

    def pop(self, field: Any, *default: Any) -> Any:
        if field in self:
            self[field]  # read: it may be changed behind that
            self._changes(field)
        return super().pop(field, *default)

    def popitem(self) -> tuple[Any, Any]:
        field = next(reversed(self), ABSENT)
        return super().popitem() if field is ABSENT else (field, self.pop(field))

    def setdefault(self, field: Any, default: Any = None) -> Any:
        if field not in self:
            self[field] = default
        return self[field]

    def update(self, *others: Any, **fields: Any) -> None:
        for field, value in dict(*others, **fields).items():
            self[field] = value

    def __ior__(self, other: Any) -> UndoBroadcast:  # type: ignore[misc]
        self.update(other)
        return self

    def clear(self) -> None:
        for field in list(self):
            del self[field]

    def _read(self, field: Any, value: Any) -> Any:
        if type(value) not in ATOMS:
            self._log.read(self._restore, field, value, (id(self), field))
        return value

    def _read_all(self) -> None:
        for field, value in super().items():
            self._read(field, value)

    def _changes(self, field: Any) -> None:
        self._log.add((self._restore, field, super().get(field, ABSENT)))

    def _restore(self, field: Any, old: Any) -> None:
        if old is ABSENT:
            super().pop(field, None)
        else:
            super().__setitem__(field, old)


class UndoTimers:
    """The timers of one operator: `ftlayer.functions.keyed.Timers`.

    A timer that was deleted, and is set again by the log, fires behind the others of its time. One that fires alone is
    gone, also if it fails: what fired it has it.
    """

    def __init__(self, timers: Timers, log: UndoLog) -> None:
        self._timers = timers
        self._log = log

    def add_event(self, key: Key, time_ms: int) -> bool:
        added = self._timers.add_event(key, time_ms)
        if added:
            self._log.add((self._timers.delete_event, key, time_ms))
        return added

    def add_processing(self, key: Key, time_ms: int) -> bool:
        added = self._timers.add_processing(key, time_ms)
        if added:
            self._log.add((self._timers.delete_processing, key, time_ms))
        return added

    def delete_event(self, key: Key, time_ms: int) -> bool:
        deleted = self._timers.delete_event(key, time_ms)
        if deleted:
            self._log.add((self._timers.add_event, key, time_ms))
        return deleted

    def delete_processing(self, key: Key, time_ms: int) -> bool:
        deleted = self._timers.delete_processing(key, time_ms)
        if deleted:
            self._log.add((self._timers.add_processing, key, time_ms))
        return deleted

    def due_event(self, watermark_ms: int) -> tuple[int, list[Key]] | None:
        due = self._timers.due_event(watermark_ms)
        if due is not None and not self._log.alone:
            self._log.add((self._set_event, *due))
        return due

    def due_processing(self, now_ms: int) -> tuple[int, list[Key]] | None:
        due = self._timers.due_processing(now_ms)
        if due is not None and not self._log.alone:
            self._log.add((self._set_processing, *due))
        return due

    @property
    def next_event_ms(self) -> int | None:
        return self._timers.next_event_ms

    @property
    def next_processing_ms(self) -> int | None:
        return self._timers.next_processing_ms

    @property
    def event_count(self) -> int:
        return self._timers.event_count

    @property
    def processing_count(self) -> int:
        return self._timers.processing_count

    def _set_event(self, time_ms: int, keys: list[Key]) -> None:
        for key in keys:
            self._timers.add_event(key, time_ms)

    def _set_processing(self, time_ms: int, keys: list[Key]) -> None:
        for key in keys:
            self._timers.add_processing(key, time_ms)


class UndoBackend:
    """`ftlayer.functions.keyed.Backend`: what functions change through it goes into ``log``."""

    def __init__(self, backend: Backend, log: UndoLog, *, copies: bool = True) -> None:
        """``copies``: what functions read is copied where they could change it in place."""
        self._backend = backend
        self._log = log
        self.copies = copies
        self._changes: Changes = log if copies else Uncopied(log)

    def uncopied(self) -> UndoBackend:
        """Return the same for functions that change no value in place."""
        return UndoBackend(self._backend, self._log, copies=False)

    def state(self, uid: str) -> UndoState:
        return UndoState(self._backend.state(uid), self._changes)

    def timers(self, uid: str) -> UndoTimers:
        return UndoTimers(self._backend.timers(uid), self._log)

    def operators(self, uid: str) -> OperatorStates:
        states = self._backend.operators(uid)
        states.log_changes(partial(logged, log=self._changes))
        return states


class UndoState:
    """The keyed state of one operator: `ftlayer.functions.keyed.KeyedState`."""

    def __init__(self, state: KeyedState, log: Changes) -> None:
        self._state = state
        self._log = log
        # One object a table: the log tells places by them.
        self._values: dict[str, UndoValues] = {}
        self._lists: dict[str, UndoLists] = {}
        self._maps: dict[str, UndoMaps] = {}

    def values(self, name: str) -> UndoValues:
        if name not in self._values:
            self._values[name] = UndoValues(self._state.values(name), self._log)
        return self._values[name]

    def lists(self, name: str) -> UndoLists:
        if name not in self._lists:
            self._lists[name] = UndoLists(self._state.lists(name), self._log)
        return self._lists[name]

    def maps(self, name: str) -> UndoMaps:
        if name not in self._maps:
            self._maps[name] = UndoMaps(self._state.maps(name), self._log)
        return self._maps[name]

    def describe(self, name: str, values: str) -> None:
        self._state.describe(name, values)

    def cache(self, cache: StateCache) -> None:
        self._state.cache(cache)
