"""What functions of a stage may take and return, record by record."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stage_chains import BOTH, V, first_failures, ints, rows_out, run_chain

from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.functions.steps import Filter, FlatMap, Map, MapBatches

# ---------------------------------------------------------------- what functions return


def test_a_result_that_does_not_fit_fails_its_record_and_names_who_returned_it() -> None:
    results: list[Any] = [
        {"a": 1, "b": "x"},
        None,
        "a string",
        ["a"],
        7,
        ("a", "b"),
        {"a": "no number", "b": "x"},
        {"a": 1.5, "b": "cut off?"},
        {"a": Decimal("1.5")},
        {"a": float("nan")},
        {"a": 2**63},
        {"b": b"\xff"},
        {"b": "\udc80"},
        {"a": 2.0, "b": None},
    ]
    misfits = range(1, 13)
    steps = [Map("maker", lambda r: results[r["v"]], BOTH), Filter("after", lambda r: True, BOTH)]
    result = run_chain(ints(list(range(len(results)))), steps)
    assert rows_out(result) == [(0, {"a": 1, "b": "x"}), (13, {"a": 2, "b": None})]
    assert first_failures(result) == dict.fromkeys(misfits, "maker")
    for failure in result.failures:
        assert failure.reason.startswith(
            "ResultRowError: what 'maker' returned does not fit its schema (a int64"
        )
        failure.reason.encode()


def test_columns_that_are_missing_are_null_and_keys_that_are_none_fail_the_record() -> None:
    assert rows_out(run_chain(ints([1]), [Map("m", lambda r: {"b": "x"}, BOTH)])) == [
        (0, {"a": None, "b": "x"})
    ]
    lax = RetryRules(lax=True)
    for too_much in ({"b": "x", "c": object()}, {"aa": 1, "b": "x"}, {"a": 1, "b": "x", 3: 3}):

        def odd(record: Any, too_much: Any = too_much) -> Any:
            return too_much if record["v"] % 2 else {"a": 0, "b": "y"}

        result = run_chain(ints([1, 2, 3]), [Map("m", odd, BOTH)])
        assert rows_out(result) == [(1, {"a": 0, "b": "y"})]
        assert first_failures(result) == {0: "m", 2: "m"}
        assert "there is no column" in result.failures[0].reason
        left = {name: too_much.get(name) for name in ("a", "b")}
        assert rows_out(run_chain(ints([1]), [Map("m", odd, BOTH, rules=lax)])) == [(0, left)]
    (failure,) = run_chain(ints([1]), [Map("m", lambda r: {"aa": 1}, BOTH)]).failures
    assert "did you mean 'a'?" in failure.reason


@pytest.mark.parametrize("kind", ["arrow", "pandas"])
def test_columns_of_batches_are_the_schemas_and_mean_the_same(kind: str) -> None:
    def run(column: Any, schema: pa.Schema, rules: RetryRules = NO_RULES) -> Any:
        batch = pa.record_batch(column)
        given: Any = batch if kind == "arrow" else batch.to_pandas()
        result = run_chain(
            ints([1]),
            [MapBatches("b", lambda _: given, schema, kind, False, rules=rules)],  # type: ignore[arg-type]
        )
        return result.failures[0].reason if result.failures else rows_out(result)[0][1]

    v = pa.schema([("v", pa.int64())])
    assert "no column 'w'" in run({"v": [1], "w": [2]}, v)
    assert run({"v": [1], "w": [2]}, v, RetryRules(lax=True)) == 1
    assert run({"v": [1.0]}, v) == 1
    for kind_of, value in [
        (pa.timestamp("us"), [5]),
        (pa.timestamp("us"), ["2024-01-01"]),
        (pa.float32(), [1e300]),
        (pa.int64(), [True]),
        (pa.int64(), ["12"]),
        (pa.string(), [12]),
        (pa.date32(), pa.array([1], pa.timestamp("us"))),
        (pa.timestamp("us"), pa.array([1], pa.timestamp("us", "UTC"))),
        (pa.timestamp("us"), pa.array([1], pa.timestamp("ns"))),
        (pa.decimal128(5, 1), [1.25]),
    ]:
        assert isinstance(run({"v": value}, pa.schema([("v", kind_of)])), str), (kind_of, value)


def test_null_in_a_column_that_may_not_be_null_fails_the_record() -> None:
    schema = pa.schema([pa.field("v", pa.int64(), nullable=False)])

    def void_odd(record: Any) -> Any:
        return {"v": None} if record["v"] % 2 else record

    result = run_chain(ints([0, 1, 2]), [Map("m", void_odd, schema)])
    assert rows_out(result) == [(0, 0), (2, 2)]
    assert "'v' is null" in result.failures[0].reason

    def void_odd_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([void_odd(row) for row in batch.to_pylist()])

    result = run_chain(ints([0, 1, 2]), [MapBatches("b", void_odd_batch, schema, "arrow", False)])
    assert rows_out(result) == [(0, 0), (2, 2)]


def test_any_mapping_will_do_as_a_record() -> None:
    from collections import OrderedDict, defaultdict
    from types import MappingProxyType

    made = [OrderedDict(v=1), defaultdict(int, v=2), MappingProxyType({"v": 3})]
    result = run_chain(ints([0, 1, 2]), [Map("m", lambda r: made[r["v"]], V)])
    assert rows_out(result) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("returned", [None, 5, {"v": 1}, "v", [None], [{"v": "x"}, {"v": 1}]])
def test_flat_map_takes_iterables_of_dicts_only(returned: Any) -> None:
    result = run_chain(ints([0]), [FlatMap("f", lambda r: returned, V)])
    assert (rows_out(result), first_failures(result)) == ([], {0: "f"})


def test_a_row_with_one_bad_result_among_several_yields_none() -> None:
    def split(record: Any) -> Any:
        return [{"v": 1}, {"v": "bad" if record["v"] == 1 else 2}]

    result = run_chain(ints([0, 1, 2]), [FlatMap("f", split, V)])
    assert rows_out(result) == [(0, 1), (0, 2), (2, 1), (2, 2)]


def test_stop_iteration_and_recursion_of_a_function_fail_its_record() -> None:
    def deep(record: Any) -> Any:
        if record["v"] == 1:
            return deep(record)
        if record["v"] == 2:
            return next(iter(()))
        return record

    for step in (Map("m", deep, V), Filter("m", deep, V), FlatMap("m", lambda r: [deep(r)], V)):
        result = run_chain(ints([0, 1, 2, 3]), [step])
        assert first_failures(result) == {1: "m", 2: "m"}
        assert [parent for parent, _ in rows_out(result)] == [0, 3]


def test_a_value_without_end_fails_its_record() -> None:
    endless: list[Any] = []
    endless.append(endless)
    schema = pa.schema([("v", pa.list_(pa.list_(pa.int64())))])
    result = run_chain(ints([0, 1]), [Map("m", lambda r: {"v": endless if r["v"] else [[1]]}, schema)])
    assert rows_out(result) == [(0, [[1]])]


# ---------------------------------------------------------------- what goes in


def test_records_that_python_cannot_hold_fail_alone_in_the_first_operator() -> None:
    text = pa.array([b"ok", b"\xff\xfe", b"fine"], pa.binary()).view(pa.string())
    when = pa.array([0, 0, 0], pa.int64()).view(pa.timestamp("us", "UTC"))
    batch = pa.record_batch({"text": text, "when": when})
    schema = pa.schema([("text", pa.string())])

    def second(record: Any) -> Any:
        if record["text"] == "ok":
            raise ValueError
        return record

    result = run_chain(
        batch, [Map("first", lambda r: {"text": r["text"]}, schema), Map("second", second, schema)]
    )
    assert first_failures(result) == {0: "second", 1: "first"}
    assert rows_out(result) == [(2, {"text": "fine"})]
    assert "column 'text'" in next(f.reason for f in result.failures if f.row == 1)

    far = pa.record_batch({"when": pa.array([0, 2**62], pa.int64()).view(pa.timestamp("us", "UTC"))})
    result = run_chain(far, [Filter("keep", lambda r: True, far.schema)])
    assert first_failures(result) == {1: "keep"}

    strings = pa.record_batch({"text": text})
    # pandas 2 makes strings of all of them at once, pandas 3 of those that are asked for.
    read = [
        MapBatches("p", lambda frame: frame.assign(text=list(frame["text"])), strings.schema, "pandas", False)
    ]
    result = run_chain(strings, read)
    assert first_failures(result) == {1: "p"}


RICH = pa.schema(
    [
        ("s", pa.struct([("x", pa.int32()), ("t", pa.list_(pa.string()))])),
        ("m", pa.map_(pa.string(), pa.int64())),
        ("d", pa.decimal128(10, 2)),
        ("ts", pa.timestamp("us", "UTC")),
        ("ntz", pa.timestamp("us")),
        ("day", pa.date32()),
        ("bin", pa.binary()),
        ("f", pa.float64()),
        ("ok", pa.bool_()),
        ("dur", pa.duration("us")),
    ]
)
rich_rows = st.lists(
    st.fixed_dictionaries(
        {
            "s": st.none()
            | st.fixed_dictionaries(
                {"x": st.none() | st.integers(-5, 5), "t": st.none() | st.lists(st.text(max_size=3))}
            ),
            "m": st.none() | st.dictionaries(st.text(max_size=2), st.none() | st.integers(-5, 5)).map(
                lambda found: list(found.items())
            ),
            "d": st.none() | st.decimals(-99_999, 99_999, places=2),
            "ts": st.none() | st.datetimes(timezones=st.just(dt.UTC)),
            "ntz": st.none() | st.datetimes(dt.datetime(1700, 1, 1), dt.datetime(2200, 1, 1)),
            "day": st.none() | st.dates(),
            "bin": st.none() | st.binary(max_size=4),
            "f": st.none() | st.floats(allow_nan=False),
            "ok": st.none() | st.booleans(),
            "dur": st.none() | st.timedeltas(dt.timedelta(-999), dt.timedelta(999)),
        }
    ),
    max_size=6,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(rich_rows)
def test_every_type_passes_through_every_kind_of_operator_unchanged(rows: list[dict[str, Any]]) -> None:
    batch = pa.RecordBatch.from_pylist(rows, schema=RICH)
    for step in (
        Map("m", dict, RICH),
        FlatMap("f", lambda r: iter([r]), RICH),
        Filter("k", lambda r: True, RICH),
        MapBatches("a", lambda b: b, RICH, "arrow", False),
        MapBatches("t", lambda b: b, RICH, "arrow", True),
    ):
        result = run_chain(batch, [step])
        assert not result.failures
        assert [row for part, _ in result.batches for row in part.to_pylist()] == batch.to_pylist()


def test_types_that_pandas_has_pass_through_pandas() -> None:
    # (pandas takes None and NaN for one, and times from 1677 to 2262 only.)
    row = {
        "s": {"x": 1, "t": ["a", None]},
        "m": [("k", 1)],
        "d": Decimal("1.20"),
        "ts": dt.datetime(2020, 1, 1, 2, 3, 4, 5, dt.UTC),
        "ntz": dt.datetime(2020, 1, 1),
        "day": dt.date(2020, 1, 1),
        "bin": b"\x00\xff",
        "f": 1.5,
        "ok": True,
        "dur": dt.timedelta(seconds=5),
    }
    batch = pa.RecordBatch.from_pylist([row, dict.fromkeys(row)], schema=RICH)
    result = run_chain(batch, [MapBatches("p", lambda frame: frame, RICH, "pandas", True)])
    assert not result.failures
    assert result.batches[0][0].to_pylist() == batch.to_pylist()


def test_mutating_the_input_record_does_no_harm() -> None:
    def mutate(record: Any) -> Any:
        record["v"] += 100
        if record["v"] == 101:
            raise ValueError
        return record

    batch = ints([0, 1, 2])
    result = run_chain(batch, [Map("m", mutate, V), Map("n", mutate, V)])
    assert rows_out(result) == [(0, 200), (2, 202)]
    assert batch.to_pylist() == [{"v": 0}, {"v": 1}, {"v": 2}]
