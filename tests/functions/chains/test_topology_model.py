"""Random chains of a topology against a model, batch after batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from chain_runs import KV, Record, chain_of, failed, rows_of, run
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.functions.chains import record_segment
from ftlayer.functions.chains.topology import MAIN
from ftlayer.functions.process import ProcessFunction
from ftlayer.functions.steps import Filter, FlatMap, Map, MapBatches, Process, Reduce

# ---------------------------------------------------------------- random chains against a model


class Failed(Exception):  # noqa: N818 - what the model says
    """The operator of this name raised."""


class Model:
    """One random operator: the step that runs, and what it does to one record, in plain Python."""

    def __init__(self, number: int, kind: str, salt: int) -> None:
        self.uid, self.tag, self.kind, self.salt = f"op{number}", f"side{number}", kind, salt
        self.state: dict[Any, Any] = {}
        self.side: list[Record] = []

    def check(self, value: Any) -> int:
        number = value or 0
        if (number + self.salt) % 11 == 0:
            raise ValueError(number)
        return number

    # What the step does.

    def step(self) -> Any:
        match self.kind:
            case "map":
                return Map(self.uid, self.map, KV)
            case "filter":
                return Filter(self.uid, self.filter, KV)
            case "list":
                return FlatMap(self.uid, lambda r: list(self.flat_map(r)), KV)
            case "generator":
                return FlatMap(self.uid, self.flat_map, KV)
            case "reduce":
                return Reduce(self.uid, self.reduce, KV, ("k",))
            case "process":
                return Process(self.uid, Counting(self), KV, ("k",), ((self.tag, KV),))
            case "unkeyed":
                return Process(self.uid, Splitting(self), KV, (), ((self.tag, KV),))
        return MapBatches(self.uid, self.map_batches, KV, "arrow", True)

    def map(self, record: Record) -> Record:
        return record[0], self.check(record[1]) * self.salt % 97

    def filter(self, record: Record) -> bool:
        return self.check(record[1]) % 3 > 0

    def flat_map(self, record: Record) -> Iterator[Record]:
        number = record[1] or 0
        for i in range(number % 4):
            yield record[0], number + i
            self.check(number + i)

    def reduce(self, one: Record, other: Record) -> Record:
        self.check(other[1])
        return one[0], ((one[1] or 0) + (other[1] or 0)) % 1_000

    def map_batches(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        for value in batch.column("v").to_pylist():
            self.check(value)
        return batch.take(pa.array(np.repeat(np.arange(batch.num_rows), 2)))

    # What the model does: `into` takes a record to what is behind.

    def flow(self, record: Record, behind: list[Model]) -> list[Record]:
        out: list[Record] = []

        def into(result: Record) -> None:
            out.extend(behind[0].flow(result, behind[1:]) if behind else [result])

        def guarded(call: Any) -> Any:
            try:
                return call()
            except ValueError as error:
                raise Failed(self.uid) from error

        if self.kind == "map":
            into(guarded(lambda: self.map(record)))
        elif self.kind == "filter":
            if guarded(lambda: self.filter(record)):
                into(record)
        elif self.kind == "list":
            for result in guarded(lambda: list(self.flat_map(record))):
                into(result)
        elif self.kind == "generator":
            results = self.flat_map(record)
            while (result := guarded(lambda: next(results, None))) is not None:
                into(result)
        elif self.kind == "reduce":
            key, old = record[0], self.state.get(record[0])
            new = record if old is None else guarded(lambda: self.reduce(old, record))
            into(new)
            self.state[key] = new
        elif self.kind == "process":
            self.state[record[0]] = self.state.get(record[0], 0) + 1
            self.side.append(record)
            number = guarded(lambda: self.check(record[1]))
            if number % 5:
                into((record[0], number + self.state[record[0]]))
        else:
            for result in (record, record):
                self.side.append(result)
                guarded(lambda: self.check(record[1]))
                into(result)
        return out


class Counting(ProcessFunction):
    def __init__(self, model: Model) -> None:
        self.model = model

    def process(self, record: Any, ctx: Any) -> Iterable[Any] | None:
        assert ctx.key == record[0]
        assert ctx.timestamp == 7
        count = ctx.value("count", 0)
        count.set(count.get() + 1)
        ctx.output(self.model.tag, record)
        number = self.model.check(record[1])
        return [(record[0], number + count.get())] if number % 5 else None


class Splitting(ProcessFunction):
    def __init__(self, model: Model) -> None:
        self.model = model

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        for _ in range(2):
            ctx.output(self.model.tag, record)
            self.model.check(record[1])
            yield record


KINDS = ("map", "filter", "list", "generator", "reduce", "process", "unkeyed", "batch")
drawn_operators = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 10)), min_size=0, max_size=5)
batches = st.lists(
    st.lists(st.tuples(st.sampled_from(["a", "b", "", None]), st.none() | st.integers(0, 40)), max_size=12),
    min_size=1,
    max_size=3,
)


def expected_of(
    records: list[Record], models: list[Model]
) -> tuple[list[tuple[int, Record]], dict[str, list[tuple[int, Record]]], dict[int, str]]:
    """Main and side outputs with the row each comes from, and the operator at which each failed row failed."""
    rows = list(enumerate(records))
    side: dict[str, list[tuple[int, Record]]] = {}
    failures: dict[int, str] = {}
    for _, group in groupby(models, key=lambda model: model.uid if model.kind == "batch" else ""):
        neighbours = list(group)
        rows = [(parent, record) for parent, record in rows if parent not in failures]
        results = []
        for parent, record in rows:
            for model in neighbours:
                model.side = []
            try:
                if neighbours[0].kind == "batch":
                    if (((record[1] or 0) + neighbours[0].salt) % 11) == 0:
                        raise Failed(neighbours[0].uid)
                    results += [(parent, record)] * 2
                else:
                    results += [(parent, out) for out in neighbours[0].flow(record, neighbours[1:])]
            except Failed as error:
                failures.setdefault(parent, str(error))
            for model in neighbours:
                side.setdefault(model.tag, []).extend((parent, record) for record in model.side)
        rows = results
    alive = {tag: [row for row in found if row[0] not in failures] for tag, found in side.items()}
    return [row for row in rows if row[0] not in failures], alive, failures


@settings(max_examples=200, deadline=None)
@given(batches, drawn_operators, st.integers(1, 5), st.integers(1, 5))
def test_a_chain_does_what_the_model_does_batch_after_batch(
    given_batches: list[list[Record]], drawn: list[tuple[str, int]], chunk_rows: int, most_results: int
) -> None:
    models = [Model(number, *one) for number, one in enumerate(drawn)]
    chain = chain_of(*(Model(number, *one).step() for number, one in enumerate(drawn)))
    for records in given_batches:
        with (
            patch.object(record_segment, "CHUNK_ROWS", chunk_rows),
            patch.object(record_segment, "MOST_RESULTS", most_results),
        ):
            result = run(chain, records, [7] * len(records))
        main, side, failures = expected_of(records, models)
        assert rows_of(result) == main
        assert failed(result) == failures
        assert {tag for tag, found in side.items() if found} == set(result.outputs) - {MAIN}
        for tag in side:
            assert rows_of(result, tag) == side[tag]
        assert all(output.batch.schema == KV for output in result.outputs.values())
