"""Topologies of both modes whose session's JVM is killed: ``python lost_session.py DIRECTORY``.

The driver's Python process lives on. Each job has to end by itself, with an error that says what is gone; the exit
code is 0 if they do.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession

from ftlayer import CheckpointConfig, FixedDelay, FTLayer, JobState, StreamEnvironment
from ftlayer.errors import SessionLostError

WAIT_S = 600


def numbers() -> Iterator[int]:
    for number in itertools.count():
        time.sleep(0.01)
        yield number


def ignore(batch: Any) -> None:
    pass


def start(env: StreamEnvironment) -> Any:
    env.source(numbers, "id bigint", uid="numbers").key_by("id").map(lambda it: it, uid="same").sink(ignore)
    return env.execute_async()


def kill_jvm() -> None:
    """Kill the JVM that this process has started."""
    gateway: Any = SparkContext._gateway
    gateway.proc.kill()
    gateway.proc.wait()


def says_that_the_jvm_is_gone(job: Any) -> None:
    """Wait until a job is over, and look at its reason."""
    assert job.over(WAIT_S), job.status()
    error = job.exception()
    print(f"{job.name}: {error}")
    assert isinstance(error, SessionLostError), error
    assert "JVM" in str(error), error
    assert job.state is JobState.FAILED, job.status()


def main(directory: Path) -> None:
    spark = (
        SparkSession.builder.master("local[4]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    # Without limit: it is not the restart strategy that is to end them.
    patient = FixedDelay(attempts=1 << 20, delay="10ms")
    checkpointing = CheckpointConfig(interval="200ms", directory=str(directory / "checkpoints"))
    with FTLayer.embedded(directory / "ft") as layer:
        jobs = [
            start(StreamEnvironment(spark, layer, name="tracked", restart=patient)),
            start(StreamEnvironment(spark, name="checked", restart=patient, checkpointing=checkpointing)),
        ]
        while any(job.state is not JobState.RUNNING for job in jobs):
            time.sleep(0.05)
        kill_jvm()
        for job in jobs:
            says_that_the_jvm_is_gone(job)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
