"""The driver of an exact job, and its slots: everything happens when a walk says so."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from once_outside import ID, KEY, Outside, Reader, Table
from once_slots import SinkSlot, SourceSlot, no_cancel

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskRestore, SubtaskSnapshot
from ftlayer.common.clock import Now
from ftlayer.common.rules.restart import FixedDelay
from ftlayer.errors import CommitFailedError, JobError
from ftlayer.records.partitioning import Rebalance
from ftlayer.runtime.barrier_mode.driver.committing import Committer
from ftlayer.runtime.barrier_mode.driver.rules.reader_checkpoints import ReaderCheckpoints, unpack_captured
from ftlayer.runtime.barrier_mode.task.mode import BarrierTaskMode
from ftlayer.runtime.connectors.offset_reader import partition_key, unpack_split
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.driver.planners import Planners
from ftlayer.runtime.driver.rules.planner_rules import MAX_POLL_MS
from ftlayer.runtime.protocol.messages import AssignSplits, unseal
from ftlayer.runtime.slot.main import ANY_CHECKPOINT
from ftlayer.runtime.task.actions import Send
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.contract import NO_SUSPECTS
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import ReaderSource, Sink, Source, WriterSink


def no_state(chain: str, subtask: int, keys: Any) -> Any:
    raise AssertionError(f"{chain!r} keeps no state")


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
        source = Source("src", ReaderSource(self.reader), ID, restart=FixedDelay(attempts=1, delay="1ms"))
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

        def open_sinks(sink: Sink, number: int, parallelism: int, may_refuse: bool) -> Any:
            own = Sink(sink.uid, WriterSink(table, 1, 1), sink.schema)
            return open_sink(own, number, parallelism, may_refuse, run="run", checkpoint_key=KEY)

        restored = {} if restore is None else {(uid, subtask): restore}
        mode = BarrierTaskMode(restored, no_state, open_sinks, lambda _: NO_SUSPECTS)
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
        planner = self.planners.by_source["src"]
        planner.work()
        planner.rules.validate()

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
                if position is not None and position.range.number > planned.number:
                    continue
                rows = [row for row in unseal(payload, KEY).rows if row not in hidden]
                same = position is not None and position.range.number == planned.number
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
