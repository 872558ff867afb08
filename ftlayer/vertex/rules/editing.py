"""`EditAndRequeue`: dead letters with other payloads."""

from __future__ import annotations

import pyarrow as pa

from ftlayer.errors import MalformedRequestError


def as_stored(payload: pa.RecordBatch, schema: pa.Schema, where: str) -> pa.RecordBatch:
    """Return a new payload under the schema that its letter has.

    Raises `MalformedRequestError` that names the column, if it has another type, is missing, is one too many, or has a
    null that the schema does not take.
    """
    for index, field in enumerate(schema):
        if index >= payload.num_columns or payload.schema.field(index).name != field.name:
            raise MalformedRequestError(
                f"{where}: column {index} has to be {field.name!r} ({field.type}): give the letter's columns, "
                f"{', '.join(schema.names)}, in their order"
            )
        given = payload.schema.field(index).type
        if given != field.type:
            raise MalformedRequestError(
                f"{where}: column {field.name!r} is {given}, the letter's is {field.type}"
            )
        if not field.nullable and payload.column(index).null_count:
            raise MalformedRequestError(
                f"{where}: column {field.name!r} is null, and the letter's takes no null"
            )
    if payload.num_columns > len(schema):
        extra = payload.schema.field(len(schema)).name
        raise MalformedRequestError(f"{where}: the letter has no column {extra!r}")
    return pa.RecordBatch.from_arrays(payload.columns, schema=schema)
