"""A wrapped query against the same functions in plain Spark: 1 M-row batches of real log lines.

The job: a line → (host, length, message) → its message in halves → repartition by host → parquet. *Unwrapped* it is
written with one ``mapInArrow`` a function and no tracking, the fastest of the ways to call a function a record in
Spark: UDFs of PySpark's take half as long again and more. `VARIANTS` has the other jobs. Both sides run in turn, in
one Spark session, and once before that without being counted: with the JVM's compilers at work a first run takes twice
the CPU time of later ones. Timed is from the end of the first batch, which starts workers, to that of the source's last
one. CPU time is that of the driver, the JVM, the Python workers and the vertex together, for a source row.
"""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.harness import Run, Target, compared, cpu_seconds_of_all, in_turn, note, scratch
from ftlayer import current_record

TARGETS = {
    "vs_unwrapped": Target(at_least=1.05),
    "vs_unwrapped_one_function": Target(at_least=0.85),
    "vs_unwrapped_failing": Target(at_least=0.8),
}

FAILS_OF = 100
"""One record of so many fails, at its first attempt."""

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


def parse_or_fail(record: dict[str, Any]) -> dict[str, Any]:
    """`parse`; records fail that their text chooses, each once."""
    line = record["value"]
    if zlib.crc32(line.encode()) % FAILS_OF == 0 and current_record().attempt == 1:
        raise ValueError("chosen to fail")
    return parse(record)


def plain_parse(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.RecordBatch.from_pylist([parse(record) for record in batch.to_pylist()], schema=PARSED_ARROW)


def plain_halve(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        halves = [half for record in batch.to_pylist() for half in halve(record)]
        yield pa.RecordBatch.from_pylist(halves, schema=HALVED_ARROW)


Started = Callable[[Any, Path, Callable[[Any, int], None]], "tuple[Any, Callable[[], None]]"]
"""Starts a job over a source in a folder, with what writes a batch; returns its query, and what is to be closed."""


@dataclass(frozen=True)
class Variant:
    """Two jobs that are compared; ``suffix`` ends the names of their ratio and of both sides."""

    suffix: str
    wrapped: Started
    unwrapped: Started


def unwrapped_job(functions: tuple[Any, ...], source: Any, folder: Path, write: Any) -> Any:
    """A ``mapInArrow`` a function, and the columns that it makes."""
    rows = source
    for function, columns in functions:
        rows = rows.mapInArrow(function, columns)
    writer = rows.repartition("host").writeStream.foreachBatch(write)
    started = writer.option("checkpointLocation", str(folder / "ck")).trigger(availableNow=True).start()
    return started, lambda: None


def wrapped_job(parsing: Any, halved: bool, source: Any, folder: Path, write: Any) -> Any:
    from ftlayer import FTLayer

    layer = FTLayer.embedded(folder / "ft")
    stream = layer.source(source, name="lines").map(parsing, PARSED)
    if halved:
        stream = stream.flat_map(halve, HALVED)
    sink = stream.key_by("host").sink(write, checkpoint=str(folder / "ck"))
    return sink.trigger(availableNow=True).start(), layer.close


BOTH = partial(unwrapped_job, ((plain_parse, PARSED), (plain_halve, HALVED)))
VARIANTS = (
    Variant("", partial(wrapped_job, parse, True), BOTH),
    Variant(
        "_one_function", partial(wrapped_job, parse, False), partial(unwrapped_job, ((plain_parse, PARSED),))
    ),
    Variant("_failing", partial(wrapped_job, parse_or_fail, True), BOTH),
)


def run(quick: bool, pairs: int) -> dict[str, float]:
    """Run both sides of each variant ``pairs`` times, in turn; a rate is of source rows."""
    from pyspark.sql import SparkSession

    with scratch() as root:
        write_input(root / "in", batches=2 if quick else 4)
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
        found: dict[str, float] = {}
        try:
            for variant in VARIANTS:
                wrapped, unwrapped = f"wrapped{variant.suffix}", f"unwrapped{variant.suffix}"
                sides = {
                    unwrapped: partial(timed, spark, root, variant.unwrapped),
                    wrapped: partial(timed, spark, root, variant.wrapped),
                }
                ratio = {f"vs_unwrapped{variant.suffix}": (wrapped, unwrapped)}
                for warm_up in sides.values():
                    warm_up()
                found |= compared(in_turn(sides, pairs), ratio)
        finally:
            spark.stop()
    return found


def timed(spark: Any, root: Path, job: Started) -> Run:
    """Run a job over all input, and forget what it has written; return what the batches behind the first one took."""
    source = (
        spark.readStream.format("text").option("maxFilesPerTrigger", FILES_A_BATCH).load(str(root / "in"))
    )
    batches = len(list((root / "in").iterdir())) // FILES_A_BATCH
    with tempfile.TemporaryDirectory(dir=root) as temporary:
        folder = Path(temporary)
        written: list[tuple[float, float]] = []

        def write(rows: Any, batch: int) -> None:
            rows.write.mode("overwrite").parquet(str(folder / "out" / str(batch)))
            written.append((time.monotonic(), cpu_seconds_of_all()))

        query, close = job(source, folder, write)
        try:
            query.awaitTermination()
        finally:
            close()
    # Behind the source's batches are those of what still waits for a replay; a batch between has some of its own.
    (begin, cpu_begin), (end, cpu_end) = written[0], written[batches - 1]
    rows = BATCH_ROWS * (batches - 1)
    return Run(rows / (end - begin), (cpu_end - cpu_begin) / rows * 1e6)


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
