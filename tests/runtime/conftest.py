"""Tasks that do little, graphs of them, and slots whose channels are lists."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.common.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.functions.steps import Map
from ftlayer.records.ids import U64Array
from ftlayer.records.partitioning import Forward, Partitioner, Rebalance
from ftlayer.runtime.acker_mode.slot.rules import AckerSlot, FailCall, PersistCall, TakeReplaysCall, XorCall
from ftlayer.runtime.protocol.channel_frames import ElementCodec, decode_grants, is_limits
from ftlayer.runtime.protocol.messages import Batch, Element, EndOfStream, FromSlot, RecordIds, ReplayNow
from ftlayer.runtime.slot.rules.core import SlotCore, SlotEvent
from ftlayer.runtime.slot.rules.events import (
    CreditCame,
    FrameCame,
    Grant,
    ModeInstruction,
    PeerReached,
    PeersGone,
    Rest,
    RowsDone,
    RowsRead,
    RunTask,
    SlotInstruction,
    SlotStarted,
    SourceEnded,
    TellCoordinator,
    TimePassed,
    Transmit,
    Turn,
)
from ftlayer.runtime.slot.rules.mode import OpenRules, SlotMode, SlotParts, UntrackedSlot
from ftlayer.runtime.slot.rules.subtask import Seating
from ftlayer.runtime.task.actions import (
    Acknowledge,
    Action,
    AskReplays,
    ChannelReset,
    ElementCame,
    PersistRoots,
    Replayed,
    RowsPersisted,
    Send,
    SourceOver,
    SourceRows,
    TaskEnded,
    TaskEvent,
)
from ftlayer.runtime.task.contract import TaskKey
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import FunctionSink, IterableSource, Replay, Sink, Source
from ftlayer.vertex.calls import Failure, Persist, StreamOptions

# A module of this directory, which is no package, under its own name.
_spec = spec_from_file_location("rules_client", Path(__file__).with_name("rules_client.py"))
assert _spec is not None
assert _spec.loader is not None
sys.modules["rules_client"] = module_from_spec(_spec)
_spec.loader.exec_module(sys.modules["rules_client"])

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
NOW = Now(0, 0)


def rows_of(first: int, n: int, width: int = 8) -> pa.RecordBatch:
    numbers = range(first, first + n)
    return pa.record_batch(
        [pa.array(numbers, pa.int64()), pa.array(["x" * width for _ in numbers])], schema=SCHEMA
    )


def lineage_of(batch: pa.RecordBatch) -> RecordIds:
    roots = batch.column(0).to_numpy().astype(np.uint64) + np.uint64(1)
    return RecordIds(roots, roots * np.uint64(3))


def graph_of(
    parallelism: int, shuffled: bool = True, tracked: bool = False, rate_limit: float | None = None
) -> JobGraph:
    """source → work → sink; all-to-all where ``shuffled``. ``rate_limit`` is that of ``work``."""
    connector = IterableSource(())
    kinds: list[Any] = [
        Source("source", connector, SCHEMA),
        Map("work", lambda record: record, SCHEMA, rate_limit=rate_limit),
        Sink("sink", FunctionSink(lambda batch: None), SCHEMA),
    ]
    vertices = [JobVertex(kind.uid, (kind,), parallelism) for kind in kinds]
    partitioner: Partitioner = Rebalance() if shuffled else Forward()
    edges = [
        JobEdge(0, "source", "work", 0, partitioner, SCHEMA),
        JobEdge(1, "work", "sink", 0, partitioner, SCHEMA),
    ]
    options: tuple[tuple[str, StreamOptions], ...] = ()
    if tracked:
        vertices.append(JobVertex("replay", (Replay("replay", "job/source", "source", SCHEMA),), 1))
        edges.append(JobEdge(2, "replay", "work", 0, partitioner, SCHEMA))
        options = (("job/source", StreamOptions()),)
    return JobGraph("job", tuple(vertices), tuple(edges), tracked, options)


@dataclass
class FakeTask:
    """Sends each row of a batch to the channel of its number; ends when all its inputs have."""

    graph: JobGraph
    uid: str
    subtask: int
    tracked: bool = False
    copies: int = 1
    taken: list[int] = field(default_factory=list)
    resets: list[Channel] = field(default_factory=list)
    ticket: int = 0
    unsent: dict[int, list[Action]] = field(default_factory=dict)
    ending: bool = False

    def __post_init__(self) -> None:
        self.open = {
            channel
            for edge in self.graph.edges_into(self.uid)
            for channel in self.graph.channels(edge)
            if channel.receiver == self.subtask
        }
        self.outputs = [
            [channel for channel in self.graph.channels(edge) if channel.sender == self.subtask]
            for edge in self.graph.edges_from(self.uid)
        ]

    def handle(self, event: TaskEvent, now: Now) -> list[Action]:
        match event:
            case ElementCame(channel, element):
                return self._came(channel, element)
            case ChannelReset(channel):
                self.resets.append(channel)
                self.open.add(channel)
                return []
            case SourceRows():
                return self._persist(event)
            case RowsPersisted(ticket):
                return self.unsent.pop(ticket) + self._end()
            case SourceOver():
                self.ending = True
                return self._end()
            case ReplayNow():
                return [AskReplays("job/source", 10)]
            case Replayed(records):
                return [action for batch in records for action in self._sends(batch.payload)]
            case _:
                return []

    def held_roots(self) -> U64Array:
        return np.empty(0, np.uint64)

    def _came(self, channel: Channel, element: Element) -> list[Action]:
        assert channel in self.open
        if isinstance(element, EndOfStream):
            self.open.remove(channel)
            return [] if self.open else [*self._marks(), TaskEnded()]
        if not isinstance(element, Batch):
            return []
        self.taken += element.payload.column(0).to_pylist()
        actions: list[Action] = [*self._sends(element.payload)]
        if element.lineage is not None:
            actions.append(Acknowledge(element.lineage.roots, element.lineage.ids))
        return actions

    def _persist(self, rows: SourceRows) -> list[Action]:
        sends = self._sends(rows.payload)
        if not self.tracked:
            return sends
        self.ticket += 1
        self.unsent[self.ticket] = sends
        lineage = lineage_of(rows.payload)
        return [PersistRoots(self.ticket, Persist("job/source", rows.payload, lineage.roots, lineage.ids))]

    def _end(self) -> list[Action]:
        return [] if self.unsent or not self.ending else [*self._marks(), TaskEnded()]

    def _marks(self) -> list[Action]:
        return [Send(channel, EndOfStream()) for channels in self.outputs for channel in channels]

    def _sends(self, payload: pa.RecordBatch) -> list[Action]:
        sends: list[Action] = []
        numbers = payload.column(0).to_numpy()
        for channels in self.outputs:
            for place, channel in enumerate(channels):
                part = payload.take(pa.array(np.flatnonzero(numbers % len(channels) == place)))
                if part.num_rows:
                    batch = Batch(part, lineage_of(part) if self.tracked else None)
                    sends += [Send(channel, batch)] * self.copies
        return sends


@dataclass
class FakeVertex:
    """Keeps what it was told."""

    persists: deque[tuple[TaskKey, int, Persist]] = field(default_factory=deque)
    xors: list[Acknowledge] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    asks: list[tuple[TaskKey, AskReplays]] = field(default_factory=list)
    room: bool = True

    @property
    def may_persist(self) -> bool:
        return self.room

    @property
    def is_quiet(self) -> bool:
        return not self.persists

    def carry_out(self, instruction: ModeInstruction) -> None:
        match instruction:
            case PersistCall(key, ticket, call):
                self.persists.append((key, ticket, call))
            case XorCall(event):
                self.xors.append(event)
            case FailCall(failures):
                self.failures += failures
            case TakeReplaysCall(key, ask):
                self.asks.append((key, ask))
            case _:
                raise AssertionError(f"acker mode wants {instruction}")


@dataclass
class FakeLinks:
    """What one slot has sent to others: elements and credit, in their order."""

    frames: dict[int, deque[bytes]] = field(default_factory=dict)
    grants: dict[int, deque[bytes]] = field(default_factory=dict)


class Driven:
    """A `SlotCore` as its loop drives it: what it wants done is done to stand-ins, and it is validated.

    ``carry_out`` gets what is the mode's. ``done`` has the rows that a source need not read again, ``on_the_way`` the
    sizes of the frames of each channel that have left and whose credit has not come back.
    """

    def __init__(
        self,
        graph: JobGraph,
        slot: int,
        tasks: dict[TaskKey, Any],
        options: TopologyOptions,
        rules: OpenRules,
        links: FakeLinks,
        carry_out: Callable[[ModeInstruction], None],
    ) -> None:
        self.links, self.carry_out = links, carry_out
        self.codec = ElementCodec(graph.edges)
        self.on_the_way: dict[Channel, deque[int]] = {}
        self.parts: SlotParts
        self.core = SlotCore(graph, slot, tasks, options, partial(self._open, rules))
        self.said: list[FromSlot] = []
        self.done: list[tuple[TaskKey, int]] = []
        self.reads = 0

    def _open(self, rules: OpenRules, parts: SlotParts) -> SlotMode:
        self.parts = parts
        return rules(parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)

    @property
    def seating(self) -> Seating:
        return self.parts.seating

    def handle(self, event: SlotEvent, now: Now) -> None:
        todo = deque(self._decided(event, now))
        while todo:
            match todo.popleft():
                case RunTask() as run:
                    todo.extendleft(reversed(self._decided(run, now)))
                case Transmit(slot, frame):
                    self.links.frames.setdefault(slot, deque()).append(frame)
                    channel, _ = self.codec.decode(pa.py_buffer(frame))
                    self.on_the_way.setdefault(channel, deque()).append(len(frame))
                case Grant(slot, grants):
                    self.links.grants.setdefault(slot, deque()).append(grants)
                case TellCoordinator(message):
                    self.said.append(message)
                case RowsDone(key, number):
                    self.done.append((key, number))
                case ModeInstruction() as wanted:
                    self.carry_out(wanted)
        self.core.carried_out()

    def _decided(self, event: SlotEvent, now: Now) -> list[SlotInstruction]:
        instructions = self.core.handle(event, now)
        self.core.validate()
        runs = [isinstance(each, RunTask) for each in instructions]
        behind = instructions[runs.index(True) :] if True in runs else []
        assert not any(isinstance(each, Transmit) for each in behind), "a frame waits for a function"
        return instructions

    def start(self, now: Now) -> None:
        self.handle(SlotStarted(), now)

    def frame(self, slot: int, data: pa.Buffer) -> None:
        self.handle(FrameCame(slot, "", data), NOW)

    def granted(self, grants: bytes) -> None:
        for channel, size in [] if is_limits(grants) else decode_grants(grants):
            frames, left = self.on_the_way[channel], size
            while left and frames[0] <= left:
                left -= frames.popleft()
            if left:
                frames[0] -= left
        self.handle(CreditCame(-1, "", grants), NOW)

    def rows(self, key: TaskKey, rows: SourceRows, now: Now) -> None:
        self.reads += 1
        self.handle(RowsRead(key, self.reads, rows), now)

    def source_ended(self, key: TaskKey, now: Now) -> None:
        self.handle(SourceEnded(key), now)

    def peer_up(self, slot: int) -> None:
        self.handle(PeerReached(slot), NOW)

    def drop_peer(self, slot: int, now: Now) -> None:
        for channel, output in self.seating.remote.items():
            if output.slot == slot:
                self.on_the_way.pop(channel, None)
        self.handle(PeersGone((slot,)), now)

    def on_time(self, now: Now) -> None:
        self.handle(TimePassed(now.mono_ms), now)

    def run_next(self, now: Now) -> bool:
        """Take a turn as the loop does; whether a task had something to do."""
        self.handle(TimePassed(now.mono_ms), now)
        if not self.core.can_run:
            return False
        self.handle(Turn(), now)
        return True

    def idle(self, now_ms: int) -> None:
        self.handle(Rest(), Now(now_ms, now_ms))


@dataclass
class FakeSlot:
    core: Driven
    links: FakeLinks
    tasks: dict[TaskKey, FakeTask]
    vertex: FakeVertex | None

    @classmethod
    def of(
        cls, graph: JobGraph, slot: int, options: TopologyOptions, *, tracked: bool = False, copies: int = 1
    ) -> FakeSlot:
        tasks = {
            key: FakeTask(graph, *key, tracked, copies if key[0] == "work" else 1)
            for key in graph.subtasks_in(slot)
        }
        links, vertex = FakeLinks(), FakeVertex() if tracked else None
        rules: OpenRules = UntrackedSlot if vertex is None else partial(AckerSlot, vertex)
        carry_out = not_wanted if vertex is None else vertex.carry_out
        driven = Driven(graph, slot, dict(tasks), options, rules, links, carry_out)
        driven.start(NOW)
        return cls(driven, links, tasks, vertex)


def not_wanted(instruction: ModeInstruction) -> None:
    raise AssertionError(f"this mode wants nothing, and asks for {instruction}")


class Tools:
    """What the tests of this room build things with."""

    schema = SCHEMA
    now = NOW
    rows_of = staticmethod(rows_of)
    lineage_of = staticmethod(lineage_of)
    graph_of = staticmethod(graph_of)
    slot = FakeSlot
    task = FakeTask
    links = FakeLinks
    driven = Driven
    not_wanted = staticmethod(not_wanted)

    batch = Batch

    @staticmethod
    def source_rows(first: int, n: int, width: int = 8) -> SourceRows:
        return SourceRows("p0", 0, first, rows_of(first, n, width), None)


@pytest.fixture(scope="session")
def tools() -> type[Tools]:
    return Tools
