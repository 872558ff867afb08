from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.runtime.connectors.lane import SplitProgress
from ftlayer.runtime.connectors.offset_reader import (
    PositionChain,
    RangeProgress,
    SplitPosition,
    partition_key,
    progress_of,
    unpack_split,
)
from ftlayer.runtime.driver.rules.planner_rules import PlannedRange, SplitPlanner
from ftlayer.runtime.protocol.messages import AssignSplits, ReaderRange, Split, SplitDone


def planned(number: int, splits: int) -> PlannedRange:
    return PlannedRange(number, "0", "1", b"d", tuple(bytes([split]) for split in range(splits)))


def progress(number: int, rows: tuple[int, ...], done: tuple[bool, ...]) -> RangeProgress:
    return RangeProgress(ReaderRange(number, "0", "1", len(rows), b"d"), rows, done)


def splits_of(messages: list[AssignSplits]) -> dict[int, list[tuple[int, int]]]:
    return {message.subtask: [(split.number, split.rows) for split in message.mine] for message in messages}


def test_splits_are_spread_over_the_subtasks_that_are_up() -> None:
    planner = SplitPlanner("s", 3)
    assert planner.slot_up(0, ()) == []
    assert planner.slot_up(2, ()) == []
    assert splits_of(planner.open(planned(1, 7), None)) == {0: [(0, 0), (3, 0), (6, 0)], 2: [(2, 0), (5, 0)]}
    assert splits_of(planner.slot_up(1, ())) == {1: [(1, 0), (4, 0)]}
    assert planner.reading


def test_a_message_has_all_that_a_slot_needs() -> None:
    planner = SplitPlanner("s", 1)
    planner.slot_up(0, ())
    assert planner.open(planned(4, 1), None) == [
        AssignSplits("s", 0, ReaderRange(4, "0", "1", 1, b"d"), (Split(0, b"\x00", 0),))
    ]


def test_the_range_is_read_when_all_its_splits_are_done() -> None:
    planner = SplitPlanner("s", 2)
    planner.open(planned(1, 2), None)
    planner.split_done(SplitDone("s", 1, 0))
    planner.split_done(SplitDone("s", 1, 0))
    assert planner.reading
    planner.split_done(SplitDone("s", 7, 1))
    planner.split_done(SplitDone("s", 1, 9))
    assert planner.reading
    planner.split_done(SplitDone("s", 1, 1))
    assert not planner.reading


def test_a_lost_subtask_gets_what_is_left_of_its_splits() -> None:
    planner = SplitPlanner("s", 2)
    planner.slot_up(0, ())
    planner.slot_up(1, ())
    planner.open(planned(1, 6), None)
    planner.split_done(SplitDone("s", 1, 0))
    planner.slot_down(0)
    known = progress(1, (9, 1, 5, 0, 7, 0), (True, False, False, False, True, False))
    assert splits_of(planner.slot_up(0, (known,))) == {0: [(2, 5)]}


def test_what_was_done_and_not_said_completes_the_range() -> None:
    planner = SplitPlanner("s", 1)
    planner.slot_up(0, ())
    planner.open(planned(1, 1), None)
    planner.slot_down(0)
    assert planner.slot_up(0, (progress(1, (3,), (True,)),)) == []
    assert not planner.reading


def test_progress_of_another_range_says_nothing() -> None:
    planner = SplitPlanner("s", 1)
    planner.slot_up(0, ())
    messages = planner.open(planned(2, 1), progress(1, (3,), (True,)))
    assert splits_of(messages) == {0: [(0, 0)]}


def test_the_end_is_told_to_all_and_to_who_comes_late() -> None:
    planner = SplitPlanner("s", 3)
    planner.slot_up(0, ())
    assert [(message.subtask, message.range.splits, message.mine) for message in planner.end()] == [
        (0, 0, ())
    ]
    assert [(message.subtask, message.range.splits) for message in planner.slot_up(2, ())] == [(2, 0)]


def test_a_range_is_not_opened_over_another() -> None:
    planner = SplitPlanner("s", 1)
    planner.open(planned(1, 1), None)
    with pytest.raises(AssertionError, match="still read"):
        planner.open(planned(2, 1), None)


# ---------------------------------------------------------------- a model of a whole source


class ModelSlot:
    """One instance of a subtask: reads what it is assigned, a row a step."""

    def __init__(self, positions: dict[str, bytes]) -> None:
        self.chain = PositionChain(positions)
        self.todo: list[tuple[AssignSplits, Split]] = []
        self.said: list[SplitDone] = []


class ModelJob:
    """A source of ranges of splits of rows, its planner, its slots and the vertex."""

    def __init__(self, ranges: list[list[int]], parallelism: int, unstable: set[int]) -> None:
        self.ranges = ranges
        self.parallelism = parallelism
        self.unstable = unstable
        self.plans = 0
        self.positions: dict[str, bytes] = {}
        self.accepted: list[tuple[int, int, int]] = []
        self.committed: list[int] = []
        self.repeats = False
        self.start()

    def digest(self, place: int) -> bytes:
        self.plans += 1
        return bytes([self.plans % 256]) if place in self.unstable else b"same"

    def planned(self, number: int, place: int, digest: bytes) -> PlannedRange:
        sizes = self.ranges[place]
        return PlannedRange(number, str(place), str(place + 1), digest, tuple(bytes([s]) for s in sizes))

    def start(self) -> None:
        """Start the driver: everything else is new, too."""
        self.planner = SplitPlanner("s", self.parallelism)
        self.slots: dict[int, ModelSlot] = {}
        self.number, self.place = 0, 0
        self.open = False
        ranges = progress_of("s", self.positions)
        if not ranges:
            return
        (found,) = ranges
        self.number, self.place = found.range.number, int(found.range.end)
        self.open = True
        if not found.complete:
            digest = self.digest(self.place - 1)
            if digest != found.range.digest:
                self.number += 1
                self.repeats = True
            self.send(self.planner.open(self.planned(self.number, self.place - 1, digest), found))

    def send(self, messages: list[AssignSplits]) -> None:
        for message in messages:
            slot = self.slots.get(message.subtask)
            if slot is not None:
                slot.todo += [(message, split) for split in message.mine]

    def up(self, subtask: int) -> None:
        if subtask not in self.slots:
            self.slots[subtask] = ModelSlot(self.positions)
            self.send(self.planner.slot_up(subtask, progress_of("s", self.positions)))

    def lose(self, subtask: int) -> None:
        if self.slots.pop(subtask, None) is not None:
            self.planner.slot_down(subtask)

    def step(self, subtask: int) -> None:
        """Persist a row of the split a slot is at, or its end."""
        slot = self.slots.get(subtask)
        if slot is None or not slot.todo:
            return
        message, split = slot.todo[0]
        size = split.payload[0]
        key = partition_key(split.number)
        last = slot.chain.last(key)
        rows = split.rows
        if last is not None and unpack_split("s", last).range.number == message.range.number:
            rows = unpack_split("s", last).rows
        done = rows >= size
        rows = min(size, rows + 1)
        end = SplitPosition(message.range, rows, done)
        position = slot.chain.advance(key, end.pack())
        assert self.positions.get(key) == position.start
        self.positions[key] = position.end
        if done:
            slot.todo.pop(0)
            slot.said.append(SplitDone("s", message.range.number, split.number))
        else:
            self.accepted.append((int(message.range.start), split.number, rows - 1))

    def deliver(self, subtask: int) -> None:
        """Bring a slot's oldest message to the planner."""
        slot = self.slots.get(subtask)
        if slot is not None and slot.said:
            self.planner.split_done(slot.said.pop(0))

    def plan(self) -> bool:
        """Do what the planner's thread does between ranges; False at the end of the source."""
        if self.planner.reading:
            return True
        if self.open:
            assert not set(self.expected(self.place)) - set(self.accepted), "committed before it was accepted"
            self.committed.append(self.place)
            self.open = False
        if self.place == len(self.ranges):
            return False
        self.number += 1
        self.place += 1
        self.open = True
        self.send(
            self.planner.open(self.planned(self.number, self.place - 1, self.digest(self.place - 1)), None)
        )
        return True

    def expected(self, upto: int) -> list[tuple[int, int, int]]:
        return [
            (place, split, row)
            for place, sizes in enumerate(self.ranges[:upto])
            for split, size in enumerate(sizes)
            for row in range(size)
        ]


MOVES = st.sampled_from(
    ["up", "step", "step", "step", "deliver", "deliver", "plan", "plan", "lose", "restart"]
)


@settings(max_examples=300, deadline=None)
@given(
    ranges=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=3),
    parallelism=st.integers(1, 3),
    unstable=st.sets(st.integers(0, 2), max_size=1),
    moves=st.lists(st.tuples(MOVES, st.integers(0, 2)), max_size=80),
)
def test_whatever_is_lost_no_row_is(
    ranges: list[list[int]], parallelism: int, unstable: set[int], moves: list[tuple[str, int]]
) -> None:
    job = ModelJob(ranges, parallelism, unstable)
    for move, number in moves:
        subtask = number % parallelism
        if move == "restart":
            job.start()
        elif move == "plan":
            job.plan()
        else:
            getattr(job, move)(subtask)
    job.unstable = set()
    for _ in range(1_000):
        for subtask in range(parallelism):
            job.up(subtask)
            job.step(subtask)
            job.deliver(subtask)
        if not job.plan():
            break
    else:
        raise AssertionError("it does not come to an end")
    expected = job.expected(len(ranges))
    assert set(job.accepted) == set(expected)
    if not job.repeats:
        assert sorted(job.accepted) == expected
    assert job.committed == sorted(job.committed)
    assert job.committed[-1] == len(ranges)


def test_many_random_runs() -> None:
    """The same over longer runs than Hypothesis likes to make."""
    for seed in range(30):
        draw = random.Random(seed)
        ranges = [[draw.randrange(6) for _ in range(draw.randrange(1, 6))] for _ in range(12)]
        job: Any = ModelJob(ranges, 3, set())
        while job.plan():
            subtask = draw.randrange(3)
            move = draw.choices(
                [job.up, job.step, job.deliver, job.lose, lambda _, job=job: job.start()], [10, 60, 25, 4, 1]
            )[0]
            move(subtask)
        assert sorted(job.accepted) == job.expected(len(ranges))


def test_progress_of_a_split_counts_over_its_batches(values: Any) -> None:
    import pyarrow as pa

    chain = PositionChain({"p0": b"before"})
    progress = SplitProgress("p0", 7, 10, chain, lambda rows, done: b"%d %d" % (rows, done), tells_done=True)
    batch = pa.record_batch({"id": [1, 2, 3]})
    first, second = progress.advance(batch), progress.advance(batch, done=True)
    assert (first.first_ordinal, second.first_ordinal) == (10, 13)
    assert first.position is not None
    assert second.position is not None
    assert (first.position.start, first.position.end) == (b"before", b"13 0")
    assert (second.position.start, second.position.end) == (b"13 0", b"16 1")
