"""A stage's work on one partition: roots, what is left out, failures, ids handed on, pages."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import CodecError, QueryError
from ftlayer.failures import RetryLater
from ftlayer.functions.chains.chain import CHUNK_ROWS
from ftlayer.functions.steps import Filter, FlatMap, Map, MapAsync
from ftlayer.records.ids import shard_bits
from ftlayer.spark.stages import task as stage_task
from ftlayer.spark.stages.carrier import make_carriers, read_carriers
from ftlayer.spark.stages.pages import ROOT, roots_of, to_roots
from ftlayer.spark.stages.task import EMITTED_ID, FT, RootGiver, Skip, StageTask

V = pa.schema([("v", pa.int64())])
ODD_FAILS = Map("odd", lambda r: {"v": 10 // (1 - r["v"] % 2)}, V)
PASS = Map("pass", dict, V)


def vs(values: Any) -> list[dict[str, int]]:
    return [{"v": value} for value in values]


def first(functions: Any = (), **options: Any) -> StageTask:
    giver = RootGiver("q", "run", "files", 0, 0, 1)
    return StageTask(tuple(functions), options.pop("giver", giver), **options)


def run(kit: SimpleNamespace, task: StageTask, *batches: pa.RecordBatch, partition: int = 0) -> list[Any]:
    return kit.read_pages(task.pages(iter(batches), partition))


def u64s(values: Any) -> Any:
    return np.array(list(values), np.uint64)


# ---------------------------------------------------------------- roots


@given(st.lists(st.integers(1, 700), max_size=4), st.integers(0, 2**31 - 1), st.sampled_from([1, 4, 256]))
@settings(max_examples=25, deadline=None)
def test_roots_name_rows_by_place_however_the_rows_are_batched(
    kit: SimpleNamespace, sizes: list[int], partition: int, shards: int
) -> None:
    giver = RootGiver("q", "run", "files", 7, shards - 1, shards)
    rows = kit.source_rows(vs(range(sum(sizes))), V)
    parts, start = [], 0
    for size in sizes:
        parts.append(rows.slice(start, size))
        start += size
    task = first([PASS], giver=giver)
    one = run(kit, task, rows, partition=partition)
    other = run(kit, task, *parts, partition=partition)
    roots = [root for page in one for root in page.roots]
    assert [root for page in other for root in page.roots] == roots
    assert len(set(roots)) == sum(sizes)
    assert 0 not in roots
    bits = shard_bits(shards)
    assert all(root >> (64 - bits) == shards - 1 for root in roots)
    assert sum(page.head.rows_in for page in one) == sum(sizes)


def test_roots_differ_between_runs_batches_partitions_sources_and_queries(kit: SimpleNamespace) -> None:
    giver = RootGiver("q", "run", "files", 0, 0, 1)
    rows = kit.source_rows(vs(range(50)), V)
    seen: set[int] = set()
    tasks = [
        (giver, 0),
        (giver, 1),
        (replace(giver, run="again"), 0),
        (replace(giver, batch=1), 0),
        (replace(giver, source="other"), 0),
        (replace(giver, query="other"), 0),
    ]
    for named, partition in tasks:
        (page,) = run(kit, first([PASS], giver=named), rows, partition=partition)
        seen.update(page.roots)
    assert len(seen) == 50 * len(tasks)


def test_delivered_rows_keep_their_roots_and_report_their_range(kit: SimpleNamespace) -> None:
    high = 2**64 - 3
    page, *more = run(
        kit,
        first([ODD_FAILS]),
        kit.source_rows(vs([0, 1]), V),
        kit.delivered_rows(vs([2, 3]), V, [high, 9], 40, 60),
        kit.source_rows(vs([4]), V),
    )
    assert not more
    head = page.head
    assert page.roots[1] == high
    assert page.column("v") == [10, 10, 10]
    assert head.delivered == (40, 60)
    assert to_roots(head.delivered_roots).tolist() == [high, 9]
    assert (head.rows_in, head.rows_out) == (5, 3)
    # The vertex has the payload of what it delivered; of the source's row it goes along.
    assert [(f.root == 9, f.row) for f in head.failures] == [(False, 0), (True, -1)]
    assert page.failed == vs([1])


def test_rows_of_several_ranges_report_what_covers_them(kit: SimpleNamespace) -> None:
    parts = [kit.delivered_rows(vs([1]), V, [5], 40, 60), kit.delivered_rows(vs([1]), V, [6], 10, 50)]
    (page,) = run(kit, first(), *parts)
    assert page.head.delivered == (10, 60)


def test_rows_behind_a_transform_keep_the_roots_they_came_with(kit: SimpleNamespace) -> None:
    task = StageTask((PASS,), None)
    (page,) = run(kit, task, kit.rooted_rows(vs([1, 2, 3]), V, [7, 2**64 - 1, 7]))
    assert page.roots == [7, 2**64 - 1, 7]
    assert page.head.delivered is None
    assert page.head.delivered_roots == b""


@pytest.mark.parametrize("ft", [None, {"root": None}, {"root": 0}])
def test_rows_whose_root_a_transform_lost_are_refused(kit: SimpleNamespace, ft: Any) -> None:
    rows = kit.rooted_rows(vs([1, 2]), V, [7, 8])
    column = pa.array([{"root": 7}, ft], rows.schema.field(FT).type)
    rows = rows.set_column(1, rows.schema.field(FT), column)
    with pytest.raises(QueryError, match="'_ft' is null"):
        run(kit, StageTask((PASS,), None), rows)


# ---------------------------------------------------------------- skip


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_exactly_the_skipped_rows_are_left_out(kit: SimpleNamespace, data: Any) -> None:
    kinds = data.draw(st.lists(st.booleans(), min_size=1, max_size=30), label="delivered")
    cuts = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=30), label="chunks")
    places = data.draw(st.sets(st.integers(0, 29)), label="places")
    skipped_roots = data.draw(st.sets(st.integers(1, 30)), label="roots")
    # The seal took source rows by place, delivered ones by root (here: place + 1).
    by_place = frozenset(place for place in places if place < len(kinds) and not kinds[place])
    parts = []
    for place, delivered in enumerate(kinds):
        row = vs([place])
        parts.append(kit.delivered_rows(row, V, [place + 1], 0, 99) if delivered else kit.source_rows(row, V))
    whole = pa.concat_batches(parts)
    batches, start = [], 0
    for cut in cuts:
        batches.append(whole.slice(start, cut))
        start += cut
    batches.append(whole.slice(start))
    skip = Skip({3: by_place, 4: frozenset(range(30))}, frozenset(skipped_roots))
    pages = run(kit, first([PASS], skip=skip), *batches, partition=3)
    expected = [
        place
        for place, delivered in enumerate(kinds)
        if not (place + 1 in skipped_roots if delivered else place in by_place)
    ]
    assert [value for page in pages for value in page.column("v")] == expected
    # What is left has the roots it would have had.
    plain = run(kit, first([PASS]), whole, partition=3)
    roots = dict(zip(plain[0].column("v"), plain[0].roots, strict=True))
    assert [root for page in pages for root in page.roots] == [roots[place] for place in expected]


def test_a_partition_whose_rows_are_all_left_out_still_reports_what_it_was_given(
    kit: SimpleNamespace,
) -> None:
    task = first([PASS], skip=Skip(roots=frozenset({5, 6})))
    (page,) = run(kit, task, kit.delivered_rows(vs([1, 2]), V, [5, 6], 3, 9))
    assert page.head.delivered == (3, 9)
    assert page.roots == []


def test_no_rows_no_pages(kit: SimpleNamespace) -> None:
    assert run(kit, first([PASS])) == []
    assert run(kit, first([PASS]), kit.source_rows([], V)) == []


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


# ---------------------------------------------------------------- ids handed on


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(50, 4_000),
)
def test_ids_handed_on_are_distinct_and_add_up_over_chunks_pages_and_partitions(
    kit: SimpleNamespace, rows: list[tuple[int, int]], chunk_rows: int, page_bytes: int
) -> None:
    """Roots repeat (behind an explode), and each row becomes 0 to 3."""
    step = FlatMap("copies", lambda r: [r] * r["v"], V)
    task = StageTask((step,), None, emits="emit:x")
    batch = kit.rooted_rows(vs(copies for _, copies in rows), V, [root for root, _ in rows])
    with (
        patch.object(stage_task, "CHUNK_ROWS", chunk_rows),
        patch.object(stage_task, "PAGE_BYTES", page_bytes),
    ):
        pages = run(kit, task, batch) + run(kit, task, batch, partition=1)
        again = run(kit, task, batch) + run(kit, task, batch, partition=1)
    ids = [id_ for page in pages for id_ in page.column(EMITTED_ID)]
    assert ids == [id_ for page in again for id_ in page.column(EMITTED_ID)]
    assert len(set(ids)) == len(ids) == 2 * sum(copies for _, copies in rows)
    assert 0 not in ids
    wanted: dict[int, int] = {}
    for page in pages:
        for root, id_ in zip(page.roots, page.column(EMITTED_ID), strict=True):
            wanted[root] = wanted.get(root, 0) ^ id_
    said: dict[int, int] = {}
    for page in pages:
        roots, values = (
            to_roots(data).tolist() for data in (page.head.emitted_roots, page.head.emitted_values)
        )
        assert len(set(roots)) == len(roots)
        for root, value in zip(roots, values, strict=True):
            said[root] = said.get(root, 0) ^ value
    assert said == wanted


def test_rows_tried_again_in_place_get_ids_of_their_own(kit: SimpleNamespace, tmp_path: Any) -> None:
    """A retry's rows are a second result for one chunk; under one root they must not repeat an id."""
    tried: set[int] = set()

    def second_time(record: Any) -> Any:
        if record["v"] % 2 and record["v"] not in tried:
            tried.add(record["v"])
            raise ValueError
        return record

    task = StageTask((Map("m", second_time, V),), None, emits="e", again=1)
    (page,) = run(kit, task, kit.rooted_rows(vs(range(6)), V, [5] * 6))
    assert not page.head.failures
    assert len(set(page.column(EMITTED_ID))) == 6


# ---------------------------------------------------------------- carriers


def with_carriers(kit: SimpleNamespace, values: list[int], carriers: list[bytes | None]) -> pa.RecordBatch:
    rows = pa.RecordBatch.from_pylist(vs(values), schema=V).append_column(
        "ft", pa.array(carriers, pa.binary())
    )
    return kit.source_rows(rows.to_pylist(), rows.schema)


def test_resumed_rows_are_named_by_their_record_ids(kit: SimpleNamespace) -> None:
    carriers = make_carriers(u64s([50, 50, 60]), u64s([7, 2**64 - 1, 9]), 3).to_pylist()
    batch = with_carriers(kit, [0, 1, 2], carriers)
    (page,) = run(kit, first([ODD_FAILS], carrier="ft"), batch)
    assert page.roots == [7, 9]
    # The query that emitted it has the payload.
    assert [(f.root, f.row) for f in page.head.failures] == [(2**64 - 1, -1)]
    assert page.failed == []
    assert read_carriers(page.head.carried).tolist() == [(50, 7, 3), (50, 2**64 - 1, 3), (60, 9, 3)]
    assert page.head.delivered is None


def test_resumed_rows_that_are_left_out_are_still_reported(kit: SimpleNamespace) -> None:
    carriers = make_carriers(u64s([50, 60]), u64s([7, 9]), 3).to_pylist()
    skip = Skip(roots=frozenset({7, 9}))
    (page,) = run(kit, first([PASS], carrier="ft", skip=skip), with_carriers(kit, [0, 1], carriers))
    assert page.roots == []
    assert len(read_carriers(page.head.carried)) == 2


def test_a_row_without_a_carrier_is_refused(kit: SimpleNamespace) -> None:
    with pytest.raises(CodecError, match="'ft': row 0"):
        run(kit, first([PASS], carrier="ft"), with_carriers(kit, [0], [None]))


# ---------------------------------------------------------------- tries in place


@pytest.mark.parametrize(
    ("again", "passing"), [(0, [0]), (1, [0, 1]), (3, [0, 1, 2, 3]), (9, [0, 1, 2, 3, 4])]
)
def test_records_are_tried_again_in_place(kit: SimpleNamespace, again: int, passing: list[int]) -> None:
    calls = dict.fromkeys(range(5), 0)

    def needs(record: Any) -> Any:
        calls[record["v"]] += 1
        if calls[record["v"]] <= record["v"]:
            raise ValueError(f"try {calls[record['v']]}")
        return record

    (page,) = run(kit, first([Map("m", needs, V)], again=again), kit.source_rows(vs(range(5)), V))
    (plain,) = run(kit, first(), kit.source_rows(vs(range(5)), V))
    assert sorted(page.column("v")) == passing
    assert sorted(page.roots) == sorted(plain.roots[v] for v in passing)
    # The last try's reason stands, and who passed is not tried again.
    assert [f.reason for f in page.head.failures] == [f"ValueError: try {again + 1}"] * (5 - len(passing))
    assert page.failed == vs(v for v in range(5) if v not in passing)
    assert calls == {v: min(v, again) + 1 for v in range(5)}


def test_what_asks_for_a_pause_is_not_tried_again_in_place(kit: SimpleNamespace) -> None:
    tries: list[int] = []

    def busy(record: Any) -> Any:
        tries.append(record["v"])
        raise [RetryLater("busy", after="1m", uses_attempt=False), RetryLater("busy")][record["v"]]

    rows = kit.source_rows(vs(range(2)), V)
    (page,) = run(kit, first([Map("busy", busy, V)], again=2), rows)
    assert sorted(tries) == [0, 1, 1, 1]
    asked = [(failed.after_ms, failed.uses_attempt) for failed in page.head.failures]
    assert asked == [(60_000, False), (None, True)]


def test_tries_in_place_of_killers_stay_in_a_child(kit: SimpleNamespace, tmp_path: Any) -> None:
    import os

    def worse(record: Any) -> Any:
        if record["v"] == 1:
            raise ValueError
        if record["v"] == 2:
            if (tmp_path / "seen").exists():
                os._exit(1)  # the second time it does not raise but kill
            (tmp_path / "seen").touch()
            raise ValueError
        return record

    task = first([Map("m", worse, V)], again=2, isolate=True)
    (page,) = run(kit, task, kit.source_rows(vs(range(4)), V))
    assert sorted(page.column("v")) == [0, 3]
    fatal = {page.failed[f.row]["v"]: f.fatal for f in page.head.failures}
    assert fatal == {1: False, 2: True}


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
