"""Both modes over Spark Connect: ``python connect_topologies.py DIRECTORY ADDRESS TOKEN_FILE LINES_FILE``.

Each topology loses a slot to SIGKILL and is compared with its recount; the exit code is 0 if nothing is missing, and
nothing more there than its mode allows.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from pyspark.sql import SparkSession

from ftlayer import CheckpointConfig, FixedDelay, FTLayer, StreamEnvironment

sys.path.insert(0, str(Path(__file__).parent))

from cluster_topologies import load


def kill_a_slot(job: Any) -> None:
    while not (victim := job.status().slots[0].pid):
        assert not job.over(0.02), job.status()
    os.kill(victim, signal.SIGKILL)


def run_tracked(kit: ModuleType, spark: Any, layer: FTLayer, directory: Path, lines: list[str]) -> None:
    """Acker mode, with a vertex that a server of its own runs."""
    logs = kit.GrowingLogs(directory, lines)
    logs.grow(300)
    env = StreamEnvironment(spark, layer, name="tracked", parallelism=2)
    kit.build(env, directory)
    job = env.execute_async()
    ledger = kit.Ledger(directory, layer, "tracked")

    def grow() -> None:
        logs.grow(10)

    kit.until(job, lambda: len(ledger.sink()) > 100, grow)
    kill_a_slot(job)
    kit.until(job, lambda: job.status().restarts, grow)
    kit.until(job, ledger.all_there)
    assert job.drain(kit.WAIT_S)
    ledger.check(exact=False)


def run_checkpointed(kit: ModuleType, spark: Any, directory: Path) -> None:
    """Barrier mode."""
    env = StreamEnvironment(
        spark,
        name="checkpointed",
        parallelism=2,
        restart=FixedDelay(attempts=5, delay="10ms"),
        checkpointing=CheckpointConfig(interval="200ms", directory=str(directory / "checkpoints")),
    )
    kit.build(env, directory, pace_s=0.05)
    job = env.execute_async()
    while job.status().checkpoints.completed < 2:
        assert not job.over(0.02), "the job ended before its slot was killed"
    kill_a_slot(job)
    job.wait()
    assert job.status().restarts >= 1
    kit.Ledger(directory).check()


def main(directory: Path, address: str, token: Path, lines: Path) -> None:
    logs_kit, barrier_kit = load("log_job"), load("barrier_job")
    spark = (
        SparkSession.builder.remote("local[2,4]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    assert type(spark).__module__ == "pyspark.sql.connect.session"
    for name in ("tracked", "checkpointed"):
        (directory / name).mkdir()
    options: dict[str, Any] = {"backoff": "20ms", "jitter": 0, "max_attempts": logs_kit.MAX_ATTEMPTS}
    with FTLayer.connect(address, token=token.read_text().strip(), **options) as layer:
        run_tracked(logs_kit, spark, layer, directory / "tracked", lines.read_text().splitlines())
    run_checkpointed(barrier_kit, spark, directory / "checkpointed")
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
