"""The rules of a reader source's planner against a model: every row is read once, whatever happens when."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.clock import Now
from ftlayer.runtime.barrier_mode.driver.reader_checkpoints import SourceCheckpoints
from ftlayer.runtime.connectors.positions import (
    PositionChain,
    SplitPosition,
    partition_key,
    progress_of,
    unpack_split,
)
from ftlayer.runtime.driver.planner_events import (
    AskBacklog,
    AskInitial,
    AskLatest,
    AskProgress,
    AskSplits,
    BacklogIs,
    CallReader,
    CloseSource,
    CommitOffset,
    DrainSource,
    EndIs,
    FindEnd,
    InitialIs,
    KeeperEvent,
    LatestIs,
    OffsetCommitted,
    PlannerEvent,
    PlannerInstruction,
    PollDue,
    ProgressIs,
    ReaderAnswer,
    ReaderAnswered,
    ReaderCall,
    SplitsAre,
    StopReader,
    SubtaskDown,
    SubtaskUp,
    TellBacklog,
    WarnReadAgain,
)
from ftlayer.runtime.driver.planner_rules import MAX_POLL_MS, POLL_MS, PlannerRules
from ftlayer.runtime.driver.position_keeper import PositionKeeper
from ftlayer.runtime.driver.range_keeper import RangeKeeper
from ftlayer.runtime.protocol.messages import AssignSplits, Split, SplitDone

MANY = 5_000
"""It has come to an end by then."""


def exists(row: int) -> bool:
    """A range of rows that do not exist has no splits."""
    return row % 4 != 0


# ---------------------------------------------------------------- a model


@dataclass
class Slot:
    """One instance of a subtask: reads the splits that it is assigned, row by row."""

    chain: PositionChain
    todo: list[tuple[AssignSplits, Split]] = field(default_factory=list)
    read: set[int] = field(default_factory=set)

    def assign(self, message: AssignSplits) -> None:
        for split in message.mine:
            last = self.chain.last(partition_key(split.number))
            position = None if last is None else unpack_split("src", last)
            here = position is not None and position.range == message.range
            assert split.rows == (position.rows if here and position is not None else 0)
            self.todo.append((message, split))


class World:
    """A planner's rules with a broker, slots, and a thread that calls the reader. The same for the same seed."""

    keeper: RangeKeeper[Any]

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.parallelism = self.random.randint(1, 3)
        self.stops = self.random.random() < 0.3
        self.rows = self.random.randrange(30)
        self.end: int | None = None
        self.forgotten = 0
        self.now_ms = 0
        self.slots: dict[int, Slot] = {}
        self.reports: list[SplitDone] = []
        self.start_driver()

    def run(self) -> None:
        for _ in range(200):
            happens = self.random.choice(self.unlikely() if self.random.random() < 0.1 else self.likely())
            happens()
        self.recover()
        for _ in range(MANY):
            if not (happens := self.possible()):
                break
            self.random.choice(happens)()
        reached = self.rows if self.end is None else self.end
        assert all(self.is_read(row) == exists(row) for row in range(reached))
        if self.stops:
            assert self.told_end == set(range(self.parallelism))

    def recover(self) -> None:
        """Let happen what everything waits for."""

    def is_idle(self) -> bool:
        return all(self.is_read(row) for row in range(self.rows) if exists(row)) and not self.stops

    def start_driver(self) -> None:
        self.call: CallReader | None = None
        self.at_work: tuple[CallReader, ReaderAnswer] | None = None
        self.slots.clear()
        self.reports.clear()
        self.told_end: set[int] = set()
        self.keeper = self.open_keeper()
        self.rules = PlannerRules(
            "src", self.parallelism, self.keeper, stop_at_latest=self.stops, tells_backlog=True
        )
        self.handle(PollDue())

    def open_keeper(self) -> RangeKeeper[Any]:
        raise NotImplementedError

    def positions_for(self, subtask: int) -> dict[str, bytes]:
        """What a new instance begins with."""
        raise NotImplementedError

    def is_read(self, row: int) -> bool:
        raise NotImplementedError

    def handle(self, event: PlannerEvent) -> None:
        instructions = self.rules.handle(event, Now(self.now_ms, 0))
        self.rules.validate()
        for instruction in instructions:
            match instruction:
                case CallReader():
                    self.call = instruction
                case AssignSplits(subtask=subtask, splits=0):
                    self.told_end.add(subtask)
                case AssignSplits(subtask=subtask):
                    # One that was sent to an instance that is gone is dropped on its way.
                    self.slots[subtask].assign(instruction)

    # ------------------------------------------------------------ what happens by itself

    def likely(self) -> list[Callable[[], None]]:
        return [*self.possible(), self.grow]

    def unlikely(self) -> list[Callable[[], None]]:
        return [self.fail, self.grow]

    def possible(self) -> list[Callable[[], None]]:
        happens: list[Callable[[], None]] = []
        happens += [partial(self.read, subtask) for subtask, slot in self.slots.items() if slot.todo]
        if len(self.slots) < self.parallelism:
            happens.append(self.up)
        if self.reports:
            happens.append(self.report)
        if self.at_work is not None:
            happens.append(self.answer)
        elif self.call is not None:
            happens.append(self.call_reader)
        elif self.rules.due_ms is not None and not self.is_idle():
            happens.append(self.poll)
        return happens

    def call_reader(self) -> None:
        assert self.call is not None
        self.at_work = self.call, self.answer_to(self.call.call)

    def answer(self) -> None:
        assert self.at_work is not None
        (call, answer), self.at_work = self.at_work, None
        if self.call is call:
            self.call = None
        if isinstance(answer, EndIs):
            assert self.end is None, "the end is asked for twice"
            assert answer.end is not None
            self.end = int(answer.end)
        self.handle(ReaderAnswered(call.generation, answer))

    def poll(self) -> None:
        self.now_ms = max(self.now_ms, self.rules.due_ms or 0)
        self.handle(PollDue())

    def up(self) -> None:
        subtask = self.random.choice([one for one in range(self.parallelism) if one not in self.slots])
        self.slots[subtask] = Slot(PositionChain(self.positions_for(subtask)))
        self.handle(SubtaskUp(subtask))

    def read(self, subtask: int) -> None:
        slot = self.slots[subtask]
        message, split = slot.todo[0]
        assert split.number % self.parallelism == subtask, "another subtask's"
        rows = json.loads(split.payload)
        until = min(split.rows + self.random.randint(1, 4), len(rows))
        done = until == len(rows)
        for row in rows[split.rows : until]:
            assert not self.is_read(row), f"row {row} is read twice"
            assert row >= self.forgotten, "the broker has been told that this is not needed any more"
            slot.read.add(row)
        position = SplitPosition(
            message.range, message.start, message.end, message.splits, message.digest, until, done
        )
        slot.chain.advance(partition_key(split.number), position.pack())
        self.accepted(split.number, position, rows[split.rows : until])
        if done:
            slot.todo.pop(0)
            self.reports.append(SplitDone("src", message.range, split.number))
        else:
            slot.todo[0] = message, Split(split.number, split.payload, until)

    def accepted(self, split: int, position: SplitPosition, rows: list[int]) -> None:
        raise NotImplementedError

    def report(self) -> None:
        self.handle(self.reports.pop(0))

    # ------------------------------------------------------------ what happens to it

    def grow(self) -> None:
        self.rows += self.random.randint(0, 9)

    def fail(self) -> None:
        """The reader raises: what is wanted by then is called next."""
        self.at_work = None

    # ------------------------------------------------------------ the broker

    def answer_to(self, call: ReaderCall) -> ReaderAnswer:
        match call:
            case AskProgress():
                return ProgressIs(self.progress())
            case AskInitial():
                return InitialIs("0")
            case FindEnd():
                return EndIs(str(self.rows))
            case AskLatest(start):
                return LatestIs(str(min(self.rows, int(start) + self.random.randrange(25))))
            case AskSplits(start, end):
                return self.splits(int(start), int(end), self.random.randrange(3))
            case AskBacklog(start, end):
                return BacklogIs(int(end) < self.rows)
            case CommitOffset(end):
                assert all(self.is_read(row) for row in range(int(end)) if exists(row)), "not read yet"
                self.forgotten = max(self.forgotten, int(end))
                return OffsetCommitted(end)

    def progress(self) -> Any:
        raise NotImplementedError

    def splits(self, start: int, end: int, draw: int) -> SplitsAre:
        assert start >= self.forgotten, "the broker has been told that this is not needed any more"
        count = 1 + draw % 3 if any(map(exists, range(start, end))) else 0
        rows = [[row for row in range(start + i, end, count) if exists(row)] for i in range(count)]
        payloads = tuple(json.dumps(each).encode() for each in rows)
        return SplitsAre(str(start), str(end), bytes([count]), payloads, payloads)


# ---------------------------------------------------------------- positions that outlive subtasks


class AcceptedWorld(World):
    """Positions are in the vertex; subtasks are lost one by one, and the driver too."""

    def __init__(self, seed: int) -> None:
        self.positions: dict[str, bytes] = {}
        self.all_read: set[int] = set()
        super().__init__(seed)

    def unlikely(self) -> list[Callable[[], None]]:
        return [*super().unlikely(), self.down, self.down, self.driver_restarts]

    def open_keeper(self) -> PositionKeeper:
        return PositionKeeper()

    def positions_for(self, subtask: int) -> dict[str, bytes]:
        return dict(self.positions)

    def progress(self) -> Any:
        return progress_of("src", self.positions)

    def splits(self, start: int, end: int, draw: int) -> SplitsAre:
        # Planned otherwise, rows come again: that is a test of its own.
        return super().splits(start, end, end)

    def is_read(self, row: int) -> bool:
        return row in self.all_read

    def accepted(self, split: int, position: SplitPosition, rows: list[int]) -> None:
        self.positions[partition_key(split)] = position.pack()
        self.all_read.update(rows)

    def down(self) -> None:
        """What it has reported comes still."""
        subtask = self.random.randrange(self.parallelism)
        if self.slots.pop(subtask, None) is not None:
            self.told_end.discard(subtask)
            self.handle(SubtaskDown(subtask))

    def driver_restarts(self) -> None:
        self.parallelism, self.end = self.random.randint(1, 3), None
        self.start_driver()


# ---------------------------------------------------------------- checkpoints


class CheckpointedWorld(World):
    """Positions are in checkpoints, and a restore leads back to the last one, at any moment."""

    def __init__(self, seed: int) -> None:
        self.has_begun = False
        self.before: set[int] = set()
        self.restored: tuple[dict[str, bytes], bytes | None, set[int]] = ({}, None, set())
        self.number = 0
        self.under_way: dict[int, dict[int, tuple[dict[str, bytes], set[int]]]] = {}
        self.parts: dict[int, dict[str, bytes]] = {}
        super().__init__(seed)

    def likely(self) -> list[Callable[[], None]]:
        waiting = any(len(parts) < self.parallelism for parts in self.under_way.values())
        return [*super().likely(), self.trigger, *([self.snapshot] * 2 if waiting else [])]

    def unlikely(self) -> list[Callable[[], None]]:
        return [*super().unlikely(), self.restore, self.restore]

    def open_keeper(self) -> RangeKeeper[Any]:
        self.ranges = SourceCheckpoints("src", lambda event: self.handle(KeeperEvent(event)))
        return self.ranges.keeper

    def positions_for(self, subtask: int) -> dict[str, bytes]:
        # What the instance before has reported is not heard of any more.
        self.reports = [done for done in self.reports if done.split % self.parallelism != subtask]
        return self.parts.setdefault(subtask, dict(self.restored[0]))

    def is_read(self, row: int) -> bool:
        return row in self.before or any(row in slot.read for slot in self.slots.values())

    def accepted(self, split: int, position: SplitPosition, rows: list[int]) -> None:
        self.parts[split % self.parallelism][partition_key(split)] = position.pack()

    def restore(self) -> None:
        self.has_begun = True
        for subtask in sorted(self.slots):
            self.handle(SubtaskDown(subtask))
        if self.random.random() < 0.5:
            while self.reports:
                self.report()
        self.slots.clear()
        self.told_end.clear()
        self.under_way.clear()
        self.parts.clear()
        positions, captured, self.before = self.restored
        self.ranges.restore(positions, captured)

    def trigger(self) -> None:
        if len(self.slots) < self.parallelism or len(self.under_way) == 3 or not self.has_begun:
            return
        self.number += 1
        self.under_way[self.number] = {}
        self.ranges.under_way(self.under_way)

    def snapshot(self) -> None:
        subtask = self.random.randrange(self.parallelism)
        waiting = [number for number, parts in self.under_way.items() if subtask not in parts]
        if not waiting:
            return
        slot = self.slots[subtask]
        mine = {
            key: position
            for key, position in self.parts[subtask].items()
            if int(key[1:]) % self.parallelism == subtask
        }
        self.under_way[waiting[0]][subtask] = mine, set(slot.read)
        if len(self.under_way[waiting[0]]) == self.parallelism:
            self.complete(waiting[0])

    def complete(self, number: int) -> None:
        parts = self.under_way.pop(number).values()
        for older in [older for older in self.under_way if older < number]:
            del self.under_way[older]
        positions = {key: position for mine, _ in parts for key, position in mine.items()}
        captured = self.ranges.capture(positions)
        self.restored = positions, captured, self.before.union(*(read for _, read in parts))
        self.ranges.completed(captured)

    def recover(self) -> None:
        if not self.has_begun:
            self.restore()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("world", [AcceptedWorld, CheckpointedWorld])
def test_each_row_is_read_once(world: type[World], seed: int) -> None:
    world(seed).run()


# ---------------------------------------------------------------- one by one


class Rules:
    """The rules of a source at parallelism 1, and what they want."""

    def __init__(self, *, checkpoints: bool = False, **options: bool) -> None:
        self.ranges = SourceCheckpoints("src", lambda event: self.handle(KeeperEvent(event)))
        keeper: RangeKeeper[Any] = self.ranges.keeper if checkpoints else PositionKeeper()
        self.rules = PlannerRules("src", 1, keeper, **options)
        self.calls: list[CallReader] = []
        self.rest: list[PlannerInstruction] = []

    def handle(self, event: PlannerEvent, at_ms: int = 0) -> Rules:
        for instruction in self.rules.handle(event, Now(at_ms, 0)):
            if isinstance(instruction, CallReader):
                self.calls.append(instruction)
            else:
                self.rest.append(instruction)
        self.rules.validate()
        return self

    def answer(self, *answers: ReaderAnswer, at_ms: int = 0) -> Rules:
        """Answer the last call, and those that follow."""
        for answer in answers:
            self.handle(ReaderAnswered(self.calls[-1].generation, answer), at_ms)
        return self

    @property
    def asked(self) -> list[ReaderCall]:
        return [each.call for each in self.calls]

    @property
    def assigned(self) -> list[int]:
        """The ranges that were assigned; 0: the end, before any range."""
        return [each.range for each in self.rest if isinstance(each, AssignSplits)]


def splits(start: str, end: str, *payloads: bytes, digest: bytes = b"d") -> SplitsAre:
    return SplitsAre(start, end, digest, payloads, payloads)


def accepted(rows: int, *, done: bool = False) -> dict[str, bytes]:
    return {partition_key(0): SplitPosition(1, "0", "5", 1, b"d", rows, done).pack()}


FIRST = (ProgressIs(None), InitialIs("0"), LatestIs("5"), splits("0", "5", b"x"))


def test_what_is_asked_to_open_and_commit_a_range() -> None:
    rules = Rules().handle(SubtaskUp(0)).answer(*FIRST)
    assert rules.asked == [AskProgress(), AskInitial(), AskLatest("0"), AskSplits("0", "5")]
    assert rules.assigned == [1]
    rules.handle(SplitDone("src", 1, 0))
    assert rules.asked[4:] == [CommitOffset("5")]
    rules.answer(OffsetCommitted("5"))
    assert rules.asked[5:] == [AskLatest("5")]


def test_the_pause_doubles_while_there_is_nothing_new() -> None:
    rules = Rules().handle(PollDue()).answer(ProgressIs(None), InitialIs("0"))
    pauses = []
    at_ms = 1_000
    for _ in range(6):
        rules.answer(LatestIs("0"), at_ms=at_ms)
        due_ms = rules.rules.due_ms
        assert due_ms is not None
        asked = len(rules.asked)
        assert len(rules.handle(PollDue(), due_ms - 1).asked) == asked
        assert len(rules.handle(PollDue(), due_ms).asked) == asked + 1
        pauses.append(due_ms - at_ms)
        at_ms = due_ms
    assert pauses == [POLL_MS, 40, 80, 160, MAX_POLL_MS, MAX_POLL_MS]


def test_a_subtask_that_is_back_waits_for_what_was_asked_behind_it() -> None:
    rules = Rules().handle(SubtaskUp(0)).answer(*FIRST)
    rules.handle(SubtaskDown(0)).handle(SubtaskUp(0))
    assert rules.asked[4:] == [AskProgress()]
    rules.handle(SubtaskDown(0)).handle(SubtaskUp(0))
    rules.answer(ProgressIs(progress_of("src", accepted(2))))
    assert rules.asked[4:] == [AskProgress(), AskProgress()]
    assert rules.assigned == [1]
    rules.answer(ProgressIs(progress_of("src", accepted(3))))
    assert [each.mine[0].rows for each in rules.rest if isinstance(each, AssignSplits)] == [0, 3]


@pytest.mark.parametrize("digest", [b"d", b"e"])
def test_a_range_of_the_run_before_is_read_on_if_it_is_planned_as_it_was(digest: bytes) -> None:
    before = progress_of("src", accepted(3))
    rules = Rules().handle(SubtaskUp(0)).answer(ProgressIs(before))
    assert rules.asked == [AskProgress(), AskSplits("0", "5")]
    rules.answer(splits("0", "5", b"x", digest=digest))
    if digest == b"d":
        assert rules.rest == [AssignSplits("src", 0, 1, "0", "5", b"d", 1, (Split(0, b"x", 3),))]
    else:
        assert before is not None
        again = AssignSplits("src", 0, 2, "0", "5", b"e", 1, (Split(0, b"x", 0),))
        assert rules.rest == [WarnReadAgain(before), again]


def test_a_complete_range_of_the_run_before_is_committed_again() -> None:
    rules = Rules().handle(PollDue()).answer(ProgressIs(progress_of("src", accepted(3, done=True))))
    assert rules.asked == [AskProgress(), CommitOffset("5")]


def test_a_backlog_is_told_when_it_changes() -> None:
    rules = Rules(tells_backlog=True).handle(SubtaskUp(0)).answer(*FIRST)
    assert rules.asked[4:] == [AskBacklog("0", "5")]
    assert rules.assigned == []
    for number, is_behind in enumerate((True, True, False), 1):
        end = str(5 * number)
        rules.answer(BacklogIs(is_behind))
        rules.handle(SplitDone("src", number, 0))
        rules.answer(OffsetCommitted(end), LatestIs(end + "0"), splits(end, end + "0", b"x"))
    assert [each for each in rules.rest if isinstance(each, TellBacklog)] == [
        TellBacklog(True),
        TellBacklog(False),
    ]


def test_draining_opens_no_range_that_is_being_planned() -> None:
    rules = Rules().handle(SubtaskUp(0)).answer(*FIRST[:3]).handle(DrainSource()).answer(FIRST[3])
    assert rules.assigned == []
    assert rules.rules.due_ms is None


def test_the_end_is_told_when_it_is_read() -> None:
    rules = Rules(stop_at_latest=True).handle(SubtaskUp(0))
    rules.answer(ProgressIs(None), InitialIs("0"), EndIs("5"), splits("0", "5", b"x"))
    assert rules.asked == [AskProgress(), AskInitial(), FindEnd("0"), AskSplits("0", "5")]
    rules.handle(SplitDone("src", 1, 0)).answer(OffsetCommitted("5"))
    assert rules.rest[1:] == [AssignSplits("src", 0, 1, "5", "5", b"", 0, ())]
    assert rules.rules.due_ms is None


def test_closing_waits_for_a_commit_that_is_due() -> None:
    rules = Rules().handle(SubtaskUp(0)).answer(*FIRST).handle(SplitDone("src", 1, 0)).handle(CloseSource())
    assert rules.asked[4:] == [CommitOffset("5")]
    assert StopReader() not in rules.rest
    rules.answer(OffsetCommitted("5"))
    assert rules.rest[1:] == [StopReader()]
    assert rules.handle(SubtaskDown(0)).asked[5:] == []


def test_closing_waits_for_what_the_reader_does() -> None:
    rules = Rules().handle(PollDue()).answer(*FIRST[:2]).handle(CloseSource())
    assert rules.rest == []
    rules.answer(LatestIs("5"))
    assert rules.rest == [StopReader()]


def test_an_answer_from_before_a_restore_is_ignored() -> None:
    rules = Rules(checkpoints=True).handle(SubtaskUp(0))
    assert rules.calls == []
    rules.ranges.restore({}, None)
    first = rules.calls[-1]
    rules.handle(SubtaskDown(0))
    rules.ranges.restore({}, None)
    rules.handle(SubtaskUp(0))
    assert rules.asked == [AskInitial(), AskInitial()]
    assert rules.handle(ReaderAnswered(first.generation, InitialIs("7"))).asked == [
        AskInitial(),
        AskInitial(),
    ]
    rules.answer(InitialIs("0"), LatestIs("5"))
    stale = rules.calls[-1]
    checkpoint = rules.ranges.capture({})
    rules.handle(SubtaskDown(0))
    rules.ranges.restore({}, checkpoint)
    rules.handle(ReaderAnswered(stale.generation, splits("0", "5", b"x")))
    assert rules.assigned == []
    assert rules.ranges.capture({}) == checkpoint


def test_where_a_source_ends_is_asked_once_however_often_it_is_restored() -> None:
    rules = Rules(checkpoints=True, stop_at_latest=True)
    rules.ranges.restore({}, None)
    rules.answer(InitialIs("0"))
    rules.ranges.restore({}, None)
    assert rules.asked == [AskInitial(), FindEnd("0")]
    rules.answer(EndIs("5"), InitialIs("0"))
    assert rules.asked[2:] == [AskInitial(), AskSplits("0", "5")]


def test_a_report_behind_the_loss_counts_where_what_was_read_outlives_the_subtask() -> None:
    done = SplitDone("src", 1, 0)
    rules = Rules().handle(SubtaskUp(0)).answer(*FIRST).handle(SubtaskDown(0)).handle(done)
    assert rules.asked[4:] == [CommitOffset("5")]
    rules = Rules(checkpoints=True).handle(SubtaskUp(0))
    rules.ranges.restore({}, None)
    rules.answer(*FIRST[1:]).handle(SubtaskDown(0)).handle(done)
    assert rules.asked[3:] == []
    rules.handle(SubtaskUp(0)).handle(done)
    assert rules.asked[3:] == [AskLatest("5")]
