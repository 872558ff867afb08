"""Arrow arrays of values that were read from JSON."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pyarrow as pa

from ftlayer.monitor.row_json.types import UnfitError
from ftlayer.records.arrow_types import is_list, is_string


def array_of(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return what `reader_of` gave as an array; nested ones by parts, since ``pa.array`` cannot make all types."""
    nulls = pa.array([value is None for value in values], pa.bool_())
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, array_of(values, kind.storage_type))
    if pa.types.is_dictionary(kind):
        places = pa.array(
            [None if value is None else place for place, value in enumerate(values)], kind.index_type
        )
        return pa.DictionaryArray.from_arrays(places, array_of(values, kind.value_type), ordered=kind.ordered)
    if pa.types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        parts = [
            array_of([None if value is None else value[field.name] for value in values], field.type)
            for field in fields
        ]
        return (
            pa.StructArray.from_arrays(parts, fields=fields, mask=nulls) if parts else pa.array(values, kind)
        )
    if pa.types.is_map(kind):
        entries = [entry for value in values for entry in value or ()]
        keys, items = (
            array_of([entry[i] for entry in entries], part)
            for i, part in enumerate((kind.key_type, kind.item_type))
        )
        return pa.MapArray.from_arrays(_offsets(values, pa.int32()), keys, items, type=kind)
    if is_list(kind):
        return _list_array(values, kind, nulls)
    if is_string(kind):
        # Arrow would refuse what is not UTF-8; Spark's strings need not be.
        raw = [value.encode() if isinstance(value, str) else value for value in values]
        return pa.array(raw, _bytes_type(kind)).view(kind)
    return pa.array(values, kind)


def _list_array(values: list[Any], kind: Any, nulls: pa.Array) -> pa.Array:
    items = [item for value in values for item in value or ()]
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        items = [item for value in values for item in ([None] * size if value is None else value)]
        if len(items) != size * len(values):
            raise UnfitError(f"expected arrays of {size}")
        return pa.FixedSizeListArray.from_arrays(array_of(items, kind.value_type), type=kind, mask=nulls)
    inner = array_of(items, kind.value_type)
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(_offsets(values, pa.int64()), inner, type=kind)
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(_offsets(values, pa.int32()), inner, type=kind)
    return _array_of_views(values, kind, inner, nulls)


def _array_of_views(values: list[Any], kind: Any, inner: pa.Array, nulls: pa.Array) -> pa.Array:
    is_large = pa.types.is_large_list_view(kind)
    whole = pa.int64() if is_large else pa.int32()
    starts = pa.array(_starts(values)[:-1], whole)
    sizes = pa.array([len(value or ()) for value in values], whole)
    return (pa.LargeListViewArray if is_large else pa.ListViewArray).from_arrays(
        starts, sizes, inner, type=kind, mask=nulls
    )


def _offsets(values: list[Any], whole: pa.DataType) -> pa.Array:
    """Return where each list begins; null for a list that is."""
    starts = _starts(values)
    return pa.array(
        [None if value is None else start for start, value in zip(starts, values, strict=False)]
        + starts[-1:],
        whole,
    )


def _starts(values: list[Any]) -> list[int]:
    return list(accumulate((len(value or ()) for value in values), initial=0))


def _bytes_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    return pa.binary_view() if pa.types.is_string_view(kind) else pa.binary()
