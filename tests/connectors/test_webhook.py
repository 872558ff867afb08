"""A webhook in topologies that lose their slot, and in a query that is started again: senders repeat."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from servers import free_port

from ftlayer import CheckpointConfig, FixedDelay, FTLayer, StreamEnvironment
from ftlayer.sinks import FileSink
from ftlayer.sources import WebhookDataSource, WebhookSource

pytestmark = pytest.mark.spark

NUMBER = pa.schema([("number", pa.int64())])
COUNT, SENDERS, KILLS_AT = 96, 16, 40


class Senders:
    """Send all numbers, each until it is answered with 202; ``sent`` counts how often."""

    def __init__(self, port: int) -> None:
        self.sent: Counter[int] = Counter()
        self._url = f"http://127.0.0.1:{port}/numbers"
        self._threads = [threading.Thread(target=self._send, args=(first,)) for first in range(SENDERS)]
        for thread in self._threads:
            thread.start()

    def _send(self, first: int) -> None:
        with httpx.Client(timeout=600) as client:
            for number in range(first, COUNT, SENDERS):
                while not self._is_answered(client, number):
                    pass

    def _is_answered(self, client: httpx.Client, number: int) -> bool:
        try:
            answer = client.post(self._url, content=str(number))
        except httpx.ConnectError:
            return False
        except httpx.TransportError:
            self.sent[number] += 1
            return False
        self.sent[number] += answer.status_code != 429
        return answer.status_code == 202

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


def number_in(directory: Path) -> Callable[[Any], Any]:
    """Make a request its number; one of them kills the process that meets it first."""

    def function(record: Any) -> int:
        number = int(record[-1])
        if number == KILLS_AT:
            with contextlib.suppress(FileExistsError):
                (directory / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return number

    return function


@contextmanager
def running(env: StreamEnvironment) -> Iterator[Any]:
    job = env.execute_async()
    try:
        yield job
    finally:
        job.cancel()


def test_barrier_mode_has_each_request_that_it_answered_once(
    spark: Any, wait_until: Any, tmp_path: Path
) -> None:
    env = StreamEnvironment(
        spark,
        name="hook",
        parallelism=1,
        restart=FixedDelay(attempts=20, delay="10ms"),
        checkpointing=CheckpointConfig(interval="50ms", directory=str(tmp_path / "checkpoints")),
    )
    port = free_port()
    numbers = env.source(WebhookSource(f"127.0.0.1:{port}"), uid="hook").map(number_in(tmp_path), NUMBER)
    numbers.sink(FileSink(str(tmp_path / "out")), uid="files")
    with running(env):
        senders = Senders(port)
        senders.join()
        # What was answered is in a complete checkpoint; its files follow.
        wait_until(lambda: set(found(tmp_path / "out")) == set(range(COUNT)), "all requests")
    assert (tmp_path / "killed").exists()
    assert not found(tmp_path / "out") - senders.sent, "more often than it was sent"


def found(out: Path) -> Counter[int]:
    if not out.exists():
        return Counter()
    return Counter(ds.dataset(out, NUMBER, format="parquet").to_table()["number"].to_pylist())


@pytest.mark.campaign
def test_acker_mode_loses_no_request_that_it_answered(spark: Any, wait_until: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()

    def keep(batch: pa.RecordBatch) -> None:
        with (tmp_path / "out" / f"{os.getpid()}.txt").open("a") as file:
            file.writelines(f"{number}\n" for number in batch.column(0).to_pylist())

    def kept() -> set[int]:
        texts = [path.read_text() for path in (tmp_path / "out").iterdir()]
        return {int(line) for text in texts for line in text.splitlines()}

    port = free_port()
    with FTLayer.embedded(str(tmp_path / "ft"), timeout="5s") as layer:
        env = StreamEnvironment(
            spark, layer, name="hook", parallelism=1, restart=FixedDelay(attempts=20, delay="10ms")
        )
        numbers = env.source(WebhookSource(f"127.0.0.1:{port}"), uid="hook").map(number_in(tmp_path), NUMBER)
        numbers.sink(keep, uid="kept")
        with running(env):
            Senders(port).join()
            wait_until(lambda: kept() == set(range(COUNT)), "all requests")
    assert (tmp_path / "killed").exists()


def test_plain_spark_has_each_request_that_it_answered_once(
    spark: Any, wait_until: Any, tmp_path: Path
) -> None:
    """The query is stopped and started again while they are sent."""
    spark.dataSource.register(WebhookDataSource)
    port = free_port()
    found: dict[int, list[int]] = {}

    def keep(rows: Any, batch_id: int) -> None:
        found[batch_id] = [int(row.body.decode()) for row in rows.collect()]

    def start() -> Any:
        reader = spark.readStream.format("ftlayer-webhook").option("listen", f"127.0.0.1:{port}")
        stream = reader.option("spool", str(tmp_path / "spool")).load()
        writer = stream.writeStream.foreachBatch(keep)
        return writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()

    def numbers() -> list[int]:
        return [number for batch in list(found.values()) for number in batch]

    query = start()
    try:
        senders = Senders(port)
        wait_until(lambda: len(numbers()) >= COUNT // 3, "requests on their way")
        query.stop()
        query = start()
        senders.join()
        query.processAllAvailable()
    finally:
        query.stop()
    taken = Counter(numbers())
    assert set(taken) == set(range(COUNT))
    assert all(taken[number] <= senders.sent[number] for number in taken)
