from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.common.failures import FailException
from ftlayer.errors import JobError
from ftlayer.records.partitioning import Custom, HashByKey, Partitioner, Rebalance
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.handler import FTHandler, NonFTHandler
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, Batch, EndOfStream, Idle, RecordIds, Watermark
from ftlayer.runtime.task import build as join
from ftlayer.runtime.task import join_buffer
from ftlayer.runtime.task.actions import (
    Acknowledge,
    ChannelReset,
    ElementCame,
    FailRoots,
    Send,
    TaskEnded,
    TaskStart,
    TimeCame,
    WakeAt,
)
from ftlayer.runtime.task.build import JoinTask
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.runtime.task.event_time import StatusWatermarkValve
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import FunctionSink, IterableSource, Join, Sink, Source

IN = pa.schema([("key", pa.int64()), ("number", pa.int64())])
OUT = pa.schema([("left", pa.int64()), ("right", pa.int64())])
HOLD_MS, REMEMBER_MS, STEP_MS = 100, 160, 10


def graph_of(function, lower: int, upper: int, out: Partitioner) -> JobGraph:
    by_key = HashByKey(KeySelector(("key",)))
    operator = Join("join", function, OUT, (("key",), ("key",)), (IN, IN), lower, upper)
    vertices = (
        JobVertex("left", (Source("left", IterableSource(()), IN),), 1),
        JobVertex("right", (Source("right", IterableSource(()), IN),), 1),
        JobVertex("join", (operator,), 1),
        JobVertex("sink", (Sink("sink", FunctionSink(print), OUT),), 2),
    )
    edges = (
        JobEdge(0, "left", "join", 0, by_key, IN),
        JobEdge(1, "right", "join", 1, by_key, IN),
        JobEdge(2, "join", "sink", 0, out, OUT),
    )
    return JobGraph("job", vertices, edges, tracked=True)


def task_of(
    function, lower: int = 0, upper: int = 0, *, tracked: bool = True, out: Partitioner | None = None
) -> JoinTask:
    graph = graph_of(function, lower, upper, out or Rebalance())
    handler = FTHandler("join", job="job", run="run") if tracked else NonFTHandler()
    return JoinTask(
        "join",
        0,
        graph.vertex("join").operators[0],
        graph.edges_into("join"),
        StatusWatermarkValve.of(graph, "join", 0),
        handler,
        Emitter(graph, "join", 0, handler),
        HOLD_MS,
        REMEMBER_MS,
    )


CHANNELS = (Channel(0, 0, 0), Channel(1, 0, 0))


@dataclass
class Row:
    number: int
    key: int | None
    time: int
    anchors: list[tuple[int, int, int]]  # root, origin, id
    hold: int | None = None

    @property
    def replay(self) -> bool:
        return any(root != origin for root, origin, _ in self.anchors)


def batch_of(rows: list[Row]) -> Batch:
    payload = pa.RecordBatch.from_pylist([{"key": row.key, "number": row.number} for row in rows], schema=IN)
    anchors = [anchor for row in rows for anchor in row.anchors]
    roots, origins, ids = (np.array(column, np.uint64) for column in zip(*anchors, strict=True))
    offsets = None
    if len(anchors) != len(rows):
        offsets = np.cumsum([0, *(len(row.anchors) for row in rows)]).astype(np.int32)
    lineage = RecordIds(roots, ids, offsets, None if (roots == origins).all() else origins)
    return Batch(payload, lineage, np.array([row.time for row in rows], np.int64))


@dataclass
class Harness:
    """The task beside a model of it, and beside the vertex's table."""

    lower: int
    upper: int
    rotten: frozenset[int]
    sides: tuple[list[Row], list[Row]] = field(default_factory=lambda: ([], []))
    past: tuple[list[Row], list[Row]] = field(default_factory=lambda: ([], []))
    watermarks: list[int] = field(default_factory=lambda: [-(2**63)] * 2)
    time: int = 0
    table: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # records not acked, a root
    done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    pairs: int = 0

    def __post_init__(self) -> None:
        self.task = task_of(self.function, self.lower, self.upper)
        self.called: list[tuple[int, int]] = []
        self.raised: list[tuple[int, int]] = []
        self.take(self.task.handle(TaskStart(), self.now))

    @property
    def now(self) -> Now:
        return Now(self.time, 0)

    @property
    def watermark(self) -> int:
        return min(self.watermarks)

    def function(self, left, right):
        pair = (left[1], right[1])
        assert left[0] == right[0]
        self.called.append(pair)
        if sum(pair) % 7 in self.rotten:
            self.raised.append(pair)
            raise FailException("rotten")
        return pair

    # ---------------------------------------------------------------- the vertex

    def register(self, rows: list[Row]) -> None:
        """Add these copies to what their roots wait for. (A root of two copies begins with both.)"""
        for row in rows:
            for root, _, identity in row.anchors:
                self.table[root] = self.table.get(root, 0) ^ identity
                self.waiting[root] += 1

    def take(self, actions) -> list[tuple[int, int]]:
        """Carry actions out; the sink acknowledges at once. Return the pairs sent."""
        sent = []
        for action in actions:
            match action:
                case Send(_, Batch(payload, lineage, times)):
                    sent.extend(zip(*(column.to_pylist() for column in payload.columns), strict=True))
                    assert times is not None
                    for root, identity in zip(lineage.roots.tolist(), lineage.ids.tolist(), strict=True):
                        if root in self.table:
                            self.table[root] ^= identity
                case Acknowledge(roots, values):
                    for root, value in zip(roots.tolist(), values.tolist(), strict=True):
                        if root in self.table:
                            self.table[root] ^= value
                case FailRoots(failures):
                    for failure in failures:
                        assert failure.reason == "rotten"
                        assert failure.operator == "join"
                        self.failed.add(failure.root)
                        self.table.pop(failure.root, None)
        for root, value in list(self.table.items()):
            if value == 0:
                self.done.add(root)
                del self.table[root]
        return sent

    # ---------------------------------------------------------------- the model

    def last(self, side: int, row: Row) -> int:
        return row.time + (self.upper if side == 0 else -self.lower)

    def matching(self, side: int, row: Row, other: Row) -> bool:
        left, right = (row, other) if side == 0 else (other, row)
        return (
            row.key is not None
            and row.key == other.key
            and (left.time + self.lower <= right.time <= left.time + self.upper)
        )

    def acknowledge(self, row: Row) -> None:
        for root, _, _ in row.anchors:
            self.waiting[root] -= 1

    def batch(self, side: int, rows: list[Row]) -> None:
        replayed = {origin: root for row in rows for root, origin, _ in row.anchors if root != origin}
        roots = {root for row in rows for root, origin, _ in row.anchors if root != origin}
        for buffer in (*self.sides, *self.past):
            buffer[:] = [
                row
                for row in buffer
                if not any(origin in replayed and root not in roots for root, origin, _ in row.anchors)
            ]
        self.called.clear()
        self.raised.clear()
        sent = self.take(self.task.handle(ElementCame(CHANNELS[side], batch_of(rows)), self.now))

        def pair(row: Row, other: Row) -> tuple[int, int]:
            return (row.number, other.number) if side == 0 else (other.number, row.number)

        others, past = self.sides[1 - side], self.past[1 - side]
        expected = {pair(row, other) for row in rows for other in others if self.matching(side, row, other)}
        expected |= {
            pair(row, other)
            for row in rows
            for other in past
            if row.replay and self.matching(side, row, other)
        }
        bad = [{numbers[which] for numbers in self.raised} for which in range(2)]
        # What was acknowledged cannot fail.
        bad[1 - side] -= {other.number for other in past}
        harmed = {p for p in expected if p[0] in bad[0] or p[1] in bad[1]}
        assert len(self.called) == len(set(self.called))
        assert set(self.called) <= expected
        assert expected - harmed <= set(self.called)
        assert len(sent) == len(set(sent))
        assert expected - harmed <= set(sent) <= set(self.called) - set(self.raised)
        self.pairs += len(sent)
        others[:] = [other for other in others if other.number not in bad[1 - side]]
        for row in rows:
            if row.number in bad[side]:
                continue
            if row.key is not None and (row.replay or self.last(side, row) >= self.watermark):
                row.hold = self.time + HOLD_MS if row.replay else None
                self.sides[side].append(row)
            else:
                self.acknowledge(row)
                if row.key is not None:
                    self.remember(side, row)

    def remember(self, side: int, row: Row) -> None:
        row.hold = -(-(self.time + REMEMBER_MS) // STEP_MS) * STEP_MS
        self.past[side].append(row)

    def move(self, side: int, time_ms: int) -> None:
        self.watermarks[side] = max(self.watermarks[side], time_ms)
        self.take(self.task.handle(ElementCame(CHANNELS[side], Watermark(time_ms)), self.now))
        self.evict()

    def tick(self, ms: int) -> None:
        self.time += ms
        self.take(self.task.handle(TimeCame(), self.now))
        self.evict()

    def evict(self) -> None:
        for side, buffer in enumerate(self.sides):
            for row in list(buffer):
                past = self.last(side, row) < self.watermark or self.watermark == MAX_TIME_MS
                if past and (row.hold is None or row.hold <= self.time):
                    buffer.remove(row)
                    self.acknowledge(row)
                    self.remember(side, row)
        for past in self.past:
            past[:] = [row for row in past if row.hold is None or row.hold > self.time]

    def end(self) -> None:
        self.take(self.task.handle(ElementCame(CHANNELS[0], EndOfStream()), self.now))
        self.watermarks[0] = MAX_TIME_MS
        self.evict()
        actions = self.task.handle(ElementCame(CHANNELS[1], EndOfStream()), self.now)
        self.take(actions)
        assert isinstance(actions[-1], TaskEnded)
        for buffer in self.sides:
            for row in buffer:
                self.acknowledge(row)
            buffer.clear()

    def check(self) -> None:
        held = sorted(root for buffer in self.sides for row in buffer for root, _, _ in row.anchors)
        assert sorted(self.task.held_roots().tolist()) == held
        for root, count in self.waiting.items():
            if root in self.failed:
                assert root not in self.done
            else:
                assert (root in self.done) == (count == 0), (root, count)


rows_strategy = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1, 2, None]),  # key
        st.integers(0, 30),  # time
        st.integers(1, 2),  # anchors
        st.one_of(st.none(), st.integers(0, 30)),  # replay of which earlier record
    ),
    min_size=1,
    max_size=6,
)
events = st.lists(
    st.one_of(
        st.tuples(st.just("batch"), st.integers(0, 1), rows_strategy),
        st.tuples(st.just("batch"), st.integers(0, 1), rows_strategy),
        st.tuples(st.just("self"), st.booleans(), rows_strategy),
        st.tuples(st.just("watermark"), st.integers(0, 1), st.integers(0, 40)),
        st.tuples(st.just("tick"), st.just(0), st.integers(1, 120)),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=150)
@given(
    events,
    st.integers(-10, 5),
    st.integers(0, 12),
    st.frozensets(st.integers(0, 6), max_size=2),
    st.sampled_from([2, 5, 1000]),
    st.booleans(),
)
def test_against_brute_force(script, lower, width, rotten, block, merging):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(join, "PAIRS_AT_A_TIME", block)
        if not merging:
            patch.setattr(join_buffer, "MAX_RUN_BYTES", 0)
        harness = Harness(lower, lower + width, rotten)
        numbers = iter(range(10**6))
        fresh = iter(np.random.default_rng(1).integers(1, 2**63, 10**5).tolist())
        history: list[tuple[int, int]] = []  # origin, latest root

        def make(spec) -> Row:
            key, time, count, again = spec
            anchors = []
            for _ in range(count):
                root = next(fresh)
                origin = root
                if again is not None and history:
                    place = again % len(history)
                    origin, old = history[place]
                    if any(origin == other for _, other, _ in anchors):
                        origin = root
                    else:
                        # The old attempt has ended: its root is not in the table any more.
                        harness.table.pop(old, None)
                        harness.waiting.pop(old, None)
                        harness.done.discard(old)
                        history[place] = (origin, root)
                if origin == root:
                    history.append((root, root))
                anchors.append((root, origin, next(fresh)))
                again = None
            return Row(next(numbers), key, time, anchors)

        for kind, which, what in script:
            if kind == "watermark":
                harness.move(which, what)
            elif kind == "tick":
                harness.tick(what)
            else:
                rows = [make(spec) for spec in what]
                latest = {origin: root for row in rows for root, origin, _ in row.anchors}
                # Two replays of one record do not meet in a batch.
                rows = [row for row in rows if all(latest[origin] == root for root, origin, _ in row.anchors)]
                if not rows:
                    continue
                if kind == "batch":
                    harness.register(rows)
                    harness.batch(which, rows)
                else:
                    twins = [
                        Row(row.number, row.key, row.time, [(r, o, next(fresh)) for r, o, _ in row.anchors])
                        for row in rows
                    ]
                    harness.register(rows + twins)
                    harness.batch(int(which), rows)
                    harness.check()
                    harness.batch(1 - int(which), twins)
            harness.check()
        harness.end()
        harness.check()


def simple(key: int, number: int, time: int, root: int, origin: int | None = None) -> Row:
    return Row(number, key, time, [(root, origin or root, root + 1000)])


def sends(actions) -> list[tuple[int, int]]:
    return [
        pair
        for action in actions
        if isinstance(action, Send) and isinstance(action.element, Batch)
        for pair in zip(*(c.to_pylist() for c in action.element.payload.columns), strict=True)
    ]


def both(left, right):
    return left[1], right[1]


def test_a_pair_has_the_later_time_and_its_watermark_comes_behind_it():
    task = task_of(both, -5, 5)
    now = Now(0, 0)
    task.handle(ElementCame(CHANNELS[0], batch_of([simple(1, 1, 10, 1)])), now)
    actions = task.handle(ElementCame(CHANNELS[1], batch_of([simple(1, 2, 12, 2)])), now)
    (send,) = [a for a in actions if isinstance(a, Send)]
    assert send.element.times.tolist() == [12]
    assert sorted(send.element.lineage.roots.tolist()) == [1, 2]
    assert task.handle(ElementCame(CHANNELS[0], Watermark(20)), now) == []
    actions = task.handle(ElementCame(CHANNELS[1], Watermark(16)), now)
    assert isinstance(actions[0], Acknowledge)
    assert actions[0].roots.tolist() == [1]
    assert [a.element for a in actions[1:]] == [Watermark(16)] * 2
    actions = task.handle(ElementCame(CHANNELS[1], Idle()), now)
    assert actions[0].roots.tolist() == [2]
    assert [a.element for a in actions[1:]] == [Watermark(20)] * 2


def test_the_replay_of_one_side_waits_for_the_replay_of_the_other():
    task = task_of(both)
    now = Now(0, 0)
    for channel in CHANNELS:
        task.handle(ElementCame(channel, Watermark(1_000)), now)
    actions = task.handle(ElementCame(CHANNELS[0], batch_of([simple(1, 1, 10, 101, 1)])), now)
    assert actions == [WakeAt(HOLD_MS)]
    assert task.held_roots().tolist() == [101]
    actions = task.handle(ElementCame(CHANNELS[1], batch_of([simple(1, 2, 10, 102, 2)])), Now(50, 0))
    assert sends(actions) == [(1, 2)]
    actions = task.handle(TimeCame(), Now(HOLD_MS, 0))
    assert actions[0].roots.tolist() == [101]
    assert actions[1] == WakeAt(50 + HOLD_MS)
    assert task.held_roots().tolist() == [102]
    (actions,) = task.handle(TimeCame(), Now(50 + HOLD_MS, 0))
    assert actions.roots.tolist() == [102]


def test_a_replay_meets_what_was_acknowledged_and_anchors_the_pair_alone():
    task = task_of(both)
    now = Now(0, 0)
    task.handle(ElementCame(CHANNELS[1], batch_of([simple(1, 2, 10, 2)])), now)
    for channel in CHANNELS:
        task.handle(ElementCame(channel, Watermark(1_000)), now)
    assert len(task.held_roots()) == 0
    actions = task.handle(
        ElementCame(CHANNELS[0], batch_of([simple(1, 1, 10, 101, 1), simple(1, 3, 10, 3)])), now
    )
    assert sends(actions) == [(1, 2)]
    (send,) = [a for a in actions if isinstance(a, Send)]
    assert send.element.lineage.roots.tolist() == [101]
    (identity,) = send.element.lineage.ids.tolist()
    (acknowledge,) = task.handle(TimeCame(), Now(HOLD_MS, 0))
    assert acknowledge.roots.tolist() == [101]
    assert acknowledge.values.tolist() == [1101 ^ identity]
    # The replay itself is remembered, too, and what came too late.
    again = batch_of([simple(1, 5, 10, 105, 5)])
    assert sends(task.handle(ElementCame(CHANNELS[1], again), Now(HOLD_MS, 0))) == [(1, 5), (3, 5)]
    for time in (1_000, 2_000, 3_000):
        task.handle(TimeCame(), Now(time, 0))
    again = batch_of([simple(1, 4, 10, 104, 4)])
    assert sends(task.handle(ElementCame(CHANNELS[0], again), Now(3_000, 0))) == []


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("where", ["function", "result", "partitioner"])
def test_a_replay_that_fails_leaves_what_was_acknowledged_to_the_other_replays(where: str, side: int):
    """The failing pair is between two good ones of the same remembered row: neither goes with it.

    They would not be made again: their replays are acknowledged without them.
    """

    def bad(left: int, right: int) -> bool:
        return (left, right)[side] == 2

    def function(left, right):
        if where == "function" and bad(left[1], right[1]):
            raise FailException("rotten")
        return left[1], "two" if where == "result" and bad(left[1], right[1]) else right[1]

    def road(pair, channels):
        if where == "partitioner" and bad(*pair):
            raise FailException("no road")
        return pair[side] % channels

    task = task_of(function, out=Custom(KeySelector(("left", "right")), road))
    now = Now(0, 0)
    task.handle(ElementCame(CHANNELS[1 - side], batch_of([simple(1, 9, 10, 9)])), now)
    for channel in CHANNELS:
        task.handle(ElementCame(channel, Watermark(1_000)), now)
    assert len(task.held_roots()) == 0
    replays = [simple(1, number, 10, 100 + number, number) for number in (1, 2, 3)]
    actions = task.handle(ElementCame(CHANNELS[side], batch_of(replays)), now)
    (failed,) = [action for action in actions if isinstance(action, FailRoots)]
    assert [failure.root for failure in failed.failures] == [102]
    assert sorted(sends(actions)) == ([(1, 9), (3, 9)] if side == 0 else [(9, 1), (9, 3)])
    assert sorted(task.held_roots().tolist()) == [101, 103]
    # The next attempt finds the remembered row again.
    again = batch_of([simple(1, 4, 10, 202, 2)])
    assert sends(task.handle(ElementCame(CHANNELS[side], again), now)) == [(4, 9) if side == 0 else (9, 4)]


def test_late_records_are_counted_and_acknowledged():
    task = task_of(both)
    for channel in CHANNELS:
        task.handle(ElementCame(channel, Watermark(1_000)), Now(0, 0))
    (action,) = task.handle(ElementCame(CHANNELS[0], batch_of([simple(1, 1, 10, 1)])), Now(0, 0))
    assert action.roots.tolist() == [1]
    assert action.values.tolist() == [1001]
    assert task.late == 1


def test_what_has_no_time_fails_and_says_why():
    task = task_of(both)
    batch = batch_of([simple(1, 1, 10, 1)])
    (action,) = task.handle(ElementCame(CHANNELS[0], Batch(batch.payload, batch.lineage, None)), Now(0, 0))
    assert "no event time" in action.failures[0].reason


def test_a_result_that_does_not_fit_fails_its_pair_alone():
    task = task_of(lambda left, right: (left[1], right[1] if right[1] != 3 else "three"))
    now = Now(0, 0)
    task.handle(ElementCame(CHANNELS[0], batch_of([simple(1, 1, 0, 1), simple(2, 2, 0, 2)])), now)
    rows = [simple(1, 3, 0, 3), simple(2, 4, 0, 4)]
    actions = task.handle(ElementCame(CHANNELS[1], batch_of(rows)), now)
    assert sends(actions) == [(2, 4)]
    (failed,) = [a for a in actions if isinstance(a, FailRoots)]
    assert sorted(failure.root for failure in failed.failures) == [1, 3]
    assert "does not fit its schema" in failed.failures[0].reason
    assert sorted(task.held_roots().tolist()) == [2, 4]


def test_untracked_it_pairs_and_a_failure_goes_up():
    task = task_of(lambda left, right: (left[1], 10 // right[1]), tracked=False)
    now = Now(0, 0)
    times = np.zeros(1, np.int64)
    one = pa.RecordBatch.from_pylist([{"key": 1, "number": 5}], schema=IN)
    zero = pa.RecordBatch.from_pylist([{"key": 1, "number": 0}], schema=IN)
    assert task.handle(ElementCame(CHANNELS[0], Batch(one, None, times)), now) == []
    assert sends(task.handle(ElementCame(CHANNELS[1], Batch(one, None, times)), now)) == [(5, 2)]
    with pytest.raises(JobError, match="'join' failed: ZeroDivisionError"):
        task.handle(ElementCame(CHANNELS[1], Batch(zero, None, times)), now)
    assert len(task.held_roots()) == 0


def test_a_sender_that_is_replaced_holds_the_watermark():
    task = task_of(both)
    now = Now(0, 0)
    for channel in CHANNELS:
        task.handle(ElementCame(channel, Watermark(10)), now)
    task.handle(ChannelReset(CHANNELS[0]), now)
    assert task.handle(ElementCame(CHANNELS[1], Watermark(20)), now) == []
    actions = task.handle(ElementCame(CHANNELS[0], Watermark(15)), now)
    assert [a.element for a in actions] == [Watermark(15)] * 2
