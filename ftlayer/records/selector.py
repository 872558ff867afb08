"""Key selectors: which columns of a source decide where its records go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from ftlayer.errors import ConfigError
from ftlayer.records.ids import I32Array
from ftlayer.records.keyhash import check_hashable, key_column, spark_hash


class Selector(Protocol):
    """What a source needs to know of a key: its hash, and whether a schema has one.

    Selectors are values: two that select the same key are equal and have the same ``hash()``.
    """

    def hash(self, batch: pa.RecordBatch) -> I32Array:
        """Return the key's hash for each row of the user's columns: int32[n]."""

    def check(self, schema: pa.Schema) -> None:
        """Raise ConfigError or UnhashableKeyError, naming the column, unless the schema has such a key."""


@dataclass(frozen=True)
class KeySelector:
    """The key is one or more columns, in order; its hash is Spark's.

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
            raise ConfigError("a key needs at least one column; for none, use ConstantKeySelector")

    def hash(self, batch: pa.RecordBatch) -> I32Array:
        """Return ``hash(*columns)`` for each row, as Spark computes it: int32[n]."""
        return spark_hash([key_column(batch, name) for name in self.columns])

    def check(self, schema: pa.Schema) -> None:
        """Raise ConfigError for a column that does not exist, UnhashableKeyError for one of a wrong type."""
        check_hashable(schema, self.columns)


@dataclass(frozen=True)
class ConstantKeySelector:
    """All records have the same key: what a source without a key uses. The hash is 0."""

    def hash(self, batch: pa.RecordBatch) -> I32Array:
        """Return int32[n] zeros."""
        return np.zeros(batch.num_rows, np.int32)

    def check(self, schema: pa.Schema) -> None:
        """Accept every schema."""


def distinct_selectors(wanted: Iterable[Selector]) -> tuple[tuple[Selector, ...], tuple[int, ...]]:
    """Find which hashes a source has to store for its keyed outputs.

    Args:
        wanted: the selector of each output.

    Returns:
        The distinct selectors in order of first appearance, and each output's index among them.
    """
    index: dict[Selector, int] = {}
    positions = tuple(index.setdefault(selector, len(index)) for selector in wanted)
    return tuple(index), positions


def hash_keys(batch: pa.RecordBatch, selectors: Sequence[Selector]) -> I32Array:
    """Hash the keys of a batch by each selector.

    Returns:
        int32[n] for one selector, int32[n, k] for k of them, as `TrackedBatch` stores it.
    """
    if not selectors:
        raise ConfigError("a source stores at least one key hash; for none, use ConstantKeySelector")
    if len(selectors) == 1:
        return selectors[0].hash(batch)
    return np.stack([selector.hash(batch) for selector in selectors], axis=1)
