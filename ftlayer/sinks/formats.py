"""Record batches as Parquet, CSV or JSON lines."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from io import BytesIO
from typing import Any, BinaryIO

import pyarrow as pa

from ftlayer.errors import ConfigError

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
            batch.validate(full=True)  # Texts that are none are written, and no reader takes them.
            for column in batch.columns:
                if pa.types.is_timestamp(column.type) and column.type.unit == "s":
                    # Parquet has milliseconds; before version 21 Arrow lets those overflow.
                    column.cast(pa.timestamp("ms", column.type.tz))
            gathered.append(batch)
            if sum(one.num_rows for one in gathered) >= ROW_GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(gathered, schema))
                gathered = []
        if gathered:
            writer.write_table(pa.Table.from_batches(gathered, schema))


def _csv(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, file: BinaryIO, options: dict[str, Any]
) -> None:
    from pyarrow import csv

    with csv.CSVWriter(file, schema, write_options=csv.WriteOptions(**options)) as writer:
        for batch in batches:
            batch.validate(full=True)
            writer.write_batch(batch)


def _json(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, file: BinaryIO, options: dict[str, Any]
) -> None:
    if options:
        raise TypeError("JSON lines have no options")
    for batch in batches:
        lines = (
            json.dumps(_plain(row), ensure_ascii=False) for row in batch.to_pylist(maps_as_pydicts="lossy")
        )
        file.write("".join(f"{line}\n" for line in lines).encode())


def _plain(value: Any) -> Any:
    """Return what JSON can carry, written as Spark writes and reads it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, (Decimal, timedelta)):
        return str(value)
    return value


_FORMATS = {
    "parquet": Format(".parquet", _parquet, ROW_GROUP_ROWS),
    "csv": Format(".csv", _csv),
    "json": Format(".json", _json),
}
