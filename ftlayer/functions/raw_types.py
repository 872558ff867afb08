"""Arrow types whose every value Python can hold."""

from __future__ import annotations

import pyarrow as pa


def raw_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same layout whose every value Python can hold."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind) or pa.types.is_time64(kind):
        return pa.int64()
    if pa.types.is_date32(kind):
        return pa.int32()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(raw_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(raw_type(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(raw_type(kind.key_type), raw_type(kind.item_type))
    return kind
