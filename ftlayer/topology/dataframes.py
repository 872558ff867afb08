"""DataFrames as sources: of pandas, Arrow, and any library that hands its columns out through Arrow's C interface."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ftlayer.errors import ConfigError

PARTITION_ROWS = 100_000
"""Rows of a partition. Order is kept within one."""

MAX_PARTITIONS = 64

_BATCH_ROWS = 16_384

_UNSIGNED = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.int64(),
    pa.float16(): pa.float32(),
    pa.date64(): pa.date32(),
}


def partitioned(table: pa.Table, rows: int = PARTITION_ROWS) -> tuple[Callable[[], Iterable[Any]], ...]:
    """Deal a table's rows out, by their number alone: positions outlive a change of parallelism."""
    parts = min(MAX_PARTITIONS, max(1, -(-table.num_rows // rows)))
    size = max(1, -(-table.num_rows // parts))
    return tuple(_IpcPartition.of(table.slice(part * size, size)) for part in range(parts))


@dataclass(frozen=True)
class _IpcPartition:
    """Rows as an Arrow IPC stream: a slice of a table would take all of it along."""

    data: bytes

    @classmethod
    def of(cls, table: pa.Table) -> _IpcPartition:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=_BATCH_ROWS)
        return cls(sink.getvalue().to_pybytes())

    def __call__(self) -> Iterator[pa.RecordBatch]:
        with pa.ipc.open_stream(self.data) as reader:
            yield from reader


# ---------------------------------------------------------------- to Arrow


def table_of(given: Any) -> pa.Table | None:
    """Return the rows of a DataFrame, or of a list of dicts, read now; None for anything else.

    Raises `ConfigError` for one that Arrow cannot read.
    """
    if isinstance(given, type | pa.Array | pa.ChunkedArray) or type(given).__name__ == "Series":
        # One column has no name: these are iterables of values.
        return None
    if isinstance(given, pa.Table):
        return given
    if isinstance(given, pa.RecordBatch):
        return pa.Table.from_batches([given])
    if _is_pandas(given):
        return _from_pandas(given)
    if isinstance(given, list) and given and all(isinstance(record, dict) for record in given):
        return _read("a list of dicts", _from_dicts, given)
    if getattr(given, "isStreaming", False) is True:
        raise ConfigError(
            "source: a streaming DataFrame is read by Spark alone, batch by batch: wrap it with FTLayer.source(…), or "
            "give the topology a source that it reads itself, such as a reader"
        )
    if hasattr(given, "__arrow_c_stream__") or hasattr(given, "__arrow_c_array__"):
        return _read(f"a {type(given).__name__}", pa.table, given)
    return None


def _from_dicts(given: list[dict[str, Any]]) -> pa.Table:
    """Read the columns that any of the dicts has; Arrow itself looks at the first one."""
    names = dict.fromkeys(name for record in given for name in record)
    return pa.table({name: [record.get(name) for record in given] for name in names})


def _is_pandas(given: Any) -> bool:
    return any(
        kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas"
        for kind in type(given).__mro__
    )


def _from_pandas(frame: Any) -> pa.Table:
    names = [name for name in frame.index.names if name is not None]
    if names:
        raise ConfigError(
            f"source: the index of this DataFrame is named {', '.join(map(repr, names))}, and only columns are read: "
            "reset_index() makes columns of it, reset_index(drop=True) leaves it out"
        )
    if not all(isinstance(name, str) for name in frame.columns):
        raise ConfigError(
            f"source: names of columns are texts, and this DataFrame has {list(frame.columns)!r}"
        )
    return _read("a pandas.DataFrame", pa.Table.from_pandas, frame, preserve_index=False)


def _read(what: str, read: Callable[..., pa.Table], given: Any, **options: Any) -> pa.Table:
    try:
        return read(given, **options)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"source: {what} that Arrow cannot read: {'; '.join(map(str, error.args))}"
        ) from error


# ---------------------------------------------------------------- types


def with_known_types(table: pa.Table) -> pa.Table:
    """Return a table with the types that Spark has for its columns; `ConfigError` for values that do not fit them."""
    columns = []
    for field, column in zip(table.schema, table.columns, strict=True):
        wanted = known_type(field.type)
        try:
            columns.append(column if wanted == field.type else _cast(column, wanted))
        except pa.ArrowException as error:
            raise ConfigError(
                f"source: column {field.name!r} is {field.type}, and its values do not fit {wanted} ({error}): "
                "convert it, or give schema=…"
            ) from error
    fields = [pa.field(name, column.type) for name, column in zip(table.column_names, columns, strict=True)]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def _cast(column: pa.ChunkedArray, wanted: pa.DataType) -> pa.ChunkedArray:
    if not pa.types.is_dictionary(column.type):
        return column.cast(wanted)
    # Arrow does not decode a dictionary of string views in one step.
    return pa.chunked_array([one.dictionary.cast(wanted).take(one.indices) for one in column.chunks], wanted)


def known_type(given: pa.DataType) -> pa.DataType:
    """Return the type that Spark reads a column of this type as; the same for one that it has none for."""
    types = pa.types
    if given in _UNSIGNED:
        return _UNSIGNED[given]
    if types.is_large_string(given) or types.is_string_view(given):
        return pa.string()
    if types.is_large_binary(given) or types.is_binary_view(given) or types.is_fixed_size_binary(given):
        return pa.binary()
    if types.is_dictionary(given):
        return known_type(given.value_type)
    if types.is_timestamp(given):
        return pa.timestamp("us", None if given.tz is None else "UTC")
    if types.is_struct(given):
        return pa.struct([field.with_type(known_type(field.type)) for field in given])
    if types.is_map(given):
        return pa.map_(known_type(given.key_type), known_type(given.item_type))
    if types.is_list(given) or types.is_large_list(given) or types.is_fixed_size_list(given):
        return pa.list_(pa.field("item", known_type(given.value_type), given.value_field.nullable))
    return given
