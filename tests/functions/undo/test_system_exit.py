"""`SystemExit` of a user's function: where what a record has changed is taken back, it fails that record alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.functions.chains.topology import MAIN, TopologyChain, TopologyResult
from ftlayer.functions.steps import FlatMap, Map, MapAsync, MapBatches, Reduce
from ftlayer.functions.undo import UndoLog, in_pieces
from ftlayer.state.heap import HeapBackend

N = pa.schema([("n", pa.int64())])
NUMBERS = list(range(20))


def mapped(number: int) -> int:
    if number == 13:
        sys.exit("enough")
    return number


def twice(number: int) -> Iterator[int]:
    yield number
    yield mapped(number)


def batches(rows: pa.RecordBatch) -> pa.RecordBatch:
    for number in rows.column(0).to_pylist():
        mapped(number)
    return rows


async def called(number: int) -> int:
    return mapped(number)


STEPS = {
    "map": Map("exits", mapped, N),
    "flat_map": FlatMap("exits", twice, N),
    "map_batches": MapBatches("exits", batches, N, "arrow", tagged=False),
    "map_async": MapAsync("exits", called, N, in_flight=4, timeout_ms=60_000),
}


class Ran:
    """What came of a piece of the numbers."""

    def __init__(self, size: int, result: TopologyResult) -> None:
        self.size, self.result = size, result
        self.has_failures = bool(result.failures)


@pytest.mark.parametrize("kind", STEPS)
def test_it_fails_its_record_alone(kind: str) -> None:
    log, backend = UndoLog(), HeapBackend()
    total = Reduce("total", lambda old, new: old, N, ("n",))
    chain = TopologyChain([total, STEPS[kind]], [N], backend, log)
    chain.open()
    rows = pa.record_batch([NUMBERS], schema=N)

    def run(start: int, most: int) -> Ran | None:
        piece = rows.slice(start, most)
        return Ran(piece.num_rows, chain.run(piece, None, 0, 0)) if piece.num_rows else None

    out: list[Any] = []
    failed = []
    for start, ran in in_pieces(log, rows.num_rows, run):
        out += ran.result.outputs[MAIN].batch.column(0).to_pylist()
        failed += [(start + failure.row, failure.operator, failure.reason) for failure in ran.result.failures]
    assert failed == [(13, "exits", "SystemExit: enough")]
    assert sorted(set(out)) == [number for number in NUMBERS if number != 13]
    (failure,) = TopologyChain([STEPS[kind]], [N], HeapBackend()).run(rows, None, 0, 0).failures
    assert (failure.row, failure.reason) == (13, "SystemExit: enough")
