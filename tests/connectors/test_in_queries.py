"""Every connector of a queue in queries of Structured Streaming: plain ones, and wrapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftlayer import FTLayer
from ftlayer.connectors.queue_stream import owner_of
from ftlayer.functions.data_sources import HAS_LIMITS
from ftlayer.sinks import PostgresDataSource

pytestmark = pytest.mark.spark


def open_stream(spark: Any, kit: Any, directory: Path) -> Any:
    """A streaming DataFrame of the kit's messages, spooled in the directory."""
    for each in (kit.data_source, PostgresDataSource):  # the sink of two kits
        spark.dataSource.register(each)
    reader = spark.readStream.format(kit.data_source.name()).options(**kit.options)
    if HAS_LIMITS:
        reader = reader.option("maxRowsPerTrigger", "70")
    return reader.option("spool", str(directory / "spool")).load()


def test_plain_spark_reads_and_writes_each_message_once(spark: Any, kit: Any, tmp_path: Path) -> None:
    """The batch that was not committed when the driver died is run again, with the same messages."""
    kit.begin(owner_of(str(tmp_path / "spool")))
    kit.put(0, 200)

    def run() -> None:
        numbers = open_stream(spark, kit, tmp_path).selectExpr(
            f"cast(cast({kit.column} as string) as long) as number"
        )
        writer = numbers.writeStream.format(kit.sink_format).options(**kit.sink_options("out"))
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    run()
    commits = tmp_path / "checkpoint" / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
    assert last > 0 or not HAS_LIMITS
    for note in (str(last), f".{last}.crc"):
        (commits / note).unlink()
    kit.put(200, 300)
    run()
    while not HAS_LIMITS and len(kit.in_sink("out")) < 300:
        run()  # One ends after the batch that was planned, or with what came within a second.
    assert sorted(kit.in_sink("out")) == list(range(300))
    assert kit.pending() == 0


@pytest.mark.campaign
def test_a_wrapped_query_reads_each_message_once(spark: Any, kit: Any, tmp_path: Path) -> None:
    kit.begin(owner_of(str(tmp_path / "spool")))
    kit.put(0, 300)
    column, found = kit.column, []

    def number(record: dict[str, Any]) -> dict[str, int]:
        if int(record[column]) == 70:
            raise ValueError("meant to fail")
        return {"number": int(record[column])}

    with FTLayer.embedded(str(tmp_path / "ft"), max_attempts=2, backoff=("10ms",)) as layer:

        def run() -> None:
            writer = (
                layer.source(open_stream(spark, kit, tmp_path), name="messages")
                .map(number, "number long")
                .sink(
                    lambda rows, _: found.extend(row.number for row in rows.collect()),
                    checkpoint=str(tmp_path / "ck"),
                )
            )
            writer.trigger(availableNow=True).start().awaitTermination()

        run()
        while not HAS_LIMITS and len(found) < 299:
            run()
        assert layer.dead_letters(spark).count() == 1
    assert sorted(found) == [number for number in range(300) if number != 70]
    assert kit.pending() == 0
