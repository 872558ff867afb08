"""Chains of functions against a model that runs them record by record in plain Python."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from stage_chains import V, first_failures, ints, rows_out, run_chain, run_functions

from ftlayer.common.failures import FailException
from ftlayer.common.rules.restart import lasting_in_text
from ftlayer.errors import QueryError, ResultRowError
from ftlayer.functions.chains.segments import ROW_TAG
from ftlayer.functions.failures import MAX_REASON, MAX_TRACEBACK, failure_of
from ftlayer.functions.steps import Filter, FlatMap, Map, MapAsync, MapBatches
from ftlayer.functions.writing import settle
from ftlayer.runtime.handler import NonFTXorHandler

# ---------------------------------------------------------------- batch functions


@pytest.mark.parametrize("kind", ["arrow", "pandas"])
@pytest.mark.parametrize(
    ("tagged", "function", "said"),
    [
        (False, lambda b: b[:1], "got 1 rows and returned"),
        (False, lambda b: None, "returned a NoneType, not a"),
        (False, lambda b: {"v": [1]}, "returned a dict, not a"),
        (True, lambda b: drop(b, ROW_TAG), f"returned no column '{ROW_TAG}'"),
        (False, lambda b: drop(b, "v"), "returned no column 'v'"),
        (True, lambda b: retag(b, 1_000), "values that were not among its input's"),
        (True, lambda b: retag(b, -1), "values that were not among its input's"),
        (True, lambda b: retag(b, None), "is null"),
        (True, lambda b: retag(b, 0.5), "0.5"),
    ],
)
def test_a_batch_function_that_breaks_its_contract_fails_every_row_with_the_reason(
    kind: Any, tagged: bool, function: Any, said: str
) -> None:
    if said.startswith("got 1"):
        function = lambda b: pa.concat_batches([b, b]) if kind == "arrow" else pd.concat([b, b])  # noqa: E731
    result = run_chain(ints([1, 2, 3]), [MapBatches("b", function, V, kind, tagged)])
    assert first_failures(result) == {0: "b", 1: "b", 2: "b"}
    assert all(said in failure.reason for failure in result.failures), result.failures


def drop(batch: Any, name: str) -> Any:
    if isinstance(batch, pd.DataFrame):
        return batch.drop(columns=name)
    return batch.drop_columns([name])


def retag(batch: Any, tag: Any) -> Any:
    if isinstance(batch, pd.DataFrame):
        return batch.assign(**{ROW_TAG: pd.Series([tag] * len(batch), dtype=object)})
    return batch.drop_columns([ROW_TAG]).append_column(ROW_TAG, pa.array([tag] * batch.num_rows))


def test_fractions_in_an_integer_column_of_pandas_fail_their_row() -> None:
    for dtype in (object, float):
        function = lambda f: pd.DataFrame({"v": pd.Series([v + 0.5 * (v == 1) for v in f["v"]], dtype=dtype)})  # noqa: B023, E731
        result = run_chain(ints([0, 1, 2]), [MapBatches("b", function, V, "pandas", False)])
        assert rows_out(result) == [(0, 0), (2, 2)]


def test_culprits_of_a_batch_are_found_in_few_calls() -> None:
    calls = 0

    def function(batch: pa.RecordBatch) -> pa.RecordBatch:
        nonlocal calls
        calls += 1
        if 700 in batch.column("v").to_pylist():
            raise ValueError("700")
        return batch

    result = run_chain(ints(list(range(1_000))), [MapBatches("b", function, V, "arrow", False)])
    assert first_failures(result) == {700: "b"}
    assert [value for _, value in rows_out(result)] == [v for v in range(1_000) if v != 700]
    assert calls <= 2 * math.ceil(math.log2(1_000)) + 1


# ---------------------------------------------------------------- what is no Exception


class PanicException(BaseException):
    """As extensions in Rust raise it."""

    def __str__(self) -> str:
        raise SystemExit("not even its text")

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


class Disguised(BaseException):
    @property
    def __class__(self) -> Any:
        raise ValueError("no class")


NO_EXCEPTIONS: list[Any] = [
    PanicException(),
    Disguised,
    MemoryError("m"),
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    BaseExceptionGroup("g", [KeyboardInterrupt(), ValueError()]),
]


def name_of(error: Any) -> str:
    return error.__name__ if type(error) is type else type(error).__name__


@pytest.mark.parametrize("error", NO_EXCEPTIONS, ids=name_of)
@pytest.mark.parametrize(
    "kind", ["map", "flat_map", "late", "filter", "arrow", "result", "async", "async task"]
)
def test_whatever_a_function_raises_fails_its_record(error: BaseException, kind: str) -> None:
    def function(record: Any) -> Any:
        if 2 in (record.column(0).to_pylist() if isinstance(record, pa.RecordBatch) else [record["v"]]):
            raise error
        return [record] if kind == "flat_map" else record

    def late(record: Any) -> Iterator[Any]:
        yield record
        yield function(record)

    class Result(dict[str, Any]):
        def get(self, *_: Any) -> Any:
            return function({"v": self["v"]})["v"]

        def __getitem__(self, name: str) -> Any:
            return self.get() if sys._getframe(1).f_code.co_name != "get" else super().__getitem__(name)

    async def called(record: Any) -> Any:
        return function(record)

    async def in_task(record: Any) -> Any:
        return await asyncio.create_task(called(record))

    step: Any = {
        "map": Map("o", function, V),
        "flat_map": FlatMap("o", function, V),
        "late": FlatMap("o", late, V),
        "filter": Filter("o", function, V),
        "arrow": MapBatches("o", function, V, "arrow", False),
        "result": Map("o", lambda record: Result(record), V),
        "async": MapAsync("o", called, V, 2, 60_000),
        "async task": MapAsync("o", in_task, V, 2, 60_000),
    }[kind]
    result = run_chain(ints([1, 2, 3]), [step])
    assert first_failures(result) == {1: "o"}
    said = "ResultRowError: what 'o' returned" if kind == "result" else name_of(error)
    assert result.failures[0].reason.startswith(said)
    assert {row for row, _ in rows_out(result)} == {0, 2}


def interrupted(n: int) -> int:
    os.kill(os.getpid(), signal.SIGINT)
    return sum(range(n))


def made_of_it(n: int) -> int:
    try:
        return interrupted(n)
    finally:
        raise SystemExit(1)


@pytest.mark.parametrize("function", [interrupted, made_of_it])
@pytest.mark.parametrize("handler", [signal.default_int_handler, lambda *_: sys.exit(4)])
@pytest.mark.parametrize("kind", ["map", "flat_map", "arrow", "sink", "timer"])
def test_what_a_signals_handler_raises_ends_the_process(
    function: Callable[[int], int], handler: Any, kind: str
) -> None:
    def call(record: Any) -> Any:
        function(10_000)
        return [record] if kind == "flat_map" else record

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises((KeyboardInterrupt, SystemExit)):  # noqa: PT012
            if kind == "sink":
                settle("o", ints([1, 2]), call)
            elif kind == "timer":
                failure_of(0, "o", raised_by(call))
            else:
                step = {"map": Map, "flat_map": FlatMap}.get(kind)
                steps = [MapBatches("o", call, V, "arrow", False) if step is None else step("o", call, V)]
                run_chain(ints([1, 2]), steps)
    finally:
        signal.signal(signal.SIGINT, before)


def raised_by(function: Callable[[Any], Any]) -> BaseException:
    try:
        function(1)
    except BaseException as error:  # noqa: BLE001 - it is what is asked for
        return error
    raise AssertionError


def test_in_another_thread_no_handler_runs() -> None:
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(failure_of, 0, "o", KeyboardInterrupt()).result().reason == "KeyboardInterrupt: "


# ---------------------------------------------------------------- reasons and tracebacks


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


class NumberError(Exception):
    def __str__(self) -> Any:
        return 5


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (FailException("no good"), "no good"),
        (FailException(), "FailException"),
        (ValueError("no good"), "ValueError: no good"),
        (MuteError(), "MuteError: (its text cannot be had: RuntimeError)"),
        (NumberError(), "NumberError: (its text cannot be had: TypeError)"),
        (ValueError("\udc80 name"), "ValueError: \\udc80 name"),
    ],
)
def test_reasons(error: Exception, reason: str) -> None:
    def function(record: Any) -> Any:
        raise error

    (failure,) = run_chain(ints([1]), [Map("m", function, V)]).failures
    assert failure.reason == reason
    assert "in function" in failure.traceback
    assert "__call__" not in failure.traceback
    (failure.reason + failure.traceback).encode()


def test_reason_and_traceback_are_bounded_and_keep_both_ends() -> None:
    def nest(depth: int) -> None:
        try:
            if depth:
                nest(depth - 1)
            raise ValueError(f"level {depth} " + "x" * 1_000)
        except ValueError as error:
            raise KeyError("y" * 5_000) from error

    try:
        nest(50)
    except KeyError as error:
        failure = failure_of(3, "op", error)
    assert len(failure.reason) == MAX_REASON
    assert MAX_TRACEBACK - 100 < len(failure.traceback) <= MAX_TRACEBACK
    assert failure.traceback.startswith("Traceback")
    assert "characters left out" in failure.traceback


def test_the_traceback_of_a_misfit_says_what_was_returned() -> None:
    (failure,) = run_chain(ints([1]), [Map("m", lambda r: {"v": "text"}, V)]).failures
    assert "text" in failure.reason
    assert failure.traceback


# ---------------------------------------------------------------- without tracking


def test_without_tracking_the_first_failure_is_raised() -> None:
    step = Map("half", lambda r: {"v": 4 // r["v"]}, V)
    assert [b.to_pylist() for b in run_functions(ints([1, 2]), [step])] == [[{"v": 4}, {"v": 2}]]
    assert list(run_functions(ints([]), [step])) == []
    with pytest.raises(QueryError, match="'half' failed: ZeroDivisionError"):
        list(run_functions(ints([1, 0]), [step]))


@pytest.mark.parametrize(
    "step",
    [
        Map("wrong", lambda r: {"v": "text"}, V),
        MapBatches("wrong", lambda batch: batch.rename_columns(["other"]), V, "arrow", False),
        MapBatches("wrong", lambda batch: None, V, "arrow", False),
        MapBatches("wrong", lambda batch: batch.slice(1), V, "arrow", False),
    ],
)
def test_a_result_that_does_not_fit_is_not_tried_again_where_records_cannot_fail(step: Any) -> None:
    """Spark tells of it as text: the supervisor knows from that."""
    with pytest.raises(QueryError, match="'wrong' failed: ResultRowError") as raised:
        list(run_functions(ints([1]), [step]))
    text = "".join(traceback.format_exception(raised.value))
    assert isinstance(lasting_in_text(text), ResultRowError)
    with pytest.raises(ResultRowError, match=r"'wrong'.*\(give a policy\)"):
        NonFTXorHandler(" (give a policy)").fail(None, run_chain(ints([1]), [step]).failures)


def test_parents_are_int64_and_count_over_chunks() -> None:
    values = list(range(2_500))
    result = run_chain(ints(values), [Filter("f", lambda r: r["v"] % 2, V)])
    parents = np.concatenate([parents for _, parents in result.batches])
    assert parents.dtype == np.int64
    assert parents.tolist() == values[1::2]
