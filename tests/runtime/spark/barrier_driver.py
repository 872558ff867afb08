"""A driver in barrier mode that may be killed at any moment: ``python barrier_driver.py DIRECTORY COUNT PACE [FAILS]``.

It goes on from the latest checkpoint there is, and exits with 0 when everything is through. With a fourth argument
records fail, and are tried again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pyspark.sql import SparkSession

from ftlayer import CheckpointConfig, FailurePolicy, FixedDelay, Retention, StreamEnvironment
from ftlayer.runtime.environment import LATEST

sys.path.insert(0, str(Path(__file__).parent))

from rescaling import load_kit


def main(directory: Path, count: int, pace_s: float, *, fails: bool) -> None:
    """Run one life."""
    kit = load_kit()
    spark = (
        SparkSession.builder.master("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    config = CheckpointConfig(
        interval="150ms",
        directory=str(directory / "checkpoints"),
        retention=Retention.RETAIN_ON_CANCELLATION,
        backend="lmdb",
        incremental=True,
        failures=FailurePolicy(max_attempts=2, backoff="50ms") if fails else None,
    )
    restart = FixedDelay(attempts=1_000, delay="10ms")
    env = StreamEnvironment(spark, name="driven", parallelism=2, checkpointing=config, restart=restart)
    functions = {"function": kit.stumble, "process": kit.Tallying()} if fails else {}
    kit.build(env, directory, count=count, pace_s=pace_s, **functions)
    env.execute_async(restore_from=LATEST).wait()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), fails=len(sys.argv) > 4)
