"""A wrapped query on a standalone cluster: ``python cluster_job.py CONFIG.json``; see test_cluster.py.

What it wrote and said is in ``result.json``.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from programs import children_of, is_running

WORD_SCHEMA = "line string, copy int, nonce string"
FAILURES = 0.03
SLOW_S = 600.0
"""The other attempt is ended as soon as the speculative one has succeeded."""

GRACE_S = 30.0
"""How long an executor that was asked to go may take. Where it is the only one it would try for ever to move its
blocks, so then it is killed, as YARN and Kubernetes do at the end of their grace."""

GONE_S = 300.0
"""An executor that has not ended by then will not."""

Row = dict[str, Any]


@dataclass
class ClusterJob:
    """Where the cluster is; ``workers`` are the process ids of its workers, ``settings`` further ones of Spark."""

    directory: str
    master: str
    workers: list[int]
    settings: dict[str, str]


def answers_differently(row: Row) -> list[Row]:
    """Fail at random; otherwise give two rows that belong together, and to this call."""
    if random.random() < FAILURES:
        raise RuntimeError("at random")
    nonce = uuid.uuid4().hex
    return [{"line": row["value"], "copy": copy, "nonce": nonce} for copy in (0, 1)]


def fails_behind_the_shuffle(row: Row) -> Row:
    if random.random() < FAILURES:
        raise RuntimeError("at random, late")
    return row


def slow_at_first(directory: Path) -> Callable[[Row], list[Row]]:
    """Give a function that is slow in the first attempt of the task that gets a line of its kind."""
    speculated = str(directory / "speculated")

    def run(row: Row) -> list[Row]:
        if "slow" in row["value"]:
            from pyspark import TaskContext

            if TaskContext.get().attemptNumber() == 0:
                time.sleep(SLOW_S)
            else:
                Path(speculated).touch()
        return answers_differently(row)

    return run


class LoseExecutors:
    """Takes executors away between the verdict and the sink: those of one worker a batch, from batch 1 on.

    Those of each worker are killed, then the first one's are decommissioned: asked to go.
    """

    def __init__(self, workers: list[int]) -> None:
        self._turns = [*((worker, signal.SIGKILL) for worker in workers), (workers[0], signal.SIGPWR)]
        self.lost: list[list[int]] = []

    def __call__(self, step: str, batch: int) -> None:
        turn = len(self.lost)
        if step != "sealed" or batch != turn + 1 or turn >= len(self._turns):
            return
        worker, ask = self._turns[turn]
        executors = children_of(worker)
        for executor in executors:
            os.kill(executor, ask)
        if not self._have_gone(executors, GRACE_S):
            for executor in filter(is_running, executors):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(executor, signal.SIGKILL)
            assert self._have_gone(executors, GONE_S), f"executors {executors} have not gone by {ask.name}"
        self.lost.append(executors)

    @staticmethod
    def _have_gone(executors: list[int], within_s: float) -> bool:
        deadline = time.monotonic() + within_s
        while any(map(is_running, executors)):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def main(job: ClusterJob) -> None:
    from ftlayer.spark.facade import FTLayer
    from ftlayer.spark.query.writer import watch_steps

    directory = Path(job.directory)
    spark = session(job)
    layer = FTLayer.embedded(directory / "store", max_attempts=8, backoff="50ms")
    losses = LoseExecutors(job.workers)
    calls: list[tuple[int, list[tuple[Any, ...]]]] = []
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(directory / "lines"))
    writer = (
        layer.source(lines, name="lines")
        .flat_map(slow_at_first(directory), WORD_SCHEMA)
        .key_by("line", "copy", partitions=4)
        .map(fails_behind_the_shuffle, WORD_SCHEMA)
        .sink(_collect(calls), checkpoint=str(directory / "checkpoint"))
        .trigger(availableNow=True)
    )
    watch_steps(writer, losses)
    query = writer.start()
    query.awaitTermination()
    result = {
        "calls": calls,
        "restarts": query.restarts,
        "last_failure": query.last_failure,
        "status": asdict(query.ft_status()),
        "address": layer.address,
        "driver": spark.conf.get("spark.driver.host"),
        "lost": losses.lost,
        "states": [(report.batch, report.state, report.differs) for report in query.recent_batches],
        "speculated": (directory / "speculated").exists(),
    }
    (directory / "result.json").write_text(json.dumps(result))
    layer.close()
    spark.stop()


def _collect(calls: list[tuple[int, list[tuple[Any, ...]]]]) -> Callable[[Any, int], None]:
    def sink(rows: Any, batch: int) -> None:
        calls.append((batch, [tuple(row) for row in rows.collect()]))

    return sink


def session(job: ClusterJob) -> Any:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        "spark.log.level": "WARN",
        "spark.executor.extraJavaOptions": os.environ["SPARK_DAEMON_JAVA_OPTS"],
        "spark.executor.memory": "512m",
        "spark.sql.shuffle.partitions": "4",
        "spark.sql.files.maxPartitionBytes": "4000b",
        "spark.sql.files.openCostInBytes": "1b",
        "spark.sql.warehouse.dir": f"{job.directory}/warehouse",
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.executorIdleTimeout": "4s",
        "spark.decommission.enabled": "true",
        "spark.storage.decommission.enabled": "true",
        # By default an executor that goes looks every half minute whether its blocks have gone.
        "spark.storage.decommission.replicationReattemptInterval": "1s",
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "3",
        **job.settings,
    }
    builder = SparkSession.builder.master(job.master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def rows_of(calls: list[tuple[int, list[list[Any]]]]) -> Iterator[tuple[str, int, str]]:
    """Yield what a sink that overwrites by batch id holds."""
    for rows in dict(map(tuple, calls)).values():
        yield from rows


if __name__ == "__main__":
    main(ClusterJob(**json.loads(Path(sys.argv[1]).read_text())))
