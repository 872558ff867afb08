"""A stage's work on one partition: roots, what is left out, failures, ids handed on, pages."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from stage_runs import ODD_FAILS, PASS, V, first, run, vs

from ftlayer.errors import QueryError
from ftlayer.functions.chains.record_segment import CHUNK_ROWS
from ftlayer.functions.steps import Filter, FlatMap, Map, MapAsync
from ftlayer.spark.stages import task as stage_task
from ftlayer.spark.stages.pages import ROOT, roots_of, to_roots
from ftlayer.spark.stages.task import Skip, StageTask

# ---------------------------------------------------------------- failures


def test_failed_source_rows_go_along_in_their_order(kit: SimpleNamespace) -> None:
    values = list(range(2 * CHUNK_ROWS + 10))
    failing = {3, 5, CHUNK_ROWS + 1, 2 * CHUNK_ROWS + 7}

    def fail(record: Any) -> Any:
        if record["v"] in failing:
            raise ValueError(record["v"])
        return {"v": -record["v"]}

    (page,) = run(kit, first([Map("m", fail, V)]), kit.source_rows(vs(values), V))
    plain = run(kit, first(), kit.source_rows(vs(values), V))[0]
    roots = dict(zip(plain.column("v"), plain.roots, strict=True))
    assert len(page.head.failures) == len(failing)
    for failure in page.head.failures:
        value = page.failed[failure.row]["v"]
        assert failure.root == roots[value]
        assert failure.reason == f"ValueError: {value}"
        assert failure.operator == "m"
        assert failure.read_as == f"row {value} of partition 0 of batch 0"
    assert {page.failed[failure.row]["v"] for failure in page.head.failures} == failing
    assert page.roots == [roots[value] for value in values if value not in failing]


def test_the_first_failure_of_a_row_stands_and_equal_tracebacks_are_sent_once(kit: SimpleNamespace) -> None:
    def one(record: Any) -> Any:
        raise ValueError("same")

    (page,) = run(kit, first([Map("m", one, V)]), kit.source_rows(vs(range(5)), V))
    assert len(page.head.failures) == 5
    assert len(page.head.tracebacks) == 1
    assert {failure.traceback for failure in page.head.failures} == {0}


def test_behind_a_shuffle_each_failed_row_names_its_root_and_brings_no_payload(kit: SimpleNamespace) -> None:
    rows = kit.rooted_rows(vs([1, 2, 3, 4]), V, [7, 7, 7, 8])
    (page,) = run(kit, StageTask((ODD_FAILS,), None), rows)
    assert [(f.root, f.row) for f in page.head.failures] == [(7, -1), (7, -1)]
    assert page.head.failed_rows is None
    # The good row of root 7 is still here: the verdict takes it out.
    assert page.roots == [7, 8]


def test_the_source_is_kept_where_a_later_stage_may_fail(kit: SimpleNamespace) -> None:
    task = first([FlatMap("twice", lambda r: [r, r] if r["v"] else [], V)], keep_source=True)
    (page,) = run(kit, task, kit.source_rows(vs([0, 1]), V), kit.delivered_rows(vs([2]), V, [9], 0, 1))
    (plain,) = run(kit, first(), kit.source_rows(vs([0, 1]), V))
    assert [row for part in page.source for row in part.select(["v"]).to_pylist()] == vs([0, 1, 2])
    assert [root for part in page.source for root in roots_of(part).tolist()] == [*plain.roots, 9]
    assert page.source[0].schema.names == ["v", ROOT]
    assert page.column("v") == [1, 1, 2, 2]


def test_watched_stages_name_the_roots_they_saw_and_sent(kit: SimpleNamespace) -> None:
    task = StageTask((Filter("f", lambda r: r["v"] > 1, V),), None, watch=True)
    (page,) = run(kit, task, kit.rooted_rows(vs([1, 2, 3, 1]), V, [9, 7, 7, 8]))
    assert to_roots(page.head.seen_roots).tolist() == [7, 8, 9]
    assert to_roots(page.head.sent_roots).tolist() == [7]
    (page,) = run(kit, replace(task, watch=False), kit.rooted_rows(vs([1]), V, [9]))
    assert page.head.seen_roots == page.head.sent_roots == b""


# ---------------------------------------------------------------- pages


def test_a_page_is_cut_at_its_size_and_nothing_is_lost_or_doubled(kit: SimpleNamespace) -> None:
    schema = pa.schema([("v", pa.int64()), ("text", pa.string())])
    rows = [{"v": i, "text": "x" * 100} for i in range(300)]

    def fail(record: Any) -> Any:
        if record["v"] % 10 == 0:
            raise ValueError
        return record

    task = first([Map("m", fail, schema)], keep_source=True)
    with (
        patch.object(stage_task, "rows_at_once", lambda *_: 10),
        patch.object(stage_task, "PAGE_BYTES", 5_000),
    ):
        pages = run(kit, task, kit.source_rows(rows, schema))
    assert len(pages) > 5
    assert [v for page in pages for v in page.column("v")] == [v for v in range(300) if v % 10]
    assert sum(page.head.rows_in for page in pages) == 300
    assert sum(page.head.rows_out for page in pages) == 270
    assert [row["v"] for page in pages for row in page.failed] == list(range(0, 300, 10))
    for page in pages:
        assert [f.row for f in page.head.failures] == list(range(len(page.failed)))
        assert sum(part.num_rows for part in page.source) == page.head.rows_in


def test_rows_that_all_fail_are_cut_into_pages_too(kit: SimpleNamespace) -> None:
    def fail(record: Any) -> Any:
        raise ValueError

    schema = pa.schema([("text", pa.string())])
    rows = [{"text": "x" * 1_000}] * 100
    with (
        patch.object(stage_task, "rows_at_once", lambda *_: 10),
        patch.object(stage_task, "PAGE_BYTES", 20_000),
    ):
        pages = run(kit, first([Map("m", fail, schema)]), kit.source_rows(rows, schema))
    assert len(pages) == 5
    assert sum(len(page.failed) for page in pages) == 100


def test_pages_are_made_as_rows_come(kit: SimpleNamespace) -> None:
    """A task must not gather its whole partition."""
    read = 0

    def rows() -> Iterator[pa.RecordBatch]:
        nonlocal read
        for value in range(10):
            read += 1
            yield kit.source_rows(vs([value]), V)

    with patch.object(stage_task, "PAGE_BYTES", 1):
        pages = first([PASS]).pages(rows(), 0)
        next(pages)
        assert read == 1


def test_a_stage_without_functions_passes_rows_on(kit: SimpleNamespace) -> None:
    schema = pa.schema([("text", pa.string())])
    broken = pa.array([b"\xff", b"ok"], pa.binary()).view(pa.string())
    batch = kit.source_rows([{"text": "a"}] * 2, schema).set_column(0, schema.field(0), broken)
    (page,) = run(kit, first(), batch)
    assert len(page.roots) == 2
    assert page.data[0].column("text").view(pa.binary()).to_pylist() == [b"\xff", b"ok"]


def test_a_task_can_be_pickled_and_asks_spark_for_its_partition(kit: SimpleNamespace) -> None:
    from pyspark import cloudpickle

    task = pickle.loads(cloudpickle.dumps(first([PASS], skip=Skip({0: frozenset({1})}))))
    rows = kit.source_rows(vs([1]), V)
    with pytest.raises(QueryError, match="inside a Spark task"):
        list(task(iter([rows])))
    frame = kit.FakeFrame([[], [rows]]).mapInArrow(task, "")
    pages = kit.read_pages(frame.partitions[1])
    assert pages[0].roots == run(kit, first([PASS]), rows, partition=1)[0].roots


def test_calls_of_a_whole_arrow_batch_overlap(kit: SimpleNamespace) -> None:
    """The first call waits for one of a row that is more than a chunk behind it."""
    rows = 2 * CHUNK_ROWS + 1
    begun: list[asyncio.Event] = []

    async def look_up(record: dict[str, int]) -> dict[str, int]:
        if not begun:
            begun.append(asyncio.Event())
        if record["v"] == rows - 1:
            begun[0].set()
        if record["v"] == 0:
            await begun[0].wait()
        return record

    task = first([MapAsync("look_up", look_up, V, 2, 60_000)])
    pages = run(kit, task, kit.source_rows(vs(range(rows)), V))
    assert [page.head.failures for page in pages] == [()]
    assert pages[0].head.rows_out == rows
