"""The end of a wrapped query: where its rows go, how it is triggered, and its start."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftlayer.checks import check_instance, check_known, check_text, known_options, shown
from ftlayer.circuit import CircuitStatus
from ftlayer.errors import CheckpointMismatchError, ConfigError, QueryError
from ftlayer.functions.pickling import missing_in, needing
from ftlayer.functions.steps import FunctionStep
from ftlayer.jobs.local_board import local_announcer
from ftlayer.restart import ExponentialDelay, RestartStrategy, check_strategy
from ftlayer.spark.batch.raised import StoppedError, hide_stops, words_of
from ftlayer.spark.batch.runner import SourceOfQuery, SparkRunner
from ftlayer.spark.circuits import SINK, WHOLE_QUERY, QueryCircuits, QueryGate
from ftlayer.spark.deliveries.source import FORMAT, DeliveryOptions, DeliverySource
from ftlayer.spark.plan.checks import all_nullable, check_functions, with_source_ft
from ftlayer.spark.plan.endings import Ending
from ftlayer.spark.plan.plain import plain_rows
from ftlayer.spark.plan.stream_plan import StreamPlan, stream_of_source
from ftlayer.spark.protocol import BatchProtocol
from ftlayer.spark.query.batch_traces import batch_traces
from ftlayer.spark.query.checkpoint import CheckpointDirectory, CheckpointMark
from ftlayer.spark.query.handle import TrackedQuery
from ftlayer.spark.query.letter_queries import letter_queries, note_wrapped
from ftlayer.spark.query.listener import OBSERVATION, TrackedQueryListener, tell_batch
from ftlayer.spark.query.supervisor import QuerySupervisor
from ftlayer.spark.query.telling import BatchHistory, QueryTelling, UntrackedQueryTelling, title_of
from ftlayer.spark.sessions import links_of, stream_reader, tells_of_its_end
from ftlayer.spark.stages.run import QueryPlan
from ftlayer.spark.stages.steps import plan_stages
from ftlayer.spark.stages.task import FT
from ftlayer.vertex.calls import OpenQuery, QueryOpened, QueryStatus, QueryStatusCall, ReportCircuits

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery


class TrackedWriter:
    """A wrapped query that is ready to start. Its methods return it, as those of a DataStreamWriter do."""

    def __init__(self, plan: StreamPlan, checkpoint: str, name: str, end: Callable[[], Ending]) -> None:
        """For `TrackedStream`; ``end`` says where the rows go, behind the checks of what is given here."""
        check_text(checkpoint, "checkpoint", "a directory, of this query alone, as text")
        check_text(name, "name")
        self._plan = plan
        self._checkpoint = checkpoint
        self._name = name
        self._trigger: dict[str, Any] = {}
        self._options: dict[str, str] = {}
        self._restart: RestartStrategy | None = None
        self._ending = end()
        self._listeners: list[TrackedQueryListener] = []
        self._watch: Callable[[str, int], None] = lambda step, batch: None

    # ------------------------------------------------------------ how it runs

    def trigger(self, **trigger: Any) -> TrackedWriter:
        """Set the trigger, as in Spark: ``processingTime="1 second"`` or ``availableNow=True``."""
        allowed = {"processingTime", "availableNow"}
        check_known(trigger, sorted(allowed), "trigger")
        if len(trigger) != 1:
            raise ConfigError(f"trigger: expected one of {', '.join(sorted(allowed))}, got {shown(trigger)}")
        if "availableNow" in trigger and trigger["availableNow"] is not True:
            raise ConfigError(f"trigger: availableNow: expected True, got {shown(trigger['availableNow'])}")
        if "processingTime" in trigger:
            self._check_interval(trigger["processingTime"])
        self._trigger = trigger
        return self

    def _check_interval(self, interval: object) -> None:
        """Have Spark read it now: it would do so at the start."""
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException

        option, expected = "trigger: processingTime", "an interval like '2 seconds'"
        check_text(interval, option, expected)
        jvm: Any = self._plan.spark._jvm
        try:
            jvm.org.apache.spark.sql.streaming.Trigger.ProcessingTime(interval)
        except (Py4JError, PySparkException) as error:
            raise ConfigError(f"{option}: expected {expected}, got {shown(interval)}") from error

    @known_options
    def option(self, key: str, value: str) -> TrackedWriter:
        """Set an option of Spark's DataStreamWriter."""
        if key == "checkpointLocation":
            raise ConfigError(
                "option checkpointLocation: give it as checkpoint=… to sink, write_stream or emit"
            )
        self._options[key] = value
        return self

    @known_options
    def restart(self, strategy: RestartStrategy) -> TrackedWriter:
        """Set what happens when the query fails (default: `ExponentialDelay`)."""
        check_strategy(strategy, "restart")
        self._restart = strategy
        return self

    @known_options
    def listener(self, listener: TrackedQueryListener) -> TrackedWriter:
        """Tell ``listener`` of each batch; one may be given to many queries, and a query may have several.

        With `FTStatus.OFF` there are no batches to be told of.
        """
        check_instance(listener, "listener", TrackedQueryListener)
        self._listeners.append(listener)
        return self

    @known_options
    def start(self) -> TrackedQuery:
        """Start the query and its supervisor.

        Raises `ConfigError` if a query of this name runs already, `CheckpointMismatchError` if the checkpoint is not
        this query's, `InvalidTopologyError` for a function that cannot be pickled, `SessionLostError` if Spark's JVM
        ends meanwhile, `LayerClosedError` if the layer is closed, and whatever Spark or the vertex raises at the start.
        """
        self._plan.layer.check_open()
        check_functions(self._plan.steps)
        spark = self._plan.spark
        with tells_of_its_end(spark):
            if any(query.name == self._name for query in spark.streams.active):
                raise ConfigError(
                    f"name: a query {self._name!r} runs in this session already, and two queries of one source need "
                    "names of their own: give this one another with name=… of sink, write_stream or emit"
                )
            return self._start_tracked() if self._plan.layer.enabled else self._start_plain()

    def _start_plain(self) -> TrackedQuery:
        source = self._plan.source
        directory = CheckpointDirectory(source.frame.sparkSession, self._checkpoint)
        directory.refuse_mark()
        rows = plain_rows(source.frame, plan_stages(self._plan.steps), self._plan.stage_schemas())
        writer = self._ending.plain(rows)

        def start(supervisor: QuerySupervisor) -> StreamingQuery:
            directory.remove_torn_offsets()
            return self._spark_start(writer, supervisor)

        def status() -> QueryStatus:
            return QueryStatus(0, 0, 0, 0, 0, -1)

        spark = source.frame.sparkSession
        links, since_ms = links_of(spark), time.time_ns() // 1_000_000
        supervisor = QuerySupervisor(
            self._name,
            start,
            status,
            directory.log,
            self._strategy(),
            bounded=self._bounded,
            needed_by=self._needed_by,
        )
        local_announcer().add(
            UntrackedQueryTelling(
                supervisor,
                spark,
                owner=title_of(self._name),
                source=source.name,
                checkpoint=self._checkpoint,
                links=links,
                since_ms=since_ms,
            )
        )
        return TrackedQuery(supervisor)

    def _needed_by(self, text: str) -> str:
        """Return the operators whose functions need what could not be loaded, as ``text`` says; "" for none."""
        steps = [(repr(step.uid), step) for step in self._plan.steps if isinstance(step, FunctionStep)]
        return needing(missing_in(text), steps)

    def _start_tracked(self) -> TrackedQuery:
        source = self._plan.source
        directory = CheckpointDirectory(source.frame.sparkSession, self._checkpoint)
        mark = directory.claim(source.name)
        stream = stream_of_source(source, mark.query)
        client = self._plan.layer.client
        self._plan.layer.watch_dead(stream)
        limits = self._plan.failing_limits()
        if self._ending.rejects and WHOLE_QUERY in limits:
            limits[SINK] = limits[WHOLE_QUERY]
        circuits = QueryCircuits(self._name, limits) if limits else None
        execution = uuid.uuid4().hex
        log = BatchHistory(traces=batch_traces(title_of(self._name), execution))
        # Before anything runs that could not be handed out, where one of them fails.
        announcer, links = self._plan.layer.job_announcer, links_of(source.frame.sparkSession)
        since_ms = time.time_ns() // 1_000_000
        runs = itertools.count(1)

        def start(supervisor: QuerySupervisor) -> StreamingQuery:
            run = f"{execution}.{next(runs)}"
            return self._start_run(supervisor, directory, mark, stream, circuits, run, log)

        def status() -> QueryStatus:
            reply = client.call(QueryStatusCall(mark.query))
            assert isinstance(reply, QueryStatus)
            return reply

        supervisor = QuerySupervisor(
            self._name,
            start,
            status,
            directory.log,
            self._strategy(),
            bounded=self._bounded,
            circuits=circuits,
            letter_queries=lambda: letter_queries(source.frame.sparkSession, stream),
            needed_by=self._needed_by,
        )
        note_wrapped(supervisor, source.frame)
        announcer.add(
            QueryTelling(
                supervisor,
                log,
                owner=mark.query,
                source=source.name,
                run=execution,
                checkpoint=self._checkpoint,
                links=links,
                since_ms=since_ms,
            )
        )
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
        layer = self._plan.layer
        client = layer.client
        directory.remove_torn_offsets()
        opened = client.call(
            OpenQuery(mark.query, run, (stream,), layer.stream_options, title_of(self._name))
        )
        assert isinstance(opened, QueryOpened)
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
        plan = self._query_plan(opened.exact)
        name = self._plan.source.name

        def tell(circuits: dict[str, CircuitStatus]) -> None:
            client.call(ReportCircuits(mark.query, circuits))

        def watch(step: str, batch: int) -> None:
            log.watch(step, batch)
            self._watch(step, batch)

        def process(rows: DataFrame, batch: int) -> None:
            runner = SparkRunner(
                rows,
                plan,
                self._ending.sink,
                SourceOfQuery(name, stream),
                opened,
                lambda: client.health().incarnation,
                mark.query,
                run,
                client.call_once,
            )
            try:
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

        source, layer = self._plan.source, self._plan.layer
        spark, client = source.frame.sparkSession, layer.client
        own = with_source_ft(source.frame)
        spark.dataSource.register(DeliverySource)
        options = DeliveryOptions(
            client.address,
            client.token,
            stream,
            query,
            (client.root_certs or b"").decode(),
            layer.max_rows,
            spark.sparkContext.defaultParallelism,
            drain_until_ms=round((drain_until or 0) * 1000),
            client_pem=(client.client_pem or b"").decode(),
            required=tuple(field.name for field in own.schema if not field.nullable),
        )
        schema = all_nullable(own.schema)
        reader = stream_reader(spark, "ftlayer_deliveries").format(FORMAT).schema(schema)
        delivered = reader.options(**options.to_spark()).load()
        rows = delivered if source.ingest else own.union(delivered)
        # Each row once, though a batch be read again; Spark's numInputRows counts every reading.
        return rows.observe(
            OBSERVATION,
            functions.count(functions.lit(1)).alias("rows"),
            functions.count(FT).alias("delivered"),
        )

    def _query_plan(self, exact: bool) -> QueryPlan:
        made = self._plan
        return QueryPlan(
            plan_stages(made.steps),
            made.stage_schemas(),
            key=made.source.key,
            emits=f"emit:{self._name}" if self._ending.carrier else "",
            carrier=made.source.carrier,
            strict=made.layer.strict,
            exact=exact,
            rejects=self._ending.rejects,
        )

    def _strategy(self) -> RestartStrategy:
        return self._restart if self._restart is not None else ExponentialDelay()

    @property
    def _bounded(self) -> bool:
        return "availableNow" in self._trigger

    def _spark_start(self, writer: Any, supervisor: QuerySupervisor) -> StreamingQuery:
        writer = writer.option("checkpointLocation", self._checkpoint).queryName(self._name)
        for key, value in self._options.items():
            writer = writer.option(key, value)
        trigger = self._trigger if supervisor.drain_until is None else {"availableNow": True}
        if trigger:
            writer = writer.trigger(**trigger)
        query: StreamingQuery = writer.start()
        return query


def watch_steps(writer: TrackedWriter, watch: Callable[[str, int], None]) -> None:
    """Have ``watch`` called at each step of each batch (`ftlayer.spark.protocol.STEPS`): faults are injected there."""
    writer._watch = watch
