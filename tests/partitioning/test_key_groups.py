"""Key groups cover each other's subtasks exactly."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import ConfigError
from ftlayer.records.partitioning import HashByKeyGroup, OutgoingRows, groups_of, key_groups, subtasks_of
from ftlayer.records.traced import KeySelector


@given(st.integers(1, 500).flatmap(lambda most: st.tuples(st.just(most), st.integers(1, most))))
def test_every_group_has_the_subtask_whose_range_holds_it(case: tuple[int, int]) -> None:
    most, parallelism = case
    ranges = [groups_of(subtask, parallelism, most) for subtask in range(parallelism)]
    assert [group for groups in ranges for group in groups] == list(range(most))
    assert all(ranges)
    owners = subtasks_of(np.arange(most, dtype=np.int32), parallelism, most)
    assert [subtask for subtask, groups in enumerate(ranges) for _ in groups] == owners.tolist()


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50), st.integers(1, 1 << 15))
def test_a_group_is_the_positive_remainder(hashes: list[int], most: int) -> None:
    assert key_groups(np.array(hashes, np.int32), most).tolist() == [value % most for value in hashes]


def test_rows_go_where_their_group_lives() -> None:
    payload = pa.record_batch({"key": [f"k{i}" for i in range(1_000)]})
    partitioner = HashByKeyGroup(KeySelector(("key",)), 128)
    rows = OutgoingRows(payload, np.zeros(1_000, np.uint64))
    groups = key_groups(partitioner.selector.hash(payload), 128)
    for channels in (1, 2, 3, 128):
        chosen = partitioner.select(rows, channels).tolist()
        assert all(
            group in groups_of(c, channels, 128) for c, group in zip(chosen, groups.tolist(), strict=True)
        )


def test_more_subtasks_than_groups_are_refused() -> None:
    rows = OutgoingRows(pa.record_batch({"key": [1]}), np.zeros(1, np.uint64))
    with pytest.raises(ConfigError, match="max_parallelism"):
        HashByKeyGroup(KeySelector(("key",)), 2).select(rows, 3)
