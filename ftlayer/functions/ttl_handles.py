"""Handles of keyed state with a time to live. What is over is removed when its key is used."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, MutableMapping, ValuesView
from typing import Any

from ftlayer.functions.handles import NOTHING, Call, ListHandle, MapHandle, Own, ValueHandle
from ftlayer.functions.keyed import Key, ListTable, MapTable
from ftlayer.functions.ttl import Stamped, StateTtl, is_expired, lifetime_ms
from ftlayer.functions.values import owned_all


class ExpiringValue(ValueHandle):
    __slots__ = ("_refreshes", "_stamp")

    def __init__(
        self, context: Call, table: MutableMapping[Key, Any], default: Any, ttl: StateTtl, own: Own = None
    ) -> None:
        super().__init__(context, table, default, ttl, own)
        self._stamp = _stamp(context, ttl)
        self._refreshes = ttl.refresh_on_read

    def get(self) -> Any:
        """Return the value, the default if there is none or it is over. After changing it in place, `set` it."""
        key = self._context.key
        stamped = self._table.get(key, NOTHING)
        if stamped is NOTHING:
            return self.default
        if is_expired(stamped, self._context.now_ms):
            self._table.pop(key, None)
            return self.default
        if self._refreshes:
            self._table[key] = self._stamp(stamped[1])
        return stamped[1] if self._own is None else self._own(stamped[1])

    def set(self, value: Any) -> None:
        """Replace the value, whose time begins."""
        self._table[self._context.key] = self._stamp(value if self._own is None else self._own(value))


class ExpiringList(ListHandle):
    """A list a key, each of whose values has its own time."""

    __slots__ = ("_refreshes", "_stamp")

    def __init__(self, context: Call, table: ListTable, ttl: StateTtl, own: Own = None) -> None:
        super().__init__(context, table, ttl, own)
        self._stamp = _stamp(context, ttl)
        self._refreshes = ttl.refresh_on_read

    def append(self, value: Any) -> None:
        """Add a value at the end."""
        self.extend((value,))

    def extend(self, values: Iterable[Any]) -> None:
        """Add values at the end."""
        added = list(values) if self._own is None else owned_all(list(values))
        self._table.extend(self._context.key, list(map(self._stamp, added)))

    def get(self) -> list[Any]:
        """Return a list of the values that are not over, the caller's own."""
        key, now_ms = self._context.key, self._context.now_ms
        found = self._table.get(key)
        values = [stamped[1] for stamped in found if not is_expired(stamped, now_ms)]
        if self._refreshes or len(values) < len(found):
            kept = [stamped for stamped in found if not is_expired(stamped, now_ms)]
            self._table.clear(key)
            self._table.extend(key, map(self._stamp, values) if self._refreshes else kept)
        return values


class ExpiringMap(MapHandle):
    """A mapping a key, each of whose items has its own time."""

    __slots__ = ("_refreshes", "_stamp")

    def __init__(self, context: Call, table: MapTable, ttl: StateTtl, own: Own = None) -> None:
        super().__init__(context, table, ttl, own)
        self._stamp = _stamp(context, ttl)
        self._refreshes = ttl.refresh_on_read

    def __getitem__(self, field: Any) -> Any:
        key = self._context.key
        stamped = self._table.items(key)[field]
        if is_expired(stamped, self._context.now_ms):
            self._table.remove(key, field)
            raise KeyError(field)
        if self._refreshes:
            self._table.put(key, field, self._stamp(stamped[1]))
        return stamped[1] if self._own is None else self._own(stamped[1])

    def __contains__(self, field: object) -> bool:
        return self.get(field, NOTHING) is not NOTHING

    def get(self, field: Any, default: Any = None) -> Any:
        """Return an item's value, or ``default`` if there is none or it is over."""
        try:
            return self[field]
        except KeyError:
            return default

    def items(self) -> ItemsView[Any, Any]:
        """Return a view of the items that are not over."""
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:
        """Return a view of the values that are not over."""
        return ValuesView(self)

    def __setitem__(self, field: Any, value: Any) -> None:
        own = value if self._own is None else self._own(value)
        self._table.put(self._context.key, field, self._stamp(own))

    def __delitem__(self, field: Any) -> None:
        key = self._context.key
        over = is_expired(self._table.items(key)[field], self._context.now_ms)
        self._table.remove(key, field)
        if over:
            raise KeyError(field)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._fields())

    def __len__(self) -> int:
        return len(self._fields())

    def _fields(self) -> list[Any]:
        """Return what is not over, and remove the rest."""
        key, now_ms = self._context.key, self._context.now_ms
        items = self._table.items(key)
        over = [field for field, stamped in items.items() if is_expired(stamped, now_ms)]
        for field in over:
            self._table.remove(key, field)
        return list(self._table.items(key) if over else items)


def _stamp(context: Call, ttl: StateTtl) -> Callable[[Any], Stamped]:
    """Return what makes a value one that is written now."""
    time_ms = lifetime_ms(ttl)
    return lambda value: (context.now_ms + time_ms, value)
