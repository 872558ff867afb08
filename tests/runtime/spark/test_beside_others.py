"""A topology beside ordinary jobs and a wrapped query of the same session and vertex."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.spark


def test_ordinary_jobs_and_a_wrapped_query_run_beside_a_topology(
    environment: Any, connect: Any, spark: Any, logs_kit: ModuleType, real_lines: list[str], tmp_path: Path
) -> None:
    layer = connect()
    logs = logs_kit.GrowingLogs(tmp_path, real_lines)
    logs.grow(200)
    env = environment(layer, "beside", parallelism=1)
    logs_kit.build(env, tmp_path)
    job = env.execute_async()
    ledger = logs_kit.Ledger(tmp_path, layer, "beside")

    def more_comes() -> None:
        before = len(ledger.sink())
        logs.grow(50)
        logs_kit.until(job, lambda: len(ledger.sink()) > before)

    more_comes()
    assert spark.range(1_000).selectExpr("sum(id)").first()[0] == 499_500
    more_comes()
    # With Python workers of its own.
    doubled = (
        spark.range(0, 1_000, 1, 4).mapInArrow(lambda batches: batches, "id bigint").repartition(2, "id")
    )
    assert doubled.count() == 1_000
    more_comes()

    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("a\nb\nc\n")
    texts = layer.source(spark.readStream.format("text").load(str(tmp_path / "texts")), name="texts")
    rows: Counter[str] = Counter()
    query = (
        texts.map(lambda row: {"value": row["value"] * 2}, "value string")
        .sink(
            lambda frame, batch: rows.update(row.value for row in frame.collect()),
            checkpoint=str(tmp_path / "checkpoint"),
        )
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(600)
    assert rows == Counter(["aa", "bb", "cc"])
    more_comes()

    logs_kit.until(job, ledger.all_there)
    assert job.drain(600)
    assert job.status().restarts == 0
    ledger.check(exact=True)
