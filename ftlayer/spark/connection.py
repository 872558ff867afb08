"""What the queries and topologies of an `FTLayer` hold of it: its vertex, and how records are retried."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from ftlayer.checkpoint.dead_letters.announcer import Announcer
from ftlayer.checkpoint.dead_letters.letter import DeadLetter
from ftlayer.common import checks
from ftlayer.common.checks import Duration, check_int
from ftlayer.common.printable import shown_url, tell, tell_anyway
from ftlayer.common.rules.circuit import Limit
from ftlayer.common.rules.restart import check_pauses, pauses_of
from ftlayer.config import FTStatus, VertexOptions
from ftlayer.errors import ConfigError, LayerClosedError, UnsupportedError
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.monitor.announcer import JobAnnouncer
from ftlayer.spark.sessions import is_connect, stream_reader
from ftlayer.vertex.calls import StreamOptions
from ftlayer.vertex.calls.common import LONGEST_MS
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.service.embedded import EmbeddedVertex

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ftlayer.monitor.console.options import ConsoleOptions, ConsoleProcess

CLOSED = "the layer is closed: use it, and what it gave out, before FTLayer.close, or make another one"


@dataclass(frozen=True)
class RetryDefaults:
    """Beside its stream options: what a layer's records are retried by where source and operator say nothing.

    Attributes:
        rules: say which failures are worth another attempt.
        limit: how many may fail; None: any number.
        least_timeout_ms: what an embedded vertex can follow at least; None: the vertex is another program's.
    """

    rules: RetryRules
    limit: Limit | None
    least_timeout_ms: int | None

    def check(self, options: StreamOptions, what: str) -> None:
        """Raise `ConfigError` unless an embedded vertex can follow records for this ``timeout_ms``."""
        if self.least_timeout_ms is not None:
            check_int(options.timeout_ms, f"{what}: timeout_ms", least=self.least_timeout_ms, most=LONGEST_MS)


def stream_options_of(
    timeout: Duration,
    max_attempts: int | None,
    backoff: Duration | Sequence[Duration],
    jitter: float,
    max_pending: int,
    buckets: int,
) -> StreamOptions:
    """Return a layer's options of retries as those of a stream; `ConfigError` names the option.

    ``buckets``: in how many the vertex counts a timeout.
    """
    timeout_ms = checks.duration_ms(timeout, "timeout", least=buckets - 1)
    options = StreamOptions(timeout_ms, max_attempts, pauses_of(backoff), jitter, max_pending)
    check_pauses(options, "FTLayer")
    return options


MAX_ROWS = 100_000


def check_streams(streams: Sequence[str], method: str) -> None:
    """Raise `ConfigError` unless one stream or more is named, each by a text."""
    if not streams:
        raise ConfigError(f"{method}: name one stream or more, '<query>/<source>'")
    checks.check_texts(streams, f"{method}: stream", "a name like '<query>/<source>'")


class FTLayerEngine:
    """An `FTLayer` without the methods by which a user asks for sources and dead letters.

    Attributes:
        status: whether fault tolerance is on.
        stream_options: what records are retried by.
        strict: whether rows that get lost in a `TrackedStream.transform` count as failed.
        max_rows: rows that the vertex delivers to one batch.
    """

    def __init__(
        self,
        vertex: VertexOptions | VertexClient,
        options: StreamOptions,
        *,
        status: FTStatus = FTStatus.ON,
        strict: bool = True,
        max_rows: int = MAX_ROWS,
        rules: RetryRules = NO_RULES,
        on_dead: Callable[[DeadLetter], object] | None = None,
        limit: Limit | None = None,
    ) -> None:
        """Use `FTLayer.embedded` or `FTLayer.connect` instead."""
        self._vertex_options = vertex if isinstance(vertex, VertexOptions) else None
        self._client = vertex if isinstance(vertex, VertexClient) else None
        self._embedded: EmbeddedVertex | None = None
        # None: tasks run as this user on this machine.
        self._host: str | None = None
        self.stream_options = options
        least_ms = vertex.timeout_buckets - 1 if isinstance(vertex, VertexOptions) else None
        self._retries = RetryDefaults(rules, limit, least_ms)
        if on_dead is not None:
            checks.check_function(on_dead, "on_dead", takes=1)
        self._on_dead = on_dead
        self._announcer: Announcer | None = None
        self._made_announcer: JobAnnouncer | None = None
        self._others: list[VertexClient] = []
        self._console: ConsoleProcess | None = None
        self._lock = threading.Lock()  # of what is made when it is first needed
        self._closed = False
        self.status = checks.member(status, "status", FTStatus)
        checks.check_bool(strict, "strict")
        self.strict = strict
        check_int(max_rows, "max_rows", least=1)
        self.max_rows = max_rows

    def __repr__(self) -> str:
        if self._vertex_options is not None:
            where = f"embedded, {str(self._vertex_options.path)!r}"
        else:
            where = f"connected, {'' if self._client is None else shown_url(self._client.address)}"
        started = "open" if self._client is not None else "not started"
        state = "closed" if self._closed else started if self.enabled else "off"
        return f"FTLayer({where}, {state})"

    @property
    def enabled(self) -> bool:
        return self.status is FTStatus.ON

    # ------------------------------------------------------------ the vertex

    @property
    def vertex(self) -> EmbeddedVertex | None:
        """The embedded vertex, None if there is none or it was not needed yet."""
        return self._embedded

    @property
    def client(self) -> VertexClient:
        """The connection to the vertex; starts an embedded one if it does not run yet.

        Raises `LayerClosedError` after `close`.
        """
        self._check_open()
        if self._client is None:
            assert self._vertex_options is not None
            from pyspark.sql import SparkSession

            # A vertex may start before a source is wrapped: an ingest's, say.
            session = SparkSession.getActiveSession()
            if session is not None and not is_connect(session):
                self._place(session)
            self._embedded = EmbeddedVertex(self._vertex_options, host=self._host)
            began = time.monotonic()
            self._embedded.start()
            tell(
                f"ftlayer: the vertex of {self._vertex_options.path} is up after {time.monotonic() - began:.1f} s"
            )
            self._client = self._embedded.client(client_id="driver")
        return self._client

    def client_for(self, spark: SparkSession) -> VertexClient:
        """Return the connection to the vertex; an embedded one starts where this session's executors reach it.

        Raises `UnsupportedError` for an embedded vertex and a session of Spark Connect.
        """
        if self._vertex_options is not None and is_connect(spark):
            raise UnsupportedError(
                "over Spark Connect tasks run where the server is, and cannot be told how to reach a vertex that is "
                "embedded in this program: start one with `ftlayer serve` and use FTLayer.connect"
            )
        if self._client is None and not is_connect(spark):
            self._place(spark)
        return self.client

    def _another_client(self, client: VertexClient, label: str) -> VertexClient:
        certs, pem = client.root_certs, client.client_pem
        another = VertexClient(
            client.address, client.token, root_certs=certs, client_pem=pem, client_id=label
        )
        self._others.append(another)  # ends with the layer too
        return another

    def _place(self, spark: SparkSession) -> None:
        """Let an embedded vertex listen where this session's executors can reach it."""
        if self._embedded is None and not (spark.sparkContext.master or "").startswith("local"):
            self._host = str(spark.conf.get("spark.driver.host"))

    # ------------------------------------------------------------ dead letters

    def watch_dead(self, stream: str) -> None:
        """Have ``on_dead`` told of a stream's dead letters; queries and topologies do so when they start.

        Those that were never told come first. How far the callback has come is kept in the vertex, for each stream:
        of two programs with one stream, both are told some. A callback that raises is called again with the same
        letter, after a pause of 1 s that doubles up to a minute; the failure is logged. Does nothing without
        ``on_dead``.
        """
        check_streams([stream], "watch_dead")
        self._check_open()
        if self._on_dead is None:
            return
        if self._announcer is None:
            self._announcer = Announcer(self._another_client(self.client, "on-dead"), self._on_dead)
        self._announcer.watch(stream)

    def _letters_of(self, spark: SparkSession, streams: Sequence[str]) -> DataFrame:
        from ftlayer.checkpoint.dead_letters.reader import FORMAT, DeadLetterSource

        check_streams(streams, "dead_letter_stream")
        client = self.client_for(spark)
        spark.dataSource.register(DeadLetterSource)
        options = {"address": client.address, "token": client.token, "streams": "\n".join(streams)}
        if client.root_certs:
            options["root_certs"] = client.root_certs.decode()
        if client.client_pem:
            options["client_pem"] = client.client_pem.decode()
        # A query may have several of them, of other streams each.
        name = f"ftlayer_dead_letters_{sha256(options['streams'].encode()).hexdigest()[:16]}"
        found: DataFrame = stream_reader(spark, name).format(FORMAT).options(**options).load()
        return found

    # ------------------------------------------------------------ jobs

    @property
    def _job_announcer(self) -> JobAnnouncer:
        """What announces jobs to the vertex, which has to be there by now."""
        self._check_open()
        with self._lock:
            if self._made_announcer is None:
                self._made_announcer = JobAnnouncer(self._another_client(self.client, "announce"))
            return self._made_announcer

    # ------------------------------------------------------------ the console

    def _show_console(self, options: ConsoleOptions) -> ConsoleProcess:
        from ftlayer.monitor.console.options import ConsoleProcess
        from ftlayer.monitor.sources import source_of_client, sources_given

        self._check_open()
        if self._console is None:
            client, vertex = self.client, self._vertex_options
            sources = (
                (source_of_client(client),)
                if vertex is None
                else sources_given([str(vertex.path)], token=lambda: client.token)
            )
            self._console = ConsoleProcess(options, sources)
            tell_anyway(f"ftlayer: the console is at {self._console.link}")
        return self._console

    # ------------------------------------------------------------ its end

    def _check_open(self) -> None:
        if self._closed:
            raise LayerClosedError(CLOSED)

    def close(self) -> None:
        """Stop an embedded vertex; what it holds stays in its store. Stop the queries first.

        Tells ``on_dead`` what it was not told yet, for up to ten seconds. After that every call of the layer, of its
        ingests and of its dead letters' readers raises `LayerClosedError`, and calls that wait for the vertex end with
        it, once the attempt under way has. Closing again does nothing.
        """
        if self._announcer is not None:
            # First: the callback may use the layer.
            self._announcer.close()
        if self._made_announcer is not None:
            # While the vertex is there to hear of the end of jobs.
            self._made_announcer.close()
        self._closed = True
        if self._console is not None:
            self._console.stop()
        for client in (self._client, *self._others):
            if client is not None:
                client.end(LayerClosedError(CLOSED))
        if self._embedded is not None:
            self._embedded.stop()
