"""The roots that a stage gives to rows, and the rows that it leaves out by them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_runs import ODD_FAILS, PASS, V, first, run, vs

from ftlayer.errors import QueryError
from ftlayer.functions.steps import Map
from ftlayer.records.ids import shard_bits
from ftlayer.spark.stages.pages import to_roots
from ftlayer.spark.stages.task import FT, RootGiver, Skip, StageTask

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
    failing = [Map("fail", lambda record: record["missing"], V)]
    failed = run(kit, first(failing, skip=skip), *batches, partition=3)
    said = [failure.read_as for page in failed for failure in page.head.failures]
    assert said == ["" if kinds[place] else f"row {place} of partition 3 of batch 0" for place in expected]
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
