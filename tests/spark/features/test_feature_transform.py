"""Spark's own operators between functions: ids of rows that repeat, records that get lost, shuffles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql import functions as f

from ftlayer.common.rules.restart import NoRestart
from ftlayer.errors import QueryError
from ftlayer.spark.facade import FTLayer

pytestmark = pytest.mark.spark


def test_columns_explode_and_a_static_join_over_log_lines(
    layer: Any, spark: Any, logs: Any, logged: list[str], kept: Any, tools: Any, once: Any
) -> None:
    """Each word of a line, with its class from a static table; a line one of whose words fails is replayed whole."""
    classes = spark.createDataFrame([("[error]", "bad"), ("[notice]", "good")], "word string, class string")

    def words(frame: Any) -> Any:
        return frame.select("*", f.explode(f.split("value", " ")).alias("word"))

    def classified(frame: Any) -> Any:
        return frame.join(f.broadcast(classes), "word", "left")

    def check(record: dict[str, Any]) -> dict[str, Any]:
        if record["word"] == "workerEnv" and once.first(hash(record["value"]) % 40):
            raise RuntimeError("one word of this line")
        return record

    stream = (
        layer.source(logs, name="words")
        .transform(words)
        .transform(classified)
        .map(check, "word string, value string, class string")
    )
    query = tools.run(stream, kept)
    assert Counter(kept.column("word")) == Counter(word for line in logged for word in line.split(" "))
    assert Counter(row["class"] for row in kept.rows if row.word == "[error]") == Counter(
        {"bad": sum("[error]" in line.split(" ") for line in logged)}
    )
    first, again = query.recent_batches[:2]
    assert first.failed == again.delivered > 0
    assert first.waiting == first.failed


def test_records_lost_in_a_transform_fail_with_their_rows(
    layer: Any, numbers: Any, kept: Any, tools: Any
) -> None:
    stream = layer.source(numbers, name="lost").map(lambda r: {"m": r["n"] * 10}, "m bigint", name="tens")
    tools.run(stream.transform(lambda frame: frame.where("m >= 30"), name="cut"), kept)
    assert sorted(kept.column("m")) == list(range(30, 1000, 10))
    dead = tools.dead_of(layer, "lost")
    assert sorted(info.payload.to_pylist()[0]["n"] for info in dead) == [0, 1, 2]
    assert {info.operator for info in dead} == {"cut"}
    assert "lost in transform 'cut': no row of it came out" in dead[0].reason
    assert "drops=True" in dead[0].reason
    assert {info.attempt for info in dead} == {3}


@pytest.mark.parametrize("how", ["drops", "not strict"])
def test_dropping_that_is_meant(
    connect: Callable[..., FTLayer], numbers: Any, kept: Any, tools: Any, how: str
) -> None:
    layer = connect(strict=how == "drops")
    stream = layer.source(numbers, name="meant").transform(
        lambda frame: frame.where("n % 2 = 0"), drops=how == "drops"
    )
    query = tools.run(stream, kept)
    assert sorted(kept.column("n")) == list(range(0, 100, 2))
    assert [report.failed for report in query.recent_batches] == [0]
    assert tools.dead_of(layer, "meant") == []


def test_rows_that_a_transform_makes_of_its_own_fail_the_batch(
    layer: Any, spark: Any, numbers: Any, kept: Any, tools: Any
) -> None:
    def add(frame: Any) -> Any:
        return frame.join(spark.createDataFrame([(1_000,)], "n bigint"), "n", "full")

    stream = layer.source(numbers, name="own").transform(add)
    writer = stream.sink(kept, checkpoint=tools.checkpoint).trigger(availableNow=True).restart(NoRestart())
    with pytest.raises(QueryError, match=r"unknown which record they derive from"):
        writer.start().awaitTermination(600)
    assert kept.rows == []


def test_all_or_nothing_behind_a_shuffle(layer: Any, numbers: Any, kept: Any, tools: Any, once: Any) -> None:
    """A record's third child fails in another partition than its first two: none of the three gets out."""

    def three(record: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"n": record["n"], "part": part} for part in range(3)]

    def third(record: dict[str, Any]) -> dict[str, Any]:
        if record["part"] == 2 and record["n"] % 10 == 0 and once.first(record["n"]):
            raise RuntimeError("the third child")
        return record

    schema = "n bigint, part int"
    stream = layer.source(numbers, name="three").flat_map(three, schema).key_by("part", partitions=3)
    query = tools.run(stream.map(third, schema).key_by("n").map(lambda r: r, schema), kept)
    tens = set(range(0, 100, 10))
    assert {row.n for row in kept.batches[0]} == set(range(100)) - tens
    assert Counter(row.n for row in kept.batches[1]) == dict.fromkeys(tens, 3)
    assert Counter(map(tuple, kept.rows)) == Counter((n, part) for n in range(100) for part in range(3))
    assert [(r.rows_in, r.failed, r.delivered) for r in query.recent_batches] == [(100, 10, 0), (10, 0, 10)]


def test_where_spark_wants_streams_to_be_named_ours_are(
    layer: Any, spark: Any, rows: Any, kept: Any, tools: Any, once: Any
) -> None:
    spark.conf.set("spark.sql.streaming.queryEvolution.enableSourceEvolution", "true")
    try:
        rows.add([{"n": n} for n in range(20)])
        named = spark.readStream.name("mine").schema("n bigint").parquet(str(rows.directory))

        def fails_once(record: dict[str, Any]) -> dict[str, Any]:
            if once.first(record["n"] % 3):
                raise RuntimeError("once")
            return record

        stream = layer.source(named, name="evolving").transform(lambda frame: frame.where("n >= 0"))
        tools.run(stream.map(fails_once, "n bigint"), kept)
        assert sorted(kept.column("n")) == list(range(20))
        letters = [layer.dead_letter_stream(spark, name) for name in ("evolving", "another")]
        assert letters[0].union(letters[1]).isStreaming
    finally:
        spark.conf.unset("spark.sql.streaming.queryEvolution.enableSourceEvolution")
