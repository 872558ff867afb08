"""The topology as a whole, on a Spark of this machine: what reaches the sink, and what becomes a dead letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from ftlayer import FTLayer, StreamEnvironment
from ftlayer.sinks import FileSink

from my_project.functions import parse
from my_project.job import build
from my_project.process import session

LINES = ['{"order_id": "o-1", "customer": "ada", "cents": 1250}', "no JSON"]


def test_good_orders_reach_the_sink_and_the_others_are_dead_letters(tmp_path: Path) -> None:
    def from_lines(env: StreamEnvironment) -> Any:
        return env.source(LINES, "value string", uid="source")

    def to_files(orders: Any) -> None:
        orders.sink(FileSink(tmp_path / "out"), uid="sink")

    with FTLayer.embedded(tmp_path / "store") as layer:
        env = StreamEnvironment(session(), layer, name="test", parallelism=2)
        build(env, add_source=from_lines, order_of=parse, add_sink=to_files)
        env.execute()
        dead = [letter.reason for letter in layer.list_dead()]

    assert pq.read_table(tmp_path / "out").to_pylist() == [
        {"order_id": "o-1", "customer": "ada", "cents": 1250}
    ]
    assert len(dead) == 1
    assert "JSONDecodeError" in dead[0]
