"""Msgpack from elsewhere: counted before it becomes objects."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer import _native
from ftlayer.transport.frames import BASE_COST, unpack

values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(allow_nan=False),
        st.text(st.characters(codec="utf-8")),
        st.binary(max_size=300),
        st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=20)),
    ),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(st.characters(codec="utf-8")), inner)),
)


def cost(value: Any) -> int:
    if isinstance(value, dict):
        return 8 + sum(1 + cost(item) for item in value.values())
    if type(value) is list:
        return 8 + sum(map(cost, value))
    return 1


@settings(max_examples=100, deadline=None)
@given(values)
def test_a_value_comes_back_and_costs_what_it_is_made_of(value: Any) -> None:
    data = msgpack.packb(value)
    assert unpack(data) == value
    assert _native.msgpack_cost(data, 1 << 40) == cost(value)


@pytest.mark.parametrize("size", [16, 256, 65_535, 65_536, 70_000])
def test_every_length_is_followed(size: int) -> None:
    for value in ("x" * size, b"x" * size, [1] * size, {str(index): [] for index in range(size)}):
        data = msgpack.packb([value, 1])
        assert _native.msgpack_cost(data, 1 << 40) == cost([value, 1])
        assert unpack(data) == [value, 1]


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        unpack(data)
    except ValueError:
        return


@given(values, st.data())
def test_no_beginning_of_a_value_is_one(value: Any, data: st.DataObject) -> None:
    packed = msgpack.packb(value)
    with pytest.raises(ValueError, match="not msgpack"):
        unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\x00\x80\x00\x00" + b"\x80" * (8 << 20),
        b"\xdd\x00\x20\x00\x00" + b"\x91\xc0" * (2 << 20),
        b"\xdd\x01\x00\x00\x00" + b"\xc0" * (16 << 20),
    ],
    ids=["empty maps", "short arrays", "nils"],
)
def test_small_things_in_great_numbers_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="too many values"):
        unpack(data)


def test_what_a_call_with_many_records_has_is_read() -> None:
    keys = [index.to_bytes(24, "big") for index in range(1_500_000)]
    assert len(keys) > BASE_COST
    assert unpack(msgpack.packb(keys)) == keys


def test_a_claim_that_is_not_kept_ends_the_count() -> None:
    for data in (b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff\x01", b"\xc6\xff\xff\xff\xff", b"\xdd\xff"):
        with pytest.raises(ValueError, match="not msgpack"):
            unpack(data)


def test_what_is_nested_too_deep_is_refused() -> None:
    assert unpack(b"\x91" * 60 + b"\xc0")
    with pytest.raises(ValueError, match="nested"):
        unpack(b"\x91" * 100_000 + b"\xc0")
