"""The C kernels behind anchors and emitters, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.records.kernels import native
from ftlayer.runtime.task.routes import split_rows


@given(st.lists(st.integers(0, 4), max_size=40), st.lists(st.integers(0, 2**63), min_size=5, max_size=5))
def test_child_ordinals_count_on(parents: list[int], counts: list[int]) -> None:
    running, out = np.array(counts, np.uint64), np.empty(len(parents), np.uint64)
    native.child_ordinals(np.array(parents, np.int64), running, out)
    expected = []
    for parent in parents:
        expected.append(counts[parent])
        counts[parent] += 1
    assert out.tolist() == expected
    assert running.tolist() == counts


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2**64 - 1)), max_size=40))
def test_xor_at_is_numpys_ufunc_at(events: list[tuple[int, int]]) -> None:
    places = np.array([place for place, _ in events], np.int64)
    values = np.array([value for _, value in events], np.uint64)
    folded, expected = np.arange(5, dtype=np.uint64), np.arange(5, dtype=np.uint64)
    native.xor_at(folded, places, values)
    np.bitwise_xor.at(expected, places, values)
    assert (folded == expected).all()


@given(st.integers(1, 5), st.data())
def test_split_rows_gives_each_channel_its_rows_in_order(channels: int, data: st.DataObject) -> None:
    selection = np.array(data.draw(st.lists(st.integers(0, channels - 1), max_size=40)), np.int32)
    expected = [np.flatnonzero(selection == channel).tolist() for channel in range(channels)]
    assert [rows.tolist() for rows in split_rows(selection, channels)] == expected


@pytest.mark.parametrize("place", [-1, 3])
def test_a_place_out_of_range_is_refused(place: int) -> None:
    places, three = np.array([0, place]), np.zeros(3, np.uint64)
    with pytest.raises(IndexError, match=rf"parents\[1\] is {place}, and there are 3 records"):
        native.child_ordinals(places, three, np.empty(2, np.uint64))
    with pytest.raises(IndexError, match=rf"places\[1\] is {place}, and folded has 3 items"):
        native.xor_at(three, places, np.ones(2, np.uint64))
    with pytest.raises(IndexError, match=rf"selection\[1\] is {place}, and there are 3 channels"):
        split_rows(places.astype(np.int32), 3)


def test_arguments_are_checked() -> None:
    ints, ids = np.zeros(2, np.int64), np.zeros(2, np.uint64)
    with pytest.raises(TypeError, match="parents must be one-dimensional int64"):
        native.child_ordinals(ids, ids, ids)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out has 1 items, expected 2"):
        native.child_ordinals(ints, ids, np.zeros(1, np.uint64))
    with pytest.raises(ValueError, match="values has 1 items, expected 2"):
        native.xor_at(ids, ints, np.zeros(1, np.uint64))
    with pytest.raises(ValueError, match="order has 1 items, expected 2"):
        native.split_rows(np.zeros(2, np.int32), np.zeros(1, np.int64), ints)
