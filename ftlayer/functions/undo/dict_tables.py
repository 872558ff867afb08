"""What reads and changes single values a record at a time: in C where the table is a dict, as all backends' are."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any, TypeGuard

from ftlayer.functions.handles import Call, Own, ValueHandle
from ftlayer.functions.keyed import Key
from ftlayer.functions.undo.tables import ABSENT, UndoValues
from ftlayer.records.kernels import native


def value_handle(
    context: Call, table: MutableMapping[Key, Any], default: Any, own: Own = None
) -> ValueHandle:
    """Return the handle of a single value; what it changes goes into a log where ``table`` has one."""
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
