"""Operators with keys and state, made ready for the fused loop."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ftlayer.errors import InvalidTopologyError, UnhashableKeyError
from ftlayer.functions.context import Context
from ftlayer.functions.keyed import Key
from ftlayer.functions.steps import Filter, FlatMap, Map

NAN = float("nan")
"""The one not-a-number that keys are made of: no other is found again in a dict."""


@dataclass(frozen=True)
class KeyColumns:
    """Where the key lies in a record of the form VALUES."""

    positions: tuple[int, ...]
    floats: frozenset[int]
    width: int

    @classmethod
    def of(cls, uid: str, keys: Sequence[str], schema: pa.Schema) -> KeyColumns:
        """Find the columns; InvalidTopologyError if one is missing."""
        for name in keys:
            if name not in schema.names:
                raise InvalidTopologyError(
                    f"{uid!r} has the key {name!r}, which its input lacks ({', '.join(schema.names)})"
                )
        positions = tuple(schema.names.index(name) for name in keys)
        floats = frozenset(place for place in positions if pa.types.is_floating(schema.field(place).type))
        return cls(positions, floats, len(schema))

    def source(self, record: str) -> str:
        """Return the Python expression of the key of ``record``; it speaks of `NAN` by that name."""
        parts = [self._part(record, place) for place in self.positions]
        return parts[0] if len(parts) == 1 else f"({', '.join(parts)})"

    def _part(self, record: str, place: int) -> str:
        value = record if self.width == 1 else f"{record}[{place}]"
        return f"(NAN if {value} != {value} else {value})" if place in self.floats else value


@dataclass(frozen=True)
class Reducing:
    """A `Reduce` and its table."""

    uid: str
    function: Callable[[Any, Any], Any]
    schema: pa.Schema
    key: KeyColumns
    table: MutableMapping[Key, Any]
    create: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Processing:
    """One input of a `Process` or `CoProcess`, and its context. ``key`` is None without keys."""

    uid: str
    function: Callable[[Any, Context], Any]
    schema: pa.Schema
    key: KeyColumns | None
    context: Context
    side: tuple[tuple[str, pa.Schema], ...]


PreparedStep = Map | FlatMap | Filter | Reducing | Processing


def unhashable(uid: str, key: Any) -> UnhashableKeyError:
    """Return the error of a record whose key no dict can hold."""
    kind = type(key).__name__
    return UnhashableKeyError(
        f"{uid!r} cannot use a {kind} as a key ({key!r:.100}): Python cannot hash it; "
        "key by a number, a string or a binary"
    )
