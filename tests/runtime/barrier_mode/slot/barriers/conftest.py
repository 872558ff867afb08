"""Two or more slots of a checkpointed graph in one thread, with tasks that remember what they were given."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.checkpoint.barrier import Alignment, Barrier
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Piece, Restore, SnapshotTimes
from ftlayer.common.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.functions.steps import Map
from ftlayer.records.partitioning import HashByKeyGroup, Rebalance
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.barrier_mode.slot.in_flight import CapturedChannel, put_in_flight, read_batches
from ftlayer.runtime.barrier_mode.slot.rules.barriers import (
    BeginSnapshot,
    CancelSnapshot,
    CheckpointParts,
    DropFiles,
    GiveUpSnapshot,
    KeepFiles,
    SnapshotCaptured,
)
from ftlayer.runtime.barrier_mode.slot.rules.slot_half import BarrierSlot
from ftlayer.runtime.protocol.channel_frames import ElementCodec
from ftlayer.runtime.protocol.messages import (
    MAX_TIME_MS,
    Batch,
    CheckpointAborted,
    Element,
    EndOfStream,
    EndTasks,
    TriggerCheckpoint,
    Watermark,
)
from ftlayer.runtime.slot.rules.events import ModeInstruction
from ftlayer.runtime.task.actions import (
    Action,
    ElementCame,
    Send,
    SourceOver,
    SourceRows,
    TaskEnded,
    TaskEvent,
)
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import FunctionSink, IterableSource, Sink, Source

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
MAX_GROUPS = 16
KEY = HashByKeyGroup(KeySelector(("n",)), MAX_GROUPS)


def graph_of(parallelism: int) -> JobGraph:
    """source → work → sink, all to all, by key and in turn."""
    kinds: list[Any] = [
        Source("source", IterableSource(()), SCHEMA),
        Map("work", lambda record: record, SCHEMA),
        Sink("sink", FunctionSink(lambda batch: None), SCHEMA),
    ]
    return JobGraph(
        "job",
        tuple(JobVertex(kind.uid, (kind,), parallelism) for kind in kinds),
        (JobEdge(0, "source", "work", 0, KEY, SCHEMA), JobEdge(1, "work", "sink", 0, Rebalance(), SCHEMA)),
        tracked=False,
        max_parallelism=MAX_GROUPS,
    )


@dataclass
class Frozen:
    """A task's state at a barrier: what it had taken."""

    taken: tuple[int, ...]
    released: bool = False


@dataclass
class Task:
    """Passes rows on to the channels of their numbers, and remembers them."""

    graph: JobGraph
    uid: str
    subtask: int
    taken: list[int] = field(default_factory=list)
    told: list[tuple[str, int]] = field(default_factory=list)
    times: dict[Channel, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open = {
            channel
            for edge in self.graph.edges_into(self.uid)
            for channel in self.graph.channels(edge)
            if channel.receiver == self.subtask
        }
        self.outputs = [
            channel
            for edge in self.graph.edges_from(self.uid)
            for channel in self.graph.channels(edge)
            if channel.sender == self.subtask
        ]

    def handle(self, event: TaskEvent, now: Now) -> list[Action]:
        match event:
            case ElementCame(channel, element):
                return self._came(channel, element)
            case SourceRows():
                return self._take(event.payload)
            case SourceOver():
                return self._all(Watermark(MAX_TIME_MS))
            case EndTasks():
                return self._all(EndOfStream(), TaskEnded())
            case _:
                return []

    def _came(self, channel: Channel, element: Element) -> list[Action]:
        assert channel in self.open
        match element:
            case Batch():
                return self._take(element.payload)
            case EndOfStream():
                self.open.remove(channel)
                return [] if self.open else self._all(EndOfStream(), TaskEnded())
            case Watermark(time_ms):
                self.times[channel] = time_ms
                return []
        raise AssertionError(f"a task was handed {element}")

    def snapshot(self, barrier: Barrier, now: Now) -> tuple[list[Action], Any]:
        return [], Frozen(tuple(self.taken))

    def completed(self, checkpoint: int, read: int) -> None:
        self.told.append(("completed", checkpoint))

    def aborted(self, checkpoint: int) -> None:
        self.told.append(("aborted", checkpoint))

    def _take(self, payload: pa.RecordBatch) -> list[Action]:
        numbers = payload.column(0).to_numpy()
        self.taken += numbers.tolist()
        actions: list[Action] = []
        for channel in self.outputs:
            part = payload.take(pa.array(np.flatnonzero(numbers % len(self.outputs) == channel.receiver)))
            if part.num_rows:
                actions.append(Send(channel, Batch(part)))
        return actions

    def _all(self, mark: Element, *then: Action) -> list[Action]:
        return [*(Send(channel, mark) for channel in self.outputs), *then]


@dataclass
class Shelf:
    """Snapshots of one slot, by task and checkpoint."""

    begun: dict[tuple[TaskKey, int], Frozen] = field(default_factory=dict)
    barriers: dict[tuple[TaskKey, int], Barrier] = field(default_factory=dict)
    done: dict[tuple[TaskKey, int], tuple[tuple[CapturedChannel, ...], SnapshotTimes]] = field(
        default_factory=dict
    )
    given_up: list[tuple[TaskKey, int]] = field(default_factory=list)
    cancelled: list[tuple[TaskKey, int]] = field(default_factory=list)

    def carry_out(self, instruction: ModeInstruction) -> None:
        match instruction:
            case BeginSnapshot(key, barrier, pending):
                self.begin(key, barrier, pending)
            case SnapshotCaptured(key, checkpoint, channels, times):
                self.captured(key, checkpoint, channels, times)
            case GiveUpSnapshot(key, checkpoint, reason):
                assert reason
                self.given_up.append((key, checkpoint))
            case CancelSnapshot(key, checkpoint):
                self.cancelled.append((key, checkpoint))
            case KeepFiles() | DropFiles():
                pass
            case _:
                raise AssertionError(f"barrier mode wants {instruction}")

    def begin(self, key: TaskKey, barrier: Barrier, pending: Any) -> None:
        place = key, barrier.checkpoint
        assert place not in self.begun
        assert place not in self.given_up
        self.begun[place], self.barriers[place] = pending, barrier

    def captured(
        self, key: TaskKey, checkpoint: int, channels: tuple[CapturedChannel, ...], times: SnapshotTimes
    ) -> None:
        assert (key, checkpoint) in self.begun
        assert (key, checkpoint) not in self.done
        self.done[key, checkpoint] = channels, times


class Pieces:
    """A `PieceWriter` that keeps pieces inline."""

    def write(self, chunks: Iterable[bytes], scope: Any = None, in_flight_of: str = "") -> Piece:
        data = b"".join(chunks)
        return Piece(b"", len(data), inline=data)


def numbers_of(captured: CapturedChannel) -> list[int]:
    """Return what a captured channel holds, as it is read back."""
    state = captured.write(Pieces(), "sum/0")  # type: ignore[arg-type]
    assert state.frames.inline is not None
    batches = read_batches(state.frames.inline, captured.edge, captured.codec)
    numbers = [n for batch in batches for n in batch.payload.column(0).to_pylist()]
    assert len(numbers) == state.count == captured.records
    return numbers


@dataclass
class Slot:
    links: Any
    tasks: dict[TaskKey, Task]
    shelf: Shelf
    core: Any = field(init=False)

    def restore(self, restore: Restore, read: Callable[[Piece], bytes]) -> None:
        parts = self.core.parts
        put_in_flight(parts.graph, parts.seating, parts.codec, restore, read)


class World:
    """Slots in one thread; what is on its way is delivered when the test says so."""

    def __init__(self, tools: Any, config: CheckpointConfig, slots: int = 2, **options: int) -> None:
        self.tools = tools
        self.graph = graph_of(slots)
        defaults = {"batch_rows": 16, "batch_age_ms": 5, "channel_bytes": 1 << 10}
        self.options = TopologyOptions(**defaults | options)  # type: ignore[arg-type]
        self.slots: list[Slot] = []
        self.clock = 0
        self.burst = 1
        for slot in range(slots):
            tasks = {key: Task(self.graph, *key) for key in self.graph.subtasks_in(slot)}
            links, shelf = tools.links(), Shelf()
            mine = Slot(links, tasks, shelf)
            rules = partial(BarrierSlot, CheckpointParts(config, tasks, lambda: 0.0))  # type: ignore[arg-type]
            mine.core = tools.driven(self.graph, slot, tasks, self.options, rules, links, shelf.carry_out)
            self.slots.append(mine)
        for place, slot in enumerate(self.slots):
            for other in range(slots):
                if other != place:
                    slot.core.peer_up(other)
            slot.core.start(self.now)

    @property
    def now(self) -> Now:
        return Now(self.clock, 1_000_000 + self.clock)

    def barrier(self, checkpoint: int, alignment: Alignment, timeout_ms: int | None = None) -> Barrier:
        return Barrier(checkpoint, self.now.wall_ms, alignment, timeout_ms)

    def trigger(self, barrier: Barrier) -> None:
        for slot in self.slots:
            slot.core.handle(TriggerCheckpoint(barrier), self.now)

    # ------------------------------------------------------------ moves

    def moves(self, runs: bool = True) -> list[Callable[[], bool]]:
        """Return everything that may happen next; each says whether it did."""
        moves: list[Callable[[], bool]] = []
        for place, slot in enumerate(self.slots):
            if runs:
                moves.append(lambda s=slot: s.core.run_next(self.now))  # type: ignore[misc]
            for other, frames in slot.links.frames.items():
                moves.append(lambda f=frames, p=place, o=other: self.deliver(f, p, o))  # type: ignore[misc]
            for other, grants in slot.links.grants.items():
                moves.append(lambda g=grants, o=other: self.give(g, o))  # type: ignore[misc]
        return moves

    def step(self, draw: random.Random) -> bool:
        self.clock += 1
        self.burst = draw.choice((1, 1, 3, 9))
        moves = self.moves()
        draw.shuffle(moves)
        for slot in self.slots:
            slot.core.on_time(self.now)
        if any(move() for move in moves):
            return True
        self.clock += 10
        for slot in self.slots:
            slot.core.idle(self.now.mono_ms)
        return any(
            queue
            for slot in self.slots
            for kind in (slot.links.frames, slot.links.grants)
            for queue in kind.values()
        )

    def deliver(self, frames: Any, sender: int, receiver: int) -> bool:
        if not frames:
            return False
        # As many as a loop finds in its mailbox before it looks at anything else.
        for _ in range(min(self.burst, len(frames))):
            self.slots[receiver].core.frame(sender, pa.py_buffer(frames.popleft()))
        return True

    def give(self, grants: Any, to: int) -> bool:
        if not grants:
            return False
        self.slots[to].core.granted(grants.popleft())
        return True

    def run_out(self, draw: random.Random, steps: int = 20_000) -> None:
        for _ in range(steps):
            if not self.step(draw):
                return
        raise AssertionError("it does not come to rest")

    # ------------------------------------------------------------ what came of it

    def task(self, uid: str, subtask: int) -> Task:
        return self.slots[subtask].tasks[uid, subtask]

    def complete(self, checkpoint: int) -> bool:
        """Whether every task has taken its part."""
        return all((key, checkpoint) in slot.shelf.done for slot in self.slots for key in slot.tasks)

    def held(self, checkpoint: int, uid: str) -> list[int]:
        """Return what tasks of a chain had taken at a checkpoint."""
        return [
            n
            for slot in self.slots
            for (key, its), frozen in slot.shelf.begun.items()
            if key[0] == uid and its == checkpoint
            for n in frozen.taken
        ]

    def in_flight(self, checkpoint: int, edge: int) -> list[CapturedChannel]:
        return [
            channel
            for slot in self.slots
            for (_, its), (channels, _) in slot.shelf.done.items()
            if its == checkpoint
            for channel in channels
            if channel.channel.edge == edge
        ]

    def check_exact(self, checkpoint: int) -> None:
        """Nothing is lost between two tasks at a checkpoint, and nothing is there twice; order is kept."""
        for edge, (source, target) in enumerate((("source", "work"), ("work", "sink"))):
            captured = self.in_flight(checkpoint, edge)
            there = [n for channel in captured for n in numbers_of(channel)]
            before = self.held(checkpoint, source)
            assert sorted(self.held(checkpoint, target) + there) == sorted(before)
        for place in range(len(self.slots)):
            self.check_order(checkpoint, place)

    def check_order(self, checkpoint: int, subtask: int) -> None:
        """What a task had taken, then what waited, then what had not left: each sender's rows ascend."""
        taken = list(self.slots[subtask].shelf.begun[("work", subtask), checkpoint].taken)
        mine = [c for c in self.in_flight(checkpoint, 0) if c.channel.receiver == subtask]
        for outgoing in (False, True):
            taken += [n for c in mine if c.outgoing is outgoing for n in numbers_of(c)]
        for sender in range(len(self.slots)):
            its = [n for n in taken if n // 1_000_000 == sender]
            assert its == sorted(its)


ALIGNED = CheckpointConfig()
AT_LEAST_ONCE = CheckpointConfig(mode="at-least-once")  # type: ignore[arg-type]
UNALIGNED = CheckpointConfig(unaligned=True)
TURNING = CheckpointConfig(unaligned=True, aligned_timeout="20ms")

MODES = {
    "aligned": (ALIGNED, Alignment.ALIGNED, None),
    "at-least-once": (AT_LEAST_ONCE, Alignment.AT_LEAST_ONCE, None),
    "unaligned": (UNALIGNED, Alignment.UNALIGNED, None),
    "turning": (TURNING, Alignment.ALIGNED, 20),
}


class Story:
    """Sources with something to read, and a coordinator that lets slots hear of checkpoints one after another."""

    def __init__(self, world: World, draw: random.Random, batches: int = 8) -> None:
        self.world, self.draw = world, draw
        slots = len(world.slots)
        self.left = [
            [(place * 1_000_000 + i * 100, draw.randrange(1, 60)) for i in range(batches)]
            for place in range(slots)
        ]
        self.sent = [n for parts in self.left for first, rows in parts for n in range(first, first + rows)]
        self.reading = set(range(slots))
        self.untold: list[list[Barrier]] = [[] for _ in range(slots)]
        self.checkpoints: list[Barrier] = []
        self.aborted: set[int] = set()

    @property
    def under_way(self) -> list[int]:
        return [
            barrier.checkpoint
            for barrier in self.checkpoints
            if not self.world.complete(barrier.checkpoint) and barrier.checkpoint not in self.aborted
        ]

    def trigger(self, alignment: Alignment, timeout_ms: int | None) -> None:
        barrier = self.world.barrier(len(self.checkpoints) + 1, alignment, timeout_ms)
        self.checkpoints.append(barrier)
        for untold in self.untold:
            untold.append(barrier)

    def abort(self, checkpoint: int) -> None:
        """The coordinator has told all slots of the checkpoint, or tells those it has not that it is over."""
        self.aborted.add(checkpoint)
        for place, slot in enumerate(self.world.slots):
            self.tell(place)
            slot.core.handle(CheckpointAborted(checkpoint), self.world.now)

    def tell(self, place: int) -> None:
        for barrier in self.untold[place]:
            self.world.slots[place].core.handle(TriggerCheckpoint(barrier), self.world.now)
        self.untold[place].clear()

    def read(self) -> None:
        for place, slot in enumerate(self.world.slots):
            key = ("source", place)
            if self.left[place] and slot.core.may_read(key) and self.draw.random() < 0.3:
                slot.core.rows(key, self.world.tools.source_rows(*self.left[place].pop(0)), self.world.now)
            elif not self.left[place] and place in self.reading:
                self.reading.remove(place)
                slot.core.source_ended(key, self.world.now)
            if self.draw.random() < 0.2:
                self.tell(place)

    def go_on(self) -> bool:
        """Do something; False when everything is at rest."""
        self.read()
        moved = self.world.step(self.draw)
        return moved or bool(self.reading or any(self.untold))

    def end(self) -> None:
        for slot in self.world.slots:
            slot.core.handle(EndTasks(), self.world.now)
        self.world.run_out(self.draw)
        assert all(slot.core.has_ended for slot in self.world.slots), "nothing is stuck"
        taken = [n for place in range(len(self.world.slots)) for n in self.world.task("sink", place).taken]
        assert sorted(taken) == sorted(self.sent)


def full_of_records(tools: Any, config: CheckpointConfig, slots: int = 2) -> World:
    """Return a world in which no task can send any more, since the sinks never take anything."""
    world = World(tools, config, slots)
    for place, slot in enumerate(world.slots):
        first = place * 1_000_000
        for _ in range(25):
            slot.core.rows(("source", place), tools.source_rows(first, 50), world.now)
            first += 50
    return world


def pass_on(world: World, steps: int = 100) -> int:
    """Let everything move but the tasks, until nothing moves; returns in how many rounds."""
    for round in range(steps):
        for slot in world.slots:
            slot.core.on_time(world.now)
        moved = [move() for move in world.moves(runs=False)]
        if not any(moved):
            return round
    raise AssertionError("it does not come to rest")


def one_of_two(tools: Any, config: CheckpointConfig, **options: int) -> tuple[World, Slot]:
    world = World(tools, config, 2, **options)
    return world, world.slots[0]


def frame(world: World, channel: Channel, element: Element) -> pa.Buffer:
    return pa.py_buffer(ElementCodec(world.graph.edges).encode(channel, element))


FROM_0, FROM_1 = Channel(0, 0, 0), Channel(0, 1, 0)


class Kit:
    """What the tests of barriers build things with."""

    world = World
    story = Story
    modes = MODES
    aligned = ALIGNED
    unaligned = UNALIGNED
    turning = TURNING
    schema = SCHEMA
    from_0 = FROM_0
    from_1 = FROM_1
    full_of_records = staticmethod(full_of_records)
    pass_on = staticmethod(pass_on)
    one_of_two = staticmethod(one_of_two)
    frame = staticmethod(frame)


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit
