"""Whether a text is in a record: in one of its text or binary values, however deep."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa


def is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_binary(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_binary(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_binary_view(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists. A map is none here."""
    return bool(
        pa.types.is_list(kind)
        or pa.types.is_large_list(kind)
        or pa.types.is_fixed_size_list(kind)
        or pa.types.is_list_view(kind)
        or pa.types.is_large_list_view(kind)
    )


def says(batch: pa.RecordBatch, sought: bytes) -> bool:
    """Whether a text or binary value in ``batch`` has ``sought`` in it. Unions are not looked into."""
    return any(sought in value for column in batch.columns for value in _values(column))


def _values(column: pa.Array) -> Iterator[bytes]:
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        yield from _values(column.storage)
    elif pa.types.is_dictionary(kind):
        yield from _values(column.dictionary_decode())
    elif pa.types.is_struct(kind):
        for part in column.flatten():
            yield from _values(part)
    elif pa.types.is_map(kind):
        # Arrow gives keys and values of the whole array, whatever part of it this is.
        first, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        yield from _values(column.keys.slice(first, end - first))
        yield from _values(column.items.slice(first, end - first))
    elif pa.types.is_nested(kind) and not pa.types.is_union(kind):
        yield from _values(column.flatten())
    elif is_string(kind):
        # As bytes: what is stored need not be UTF-8.
        yield from (value.as_py() for value in column.cast(pa.large_binary()).drop_null())
    elif is_binary(kind):
        yield from (value.as_py() for value in column.drop_null())
