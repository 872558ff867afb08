"""Which records are followed as traces, and what their traces and spans are called.

All of it follows from a record's origin, its first root, and from the root of an attempt: each process decides alike,
and nothing travels with a record for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.errors import ConfigError
from ftlayer.records.ids import I32Array, U64Array, mix64
from ftlayer.records.keyhash import check_hashable, key_column, spark_hash


@dataclass(frozen=True)
class KeySelector:
    """The key is one or more columns, in order; its hash is Spark's. Equal selectors have the same ``hash()``.

    Attributes:
        columns: names; ``a.b`` is field ``b`` of struct ``a``, unless a column is called just that. Case
            matters, as it does in Arrow.
    """

    columns: tuple[str, ...]

    def __post_init__(self) -> None:
        given: object = self.columns
        if not isinstance(given, tuple) or not all(isinstance(name, str) for name in given):
            raise ConfigError(f"a key is a tuple of column names, not {given!r}")
        if not given:
            raise ConfigError("a key needs at least one column")

    def hash(self, batch: pa.RecordBatch) -> I32Array:
        """Return ``hash(*columns)`` for each row, as Spark computes it: int32[n]."""
        return spark_hash([key_column(batch, name) for name in self.columns])

    def check(self, schema: pa.Schema) -> None:
        """Raise ConfigError for a column that does not exist, UnhashableKeyError for one of a wrong type."""
        check_hashable(schema, self.columns)


_ALL = 1 << 64
_RECORD, _ATTEMPT = 0x7265636F7264, 0x617474656D7074


class Sampler:
    """Picks a share of all records by their origins."""

    def __init__(self, ratio: float) -> None:
        """``ratio`` is above 0 and at most 1; `ConfigError` otherwise."""
        if not 0 < ratio <= 1:
            raise ConfigError(f"the share of records that are traced: expected above 0 to 1, got {ratio}")
        self._below = round(ratio * _ALL)

    def mask(self, origins: U64Array) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return which records are followed: bool[n] for uint64[n]."""
        if self._below >= _ALL:
            return np.ones(len(origins), np.bool_)
        # As OpenTelemetry's TraceIdRatioBased picks by the low half of a trace's id.
        return mix64(np.ascontiguousarray(origins)) < np.uint64(self._below)


def trace_of(origin: int) -> int:
    """Return the id of a record's trace, 128 bits: its origin, and what it is picked by."""
    return origin << 64 | mixed(origin)


def record_span(origin: int) -> int:
    """Return the id of a trace's first span: the record at its source."""
    return mixed(origin ^ _RECORD) or 1


def attempt_span(root: int) -> int:
    return mixed(root ^ _ATTEMPT) or 1


def span_within(parent: int, *parts: int) -> int:
    """Return the id of a span below another one; ``parts`` tell it from the others there."""
    value = parent
    for part in parts:
        value = mixed(value ^ part % _ALL)
    return value or 1


def mixed(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % _ALL
    value = (value ^ value >> 27) * 0x94D049BB133111EB % _ALL
    return value ^ value >> 31
