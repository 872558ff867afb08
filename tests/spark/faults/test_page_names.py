"""Two copies of a page, as speculation may leave them: the one whose head was not counted is not read."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.errors import RecomputedResultError
from ftlayer.functions.steps import Map
from ftlayer.spark.stages.run import QueryPlan, RunOptions, StagesResult, run_stages
from ftlayer.spark.stages.task import plan_stages

SCHEMA = pa.schema([("n", pa.int64())])


def run(kit: SimpleNamespace) -> StagesResult:
    def function(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == 3:
            raise ValueError("three")
        return {"n": random.getrandbits(60)}

    steps = plan_stages((Map("random", function, SCHEMA),))
    frame = kit.FakeFrame(
        [[kit.source_rows([{"n": n} for n in range(part, part + 2)], SCHEMA)] for part in (0, 2)]
    )
    plan = QueryPlan(steps, (SimpleNamespace(names=["n"]),))  # type: ignore[arg-type]
    return run_stages(frame, plan, RunOptions(kit.GIVER))


def rows(result: StagesResult) -> list[Any]:
    return [row for (row,) in result.good_rows().toLocalIterator()]


def test_the_pages_that_were_counted_are_read(kit: SimpleNamespace) -> None:
    result = run(kit)
    assert rows(result) == rows(result)
    assert len(rows(result)) == 3


def test_another_copy_of_a_page_is_refused(kit: SimpleNamespace) -> None:
    result, other = run(kit), run(kit)
    mixed: Any = result.pages[0]._frame
    mixed.partitions[1] = other.pages[0]._frame.partitions[1]  # type: ignore[attr-defined]
    with pytest.raises(RecomputedResultError, match="not the one that was counted"):
        rows(result)
