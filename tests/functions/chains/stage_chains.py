"""Runs the chain of a stage over a batch, and reads what came of its rows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from ftlayer.functions.chains import segments as chain
from ftlayer.functions.chains.segments import Chain

V = pa.schema([("v", pa.int64())])
BOTH = pa.schema([("a", pa.int64()), ("b", pa.string())])


def run_chain(batch, functions):
    return Chain(functions).run(batch)


def run_functions(batch, functions):
    return Chain(functions).run_untracked(batch)


def ints(values: list[int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"v": value} for value in values], schema=V)


def rows_out(result: chain.ChainResult) -> list[tuple[int, Any]]:
    """(input row, output row) in order; values alone where there is one column."""
    found = []
    for batch, parents in result.batches:
        assert batch.num_rows == len(parents)
        for parent, row in zip(parents.tolist(), batch.to_pylist(), strict=True):
            found.append((parent, row["v"] if list(row) == ["v"] else row))
    return found


def first_failures(result: chain.ChainResult) -> dict[int, str]:
    first: dict[int, str] = {}
    for failure in result.failures:
        first.setdefault(failure.row, failure.operator)
    return first
