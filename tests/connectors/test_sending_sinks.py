"""Sinks that send each row at least once, in topologies and queries: slots and servers are killed in the middle."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import CheckpointConfig, FixedDelay, FTLayer, StreamEnvironment

pytestmark = [pytest.mark.spark, pytest.mark.campaign]

COUNT = 6_000
KILLS_AT = (1_500, 4_500)
NUMBER = pa.schema([("number", pa.int64())])
TEXTS = pa.schema([("id", pa.string())])


class AmqpReceiver:
    """A queue whose messages are numbers."""

    format, options = "ftlayer-amqp", ("routingKey", "body")

    def __init__(self, server: Any, name: str) -> None:
        from ftlayer.sinks import AmqpSink
        from ftlayer.sources import AmqpDataSource

        self.server, self.name, self.data_source = server, name, AmqpDataSource
        self.sink = AmqpSink(server.url, routing_key=name, body="id", message_id="id")
        self.given = {"url": server.url, "routingKey": name, "body": "id"}
        self.numbers: list[int] = []
        with server.client() as client:
            client.channel().queue_declare(name, durable=True)

    def received(self) -> list[int]:
        import pika

        with contextlib.suppress(pika.exceptions.AMQPError, OSError), self.server.client() as client:
            channel = client.channel()
            while (message := channel.basic_get(self.name))[0] is not None:
                channel.basic_ack(message[0].delivery_tag)
                self.numbers.append(int(message[2]))
        return self.numbers


class MqttReceiver:
    """A topic whose messages are numbers, and a session that has subscribed to it."""

    def __init__(self, server: Any, name: str) -> None:
        from ftlayer.sinks import MqttSink
        from ftlayer.sources import MqttDataSource, MqttSource
        from ftlayer.topology.operators import Member

        self.server, self.name, self.data_source = server, name, MqttDataSource
        self.sink = MqttSink(server.url, topic=name, body="id")
        self.given = {"url": server.url, "topic": name, "body": "id"}
        self.numbers: list[int] = []
        self.reader = MqttSource(server.url, name).open(Member(name, 0, 1), {}, stored=True)
        self.received()

    def received(self) -> list[int]:
        while (fetched := self.reader.fetch(1_000, 0.05)) is not None:
            self.numbers += map(int, fetched.rows.column("value").to_pylist())
            self.reader.acknowledge([fetched.receipt])
        return self.numbers


@pytest.fixture(params=["amqp", "mqtt"])
def receiver(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "amqp":
        return AmqpReceiver(request.getfixturevalue("rabbit_server"), tmp_path.name)
    return MqttReceiver(request.getfixturevalue("mosquitto"), tmp_path.name)


def killing(directory: Path) -> Callable[[int], str]:
    """Make a number a text; two of them kill the process that meets them first."""

    def function(number: int) -> str:
        if number in KILLS_AT:
            with contextlib.suppress(FileExistsError):
                (directory / f"killed-{number}").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return str(number)

    return function


def paced(count: int) -> Callable[[], Any]:
    """Numbers that come for some seconds, so that what happens in the middle meets them."""

    def numbers() -> Any:
        import time

        for number in range(count):
            if number % 100 == 0:
                time.sleep(0.05)
            yield number

    return numbers


def run(env: StreamEnvironment, receiver: Any, directory: Path, wait_until: Any) -> None:
    texts = env.source(paced(COUNT), NUMBER, uid="numbers").map(killing(directory), TEXTS, uid="text")
    texts.sink(receiver.sink, uid="out")
    job = env.execute_async()
    try:
        wait_until(lambda: len(set(receiver.received())) >= 500, "messages on their way")
        receiver.server.restart()

        def is_done() -> bool:
            found = receiver.received()
            if job.status().state.is_final:
                job.wait()
            return len(set(found)) >= COUNT

        wait_until(is_done, "all messages")
        job.wait(120)
    finally:
        job.cancel()
    assert all((directory / f"killed-{number}").exists() for number in KILLS_AT)
    assert set(receiver.received()) == set(range(COUNT))


def test_barrier_mode_loses_no_row(spark: Any, receiver: Any, wait_until: Any, tmp_path: Path) -> None:
    env = StreamEnvironment(
        spark,
        name="sending",
        parallelism=2,
        restart=FixedDelay(attempts=20, delay="10ms"),
        checkpointing=CheckpointConfig(interval="200ms", directory=str(tmp_path / "checkpoints")),
    )
    run(env, receiver, tmp_path, wait_until)


def test_acker_mode_loses_no_row(spark: Any, receiver: Any, wait_until: Any, tmp_path: Path) -> None:
    with FTLayer.embedded(str(tmp_path / "ft"), timeout="5s") as layer:
        env = StreamEnvironment(
            spark, layer, name="sending", parallelism=2, restart=FixedDelay(attempts=20, delay="10ms")
        )
        run(env, receiver, tmp_path, wait_until)


def test_plain_spark_writes_all_rows(spark: Any, receiver: Any, tmp_path: Path) -> None:
    """The batch that was not committed when the driver died is sent again."""
    spark.dataSource.register(receiver.data_source)
    rows = tmp_path / "rows"
    for part in range(3):
        spark.range(part * 100, part * 100 + 100).selectExpr("cast(id as string) id").write.mode(
            "append"
        ).text(str(rows))

    def write() -> None:
        lines = (
            spark.readStream.option("maxFilesPerTrigger", 2).text(str(rows)).withColumnRenamed("value", "id")
        )
        writer = lines.writeStream.format(receiver.data_source.name()).options(**receiver.given)
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    write()
    commits = tmp_path / "checkpoint" / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
    for note in (str(last), f".{last}.crc"):
        (commits / note).unlink()
    write()
    assert set(receiver.received()) == set(range(300))


def test_a_wrapped_query_writes_all_rows(spark: Any, receiver: Any, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    spark.range(300).selectExpr("cast(id as string) id").write.text(str(rows))

    def checked(record: dict[str, Any]) -> dict[str, str]:
        if int(record["value"]) == 70:
            raise ValueError("meant to fail")
        return {"id": record["value"]}

    with FTLayer.embedded(str(tmp_path / "ft"), max_attempts=2, backoff=("10ms",)) as layer:
        query = (
            layer.source(spark.readStream.text(str(rows)), name="lines")
            .map(checked, "id string")
            .write_stream(receiver.data_source, checkpoint=str(tmp_path / "ck"), **receiver.given)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        assert layer.dead_letters(spark).count() == 1
    assert set(receiver.received()) == set(range(300)) - {70}
