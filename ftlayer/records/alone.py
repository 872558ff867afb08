"""A row by itself: its buffers hold nothing of the rows beside it.

Arrow pads what it writes of a slice with the bytes that follow, and writes dictionaries, the text of views and the
values of unions whole. So a slice says more than its rows do.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ftlayer.records.views import kinds_within, with_views, without_views


def may_share(schema: pa.Schema) -> bool:
    """Whether rows of ``schema`` point into values that other rows may point into too."""
    return any(_shares(kind) for kind in kinds_within(schema.types))


def row_alone(batch: pa.RecordBatch, row: int, *, shares: bool) -> pa.RecordBatch:
    """Return a row of ``batch`` as one that owns all of its memory; ``shares`` is `may_share` of its schema."""
    part = batch.slice(row, 1)
    if not shares:
        return _copied(part)
    plain = without_views(part)
    columns = [_own(column) for column in _copied(plain).columns]
    own = pa.RecordBatch.from_arrays(columns, schema=plain.schema)
    return own if plain is part else with_views(own, batch.schema)


def _copied(part: pa.RecordBatch) -> pa.RecordBatch:
    # A batch that is put together with nothing is copied, and faster than rows are taken.
    return pa.concat_batches([part, part.slice(0, 0)])


def _shares(kind: pa.DataType) -> bool:
    types = pa.types
    is_view = types.is_string_view(kind) or types.is_binary_view(kind)
    return bool(is_view or types.is_dictionary(kind) or types.is_union(kind))


def _own(array: Any) -> Any:
    """Return a copied array whose dictionaries and unions have its own values alone."""
    kind, types = array.type, pa.types
    if not any(_shares(inner) for inner in kinds_within([kind])):
        return array
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _own(array.storage))
    if types.is_dictionary(kind):
        used = pc.unique(array.indices.drop_null())
        indices = pc.index_in(array.indices, value_set=used).cast(kind.index_type)
        return pa.DictionaryArray.from_arrays(
            indices, _own(array.dictionary.take(used)), ordered=kind.ordered
        )
    if types.is_struct(kind):
        fields = [_own(array.field(index)) for index in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
    if types.is_fixed_size_list(kind):
        return _with_values(array, kind, 1)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        return _with_values(array, kind, 2)
    return array.take(pa.array(range(len(array)), pa.int64()))


def _with_values(array: Any, kind: Any, buffers: int) -> Any:
    """Return a list, or a map, with values of its own; ``buffers`` are its own, before those of its values."""
    if pa.types.is_map(kind):
        entries = kind.field(0).type
        values = pa.StructArray.from_arrays([_own(array.keys), _own(array.items)], fields=list(entries))
    else:
        values = _own(array.values)
    return pa.Array.from_buffers(kind, len(array), array.buffers()[:buffers], array.null_count, 0, [values])
