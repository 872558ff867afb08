"""What is no argument of a public method is refused at the call, by a `ConfigError` that names the option."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructType

from ftlayer.checkpoint.migration import StateMigration
from ftlayer.checkpoint.storage.metadata import JobResult
from ftlayer.config import FTStatus
from ftlayer.errors import CodecError, ConfigError, LayerClosedError
from ftlayer.failures import RowsRejected
from ftlayer.functions.process import ProcessFunction
from ftlayer.restart import NoRestart
from ftlayer.runtime.driver.job import EndedJob, Job
from ftlayer.runtime.environment import StreamEnvironment
from ftlayer.spark.batch.sinks import stream_writer
from ftlayer.spark.deliveries.ingest_reader import IngestStream
from ftlayer.spark.facade import FTLayer
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.streams.windowed_stream import session, sliding, tumbling

NO: Any = None
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
        (lambda: FTLayer(), "FTLayer: missing a required argument: 'vertex'"),  # type: ignore[call-arg]
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
