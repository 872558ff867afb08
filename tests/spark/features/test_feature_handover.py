"""Records handed from query to query: done when the last one is done, replayed from the first one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftlayer.spark.facade import FTLayer

pytestmark = pytest.mark.spark

CARRIED = "n bigint, ft binary"


class Road:
    """Files between two queries, with the carrier as a column."""

    def __init__(self, spark: Any, path: Path) -> None:
        self.spark = spark
        self.path = str(path)
        path.mkdir()

    def write(self, rows: Any, batch: int) -> None:
        rows.write.mode("append").parquet(self.path)

    def read(self) -> Any:
        return self.spark.readStream.schema(CARRIED).parquet(self.path)


@pytest.fixture
def road(spark: Any, tmp_path: Path) -> Road:
    return Road(spark, tmp_path / "road")


@pytest.fixture
def started(tmp_path: Path) -> Any:
    """Start a writer, streaming on, and stop it at the end."""
    queries: list[Any] = []

    def start(writer: Any) -> Any:
        queries.append(writer.trigger(processingTime="0 seconds").start())
        return queries[-1]

    yield start
    for query in queries:
        query.stop()


def test_a_failure_in_the_second_query_replays_through_the_first(
    connect: Callable[..., FTLayer],
    spark: Any,
    numbers: Any,
    road: Road,
    kept: Any,
    tools: Any,
    tmp_path: Path,
    started: Any,
    once: Any,
) -> None:
    layer = connect(timeout="10m", backoff="50ms")
    calls = tmp_path / "calls"
    calls.mkdir()

    def first(record: dict[str, Any]) -> list[dict[str, Any]]:
        with (calls / str(record["n"])).open("a") as file:
            file.write("x")
        return [record] if record["n"] % 10 == 9 else [record, record]

    def second(record: dict[str, Any]) -> dict[str, Any]:
        if record["n"] % 10 == 3 and once.first(record["n"]):
            raise RuntimeError("not now")
        if record["n"] == 50:
            raise ValueError("never")
        return record

    upstream = started(
        layer.source(numbers, name="up")
        .flat_map(first, "n bigint")
        .emit(road.write, checkpoint=str(tmp_path / "1"))
    )
    tools.until(lambda: upstream.ft_status().pending == 100, "the records handed on")
    mine = {row.origin for row in layer.pending(spark).collect() if row.stream.endswith("/up")}
    assert len(mine) == 100

    down = (
        layer.resume(road.read(), name="down")
        .filter(lambda r: r["n"] != 77)
        .map(second, "n bigint", extra_keys="ignore")
    )
    downstream = started(down.sink(kept, checkpoint=str(tmp_path / "2")))
    tools.until(lambda: upstream.ft_status().drained, "the end of all")
    assert upstream.await_drained(600)
    assert set(kept.column("n")) == set(range(100)) - {50, 77}
    # A replay passes through both again: nothing is lost, and what had passed before comes twice.
    counts = Counter(kept.column("n"))
    assert all(counts[n] == (1 if n % 10 == 9 else 2) for n in counts if n % 10 != 3)
    assert all(counts[n] >= 2 for n in counts if n % 10 == 3)
    runs = {int(path.name): len(path.read_text()) for path in calls.iterdir()}
    assert {n for n, times in runs.items() if times == 2} == set(range(3, 100, 10))
    assert runs[50] == 3
    (dead,) = tools.dead_of(layer, "up")
    assert (dead.payload.to_pylist(), dead.reason, dead.operator) == (
        [{"n": 50}],
        "ValueError: never",
        "second",
    )
    assert sum(report.failed for report in downstream.recent_batches) > 0
    assert tools.dead_of(layer, "down") == []


def test_without_an_answer_records_time_out_and_are_dead_letters_at_last(
    connect: Callable[..., FTLayer], rows: Any, road: Road, tools: Any
) -> None:
    layer = connect(timeout="400ms", max_attempts=2)
    source = rows.add([{"n": n} for n in range(5)]).stream("n bigint")
    writer = layer.source(source, name="unheard").emit(road.write, checkpoint=tools.checkpoint)
    query = tools.finish(writer.trigger(availableNow=True).start())
    dead = tools.dead_of(layer, "unheard")
    assert sorted(info.payload.to_pylist()[0]["n"] for info in dead) == list(range(5))
    assert {info.attempt for info in dead} == {2}
    assert all("400 ms" in each.reason or "timeout" in each.reason for info in dead for each in info.history)
    assert sum(report.delivered for report in query.recent_batches) == 5


def test_a_chain_of_three_queries(
    connect: Callable[..., FTLayer],
    spark: Any,
    numbers: Any,
    road: Road,
    kept: Any,
    tools: Any,
    tmp_path: Path,
    started: Any,
    once: Any,
) -> None:
    layer = connect(timeout="10m", backoff="50ms")
    second_road = Road(spark, tmp_path / "road-2")

    def last(record: dict[str, Any]) -> dict[str, Any]:
        if record["n"] < 5 and once.first(record["n"]):
            raise RuntimeError("not now")
        return record

    def middle(record: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"n": record["n"]}] * (record["n"] % 3)  # a third of them ends here

    first = started(layer.source(numbers, name="one").emit(road.write, checkpoint=str(tmp_path / "1")))
    second = layer.resume(road.read(), name="two").flat_map(middle, "n bigint", extra_keys="ignore")
    started(second.emit(second_road.write, checkpoint=str(tmp_path / "2")))
    tools.until(lambda: first.ft_status().pending == 66, "what ended in the second query")
    third = layer.resume(second_road.read(), name="three").map(last, "n bigint", extra_keys="ignore")
    started(third.sink(kept, checkpoint=str(tmp_path / "3")))
    tools.until(lambda: first.ft_status().drained, "the end of all")
    counts = Counter(kept.column("n"))
    assert set(counts) == {n for n in range(100) if n % 3}
    assert all(counts[n] == n % 3 for n in counts if n >= 5)
    assert tools.dead_of(layer, "one") == []


def test_rows_without_a_carrier_fail_the_batch(layer: FTLayer, rows: Any, kept: Any, tools: Any) -> None:
    import pyarrow as pa

    from ftlayer.common.rules.restart import NoRestart
    from ftlayer.errors import CodecError

    table = pa.table({"n": [1], "ft": pa.array([None], pa.binary())})
    stream = layer.resume(rows.add(table).stream(CARRIED), name="bare")
    writer = stream.sink(kept, checkpoint=tools.checkpoint).restart(NoRestart()).trigger(availableNow=True)
    with pytest.raises(CodecError, match=r"row 0 holds no carrier of a tracked record \(null\)"):
        writer.start().awaitTermination(600)
