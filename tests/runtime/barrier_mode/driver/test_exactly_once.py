"""A reader source, a writer's sink, and all that is between them in barrier mode, through crashes at any point.

Everything is real but threads, channels, the rules of the coordinator, and what is outside: a broker that forgets what
its reader has committed, and plans every range otherwise each time, and a table that takes each id once.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskRestore, SubtaskSnapshot
from ftlayer.clock import Now
from ftlayer.errors import CommitFailedError, JobError
from ftlayer.partitioning.partitioners import Rebalance
from ftlayer.restart import FixedDelay
from ftlayer.runtime.barrier_mode.driver.committing import Committer
from ftlayer.runtime.barrier_mode.driver.range_log import unpack_captured
from ftlayer.runtime.barrier_mode.driver.reader_checkpoints import ReaderCheckpoints
from ftlayer.runtime.barrier_mode.task.mode import BarrierTaskMode
from ftlayer.runtime.connectors import committing_sink
from ftlayer.runtime.connectors.lane import SplitProgress
from ftlayer.runtime.connectors.offset_reader import read_split
from ftlayer.runtime.connectors.positions import PositionChain, SplitPosition, partition_key, unpack_split
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.driver.planner_rules import MAX_POLL_MS
from ftlayer.runtime.driver.planners import Planners
from ftlayer.runtime.protocol.messages import AssignSplits, Split, SplitDone
from ftlayer.runtime.protocol.sealed import unseal
from ftlayer.runtime.slot.main import ANY_CHECKPOINT
from ftlayer.runtime.task.actions import Send
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.events import ElementCame, TaskStart
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import ReaderSource, Sink, Source, WriterSink

ID = pa.schema([("id", pa.int64())])
KEY = b"k" * 32
NOW = Now(0, 0)

OUTSIDE = sys.modules.setdefault("ftlayer_test_outside", ModuleType("ftlayer_test_outside"))
"""By its name, a module means the same to a copy of what refers to it; this one is not imported by name."""


def no_cancel() -> bool:
    return False


def no_state(chain: str, subtask: int, keys: Any) -> Any:
    raise AssertionError(f"{chain!r} keeps no state")


# ---------------------------------------------------------------- what is outside


class Outside:
    """The broker and the table. Outlives drivers and slots."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rows = 0
        self.hidden: set[int] = set()  # in ranges that turned out to have no splits: they stay without
        self.forgotten = 0
        self.table: list[int] = []
        self.ids: dict[int, tuple[int, ...]] = {}
        self.aborted: set[int] = set()
        self.staged: dict[int, Any] = {}
        self.numbers = itertools.count()
        self.during: dict[str, Any] = {}

    def __reduce__(self) -> Any:
        setattr(OUTSIDE, f"outside{id(self)}", self)
        return getattr, (OUTSIDE, f"outside{id(self)}")

    def call(self, name: str) -> None:
        """Let happen what is to happen while a user's method is at work."""
        happens = self.during.pop(name, None)
        if happens is not None:
            happens()


class Piece(InputPartition):
    def __init__(self, rows: range) -> None:
        self.rows = rows


class Reader(DataSourceStreamReader):
    def __init__(self, outside: Outside) -> None:
        self.outside = outside

    def initialOffset(self) -> Any:
        return {"index": self.outside.forgotten}

    def latestOffset(self, start: Any, limit: Any) -> Any:
        self.outside.call("latestOffset")
        return {"index": self.outside.random.randint(start["index"], self.outside.rows)}

    def getDefaultReadLimit(self) -> Any:
        return None

    def partitions(self, start: Any, end: Any) -> list[Piece]:
        self.outside.call("partitions")
        if self.outside.random.random() < 0.1:
            # Nothing is lost: there is just nothing there that anybody may see.
            self.outside.hidden.update(range(start["index"], end["index"]))
        if self.outside.hidden.issuperset(range(start["index"], end["index"])):
            return []
        count = self.outside.random.randint(1, 4)
        return [Piece(range(start["index"] + i, end["index"], count)) for i in range(count)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Piece)
        for row in partition.rows:
            assert row >= self.outside.forgotten, "the broker has been told that this is not needed any more"
            if row not in self.outside.hidden:
                yield (row,)

    def commit(self, end: Any) -> None:
        self.outside.call("commit")
        self.outside.forgotten = max(self.outside.forgotten, end["index"])


class Message(WriterCommitMessage):
    def __init__(self, number: int, rows: list[int]) -> None:
        self.number, self.rows = number, rows


class Table(DataSourceStreamArrowWriter):
    def __init__(self, outside: Outside) -> None:
        self.outside = outside

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
        self.outside.call("write")
        rows = [row for batch in iterator for row in batch.column(0).to_pylist()]
        assert rows, "there was nothing to write"
        message = Message(next(self.outside.numbers), rows)
        self.outside.staged[message.number] = self
        return message

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - pyspark's name
        assert messages
        self.outside.call("before commit")
        numbers = tuple(message.number for message in messages)
        assert len(set(numbers)) == len(numbers)
        if batchId in self.outside.ids:
            assert self.outside.ids[batchId] == numbers, "an id came again with other messages"
            return
        for message in messages:
            assert message.number not in self.outside.aborted
            assert all(message.number not in known for known in self.outside.ids.values())
            self.outside.table += message.rows
        self.outside.ids[batchId] = numbers
        self.outside.call("after commit")

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - pyspark's name
        for message in messages:
            assert all(message.number not in known for known in self.outside.ids.values())
            self.outside.aborted.add(message.number)


# ---------------------------------------------------------------- slots


class SourceSlot:
    """A source's subtask with a reader that reads when it is told to."""

    def __init__(self, world: World, subtask: int, restore: SubtaskRestore, before: frozenset[int]) -> None:
        self.world, self.subtask = world, subtask
        self.task, self.checkpoints = world.build("src", subtask, restore)
        self.positions = PositionChain(restore.positions)
        self.todo: deque[tuple[SplitProgress, Iterator[Any], AssignSplits, Split]] = deque()
        self.control: deque[Any] = deque()
        self.emitted = set(before)

    def assign(self, message: AssignSplits) -> None:
        for split in message.mine:
            key = partition_key(split.number)
            last = self.positions.last(key)
            position = None if last is None else unpack_split("src", last)
            if position is not None and position.range == message.range:
                assert (position.rows, position.done) == (split.rows, False)
            else:
                assert split.rows == 0

            def position_of(rows: int, done: bool, message: AssignSplits = message) -> bytes:
                return SplitPosition(
                    message.range, message.start, message.end, message.splits, message.digest, rows, done
                ).pack()

            progress = SplitProgress(key, 0, split.rows, self.positions, position_of, tells_done=True)
            rows = itertools.islice(
                read_split(self.world.reader, unseal(split.payload, KEY)), split.rows, None
            )
            self.todo.append((progress, rows, message, split))

    def read(self, most: int) -> None:
        if not self.todo:
            return
        progress, iterator, message, split = self.todo[0]
        rows = [row for (row,) in itertools.islice(iterator, most)]
        done = len(rows) < most
        payload = pa.record_batch([pa.array(rows, pa.int64())], schema=ID)
        self.world.send(self.task.handle(progress.advance(payload, done=done), NOW))
        assert not self.emitted & set(rows), "a row was read twice"
        self.emitted |= set(rows)
        if done:
            self.todo.popleft()
            self.world.planners.split_done(SplitDone("src", message.range, split.number))

    def take_control(self) -> None:
        if not self.control:
            return
        barrier = self.control.popleft()
        if isinstance(barrier, int):
            self.checkpoints.completed(barrier)
            return
        actions, pending = self.checkpoints.snapshot(barrier, NOW)
        assert actions == []
        part = pending.write(None, no_cancel)
        pending.release()
        for receiver in range(self.world.parallelism):
            self.world.channels[self.subtask, receiver].append(barrier)
        self.world.acked(barrier.checkpoint, part, self.emitted)


class SinkSlot:
    """A sink's subtask that aligns its channels."""

    def __init__(self, world: World, subtask: int) -> None:
        self.world, self.subtask = world, subtask
        self.table = Table(world.outside)
        self.task, self.checkpoints = world.build("out", subtask, None, self.table)
        self.task.handle(TaskStart(), NOW)
        self.arrived: set[int] = set()
        self.control: deque[int] = deque()
        self.writing: list[tuple[int, Any]] = []

    def take(self, place: int) -> None:
        world = self.world
        ready = [
            sender
            for sender in range(world.parallelism)
            if sender not in self.arrived and world.channels[sender, self.subtask]
        ]
        if not ready:
            return
        sender = ready[place % len(ready)]
        element = world.channels[sender, self.subtask].popleft()
        if not isinstance(element, Barrier):
            self.task.handle(ElementCame(Channel(0, sender, self.subtask), element), NOW)
            return
        self.arrived.add(sender)
        if len(self.arrived) == world.parallelism:
            self.arrived.clear()
            _, pending = self.checkpoints.snapshot(element, NOW)
            self.writing.append((element.checkpoint, pending))

    def write(self, place: int) -> None:
        if not self.writing:
            return
        checkpoint, pending = self.writing.pop(place % len(self.writing))
        try:
            part = pending.write(None, no_cancel)
        except JobError:
            self.world.give_up(checkpoint)
        else:
            self.world.acked(checkpoint, part, set())
        pending.release()

    def take_control(self) -> None:
        if self.control:
            self.checkpoints.completed(self.control.popleft())


# ---------------------------------------------------------------- the driver


@dataclass
class Pending:
    barrier: Barrier
    parts: dict[tuple[str, int], SubtaskSnapshot] = field(default_factory=dict)
    emitted: set[int] = field(default_factory=set)


def _check_expected(error: CommitFailedError) -> None:
    if not isinstance(error.__cause__, OSError):
        raise error


class World:
    """A driver and its slots; ``durable`` outlives them."""

    def __init__(self, outside: Outside) -> None:
        self.outside = outside
        self.durable: list[tuple[Checkpoint, frozenset[int]]] = []
        self.last = 0
        self.dead: set[Any] = set()
        self.saved: set[int] = set()
        self.zombies: list[Any] = []
        self.now_ms = 0
        self.generation = 0

    def start_driver(self, parallelism: int) -> None:
        self.parallelism = parallelism
        self.reader = Reader(self.outside)
        source = Source("src", ReaderSource(self.reader), ID, restart=FixedDelay(attempts=1, delay=1))
        # A copy of the writer for each subtask, as slots have them: those of a driver that is gone write no more.
        sink = Sink("out", WriterSink(Table(self.outside), 1, 1), ID)
        self.graph = JobGraph(
            "job",
            (JobVertex("src", (source,), parallelism), JobVertex("out", (sink,), parallelism)),
            (JobEdge(0, "src", "out", 0, Rebalance(), ID),),
            tracked=False,
            max_parallelism=8,
        )
        self.mail: deque[AssignSplits] = deque()
        self.readers = ReaderCheckpoints(self.graph)
        self.planners = Planners(
            self.graph,
            self.readers.open,
            KEY,
            send=self.mail.append,
            failed=self._broken,
            clock=lambda: Now(self.now_ms, 0),
        )
        self.committer = Committer(self.graph, KEY)
        self.pending: dict[int, Pending] = {}
        self.given_up: list[SubtaskSnapshot] = []
        self.committing: Checkpoint | None = None
        self.sources: list[SourceSlot] = []
        self.sinks: list[SinkSlot] = []
        self.channels: dict[tuple[int, int], deque[Any]] = {}
        self.restore(set())

    def _broken(self, error: Exception) -> None:
        raise AssertionError(error)

    def build(
        self, uid: str, subtask: int, restore: SubtaskRestore | None, table: Table | None = None
    ) -> tuple[Any, Any]:
        """Return a task, and its part in checkpoints; what a sink's writes goes to ``table``."""

        def open_sinks(sink: Sink, number: int, parallelism: int) -> Any:
            own = Sink(sink.uid, WriterSink(table, 1, 1), sink.schema)
            return open_sink(own, number, parallelism, "run", KEY)

        restored = {} if restore is None else {(uid, subtask): restore}
        mode = BarrierTaskMode(restored, no_state, open_sinks)
        return build_task(self.graph, uid, subtask, mode), mode.checkpointed[uid, subtask]

    # ------------------------------------------------------------ recovery

    def crash_driver(self, parallelism: int) -> None:
        """The driver is gone, and with it its slots."""
        self.dead.update(slot.table for slot in self.sinks)
        self.outside.during.clear()
        self.start_driver(parallelism)

    def restore(self, lost: set[int]) -> None:
        """Slots ``lost`` are gone: reset the others, and deploy all."""
        self.generation += 1
        for slot in range(self.parallelism):
            self.planners.slot_down(slot)
        self.give_up_all()
        while True:
            checkpoint, before = self.durable[-1] if self.durable else (None, frozenset())
            try:
                if checkpoint is not None:
                    self.committer.commit(checkpoint.checkpoint, checkpoint.subtasks)
                break
            except CommitFailedError as error:
                _check_expected(error)
        self.committing = None
        self.readers.restore(checkpoint, range(self.parallelism))
        self.committer.abort(self.given_up)
        self.given_up = []
        # A survivor goes on until it hears of it.
        for source in self.sources:
            if source.subtask not in lost and self.outside.random.random() < 0.5:
                source.read(3)
        # What was sent before finds its slot down.
        self.mail.clear()
        restored = 0 if checkpoint is None else checkpoint.checkpoint
        for sink in self.sinks:
            if sink.subtask in lost:
                self.dead.add(sink.table)
            else:
                sink.checkpoints.discard(restored, ANY_CHECKPOINT)
                # What was being written when it was discarded comes to its end later.
                self.zombies += [pending for _, pending in sink.writing]
        positions = {
            partition: position
            for part in (() if checkpoint is None else checkpoint.subtasks)
            for partition, position in part.positions.items()
        }
        self.channels = {
            (sender, receiver): deque()
            for sender in range(self.parallelism)
            for receiver in range(self.parallelism)
        }
        self.sinks = [SinkSlot(self, subtask) for subtask in range(self.parallelism)]
        self.sources = []
        for subtask in range(self.parallelism):
            restore = SubtaskRestore("src", subtask, positions=positions)
            self.sources.append(SourceSlot(self, subtask, restore, before))
            self.planners.slot_up(subtask)

    # ------------------------------------------------------------ going on

    def send(self, actions: list[Any]) -> None:
        for action in actions:
            assert isinstance(action, Send)
            self.channels[action.channel.sender, action.channel.receiver].append(action.element)

    def plan(self) -> None:
        """Have the reader called, if the planner wants that."""
        self.now_ms += MAX_POLL_MS
        self.planners.by_source["src"].work()

    def deliver(self) -> None:
        if self.mail:
            message = self.mail.popleft()
            self.sources[message.subtask].assign(message)

    def sink_takes(self, subtask: int, place: int) -> None:
        sink = self.sinks[subtask]
        try:
            sink.take(place)
        except JobError:
            self.restore({subtask})

    # ------------------------------------------------------------ checkpoints

    def trigger(self, kind: SnapshotKind) -> None:
        self.last += 1
        barrier = Barrier(self.last, 0, kind=kind)
        self.pending[self.last] = Pending(barrier)
        self.readers.under_way(self.pending)
        for source in self.sources:
            source.control.append(barrier)

    def acked(self, checkpoint: int, part: SubtaskSnapshot, emitted: set[int]) -> None:
        pending = self.pending.get(checkpoint)
        if pending is not None:
            pending.parts[part.uid, part.subtask] = part
            pending.emitted |= emitted

    def give_up(self, checkpoint: int) -> None:
        pending = self.pending.pop(checkpoint, None)
        if pending is not None:
            self.given_up += pending.parts.values()
            for slot in (*self.sources, *self.sinks):
                slot.checkpoints.aborted(checkpoint)

    def give_up_all(self) -> None:
        for checkpoint in list(self.pending):
            self.give_up(checkpoint)

    def publish(self) -> None:
        """Publish a checkpoint all parts of which are there."""
        if self.committing is not None:
            return
        ready = [n for n, pending in self.pending.items() if len(pending.parts) == 2 * self.parallelism]
        if not ready:
            return
        number = self.outside.random.choice(ready)
        pending = self.pending[number]
        parts = tuple(pending.parts.values())
        sources = self.readers.capture(parts)
        self._check_captured(parts, sources["src"], pending.emitted)
        checkpoint = Checkpoint(
            number, "job", "run", "", 0, 0, 8, (), self.committer.uncommitted(number, parts), sources
        )
        del self.pending[number]
        if pending.barrier.kind is SnapshotKind.SAVEPOINT:
            self.saved.update(
                unseal(each.message, KEY).number for part in checkpoint.subtasks for each in part.committables
            )
            return
        for other in [other for other in self.pending if other < number]:
            if self.pending[other].barrier.kind is not SnapshotKind.SAVEPOINT:
                self.give_up(other)
        self.durable.append((checkpoint, frozenset(pending.emitted)))
        self.committing = checkpoint

    def commit(self) -> None:
        checkpoint = self.committing
        if checkpoint is None:
            return
        generation = self.generation
        try:
            self.committer.commit(checkpoint.checkpoint, checkpoint.subtasks)
        except CommitFailedError as error:
            _check_expected(error)
            if generation == self.generation:
                self.restore(set())
            return
        self.committing = None
        self.readers.completed(checkpoint)
        for slot in (*self.sources, *self.sinks):
            slot.control.append(checkpoint.checkpoint)

    def _check_captured(self, parts: Any, captured: bytes, emitted: set[int]) -> None:
        """What would be read if this were restored is what has not been."""
        if not captured:
            assert not emitted
            return
        found = unpack_captured(captured)
        positions = {
            key: unpack_split("src", packed) for part in parts for key, packed in part.positions.items()
        }
        hidden = self.outside.hidden
        again: set[int] = set()
        for planned in found.ranges:
            for split, payload in enumerate(planned.payloads):
                position = positions.get(partition_key(split))
                if position is not None and position.range > planned.number:
                    continue
                rows = [row for row in unseal(payload, KEY).rows if row not in hidden]
                same = position is not None and position.range == planned.number
                again |= set(rows[position.rows if same and position is not None else 0 :])
        at = json.loads(found.at)["index"]
        assert not again & emitted
        assert again | emitted | hidden >= set(range(at))
        assert all(row < at for row in again | emitted)

    def finish(self) -> None:
        """Let everything come to its end."""
        self.outside.during.clear()
        everything = set(range(self.outside.rows)) - self.outside.hidden
        for _ in range(10_000):
            everything = set(range(self.outside.rows)) - self.outside.hidden
            self.work()
            if set().union(*(source.emitted for source in self.sources)) == everything:
                break
        self.trigger(SnapshotKind.CHECKPOINT)
        final = self.last
        for _ in range(1_000):
            self.work()
            if self.committing is None and self.durable and self.durable[-1][0].checkpoint == final:
                break
        assert sorted(self.outside.table) == sorted(everything)
        for zombie in self.zombies:
            zombie.write(None, no_cancel)
        committed = {number for numbers in self.outside.ids.values() for number in numbers}
        for number, writer in self.outside.staged.items():
            over = number in committed or number in self.outside.aborted
            assert over or number in self.saved or writer in self.dead
        assert not self.saved & self.outside.aborted

    def work(self) -> None:
        self.plan()
        while self.mail:
            self.deliver()
        for subtask in range(self.parallelism):
            self.sources[subtask].read(5)
            self.sources[subtask].take_control()
            for place in range(self.parallelism + 1):
                self.sink_takes(subtask, place)
            self.sinks[subtask].write(0)
            self.sinks[subtask].take_control()
        self.publish()
        self.commit()


class Walk:
    """Steps of all parts in random order, and what may happen to them. The same for the same seed."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        monkeypatch.setattr(committing_sink, "MAX_BYTES", self.random.choice([100, 1 << 20]))
        self.outside = Outside(self.random.getrandbits(32))
        self.world = World(self.outside)
        self.world.start_driver(self.random.randint(1, 3))
        # Some walks have a slot that is slow, and others that are ranges ahead of it.
        self.slow = self.random.choice([None, 0, 1])

    def run(self, steps: int) -> None:
        usual = [self.grow, self.plan, self.deliver, self.read, self.read, self.source_hears, self.sink_takes]
        usual += [self.sink_takes, self.sink_writes, self.sink_hears, self.publish, self.commit]
        rare = [self.expires, self.slots_crash, self.driver_crashes, self.reader_is_busy, self.sink_fails]
        for _ in range(steps):
            kind = self.random.random()
            if kind < 0.02:
                self.random.choice(rare)()
            elif kind < 0.06:
                self.trigger()
            elif kind < 0.10:
                self.world.work()
            else:
                self.random.choice(usual)()
        self.world.finish()

    def slot(self) -> int:
        slot = self.random.randrange(self.world.parallelism)
        return self.random.randrange(self.world.parallelism) if slot == self.slow else slot

    def grow(self) -> None:
        self.outside.rows += self.random.randint(1, 6)

    def plan(self) -> None:
        for _ in range(self.random.randint(1, 5)):
            self.world.plan()

    def deliver(self) -> None:
        self.world.deliver()

    def read(self) -> None:
        self.world.sources[self.slot()].read(self.random.randint(1, 8))

    def source_hears(self) -> None:
        self.world.sources[self.slot()].take_control()

    def sink_takes(self) -> None:
        self.world.sink_takes(self.slot(), self.random.randrange(6))

    def sink_writes(self) -> None:
        self.world.sinks[self.slot()].write(self.random.randrange(6))

    def sink_hears(self) -> None:
        self.world.sinks[self.slot()].take_control()

    def publish(self) -> None:
        self.world.publish()

    def commit(self) -> None:
        self.world.commit()

    def trigger(self) -> None:
        if len(self.world.pending) < 3:
            savepoint = self.random.random() < 0.3
            self.world.trigger(SnapshotKind.SAVEPOINT if savepoint else SnapshotKind.CHECKPOINT)

    def expires(self) -> None:
        if self.world.pending:
            self.world.give_up(self.random.choice(sorted(self.world.pending)))

    def slots_crash(self) -> None:
        self.world.restore({slot for slot in range(self.world.parallelism) if self.random.random() < 0.5})

    def driver_crashes(self) -> None:
        self.world.crash_driver(self.random.randint(1, 3))

    def reader_is_busy(self) -> None:
        """The planner's thread is in a method of the reader while the coordinator's restores the job."""
        checkpoints = self.random.random() < 0.5

        def happens() -> None:
            world = self.world
            world.restore(set())
            if checkpoints:
                plan = world.plan
                world.plan = lambda: None  # type: ignore[method-assign]
                world.trigger(SnapshotKind.CHECKPOINT)
                for _ in range(3):
                    world.work()
                world.plan = plan  # type: ignore[method-assign]

        self.outside.during[self.random.choice(["latestOffset", "partitions", "commit"])] = happens

    def sink_fails(self) -> None:
        where = self.random.choice(["write", "before commit", "after commit"])

        def happens() -> None:
            raise OSError(where)

        self.outside.during[where] = happens


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32))
def test_each_record_is_in_the_table_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Walk(seed, monkeypatch).run(400)
