"""A wrapped query against the same functions in plain Spark: 1 M-row batches of real log lines.

The job: a line → (host, length, message) → its message in halves → repartition by host → parquet. *Unwrapped*
it is written as a user writes it, one ``mapInArrow`` a function, with no tracking. Both are timed by the whole
trigger, as the query's progress reports it, in turn, in one Spark session.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.harness import Target, note

TARGETS = {"vs_unwrapped": Target(at_least=1.1)}

BATCH_ROWS = 1_000_000
FILES_A_BATCH = 2
PARSED = "host string, length long, message string"
HALVED = "host string, length long, part string"
PARSED_ARROW = pa.schema([("host", pa.string()), ("length", pa.int64()), ("message", pa.string())])
HALVED_ARROW = pa.schema([("host", pa.string()), ("length", pa.int64()), ("part", pa.string())])


def parse(record: dict[str, Any]) -> dict[str, Any]:
    line = record["value"]
    parts = line.split(None, 5)
    return {"host": parts[3] if len(parts) > 3 else "", "length": len(line), "message": line}


def halve(record: dict[str, Any]) -> list[dict[str, Any]]:
    message = record["message"]
    middle = len(message) // 2
    return [
        {"host": record["host"], "length": record["length"], "part": part}
        for part in (message[:middle], message[middle:])
    ]


def plain_parse(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.RecordBatch.from_pylist([parse(record) for record in batch.to_pylist()], schema=PARSED_ARROW)


def plain_halve(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        halves = [half for record in batch.to_pylist() for half in halve(record)]
        yield pa.RecordBatch.from_pylist(halves, schema=HALVED_ARROW)


def run(quick: bool) -> dict[str, float]:
    from pyspark.sql import SparkSession

    rounds = 1 if quick else 3
    with tempfile.TemporaryDirectory(prefix="ftlayer-bench-") as folder:
        root = Path(folder)
        batches = 3 if quick else 4
        write_input(root / "in", batches)
        spark = (
            SparkSession.builder.master("local[2]")
            .appName("ftlayer-bench")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.memory", "4g")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.warehouse.dir", str(root / "warehouse"))
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        try:
            plain: list[float] = []
            wrapped: list[float] = []
            for turn in range(rounds):
                plain += warm(timed(spark, root / f"plain-{turn}", run_plain))
                wrapped += warm(timed(spark, root / f"wrapped-{turn}", run_wrapped))
        finally:
            spark.stop()
    return {
        "vs_unwrapped": statistics.median(wrapped) / statistics.median(plain),
        "rows_per_s_wrapped": statistics.median(wrapped),
        "rows_per_s_unwrapped": statistics.median(plain),
    }


def warm(rates: list[float]) -> list[float]:
    """Leave the first batch out: it starts workers and compiles."""
    return rates[1:]


def timed(spark: Any, folder: Path, job: Callable[[Any, Any, Path], Any]) -> list[float]:
    """Run a job over all input; return the rows a second of each batch by its whole trigger."""
    source = (
        spark.readStream.format("text")
        .option("maxFilesPerTrigger", FILES_A_BATCH)
        .load(str(folder.parent / "in"))
    )
    query = job(spark, source, folder)
    query.awaitTermination()
    rates = [
        progress["numInputRows"] / progress["durationMs"]["triggerExecution"] * 1000
        for progress in query.recentProgress
        if progress["numInputRows"]
    ]
    shutil.rmtree(folder)
    return rates


def write_rows(folder: Path) -> Callable[[Any, int], None]:
    def write(rows: Any, batch: int) -> None:
        rows.write.mode("overwrite").parquet(str(folder / "out" / str(batch)))

    return write


def run_plain(spark: Any, source: Any, folder: Path) -> Any:
    rows = source.mapInArrow(plain_parse, PARSED).mapInArrow(plain_halve, HALVED).repartition("host")
    writer = rows.writeStream.foreachBatch(write_rows(folder))
    return writer.option("checkpointLocation", str(folder / "ck")).trigger(availableNow=True).start()


def run_wrapped(spark: Any, source: Any, folder: Path) -> Any:
    from ftlayer import FTLayer

    folder.mkdir()
    layer = FTLayer.embedded(folder / "ft")
    stream = layer.source(source, name="lines").map(parse, PARSED).flat_map(halve, HALVED).key_by("host")
    query = stream.sink(write_rows(folder), checkpoint=str(folder / "ck")).trigger(availableNow=True).start()
    query.awaitTermination()
    layer.close()
    return query


def write_input(folder: Path, batches: int) -> None:
    lines = log_lines()
    folder.mkdir()
    rows = BATCH_ROWS // FILES_A_BATCH
    for number in range(batches * FILES_A_BATCH):
        start = (number * 7919) % len(lines)
        cycle = lines[start:] + lines[:start]
        text = "\n".join((cycle * (rows // len(cycle) + 1))[:rows])
        (folder / f"{number:03}.txt").write_text(text + "\n")


def log_lines() -> list[str]:
    """Real log lines of the directory that FTLAYER_LOGHUB names, or the lines of Python's standard library."""
    named = os.environ.get("FTLAYER_LOGHUB")
    if named:
        sources = sorted(Path(named).glob("*.log"))
    else:
        note("FTLAYER_LOGHUB names no logs: lines of the standard library's sources instead")
        sources = sorted(Path(os.__file__).parent.glob("*.py"))
    lines = [
        line for file in sources for line in file.read_text(errors="replace").splitlines() if line.strip()
    ]
    if not lines:
        raise SystemExit(f"there are no lines of text in FTLAYER_LOGHUB ({named})")
    return lines
