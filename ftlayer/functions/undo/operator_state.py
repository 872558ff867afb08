"""Operator state whose changes go into an undo log: lists and mappings that users change in place.

They are a `list` and a `dict` in all that reads them. An item that can be changed itself is copied, with all others,
when one is read for the first time in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

from ftlayer.functions.undo.log import Changes
from ftlayer.functions.undo.tables import ABSENT
from ftlayer.functions.values import ATOMS, is_immutable


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
