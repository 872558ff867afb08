"""Tracked batches: the user's columns, and beside each row what ftlayer knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.errors import CodecError
from ftlayer.records.ids import I32Array, I64Array, RootSeed, U64Array, initial_record_ids, root_ids

TRACKED_COLUMNS = ("source_record_id", "record_id", "key_hash", "attempt", "origin")
"""Names that a user's column may not have."""

MAX_SELECTORS = 32
"""At most this many distinct key selectors a source: constant hashes must not claim any amount of memory."""


@dataclass(frozen=True, slots=True)
class RootRun:
    """Root ids of consecutive ordinals of one seed: what `root_ids` was called with, save for how many."""

    key: bytes
    first_ordinal: int
    shard: int
    shards: int

    def ids(self, n: int) -> U64Array:
        """Derive the first ``n`` ids of the run: uint64[n]."""
        return root_ids(self.key, self.first_ordinal, n, shard=self.shard, shards=self.shards)


class TrackedBatch:
    """Rows of a user's batch with their ids, key hashes and attempts. Not to be changed once made.

    Nothing is copied that comes in contiguous and of the right type; arrays of Arrow data are read-only.

    Attributes:
        payload: the user's columns alone.
        source_record_id: uint64[n], the root of each row; never 0.
        record_id: uint64[n], the row itself; never 0.
        key_hash: int32[n], or int32[n, k] when the source has k distinct key selectors.
        attempt: int32[n], 0 or more: how many attempts of the record came before this one.
        origin: uint64[n], the first root id that the record ever had; never 0.
        root_run: where the roots are known to be those of a `RootRun`, that run; else None.
    """

    __slots__ = ("attempt", "key_hash", "origin", "payload", "record_id", "root_run", "source_record_id")

    def __init__(
        self,
        payload: pa.RecordBatch,
        source_record_id: U64Array,
        record_id: U64Array,
        *,
        key_hash: I32Array | None = None,
        attempt: int | I32Array = 0,
        origin: U64Array | None = None,
    ) -> None:
        """Put a user's batch and its tracked columns together.

        Args:
            payload: the user's columns.
            source_record_id, record_id, key_hash, attempt, origin: as the attributes. No key hash means 0
                (that of `ConstantKeySelector`), one attempt is for all rows, no origin means the root.

        Raises:
            CodecError: a tracked column of another length or type, an id 0, a negative attempt, or a user's
                column with a reserved name; names the column.
        """
        check_reserved_names(payload.schema)
        n = payload.num_rows
        self.payload = payload
        self.source_record_id = _id_column("source_record_id", source_record_id, n)
        self.record_id = _id_column("record_id", record_id, n)
        self.key_hash = np.zeros(n, np.int32) if key_hash is None else _key_hashes(key_hash, n)
        self.attempt = _attempts(attempt, n)
        self.origin = self.source_record_id if origin is None else _id_column("origin", origin, n)
        self.root_run: RootRun | None = None

    @classmethod
    def of_source(
        cls,
        payload: pa.RecordBatch,
        seed: RootSeed | bytes,
        first_ordinal: int,
        *,
        shard: int = 0,
        shards: int = 1,
        key_hash: I32Array | None = None,
    ) -> TrackedBatch:
        """Track the rows of a source as roots at their first attempt, with ids derived from their names.

        The record ids are `initial_record_ids`. Arguments and errors: see `root_ids` and the class.
        """
        key = seed.key if isinstance(seed, RootSeed) else seed
        run = RootRun(key, first_ordinal, shard, shards)
        roots = run.ids(payload.num_rows)
        batch = cls(payload, roots, initial_record_ids(roots), key_hash=key_hash)
        batch.root_run = run
        return batch

    @classmethod
    def from_arrow(cls, batch: pa.RecordBatch) -> TrackedBatch:
        """Take a record batch that has all five tracked columns, as `to_arrow` makes it, in any order.

        Raises CodecError for a tracked column that is missing, has nulls or has another type.
        """
        columns = {name: _only_column(batch, name) for name in TRACKED_COLUMNS}
        return cls(
            batch.drop_columns(list(TRACKED_COLUMNS)),
            numbers_of("source_record_id", columns["source_record_id"], pa.uint64()),
            numbers_of("record_id", columns["record_id"], pa.uint64()),
            key_hash=key_hashes_of(columns["key_hash"]),
            attempt=numbers_of("attempt", columns["attempt"], pa.int32()),
            origin=numbers_of("origin", columns["origin"], pa.uint64()),
        )

    def to_arrow(self) -> pa.RecordBatch:
        """Return the user's columns followed by the five tracked ones."""
        tracked = [
            pa.array(self.source_record_id),
            pa.array(self.record_id),
            key_hash_column(self.key_hash),
            pa.array(self.attempt),
            pa.array(self.origin),
        ]
        schema = self.payload.schema
        for name, column in zip(TRACKED_COLUMNS, tracked, strict=True):
            schema = schema.append(pa.field(name, column.type, nullable=False))
        return pa.RecordBatch.from_arrays([*self.payload.columns, *tracked], schema=schema)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.payload.num_rows)

    @property
    def selectors(self) -> int:
        """Number of key hashes that each row has."""
        return 1 if self.key_hash.ndim == 1 else self.key_hash.shape[1]

    def hashes_of(self, selector: int) -> I32Array:
        """Return the key hashes by the selector at this index: int32[n]; CodecError if there is none."""
        if not 0 <= selector < self.selectors:
            raise CodecError(f"there is no key hash {selector}: rows have {self.selectors}")
        return self.key_hash if self.key_hash.ndim == 1 else np.ascontiguousarray(self.key_hash[:, selector])

    def take(self, indices: I64Array) -> TrackedBatch:
        """Return the rows at ``indices`` (int64[m]), in that order; CodecError for one out of range."""
        indices = np.asarray(indices, np.int64)
        if len(indices) and not (indices.min() >= 0 and indices.max() < self.num_rows):
            raise CodecError(f"row indices must lie in 0..{self.num_rows - 1}")
        return self._rows(self.payload.take(pa.array(indices)), indices)

    def filter(self, mask: npt.NDArray[np.bool_]) -> TrackedBatch:
        """Return the rows where ``mask`` (bool[n]) is true. Raises CodecError if it has another length."""
        mask = np.asarray(mask, np.bool_)
        if mask.shape != (self.num_rows,):
            raise CodecError(f"the mask has shape {mask.shape}, expected ({self.num_rows},)")
        return self._rows(self.payload.filter(pa.array(mask)), mask)

    def slice(self, start: int, stop: int) -> TrackedBatch:
        """Return the rows from ``start`` up to ``stop`` (clipped to those that exist), without copying."""
        rows = slice(*slice(max(start, 0), max(stop, 0)).indices(self.num_rows))
        length = max(rows.stop - rows.start, 0)
        part = self._rows(self.payload.slice(rows.start, length), rows)
        if self.root_run is not None:
            run = self.root_run
            part.root_run = RootRun(run.key, run.first_ordinal + rows.start, run.shard, run.shards)
        return part

    def _rows(self, payload: pa.RecordBatch, rows: Any) -> TrackedBatch:
        """Select rows by what NumPy takes as an index; ``payload`` has just those."""
        batch = TrackedBatch.__new__(TrackedBatch)
        batch.payload = payload
        batch.source_record_id = self.source_record_id[rows]
        batch.record_id = self.record_id[rows]
        batch.key_hash = self.key_hash[rows]
        batch.attempt = self.attempt[rows]
        same = self.origin is self.source_record_id
        batch.origin = batch.source_record_id if same else self.origin[rows]
        batch.root_run = None
        return batch


def check_reserved_names(schema: pa.Schema) -> None:
    """Raise CodecError, naming the column, if a user's column has the name of a tracked one."""
    for name in TRACKED_COLUMNS:
        if name in schema.names:
            raise CodecError(f"column name {name!r} is reserved for ftlayer's own column; rename yours")


def numbers_of(name: str, column: pa.Array, type_: pa.DataType) -> npt.NDArray[Any]:
    """View a column of fixed-width numbers as NumPy; CodecError, naming it, for another type or nulls."""
    if column.type != type_ or column.null_count:
        nulls = f" with {column.null_count} nulls" if column.null_count else ""
        raise CodecError(f"column {name!r} must be {type_} without nulls, not {column.type}{nulls}")
    view: npt.NDArray[Any] = column.to_numpy(zero_copy_only=True)
    return view


def key_hashes_of(column: pa.Array) -> I32Array:
    """View a ``key_hash`` column as int32[n] or int32[n, k]; CodecError for another type or nulls."""
    if not pa.types.is_fixed_size_list(column.type):
        return numbers_of("key_hash", column, pa.int32())
    if column.null_count or column.type.list_size < 1:
        raise CodecError(f"column 'key_hash' must be int32 or lists of them without nulls, not {column.type}")
    return numbers_of("key_hash", column.flatten(), pa.int32()).reshape(len(column), column.type.list_size)


def key_hash_column(key_hash: I32Array) -> pa.Array:
    """Return the Arrow column of int32[n] or int32[n, k] key hashes."""
    if key_hash.ndim == 1:
        return pa.array(key_hash)
    return pa.FixedSizeListArray.from_arrays(pa.array(key_hash.reshape(-1)), key_hash.shape[1])


def _only_column(batch: pa.RecordBatch, name: str) -> pa.Array:
    indices = batch.schema.get_all_field_indices(name)
    if len(indices) != 1:
        found = f"has it {len(indices)} times" if indices else f"has only {', '.join(batch.schema.names)}"
        raise CodecError(f"a tracked batch needs one column {name!r}; this one {found}")
    return batch.column(indices[0])


def _id_column(name: str, values: U64Array, n: int) -> U64Array:
    values = _numbers(name, values, np.dtype(np.uint64), (n,))
    if not values.all():
        raise CodecError(f"column {name!r} has id 0 in row {int(np.argmin(values))}; 0 is never an id")
    return values


def _key_hashes(values: I32Array, n: int) -> I32Array:
    selectors = values.shape[1:] if values.ndim == 2 else ()
    values = _numbers("key_hash", values, np.dtype(np.int32), (n, *selectors))
    if selectors and not 1 <= selectors[0] <= MAX_SELECTORS:
        raise CodecError(f"column 'key_hash' must have 1 to {MAX_SELECTORS} hashes a row, not {selectors[0]}")
    return values.reshape(n) if selectors == (1,) else values


def _attempts(values: int | I32Array, n: int) -> I32Array:
    if not isinstance(values, np.ndarray):
        values = np.full(n, values, np.int32)
    values = _numbers("attempt", values, np.dtype(np.int32), (n,))
    if n and values.min() < 0:
        raise CodecError(f"column 'attempt' has a negative number in row {int(np.argmin(values))}")
    return values


def _numbers(
    name: str, values: npt.NDArray[Any], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    if values.dtype != dtype or values.shape != shape:
        raise CodecError(
            f"column {name!r} must be {dtype} of shape {shape}, not {values.dtype} of shape {values.shape}"
        )
    return np.ascontiguousarray(values)
