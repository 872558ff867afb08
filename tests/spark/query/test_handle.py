"""The supervisor behind a handle, with Spark queries that do what the test says."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException

from ftlayer.common.rules.restart import FixedDelay, NoRestart, RestartStrategy
from ftlayer.errors import CodecError, ConfigError, FunctionLoadError, QueryError, VertexUnavailableError
from ftlayer.spark.query.checkpoint import LogEnds
from ftlayer.spark.query.supervisor import QuerySupervisor, TrackedQuery
from ftlayer.vertex.calls import BatchDetails, QueryStatus

IDLE = QueryStatus(0, 0, 0, 0, 0, -1)
WAIT_S = 600


EMPTY_LOG = LogEnds(-1, -1)


def wait_until(holds: Callable[[], bool]) -> None:
    """Return once ``holds`` says so; fail after `WAIT_S`."""
    give_up = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.001)


class FakeRun:
    """One run of a Spark query: ends when it is stopped, or told to by `end`."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._idle = threading.Event()
        self._error: Exception | None = None
        self.stopped = False

    def end(self, error: Exception | None = None) -> None:
        self._error = error
        self._ended.set()
        self._idle.set()

    def find_nothing_new(self) -> None:
        self._idle.set()

    def stop(self) -> None:
        self.stopped = self.stopped or self.isActive
        self.end()

    @property
    def isActive(self) -> bool:
        return not self._ended.is_set()

    def awaitTermination(self) -> None:
        assert self._ended.wait(WAIT_S)
        if self._error is not None and not self.stopped:
            raise self._error

    def processAllAvailable(self) -> None:
        assert self._idle.wait(WAIT_S)
        if self._error is not None and not self.stopped:
            raise self._error


class Starter:
    """Starts runs; ``before`` is called with the number of each before it is handed out."""

    def __init__(self, before: Callable[[int], None] = lambda number: None) -> None:
        self.runs: list[FakeRun] = []
        self.drains: list[bool] = []
        self._before = before
        self._more = threading.Condition()

    def __call__(self, supervisor: QuerySupervisor) -> Any:
        drains = supervisor.drain_until is not None
        self._before(len(self.runs))
        with self._more:
            self.runs.append(FakeRun())
            self.drains.append(drains)
            self._more.notify_all()
        return self.runs[-1]

    def run(self, number: int) -> FakeRun:
        with self._more:
            assert self._more.wait_for(lambda: len(self.runs) > number, WAIT_S)
        return self.runs[number]


def supervisor_of(
    starter: Starter,
    strategy: RestartStrategy | None = None,
    status: Callable[[], QueryStatus] = lambda: IDLE,
    *,
    log: Callable[[], LogEnds] = lambda: EMPTY_LOG,
    bounded: bool = False,
    letter_queries: Callable[[], list[Any]] = list,
    needed_by: Callable[[str], str] = lambda text: "",
) -> QuerySupervisor:
    return QuerySupervisor(
        "fake",
        starter,
        status,
        log,
        strategy or FixedDelay(3, "1ms"),
        bounded=bounded,
        letter_queries=letter_queries,
        needed_by=needed_by,
    )


def handle_of(starter: Starter, strategy: RestartStrategy | None = None, **changes: Any) -> TrackedQuery:
    return TrackedQuery(supervisor_of(starter, strategy, **changes))


def test_a_stop_while_the_next_run_starts_stops_that_one_too() -> None:
    entered, go_on = threading.Event(), threading.Event()

    def before(number: int) -> None:
        if number == 1:
            entered.set()
            assert go_on.wait(WAIT_S)

    starter = Starter(before)
    supervisor = supervisor_of(starter)
    handle = TrackedQuery(supervisor)
    starter.run(0).end(OSError("first"))
    assert entered.wait(WAIT_S)
    stopper = threading.Thread(target=handle.stop)
    stopper.start()
    wait_until(lambda: supervisor.interrupted)
    go_on.set()
    stopper.join(WAIT_S)
    assert not stopper.is_alive()
    assert starter.run(1).stopped
    assert not handle.isActive
    assert handle.exception() is None


def test_a_drain_stops_the_run_and_starts_one_that_drains() -> None:
    starter = Starter()
    handle = handle_of(starter)
    first = starter.run(0)
    drained: list[bool] = []
    drainer = threading.Thread(target=lambda: drained.append(handle.drain(WAIT_S)))
    drainer.start()
    second = starter.run(1)
    assert first.stopped
    assert starter.drains == [False, True]
    second.end()
    drainer.join(WAIT_S)
    assert drained == [True]
    assert not handle.isActive
    assert len(starter.runs) == 2


def test_a_drain_whose_run_does_not_come_to_the_sources_end_is_none() -> None:
    """A batch that is slow: the vertex knows of nothing that is left to do."""
    starter = Starter()
    handle = handle_of(starter)
    assert not handle.drain(0.5)
    assert starter.drains == [False, True]
    assert handle.exception() is None
    assert not handle.drain(0.1)


def test_a_drain_of_a_source_that_raises_on_every_run_is_none() -> None:
    def before(number: int) -> None:
        if number:
            raise OSError("the broker is gone")

    handle = handle_of(Starter(before), FixedDelay(10_000, "10ms"))
    assert not handle.drain(0.5)
    assert handle.restarts > 0


def test_a_drain_looks_at_sparks_log_too() -> None:
    """The run that drains was ended from outside, in the middle of a batch."""
    starter = Starter()
    handle = handle_of(starter, log=lambda: LogEnds(7, 6))
    drained: list[bool] = []
    drainer = threading.Thread(target=lambda: drained.append(handle.drain(WAIT_S)))
    drainer.start()
    starter.run(1).end()
    drainer.join(WAIT_S)
    assert drained == [False]


class LetterRun(FakeRun):
    """A query of Spark's that reads dead letters."""

    def __init__(self, query_id: str = "letters") -> None:
        super().__init__()
        self.id = query_id

    def fail(self) -> None:
        self.end(StreamingQueryException("the sink of the letters is down"))


def test_a_drain_waits_for_the_queries_that_read_its_dead_letters() -> None:
    starter, letters = Starter(), LetterRun()
    handle = handle_of(starter, letter_queries=lambda: [letters])
    drained: list[bool] = []
    drainer = threading.Thread(target=lambda: drained.append(handle.drain(WAIT_S)))
    drainer.start()
    starter.run(1).end()
    assert handle.awaitTermination(WAIT_S)
    drainer.join(0.2)
    assert drained == []
    letters.find_nothing_new()
    drainer.join(WAIT_S)
    assert drained == [True]


def test_letters_that_are_not_read_in_time_are_no_drain() -> None:
    starter, letters = Starter(), LetterRun()
    handle = handle_of(starter, letter_queries=lambda: [letters])
    starter.run(0).find_nothing_new()
    assert not handle.await_drained(0.5)
    letters.find_nothing_new()
    assert handle.await_drained(WAIT_S)
    assert handle.isActive


def test_a_query_of_letters_that_fails_meanwhile_has_not_read_them() -> None:
    starter, letters = Starter(), LetterRun()
    # Spark lists it as active no more once it has failed.
    handle = handle_of(starter, letter_queries=lambda: [letters] if letters.isActive else [])
    drained: list[bool] = []
    drainer = threading.Thread(target=lambda: drained.append(handle.drain(WAIT_S)))
    drainer.start()
    run = starter.run(1)
    letters.fail()
    run.end()
    drainer.join(WAIT_S)
    assert drained == [False]


def test_a_drain_of_a_query_that_has_ended_says_what_its_last_run_came_to() -> None:
    stopped = handle_of(Starter())
    stopped.stop()
    assert not stopped.drain(WAIT_S)
    starter = Starter()
    bounded = handle_of(starter, bounded=True)
    starter.run(0).end()
    assert bounded.awaitTermination(WAIT_S)
    assert bounded.drain(WAIT_S)
    assert bounded.await_drained(WAIT_S)
    assert len(starter.runs) == 1


def test_waiting_for_a_drain_is_waiting_for_the_sources_end_too() -> None:
    starter = Starter()
    handle = handle_of(starter)
    assert not handle.await_drained(0.5)
    starter.run(0).find_nothing_new()
    assert handle.await_drained(WAIT_S)
    handle.stop()
    assert not handle.await_drained(WAIT_S)


def test_what_a_stopped_run_says_of_its_source_is_no_answer() -> None:
    """Spark's processAllAvailable returns as well when its query is stopped, as a drain does it."""
    entered, go_on = threading.Event(), threading.Event()

    def before(number: int) -> None:
        if number:
            entered.set()
            assert go_on.wait(WAIT_S)

    starter = Starter(before)
    handle = handle_of(starter)
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(handle.await_drained(WAIT_S)))
    waiter.start()
    drainer = threading.Thread(target=lambda: answers.append(handle.drain(WAIT_S)))
    drainer.start()
    assert entered.wait(WAIT_S)
    assert answers == []
    go_on.set()
    starter.run(1).end()
    waiter.join(WAIT_S)
    drainer.join(WAIT_S)
    assert answers == [True, True]


def test_an_error_that_ends_the_query_is_raised_to_who_waits_for_a_drain() -> None:
    starter = Starter()
    handle = handle_of(starter, NoRestart())
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            handle.await_drained(WAIT_S)
        except QueryError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    starter.run(0).end(OSError("broken"))
    waiter.join(WAIT_S)
    assert raised == [handle.exception()]


def test_a_drain_restarts_what_fails_meanwhile_and_gives_up_when_time_is_up() -> None:
    left = QueryStatus(3, 0, 0, 0, 0, 1_000)
    starter = Starter()
    handle = handle_of(starter, status=lambda: left)
    drained: list[bool] = []
    drainer = threading.Thread(target=lambda: drained.append(handle.drain(1.0)))
    drainer.start()
    starter.run(1).end(OSError("once more"))
    assert starter.run(2)
    drainer.join(WAIT_S)
    assert drained == [False]
    assert starter.drains == [False, True, True]
    assert handle.exception() is None
    assert handle.restarts == 1


def test_what_a_stopped_run_raises_uses_up_no_restart() -> None:
    starter = Starter()
    handle = handle_of(starter, NoRestart())
    run = starter.run(0)
    run.stop = lambda: run.end(QueryError("stopped"))  # type: ignore[method-assign]
    drained: list[bool] = []
    drainer = threading.Thread(target=lambda: drained.append(handle.drain(WAIT_S)))
    drainer.start()
    starter.run(1).end()
    drainer.join(WAIT_S)
    assert (drained, handle.restarts, handle.exception()) == ([True], 0, None)


def test_a_drain_raises_what_ended_the_query() -> None:
    starter = Starter()
    handle = handle_of(starter, NoRestart())
    starter.run(0).end(OSError("broken"))
    for wait in (handle.awaitTermination, handle.drain):
        with pytest.raises(QueryError, match="broken"):
            wait(WAIT_S)


def test_process_all_available_waits_over_a_restart() -> None:
    starter = Starter()
    supervisor = supervisor_of(starter)
    handle = TrackedQuery(supervisor)
    done = threading.Event()

    def wait() -> None:
        handle.processAllAvailable()
        done.set()

    waiter = threading.Thread(target=wait)
    waiter.start()
    starter.run(0).end(OSError("first"))
    assert not done.is_set()
    starter.run(1)
    handle.stop()
    assert done.wait(WAIT_S)


def test_a_bounded_query_runs_again_until_nothing_is_left() -> None:
    answers = [QueryStatus(2, 0, 0, 0, 0, 1), QueryStatus(0, 1, 0, 0, 0, -1), IDLE]
    starter = Starter(lambda number: None)
    handle = handle_of(starter, status=lambda: answers.pop(0), bounded=True)
    for number in range(3):
        starter.run(number).end()
    assert handle.awaitTermination(WAIT_S)
    assert len(starter.runs) == 3


def test_an_error_at_the_first_start_is_raised_at_once() -> None:
    def before(number: int) -> None:
        raise ConfigError("no")

    with pytest.raises(ConfigError, match="no"):
        handle_of(Starter(before))


@pytest.mark.parametrize(
    "error", [CodecError("a record does not fit"), ModuleNotFoundError("No module named 'h'")]
)
def test_what_no_restart_mends_ends_the_query_at_once(error: Exception) -> None:
    starter = Starter()
    supervisor = supervisor_of(starter)
    query = TrackedQuery(supervisor)
    supervisor.note_failure(error)
    starter.run(0).end(RuntimeError("what Spark makes of it"))
    with pytest.raises((CodecError, FunctionLoadError), match=str(error)):
        query.awaitTermination(WAIT_S)
    assert query.restarts == 0
    assert len(starter.runs) == 1


def test_what_could_not_be_loaded_is_known_by_the_operators_that_need_it() -> None:
    starter = Starter()
    query = handle_of(starter, needed_by=lambda text: "'parse'" if "'h'" in text else "")
    starter.run(0).end(ModuleNotFoundError("No module named 'h'"))
    with pytest.raises(FunctionLoadError, match=r"^'parse': ModuleNotFoundError: No module named 'h'"):
        query.awaitTermination(WAIT_S)


def test_restarts_and_the_end_are_told_with_their_reasons(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ftlayer.spark.query")
    starter = Starter()
    supervisor = supervisor_of(starter, FixedDelay(1, "1ms"))
    assert supervisor.state == "running"
    starter.run(0).end(OSError("the first"))
    starter.run(1).end(OSError("the second\nand its traceback"))
    gave_up = "the restart strategy has given up after 1 restart: OSError: the second"
    with pytest.raises(QueryError, match=f"^{supervisor.name}: {gave_up}"):
        supervisor.wait_until_ended(WAIT_S)
    assert supervisor.state == "failed"
    start, restart, again, end = supervisor.incidents
    assert (start.text, restart.kind, end.kind) == ("started", "restart", "state")
    assert (again.kind, again.text) == ("state", "runs again, restart 1, 1 of 1")
    assert "restart 1" in restart.text
    assert "the first" in restart.text
    assert end.text.startswith("running → failed: ")
    assert "the second" in end.text
    query = f"query {supervisor.name!r}"
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("INFO", f"{query}: started"),
        ("WARNING", f"{query}: restart 1 in 0.001 s, 1 of 1: OSError: the first"),
        ("INFO", f"{query}: runs again, restart 1, 1 of 1"),
        ("ERROR", f"{query}: running → failed: {supervisor.name}: {gave_up}"),
    ]


@pytest.mark.parametrize(
    ("dead", "left"),
    [
        (0, "0 dead letters"),
        (2, "2 dead letters: ftlayer dead list, with --store or --checkpoints once the program has ended"),
    ],
)
def test_the_end_says_what_was_done_and_what_is_dead(
    dead: int, left: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ftlayer.spark.query")
    starter = Starter()
    supervisor = supervisor_of(starter)
    supervisor.report(BatchDetails(0, rows_in=1_500, failed=10, waiting=10 - dead, dead=dead))
    supervisor.report(BatchDetails(1, rows_in=10, delivered=10))
    supervisor.stop()
    assert caplog.messages[-2:] == [
        f"query {supervisor.name!r}: running → ended",
        f"query {supervisor.name!r}: 1,500 records done, {left}",
    ]


def test_an_error_of_ftlayers_keeps_its_class_where_the_strategy_gives_up() -> None:
    starter = Starter()
    supervisor = supervisor_of(starter, NoRestart())
    raised = VertexUnavailableError(f"{supervisor.name}: no answer")
    starter.run(0).end(raised)
    with pytest.raises(
        VertexUnavailableError, match=f"^{supervisor.name}: .* given up after 0 restarts: no answer$"
    ) as given_up:
        supervisor.wait_until_ended(WAIT_S)
    assert given_up.value.__cause__ is raised


def test_a_mistake_of_the_program_ends_a_query_that_has_committed_nothing() -> None:
    starter = Starter()
    handle = handle_of(starter)
    starter.run(0).end(AttributeError("'DataFrame' object has no attribute 'wirte'"))
    with pytest.raises(QueryError, match=r"wirte.* not started again, for nothing was committed yet"):
        handle.awaitTermination()
    assert (handle.restarts, len(starter.runs)) == (0, 1)


def test_behind_a_committed_batch_the_strategy_decides_on_it() -> None:
    starter = Starter()
    supervisor = supervisor_of(starter)
    handle = TrackedQuery(supervisor)
    supervisor.report(BatchDetails(0))
    starter.run(0).end(AttributeError("'NoneType' object has no attribute 'strip'"))
    starter.run(1)
    assert handle.restarts == 1
    handle.stop()


def test_batches_count_the_strategys_failures_down() -> None:
    """A query counts with a copy of its own: a strategy that two were given is used up by neither for the other."""
    seen: list[int] = []

    class Successes(FixedDelay):
        def on_success(self) -> None:
            seen.append(id(self))

    strategy = Successes(3, "1ms")
    supervisors = [supervisor_of(Starter(), strategy) for _ in range(2)]
    for supervisor in supervisors:
        supervisor.report(BatchDetails(0))
    assert len({*seen, id(strategy)}) == 3
    for supervisor in supervisors:
        supervisor.stop()
