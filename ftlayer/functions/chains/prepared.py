"""Operators with keys and state, made ready for the fused loop."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ftlayer.errors import InvalidTopologyError, UnhashableKeyError
from ftlayer.functions.context import Context
from ftlayer.functions.handles import Own
from ftlayer.functions.keyed import Key, KeyedState
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.functions.steps import Filter, FlatMap, Map


@dataclass(frozen=True)
class KeyColumn:
    """Where a part of the key lies in a record of the form VALUES: in a column, or in a field of a struct."""

    position: int
    fields: tuple[str, ...]
    is_float: bool

    @classmethod
    def of(cls, uid: str, name: str, schema: pa.Schema) -> KeyColumn:
        """Find a column by its whole name, else by the path that the name spells; InvalidTopologyError."""
        column, *fields = [name] if name in schema.names else name.split(".")
        kind: Any = schema.field(column).type if column in schema.names else None
        for field in fields:
            found = kind is not None and pa.types.is_struct(kind) and kind.get_field_index(field) >= 0
            kind = kind.field(field).type if found else None
        if kind is None:
            raise InvalidTopologyError(
                f"{uid!r} has the key {name!r}, which its input lacks ({', '.join(schema.names)})"
            )
        return cls(schema.names.index(column), tuple(fields), pa.types.is_floating(kind))

    def source(self, record: str, width: int) -> str:
        """Return the Python expression of it; the field of a struct that is null is null."""
        value = record if width == 1 else f"{record}[{self.position}]"
        for field in self.fields:
            value = f"(None if (part := {value}) is None else part[{field!r}])"
        return f"(NAN if (part := {value}) != part else part)" if self.is_float else value


@dataclass(frozen=True)
class KeyColumns:
    """Where the key lies in a record of ``width`` columns."""

    columns: tuple[KeyColumn, ...]
    width: int

    @classmethod
    def of(cls, uid: str, keys: Sequence[str], schema: pa.Schema) -> KeyColumns:
        """Find the columns; InvalidTopologyError if one is missing."""
        return cls(tuple(KeyColumn.of(uid, name, schema) for name in keys), len(schema))

    def source(self, record: str) -> str:
        """Return the Python expression of the key of ``record``; it speaks of `NAN` by that name."""
        parts = [column.source(record, self.width) for column in self.columns]
        return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"


@dataclass(frozen=True)
class Reducing:
    """A `Reduce` and its table, which is one of ``state``; without a state, the segment alone may change the table.

    ``own`` copies what is put into the table, and that the function may keep; None: nothing is copied.
    """

    uid: str
    function: Callable[[Any, Any], Any]
    schema: pa.Schema
    key: KeyColumns
    table: MutableMapping[Key, Any]
    create: Callable[[], Any] | None = None
    rules: RetryRules = NO_RULES
    state: KeyedState | None = None
    own: Own = None


@dataclass(frozen=True)
class Processing:
    """One input of a `Process` or `CoProcess`, and its context. ``key`` is None without keys."""

    uid: str
    function: Callable[[Any, Context], Any]
    schema: pa.Schema
    key: KeyColumns | None
    context: Context
    side: tuple[tuple[str, pa.Schema], ...]
    rules: RetryRules = NO_RULES


PreparedStep = Map | FlatMap | Filter | Reducing | Processing


def unhashable(uid: str, key: Any) -> UnhashableKeyError:
    kind = type(key).__name__
    return UnhashableKeyError(
        f"{uid!r} cannot use a {kind} as a key ({key!r:.100}): Python cannot hash it; "
        "key by a number, a string or a binary"
    )
