"""`StreamEnvironment`: where a continuous topology is built, looked at and started."""

from __future__ import annotations

import copy
import logging
import os
import secrets
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias

import pyarrow as pa

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.common.checks import (
    Unstarted,
    UserFacing,
    check_bool,
    check_instance,
    check_int,
    check_text,
    known_options,
    shown,
    users_line,
)
from ftlayer.common.printable import NotebookLine, in_notebook, printable, tell_anyway
from ftlayer.common.rules.restart import RestartStrategy, check_strategy
from ftlayer.common.rules.restart import default_restart as default_restart
from ftlayer.common.rules.telemetry_settings import tracing_of
from ftlayer.config import FTStatus, TopologyOptions
from ftlayer.errors import ConfigError, JobStartError
from ftlayer.functions.retry_rules import Errors
from ftlayer.monitor.local_board import kept_reports, local_announcer, push_otlp, tell_prometheus
from ftlayer.runtime.acker_mode.driver.job_vertex import JobVertexCalls, vertex_keepers
from ftlayer.runtime.acker_mode.driver.rules.driver_half import AckerDriver
from ftlayer.runtime.acker_mode.slot.rules import AckerSlotFactory
from ftlayer.runtime.barrier_mode.driver.checkpointing import BarrierDriver
from ftlayer.runtime.barrier_mode.driver.letters import check_place
from ftlayer.runtime.barrier_mode.driver.opening import LATEST as LATEST
from ftlayer.runtime.barrier_mode.driver.opening import ended_before, open_checkpoints
from ftlayer.runtime.barrier_mode.slot.shell import BarrierSlotFactory
from ftlayer.runtime.driver import session
from ftlayer.runtime.driver.control_server import ControlServer
from ftlayer.runtime.driver.job import EndedJob, Job, TopologyTelling
from ftlayer.runtime.driver.job_thread import JobParts, JobThread
from ftlayer.runtime.driver.planners import Planners
from ftlayer.runtime.driver.rules import events
from ftlayer.runtime.driver.rules.events import Crew, SlotRecord, died, untracked
from ftlayer.runtime.driver.rules.job_rules import (
    DriverMode,
    JobContext,
    JobMode,
    ModeInstruction,
    OpenMode,
    StopJob,
    failed,
)
from ftlayer.runtime.driver.rules.planner_rules import KeptRanges, OpenKeeper, PositionKeeper
from ftlayer.runtime.protocol.messages import KEY_BYTES, Deploy, SlotOrder
from ftlayer.runtime.slot.black_box import last_words
from ftlayer.runtime.slot.main import run_slot
from ftlayer.runtime.slot.rules.mode import Order, SlotModeFactory, UntrackedSlotFactory
from ftlayer.spark.sessions import check_is_session, links_of, prepare_workers, tells_of_its_end
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import Schema
from ftlayer.topology.explain import check_forced, explain, to_dot, to_mermaid, warn_of_losses
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.topology.operators import Source
from ftlayer.topology.streams.data_stream import DataStream
from ftlayer.transport.address import MAX_PORT, Address, parse_address
from ftlayer.transport.flight_connection import Endpoint
from ftlayer.transport.sockets import SocketDirectory
from ftlayer.vertex.calls import StreamOptions
from ftlayer.vertex.client.client import VertexClient

if TYPE_CHECKING:
    from ftlayer.monitor.console.options import ConsoleProcess
    from ftlayer.spark.facade import FTLayer

logger = logging.getLogger(__name__)


# A live line is drawn this often; plain lines are for logs, and come less often (s).
LIVE_S = 0.5
PLAIN_S = 10.0


class Line(Protocol):
    """Where the progress of a job is shown."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...

    def show(self, text: str) -> None: ...


class PlainLines:
    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)


class TerminalLine:
    """The last line of a terminal, drawn again; on leaving, the last text stays as a line of its own."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.status import Status
        from rich.text import Text

        self._to_text = Text
        self._status = Status("starting", console=Console(stderr=True))
        self._last = ""

    def __enter__(self) -> TerminalLine:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Stopped before the error of a failed job is raised, or it would be drawn over.
        self._status.stop()
        if self._last:
            print(self._last, file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        self._last = printable(text)
        self._status.update(self._to_text(self._last))


def follow(job: Job, line: Line | None = None) -> Job:
    """Show progress until the job is over, and how it ended. Raises what the job fails with.

    Ctrl-C, or the interrupt of a notebook's cell, cancels the job and is raised again, without the frames of where it
    met this thread.
    """
    try:
        _follow(job, line or _line())
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None
    job.wait()
    return job


def _follow(job: Job, line: Line) -> None:
    every_s = PLAIN_S if isinstance(line, PlainLines) else LIVE_S
    with line:
        try:
            while not job.over(every_s):
                line.show(job.status().line())
        except KeyboardInterrupt:
            job.interrupt()
            line.show(job.status().line())
            raise
        line.show(job.status().line())


def hide_spark_bar(spark: Any) -> None:
    """End the session's progress bar, which draws over ours: to it slots are stages that never come to their end."""
    context = getattr(spark, "_sc", None)  # over Spark Connect there is none
    if context is None:
        return
    bar = context._jsc.sc().progressBar()
    if bar.isDefined():
        bar.get().stop()


def _line() -> Line:
    if in_notebook():
        return NotebookLine()
    return TerminalLine() if sys.stderr.isatty() else PlainLines()


_Instructions: TypeAlias = Sequence[ModeInstruction[NoReturn]]


class UntrackedJob(JobMode[NoReturn]):
    def __init__(self, crew: Crew, *, run: str, restart: RestartStrategy) -> None:
        super().__init__(crew, run)
        self.slot_restart = restart

    def lost(self, slot: SlotRecord, now_ms: int, *, alone: bool) -> _Instructions:
        return [failed(untracked(slot.failure))]

    def go_on(self, now_ms: int) -> _Instructions:
        slots = self._crew.slots
        if self.has_begun:
            return [StopJob(events.Over(events.JobState.ENDED))] if all(slot.ended for slot in slots) else []
        if not all(slot.hello for slot in slots):
            return []
        self.epoch = 1
        deploy = Deploy(1, f"{self._run}/1", tuple(slot.peer for slot in slots))
        return [each for slot in slots for each in self._crew.deploy(slot, deploy, now_ms)]

    def validate(self) -> None:
        assert self.has_begun == self._crew.all_deployed, "a job that goes on has lost a slot"


class UntrackedDriver(DriverMode[NoReturn]):
    def __init__(self, job: JobContext) -> None:
        super().__init__(job)
        self.rules = UntrackedJob(job.crew, run=job.run, restart=job.restart)

    def carry_out(self, instruction: NoReturn) -> None: ...


def open_untracked(source: Source, happened: Callable[[Any], None]) -> KeptRanges:
    """Return the keeper of a reader source with ``FTStatus.OFF``: an `OpenKeeper`. Positions are kept nowhere."""
    return KeptRanges(PositionKeeper())


# The name on a job's certificate: slots ask for it, whatever address the driver has.
TLS_NAME = "ftlayer-job"


_WORDS = {
    "start run submit awaittermination": ".execute() runs the topology to its end; .execute_async() starts it and "
    "returns its Job, which has .wait()",
    "addsource fromsource fromcollection fromelements fromdata readtextfile readstream read": ".source(source, schema) "
    "begins a stream: an iterable, a DataFrame, a Python Data Source, or one of ftlayer.sources",
    "sink addsink sinkto print show map flatmap filter keyby process": "it belongs to a stream: "
    "env.source(source, schema) returns one",
    "executeandcollect collect": "give the stream a .sink(function), then call .execute()",
    "enablecheckpointing getcheckpointconfig setstatebackend": "give StreamEnvironment "
    "checkpointing=CheckpointConfig(interval=…, directory=…)",
    "setparallelism setrestartstrategy": "give StreamEnvironment parallelism=… or restart=…",
    "getexecutionenvironment createlocalenvironment create getorcreate builder": "make one: StreamEnvironment(spark, "
    "layer, name=…), or with checkpointing=CheckpointConfig(…) in place of the layer",
    "stop cancel drain savepoint state status wait result": "it belongs to the Job that .execute_async() returns",
}


class StreamEnvironment(UserFacing, words=_WORDS):
    """A topology of long-lived Python operators in a Spark session, tracked by an `FTLayer` or with checkpoints.

    Several environments may run in one session at a time, beside ordinary jobs. Their names have to differ: a
    topology's records and positions are filed under its name in the vertex, and the next start of the same name
    goes on with them.
    """

    @known_options
    def __init__(
        self,
        spark: Any,
        layer: FTLayer | None = None,
        *,
        name: str,
        parallelism: int = 1,
        restart: RestartStrategy | None = None,
        options: TopologyOptions | None = None,
        checkpointing: CheckpointConfig | None = None,
        board: FTLayer | None = None,
    ) -> None:
        """Begin an empty topology; starts nothing.

        Args:
            spark: the session that its slots run in, classic or Spark Connect.
            layer: acker mode: the vertex that tracks its records; with `FTStatus.OFF` nothing is tracked, and the
                loss of a slot ends the job.
            name: of the topology; keep it over restarts.
            parallelism: of operators that have none of their own. The highest one is the number of task slots that
                the job holds.
            restart: what becomes of a slot that is lost, and of a source that fails; see `default_restart`. Each slot
                and each source counts by itself.
            options: batching, credits, heartbeats.
            checkpointing: barrier mode: its options. Either this or ``layer``.
            board: barrier mode: ``FTLayer.connect(…)`` of a vertex that shows the topology beside others, takes orders
                to it (`ftlayer savepoint` and so on), and keeps what it said last. It tracks nothing of it, and the
                topology does not depend on it. Without it this process answers tools of its user itself, while it
                runs.

        Raises `ConfigError`.
        """
        check_is_session(spark)
        if (layer is None) == (checkpointing is None):
            raise ConfigError(
                "layer, checkpointing: give one of them: layer=FTLayer.embedded(…) follows every record (acker mode), "
                "checkpointing=CheckpointConfig(…) takes snapshots of all state (barrier mode)"
            )
        if layer is not None and not hasattr(layer, "client_for"):
            raise ConfigError(
                f"layer: expected FTLayer.embedded(…) or FTLayer.connect(…), got {shown(layer)}"
            )
        if checkpointing is not None:
            check_instance(checkpointing, "checkpointing", CheckpointConfig)
        if board is not None and (layer is not None or not hasattr(board, "client_for")):
            raise ConfigError(
                "board: expected FTLayer.connect(…), beside checkpointing=… (with layer=… it announces itself "
                f"to that one's vertex), got {shown(board)}"
            )
        if options is not None:
            check_instance(options, "options", TopologyOptions)
            _check_metrics(options, layer, board)
        check_strategy(restart, "restart")
        self._spark = spark
        self._layer = layer
        self._board = board
        self._console: ConsoleProcess | None = None
        self._checkpointing = checkpointing
        self._restart = restart
        self._options = TopologyOptions() if options is None else options
        status = FTStatus.OFF if layer is None else layer.status
        self._builder = GraphBuilder(
            name,
            parallelism=parallelism,
            status=status,
            restart=restart,
            open_letters=None if layer is None else lambda streams: layer.dead_letter_reader(spark, *streams),
        )
        self._built = users_line()
        self._unstarted: Unstarted | None = None

    @property
    def name(self) -> str:
        """The topology's name."""
        return self._builder.name

    def __repr__(self) -> str:
        tracked = "acker mode" if self._layer is not None and self._layer.enabled else "untracked"
        mode = tracked if self._checkpointing is None else "barrier mode"
        return f"StreamEnvironment({self.name!r}, {mode})"

    def source(
        self,
        source: Any,
        schema: Schema | None = None,
        *,
        options: Mapping[str, str] | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
        retry: StreamOptions | None = None,
        retry_on: Errors | None = None,
        dead_on: Errors | None = None,
        max_failing: str | int | None = None,
        restart: RestartStrategy | None = None,
        replay: str = "store",
    ) -> DataStream:
        """Begin a stream; arguments and errors as `ftlayer.topology.builder.GraphBuilder.source`."""
        if retry is not None and self._layer is not None:
            check_instance(retry, "source: retry", StreamOptions)
            self._layer._retries.check(retry, "source: retry")
        if replay != "store" and self._checkpointing is not None:
            raise ConfigError(
                "source: replay: it is about acker mode; with checkpoints a source is read again anyway: leave it out"
            )
        if self._unstarted is None:
            self._unstarted = Unstarted(
                f"topology {self.name!r} was built here and never executed: call .execute() or .execute_async() of "
                "its StreamEnvironment",
                self._built,
            )
        return self._builder.source(
            source,
            schema,
            options=options,
            uid=uid,
            parallelism=parallelism,
            retry=retry,
            retry_on=retry_on,
            dead_on=dead_on,
            max_failing=max_failing,
            restart=restart,
            replay=replay,
        )

    def job_graph(self) -> JobGraph:
        """Return what will run; raises where the topology could not be tracked, naming the operators."""
        self._settle()
        graph = self._builder.build()
        if self._checkpointing is not None:
            check_forced(graph, self._checkpointing)
            return job_graph(
                graph,
                max_parallelism=self._checkpointing.max_parallelism,
                failures=self._checkpointing.failures,
                keeps_letters=self._checkpointing.directory is not None or self._board is not None,
            )
        assert self._layer is not None
        layer, retries = self._layer, self._layer._retries
        return job_graph(graph, layer.status, layer.stream_options, rules=retries.rules, limit=retries.limit)

    def explain(self) -> str:
        """Return the topology in words: its chains, how records get from one to the next, where the vertex comes in."""
        return explain(self.job_graph())

    def to_mermaid(self) -> str:
        """Return the topology as a Mermaid flowchart."""
        return to_mermaid(self.job_graph())

    def to_dot(self) -> str:
        """Return the topology in Graphviz's language."""
        return to_dot(self.job_graph())

    def execute(
        self, *, stop_at_latest: bool = False, restore_from: str | None = None, console: int | None = None
    ) -> Job:
        """Run the topology to its end, with a line of progress; Ctrl-C cancels it and is raised.

        Arguments and errors as `execute_async`; also raises what the job fails with.
        """
        hide_spark_bar(self._spark)
        return follow(
            self.execute_async(stop_at_latest=stop_at_latest, restore_from=restore_from, console=console)
        )

    def execute_async(
        self, *, stop_at_latest: bool = False, restore_from: str | None = None, console: int | None = None
    ) -> Job:
        """Start the topology and return its handle; it runs in threads of this process and slots of the session.

        In acker mode, what an earlier run of the same name left pending is replayed first. If another driver still has
        that run, this one takes over, and that one ends with a `StaleOwnerError`.

        Args:
            stop_at_latest: readers end at the offset that is their latest now, so that the job ends.
            restore_from: barrier mode: begin with this checkpoint or savepoint, the path or URL of its directory;
                whatever becomes of the job, it is left as it is. `LATEST`: with the latest one of this topology in
                ``directory``, if there is any; it is subsumed by the job's own ones. Where the job has ended for good
                (by itself, or stopped with a savepoint) nothing is run: the handle is of a job that has ended, with
                its `Job.result`. None, or a path, begins a new run and forgets that result.
            console: the port on loopback at which the console shows the topology in a browser, 0 for any free one; it
                ends with this program. None: there is none.

        Raises:
            InvalidTopologyError: the topology cannot be tracked, or cannot be sent to the slots; names the operator.
            ConfigError: the session cannot run slots, or a topology of this name runs already.
            JobStartError: there are too few task slots, or the driver cannot be reached.
            SessionLostError: Spark's JVM, or its Connect server, ends meanwhile.
            VertexError: the vertex does not answer, or the layer is closed (`LayerClosedError`).
            CheckpointError: there is nothing to restore from there, it is damaged, or it does not fit the topology.
            MachineError: the extra ``console`` is not installed.
        """
        self._settle()
        check_bool(stop_at_latest, "stop_at_latest")
        if console is not None:
            check_int(console, "console", least=0, most=MAX_PORT)
        if restore_from is not None:
            check_text(
                restore_from, "restore_from", "the directory of a checkpoint or savepoint, or 'latest'"
            )
        if restore_from is not None and self._checkpointing is None:
            raise ConfigError(
                "restore_from: there are checkpoints in barrier mode alone; give checkpointing=…"
            )
        for layer in (self._layer, self._board):
            if layer is not None:
                layer._check_open()
        graph = self.job_graph()
        ended = ended_before(graph.name, self._checkpointing, restore_from)
        if ended is not None:
            logger.warning("%s", ended)
            return Job(EndedJob(ended))
        session.check_session(self._spark)
        if self._checkpointing is not None:
            check_place(graph, self._checkpointing, has_vertex=self._board is not None)
            warn_of_losses(self._builder.build())
        taken = session.taken_task_slots()
        taken.take(graph.name, graph.slots)
        try:
            with tells_of_its_end(self._spark):
                if console is not None:
                    self._show(console)
                return self._start(graph, stop_at_latest, restore_from)
        except BaseException:
            taken.give_back(graph.name)
            raise

    def _settle(self) -> None:
        if self._unstarted is not None:
            self._unstarted.settle()

    def _show(self, port: int) -> None:
        """Start the console over the topology's vertex, or over the board that this process serves."""
        from ftlayer.monitor.console.options import ConsoleOptions, ConsoleProcess

        options = ConsoleOptions(f"127.0.0.1:{port}")
        tracked = self._layer is not None and self._layer.status is FTStatus.ON
        layer = self._layer if tracked else self._board
        if layer is not None:
            layer.client_for(self._spark)  # which places an embedded vertex
            layer._show_console(options)
        elif self._console is None:
            self._console = ConsoleProcess(options)
            tell_anyway(f"ftlayer: the console is at {self._console.link}")

    def _start(self, graph: JobGraph, stop_at_latest: bool, restore_from: str | None) -> Job:
        session.check_task_slots(self._spark, graph.slots, graph.name)
        place = session.place_of(self._spark)
        prepare_workers(self._spark)
        tracked = self._layer is not None and self._layer.status is FTStatus.ON
        client = self._layer.client_for(self._spark) if self._layer is not None and tracked else None
        board = self._layer if tracked else self._board
        announcer, links = local_announcer() if board is None else board._job_announcer, links_of(self._spark)
        if board is None:
            push_otlp(self._options.otlp_endpoint)
        if self._options.metrics_port is not None:
            tell_prometheus(place.listen, self._options.metrics_port)
        job = JobThread(f"{graph.name}-{uuid.uuid4().hex[:12]}")
        vertex = None if client is None else JobVertexCalls(client, graph.name, job.job, dict(graph.options))
        checkpoints = plan = None
        key = os.urandom(KEY_BYTES)
        if self._checkpointing is not None:
            checkpoints, plan = open_checkpoints(graph, self._checkpointing, job.job, restore_from, key)
            if self._board is not None:
                keeper_of_letters = self._board.client_for(self._spark)
                checkpoints = replace(
                    checkpoints, letters=replace(checkpoints.letters, vertex=keeper_of_letters)
                )
        slots: SlotModeFactory = UntrackedSlotFactory()
        if plan is not None:
            slots = BarrierSlotFactory(plan)
        elif client is not None:
            slots = AckerSlotFactory(client)
        # Before anything is open: its variables may be wrong.
        tracing = tracing_of(os.environ) if client is not None else None
        boxes = None if self._checkpointing is None else self._checkpointing.state_directory
        server, order = open_server(job, graph, place, self._options, slots, key, boxes)
        try:
            runner = session.SlotRunner(session.pickled_order(replace(order, tracing=tracing)), run_slot)
            if vertex is not None:
                _check_reachable(place, vertex.client)
                # Behind all that can be wrong with this program: from here on an earlier run ends.
                vertex.claim()
                vertex.open()
                self._watch_dead(vertex)
        except BaseException:
            server.close()
            raise
        mode: OpenMode = UntrackedDriver
        keeper: OpenKeeper = open_untracked
        if checkpoints is not None:
            mode, keeper = partial(BarrierDriver, checkpoints), checkpoints.readers.open
        elif vertex is not None:
            mode, keeper = partial(AckerDriver, vertex), vertex_keepers(vertex, graph)
        mode_word = "acker" if tracked else "off" if checkpoints is None else "barrier"
        restart = default_restart() if self._restart is None else copy.deepcopy(self._restart)
        planners = Planners(
            graph,
            keeper,
            key,
            send=job.send_splits,
            failed=job.broken,
            stop_at_latest=stop_at_latest,
            backlog=job.source_backlog if _minds_backlog(self._checkpointing) else None,
        )
        job.start(
            JobParts(
                graph,
                self._options,
                restart,
                server,
                session.SlotSubmitter(
                    self._spark, job.job, graph.name, runner, job.spark_job_ended, job.session_over
                ),
                planners,
                mode,
                on_over=lambda: session.taken_task_slots().give_back(graph.name),
            )
        )
        telling = TopologyTelling(job, graph, mode_word, self._checkpointing, links)
        announcer.add(telling)
        if self._checkpointing is not None and self._checkpointing.directory is not None:
            # Another, since each is one thread's.
            kept = TopologyTelling(job, graph, mode_word, self._checkpointing, links, telling.since_ms)
            kept_reports().add(kept, self._checkpointing.directory)
        return Job(job)

    def _watch_dead(self, vertex: JobVertexCalls) -> None:
        assert self._layer is not None
        for stream in vertex.streams:
            self._layer.watch_dead(stream)


def _check_metrics(options: TopologyOptions, layer: FTLayer | None, board: FTLayer | None) -> None:
    told_by_vertex = board is not None or (layer is not None and layer.status is FTStatus.ON)
    for name, served in (("metrics_port", "--metrics-port"), ("otlp_endpoint", "--otlp")):
        if getattr(options, name) is not None and told_by_vertex:
            raise ConfigError(
                f"options: {name}: the vertex tells of this topology; give it to FTLayer.embedded({name}=…), or "
                f"ftlayer serve {served}"
            )


def _minds_backlog(config: CheckpointConfig | None) -> bool:
    return config is not None and config.interval_during_backlog is not None


def _check_reachable(place: session.Place, client: VertexClient) -> None:
    if parse_address(client.address, "address").is_here and not place.is_local:
        raise ConfigError(
            f"the vertex listens on {client.address}, which other machines cannot reach: it was started before a "
            "session on a cluster was there. Make the session first, or a new FTLayer"
        )


def open_server(
    job: JobThread,
    graph: JobGraph,
    place: session.Place,
    options: TopologyOptions,
    mode: SlotModeFactory,
    key: bytes,
    boxes: str | None = None,
) -> tuple[ControlServer, Order]:
    """Listen for slots, and return what the first one has to know; ``boxes`` as for `last_words`."""
    noted = [each.uid for each in graph.vertices if each.failures] or [each.uid for each in graph.vertices]

    def lost(slot: int, instance: str, reason: str) -> None:
        deaths = last_words(boxes, job.job, instance, noted)
        job.slot_lost(slot, instance, died(deaths[0]).partition(": ")[2] if deaths else reason)

    token = secrets.token_urlsafe(32)
    certificate = None
    if not place.is_local:
        # Late, because most jobs need no certificate.
        from ftlayer.transport.tls import make_certificate

        certificate = make_certificate([TLS_NAME])
    sockets = SocketDirectory.make() if place.own_executors else None
    listen = Address(place.listen) if sockets is None else sockets.socket("driver")
    try:
        server = ControlServer(
            listen=listen,
            token=token,
            job=job.job,
            slots=graph.slots,
            certificate=None if certificate is None else (certificate.cert, certificate.key),
            on_message=job.slot_said,
            on_lost=lost,
            sockets=sockets,
        )
    except (pa.ArrowException, OSError) as error:
        raise JobStartError(
            f"the driver cannot listen on {listen.listen}, where slots were to reach it ({error}): set "
            "spark.driver.bindAddress to an address of this machine, and spark.driver.host to how others reach it"
        ) from error
    address = server.address
    endpoint = Endpoint(str(address if address.path else replace(address, host=place.advertised)), token)
    if certificate is not None:
        endpoint = replace(
            endpoint,
            root_certs=certificate.cert,
            tls_name=TLS_NAME,
            client_cert=certificate.cert,
            client_key=certificate.key,
        )
    return server, SlotOrder(
        job=job.job,
        slot=0,
        coordinator=endpoint,
        graph=graph,
        options=options,
        mode=mode,
        listen_on="127.0.0.1" if place.is_local else "",
        tls_cert=None if certificate is None else certificate.cert,
        tls_key=None if certificate is None else certificate.key,
        key=key,
        sockets="" if sockets is None else sockets.path,
    )
