"""Options of Data Sources: what they are, and which are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.common.checks import Duration
from ftlayer.connectors.queue_stream import QueueDataSource
from ftlayer.errors import ConfigError, UnsupportedError
from ftlayer.functions.data_sources import (
    HAS_LIMITS,
    DataSourceOptions,
    DataSourceStreamReader,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    from_arrow_schema,
    to_arrow_schema,
)
from ftlayer.sinks import DeltaDataSource, IcebergDataSource, PostgresDataSource
from ftlayer.sources import (
    AmqpDataSource,
    FilesDataSource,
    KafkaDataSource,
    MqttDataSource,
    NatsDataSource,
    PolledJsonDataSource,
    PostgresChangesDataSource,
    PostgresTableDataSource,
    RedisDataSource,
    SseDataSource,
    TailDataSource,
    WebhookDataSource,
)


def test_options_are_read_as_what_they_are() -> None:
    options = DataSourceOptions(
        {"maxRows": "7", "Unique": "True", "fields": " a, b,,c ", "kafka.acks": "all", "name": ""}, "ours"
    )
    assert (options.count("maxrows", 1), options.count("minRows", 3)) == (7, 3)
    assert options.flag("unique", default=False)
    assert options.flag("other", default=True)
    assert options.names("fields") == ["a", "b", "c"]
    assert options.names("others", "x,y") == ["x", "y"]
    assert options.below("kafka.") == {"acks": "all"}
    assert (options.text("name", "default"), options.text("absent", "default")) == ("", "default")
    assert options.get("absent") is None
    options.check_all_known()


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (lambda options: options.count("n", 1), "n: expected a number from 1 to .*, got '0'"),
        (lambda options: options.flag("b", default=True), "b: expected true or false, got 'yes'"),
        (lambda options: options.required("missing"), "option 'missing' is missing"),
        (lambda options: options.required("empty"), "option 'empty' is missing"),
    ],
)
def test_what_an_option_cannot_be(read: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(DataSourceOptions({"n": "0", "b": "yes", "empty": ""}, "ours"))


def test_an_option_that_nothing_asks_for_is_refused_with_those_that_there_are() -> None:
    options = DataSourceOptions({"url": "u", "maxRow": "7", "checkpointLocation": "/c"}, "ours")
    options.text("url", "")
    options.count("maxRows", 1)
    options.below("kafka.")
    with pytest.raises(
        ConfigError, match=r"^option 'maxrow' is unknown to ours; it knows url, maxRows, kafka\.…$"
    ):
        options.check_all_known()


class Made:
    def __init__(
        self,
        url: str,
        *,
        key: Sequence[str] = ("a", "b"),
        reconnect_timeout: Duration = "5m",
        claim_idle: Duration | None = None,
        max_pending: int = 7,
        max_length: int | None = None,
        is_sent: bool = True,
        kind: str = "text",
        app: Callable[[], None] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.given = (url, key, reconnect_timeout, claim_idle, max_pending, max_length, is_sent, kind)
        self.others = (app, headers)


def test_options_are_the_parameters_of_what_they_make() -> None:
    made = DataSourceOptions({}, "ours").made(Made, url="")
    assert made.given == ("", ["a", "b"], "5m", None, 7, None, True, "text")
    given = {"key": "c", "reconnectTimeout": "1s", "claimIdle": "2s", "maxPending": "9", "format": "json"}
    options = DataSourceOptions({"url": "u", **given, "maxLength": "3", "isSent": "false"}, "ours")
    made = options.made(Made, {"kind": "format"}, headers={"a": "b"})
    assert made.given == ("u", ["c"], "1s", "2s", 9, 3, False, "json")
    assert made.others == (None, {"a": "b"})
    options.check_all_known()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("maxPending", "maxPending: expected a number from 1 to "),
        ("maxLength", "maxLength: expected a number from 1 to "),
        ("isSent", "isSent: expected true or false, got 'x'"),
    ],
)
def test_an_option_that_is_not_of_its_parameter_s_kind_is_refused(option: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        DataSourceOptions({option: "x"}, "ours").made(Made)


def test_what_no_text_can_be_is_no_option() -> None:
    options = DataSourceOptions({"app": "x", "headers": "y"}, "ours")
    options.made(Made)
    with pytest.raises(
        ConfigError, match=r"^option 'app' is unknown to ours; it knows url, key, reconnectTimeout, "
    ):
        options.check_all_known()


ONLY_READ = {SseDataSource, TailDataSource, WebhookDataSource, PostgresTableDataSource}

READERS: list[tuple[Any, dict[str, str]]] = [
    (AmqpDataSource, {"url": "amqp://h", "queue": "q"}),
    (FilesDataSource, {"path": "/p", "journal": "/j"}),
    (KafkaDataSource, {"kafka.bootstrap.servers": "h:1", "subscribe": "t"}),
    (MqttDataSource, {"url": "mqtt://h", "topic": "t", "group": "g"}),
    (NatsDataSource, {"url": "nats://h", "stream": "s", "consumer": "c"}),
    (PolledJsonDataSource, {"url": "http://h"}),
    (PostgresChangesDataSource, {"dsn": "host=h", "table": "t", "slot": "s", "columns": "a"}),
    (PostgresTableDataSource, {"dsn": "host=h", "table": "t", "column": "c"}),
    (RedisDataSource, {"url": "redis://h", "stream": "s", "group": "g"}),
    (SseDataSource, {"url": "http://h"}),
    (TailDataSource, {"path": "/p"}),
    (WebhookDataSource, {"listen": "localhost:0"}),
]


@pytest.mark.parametrize(("kind", "options"), READERS, ids=[kind.name() for kind, _ in READERS])
def test_every_reader_refuses_an_option_that_it_does_not_know(kind: Any, options: dict[str, str]) -> None:
    if issubclass(kind, QueueDataSource):
        with pytest.raises(ConfigError, match=r"^spool: expected a directory"):
            kind(options).schema()
        options = {**options, "spool": "/spool"}
    for unknown in ("maxRowPerTrigger", "startingTimestamp"):
        data_source = kind({**options, unknown: "7"})
        with pytest.raises(
            ConfigError, match=f"option '{unknown.lower()}' is unknown to {kind.name()}; it knows "
        ) as raised:
            data_source.schema()
        assert _known(raised.value) == set(KNOWN[kind].split())


def _known(error: ConfigError) -> set[str]:
    return set(str(error).partition("; it knows ")[2].split(", ")) - {"spool", "maxRowsPerTrigger", "keep"}


KNOWN = {
    AmqpDataSource: "url queue maxPending uniqueIds reconnectTimeout column",
    FilesDataSource: "path fileFormat journal columns position malformed header delimiter maxFilesPerTrigger "
    "maxBytesPerTrigger splitBytes poll minAge remember ignoreMissing encoding errors",
    KafkaDataSource: "subscribe startingOffsets maxOffsetsPerTrigger reconnectTimeout column kafka.…",
    MqttDataSource: "url topic group qos version sessionExpiry maxPending reconnectTimeout column",
    NatsDataSource: "url stream consumer subject credentials start maxPending ackWait reconnectTimeout column",
    PolledJsonDataSource: "url id items cursor param interval timeout reconnectTimeout column header.…",
    PostgresChangesDataSource: "dsn table slot publication columns asText initial maxTransactionRows "
    "reconnectTimeout column",
    PostgresTableDataSource: "dsn table column key columns asText after delay pollInterval reconnectTimeout",
    RedisDataSource: "url stream group fields start claimIdle reconnectTimeout column",
    SseDataSource: "url idleTimeout reconnectTimeout column header.…",
    TailDataSource: "path rotated rotation start quiet maxLine column",
    WebhookDataSource: "listen headers maxBody maxPending answerTimeout tlsCert tlsKey signatureSecret "
    "signatureHeader signaturePrefix signatureEncoding signatureAlgorithm column",
}
"""Of readers: a parameter that gets another name would give it to an option that is in use."""

WRITERS: list[tuple[Any, dict[str, str], str]] = [
    (
        AmqpDataSource,
        {"url": "amqp://h", "routingKey": "k"},
        "url exchange routingKey routingKeyColumn body messageId reconnectTimeout",
    ),
    (DeltaDataSource, {"path": "/p"}, "path partitionBy storage.…"),
    (FilesDataSource, {"path": "/p"}, "path fileFormat"),
    (IcebergDataSource, {"table": "a.b", "catalog": "c"}, "table catalog partitionBy remember catalog.…"),
    (
        KafkaDataSource,
        {"kafka.bootstrap.servers": "h:1", "exactlyOnce": "false"},
        "topic staging exactlyOnce name kafka.…",
    ),
    (
        MqttDataSource,
        {"url": "mqtt://h", "topic": "t"},
        "url topic topicColumn body retain version reconnectTimeout",
    ),
    (
        NatsDataSource,
        {"url": "nats://h", "stream": "s", "subject": "s.in"},
        "url stream subject value headers credentials idColumn name remember",
    ),
    (PostgresDataSource, {"dsn": "host=h", "table": "t"}, "dsn table name"),
    (RedisDataSource, {"url": "redis://h", "stream": "s"}, "url stream name maxLength remember"),
]


@pytest.mark.parametrize(("kind", "options", "known"), WRITERS, ids=[kind.name() for kind, *_ in WRITERS])
def test_every_writer_refuses_an_option_that_it_does_not_know(
    kind: Any, options: dict[str, str], known: str
) -> None:
    kind(options).streamWriter(None, False)
    with pytest.raises(
        ConfigError, match=f"option 'subscribed' is unknown to {kind.name()}; it knows "
    ) as raised:
        kind({**options, "subscribed": "7"}).streamWriter(None, False)
    assert _known(raised.value) == set(known.split())


@pytest.mark.parametrize(("kind", "options"), [reader for reader in READERS if reader[0] in ONLY_READ])
def test_what_only_reads_says_so_as_spark_does(kind: Any, options: dict[str, str]) -> None:
    with pytest.raises(NotImplementedError):
        kind(options).streamWriter(None, False)


class Numbers(DataSourceStreamReader):
    """Begins at a place of its own each time it is asked, as one does that makes a new journal."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ReadLimit]] = []
        self._places = iter(range(10, 20))

    def initialOffset(self) -> dict[str, int]:
        return {"at": next(self._places)}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(3)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        self.asked.append((start["at"], limit))
        return {"at": start["at"] + (limit.max_rows if isinstance(limit, ReadMaxRows) else 100)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Any]:
        return []

    def read(self, partition: Any) -> Iterator[Any]:
        return iter(())


class Wrapped(Numbers):
    """Asks the reader that it derives from: where the query is, is known to both of them."""

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        return super().latestOffset(start, limit)


@pytest.mark.parametrize("kind", [Numbers, Wrapped])
def test_a_reader_is_told_where_the_query_is_on_each_spark(kind: type[Numbers]) -> None:
    """Before 4.2 Spark asks for `latestOffset()`, and for `initialOffset` behind it."""
    limit = ReadAllAvailable() if not HAS_LIMITS else ReadMaxRows(3)

    def latest(reader: Any, at: int) -> dict[str, int]:
        return reader.latestOffset({"at": at}, limit) if HAS_LIMITS else reader.latestOffset()

    reader, step = kind(), 3 if HAS_LIMITS else 100
    if HAS_LIMITS:
        assert reader.initialOffset() == {"at": 10}
    assert latest(reader, 10) == {"at": 10 + step}
    assert HAS_LIMITS or reader.initialOffset() == {"at": 10}
    assert latest(reader, 10) == {"at": 10 + step}
    reader.partitions({"at": 10}, {"at": 10 + step})
    assert latest(reader, 10 + step) == {"at": 10 + 2 * step}
    assert reader.asked == [(10, limit), (10, limit), (10 + step, limit)]
    again = kind()
    again.partitions({"at": 70}, {"at": 70})  # as Spark says it when a query starts again
    assert latest(again, 70) == {"at": 70 + step}


def test_a_limit_that_spark_does_not_know_is_refused(tmp_path: Any) -> None:
    options = {"path": str(tmp_path), "journal": str(tmp_path / "../journal"), "maxFilesPerTrigger": "3"}
    reader: Any = FilesDataSource(options).streamReader(None)  # type: ignore[arg-type]
    start = reader.initialOffset()
    assert reader.latestOffset(start, reader.getDefaultReadLimit()) == start  # as a topology asks
    if not HAS_LIMITS:
        with pytest.raises(UnsupportedError, match=r"^maxFilesPerTrigger: Spark 4\.[01]\S* asks .* for all"):
            reader.latestOffset()


def test_timestamps_with_and_without_a_zone_stay_what_they_are_on_each_spark() -> None:
    schema = pa.schema([("at", pa.timestamp("us", "UTC")), ("local", pa.timestamp("us")), ("n", pa.int64())])
    assert to_arrow_schema(from_arrow_schema(schema)) == schema
    assert from_arrow_schema(schema).simpleString() == "struct<at:timestamp,local:timestamp_ntz,n:bigint>"
