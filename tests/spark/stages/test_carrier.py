"""Carriers: 20 bytes that name a record in another query."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import CodecError
from ftlayer.spark.stages.pages import (
    CARRIER_BYTES,
    CARRIER_DTYPE,
    check_carriers,
    make_carriers,
    read_carriers,
)

u64 = st.integers(1, 2**64 - 1)
pairs = st.lists(st.tuples(u64, u64), max_size=10)


def u64s(values: Any) -> Any:
    return np.array(list(values), np.uint64)


@given(pairs, st.integers(0, 2**32 - 1), st.sampled_from([pa.binary(), pa.large_binary()]))
def test_carriers_come_back_as_they_went(ids: list[tuple[int, int]], incarnation: int, kind: Any) -> None:
    made = make_carriers(u64s(root for root, _ in ids), u64s(id_ for _, id_ in ids), incarnation)
    made.validate(full=True)
    assert all(len(value) == CARRIER_BYTES for value in made.to_pylist())
    back = read_carriers(check_carriers(made.cast(kind), "ft"))
    assert [tuple(carrier) for carrier in back.tolist()] == [(*pair, incarnation) for pair in ids]
    sliced = made.slice(1)
    assert read_carriers(check_carriers(sliced, "ft")).tolist() == back[1:].tolist()


def test_the_layout_is_what_the_docs_say() -> None:
    (value,) = make_carriers(u64s([1]), u64s([2]), 3).to_pylist()
    assert value == b"\x01" + bytes(7) + b"\x02" + bytes(7) + b"\x03" + bytes(3)
    assert CARRIER_BYTES == 20


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "null"),
        (b"", "0 bytes"),
        (bytes(range(1, 20)), "19 bytes"),
        (bytes(range(1, 22)), "21 bytes"),
        (bytes(8) + b"\x01" * 12, "20 bytes"),
        (b"\x01" * 8 + bytes(8) + b"\x01" * 4, "20 bytes"),
    ],
)
def test_a_row_without_a_carrier_is_named(value: bytes | None, said: str) -> None:
    good = make_carriers(u64s([1]), u64s([2]), 0)[0].as_py()
    with pytest.raises(CodecError, match=rf"column 'ft': row 1 holds no carrier.*\({said}\)"):
        check_carriers(pa.array([good, value], pa.binary()), "ft")


def test_another_type_is_named() -> None:
    with pytest.raises(CodecError, match="column 'ft' is string; a carrier is binary"):
        check_carriers(pa.array(["x" * 20]), "ft")


def test_no_rows() -> None:
    assert read_carriers(check_carriers(pa.array([], pa.binary()), "ft")).dtype == CARRIER_DTYPE
