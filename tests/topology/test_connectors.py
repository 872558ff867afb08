"""What a user gives as a source or a sink, Python Data Sources of pyspark among it. No Spark session needed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    SimpleDataSourceStreamReader,
)
from pyspark.sql.types import LongType, StructField, StructType

from ftlayer.errors import ConfigError
from ftlayer.functions.data_sources import DataSourceStreamArrowWriter
from ftlayer.functions.process import ProcessFunction
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.topology.operators import (
    FunctionSink,
    IterableSource,
    PushSource,
    ReaderSource,
    Sink,
    Source,
    WriterSink,
)


class Reader(DataSourceStreamReader):
    def __init__(self, schema: StructType, options: Any) -> None:
        self.schema, self.options = schema, options

    def initialOffset(self) -> dict[str, Any]:
        return {}

    def latestOffset(self, *args: Any) -> dict[str, Any]:
        return {}

    def partitions(self, start: Any, end: Any) -> list[InputPartition]:
        return []

    def read(self, partition: Any) -> Iterator[Any]:
        return iter(())


class Simple(SimpleDataSourceStreamReader):
    def initialOffset(self) -> dict[str, Any]:
        return {}

    def read(self, start: Any) -> Any:
        return iter(()), start

    def readBetweenOffsets(self, start: Any, end: Any) -> Any:
        return iter(())


class Writer(DataSourceStreamWriter):
    def __init__(self, schema: StructType, overwrite: bool, options: Any) -> None:
        self.schema, self.overwrite, self.options = schema, overwrite, options

    def write(self, iterator: Any) -> Any:
        return None


class ArrowWriter(DataSourceStreamArrowWriter):
    def write(self, iterator: Any) -> Any:
        return None


class Numbers(DataSource):
    def schema(self) -> Any:
        return "id bigint, name string"

    def streamReader(self, schema: StructType) -> Reader:
        return Reader(schema, self.options)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Writer:
        return Writer(schema, overwrite, self.options)


class Structs(Numbers):
    def schema(self) -> StructType:
        return StructType([StructField("id", LongType(), nullable=False)])


class SimpleNumbers(DataSource):
    def schema(self) -> str:
        return "id bigint"

    def simpleStreamReader(self, schema: StructType) -> Simple:
        return Simple()


class Nothing(DataSource):
    """Neither says its schema nor reads nor writes."""


def source_of(env: GraphBuilder, given: Any, schema: Any = None, **options: Any) -> Source:
    env.source(given, schema, **options).sink(print)
    (*_, operator) = (node.operator for node in env.build().nodes if isinstance(node.operator, Source))
    return operator


def sink_of(env: GraphBuilder, given: Any, **options: Any) -> Any:
    env.source([], "id bigint, name string").sink(given, **options)
    operator = env.build().node("sink-1").operator
    assert isinstance(operator, Sink)
    return operator.connector


def numbers() -> Iterator[int]:
    yield from range(3)


@pytest.mark.parametrize(
    "given", [[0, 1, 2], (0, 1, 2), range(3), numbers, lambda: [0, 1, 2], partial(range, 3)]
)
def test_iterables_come_again_and_again(env: GraphBuilder, given: Any) -> None:
    connector = source_of(env, given, "n int").connector
    assert isinstance(connector, IterableSource)
    (first,) = connector.partitions
    assert [list(first()), list(first())] == [[0, 1, 2]] * 2


def test_whole_batches(env: GraphBuilder) -> None:
    batch = pa.record_batch({"n": pa.array([1, 2], pa.int32())})
    for given in (batch, pa.Table.from_batches([batch]), [batch]):
        connector = source_of(env, given, batch.schema).connector
        assert isinstance(connector, IterableSource)
        assert list(connector.partitions[0]()) == [batch]


def test_several_partitions(env: GraphBuilder) -> None:
    made = partitions([1], numbers, range(2))
    assert [list(part()) for part in made.partitions] == [[1], [0, 1, 2], [0, 1]]
    assert source_of(env, made, "n int").connector is made
    with pytest.raises(ConfigError, match="partition 1: a generator"):
        partitions([1], numbers())
    with pytest.raises(ConfigError, match="one iterable or more"):
        partitions()


def test_subtasks_of_a_source_find_something_to_do(env: GraphBuilder) -> None:
    given = {
        "list": [],
        "two": partitions([], []),
        "three": partitions([], [], []),
        "reader": Reader(StructType(), {}),
        "simple": Simple(),
        "push": PushSource(lambda push: None),
    }
    for uid, source in given.items():
        env.source(source, "n int", uid=uid).sink(print)
    graph = env.build()
    assert {uid: graph.node(uid).parallelism for uid in given} == {
        "list": 1,
        "two": 2,
        "three": 2,
        "reader": 2,
        "simple": 1,
        "push": 1,
    }


def test_a_reader_needs_a_schema(env: GraphBuilder) -> None:
    reader = Reader(StructType(), {})
    connector = source_of(env, reader, "id bigint").connector
    assert connector == ReaderSource(reader)
    with pytest.raises(ConfigError, match="give schema="):
        env.source(reader)


def test_a_data_source_reads_with_its_own_schema_and_the_options(env: GraphBuilder) -> None:
    operator = source_of(env, Numbers, options={"Path": 7, "header": True})
    assert operator.schema == pa.schema([("id", pa.int64()), ("name", pa.string())])
    assert isinstance(operator.connector, ReaderSource)
    reader = operator.connector.reader
    assert isinstance(reader, Reader)
    assert dict(reader.options) == {"path": "7", "header": "true"}
    assert reader.schema.names == ["id", "name"]


def test_a_data_source_reads_with_a_schema_of_the_users(env: GraphBuilder) -> None:
    operator = source_of(env, Numbers({"a": "b"}), "id bigint")
    assert operator.schema.names == ["id"]
    assert isinstance(operator.connector, ReaderSource)
    assert operator.connector.reader.schema.names == ["id"]


def test_a_data_source_may_say_its_schema_as_a_struct(env: GraphBuilder) -> None:
    assert source_of(env, Structs).schema == pa.schema([pa.field("id", pa.int64(), nullable=False)])


def test_a_simple_reader_is_taken_where_there_is_no_other(env: GraphBuilder) -> None:
    connector = source_of(env, SimpleNumbers).connector
    assert isinstance(connector, ReaderSource)
    assert isinstance(connector.reader, Simple)


def test_data_sources_that_lack_something(env: GraphBuilder) -> None:
    with pytest.raises(ConfigError, match="a Nothing does not say its schema"):
        env.source(Nothing)
    with pytest.raises(ConfigError, match="the class Nothing has no stream reader"):
        env.source(Nothing, "id bigint")
    with pytest.raises(ConfigError, match="the class Nothing has no stream writer"):
        env.source([], "id bigint").sink(Nothing)
    with pytest.raises(ConfigError, match="a Numbers has its own"):
        env.source(Numbers({}), options={})
    with pytest.raises(ConfigError, match="options are for a pyspark DataSource class"):
        env.source([], "n int", options={})


def test_classes_of_readers_and_writers_are_no_functions(env: GraphBuilder) -> None:
    with pytest.raises(
        ConfigError, match=r"source: expected an instance, got the class Simple; write Simple\(…\)"
    ):
        env.source(Simple, "n int")
    with pytest.raises(ConfigError, match=r"sink: expected an instance, got the class ArrowWriter"):
        env.source([], "n int").sink(ArrowWriter)


def test_sinks(env: GraphBuilder) -> None:
    assert sink_of(env, print) == FunctionSink(print)


def test_writers_get_a_batch_by_age_and_length(env: GraphBuilder) -> None:
    writer = ArrowWriter()
    assert sink_of(env, writer, every="200ms", max_rows=7) == WriterSink(writer, 200, 7)


def test_a_data_source_writes_the_streams_schema(env: GraphBuilder) -> None:
    connector = sink_of(env, Numbers, options={"Path": "x"})
    assert isinstance(connector, WriterSink)
    assert (connector.every_ms, connector.max_rows) == (1_000, 10_000)
    writer = connector.writer
    assert isinstance(writer, Writer)
    assert (writer.schema.names, writer.overwrite, writer.options["path"]) == (["id", "name"], False, "x")


def test_connectors_travel(env: GraphBuilder, plain: ProcessFunction) -> None:
    stream = env.source(Numbers).union(env.source([(1, "a")], "id bigint, name string"))
    stream.process(plain).sink(Numbers)
    stream.sink(lambda batch: None)
    again = cloudpickle.loads(cloudpickle.dumps(job_graph(env.build())))  # type: ignore[no-untyped-call]
    source = again.vertex("source-2").operators[0]
    assert list(source.connector.partitions[0]()) == [(1, "a")]
