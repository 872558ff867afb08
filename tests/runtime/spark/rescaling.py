"""A job that is stopped with savepoints and goes on at other parallelisms: ``python rescaling.py DIRECTORY``.

Its Python workers come from the daemon that has ftlayer imported before it forks them.

Prints "exact" if nothing was lost, duplicated, or out of order within a key, and all counts are right.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from ftlayer import CheckpointConfig, StreamEnvironment

COUNT = 4_000


def load_kit() -> ModuleType:
    """Load `barrier_job` from beside this file; what slots run of it travels whole."""
    spec = importlib.util.spec_from_file_location("barrier_job", Path(__file__).with_name("barrier_job.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["barrier_job"] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def environment(spark: Any, directory: Path, parallelism: int) -> StreamEnvironment:
    """The job at one parallelism; the backend changes with it, which savepoints do not mind."""
    backend = "lmdb" if parallelism % 2 else "heap"
    config = CheckpointConfig(interval="200ms", directory=str(directory / "checkpoints"), backend=backend)  # type: ignore[arg-type]
    return StreamEnvironment(spark, name="rescaled", parallelism=parallelism, checkpointing=config)


def begun_with_ftlayer(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Say whether the worker has what slots import."""
    for batch in batches:
        there = "ftlayer.runtime.slot.main" in sys.modules
        yield pa.record_batch({"there": [there] * batch.num_rows})


def main(directory: Path) -> None:
    """Run the job in four lives."""
    kit = load_kit()
    spark = (
        SparkSession.builder.master("local[4]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.python.daemon.module", "ftlayer.runtime.worker_daemon")
        .getOrCreate()
    )
    rows = spark.range(0, 8, 1, 4).mapInArrow(begun_with_ftlayer, "there boolean").collect()
    assert [row.there for row in rows] == [True] * 8, rows
    ledger = kit.Ledger(directory, count=COUNT)
    where: str | None = None
    for number, parallelism in enumerate((2, 3, 1)):
        env = environment(spark, directory, parallelism)
        kit.build(env, directory, count=COUNT, pace_s=0.08, passing=min(2, parallelism))
        seen = len(ledger.rows())
        job = env.execute_async(restore_from=where)
        while len(ledger.rows()) <= seen + 300:
            time.sleep(0.02)
            job.wait(0)
        location = job.stop_with_savepoint(str(directory / "savepoints"))
        where = str(directory / f"moved-{number}")
        shutil.move(location, where)
    env = environment(spark, directory, 4)
    kit.build(env, directory, count=COUNT, passing=2)
    env.execute_async(restore_from=where).wait()
    ledger.check()
    spark.stop()
    print("exact")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
