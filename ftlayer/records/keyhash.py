"""Spark's own hash of key columns, computed on Arrow data.

A replayed row has to reach the partition that ``repartition(n, key)`` put its original in. So the key hash is
what Spark's ``hash()`` gives (MurmurHash3 with seed 42, folded over the columns; a null leaves the running
hash as it is) and the partition is its positive remainder. The kernels are in ``native/``; how Spark hashes
each type was found by comparing with it, and the tests go on comparing.

Not covered: strings with another collation than ``UTF8_BINARY``. Spark hashes those by their collation key,
and an Arrow column does not say that it has one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ftlayer.errors import ConfigError, UnhashableKeyError
from ftlayer.records.ids import I32Array
from ftlayer.records.ipc import is_binary, is_list, is_string
from ftlayer.records.kernels import native

SPARK_SEED = 42

_OTHER_PRIMITIVE = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_signed_integer,
    pa.types.is_float32,
    pa.types.is_float64,
    pa.types.is_decimal128,
    pa.types.is_date32,
)


def spark_hash(columns: Sequence[pa.Array | pa.ChunkedArray], seed: int = SPARK_SEED) -> I32Array:
    """Return what Spark's ``hash(*columns)`` gives for each row: int32[n].

    ``columns``: at least one, all of length n; slices, nulls and any nesting are fine. ``seed``: the hash to begin
    with, an int32; Spark's ``hash`` and its hash partitioning use 42.
    Raises UnhashableKeyError for a type that `check_hashable` refuses, naming the column by its position; ValueError
    for no columns, or columns of different lengths.
    """
    if not columns:
        raise ValueError("spark_hash needs at least one column")
    rows = len(columns[0])
    hashes = np.full(rows, seed, np.int32)
    for position, column in enumerate(columns):
        if len(column) != rows:
            raise ValueError(f"key column {position} has {len(column)} rows, expected {rows}")
        refusal = _refusal(column.type)
        if refusal is not None:
            raise UnhashableKeyError(f"key column {position}: {refusal}")
        start = 0
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            schema, array = chunk.__arrow_c_array__()
            native.hash_column(schema, array, hashes[start : start + len(chunk)])
            start += len(chunk)
    return hashes


def partition_of(hashes: I32Array, partitions: int) -> I32Array:
    """Return where Spark's hash partitioning puts int32[n] ``hashes``: int32[n] in 0..partitions-1."""
    if partitions < 1:
        raise ConfigError(f"the number of partitions must be at least 1, not {partitions}")
    if partitions & (partitions - 1) == 0:
        # The remainder by a power of two, positive for negative hashes too: a tenth of the time that a division takes.
        return np.bitwise_and(hashes, np.int32(partitions - 1))
    return np.mod(hashes, np.int32(partitions))


def check_hashable(schema: pa.Schema, columns: Iterable[str]) -> None:
    """Check that all key ``columns`` exist and have types that both Spark can hash and Arrow can carry.

    ``a.b`` is field ``b`` of struct ``a``, unless a column is called just that. Raises ConfigError for a column that
    does not exist, UnhashableKeyError where its type, or one nested in it, cannot be a key; names both.
    """
    for name in columns:
        refusal = _refusal(_resolve(schema, name)[0].type)
        if refusal is not None:
            raise UnhashableKeyError(f"key column {name!r}: {refusal}")


def key_column(batch: pa.RecordBatch, name: str) -> pa.Array:
    """Return the column called ``name``, where ``a.b`` is field ``b`` of struct ``a`` (null where ``a`` is).

    Raises ConfigError if there is none.
    """
    _, path = _resolve(batch.schema, name)
    column = batch.column(path[0])
    return pc.struct_field(column, path[1:]) if len(path) > 1 else column


def _resolve(schema: pa.Schema, name: str) -> tuple[pa.Field, list[int]]:
    """Find a column by its whole name, else by the path the name spells."""
    first, *rest = [name] if name in schema.names else name.split(".")
    indices = schema.get_all_field_indices(first)
    if len(indices) != 1:
        found = f"{len(indices)} columns are" if indices else "no column is"
        raise ConfigError(f"{found} called {first!r} (key {name!r}); there are: {', '.join(schema.names)}")
    field, path = schema.field(indices[0]), [indices[0]]
    for part in rest:
        index = field.type.get_field_index(part) if pa.types.is_struct(field.type) else -1
        if index < 0:
            raise ConfigError(
                f"key {name!r}: column {field.name!r} of type {field.type} has no field {part!r}"
            )
        field = field.type.field(index)
        path.append(index)
    return field, path


def _refusal(type_: pa.DataType) -> str | None:
    """Say why a type cannot be part of a key, and what to do; None if it can."""
    if any(is_type(type_) for is_type in _OTHER_PRIMITIVE) or is_string(type_) or is_binary(type_):
        return None
    if is_list(type_) or pa.types.is_dictionary(type_):
        return _refusal(type_.value_type)
    if pa.types.is_struct(type_):
        return _struct_refusal(type_)
    if pa.types.is_timestamp(type_) or pa.types.is_duration(type_):
        return None if type_.unit == "us" else f"{type_} is not in Spark's unit; cast it to microseconds"
    if pa.types.is_time64(type_):
        return None if type_.unit == "ns" else f"{type_} is not in Spark's unit; cast it to time64('ns')"
    if pa.types.is_map(type_):
        return (
            f"Spark refuses to hash a map ({type_}), since equal maps can hash differently; use its entries"
        )
    return f"Spark has no type for Arrow's {type_} that can be hashed; cast it to one that has"


def _struct_refusal(type_: pa.StructType) -> str | None:
    fields = [type_.field(i) for i in range(type_.num_fields)]
    if any((field.metadata or {}).get(b"variant") == b"true" for field in fields):
        return "Spark refuses to hash a variant; use a value extracted from it"
    for field in fields:
        refusal = _refusal(field.type)
        if refusal is not None:
            return f"field {field.name!r}: {refusal}"
    return None
