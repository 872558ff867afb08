from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import CodecError
from ftlayer.records.batch import MAX_SELECTORS, TRACKED_COLUMNS, TrackedBatch, check_reserved_names
from ftlayer.records.ids import RootSeed, initial_record_ids, root_ids

KEY = b"0123456789abcdef"


def payload(n: int) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array(range(n), pa.int64()), pa.array(map(str, range(n)), pa.string())], ["a", "b"]
    )


def tracked(n: int, selectors: int = 1) -> TrackedBatch:
    rng = np.random.default_rng(n)
    shape = (n,) if selectors == 1 else (n, selectors)
    return TrackedBatch(
        payload(n),
        rng.integers(1, 2**64, n, np.uint64),
        rng.integers(1, 2**64, n, np.uint64),
        key_hash=rng.integers(-(2**31), 2**31, shape, np.int32),
        attempt=rng.integers(0, 5, n, np.int32),
        origin=rng.integers(1, 2**64, n, np.uint64),
    )


def rows(batch: TrackedBatch) -> list[tuple[Any, ...]]:
    tracked_lists = [getattr(batch, name).tolist() for name in TRACKED_COLUMNS]
    users = [tuple(row.values()) for row in batch.payload.to_pylist()]
    return list(zip(users, *tracked_lists, strict=True))


def test_a_source_batch_is_named_by_its_seed() -> None:
    seed = RootSeed("q", "r", "s", 3, 1)
    batch = TrackedBatch.of_source(payload(5), seed, 100, shard=1, shards=4)
    roots = root_ids(seed, 100, 5, shard=1, shards=4)
    assert batch.source_record_id.tolist() == roots.tolist()
    assert batch.record_id.tolist() == initial_record_ids(roots).tolist()
    assert batch.origin.tolist() == roots.tolist()
    assert batch.attempt.tolist() == [0] * 5
    assert batch.key_hash.tolist() == [0] * 5


@given(st.integers(0, 8), st.integers(1, 3), st.data())
def test_selections_keep_rows_together(n: int, selectors: int, data: st.DataObject) -> None:
    batch = tracked(n, selectors)
    whole = rows(batch)
    indices = data.draw(st.lists(st.integers(0, n - 1))) if n else []
    assert rows(batch.take(np.array(indices, np.int64))) == [whole[i] for i in indices]
    mask = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    assert rows(batch.filter(np.array(mask, np.bool_))) == [
        r for r, keep in zip(whole, mask, strict=True) if keep
    ]
    start, stop = data.draw(st.integers(0, 10)), data.draw(st.integers(0, 10))
    assert rows(batch.slice(start, stop)) == whole[start:stop]


@given(st.integers(0, 8), st.integers(1, 3), st.integers(0, 8))
def test_arrow_and_back(n: int, selectors: int, start: int) -> None:
    batch = tracked(n, selectors)
    arrow = batch.to_arrow()
    assert arrow.schema.names == ["a", "b", *TRACKED_COLUMNS]
    assert rows(TrackedBatch.from_arrow(arrow)) == rows(batch)
    assert rows(TrackedBatch.from_arrow(arrow.slice(start))) == rows(batch)[start:]


def test_columns_may_come_in_any_order() -> None:
    batch = tracked(3, 2)
    names = [*reversed(TRACKED_COLUMNS), "a", "b"]
    assert rows(TrackedBatch.from_arrow(batch.to_arrow().select(names))) == rows(batch)


def test_nothing_is_copied() -> None:
    roots = np.arange(1, 100, dtype=np.uint64)
    batch = TrackedBatch(payload(99), roots, roots)
    assert batch.source_record_id is roots
    arrow = batch.to_arrow()
    again = TrackedBatch.from_arrow(arrow)
    address = roots.__array_interface__["data"][0]
    assert again.source_record_id.__array_interface__["data"][0] == address
    assert arrow.column("a").buffers()[1].address == batch.payload.column("a").buffers()[1].address
    part = batch.slice(10, 20)
    assert part.record_id.__array_interface__["data"][0] == address + 80


def test_a_payload_without_columns_keeps_its_rows() -> None:
    nothing = payload(4).select([])
    batch = TrackedBatch.of_source(nothing, KEY, 0)
    assert TrackedBatch.from_arrow(batch.to_arrow()).num_rows == 4
    assert batch.filter(np.array([True, False, True, False])).num_rows == 2
    assert batch.take(np.array([3, 0, 1])).num_rows == 3
    assert batch.slice(1, 3).num_rows == 2


def test_hashes_by_selector() -> None:
    batch = tracked(4, 3)
    assert batch.selectors == 3
    for i in range(3):
        assert batch.hashes_of(i).tolist() == batch.key_hash[:, i].tolist()
    single = TrackedBatch(
        payload(1), np.ones(1, np.uint64), np.ones(1, np.uint64), key_hash=np.full((1, 1), 7, np.int32)
    )
    assert (single.key_hash.shape, single.hashes_of(0).tolist()) == ((1,), [7])
    for selector in (-1, 3):
        with pytest.raises(CodecError, match="no key hash"):
            batch.hashes_of(selector)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", TRACKED_COLUMNS)
def test_reserved_names_are_refused(name: str) -> None:
    users = pa.record_batch([pa.array([1])], [name])
    with pytest.raises(CodecError, match=f"'{name}' is reserved"):
        check_reserved_names(users.schema)
    with pytest.raises(CodecError, match=f"'{name}' is reserved"):
        TrackedBatch(users, np.ones(1, np.uint64), np.ones(1, np.uint64))


@pytest.mark.parametrize("name", TRACKED_COLUMNS)
def test_a_column_of_another_type_or_length_is_named(name: str) -> None:
    good: dict[str, Any] = {column: getattr(tracked(3), column) for column in TRACKED_COLUMNS}
    TrackedBatch(payload(3), **good)
    for bad in (good[name][:2], good[name].astype(np.float64), np.ones((3, 2, 2), good[name].dtype)):
        with pytest.raises(CodecError, match=f"column '{name}' must be"):
            TrackedBatch(payload(3), **{**good, name: bad})


@pytest.mark.parametrize("name", ["source_record_id", "record_id", "origin"])
def test_id_0_is_refused(name: str) -> None:
    good: dict[str, Any] = {column: getattr(tracked(3), column) for column in TRACKED_COLUMNS}
    with pytest.raises(CodecError, match=f"'{name}' has id 0 in row 1"):
        TrackedBatch(payload(3), **{**good, name: np.array([1, 0, 2], np.uint64)})


def test_a_negative_attempt_and_impossible_hash_counts_are_refused() -> None:
    ids = np.ones(2, np.uint64)
    with pytest.raises(CodecError, match="'attempt' has a negative number in row 1"):
        TrackedBatch(payload(2), ids, ids, attempt=np.array([0, -1], np.int32))
    for selectors in (0, MAX_SELECTORS + 1):
        with pytest.raises(CodecError, match="'key_hash' must have 1 to"):
            TrackedBatch(payload(2), ids, ids, key_hash=np.zeros((2, selectors), np.int32))


@pytest.mark.parametrize("name", TRACKED_COLUMNS)
def test_arrow_columns_that_are_wrong_are_named(name: str) -> None:
    arrow = tracked(3, 2).to_arrow()
    index = arrow.schema.get_field_index(name)
    column = arrow.column(index)
    broken = [
        pa.array(["x"] * 3),
        pa.array([*column.to_pylist()[:2], None], column.type),
        pa.array([[1], [2], [3]], pa.list_(pa.int32())),
        pa.array([[1, 2], [3, None], [5, 6]], pa.list_(pa.int32(), 2)),
        pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
        pa.array([[], [], []], pa.list_(pa.int32(), 0)),
    ]
    for column in broken:
        with pytest.raises(CodecError, match=f"column '{name}'"):
            TrackedBatch.from_arrow(arrow.set_column(index, name, column))
    with pytest.raises(CodecError, match=f"one column '{name}'; this one has only"):
        TrackedBatch.from_arrow(arrow.drop_columns([name]))
    with pytest.raises(CodecError, match=f"one column '{name}'; this one has it 2 times"):
        TrackedBatch.from_arrow(arrow.append_column(name, column))


def test_selections_out_of_range_are_refused() -> None:
    batch = tracked(3)
    for index in (-1, 3):
        with pytest.raises(CodecError, match=r"0\.\.2"):
            batch.take(np.array([0, index]))
    with pytest.raises(CodecError, match="shape"):
        batch.filter(np.array([True]))
