"""The driver of the demo's query: ``python -m ftlayer.demo.driver DIRECTORY``, started by the screen.

This is what a user's own program looks like: nothing in it knows that it is going to be killed. It prints
events (`ftlayer.demo.events`); everything else goes to the log.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ftlayer import FTLayer
from ftlayer.demo.events import BatchDone, Event, Finished, Restarted, Started, Writing, to_line
from ftlayer.demo.functions import ENRICHED_SCHEMA, WORDS_SCHEMA, Enrich, parse, split_record
from ftlayer.demo.layout import BACKOFF, MAX_ATTEMPTS, RunDirectory
from ftlayer.demo.text import FILES_A_BATCH
from ftlayer.layer.calls import BatchState
from ftlayer.spark.query import TrackedQuery

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

POLL_S = 0.05

SHORT_RUN = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A run of a minute on two cores: what Java's second compiler costs it never gives back (1.5 s a batch, 1.0
without it)."""

Tell = Callable[[Event], None]


def main(directory: RunDirectory) -> None:
    """Run the query until nothing is left to do."""
    tell = _event_channel()
    spark = _session(directory)
    with FTLayer.embedded(directory.store, max_attempts=MAX_ATTEMPTS, backoff=BACKOFF) as layer:
        query = _start(spark, layer, directory, tell)
        tell(Started())
        _report(query, tell)
        query.awaitTermination()
        _write_dead_letters(layer, directory)
    spark.stop()
    tell(Finished())


def _start(spark: SparkSession, layer: FTLayer, directory: RunDirectory, tell: Tell) -> TrackedQuery:
    lines = (
        spark.readStream.format("text")
        .option("lineSep", "\n")
        .option("maxFilesPerTrigger", FILES_A_BATCH)
        .load(str(directory.input))
    )

    def write(rows: DataFrame, batch: int) -> None:
        tell(Writing(batch))
        rows.write.mode("overwrite").parquet(str(directory.batch_output(batch)))

    return (
        layer.source(lines, name="lines")
        .flat_map(parse, WORDS_SCHEMA)
        .map(Enrich(str(directory.service)), ENRICHED_SCHEMA, name="enrich")
        .key_by("word")
        .sink(write, checkpoint=str(directory.checkpoint))
        .trigger(availableNow=True)
        .start()
    )


def _session(directory: RunDirectory) -> SparkSession:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    return (
        SparkSession.builder.master("local[2]")
        .appName("ftlayer demo")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "WARN")
        .config("spark.driver.extraJavaOptions", SHORT_RUN)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.local.dir", str(directory.scratch))
        .config("spark.sql.warehouse.dir", str(directory.scratch / "warehouse"))
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )


def _report(query: TrackedQuery, tell: Tell) -> None:
    """Tell of batches and restarts until the query has ended."""
    told = restarts = 0
    before = time.monotonic()
    active = True
    while active:
        time.sleep(POLL_S)
        active = query.isActive
        reports = query.recent_batches
        for report in reports[told:]:
            now = time.monotonic()
            tell(
                BatchDone(
                    report.batch,
                    report.state is BatchState.SEALED,
                    report.rows_in,
                    report.waiting,
                    report.dead,
                    report.delivered,
                    now - before,
                )
            )
            before = now
        told = len(reports)
        if query.restarts > restarts:
            restarts = query.restarts
            tell(Restarted(query.last_failure))


def _write_dead_letters(layer: FTLayer, directory: RunDirectory) -> None:
    with directory.dead.open("w", encoding="utf-8") as file:
        for letter in layer.list_dead():
            line, text = split_record(letter.payload.column("value")[0].as_py())
            entry = {
                "line": line,
                "reason": letter.reason,
                "operator": letter.operator,
                "attempts": len(letter.history),
                "text": text,
            }
            file.write(json.dumps(entry) + "\n")


def _event_channel() -> Tell:
    """Keep stdout for events: Spark's JVM, and whoever else prints, gets the log instead."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()

    def tell(event: Event) -> None:
        with lock:
            events.write(to_line(event))
            events.flush()

    return tell


def _end_with_screen() -> None:
    """End when stdin does: the screen is gone, and nobody would ever look at this run."""
    while os.read(0, 4_096):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_screen, name="demo-screen", daemon=True).start()
    main(RunDirectory(Path(sys.argv[1])))
