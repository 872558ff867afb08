"""Functions of a record and of a batch, as a user writes them, on real Spark and log lines."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from ftlayer.common.failures import FailException
from ftlayer.spark.stages import run as stage_run

pytestmark = pytest.mark.spark

LINE = re.compile(r"\[(?P<ts>[^\]]+)\] \[(?P<level>\w+)\] (?P<message>.*)")
PARSED = "ts string, level string, message string"


def parse(record: dict[str, Any]) -> list[dict[str, Any]]:
    found = LINE.fullmatch(record["value"])
    if found is None:
        raise FailException("no line of an Apache log")
    return [found.groupdict()]


def expected(lines: list[str]) -> list[tuple[str, ...]]:
    return sorted(found.groups() for found in map(LINE.fullmatch, lines) if found)


def test_log_lines_are_parsed_filtered_and_counted(
    layer: Any, logs: Any, logged: list[str], kept: Any, tools: Any, once: Any
) -> None:
    def flaky(record: dict[str, Any]) -> dict[str, Any]:
        if "child init" in record["message"] and once.first(hash(record["ts"]) % 50):
            raise ConnectionError("try again")
        return {**record, "words": len(record["message"].split())}

    stream = (
        layer.source(logs, name="apache")
        .flat_map(parse, PARSED)
        .filter(lambda record: record["level"] == "error")
        .map(flaky, f"{PARSED}, words int")
    )
    query = tools.run(stream, kept)
    errors = [row for row in expected(logged) if row[1] == "error"]
    assert sorted((row.ts, row.level, row.message) for row in kept.rows) == errors
    assert all(row.words == len(row.message.split()) for row in kept.rows)
    assert query.recent_batches[0].failed > 0
    assert query.recent_batches[1].delivered == query.recent_batches[0].failed
    assert query.restarts == 0
    assert query.ft_status().drained


def test_names_of_columns_may_have_any_character(
    layer: Any, numbers: Any, kept: Any, tools: Any, spark: Any
) -> None:
    """What Spark reads as an expression quotes them, the keys of steps as well as a carrier."""
    schema = '`a``b` bigint, `c.d` bigint, `g h` struct<`i``j`: bigint>, `e"f` string'
    odd = layer.source(numbers, name="odd").map(
        lambda r: {"a`b": r["n"] % 3, "c.d": r["n"], "g h": {"i`j": r["n"]}, 'e"f': "x"}, schema
    )
    keyed = odd.key_by("a`b", "c.d", "g h.i`j", 'e"f', partitions=3)
    tools.run(keyed.filter(lambda r: r["a`b"] < 2).repartition(None, "a`b").key_by("c.d"), kept)
    assert kept.rows
    assert all(row["a`b"] == row["c.d"] % 3 and row["g h"]["i`j"] == row["c.d"] for row in kept.rows)
    assert stage_run.with_column(spark.range(1).schema, "f`.t", "binary").names == ["id", "f`.t"]


def test_flat_map_gives_none_one_or_many(layer: Any, numbers: Any, kept: Any, tools: Any) -> None:
    def some(record: dict[str, Any]) -> Any:
        for part in range(record["n"] % 3):
            yield {"n": record["n"], "part": part}

    tools.run(layer.source(numbers, name="some").flat_map(some, "n bigint, part int"), kept)
    wanted = [(n, part) for n in range(100) for part in range(n % 3)]
    assert sorted((row.n, row.part) for row in kept.rows) == wanted


def test_a_record_whose_third_result_does_not_fit_gives_none(
    layer: Any, numbers: Any, kept: Any, tools: Any
) -> None:
    def third(record: dict[str, Any]) -> list[dict[str, Any]]:
        last = "three" if record["n"] == 7 else 3
        return [{"part": 1}, {"part": 2}, {"part": last}]

    tools.run(layer.source(numbers, name="third").flat_map(third, "part int", name="split"), kept)
    assert len(kept.rows) == 99 * 3
    (dead,) = tools.dead_of(layer, "third")
    assert dead.operator == "split"
    assert "does not fit its schema (part int32)" in dead.reason


@pytest.mark.parametrize("kind", ["arrow", "pandas"])
def test_batches_row_for_row(layer: Any, numbers: Any, kept: Any, tools: Any, kind: str) -> None:
    class Arrow:
        """It says what its schema is."""

        def result_schema(self, schema: pa.Schema) -> pa.Schema:
            return pa.schema([*schema, pa.field("twice", pa.int64())])

        def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
            if 13 in batch.column("n").to_pylist():
                raise ValueError("thirteen")
            return batch.append_column("twice", pc.multiply(batch.column("n"), 2))

    def pandas(frame: Any) -> Any:
        if (frame.n == 13).any():
            raise ValueError("thirteen")
        return frame.assign(twice=frame.n * 2)

    function, schema = (Arrow(), None) if kind == "arrow" else (pandas, "n bigint, twice bigint")
    stream = layer.source(numbers, name=f"batches-{kind}")
    tools.run(stream.map_batches(function, schema, kind=kind), kept)
    assert sorted((row.n, row.twice) for row in kept.rows) == [(n, 2 * n) for n in range(100) if n != 13]
    (dead,) = tools.dead_of(layer, f"batches-{kind}")
    assert dead.reason == "ValueError: thirteen"
    assert [each.reason for each in dead.history] == ["ValueError: thirteen"] * 3


def test_tagged_batches_may_lose_and_repeat_rows(layer: Any, numbers: Any, kept: Any, tools: Any) -> None:
    def odd_twice(batch: pa.RecordBatch) -> pa.RecordBatch:
        odd = batch.filter(pc.equal(pc.bit_wise_and(batch.column("n"), 1), 1))
        return pa.concat_batches([odd, odd])

    tools.run(layer.source(numbers, name="tagged").map_batches(odd_twice, "n bigint", tagged=True), kept)
    assert sorted(kept.column("n")) == sorted(2 * list(range(1, 100, 2)))


def test_a_batch_function_that_loses_rows_untagged_fails_them(
    layer: Any, numbers: Any, kept: Any, tools: Any
) -> None:
    stream = layer.source(numbers, name="untagged").map_batches(
        lambda batch: batch.filter(pc.less(batch.column("n"), 50)), "n bigint"
    )
    tools.run(stream, kept)
    assert sorted(kept.column("n")) == list(range(50))
    dead = tools.dead_of(layer, "untagged")
    assert len(dead) == 50
    assert "tagged=True" in dead[0].reason


def test_consecutive_functions_run_in_one_python_pass(
    layer: Any, numbers: Any, kept: Any, tools: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = []
    pages = stage_run.Pages.__init__

    def spy(self: Any, frame: Any, *rest: Any, **named: Any) -> None:
        plans.append(frame._jdf.queryExecution().analyzed().toString())
        pages(self, frame, *rest, **named)

    monkeypatch.setattr(stage_run.Pages, "__init__", spy)
    stream = layer.source(numbers, name="chained")
    for number in range(4):
        stream = stream.map(lambda record: {"n": record["n"] + 1}, "n bigint", name=f"step-{number}")
    stream = stream.key_by("n").filter(lambda record: record["n"] < 50).map(lambda record: record, "n bigint")
    tools.run(stream, kept)
    assert sorted(kept.column("n")) == list(range(4, 50))
    assert [plan.count("MapInArrow ") for plan in plans] == [1, 2]  # the second reads the first one's pages
    assert "RepartitionByExpression" in plans[1]
