"""Records between Arrow and Python: what cannot be converted is found, row by row, and never bent to fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.functions.steps import Record


def records_of(batch: pa.RecordBatch) -> Sequence[Record | Exception]:
    """Return the rows as dicts; in the place of one that Python cannot hold, why.

    Spark takes strings that are not UTF-8, and dates past the year 9999.
    """
    try:
        records: list[Record] = batch.to_pylist()
    except (ValueError, OverflowError, pa.ArrowException):
        return [_record(batch.slice(row, 1)) for row in range(batch.num_rows)]
    return records


def _record(row: pa.RecordBatch) -> Record | Exception:
    record: Record = {}
    for name, column in zip(row.schema.names, row.columns, strict=True):
        try:
            record[name] = column[0].as_py()
        except (ValueError, OverflowError, pa.ArrowException) as error:
            return ValueError(f"column {name!r} of the record cannot be read in Python: {text_of(error)}")
    return record


def to_batch(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Convert dicts; a column that a dict lacks is null, one that the schema lacks is left out.

    Raises `TypeError`, `ValueError` or an Arrow error for what does not fit, where Arrow's own conversion
    takes some silently: strings and lists for rows, fractions for integers, nulls where there may be none.
    """
    for kind in set(map(type, rows)):
        if not issubclass(kind, Mapping):
            raise TypeError(f"a {kind.__name__} is not a dict")
    columns = []
    for field in schema:
        name = field.name
        try:
            values = list(map(itemgetter(name), rows))
        except KeyError:
            values = [row.get(name) for row in rows]
        if pa.types.is_integer(field.type):
            check_whole(values, name)
        column = pa.array(values, field.type)
        if not field.nullable and column.null_count:
            raise ValueError(f"column {name!r} is null and may not be")
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def check_whole(values: Sequence[Any], name: str) -> None:
    """Raise `ValueError` for a fraction in an integer column, which Arrow would cut off."""
    if any(issubclass(kind, float | Decimal | np.floating) for kind in set(map(type, values))):
        for value in values:
            if isinstance(value, float | Decimal | np.floating) and value != int(value):
                raise ValueError(f"column {name!r} is an integer, not {value!r}")


def concat(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Return the batches as one; raises `pa.ArrowInvalid` where that would pass Arrow's 2 GiB a column."""
    return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema=schema)


def text_of(error: BaseException) -> str:
    """Return an exception's text, whatever its class does to hide it."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - a user's exception may fail to describe itself
        return f"(its text cannot be had: {type(broken).__name__})"
