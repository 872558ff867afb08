"""Handles of keyed state, as a process function uses them: each speaks of the key of the current call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import Any, Protocol

from ftlayer.functions.keyed import Key, ListTable, MapTable


class HasKey(Protocol):
    """Knows the current key."""

    key: Any


class ValueHandle:
    """One value a key."""

    __slots__ = ("_context", "_table", "default")

    def __init__(self, context: HasKey, table: MutableMapping[Key, Any], default: Any) -> None:
        self._context = context
        self._table = table
        self.default = default

    def get(self) -> Any:
        """Return the value, the default if there is none. After changing it in place, `set` it."""
        return self._table.get(self._context.key, self.default)

    def set(self, value: Any) -> None:
        """Replace the value."""
        self._table[self._context.key] = value

    def clear(self) -> None:
        """Remove the value."""
        self._table.pop(self._context.key, None)


class ListHandle:
    """A list a key."""

    __slots__ = ("_context", "_table")

    def __init__(self, context: HasKey, table: ListTable) -> None:
        self._context = context
        self._table = table

    def append(self, value: Any) -> None:
        """Add a value at the end."""
        self._table.extend(self._context.key, (value,))

    def extend(self, values: Iterable[Any]) -> None:
        """Add values at the end."""
        self._table.extend(self._context.key, values)

    def get(self) -> list[Any]:
        """Return a list of the values, the caller's own."""
        return self._table.get(self._context.key)

    def clear(self) -> None:
        """Remove all values."""
        self._table.clear(self._context.key)


class MapHandle(MutableMapping[Any, Any]):
    """A mapping a key. After changing one of its values in place, set it again."""

    __slots__ = ("_context", "_table")

    def __init__(self, context: HasKey, table: MapTable) -> None:
        self._context = context
        self._table = table

    def __getitem__(self, field: Any) -> Any:
        return self._table.items(self._context.key)[field]

    def __setitem__(self, field: Any, value: Any) -> None:
        self._table.put(self._context.key, field, value)

    def __delitem__(self, field: Any) -> None:
        self._table.remove(self._context.key, field)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._table.items(self._context.key))

    def __len__(self) -> int:
        return len(self._table.items(self._context.key))

    def clear(self) -> None:
        """Remove all items."""
        self._table.clear(self._context.key)
