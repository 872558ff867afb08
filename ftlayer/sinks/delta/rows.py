"""Rows of a Delta table as its log describes them: values of partitions, statistics of columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ftlayer.errors import SinkError

MOST_COLUMNS = 32
"""Columns that have statistics, as Delta's default is."""

MOST_CHARACTERS = 32
"""Texts longer than this are no bounds."""

MILLISECOND = timedelta(milliseconds=1)

PartitionValues = tuple[tuple[str, str | None], ...]


def check_partitions(schema: pa.Schema, partition_by: tuple[str, ...], place: str) -> None:
    """Raise `SinkError` unless rows can be partitioned by these columns."""
    for name in partition_by:
        if name not in schema.names:
            raise SinkError(
                f"{place}: partition column {name!r} is not in the rows ({', '.join(schema.names)})"
            )
        if not _makes_partitions(schema.field(name).type):
            raise SinkError(
                f"{place}: partition column {name!r} is {schema.field(name).type}; partition by a text, an integer, a "
                "truth value, a date, a timestamp or a decimal"
            )
    if partition_by and len(partition_by) == len(schema.names):
        raise SinkError(f"{place}: all columns are partition columns; a file would have none")


def partitions(rows: pa.Table, partition_by: tuple[str, ...]) -> Iterator[tuple[PartitionValues, pa.Table]]:
    """Return the rows of each partition, without the columns that say which it is."""
    if not partition_by:
        yield (), rows
        return
    keys = list(zip(*(rows.column(name).to_pylist() for name in partition_by), strict=True))
    found: dict[tuple[Any, ...], list[int]] = {}
    for number, key in enumerate(keys):
        found.setdefault(key, []).append(number)
    others = rows.drop_columns(list(partition_by))
    for key, numbers in found.items():
        values = tuple(zip(partition_by, map(_partition_value, key), strict=True))
        yield values, others.take(pa.array(numbers, pa.int64()))


def statistics(rows: pa.Table) -> str:
    """Return the statistics of a file, as the log has them: how many rows, and bounds that readers skip files by."""
    lowest: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for field in list(rows.schema)[:MOST_COLUMNS]:
        if pa.types.is_nested(field.type):
            continue
        column = rows.column(field.name)
        nulls[field.name] = column.null_count
        if column.null_count == len(column) or not _has_bounds(column):
            continue
        try:
            bounds = pc.min_max(column).as_py()
        except (OverflowError, ValueError):  # A time that Python has none for.
            continue
        low, high = _bound(bounds["min"], up=False), _bound(bounds["max"], up=True)
        if low is not None and high is not None:
            lowest[field.name], highest[field.name] = low, high
    return json.dumps(
        {"numRecords": rows.num_rows, "minValues": lowest, "maxValues": highest, "nullCount": nulls}
    )


def _has_bounds(column: pa.ChunkedArray) -> bool:
    if pa.types.is_floating(column.type):
        # Spark takes NaN for the greatest number, and JSON has none.
        return bool(pc.all(pc.is_finite(column)).as_py())
    kind = column.type
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_string(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
    )


def _bound(value: Any, *, up: bool) -> Any:
    """Return a bound as JSON has it; None: it has none."""
    if isinstance(value, datetime):
        # In milliseconds, as others write it; what is finer is within the bounds.
        cut = value.replace(microsecond=value.microsecond // 1_000 * 1_000)
        if up and cut != value:
            if cut > cut.max.replace(tzinfo=cut.tzinfo) - MILLISECOND:
                return None
            cut += MILLISECOND
        text = cut.replace(tzinfo=None).isoformat(timespec="milliseconds")
        return text if cut.tzinfo is None else f"{text}Z"
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str):
        return value if len(value) <= MOST_CHARACTERS else None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _makes_partitions(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
        or pa.types.is_decimal(kind)
    )


def _partition_value(value: Any) -> str | None:
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        at = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
        return at.isoformat(" ", timespec="microseconds")
    if isinstance(value, date):
        return value.isoformat()
    return str(value)
