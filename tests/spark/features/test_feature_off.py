"""FTStatus.OFF: the same code is the hand-written query, and nothing else."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as f

from ftlayer.common.rules.restart import NoRestart
from ftlayer.config import FTStatus
from ftlayer.errors import ConfigError, QueryError
from ftlayer.monitor.sources import sources_here
from ftlayer.spark.facade import FTLayer
from ftlayer.spark.plan.stream_plan import plain_rows
from ftlayer.spark.stages.task import plan_stages
from ftlayer.spark.tracked import plan_of
from ftlayer.vertex.calls import AnnouncedJob, GetJob, JobDetails

pytestmark = pytest.mark.spark


@pytest.fixture
def off(tmp_path: Path) -> FTLayer:
    return FTLayer.embedded(tmp_path / "none" / "ft", status=FTStatus.OFF)


def pipeline(layer: FTLayer, source: Any) -> Any:
    """Steps of every kind; one transform names the ids' column, one lists all columns."""
    return (
        layer.source(source, name="numbers", key="n")
        .map(lambda r: {"n": r["n"] + 1}, "n bigint", name="add")
        .filter(lambda r: r["n"] % 2)
        .key_by("n", partitions=3)
        .transform(lambda frame: frame.select("_ft", (f.col("n") * 2).alias("n")), name="twice")
        .transform(lambda frame: frame.select("*", f.lit("x").alias("tag")), name="tagged")
        .flat_map(lambda r: [r, r], "n bigint, tag string", name="both")
        .repartition(2)
    )


def job_of(name: str) -> JobDetails:
    """Return what is announced of a query to the board of this program, once it is."""
    (board,) = (source for source in sources_here().sources if source.pid == os.getpid() and not source.path)
    client = board.client("test")
    try:
        reply = client.call(GetJob(name))
    finally:
        client.close()
    assert isinstance(reply, AnnouncedJob)
    return reply.job


def sparks_plan_of(frame: Any) -> str:
    plan = frame._jdf.queryExecution().optimizedPlan().toString()
    plan = re.sub(r"#\d+L?", "", plan)
    return re.sub(r"(MapInArrow) \S+\(", r"\1 function(", plan)


def test_the_plan_is_that_of_the_hand_written_query(off: FTLayer, spark: Any) -> None:
    frame = spark.range(10).withColumnRenamed("id", "n")

    def any_function(batches: Any) -> Any:
        yield from batches

    by_hand = (
        frame.mapInArrow(any_function, "n bigint")
        .repartition(3, "n")
        .select((f.col("n") * 2).alias("n"))
        .select("*", f.lit("x").alias("tag"))
        .mapInArrow(any_function, "n bigint, tag string")
        .repartition(2)
    )
    stream = pipeline(off, spark.readStream.format("rate").load().selectExpr("value as n"))
    asked = plan_of(stream)
    ours = plain_rows(frame, plan_stages(asked.steps), asked.stage_schemas())
    assert sparks_plan_of(ours) == sparks_plan_of(by_hand)
    assert ours.schema == by_hand.schema
    assert "_ft" not in sparks_plan_of(ours)


def test_off_and_on_give_the_same_rows_and_off_starts_no_vertex(
    off: FTLayer, layer: FTLayer, numbers: Any, kept: Any, tools: Any, tmp_path: Path
) -> None:
    query = tools.run(pipeline(off, numbers), kept)
    plain = sorted(kept.rows)
    assert off.vertex is None
    assert not (tmp_path / "none").exists()
    assert query.ft_status().drained
    tools.until(lambda: job_of(query.name).final, "its last word on the program's own board")
    told = job_of(query.name)
    assert (told.mode, told.kind, told.state) == ("off", "query", "ended")
    assert told.counters["records_in"] == 100
    kept.batches.clear()
    checkpoint = str(tmp_path / "on")
    tools.finish(
        pipeline(layer, numbers).sink(kept, checkpoint=checkpoint).trigger(availableNow=True).start()
    )
    assert sorted(kept.rows) == plain
    assert len(plain) == 100


def test_off_a_raising_function_fails_the_query(off: FTLayer, numbers: Any, kept: Any, tools: Any) -> None:
    def bad(record: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("no such thing")

    stream = off.source(numbers, name="numbers").map(bad, "n bigint")
    writer = stream.sink(kept, checkpoint=tools.checkpoint).trigger(availableNow=True).restart(NoRestart())
    with pytest.raises(QueryError, match=r"'bad' failed: KeyError: 'no such thing'"):
        writer.start().awaitTermination(600)


def test_off_has_no_ingest(off: FTLayer) -> None:
    with pytest.raises(ConfigError, match=r"FTStatus.OFF starts none"):
        off.ingest("clicks", "n bigint")
    assert off.vertex is None


def test_off_emit_gives_null_carriers(off: FTLayer, rows: Any, kept: Any, tools: Any) -> None:
    source = rows.add(pa.table({"n": [1, 2]})).stream("n bigint")
    writer = off.source(source, name="numbers").emit(kept, checkpoint=tools.checkpoint, carrier="header")
    tools.finish(writer.trigger(availableNow=True).start())
    assert [tuple(row) for row in kept.rows] == [(1, None), (2, None)]
