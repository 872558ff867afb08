"""Records of plain values, between Arrow and Python by the C extension: several times as fast as by Arrow's own way.

Plain are ``None`` and values of exactly the types bool, int, float, str and bytes, in columns of these kinds, and
tuples of them. What is not plain is for the caller to convert: nothing is bent here to fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pyarrow as pa

from ftlayer.records.kernels import native

PLAIN_CODES = {
    pa.bool_(): b"b",
    pa.int8(): b"c",
    pa.int16(): b"s",
    pa.int32(): b"i",
    pa.int64(): b"l",
    pa.float64(): b"g",
    pa.string(): b"u",
    pa.binary(): b"z",
}
"""The C extension's letters for the types of plain columns."""
OTHER_CODE = b"O"
"""The letter of all others: their values stay Python objects."""


def read_plain(batch: pa.RecordBatch) -> list[Any] | None:
    """Return the rows as tuples in column order, those of one column as bare values; None if a type is not plain.

    Raises ValueError for text that is not UTF-8.
    """
    schema, array = batch.__arrow_c_array__()
    return native.read_records(schema, array, 0, batch.num_rows)


def plain_columns(rows: Sequence[Any], schema: pa.Schema) -> list[pa.Array | list[Any]] | None:
    """Convert tuples, or the bare values of a single column.

    Returns:
        A column a field: as an Arrow array, or as a list of values where the field's type is not plain. None if a
        value of a plain column is not plain, out of range, or null where it may not be; or if no column is plain.
    """
    codes = codes_of(schema)
    if not codes.strip(OTHER_CODE) or not isinstance(rows, list | tuple):
        return None
    columns = native.write_records(rows, codes, bytes(field.nullable for field in schema))
    if columns is None:
        return None
    return [array_of(field.type, len(rows), column) for field, column in zip(schema, columns, strict=True)]


def codes_of(schema: pa.Schema) -> bytes:
    """Return the C extension's letter for each column."""
    return b"".join(PLAIN_CODES.get(field.type, OTHER_CODE) for field in schema)


def array_of(
    kind: pa.DataType, rows: int, column: tuple[bytes | None, bytes | list[Any], bytes | None, int]
) -> pa.Array | list[Any]:
    """Return what the C extension has written of a column as an array; a list as it is."""
    validity, values, text, nulls = column
    if isinstance(values, list):
        return values
    buffers = [None if validity is None else pa.py_buffer(validity), pa.py_buffer(values)]
    if text is not None:
        buffers.append(pa.py_buffer(text))
    return cast(pa.Array, pa.Array.from_buffers(kind, rows, buffers, nulls))
