"""A wrapped query and topologies of both modes in one session: ``python every_way.py CONFIG.json``.

Each is compared with its recount; the exit code is 0 if nothing is missing, and nothing twice.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cluster_topologies import load

from ftlayer import CheckpointConfig, FTLayer, StreamEnvironment, current_record
from ftlayer.spark.facade import list_records

LINES = 600
FILES = 3


@dataclass
class EveryWayJob:
    """A session to try: its master, and its further settings."""

    directory: str
    master: str
    settings: dict[str, str]
    lines: list[str]

    def save(self) -> Path:
        file = Path(self.directory) / "job.json"
        file.write_text(json.dumps(asdict(self)))
        return file


def fate(line: str) -> str:
    number = int(line.split(" ", 1)[0])
    if number % 50 == 11:
        return "dies"
    return "stumbles" if number % 20 == 3 else "passes"


def stumble(row: dict[str, Any]) -> dict[str, Any]:
    its = fate(row["value"])
    if its == "dies" or (its == "stumbles" and current_record().attempt < 2):
        raise ValueError(f"{row['value']!r} {its}")
    return row


def run_wrapped(spark: Any, layer: FTLayer, directory: Path, lines: list[str]) -> None:
    """Each line is in the sink once, or a dead letter; records move by key on the way."""
    (directory / "in").mkdir(parents=True)
    numbered = [f"{number} {line}" for number, line in enumerate(lines[:LINES])]
    for number in range(FILES):
        (directory / "in" / f"{number}.txt").write_text("\n".join(numbered[number::FILES]) + "\n")
    written: dict[int, list[str]] = {}

    def sink(rows: Any, batch: int) -> None:
        written[batch] = [row["value"] for row in rows.collect()]

    source = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(directory / "in"))
    query = (
        layer.source(source, name="numbered")
        .map(stumble, "value string")
        .key_by("value")
        .map(lambda row: row, "value string", name="behind the shuffle")
        .sink(sink, checkpoint=str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert query.restarts == 0, query.last_failure
    rows = Counter(row for batch in written.values() for row in batch)
    assert rows == Counter(line for line in numbered if fate(line) != "dies")
    letters = [letter for letter in list_records(layer.client, "dead") if letter.stream.endswith("numbered")]
    dead = [letter.payload.column("value")[0].as_py() for letter in letters]
    assert sorted(dead) == sorted(line for line in numbered if fate(line) == "dies")


def run_tracked(kit: ModuleType, spark: Any, layer: FTLayer, directory: Path, lines: list[str]) -> None:
    """Acker mode."""
    directory.mkdir()
    logs = kit.GrowingLogs(directory, lines)
    logs.grow(LINES)
    env = StreamEnvironment(spark, layer, name="tracked", parallelism=2)
    kit.build(env, directory)
    job = env.execute_async()
    ledger = kit.Ledger(directory, layer, "tracked")
    kit.until(job, ledger.all_there)
    assert job.drain(kit.WAIT_S)
    ledger.check(exact=True)


def run_checkpointed(kit: ModuleType, spark: Any, directory: Path) -> None:
    """Barrier mode."""
    directory.mkdir()
    checkpointing = CheckpointConfig(interval="200ms", directory=str(directory / "checkpoints"))
    env = StreamEnvironment(spark, name="checkpointed", parallelism=2, checkpointing=checkpointing)
    kit.build(env, directory, count=1_000)
    env.execute_async().wait()
    kit.Ledger(directory, count=1_000).check()


def main(job: EveryWayJob) -> None:
    from pyspark.sql import SparkSession

    directory = Path(job.directory)
    builder = SparkSession.builder.master(job.master)
    settings = {
        "spark.ui.enabled": "false",
        "spark.log.level": "WARN",
        "spark.driver.host": "127.0.0.1",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        **job.settings,
    }
    for key, value in settings.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    logs_kit, barrier_kit = load("log_job"), load("barrier_job")
    with FTLayer.embedded(
        directory / "store", max_attempts=logs_kit.MAX_ATTEMPTS, backoff="20ms", jitter=0
    ) as layer:
        run_wrapped(spark, layer, directory / "wrapped", job.lines)
        run_tracked(logs_kit, spark, layer, directory / "tracked", job.lines)
    run_checkpointed(barrier_kit, spark, directory / "checkpointed")
    spark.stop()


if __name__ == "__main__":
    os.environ["PYSPARK_PYTHON"] = sys.executable
    main(EveryWayJob(**json.loads(Path(sys.argv[1]).read_text())))
