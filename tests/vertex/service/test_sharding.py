"""One answer out of those of several shards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import ProtocolError, StaleIncarnationError
from ftlayer.vertex.calls import Hour, RecordPage, Xor, Xored
from ftlayer.vertex.service.vertex import (
    Gather,
    add_counts,
    add_hours,
    late_if_stale,
    newest_first,
    position_of,
)

NONE = math.nan


def _hour(end_ms: int, **series: tuple[float, ...]) -> Hour:
    return Hour(10_000, end_ms, series)


def _same(hour: Hour, other: Hour) -> bool:
    assert hour.series.keys() == other.series.keys()
    for name, points in hour.series.items():
        assert list(points) == pytest.approx(list(other.series[name]), nan_ok=True), name
    return (hour.step_ms, hour.end_ms) == (other.step_ms, other.end_ms)


def test_points_are_added_and_of_ages_and_shares_the_largest_is_taken() -> None:
    a = _hour(100_000, pending=(NONE, 1.0, 2.0), oldest_seconds=(NONE, 5.0, 15.0), used_share=(0.1, 0.1, 0.1))
    b = _hour(
        100_003, pending=(NONE, NONE, 4.0), oldest_seconds=(NONE, 9.0, 2.0), used_share=(0.3, NONE, 0.0)
    )
    both = _hour(
        100_000, pending=(NONE, 1.0, 6.0), oldest_seconds=(NONE, 9.0, 15.0), used_share=(0.3, 0.1, 0.1)
    )
    assert _same(add_hours(a, b), both)
    assert _same(add_hours(b, a), both)


def test_a_shard_that_is_a_step_ahead_waits_for_the_other() -> None:
    a, b = _hour(90_001, pending=(1.0, 2.0, 3.0)), _hour(100_000, pending=(20.0, 30.0, 40.0))
    both = _hour(90_001, pending=(1.0, 22.0, 33.0))
    assert _same(add_hours(a, b), both)
    assert _same(add_hours(b, a), both)


def test_a_series_that_one_shard_has_is_kept() -> None:
    assert _same(add_hours(_hour(0, x=(1.0,)), _hour(0, y=(2.0,))), _hour(0, x=(1.0,), y=(2.0,)))


def test_events_for_a_shard_that_was_made_anew_are_late_and_those_for_others_are_not_sent_again() -> None:
    answers: list[object] = []
    event = Xor(np.arange(1, 4, dtype=np.uint64), None, 7)
    for replies in (
        [StaleIncarnationError("anew"), Xored(2, 1)],
        [StaleIncarnationError("anew"), ProtocolError("bad")],
    ):
        gather = Gather(2, answers.append, add_counts)
        for reply in replies:
            late_if_stale(event, gather)(reply)
    assert answers[0] == Xored(2, 4)
    assert isinstance(answers[1], ProtocolError)


def _key(shard: int, ms: int, serial: int) -> bytes:
    """Return the key of a letter of some stream."""
    parts = ((shard, 2), (serial % 3, 4), (ms, 8), (serial, 8))
    return b"".join(value.to_bytes(size, "big") for value, size in parts)


class Shards:
    """Letters of two or three shards, of which a call examines some, and finds those that are wanted."""

    def __init__(self, letters: list[set[tuple[int, int]]], examined: int) -> None:
        self.letters = letters
        self.examined = examined

    def page(self, shard: int, after: bytes, limit: int) -> RecordPage:
        ordered = sorted(
            (_key(shard, *letter) for letter in self.letters[shard]), reverse=True, key=position_of
        )
        behind = [key for key in ordered if not after or key[6:] < after[4:]]
        keys: list[bytes] = []
        for number, key in enumerate(behind):
            if number == self.examined or len(keys) == limit:
                return RecordPage((), tuple(keys), number, behind[number - 1])
            if key[-1] % 2:  # the filter
                keys.append(key)
        return RecordPage((), tuple(keys), len(behind), b"")

    def pages(self, limit: int) -> Iterator[RecordPage]:
        """Ask as the vertex does, until there is no more."""
        after = b""
        while True:
            last, rest = int.from_bytes(after[:2], "big"), after[2:]
            pages = [
                self.page(shard, rest + b"\0" if rest and shard < last else rest, limit)
                for shard in range(len(self.letters))
            ]
            page = reduce(newest_first(limit), pages)
            yield page
            after = page.more
            if not after:
                return


LETTERS = st.sets(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=12)


@given(st.lists(LETTERS, min_size=2, max_size=3), st.integers(1, 5), st.integers(1, 5))
def test_the_latest_letters_of_all_shards_come_in_order_and_once(
    letters: list[set[tuple[int, int]]], limit: int, examined: int
) -> None:
    wanted = [
        _key(shard, ms, serial) for shard, each in enumerate(letters) for ms, serial in each if serial % 2
    ]
    pages = list(Shards(letters, examined).pages(limit))
    assert [key for page in pages for key in page.keys] == sorted(wanted, key=position_of, reverse=True)
    assert all(len(page.keys) <= limit for page in pages)
