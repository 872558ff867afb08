"""Digests of rows: the same however rows are cut and laid out, another one for other rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.records.digests import DIGEST_BYTES, digest_of

TYPES: dict[str, tuple[pa.DataType, st.SearchStrategy[Any]]] = {
    "int": (pa.int64(), st.integers(-(2**40), 2**40)),
    "short": (pa.int16(), st.integers(-100, 100)),
    "bool": (pa.bool_(), st.booleans()),
    "text": (pa.string(), st.text(max_size=12)),
    "large": (pa.large_string(), st.text(max_size=12)),
    "view": (pa.string_view(), st.text(max_size=20)),
    "bytes": (pa.binary(), st.binary(max_size=12)),
    "list": (pa.list_(pa.string()), st.lists(st.text(max_size=3), max_size=3)),
    "struct": (
        pa.struct([("a", pa.int32()), ("b", pa.string())]),
        st.fixed_dictionaries({"a": st.none() | st.integers(0, 9), "b": st.text(max_size=3)}),
    ),
    "map": (
        pa.map_(pa.string(), pa.int64()),
        st.lists(st.tuples(st.text(max_size=3), st.integers(0, 9)), max_size=3),
    ),
    "dictionary": (pa.dictionary(pa.int32(), pa.string()), st.sampled_from("abc")),
    "decimal": (pa.decimal128(9, 2), st.decimals(-99, 99, places=2)),
    "null": (pa.null(), st.none()),
}


def batch(kind: pa.DataType, values: list[Any]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, kind)], names=["v"])


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_it_depends_on_values_and_not_on_their_layout(name: str, data: st.DataObject) -> None:
    kind, one = TYPES[name]
    values = data.draw(st.lists(st.none() | one, max_size=20))
    before, behind = data.draw(st.lists(one, max_size=4)), data.draw(st.lists(one, max_size=4))
    whole = batch(kind, values)
    sliced = batch(kind, before + values + behind).slice(len(before), len(values))
    assert digest_of(sliced) == digest_of(whole)
    cut = data.draw(st.integers(0, len(values)))
    pieces = pa.Table.from_batches([whole.slice(0, cut), whole.slice(cut)]).combine_chunks().to_batches()
    if pieces:
        assert digest_of(pieces[0]) == digest_of(whole)
    others = data.draw(st.lists(st.none() | one, max_size=20))
    if others != values:
        assert digest_of(batch(kind, others)) != digest_of(whole)


def test_long_batches_and_order() -> None:
    numbers = list(range(100_000))
    digest = digest_of(batch(pa.int64(), numbers))
    assert len(digest) == DIGEST_BYTES
    assert digest != digest_of(batch(pa.int64(), [*numbers[:-2], numbers[-1], numbers[-2]]))
    assert digest_of(batch(pa.int64(), [0])) != digest_of(batch(pa.int64(), [0, 0]))
