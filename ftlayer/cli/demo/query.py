"""The demo as a wrapped micro-batch query."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftlayer import FTLayer
from ftlayer.cli.demo.checkpointed import FILES_A_BATCH
from ftlayer.cli.demo.driver import (
    BACKOFF,
    MAX_ATTEMPTS,
    BatchDone,
    Restarted,
    RunDirectory,
    Started,
    Starting,
    Tell,
    Writing,
)
from ftlayer.cli.demo.ledger import ENRICHED_SCHEMA, WORDS_SCHEMA, Service, words_of
from ftlayer.cli.demo.tracked import write_changes, write_dead_letters
from ftlayer.spark.query.supervisor import TrackedQuery
from ftlayer.vertex.calls import BatchState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

POLL_S = 0.05


def parse(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for line, place, word in words_of(record["value"]):
        yield {"line": line, "place": place, "word": word}


@dataclass(frozen=True)
class EnrichRecord:
    service: Service

    def __call__(self, record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "kind": self.service.kind(record["line"], record["word"])}


def run(spark: SparkSession, directory: RunDirectory, tell: Tell) -> None:
    with FTLayer.embedded(directory.store, max_attempts=MAX_ATTEMPTS, backoff=BACKOFF) as layer:
        tell(Starting("the vertex"))
        layer.client_for(spark)
        tell(Starting("the query"))
        query = _start(spark, layer, directory, tell)
        tell(Started())
        _report(query, tell)
        query.awaitTermination()
        write_dead_letters(layer, directory)
        write_changes(layer, directory)


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
        .map(EnrichRecord(Service(str(directory.service))), ENRICHED_SCHEMA, name="enrich")
        .key_by("word")
        .sink(write, checkpoint=str(directory.checkpoint))
        .trigger(availableNow=True)
        .start()
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
