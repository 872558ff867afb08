"""A row of Arrow from its columns as JSON has them."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from ftlayer.checks import shown
from ftlayer.errors import ConfigError
from ftlayer.monitor.row_json.arrays import array_of
from ftlayer.monitor.row_json.types import UnfitError
from ftlayer.monitor.row_json.values import reader_of
from ftlayer.records.arrow_types import is_string


def row_of_json(values: object, schema: pa.Schema) -> pa.RecordBatch:
    """Return one row of ``schema`` from its columns as JSON has them.

    Raises `ConfigError` naming the column that is missing, unknown, null and may not be, or whose value does not fit.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"expected an object with the columns of the record, got {shown(values)}")
    for name in values:
        _check_named(str(name), schema)
    columns = []
    for field in schema:
        if field.name not in values:
            raise ConfigError(f"column {field.name!r} is missing: write null for no value")
        try:
            columns.append(_column(values[field.name], field))
        except UnfitError as error:
            raise ConfigError(f"column {field.name!r} ({field.type}): {error}") from None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def value_of_text(text: str, name: str, schema: pa.Schema) -> Any:
    """Return what a person means by ``text`` as a value of a column: itself for a string, else as JSON has it.

    What is no JSON is text too, so that times and numbers of decimals need no quotes. `ConfigError` for a column that
    is none.
    """
    _check_named(name, schema)
    if is_string(schema.field(name).type):
        return text
    try:
        return json.loads(text, parse_float=str if pa.types.is_decimal(schema.field(name).type) else None)
    except ValueError:
        return text


def _check_named(name: str, schema: pa.Schema) -> None:
    if name not in schema.names:
        near = difflib.get_close_matches(name, schema.names, n=1)
        meant = f": did you mean {near[0]!r}?" if near else f"; it has {', '.join(schema.names)}"
        raise ConfigError(f"column {name!r} is none of the record's{meant}")


def _column(value: Any, field: pa.Field) -> pa.Array:
    read = reader_of(field.type)
    found = None if value is None else read(value)
    if found is None and not field.nullable:
        raise UnfitError("it may not be null")
    try:
        return array_of([found], field.type)
    except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
        raise UnfitError(f"{shown(value)} does not fit: {error}") from None
