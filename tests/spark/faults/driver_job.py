"""Three wrapped queries over the same lines, one for each kind of sink: ``python driver_job.py CONFIG.json``.

A test starts it, kills it (or has it kill itself, or its vertex, at a step of the batch protocol), and
starts it again until it ends by itself and leaves ``result.json``. `expected` is the recount to compare
with: it needs no Spark. Everything that must outlive a kill is in files of the job's directory.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SINKS = ("append", "overwrite", "skip")
LINE_SCHEMA = "line string, place int, word string"
WORD_SCHEMA = "line string, place int, word string, length int"
MAX_ATTEMPTS = 3
RANDOM_FAILURES = 0.003
"""Per call of lines that do not fail at first: one that fails 3 times by chance is one in 4 · 10^7."""
WAIT_S = 600.0

Row = dict[str, Any]


# ---------------------------------------------------------------- the job, and its recount


def _crc(text: str) -> int:
    return zlib.crc32(text.encode())


def split(line: str) -> list[Row]:
    """Return the first words of a line, up to three; some lines cannot be split."""
    if _crc(line) % 29 == 7:
        raise ValueError(f"no log line: {line[:20]}")
    return [
        {"line": line, "place": place, "word": word}
        for place, word in enumerate(line.split()[: _crc(line) % 4])
    ]


def measure(row: Row) -> Row:
    """Return the row with its word's length; some words cannot be measured."""
    if _crc(f"{row['line']}/{row['place']}") % 43 == 5:
        raise KeyError(row["word"])
    return {**row, "length": len(row["word"])}


def expected(lines: list[str]) -> tuple[Counter[str], Counter[str]]:
    """Return the sink's rows and the dead letters of a run without faults."""
    rows: Counter[str] = Counter()
    dead: Counter[str] = Counter()
    for line in lines:
        try:
            measured = [measure(word) for word in split(line)]
        except (ValueError, KeyError):
            dead[line] += 1
        else:
            rows.update(key_of(row) for row in measured)
    return rows, dead


def key_of(row: Row) -> str:
    return json.dumps(row, sort_keys=True)


class Flaky:
    """Fails for some lines when they are met first, over all processes and lives, and for others at random."""

    def __init__(self, directory: Path) -> None:
        self._directory = str(directory)

    def __call__(self, line: str) -> None:
        # Not both: with one failure for certain, two more by chance would come once in 500 tests.
        if _crc(line) % 17 == 3:
            if first_time(f"{self._directory}/{_crc(line)}"):
                raise RuntimeError("at first")
        elif random.SystemRandom().random() < RANDOM_FAILURES:
            raise RuntimeError("at random")


def first_time(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


# ---------------------------------------------------------------- the sinks


def sink_function(kind: str, directory: Path) -> Callable[[Any, int], None]:
    """Return the sink: each writes a batch at once, by a rename, or (``overwrite``) over and over."""

    def write(rows: Any, batch: int) -> None:
        if kind == "overwrite":
            rows.write.mode("overwrite").json(str(directory / f"{batch}"))
            return
        if kind == "skip" and (directory / f"{batch}").exists():
            return
        temporary = directory / f".{uuid.uuid4().hex}"
        rows.write.json(str(temporary))
        temporary.rename(directory / (f"{batch}" if kind == "skip" else f"{batch}-{uuid.uuid4().hex}"))

    return write


def written(directory: Path) -> dict[str, Counter[str]]:
    """Return what a sink holds, by its directories."""
    content = {}
    for batch in directory.iterdir():
        if not batch.name.startswith("."):
            lines = [line for part in batch.glob("part-*") for line in part.read_text().splitlines()]
            content[batch.name] = Counter(key_of(json.loads(line)) for line in lines)
    return content


# ---------------------------------------------------------------- kills


@dataclass
class Job:
    """What a test asks for.

    The n-th of ``kills`` is in batch n of all three queries at once: it has its victim, which is "driver", "jvm" or
    "vertex", and the step of each query, by its sink.
    """

    directory: str
    kills: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    master: str = "local[2]"
    partition_bytes: int = 1 << 27
    shards: int = 1

    @property
    def path(self) -> Path:
        return Path(self.directory)

    def save(self) -> Path:
        file = self.path / "job.json"
        file.write_text(json.dumps(asdict(self)))
        return file


class Watch:
    """Keeps a journal of all steps, and kills at those that were asked for.

    A query that comes to its step waits for the others there, so that one kill hits all of them.
    """

    def __init__(self, job: Job, kill: Callable[[str], None]) -> None:
        self._job = job
        self._kill = kill
        self._condition = threading.Condition()
        self._here: set[str] = set()
        self._kills = job.path / "kills"
        self._killed = len(self._kills.read_text().splitlines()) if self._kills.exists() else 0
        self._life = uuid.uuid4().hex[:8]
        self._journal = os.open(job.path / "journal", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def of(self, query: str) -> Callable[[str, int], None]:
        def watch(step: str, batch: int) -> None:
            os.write(self._journal, f"{self._life} {query} {batch} {step}\n".encode())
            with self._condition:
                turn = self._killed
                if turn >= len(self._job.kills):
                    return
                victim, steps = self._job.kills[turn]
                if (step, batch) != (steps[query], turn):
                    return
                self._here.add(query)
                if len(self._here) == len(SINKS):
                    self._end_turn(victim)
                elif not self._condition.wait_for(lambda: self._killed > turn, WAIT_S):
                    raise TimeoutError(f"only {self._here} came to {step} of batch {batch}")

        return watch

    def _end_turn(self, victim: str) -> None:
        with self._kills.open("a") as file:
            file.write(f"{self._killed}\n")
        self._killed += 1
        self._here.clear()
        self._kill(victim)
        self._condition.notify_all()


def read_journal(directory: Path) -> Iterator[tuple[str, str, int, str]]:
    """Yield (life, query, batch, step) in order."""
    for line in (directory / "journal").read_text().splitlines():
        life, query, batch, step = line.split()
        yield life, query, int(batch), step


# ---------------------------------------------------------------- the driver


def main(job: Job) -> None:
    from ftlayer.common.rules.restart import FixedDelay
    from ftlayer.spark.facade import FTLayer, list_records
    from ftlayer.spark.query.writer import watch_steps

    spark = session(job)
    layer = FTLayer.embedded(
        job.path / "store",
        max_attempts=MAX_ATTEMPTS,
        backoff="50ms",
        jitter=0.0,
        shards=job.shards,
        max_store_bytes=256 << 20,
    )

    def kill(victim: str) -> None:
        match victim:
            case "vertex":
                assert layer.vertex is not None
                layer.vertex.kill()
            case "jvm":
                os.kill(spark.sparkContext._gateway.proc.pid, signal.SIGKILL)
            case _:
                os.kill(os.getpid(), signal.SIGKILL)

    watch = Watch(job, kill)
    queries = {}
    for kind in SINKS:
        flaky = job.path / "flaky" / kind
        output = job.path / kind
        for directory in (flaky, output):
            directory.mkdir(parents=True, exist_ok=True)
        writer = (
            layer.source(
                spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(job.path / "input")),
                name=kind,
            )
            .flat_map(_flaky_split(Flaky(flaky)), LINE_SCHEMA, name="split")
            .key_by("word")
            .map(measure, WORD_SCHEMA, name="measure")
            .sink(sink_function(kind, output), checkpoint=str(job.path / "checkpoints" / kind))
            .trigger(availableNow=True)
            .restart(FixedDelay(attempts=50, delay="100ms"))
        )
        watch_steps(writer, watch.of(kind))
        queries[kind] = writer.start()
    (job.path / "started").touch()
    for query in queries.values():
        query.awaitTermination()
    result = {
        "restarts": {kind: query.restarts for kind, query in queries.items()},
        "status": {kind: asdict(query.ft_status()) for kind, query in queries.items()},
        "dead": [
            (
                letter.stream.split("/")[-1],
                letter.operator,
                letter.payload[0][0].as_py(),
                [each.reason for each in letter.history],
            )
            for letter in list_records(layer.client, "dead")
        ],
        "pending": layer.stats(),
    }
    layer.close()
    spark.stop()
    (job.path / "result.json").write_text(json.dumps(result))


def _flaky_split(flaky: Flaky) -> Callable[[Row], list[Row]]:
    def run(record: Row) -> list[Row]:
        flaky(record["value"])
        return split(record["value"])

    return run


def session(job: Job) -> Any:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    scratch = job.path / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    return (
        SparkSession.builder.master(job.master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "WARN")
        # These lives are short: Java's second compiler would cost more than it gives.
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.local.dir", str(scratch))
        .config("spark.sql.warehouse.dir", str(scratch / "warehouse"))
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.files.maxPartitionBytes", str(job.partition_bytes))
        .config("spark.sql.files.openCostInBytes", "1")
        .getOrCreate()
    )


if __name__ == "__main__":
    main(Job(**json.loads(Path(sys.argv[1]).read_text())))
