"""What the vertex holds as DataFrames; large records, many failures, sources that change."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ftlayer.common.rules.restart import NoRestart
from ftlayer.errors import CodecError

pytestmark = pytest.mark.spark


def mine(frame: Any, source: str) -> list[Any]:
    return [row for row in frame.collect() if row.stream.endswith(f"/{source}")]


def test_waiting_records_and_dead_letters_can_be_read_requeued_and_purged(
    layer: Any, connect: Any, spark: Any, numbers: Any, kept: Any, tools: Any, tmp_path: Path
) -> None:
    mended = tmp_path / "mended"

    def broken(record: dict[str, Any]) -> dict[str, Any]:
        if record["n"] < 4 and not mended.exists():
            raise ValueError(f"number {record['n']}")
        return record

    stream = connect(backoff="5s", max_attempts=2).source(numbers, name="letters").map(broken, "n bigint")
    query = stream.sink(kept, checkpoint=tools.checkpoint).trigger(processingTime="0 seconds").start()
    try:
        tools.until(lambda: query.ft_status().waiting, "waiting records")
        waiting = mine(layer.waiting(spark), "letters")
        assert {json.loads(row.record)["n"] for row in waiting} <= set(range(4))
        assert {(row.attempt, row.state, row.operator) for row in waiting} == {
            (2, "waiting", "broken")
        }  # the attempt to come
        assert all(row.not_before is not None for row in waiting)
        tools.until(lambda: query.ft_status().dead == 4, "dead letters")
        dead = sorted(mine(layer.dead_letters(spark), "letters"), key=lambda row: row.record)
        assert [json.loads(row.record) for row in dead] == [{"n": n} for n in range(4)]
        assert [row.reason for row in dead] == [f"ValueError: number {n}" for n in range(4)]
        assert "in broken" in dead[0].traceback
        assert [len(row.history) for row in dead] == [2] * 4
        assert dead[0].history[0].operator == "broken"
        assert all("in broken" in each.traceback for each in dead[0].history)
        assert re.fullmatch(
            r"Spark stage \d+, partition \d, attempt 0 on .+, pid \d+", dead[0].history[1].place
        )
        assert layer.purge([dead[3].key]) == 1
        assert layer.purge([dead[3].key]) == 0
        mended.touch()
        assert layer.requeue([row.key for row in dead]) == 3
        tools.until(lambda: len(kept.rows) == 99, "the requeued records")
        assert query.await_drained(600)
    finally:
        query.stop()
    assert sorted(kept.column("n")) == [n for n in range(100) if n != 3]
    assert mine(layer.dead_letters(spark), "letters") == []
    assert layer.stats()["dead_letters"] >= 0


def test_a_batch_in_which_everything_fails(
    layer: Any, spark: Any, kept: Any, tools: Any, tmp_path: Path
) -> None:
    """50,000 failures travel in one verdict, and are replayed."""
    spark.range(50_000).withColumnRenamed("id", "n").write.parquet(str(tmp_path / "many"))
    works = tmp_path / "works"

    def all_fail(record: dict[str, Any]) -> dict[str, Any]:
        if not works_now(works):
            raise RuntimeError(f"not yet {record['n']}")
        return record

    def sink(frame: Any, batch: int) -> None:
        works.touch()
        kept.batches[batch] = [frame.count()]

    source = spark.readStream.schema("n bigint").parquet(str(tmp_path / "many"))
    query = tools.run(layer.source(source, name="many").map(all_fail, "n bigint"), sink)
    assert query.restarts == 0
    assert [report.failed for report in query.recent_batches[:2]] == [50_000, 0]
    assert sum(count for (count,) in kept.batches.values()) == 50_000


def works_now(path: Path) -> bool:
    return path.exists()


def test_a_source_that_gained_a_column_while_records_waited(
    layer: Any, rows: Any, kept: Any, tools: Any, tmp_path: Path
) -> None:
    mended = tmp_path / "mended"

    def broken(record: dict[str, Any]) -> dict[str, Any]:
        if not mended.exists():
            raise ValueError("not yet")
        return {"n": record["n"], "more": record["more"] or "none"}

    def build(schema: str) -> Any:
        stream = layer.source(rows.stream(schema), name="grown").map(broken, "n bigint, more string")
        return stream.sink(kept, checkpoint=tools.checkpoint)

    rows.add([{"n": 1}])
    query = build("n bigint").trigger(processingTime="1 hour").start()
    tools.until(lambda: query.recent_batches, "the first batch")
    query.stop()
    mended.touch()
    rows.add([{"n": 2, "more": "here"}])
    writer = build("m bigint, more string").restart(NoRestart()).trigger(availableNow=True)
    with pytest.raises(CodecError, match=r"stored records have a column 'n' .* no such column now"):
        writer.start().awaitTermination(600)
    tools.finish(build("n bigint, more string").trigger(availableNow=True).start())
    assert sorted(map(tuple, kept.rows)) == [(1, "none"), (2, "here")]
