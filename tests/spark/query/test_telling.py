"""A wrapped query as it is announced: what its batches took, and what orders do."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from ftlayer.common.telemetry import EndedSpan
from ftlayer.errors import QueryError, SessionLostError, UnsupportedError
from ftlayer.records.traced import Sampler
from ftlayer.spark.protocol import JUDGED
from ftlayer.spark.query.writer import (
    KEPT_BATCHES,
    RATE_MS,
    BatchHistory,
    BatchTraces,
    QueryStart,
    QueryTelling,
    UntrackedQueryTelling,
    rates_of,
    title_of,
)
from ftlayer.vertex.calls import (
    AnnounceJob,
    BatchDetails,
    BatchState,
    Incident,
    JobOrder,
    OpenQuery,
    OrderAction,
)

STEPS = ("begin", "begun", "run", JUDGED, "sealed", "written", "committed", "reported")


class Clock:
    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> float:
        return self.ms


def run_batch(log: BatchHistory, clock: Clock, batch: int, *, ms: float = 10.0, at_ms: int = 1_000) -> None:
    for step in STEPS:
        log.watch(step, batch)
        clock.ms += ms
    log.through(BatchDetails(batch, 0, 100, 5, 10, 2, rows_out=90, waiting=8), at_ms)


def test_phases_are_the_times_between_the_steps() -> None:
    clock = Clock()
    log = BatchHistory(clock)
    for step, ms in zip(STEPS, (1, 100, 20, 3, 50, 7, 2, 0), strict=True):
        log.watch(step, 4)
        clock.ms += ms
    report = log.through(BatchDetails(4, 0, 100, 5, 10, 2, rows_out=90, waiting=8), 1_234)
    (batch,) = log.batches
    assert report == batch
    assert batch.phases_ms == {"run": 100, "verdict": 20, "seal": 3, "sink": 50, "commit": 7}
    assert (batch.batch, batch.at_ms, batch.duration_ms) == (4, 1_234, 183)
    assert (batch.rows_in, batch.delivered, batch.failed, batch.dead) == (100, 5, 10, 2)
    histograms = {name: sum(each.counts) for name, each in log.histograms.items()}
    assert histograms == {
        f"batch{phase}|": 1 for phase in ("", "_run", "_verdict", "_seal", "_sink", "_commit")
    }
    assert log.histograms["batch_sink|"].total == pytest.approx(0.05)


def test_a_batch_is_a_trace_of_its_phases() -> None:
    clock, spans = Clock(), list[EndedSpan]()
    log = BatchHistory(clock, BatchTraces(Sampler(1.0), "clean orders", "run-1", spans.append))
    for step, ms in zip(STEPS, (1, 100, 20, 3, 50, 7, 2, 0), strict=True):
        log.watch(step, 4)
        clock.ms += ms
    log.through(BatchDetails(4, 0, 100, 5, 10, 2, rows_out=90, waiting=8), 1_000_000)
    whole, *phases = spans
    assert (whole.name, whole.parent, whole.end_ns - whole.start_ns) == ("batch", 0, 183_000_000)
    assert whole.end_ns == 1_000_000 * 1_000_000
    assert whole.attributes == {
        "ftlayer.query": "clean orders",
        "ftlayer.batch": 4,
        "ftlayer.batch.rows": 100,
        "ftlayer.batch.from_vertex": 5,
        "ftlayer.batch.failed": 10,
        "ftlayer.batch.died": 2,
    }
    assert {(span.trace, span.parent) for span in phases} == {(whole.trace, whole.span)}
    since = [(span.name, (span.start_ns - whole.start_ns) // 1_000_000) for span in phases]
    assert since == [("run", 1), ("verdict", 101), ("seal", 121), ("sink", 124), ("commit", 174)]
    assert phases[-1].end_ns - whole.start_ns == 181_000_000
    run_batch(log, clock, 5)
    assert len({span.trace for span in spans}) == 2
    assert len({span.span for span in spans}) == 12


def test_a_share_of_batches_is_traced() -> None:
    clock, spans = Clock(), list[EndedSpan]()
    log = BatchHistory(clock, BatchTraces(Sampler(0.1), "q", "run-1", spans.append))
    for batch in range(300):
        run_batch(log, clock, batch)
    assert 10 < len({span.trace for span in spans}) < 60


def test_a_batch_that_was_committed_before_has_no_phases() -> None:
    clock = Clock()
    log = BatchHistory(clock)
    run_batch(log, clock, 1)
    for step in ("begin", "begun", "reported"):
        log.watch(step, 2)
    log.through(BatchDetails(2, state=BatchState.COMMITTED), 2_000)
    assert [batch.phases_ms == {} for batch in log.batches] == [False, True]


def test_the_last_batches_are_kept_and_all_are_counted() -> None:
    clock = Clock()
    log = BatchHistory(clock)
    for batch in range(KEPT_BATCHES + 20):
        run_batch(log, clock, batch)
    assert [batch.batch for batch in log.batches] == list(range(20, KEPT_BATCHES + 20))
    assert log.counters["batches"] == KEPT_BATCHES + 20
    assert log.counters["records_in"] == 100 * (KEPT_BATCHES + 20)


def test_rates_are_those_of_the_last_seconds() -> None:
    clock = Clock()
    log = BatchHistory(clock)
    run_batch(log, clock, 1, at_ms=1_000)
    run_batch(log, clock, 2, at_ms=5_000)
    assert rates_of(log.batches, 6_000) == {"records_in": 20.0, "failed": 2.0}
    assert rates_of(log.batches, 1_000 + RATE_MS) == {"records_in": 10.0, "failed": 1.0}
    assert rates_of((), 1_000) == {"records_in": 0.0, "failed": 0.0}


def test_a_batch_that_takes_a_minute_is_no_burst_of_ten_seconds() -> None:
    """It was 60 times 100 rows in one look, and none in the next five."""
    clock = Clock()
    log = BatchHistory(clock)
    run_batch(log, clock, 1, ms=7_500, at_ms=60_000)  # 8 steps
    assert rates_of(log.batches, 60_000)["records_in"] == pytest.approx(100 / 60)
    assert rates_of(log.batches, 90_000)["records_in"] == pytest.approx(100 / 90)
    run_batch(log, clock, 2, ms=7_500, at_ms=120_000)
    assert rates_of(log.batches, 120_000)["records_in"] == pytest.approx(100 / 60)
    assert rates_of(log.batches, 180_000)["records_in"] == 0.0


@pytest.fixture
def supervisor() -> Any:
    it = Mock(isActive=True, state="running", error=None, restarts=2, last_failure="OSError: down")
    it.query.lastProgress = None
    it.name = "clean-orders"
    it.incidents = (Incident(5, "restart", "restart 2: OSError: down"),)
    it.circuits.return_value = {}
    return it


@pytest.fixture
def telling(supervisor: Any) -> QueryTelling:
    clock = Clock()
    log = BatchHistory(clock)
    run_batch(log, clock, 1)
    return QueryTelling(
        supervisor, log, QueryStart("3f2a", "orders", "/chk", {"Spark UI": "http://x:4040"}, 7, "run-1")
    )


def test_it_is_told_by_the_name_that_people_gave_it(telling: QueryTelling) -> None:
    details = telling.details(0, with_plan=True)
    AnnounceJob(details).check()
    assert (details.owner, details.name, details.kind, details.run) == (
        "3f2a",
        "clean-orders",
        "query",
        "run-1",
    )
    assert (details.state, details.final, details.restarts, details.last_failure) == (
        "running",
        False,
        2,
        "OSError: down",
    )
    assert (details.checkpoint_location, details.links) == ("/chk", {"Spark UI": "http://x:4040"})
    assert [batch.batch for batch in details.batches] == [1]
    assert details.incidents[0].kind == "restart"
    assert "5 of them from the vertex" in details.line
    assert details.line.startswith("running · 1 batches · 100 rows (")


def test_its_last_word_says_what_it_ended_with(telling: QueryTelling, supervisor: Any) -> None:
    supervisor.isActive, supervisor.state, supervisor.error = False, "failed", QueryError("no table")
    first, again = telling.details(0, with_plan=False), telling.details(0, with_plan=False)
    assert (first.state, first.final, first.last_failure) == ("failed", True, "no table")
    assert first.ended_ms == again.ended_ms > 0


@pytest.mark.parametrize("name", ["x" * 5_000, "é" * 150, "a\0b", "\0", "lone \ud800", "two words"])
def test_any_name_that_spark_takes_is_one_that_the_vertex_takes(
    telling: QueryTelling, supervisor: Any, name: str
) -> None:
    supervisor.name = name
    AnnounceJob(telling.details(0, with_plan=False)).check()
    OpenQuery("3f2a", "run-1.1", (), title=title_of(name)).check()


def progress(batch: int, rows: int, *, ran: bool = True) -> dict[str, Any]:
    took = {"triggerExecution": 500} | ({"addBatch": 300} if ran else {"latestOffset": 1})
    return {
        "batchId": batch,
        "numInputRows": rows,
        "timestamp": f"2026-01-02T03:04:0{5 + batch}.{5 if ran else 1}00Z",
        "durationMs": took,
    }


def test_a_query_that_is_not_tracked_is_told_by_sparks_progress(
    supervisor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    telling = UntrackedQueryTelling(supervisor, Mock(), QueryStart("orders", "clicks", "/c", {}, 1_000))
    supervisor.query.lastProgress = None
    details = telling.details(0, with_plan=True)
    AnnounceJob(details).check()
    assert (details.owner, details.mode, details.counters) == ("orders", "off", {})
    told = [progress(0, 10), progress(1, 20), progress(2, 0, ran=False)]
    supervisor.query.recentProgress, supervisor.query.lastProgress = told, told[-1]
    details = telling.details(0, with_plan=False)
    assert details.counters == {"batches": 2, "records_in": 30}
    assert [(each.batch, each.rows_in, each.duration_ms) for each in details.batches] == [
        (0, 10, 500),
        (1, 20, 500),
    ]
    assert details.batches[0].at_ms == 1_767_323_046_000
    assert details.line.endswith("2 batches · 30 rows (0/s) · not tracked · 2 restarts")
    told.append(progress(2, 5))
    supervisor.query.lastProgress = told[-1]
    assert telling.details(0, with_plan=False).counters == {"batches": 3, "records_in": 35}
    supervisor.isActive = False
    told.append(progress(3, 7))
    supervisor.query.lastProgress = told[-1]
    monkeypatch.setattr("ftlayer.spark.sessions.how_it_ended", lambda spark: SessionLostError("stopped"))
    last = telling.details(0, with_plan=False)
    assert (last.final, last.counters["batches"]) == (True, 3)
    monkeypatch.setattr("ftlayer.spark.sessions.how_it_ended", lambda spark: None)
    assert telling.details(0, with_plan=False).counters["batches"] == 4


@pytest.mark.parametrize(
    ("offsets", "lag"),
    [
        ((('{"a-0": 3}', '{"a-0": 5}'),), {"lag/orders": 2}),
        ((('{"a-0": 3}', '{"a-0": 5}'), ('{"next": 1}', '{"next": 1, "waiting": 7}')), {"lag/orders": 9}),
        ((('{"a-0": 3}', None),), {}),
        ((("7", "9"),), {}),
        ((), {}),
    ],
)
def test_the_lag_is_that_of_sparks_progress(
    telling: QueryTelling, supervisor: Any, offsets: Any, lag: dict[str, int]
) -> None:
    sources = [{"endOffset": end, "latestOffset": latest} for end, latest in offsets]
    supervisor.query.lastProgress = progress(0, 5) | {"sources": sources}
    details = telling.details(0, with_plan=False)
    AnnounceJob(details).check()
    assert {name: count for name, count in details.counters.items() if "/" in name} == lag


def order(action: OrderAction, timeout_ms: int = 0) -> JobOrder:
    return JobOrder("o1", "3f2a", "run-1", action, "me", 1, timeout_ms=timeout_ms)


def test_orders_stop_it_and_drain_it(telling: QueryTelling, supervisor: Any) -> None:
    assert "stopped" in telling.carry_out(order(OrderAction.STOP))
    supervisor.stop.assert_called_once_with()
    supervisor.drain.return_value = True
    assert "is done" in telling.carry_out(order(OrderAction.DRAIN, 1_500))
    supervisor.drain.assert_called_once_with(1.5)
    supervisor.drain.return_value = False
    assert "stays for its next start" in telling.carry_out(order(OrderAction.DRAIN))


@pytest.mark.parametrize(
    ("action", "way_out"),
    [
        (OrderAction.SAVEPOINT, "stop it, and start it again"),
        (OrderAction.CANCEL, "stop it"),
        (OrderAction.STACK, "Thread Dump"),
    ],
)
def test_what_a_query_cannot_be_asked_for_is_refused_with_the_ways_out(
    telling: QueryTelling, action: OrderAction, way_out: str
) -> None:
    with pytest.raises(UnsupportedError, match=way_out):
        telling.carry_out(order(action))


def test_one_that_has_ended_takes_no_orders(telling: QueryTelling, supervisor: Any) -> None:
    supervisor.isActive, supervisor.state = False, "ended"
    with pytest.raises(UnsupportedError, match="is ended"):
        telling.carry_out(order(OrderAction.STOP))
