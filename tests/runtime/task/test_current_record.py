"""The attempt that a function of a topology sees: with a replay from the vertex, through channels, joins and tags."""

from __future__ import annotations

import datetime as dt
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.errors import UnsupportedError
from ftlayer.functions.current import CurrentRecord, current_record
from ftlayer.functions.process import ProcessFunction
from ftlayer.functions.steps import Map, MapBatches, Process
from ftlayer.records.ids import pack_tries
from ftlayer.runtime.handler import concat_record_ids
from ftlayer.runtime.protocol.messages import RecordIds
from ftlayer.runtime.task.contract import KnownOf, known_of
from ftlayer.runtime.task.pipeline import OperatorChain
from ftlayer.state.heap import HeapBackend
from ftlayer.topology.operators import AssignWatermarks
from ftlayer.vertex import calls
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.store import MemoryStore

N = pa.schema([("n", pa.int64())])


def u64(*values: int) -> Any:
    return np.array(values, np.uint64)


def tried(*attempts: int) -> Any:
    return pack_tries(np.array(attempts, np.int32), np.array(attempts, np.uint64) * np.uint64(1_000))


class Attempts(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        assert ctx.attempt == current_record().attempt
        assert ctx.first_failed_at == current_record().first_failed_at
        return [record * 1_000 + ctx.attempt]


def test_functions_of_a_chain_see_the_attempt_of_their_record() -> None:
    def tagged(batch: pa.RecordBatch) -> pa.RecordBatch:
        assert [n % 1_000 for n in batch["n"].to_pylist()] == batch["_ft_attempt"].to_pylist()
        return batch

    def plain(n: int) -> int:
        assert current_record().attempt == n % 1_000
        return n

    operators = [
        Process("attempts", Attempts(), N, ()),
        MapBatches("tagged", tagged, N, "arrow", True),
        AssignWatermarks("times", "n", 0, None, N),
        Map("plain", plain, N),
    ]
    pipeline = OperatorChain(operators, [N], HeapBackend())
    pipeline.open(0)
    lineage = RecordIds(
        u64(1, 2, 3, 4), u64(5, 6, 7, 8), np.array([0, 1, 3, 4], np.int32), None, tried(4, 2, 9, 1)
    )
    payload = pa.record_batch([[10, 20, 30]], N)
    passed = pipeline.run(payload, None, True, 0, Now(0, 0), known_of(lineage))
    assert passed.failures == []
    # Of a record that derives from several, the one that was tried most often.
    assert passed.outputs[""].payload["n"].to_pylist() == [10_004, 20_009, 30_001]
    again = pipeline.run(payload, None, True, 0, Now(0, 0))
    assert again.outputs[""].payload["n"].to_pylist() == [10_001, 20_001, 30_001]
    try:
        current_record()
    except UnsupportedError:
        return
    raise AssertionError("the batch is over")


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=6), st.data())
def test_tries_stay_with_their_records_wherever_these_go(sizes: list[list[int]], data: Any) -> None:
    counts = [len(each) for each in sizes]
    flat = [attempt for each in sizes for attempt in each]
    ids = np.arange(1, len(flat) + 1, dtype=np.uint64)
    offsets = None if set(counts) == {1} else np.cumsum([0, *counts]).astype(np.int32)
    lineage = RecordIds(ids, ids, offsets, None, tried(*flat))
    fresh = RecordIds(u64(99), u64(98))
    rows = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1))
    joined = KnownOf(concat_record_ids([fresh, lineage.take(np.array(rows))]))
    want = [1, *(max(sizes[row]) for row in rows)]
    assert [joined.record(row).attempt for row in range(len(want))] == want
    everything = joined.tries(np.arange(len(want)))
    assert (everything >> np.uint64(44)).tolist() == want


def test_a_replay_says_when_its_record_first_failed() -> None:
    store = MemoryStore()
    vertex = FTLayerCore(store, LayerOptions(), Now(0, 1_000))

    def call(call: Any, wall_ms: int) -> Any:
        with store.write(intake=isinstance(call, calls.Persist)) as txn:
            outcome = vertex.apply(txn, call, None, Now(wall_ms, wall_ms))
        outcome.after()
        return outcome.reply

    call(calls.OpenStream("s", calls.StreamOptions(backoff_ms=(0,))), 1_000)
    call(calls.Persist("s", pa.record_batch([[1]], N), u64(5), u64(5)), 1_000)
    root = 5
    for wall_ms, attempt in ((2_000, 2), (3_000, 3)):
        call(calls.Fail((calls.Failure(root, "no"),), vertex.incarnation), wall_ms)
        (records,) = call(calls.TakeReplays("s", 10), wall_ms).batches
        assert records.first_failed_ms.tolist() == [2_000]
        lineage = RecordIds(
            records.roots,
            records.roots,
            None,
            records.origins,
            pack_tries(records.attempts, records.first_failed_ms),
        )
        expected = CurrentRecord(attempt, dt.datetime.fromtimestamp(2, dt.UTC), f"{5:016x}")
        assert KnownOf(lineage).record(0) == expected
        root = int(records.roots[0])
