"""A queue's messages into a sink, in one of the ways that ftlayer runs: ``python queue_drivers.py JOB``.

As a script it is a driver that may be killed at any moment, and goes on where the one before it was.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from ftlayer import CheckpointConfig, FixedDelay, FTLayer, StreamEnvironment

NUMBER = pa.schema([("number", pa.int64())])


@dataclass(frozen=True)
class QueueJob:
    """What a driver runs. ``queue`` and ``sink`` are for topologies, ``data_source`` and the rest for queries."""

    way: str
    directory: str
    column: str
    queue: Any
    parallelism: int
    sink: Any
    data_source: Any
    options: dict[str, str]
    sink_format: str
    sink_options: dict[str, str] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        """Where acker mode keeps what came out."""
        return Path(self.directory) / "out"

    def save(self) -> str:
        path = Path(self.directory) / "job"
        path.write_bytes(cloudpickle.dumps(self))  # type: ignore[no-untyped-call]
        return str(path)

    def run(self) -> None:
        spark = SparkSession.builder.master("local[2,4]").config("spark.ui.enabled", "false").getOrCreate()
        WAYS[self.way](self, spark)

    def number_in(self) -> Callable[[Any], int]:
        place = self.queue.schema.names.index(self.column)

        def number(record: Any) -> int:
            return int(record[place])

        return number

    def barrier_mode(self, spark: SparkSession) -> None:
        env = StreamEnvironment(
            spark,
            name="messages",
            parallelism=2,
            checkpointing=CheckpointConfig(interval="200ms", directory=f"{self.directory}/checkpoints"),
        )
        self._numbers(env).sink(self.sink, uid="out")
        env.execute(restore_from="latest")

    def acker_mode(self, spark: SparkSession) -> None:
        self.out.mkdir(exist_ok=True)
        with FTLayer.embedded(f"{self.directory}/ft", timeout="5s") as layer:
            env = StreamEnvironment(
                spark, layer, name="messages", parallelism=2, restart=FixedDelay(attempts=20, delay="10ms")
            )
            self._numbers(env).sink(keeping(str(self.out)), uid="out")
            env.execute()

    def _numbers(self, env: StreamEnvironment) -> Any:
        messages = env.source(self.queue, uid="messages", parallelism=self.parallelism)
        return messages.map(self.number_in(), NUMBER, uid="number")

    def query(self, spark: SparkSession) -> None:
        numbers = self._stream(spark).selectExpr(f"cast(cast({self.column} as string) as long) as number")
        writer = numbers.writeStream.format(self.sink_format).options(**self.sink_options)
        writer.option("checkpointLocation", f"{self.directory}/checkpoint").start().awaitTermination()

    def wrapped_query(self, spark: SparkSession) -> None:
        self.out.mkdir(exist_ok=True)
        column, out = self.column, str(self.out)

        def keep(rows: Any, batch_id: int) -> None:
            numbers = pa.RecordBatch.from_pydict({"number": [row.number for row in rows.collect()]})
            keeping(out)(numbers)

        with FTLayer.embedded(f"{self.directory}/ft") as layer:
            stream = layer.source(self._stream(spark), name="messages")
            numbers = stream.map(lambda record: {"number": int(record[column])}, "number long")
            query = numbers.sink(keep, checkpoint=f"{self.directory}/checkpoint").start()
            query.awaitTermination()

    def _stream(self, spark: SparkSession) -> Any:
        spark.dataSource.register(self.data_source)
        reader = spark.readStream.format(self.data_source.name()).options(**self.options)
        return reader.load()


WAYS: dict[str, Callable[[QueueJob, SparkSession], None]] = {
    "barrier": QueueJob.barrier_mode,
    "acker": QueueJob.acker_mode,
    "query": QueueJob.query,
    "wrapped": QueueJob.wrapped_query,
}


def keeping(directory: str) -> Callable[[pa.RecordBatch], None]:
    """A sink that keeps what it was called with."""

    def keep(batch: pa.RecordBatch) -> None:
        with open(f"{directory}/{os.getpid()}.txt", "a") as file:
            file.writelines(f"{number}\n" for number in batch.column(0).to_pylist())

    return keep


def kept_in(directory: Path) -> list[int]:
    """Return what a `keeping` sink has kept, whole lines alone."""
    texts = [path.read_text() for path in directory.glob("*.txt")]
    return [int(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]


if __name__ == "__main__":
    cloudpickle.loads(Path(sys.argv[1]).read_bytes()).run()  # type: ignore[no-untyped-call]
