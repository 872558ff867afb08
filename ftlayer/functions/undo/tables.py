"""Tables of keyed state whose changes go into an undo log.

Values that a function may change in place (`acc.append(x)`) are copied when they are first read in a batch, at a cost
that grows with their size; numbers, strings and tuples of them are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, TypeGuard

from ftlayer.functions.handles import Call, Own, ValueHandle
from ftlayer.functions.keyed import Key, ListTable, MapTable
from ftlayer.functions.undo.log import Changes
from ftlayer.functions.values import ATOMS, is_immutable, is_marker
from ftlayer.records.kernels import native


class _Absent:
    __slots__ = ()


ABSENT: Any = _Absent()
"""In the log, for a key or an item that was not there."""


class UndoValues(MutableMapping[Key, Any]):
    """A table of single values.

    Attributes:
        table: it without the log.
        log: where changes go.
    """

    def __init__(self, table: MutableMapping[Key, Any], log: Changes) -> None:
        self.table = table
        self.log = log
        self._add = log.add
        self._get = table.get

    def get(self, key: Key, default: Any = None) -> Any:
        value = self._get(key, ABSENT)
        if type(value) not in ATOMS:
            if value is ABSENT:
                return default
            self.read(key, value)
        return value

    def __getitem__(self, key: Key) -> Any:
        value = self.get(key, ABSENT)
        if value is ABSENT:
            raise KeyError(key)
        return value

    def __setitem__(self, key: Key, value: Any) -> None:
        self._add((self.restore, key, self._get(key, ABSENT)))
        self.table[key] = value

    def __delitem__(self, key: Key) -> None:
        # `LayeredTable` has no use for `del`.
        self.pop(key)

    def pop(self, key: Key, default: Any = ABSENT) -> Any:
        value = self._get(key, ABSENT)
        if value is ABSENT:
            if default is ABSENT:
                raise KeyError(key)
            return default
        self.read(key, value)
        self._add((self.restore, key, value))
        self.table.pop(key)
        return value

    def look_up(self, key: Key) -> Any:
        """Return the value that is about to be replaced, and log it; KeyError where there is none."""
        value = self._get(key, ABSENT)
        if value is not ABSENT:
            self.read(key, value)
        self._add((self.restore, key, value))
        if value is ABSENT:
            raise KeyError(key)
        return value

    def __iter__(self) -> Iterator[Key]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)

    def read(self, key: Key, value: Any) -> None:
        """A key's value is read, and may be changed in place."""
        self.log.read(self.restore, key, value, (id(self), key))

    def restore(self, key: Key, old: Any) -> None:
        if old is ABSENT:
            self.table.pop(key, None)
        else:
            self.table[key] = old


class UndoLists:
    """A table of lists: `ftlayer.functions.keyed.ListTable`."""

    def __init__(self, table: ListTable, log: Changes) -> None:
        self._table = table
        self._log = log

    def size(self, key: Key) -> int:
        return self._table.size(key)

    def get(self, key: Key) -> list[Any]:
        found = self._table.get(key)
        # The list is the caller's own; what is in it is not.
        if not (ATOMS.issuperset(map(type, found)) or all(map(is_immutable, found))):
            self._log.read(self._replace, key, found, (id(self), key))
        return found

    def extend(self, key: Key, values: Iterable[Any]) -> None:
        size = self._table.size(key)
        self._table.extend(key, values)
        self._log.add((self._cut, key, size))

    def clear(self, key: Key) -> None:
        self._log.add((self._replace, key, self._table.get(key)))
        self._table.clear(key)

    def _cut(self, key: Key, size: int) -> None:
        self._replace(key, self._table.get(key)[:size])

    def _replace(self, key: Key, items: list[Any]) -> None:
        self._table.clear(key)
        self._table.extend(key, items)


class UndoMaps:
    """A table of mappings: `ftlayer.functions.keyed.MapTable`.

    Attributes:
        table: it without the log.
    """

    def __init__(self, table: MapTable, log: Changes) -> None:
        self.table = table
        self._log = log

    def keys(self) -> Iterable[Key]:
        return self.table.keys()

    def items(self, key: Key) -> Mapping[Any, Any]:
        found = self.table.items(key)
        return _Items(self, key, found) if found else found

    def put(self, key: Key, field: Any, value: Any) -> None:
        self._log.add((self._restore, (key, field), self.table.items(key).get(field, ABSENT)))
        self.table.put(key, field, value)

    def remove(self, key: Key, field: Any) -> None:
        old = self.table.items(key)[field]
        self.table.remove(key, field)
        self._log.add((self._restore, (key, field), old))

    def clear(self, key: Key) -> None:
        self._log.add((self._replace, key, dict(self.table.items(key))))
        self.table.clear(key)

    def read(self, key: Key, field: Any, value: Any) -> None:
        self._log.read(self._restore, (key, field), value, (id(self), key, field))

    def _restore(self, where: tuple[Key, Any], old: Any) -> None:
        key, field = where
        if old is not ABSENT:
            self.table.put(key, field, old)
        elif field in self.table.items(key):
            self.table.remove(key, field)

    def _replace(self, key: Key, items: Mapping[Any, Any]) -> None:
        self.table.clear(key)
        for field, value in items.items():
            self.table.put(key, field, value)


class _Items(Mapping[Any, Any]):
    """The items of one key, each of which is copied when it is read, if it can be changed."""

    __slots__ = ("_found", "_key", "_maps")

    def __init__(self, maps: UndoMaps, key: Key, found: Mapping[Any, Any]) -> None:
        self._maps = maps
        self._key = key
        self._found = found

    def __getitem__(self, field: Any) -> Any:
        value = self._found[field]
        if type(value) not in ATOMS:
            self._maps.read(self._key, field, value)
        return value

    def __contains__(self, field: object) -> bool:
        return field in self._found

    def __iter__(self) -> Iterator[Any]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def value_handle(
    context: Call, table: MutableMapping[Key, Any], default: Any, own: Own = None
) -> ValueHandle:
    """Return the handle of a single value; what it changes goes into a log where ``table`` has one."""
    if not (is_marker(default) or is_immutable(default)):
        return ValueHandle(context, table, default, own=own)
    if isinstance(table, UndoValues):
        if finds_as_dict(table.table):
            return native.DictValueHandle(
                context,
                table.table,
                table.pop,
                default,
                own,
                table.log.entries,
                table.restore,
                table.read,
                ABSENT,
            )
    elif finds_as_dict(table):
        return native.DictValueHandle(context, table, table.pop, default, own)
    return ValueHandle(context, table, default, own=own)


def logged_lookup(values: UndoValues) -> Callable[[Key], Any]:
    """Return `UndoValues.look_up`. It does not look at a value that nothing changes in place."""
    table, log = values.table, values.log
    if not finds_as_dict(table):
        return values.look_up
    return native.LoggedLookup(
        table, log.entries, values.restore, values.read if log.copies else None, ABSENT
    )


def finds_as_dict(table: MutableMapping[Key, Any]) -> TypeGuard[dict[Key, Any]]:
    """Return whether ``table`` is a dict that looks up, and sets, items as all do."""
    kind = type(table)
    return (
        issubclass(kind, dict)
        and kind.__getitem__ is dict.__getitem__
        and kind.__setitem__ is dict.__setitem__
    )
