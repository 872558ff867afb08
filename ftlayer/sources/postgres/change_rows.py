"""Changes of a table as record batches."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import pyarrow as pa

from ftlayer.errors import ConfigError
from ftlayer.records import beside
from ftlayer.sources.postgres.columns import to_column
from ftlayer.sources.postgres.transactions import ChangedRow

OPERATION, LSN, SEQUENCE, XID, TIME = "_operation", "_lsn", "_sequence", "_transaction", "_commit_time"
BEFORE, UNCHANGED = "_before", "_unchanged"

_NAMES = (OPERATION, LSN, SEQUENCE, XID, TIME, BEFORE, UNCHANGED)
_PLACES = attrgetter("operation", "lsn", "place", "xid", "time_us", "columns", "before", "unchanged")


def schema_of_changes(columns: Sequence[pa.Field]) -> pa.Schema:
    """Return the schema of a table's changes. Raises `ConfigError` for a column with a name of ours."""
    taken = [field.name for field in columns if field.name in _NAMES]
    if taken:
        raise ConfigError(f"columns: {taken[0]!r} is also a name of the change's own; leave that column out")
    return pa.schema(
        [
            pa.field(OPERATION, pa.string()),
            pa.field(LSN, pa.int64()),
            pa.field(SEQUENCE, pa.int64()),
            pa.field(XID, pa.int64()),
            pa.field(TIME, pa.timestamp("us", "UTC")),
            *columns,
            pa.field(BEFORE, pa.struct(list(columns))),
            pa.field(UNCHANGED, pa.list_(pa.string())),
        ]
    )


def change_batch(rows: Sequence[ChangedRow], schema: pa.Schema) -> pa.RecordBatch:
    """Return changes as rows of their schema. Raises `SourceError` for a value that its column cannot have."""
    operations, lsns, places, xids, times, columns, before, unchanged = zip(*map(_PLACES, rows), strict=True)
    fields = list(schema)[5:-2]
    after = [to_column(texts, field) for texts, field in zip(zip(*columns, strict=True), fields, strict=True)]
    arrays = [
        pa.array(operations, pa.string()),
        pa.array(lsns, pa.int64()),
        pa.array(places, pa.int64()),
        pa.array(xids, pa.int64()),
        beside.times(times, "us", "PostgreSQL", "the time of a commit"),
        *after,
        _struct(before, fields),
        _name_lists(unchanged),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _struct(rows: Sequence[tuple[str | None, ...] | None], fields: list[pa.Field]) -> pa.Array:
    kind = pa.struct(fields)
    if not any(row is not None for row in rows):
        return pa.nulls(len(rows), kind)
    nothing = (None,) * len(fields)
    texts = zip(*(nothing if row is None else row for row in rows), strict=True)
    arrays = [to_column(column, field) for column, field in zip(texts, fields, strict=True)]
    return pa.StructArray.from_arrays(
        arrays, fields=fields, mask=pa.array([row is None for row in rows], pa.bool_())
    )


def _name_lists(names: Sequence[tuple[str, ...]]) -> pa.Array:
    kind = pa.list_(pa.string())
    if not any(names):
        return pa.nulls(len(names), kind)
    return pa.array([list(each) or None for each in names], kind)
