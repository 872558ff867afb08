"""The demo as a continuous topology in acker mode: every record is stored, followed, and replayed where it is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ftlayer import FTLayer, StreamEnvironment
from ftlayer.demo.dead import write_changes, write_dead_letters
from ftlayer.demo.events import Event, Starting
from ftlayer.demo.layout import BACKOFF, MAX_ATTEMPTS, RunDirectory
from ftlayer.demo.topology import PARALLELISM, enriched_words, follow
from ftlayer.runtime.driver.job_status import JobStatus
from ftlayer.sinks import FileSink

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TIMEOUT = "2m"
"""Longer than a slot is away on any machine: a record is replayed for a failure or a kill, and for nothing else."""


def run(spark: SparkSession, directory: RunDirectory, tell: Callable[[Event], None]) -> None:
    """Run the topology to its end; started again, it goes on with what the vertex has."""
    with FTLayer.embedded(
        directory.store, timeout=TIMEOUT, max_attempts=MAX_ATTEMPTS, backoff=BACKOFF
    ) as layer:
        tell(Starting("the vertex"))
        layer.client_for(spark)
        env = StreamEnvironment(spark, layer, name="demo", parallelism=PARALLELISM)
        (
            enriched_words(env, directory)
            .key_by("word")
            .sink(FileSink(str(directory.output)), every="250ms", uid="sink")
        )
        follow(env.execute_async(), directory, tell, _figures)
        write_dead_letters(layer, directory)
        write_changes(layer, directory)


def _figures(status: JobStatus) -> dict[str, int]:
    vertex = status.vertex
    figures = {"slot restarts": status.restarts}
    if vertex is not None:
        figures |= {
            "pending": vertex.pending + vertex.due,
            "waiting": vertex.waiting,
            "dead letters": vertex.dead,
        }
    return figures
