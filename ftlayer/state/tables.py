"""Lists and maps by key over a `LayeredTable`: `ftlayer.state.heap` has them over plain dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ftlayer.functions.keyed import Key
from ftlayer.state.layers import NOTHING, LayeredTable

_NO_ITEMS: Mapping[Any, Any] = MappingProxyType({})


class LayeredList:
    """Lists by key: `ftlayer.functions.keyed.ListTable`."""

    def __init__(self, table: LayeredTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def get(self, key: Key) -> list[Any]:
        """Return a list of the values, the caller's own."""
        found = self._table.read(key)
        return [] if found is NOTHING else list(found)

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
        """Remove the key's entry."""
        self._table.discard(key)


class LayeredMap:
    """Mappings by key: `ftlayer.functions.keyed.MapTable`."""

    def __init__(self, table: LayeredTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    def items(self, key: Key) -> Mapping[Any, Any]:
        """Return the items, not to be changed, and valid until the next change."""
        found: Any = self._table.read(key)
        return _NO_ITEMS if found is NOTHING else found

    def put(self, key: Key, field: Any, value: Any) -> None:
        """Set one item."""
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
        """Remove the key's entry."""
        self._table.discard(key)
