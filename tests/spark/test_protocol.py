"""The micro-batch protocol over the real rules of the vertex, with everything dying at every step.

Spark is simulated: its offset and commit logs, partitions that differ from run to run, a query that
starts again. The runner, the stages and the vertex's rules are the real ones.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ftlayer.errors import ConfigError
from ftlayer.failures import RowsRejected
from ftlayer.functions.steps import FlatMap, Map
from ftlayer.spark.batch.runner import SourceOfQuery, SparkRunner
from ftlayer.spark.batch.sinks import BatchFunctionSink
from ftlayer.spark.deliveries.source import delivered_rows
from ftlayer.spark.protocol import REJECTED, STEPS, BatchProtocol, BatchReport
from ftlayer.spark.stages.run import QueryPlan
from ftlayer.spark.stages.steps import Repartition, plan_stages
from ftlayer.spark.stages.task import FT
from ftlayer.vertex import calls
from ftlayer.vertex.calls import BatchState

SOURCE = pa.schema([("v", pa.int64())])
OUT = pa.schema([("v", pa.int64()), ("copy", pa.int64())])
DELIVERED = SOURCE.append(pa.field(FT, pa.binary()))
MAX_ATTEMPTS = 3
POISON = 0
"""Rows with this value fail always."""

Values = list[int]


class CrashError(BaseException):
    """The query's process dies: no code of its own may handle that."""


class Functions:
    """The user's functions for one run: each record fails or not, as this run has it."""

    def __init__(self, seed: int, failing: float, *, by_call: bool) -> None:
        self._random = random.Random(seed)
        self._failing = failing
        self._by_call = by_call
        self._kept: dict[Any, bool] = {}

    def check(self, key: Any) -> None:
        if self._by_call or key not in self._kept:
            self._kept[key] = self._random.random() < self._failing
        if key[0] == POISON or self._kept[key]:
            raise ValueError(f"record {key}")

    def copies(self, record: Any) -> Iterator[Any]:
        yield {"v": record["v"], "copy": 0}
        self.check((record["v"], "first"))
        yield {"v": record["v"], "copy": 1}

    def each(self, record: Any) -> Any:
        self.check((record["v"], record["copy"]))
        return record


class Sinks:
    """Three of them, fed alike: one appends, one overwrites by batch id, one skips ids it knows.

    ``refuses`` says by value whether they set a record aside, by one of its rows.
    """

    def __init__(self) -> None:
        self.refuses: Callable[[int], bool] = lambda value: False
        self.appended: Counter[int] = Counter()
        self.overwritten: dict[int, Counter[int]] = {}
        self.skipping: dict[int, Counter[int]] = {}
        self.writes: dict[int, list[Counter[int]]] = {}
        self.die_half_way = False

    def write(self, batch: int, result: Any, incarnation: int) -> Any:
        return BatchFunctionSink(self.take, "sinks", tagged=True).write(batch, result, incarnation)

    def take(self, frame: Any, batch: int) -> None:
        tagged = list(frame.toLocalIterator())
        if refused := {tag: "refused" for v, copy, tag in tagged if copy and self.refuses(v)}:
            raise RowsRejected(refused)
        found = [(v, copy) for v, copy, _ in tagged]
        copies = [Counter(v for v, copy in found if copy == number) for number in (0, 1)]
        assert copies[0] == copies[1], "all or nothing"
        rows = copies[0]
        if self.die_half_way:
            half = Counter(dict(list(rows.items())[: len(rows) // 2]))
            self.appended += half
            self.overwritten[batch] = half
            raise CrashError
        self.writes.setdefault(batch, []).append(rows)
        self.appended += rows
        self.overwritten[batch] = rows
        self.skipping.setdefault(batch, rows)


class Query:
    """A wrapped query on a simulated Spark."""

    def __init__(self, kit: SimpleNamespace, *, rewindable: bool, shuffled: bool) -> None:
        self.kit = kit
        self.rewindable = rewindable
        self.shuffled = shuffled
        self.stream = "q/files" if rewindable else "ingest/clicks"
        self.vertex = kit.Vertex(MAX_ATTEMPTS)
        self.sinks = Sinks()
        self.arrived: Values = []
        self.runs = 0
        self.opened: Any = None
        # Spark's checkpoint: the end offsets of each batch, and how many are committed.
        self.offsets: list[tuple[int, int]] = []
        self.commits = 0
        self.max_rows = 4
        self.start()

    # ------------------------------------------------------------ Spark

    def call(self, call: Any) -> Any:
        return self.vertex.call(call, f"client-{self.runs}")

    def start(self) -> None:
        """Start the query's process, and the Spark query in it."""
        self.runs += 1
        options = calls.StreamOptions(max_attempts=MAX_ATTEMPTS, backoff_ms=(100,), jitter=0.0)
        self.opened = self.call(calls.OpenQuery("q", f"run-{self.runs}", (self.stream,), options))
        assert self.opened.last_committed >= self.commits - 1

    def arrive(self, values: Values) -> None:
        self.arrived += values
        if not self.rewindable:
            payload = pa.RecordBatch.from_pylist([{"v": value} for value in values], schema=SOURCE)
            self.vertex.call(calls.Ingest(self.stream, payload), "producer")

    @property
    def in_flight(self) -> bool:
        """Whether Spark has a batch planned that it does not know to be committed."""
        return len(self.offsets) > self.commits

    def plan_batch(self) -> bool:
        """Write the next batch into the offset log, unless there is nothing new."""
        if self.in_flight:
            return True
        source, delivered = self.offsets[-1] if self.offsets else (0, 0)
        end = self.call(calls.Deliverable(self.stream, delivered, self.max_rows)).end
        up_to = min(len(self.arrived), source + self.max_rows) if self.rewindable else 0
        if (up_to, end) == (source, delivered):
            return False
        self.offsets.append((up_to, end))
        return True

    def frame(self, batch: int, seed: int) -> Any:
        """The batch's rows, in partitions and an order of this run."""
        start = self.offsets[batch - 1] if batch else (0, 0)
        end = self.offsets[batch]
        parts = []
        if self.rewindable:
            rows = [{"v": value} for value in self.arrived[start[0] : end[0]]]
            parts.append(self.kit.source_rows(rows, SOURCE))
        if end[1] > start[1]:
            reply = self.call(calls.ReadDeliveries(self.stream, start[1], end[1]))
            parts += [delivered_rows(records, DELIVERED, start[1], end[1]) for records in reply.batches]
        chance = random.Random(seed)
        partitions: list[list[Any]] = [[] for _ in range(chance.randint(1, 3))]
        singles = [part.slice(row, 1) for part in parts for row in range(part.num_rows)]
        chance.shuffle(singles)
        for single in singles:
            chance.choice(partitions).append(single)
        # Spark hands over batches, not rows.
        return self.kit.FakeFrame([[pa.concat_batches(part)] if part else [] for part in partitions])

    def process(
        self,
        functions: Functions,
        seed: int,
        *,
        crash: str = "",
        restart: str = "",
        refusing: float = 0.0,
    ) -> BatchReport | None:
        """Run the next batch; None if there is nothing to do, or the process died."""
        if self.opened is None:
            self.start()
        if not self.plan_batch():
            return None
        batch = len(self.offsets) - 1
        steps: list[Any] = [FlatMap("copies", functions.copies, OUT)]
        if self.shuffled:
            steps += [Repartition(2, ()), Map("each", functions.each, OUT)]
        schema = SimpleNamespace(names=OUT.names)
        stages = plan_stages(steps)
        plan = QueryPlan(stages, (schema,) * len(stages.stages), rejects=True)  # type: ignore[arg-type]
        chance = random.Random(seed)
        self.sinks.refuses = lambda value: chance.random() < refusing
        runner = SparkRunner(
            self.frame(batch, seed),
            plan,
            self.sinks,
            SourceOfQuery("files", self.stream),
            self.opened,
            lambda: self.vertex.incarnation,
            "q",
            f"run-{self.runs}",
            self.call,
        )

        def watch(step: str, number: int) -> None:
            assert number == batch
            if step == restart:
                self.vertex.restart()
            if step == crash:
                raise CrashError

        self.sinks.die_half_way = crash == "sink"
        try:
            with patch("ftlayer.spark.stages.run._with", lambda schema, *more: schema):
                report = BatchProtocol("q", self.opened.epoch, self.call, runner, watch).process(batch)
        except CrashError:
            self.opened = None
            return None
        finally:
            self.sinks.die_half_way = False
        self.commits = batch + 1
        return report

    # ------------------------------------------------------------ what must hold

    def status(self) -> Any:
        return self.call(calls.QueryStatusCall("q"))

    def accounted(self) -> Counter[int]:
        """Every record where it is: in the sink, dead, on its way in the vertex, not read yet."""
        found = sum((rows for rows in self.sinks.overwritten.values()), Counter())
        for state in ("dead", "waiting", "delivery"):
            found += self.vertex.values(state)
        read = self.offsets[-1][0] if self.offsets else 0
        return found + Counter(self.arrived[read:] if self.rewindable else ())

    def check_sinks(self) -> None:
        for batch, written in self.sinks.writes.items():
            for earlier, later in pairwise(written):
                # What failed once stays out: else a sink that skips would never get it.
                assert not later - earlier, f"batch {batch}: {later - earlier} passed only when run again"

    def drain(self) -> None:
        """Go on in peace until nothing is left to do."""
        good = Functions(0, 0.0, by_call=True)
        for seed in range(200):
            if self.process(good, seed) is None:
                if self.status().drained:
                    break
                self.vertex.advance(50)
        assert self.status().drained
        dead = self.vertex.values("dead")
        wanted = Counter(self.arrived) - dead
        assert not dead - Counter(self.arrived)
        assert sum((rows for rows in self.sinks.overwritten.values()), Counter()) == wanted
        assert not wanted - self.sinks.appended
        assert not wanted - sum((rows for rows in self.sinks.skipping.values()), Counter())
        assert dead[POISON] == Counter(self.arrived)[POISON]
        again = Counter(batch for batch, written in self.sinks.writes.items() if len(written) > 1)
        if not again:
            assert sum((rows for rows in self.sinks.skipping.values()), Counter()) == wanted
        self.check_sinks()
        # The next batch removes the last one's rows; what is left in the store are the dead.
        self.call(calls.BeginBatch("q", self.opened.epoch, len(self.offsets)))
        with self.vertex.inner.read() as read:
            assert (read.count("delivery"), read.count("segments")) == (0, 0)


LOSABLE = [None, calls.OpenQuery, calls.BeginBatch, calls.Seal, calls.Reseal, calls.Commit, calls.Deliverable]
steps_or_none = st.sampled_from(["", "", *STEPS])


class Protocol(RuleBasedStateMachine):
    """Random histories."""

    kit: SimpleNamespace

    @initialize(rewindable=st.booleans(), shuffled=st.booleans())
    def begin(self, rewindable: bool, shuffled: bool) -> None:
        self.query = Query(self.kit, rewindable=rewindable, shuffled=shuffled)

    @rule(values=st.lists(st.integers(0, 5), min_size=1, max_size=6))
    def arrive(self, values: Values) -> None:
        self.query.arrive(values)

    @rule(
        seed=st.integers(0, 2**32),
        failing=st.sampled_from([0.0, 0.2, 0.6, 0.9]),
        by_call=st.booleans(),
        crash=st.sampled_from(["", "", "", "sink", REJECTED, *STEPS]),
        restart=steps_or_none,
        lose=st.sampled_from(LOSABLE),
        restart_on_loss=st.booleans(),
        refusing=st.sampled_from([0.0, 0.3]),
    )
    def batch(
        self,
        seed: int,
        failing: float,
        by_call: bool,
        crash: str,
        restart: str,
        lose: Any,
        restart_on_loss: bool,
        refusing: float,
    ) -> None:
        self.query.vertex.lose, self.query.vertex.restart_on_loss = lose, restart_on_loss
        functions = Functions(seed, failing, by_call=by_call)
        self.query.process(functions, seed, crash=crash, restart=restart, refusing=refusing)
        self.query.vertex.lose = None

    @rule(
        seed=st.integers(0, 2**32),
        failing=st.sampled_from([0.0, 0.5]),
        crash=st.sampled_from(["sealed", "sink", "written", REJECTED]),
        refusing=st.sampled_from([0.0, 0.3]),
        again=st.sampled_from([0.0, 0.7]),
        restart=steps_or_none,
        lose=st.sampled_from(LOSABLE),
    )
    def batch_that_runs_again(
        self, seed: int, failing: float, crash: str, again: float, restart: str, lose: Any, refusing: float
    ) -> None:
        self.batch(seed, failing, False, crash, "", None, False, refusing)
        self.batch(seed + 1, again, False, "", restart, lose, True, refusing)

    @rule(what=st.sampled_from(["wait", "wait long", "vertex", "query"]))
    def happens(self, what: str) -> None:
        match what:
            case "vertex":
                self.query.vertex.restart()
            case "query":
                self.query.start()
            case _:
                self.query.vertex.advance(5_000 if what == "wait long" else 60)

    @precondition(lambda self: hasattr(self, "query") and not self.query.in_flight)
    @invariant()
    def everything_is_somewhere(self) -> None:
        assert self.query.accounted() == Counter(self.query.arrived)

    def teardown(self) -> None:
        if hasattr(self, "query"):
            self.query.drain()


def test_no_history_loses_or_doubles_a_record(kit: SimpleNamespace) -> None:
    Protocol.kit = kit
    run_state_machine_as_test(
        Protocol, settings=settings(max_examples=60, stateful_step_count=20, deadline=None)
    )


# ---------------------------------------------------------------- one crash at each step


@pytest.mark.parametrize("rewindable", [True, False], ids=["rewindable", "delivered"])
@pytest.mark.parametrize("crash", ["sink", *STEPS])
@pytest.mark.parametrize("restart", [False, True], ids=["vertex lives", "vertex restarts"])
def test_a_batch_that_crashes_at_a_step_goes_on_there(
    kit: SimpleNamespace, crash: str, restart: bool, rewindable: bool
) -> None:
    query = Query(kit, rewindable=rewindable, shuffled=False)
    query.arrive([POISON, 1, 2, 2])
    good = Functions(0, 0.0, by_call=True)
    assert query.process(good, 1, crash=crash) is None
    if restart:
        query.vertex.restart()
    report = query.process(good, 2)
    assert report is not None
    states = {"begin": "new", "begun": "new", "run": "new", "committed": "committed", "reported": "committed"}
    assert report.state is BatchState(states.get(crash, "sealed"))
    writes = 2 if crash == "written" else 1
    assert query.sinks.writes == {0: [Counter({1: 1, 2: 2})] * writes}
    assert query.sinks.overwritten == {0: Counter({1: 1, 2: 2})}
    query.drain()
    assert query.vertex.values("dead") == Counter({POISON: 1})


def test_a_report_says_what_came_of_a_batch(kit: SimpleNamespace) -> None:
    query = Query(kit, rewindable=True, shuffled=True)
    query.arrive([POISON, 1, 2])
    good = Functions(0, 0.0, by_call=True)
    assert query.process(good, 1) == BatchReport(
        0, BatchState.NEW, rows_in=3, rows_out=4, failed=1, waiting=1, dead=0, delivered=0
    )
    query.vertex.advance(100)
    assert query.process(good, 1) == BatchReport(
        1, BatchState.NEW, rows_in=1, rows_out=0, failed=1, waiting=1, dead=0, delivered=1
    )
    query.vertex.advance(100)
    report = query.process(good, 1)
    assert report is not None
    assert (report.failed, report.waiting, report.dead) == (1, 0, 1)


def test_a_row_that_passed_before_and_fails_in_the_run_again_is_replayed(kit: SimpleNamespace) -> None:
    """The documented case in which a sink that skips known batch ids sees a record twice."""
    query = Query(kit, rewindable=True, shuffled=False)
    query.arrive([1, 2])
    good, bad = Functions(0, 0.0, by_call=True), Functions(0, 1.0, by_call=True)
    query.process(good, 1, crash="written")
    report = query.process(bad, 2)
    assert report is not None
    assert (report.state, report.failed, report.differs) == (BatchState.SEALED, 2, True)
    query.drain()
    assert sum(query.sinks.skipping.values(), Counter()) == Counter({1: 2, 2: 2})
    assert sum(query.sinks.overwritten.values(), Counter()) == Counter({1: 1, 2: 1})


# ---------------------------------------------------------------- rows that the sink rejects


@pytest.mark.parametrize("rewindable", [True, False], ids=["rewindable", "delivered"])
@pytest.mark.parametrize("shuffled", [True, False])
@pytest.mark.parametrize("crash", ["", REJECTED, "written", "committed"])
def test_a_record_that_the_sink_rejects_fails_with_all_its_rows_and_the_rest_is_written(
    kit: SimpleNamespace, crash: str, shuffled: bool, rewindable: bool
) -> None:
    query = Query(kit, rewindable=rewindable, shuffled=shuffled)
    query.arrive([1, 2, 3])
    good = Functions(0, 0.0, by_call=True)
    calls_of_sink: list[int] = []
    take = query.sinks.take

    def rejecting(frame: Any, batch: int) -> None:
        rows = [(v, copy, tag) for v, copy, tag in frame.toLocalIterator()]
        calls_of_sink.append(len(rows))
        if bad := {tag: ValueError(f"no {v}") for v, copy, tag in rows if v == 2 and copy}:
            raise RowsRejected(bad)
        take(frame, batch)

    query.sinks.take = rejecting  # type: ignore[method-assign]
    report = query.process(good, 1, crash=crash)
    if crash:
        report = query.process(good, 2)
    assert report is not None
    assert query.sinks.overwritten == {0: Counter({1: 1, 3: 1})}
    expected = {"": [6, 4], REJECTED: [6, 4], "written": [6, 4, 4], "committed": [6, 4]}
    assert calls_of_sink == expected[crash]
    if not crash:
        assert (report.failed, report.waiting, report.differs) == (1, 1, False)
    page = query.call(calls.ListRecords("waiting", "", 100, b""))
    (record,) = page.records
    assert [(reason, operator) for _, reason, operator in record.history] == [("ValueError: no 2", "sinks")]
    query.sinks.take = take  # type: ignore[method-assign]
    query.drain()
    assert sum(query.sinks.overwritten.values(), Counter()) == Counter([1, 2, 3])


@pytest.mark.parametrize("key", [77, -77, "row", None])
def test_a_row_that_the_sink_was_not_given_cannot_be_rejected(kit: SimpleNamespace, key: Any) -> None:
    query = Query(kit, rewindable=True, shuffled=False)
    query.arrive([1, 2])

    def rejecting(frame: Any, batch: int) -> None:
        raise RowsRejected({key: "no"})

    query.sinks.take = rejecting  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match=f"raised RowsRejected for {key!r}, which is the _ft_row of no row"):
        query.process(Functions(0, 0.0, by_call=True), 1)


def test_a_row_that_was_rejected_before_cannot_be_rejected_again(kit: SimpleNamespace) -> None:
    query = Query(kit, rewindable=True, shuffled=False)
    query.arrive([1, 2])
    first: list[int] = []

    def rejecting(frame: Any, batch: int) -> None:
        first.append(next(iter(frame.toLocalIterator()))[2])
        raise RowsRejected({first[0]: "no"})

    query.sinks.take = rejecting  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="_ft_row of no row"):
        query.process(Functions(0, 0.0, by_call=True), 1)
    assert len(first) == 2


def test_what_a_run_holds_is_released_however_it_ends() -> None:
    class Runner:
        released = 0

        def run(self, batch: int, sealed: Any) -> str:
            return "result"

        def outcome(self, result: str, sealed: Any) -> Any:
            raise CrashError

        def release(self, result: str) -> None:
            self.released += 1

    runner: Any = Runner()
    with pytest.raises(CrashError):
        BatchProtocol("q", 1, lambda call: calls.BatchBegun(BatchState.NEW), runner).process(0)
    assert runner.released == 1
