"""Reader sources of simple readers, of other people's readers, and of files that grow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition, SimpleDataSourceStreamReader

LINES = pa.schema([("line", pa.string())])


class SimpleReader(SimpleDataSourceStreamReader):
    def __init__(self, broker: Any) -> None:
        self.broker = broker

    def initialOffset(self) -> dict[str, Any]:
        return {"index": 0}

    def read(self, start: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self.broker.call("read")
        rows = self.broker.rows
        return ([(row,) for row in rows[start["index"] :]], {"index": len(rows)})  # a list, as some do

    def readBetweenOffsets(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[Any]:
        self.broker.call("readBetweenOffsets")
        return ((row,) for row in self.broker.rows[start["index"] : end["index"]])

    def commit(self, end: dict[str, Any]) -> None:
        self.broker.commits.append(end["index"])


def test_a_simple_reader(start: Any, broker: Any, vertex: Any) -> None:
    job = start(SimpleReader(broker))
    for upto in (30, 31, 100):
        broker.rows = list(range(upto))
        job.run_until(lambda upto=upto: upto in broker.commits)
    assert sorted(vertex.rows) == list(range(100))
    assert "readBetweenOffsets" not in broker.calls


def test_a_simple_reader_over_a_restart(start: Any, broker: Any, vertex: Any) -> None:
    broker.rows = list(range(60))
    job = start(SimpleReader(broker))
    job.run_until(lambda: len(vertex.rows) >= 20)
    job.kill(0)
    job.up(0)
    job.run_until(lambda: len(vertex.rows) >= 40)
    assert "readBetweenOffsets" not in broker.calls
    assert 60 not in broker.commits
    job.close()
    job = start(SimpleReader(broker), bounded=True)
    job.run_until(lambda: job.ended)
    assert sorted(vertex.rows) == list(range(60))
    assert "readBetweenOffsets" in broker.calls


def test_a_simple_reader_that_is_shorter_than_its_position_is_an_error(
    start: Any, broker: Any, vertex: Any
) -> None:
    broker.rows = list(range(300))
    job = start(SimpleReader(broker))
    job.run_until(lambda: 300 in broker.commits)
    job.close()
    broker.rows = list(range(100))
    job = start(SimpleReader(broker))
    job.driver.until(lambda: job.errors)
    assert 'read up to {"index": 300}, and its reader says that it ends at {"index": 100} now' in str(
        job.errors[0]
    )


def test_a_simple_reader_that_does_not_advance(start: Any, broker: Any) -> None:
    class Stuck(SimpleReader):
        def read(self, begin: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return iter([(1,)]), begin

    job = start(Stuck(broker))
    job.driver.until(lambda: job.errors)
    assert "would be read without end" in str(job.errors[0])


def test_a_third_partys_reader(start: Any, vertex: Any) -> None:
    """``fake`` of pyspark-data-sources: rows that are never the same again, an offset that grows by asking."""
    fake = pytest.importorskip("pyspark_datasources").FakeDataSource
    from pyspark.sql.types import StringType, StructField, StructType

    schema = StructType([StructField("name", StringType()), StructField("zipcode", StringType())])
    reader = fake({"numRows": "5"}).streamReader(schema)
    job = start(reader, schema=pa.schema([("name", pa.string()), ("zipcode", pa.string())]))
    job.run_until(lambda: len(vertex.rows) >= 20)
    job.kill(0)
    job.up(0)
    job.run_until(lambda: len(vertex.rows) >= 40)
    assert len(vertex.rows) % 5 == 0 or len(vertex.rows) > 40
    assert all(isinstance(name, str) and zipcode for name, zipcode in vertex.rows)


class Tail(DataSourceStreamReader):
    """The lines of a file that grows; offsets are bytes."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def initialOffset(self) -> dict[str, Any]:
        return {"bytes": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        data = Path(self.path).read_bytes()
        return {"bytes": data.rfind(b"\n") + 1}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition((start["bytes"], end["bytes"]))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        begin, end = partition.value
        for line in Path(self.path).read_bytes()[begin:end].splitlines():
            yield (line.decode(),)


def test_a_file_that_grows(start: Any, vertex: Any, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    job = start(Tail(path), parallelism=1, schema=LINES)
    lines = [f"line {number}" for number in range(300)]
    with path.open("a") as file:
        for number, line in enumerate(lines):
            file.write(line + "\n")
            if number % 30 == 7:
                file.flush()
                job.run_until(lambda number=number: len(vertex.rows) > number)
            if number % 100 == 50:
                job.kill(0)
                job.up(0)
    job.run_until(lambda: len(vertex.rows) == 300)
    assert vertex.rows == lines
