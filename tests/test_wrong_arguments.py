"""What is no argument of a public method is refused at the call, by a `ConfigError` that names the option."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructType

import ftlayer
import ftlayer.sinks
import ftlayer.sources
from ftlayer import config
from ftlayer.checkpoint.options import StateMigration
from ftlayer.checkpoint.storage.loading import JobResult
from ftlayer.common import checks
from ftlayer.common.failures import RowsRejected
from ftlayer.common.rules.restart import NoRestart
from ftlayer.config import FTStatus
from ftlayer.errors import CodecError, ConfigError, LayerClosedError
from ftlayer.functions.process import ProcessFunction
from ftlayer.functions.retry_rules import NO_RULES
from ftlayer.runtime.driver.job import EndedJob, Job
from ftlayer.runtime.environment import StreamEnvironment
from ftlayer.spark.batch.sinks import stream_writer
from ftlayer.spark.deliveries.ingest_reader import IngestStream
from ftlayer.spark.facade import FTLayer
from ftlayer.spark.plan.stream_plan import StreamPlan
from ftlayer.spark.query.supervisor import TrackedQuery
from ftlayer.spark.tracked import TrackedStream
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.streams.windowed_stream import session, sliding, tumbling

NO: Any = None
LAYER: Any = SimpleNamespace(enabled=True)
NOTHING_READ: Any = SimpleNamespace(rules=NO_RULES)
NO_COLUMNS: Any = SimpleNamespace(names=[])
SCHEMA = pa.schema([("n", pa.int64()), ("at", pa.int64())])


class Passes(ProcessFunction):
    def process(self, record: Any, context: Any) -> Any:
        yield record


def stream() -> Any:
    return GraphBuilder("t", status=FTStatus.OFF).source([{"n": 1, "at": 1}], SCHEMA)


def job() -> Any:
    return Job(EndedJob(JobResult("t", "t-1", 0, 1)))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: stream().process(Passes(), side=3), r"side: expected \{tag: schema\}, got 3"),
        (lambda: stream().shuffle(seed="x"), "shuffle: seed: expected an integer from 0"),
        (lambda: stream().shuffle(seed=-1), "shuffle: seed: expected an integer from 0"),
        (lambda: stream().assign_watermarks(3), "assign_watermarks: column: expected the name of a column"),
        (lambda: tumbling("1s", ofset="1s"), "tumbling: there is no option 'ofset': did you mean 'offset'"),
        (lambda: sliding("1s", evry="1s"), "sliding: there is no option 'evry': did you mean 'every'"),
        (lambda: sliding("1s"), "sliding: missing a required argument: 'every'"),
        (lambda: session("1s", offset=1), "session: there is no option 'offset'"),
        (lambda: NoRestart(3), "NoRestart: too many positional arguments"),  # type: ignore[call-arg]
        (lambda: RowsRejected(), "RowsRejected: missing a required argument: 'errors'"),  # type: ignore[call-arg]
        (lambda: StateMigration("a", "b", renamed_from="b"), "renamed_from is the name that it has"),
        (
            lambda: FTLayer.console(NO, prot=3),
            "FTLayer.console: there is no option 'prot': did you mean 'port'",
        ),  # type: ignore[call-arg]
        (lambda: FTLayer.dead_letters(NO), "missing a required argument: 'spark'"),  # type: ignore[call-arg]
        (lambda: FTLayer.close(NO, now=True), "FTLayer.close: there is no option 'now'"),  # type: ignore[call-arg]
        (lambda: stream().union(other=3), "DataStream.union: there is no option 'other'"),
        (lambda: job().wait(timeuot=3), "Job.wait: there is no option 'timeuot': did you mean 'timeout'"),
        (lambda: FTLayer(), "FTLayer: use `FTLayer.embedded` or `FTLayer.connect` instead"),  # type: ignore[call-arg]
        (
            lambda: TrackedStream.sink(NO, NO, "checkpoint"),  # type: ignore[call-arg, misc]
            r"TrackedStream.sink: too many positional arguments; it is "
            r"TrackedStream.sink\(function, \*, checkpoint, name='', tagged=False\)$",
        ),
        (
            lambda: stream().filter(),
            r"it is DataStream.filter\(function, \*, uid=None, parallelism=None, .*, rate_limit=None\)$",
        ),
        (
            lambda: StateMigration("a"),  # type: ignore[call-arg]
            r"it is StateMigration\(operator, state, version=1, migrate=_unchanged, renamed_from=None\)$",
        ),
        (
            lambda: FTLayer.embedded(),  # type: ignore[call-arg]
            r"it is FTLayer.embedded\(path, \*, timeout='30s', .*, status=FTStatus.ON, .*\*\*vertex\)$",
        ),
        (lambda: stream_writer(NO, 3, NO, {}), "write_stream: 3 is not a pyspark"),  # type: ignore[arg-type]
        (
            lambda: StreamEnvironment.execute(NO, stop_at_last=True),  # type: ignore[call-arg]
            "there is no option 'stop_at_last': did you mean 'stop_at_latest'",
        ),
    ],
)
def test_an_argument_that_is_none(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call()


@pytest.mark.parametrize(
    ("call", "option"),
    [
        (lambda job: job.wait("x"), "wait: timeout"),
        (lambda job: job.wait(-1), "wait: timeout"),
        (lambda job: job.over("x"), "over: timeout"),
        (lambda job: job.cancel("x"), "cancel: timeout"),
        (lambda job: job.interrupt(-1), "interrupt: timeout"),
        (lambda job: job.drain(timeout=-1), "drain: timeout"),
        (lambda job: job.checkpoint("x"), "checkpoint: timeout"),
        (lambda job: job.wait_until_running("x"), "wait_until_running: timeout"),
        (lambda job: job.savepoint(3), "savepoint: directory"),
        (lambda job: job.savepoint("d", timeout="x"), "savepoint: timeout"),
        (lambda job: job.stop_with_savepoint(None), "stop_with_savepoint: directory"),
    ],
)
def test_a_job_is_asked_for_what_it_can_do(call: Callable[[Any], Any], option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}: expected"):
        call(job())


def test_a_time_of_none_or_zero_is_one() -> None:
    assert job().wait(0)
    assert job().drain()


def test_an_ingest_is_shown_by_its_name_and_columns() -> None:
    assert (
        repr(IngestStream("i", StructType().add("n", LongType()), NO))
        == "IngestStream('i', struct<n:bigint>)"
    )


@pytest.mark.parametrize("records", [3, {"n": 1}, "n", None])
def test_an_ingest_takes_records(records: Any) -> None:
    ingest = IngestStream("i", StructType().add("n", LongType()), NO)
    with pytest.raises(CodecError, match="ingest 'i': expected mappings of columns to values, got"):
        ingest.put_many(records)
    with pytest.raises(CodecError, match=r"ingest 'i': expected a pyarrow.RecordBatch, got a"):
        ingest.put_batch(records)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda layer: layer.watch_dead(3), "watch_dead: stream: expected a name like"),
        (lambda layer: layer.watch_dead(""), "watch_dead: stream: expected a name like"),
        (lambda layer: layer.dead_letter_stream(NO, 3), "dead_letter_stream: stream: expected a name like"),
        (lambda layer: layer.dead_letter_reader(NO), "dead_letter_reader: name one stream or more"),
        (lambda layer: layer.dead_letter_reader(NO, 3), "dead_letter_reader: stream: expected a name like"),
        (lambda layer: layer.requeue([3]), "keys: expected keys of dead letters"),
        (lambda layer: layer.purge([None]), "keys: expected keys of dead letters"),
        (lambda layer: layer.requeue(["not hexadecimal"]), "keys: expected keys of dead letters"),
    ],
)
def test_a_layer_is_asked_for_streams_and_keys(tmp_path: Path, call: Callable[[Any], Any], said: str) -> None:
    layer = FTLayer.embedded(tmp_path / "ft")
    with pytest.raises(ConfigError, match=said):
        call(layer)
    assert layer.vertex is None


def test_a_closed_layer_is_not_entered_again(tmp_path: Path) -> None:
    layer = FTLayer.embedded(tmp_path / "ft")
    layer.close()
    with pytest.raises(LayerClosedError), layer:
        raise AssertionError("it was entered")


# ---------------------------------------------------------------- durations, everywhere


WORDS = re.compile(
    "(^|_)(timeout|interval|backoff|delay|ttl|gap|lateness|orderness|pause|idle|wait|every|period|patience|poll|"
    "remember|expiry|age|quiet|older|time|duration|deadline|durability)(_|$)"
)
PLACES = {"path": "x", "url": "x://h", "stream": "s", "consumer": "c", "topic": "t", "token": "t" * 32}
NEEDED: dict[str, dict[str, Any]] = {
    "CheckpointConfig": {"unaligned": True},
    "FTLayer.connect": {"address": "grpc://127.0.0.1:1"},
    "FailurePolicy": {"max_attempts": None},
    "AmqpSource": {"url": "amqp://h", "queue": "q"},
    "AmqpSink": {"url": "amqp://h", "exchange": "e"},
    "FilesSource": {"path": "x", "format": "json", "schema": "n int", "journal": "j"},
    "HttpSink": {"url": "http://h"},
    "IcebergSink": {"table": "a.b", "catalog": "c"},
    "KafkaSink": {"servers": "h:1", "topic": "t", "staging": "x"},
    "KafkaSource": {"servers": "h:1", "topic": "t"},
    "MqttSource": {"url": "mqtt://h"},
    "MqttSink": {"url": "mqtt://h", "topic": "t"},
    "NatsSink": {"url": "nats://h", "subject": "s"},
    "NatsSource": {"url": "nats://h"},
    "PolledJsonSource": {"url": "http://h"},
    "PostgresChangesSource": {"dsn": "dbname=x", "table": "t", "slot": "s"},
    "PostgresTableSource": {"dsn": "dbname=x", "table": "t", "column": "c"},
    "PostgresSink": {"dsn": "dbname=x", "table": "t"},
    "RedisSink": {"url": "redis://h"},
    "RedisSource": {"url": "redis://h", "group": "g"},
    "SseSource": {"url": "http://h"},
    "TailSource": {"paths": "x"},
    "WebhookSource": {"listen": "127.0.0.1:0"},
    "TrackedStream.map_async": {"function": asyncio.sleep, "schema": StructType().add("n", LongType())},
    "tumbling": {"size": "1d"},
    "sliding": {"size": "1d", "every": "1d"},
    "assign_watermarks": {"column": "at"},
    "map_async": {"function": asyncio.sleep, "schema": "n int"},
    "sink": {"sink": print, "function": print},
    "join": {"other": None, "lower": "-1d", "upper": "1d", "function": max, "schema": "n int"},
}
"""What classes and methods need beside a duration."""


def public() -> dict[str, tuple[Any, inspect.Signature]]:
    """Constructors, functions and methods that users call, by their names."""
    found = {}
    for module in (ftlayer, ftlayer.sources, ftlayer.sinks, config):
        for name in getattr(module, "__all__", ("VertexOptions", "ServeOptions", "TopologyOptions")):
            one = getattr(module, name)
            if inspect.isclass(one) and one.__module__.startswith("ftlayer"):
                methods = [each for each in vars(one) if not each.startswith("_")]
                found |= {f"{name}.{each}": getattr(one, each) for each in methods}
                found[name] = one
            elif inspect.isfunction(one):
                found[name] = one
    signatures: dict[str, tuple[Any, inspect.Signature]] = {}
    for name, one in found.items():
        with contextlib.suppress(TypeError, ValueError):
            signatures[name] = one, inspect.signature(one)
    return signatures


PUBLIC = public()


def on(name: str, what: Any) -> Any:
    """The same, of an instance where it is a method of one."""
    kind, _, method = name.rpartition(".")
    if not kind or inspect.ismethod(what):
        return what
    timed = stream().assign_watermarks("at").key_by("n")
    made = {
        "Job": job,
        "TrackedQuery": lambda: TrackedQuery(MagicMock()),
        "TrackedStream": lambda: TrackedStream(StreamPlan(LAYER, NOTHING_READ, NO_COLUMNS)),
        "DataStream": stream,
        "KeyedStream": lambda: timed,
        "WindowedStream": lambda: timed.window(tumbling("1s")),
    }
    instance = made[kind]() if kind in made else made_of(getattr(ftlayer.sinks, kind), kind)
    return getattr(instance, method)


def made_of(kind: Any, name: str) -> Any:
    parameters = inspect.signature(kind).parameters
    places = {each: value for each, value in PLACES.items() if each in parameters}
    return kind(**places | NEEDED.get(name, {}))


DURATIONS = [
    (name, parameter)
    for name, (_, signature) in PUBLIC.items()
    for parameter, each in signature.parameters.items()
    if "Duration" in str(each.annotation)
]


@pytest.mark.parametrize(("name", "parameter"), DURATIONS, ids=lambda one: one)
def test_a_bare_number_is_of_seconds_as_a_text_and_a_timedelta_say_it(
    name: str, parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How each is read; what else is wrong with what is called here does not matter."""
    read: list[Fraction] = []
    parts = checks._parts

    def noted(value: object, option: str, *, zero: bool) -> tuple[int, int]:
        found = parts(value, option, zero=zero)
        if re.search(rf"(\b|allowed_){parameter}\b", option):
            read.append(Fraction(*found))
        return found

    what, signature = PUBLIC[name]
    needed = PLACES | NEEDED.get(name, NEEDED.get(name.rpartition(".")[2], {}))
    beside = {each: given for each, given in needed.items() if each in signature.parameters}
    called = on(name, what)
    if "other" in beside:
        beside["other"] = called.__self__
    monkeypatch.setattr(checks, "_parts", noted)
    for given in (7_200, 7_200.0, "7200s", "2 hours", timedelta(hours=2)):
        read.clear()
        with contextlib.suppress(Exception):
            called(**beside | {parameter: given})
        assert set(read) == {7_200_000}, given


def test_what_is_called_as_a_duration_is_one() -> None:
    """Names that end in ``_ms`` say their unit."""
    assert len(DURATIONS) > 70
    for name, (_, signature) in PUBLIC.items():
        for parameter, each in signature.parameters.items():
            number = re.search(r"\b(int|float)\b", str(each.annotation))
            if WORDS.search(parameter) and not parameter.endswith(("_ms", "_buckets")) and number:
                assert "Duration" in str(each.annotation), f"{name}({parameter}: {each.annotation})"


CONNECTORS = {
    name: kind
    for module in (ftlayer.sources, ftlayer.sinks)
    for name, kind in vars(module).items()
    if inspect.isclass(kind) and re.search(r"(Source|Sink|FromJson|HmacSignature)$", name)
    # Spark makes a Data Source, whose options are a map.
    if not name.endswith("DataSource")
}


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_connector_refuses_an_option_that_it_does_not_have(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        CONNECTORS[name](nonsense=1)


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_connector_shows_what_it_is(name: str) -> None:
    assert CONNECTORS[name].__repr__ is not object.__repr__
