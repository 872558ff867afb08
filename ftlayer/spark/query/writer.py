"""The end of a wrapped query: where its rows go, how it is triggered, and its start."""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import numpy as np
from pyspark.sql.streaming.listener import StreamingQueryListener

from ftlayer import __version__
from ftlayer.common.checks import Unstarted, UserFacing, check_instance, check_text, shown
from ftlayer.common.printable import shortened
from ftlayer.common.rules.circuit import CircuitStatus
from ftlayer.common.rules.histogram import BATCH_BOUNDS, Histogram
from ftlayer.common.rules.restart import ExponentialDelay, RestartStrategy, check_strategy, restarts_text
from ftlayer.common.rules.telemetry_settings import tracing_of
from ftlayer.common.telemetry import EndedSpan, program_spans
from ftlayer.errors import CheckpointMismatchError, ConfigError, QueryError, UnsupportedError
from ftlayer.functions.data_sources import HAS_LIMITS
from ftlayer.functions.pickling import missing_in, needing
from ftlayer.functions.steps import FunctionStep
from ftlayer.monitor.local_board import local_announcer
from ftlayer.records.traced import Sampler, record_span, span_within, trace_of
from ftlayer.spark import sessions
from ftlayer.spark.batch.runner import SourceOfQuery, SparkRunner
from ftlayer.spark.batch.sinks import StoppedError, hide_stops, words_of
from ftlayer.spark.circuits import SINK, WHOLE_QUERY, QueryCircuits, QueryGate
from ftlayer.spark.deliveries.source import FORMAT, DeliveryOptions, DeliverySource
from ftlayer.spark.plan import stream_plan
from ftlayer.spark.protocol import JUDGED, BatchProtocol
from ftlayer.spark.query.checkpoint import CheckpointDirectory, CheckpointMark
from ftlayer.spark.query.supervisor import QuerySupervisor, TrackedQuery, letter_queries, note_wrapped
from ftlayer.spark.stages.run import QueryPlan
from ftlayer.spark.stages.task import FT, plan_stages
from ftlayer.topology.checks import lag_behind
from ftlayer.vertex import calls
from ftlayer.vertex.calls import BatchDetails

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger(__name__)


OBSERVATION = "ftlayer"
"""The name, in ``observedMetrics`` of Spark's progress, of what is counted on the streaming plan."""


class TrackedQueryListener(StreamingQueryListener):
    """Told of each batch of the wrapped queries that it is given to (`TrackedWriter.listener`).

    It is a listener of Spark's too: given to ``spark.streams.addListener`` as well, it is told of starts, progress and
    ends of all queries. Override what you want to know.
    """

    def on_batch(self, report: BatchDetails) -> None:
        """Take note of a batch that is committed, or was before it was run again.

        Called on the thread of the batch, which waits for it. What it raises is logged, and the query goes on.
        """

    def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Take note of a query's start (Spark's event)."""

    def onQueryProgress(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Take note of a query's progress (Spark's event)."""

    def onQueryIdle(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Take note that a query has nothing to do (Spark's event)."""

    def onQueryTerminated(self, event: Any) -> None:  # noqa: N802 - Spark's name
        """Take note of a query's end (Spark's event)."""


def tell_batch(listeners: Iterable[TrackedQueryListener], report: BatchDetails) -> None:
    for listener in listeners:
        try:
            listener.on_batch(report)
        except Exception:
            logger.exception(
                "on_batch of %r failed for batch %d of %r; the query goes on",
                listener,
                report.batch,
                report.query,
            )


Times = tuple[float, float]
"""From and to, in ms since a batch's begin."""


@dataclass(frozen=True)
class BatchTraces:
    """Makes spans of the batches of one start of a query. For the batch's thread.

    ``query`` is what people call it, ``execution`` names this start.
    """

    sampler: Sampler
    query: str
    execution: str
    send: Callable[[EndedSpan], None]

    def through(self, batch: calls.BatchDetails, phases: Mapping[str, Times]) -> None:
        name = hashlib.blake2b(f"{self.execution}/{batch.batch}".encode(), digest_size=8).digest()
        origin = int.from_bytes(name, "little") or 1
        if not self.sampler.mask(np.array([origin], np.uint64))[0]:
            return
        began_ms = batch.at_ms - batch.duration_ms
        counts: dict[str, str | int | bool] = {
            "ftlayer.batch.rows": batch.rows_in,
            "ftlayer.batch.from_vertex": batch.delivered,
            "ftlayer.batch.failed": batch.failed,
            "ftlayer.batch.died": batch.dead,
        }
        told: dict[str, str | int | bool] = {"ftlayer.query": self.query, "ftlayer.batch": batch.batch}
        whole = record_span(origin)
        spans = [(whole, 0, "batch", (0.0, batch.duration_ms), {**told, **counts})]
        for place, (phase, times) in enumerate(phases.items()):
            spans.append((span_within(whole, place + 1), whole, phase, times, told))
        for span, parent, title, (start_ms, end_ms), attributes in spans:
            start_ns, end_ns = (int((began_ms + ms) * 1e6) for ms in (start_ms, end_ms))
            self.send(EndedSpan(trace_of(origin), span, parent, title, start_ns, end_ns, attributes))


def batch_traces(query: str, execution: str) -> BatchTraces | None:
    """Return what traces a query's batches, as OpenTelemetry's variables say; None where nothing is traced."""
    tracing = tracing_of(os.environ)
    spans = None if tracing is None else program_spans(tracing, "ftlayer-driver", __version__)
    if tracing is None or spans is None:
        return None
    return BatchTraces(Sampler(tracing.ratio), query, execution, spans.send)


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
    return shortened(name.replace("\0", "\\0"), calls.MAX_NAME_BYTES)


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
        self._batches: deque[calls.BatchDetails] = deque(maxlen=KEPT_BATCHES)
        self._counters: Counter[str] = Counter()
        self._histograms = {f"batch_{phase}": Histogram(BATCH_BOUNDS) for phase, _, _ in PHASES}
        self._histograms["batch"] = Histogram(BATCH_BOUNDS)

    def watch(self, step: str, batch: int) -> None:
        if step == "begin":
            self._steps = {}
        self._steps[step] = self._clock_ms()

    def through(self, batch: calls.BatchDetails, at_ms: int) -> calls.BatchDetails:
        """Take note of a batch that is through, at ``at_ms`` (Unix); return it with its times."""
        began = self._steps["begin"]
        steps = {step: at - began for step, at in self._steps.items()}
        times = {
            phase: (steps[before], steps[after])
            for phase, before, after in PHASES
            if before in steps and after in steps
        }
        phases = {phase: end - start for phase, (start, end) in times.items()}
        duration_ms = self._clock_ms() - began
        batch = replace(batch, at_ms=at_ms, duration_ms=duration_ms, phases_ms=phases)
        with self._lock:
            self._batches.append(batch)
            self._counters.update(
                batches=1,
                records_in=batch.rows_in,
                records_out=batch.rows_out,
                delivered=batch.delivered,
                failed=batch.failed,
                dead=batch.dead,
            )
            self._histograms["batch"].observe(duration_ms / 1_000)
            for phase, ms in phases.items():
                self._histograms[f"batch_{phase}"].observe(ms / 1_000)
        if self._traces is not None:
            self._traces.through(batch, times)
        return batch

    def progressed(self, progress: Mapping[str, Any]) -> None:
        """Take a batch from Spark's progress of a query that is not tracked: of it no more is known."""
        duration_ms = float(progress["durationMs"].get("triggerExecution", 0))
        began = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00"))
        rows = int(progress["numInputRows"])
        at_ms = round(began.timestamp() * 1_000 + duration_ms)
        with self._lock:
            batch = int(progress["batchId"])
            self._batches.append(calls.BatchDetails(batch, at_ms, rows, duration_ms=duration_ms))
            self._counters.update(batches=1, records_in=rows)
            self._histograms["batch"].observe(duration_ms / 1_000)

    @property
    def batches(self) -> tuple[calls.BatchDetails, ...]:
        with self._lock:
            return tuple(self._batches)

    @property
    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counters)

    @property
    def histograms(self) -> dict[str, calls.HistogramDetails]:
        """How long batches and their phases took, by ``batch|`` and ``batch_<phase>|``."""
        with self._lock:
            return {f"{name}|": calls.HistogramDetails.of(each) for name, each in self._histograms.items()}


@dataclass(frozen=True)
class QueryStart:
    """One start of a query. ``owner``: what the vertex files it under; ``source``: that one's name."""

    owner: str
    source: str
    checkpoint: str
    links: dict[str, str]
    since_ms: int
    run: str = field(default_factory=lambda: uuid.uuid4().hex)


class QueryTelling:
    """`ftlayer.monitor.announcer.Telling` of a wrapped query, over all runs of its Spark query."""

    _mode = ""

    def __init__(self, supervisor: QuerySupervisor, log: BatchHistory, start: QueryStart) -> None:
        self.run = start.run
        self._supervisor = supervisor
        self._log = log
        self._start = start
        self._ended_ms = 0

    def details(self, known_checkpoint: int, *, with_plan: bool) -> calls.JobDetails:
        supervisor, log = self._supervisor, self._log
        final = not supervisor.isActive
        now_ms = time.time_ns() // 1_000_000
        if final and not self._ended_ms:
            self._ended_ms = now_ms
        counters = log.counters
        batches = log.batches
        rates = rates_of(batches, now_ms)
        state = supervisor.state
        restarts = f" · {restarts_text(supervisor.restarts)}" if supervisor.restarts else ""
        error = supervisor.error
        return calls.JobDetails(
            owner=self._start.owner,
            name=title_of(supervisor.name),
            kind=calls.JobKind.QUERY,
            run=self.run,
            mode=self._mode,
            state=state,
            final=final,
            since_ms=self._start.since_ms,
            at_ms=now_ms,
            ended_ms=self._ended_ms,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            line=(
                f"{state} · {counters.get('batches', 0):,} batches · "
                f"{counters.get('records_in', 0):,} rows ({rates.get('records_in', 0):,.0f}/s)"
                f"{self._fate(counters)}{restarts}"
            ),
            restarts=supervisor.restarts,
            last_failure=shortened(supervisor.last_failure if error is None else words_of(error), MAX_TEXT),
            checkpoint_location=self._start.checkpoint,
            counters=counters | self._lag(),
            rates=rates,
            histograms=log.histograms,
            incidents=tuple(supervisor.incidents),
            circuits=supervisor.circuits(),
            batches=batches,
            links=self._start.links,
        )

    def _fate(self, counters: Mapping[str, int]) -> str:
        return (
            f", {counters.get('delivered', 0):,} of them from the vertex · "
            f"{counters.get('failed', 0):,} failed · {counters.get('dead', 0):,} died"
        )

    def _lag(self) -> dict[str, int]:
        supervisor = self._supervisor
        # A query that has ended may have no session to ask any more.
        last = supervisor.query.lastProgress if supervisor.isActive else None
        lag = None if last is None else lag_in(last)
        return {} if lag is None else {f"lag/{self._start.source}": lag}

    def carry_out(self, order: calls.JobOrder) -> str:
        supervisor = self._supervisor
        if not supervisor.isActive:
            raise UnsupportedError(f"{supervisor.name!r} is {supervisor.state}: nothing can be asked of it")
        match order.action:
            case calls.OrderAction.STOP:
                supervisor.stop()
                return "it is stopped: what is pending or waits stays for its next start"
            case calls.OrderAction.DRAIN:
                if supervisor.drain(order.timeout_ms / 1_000 or DRAIN_S):
                    return "everything that its source had is done"
                return f"it is {supervisor.state}: what is not through stays for its next start"
            case calls.OrderAction.CANCEL:
                raise UnsupportedError(
                    "a wrapped query is not cancelled: stop it. That gives its batch up at once, and what is pending "
                    "or waits stays for its next start"
                )
            case calls.OrderAction.SAVEPOINT:
                raise UnsupportedError(
                    "a wrapped query has no savepoints: its checkpoint is Spark's, of each batch, at "
                    f"{self._start.checkpoint or 'its checkpointLocation'}; stop it, and start it again with that"
                )
            case calls.OrderAction.STACK:
                ui = self._start.links.get("Spark UI")
                raise UnsupportedError(
                    "a wrapped query has no slots of its own: its functions run in Spark's tasks. What executors do is "
                    f"in Spark's UI{f' at {ui}/executors/' if ui else ''} (Executors, Thread Dump); what a "
                    "Python worker does, py-spy shows, by the pid that the place of a failed attempt names"
                )


class UntrackedQueryTelling(QueryTelling):
    """The same for `FTStatus.OFF`: its batches are those of Spark's progress, and no record is followed."""

    _mode = "off"

    def __init__(self, supervisor: QuerySupervisor, spark: SparkSession, start: QueryStart) -> None:
        super().__init__(supervisor, BatchHistory(), start)
        self._spark = spark
        self._last_batch = -1
        self._seen: tuple[int, str] | None = None

    def details(self, known_checkpoint: int, *, with_plan: bool) -> calls.JobDetails:
        for progress in self._ended_since():
            self._last_batch = int(progress["batchId"])
            self._log.progressed(progress)
        return super().details(known_checkpoint, with_plan=with_plan)

    def _fate(self, counters: Mapping[str, int]) -> str:
        return " · not tracked"

    def _ended_since(self) -> list[Mapping[str, Any]]:
        """Return Spark's progress of the batches that have ended since the last time, the oldest first."""
        query = self._supervisor.query
        if not self._supervisor.isActive and sessions.how_it_ended(self._spark) is not None:
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


def rates_of(batches: tuple[calls.BatchDetails, ...], now_ms: int) -> dict[str, float]:
    """Return what was taken in and what of it failed, per second: of the batches of the last `RATE_MS`.

    A batch that takes longer counts for as long as it took, from its begin on.
    """
    last = [batch for batch in batches if now_ms - batch.at_ms < max(RATE_MS, batch.duration_ms)]
    since_ms = min(
        (batch.at_ms - batch.duration_ms for batch in last if batch.duration_ms > RATE_MS), default=now_ms
    )
    span_s = max(now_ms - since_ms, RATE_MS) / 1_000
    return {
        "records_in": sum(batch.rows_in for batch in last) / span_s,
        "failed": sum(batch.failed for batch in last) / span_s,
    }


_WORDS = {
    "awaittermination stop isactive lastprogress recentprogress status exception processallavailable drain explain "
    "wait join id runid": "nothing runs yet: .start() returns the query, which has .awaitTermination(), .stop(), …",
    "execute run": "it is started with .start()",
    "queryname name": "give it as name=… to sink, write_stream or emit",
    "outputmode": "rows come to the sink as they are, a batch at a time, which is Spark's append: leave it out",
    "options": "give each with .option(key, value)",
    "foreachbatch foreach format table totable writestream sink": "where the rows go was said by sink, write_stream or "
    "emit: call .start()",
    "map flatmap filter mapbatches mapasync transform keyby repartition": "it belongs to the stream: call it before "
    "sink, write_stream or emit",
}


class TriggerOptions(TypedDict, total=False):
    """When a query's batches begin: one of the two."""

    processingTime: str
    availableNow: Literal[True]


class TrackedWriter(UserFacing, words=_WORDS):
    """A wrapped query that is ready to start. Its methods return it, as those of a DataStreamWriter do."""

    def __init__(
        self, plan: stream_plan.StreamPlan, checkpoint: str, name: str, end: Callable[[], stream_plan.Ending]
    ) -> None:
        """For `TrackedStream`; ``end`` says where the rows go, behind the checks of what is given here."""
        check_text(checkpoint, "checkpoint", "a directory, of this query alone, as text")
        check_text(name, "name")
        self._plan = plan
        self._checkpoint = checkpoint
        self._name = name
        self._trigger: TriggerOptions = {}
        self._options: dict[str, str] = {}
        self._restart: RestartStrategy | None = None
        self._ending = end()
        self._listeners: list[TrackedQueryListener] = []
        self._watch: Callable[[str, int], None] = lambda step, batch: None
        self._unstarted = Unstarted(
            f"query {name!r} was built here and never started: call .start() on it, and .awaitTermination() on what "
            "that returns"
        )

    def __repr__(self) -> str:
        return f"TrackedWriter({self._name!r}, not started: .start() does)"

    # ------------------------------------------------------------ how it runs

    @overload
    def trigger(self, *, processingTime: str) -> TrackedWriter: ...  # noqa: N803 - Spark's name

    @overload
    def trigger(self, *, availableNow: Literal[True]) -> TrackedWriter: ...  # noqa: N803 - Spark's name

    def trigger(self, **trigger: Unpack[TriggerOptions]) -> TrackedWriter:
        """Set the trigger, as in Spark: ``processingTime="1 second"`` or ``availableNow=True``."""
        if len(trigger) != 1:
            raise ConfigError(
                f"trigger: expected one of {', '.join(TriggerOptions.__annotations__)}, got {shown(trigger)}"
            )
        if "availableNow" in trigger and trigger["availableNow"] is not True:
            raise ConfigError(f"trigger: availableNow: expected True, got {shown(trigger['availableNow'])}")
        if "processingTime" in trigger:
            from py4j.protocol import Py4JError
            from pyspark.errors import PySparkException

            interval: object = trigger["processingTime"]
            option, expected = "trigger: processingTime", "an interval like '2 seconds'"
            check_text(interval, option, expected)
            jvm: Any = self._plan.spark._jvm
            try:  # Spark reads it now: it would do so at the start.
                jvm.org.apache.spark.sql.streaming.Trigger.ProcessingTime(interval)
            except (Py4JError, PySparkException) as error:
                raise ConfigError(f"{option}: expected {expected}, got {shown(interval)}") from error
        self._trigger = trigger
        return self

    def option(self, key: str, value: str) -> TrackedWriter:
        """Set an option of Spark's DataStreamWriter."""
        if key == "checkpointLocation":
            raise ConfigError(
                "option checkpointLocation: give it as checkpoint=… to sink, write_stream or emit"
            )
        self._options[key] = value
        return self

    def restart(self, strategy: RestartStrategy) -> TrackedWriter:
        """Set what happens when the query fails (default: `ExponentialDelay`)."""
        check_strategy(strategy, "restart")
        self._restart = strategy
        return self

    def listener(self, listener: TrackedQueryListener) -> TrackedWriter:
        """Tell ``listener`` of each batch; one may be given to many queries, and a query may have several.

        With `FTStatus.OFF` there are no batches to be told of.
        """
        check_instance(listener, "listener", TrackedQueryListener)
        self._listeners.append(listener)
        return self

    def start(self) -> TrackedQuery:
        """Start the query and its supervisor.

        Raises `ConfigError` if a query of this name runs already, `CheckpointMismatchError` if the checkpoint is not
        this query's, `InvalidTopologyError` for a function that cannot be pickled, `SessionLostError` if Spark's JVM
        ends meanwhile, `LayerClosedError` if the layer is closed, and whatever Spark or the vertex raises at the start.
        """
        self._unstarted.settle()
        self._plan.layer._check_open()
        stream_plan.check_functions(self._plan.steps)
        spark = self._plan.spark
        with sessions.tells_of_its_end(spark):
            if any(query.name == self._name for query in spark.streams.active):
                raise ConfigError(
                    f"name: a query {self._name!r} runs in this session already, and two queries of one source need "
                    "names of their own: give this one another with name=… of sink, write_stream or emit"
                )
            return self._start_tracked() if self._plan.layer.enabled else self._start_plain()

    def _start_plain(self) -> TrackedQuery:
        source, spark = self._plan.source, self._plan.spark
        directory = CheckpointDirectory(spark, self._checkpoint)
        directory.refuse_mark()
        rows = stream_plan.plain_rows(source.frame, plan_stages(self._plan.steps), self._plan.stage_schemas())
        writer = self._ending.plain(rows)

        def start(supervisor: QuerySupervisor) -> StreamingQuery:
            directory.remove_torn_offsets()
            return self._spark_start(writer, supervisor)

        begun = self._begun(title_of(self._name))
        supervisor = QuerySupervisor(
            self._name,
            start,
            lambda: calls.QueryStatus(0, 0, 0, 0, 0, -1),
            directory.log,
            self._restart or ExponentialDelay(),
            bounded="availableNow" in self._trigger,
            needed_by=self._needed_by,
        )
        local_announcer().add(UntrackedQueryTelling(supervisor, spark, begun))
        return TrackedQuery(supervisor)

    def _begun(self, owner: str) -> QueryStart:
        now_ms = time.time_ns() // 1_000_000
        return QueryStart(
            owner, self._plan.source.name, self._checkpoint, sessions.links_of(self._plan.spark), now_ms
        )

    def _needed_by(self, text: str) -> str:
        """Return the operators whose functions need what could not be loaded, as ``text`` says; "" for none."""
        steps = [(repr(step.uid), step) for step in self._plan.steps if isinstance(step, FunctionStep)]
        return needing(missing_in(text), steps)

    def _start_tracked(self) -> TrackedQuery:
        source, spark, client = self._plan.source, self._plan.spark, self._plan.layer.client
        directory = CheckpointDirectory(spark, self._checkpoint)
        mark = directory.claim(source.name)
        stream = stream_plan.stream_of_source(source, mark.query)
        self._plan.layer.watch_dead(stream)
        limits = self._plan.failing_limits()
        if self._ending.rejects and WHOLE_QUERY in limits:
            limits[SINK] = limits[WHOLE_QUERY]
        circuits = QueryCircuits(self._name, limits) if limits else None
        # Before anything runs that could not be handed out, where one of them fails.
        announcer, begun = self._plan.layer._job_announcer, self._begun(mark.query)
        log = BatchHistory(traces=batch_traces(title_of(self._name), begun.run))
        runs = itertools.count(1)

        def start(supervisor: QuerySupervisor) -> StreamingQuery:
            run = f"{begun.run}.{next(runs)}"
            return self._start_run(supervisor, directory, mark, stream, circuits, run, log)

        supervisor = QuerySupervisor(
            self._name,
            start,
            lambda: client.call(calls.QueryStatusCall(mark.query)),
            directory.log,
            self._restart or ExponentialDelay(),
            bounded="availableNow" in self._trigger,
            circuits=circuits,
            letter_queries=lambda: letter_queries(spark, stream),
            needed_by=self._needed_by,
        )
        note_wrapped(supervisor, source.frame)
        announcer.add(QueryTelling(supervisor, log, begun))
        return TrackedQuery(supervisor)

    def _start_run(
        self,
        supervisor: QuerySupervisor,
        directory: CheckpointDirectory,
        mark: CheckpointMark,
        stream: str,
        circuits: QueryCircuits | None,
        run: str,
        log: BatchHistory,
    ) -> StreamingQuery:
        """Start one run of the Spark query: a new epoch, which fences the run before."""
        layer, source, made = self._plan.layer, self._plan.source, self._plan
        client = layer.client
        directory.remove_torn_offsets()
        opened = client.call(
            calls.OpenQuery(mark.query, run, (stream,), layer.stream_options, title_of(self._name))
        )
        if directory.last_commit > opened.last_committed:
            raise CheckpointMismatchError(
                f"checkpoint {directory.path} has committed batch {directory.last_commit}, and the vertex at "
                f"{client.address} knows of {opened.last_committed} only: it is not the store this query ran with "
                "(or it was deleted). Connect to the right one; if it is gone, records that waited in it are "
                "lost, and the query has to start with a new checkpoint"
            )
        if opened.last_committed > directory.last_planned:
            raise CheckpointMismatchError(
                f"checkpoint {directory.path} ends at batch {directory.last_planned}, and the vertex at "
                f"{client.address} has committed batch {opened.last_committed}: the checkpoint was reset, or is an "
                "old copy, and batches that Spark plans anew would be taken for ones that are done. Restore "
                "the newer checkpoint, or start with a new checkpoint directory"
            )
        plan = QueryPlan(
            plan_stages(made.steps),
            made.stage_schemas(),
            key=source.key,
            emits=f"emit:{self._name}" if self._ending.carrier else "",
            carrier=source.carrier,
            strict=layer.strict,
            exact=opened.exact,
            rejects=self._ending.rejects,
        )

        def tell(circuits: dict[str, CircuitStatus]) -> None:
            client.call(calls.ReportCircuits(mark.query, circuits))

        def watch(step: str, batch: int) -> None:
            log.watch(step, batch)
            self._watch(step, batch)

        is_ours_to_check = sessions.reads_in_python(source.frame)

        def process(rows: DataFrame, batch: int) -> None:
            runner = SparkRunner(
                rows,
                plan,
                self._ending.sink,
                SourceOfQuery(source.name, stream),
                opened,
                lambda: client.health().incarnation,
                mark.query,
                run,
                client.call_once,
            )
            try:
                if is_ours_to_check:
                    directory.check_goes_on(batch)
                gate = None if circuits is None else QueryGate(circuits, lambda: supervisor.interrupted, tell)
                batches = BatchProtocol(mark.query, opened.epoch, client.call, runner, watch, gate)
                report = batches.process(batch)
            except BaseException as error:
                supervisor.note_failure(error)
                if supervisor.interrupted:
                    # From None: Spark's regular expression for a stop overflows the stack over a long text.
                    raise StoppedError(self._name) from None
                if not isinstance(error, Exception):  # Py4J would not come back from it.
                    raise QueryError(f"{self._name}: {words_of(error)}") from error
                raise
            report = log.through(replace(report, query=self._name), time.time_ns() // 1_000_000)
            supervisor.report(report)
            tell_batch(self._listeners, report)

        hide_stops()
        rows = self._frame(stream, mark.query, supervisor.drain_until)
        return self._spark_start(rows.writeStream.foreachBatch(process), supervisor)

    def _frame(self, stream: str, query: str, drain_until: float | None) -> DataFrame:
        """Return the source's rows with the vertex's deliveries among them, both counted for Spark's progress.

        Counted here: what `foreachBatch` does is no part of the streaming plan, and invisible to Spark's listeners.
        """
        from pyspark.sql import functions

        source, spark, layer = self._plan.source, self._plan.spark, self._plan.layer
        client = layer.client
        own = stream_plan.with_source_ft(source.frame)
        spark.dataSource.register(DeliverySource)
        options = DeliveryOptions(
            client.address,
            client.token,
            stream,
            query,
            (client.root_certs or b"").decode(),
            layer.max_rows,
            spark.sparkContext.defaultParallelism,
            drain_until_ms=round((drain_until or 0) * 1000) if HAS_LIMITS else 0,
            client_pem=(client.client_pem or b"").decode(),
            required=tuple(field.name for field in own.schema if not field.nullable),
        )
        schema = stream_plan.all_nullable(own.schema)
        reader = sessions.stream_reader(spark, sessions.DELIVERIES).format(FORMAT).schema(schema)
        delivered = reader.options(**options.to_spark()).load()
        rows = delivered if source.ingest else own.union(delivered)
        # Each row once, though a batch be read again; Spark's numInputRows counts every reading.
        return rows.observe(
            OBSERVATION,
            functions.count(functions.lit(1)).alias("rows"),
            functions.count(FT).alias("delivered"),
        )

    def _spark_start(self, writer: Any, supervisor: QuerySupervisor) -> StreamingQuery:
        writer = writer.option("checkpointLocation", self._checkpoint).queryName(self._name)
        for key, value in self._options.items():
            writer = writer.option(key, value)
        trigger = self._trigger if supervisor.drain_until is None else {"availableNow": True}
        if trigger:
            writer = writer.trigger(**trigger)
        bounded = self._plan.layer.enabled and "availableNow" in trigger
        return sessions.start_query(writer, self._plan.source.frame, bounded=bounded)


def watch_steps(writer: TrackedWriter, watch: Callable[[str, int], None]) -> None:
    """Have ``watch`` called at each step of each batch (`ftlayer.spark.protocol.STEPS`): faults are injected there."""
    writer._watch = watch
