"""What is packed comes back with its type."""

from __future__ import annotations

import datetime as dt
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.state.snapshots.serializer import Serializer, split_array, unpack

zones = st.sampled_from(
    [
        None,
        dt.UTC,
        dt.timezone(dt.timedelta(hours=2)),
        dt.timezone(dt.timedelta(0), "X"),
        ZoneInfo("Europe/Rome"),
    ]
)
hashable = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(st.characters()),
    st.binary(max_size=8),
    st.complex_numbers(),
    st.decimals(allow_nan=True).filter(lambda d: not d.is_snan()),
    st.uuids(),
    st.dates(),
    st.timedeltas(),
    st.builds(lambda t, z, f: t.replace(tzinfo=z, fold=f), st.datetimes(), zones, st.sampled_from([0, 1])),
    st.builds(lambda t, f: t.replace(fold=f), st.times(), st.sampled_from([0, 1])),
    st.sampled_from(
        [np.int8(-3), np.float32(1.5), np.datetime64(7, "ms"), np.bool_(True), np.str_("x"), np.str_("")]
    ),
)
values = st.recursive(
    hashable | st.builds(bytearray, st.binary(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.sets(hashable, max_size=3),
        st.frozensets(hashable, max_size=3),
        st.dictionaries(hashable | st.tuples(hashable, hashable), inner, max_size=3),
    ),
    max_leaves=8,
)


def shown(value: Any) -> str:
    """Return a text that tells apart whatever differs in type or value; sets in any order."""
    kind = type(value).__name__
    if isinstance(value, list | tuple):
        return f"{kind}[{','.join(map(shown, value))}]"
    if isinstance(value, set | frozenset):
        return f"{kind}[{','.join(sorted(map(shown, value)))}]"
    if isinstance(value, dict):
        return f"{kind}[{','.join(f'{shown(k)}:{shown(v)}' for k, v in value.items())}]"
    return f"{kind} {value!r} {getattr(value, 'fold', '')}"


@settings(max_examples=200, deadline=None)
@given(value=values)
def test_values_come_back_as_they_went(value: Any) -> None:
    assert shown(unpack(Serializer().pack(value))) == shown(value)


@settings(max_examples=150, deadline=None)
@given(value=values)
def test_the_extension_writes_what_the_serializer_writes(value: Any) -> None:
    serializer = Serializer()
    assert serializer.pack(value) == serializer.pack_any(value)


@pytest.mark.parametrize("bits", [5, 7, 8, 15, 16, 31, 32, 63, 64])
def test_numbers_at_the_ends_of_their_sizes_are_written_as_msgpack_writes_them(bits: int) -> None:
    serializer = Serializer()
    for number in (1 << bits, -(1 << bits)):
        for near in (number - 1, number, number + 1):
            assert serializer.pack(near) == serializer.pack_any(near)


@pytest.mark.parametrize("size", [0, 1, 3, 12, 13, 15, 16, 31, 32, 250, 255, 256, 65_530, 65_535, 65_536])
def test_texts_and_containers_at_the_ends_of_their_sizes_are_written_as_msgpack_writes_them(
    size: int,
) -> None:
    serializer = Serializer()
    of_size: list[Any] = [bytes(size), "x" * size, "é" * size, "\ud800" * size, "😀" * size, [None] * size]
    of_size += [tuple([None] * size), dict.fromkeys(range(size))]
    for value in of_size:
        assert serializer.pack(value) == serializer.pack_any(value)
        assert serializer.pack((value, [(value,)])) == serializer.pack_any((value, [(value,)]))


@settings(max_examples=60, deadline=None)
@given(items=st.lists(values, max_size=8), most=st.integers(0, 60), draw=st.randoms())
def test_some_values_are_a_packed_list_up_to_its_size(items: list[Any], most: int, draw: Any) -> None:
    serializer = Serializer()
    places = draw.sample(range(len(items)), len(items))
    packed, count = serializer.pack_some(items, np.array(places, np.int64), most)
    parts = [serializer.pack(items[place]) for place in places[:count]]
    assert split_array(packed) == parts
    header = len(packed) - sum(map(len, parts))
    assert count == len(items) or len(packed) >= most
    assert count <= 1 or header + sum(map(len, parts[:-1])) < most


def test_what_cannot_be_packed_is_raised_and_places_are_checked() -> None:
    class Unwritable:
        def __reduce__(self) -> Any:
            raise ValueError("not this one")

    serializer = Serializer()
    with pytest.raises(ValueError, match="not this one"):
        serializer.pack_some([1, Unwritable()], np.array([0, 1]), 100)
    for place in (-1, 2):
        with pytest.raises(IndexError, match="places"):
            serializer.pack_some([1, 2], np.array([place]), 100)


Point = namedtuple("Point", "x y")


@dataclass
class Account:
    balance: int


@pytest.mark.parametrize(
    "value",
    [
        Point(1, 2),
        OrderedDict(a=1),
        Counter("aab"),
        defaultdict(list, a=[1]),
        Account(5),
        [Account(5)],
        range(3),
    ],
)
def test_other_objects_are_pickled(value: Any) -> None:
    found = unpack(Serializer().pack(value))
    # The test's module cannot be imported by its name, so its classes travel by value.
    assert type(found).__name__ == type(value).__name__
    assert repr(found) == repr(value)


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_come_back_writable_and_in_their_order(order: Any) -> None:
    array = np.array([[1, 2, 3], [4, 5, 6]], dtype=">i4", order=order)
    found = unpack(Serializer().pack(array))
    assert found.dtype == array.dtype
    assert found.flags.c_contiguous == array.flags.c_contiguous
    assert (found == array).all()
    found[0, 0] = 9


def test_arrow_values_come_back() -> None:
    batch = pa.record_batch({"a": [1, None], "b": ["x", "y"]})
    assert unpack(Serializer().pack([batch]))[0].equals(batch)
    assert unpack(Serializer().pack(pa.scalar(5, pa.int16()))) == pa.scalar(5, pa.int16())


def test_what_is_nested_very_deep_comes_back() -> None:
    value: Any = 1
    for _ in range(300):
        value = [value]
    found = unpack(Serializer().pack(value))
    depth = 0
    while isinstance(found, list):
        found, depth = found[0], depth + 1
    assert depth == 300


def test_an_extension_of_a_later_version_is_refused() -> None:
    with pytest.raises(ValueError, match="kind 99 are not known"):
        unpack(b"\xd4\x63x")


def test_not_a_number_stays_one() -> None:
    assert math.isnan(unpack(Serializer().pack(math.nan)))
    assert unpack(Serializer().pack(UUID(int=5))) == UUID(int=5)
    assert str(unpack(Serializer().pack(Decimal("1.50")))) == "1.50"
