"""The loop over per-record functions in C, where records, results and functions are such that it can run them.

It reads records from Arrow columns and writes results to Arrow columns, one after the other. `fuse` of
`ftlayer.functions.chains.fused` is its reference, and does what it cannot.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import pyarrow as pa

from ftlayer.errors import StateSerializationError
from ftlayer.functions.chains.fused import has_run
from ftlayer.functions.chains.prepared import KeyColumns, PreparedStep, Processing, Reducing, unhashable
from ftlayer.functions.conversion import DICTS, VALUES, Form, column_of, python_values
from ftlayer.functions.plain import PLAIN_CODES, array_of, codes_of
from ftlayer.functions.steps import Filter, FlatMap
from ftlayer.functions.undo.dict_tables import finds_as_dict, logged_lookup
from ftlayer.functions.undo.log import UndoLog
from ftlayer.functions.undo.tables import UndoValues
from ftlayer.functions.values import NAN
from ftlayer.records.kernels import native

_READ = frozenset({*PLAIN_CODES, pa.float32(), pa.large_string(), pa.large_binary()})

Objects = tuple[list[Any] | None, ...]
"""For each column None, or its values where the C extension cannot read them."""

Driven = tuple[list[Any], int, bytes, bool]
"""What `ChainDriver.run` returns: columns, or records; how many; int32 counts a row; whether they are columns."""


def not_plain(schema: pa.Schema) -> bool:
    """Whether columns of these types cannot all be read by the C extension."""
    return any(field.type not in _READ for field in schema)


def objects_in(batch: pa.RecordBatch) -> Objects:
    """Return the values of columns that the C extension cannot read. Raises one of `UNREADABLE`."""
    return tuple(None if column.type in _READ else python_values(column) for column in batch.columns)


def batch_of(columns: Sequence[Any], rows: int, schema: pa.Schema, *, lax: bool) -> pa.RecordBatch:
    """Return the columns of results as a batch. Raises what `to_batch` raises for objects that do not fit."""
    made = [array_of(field.type, rows, column) for field, column in zip(schema, columns, strict=True)]
    arrays = [
        column_of(column, field, lax=lax) if isinstance(column, list) else column
        for field, column in zip(schema, made, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def records_from(columns: Sequence[Any], rows: int, schema: pa.Schema, form: Form) -> list[Any]:
    """Return results as the functions have returned them: plain values come out of Arrow as they went in."""
    made = [array_of(field.type, rows, column) for field, column in zip(schema, columns, strict=True)]
    values = [column if isinstance(column, list) else column.to_pylist() for column in made]
    if form is DICTS:
        return [dict(zip(schema.names, record, strict=True)) for record in zip(*values, strict=True)]
    return values[0] if len(values) == 1 else list(zip(*values, strict=True))


def driver_of(
    steps: Sequence[PreparedStep],
    schema: pa.Schema,
    form: Form,
    log: UndoLog | None,
    *,
    keeps: bool = False,
    lax: bool = False,
) -> native.ChainDriver | None:
    """Return what runs ``steps`` over record batches, whose results are of ``schema``; None if it cannot.

    ``form`` and ``log`` are as for `fuse`. Records may be values or dicts, and a `Reducing` needs values. ``keeps``:
    aggregates of the first `Reducing` may lie beside their keys until `write_back`; the driver alone changes its table.
    ``lax`` as for `to_batch`.
    """
    codes = codes_of(schema)
    are_dicts = form is DICTS
    if not (are_dicts or form is VALUES) or not steps or not codes:
        return None
    driven = [known for step in steps if (known := _driven(step, form, keeps)) is not None]
    if len(driven) < len(steps):
        return None
    logs = any(isinstance(step, Reducing) and isinstance(step.table, UndoValues) for step in steps)
    return native.ChainDriver(
        tuple(driven),
        codes,
        bytes(field.nullable for field in schema),
        tuple(sys.intern(name) for name in schema.names) if are_dicts else None,
        () if log is None else (StateSerializationError,),
        log.entries if log is not None and logs else None,
        NAN,
        lax,
    )


def _driven(step: PreparedStep, form: Form, keeps: bool) -> tuple[Any, ...] | None:
    match step:
        case Processing():
            return None
        case Reducing():
            return _reduce(step, keeps) if form is VALUES else None
        case Filter():
            return "filter", step.function, has_run
        case FlatMap():
            return "flat_map", step.function, form.results
        case _:
            return "map", step.function


def _reduce(step: Reducing, keeps: bool) -> tuple[Any, ...] | None:
    table: Any = step.table
    lookup = None
    if isinstance(table, UndoValues):
        lookup, table = logged_lookup(table), table.table
    if not finds_as_dict(table) or any(column.fields for column in step.key.columns):
        return None
    return (
        "reduce",
        step.function,
        _positions(step.key),
        bytes(column.is_float for column in step.key.columns),
        table,
        lookup,
        step.create,
        step.own,
        _refusing(step.uid),
        keeps,
    )


def _positions(key: KeyColumns) -> tuple[int | None, ...]:
    """Return where the parts of the key lie in a record; None: it is the record."""
    return tuple(None if key.width == 1 else column.position for column in key.columns)


def _refusing(uid: str) -> Callable[[Any], NoReturn]:
    def refuse(key: Any) -> NoReturn:
        raise unhashable(uid, key) from None

    return refuse
