"""Chains of topologies against a model that runs them record by record, with a dict for every state."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest
from chain_runs import KV, Enrich, Passing, Record, add, chain_of, failed, rows_of, run

from ftlayer.errors import InvalidTopologyError
from ftlayer.functions.chains.topology import TopologyChain
from ftlayer.functions.process import ProcessFunction
from ftlayer.functions.steps import CoProcess, Filter, FlatMap, Map, MapBatches, Process, Reduce
from ftlayer.state.heap import HeapBackend

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
    steps += [Reduce("r", add, KV, ("k",)), *(FlatMap(f"g{i}", lambda r: [r], KV) for i in range(13))]
    steps += [Process("p", Passing(), KV, ("k",)), Reduce("q", add, KV, ("k",))]
    assert rows_of(run(chain_of(*steps), [("a", 1), ("a", 2)])) == [(0, ("a", 1)), (1, ("a", 4))]


@pytest.mark.parametrize("error", [MemoryError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["map", "reduce", "process"])
def test_whatever_a_function_raises_fails_its_record(error: type[BaseException], kind: str) -> None:
    def function(*_: Any) -> Any:
        raise error

    class Raising(ProcessFunction):
        process = function

    step: Any = {
        "map": Map("o", function, KV),
        "reduce": Reduce("o", function, KV, ("k",)),
        "process": Process("o", Raising(), KV, ("k",)),
    }[kind]
    failures = run(chain_of(step), [("a", 1), ("a", 2)]).failures
    # The first record of a key is its aggregate.
    assert {failure.row for failure in failures} == ({1} if kind == "reduce" else {0, 1})
    assert {failure.reason for failure in failures} == {f"{error.__name__}: "}


# ---------------------------------------------------------------- chains that cannot be


@pytest.mark.parametrize(
    ("operators", "inputs", "says"),
    [
        ([Reduce("r", add, KV, ())], [KV], "has no keys"),
        ([Reduce("r", add, KV, ("x",))], [KV], "the key 'x'"),
        ([Process("p", Passing(), KV, ("x",))], [KV], "the key 'x'"),
        ([Process("p", Passing(), KV, ("k.x",))], [KV], "the key 'k.x'"),
        ([Map("m", add, KV)], [KV, KV], "takes 1 inputs got the schemas of 2"),
        (
            [Map("m", add, KV), CoProcess("c", Enrich(), KV, ((), ()), (KV, KV))],
            [KV],
            "has to begin its chain",
        ),
        ([CoProcess("c", Enrich(), KV, (("k",), ()), (KV, KV))], [KV, KV], "for one of its inputs only"),
        (
            [Process(uid, Passing(), KV, (), (("late", KV),)) for uid in "pq"],
            [KV],
            "'q' has the side output 'late'",
        ),
        ([Process("p", Passing(), KV, (), (("", KV),))], [KV], "the side output ''"),
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
    assert run(chain, [("a", 2)]).failures
    assert chain.row is None
