"""Which failures are retried, what a function sees of its attempt, and where dead letters go."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import DeadLetter, PermanentFailure, RetryLater, RowsRejected, current_record
from ftlayer.spark.facade import list_records
from ftlayer.vertex.calls import Stats

pytestmark = pytest.mark.spark


def test_each_failure_gets_the_retries_that_it_is_worth(
    connect: Any, numbers: Any, kept: Any, tools: Any, tmp_path: Path
) -> None:
    """Numbers 0 to 99: some fail for good, some for a time, and the second stage knows the attempt too."""

    def first(record: dict[str, Any]) -> dict[str, Any]:
        n, attempt = record["n"], current_record().attempt
        if n == 1:
            raise PermanentFailure("never")
        if n == 2:
            raise KeyError("a rule of the layer")
        if n == 3:
            raise ValueError("a rule of the operator")
        if n == 4 and current_record().first_failed_at is None:
            raise RetryLater("busy", after="50ms", uses_attempt=False)
        if n == 5 and attempt < 3:
            raise OSError("twice")
        return {"n": n, "seen": attempt}

    def second(record: dict[str, Any]) -> dict[str, Any]:
        return {**record, "seen": record["seen"] * 10 + current_record().attempt}

    told: list[DeadLetter] = []
    layer = connect(dead_on=KeyError, on_dead=told.append)
    wrapped = layer.source(numbers, name="worth", retry_on=(OSError,))
    stream = (
        wrapped.map(first, "n bigint, seen int", dead_on=ValueError)
        .repartition(2)
        .map(second, "n bigint, seen int")
    )
    query = stream.sink(kept, checkpoint=tools.checkpoint).trigger(processingTime="0 seconds").start()
    letters = wrapped.dead_letters(tools.checkpoint)
    rows: list[Any] = []
    kept_letters = type(kept)()
    may_read = threading.Event()

    def read_late(batch: Any, _: int) -> None:
        assert may_read.wait(600)
        rows.extend(batch.collect())

    reading = (
        letters.writeStream.foreachBatch(read_late)
        .option("checkpointLocation", str(tmp_path / "letters"))
        .start()
    )
    of_letters = layer.source(letters, name="letters")
    wrapped_letters = of_letters.sink(kept_letters, checkpoint=str(tmp_path / "wrapped")).start()
    try:
        tools.until(lambda: query.ft_status().dead == 3 and query.ft_status().drained, "all verdicts")
        query.processAllAvailable()
        assert not query.await_drained(0.5)
        may_read.set()
        assert query.await_drained(600)
        assert len(rows) == 3
        assert sorted(kept_letters.column("key")) == sorted(row.key for row in rows)
        tools.until(lambda: len(told) == 3, "all dead letters in the callback")
    finally:
        wrapped_letters.stop()
        reading.stop()
        query.stop()
    seen = {row.n: row.seen for row in kept.rows}
    assert sorted(seen) == [n for n in range(100) if n not in (1, 2, 3)]
    assert seen.pop(5) == 33
    assert set(seen.values()) == {11}  # of number 4 too: its failure used up no attempt
    died = {letter.record["n"]: letter for letter in told}
    assert {n: (letter.attempts, letter.operator) for n, letter in died.items()} == dict.fromkeys(
        (1, 2, 3), (1, "first")
    )
    assert died[1].reason == "never"
    assert {json.loads(row.record)["n"]: row.reason for row in rows} == {n: died[n].reason for n in died}
    assert {row.key for row in rows} == {letter.key for letter in told}


def test_while_too_many_fail_the_batch_is_held_and_nothing_dies(
    connect: Any, numbers: Any, kept: Any, tools: Any, tmp_path: Path
) -> None:
    up, sink_up = tmp_path / "up", tmp_path / "sink_up"

    def look_up(record: dict[str, Any]) -> dict[str, Any]:
        if not up.exists():
            raise ConnectionError("the database is down")
        return {"n": record["n"], "attempt": current_record().attempt}

    layer = connect(max_attempts=1, max_failing="5%")

    def take(rows: Any, batch: int) -> None:
        if not sink_up.exists():
            raise RowsRejected({row["_ft_row"]: "the sink is down" for row in rows.collect()})
        kept(rows.drop("_ft_row"), batch)

    stream = layer.source(numbers, name="held").map(look_up, "n bigint, attempt int")
    writer = stream.sink(take, checkpoint=tools.checkpoint, tagged=True)
    query = writer.trigger(processingTime="0 seconds").start()
    try:
        tools.until(lambda: query.circuits()[""].opened >= 2, "a trial that fails")
        assert (query.ft_status().dead, query.ft_status().waiting, kept.calls) == (0, 0, 0)
        # The vertex serves metrics, and is told of it.
        (of_query,) = (each for each in layer.client.call(Stats()).circuits.values() if "(sink)" in each)
        assert of_query[""].opened >= 2
        up.touch()
        tools.until(lambda: query.circuits()["(sink)"].opened >= 1, "a sink that is down")
        assert (query.ft_status().dead, query.ft_status().waiting, kept.calls) == (0, 0, 0)
        sink_up.touch()
        assert query.await_drained(600)
        assert {name: status.state for name, status in query.circuits().items()} == {
            "": "closed",
            "(sink)": "closed",
        }
        assert query.recent_batches[0].held >= 3
        assert query.ft_status().dead == 0
    finally:
        query.stop()
    assert sorted(kept.column("n")) == list(range(100))
    assert set(kept.column("attempt")) == {1}


def test_a_line_that_is_no_utf8_is_a_dead_letter(
    connect: Any, spark: Any, kept: Any, tools: Any, tmp_path: Path
) -> None:
    """The lines beside it go on."""
    lines = tmp_path / "lines"
    lines.mkdir()
    (lines / "a.txt").write_bytes(b"one\ncaf\xe9\nthree\n")
    layer = connect(max_attempts=2)
    text = layer.source(spark.readStream.text(str(lines)), name="undecodable")
    stream = text.map(lambda record: {"text": record["value"]}, "text string")
    query = stream.sink(kept, checkpoint=tools.checkpoint).trigger(availableNow=True).start()
    query.awaitTermination()
    assert sorted(row["text"] for row in kept.rows) == ["one", "three"]
    (letter,) = (letter for letter in list_records(layer.client, "dead") if letter.source == "undecodable")
    assert "cannot be read in Python: 'utf-8' codec" in letter.reason
    assert letter.payload.column("value").view(pa.binary()).to_pylist() == [b"caf\xe9"]
