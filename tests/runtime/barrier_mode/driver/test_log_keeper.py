"""Where a reader source with checkpoints has come to: the keeper alone, told of what the rules do."""

from __future__ import annotations

import pytest

from ftlayer.runtime.barrier_mode.driver.rules.reader_checkpoints import (
    Captured,
    LogEvent,
    SourceCheckpoints,
    unpack_captured,
)
from ftlayer.runtime.connectors.offset_reader import RangeProgress, SplitPosition, partition_key
from ftlayer.runtime.driver.rules.planner_rules import Beginning, PlannedRange
from ftlayer.runtime.protocol.messages import ReaderRange


class World:
    """A keeper, and what it has answered to the last event."""

    def __init__(self) -> None:
        self.ranges = SourceCheckpoints("src", self._happened)
        self.keeper = self.ranges.keeper
        self.answer: Beginning | None = None
        self.first_unread = 1

    def _happened(self, event: LogEvent) -> None:
        self.answer = self.keeper.handle(event, self.first_unread)

    def begin(self) -> None:
        self.ranges.restore({}, None)
        self.keeper.begun("0", 0)

    def open(self, number: int) -> None:
        self.first_unread = number
        self.keeper.opened(planned(number))

    @property
    def remembered(self) -> list[int]:
        """Numbers of ranges that a checkpoint which has begun all of them holds."""
        position = SplitPosition(ReaderRange(1, "0", "1", 1, b"d"), 1, done=False)
        captured = unpack_captured(self.ranges.capture({partition_key(0): position.pack()}))
        return [planned.number for planned in captured.ranges]


def planned(number: int) -> PlannedRange:
    return PlannedRange(number, str(number - 1), str(number), b"d", (b"x",))


@pytest.fixture
def world() -> World:
    return World()


def test_where_it_begins_is_not_known_before_a_restore(world: World) -> None:
    assert world.ranges.capture({}) == b""
    world.ranges.restore({}, None)
    assert world.answer == Beginning(None, 0)


def test_without_a_checkpoint_it_goes_back_to_where_it_began(world: World) -> None:
    world.begin()
    world.open(1)
    world.ranges.restore({}, None)
    assert world.answer == Beginning("0", 0)
    assert unpack_captured(world.ranges.capture({})) == Captured("0", 0, ())


def test_ranges_of_a_checkpoint_are_read_on_with_the_splits_they_had(world: World) -> None:
    ranges = (planned(3), planned(4))
    position = SplitPosition(ranges[0].range, 5, done=False)
    world.ranges.restore({partition_key(0): position.pack()}, Captured("c", 4, ranges).pack())
    found = (
        RangeProgress(ReaderRange(3, "2", "3", 1, b"d"), (5,), (False,)),
        RangeProgress(ReaderRange(4, "3", "4", 1, b"d"), (0,), (False,)),
    )
    assert world.answer == Beginning("c", 4, restored=tuple(zip(ranges, found, strict=True)))
    # What the checkpoint has read to its end is committed again.
    assert world.keeper.to_commit(None) == "2"


def test_an_offset_is_committed_until_it_has_been(world: World) -> None:
    world.begin()
    complete = Captured("3", 1, ()).pack()
    for _ in range(2):
        world.ranges.completed(complete)
        assert world.keeper.to_commit(None) == "3"
    world.keeper.committed("3")
    world.ranges.completed(complete)
    world.ranges.completed(None)
    assert world.keeper.to_commit("9") is None


def test_a_range_is_remembered_while_a_checkpoint_may_need_it(world: World) -> None:
    world.begin()
    world.open(1)
    world.ranges.under_way([7])
    world.open(2)
    assert world.remembered == [1]
    world.ranges.under_way([])
    assert world.remembered == []
