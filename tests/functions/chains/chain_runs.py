"""Runs a chain of a topology over batches of records, and reads what came of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.functions.chains.topology import MAIN, TopologyChain, TopologyResult
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.state.heap import HeapBackend

KV = pa.schema([("k", pa.string()), ("v", pa.int64())])
V = pa.schema([("v", pa.int64())])

Record = tuple[Any, Any]


def kv(records: list[Record]) -> pa.RecordBatch:
    columns = zip(*records, strict=True) if records else ([], [])
    return pa.RecordBatch.from_arrays(
        [pa.array(list(c), f.type) for c, f in zip(columns, KV, strict=True)], schema=KV
    )


def chain_of(*operators: Any, schema: pa.Schema = KV) -> TopologyChain:
    return TopologyChain(operators, [schema], HeapBackend())


def run(
    chain: TopologyChain, records: list[Record], times: list[int] | None = None, **where: int
) -> TopologyResult:
    stamps = None if times is None else np.array(times, dtype=np.int64)
    return chain.run(kv(records), stamps, where.pop("watermark", 0), where.pop("now", 0), **where)


def rows_of(result: TopologyResult, tag: str = MAIN) -> list[tuple[int, Any]]:
    """(input row, record) in order."""
    if tag not in result.outputs:
        return []
    output = result.outputs[tag]
    assert output.parents.dtype == np.int64
    columns = [column.to_pylist() for column in output.batch.columns]
    records = columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))
    return list(zip(output.parents.tolist(), records, strict=True))


def failed(result: TopologyResult) -> dict[int, str]:
    rows = [failure.row for failure in result.failures]
    assert rows == sorted(set(rows))
    return {failure.row: failure.operator for failure in result.failures}


def add(one: Record, other: Record) -> Record:
    return one[0], one[1] + other[1]


class Passing(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        return [record]


class Enrich(CoProcessFunction):
    """Records of the right side are kept; those of the left side get the last one of their key."""

    def process_left(self, record: Any, ctx: Any) -> Any:
        kept = ctx.value("kept").get()
        return None if kept is None else [(ctx.key, kept + record[1])]

    def process_right(self, record: Any, ctx: Any) -> Any:
        if record == 13:
            raise ValueError(record)
        ctx.value("kept").set(record)
        ctx.output("kept", record)
        return ()
