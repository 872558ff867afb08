"""The query as a whole, on a Spark of this machine: what reaches the sink, and what becomes a dead letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from ftlayer import FTLayer
from ftlayer.sinks import FileDataSource

from my_project.functions import Order, parse
from my_project.job import build
from my_project.process import session


def order_of(record: dict[str, Any]) -> Order:
    return parse(record["value"])


def test_good_orders_reach_the_sink_and_the_others_are_dead_letters(tmp_path: Path) -> None:
    good = '{"order_id": "o-1", "customer": "ada", "cents": 1250}'
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "1.jsonl").write_text(f"{good}\nno JSON\n")

    def to_files(orders: Any, checkpoint: str) -> Any:
        return orders.write_stream(FileDataSource, checkpoint=checkpoint, path=str(tmp_path / "out"))

    spark = session()
    with FTLayer.embedded(tmp_path / "store") as layer:
        writer = build(
            spark,
            layer,
            str(tmp_path / "checkpoint"),
            read=lambda spark: spark.readStream.text(str(tmp_path / "in")),
            order_of=order_of,
            add_sink=to_files,
        )
        writer.trigger(availableNow=True).start().awaitTermination()
        dead = [letter.reason for letter in layer.list_dead()]

    assert pq.read_table(tmp_path / "out").to_pylist() == [
        {"order_id": "o-1", "customer": "ada", "cents": 1250}
    ]
    assert len(dead) == 1
    assert "JSONDecodeError" in dead[0]
