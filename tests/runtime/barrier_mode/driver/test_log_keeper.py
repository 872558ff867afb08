"""Where a reader source with checkpoints has come to: the keeper alone, given its events when the test likes."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.runtime.barrier_mode.driver.log_keeper import LogKeeper
from ftlayer.runtime.barrier_mode.driver.range_log import Captured, unpack_captured
from ftlayer.runtime.connectors.positions import SplitPosition, partition_key
from ftlayer.runtime.driver.range_keeper import Beginning, CommitOffset, StartOver
from ftlayer.runtime.driver.splits import PlannedRange
from ftlayer.runtime.protocol.messages import AssignSplits

END = AssignSplits("src", 0, 0, "null", "null", b"", 0, ())


class World:
    """A keeper; events lie in ``posted`` until `work_off`."""

    def __init__(self) -> None:
        self.posted: list[Any] = []
        self.sent: list[AssignSplits] = []
        self.keeper = LogKeeper("src", b"k" * 32, self.posted.append)

    def work_off(self, open_range: int | None = None) -> list[Any]:
        """Hand on what lies there; return the instructions."""
        instructions: list[Any] = []
        while self.posted:
            instructions += self.keeper.handle(self.posted.pop(0), open_range)
        return instructions

    def begin(self) -> None:
        self.keeper.restore({}, None)
        self.work_off()
        assert self.keeper.begun("0")

    def open(self, number: int) -> None:
        planned = PlannedRange(number, str(number - 1), str(number), b"d", (b"x",))
        self.keeper.opened(planned, [object()])

    def send(self) -> None:
        self.keeper.pass_on([END], self.sent.append)

    @property
    def remembered(self) -> list[int]:
        """Numbers of ranges that a checkpoint which has begun all of them holds."""
        position = SplitPosition(1, "0", "1", 1, b"d", 1, done=False)
        captured = unpack_captured(self.keeper.capture({partition_key(0): position.pack()}))
        return [planned.number for planned in captured.ranges]


@pytest.fixture
def world() -> World:
    return World()


def test_where_it_begins_is_not_known_before_a_restore(world: World) -> None:
    keeper = world.keeper
    assert not keeper.is_current
    assert keeper.capture({}) == b""
    keeper.restore({}, None)
    assert not keeper.is_current
    assert world.work_off() == [StartOver()]
    assert keeper.is_current
    assert keeper.beginning() == Beginning(None, 0)


def test_what_is_planned_when_a_restore_comes_is_of_no_use(world: World) -> None:
    world.begin()
    world.send()
    assert world.sent == [END]
    before = world.keeper.capture({})
    world.keeper.restore({}, before)
    world.open(1)
    world.keeper.moved("9")
    world.send()
    assert not world.keeper.begun("9")
    assert world.sent == [END]
    assert world.keeper.capture({}) == before
    world.work_off()
    assert world.keeper.beginning() == Beginning("0", 0)
    world.send()
    assert world.sent == [END, END]


def test_events_of_the_restore_before_the_last_leave_it_behind(world: World) -> None:
    world.begin()
    world.keeper.restore({}, Captured("5", 0, ()).pack())
    first = world.posted.pop()
    world.keeper.restore({}, Captured("7", 0, ()).pack())
    assert world.keeper.handle(first, None) == [StartOver()]
    assert not world.keeper.is_current
    world.work_off()
    assert world.keeper.beginning() == Beginning("7", 0)


def test_ranges_of_a_checkpoint_come_once_with_the_splits_they_had(world: World) -> None:
    ranges = tuple(PlannedRange(number, "a", "b", b"d", (b"x",)) for number in (3, 4))
    world.keeper.restore({}, Captured("c", 4, ranges).pack())
    # What the checkpoint has read to its end is committed again.
    assert world.work_off() == [StartOver(), CommitOffset("a")]
    assert world.keeper.beginning() == Beginning("c", 4)
    assert [world.keeper.next_restored() for _ in range(3)] == [*ranges, None]


def test_an_offset_is_committed_until_it_has_been(world: World) -> None:
    world.begin()
    complete = Captured("3", 1, ()).pack()
    for _ in range(2):
        world.keeper.completed(complete)
        assert world.work_off() == [CommitOffset("3")]
    world.keeper.committed("3")
    world.keeper.completed(complete)
    world.keeper.completed(None)
    assert world.work_off() == []


def test_a_range_is_remembered_while_a_checkpoint_may_need_it(world: World) -> None:
    world.begin()
    world.open(1)
    world.keeper.under_way([7])
    world.work_off(open_range=1)
    world.open(2)
    assert world.remembered == [1]
    world.keeper.under_way([])
    world.work_off(open_range=2)
    assert world.remembered == []
