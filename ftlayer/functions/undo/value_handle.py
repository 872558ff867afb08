"""The handle of a single value whose changes go into an undo log: what `UndoValues` does, without its calls."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from ftlayer.functions.handles import Call, ValueHandle
from ftlayer.functions.keyed import Key
from ftlayer.functions.undo.tables import ABSENT, UndoValues
from ftlayer.functions.values import ATOMS


class UndoValueHandle(ValueHandle):
    """One value a key."""

    __slots__ = ("_add", "_plain", "_read", "_restore")

    def __init__(self, context: Call, table: UndoValues, default: Any) -> None:
        super().__init__(context, table, default)
        self._plain = table.table
        self._add = table.log.add
        self._read = table.read
        self._restore = table.restore

    def get(self) -> Any:
        """See `ValueHandle.get`."""
        key = self._context.key
        try:
            value = self._plain[key]
        except KeyError:
            return self.default
        if type(value) not in ATOMS:
            self._read(key, value)
        return value

    def set(self, value: Any) -> None:
        """See `ValueHandle.set`."""
        key, table = self._context.key, self._plain
        try:
            old = table[key]
        except KeyError:
            old = ABSENT
        self._add((self._restore, key, old))
        table[key] = value


def value_handle(context: Call, table: MutableMapping[Key, Any], default: Any) -> ValueHandle:
    """Return the handle of a single value."""
    if isinstance(table, UndoValues):
        return UndoValueHandle(context, table, default)
    return ValueHandle(context, table, default)
