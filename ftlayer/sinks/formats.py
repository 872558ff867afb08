"""Record batches as Parquet, CSV or JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BytesIO
from typing import Any, BinaryIO

import pyarrow as pa

from ftlayer.errors import ConfigError
from ftlayer.records.ipc import copied, retyped
from ftlayer.sinks.at_least_once import as_json

ROW_GROUP_ROWS = 1 << 17
"""Small batches are put together to Parquet row groups of at least so many rows."""

Encode = Callable[[Iterable[pa.RecordBatch], pa.Schema, BinaryIO, dict[str, Any]], None]


@dataclass(frozen=True)
class Format:
    """How rows become a file; ``encode`` writes a whole one, ``together`` so many rows at a time, or a batch."""

    suffix: str
    encode: Encode
    together: int = 1


def format_named(name: str, options: dict[str, Any]) -> Format:
    """Return the format; `ConfigError` if there is none of this name, or if it does not take the options."""
    found = _FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(f"format: expected one of {', '.join(_FORMATS)}, got {name!r}")
    try:
        found.encode([], pa.schema([("a", pa.int64())]), BytesIO(), options)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"{', '.join(options)}: not an option of {name}: {error}") from error
    return found


def _parquet(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, file: BinaryIO, options: dict[str, Any]
) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(file, schema, **options) as writer:
        gathered: list[pa.RecordBatch] = []
        for batch in batches:
            # Parquet has milliseconds, which before version 21 Arrow lets overflow.
            gathered.append(_checked(batch, "s"))
            if sum(one.num_rows for one in gathered) >= ROW_GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(gathered, schema))
                gathered = []
        if gathered:
            writer.write_table(pa.Table.from_batches(gathered, schema))


def _checked(batch: pa.RecordBatch, lacks: str = "") -> pa.RecordBatch:
    """Return a batch whose texts are some (other ones are written, and no reader takes them), and whose times fit.

    ``lacks``: timestamps in ``"s"`` are written in milliseconds, times of day in ``"ns"`` in microseconds.
    """

    def held(kind: pa.DataType) -> pa.DataType | None:
        if pa.types.is_dictionary(kind):
            found = retyped(kind.value_type, held)
            return None if found == kind.value_type else found
        if lacks == "s" and pa.types.is_timestamp(kind) and kind.unit == "s":
            return pa.timestamp("ms", kind.tz)
        return pa.time64("us") if lacks == "ns" and kind == pa.time64("ns") else None

    def look(rows: pa.RecordBatch) -> pa.RecordBatch:
        rows.validate(full=True)
        for column in rows.columns:
            if (kind := retyped(column.type, held)) != column.type:
                column.cast(kind)
        return rows

    try:
        return look(batch)
    except pa.ArrowInvalid:
        return look(copied(batch))


def _csv(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, file: BinaryIO, options: dict[str, Any]
) -> None:
    from pyarrow import csv

    with csv.CSVWriter(file, schema, write_options=csv.WriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(_checked(batch))


def _json(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, file: BinaryIO, options: dict[str, Any]
) -> None:
    if options:
        raise TypeError("JSON lines have no options")
    for batch in batches:
        # Python's times of day have microseconds.
        batch = _checked(batch, "ns")
        rows = batch.to_pylist(maps_as_pydicts="lossy")
        lines = (json.dumps(_plain(row), ensure_ascii=False, default=as_json) for row in rows)
        file.write("".join(f"{line}\n" for line in lines).encode())


def _plain(value: Any) -> Any:
    """Return what JSON can carry, written as Spark writes and reads it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


_FORMATS = {
    "parquet": Format(".parquet", _parquet, ROW_GROUP_ROWS),
    "csv": Format(".csv", _csv),
    "json": Format(".json", _json),
}
