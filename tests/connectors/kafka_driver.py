"""A driver that copies a topic and may be killed: ``python kafka_driver.py KIND DIRECTORY SERVERS FROM TO``.

``barrier`` is a topology in barrier mode, ``wrapped`` a wrapped query; both run until they are killed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from ftlayer import CheckpointConfig, FixedDelay, FTLayer, Retention, StreamEnvironment
from ftlayer.sinks import KafkaSink
from ftlayer.sources import KafkaDataSource, KafkaSource

FAILS_EACH = 97


def session() -> SparkSession:
    return (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", 2)
        .getOrCreate()
    )


def run_topology(spark: SparkSession, directory: Path, servers: str, source: str, target: str) -> None:
    checkpoints = CheckpointConfig(
        interval="100ms", directory=str(directory / "checkpoints"), retention=Retention.RETAIN_ON_CANCELLATION
    )
    restart = FixedDelay(attempts=1_000, delay="10ms")
    env = StreamEnvironment(spark, name="copy", parallelism=2, checkpointing=checkpoints, restart=restart)
    messages = env.source(KafkaSource(servers, source, max_rows=200), uid="messages")
    values = messages.map(lambda row: row[1], "value binary", uid="value")
    values.sink(KafkaSink(servers, target, staging=directory / "staged"), uid="copies")
    env.execute_async(restore_from="latest").wait()


def run_query(spark: SparkSession, directory: Path, servers: str, source: str, target: str) -> None:
    spark.dataSource.register(KafkaDataSource)
    options = {"kafka.bootstrap.servers": servers, "subscribe": source, "maxOffsetsPerTrigger": "200"}
    tried = directory / "tried"
    tried.mkdir(exist_ok=True)

    def value(record: dict[str, Any]) -> dict[str, Any]:
        number = int(record["value"])
        if number % FAILS_EACH == 0 and not (tried / str(number)).exists():
            (tried / str(number)).touch()
            raise ValueError("meant to fail once")
        return {"value": record["value"]}

    with FTLayer.embedded(str(directory / "ft"), max_attempts=5, backoff=("10ms",)) as layer:
        stream = spark.readStream.format("ftlayer-kafka").options(**options).load()
        written = {"kafka.bootstrap.servers": servers, "topic": target, "staging": str(directory / "staged")}
        copies = layer.source(stream, name="messages").map(value, "value binary")
        query = copies.write_stream(KafkaDataSource, checkpoint=str(directory / "ck"), **written)
        query.trigger(processingTime="50 milliseconds").start().awaitTermination()


if __name__ == "__main__":
    kind, where, *rest = sys.argv[1:]
    run = {"barrier": run_topology, "wrapped": run_query}[kind]
    run(session(), Path(where), *rest)
