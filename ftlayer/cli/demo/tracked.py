"""The demo as a continuous topology in acker mode: every record is stored, followed, and replayed where it is lost."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from ftlayer import FTLayer, StreamEnvironment
from ftlayer.cli.demo.checkpointed import PARALLELISM, enriched_words, follow
from ftlayer.cli.demo.driver import BACKOFF, MAX_ATTEMPTS, Event, RunDirectory, Starting
from ftlayer.cli.demo.ledger import split_record
from ftlayer.runtime.driver.rules.job_status import JobStatus
from ftlayer.sinks import FileSink
from ftlayer.spark.facade import list_records
from ftlayer.vertex.calls import AuditPage, ListAudit

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


NAMES = {"requeue": "requeued", "edit": "edited", "purge": "purged"}
"""Fields of `ftlayer.cli.demo.ledger.HandChanges` by what the audit log calls a change."""


def write_dead_letters(layer: FTLayer, directory: RunDirectory) -> None:
    """Write a line of JSON for each dead letter; the source's records are in a column ``value``."""
    with directory.dead.open("w", encoding="utf-8") as file:
        for letter in list_records(layer.client, "dead"):
            line, text = split_record(letter.payload.column("value")[0].as_py())
            entry = {
                "line": line,
                "reason": letter.reason,
                "operator": letter.operator,
                "attempts": len(letter.history),
                "edited": bool(letter.edited_by),
                "text": text,
            }
            file.write(json.dumps(entry) + "\n")


def write_changes(layer: FTLayer, directory: RunDirectory) -> None:
    """Write how many letters were requeued, edited and purged, by anybody: the audit log has all of it."""
    changes = dict.fromkeys(NAMES.values(), 0)
    more = b""
    while True:
        page = layer.client.call(ListAudit(more))
        assert isinstance(page, AuditPage)
        for entry in page.entries:
            if entry.what in NAMES:
                changes[NAMES[entry.what]] += entry.count
        more = page.more
        if not more:
            break
    directory.changes.write_text(json.dumps(changes), "utf-8")


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
