"""A topic of Kafka in a topology that loses a slot while the broker is restarted, and in plain Structured Streaming."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import CheckpointConfig, FixedDelay, FTLayer, StreamEnvironment
from ftlayer.sinks import FileSink
from ftlayer.sources import KafkaDataSource, KafkaSource

pytestmark = pytest.mark.spark

NUMBER = pa.schema([("number", pa.int64())])
TOTAL, PART, KILLS_AT = 3_000, 500, 700
COUNT = count()


@pytest.fixture
def topic(kafka_server: Any) -> str:
    name = f"topology-{os.getpid()}-{next(COUNT)}"
    kafka_server.make_topic(name, 3)
    return name


def number_in(directory: Path) -> Callable[[Any], Any]:
    """Make a message its number; one of them kills the process that meets it first."""

    def function(record: Any) -> int:
        number = int(record[1])
        if number == KILLS_AT:
            with contextlib.suppress(FileExistsError):
                (directory / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return number

    return function


@pytest.mark.campaign
def test_barrier_mode_reads_each_message_once(
    spark: Any, kafka_server: Any, topic: str, wait_until: Any, tmp_path: Path
) -> None:
    import pyarrow.dataset as ds
    from confluent_kafka import Consumer, TopicPartition

    env = StreamEnvironment(
        spark,
        name="topics",
        parallelism=2,
        restart=FixedDelay(attempts=20, delay="10ms"),
        checkpointing=CheckpointConfig(interval="200ms", directory=str(tmp_path / "checkpoints")),
    )
    source = KafkaSource(kafka_server.url, topic, group=topic, max_rows=300)
    env.source(source, uid="messages").map(number_in(tmp_path), NUMBER, uid="number").sink(
        FileSink(str(tmp_path / "out")), uid="files"
    )

    def found() -> list[int]:
        if not (tmp_path / "out").exists():
            return []
        read: list[int] = (
            ds.dataset(tmp_path / "out", NUMBER, format="parquet").to_table()["number"].to_pylist()
        )
        return read

    job = env.execute_async()
    consumer = Consumer({"bootstrap.servers": kafka_server.url, "group.id": topic})
    places = [TopicPartition(topic, partition) for partition in range(3)]
    try:
        for first in range(0, TOTAL, PART):
            kafka_server.produce(topic, first // PART % 3, range(first, first + PART))
            if first == 3 * PART:
                kafka_server.restart(signal.SIGTERM)
            wait_until(lambda first=first: len(found()) >= first, "messages on their way")
        wait_until(lambda: len(found()) >= TOTAL, "all messages")
        wait_until(
            lambda: sum(each.offset for each in consumer.committed(places, timeout=60)) == TOTAL,
            "the group's offsets",
        )
    finally:
        job.cancel()
        consumer.close()
    assert (tmp_path / "killed").exists()
    assert sorted(found()) == list(range(TOTAL))


@pytest.mark.campaign
@pytest.mark.parametrize("replay", ["store", "source"])
def test_acker_mode_loses_no_message(
    spark: Any, kafka_server: Any, topic: str, wait_until: Any, tmp_path: Path, replay: str
) -> None:
    from confluent_kafka import Consumer, TopicPartition

    (tmp_path / "out").mkdir()
    directory = tmp_path / "out"

    def keep(batch: pa.RecordBatch) -> None:
        with (directory / f"{os.getpid()}.txt").open("a") as file:
            file.writelines(f"{number}\n" for number in batch.column(0).to_pylist())

    def found() -> set[int]:
        return {int(line) for path in directory.iterdir() for line in path.read_text().splitlines()}

    with FTLayer.embedded(str(tmp_path / "ft"), timeout="5s") as layer:
        restart = FixedDelay(attempts=20, delay="10ms")
        env = StreamEnvironment(spark, layer, name="topics", parallelism=2, restart=restart)
        source = KafkaSource(kafka_server.url, topic, group=topic, max_rows=300)
        messages = env.source(source, uid="messages", replay=replay)
        messages.map(number_in(tmp_path), NUMBER, uid="number").sink(keep, uid="kept")
        job = env.execute_async()
        consumer = Consumer({"bootstrap.servers": kafka_server.url, "group.id": topic})
        places = [TopicPartition(topic, partition) for partition in range(3)]
        try:
            for first in range(0, TOTAL, PART):
                kafka_server.produce(topic, first // PART % 3, range(first, first + PART))
                if first == 3 * PART:
                    kafka_server.restart(signal.SIGTERM)
                wait_until(lambda first=first: len(found()) >= first, "messages on their way")
            wait_until(lambda: len(found()) >= TOTAL, "all messages")
            wait_until(
                lambda: sum(each.offset for each in consumer.committed(places, timeout=60)) == TOTAL,
                "the group's offsets",
            )
        finally:
            job.cancel()
            consumer.close()
    assert (tmp_path / "killed").exists()
    assert found() == set(range(TOTAL))


@pytest.mark.campaign
def test_plain_spark_reads_each_message_once(
    spark: Any, kafka_server: Any, topic: str, tmp_path: Path
) -> None:
    """Messages that are JSON are read with the schema that the user gives."""
    for partition in range(3):
        numbers = range(100 * partition, 100 * (partition + 1))
        kafka_server.produce(topic, partition, numbers, form='{{"number": {}}}'.format)
    spark.dataSource.register(KafkaDataSource)
    options = {"kafka.bootstrap.servers": kafka_server.url, "subscribe": topic, "maxOffsetsPerTrigger": "70"}
    reader = spark.readStream.format("ftlayer-kafka").options(**options, keep="offset")
    stream = reader.schema("number long, offset long").load()
    batches: dict[int, list[int]] = {}

    def keep(rows: Any, batch_id: int) -> None:
        batches[batch_id] = [row.number for row in rows.collect() if row.number % 100 == row.offset]

    writer = stream.writeStream.foreachBatch(keep).option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    assert sorted(number for batch in batches.values() for number in batch) == list(range(300))
    assert len(batches) > 3
