"""The demo as a continuous topology in barrier mode: keyed state and an exactly-once sink, by checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ftlayer import (
    CheckpointConfig,
    Context,
    FailurePolicy,
    Job,
    ProcessFunction,
    Retention,
    StreamEnvironment,
)
from ftlayer.demo.events import Event
from ftlayer.demo.functions import ENRICHED_SCHEMA
from ftlayer.demo.layout import BACKOFF, MAX_ATTEMPTS, RunDirectory
from ftlayer.demo.topology import PARALLELISM, enriched_words, follow
from ftlayer.runtime.driver.job_status import JobStatus
from ftlayer.runtime.environment import LATEST
from ftlayer.sinks import FileSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INTERVAL = "500ms"
COUNTED_SCHEMA = ENRICHED_SCHEMA + ", count long"


class Count(ProcessFunction):
    def open(self, ctx: Context) -> None:
        self._count = ctx.value("count", 0)

    def process(self, record: tuple[str, int, str, str], ctx: Context) -> Iterator[tuple[object, ...]]:
        count = self._count.get() + 1
        self._count.set(count)
        yield (*record, count)


def run(spark: SparkSession, directory: RunDirectory, tell: Callable[[Event], None]) -> None:
    """Run the topology to its end; started again, it goes on from its latest checkpoint."""
    config = CheckpointConfig(
        interval=INTERVAL,
        directory=str(directory.checkpoints),
        savepoint_directory=str(directory.savepoints),
        retention=Retention.RETAIN_ON_CANCELLATION,
        failures=FailurePolicy(max_attempts=MAX_ATTEMPTS, backoff=BACKOFF),
    )
    env = StreamEnvironment(spark, name="demo", parallelism=PARALLELISM, checkpointing=config)
    words = enriched_words(env, directory)
    # A dead letter is a record like others: this sink has each of them exactly once, whatever is killed.
    words.dead_letters().sink(FileSink(str(directory.dead_letters)), uid="dead")
    (
        words.key_by("word")
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
        "waiting": sum(chain.waiting for chain in status.chains),
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
