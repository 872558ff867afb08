"""Key selectors: which columns of a source decide where its records go."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from ftlayer.errors import ConfigError
from ftlayer.records.ids import I32Array
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
