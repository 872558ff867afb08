"""What a function may ask of its record, wherever it stands in a chain, and what it costs."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import UnsupportedError
from ftlayer.functions.chains.record_segment import CHUNK_ROWS
from ftlayer.functions.chains.segments import Chain
from ftlayer.functions.current import CurrentRecord, Tries, current_record
from ftlayer.functions.steps import Filter, FlatMap, Map, MapBatches
from ftlayer.records.ids import FIRST_TRY, attempts_of, first_failed_of, pack_tries, unpacked
from ftlayer.spark.stages.known import NOTHING_TRIED, TriedRoots, isolated

V = pa.schema([("v", pa.int64())])


@given(st.lists(st.tuples(st.integers(1, 2**31 - 1), st.integers(0, 2**64 - 1)), max_size=20))
def test_tries_are_packed_up_to_their_bounds(tries: list[tuple[int, int]]) -> None:
    attempts = np.array([attempt for attempt, _ in tries], np.int32)
    failed = np.array([ms for _, ms in tries], np.uint64)
    packed = pack_tries(attempts, failed)
    assert attempts_of(packed).tolist() == [min(attempt, 2**20 - 1) for attempt, _ in tries]
    assert first_failed_of(packed).tolist() == [min(ms, 2**44 - 1) for _, ms in tries]
    assert list(map(unpacked, packed.tolist())) == list(
        zip(attempts_of(packed), first_failed_of(packed), strict=True)
    )
    assert first_failed_of(pack_tries(attempts, None)).tolist() == [0] * len(tries)


def known(rows: list[int]) -> Tries:
    """Record v of which every third was never delivered, and the others v times, from v seconds on."""
    packed = [
        FIRST_TRY if v % 3 == 0 else int(pack_tries(np.array([v]), np.array([v * 1_000], np.uint64))[0])
        for v in rows
    ]
    return Tries(np.array(rows, np.uint64) + np.uint64(7), np.array(packed, np.uint64))


def expected(v: int) -> CurrentRecord:
    if v % 3 == 0:
        return CurrentRecord(1, None, f"{v + 7:016x}")
    return CurrentRecord(v, dt.datetime.fromtimestamp(v, dt.UTC), f"{v + 7:016x}")


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.booleans())
def test_each_function_sees_its_own_record(rows: list[int], isolate: bool) -> None:
    def seen(record: Any) -> CurrentRecord:
        if current_record() != expected(record["v"] % 100):
            raise AssertionError(f"{current_record()} for {record}")
        return current_record()

    def twice(record: Any) -> Any:
        yield {"v": record["v"]}
        seen(record)  # late: when the loop asks for the second one
        yield {"v": record["v"] + 100}

    def tagged(batch: pa.RecordBatch) -> pa.RecordBatch:
        for row in batch.to_pylist():
            want = expected(row["v"] % 100)
            assert (row["_ft_attempt"], row["_ft_first_failed_at"]) == (want.attempt, want.first_failed_at), (
                row
            )
        if batch.num_rows > 3:
            raise ValueError("too many")
        return batch

    steps = [
        Filter("odd", lambda r: seen(r) is not None and r["v"] % 5, V),
        FlatMap("twice", twice, V),
        MapBatches("tagged", tagged, V, "arrow", True),
        Map("last", lambda r: seen(r) and r, V),
    ]
    chain = Chain(steps)
    batch = pa.record_batch([rows], V)
    run = chain.run
    result = isolated(batch, known(rows), run) if isolate and len(rows) < 4 else run(batch, known(rows))
    assert [failure.reason for failure in result.failures] == []
    assert sum(b.num_rows for b, _ in result.batches) == 2 * sum(v % 5 > 0 for v in rows)


def test_rows_beyond_a_chunk_are_their_own() -> None:
    rows = list(range(1, 2 * CHUNK_ROWS))
    tries = Tries(None, np.array(rows, np.uint64) << np.uint64(44))
    chain = Chain([Map("attempt", lambda r: {"v": current_record().attempt - r["v"]}, V)])
    result = chain.run(pa.record_batch([rows], V), tries)
    assert {v for batch, _ in result.batches for v in batch.column("v").to_pylist()} == {0}


def test_where_there_is_no_record_it_says_so() -> None:
    with pytest.raises(UnsupportedError, match="there is no record here"):
        current_record()
    chain = Chain(
        [Map("m", dict, V), MapBatches("b", lambda batch: current_record() and batch, V, "arrow", False)]
    )
    (failure,) = chain.run(pa.record_batch([[1]], V)).failures
    assert "tagged=True" in failure.reason


def test_an_unknown_record_is_at_its_first_attempt() -> None:
    seen: list[CurrentRecord] = []
    chain = Chain([Map("m", lambda r: seen.append(current_record()) or r, V)])
    chain.run(pa.record_batch([[1]], V))
    assert seen == [CurrentRecord(1, None, None)]


@given(
    st.lists(st.integers(1, 1_000), unique=True, max_size=30), st.lists(st.integers(1, 1_000), max_size=30)
)
def test_behind_the_first_stage_tries_are_found_by_root(delivered: list[int], roots: list[int]) -> None:
    ids = np.array(delivered, np.uint64)
    tried = TriedRoots.of(ids, ids + np.uint64(1), (ids << np.uint64(44)) + np.uint64(5))
    found = tried.known(np.array(roots, np.uint64))
    for row, root in enumerate(roots):
        record = found.record(row)
        if root in delivered:
            assert (record.attempt, record.origin) == (root, f"{root + 1:016x}")
        else:
            assert (record.attempt, record.first_failed_at, record.origin) == (1, None, f"{root:016x}")
    assert NOTHING_TRIED.known(ids).packed is None
