"""A batch in which too many records fail is held and run again; nothing of it has happened meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.common.rules.circuit import FIRST_PAUSE_MS, LONGEST_PAUSE_MS, CircuitState, CircuitStatus, Limit
from ftlayer.errors import QueryError
from ftlayer.spark import circuits
from ftlayer.spark.circuits import SINK, WHOLE_QUERY, FailureTally, QueryCircuits, QueryGate
from ftlayer.spark.protocol import BatchOutcome, BatchProtocol
from ftlayer.vertex import calls
from ftlayer.vertex.calls import BatchBegun, BatchState, Failure, Sealed

NOTHING = BatchOutcome({}, (), (), (), (), 0, 0, None)  # type: ignore[arg-type]


class Clock:
    """A clock that moves when somebody waits."""

    def __init__(self) -> None:
        self.ms = 0

    def __call__(self) -> int:
        return self.ms

    def pause(self, seconds: float) -> None:
        self.ms += round(seconds * 1_000)


class Runner:
    """Runs that come to what was said, one after the other; the last one again and again."""

    def __init__(self, clock: Clock, tallies: list[FailureTally]) -> None:
        self.clock, self.tallies = clock, tallies
        self.ran: list[int] = []
        self.rejects: list[int] = []
        """How many records each call of the sink rejects."""
        self.called: list[int] = []
        self.failed = 0
        self.open = 0
        self.written = 0

    def run(self, batch: int, sealed: Any) -> FailureTally:
        self.ran.append(self.clock.ms)
        self.open += 1
        return self.tallies[min(len(self.ran), len(self.tallies)) - 1]

    def tally(self, result: FailureTally) -> FailureTally:
        return result

    def outcome(self, result: FailureTally, sealed: Any) -> BatchOutcome:
        return replace(NOTHING, rows_in=result.rows_in)

    def write(self, batch: int, result: FailureTally) -> tuple[Failure, ...]:
        self.written += 1
        self.called.append(self.clock.ms)
        left = self.rejects[0] if self.rejects else 0
        del self.rejects[:1]
        return tuple(Failure(root, "down", "sink") for root in range(left))

    def reject(self, result: FailureTally, rejected: tuple[Failure, ...], sealed: Any) -> BatchOutcome:
        self.failed += len(rejected)
        return replace(NOTHING, redelivered=rejected)

    def report(self, batch: int, *rest: Any) -> None:
        pass

    def release(self, result: FailureTally) -> None:
        self.open -= 1


def process(runner: Runner, gate: QueryGate | None) -> tuple[Any, list[str]]:
    said: list[str] = []

    def call(call: Any) -> Any:
        said.append(type(call).__name__)
        match call:
            case calls.BeginBatch():
                return BatchBegun(BatchState.NEW)
            case calls.Seal() | calls.Reseal():
                return Sealed(0, 0)
        return None

    return BatchProtocol("q", 1, call, runner, gate=gate).process(0), said  # type: ignore[arg-type]


def of(failed: Mapping[str, int], rows: int = 100) -> FailureTally:
    return FailureTally(rows, failed)


@settings(deadline=None)
@given(st.integers(1, 12))
def test_a_batch_is_held_until_its_trial_goes_well(failing: int) -> None:
    clock = Clock()
    runner = Runner(clock, [of({"look_up": 60})] * failing + [of({"look_up": 2})])
    it = QueryCircuits("q", {WHOLE_QUERY: Limit.of("5%", "here")}, clock, clock.pause)
    told: list[dict[str, CircuitStatus]] = []
    report, said = process(runner, QueryGate(it, lambda: False, told.append))
    assert (report.held, report.rows_in, runner.written, runner.open) == (failing, 100, 1, 0)
    # The vertex hears of each state, for its metrics.
    states = [each[WHOLE_QUERY].state for each in told]
    assert states[:3] == ["closed", "open", "half-open"]
    assert states.count(CircuitState.OPEN) == failing
    assert states[-1] is CircuitState.CLOSED
    # Nothing was sealed of the runs that were given up.
    assert [name for name in said if name in ("BeginBatch", "Seal", "Commit")] == [
        "BeginBatch",
        "Seal",
        "Commit",
    ]
    waits = [after - before for before, after in zip(runner.ran, runner.ran[1:], strict=False)]
    pauses = [min(FIRST_PAUSE_MS * 2**number, LONGEST_PAUSE_MS) for number in range(failing)]
    assert all(pause <= wait <= pause + 200 for wait, pause in zip(waits, pauses, strict=True))
    assert it.status()[WHOLE_QUERY].state is CircuitState.CLOSED
    assert it.status()[WHOLE_QUERY].opened == failing


def test_an_operator_with_a_limit_is_looked_at_alone() -> None:
    clock = Clock()
    limits = {WHOLE_QUERY: Limit.of(10, "here"), "look_up": Limit.of("50%", "here")}
    it = QueryCircuits("q", limits, clock, clock.pause)
    assert it.passes(of({"look_up": 40, "parse": 3}))
    assert not it.passes(of({"look_up": 70, "parse": 3}))
    assert {name: status.state for name, status in it.status().items()} == {"": "closed", "look_up": "open"}
    it.wait(lambda: False)
    assert it.passes(of({"look_up": 0, "parse": 3}))
    assert not it.passes(of({"parse": 8}))


def test_a_query_that_is_told_to_stop_waits_no_longer() -> None:
    clock = Clock()
    runner = Runner(clock, [of({"look_up": 60})])
    it = QueryCircuits("q", {WHOLE_QUERY: Limit.of("5%", "here")}, clock, clock.pause)
    with pytest.raises(QueryError, match="stopped"):
        process(runner, QueryGate(it, lambda: clock.ms > 30_000, lambda _: None))
    assert (runner.open, runner.written) == (0, 0)


def test_without_a_limit_nothing_is_held(caplog: Any) -> None:
    report, _ = process(Runner(Clock(), [of({"look_up": 100})]), None)
    assert report.held == 0
    assert circuits.logger.name not in {record.name for record in caplog.records}


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 5), st.integers(0, 5))
def test_what_a_sink_rejects_while_it_is_down_does_not_fail(down: int, bad: int, worse: int) -> None:
    clock = Clock()
    runner = Runner(clock, [of({})])
    # Down for some calls; then it rejects a few, some more of the rest, and takes what is left.
    runner.rejects = [60] * down + [count for count in (bad, worse if bad else 0) if count]
    limit = Limit.of("5%", "here")
    it = QueryCircuits("q", {WHOLE_QUERY: limit, SINK: limit}, clock, clock.pause)
    report, said = process(runner, QueryGate(it, lambda: False, lambda _: None))
    more = sum(count > 0 for count in (bad, worse if bad else 0))
    assert (len(runner.ran), runner.open) == (1, 0)
    assert (report.held, runner.failed, said.count("Reseal")) == (down, bad + (worse if bad else 0), more)
    waits = [
        after - before for before, after in zip(runner.called, runner.called[1 : down + 1], strict=False)
    ]
    pauses = [min(FIRST_PAUSE_MS * 2**number, LONGEST_PAUSE_MS) for number in range(down)]
    assert all(pause <= wait <= pause + 200 for wait, pause in zip(waits, pauses, strict=True))
    status = it.status()
    assert (status[SINK].state, status[SINK].opened) == (CircuitState.CLOSED, down)
    assert (status[WHOLE_QUERY].state, status[WHOLE_QUERY].opened) == (CircuitState.CLOSED, 0)


def test_rows_are_counted_once_however_often_a_sink_rejects() -> None:
    clock = Clock()
    runner = Runner(clock, [of({})])
    runner.rejects = [4, 4]
    it = QueryCircuits("q", {SINK: Limit.of("5%", "here")}, clock, clock.pause)
    report, _ = process(runner, QueryGate(it, lambda: False, lambda _: None))
    assert (report.held, runner.failed, it.status()[SINK].failed) == (1, 4, 8)


def test_a_query_that_is_told_to_stop_leaves_its_sink_alone() -> None:
    clock = Clock()
    runner = Runner(clock, [of({})])
    runner.rejects = [60] * 1_000
    it = QueryCircuits("q", {SINK: Limit.of("5%", "here")}, clock, clock.pause)
    with pytest.raises(QueryError, match="stopped"):
        process(runner, QueryGate(it, lambda: clock.ms > 30_000, lambda _: None))
    assert (runner.failed, runner.open) == (0, 0)
