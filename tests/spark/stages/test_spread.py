"""Rows sorted into pages by their target partition: the one Spark's own repartition would choose."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.records.keyhash import partition_of, spark_hash
from ftlayer.spark.stages.pages import NAME, ROOT, WithNames, ipc_to_rows
from ftlayer.spark.stages.task import FT, RootGiver, Spread, StageTask, numbers_of_partitions

ROWS = st.lists(st.tuples(st.one_of(st.none(), st.text(max_size=3)), st.integers(0, 5)), max_size=40)


def batch_of(rows: list[tuple[str | None, int]]) -> pa.RecordBatch:
    keys = pa.array([key for key, _ in rows], pa.string())
    return pa.RecordBatch.from_arrays([keys, pa.array([n for _, n in rows], pa.int64())], names=["k", "n"])


@given(st.lists(ROWS, max_size=4), st.integers(1, 7))
def test_each_row_goes_to_the_partition_of_its_hash_and_keeps_its_order(batches, partitions):
    given_rows = [batch_of(rows) for rows in batches]
    wanted: dict[int, list[dict]] = {}
    for batch in given_rows:
        targets = partition_of(spark_hash([batch.column("k"), batch.column("n")]), partitions)
        for target, row in zip(targets.tolist(), batch.to_pylist(), strict=True):
            wanted.setdefault(target, []).append(row)
    found = {part: rows.to_pylist() for part, rows in Spread(("k", "n"), partitions).split(given_rows)}
    assert found == wanted


def test_a_stage_puts_each_row_into_exactly_one_part_under_the_name_of_its_page():
    task = StageTask((), RootGiver("q", "r", "s", 0, 0, 1), spread=Spread(("k",), 3))
    rows = batch_of([(str(n % 11), n) for n in range(2_500)])
    source = rows.append_column(FT, pa.nulls(2_500, pa.binary()))

    named = WithNames(lambda batches: task.pages(batches, 0))
    page = pa.Table.from_batches(list(named(iter([source])))).to_pylist()

    assert [row["head"] is not None for row in page] == [True, False, False, False]
    assert len({row[NAME] for row in page}) == 1
    assert page[0]["data"] is None
    numbers, roots = [], set()
    for row in page[1:]:
        for part in ipc_to_rows(row["data"]):
            targets = partition_of(spark_hash([part.column("k")]), 3)
            assert np.array_equal(targets, np.full(part.num_rows, row["part"]))
            numbers += part.column("n").to_pylist()
            roots |= set(part.column(ROOT).to_pylist())
    assert sorted(numbers) == list(range(2_500))
    assert len(roots) == 2_500


@given(st.integers(1, 300))
def test_a_number_stands_for_each_partition(count):
    numbers = numbers_of_partitions(count)
    targets = partition_of(spark_hash([pa.array(numbers, pa.int32())]), count)
    assert targets.tolist() == list(range(count))
