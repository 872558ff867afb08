"""A topic of Kafka copied to another: drivers, slots and the broker end in the middle, each message is there once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ftlayer import CheckpointConfig, FixedDelay, FTLayer, StreamEnvironment
from ftlayer.errors import UnsupportedError
from ftlayer.sinks import KafkaSink
from ftlayer.sources import KafkaDataSource, KafkaSource

pytestmark = pytest.mark.spark

SCRIPT = Path(__file__).with_name("kafka_driver.py")
TOTAL, PART, KILLS_AT = 3_000, 500, 700
COUNT = count()
KILLS = 5


@pytest.fixture
def topics(kafka_server: Any) -> tuple[str, str]:
    """Where messages come from, and where they go."""
    names = tuple(f"{what}-{os.getpid()}-{next(COUNT)}" for what in ("messages", "copies"))
    for name in names:
        kafka_server.make_topic(name, 3)
    return names[0], names[1]


def value_in(directory: Path) -> Callable[[Any], Any]:
    """Pass a message's value on; one of them kills the process that meets it first."""

    def function(record: Any) -> Any:
        if int(record[1]) == KILLS_AT:
            with contextlib.suppress(FileExistsError):
                (directory / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return record[1]

    return function


def test_barrier_mode_copies_each_message_once(
    spark: Any, kafka_server: Any, topics: tuple[str, str], wait_until: Any, tmp_path: Path
) -> None:
    """A slot is killed with messages in flight; the broker is restarted between them.

    (`noida-db` loses a transaction that is open when it is restarted, and says then that it is committed.)
    """
    source, target = topics
    checkpoints = CheckpointConfig(interval="200ms", directory=str(tmp_path / "checkpoints"))
    restart = FixedDelay(attempts=20, delay="10ms")
    env = StreamEnvironment(spark, name="copies", parallelism=2, restart=restart, checkpointing=checkpoints)
    messages = env.source(KafkaSource(kafka_server.url, source, max_rows=300), uid="messages")
    values = messages.map(value_in(tmp_path), "value binary", uid="value")
    values.sink(KafkaSink(kafka_server.url, target, staging=tmp_path / "staged"), uid="copies")
    job = env.execute_async()

    def found() -> list[int]:
        if job.status().state.is_final:
            job.wait()
        numbers: list[int] = kafka_server.numbers(target)
        return numbers

    try:
        for first in range(0, TOTAL, PART):
            if first == 4 * PART and not os.environ.get("FTLAYER_KAFKA"):
                wait_until(lambda first=first: len(found()) >= first, "all messages before the restart")
                kafka_server.restart(signal.SIGTERM)
            kafka_server.produce(source, first // PART % 3, range(first, first + PART))
            wait_until(lambda first=first: len(found()) >= first, "messages on their way")
        wait_until(lambda: len(found()) >= TOTAL, "all messages")
    finally:
        job.cancel()
    assert (tmp_path / "killed").exists()
    assert sorted(found()) == list(range(TOTAL))
    assert not [path for path in (tmp_path / "staged").rglob("*") if path.is_file()]


@pytest.mark.campaign
def test_a_savepoint_is_restored_at_other_parallelisms(
    spark: Any, kafka_server: Any, topics: tuple[str, str], wait_until: Any, tmp_path: Path
) -> None:
    source, target = topics

    def start(parallelism: int, restore_from: str | None) -> Any:
        checkpoints = CheckpointConfig(interval="100ms", directory=str(tmp_path / "checkpoints"))
        env = StreamEnvironment(spark, name="copies", parallelism=parallelism, checkpointing=checkpoints)
        messages = env.source(KafkaSource(kafka_server.url, source, max_rows=100), uid="messages")
        values = messages.rebalance().map(lambda record: record[1], "value binary", uid="value")
        values.sink(KafkaSink(kafka_server.url, target, staging=tmp_path / "staged"), uid="copies")
        return env.execute_async(restore_from=restore_from)

    where: str | None = None
    for turn, parallelism in enumerate((1, 2, 1)):
        job = start(parallelism, where)
        try:
            first = turn * PART
            kafka_server.produce(source, turn % 3, range(first, first + PART))
            wait_until(
                lambda first=first: len(kafka_server.numbers(target)) >= first + PART // 3,
                "messages on their way",
            )
            where = job.stop_with_savepoint(str(tmp_path / "savepoints"), 600)
        finally:
            job.cancel()
    job = start(2, where)
    try:
        wait_until(lambda: len(kafka_server.numbers(target)) >= 3 * PART, "all messages")
    finally:
        job.cancel()
    assert sorted(kafka_server.numbers(target)) == list(range(3 * PART))


def test_acker_mode_takes_the_sink_that_may_write_twice(
    spark: Any, topics: tuple[str, str], kafka_server: Any, tmp_path: Path
) -> None:
    with FTLayer.embedded(str(tmp_path / "ft")) as layer:
        env = StreamEnvironment(spark, layer, name="refused")
        messages = env.source(KafkaSource(kafka_server.url, topics[0]), uid="messages")
        messages.sink(KafkaSink(kafka_server.url, topics[1], staging=tmp_path), uid="copies")
        with pytest.raises(
            UnsupportedError, match="sink 'copies': an exactly-once KafkaSink commits behind checkpoints"
        ):
            env.execute_async()


@pytest.mark.campaign
@pytest.mark.parametrize("as_function", [False, True])
def test_acker_mode_loses_no_message(
    spark: Any, kafka_server: Any, topics: tuple[str, str], wait_until: Any, tmp_path: Path, as_function: bool
) -> None:
    source, target = topics
    sink = KafkaSink(kafka_server.url, target, exactly_once=False)
    with FTLayer.embedded(str(tmp_path / "ft"), timeout="5s") as layer:
        restart = FixedDelay(attempts=20, delay="10ms")
        env = StreamEnvironment(spark, layer, name="copies", parallelism=2, restart=restart)
        messages = env.source(KafkaSource(kafka_server.url, source, max_rows=300), uid="messages")
        values = messages.map(value_in(tmp_path), "value binary", uid="value")
        values.sink(sink.send if as_function else sink, uid="copies", every="50ms")
        job = env.execute_async()
        try:
            for first in range(0, TOTAL, PART):
                kafka_server.produce(source, first // PART % 3, range(first, first + PART))
                if first == 3 * PART and not os.environ.get("FTLAYER_KAFKA"):
                    kafka_server.restart(signal.SIGTERM)
                wait_until(
                    lambda first=first: len(set(kafka_server.numbers(target))) >= first,
                    "messages on their way",
                )
            wait_until(lambda: len(set(kafka_server.numbers(target))) >= TOTAL, "all messages")
        finally:
            job.cancel()
    assert (tmp_path / "killed").exists()
    assert set(kafka_server.numbers(target)) == set(range(TOTAL))


@pytest.mark.campaign
def test_plain_spark_copies_each_message_once(
    spark: Any, kafka_server: Any, topics: tuple[str, str], tmp_path: Path
) -> None:
    """The batch that was not noted when the driver died is run again."""
    source, target = topics
    spark.dataSource.register(KafkaDataSource)

    def run() -> None:
        options = {
            "kafka.bootstrap.servers": kafka_server.url,
            "subscribe": source,
            "maxOffsetsPerTrigger": "70",
        }
        rows = (
            spark.readStream.format("ftlayer-kafka")
            .options(**options)
            .load()
            .select("key", "value", "headers")
        )
        written = {
            "topic": target,
            "staging": str(tmp_path / "staged"),
            "checkpointLocation": str(tmp_path / "ck"),
        }
        writer = rows.writeStream.format("ftlayer-kafka").options(**written)
        writer = writer.option("kafka.bootstrap.servers", kafka_server.url)
        writer.trigger(availableNow=True).start().awaitTermination()

    kafka_server.produce(source, 0, range(200), key="k", headers=[("h", b"1")])
    run()
    commits = tmp_path / "ck" / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
    assert last > 0
    for note in (str(last), f".{last}.crc"):
        (commits / note).unlink()
    kafka_server.produce(source, 1, range(200, 300))
    run()
    assert sorted(kafka_server.numbers(target)) == list(range(300))
    first = next(message for message in kafka_server.messages(target) if message.value() == b"7")
    assert (first.key(), first.headers()) == (b"k", [("h", b"1")])


@contextlib.contextmanager
def driver(kind: str, directory: Path, *more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A driver that is killed in the end."""
    with (directory / "driver.txt").open("ab") as log:
        process = subprocess.Popen([sys.executable, SCRIPT, kind, directory, *more], stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.campaign
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("kind", ["barrier", "wrapped"])
def test_drivers_are_killed(
    kind: str, kafka_server: Any, topics: tuple[str, str], wait_until: Any, tmp_path: Path
) -> None:
    """Each some moments after it has copied something; messages come all the while."""
    source, target = topics
    draw, produced = random.Random(kind), count()

    def more() -> int:
        first = next(produced) * 100
        kafka_server.produce(source, draw.randrange(3), range(first, first + 100))
        return first + 100

    for life in range(KILLS + 1):
        before, total = len(kafka_server.numbers(target)), more()
        with driver(kind, tmp_path, kafka_server.url, source, target) as process:

            def is_copied(least: int, process: Any = process) -> bool:
                assert process.poll() is None, (tmp_path / "driver.txt").read_text("utf-8", "replace")[
                    -6_000:
                ]
                return len(kafka_server.numbers(target)) >= least

            wait_until(lambda before=before: is_copied(before + 1), "a first message of this driver")
            if life < KILLS:
                for _ in range(draw.randrange(1, 4)):
                    total = more()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(draw.uniform(0, 0.4))
            else:
                wait_until(lambda total=total: is_copied(total), "all messages")
    found = Counter(kafka_server.numbers(target))
    assert set(found) == set(range(total))
    assert max(found.values()) == 1
