"""The order in which what waits for a task comes out."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.runtime.elements import Barrier, Batch, Watermark
from ftlayer.runtime.slot.inbox import Inbox
from ftlayer.stream.job_graph import Channel

CHANNELS = [Channel(0, sender, 0) for sender in range(3)]


def batch(*values: int) -> Batch:
    return Batch(pa.record_batch({"n": pa.array(values, pa.int64())}), None, None)


def values_in(element: object) -> list[int]:
    assert isinstance(element, Batch)
    found: list[int] = element.payload.column(0).to_pylist()
    return found


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), max_size=8))
def test_what_is_restored_comes_before_everything_else(restored: list[int], new: list[int]) -> None:
    """With another parallelism the next record of a partition may come by another channel than those in flight."""
    box = Inbox(CHANNELS, 100, 1 << 20)
    for number, place in enumerate(restored):
        box.restore(CHANNELS[place], batch(number))
    for number, place in enumerate(new, 100):
        box.put(CHANNELS[place], batch(number), 0)
    taken: list[tuple[Channel, int]] = []
    while box:
        one = box.take()
        taken += [(one.channel, value) for value in values_in(one.element)]
    assert {value for _, value in taken[: len(restored)]} == set(range(len(restored)))
    for channel in CHANNELS:
        mine = [value for place, value in taken if place == channel]
        assert mine == sorted(mine)
    assert len(taken) == len(restored) + len(new)
    assert box.is_empty


def test_what_was_restored_and_is_dropped_is_not_waited_for() -> None:
    box = Inbox(CHANNELS, 100, 1 << 20)
    box.restore(CHANNELS[0], batch(1))
    assert box.drop(CHANNELS[0]) == 1
    box.put(CHANNELS[1], Watermark(5), 0)
    assert box.take().element == Watermark(5)


def test_a_barrier_is_known_of_until_all_have_come() -> None:
    box = Inbox(CHANNELS, 100, 1 << 20)
    first, second = Barrier(1, 0), Barrier(2, 0)
    box.put(CHANNELS[0], batch(1), 0)
    assert not box.has_barriers
    box.put(CHANNELS[0], first, 0)
    assert box.has_barriers
    box.take()
    assert box.take().element is first
    assert not box.has_barriers
    box.block(CHANNELS[0])
    assert box.has_barriers
    box.unblock(CHANNELS[0])
    assert not box.has_barriers
    box.put(CHANNELS[1], batch(1), 0)
    box.put(CHANNELS[1], first, 0)
    box.put(CHANNELS[1], second, 0)
    box.take_out(CHANNELS[1], first)
    assert box.has_barriers
    box.drop(CHANNELS[1])
    assert not box.has_barriers
    assert box.is_empty
