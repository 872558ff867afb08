"""The `topology` benchmark's job in Bytewax: two processes, a two-partition source, batches of 1,000.

Run by ``python -m bytewax.testing bench.peers.bytewax_job:flow -p 2``. ``BENCH_RECORDS`` is the number of
records; ``BENCH_OUT`` a directory that each process leaves a file in with the monotone times of its first
record in and its last record out.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import bytewax.operators as op
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition

from bench.peers.functions import last, with_key

RECORDS = int(os.environ.get("BENCH_RECORDS", "1000000"))
OUT = Path(os.environ.get("BENCH_OUT", "."))
BATCH = 1_000


class _Ids(StatefulSourcePartition[int, int]):
    def __init__(self, first: int, at: int) -> None:
        self._ids = iter(range(at, RECORDS, 2))
        self._at = at
        (OUT / f"start-{first}").write_text(str(time.monotonic()))

    def next_batch(self) -> Iterable[int]:
        batch = [number for number, _ in zip(self._ids, range(BATCH), strict=False)]
        if not batch:
            raise StopIteration
        self._at = batch[-1] + 2
        return batch

    def snapshot(self) -> int:
        return self._at


class _TwoPartitions(FixedPartitionedSource[int, int]):
    def list_parts(self) -> list[str]:
        return ["0", "1"]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> _Ids:
        first = int(for_part)
        return _Ids(first, first if resume_state is None else resume_state)


class _Discard(StatelessSinkPartition[object]):
    def __init__(self, worker: int) -> None:
        self._worker = worker

    def write_batch(self, items: list[object]) -> None:
        self.ended = time.monotonic()

    def close(self) -> None:
        (OUT / f"end-{self._worker}").write_text(str(self.ended))


class _DiscardSink(DynamicSink[object]):
    def build(self, step_id: str, worker_index: int, worker_count: int) -> _Discard:
        return _Discard(worker_index)


def _key(record: tuple[int, str]) -> str:
    return record[1]


def _count(state: int | None, record: tuple[int, str]) -> tuple[int, int]:
    count = (state or 0) + 1
    return count, count


flow = Dataflow("topology")
ids = op.input("ids", flow, _TwoPartitions())
keyed = op.key_on("key", op.map("with_key", ids, with_key), _key)
counted = op.stateful_map("count", keyed, _count)
op.output("discard", op.map("last", counted, last), _DiscardSink())
