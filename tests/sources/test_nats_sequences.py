"""Sets of sequence numbers, against sets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from ftlayer.connectors.nats.source import Sequences

RANGES = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 8)), max_size=20)


def numbers_in(ranges: list[tuple[int, int]]) -> set[int]:
    return {number for first, length in ranges for number in range(first, first + length + 1)}


@given(RANGES, st.integers(1, 70), st.integers(1, 70))
def test_it_has_what_was_added(ranges: list[tuple[int, int]], first: int, last: int) -> None:
    expected = numbers_in(ranges)
    found = Sequences((start, start + length) for start, length in ranges)
    assert {number for number in range(80) if number in found} == expected
    assert (found.first, found.last) == (min(expected, default=0), max(expected, default=0))
    assert list(found.between(first, last)) == [it for it in range(first, last + 1) if it in expected]
    assert list(found.missing(first, last)) == [it for it in range(first, last + 1) if it not in expected]
    apart = list(found)
    assert all(before + 1 < after for (_, before), (after, _) in pairwise(apart))
    assert list(Sequences.unpacked(found.packed())) == apart


@given(RANGES, st.integers(0, 5), st.integers(1, 70))
def test_the_lowest_ranges_are_forgotten_but_none_that_is_needed(
    ranges: list[tuple[int, int]], count: int, below: int
) -> None:
    found = Sequences((start, start + length) for start, length in ranges)
    before = list(found)
    found.forget_first(count, below)
    gone = before[: len(before) - len(found)]
    assert before[len(gone) :] == list(found)
    assert len(gone) <= count
    assert all(last < below for _, last in gone)
    assert len(gone) == count or not before[len(gone) :] or before[len(gone)][1] >= below


def test_a_long_run_is_one_small_range() -> None:
    found = Sequences()
    for number in range(1, 10_001):
        found.add(number, number)
    assert len(found) == 1
    assert found.packed() == [1, 9_999]
