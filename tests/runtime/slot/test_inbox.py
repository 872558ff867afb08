"""The order in which what waits for a task comes out."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.runtime.protocol.messages import Barrier, Batch, RecordIds, Watermark
from ftlayer.runtime.slot.rules.inbox import Inbox
from ftlayer.topology.job_graph import Channel

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
    while box.turns:
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


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 50)), max_size=12),
    st.lists(st.integers(0, 2), max_size=3),
    st.integers(1, 7),
    st.integers(1, 12),
)
def test_a_batch_that_is_cut_keeps_its_order_its_credit_and_its_place(
    puts: list[tuple[int, int, int]], restored: list[int], most: int, batch_rows: int
) -> None:
    """Each put: channel, rows (0: a barrier), credit."""
    box = Inbox(CHANNELS, batch_rows, 1 << 20)
    sent: dict[Channel, list[object]] = {channel: [] for channel in CHANNELS}
    number = 0
    for place in restored:
        box.restore(CHANNELS[place], batch(number, number + 1, number + 2))
        sent[CHANNELS[place]] += [number, number + 1, number + 2]
        number += 3
    for place, rows, credit in puts:
        element = batch(*range(number, number + rows)) if rows else Barrier(number, 0)
        sent[CHANNELS[place]] += range(number, number + rows) if rows else [element]
        number += rows
        box.put(CHANNELS[place], element, credit)
    came: dict[Channel, list[object]] = {channel: [] for channel in CHANNELS}
    credit = size = 0
    while box.turns:
        records = box.has_records_next
        taken = box.take(most)
        assert isinstance(taken.element, Batch) == records
        if isinstance(taken.element, Batch):
            assert 0 < taken.element.num_rows <= most
            came[taken.channel] += values_in(taken.element)
        else:
            came[taken.channel].append(taken.element)
        credit += taken.credit
        size += taken.size
        assert box.has_room(taken.channel) or box.has_records
    assert came == sent
    assert credit == sum(credit for _, _, credit in puts)
    assert box.is_empty
    assert not box.has_records
    assert not box.has_barriers
    box.validate()


def test_what_is_left_of_a_batch_is_captured_and_its_roots_are_held() -> None:
    box = Inbox(CHANNELS, 100, 1 << 20)
    roots = np.arange(1, 5, dtype=np.uint64)
    box.put(CHANNELS[0], Batch(batch(1, 2, 3, 4).payload, RecordIds(roots, roots)), 40)
    box.put(CHANNELS[0], Barrier(7, 0), 0)
    assert values_in(box.take(3).element) == [1, 2, 3]
    assert [held.tolist() for held in box.roots()] == [[4]]
    assert [values_in(one) for one in box.capture(CHANNELS[0], 7)] == [[4]]
    assert box.drop(CHANNELS[0]) == 1
    assert box.is_empty
