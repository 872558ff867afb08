"""Chains of topologies against a model that runs them record by record, with a dict for every state."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import InvalidTopologyError, UnsupportedError
from ftlayer.failures import FailException
from ftlayer.functions.chains import record_segment
from ftlayer.functions.chains.topology import MAIN, TopologyChain, TopologyResult
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.functions.steps import CoProcess, Filter, FlatMap, Map, MapBatches, Process, Reduce
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
                return Reduce(self.uid, self.reduce, ("k",), KV)
            case "process":
                return Process(self.uid, Counting(self), ("k",), KV, ((self.tag, KV),))
            case "unkeyed":
                return Process(self.uid, Splitting(self), (), KV, ((self.tag, KV),))
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
    st.lists(
        st.tuples(st.sampled_from(["a", "b", "", None]), st.none() | st.integers(0, 40)),
        max_size=12,
    ),
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


# ---------------------------------------------------------------- reduce


def add(one: Record, other: Record) -> Record:
    return one[0], one[1] + other[1]


def test_a_reduce_keeps_keys_apart_and_goes_on_from_batch_to_batch() -> None:
    chain = chain_of(Reduce("sum", add, ("k",), KV))
    assert rows_of(run(chain, [("a", 1), ("b", 10), ("a", 2), (None, 5)])) == [
        (0, ("a", 1)),
        (1, ("b", 10)),
        (2, ("a", 3)),
        (3, (None, 5)),
    ]
    assert rows_of(run(chain, [(None, 1), ("b", 1)])) == [(0, (None, 6)), (1, ("b", 11))]


def test_a_record_that_fails_in_or_right_behind_a_reduce_does_not_count() -> None:
    def refuse(record: Record) -> Record:
        if record[1] == 13:
            raise FailException("no")
        return record

    def add_small(one: Record, other: Record) -> Record:
        if other[1] > 50:
            raise ValueError(other[1])
        return add(one, other)

    chain = chain_of(Reduce("sum", add_small, ("k",), KV), Map("after", refuse, KV))
    result = run(chain, [("a", 1), ("a", 99), ("a", 12), ("a", 4)])
    assert rows_of(result) == [(0, ("a", 1)), (3, ("a", 5))]
    assert failed(result) == {1: "sum", 2: "after"}


def test_an_aggregate_begins_with_what_create_returns_and_may_be_of_another_schema() -> None:
    counted = pa.schema([("k", pa.string()), ("n", pa.int64()), ("largest", pa.float64())])

    def add(aggregate: Any, record: Record) -> Any:
        return record[0], aggregate[1] + 1, max(aggregate[2], float(record[1]))

    step = Reduce("count", add, ("k",), counted, create=lambda: (None, 0, float("-inf")))
    chain = chain_of(step, Map("n", lambda record: (record[0], record[1]), KV))
    result = run(chain, [("a", 3), ("b", 1), ("a", 2)])
    assert rows_of(result) == [(0, ("a", 1)), (1, ("b", 1)), (2, ("a", 2))]
    again = run(chain, [("a", 9), ("c", None)])  # type: ignore[list-item]
    assert rows_of(again) == [(0, ("a", 3))]
    assert failed(again) == {1: "count"}


def test_an_aggregate_that_cannot_begin_fails_the_record() -> None:
    def broken() -> Any:
        raise ValueError("no beginning")

    result = run(chain_of(Reduce("count", lambda a, b: a, ("k",), KV, create=broken)), [("a", 1)])
    assert failed(result) == {0: "count"}


def test_a_stream_of_one_column_is_its_own_key_and_several_columns_are_a_tuple() -> None:
    one = TopologyChain(
        [Reduce("r", lambda a, b: a, ("v",), V), Map("m", lambda v: (str(v), v), KV)], [V], HeapBackend()
    )
    batch = pa.record_batch({"v": pa.array([1, 1, None])}, schema=V)
    assert rows_of(one.run(batch, None, 0, 0)) == [(0, ("1", 1)), (1, ("1", 1)), (2, ("None", None))]
    both = chain_of(Reduce("r", add, ("v", "k"), KV))
    assert rows_of(run(both, [("a", 1), ("a", 1), ("b", 1)]))[1:] == [(1, ("a", 2)), (2, ("b", 1))]


def test_all_nan_are_one_key() -> None:
    schema = pa.schema([("f", pa.float64()), ("n", pa.int64())])
    chain = chain_of(Reduce("r", lambda a, b: (b[0], a[1] + b[1]), ("f",), schema), schema=schema)
    batch = pa.record_batch({"f": [float("nan"), 1.5, float("nan"), None, None], "n": [1] * 5}, schema=schema)
    assert chain.run(batch, None, 0, 0).outputs[MAIN].batch.column("n").to_pylist() == [1, 1, 2, 1, 2]


class Passing(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        return [record]


def test_a_key_that_cannot_be_hashed_fails_its_record() -> None:
    schema = pa.schema([("l", pa.list_(pa.int64())), ("n", pa.int64())])
    batch = pa.record_batch({"l": [[1], None], "n": [1, 2]}, schema=schema)
    for step in (Reduce("r", add, ("l",), schema), Process("r", Passing(), ("n", "l"), schema)):
        result = chain_of(step, schema=schema).run(batch, None, 0, 0)
        assert failed(result) == {0: "r"}
        assert "cannot use a" in result.failures[0].reason
        assert result.outputs[MAIN].parents.tolist() == [1]


# ---------------------------------------------------------------- the form of records


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "a NoneType is not a tuple of 2 values"),
        (["a", 1], "a list is not a tuple"),
        ("ab", "a str is not a tuple"),
        ({"k": "a", "v": 1}, "a dict is not a tuple"),
        (("a",), "a tuple of 1 values is not one of 2"),
        (("a", 1, 2), "a tuple of 3 values is not one of 2"),
        (("a", 1.5), "'v' is an integer, not 1.5"),
        (("a", "1"), "int"),
        ((5, 1), "bytes"),
        (("a", 2**63), "int"),
    ],
)
def test_a_result_that_does_not_fit_fails_its_record_and_says_what_is_expected(
    returned: Any, says: str
) -> None:
    def function(record: Record) -> Any:
        return returned if record[1] == 1 else record

    result = run(chain_of(Map("m", function, KV)), [("a", 0), ("a", 1), ("a", 2)])
    assert rows_of(result) == [(0, ("a", 0)), (2, ("a", 2))]
    (failure,) = result.failures
    assert failure.operator == "m"
    assert says in failure.reason
    assert "does not fit its schema (k string, v int64)" in failure.reason
    assert "a function returns a tuple of 2 values in this order" in failure.reason


def test_named_tuples_whole_floats_and_nulls_fit() -> None:
    from collections import namedtuple

    pair = namedtuple("pair", "k v")
    result = run(chain_of(Map("m", lambda r: pair(None, 2.0) if r[1] else r, KV)), [("a", 0), ("a", 1)])
    assert rows_of(result) == [(0, ("a", 0)), (1, (None, 2))]


def test_null_in_a_column_that_may_not_be_null_fails_the_record() -> None:
    schema = pa.schema([pa.field("v", pa.int64(), nullable=False)])
    result = run(chain_of(Map("m", lambda r: r[1], schema)), [("a", 1), ("a", None)])
    assert rows_of(result) == [(0, 1)]
    assert "'v' is null and may not be" in result.failures[0].reason
    assert "the bare value" in result.failures[0].reason


@pytest.mark.parametrize("returned", ["text", b"bytes", {"a": 1}, None, 5])
def test_a_flat_map_has_to_return_an_iterable_of_records(returned: Any) -> None:
    schema = pa.schema([("t", pa.string())])
    result = run(chain_of(FlatMap("f", lambda r: returned, schema)), [("a", 1)])
    assert rows_of(result) == []
    assert failed(result) == {0: "f"}


def test_records_that_python_cannot_hold_fail_alone() -> None:
    text = pa.array([b"ok", b"\xff\xfe", b"fine"], pa.binary()).view(pa.string())
    batch = pa.RecordBatch.from_arrays([text, pa.array([1, 2, 3])], schema=KV)
    result = chain_of(Map("m", lambda r: r, KV)).run(batch, None, 0, 0)
    assert rows_of(result) == [(0, ("ok", 1)), (2, ("fine", 3))]
    assert "column 'k' of the record cannot be read" in result.failures[0].reason


def test_a_chain_of_nothing_gives_what_it_got() -> None:
    assert rows_of(run(chain_of(), [("a", 1), ("b", 2)])) == [(0, ("a", 1)), (1, ("b", 2))]
    assert rows_of(run(chain_of(Map("m", lambda r: r, KV)), [])) == []


def test_chains_of_many_operators() -> None:
    steps: list[Any] = [FlatMap(f"f{i}", lambda r: [r], KV) for i in range(13)]
    steps += [Reduce("r", add, ("k",), KV), *(FlatMap(f"g{i}", lambda r: [r], KV) for i in range(13))]
    steps += [Process("p", Passing(), ("k",), KV), Reduce("q", add, ("k",), KV)]
    assert rows_of(run(chain_of(*steps), [("a", 1), ("a", 2)])) == [(0, ("a", 1)), (1, ("a", 4))]


@pytest.mark.parametrize("error", [MemoryError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["map", "reduce", "process"])
def test_errors_that_are_no_records_fault_go_up(error: type[BaseException], kind: str) -> None:
    def function(*_: Any) -> Any:
        raise error

    class Raising(ProcessFunction):
        process = function

    step: Any = {
        "map": Map("o", function, KV),
        "reduce": Reduce("o", function, ("k",), KV),
        "process": Process("o", Raising(), ("k",), KV),
    }[kind]
    with pytest.raises(error):
        run(chain_of(step), [("a", 1), ("a", 2)])


# ---------------------------------------------------------------- process


class StateUser(ProcessFunction):
    """Keeps all kinds of state, under handles that were got in `open`."""

    def open(self, ctx: Any) -> None:
        self.total = ctx.value("total", 0)
        self.seen = ctx.list("seen")
        self.counts = ctx.map("counts")

    def process(self, record: Any, ctx: Any) -> Any:
        number = record[1]
        if number is None:
            self.total.clear()
            self.seen.clear()
            self.counts.clear()
            return None
        self.total.set(self.total.get() + number)
        self.seen.append(number)
        self.counts[number] = self.counts.get(number, 0) + 1
        if number == 9:
            del self.counts[9]
        return [f"{ctx.key}: {self.total.get()} {self.seen.get()} {dict(self.counts)} {len(self.counts)}"]


def test_state_belongs_to_its_key() -> None:
    chain = chain_of(Process("p", StateUser(), ("k",), pa.schema([("t", pa.string())])))
    chain.open()
    records = [("a", 1), ("b", 2), ("a", 1), ("a", 9), ("a", None), ("a", 3), ("b", 4)]
    assert [record for _, record in rows_of(run(chain, records))] == [
        "a: 1 [1] {1: 1} 1",
        "b: 2 [2] {2: 1} 1",
        "a: 2 [1, 1] {1: 2} 1",
        "a: 11 [1, 1, 9] {1: 2} 1",
        "a: 3 [3] {3: 1} 1",
        "b: 6 [2, 4] {2: 1, 4: 1} 2",
    ]


class Asking(ProcessFunction):
    """Asks its context for something, and keeps the answer."""

    def __init__(self, ask: Any) -> None:
        self.ask = ask
        self.answers: list[Any] = []

    def process(self, record: Any, ctx: Any) -> None:
        self.answers.append(self.ask(ctx))


@pytest.mark.parametrize(
    "ask",
    [
        lambda ctx: ctx.key,
        lambda ctx: ctx.value("x"),
        lambda ctx: ctx.list("x"),
        lambda ctx: ctx.map("x"),
        lambda ctx: ctx.timers.event(5),
        lambda ctx: ctx.output("nowhere", 1),
    ],
)
def test_without_keys_there_is_neither_state_nor_a_timer(ask: Any) -> None:
    result = run(chain_of(Process("p", Asking(ask), (), KV)), [("a", 1)])
    assert result.failures[0].reason.startswith("UnsupportedError: 'p' ")


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda ctx: ctx.timers.event(5), "no on_timer"),
        (lambda ctx: ctx.output("nowhere", 1), "no side output 'nowhere'"),
        (lambda ctx: (ctx.value("x"), ctx.list("x")), "give each its own name"),
        (lambda ctx: ctx.nothing, "has no attribute 'nothing'"),
    ],
)
def test_what_a_context_refuses(ask: Any, says: str) -> None:
    result = run(chain_of(Process("p", Asking(ask), ("k",), KV)), [("a", 1)])
    assert says in result.failures[0].reason


def test_there_is_no_key_outside_of_a_record() -> None:
    class Early(Asking):
        def open(self, ctx: Any) -> None:
            self.context = ctx
            ctx.value("x").get()

    function = Early(lambda ctx: ctx.value("x").get())
    chain = chain_of(Process("p", function, ("k",), KV))
    with pytest.raises(UnsupportedError, match="where there is none"):
        chain.open()
    run(chain, [("a", 1)])
    assert function.answers == [None]
    with pytest.raises(UnsupportedError, match="where there is none"):
        _ = function.context.key


def test_a_context_tells_the_times() -> None:
    function = Asking(lambda ctx: (ctx.key, ctx.timestamp, ctx.watermark, ctx.now_ms, ctx.uid))
    chain = chain_of(Map("m", lambda r: r, KV), Process("p", function, ("k", "v"), KV))
    run(chain, [("a", 1), ("b", 2)], [100, 50], watermark=40, now=7)
    run(chain, [("c", 3)])
    assert function.answers == [
        (("a", 1), 100, 40, 7, "p"),
        (("b", 2), 50, 40, 7, "p"),
        (("c", 3), None, 0, 0, "p"),
    ]


def test_the_default_of_a_value_is_that_of_the_call() -> None:
    function = Asking(lambda ctx: (ctx.value("x").get(), ctx.value("x", 5).get(), ctx.value("x", 6).get()))
    run(chain_of(Process("p", function, ("k",), KV)), [("a", 1)])
    assert function.answers == [(None, 5, 6)]


class Tagging(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        ctx.output("side", record[1] if record[1] != 3 else "three")
        return [record]


def test_a_side_output_that_does_not_fit_fails_its_record_with_all_of_it() -> None:
    chain = chain_of(Process("p", Tagging(), (), KV, (("side", V),)))
    result = run(chain, [("a", 1), ("a", 3), ("a", 5)])
    assert rows_of(result) == [(0, ("a", 1)), (2, ("a", 5))]
    assert rows_of(result, "side") == [(0, 1), (2, 5)]
    assert "put out to 'side' does not fit its schema (v int64)" in result.failures[0].reason
    result = run(chain, [("a", 3)])
    assert list(result.outputs) == [MAIN]
    assert result.outputs[MAIN].batch.num_rows == 0


def test_functions_are_opened_in_order_and_closed_in_reverse_all_of_them() -> None:
    seen: list[str] = []

    class Noting(Passing):
        def __init__(self, name: str) -> None:
            self.name = name

        def open(self, ctx: Any) -> None:
            seen.append(f"open {ctx.uid}")

        def close(self) -> None:
            seen.append(f"close {self.name}")
            raise RuntimeError(self.name)

    chain = chain_of(*(Process(uid, Noting(uid), (), KV) for uid in "ab"))
    chain.open()
    with pytest.raises(RuntimeError, match="a"):
        chain.close()
    assert seen == ["open a", "open b", "close b", "close a"]


def test_a_function_without_its_method_says_so() -> None:
    result = run(chain_of(Process("p", ProcessFunction(), (), KV)), [("a", 1)])
    assert "has no method process(record, ctx)" in result.failures[0].reason


# ---------------------------------------------------------------- two inputs


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


def test_two_inputs_share_the_state_of_a_key() -> None:
    operator = CoProcess("co", Enrich(), (("v",), ("v",)), (KV, V), V, (("kept", V),))
    chain = TopologyChain(
        [operator, Map("m", lambda r: ("sum", r[1]), KV), Reduce("r", add, ("k",), KV)],
        [KV, V],
        HeapBackend(),
    )
    rights = pa.record_batch({"v": [1, 13, 2]}, schema=V)
    result = chain.run(rights, None, 0, 0, input=1)
    assert (rows_of(result), rows_of(result, "kept"), failed(result)) == ([], [(0, 1), (2, 2)], {1: "co"})
    result = run(chain, [("x", 1), ("x", 7), ("x", 2)], input=0)
    assert rows_of(result) == [(0, ("sum", 2)), (2, ("sum", 6))]


def test_a_process_without_keys_may_be_behind_an_operator_of_two_inputs() -> None:
    operator = CoProcess("co", Enrich(), (("v",), ("v",)), (KV, V), V, (("kept", V),))
    behind = [Map("m", lambda r: r[1], V), Process("p", Passing(), (), V)]
    chain = TopologyChain([operator, *behind], [KV, V], HeapBackend())
    chain.run(pa.record_batch({"v": [1]}, schema=V), None, 0, 0, input=1)
    assert rows_of(run(chain, [("x", 1)], input=0)) == [(0, 2)]


def test_a_key_may_be_a_field_of_a_struct() -> None:
    inner = pa.struct([("x", pa.float64()), ("deep", pa.struct([("y", pa.string())]))])
    schema = pa.schema([("n", pa.int64()), ("s", inner)])
    structs = [
        {"x": 1.5, "deep": {"y": "a"}},
        {"x": math.nan, "deep": None},
        None,
        {"x": math.nan, "deep": {"y": "a"}},
    ]
    batch = pa.record_batch({"n": [0, 1, 2, 3], "s": pa.array(structs, inner)}, schema=schema)
    out = pa.schema([("key", pa.string())])

    class Keys(ProcessFunction):
        def process(self, record: Any, ctx: Any) -> Any:
            return [str(ctx.key)]

    for keys, wanted in (
        (("s.x",), ["1.5", "nan", "None", "nan"]),
        (("s.deep.y", "n"), ["('a', 0)", "(None, 1)", "(None, 2)", "('a', 3)"]),
    ):
        result = chain_of(Process("p", Keys(), keys, out), schema=schema).run(batch, None, 0, 0)
        assert result.outputs[MAIN].batch.column("key").to_pylist() == wanted
    lone = pa.schema([("s", inner)])
    chain = chain_of(Process("p", Keys(), ("s.x",), out), schema=lone)
    assert chain.run(batch.select(["s"]), None, 0, 0).outputs[MAIN].batch.num_rows == 4


# ---------------------------------------------------------------- chains that cannot be


@pytest.mark.parametrize(
    ("operators", "inputs", "says"),
    [
        ([Reduce("r", add, (), KV)], [KV], "has no keys"),
        ([Reduce("r", add, ("x",), KV)], [KV], "the key 'x'"),
        ([Process("p", Passing(), ("x",), KV)], [KV], "the key 'x'"),
        ([Process("p", Passing(), ("k.x",), KV)], [KV], "the key 'k.x'"),
        ([Map("m", add, KV)], [KV, KV], "takes 1 inputs got the schemas of 2"),
        (
            [Map("m", add, KV), CoProcess("c", Enrich(), ((), ()), (KV, KV), KV)],
            [KV],
            "has to begin its chain",
        ),
        ([CoProcess("c", Enrich(), (("k",), ()), (KV, KV), KV)], [KV, KV], "for one of its inputs only"),
        (
            [Process(uid, Passing(), (), KV, (("late", KV),)) for uid in "pq"],
            [KV],
            "'q' has the side output 'late'",
        ),
        ([Process("p", Passing(), (), KV, (("", KV),))], [KV], "the side output ''"),
        (["text"], [KV], "a str is no function"),
    ],
)
def test_chains_that_are_refused(operators: Any, inputs: Any, says: str) -> None:
    with pytest.raises(InvalidTopologyError, match=says):
        TopologyChain(operators, inputs, HeapBackend())


# ---------------------------------------------------------------- progress


def test_another_thread_sees_the_progress() -> None:
    seen: list[int] = []

    def look(record: Record) -> Record:
        thread = threading.Thread(target=lambda: seen.append(chain.progress))
        thread.start()
        thread.join()
        return record

    chain = chain_of(Filter("f", lambda r: r[1] % 2, KV), Map("m", look, KV))
    run(chain, [("a", i) for i in range(6)])
    assert seen == [1, 3, 5]
    run(chain, [("a", 1)])
    assert seen[-1] == 6
    assert chain.progress == 7


def test_another_thread_sees_the_row_that_is_worked_on() -> None:
    seen: list[int | None] = []

    def look(record: Record) -> Record:
        thread = threading.Thread(target=lambda: seen.append(chain.row))
        thread.start()
        thread.join()
        return record

    twice = FlatMap("t", lambda r: [r] * r[1], KV)
    batches = MapBatches("b", lambda batch: (seen.append(chain.row), batch)[1], KV, "arrow", False)
    chain = chain_of(Map("m", look, KV), twice, batches, Map("n", look, KV))
    assert chain.row is None
    run(chain, [("a", 2), ("b", 0), ("c", 1)])
    assert seen == [0, 1, 2, None, 0, 0, 2]
    assert chain.row is None


def test_where_a_chain_has_come_to_through_failures_is_forgotten() -> None:
    def out_of_memory(record: Record) -> Record:
        raise MemoryError

    chain = chain_of(Map("m", out_of_memory, KV))
    with pytest.raises(MemoryError):
        run(chain, [("a", 2)])
    assert chain.row is None
