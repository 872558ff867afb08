"""Numbers into a table by a driver that may be killed: ``python table_job.py JOB.json``, or built by a test."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from ftlayer import CheckpointConfig, FixedDelay, StreamEnvironment, partitions
from ftlayer.sinks import DeltaSink, IcebergSink

NUMBER = pa.schema([("number", pa.int64()), ("key", pa.string())])
SOURCES = 2
TABLE = "shop.numbers"


@dataclass(frozen=True)
class TableJob:
    """What is run, by whichever driver.

    ``pace_s``: so long passes over 100 numbers. ``kills``: seed of kills of slots.
    """

    directory: str
    kind: str
    count: int
    pace_s: float = 0.0
    kills: int | None = None

    @property
    def path(self) -> str:
        return f"{self.directory}/table"

    @property
    def catalog(self) -> dict[str, str]:
        return {
            "type": "sql",
            "uri": f"sqlite:///{self.directory}/catalog.db",
            "warehouse": f"file://{self.directory}/warehouse",
        }

    @property
    def gate(self) -> Path:
        """Once it is there, the sources come to their end."""
        return Path(self.directory) / "gate"

    def sink(self) -> Any:
        if self.kind == "delta":
            return DeltaSink(self.path, partition_by=["key"])
        return IcebergSink(TABLE, self.catalog, partition_by=["key"])

    def numbers(self) -> list[int]:
        """What readers of the table see."""
        if not self.seen():
            return []
        if self.kind == "delta":
            return self._delta().to_pyarrow_table()["number"].to_pylist()
        with self._iceberg() as table:
            return table.scan().to_arrow()["number"].to_pylist()

    def seen(self) -> int:
        """How many rows there are, by what the table says of itself."""
        if self.kind == "delta":
            from deltalake import DeltaTable

            return self._delta().count() if DeltaTable.is_deltatable(self.path) else 0
        with self._iceberg() as table:
            snapshot = table and table.current_snapshot()
            return int(snapshot.summary["total-records"]) if snapshot else 0

    def _delta(self) -> Any:
        from deltalake import DeltaTable

        return DeltaTable(self.path)

    @contextlib.contextmanager
    def _iceberg(self) -> Iterator[Any]:
        """The table; None: there is none yet."""
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NoSuchTableError

        catalog = load_catalog("default", **self.catalog)
        try:
            table = catalog.load_table(TABLE)
        except NoSuchTableError:
            table = None
        try:
            yield table
        finally:
            catalog.close()


def read(job: TableJob, source: int) -> Iterator[Any]:
    """The numbers of a source."""
    begun = Path(job.directory) / "begun"
    if not begun.exists():
        begun.touch()
    begun_s = begun.stat().st_mtime
    for number in range(source, job.count, SOURCES):
        wait_s = begun_s + number * job.pace_s / 100 - time.time() if job.pace_s else 0.0
        if wait_s > 0:
            time.sleep(wait_s)
        yield number, f"key {number % 2}"
    while not job.gate.exists():
        time.sleep(0.02)


def start(spark: Any, job: TableJob, restore_from: str = "latest") -> Any:
    """Run it from the latest checkpoint there is, or from another one."""
    env = StreamEnvironment(
        spark,
        name="numbers",
        parallelism=2,
        restart=FixedDelay(attempts=1_000, delay="10ms"),
        checkpointing=CheckpointConfig(
            interval="300ms", directory=f"{job.directory}/checkpoints", retention="retain-on-cancellation"
        ),
    )
    parts = partitions(*(partial(read, job, source) for source in range(SOURCES)))
    env.source(parts, NUMBER, uid="numbers").key_by("number").map(lambda row: row, NUMBER, uid="same").sink(
        job.sink(), uid="table"
    )
    return env.execute_async(restore_from=restore_from)


def kill_slots(running: Any, draw: random.Random) -> None:
    """Kill slots until the job is over, at random moments behind the first checkpoint of a deployment."""
    completed = 0
    while not running.over(0.05):
        status = running.status()
        if status.checkpoints.completed <= completed:
            continue
        if running.over(draw.uniform(0.0, 4.0)):
            return
        slots = [slot.pid for slot in running.status().slots if slot.pid]
        for pid in draw.sample(slots, draw.randint(1, len(slots)) if slots else 0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        completed = running.status().checkpoints.completed


def save(job: TableJob) -> Path:
    """Write a job down for a driver; returns where."""
    path = Path(job.directory) / "job.json"
    path.write_text(json.dumps(asdict(job)))
    return path


def main(job: TableJob) -> None:
    """Run one life."""
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    running = start(spark, job)
    if job.kills is not None:
        kill_slots(running, random.Random(job.kills))
    running.wait()
    spark.stop()


if __name__ == "__main__":
    main(TableJob(**json.loads(Path(sys.argv[1]).read_text())))
