"""The micro-batch protocol over the real rules of the vertex, with everything dying at every step.

Spark is simulated: its offset and commit logs, partitions that differ from run to run, a query that
starts again. The runner, the stages and the vertex's rules are the real ones.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

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
from simulated_query import POISON, CrashError, Functions, Query, Values

from ftlayer.common.failures import RowsRejected
from ftlayer.errors import ConfigError
from ftlayer.spark.protocol import REJECTED, STEPS, BatchProtocol
from ftlayer.vertex import calls
from ftlayer.vertex.calls import BatchDetails, BatchState

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
        Protocol, settings=settings(max_examples=30, stateful_step_count=20, deadline=None)
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
    assert query.process(good, 1) == BatchDetails(
        0, rows_in=3, rows_out=4, failed=1, waiting=1, dead=0, delivered=0
    )
    query.vertex.advance(100)
    assert query.process(good, 1) == BatchDetails(
        1, rows_in=1, rows_out=0, failed=1, waiting=1, dead=0, delivered=1
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
    assert [(each.reason, each.operator) for each in record.history] == [("ValueError: no 2", "sinks")]
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
