"""Digests of rows: the same however rows are cut and laid out, another one for other rows."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.records.ipc import DIGEST_BYTES, digest_of

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
    for a, b in combinations(range(len(values)), 2):
        swapped = [*values]
        swapped[a], swapped[b] = values[b], values[a]
        assert (digest_of(batch(kind, swapped)) == digest_of(whole)) is (values[a] == values[b])


def test_long_batches_and_order() -> None:
    numbers = list(range(100_000))
    digest = digest_of(batch(pa.int64(), numbers))
    assert len(digest) == DIGEST_BYTES
    assert digest != digest_of(batch(pa.int64(), [*numbers[:-2], numbers[-1], numbers[-2]]))
    assert digest_of(batch(pa.int64(), [0])) != digest_of(batch(pa.int64(), [0, 0]))


def bits_of(octets: bytes, kind: pa.DataType, flipped: tuple[int, ...]) -> pa.RecordBatch:
    changed = np.frombuffer(octets, np.uint8).copy()
    for bit in flipped:
        changed[bit // 8] ^= 1 << bit % 8
    size = len(octets) * 8 // kind.bit_width
    return pa.record_batch([pa.Array.from_buffers(kind, size, [None, pa.py_buffer(changed)])], ["v"])


@pytest.mark.parametrize(
    "kind", [pa.float64(), pa.int16(), pa.decimal128(38, 2), pa.binary(3), pa.timestamp("us")]
)
def test_every_change_of_one_bit_or_two_is_another_digest(kind: pa.DataType) -> None:
    octets = bytes(range(7, 7 + 3 * kind.bit_width // 8))
    bits = range(len(octets) * 8)
    changes = [(), *((bit,) for bit in bits), *combinations(bits, 2)]
    found = {digest_of(bits_of(octets, kind, flipped)) for flipped in changes}
    assert len(found) == len(changes)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=st.integers(2, 100_000), seed=st.integers(0, 2**32 - 1))
def test_bits_that_flip_far_from_each_other_do_not_cancel(data: st.DataObject, size: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).random(size)
    bit = st.integers(0, size * 64 - 1) | st.integers(1, size).map(lambda row: row * 64 - 1)
    flipped = data.draw(st.sets(bit, min_size=1, max_size=6))
    octets = numbers.tobytes()
    assert digest_of(bits_of(octets, pa.float64(), ())) != digest_of(
        bits_of(octets, pa.float64(), tuple(flipped))
    )


def test_values_that_are_negated_or_only_look_alike() -> None:
    doubles = pa.float64()
    for some, others in [
        ([1.5, 2.0, 3.25, 7.0], [-1.5, -2.0, -3.25, -7.0]),
        ([1.0, -1.0], [-1.0, 1.0]),
        ([0.0, 0.0], [-0.0, -0.0]),
    ]:
        assert digest_of(batch(doubles, some)) != digest_of(batch(doubles, others))
    nan = pa.array([float("nan")] * 2)
    other = pa.array(np.array([0x7FF8000000000001] * 2, np.uint64)).view(doubles)
    assert digest_of(pa.record_batch([nan], ["v"])) != digest_of(pa.record_batch([other], ["v"]))
    texts = pa.list_(pa.string())
    assert digest_of(batch(texts, [["ab"], []])) != digest_of(batch(texts, [["a", "b"], []]))
    assert digest_of(batch(texts, [None])) != digest_of(batch(texts, [[None]]))


def test_what_is_no_value_does_not_count() -> None:
    """Neither what is below a null, or behind the last bit, nor how text is kept."""
    below = [pa.array([1, hidden, 3], mask=np.array([False, True, False])) for hidden in (2, 99)]
    assert digest_of(pa.record_batch([below[0]], ["v"])) == digest_of(pa.record_batch([below[1]], ["v"]))
    bits = [
        pa.Array.from_buffers(pa.bool_(), 3, [None, pa.py_buffer(bytes([octet]))]) for octet in (0b101, 0xFD)
    ]
    assert digest_of(pa.record_batch([bits[0]], ["v"])) == digest_of(pa.record_batch([bits[1]], ["v"]))
    nulls = [
        pa.Array.from_buffers(pa.int8(), 2, [pa.py_buffer(bytes([octet])), pa.py_buffer(b"\1\2")])
        for octet in (0b01, 0xFD)
    ]
    assert digest_of(pa.record_batch([nulls[0]], ["v"])) == digest_of(pa.record_batch([nulls[1]], ["v"]))
    words = ["a", None, "b" * 20, "a"]
    plain = pa.array(words)
    forms = [
        plain,
        *(
            pa.array(words, kind)
            for kind in (pa.large_string(), pa.string_view(), pa.binary(), pa.binary_view())
        ),
        plain.dictionary_encode(),
        pa.DictionaryArray.from_arrays([2, 1, 0, 2], pa.array(["b" * 20, None, "a"], pa.string_view())),
        pc.run_end_encode(plain),
    ]
    assert len({digest_of(pa.record_batch([form], ["v"])) for form in forms}) == 1
    structs = [pa.StructArray.from_arrays([form], ["s"]) for form in forms[:3]]
    assert len({digest_of(pa.record_batch([form], ["v"])) for form in structs}) == 1
    lists = [pa.array([words, [], None], kind(pa.string())) for kind in (pa.list_, pa.large_list)]
    assert len({digest_of(pa.record_batch([form], ["v"])) for form in lists}) == 1
    codes = pa.array([0, 1], pa.int8())
    unions = [pa.UnionArray.from_sparse(codes, [pa.array([1, 2]), pa.array([word] * 2)]) for word in "ab"]
    assert digest_of(pa.record_batch([unions[0]], ["v"])) != digest_of(pa.record_batch([unions[1]], ["v"]))
