"""What the heads of a batch's pages add up to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.functions.steps import Map
from ftlayer.records.failures import FailedRow
from ftlayer.spark.stages import task as stage_task
from ftlayer.spark.stages.pages import PageHead, make_carriers
from ftlayer.spark.stages.run import (
    add_failures,
    add_last_stage,
    first_stage_verdict,
    lost_roots,
    sealed_rows,
)
from ftlayer.spark.stages.task import RootGiver, StageTask
from ftlayer.vertex.calls import Failure

V = pa.schema([("v", pa.int64())])
GIVER = RootGiver("q", "run", "files", 0, 0, 1)


def u64s(values: Any) -> Any:
    return np.array(list(values), np.uint64)


def head(**values: Any) -> PageHead:
    nothing = PageHead(0, 0, (), (), None, None, b"", b"", b"", b"", b"", b"")
    return PageHead(**{name: values.get(name, getattr(nothing, name)) for name in nothing.__slots__})


def fail_over(limit: int) -> Map:
    def function(record: Any) -> Any:
        if record["v"] >= limit:
            raise ValueError(record["v"])
        return record

    return Map("m", function, V)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=3), st.integers(0, 10))
def test_partitions_and_pages_add_up_whatever_their_cut(
    kit: SimpleNamespace, partitions: list[list[int]], limit: int
) -> None:
    task = StageTask((fail_over(limit),), GIVER)
    plain = StageTask((), GIVER)
    heads, roots, values = [], [], []
    with patch.object(stage_task, "CHUNK_ROWS", 3), patch.object(stage_task, "PAGE_BYTES", 60):
        for number, part in enumerate(partitions):
            rows = kit.source_rows([{"v": v} for v in part], V)
            pages = kit.read_pages(task.pages(iter([rows]), number))
            heads += [page.head for page in pages]
            # What fails in a first stage has no row in its pages: they are read as they are.
            failing = {failure.root for page in pages for failure in page.head.failures}
            assert failing.isdisjoint(root for page in pages for root in page.roots)
            for page in kit.read_pages(plain.pages(iter([rows]), number)):
                roots += page.roots
                values += page.column("v")
    verdict = first_stage_verdict(heads)
    add_last_stage(verdict, heads)
    by_root = dict(zip(roots, values, strict=True))
    failed = sorted(root for root in roots if by_root[root] >= limit)
    good = [root for root in roots if by_root[root] < limit]
    assert verdict.failed_roots.tolist() == failed
    assert verdict.failed_roots.dtype == np.uint64
    assert {r: row.to_pylist()[0]["v"] for r, row in verdict.failed_rows.items()} == {
        r: by_root[r] for r in failed
    }
    for root in failed:
        assert verdict.failures[root].reason == f"ValueError: {by_root[root]}"
        assert "ValueError" in verdict.failures[root].traceback
    assert (verdict.rows_in, verdict.rows_out) == (len(roots), len(good))


def test_delivered_ranges_roots_and_carriers_add_up() -> None:
    carriers = make_carriers(u64s([1, 2]), u64s([3, 4]), 5).to_pylist()
    verdict = first_stage_verdict(
        [
            head(delivered=(5, 9), delivered_roots=u64s([7]).tobytes(), carried=carriers[0]),
            head(),
            head(delivered=(3, 9), delivered_roots=u64s([8, 9]).tobytes(), carried=carriers[1]),
        ]
    )
    assert verdict.delivered == (3, 9)
    assert verdict.delivered_roots.tolist() == [7, 8, 9]
    assert verdict.carriers.tolist() == [(1, 3, 5), (2, 4, 5)]


def test_nothing_adds_up_to_nothing() -> None:
    verdict = first_stage_verdict([])
    add_last_stage(verdict, [])
    assert verdict.delivered is None
    assert verdict.failed_roots.tolist() == verdict.emitted_roots.tolist() == []
    assert (verdict.rows_in, verdict.rows_out) == (0, 0)


def failed(root: int, reason: str, row: int = -1, traceback: int = 0) -> FailedRow:
    return FailedRow(root, row, "op", reason, traceback, False)


def test_the_first_failure_of_a_root_stands_over_stages() -> None:
    verdict = first_stage_verdict(
        [
            head(failures=(failed(5, "first"), failed(5, "second")), tracebacks=("t1",)),
            head(failures=(failed(5, "third"), failed(6, "other", traceback=1)), tracebacks=("t2", "t3")),
        ]
    )
    add_failures(verdict, head(failures=(failed(5, "stage 2"), failed(7, "stage 2")), tracebacks=("t4",)))
    assert {root: (f.reason, f.traceback) for root, f in verdict.failures.items()} == {
        5: ("first", "t1"),
        6: ("other", "t3"),
        7: ("stage 2", "t4"),
    }


def test_emitted_ids_of_all_pages_are_kept_apart_for_the_fold() -> None:
    verdict = first_stage_verdict([])
    add_last_stage(
        verdict,
        [
            head(rows_out=2, emitted_roots=u64s([1, 2]).tobytes(), emitted_values=u64s([3, 4]).tobytes()),
            head(rows_out=1, emitted_roots=u64s([1]).tobytes(), emitted_values=u64s([5]).tobytes()),
        ],
    )
    assert verdict.rows_out == 3
    assert verdict.emitted_roots.tolist() == [1, 2, 1]
    assert verdict.emitted_values.tolist() == [3, 4, 5]


roots_sets = st.lists(st.sets(st.integers(1, 12)), max_size=4)


@given(roots_sets, roots_sets)
def test_roots_that_were_sent_and_not_seen_are_lost(sent: list[set[int]], seen: list[set[int]]) -> None:
    lost = lost_roots(
        [head(sent_roots=u64s(sorted(roots)).tobytes()) for roots in sent],
        [head(seen_roots=u64s(sorted(roots)).tobytes()) for roots in seen],
    )
    assert lost.tolist() == sorted(set().union(*sent) - set().union(*seen))


def test_roots_without_rows_need_not_be_left_out_and_those_that_fail_later_are() -> None:
    verdict = first_stage_verdict(
        [head(failures=(failed(9, "no"), failed(2**63 + 1, "no")), tracebacks=("t",))]
    )
    assert verdict.dropped_roots.tolist() == [9, 2**63 + 1]
    verdict.without_rows = verdict.failed_roots
    assert verdict.dropped_roots.tolist() == []
    verdict.fail(Failure(5, "rejected"))
    assert verdict.dropped_roots.tolist() == [5]
    assert verdict.dropped_roots.dtype == np.uint64
    assert verdict.failed_roots.tolist() == [5, 9, 2**63 + 1]


def test_single_rows_are_put_into_the_form_of_a_seal() -> None:
    rows = [(root, pa.record_batch({"v": pa.array([root], pa.uint64())})) for root in (9, 2**63 + 1, 3)]
    failures = {root: Failure(root, f"reason {root}") for root, _ in rows}
    packed = sealed_rows("q/files", rows, failures, None)
    assert packed.roots.tolist() == [9, 2**63 + 1, 3]
    assert [failure.root for failure in packed.failures] == packed.roots.tolist()
    assert packed.payload.column("v").to_pylist() == packed.roots.tolist()
