"""The ids under which a stage hands rows on, the carriers of those that it resumes, and tries in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_runs import ODD_FAILS, PASS, V, first, run, u64s, vs

from ftlayer.common.failures import RetryLater
from ftlayer.errors import CodecError
from ftlayer.functions.steps import FlatMap, Map
from ftlayer.spark.stages import task as stage_task
from ftlayer.spark.stages.pages import make_carriers, read_carriers, to_roots
from ftlayer.spark.stages.task import EMITTED_ID, Skip, StageTask

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
