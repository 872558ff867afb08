"""A whole topology in one process, on a manual clock: real tasks, a real vertex shard, and a network of queues.

Whatever can happen next (an element arrives, a batch is read, a call reaches the vertex, time passes, a slot
dies) is one of a list of enabled events, and a chooser picks among them, so that a run is a sequence of
choices: Hypothesis draws them, and shrinks them.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.common.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.records.ids import ids_of
from ftlayer.runtime.acker_mode.task.mode import AckerTaskMode, Holding
from ftlayer.runtime.connectors.offset_reader import partition_index
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.handler import FTHandler
from ftlayer.runtime.protocol.messages import Batch, EndReplays, LatencyMarker, ReplayNow
from ftlayer.runtime.task import actions
from ftlayer.runtime.task import emitter as latency
from ftlayer.runtime.task.actions import (
    ChannelReset,
    ElementCame,
    RangesAnswered,
    RangesLost,
    Replayed,
    RowsPersisted,
    SourceOver,
    SourceRows,
    TaskStart,
    TimeCame,
)
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.chain_plan import TaskMode
from ftlayer.runtime.task.untracked import UntrackedTaskMode
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.topology.operators import Replay
from ftlayer.vertex import calls
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.store import MemoryStore

RANGE_CALLS = calls.TakeOver | calls.Register | calls.AskRanges | calls.StoreRows

ROWS_A_BATCH = 5
"""Few, so that a run has many batches."""


class _Store:
    """A `MemoryStore` that counts its openings."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.incarnation = 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass
class _Feed:
    """What one subtask of a source has to read."""

    uid: str
    subtask: int
    rows: list[Any]
    schema: pa.Schema
    read: int = 0
    ended: bool = False

    @property
    def partition(self) -> str:
        return f"p{self.subtask}"


@dataclass(eq=False)
class _Call:
    """A call on its way to the vertex, of a task of ``slot``; ``then`` gets its reply while the task lives."""

    slot: int
    instance: int
    call: Any
    then: Callable[[Any], None] | None = None
    key: tuple[str, int] = ("", 0)


@dataclass
class Ledger:
    """How often each (root, id) was part of a registration or an event, and how many roots were completed."""

    ids: Counter[tuple[int, int]] = field(default_factory=Counter)
    completed: int = 0

    def note(self, roots: Any, ids: calls.EventIds | None) -> None:
        """Count the ids that values were folded from."""
        if ids is not None:
            owners = np.repeat(roots, np.diff(ids.offsets))
            self.ids.update(zip(owners.tolist(), ids.ids.tolist(), strict=True))


class Simulation:
    """Runs a `JobGraph`; ``choose(n)`` returns which of n enabled events happens."""

    def __init__(
        self,
        graph: JobGraph,
        rows: dict[str, list[list[Any]]],
        choose: Callable[[int], int],
        *,
        exact: bool = False,
        rows_a_batch: int = ROWS_A_BATCH,
    ) -> None:
        self.graph = graph
        self.rows_a_batch = rows_a_batch
        self.exact = exact
        self.choose = choose
        self.mono, self.wall = 1_000_000, 1_700_000_000_000
        self.store = _Store()
        self.vertex = self._open_vertex()
        self.ledger = Ledger()
        self.calls: list[_Call] = []
        self.queues: dict[Channel, deque[Any]] = {}
        self.marks: dict[Channel, Any] = {}
        self.tasks: dict[tuple[str, int], Any] = {}
        self.instances = [0] * graph.slots
        self.wakes: dict[tuple[str, int], int] = {}
        self.ended: set[tuple[str, int]] = set()
        self.ending = False
        # Of sources that a test reads by itself: what else can happen, and whether they give rows still.
        self.more_events: Callable[[], list[Callable[[], None]]] = list
        self.has_more: Callable[[], bool] = bool
        self.feeds = {
            (source.uid, subtask): _Feed(source.uid, subtask, rows[source.uid][subtask], source.schema)
            for source in graph.sources()
            for subtask in range(graph.vertex(source.uid).parallelism)
        }
        for stream, options in graph.options:
            self.apply(calls.OpenStream(stream, options))
        for slot in range(graph.slots):
            self._deploy(slot)

    @property
    def now(self) -> Now:
        return Now(self.mono, self.wall)

    @property
    def latencies(self) -> Counter[tuple[str, str]]:
        """How many markers sinks that live have seen, by source and chain."""
        seen: Counter[tuple[str, str]] = Counter()
        for (uid, _), task in self.tasks.items():
            for source, histogram in getattr(task, "latencies", {}).items():
                seen[source, uid] += histogram.count
        return seen

    # ------------------------------------------------------------ the vertex

    def _open_vertex(self) -> FTLayerCore:
        options = LayerOptions(tracker="exact" if self.exact else "table")
        return FTLayerCore(self.store, options, self.now)  # type: ignore[arg-type]

    def apply(self, call: Any) -> Any:
        if isinstance(call, calls.Register | calls.AskRanges | calls.Xor | calls.Touch):
            outcome = self.vertex.apply(None, call, None, self.now)
            outcome.after()
            return outcome.reply
        if isinstance(call, calls.StreamStatusCall | calls.ListRecords | calls.Stats):
            with self.store.read() as txn:
                return self.vertex.read(txn, call, self.now)
        with self.store.write(intake=isinstance(call, calls.Persist)) as txn:
            outcome = self.vertex.apply(txn, call, None, self.now)
        outcome.after()
        return outcome.reply

    @property
    def streams(self) -> tuple[str, ...]:
        return tuple(stream for stream, _ in self.graph.options)

    def status(self) -> calls.StreamStatus:
        found = self.apply(calls.StreamStatusCall(self.streams))
        assert isinstance(found, calls.StreamStatus)
        return found

    def dead(self) -> list[calls.RecordInfo]:
        return list(self.apply(calls.ListRecords("dead")).records)

    # ------------------------------------------------------------ slots

    def _deploy(self, slot: int) -> None:
        self.instances[slot] += 1
        for uid, subtask in self.graph.subtasks_in(slot):
            run = f"run-{slot}-{self.instances[slot]}"
            sinks = partial(open_sink, run=run)
            handler = partial(FTHandler, job=self.graph.name, run=run, exact=self.exact)
            tracked = AckerTaskMode(handler, TopologyOptions(), sinks, Holding(run, self._known_partitions))
            mode: TaskMode = tracked if self.graph.tracked else UntrackedTaskMode(sinks)
            task = build_task(self.graph, uid, subtask, mode)
            self.tasks[uid, subtask] = task
            self.ended.discard((uid, subtask))
            feed = self.feeds.get((uid, subtask))
            if feed is not None:
                feed.read, feed.ended = self._stored_position(feed), False
            self._do((uid, subtask), task.handle(TaskStart(), self.now))

    def _known_partitions(self, uid: str, subtask: int) -> list[str]:
        stream = self.graph.stream_of(uid)
        opened = self.apply(calls.OpenStream(stream, dict(self.graph.options)[stream]))
        parallelism = self.graph.vertex(uid).parallelism
        return [name for name in opened.held if partition_index(name) % parallelism == subtask]

    def _stored_position(self, feed: _Feed) -> int:
        if not self.graph.tracked:
            return 0
        opened = self.apply(
            calls.OpenStream(
                self.graph.stream_of(feed.uid), dict(self.graph.options)[self.graph.stream_of(feed.uid)]
            )
        )
        return int(opened.positions.get(feed.partition, b"0"))

    def kill(self, slot: int) -> None:
        """Lose a slot: what it held, what was on its way to it, and some of what it had sent."""
        gone = set(self.graph.subtasks_in(slot))
        self.instances[slot] += 1
        for key in gone:
            self.tasks.pop(key)
            self.wakes.pop(key, None)
        for channel, queue in self.queues.items():
            edge = self.graph.edges[channel.edge]
            if (edge.source, channel.sender) in gone or (edge.target, channel.receiver) in gone:
                queue.clear()
            if (edge.source, channel.sender) in gone:
                self.marks.pop(channel, None)
            elif (edge.target, channel.receiver) in gone and channel in self.marks:
                # The last mark is said again to the one that comes after.
                queue.append(self.marks[channel])
        # Calls that were on their way may have their effect or not; the answer is lost. What a source
        # persists arrives in order, so that a prefix of it does.
        lost_from_here = False
        for call in [call for call in self.calls if call.slot == slot]:
            if isinstance(call.call, calls.Persist | RANGE_CALLS):
                self.calls.remove(call)
                lost_from_here = lost_from_here or bool(self.choose(2))
                if not lost_from_here and not self._is_refused(call):
                    self.apply(call.call)
            elif self.choose(2):
                self.calls.remove(call)
        self.apply(calls.Recall(self.streams, self.vertex.incarnation))
        for edge in self.graph.edges:
            for channel in self.graph.channels(edge):
                task = self.tasks.get((edge.target, channel.receiver))
                if (edge.source, channel.sender) in gone and task is not None:
                    self._do((edge.target, channel.receiver), task.handle(ChannelReset(channel), self.now))
        self._deploy(slot)

    def restart_vertex(self) -> None:
        """Kill the vertex and recover it from its store; calls on their way are sent again to the new one."""
        self.store.incarnation += 1
        self.vertex = self._open_vertex()
        for call in self.calls:
            if isinstance(call.call, calls.Xor | calls.Fail):
                call.call = replace(call.call, incarnation=self.vertex.incarnation)
        self._refuse_ranges()

    def _is_refused(self, call: _Call) -> bool:
        named = getattr(call.call, "incarnation", self.vertex.incarnation)
        return isinstance(call.call, RANGE_CALLS) and named != self.vertex.incarnation

    def _refuse_ranges(self) -> None:
        """Calls that name the incarnation before are refused, one of each task that has any."""
        stale = [call for call in self.calls if self._is_refused(call)]
        self.calls = [call for call in self.calls if call not in stale]
        for call in stale:
            if call.key in self.tasks and call.instance == self.instances[call.slot]:
                lost = RangesLost(call.call.incarnation)
                self._do(call.key, self.tasks[call.key].handle(lost, self.now))

    # ------------------------------------------------------------ events

    def events(self) -> list[Callable[[], None]]:
        """Everything that can happen now."""
        found = self.more_events()
        for key, feed in self.feeds.items():
            if not feed.ended and key in self.tasks:
                found.append(lambda key=key: self._read(key))
        for channel, queue in self.queues.items():
            key = (self.graph.edges[channel.edge].target, channel.receiver)
            if queue and key in self.tasks and key not in self.ended:
                found.append(lambda channel=channel, key=key: self._deliver(channel, key))
        # Calls of one kind and slot keep their order; others may overtake them.
        seen: set[tuple[int, type]] = set()
        for call in self.calls:
            lane = (call.slot, type(call.call))
            if lane not in seen:
                seen.add(lane)
                if self.vertex.intake_blocked(call.call, self.now) is None:
                    found.append(lambda call=call: self._carry_out(call))
        return found

    def step(self) -> bool:
        """Let one enabled event happen; False when there is none."""
        found = self.events()
        if not found:
            return False
        found[self.choose(len(found)) % len(found)]()
        return True

    def advance(self, ms: int) -> None:
        """Let time pass: the vertex ticks, tasks that asked for it are woken."""
        self.mono += ms
        self.wall += ms
        with self.store.write(intake=False) as txn:
            self.vertex.tick(txn, self.now)
        for key, at in list(self.wakes.items()):
            if at <= self.mono and key in self.tasks and key not in self.ended:
                self.wakes.pop(key, None)
                self._do(key, self.tasks[key].handle(TimeCame(), self.now))

    def run(self, *, most: int = 100_000) -> None:
        """Go on until the topology has ended, letting time pass when nothing else can happen."""
        for _ in range(most):
            if self.step():
                continue
            if len(self.ended) == len(self.tasks):
                return
            if self.graph.tracked and not self.ending and self._drained():
                self.ending = True
                for key in self._replays():
                    self._do(key, self.tasks[key].handle(EndReplays(), self.now))
                continue
            self.advance(500)
            if not self.ending:
                for key in self._replays():
                    self._do(key, self.tasks[key].handle(ReplayNow(), self.now))
        raise AssertionError(f"the topology did not end: {self._stuck()}")

    def _replays(self) -> list[tuple[str, int]]:
        return [key for key in self.tasks if isinstance(self.graph.vertex(key[0]).operators[0], Replay)]

    def _drained(self) -> bool:
        if any(getattr(task, "keeps", False) for task in self.tasks.values()):
            return False  # the vertex may have been lost since
        if self.has_more() or not all(feed.ended for feed in self.feeds.values()):
            return False
        return self.status().drained

    def _stuck(self) -> str:
        status = self.status() if self.graph.tracked else None
        open_tasks = sorted(set(self.tasks) - self.ended)
        return f"vertex {status}, tasks not ended {open_tasks}"

    # ------------------------------------------------------------ how each happens

    def _read(self, key: tuple[str, int]) -> None:
        feed, task = self.feeds[key], self.tasks[key]
        if feed.read >= len(feed.rows):
            feed.ended = True
            self._do(key, task.handle(SourceOver(), self.now))
            return
        rows = feed.rows[feed.read : feed.read + self.rows_a_batch]
        columns = [rows] if len(feed.schema) == 1 else list(zip(*rows, strict=True))
        arrays = [pa.array(list(column), f.type) for column, f in zip(columns, feed.schema, strict=True)]
        start = str(feed.read).encode() if feed.read else None
        end = feed.read + len(rows)
        position = calls.SourcePosition(feed.partition, start, str(end).encode())
        source = SourceRows(
            feed.partition,
            feed.subtask,
            feed.read,
            pa.RecordBatch.from_arrays(arrays, schema=feed.schema),
            position if self.graph.tracked else None,
        )
        feed.read = end
        self._do(key, task.handle(source, self.now))

    def _deliver(self, channel: Channel, key: tuple[str, int]) -> None:
        element = self.queues[channel].popleft()
        self._do(key, self.tasks[key].handle(ElementCame(channel, element), self.now))

    def _carry_out(self, call: _Call) -> None:
        self.calls.remove(call)
        if self._is_refused(call):
            self.calls.append(call)
            self._refuse_ranges()
            return
        reply = self.apply(call.call)
        if isinstance(reply, calls.RecordBatches):
            # The vertex registers a replay with its root as the id of its one copy.
            self.ledger.ids.update((root, root) for batch in reply.batches for root in batch.roots.tolist())
        if isinstance(reply, calls.Xored):
            self.ledger.completed += reply.completed
        if call.then is not None and call.instance == self.instances[call.slot]:
            call.then(reply)

    def _do(self, key: tuple[str, int], decided: list[actions.Action]) -> None:
        uid, subtask = key
        slot = self.graph.slot_of(uid, subtask)
        task = self.tasks[key]
        for action in decided:
            match action:
                case actions.Send(channel, element):
                    assert not (isinstance(element, Batch) and element.num_rows == 0), (
                        "an empty batch was sent"
                    )
                    self.queues.setdefault(channel, deque()).append(element)
                    if not isinstance(element, Batch | LatencyMarker):
                        self.marks[channel] = element
                case actions.PersistRoots(ticket, call):
                    self.ledger.note(ids_of(call.roots), call.ids)
                    self._call(slot, call, partial(self._persisted, key, task, ticket), key)
                case actions.CallRanges(number, call):
                    self._call(slot, call, partial(self._told, key, task, number), key)
                case actions.Acknowledge(roots, values, ids):
                    self.ledger.note(roots, ids)
                    self._call(slot, calls.Xor(roots, values, self.vertex.incarnation, ids=ids))
                case actions.FailRoots(failures):
                    self._call(slot, calls.Fail(failures, self.vertex.incarnation))
                case actions.AskReplays(stream, limit):
                    self._call(
                        slot,
                        calls.TakeReplays(stream, limit),
                        lambda reply: self._do(
                            key, task.handle(Replayed(reply.batches, held=reply.held), self.now)
                        ),
                    )
                case actions.WakeAt(mono_ms):
                    self.wakes[key] = min(mono_ms, self.wakes.get(key, mono_ms))
                case actions.TaskEnded():
                    assert key not in self.ended, f"{key} ended twice"
                    self.ended.add(key)

    def _persisted(self, key: tuple[str, int], task: Any, ticket: int, reply: Any) -> None:
        event = RowsPersisted(ticket, getattr(reply, "segment", -1))
        self._do(key, task.handle(event, self.now))

    def _told(self, key: tuple[str, int], task: Any, number: int, reply: Any) -> None:
        self._do(key, task.handle(RangesAnswered(number, reply), self.now))

    def _call(
        self, slot: int, call: Any, then: Callable[[Any], None] | None = None, key: tuple[str, int] = ("", 0)
    ) -> None:
        self.calls.append(_Call(slot, self.instances[slot], call, then, key))


@pytest.fixture(scope="module")
def markers_everywhere() -> Iterator[None]:
    """Let sources send a latency marker behind every batch, in a module all of whose tests want that."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "EVERY_MS", 0)
        yield


@pytest.fixture
def markers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sources send a latency marker behind every batch, in one test."""
    monkeypatch.setattr(latency, "EVERY_MS", 0)


@pytest.fixture(scope="session")
def simulate() -> Callable[..., Simulation]:
    """Make a `Simulation` with choices drawn from a seed or a function."""

    def make(
        graph: JobGraph, rows: dict[str, list[list[Any]]], choose: Any = 0, **options: Any
    ) -> Simulation:
        if isinstance(choose, int):
            choose = random.Random(choose).randrange
        return Simulation(graph, rows, choose, **options)

    return make
