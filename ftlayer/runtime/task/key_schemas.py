"""The types of each operator's keys in a chain: what key groups are computed from."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from ftlayer.errors import InvalidTopologyError
from ftlayer.records.keyhash import key_column
from ftlayer.topology.facts import keys_of
from ftlayer.topology.operators import CoProcess, Operator


def key_schemas(operators: Sequence[Operator], inputs: Sequence[pa.Schema]) -> dict[str, pa.Schema]:
    """Return the key columns of each operator that has a key, by uid, in the key's order.

    ``inputs`` are the schemas of what the first operator takes. A `CoProcess` has those of its first input;
    `InvalidTopologyError` if the second one's have other types, since equal keys would have different groups.
    """
    found: dict[str, pa.Schema] = {}
    for operator in operators:
        schemas = [
            _key_schema(columns, schema)
            for columns, schema in zip(keys_of(operator), inputs, strict=True)
            if columns
        ]
        if isinstance(operator, CoProcess) and schemas and _types(schemas[0]) != _types(schemas[-1]):
            raise InvalidTopologyError(
                f"{operator.uid!r}: the key of input 0 is ({_text(schemas[0])}) and that of input 1 is "
                f"({_text(schemas[-1])}); equal keys of different types have different key groups: convert one of "
                "them in a map before"
            )
        if schemas:
            found[operator.uid] = schemas[0]
        inputs = (operator.schema,)
    return found


def _key_schema(columns: tuple[str, ...], schema: pa.Schema) -> pa.Schema:
    nothing = pa.RecordBatch.from_pylist([], schema=schema)
    return pa.schema([(name, key_column(nothing, name).type) for name in columns])


def _types(schema: pa.Schema) -> list[pa.DataType]:
    return [field.type for field in schema]


def _text(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
