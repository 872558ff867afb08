"""The supervisor of a wrapped query.

It starts the Spark query, starts it again after a failure as the restart strategy says, and repeats an ``availableNow``
run until no record waits for a replay.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from pyspark.errors import StreamingQueryException

from ftlayer.checkpoint.dead_letters.reader import FORMAT
from ftlayer.common.checks import Duration, UserFacing, duration_ms, wait_seconds
from ftlayer.common.printable import LetterWarnings, html_table, letters_text, shortened
from ftlayer.common.rules.circuit import CircuitState, CircuitStatus
from ftlayer.common.rules.restart import (
    RestartStrategy,
    counted,
    gave_up,
    is_programs,
    lasting,
    note_success,
    pause_after,
    restart_of,
    restarts_text,
)
from ftlayer.errors import FTLayerError, FunctionLoadError, QueryError, error_for_code
from ftlayer.functions.data_sources import HAS_LIMITS
from ftlayer.spark.batch.sinks import words_of
from ftlayer.spark.circuits import QueryCircuits
from ftlayer.spark.query.checkpoint import Drain, LogEnds
from ftlayer.vertex.calls import BatchDetails, Incident, QueryStatus

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger(__name__)

POLL_S = 0.2
"""How often the supervisor looks whether it was told to stop while the Spark query runs."""

KEPT_REPORTS = 1_000
KEPT_INCIDENTS = 50
MAX_INCIDENT_BYTES = 4_000


class LetterQuery(Protocol):
    """A query that reads another one's dead letters: a `QuerySupervisor`, or a query of Spark's own."""

    @property
    def id(self) -> str:
        """The id in its checkpoint."""

    def processAllAvailable(self) -> None:  # noqa: N802 - Spark's name
        """Block until the letters that are there now are in a committed batch, or the query is stopped."""


@dataclass
class _QueryRun:
    """One run of the Spark query. ``over`` is set once its end was judged.

    ``source_ended``: it ended by itself, because its source had no more.
    """

    query: StreamingQuery
    over: threading.Event = field(default_factory=threading.Event)
    source_ended: bool = False


class QuerySupervisor:
    """Runs a wrapped query until it has ended. Thread-safe; `TrackedQuery` is its handle, and says what methods do.

    It is a `LetterQuery` too, and has Spark's names for what that needs.

    Attributes:
        name: the query's.
        error: what ended the query for good; None while it runs, or when it ended well.
        restarts: how many times the Spark query has been started again after a failure.
        last_failure: the text of the failure that made the last restart necessary, "" if there was none.
        drain_until: when a drain that was asked for is to end at the latest (Unix, seconds); None if there is none.
        reports: of the last batches, oldest first.
        incidents: the last restarts, and its end, oldest first.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[QuerySupervisor], StreamingQuery],
        status: Callable[[], QueryStatus],
        log: Callable[[], LogEnds],
        strategy: RestartStrategy,
        *,
        bounded: bool,
        circuits: QueryCircuits | None = None,
        letter_queries: Callable[[], list[LetterQuery]] = list,
        needed_by: Callable[[str], str] = lambda text: "",
    ) -> None:
        """``start`` starts the Spark query and returns it; ``bounded``: it ends by itself (availableNow).

        ``log`` reads how far Spark's checkpoint has come; ``letter_queries`` lists the active queries that read this
        one's dead letters.
        """
        self.name = name
        self.ft_status = status
        self._start = start
        self._log = log
        self._strategy = copy.deepcopy(strategy)
        self._bounded = bounded
        self._circuits = circuits
        self._letter_queries = letter_queries
        self._needed_by = needed_by
        self._stopping = threading.Event()
        self.drain_until: float | None = None
        self._drains = False
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._current: _QueryRun | None = None
        self.error: BaseException | None = None
        self._batch_error: BaseException | None = None
        self.restarts = 0
        self.last_failure = ""
        self.reports: deque[BatchDetails] = deque(maxlen=KEPT_REPORTS)
        self.incidents: tuple[Incident, ...] = ()
        self._restart = ""  # which one it is; of what runs, ""
        self._records_done = self._records_dead = 0
        self._letters = LetterWarnings()
        self._has_succeeded = self._repeats = False
        self._first = self._begin()
        self._happened("state", "started")
        self._thread = threading.Thread(target=self._supervise, name=f"ftlayer-{name}", daemon=True)
        self._thread.start()

    @property
    def id(self) -> str:
        return str(self.query.id)

    @property
    def runId(self) -> str:  # noqa: N802 - Spark's name
        return str(self.query.runId)

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        return not self._done.is_set()

    @property
    def state(self) -> str:
        """``"running"``, ``"restarting"`` (behind a failure, up to the next run), ``"ended"`` or ``"failed"``."""
        if self._done.is_set():
            return "ended" if self.error is None else "failed"
        return "restarting" if self._restart else "running"

    @property
    def query(self) -> StreamingQuery:
        return self._run.query

    def wait_until_ended(self, timeout: float | None) -> bool:
        ended = self._done.wait(timeout)
        if ended and self.error is not None:
            raise self.error
        return ended

    def processAllAvailable(self) -> None:  # noqa: N802 - Spark's name
        self._await_source_end()
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        self._stopping.set()
        with self._lock:
            if self._current is not None:
                self._current.query.stop()
        self._thread.join()

    def drain(self, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        readers = self._letter_queries() if self.isActive else []
        with self._lock:
            self.drain_until = time.time() + timeout
            if self._current is not None:
                self._current.query.stop()
        self._done.wait(timeout)
        self.stop()
        if self.error is not None:
            raise self.error
        drain = Drain()
        if self._run.source_ended:
            drain.source_ended(self._log())
        return self._is_reached(drain) and self._letters_are_read(readers, deadline)

    def await_drained(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        readers = self._letter_queries() if self.isActive else []
        drain = Drain()
        source_end = _in_background(self._await_source_end)
        while True:
            ended = self._done.is_set()
            if source_end.done() and source_end.result():
                drain.source_ended(self._log())
            if ended and self.error is not None:
                raise self.error
            if self._is_reached(drain):
                return self._letters_are_read(readers, deadline)
            if (ended and source_end.done()) or (deadline is not None and time.monotonic() >= deadline):
                return False
            if source_end.done():
                self._done.wait(POLL_S)
            else:
                wait([source_end], POLL_S)

    def circuits(self) -> dict[str, CircuitStatus]:
        return {} if self._circuits is None else self._circuits.status()

    @property
    def interrupted(self) -> bool:
        return self._stopping.is_set() or (self.drain_until is not None and not self._drains)

    def note_failure(self, error: BaseException) -> None:
        """Take note of what made a batch fail, before Spark turns it into text (called by the batches)."""
        self._batch_error = error

    def report(self, report: BatchDetails) -> None:
        """Take note of a batch that is through (called by the query's own batches)."""
        self.reports.append(report)
        self._records_done += report.rows_in - report.failed
        self._records_dead += report.dead
        if said := self._letters.take(self._records_dead, time.monotonic_ns() // 1_000_000):
            logger.warning("query %r: %s", self.name, said)
        self._note_success()

    def _note_success(self) -> None:
        """A batch was committed: the program is one that can run."""
        self._has_succeeded = True
        note_success(self._strategy)

    # ------------------------------------------------------------ its thread

    @property
    def _run(self) -> _QueryRun:
        with self._lock:
            assert self._current is not None
            return self._current

    def _begin(self) -> _QueryRun:
        self._drains = self.drain_until is not None
        log = None if HAS_LIMITS else self._log()
        self._repeats = log is not None and log.planned > log.committed
        run = _QueryRun(self._start(self))
        with self._lock:
            self._current, restart, self._restart = run, self._restart, ""
            if self.interrupted:
                # What was asked while it started found the run before, if any, to stop.
                run.query.stop()
        if restart:
            self._happened("state", f"runs again, {restart}")
        return run

    def _await_source_end(self) -> bool:
        """Wait, over restarts, until Spark has found nothing new in the source; False if the query ended before."""
        while not self._done.is_set():
            run = self._run
            try:
                run.query.processAllAvailable()
                if run.query.isActive:
                    return True
            except Exception as error:
                if run.query.isActive and not isinstance(error, StreamingQueryException):
                    raise
            # Of a run that is stopped Spark says the same as of one that has read everything.
            run.over.wait()
            if run.source_ended:
                return True
            while self._run is run and not self._done.wait(POLL_S):
                pass  # until another run has taken its place, or there will be none
        return self._run.source_ended

    def _is_reached(self, drain: Drain) -> bool:
        return drain.source_read and drain.reached(self._log(), self.ft_status())

    def _letters_are_read(self, before: list[LetterQuery], deadline: float | None) -> bool:
        """Wait until the queries that read the dead letters have all there are; False if not in time, or one failed.

        ``before`` are those that read them when the drain began: one that has failed since has not got the rest.
        """
        readers = {query.id: query for query in (*before, *self._letter_queries())}
        reads = [_in_background(partial(_reads_all, query)) for query in readers.values()]
        _, unread = wait(reads, None if deadline is None else max(deadline - time.monotonic(), 0))
        return not unread and all(read.result() for read in reads)

    def _supervise(self) -> None:
        try:
            run: _QueryRun | None = self._first
            while not self._stopping.is_set():
                try:
                    run = run or self._begin()
                    self._await_end(run)
                except BaseException as error:  # noqa: BLE001 - any failure of the run is the strategy's to judge
                    if self._stopping.is_set():
                        return
                    if not self.interrupted and not self._wait_to_restart(error):
                        return
                else:
                    if self._stopping.is_set() or not self._goes_on():
                        return
                run = None
        finally:
            self._run.over.set()
            why = "" if self.error is None else f": {words_of(self.error)}"
            self._happened("state", f"running → {'ended' if self.error is None else 'failed'}{why}")
            if self.reports:
                done, dead = self._records_done, letters_text(self._records_dead)
                level = logging.WARNING if self._records_dead else logging.INFO
                logger.log(level, "query %r: %s records done, %s", self.name, f"{done:,}", dead)
            self._done.set()

    def _await_end(self, run: _QueryRun) -> None:
        """Wait until ``run`` has ended, and take note of how; raises what it failed with."""
        try:
            run.query.awaitTermination()
            # Others than this handle can stop a run too, in the middle of a batch: `Drain` looks at the log.
            run.source_ended = (self._drains or self._bounded) and not self.interrupted
        finally:
            run.over.set()

    def _wait_to_restart(self, error: BaseException) -> bool:
        """Wait as the strategy says; False (and the error noted) if the query is not to start again."""
        error, self._batch_error = self._batch_error or error, None
        if _spark_is_gone():
            self.error = QueryError(
                f"{self.name}: Spark's JVM has ended, and this program cannot go on without it; the query goes "
                "on from its checkpoint when the program is started again"
            )
            self.error.__cause__ = error
            return False
        final = lasting(error)
        if isinstance(final, FunctionLoadError) and (needed_by := self._needed_by(str(final))):
            final = FunctionLoadError(f"{needed_by}: {final}")
        if getattr(self.query, "lastProgress", None) is not None:  # of a query without reports, too
            self._note_success()
        ends = final is not None or (not self._has_succeeded and is_programs(error))
        pause = None if ends else pause_after(self._strategy, round(time.monotonic() * 1000))
        if pause is None:
            said = words_of(error).removeprefix(f"{self.name}: ")
            way = "it is not started again, for nothing was committed yet and the mistake is the program's"
            said = f"{said} ({way})" if ends else gave_up(self.restarts, said)
            kind = error_for_code(error.code) if isinstance(error, FTLayerError) else QueryError
            self.error = final or kind(f"{self.name}: {said}")
            cause = error.__cause__ if isinstance(error, FTLayerError) else None
            self.error.__cause__ = self.error.__cause__ or cause or error
            return False
        self.restarts += 1
        self.last_failure = words_of(error)
        self._restart = f"restart {self.restarts}{counted(self._strategy)}"
        when = restart_of(self._strategy, pause)
        self._happened("restart", f"restart {self.restarts} {when}: {self.last_failure}")
        return not self._stopping.wait(pause / 1000)

    def _happened(self, kind: str, text: str) -> None:
        level = logging.WARNING if kind == "restart" else logging.INFO
        logger.log(
            level if self.error is None else logging.ERROR, "query %r: %s", self.name, text.partition("\n")[0]
        )
        incident = Incident(time.time_ns() // 1_000_000, kind, shortened(text, MAX_INCIDENT_BYTES))
        self.incidents = (*self.incidents, incident)[-KEPT_INCIDENTS:]

    def _goes_on(self) -> bool:
        """After a run that ended well: whether another one follows, once there may be something for it."""
        if self.drain_until is not None:
            left = self.drain_until - time.time()
            # A run of its own does all of it, but on a Spark whose Python sources do not know the trigger.
            return not self._drains or (not HAS_LIMITS and left > 0 and self._is_more(left))
        return self._bounded and self._is_more()

    def _is_more(self, left: float = math.inf) -> bool:
        """After a bounded run: False if everything is done, else True once there may be something to deliver.

        Where Spark reads all there is in one batch, a run that finds a planned one does that one alone.
        """
        if self._repeats:
            return True
        status = self.ft_status()
        if status.drained:
            return False
        if status.deliverable or status.delivered:
            return True
        pause = status.next_due_in_ms / 1000 if status.next_due_in_ms >= 0 else POLL_S
        return not self._stopping.wait(min(max(pause, 0.01), left))


def _reads_all(query: LetterQuery) -> bool:
    """Wait until a query has read all dead letters there are; False if it fails, which its own handle tells."""
    try:
        query.processAllAvailable()
    except (StreamingQueryException, FTLayerError):
        return False
    return True


def _in_background(function: Callable[[], bool]) -> Future[bool]:
    """Call ``function`` in a thread of its own, which does not hold up the end of the program."""
    future: Future[bool] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - the future hands it to who asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name="ftlayer-source-end", daemon=True).start()
    return future


def _spark_is_gone() -> bool:
    """Whether the JVM that this process started has ended: then starting a query again must fail."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    return process is not None and process.poll() is not None


_WORDS = {
    "start execute run": "it was started; .awaitTermination() waits for its end",
    "wait join result get": ".awaitTermination(timeout) waits for its end",
    "cancel close shutdown": ".stop() ends it, .drain(timeout) when everything that its source has is done",
    "savepoint checkpoint": "its checkpoint is Spark's, of each batch, where checkpoint=… of its sink says",
    "deadletters listdead requeue purge": "ask the FTLayer: its .list_dead(), .requeue(keys) and .purge(keys)",
    "show collect topandas": "its rows are where its sink writes them",
    "state": ".isActive and .exception() say it",
}


class TrackedQuery(UserFacing, words=_WORDS):
    """A wrapped query that was started. Thread-safe; the properties of Spark's own are there by name."""

    def __init__(self, supervisor: QuerySupervisor) -> None:
        self._supervisor = supervisor

    def __repr__(self) -> str:
        state = "active" if self.isActive else "ended" if self.exception() is None else "failed"
        return f"TrackedQuery({self.name!r}, {state})"

    # ------------------------------------------------------------ what Spark's own handle has

    @property
    def name(self) -> str:
        """The query's name."""
        return self._supervisor.name

    @property
    def id(self) -> str:
        """The id Spark keeps in the checkpoint."""
        return self._supervisor.id

    @property
    def runId(self) -> str:  # noqa: N802 - Spark's name
        """The id of the current run; a restart has a new one."""
        return self._supervisor.runId

    @property
    def isActive(self) -> bool:  # noqa: N802 - Spark's name
        """Whether the supervisor is at work (the Spark query itself may be between two runs)."""
        return self._supervisor.isActive

    @property
    def status(self) -> Any:
        """The status of the current run of the Spark query."""
        return self._supervisor.query.status

    @property
    def lastProgress(self) -> Any:  # noqa: N802 - Spark's name
        """The last progress of the current run."""
        return self._supervisor.query.lastProgress

    @property
    def recentProgress(self) -> Any:  # noqa: N802 - Spark's name
        """The recent progress of the current run."""
        return self._supervisor.query.recentProgress

    def exception(self) -> BaseException | None:
        """Return the error that ended the query for good, None while it runs or when it ended well."""
        return self._supervisor.error

    def awaitTermination(self, timeout: Duration | None = None) -> bool:  # noqa: N802 - Spark's name
        """Wait until the query has ended; raise the error that ended it. False: it has not ended."""
        return self._supervisor.wait_until_ended(wait_seconds(timeout, "awaitTermination: timeout"))

    def processAllAvailable(self) -> None:  # noqa: N802 - Spark's name
        """Block until what the source has now is processed. Replays that wait for their pause are not awaited.

        Waits over restarts; raises the error that ended the query for good.
        """
        self._supervisor.processAllAvailable()

    def stop(self) -> None:
        """Stop. What is pending or waits for replay stays in the vertex for the next start."""
        self._supervisor.stop()

    def drain(self, timeout: Duration = "1m") -> bool:
        """Read what the source has by now, finish it and what waits for replay, and end; return whether that is done.

        True: all rows that the source had are in committed batches, no record is pending, in delivery or waits, and
        the dead letters are in committed batches of the queries of this program that read them as a stream (of those
        in other programs nothing is known here).
        Later rows are the next start's. What is not through within ``timeout`` stays in the source and in
        the vertex for the next start. An ingest gives what it accepts until it is empty: stop putting records in
        first. Of a query that has ended, it says what its last run came to. Raises the error that ended the query, if
        one did.
        """
        return self._supervisor.drain(duration_ms(timeout, "drain: timeout", least=0) / 1_000)

    def explain(self, extended: bool = False) -> None:
        """Print the plan of the last batch."""
        self._supervisor.query.explain(extended)

    # ------------------------------------------------------------ what ftlayer adds

    @property
    def restarts(self) -> int:
        """How many times the Spark query has been started again after a failure."""
        return self._supervisor.restarts

    @property
    def last_failure(self) -> str:
        """The text of the failure that made the last restart necessary, "" if there was none."""
        return self._supervisor.last_failure

    @property
    def recent_batches(self) -> list[BatchDetails]:
        """The reports of the last batches, oldest first."""
        return list(self._supervisor.reports)

    def circuits(self) -> dict[str, CircuitStatus]:
        """Return where the circuit breakers of `max_failing` are, by operator; "" is the whole query's."""
        return self._supervisor.circuits()

    def ft_status(self) -> QueryStatus:
        """Ask the vertex what is still to do."""
        return self._supervisor.ft_status()

    def await_drained(self, timeout: Duration | None = None) -> bool:
        """Wait until what the source has now is through and no record is pending or waits for replay.

        The dead letters are through then too, in the queries of this program that read them as a stream. False if
        that did not happen in time, or the query was stopped before. It goes on meanwhile: rows that the source gets
        later need not be through, but Spark must come to the source's end once. Raises the error that ended the query,
        if one did.
        """
        return self._supervisor.await_drained(wait_seconds(timeout, "await_drained: timeout"))

    def _repr_html_(self) -> str:
        """Return what became of the last batches as HTML, for notebooks."""
        error = self.exception()
        ended = "ended" if error is None else f"ended: {words_of(error)}"
        state = "active" if self.isActive else ended
        state += "".join(
            f", circuit {name or 'of the query'} {status.state}"
            for name, status in self.circuits().items()
            if status.state is not CircuitState.CLOSED
        )
        return html_table(
            f"{self.name}: {state}, {restarts_text(self.restarts)}",
            ("batch", "rows in", "rows out", "failed", "waiting", "dead"),
            [
                (report.batch, report.rows_in, report.rows_out, report.failed, report.waiting, report.dead)
                for report in self.recent_batches[-10:]
            ],
        )


# Between two runs a wrapped query is none of Spark's active ones: its supervisor will start it again.
_wrapped: WeakKeyDictionary[QuerySupervisor, frozenset[str]] = WeakKeyDictionary()


def note_wrapped(query: QuerySupervisor, frame: DataFrame) -> None:
    """Remember a wrapped query if its source has dead letters in it."""
    streams = _streams_of(frame._jdf.queryExecution().analyzed())
    if streams:
        _wrapped[query] = streams


def letter_queries(spark: SparkSession, stream: str) -> list[LetterQuery]:
    """Return the active queries that read the dead letters of ``stream``: wrapped ones, and Spark's of this session."""
    wrapped = [query for query, streams in list(_wrapped.items()) if stream in streams and query.isActive]
    runs = {query.runId for query in wrapped}
    plain = [
        query
        for query in spark.streams.active
        if str(query.runId) not in runs and stream in _streams_of(query._jsq.streamingQuery().analyzedPlan())
    ]
    return [*wrapped, *plain]


def _streams_of(plan: Any) -> frozenset[str]:
    leaves = plan.collectLeaves()
    return frozenset(
        name
        for source in map(leaves.apply, range(leaves.size()))
        if source.nodeName() == "StreamingRelationV2" and source.sourceName() == FORMAT
        for name in source.extraOptions().get("streams").split("\n")
    )
