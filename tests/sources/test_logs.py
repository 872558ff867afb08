"""Ranges of a log: limits, new splits, where a run ends. The log is a list for each split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.connectors.logs import LogReader, Offsets, limited
from ftlayer.errors import SourceChangedError
from ftlayer.functions.data_sources import ReadAllAvailable, ReadMaxRows

ID = pa.schema([("id", pa.string())])


class Log(LogReader):
    schema = ID

    def __init__(self, max_rows: int = 10, **splits: int) -> None:
        super().__init__(max_rows)
        self.first = dict.fromkeys(splits, 0)
        self.end = splits
        self.told: list[Offsets] = []

    def starts(self) -> Offsets:
        return dict(self.first)

    def ends(self) -> Offsets:
        return dict(self.end)

    def first_of(self, splits: Sequence[str]) -> Offsets:
        return {split: self.first.get(split, 0) for split in splits}

    def read_split(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pydict({"id": [f"{split}{n}" for n in range(start, end)]}, schema=ID)

    def committed(self, offsets: Offsets) -> None:
        self.told.append(dict(offsets))

    def batch(self, start: Offsets, end: Offsets) -> list[str]:
        parts = self.partitions(start, end)
        return [text for part in parts for batch in self.read(part) for text in batch.column(0).to_pylist()]


def batches(log: Log, start: Offsets, most: int = 100) -> Iterator[list[str]]:
    for _ in range(most):
        end = log.latestOffset(start, log.getDefaultReadLimit())
        if end == start:
            return
        yield log.batch(start, end)
        start = end
    raise AssertionError("it does not end")


def test_batches_are_limited_over_all_splits() -> None:
    log = Log(a=20, b=5)
    found = list(batches(log, log.initialOffset()))
    assert [len(batch) for batch in found[:2]] == [10, 10]
    assert sorted(text for batch in found for text in batch) == sorted(
        [f"a{n}" for n in range(20)] + [f"b{n}" for n in range(5)]
    )


def test_without_a_limit_there_is_one_batch() -> None:
    log = Log(a=20, b=5)
    assert log.latestOffset(log.starts(), ReadAllAvailable()) == {"a": 20, "b": 5}


def test_a_split_that_is_added_is_read_from_its_first_record() -> None:
    log = Log(a=3)
    start = log.initialOffset()
    log.end["b"], log.first["b"] = 7, 5
    end = log.latestOffset(start, ReadMaxRows(100))
    assert end == {"a": 3, "b": 7}
    assert sorted(log.batch(start, end)) == ["a0", "a1", "a2", "b5", "b6"]


def test_a_run_of_what_is_available_now_ends() -> None:
    log = Log(a=25)
    log.prepareForTriggerAvailableNow()
    log.end["a"] = 50
    log.end["b"] = 1
    assert [len(batch) for batch in batches(log, log.initialOffset())] == [10, 10, 5]


def test_a_split_that_is_gone_stays_where_it_is() -> None:
    log = Log(a=9)
    start = {"a": 9, "gone": 3}
    end = log.latestOffset(start, ReadMaxRows(10))
    assert end == start
    assert log.partitions(start, end) == []


def test_a_split_that_ends_before_its_place_is_an_error() -> None:
    """What is written to it next would be taken for what was read."""
    with pytest.raises(
        SourceChangedError, match=r"^a ends at offset 5, and the source is at offset 9: it was made anew"
    ):
        Log(a=5, b=3).latestOffset({"a": 9, "b": 3}, ReadMaxRows(10))


def test_a_range_of_the_run_before_that_is_beyond_the_end_is_an_error() -> None:
    log = Log(a=100, b=300)
    with pytest.raises(SourceChangedError, match=r"^a ends at offset 100, and the source is at offset 300"):
        log.partitions({"a": 50, "b": 3}, {"a": 300, "b": 300})
    log.end["a"] = 300
    assert len(log.partitions({"a": 50, "b": 3}, {"a": 300, "b": 300})) == 2


def test_a_split_that_is_gone_and_ought_to_be_there_is_an_error() -> None:
    class Missing(Log):
        def is_missed(self, split: str) -> bool:
            return split != "left out"

    start = {"a": 9, "gone": 3, "left out": 5}
    with pytest.raises(SourceChangedError, match=r"^gone ends at offset 0, and the source is at offset 3"):
        Missing(a=9).latestOffset(start, ReadMaxRows(10))


def test_ends_are_asked_for_once_a_range() -> None:
    class Counting(Log):
        asked = 0

        def ends(self) -> Offsets:
            self.asked += 1
            return super().ends()

    log = Counting(a=100)
    start = {"a": 0, "gone": 3}
    for _ in range(5):
        start, before = log.latestOffset(start, ReadMaxRows(10)), start
        log.partitions(before, start)
    assert log.asked == 5


def test_what_is_durable_is_told() -> None:
    log = Log(a=5)
    log.commit({"a": 4})
    assert log.told == [{"a": 4}]


SPLITS = st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 50), st.integers(0, 1_000)))


@given(SPLITS, st.integers(1, 200))
def test_limits_hold_and_everybody_comes_forward(splits: dict[str, tuple[int, int]], most: int) -> None:
    start = {split: first for split, (first, _) in splits.items()}
    ends = {split: first + behind for split, (first, behind) in splits.items()}
    found = limited(start, ends, most)
    taken = {split: found[split] - start[split] for split in start}
    assert all(start[split] <= found[split] <= ends[split] for split in start)
    assert all(taken[split] > 0 for split in start if ends[split] > start[split])
    assert sum(taken.values()) <= most + len(splits)
    if sum(ends.values()) - sum(start.values()) <= most:
        assert found == ends


@pytest.mark.parametrize("most", [None, 10])
def test_nothing_to_read_stays(most: int | None) -> None:
    assert limited({"a": 3}, {"a": 3}, most) == {"a": 3}


def test_a_split_has_one_place_in_all_ranges_of_a_topology_and_none_is_read_for_splits_without_records() -> (
    None
):
    log = Log(max_rows=4, a=20, b=1, c=7)
    start, read = log.initialOffset(), []
    while (end := log.latestOffset(start, log.getDefaultReadLimit())) != start:
        ranges = log.log_ranges(start, end)
        assert list(end) == ["a", "b", "c", *(["d"] if "d" in end else [])]
        for split, found in zip(end, ranges, strict=True):
            assert found is None or (found.split == split and found.start < found.end)
        assert [each for each in ranges if each] == log.partitions(start, end)
        read += [(each.split, at) for each in ranges if each for at in range(each.start, each.end)]
        start, log.end = end, {"d": 3, **log.end}
    assert sorted(read) == sorted((split, at) for split, ends in log.end.items() for at in range(ends))
    assert log.log_ranges(start, start) == []
