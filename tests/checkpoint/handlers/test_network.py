"""Sources, maps and sinks with handlers: every checkpoint that completes is a consistent cut through all of them."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.barrier import Alignment, Barrier, CancelMarker, SnapshotKind
from ftlayer.checkpoint.handlers import (
    AllBarriers,
    BarrierHandler,
    BlockChannel,
    Decision,
    GiveUp,
    StopCapture,
    TakeSnapshot,
    Unblock,
    make_handler,
)
from ftlayer.checkpoint.options import CheckpointingMode

Record = tuple[int, int]
"""Number of its source, and its number there."""


@dataclass
class Queue:
    """A channel that has arrived at its task."""

    task: Task
    number: int
    items: deque[Record | Barrier | CancelMarker] = field(default_factory=deque)
    blocked: bool = False
    capture: int | None = None


@dataclass
class Snapshot:
    """What a task has of one checkpoint: the records it has had, and those that were on their way to it."""

    seen: set[Record]
    in_flight: list[Record] = field(default_factory=list)
    complete: bool = False


class Task:
    """A map (with outputs) or a sink: remembers the records that it has had."""

    def __init__(self, net: Network, outputs: list[Task], inputs: int) -> None:
        self.net = net
        self.handler: BarrierHandler = make_handler(net.mode, net.unaligned, inputs)
        self.queues = [Queue(self, number) for number in range(inputs)]
        self.outputs = outputs
        self.number = 0
        self.seen: set[Record] = set()
        self.snapshots: dict[int, Snapshot] = {}

    def arrive(self, number: int, item: Record | Barrier | CancelMarker) -> None:
        queue = self.queues[number]
        if isinstance(item, Barrier):
            if item.alignment is not Alignment.UNALIGNED:
                queue.items.append(item)
            self.carry_out(self.handler.announced(number, item, self.net.now_ms))
            return
        queue.items.append(item)
        if queue.capture is not None and isinstance(item, tuple):
            self.snapshots[queue.capture].in_flight.append(item)

    def hand(self, queue: Queue) -> None:
        match queue.items.popleft():
            case Barrier() as barrier:
                self.carry_out(self.handler.barrier(queue.number, barrier, self.net.now_ms))
            case CancelMarker(checkpoint):
                self.carry_out(self.handler.cancelled(queue.number, checkpoint, self.net.now_ms))
            case (source, number):
                assert (source, number) not in self.seen
                self.seen.add((source, number))
                if self.outputs:
                    self.outputs[number // 2 % len(self.outputs)].arrive(self.number, (source, number))

    def send(self, mark: Barrier | CancelMarker) -> None:
        for output in self.outputs:
            output.arrive(self.number, mark)

    def carry_out(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            match decision:
                case BlockChannel(number):
                    self.queues[number].blocked = True
                case Unblock(number):
                    self.queues[number].blocked = False
                case TakeSnapshot():
                    self.take(decision)
                case StopCapture(checkpoint, number):
                    queue = self.queues[number]
                    assert queue.capture in (checkpoint, None)
                    queue.capture = None
                case AllBarriers(checkpoint):
                    self.snapshots[checkpoint].complete = True
                case GiveUp(checkpoint):
                    self.snapshots.pop(checkpoint, None)
                    self.net.given_up.add(checkpoint)
                    self.send(CancelMarker(checkpoint))

    def take(self, decision: TakeSnapshot) -> None:
        barrier = decision.barrier
        assert barrier.checkpoint not in self.snapshots
        unaligned = barrier.alignment is Alignment.UNALIGNED
        snapshot = self.snapshots[barrier.checkpoint] = Snapshot(set(self.seen), complete=not unaligned)
        for number in decision.capture:
            queue = self.queues[number]
            queue.capture = barrier.checkpoint
            for item in queue.items:
                if isinstance(item, Barrier) and item.checkpoint == barrier.checkpoint:
                    queue.capture = None
                    break
                if isinstance(item, tuple):
                    snapshot.in_flight.append(item)
        self.send(barrier)


class Network:
    """Two sources → some maps → some sinks, every one to every one."""

    def __init__(
        self, random: Random, mode: CheckpointingMode, unaligned: bool, maps: int, sinks: int
    ) -> None:
        self.random = random
        self.mode = mode
        self.unaligned = unaligned
        self.now_ms = 0
        self.sinks = [Task(self, [], maps) for _ in range(sinks)]
        self.maps = [Task(self, self.sinks, 2) for _ in range(maps)]
        for number, task in enumerate(self.maps):
            task.number = number
        self.sent = [0, 0]
        self.checkpoint = 0
        # Checkpoint → how many records each source had sent.
        self.positions: dict[int, dict[int, int]] = {}
        self.to_trigger: list[tuple[int, Barrier]] = []
        self.given_up: set[int] = set()

    def tasks(self) -> list[Task]:
        return [*self.maps, *self.sinks]

    def emit(self) -> None:
        source = self.random.randrange(2)
        number = self.sent[source]
        self.sent[source] += 1
        self.maps[number % len(self.maps)].arrive(source, (source, number))

    def begin(self) -> None:
        self.checkpoint += 1
        kind = self.random.choice([SnapshotKind.CHECKPOINT] * 3 + [SnapshotKind.SAVEPOINT])
        barrier = Barrier(self.checkpoint, self.now_ms, kind=kind)
        if self.unaligned and kind is SnapshotKind.CHECKPOINT:
            if self.random.random() < 0.5:
                barrier = replace(barrier, alignment=Alignment.UNALIGNED)
            else:
                barrier = replace(barrier, timeout_ms=20)
        self.positions[self.checkpoint] = {}
        self.to_trigger += [(0, barrier), (1, barrier)]

    def trigger(self) -> None:
        """Let one source have its order; orders of one source stay in their order, and may get lost."""
        if not self.to_trigger:
            return
        source = self.random.choice(self.to_trigger)[0]
        place = next(place for place, (which, _) in enumerate(self.to_trigger) if which == source)
        _, barrier = self.to_trigger.pop(place)
        if self.random.random() < 0.1:
            return
        mark: Barrier | CancelMarker = barrier
        if self.random.random() < 0.1:
            mark = CancelMarker(barrier.checkpoint)
        else:
            self.positions[barrier.checkpoint][source] = self.sent[source]
        for task in self.maps:
            task.arrive(source, mark)

    def abort(self) -> None:
        checkpoint = self.random.randint(1, self.checkpoint + 1)
        self.given_up.add(checkpoint)
        for task in self.tasks():
            task.carry_out(task.handler.aborted(checkpoint, self.now_ms))

    def pass_time(self) -> None:
        self.now_ms += self.random.randint(1, 15)
        for task in self.tasks():
            task.carry_out(task.handler.on_time(self.now_ms))

    def hand(self) -> bool:
        ready = [queue for task in self.tasks() for queue in task.queues if queue.items and not queue.blocked]
        if not ready:
            return False
        queue = self.random.choice(ready)
        queue.task.hand(queue)
        return True

    def run(self, steps: int) -> None:
        doings = [self.emit] * 6 + [self.begin, self.trigger, self.trigger, self.pass_time] + [self.hand] * 8
        for _ in range(steps):
            self.random.choice(doings)()
            if self.random.random() < 0.01:
                self.abort()
        while self.to_trigger:
            self.trigger()
        # One that nothing comes between, and that was not aborted beforehand, ends whatever is left.
        self.checkpoint += 2
        self.positions[self.checkpoint] = dict(enumerate(self.sent))
        for source in (0, 1):
            for task in self.maps:
                task.arrive(source, Barrier(self.checkpoint, self.now_ms))
        while self.hand():
            pass

    def completed(self) -> list[int]:
        tasks = self.tasks()
        return [
            checkpoint
            for checkpoint in self.positions
            if checkpoint not in self.given_up
            and all(checkpoint in t.snapshots and t.snapshots[checkpoint].complete for t in tasks)
        ]

    def check_cut(self, checkpoint: int, *, exactly: bool) -> None:
        """After a restore each record from before the barriers is seen once by a map, and once by a sink."""
        positions = self.positions[checkpoint]
        wanted = {(source, number) for source in (0, 1) for number in range(positions[source])}
        to_maps = [r for task in self.maps for r in task.snapshots[checkpoint].in_flight]
        in_maps = [r for task in self.maps for r in task.snapshots[checkpoint].seen]
        to_sinks = [r for task in self.sinks for r in task.snapshots[checkpoint].in_flight]
        in_sinks = [r for task in self.sinks for r in task.snapshots[checkpoint].seen]
        for found in (to_maps + in_maps, to_maps + to_sinks + in_sinks):
            if exactly:
                assert Counter(found) == Counter(wanted)
            else:
                assert wanted <= set(found)


@pytest.mark.parametrize("unaligned", [False, True])
@settings(max_examples=120, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 2))
def test_exactly_once(unaligned: bool, seed: int, maps: int, sinks: int) -> None:
    net = Network(Random(seed), CheckpointingMode.EXACTLY_ONCE, unaligned, maps, sinks)
    net.run(250)
    assert not any(queue.items or queue.blocked for task in net.tasks() for queue in task.queues)
    assert net.checkpoint in net.completed()
    for checkpoint in net.completed():
        net.check_cut(checkpoint, exactly=True)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 2))
def test_at_least_once(seed: int, maps: int, sinks: int) -> None:
    net = Network(Random(seed), CheckpointingMode.AT_LEAST_ONCE, False, maps, sinks)
    net.run(250)
    assert not any(queue.items for task in net.tasks() for queue in task.queues)
    assert net.checkpoint in net.completed()
    for checkpoint in net.completed():
        net.check_cut(checkpoint, exactly=False)


def test_a_run_completes_checkpoints_of_all_kinds() -> None:
    """The properties above would hold of nothing at all."""
    completed = unaligned = 0
    for seed in range(30):
        net = Network(Random(seed), CheckpointingMode.EXACTLY_ONCE, True, 2, 2)
        net.run(250)
        completed += len(net.completed())
        unaligned += sum(
            any(task.snapshots[checkpoint].in_flight for task in net.tasks())
            for checkpoint in net.completed()
        )
    assert completed > 60
    assert unaligned > 10
