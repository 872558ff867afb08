"""The demo as a continuous topology in barrier mode: keyed state and an exactly-once sink, by checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ftlayer import CheckpointConfig, Context, Job, ProcessFunction, Retention, StreamEnvironment
from ftlayer.demo.events import Event
from ftlayer.demo.functions import ENRICHED_SCHEMA, WORDS_SCHEMA, Word, kind_of, reason_of, words_of
from ftlayer.demo.layout import RunDirectory
from ftlayer.demo.topology import PARALLELISM, follow, read_lines
from ftlayer.runtime.driver.job_status import JobStatus
from ftlayer.runtime.environment import LATEST
from ftlayer.sinks import FileSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INTERVAL = "500ms"
COUNTED_SCHEMA = ENRICHED_SCHEMA + ", count long"
REJECTED_SCHEMA = "line string, reason string"


class Parse(ProcessFunction):
    """Words of a line. In barrier mode a function that raises restarts the job, so a bad line goes aside instead."""

    def process(self, record: str, ctx: Context) -> list[Word]:
        """Return the words, or none and put out the line as ``rejected``."""
        try:
            return list(words_of(record))
        except ValueError as error:
            ctx.output("rejected", (record.partition("\t")[0], reason_of(error)))
            return []


class Count(ProcessFunction):
    """Numbers the occurrences of each word."""

    def open(self, ctx: Context) -> None:
        """Make the handle."""
        self._count = ctx.value("count", 0)

    def process(self, record: tuple[str, int, str, str], ctx: Context) -> Iterator[tuple[object, ...]]:
        """Yield the record with its number."""
        count = self._count.get() + 1
        self._count.set(count)
        yield (*record, count)


def with_kind(record: Word) -> tuple[str, int, str, str]:
    """Return a word with its kind."""
    return (*record, kind_of(record[2]))


def run(spark: SparkSession, directory: RunDirectory, tell: Callable[[Event], None]) -> None:
    """Run the topology to its end; started again, it goes on from its latest checkpoint."""
    config = CheckpointConfig(
        interval=INTERVAL,
        directory=str(directory.checkpoints),
        savepoint_directory=str(directory.savepoints),
        retention=Retention.RETAIN_ON_CANCELLATION,
    )
    env = StreamEnvironment(spark, name="demo", parallelism=PARALLELISM, checkpointing=config)
    words = read_lines(env, directory).process(
        Parse(), WORDS_SCHEMA, side={"rejected": REJECTED_SCHEMA}, uid="parse"
    )
    words.side_output("rejected").sink(FileSink(str(directory.rejected)), uid="rejected")
    (
        words.map(with_kind, ENRICHED_SCHEMA, uid="kind")
        .key_by("word")
        .process(Count(), COUNTED_SCHEMA, uid="count")
        .sink(FileSink(str(directory.output)), uid="sink")
    )
    job = env.execute_async(restore_from=LATEST)
    follow(job, directory, tell, _figures)
    _write_checkpoints(job, directory)


def _figures(status: JobStatus) -> dict[str, int]:
    counts = status.checkpoints
    assert counts is not None
    return {
        "slot restarts": status.restarts,
        "checkpoints": counts.completed,
        "failed": counts.failed,
        "restores": counts.restored,
    }


def _write_checkpoints(job: Job, directory: RunDirectory) -> None:
    rows = [
        {
            "checkpoint": it.checkpoint,
            "kind": ("final " if it.final else "") + it.kind,
            "outcome": it.state,
            "duration_ms": it.duration_ms,
            "alignment_ms": it.alignment_ms,
            "sync_ms": it.sync_ms,
            "async_ms": it.async_ms,
            "state_bytes": it.state_bytes,
            "written_bytes": it.written_bytes,
            "failure": it.failure,
        }
        for it in reversed(job.checkpoints())
    ]
    directory.checkpoint_list.write_text(json.dumps(rows), "utf-8")
