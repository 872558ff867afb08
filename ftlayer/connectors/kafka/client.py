"""Kafka: clients of confluent-kafka, and their errors."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, BinaryIO, Literal, cast

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.checkpoint.storage.files import FileOutput, Files
from ftlayer.checkpoint.storage.layout import join
from ftlayer.common.printable import LEAST_SECRET, secrets_in, secrets_of, without_secrets
from ftlayer.connectors.connections import client_library
from ftlayer.errors import CheckpointDamagedError, ConfigError, UncommittableError

logger = logging.getLogger(__name__)


INLINE_BYTES = 1 << 16
"""Rows of this size are in the message itself. It lies in the checkpoint, and is sent to the driver as a whole."""


@dataclass(frozen=True)
class KafkaMessage(WriterCommitMessage):
    """The rows of one `KafkaSink.write`.

    Attributes:
        sink: name of the sink.
        execution: of the program that wrote it; `writer` in it; ``number`` of the message, from 1.
        rows: how many.
        query: see `streaming_query`.
        written_ms: when, by the clock of the writer (milliseconds since 1970).
        content: the rows as an Arrow stream; b"": they are in a file.
        path: of this file, below the staging directory; ``size`` in bytes.
    """

    sink: str
    execution: str
    writer: str
    number: int
    rows: int
    query: str
    written_ms: int
    content: bytes = b""
    path: str = ""
    size: int = 0


class StagedMessages(io.RawIOBase):
    """Takes the bytes of a message: they are kept in memory, and in a new file once they are too many.

    The file lasts when `finish` has returned; `abandon` removes it.
    """

    def __init__(self, files: Files, path: str) -> None:
        super().__init__()
        self._files, self._path = files, path
        self._kept = bytearray()
        self._output: FileOutput | None = None
        self.size = 0

    @property
    def content(self) -> bytes:
        return bytes(self._kept)

    @property
    def path(self) -> str:
        """Of the file; "": there is none."""
        return "" if self._output is None else self._path

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: object) -> int:
        chunk = bytes(data)  # type: ignore[call-overload]
        self.size += len(chunk)
        if self._output is None and self.size > INLINE_BYTES:
            self._output = self._files.create(self._path)
            self._output.write(bytes(self._kept))
            self._kept.clear()
        if self._output is None:
            self._kept += chunk
        else:
            self._output.write(chunk)
        return len(chunk)

    def finish(self) -> None:
        if self._output is not None:
            self._output.sync()
            self._output.close()

    def abandon(self) -> None:
        if self._output is not None:
            self._output.abandon()


def encode(batches: Iterable[pa.RecordBatch], schema: pa.Schema, into: StagedMessages) -> None:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(cast(BinaryIO, into), schema, options=options) as stream:
        for batch in batches:
            stream.write_batch(batch)


def content_of(message: KafkaMessage, files: Files) -> bytes:
    """Return the rows as `encode` wrote them. Raises `UncommittableError` if their file is gone or was cut."""
    if not message.path:
        return message.content
    where = join(files.url, message.path)
    try:
        content = files.read(message.path)
    except CheckpointDamagedError as error:
        raise UncommittableError(
            f"{where} is gone, with {message.rows:,} rows that were not committed: has something else removed it "
            "(KafkaSink.clean with a checkpoint that was kept, say), is staging another directory than where they were "
            "written, or were they committed so long ago that the brokers have forgotten (offsets.retention.minutes)?"
        ) from error
    if len(content) != message.size:
        raise UncommittableError(f"{where} has {len(content):,} bytes and was written with {message.size:,}")
    return content


def batches_of(content: bytes) -> Iterator[pa.RecordBatch]:
    try:
        with pa.ipc.open_stream(pa.py_buffer(content)) as stream:
            yield from stream
    except (pa.ArrowException, OSError) as error:
        raise UncommittableError(f"staged rows were damaged after they were written: {error}") from error


CALL_S = 30.0
"""How long a broker may take to answer a question about topics and offsets."""

OURS = frozenset(
    {
        "auto.offset.reset",
        "enable.auto.commit",
        "enable.auto.offset.store",
        "enable.partition.eof",
        "group.id",
        "bootstrap.servers",
    }
)
"""Properties of librdkafka that a source sets by itself."""

OURS_OF_PRODUCERS = frozenset(
    {"bootstrap.servers", "enable.idempotence", "transactional.id", "delivery.report.only.error"}
)
"""Those that a sink sets by itself."""


def kafka_library() -> Any:
    return client_library("Kafka", "confluent-kafka", "kafka", "confluent_kafka", "confluent_kafka.admin")


def check_properties(properties: Mapping[str, Any], what: Literal["source", "sink"]) -> None:
    kafka = kafka_library()
    taken = (OURS if what == "source" else OURS_OF_PRODUCERS) & set(properties)
    if taken:
        raise ConfigError(f"config: {min(taken)!r} is set by the {what} itself")
    try:
        # Without servers they do not connect.
        if what == "source":
            kafka.Consumer({"group.id": "ftlayer", **properties}, logger=logger).close()
        else:
            kafka.Producer({**properties, "enable.idempotence": True}, logger=logger)
        return
    except (kafka.KafkaException, TypeError, ValueError) as error:
        refused = _refused(error, properties)
    raise refused  # Out here it has no context, which would quote values too.


def _refused(error: Exception, properties: Mapping[str, Any]) -> ConfigError:
    """Return what librdkafka says without the values, which it quotes: one may be a password."""
    values = sorted({str(each) for each in properties.values()} - {""}, key=len, reverse=True)
    said = reason(error)
    for value in values:
        said = said.replace(f'"{value}"', '"…"')
    return ConfigError(
        f"config: {without_secrets(said, [each for each in values if len(each) >= LEAST_SECRET])}"
    )


@dataclass(frozen=True)
class Brokers:
    """Who is connected to, and how; equal ones may share a connection.

    ``group`` "": none. ``properties`` are librdkafka's.
    """

    servers: str
    group: str
    properties: tuple[tuple[str, Any], ...] = field(repr=False)

    @property
    def secrets(self) -> list[str]:
        return [*secrets_in(dict(self.properties)), *secrets_of(self.servers)]

    def consumer(self) -> Any:
        """Return a consumer that is told which offsets to read, and commits none by itself."""
        own = {
            "bootstrap.servers": self.servers,
            "group.id": self.group or "ftlayer",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
        }
        given = {"isolation.level": "read_committed", **dict(self.properties)}
        return kafka_library().Consumer({**given, **own}, logger=logger)

    def producer(self, own: Mapping[str, Any]) -> Any:
        """Return a producer whose messages are there once, however often it has to send them; with more properties."""
        fixed = {"bootstrap.servers": self.servers, "enable.idempotence": True}
        return kafka_library().Producer({**_stays(), **dict(self.properties), **fixed, **own}, logger=logger)

    def admin(self) -> Any:
        return kafka_library().admin.AdminClient(
            {**dict(self.properties), "bootstrap.servers": self.servers}, logger=logger
        )


def ask_offsets(
    brokers: Brokers, admin: Any, earliest: Iterable[Any], latest: Iterable[Any]
) -> dict[Any, Any]:
    """Ask for first and last offsets of partitions; returns a future by partition."""
    spec = kafka_library().admin.OffsetSpec
    level = kafka_library().IsolationLevel
    committed = dict(brokers.properties).get("isolation.level", "read_committed") == "read_committed"
    asked = dict.fromkeys(earliest, spec.earliest()) | dict.fromkeys(latest, spec.latest())
    found: dict[Any, Any] = admin.list_offsets(
        asked,
        isolation_level=level.READ_COMMITTED if committed else level.READ_UNCOMMITTED,
        request_timeout=CALL_S,
    )
    return found


@cache
def _stays() -> dict[str, str]:
    """Return the property by which a producer keeps the brokers that it knows while none can be reached.

    Where it would begin anew with the first ones (librdkafka 2.16 does), ``send_offsets_to_transaction`` waits for a
    broker that is let go of, and never returns, whatever its timeout.
    """
    stays = {"metadata.recovery.strategy": "none"}
    try:
        kafka_library().Producer(stays, logger=logger)
    except kafka_library().KafkaException:
        return {}
    return stays


def read_group(admin: Any, group: str) -> list[tuple[int, str]]:
    """Return the offsets that are committed for a group, each with its text; none of open transactions."""
    kafka = kafka_library()
    asked = admin.list_consumer_group_offsets(
        [kafka.ConsumerGroupTopicPartitions(group)], require_stable=True, request_timeout=CALL_S
    )
    found = asked[group].result(CALL_S).topic_partitions
    for place in found:
        if place.error is not None:
            raise kafka.KafkaException(place.error)
    return [(place.offset, place.metadata or "") for place in found if place.offset >= 0]


@cache
def group_metadata(group: str) -> Any:
    """Return what names a group that has no members, for offsets that a producer commits in a transaction."""
    # Without servers it does not connect.
    consumer = kafka_library().Consumer({"group.id": group}, logger=logger)
    try:
        return consumer.consumer_group_metadata()
    finally:
        consumer.close()


def reason(error: Any) -> str:
    said = _error_of(error)
    return f"{said.name()}: {said.str()}" if hasattr(said, "name") else str(said) or type(error).__name__


def is_fenced(error: Any) -> bool:
    """Whether a transactional producer was replaced by another one of the same id."""
    said, errors = _error_of(error), kafka_library().KafkaError
    known = (errors._FENCED, errors.INVALID_PRODUCER_EPOCH, errors.PRODUCER_FENCED)
    return hasattr(said, "code") and said.code() in known


_REFUSED = {
    "row": (
        "MSG_SIZE_TOO_LARGE",
        "INVALID_MSG_SIZE",
        "INVALID_MSG",
        "INVALID_RECORD",
        "_INVALID_DIFFERENT_RECORD",
        "INVALID_TIMESTAMP",
        "UNSUPPORTED_FOR_MESSAGE_FORMAT",
        "POLICY_VIOLATION",
    ),
    "topic": (
        "TOPIC_AUTHORIZATION_FAILED",
        "TOPIC_EXCEPTION",
        "UNKNOWN_TOPIC_OR_PART",
        "_UNKNOWN_TOPIC",
        "_UNKNOWN_PARTITION",
    ),
    "client": (
        "CLUSTER_AUTHORIZATION_FAILED",
        "GROUP_AUTHORIZATION_FAILED",
        "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
        "INVALID_TRANSACTION_TIMEOUT",
        "OFFSET_METADATA_TOO_LARGE",
    ),
}


@cache
def _refusals() -> dict[int, str]:
    errors = kafka_library().KafkaError
    return {
        getattr(errors, name): what
        for what, names in _REFUSED.items()
        for name in names
        if hasattr(errors, name)
    }


def refused_by_brokers(error: Any) -> str:
    """Return what brokers refuse for good: a ``"row"``, ``"topic"`` or ``"client"``; "": it may be of the moment."""
    said = _error_of(error)
    return _refusals().get(said.code(), "") if hasattr(said, "code") else ""


def is_of_partition(error: Any) -> bool:
    return bool(_error_of(error).code() == kafka_library().KafkaError._UNKNOWN_PARTITION)


def way_out(error: Any) -> str:
    name = _error_of(error).name()
    if name == "MSG_SIZE_TOO_LARGE":
        return (
            "raise the topic's max.message.bytes, or, if each row is smaller, lower batch.size in config (brokers "
            "hold it against a whole batch)"
        )
    if name.endswith("AUTHORIZATION_FAILED"):
        return "give the client the right"
    if "UNKNOWN" in name:
        return "create it"
    return "change that at the brokers or in config"


def is_away(error: Any) -> bool:
    said = _error_of(error)
    if not hasattr(said, "code"):
        return isinstance(error, TimeoutError)
    errors = kafka_library().KafkaError
    mended = (errors._TRANSPORT, errors._ALL_BROKERS_DOWN, errors._RESOLVE, errors._TIMED_OUT)
    # librdkafka's _NOENT: it knows no leader for any of the partitions.
    waiting = (errors.LEADER_NOT_AVAILABLE, errors._NOENT)
    return bool(said.retriable() or said.code() in (*mended, *waiting))


def _error_of(error: Any) -> Any:
    given = getattr(error, "args", ())
    return given[0] if given else error
