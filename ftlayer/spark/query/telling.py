"""A wrapped query as it is announced: its batches with their phases, its restarts, and orders as calls of it."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ftlayer.errors import UnsupportedError
from ftlayer.histogram import BATCH_BOUNDS, Histogram
from ftlayer.printable import shortened
from ftlayer.spark.batch.raised import words_of
from ftlayer.spark.protocol import JUDGED, BatchReport
from ftlayer.spark.query.batch_traces import BatchTraces
from ftlayer.spark.query.supervisor import QuerySupervisor
from ftlayer.spark.sessions import how_it_ended
from ftlayer.topology.lag import lag_behind
from ftlayer.vertex.calls.jobs import (
    BatchDetails,
    HistogramDetails,
    JobDetails,
    JobKind,
    JobOrder,
    OrderAction,
)
from ftlayer.vertex.wire.bounds import MAX_NAME_BYTES

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

KEPT_BATCHES = 100
RATE_MS = 10_000
"""Rates are those of the batches of so long, or of one that took longer."""

MAX_TEXT = 4_000
DRAIN_S = 60.0

PHASES = (
    ("run", "begun", "run"),
    ("verdict", "run", JUDGED),
    ("seal", JUDGED, "sealed"),
    ("sink", "sealed", "written"),
    ("commit", "written", "committed"),
)
"""Each phase of a batch, and the steps that it lies between."""


def title_of(name: str) -> str:
    """Return a query's name as the vertex may have it: of any text that Spark takes, in bounded length."""
    return shortened(name.replace("\0", "\\0"), MAX_NAME_BYTES)


class BatchHistory:
    """The last batches of a query, timed at the steps of the protocol: a clock is read once a step.

    `watch` and `through` are the batch's thread's; the rest is any thread's.
    """

    def __init__(
        self,
        clock_ms: Callable[[], float] = lambda: time.monotonic_ns() / 1e6,
        traces: BatchTraces | None = None,
    ) -> None:
        """``traces`` is told of each batch that is through, None where none is traced."""
        self._clock_ms = clock_ms
        self._traces = traces
        self._steps: dict[str, float] = {}
        self._lock = threading.Lock()  # guards what follows
        self._batches: deque[BatchDetails] = deque(maxlen=KEPT_BATCHES)
        self._counters: Counter[str] = Counter()
        self._histograms = {f"batch_{phase}": Histogram(BATCH_BOUNDS) for phase, _, _ in PHASES}
        self._histograms["batch"] = Histogram(BATCH_BOUNDS)

    def watch(self, step: str, batch: int) -> None:
        """Note that a batch has come to a step."""
        if step == "begin":
            self._steps = {}
        self._steps[step] = self._clock_ms()

    def through(self, report: BatchReport, at_ms: int) -> BatchReport:
        """Take note of a batch that is through, at ``at_ms`` (Unix); return its report with its times."""
        steps = self._steps
        phases = {
            phase: steps[after] - steps[before]
            for phase, before, after in PHASES
            if before in steps and after in steps
        }
        duration_ms = self._clock_ms() - steps["begin"]
        details = BatchDetails(
            batch=report.batch,
            at_ms=at_ms,
            rows=report.rows_in,
            delivered=report.delivered,
            failed=report.failed,
            dead=report.dead,
            duration_ms=duration_ms,
            phases_ms=phases,
        )
        with self._lock:
            self._batches.append(details)
            self._counters.update(
                batches=1,
                records_in=report.rows_in,
                records_out=report.rows_out,
                delivered=report.delivered,
                failed=report.failed,
                dead=report.dead,
            )
            self._histograms["batch"].observe(duration_ms / 1_000)
            for phase, ms in phases.items():
                self._histograms[f"batch_{phase}"].observe(ms / 1_000)
        if self._traces is not None:
            began = steps["begin"]
            times = {
                phase: (steps[before] - began, steps[after] - began)
                for phase, before, after in PHASES
                if phase in phases
            }
            self._traces.through(details, times)
        return replace(report, duration_ms=duration_ms, phases_ms=phases)

    def progressed(self, progress: Mapping[str, Any]) -> None:
        """Take a batch from Spark's progress of a query that is not tracked: of it no more is known."""
        duration_ms = float(progress["durationMs"].get("triggerExecution", 0))
        began = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00"))
        rows = int(progress["numInputRows"])
        at_ms = round(began.timestamp() * 1_000 + duration_ms)
        with self._lock:
            self._batches.append(
                BatchDetails(int(progress["batchId"]), at_ms, rows, 0, 0, 0, duration_ms, {})
            )
            self._counters.update(batches=1, records_in=rows)
            self._histograms["batch"].observe(duration_ms / 1_000)

    @property
    def batches(self) -> tuple[BatchDetails, ...]:
        """The last ones, the oldest first."""
        with self._lock:
            return tuple(self._batches)

    @property
    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counters)

    @property
    def histograms(self) -> dict[str, HistogramDetails]:
        """How long batches and their phases took, by ``batch|`` and ``batch_<phase>|``."""
        with self._lock:
            return {f"{name}|": HistogramDetails.of(each) for name, each in self._histograms.items()}


class QueryTelling:
    """`ftlayer.jobs.announcer.Telling` of a wrapped query, over all runs of its Spark query."""

    _mode = "acker"

    def __init__(
        self,
        supervisor: QuerySupervisor,
        log: BatchHistory,
        *,
        owner: str,
        source: str,
        run: str,
        checkpoint: str,
        links: Mapping[str, str],
        since_ms: int,
    ) -> None:
        """``owner``: what the vertex files the query under; ``source``: its name; ``run``: this start of it."""
        self.run = run
        self._supervisor = supervisor
        self._log = log
        self._owner = owner
        self._source = source
        self._checkpoint = checkpoint
        self._links = dict(links)
        self._since_ms = since_ms
        self._ended_ms = 0

    def details(self, known_checkpoint: int, *, with_plan: bool) -> JobDetails:
        """See `Telling`; a query has no plan and no checkpoints of ftlayer's."""
        supervisor, log = self._supervisor, self._log
        final = not supervisor.isActive
        now_ms = time.time_ns() // 1_000_000
        if final and not self._ended_ms:
            self._ended_ms = now_ms
        counters = log.counters
        batches = log.batches
        rates = rates_of(batches, now_ms)
        state = supervisor.state
        restarts = f" · {supervisor.restarts} restarts" if supervisor.restarts else ""
        error = supervisor.error
        return JobDetails(
            owner=self._owner,
            name=title_of(supervisor.name),
            kind=JobKind.QUERY,
            run=self.run,
            mode=self._mode,
            state=state,
            final=final,
            since_ms=self._since_ms,
            at_ms=now_ms,
            ended_ms=self._ended_ms,
            host=socket.gethostname(),
            pid=os.getpid(),
            line=(
                f"{state} · {counters.get('batches', 0):,} batches · "
                f"{counters.get('records_in', 0):,} rows ({rates.get('records_in', 0):,.0f}/s)"
                f"{self._fate(counters)}{restarts}"
            ),
            restarts=supervisor.restarts,
            last_failure=shortened(supervisor.last_failure if error is None else words_of(error), MAX_TEXT),
            checkpoint_location=self._checkpoint,
            counters=counters | self._lag(),
            rates=rates,
            histograms=log.histograms,
            incidents=tuple(supervisor.incidents),
            circuits=supervisor.circuits(),
            batches=batches,
            links=self._links,
        )

    def _fate(self, counters: Mapping[str, int]) -> str:
        """Return what became of records, in words."""
        return (
            f", {counters.get('delivered', 0):,} of them from the vertex · "
            f"{counters.get('failed', 0):,} failed · {counters.get('dead', 0):,} died"
        )

    def _lag(self) -> dict[str, int]:
        """Return ``lag/<source>`` behind the last batch, of a source whose reader can tell."""
        supervisor = self._supervisor
        # A query that has ended may have no session to ask any more.
        last = supervisor.query.lastProgress if supervisor.isActive else None
        lag = None if last is None else lag_in(last)
        return {} if lag is None else {f"lag/{self._source}": lag}

    def carry_out(self, order: JobOrder) -> str:
        supervisor = self._supervisor
        if not supervisor.isActive:
            raise UnsupportedError(f"{supervisor.name!r} is {supervisor.state}: nothing can be asked of it")
        match order.action:
            case OrderAction.STOP:
                supervisor.stop()
                return "it is stopped: what is pending or waits stays for its next start"
            case OrderAction.DRAIN:
                if supervisor.drain(order.timeout_ms / 1_000 or DRAIN_S):
                    return "everything that its source had is done"
                return f"it is {supervisor.state}: what is not through stays for its next start"
            case OrderAction.CANCEL:
                raise UnsupportedError(
                    "a wrapped query is not cancelled: stop it. That gives its batch up at once, and what is pending "
                    "or waits stays for its next start"
                )
            case OrderAction.SAVEPOINT:
                raise UnsupportedError(
                    "a wrapped query has no savepoints: its checkpoint is Spark's, of each batch, at "
                    f"{self._checkpoint or 'its checkpointLocation'}; stop it, and start it again with that"
                )
            case OrderAction.STACK:
                ui = self._links.get("Spark UI")
                raise UnsupportedError(
                    "a wrapped query has no slots of its own: its functions run in Spark's tasks. What executors do is "
                    f"in Spark's UI{f' at {ui}/executors/' if ui else ''} (Executors, Thread Dump); what a "
                    "Python worker does, py-spy shows, by the pid that the place of a failed attempt names"
                )


class UntrackedQueryTelling(QueryTelling):
    """The same for `FTStatus.OFF`: its batches are those of Spark's progress, and no record is followed."""

    _mode = "off"

    def __init__(
        self,
        supervisor: QuerySupervisor,
        spark: SparkSession,
        *,
        owner: str,
        source: str,
        checkpoint: str,
        links: Mapping[str, str],
        since_ms: int,
    ) -> None:
        """``spark``: the query's session; the rest as of `QueryTelling`."""
        super().__init__(
            supervisor,
            BatchHistory(),
            owner=owner,
            source=source,
            run=uuid.uuid4().hex,
            checkpoint=checkpoint,
            links=links,
            since_ms=since_ms,
        )
        self._spark = spark
        self._last_batch = -1
        self._seen: tuple[int, str] | None = None

    def details(self, known_checkpoint: int, *, with_plan: bool) -> JobDetails:
        for progress in self._news():
            self._last_batch = int(progress["batchId"])
            self._log.progressed(progress)
        return super().details(known_checkpoint, with_plan=with_plan)

    def _fate(self, counters: Mapping[str, int]) -> str:
        return " · not tracked"

    def _news(self) -> list[Mapping[str, Any]]:
        """Return Spark's progress of the batches that have ended since the last time, the oldest first."""
        query = self._supervisor.query
        if not self._supervisor.isActive and how_it_ended(self._spark) is not None:
            return []
        last = query.lastProgress
        seen = None if last is None else (last["batchId"], last["timestamp"])
        if seen is None or seen == self._seen:
            return []
        self._seen = seen
        # Spark tells of triggers without data too.
        return [
            progress
            for progress in query.recentProgress
            if progress["batchId"] > self._last_batch and "addBatch" in progress["durationMs"]
        ]


def lag_in(progress: Mapping[str, Any]) -> int | None:
    """Return how many records its sources had behind the batch that Spark's progress is of; None: they do not tell."""
    lags = [
        lag_behind(json.loads(source["endOffset"]), json.loads(source["latestOffset"]))
        for source in progress.get("sources", ())
        if source.get("endOffset") and source.get("latestOffset")
    ]
    known = [lag for lag in lags if lag is not None]
    return sum(known) if known else None


def rates_of(batches: tuple[BatchDetails, ...], now_ms: int) -> dict[str, float]:
    """Return what was taken in and what of it failed, per second: of the batches of the last `RATE_MS`.

    A batch that takes longer counts for as long as it took, from its begin on.
    """
    last = [batch for batch in batches if now_ms - batch.at_ms < max(RATE_MS, batch.duration_ms)]
    since_ms = min(
        (batch.at_ms - batch.duration_ms for batch in last if batch.duration_ms > RATE_MS), default=now_ms
    )
    span_s = max(now_ms - since_ms, RATE_MS) / 1_000
    return {
        "records_in": sum(batch.rows for batch in last) / span_s,
        "failed": sum(batch.failed for batch in last) / span_s,
    }
