from __future__ import annotations

import contextlib
import datetime as dt
import enum
import zoneinfo
from collections import OrderedDict, namedtuple
from decimal import Decimal
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import CodecError
from ftlayer.records.objects import MAX_TUPLE_DEPTH, pack_objects, unpack_objects

hashable = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False)
    | st.datetimes()
    | st.datetimes(timezones=st.just(dt.UTC))
    | st.dates()
    | st.times()
    | st.timedeltas()
    | st.uuids()
)
hashable |= st.tuples(hashable, hashable)
anything = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
    ),
    max_leaves=12,
)


@given(st.lists(anything, max_size=5))
def test_objects_come_back_as_they_went_in(objects: list[Any]) -> None:
    packed = pack_objects(objects)
    assert packed.type == pa.binary()
    assert packed.null_count == 0
    back = unpack_objects(packed)
    assert back == objects
    assert repr(back) == repr(objects)  # == does not tell True from 1, nor -0.0 from 0.0


def test_the_two_documented_exceptions() -> None:
    zoned = dt.datetime(2024, 7, 1, 12, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"))
    back = unpack_objects(pack_objects([zoned, bytearray(b"x")]))
    assert back == [zoned, b"x"]
    assert back[0].utcoffset() == dt.timedelta(hours=2)


Point = namedtuple("Point", "x y")


class Colour(enum.IntEnum):
    RED = 1


def itself() -> list[Any]:
    loop: list[Any] = []
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    "value",
    [
        object(),
        {1, 2},
        Point(1, 2),
        Colour.RED,
        np.float64(1.0),
        np.int32(1),
        OrderedDict(),
        1j,
        {"deep": [object()]},
        lambda: 0,
        itself(),
        "\ud800",
        (itself(),),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_carried_is_refused_and_named(value: Any) -> None:
    with pytest.raises(CodecError, match=r"object 1 .*cannot be stored"):
        pack_objects([1, value])


def test_the_refusal_names_the_nested_type() -> None:
    with pytest.raises(CodecError, match=r"builtins\.complex is not among"):
        pack_objects([[1j]])


@given(st.binary(max_size=40))
def test_garbage_is_an_error_or_an_object(data: bytes) -> None:
    with contextlib.suppress(CodecError):
        unpack_objects(pa.array([data]))


@given(st.lists(anything, min_size=1, max_size=2), st.data())
def test_flipped_bytes_are_an_error_or_an_object(objects: list[Any], data: st.DataObject) -> None:
    packed = bytearray(pack_objects([objects])[0].as_py())
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(CodecError):
        unpack_objects(pa.array([bytes(packed)]))


def test_tuples_nested_without_end_do_not_exhaust_the_stack() -> None:
    nested: tuple[Any, ...] = ()
    for _ in range(MAX_TUPLE_DEPTH - 1):
        nested = (nested,)
    assert unpack_objects(pack_objects([nested])) == [nested]
    with pytest.raises(CodecError, match="nested more than"):
        pack_objects([((nested,),)])
    packed = msgpack.packb([])
    for _ in range(5000):
        packed = msgpack.packb(msgpack.ExtType(1, packed))
    with pytest.raises(CodecError, match="object 0 cannot be read"):
        unpack_objects(pa.array([packed]))


def test_another_column_is_refused() -> None:
    for column in (pa.array(["x"]), pa.array([b"\xc0", None])):
        with pytest.raises(CodecError, match="binary column without nulls"):
            unpack_objects(column)


def test_decimals_keep_their_scale_and_their_nan() -> None:
    back = unpack_objects(pack_objects([Decimal("1.500"), Decimal("NaN"), Decimal("sNaN12")]))
    assert [str(value) for value in back] == ["1.500", "NaN", "sNaN12"]
