"""Python Data Source writers as sinks, and Data Sources of a third party, unchanged."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)

from ftlayer.common.failures import RowsRejected
from ftlayer.common.rules.restart import FixedDelay, NoRestart
from ftlayer.errors import QueryError, SourceChangedError
from ftlayer.functions.data_sources import DataSourceStreamArrowWriter
from ftlayer.spark import sessions

pytestmark = pytest.mark.spark


@dataclass
class Written(WriterCommitMessage):
    """What a task wrote, and in which attempt."""

    values: list[Any]
    attempt: int


class Writer(DataSourceStreamWriter):
    """Notes commits and aborts in files; tasks write where ``fail`` allows them to."""

    def __init__(self, options: Any) -> None:
        self.path = Path(options["path"])
        self.fail = options.get("fail", "")

    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        return self.done([row.n for row in iterator])

    def done(self, values: list[Any]) -> WriterCommitMessage:
        from pyspark import TaskContext

        attempt = TaskContext.get().attemptNumber()  # type: ignore[union-attr]
        if self.fail == "always" and 42 in values:
            raise OSError("the disk is gone")
        if self.fail == "once" and 42 in values and attempt == 0:
            raise OSError("a moment, please")
        if self.fail == "none":
            return None  # type: ignore[return-value]
        return Written(values, attempt)

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        if self.fail == "commit" and not (self.path / f"aborted-{batchId}").exists():
            raise ConnectionError("cannot commit")
        values = [[message.attempt, *message.values] for message in messages]
        (self.path / f"committed-{batchId}").write_text(json.dumps(values))

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - Spark's name
        (self.path / f"aborted-{batchId}").write_text(str(len(messages)))


class ArrowWriter(Writer, DataSourceStreamArrowWriter):
    """The same over Arrow batches."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override]
        return self.done([n for batch in iterator for n in batch.column("n").to_pylist()])


class Plain(DataSource):
    @classmethod
    def name(cls) -> str:
        return "plain_test"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        return Writer(self.options)


class Arrow(DataSource):
    @classmethod
    def name(cls) -> str:
        return "arrow_test"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        return ArrowWriter(self.options)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    return path


def committed(out: Path) -> list[list[int]]:
    """What was committed: for each task, its attempt and values."""
    return [task for path in sorted(out.glob("committed-*")) for task in json.loads(path.read_text())]


@pytest.mark.parametrize("source", [Plain, Arrow])
def test_only_the_winning_attempts_messages_are_committed(
    layer: Any, spark: Any, numbers: Any, out: Path, tools: Any, source: Any, once: Any
) -> None:
    def flaky(record: dict[str, Any]) -> dict[str, Any]:
        if record["n"] < 3 and once.first(record["n"]):
            raise RuntimeError("try again")
        return record

    spark.dataSource.register(source)
    stream = layer.source(numbers, name="numbers").map(flaky, "n bigint").repartition(3)
    writer = stream.write_stream(source.name(), checkpoint=tools.checkpoint, path=str(out), fail="once")
    query = tools.finish(writer.trigger(availableNow=True).start())
    tasks = committed(out)
    assert sorted(n for _, *values in tasks for n in values) == list(range(100))
    assert {attempt for attempt, *values in tasks if 42 in values} == {1}
    assert not list(out.glob("aborted-*"))
    assert query.restarts == 0
    assert len(list(out.glob("committed-*"))) == 2


def test_a_task_that_fails_for_good_aborts(layer: Any, numbers: Any, out: Path, tools: Any) -> None:
    stream = layer.source(numbers, name="numbers").repartition(3)
    writer = stream.write_stream(Plain, checkpoint=tools.checkpoint, path=str(out), fail="always")
    with pytest.raises(QueryError, match=r"the disk is gone"):
        writer.restart(NoRestart()).trigger(availableNow=True).start().awaitTermination(600)
    assert [path.name for path in out.iterdir()] == ["aborted-0"]


def test_a_commit_that_fails_aborts_and_is_made_in_the_next_run(
    layer: Any, numbers: Any, out: Path, tools: Any
) -> None:
    stream = layer.source(numbers, name="numbers").repartition(2)
    writer = stream.write_stream(Arrow, checkpoint=tools.checkpoint, path=str(out), fail="commit")
    query = tools.finish(writer.restart(FixedDelay(2, "50ms")).trigger(availableNow=True).start())
    assert query.restarts == 1
    assert "cannot commit" in query.last_failure
    assert (out / "aborted-0").read_text() == "2"
    assert sorted(n for _, *values in committed(out) for n in values) == list(range(100))


def test_rows_that_a_sink_rejects_become_dead_letters_and_the_rest_is_written(
    layer: Any, numbers: Any, kept: Any, tools: Any
) -> None:
    def refusing(rows: Any, batch: int) -> None:
        bad = rows.where("n % 50 = 7 and half = 1").collect()
        if bad:
            raise RowsRejected({row._ft_row: f"no {row.n}" for row in bad})
        kept(rows.drop("_ft_row"), batch)

    def halves(record: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**record, "half": half} for half in (0, 1)]

    stream = layer.source(numbers, name="refused").flat_map(halves, "n bigint, half int").key_by("half")
    writer = stream.sink(refusing, checkpoint=tools.checkpoint, tagged=True)
    query = tools.finish(writer.trigger(availableNow=True).start())
    assert Counter(kept.column("n")) == {n: 2 for n in range(100) if n % 50 != 7}
    dead = tools.dead_of(layer, "refused")
    assert sorted(
        (info.payload.to_pylist()[0]["n"], info.reason, info.operator, info.attempt) for info in dead
    ) == [(7, "no 7", "refusing", 3), (57, "no 57", "refusing", 3)]
    assert query.restarts == 0


def test_rows_that_a_writer_does_not_take_are_found_by_halves_where_it_is_asked_for(
    layer: Any, numbers: Any, out: Path, tools: Any
) -> None:
    stream = layer.source(numbers, name="halved").repartition(3)
    writer = stream.write_stream(
        Arrow, checkpoint=tools.checkpoint, bisect=True, path=str(out), fail="always"
    )
    query = tools.finish(writer.trigger(availableNow=True).start())
    assert sorted(n for _, *values in committed(out) for n in values) == [n for n in range(100) if n != 42]
    (dead,) = tools.dead_of(layer, "halved")
    assert (dead.reason, dead.operator, dead.attempt) == ("OSError: the disk is gone", "arrow_test", 3)
    assert (out / "aborted-0").exists()
    assert query.restarts == 0


def test_write_may_not_return_none(layer: Any, numbers: Any, out: Path, tools: Any) -> None:
    writer = layer.source(numbers, name="numbers").write_stream(
        Plain, checkpoint=tools.checkpoint, path=str(out), fail="none"
    )
    with pytest.raises(QueryError, match=r"Writer.write returned a NoneType, not a WriterCommitMessage"):
        writer.restart(NoRestart()).trigger(availableNow=True).start().awaitTermination(600)
    assert (out / "aborted-0").exists()


def test_a_third_partys_stream_source_is_taken_as_it_is(
    layer: Any, spark: Any, kept: Any, tools: Any, once: Any
) -> None:
    """``fake`` of pyspark-data-sources, which makes people up, and never the same again."""
    fake = pytest.importorskip("pyspark_datasources").FakeDataSource
    spark.dataSource.register(fake)
    people = (
        spark.readStream.format("fake").option("numRows", 20).schema("name string, zipcode string").load()
    )

    def flaky(record: dict[str, Any]) -> dict[str, Any]:
        if os.getpid() and once.times("any", 5):
            raise RuntimeError("try again")
        return {**record, "letters": len(record["name"])}

    stream = layer.source(people, name="people").map(flaky, "name string, zipcode string, letters int")
    query = stream.sink(kept, checkpoint=tools.checkpoint).trigger(processingTime="0 seconds").start()
    try:
        tools.until(lambda: sum(report.delivered for report in query.recent_batches) >= 5)
    finally:
        query.stop()
    assert sum(report.failed for report in query.recent_batches) == 5
    assert sum(report.rows_in - report.delivered for report in query.recent_batches) == len(kept.rows)
    assert all(row.letters == len(row.name) for row in kept.rows)


class Counting(DataSourceStreamReader):
    """Numbers up to the one in a file, which it does not compare with what was read."""

    def __init__(self, path: str) -> None:
        self.path = path

    def initialOffset(self) -> dict[str, int]:
        return {"index": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]
        return {"index": int(Path(self.path).read_text())}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition((start["index"], end["index"]))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return ((n,) for n in range(*partition.value))


class Numbers(DataSource):
    @classmethod
    def name(cls) -> str:
        return "numbers_test"

    def schema(self) -> str:
        return "n long"

    def streamReader(self, schema: Any) -> Any:
        return Counting(self.options["path"])


@pytest.mark.parametrize("evolves", [False, True])
def test_a_data_source_that_has_become_shorter_ends_its_query(
    layer: Any, spark: Any, tmp_path: Path, tools: Any, kept: Any, evolves: bool
) -> None:
    """Also beside one of the JVM, and where sources have names, by which Spark sorts their offsets."""
    spark.dataSource.register(Numbers)
    upto, files = tmp_path / "upto", tmp_path / "files"
    spark.range(5).selectExpr("-1 - id as n").write.parquet(str(files))
    reader = sessions.stream_reader

    def run(rows: int) -> Any:
        upto.write_text(str(rows))
        frame = reader(spark, "numbers").format("numbers_test").load(str(upto))
        if evolves:
            frame = reader(spark, "files").schema("n long").parquet(str(files)).union(frame)
        tools.run(layer.source(frame, name="numbers"), kept)

    spark.conf.set(sessions.SOURCE_EVOLUTION, str(evolves).lower())
    try:
        run(300)
        run(310)
        for rows in (100, 400):
            with pytest.raises(
                SourceChangedError, match=r"read up to .*310.*, and its reader says that it ends at .*100"
            ):
                run(rows)
    finally:
        spark.conf.unset(sessions.SOURCE_EVOLUTION)
    assert sorted(kept.column("n")) == list(range(-5 if evolves else 0, 310))
