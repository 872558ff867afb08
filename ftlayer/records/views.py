"""Columns of string views and binary views, whose rows point into text that they may share.

Rows may show the same text any number of times, and Arrow copies none of it before the rows are looked at. Written by
themselves, a few rows take along all the text of their batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

_PLAIN = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
_IDS = {kind.id for kind in _PLAIN}
# A view has 16 bytes; the length is the first 4.
_WORDS = 4


def check_views(batch: pa.RecordBatch, most: int) -> None:
    """Raise ValueError if all views of a batch together show more than ``most`` bytes.

    The batch has passed ``validate()``; that its views stay within their text need not be known yet.
    """
    if not _has_views(batch.schema):
        return
    shown = sum(_shown(column) for column in batch.columns)
    if shown > most:
        raise ValueError(
            f"string or binary views that show {shown} bytes, {most} are the most: rows share their text; copy it "
            "(cast the column to string or binary)"
        )


def check_view_types(schema: pa.Schema) -> None:
    """Raise ValueError for columns that cannot be taken apart: run-end encoded ones, views in unions and such."""
    for kind in kinds_within(schema.types):
        if pa.types.is_run_end_encoded(kind):
            raise ValueError("a run-end encoded column; send its rows one by one")
        if not _is_taken_apart(kind) and any(inner.id in _IDS for inner in kinds_within([kind])):
            raise ValueError(f"string or binary views within {kind}; send them as string or binary")


def without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch as one of plain strings and binary, whose rows share nothing; the same where it has no views."""
    if not _has_views(batch.schema):
        return batch
    columns = [_cast(column, _plain(column.type)) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def with_views(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows of what `without_views` made of a batch, as rows of its own schema."""
    columns = [_cast(column, kind) for column, kind in zip(batch.columns, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    # Some types cannot even be cast to themselves.
    return column if column.type == kind else column.cast(kind)


# ---------------------------------------------------------------- types


def _has_views(schema: pa.Schema) -> bool:
    # Nearly all have none, and are told by this alone.
    kinds = schema.types
    return any(kind.id in _IDS or (_may_have_inner(kind) and _views_within(kind)) for kind in kinds)


def _may_have_inner(kind: pa.DataType) -> bool:
    return bool(kind.num_fields) or isinstance(kind, pa.DictionaryType | pa.BaseExtensionType)


@functools.lru_cache(maxsize=256)
def _views_within(kind: pa.DataType) -> bool:
    return any(inner.id in _IDS for inner in kinds_within([kind]))


def kinds_within(kinds: Iterable[pa.DataType]) -> Iterator[pa.DataType]:
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        yield kind
        if isinstance(kind, pa.BaseExtensionType):
            waiting.append(kind.storage_type)
        elif pa.types.is_dictionary(kind):
            waiting.append(kind.value_type)
        waiting += [kind.field(index).type for index in range(kind.num_fields)]


def _is_taken_apart(kind: pa.DataType) -> bool:
    """Whether `_plain` looks into a type. A dictionary stays whole whichever of its rows are taken."""
    types = pa.types
    return (
        kind.id in _IDS
        or types.is_struct(kind)
        or types.is_map(kind)
        or types.is_list(kind)
        or types.is_large_list(kind)
        or types.is_fixed_size_list(kind)
        or types.is_dictionary(kind)
    )


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return a type of the same values without views."""
    types = pa.types
    if kind in _PLAIN:
        return _PLAIN[kind]
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field), kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(_plain(field.type))


# ---------------------------------------------------------------- values


def _shown(column: pa.Array) -> int:
    """Return how many bytes the views in a column show, those of rows that are null included."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _shown(column.storage)
    if kind.id in _IDS:
        words = np.frombuffer(column.buffers()[1], np.int32)
        lengths = words[::_WORDS][column.offset : column.offset + len(column)]
        return int(np.maximum(lengths, 0).sum(dtype=np.int64))
    return sum(_shown(child) for child in _children(column))


def _children(column: pa.Array) -> list[pa.Array]:
    kind, types = column.type, pa.types
    if types.is_dictionary(kind):
        return [column.dictionary]
    if types.is_map(kind):
        return [column.keys, column.items]
    if types.is_struct(kind) or types.is_union(kind):
        return [column.field(index) for index in range(kind.num_fields)]
    return [column.values] if kind.num_fields else []
