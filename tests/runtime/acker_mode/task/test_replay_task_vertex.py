"""Sources and replays with the vertex's own rules: what fails comes again, to where it went, until it is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.common.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.functions.steps import Map
from ftlayer.records.failures import RowFailure
from ftlayer.records.keyhash import partition_of
from ftlayer.records.partitioning import Broadcast, Forward, HashByKey
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.acker_mode.task.mode import PersistingSourceTask
from ftlayer.runtime.acker_mode.task.replay_task import StreamReplayTask
from ftlayer.runtime.handler import FTHandler
from ftlayer.runtime.protocol.messages import Batch, LatencyMarker, ReplayNow
from ftlayer.runtime.task.actions import (
    Acknowledge,
    Action,
    AskReplays,
    FailRoots,
    PersistRoots,
    Replayed,
    RowsPersisted,
    Send,
    SourceRows,
    TaskStart,
    WakeAt,
)
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex
from ftlayer.topology.job_graph_generator import OpFTLayerBuilder, replay_uid
from ftlayer.topology.operators import IterableSource, Source
from ftlayer.vertex import calls
from ftlayer.vertex.calls import SourcePosition
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.store import MemoryStore

SCHEMA = pa.schema([("n", pa.int64())])
STREAM = "job/s"
REPLAY = replay_uid("s")


def graph() -> JobGraph:
    def chain(uid: str) -> JobVertex:
        return JobVertex(uid, (Map(uid, lambda record: record, SCHEMA),), 2)

    source = JobVertex("s", (Source("s", IterableSource(()), SCHEMA),), 2)
    edges = (
        JobEdge(0, "s", "f", 0, Forward(), SCHEMA),
        JobEdge(1, "s", "h", 0, HashByKey(KeySelector(("n",))), SCHEMA),
        JobEdge(2, "s", "b", 0, Broadcast(), SCHEMA),
    )
    return OpFTLayerBuilder().wire(
        JobGraph("job", (source, chain("f"), chain("h"), chain("b")), edges, tracked=False), {}
    )


class World:
    """One source, its replay, the vertex, and a sink behind every channel that fails the rows it is told to."""

    def __init__(self) -> None:
        self.now = Now(0, 1_700_000_000_000)
        self.store = MemoryStore()
        self.vertex = FTLayerCore(self.store, LayerOptions(tracker="exact"), self.now)
        self.call(calls.OpenStream(STREAM, calls.StreamOptions(backoff_ms=(100,), jitter=0.0)))
        self.graph = graph()
        self.source = PersistingSourceTask(self.graph, "s", 1, self.handler("s"))
        self.replay = StreamReplayTask(
            self.graph, REPLAY, 0, self.handler(REPLAY), TopologyOptions(batch_rows=2)
        )
        self.sinks = {uid: self.handler(uid) for uid in "fhb"}
        self.delivered: list[tuple[str, int, int]] = []
        self.asked = False

    def handler(self, uid: str) -> FTHandler:
        return FTHandler(uid, job="job", run="run", exact=True)

    def call(self, call: Any) -> Any:
        if isinstance(call, calls.ReadingCall):
            with self.store.read() as txn:
                return self.vertex.read(txn, call, self.now)
        with self.store.write(intake=isinstance(call, calls.Persist)) as txn:
            outcome = self.vertex.apply(txn, call, None, self.now)
        outcome.after()
        return outcome.reply

    def later(self, ms: int) -> None:
        self.now = Now(self.now.mono_ms + ms, self.now.wall_ms + ms)
        with self.store.write(intake=False) as txn:
            self.vertex.tick(txn, self.now)

    def do(self, actions: Sequence[Action], failing: Sequence[int] = ()) -> None:
        """Carry actions out; sinks fail the numbers ``failing``."""
        for action in actions:
            match action:
                case Send(channel, Batch() as batch):
                    target = self.graph.edges[channel.edge].target
                    numbers = batch.payload.column(0).to_pylist()
                    self.delivered += [(target, channel.receiver, number) for number in numbers]
                    self.do(self.sink(target, batch, [row for row, n in enumerate(numbers) if n in failing]))
                case PersistRoots(ticket, call):
                    self.call(call)
                    self.do(self.source.handle(RowsPersisted(ticket), self.now), failing)
                case Acknowledge(roots, values, ids):
                    self.call(calls.Xor(roots, values, self.vertex.incarnation, ids=ids))
                case FailRoots(failures):
                    self.call(calls.Fail(failures, self.vertex.incarnation))
                case AskReplays(stream, limit):
                    answer = self.call(calls.TakeReplays(stream, limit))
                    self.do(self.replay.handle(Replayed(answer.batches), self.now), failing)
                case WakeAt() | Send(_, LatencyMarker()):
                    pass
                case _:
                    raise AssertionError(action)

    def sink(self, uid: str, batch: Batch, failing: list[int]) -> Iterator[Action]:
        xor, lineage = self.sinks[uid].xor, batch.lineage
        assert lineage is not None
        xor.fail(lineage, [RowFailure(row, uid, "no", "") for row in failing])
        good = np.array([row for row in range(batch.num_rows) if row not in failing], np.int64)
        xor.settle(lineage, np.zeros(len(lineage), np.uint64), good)
        failures, events = xor.failures(), xor.events()
        if failures:
            yield FailRoots(failures)
        if events is not None:
            yield Acknowledge(events.roots, events.values, events.ids)

    def read(self, *numbers: int, failing: Sequence[int] = ()) -> None:
        payload = pa.record_batch([pa.array(numbers, pa.int64())], schema=SCHEMA)
        rows = SourceRows("p", 0, 0, payload, SourcePosition("p", None, b"1"))
        self.do(self.source.handle(rows, self.now), failing)

    @property
    def status(self) -> calls.StreamStatus:
        reply = self.call(calls.StreamStatusCall((STREAM,)))
        assert isinstance(reply, calls.StreamStatus)
        return reply


@pytest.fixture
def world() -> World:
    return World()


def test_rows_that_all_go_well_leave_nothing(world: World) -> None:
    world.read(1, 2, 3)
    assert world.status.drained
    assert len(world.delivered) == 3 * (1 + 1 + 2)


def test_a_position_without_rows_is_kept(world: World) -> None:
    world.read()
    reopened = world.call(calls.OpenStream(STREAM, calls.StreamOptions()))
    assert reopened.positions == {"p": b"1"}


def test_failed_records_come_again_to_the_same_channels_until_they_are_done(world: World) -> None:
    world.read(1, 2, 3, 4, 5, failing=[2, 4, 5])
    first = world.delivered
    assert world.status.waiting == 3
    for _ in range(2):
        world.delivered = []
        world.later(100)
        world.do(world.replay.handle(ReplayNow(), world.now), failing=[4])
    assert {number for _, _, number in world.delivered} == {4}
    assert sorted(world.delivered) == sorted(entry for entry in first if entry[2] == 4)
    world.later(100)
    world.do(world.replay.handle(ReplayNow(), world.now))
    assert world.status.drained


def test_what_was_recalled_is_replayed_at_once(world: World) -> None:
    (persist,) = world.source.handle(
        SourceRows("p", 0, 0, pa.record_batch([pa.array([1, 2, 3])], schema=SCHEMA), None), world.now
    )
    assert isinstance(persist, PersistRoots)
    world.call(persist.call)
    lost = world.source.handle(RowsPersisted(persist.ticket), world.now)
    world.call(calls.Recall((STREAM,), world.vertex.incarnation))
    world.do(world.replay.handle(TaskStart(), world.now))
    assert world.status.drained
    # What the lost slot did counts for nothing: its roots are not known any more.
    world.do(lost)
    assert world.status.drained


def test_records_of_a_changed_program_become_dead_letters(world: World) -> None:
    world.read(1, 2, failing=[1])
    world.later(100)
    answer = world.call(calls.TakeReplays(STREAM, 10))
    changed = [
        calls.Records(batch.payload, batch.roots, batch.origins, batch.attempts, None)
        for batch in answer.batches
    ]
    world.do(world.replay.handle(Replayed(tuple(changed)), world.now))
    assert (world.status.dead, world.status.pending) == (1, 0)


def test_an_edited_record_goes_where_its_new_key_belongs_and_stays_with_its_reader(world: World) -> None:
    """As often as it fails: its old key's number is stored with it, and says nothing of its payload any more."""
    world.call(calls.OpenStream(STREAM, calls.StreamOptions(max_attempts=1)))
    world.read(1, failing=[1])
    assert world.status.dead == 1
    first = {target: receiver for target, receiver, _ in world.delivered if target != "b"}
    new = next(n for n in range(2, 100) if subtask_of(n) != first["h"])
    (letter,) = world.call(calls.ListRecords("dead")).records
    payload = pa.record_batch([pa.array([new], pa.int64())], schema=SCHEMA)
    world.call(calls.OpenStream(STREAM, calls.StreamOptions(backoff_ms=(100,), jitter=0.0)))
    assert world.call(calls.EditAndRequeue((calls.Edit(letter.key, payload),), "me")) == calls.Changed(1)
    for failing in ([new], []):
        world.later(100)
        world.delivered = []
        world.do(world.replay.handle(ReplayNow(), world.now), failing=failing)
        went = {(target, receiver) for target, receiver, number in world.delivered if number == new}
        assert went == {("f", first["f"]), ("h", subtask_of(new)), ("b", 0), ("b", 1)}
    assert world.status.drained


def subtask_of(number: int) -> int:
    payload = pa.record_batch([pa.array([number], pa.int64())], schema=SCHEMA)
    return int(partition_of(KeySelector(("n",)).hash(payload), 2)[0])
