"""Chains in a task, against an exact tracker of what each root waits for."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.common.failures import FailException
from ftlayer.config import TopologyOptions
from ftlayer.errors import JobStartError
from ftlayer.functions.process import ProcessFunction
from ftlayer.functions.steps import Filter, FlatMap, Map, Process
from ftlayer.records.failures import RowFailure
from ftlayer.records.partitioning import Broadcast, HashByKey, Rebalance
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.acker_mode.task.mode import AckerTaskMode
from ftlayer.runtime.connectors.sinks import open_sink
from ftlayer.runtime.handler import FTHandler
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, Batch, EndOfStream, Idle, RecordIds, Watermark
from ftlayer.runtime.task.actions import (
    Acknowledge,
    ElementCame,
    FailRoots,
    Send,
    TaskEnded,
    TaskStart,
    TimeCame,
    WakeAt,
)
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.contract import Settled
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import AssignWatermarks, FunctionSink, IterableSource, Sink, Source

IN = pa.schema([("number", pa.int64()), ("copies", pa.int64()), ("fails", pa.string()), ("at", pa.int64())])
OUT = pa.schema([("number", pa.int64()), ("copy", pa.int64()), ("fails", pa.string()), ("at", pa.int64())])


def fail_in(place):
    def check(record):
        if record[2] == place:
            raise FailException(place)
        return record

    return check


def copies_of(record):
    number, copies, fails, at = record
    for copy in range(copies):
        if fails == f"copy {copy}":
            raise FailException(fails)
        # One of the copies may lack a time, or fail behind the point where times are given.
        yield number, copy, fails, None if fails == f"time {copy}" else at


def last_fails(record):
    if record[2] == f"last {record[1]}":
        raise FailException(record[2])
    return record


OPERATORS = (
    Map("first", fail_in("first"), IN),
    FlatMap("copies", copies_of, OUT),
    AssignWatermarks("times", "at", 3, None, OUT),
    Filter("filter", lambda record: record[2] != "filtered", OUT),
    Map("last", last_fails, OUT),
)
BEFORE = Channel(0, 0, 0)


def graph_of(*, sink: bool) -> JobGraph:
    tail = (Sink("sink", FunctionSink(print), OUT),) if sink else ()
    vertices = [
        JobVertex("source", (Source("source", IterableSource(()), IN),), 1),
        JobVertex("first", (*OPERATORS, *tail), 1),
    ]
    edges = [JobEdge(0, "source", "first", 0, Rebalance(), IN)]
    if not sink:
        for number, partitioner in enumerate(
            (HashByKey(KeySelector(("number",))), Broadcast(), Rebalance()), start=1
        ):
            uid = f"sink{number}"
            vertices.append(JobVertex(uid, (Sink(uid, FunctionSink(print), OUT),), number))
            edges.append(JobEdge(number, "first", uid, 0, partitioner, OUT))
    return JobGraph("job", tuple(vertices), tuple(edges), tracked=True)


@dataclass
class BufferingSink:
    """Settles as many rows as it is told to; rows of ``rotten`` (number, copy) fail."""

    rotten: set[tuple[int, int]] = field(default_factory=set)
    budget: int = 0
    held: list[tuple[int, int]] = field(default_factory=list)
    written: list[tuple[int, int]] = field(default_factory=list)
    closed: bool = False

    def write(self, batch: pa.RecordBatch, mono_ms: int) -> Settled:
        assert batch.num_rows
        self.held.extend(zip(batch["number"].to_pylist(), batch["copy"].to_pylist(), strict=True))
        return self._settle(self.budget)

    def flush(self, mono_ms: int, *, force: bool) -> Settled:
        return self._settle(len(self.held) if force else self.budget)

    def _settle(self, rows: int) -> Settled:
        now, self.held = self.held[:rows], self.held[rows:]
        failures = [RowFailure(i, "sink", "rotten", "") for i, row in enumerate(now) if row in self.rotten]
        self.written.extend(row for row in now if row not in self.rotten)
        return Settled(len(now), tuple(failures))

    @property
    def due_ms(self) -> int | None:
        return 0 if self.held else None

    def close(self) -> None:
        assert not self.held
        self.closed = True


@dataclass
class Record:
    number: int
    copies: int
    fails: str
    at: int | None
    anchors: list[tuple[int, int]]

    @property
    def is_failing(self) -> bool:
        where, _, copy = self.fails.partition(" ")
        if where == "first":
            return True
        if self.at is None and self.copies:
            return True
        return where in ("copy", "time", "last") and int(copy) < self.copies

    @property
    def comes_to_time(self) -> bool:
        where, _, copy = self.fails.partition(" ")
        lost = where in ("copy", "time") and int(copy) < self.copies
        return self.at is not None and self.copies > 0 and where != "first" and not lost

    def rows(self) -> list[tuple[int, int]]:
        if self.is_failing or self.fails == "filtered":
            return []
        return [(self.number, copy) for copy in range(self.copies)]


def batch_of(records: list[Record]) -> Batch:
    payload = pa.RecordBatch.from_pylist(
        [{"number": r.number, "copies": r.copies, "fails": r.fails, "at": r.at} for r in records], schema=IN
    )
    anchors = [anchor for record in records for anchor in record.anchors]
    roots, ids = (np.array(column, np.uint64) for column in zip(*anchors, strict=True))
    offsets = np.cumsum([0, *(len(record.anchors) for record in records)]).astype(np.int32)
    single = len(anchors) == len(records)
    return Batch(payload, RecordIds(roots, ids, None if single else offsets))


@dataclass
class Tracker:
    """The vertex's table, and what has to be done yet for each root, named by what it is."""

    table: dict[int, int] = field(default_factory=dict)
    open: dict[int, set[object]] = field(default_factory=lambda: defaultdict(set))
    done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    emitted: list[tuple[int, int]] = field(default_factory=list)
    downstream: list[tuple[int, int]] = field(default_factory=list)
    roots: set[int] = field(default_factory=set)

    def register(self, records: list[Record]) -> None:
        for record in records:
            for root, identity in record.anchors:
                self.roots.add(root)
                self.table[root] = self.table.get(root, 0) ^ identity
                self.open[root].add(("record", record.number))

    def xor(self, root: int, value: int) -> None:
        if root in self.table:
            self.table[root] ^= value
            if self.table[root] == 0:
                del self.table[root]
                self.done.add(root)

    def take(self, actions) -> None:
        ids = set()
        for action in actions:
            match action:
                case Send(channel, Batch(payload, lineage)):
                    keys = zip(payload["number"].to_pylist(), payload["copy"].to_pylist(), strict=True)
                    self.emitted.extend((channel.edge, channel.receiver, *key) for key in keys)
                    for root, identity in zip(lineage.roots.tolist(), lineage.ids.tolist(), strict=True):
                        assert (root, identity) not in ids
                        ids.add((root, identity))
                        self.open[root].add(("child", identity))
                        self.downstream.append((root, identity))
                case Acknowledge(roots, values):
                    assert len(set(roots.tolist())) == len(roots)
                    for root, value in zip(roots.tolist(), values.tolist(), strict=True):
                        self.xor(root, value)
                case FailRoots(failures):
                    for failure in failures:
                        self.failed.add(failure.root)
                        self.table.pop(failure.root, None)

    def acknowledge_downstream(self, count: int) -> None:
        for root, identity in self.downstream[:count]:
            self.open[root].discard(("child", identity))
            self.xor(root, identity)
        self.downstream = self.downstream[count:]

    def record_done(self, record: Record) -> None:
        for root, _ in record.anchors:
            self.open[root].discard(("record", record.number))

    def check(self, failing: set[int]) -> None:
        """``failing``: numbers of roots that must have failed by now, all others must not."""
        assert self.failed == failing
        for root in self.roots - failing:
            assert (root in self.done) == (not self.open[root]), root
        assert not self.done & self.failed


FATES = ["", "", "", "first", "copy 1", "time 0", "time 1", "last 0", "last 1", "filtered"]
records_strategy = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(FATES),
        st.one_of(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.none()),
        st.lists(st.integers(1, 8), min_size=1, max_size=3, unique=True),
    ),
    min_size=1,
    max_size=6,
)


class Ids:
    def __init__(self) -> None:
        self.random = np.random.default_rng(3)
        self.records = 0

    def make(self, specs, base: int) -> list[Record]:
        """Roots of one batch are its own (and shared by its records); an operator before this one made them."""
        made = []
        for copies, fails, at, roots in specs:
            anchors = [(base * 100 + root, int(self.random.integers(1, 2**63))) for root in roots]
            made.append(Record(self.records, copies, fails, at, anchors))
            self.records += 1
        return made


def start(task, tracker: Tracker) -> None:
    tracker.take(task.handle(TaskStart(), Now(0, 0)))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(records_strategy, st.integers(0, 20)), max_size=6))
def test_records_are_acknowledged_with_their_children_and_failed_ones_never(script):
    handler = FTHandler("first", job="job", run="run")
    task = build_task(
        graph_of(sink=False), "first", 0, AckerTaskMode(lambda _: handler, TopologyOptions(), lambda *_: None)
    )
    tracker, ids = Tracker(), Ids()
    start(task, tracker)
    failing: set[int] = set()
    expected = []
    highest = None
    for base, (specs, downstream) in enumerate(script):
        records = ids.make(specs, base)
        tracker.register(records)
        actions = task.handle(ElementCame(BEFORE, batch_of(records)), Now(0, 0))
        kinds = [type(action) for action in actions]
        tracker.take(actions)
        for record in records:
            tracker.record_done(record)
            if record.is_failing:
                failing |= {root for root, _ in record.anchors}
            expected.extend(record.rows())
        tracker.check(failing)
        tracker.acknowledge_downstream(downstream)
        tracker.check(failing)
        # Each row once to the hashed edge, to both channels of the broadcast one, and once to the last.
        assert len(tracker.emitted) == 4 * len(expected)
        for edge, channels in ((1, 1), (2, 2), (3, 1)):
            rows = [row for at, _, *row in tracker.emitted if at == edge]
            assert sorted(map(tuple, rows)) == sorted(expected * channels)
        # Times of all that came as far as the point where they are given count, of whatever fails behind it too.
        seen = [record.at for record in records if record.comes_to_time]
        marks = [
            action.element.time_ms
            for action in actions
            if isinstance(action, Send) and isinstance(action.element, Watermark)
        ]
        if seen and (highest is None or max(seen) > highest):
            highest = max(seen)
            assert set(marks) == {highest - 3}
            assert kinds[-len(marks) :] == [Send] * len(marks)
    actions = task.handle(ElementCame(BEFORE, EndOfStream()), Now(0, 0))
    assert isinstance(actions[-1], TaskEnded)
    tracker.acknowledge_downstream(len(tracker.downstream))
    tracker.check(failing)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("batch"), records_strategy, st.integers(0, 8)),
            st.tuples(st.just("flush"), st.none(), st.integers(0, 8)),
        ),
        max_size=8,
    ),
    st.sets(st.tuples(st.integers(0, 20), st.integers(0, 2)), max_size=5),
)
def test_records_of_a_sink_are_acknowledged_with_their_last_row(script, rotten):
    sink = BufferingSink(rotten)
    handler = FTHandler("first", job="job", run="run")
    task = build_task(
        graph_of(sink=True), "first", 0, AckerTaskMode(lambda _: handler, TopologyOptions(), lambda *_: sink)
    )
    tracker, ids = Tracker(), Ids()
    start(task, tracker)
    given_rows: list[tuple[int, int]] = []
    by_number: dict[int, Record] = {}
    failing: set[int] = set()

    def check() -> None:
        settled = set(given_rows[: len(given_rows) - len(sink.held)])
        held = []
        for record in by_number.values():
            rows = record.rows()
            if record.is_failing or settled & rotten & set(rows):
                failing.update(root for root, _ in record.anchors)
            elif settled >= set(rows):
                tracker.record_done(record)
            else:
                held.extend(root for root, _ in record.anchors)
        tracker.check(failing)
        assert sorted(task.held_roots().tolist()) == sorted(held)

    for base, (kind, specs, budget) in enumerate(script):
        sink.budget = budget
        if kind == "batch":
            records = ids.make(specs, base)
            by_number.update({record.number: record for record in records})
            tracker.register(records)
            for record in records:
                given_rows.extend(record.rows())
            actions = task.handle(ElementCame(BEFORE, batch_of(records)), Now(0, 0))
            assert given_rows[len(given_rows) - len(sink.held) :] == sink.held
            if sink.held:
                assert any(isinstance(action, WakeAt) for action in actions) or base
            tracker.take(actions)
        else:
            tracker.take(task.handle(TimeCame(), Now(base, 0)))
        check()
    actions = task.handle(ElementCame(BEFORE, EndOfStream()), Now(0, 0))
    tracker.take(actions)
    assert isinstance(actions[-1], TaskEnded)
    assert sink.closed
    check()
    assert not tracker.table
    assert sorted(sink.written) == sorted(set(given_rows) - rotten)


def xors(actions) -> dict[int, int]:
    """What a root has left over after these actions, of the ids its records began with."""
    values: dict[int, int] = defaultdict(int)
    for action in actions:
        if isinstance(action, Acknowledge):
            for root, value in zip(action.roots.tolist(), action.values.tolist(), strict=True):
                values[root] ^= value
        elif isinstance(action, Send) and isinstance(action.element, Batch):
            lineage = action.element.lineage
            for root, identity in zip(lineage.roots.tolist(), lineage.ids.tolist(), strict=True):
                values[root] ^= identity
    return values


def test_a_sink_that_settles_as_many_old_rows_as_it_is_given_new_ones():
    sink = BufferingSink()
    task = build_task(
        graph_of(sink=True),
        "first",
        0,
        AckerTaskMode(lambda _: FTHandler("first", job="job", run="run"), TopologyOptions(), lambda *_: sink),
    )
    task.handle(TaskStart(), Now(0, 0))
    assert not xors(task.handle(ElementCame(BEFORE, batch_of([Record(1, 2, "", 0, [(1, 11)])])), Now(0, 0)))
    sink.budget = 2
    assert xors(task.handle(ElementCame(BEFORE, batch_of([Record(2, 2, "", 0, [(2, 12)])])), Now(0, 0))) == {
        1: 11
    }
    assert task.held_roots().tolist() == [2]
    assert xors(task.handle(TimeCame(), Now(0, 0))) == {2: 12}


@pytest.mark.parametrize(
    ("is_first", "tries", "earlier", "ends"),
    [
        (True, None, False, True),
        (False, None, False, False),
        (True, np.array([1, 1], np.uint64), False, False),
        (True, None, True, False),
    ],
)
def test_what_no_row_of_a_first_batch_gets_past_ends_the_job(is_first, tries, earlier, ends) -> None:
    """Not where a row was written before, a slot was lost, or these have failed before: they are theirs then."""

    def write(rows: pa.RecordBatch) -> None:
        if not earlier:
            rows.wirte("out")

    mode = AckerTaskMode(
        lambda _: FTHandler("first", job="job", run="run"),
        TopologyOptions(),
        lambda *_: open_sink(Sink("sink", FunctionSink(lambda rows: write(rows)), OUT), 0, 1, run="run"),
        is_first=is_first,
    )
    task = build_task(graph_of(sink=True), "first", 0, mode)
    task.handle(TaskStart(), Now(0, 0))
    if earlier:
        task.handle(ElementCame(BEFORE, batch_of([Record(9, 1, "", 0, [(9, 99)])])), Now(0, 0))
        earlier = False
    batch = batch_of([Record(1, 1, "", 0, [(1, 11)]), Record(2, 1, "", 0, [(2, 12)])])
    came = ElementCame(BEFORE, replace(batch, lineage=replace(batch.lineage, tries=tries)))
    if ends:
        with pytest.raises(JobStartError, match=r"sink 'sink' could write no row of its first 2: .*wirte"):
            task.handle(came, Now(0, 0))
    else:
        (failed,) = (action for action in task.handle(came, Now(0, 0)) if isinstance(action, FailRoots))
        assert [each.root for each in failed.failures] == [1, 2]


class Split(ProcessFunction):
    def process(self, record, ctx):
        for _ in range(record[1]):
            ctx.output("other", record[0])
        if record[1] == 2:
            yield record[0], 0, "", 0


def test_side_outputs_are_owed_too():
    other = pa.schema([("number", pa.int64())])
    process = Process("process", Split(), OUT, (), (("other", other),))
    vertices = (
        JobVertex("source", (Source("source", IterableSource(()), IN),), 1),
        JobVertex("process", (process,), 1),
        JobVertex("sink", (Sink("sink", FunctionSink(print), OUT),), 2),
        JobVertex("others", (Sink("others", FunctionSink(print), other),), 2),
    )
    edges = (
        JobEdge(0, "source", "process", 0, Rebalance(), IN),
        JobEdge(1, "process", "sink", 0, Broadcast(), OUT),
        JobEdge(2, "process", "others", 0, Rebalance(), other, "other"),
        JobEdge(3, "process", "others", 0, Broadcast(), other, "other"),
    )
    task = build_task(
        JobGraph("job", vertices, edges, tracked=True),
        "process",
        0,
        AckerTaskMode(
            lambda _: FTHandler("process", job="job", run="run"), TopologyOptions(), lambda *_: None
        ),
    )
    task.handle(TaskStart(), Now(0, 0))
    records = [Record(n, n, "", 0, [(n + 1, n + 100), (9, n + 200)]) for n in range(4)]
    actions = task.handle(ElementCame(BEFORE, batch_of(records)), Now(0, 0))
    rows = defaultdict(int)
    for action in actions:
        if isinstance(action, Send):
            rows[action.channel.edge] += action.element.num_rows
    assert rows == {1: 2, 2: 6, 3: 12}
    assert xors(actions) == {1: 100, 2: 101, 3: 102, 4: 103, 9: 200 ^ 201 ^ 202 ^ 203}


def test_a_chain_of_nothing_but_watermarks():
    times = AssignWatermarks("times", "at", 0, 50, IN)
    vertices = (
        JobVertex("source", (Source("source", IterableSource(()), IN),), 1),
        JobVertex("times", (times,), 1),
        JobVertex("sink", (Sink("sink", FunctionSink(print), IN),), 1),
    )
    edges = (
        JobEdge(0, "source", "times", 0, Rebalance(), IN),
        JobEdge(1, "times", "sink", 0, Rebalance(), IN),
    )
    task = build_task(
        JobGraph("job", vertices, edges, tracked=True),
        "times",
        0,
        AckerTaskMode(lambda _: FTHandler("times", job="job", run="run"), TopologyOptions(), lambda *_: None),
    )
    assert task.handle(TaskStart(), Now(0, 0)) == [WakeAt(50)]
    # Watermarks of before mean nothing behind it.
    assert task.handle(ElementCame(BEFORE, Watermark(1_000)), Now(0, 0)) == []
    actions = task.handle(ElementCame(BEFORE, batch_of([Record(1, 0, "", 7, [(1, 11)])])), Now(20, 0))
    assert [type(action) for action in actions] == [Send, Send]
    assert actions[0].element.times.tolist() == [7]
    assert actions[0].element.lineage.ids.tolist() == [11]
    assert actions[1].element == Watermark(7)
    assert task.handle(TimeCame(), Now(50, 0)) == [WakeAt(70)]
    assert [action.element for action in task.handle(TimeCame(), Now(70, 0))] == [Idle()]
    *actions, last = task.handle(ElementCame(BEFORE, EndOfStream()), Now(80, 0))
    assert [action.element for action in actions] == [Watermark(MAX_TIME_MS), EndOfStream()]
    assert last == TaskEnded()


def test_the_row_that_is_worked_on_is_known_behind_what_dropped_others():
    seen = []

    def look(record):
        seen.append((record[0], task.row, task.progress))
        return record

    operators = (
        Filter("odd", lambda record: record[0] % 2, IN),
        AssignWatermarks("times", "at", 3, None, IN),
        Map("look", look, IN),
    )
    vertices = (
        JobVertex("source", (Source("source", IterableSource(()), IN),), 1),
        JobVertex("odd", operators, 1),
        JobVertex("sink", (Sink("sink", FunctionSink(print), IN),), 1),
    )
    edges = (JobEdge(0, "source", "odd", 0, Rebalance(), IN), JobEdge(1, "odd", "sink", 0, Rebalance(), IN))
    task = build_task(
        JobGraph("job", vertices, edges, tracked=True),
        "odd",
        0,
        AckerTaskMode(lambda _: FTHandler("odd", job="job", run="run"), TopologyOptions(), lambda *_: None),
    )
    task.handle(TaskStart(), Now(0, 0))
    rows = [{"number": n, "copies": 0, "fails": "", "at": None if n == 1 else n} for n in range(6)]
    ids = np.arange(1, 7, dtype=np.uint64)
    task.handle(
        ElementCame(BEFORE, Batch(pa.RecordBatch.from_pylist(rows, schema=IN), RecordIds(ids, ids))),
        Now(0, 0),
    )
    # Row 1 has no time, and fails.
    assert [(number, row) for number, row, _ in seen] == [(3, 3), (5, 5)]
    assert seen[0][2] < seen[1][2]
    assert task.row is None
