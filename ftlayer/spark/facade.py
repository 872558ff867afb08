"""`FTLayer`: the door to fault tolerance for a PySpark program. It holds the vertex and wraps sources."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack, overload

from ftlayer.checkpoint.dead_letters.letter import DeadLetter, json_text, letter_of, shown_record
from ftlayer.common import checks
from ftlayer.common.rules.circuit import Limit, limit_of
from ftlayer.common.rules.restart import BACKOFF
from ftlayer.config import FTStatus, VertexKeywords, VertexOptions
from ftlayer.errors import ConfigError
from ftlayer.functions.retry_rules import Errors, RetryRules, rules_of
from ftlayer.monitor.sources import user_name
from ftlayer.spark.connection import MAX_ROWS, FTLayerEngine, check_streams, stream_options_of
from ftlayer.spark.deliveries.ingest_reader import IngestStream, stream_of_ingest
from ftlayer.spark.plan import stream_plan
from ftlayer.spark.sessions import check_is_session, prepare_workers
from ftlayer.spark.tracked import TrackedStream
from ftlayer.transport.address import MAX_PORT
from ftlayer.vertex import calls
from ftlayer.vertex.client.client import VertexClient

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from ftlayer.checkpoint.dead_letters.reader import DeadLetterReader
    from ftlayer.monitor.console.options import ConsoleProcess


PAGE = 1_000

COLUMNS = (
    "key string, stream string, state string, root string, origin string, attempt int, not_before timestamp, reason "
    "string, operator string, traceback string, history array<struct<number: int, at: timestamp, reason: string, "
    "operator: string, place: string, traceback: string>>, record string"
)
"""The columns of `record_frame` (DDL). Ids and ``key`` are as the command shows and takes them, ``record`` is the
payload as JSON."""


def list_records(client: VertexClient, state: str, stream: str = "") -> Iterator[calls.RecordInfo]:
    """List all records in a state ("pending", "waiting", "delivery", "dead"), page by page."""
    after = b""
    while True:
        reply = client.call(calls.ListRecords(state, stream, PAGE, after))
        yield from reply.records
        after = reply.more
        if not after:
            return


def record_frame(spark: SparkSession, client: VertexClient, state: str, stream: str = "") -> DataFrame:
    check_is_session(spark)
    rows = [record_row(info) for info in list_records(client, state, stream)]
    return spark.createDataFrame(rows, COLUMNS)


def record_row(info: calls.RecordInfo) -> tuple[Any, ...]:
    import json
    from datetime import UTC, datetime

    def at(wall_ms: int) -> datetime | None:
        return datetime.fromtimestamp(wall_ms / 1000, UTC) if wall_ms > 0 else None

    return (
        info.key.hex(),
        info.stream,
        info.state,
        f"{info.root:016x}",
        f"{info.origin:016x}",
        info.attempt,
        at(info.not_before_ms),
        info.reason,
        info.operator,
        info.traceback,
        [
            (each.number, at(each.at_ms), each.reason, each.operator, each.place, each.traceback)
            for each in info.history
        ],
        json.dumps(shown_record(info.payload), default=json_text, ensure_ascii=False),
    )


_WORDS = {
    "start execute awaittermination run": "a layer is no query: layer.source(…).….sink(…, checkpoint=…).start() starts "
    "one, and what that returns has .awaitTermination()",
    "read readstream load fromsource addsource": "read with spark.readStream, and wrap it: layer.source(frame, name=…)",
    "write writestream sink map filter keyby": "it belongs to a stream: layer.source(frame, name=…) returns one",
    "stop shutdown": ".close() stops its vertex; a query is stopped by its own .stop()",
    "environment streamenvironment topology": "StreamEnvironment(spark, layer, name=…) is a topology over it",
    "getorcreate builder": "make one with FTLayer.embedded(directory), or FTLayer.connect(address, token=…)",
}


@checks.known_options
class FTLayer(FTLayerEngine, checks.UserFacing, words=_WORDS):
    """A vertex, and how records are retried. Make one with `embedded` or `connect`; close it at the end."""

    @classmethod
    @checks.known_options
    def embedded(
        cls,
        path: str | Path,
        *,
        timeout: checks.Duration = "30s",
        max_attempts: int | None = 5,
        backoff: checks.Duration | Sequence[checks.Duration] = BACKOFF,
        jitter: float = 0.1,
        max_pending: int = 1_000_000,
        max_rows: int = MAX_ROWS,
        strict: bool = True,
        status: FTStatus = FTStatus.ON,
        retry_on: Errors | None = None,
        dead_on: Errors | None = None,
        on_dead: Callable[[DeadLetter], object] | None = None,
        max_failing: str | int | None = None,
        **vertex: Unpack[VertexKeywords],
    ) -> FTLayer:
        """Keep the vertex as a child process of this driver, with its store in ``path``.

        Args:
            path: directory of the store; made if missing.
            timeout: how long a record handed to another query (`TrackedStream.emit`) may take.
            max_attempts: runs a record gets, the first included, before it is a dead letter; None: any number.
            backoff: pause before each further attempt; the last one serves all later ones. A list has no more pauses
                than there are further attempts.
            jitter: share of a pause (0 to 1) that is drawn at random.
            max_pending: records of a source that may be in flight before intake waits.
            max_rows: rows that the vertex delivers to one batch.
            strict: every record has to be accounted for; see `TrackedStream.transform`.
            status: `FTStatus.OFF` runs the same program as plain Spark, and starts no vertex.
            retry_on: the failures that are worth another attempt: exception classes, or a function of the exception
                that says yes or no. Whatever else is raised makes a dead letter at once.
            dead_on: the failures that are not, asked before ``retry_on``. A source and an operator may have rules of
                their own; the narrowest that says something decides.
            on_dead: called in this program, in a thread of its own, with each dead letter (`DeadLetter`) of the queries
                and topologies that it runs: at least once each, in the order of their death; see `watch_dead`.
            max_failing: a share of the records of the last minute (``"5%"``) or a number of them a minute (``100``,
                ``"100/min"``). While more fail, of those that another attempt might help, each wrapped query holds its
                batch and tries it again, and each topology pauses its sources and tries a few records, after 1 s, 2 s,
                … up to a minute: no attempt is used up, and no dead letter made.
            vertex: further fields of `ftlayer.config.VertexOptions` (durability, max_store_bytes, …).

        Raises `ConfigError` naming the option. The vertex starts with the first query that needs it.
        """
        own = [name for name in inspect.signature(FTLayer.embedded).parameters if name != "vertex"]
        known = own + [field.name for field in fields(VertexOptions) if field.name not in own]
        checks.check_known(vertex, known, "FTLayer.embedded")
        vertex_options = VertexOptions(path, **vertex)
        buckets = vertex_options.timeout_buckets
        return cls(
            vertex_options,
            stream_options_of(timeout, max_attempts, backoff, jitter, max_pending, buckets),
            status=status,
            strict=strict,
            max_rows=max_rows,
            rules=rules_of(retry_on, dead_on, "FTLayer.embedded"),
            on_dead=on_dead,
            limit=limit_of(max_failing, "FTLayer.embedded"),
        )

    @classmethod
    @checks.known_options
    def connect(
        cls,
        address: str,
        *,
        token: str,
        root_certs: bytes | None = None,
        client_pem: bytes | None = None,
        timeout: checks.Duration = "30s",
        max_attempts: int | None = 5,
        backoff: checks.Duration | Sequence[checks.Duration] = BACKOFF,
        jitter: float = 0.1,
        max_pending: int = 1_000_000,
        max_rows: int = MAX_ROWS,
        strict: bool = True,
        status: FTStatus = FTStatus.ON,
        retry_on: Errors | None = None,
        dead_on: Errors | None = None,
        on_dead: Callable[[DeadLetter], object] | None = None,
        max_failing: str | int | None = None,
    ) -> FTLayer:
        """Use a vertex that ``ftlayer serve`` runs; arguments as in `embedded` and `VertexClient`."""
        buckets = VertexOptions.timeout_buckets
        options = stream_options_of(timeout, max_attempts, backoff, jitter, max_pending, buckets)
        return cls(
            VertexClient(address, token, root_certs=root_certs, client_pem=client_pem, client_id="driver"),
            options,
            status=status,
            strict=strict,
            max_rows=max_rows,
            rules=rules_of(retry_on, dead_on, "FTLayer.connect"),
            on_dead=on_dead,
            limit=limit_of(max_failing, "FTLayer.connect"),
        )

    def __enter__(self) -> FTLayer:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            checks.forgive_unstarted()
        try:
            self.close()
        except KeyboardInterrupt:
            if isinstance(error, KeyboardInterrupt):
                # The second one, of a user in a hurry: the first says the same.
                raise KeyboardInterrupt from None
            raise

    @property
    def address(self) -> str:
        """Where the vertex is."""
        return self.client.address

    @property
    def token(self) -> str:
        """The vertex's token."""
        return self.client.token

    @property
    def root_certs(self) -> bytes | None:
        """The certificate that the vertex is known by, if it is one of its own."""
        return self.client.root_certs

    @property
    def client_pem(self) -> bytes | None:
        """The certificate and key that the vertex asks its clients for, if it does."""
        return self.client.client_pem

    def console(
        self,
        *,
        port: int = 0,
        login_file: str | Path | None = None,
        mask_payloads: bool = False,
        edit_with: str | Sequence[str] = (),
    ) -> ConsoleProcess:
        """Show this layer's vertex, its queries and topologies in a browser; return the console, which has a ``link``.

        It listens on loopback, in a process of its own that ends with this program, by `close`, or by its ``stop``.
        Asked again, the console that runs is returned. For other machines run ``ftlayer console``.

        Args:
            port: where it listens; 0: any free port.
            login_file: who may log in, a line ``operator|reader NAME TOKEN`` a user; None: one operator, by the link.
            mask_payloads: show types and lengths in place of what records hold.
            edit_with: functions, as ``module:function``, that many dead letters may be edited by.

        Raises `MachineError` where the extra ``console`` is not installed, and `ConfigError` naming the option.
        """
        checks.check_int(port, "port", least=0, most=MAX_PORT)
        checks.check_bool(mask_payloads, "mask_payloads")
        from ftlayer.monitor.console.options import ConsoleOptions

        file = None if login_file is None else Path(login_file)
        functions = (edit_with,) if isinstance(edit_with, str) else tuple(edit_with)
        options = ConsoleOptions(
            f"127.0.0.1:{port}", login_file=file, mask_payloads=mask_payloads, edit_with=functions
        )
        return self._show_console(options)

    # ------------------------------------------------------------ sources

    @overload
    def source(
        self,
        frame: DataFrame,
        *,
        name: str,
        key: str | Sequence[str] = (),
        retry_on: Errors | None = None,
        dead_on: Errors | None = None,
        max_failing: str | int | None = None,
    ) -> TrackedStream: ...

    @overload
    def source(
        self,
        frame: IngestStream,
        *,
        retry_on: Errors | None = None,
        dead_on: Errors | None = None,
        max_failing: str | int | None = None,
    ) -> TrackedStream: ...

    def source(
        self,
        frame: DataFrame | IngestStream,
        *,
        name: str = "",
        key: str | Sequence[str] = (),
        retry_on: Errors | None = None,
        dead_on: Errors | None = None,
        max_failing: str | int | None = None,
    ) -> TrackedStream:
        """Wrap a streaming DataFrame (or an `ingest`): its records are tracked from here on.

        Args:
            frame: ``spark.readStream.….load()``, or what `ingest` returned.
            name: the source's name; it has to stay the same over restarts. An ingest has one already.
            key: columns whose hash, Spark's own, is stored with a record.
            retry_on: as for `embedded`, for what this source's records fail with.
            dead_on: the same.
            max_failing: the same.

        Raises `InvalidTopologyError`, `UnsupportedError` or `UnhashableKeyError` for what cannot be wrapped.
        """
        self._check_open()
        rules = rules_of(retry_on, dead_on, f"source {name!r}").within(self._retries.rules)
        limit = limit_of(max_failing, f"source {name!r}") or self._retries.limit
        if isinstance(frame, IngestStream):
            return self._ingested(frame, rules, limit)
        _check_name(name)
        stream_plan.check_source(frame, name)
        wanted = (key,) if isinstance(key, str) else key
        if not isinstance(wanted, list | tuple):
            raise ConfigError(f"source {name!r}: key: expected names of columns, got {checks.shown(key)}")
        keys = stream_plan.check_columns(frame.sparkSession, frame.schema, wanted, f"source {name!r}: key")
        if keys:
            stream_plan.check_key(frame.schema, keys, f"source {name!r}: key")
        self._place(frame.sparkSession)
        prepare_workers(frame.sparkSession)
        spec = stream_plan.SourceSpec(frame, name, keys, rules=rules, limit=limit)
        return TrackedStream(stream_plan.StreamPlan(self, spec, frame.schema))

    def resume(
        self,
        frame: DataFrame,
        *,
        name: str,
        carrier: str = "ft",
        retry_on: Errors | None = None,
        dead_on: Errors | None = None,
        max_failing: str | int | None = None,
    ) -> TrackedStream:
        """Go on tracking records that another query handed on with `TrackedStream.emit`.

        ``carrier`` is the column of ``frame`` (binary) with their ids. A record that fails here is replayed
        from where it came into the other query. ``retry_on``, ``dead_on`` and
        ``max_failing`` as for `source`.
        """
        self._check_open()
        rules = rules_of(retry_on, dead_on, f"resume {name!r}").within(self._retries.rules)
        limit = limit_of(max_failing, f"resume {name!r}") or self._retries.limit
        _check_name(name)
        stream_plan.check_source(frame, name)
        (carrier,) = stream_plan.check_columns(
            frame.sparkSession, frame.schema, [carrier], f"resume {name!r}: carrier"
        )
        if dict(frame.dtypes)[carrier] != "binary":
            raise ConfigError(
                f"resume {name!r}: column {carrier!r} is {dict(frame.dtypes)[carrier]}, not binary"
            )
        self._place(frame.sparkSession)
        prepare_workers(frame.sparkSession)
        spec = stream_plan.SourceSpec(frame, name, carrier=carrier, rules=rules, limit=limit)
        return TrackedStream(stream_plan.StreamPlan(self, spec, frame.schema))

    def ingest(self, name: str, schema: StructType | str) -> IngestStream:
        """Return an intake for records that no source can give again; pass it to `source` to process them."""
        from ftlayer.spark.tracked import struct_of

        self._check_open()
        _check_name(name)
        if not self.enabled:
            raise ConfigError(
                f"ingest {name!r}: its records are kept in the vertex, and FTStatus.OFF starts none; with OFF read "
                "from a source that Spark has"
            )
        struct = struct_of(schema, f"ingest {name!r}")
        self.client.call(calls.OpenStream(stream_of_ingest(name), self.stream_options))
        return IngestStream(name, struct, self.client)

    def _ingested(self, ingest: IngestStream, rules: RetryRules, limit: Limit | None) -> TrackedStream:
        from pyspark.sql import SparkSession

        if not self.enabled:
            raise ConfigError(
                f"ingest {ingest.name!r} has its records in the vertex: it cannot be read with FTStatus.OFF"
            )
        spark = SparkSession.active()
        stream_plan.check_session(spark)
        prepare_workers(spark)
        frame = spark.createDataFrame([], ingest.schema)
        spec = stream_plan.SourceSpec(frame, ingest.name, ingest=ingest.name, rules=rules, limit=limit)
        return TrackedStream(stream_plan.StreamPlan(self, spec, ingest.schema))

    # ------------------------------------------------------------ what the vertex holds

    def pending(self, spark: SparkSession) -> DataFrame:
        """Records in flight between queries, or ingested and not delivered yet."""
        return record_frame(spark, self.client, "pending")

    def waiting(self, spark: SparkSession) -> DataFrame:
        """Failed records that wait for their replay."""
        return record_frame(spark, self.client, "waiting")

    def deliveries(self, spark: SparkSession) -> DataFrame:
        """Records that are due, or were given to a batch that is not through."""
        return record_frame(spark, self.client, "delivery")

    def dead_letters(self, spark: SparkSession) -> DataFrame:
        """Records whose attempts are used up."""
        return record_frame(spark, self.client, "dead")

    def list_dead(self) -> Iterator[DeadLetter]:
        """List dead letters without Spark."""
        return map(letter_of, list_records(self.client, "dead"))

    def dead_letter_stream(self, spark: SparkSession, *streams: str) -> DataFrame:
        """Return the dead letters of streams as a streaming DataFrame: those that are there, then those to come.

        An ordinary one: write it anywhere, or wrap it with `source`. Its position is in the checkpoint of the query
        that reads it; each letter comes at least once, unless it was requeued or purged before. Columns:
        `ftlayer.checkpoint.dead_letters.letter.LETTER_SCHEMA`. `TrackedStream.dead_letters` and
        `DataStream.dead_letters` name the streams by themselves.
        """
        return self._letters_of(spark, streams)

    def dead_letter_reader(self, spark: SparkSession, *streams: str) -> DeadLetterReader:
        """Return a source of the dead letters of streams, for a topology's `StreamEnvironment.source`.

        Raises `ConfigError` unless one stream or more is named.
        """
        from ftlayer.checkpoint.dead_letters.reader import DeadLetterReader

        check_streams(streams, "dead_letter_reader")
        return DeadLetterReader(self._another_client(self.client_for(spark), "dead-letters"), streams)

    def requeue(self, keys: Iterable[str | bytes]) -> int:
        """Give dead letters (by their ``key``) their attempts back; return how many there were."""
        call = calls.Requeue(_keys(keys), user_name())  # Wrong keys open no store.
        return self.client.call(call).count

    def purge(self, keys: Iterable[str | bytes]) -> int:
        """Delete dead letters permanently; return how many there were."""
        call = calls.Purge(_keys(keys), user_name())
        return self.client.call(call).count

    def stats(self) -> dict[str, float]:
        """Counters and gauges of the vertex."""
        return self.client.call(calls.Stats()).values


def _keys(keys: Iterable[str | bytes]) -> tuple[bytes, ...]:
    if isinstance(keys, str | bytes) or not isinstance(keys, Iterable):
        raise ConfigError(
            f"keys: expected a list of keys of dead letters, got {checks.shown(keys)}; for one write [key]"
        )
    found = []
    for key in keys:
        try:
            found.append(key if isinstance(key, bytes) else bytes.fromhex(key))
        except (TypeError, ValueError):
            raise ConfigError(
                f"keys: expected keys of dead letters as `list_dead` and `ftlayer dead list` show them, hexadecimal "
                f"text or bytes, got {checks.shown(key)}"
            ) from None
    return tuple(found)


def _check_name(name: str) -> None:
    if name == "":
        raise ConfigError(
            "name: a source needs one that stays the same over restarts: source(frame, name='orders')"
        )
    if not isinstance(name, str) or not all(char.isalnum() or char in "_-." for char in name):
        raise ConfigError(
            f"name: {checks.shown(name)} is no name of a source; use letters, digits, '_', '-', '.', and keep it "
            "over restarts"
        )
