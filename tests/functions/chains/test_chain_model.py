"""Random chains of a stage against a model: rows that fail alone, and where the others come from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import groupby
from typing import Any
from unittest.mock import patch

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_chains import V, first_failures, ints, rows_out, run_chain

from ftlayer.functions.chains import segments as chain
from ftlayer.functions.chains.segments import ROW_TAG
from ftlayer.functions.steps import Filter, FlatMap, Map, MapAsync, MapBatches

# ---------------------------------------------------------------- random chains against a model


class Op:
    """One random operator: its step, and what it does to one value (a list of values, or it raises)."""

    def __init__(self, uid: str, kind: str, factor: int, raises: int) -> None:
        self.uid, self.kind, self.factor, self.raises = uid, kind, factor, raises

    def model(self, value: int) -> list[int]:
        if value % 7 == self.raises:
            raise ValueError(value)
        if self.kind == "filter":
            return [value] if value % 3 else []
        if self.kind in ("flat_map", "tagged arrow", "tagged pandas"):
            return [(value + i) % 1_000 for i in range(value % 3)]
        return [(value * self.factor + 1) % 1_000]

    def step(self) -> Any:
        if self.kind == "map":
            return Map(self.uid, lambda r: {"v": self.model(r["v"])[0]}, V)
        if self.kind == "filter":
            return Filter(self.uid, lambda r: self.model(r["v"]), V)
        if self.kind == "flat_map":
            return FlatMap(self.uid, self._generate, V)
        if self.kind == "async":
            return MapAsync(self.uid, self._later, V, in_flight=3, timeout_ms=60_000)
        tagged, kind = self.kind.split()
        return MapBatches(self.uid, getattr(self, f"_{kind}"), V, kind, tagged == "tagged")  # type: ignore[arg-type]

    @property
    def per_record(self) -> bool:
        return self.kind in ("map", "filter", "flat_map")

    def stream(self, value: int) -> Iterator[int]:
        """What comes out, one after the other; a flat_map raises half-way: after its first record is out."""
        if self.kind == "flat_map" and value % 7 == self.raises:
            yield 0
        yield from self.model(value)

    def _generate(self, record: dict[str, int]) -> Any:
        for value in self.stream(record["v"]):
            record["v"] = value  # one dict, changed again and again
            yield record

    async def _later(self, record: dict[str, int]) -> dict[str, int]:
        for _ in range(record["v"] % 3):  # others overtake it
            await asyncio.sleep(0)
        return {"v": self.model(record["v"])[0]}

    def _results(self, values: list[int]) -> tuple[list[int], list[int]]:
        found = [(place, out) for place, value in enumerate(values) for out in self.model(value)]
        return [out for _, out in found], [place for place, _ in found]

    def _arrow(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        values, places = self._results(batch.column("v").to_pylist())
        if not self.kind.startswith("tagged"):
            return pa.record_batch({"v": pa.array(values, pa.int32())})
        tags = batch.column(ROW_TAG).take(pa.array(places, pa.int64()))
        return pa.record_batch({ROW_TAG: tags, "v": pa.array(values, pa.int64())})

    def _pandas(self, frame: pd.DataFrame) -> pd.DataFrame:
        values, places = self._results(frame["v"].tolist())
        if not self.kind.startswith("tagged"):
            return frame.assign(v=values)
        return pd.DataFrame({"v": values, ROW_TAG: frame[ROW_TAG].to_numpy()[places]})


KINDS = ("map", "filter", "flat_map", "plain arrow", "plain pandas", "tagged arrow", "tagged pandas", "async")
ops = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(1, 5), st.integers(0, 40)), min_size=1, max_size=5
).map(lambda drawn: [Op(f"op{i}", *one) for i, one in enumerate(drawn)])


class Failed(Exception):  # noqa: N818 - what the model says
    """The operator of this name raised."""


def flow(value: int, operators: list[Op]) -> Iterator[int]:
    """Depth first: a record goes through all operators before the next one is asked for."""
    if not operators:
        yield value
        return
    out = operators[0].stream(value)
    while True:
        try:
            result = next(out, None)
        except ValueError as error:
            raise Failed(operators[0].uid) from error
        if result is None:
            return
        yield from flow(result, operators[1:])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 999), max_size=25), ops, st.integers(1, 9))
def test_a_chain_does_what_the_model_does_and_fails_rows_alone(
    values: list[int], operators: list[Op], chunk_rows: int
) -> None:
    expected: list[tuple[int, int]] = []
    failed: dict[int, str] = {}
    for row, value in enumerate(values):
        records = [value]
        try:
            # A function of a batch sees all that has come out of the operators before it.
            for _, group in groupby(operators, key=lambda op: op.uid if not op.per_record else ""):
                neighbours = list(group)
                records = [out for record in records for out in flow(record, neighbours)]
        except Failed as error:
            failed[row] = str(error)
        else:
            expected += [(row, record) for record in records]
    with patch.object(chain, "CHUNK_ROWS", chunk_rows):
        result = run_chain(ints(values), [op.step() for op in operators])
    assert rows_out(result) == expected
    assert first_failures(result) == failed
    assert all(batch.schema == V for batch, _ in result.batches)


@pytest.mark.parametrize("kind", ["map", "filter", "flat_map", "plain arrow"])
def test_a_long_chain(kind: str) -> None:
    if kind == "flat_map":
        steps: list[Any] = [FlatMap(f"o{i}", lambda r: iter([r]), V) for i in range(150)]
    else:
        steps = [Op(f"o{i}", kind, 1, 9).step() for i in range(150)]
    result = run_chain(ints([1]), steps)
    assert not result.failures
    assert len(rows_out(result)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_nothing_out(kind: str) -> None:
    result = run_chain(ints([]), [Op("o", kind, 1, 1).step()])
    assert rows_out(result) == []
    assert not result.failures
