"""Functions of a topology with keys, state, timers and two inputs: reduce, process."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest
from chain_runs import KV, Enrich, Passing, Record, V, add, chain_of, failed, rows_of, run

from ftlayer.common.failures import FailException
from ftlayer.errors import UnsupportedError
from ftlayer.functions.chains.topology import MAIN, TopologyChain
from ftlayer.functions.process import ProcessFunction
from ftlayer.functions.steps import CoProcess, Map, Process, Reduce
from ftlayer.state.heap import HeapBackend

# ---------------------------------------------------------------- reduce


def test_a_reduce_keeps_keys_apart_and_goes_on_from_batch_to_batch() -> None:
    chain = chain_of(Reduce("sum", add, KV, ("k",)))
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

    chain = chain_of(Reduce("sum", add_small, KV, ("k",)), Map("after", refuse, KV))
    result = run(chain, [("a", 1), ("a", 99), ("a", 12), ("a", 4)])
    assert rows_of(result) == [(0, ("a", 1)), (3, ("a", 5))]
    assert failed(result) == {1: "sum", 2: "after"}


def test_an_aggregate_begins_with_what_create_returns_and_may_be_of_another_schema() -> None:
    counted = pa.schema([("k", pa.string()), ("n", pa.int64()), ("largest", pa.float64())])

    def add(aggregate: Any, record: Record) -> Any:
        return record[0], aggregate[1] + 1, max(aggregate[2], float(record[1]))

    step = Reduce("count", add, counted, ("k",), create=lambda: (None, 0, float("-inf")))
    chain = chain_of(step, Map("n", lambda record: (record[0], record[1]), KV))
    result = run(chain, [("a", 3), ("b", 1), ("a", 2)])
    assert rows_of(result) == [(0, ("a", 1)), (1, ("b", 1)), (2, ("a", 2))]
    again = run(chain, [("a", 9), ("c", None)])  # type: ignore[list-item]
    assert rows_of(again) == [(0, ("a", 3))]
    assert failed(again) == {1: "count"}


def test_an_aggregate_that_cannot_begin_fails_the_record() -> None:
    def broken() -> Any:
        raise ValueError("no beginning")

    result = run(chain_of(Reduce("count", lambda a, b: a, KV, ("k",), create=broken)), [("a", 1)])
    assert failed(result) == {0: "count"}


def test_a_stream_of_one_column_is_its_own_key_and_several_columns_are_a_tuple() -> None:
    one = TopologyChain(
        [Reduce("r", lambda a, b: a, V, ("v",)), Map("m", lambda v: (str(v), v), KV)], [V], HeapBackend()
    )
    batch = pa.record_batch({"v": pa.array([1, 1, None])}, schema=V)
    assert rows_of(one.run(batch, None, 0, 0)) == [(0, ("1", 1)), (1, ("1", 1)), (2, ("None", None))]
    both = chain_of(Reduce("r", add, KV, ("v", "k")))
    assert rows_of(run(both, [("a", 1), ("a", 1), ("b", 1)]))[1:] == [(1, ("a", 2)), (2, ("b", 1))]


def test_all_nan_are_one_key() -> None:
    schema = pa.schema([("f", pa.float64()), ("n", pa.int64())])
    chain = chain_of(Reduce("r", lambda a, b: (b[0], a[1] + b[1]), schema, ("f",)), schema=schema)
    batch = pa.record_batch({"f": [float("nan"), 1.5, float("nan"), None, None], "n": [1] * 5}, schema=schema)
    assert chain.run(batch, None, 0, 0).outputs[MAIN].batch.column("n").to_pylist() == [1, 1, 2, 1, 2]


def test_a_key_that_cannot_be_hashed_fails_its_record() -> None:
    schema = pa.schema([("l", pa.list_(pa.int64())), ("n", pa.int64())])
    batch = pa.record_batch({"l": [[1], None], "n": [1, 2]}, schema=schema)
    for step in (Reduce("r", add, schema, ("l",)), Process("r", Passing(), schema, ("n", "l"))):
        result = chain_of(step, schema=schema).run(batch, None, 0, 0)
        assert failed(result) == {0: "r"}
        assert "cannot use a" in result.failures[0].reason
        assert result.outputs[MAIN].parents.tolist() == [1]


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
    chain = chain_of(Process("p", StateUser(), pa.schema([("t", pa.string())]), ("k",)))
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
    result = run(chain_of(Process("p", Asking(ask), KV, ())), [("a", 1)])
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
    result = run(chain_of(Process("p", Asking(ask), KV, ("k",))), [("a", 1)])
    assert says in result.failures[0].reason


def test_there_is_no_key_outside_of_a_record() -> None:
    class Early(Asking):
        def open(self, ctx: Any) -> None:
            self.context = ctx
            ctx.value("x").get()

    function = Early(lambda ctx: ctx.value("x").get())
    chain = chain_of(Process("p", function, KV, ("k",)))
    with pytest.raises(UnsupportedError, match="where there is none"):
        chain.open()
    run(chain, [("a", 1)])
    assert function.answers == [None]
    with pytest.raises(UnsupportedError, match="where there is none"):
        _ = function.context.key


def test_a_context_tells_the_times() -> None:
    function = Asking(lambda ctx: (ctx.key, ctx.timestamp, ctx.watermark, ctx.now_ms, ctx.uid))
    chain = chain_of(Map("m", lambda r: r, KV), Process("p", function, KV, ("k", "v")))
    run(chain, [("a", 1), ("b", 2)], [100, 50], watermark=40, now=7)
    run(chain, [("c", 3)])
    assert function.answers == [
        (("a", 1), 100, 40, 7, "p"),
        (("b", 2), 50, 40, 7, "p"),
        (("c", 3), None, 0, 0, "p"),
    ]


def test_the_default_of_a_value_is_that_of_the_call() -> None:
    function = Asking(lambda ctx: (ctx.value("x").get(), ctx.value("x", 5).get(), ctx.value("x", 6).get()))
    run(chain_of(Process("p", function, KV, ("k",))), [("a", 1)])
    assert function.answers == [(None, 5, 6)]


class Tagging(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        ctx.output("side", record[1] if record[1] != 3 else "three")
        return [record]


def test_a_side_output_that_does_not_fit_fails_its_record_with_all_of_it() -> None:
    chain = chain_of(Process("p", Tagging(), KV, (), (("side", V),)))
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

    chain = chain_of(*(Process(uid, Noting(uid), KV, ()) for uid in "ab"))
    chain.open()
    with pytest.raises(RuntimeError, match="a"):
        chain.close()
    assert seen == ["open a", "open b", "close b", "close a"]


def test_a_function_without_its_method_says_so() -> None:
    result = run(chain_of(Process("p", ProcessFunction(), KV, ())), [("a", 1)])
    assert "has no method process(record, ctx)" in result.failures[0].reason


# ---------------------------------------------------------------- two inputs


def test_two_inputs_share_the_state_of_a_key() -> None:
    operator = CoProcess("co", Enrich(), V, (("v",), ("v",)), (KV, V), (("kept", V),))
    chain = TopologyChain(
        [operator, Map("m", lambda r: ("sum", r[1]), KV), Reduce("r", add, KV, ("k",))],
        [KV, V],
        HeapBackend(),
    )
    rights = pa.record_batch({"v": [1, 13, 2]}, schema=V)
    result = chain.run(rights, None, 0, 0, input=1)
    assert (rows_of(result), rows_of(result, "kept"), failed(result)) == ([], [(0, 1), (2, 2)], {1: "co"})
    result = run(chain, [("x", 1), ("x", 7), ("x", 2)], input=0)
    assert rows_of(result) == [(0, ("sum", 2)), (2, ("sum", 6))]


def test_a_process_without_keys_may_be_behind_an_operator_of_two_inputs() -> None:
    operator = CoProcess("co", Enrich(), V, (("v",), ("v",)), (KV, V), (("kept", V),))
    behind = [Map("m", lambda r: r[1], V), Process("p", Passing(), V, ())]
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
        result = chain_of(Process("p", Keys(), out, keys), schema=schema).run(batch, None, 0, 0)
        assert result.outputs[MAIN].batch.column("key").to_pylist() == wanted
    lone = pa.schema([("s", inner)])
    chain = chain_of(Process("p", Keys(), out, ("s.x",)), schema=lone)
    assert chain.run(batch.select(["s"]), None, 0, 0).outputs[MAIN].batch.num_rows == 4
