"""The rules of a reader source's planner against a model: every row is read once, whatever happens when."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.runtime.acker_mode.driver.job_vertex import FloorKeeper
from ftlayer.runtime.barrier_mode.driver.rules.reader_checkpoints import SourceCheckpoints
from ftlayer.runtime.connectors.offset_reader import (
    PositionChain,
    SplitPosition,
    pack_range,
    partition_key,
    progress_of,
    unpack_split,
)
from ftlayer.runtime.driver.rules.planner_rules import (
    CallReader,
    KeeperEvent,
    PlannedRange,
    PlannerEvent,
    PlannerRules,
    PollDue,
    PositionKeeper,
    RangeKeeper,
    ReaderAnswered,
    ReaderCalls,
    SubtaskDown,
    SubtaskUp,
)
from ftlayer.runtime.protocol.messages import AssignSplits, ReaderRange, Split, SplitDone

MANY = 5_000
"""It has come to an end by then."""


def exists(row: int) -> bool:
    """A range of rows that do not exist has no splits."""
    return row % 4 != 0


@dataclass(eq=False)
class Slot:
    """One instance of a subtask: reads the splits that it is assigned, row by row."""

    chain: PositionChain
    todo: list[tuple[AssignSplits, Split]] = field(default_factory=list)
    read: set[int] = field(default_factory=set)

    def assign(self, message: AssignSplits) -> None:
        for split in message.mine:
            last = self.chain.last(partition_key(split.number))
            position = None if last is None else unpack_split("src", last)
            here = position is not None and position.range.number == message.range.number
            assert split.rows == (position.rows if here and position is not None else 0)
            self.todo.append((message, split))


class World(ReaderCalls):
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
        self.at_work: ReaderAnswered | None = None
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
                case AssignSplits(subtask=subtask, range=ReaderRange(splits=0)):
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
        self.at_work = self.call.carried_out(self)

    def answer(self) -> None:
        assert self.at_work is not None
        answered, self.at_work = self.at_work, None
        if self.call is answered.call:
            self.call = None
        if answered.call.method is ReaderCalls.find_end:
            assert self.end is None, "the end is asked for twice"
            assert answered.answer is not None
            self.end = int(answered.answer)
        self.handle(answered)

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
        position = SplitPosition(message.range, until, done)
        slot.chain.advance(partition_key(split.number), position.pack())
        self.accepted(split.number, position, rows[split.rows : until])
        if done:
            slot.todo.pop(0)
            self.reports.append(SplitDone("src", message.range.number, split.number))
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

    def progress(self) -> Any:
        raise NotImplementedError

    def initial(self) -> str:
        return "0"

    def find_end(self, start: str) -> str:
        return str(self.rows)

    def latest(self, start: str) -> str:
        return str(min(self.rows, int(start) + self.random.randrange(25)))

    def splits(self, number: int, start: str, end: str, digest: bytes) -> Any:
        planned = self.plan(number, int(start), int(end), self.random.randrange(3))
        return planned, planned

    def is_behind(self, start: str, end: str) -> bool:
        return int(end) < self.rows

    def lag(self, at: str) -> int:
        return self.rows - int(at)

    def commit(self, end: str) -> str:
        assert all(self.is_read(row) for row in range(int(end)) if exists(row)), "not read yet"
        self.forgotten = max(self.forgotten, int(end))
        return end

    def plan(self, number: int, start: int, end: int, draw: int) -> PlannedRange:
        assert start >= self.forgotten, "the broker has been told that this is not needed any more"
        count = 1 + draw % 3 if any(map(exists, range(start, end))) else 0
        rows = [[row for row in range(start + i, end, count) if exists(row)] for i in range(count)]
        payloads = tuple(json.dumps(each).encode() for each in rows)
        return PlannedRange(number, str(start), str(end), bytes([count]), payloads)


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

    def plan(self, number: int, start: int, end: int, draw: int) -> PlannedRange:
        # Planned otherwise, rows come again: that is a test of its own.
        return super().plan(number, start, end, end)

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


@dataclass
class Registered:
    """Rows of a split up to a position, as the vertex knows them; ``holder`` has them in memory."""

    position: SplitPosition
    rows: list[int]
    holder: Slot | None


class ReadAgainWorld(World):
    """Rows are done some time after they are read: what a lost subtask had read and was not done is read again.

    The vertex has what was registered behind each partition's floor, and may be lost with the driver.
    """

    def __init__(self, seed: int) -> None:
        self.positions: dict[str, bytes] = {}
        self.registered: dict[str, deque[Registered]] = {}
        self.notes: dict[int, bytes] = {}
        self.all_done: set[int] = set()
        super().__init__(seed)

    def run(self) -> None:
        super().run()
        for _ in range(20):
            happens = self.poll if self.call is None and self.at_work is None else self.call_and_answer
            if self.rules.due_ms is not None or happens != self.poll:
                happens()
        reached = self.rows if self.end is None else self.end
        assert not any(exists(row) for row in range(self.forgotten, reached)), (
            "all is done, and not committed"
        )

    def call_and_answer(self) -> None:
        if self.at_work is None:
            self.call_reader()
        self.answer()

    def unlikely(self) -> list[Callable[[], None]]:
        return [*super().unlikely(), self.down, self.down, self.driver_restarts]

    def possible(self) -> list[Callable[[], None]]:
        ready = [key for key, known in self.registered.items() if known and known[0].holder is not None]
        return [*super().possible(), *(partial(self.finish, key) for key in ready)]

    def open_keeper(self) -> FloorKeeper:
        return FloorKeeper()

    def positions_for(self, subtask: int) -> dict[str, bytes]:
        return dict(self.positions)

    def progress(self) -> Any:
        return progress_of("src", self.positions, [self.notes[number] for number in sorted(self.notes)])

    def plan(self, number: int, start: int, end: int, draw: int) -> PlannedRange:
        return super().plan(number, start, end, end)

    def keep(self, planned: PlannedRange, first: int) -> None:
        self.notes = {number: each for number, each in self.notes.items() if number >= first}
        self.notes[planned.number] = pack_range(planned.range)

    def is_read(self, row: int) -> bool:
        return row in self.all_done

    def accepted(self, split: int, position: SplitPosition, rows: list[int]) -> None:
        """What is registered is read again; what is behind it is new, and is next to it."""
        assert position.range.number in self.notes, "a range is read that was not noted"
        key = partition_key(split)
        known = self.registered.setdefault(key, deque())
        holder = self.slots[split % self.parallelism]
        for each in known:
            if place_of(each.position) <= place_of(position) and holder.read.issuperset(each.rows):
                each.holder = holder
        head = known[-1].position if known else None
        if head is None and key in self.positions:
            head = unpack_split("src", self.positions[key])
        behind = rows
        if head is not None and head.range.number == position.range.number:
            behind = (
                rows[max(0, len(rows) - (position.rows - head.rows)) :] if position.rows > head.rows else []
            )
        elif head is not None and head.range.number > position.range.number:
            return
        else:
            assert position.rows == len(rows), "its first rows are missing"
            assert head is None or head.done, "rows are missing before these"
        if behind or (head is None or place_of(head) < place_of(position)):
            known.append(Registered(position, behind, holder))

    def finish(self, key: str) -> None:
        """The first rows of a partition that are not done are done."""
        done = self.registered[key].popleft()
        self.positions[key] = done.position.pack()
        self.all_done.update(done.rows)

    def down(self) -> None:
        subtask = self.random.randrange(self.parallelism)
        slot = self.slots.pop(subtask, None)
        if slot is not None:
            self.lose(slot)
            self.told_end.discard(subtask)
            self.handle(SubtaskDown(subtask))

    def lose(self, slot: Slot) -> None:
        for known in self.registered.values():
            for each in known:
                each.holder = None if each.holder is slot else each.holder

    def driver_restarts(self) -> None:
        for slot in self.slots.values():
            self.lose(slot)
        if self.random.random() < 0.5:
            self.registered.clear()
        self.parallelism, self.end = self.random.randint(1, 3), None
        self.start_driver()


def place_of(position: SplitPosition) -> tuple[int, int, bool]:
    return position.range.number, position.rows, position.done


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
@pytest.mark.parametrize("world", [AcceptedWorld, ReadAgainWorld, CheckpointedWorld])
def test_each_row_is_read_once(world: type[World], seed: int) -> None:
    world(seed).run()
