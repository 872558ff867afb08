"""The topology as a whole, on a Spark of this machine: what reaches the sink, and what becomes a dead letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from ftlayer import StreamEnvironment
from ftlayer.sinks import FileSink

from my_project.functions import parse
from my_project.job import build, environment
from my_project.process import session

LINES = [
    '{"order_id": "o-1", "customer": "ada", "cents": 100}',
    "no JSON",
    '{"order_id": "o-2", "customer": "ada", "cents": 50}',
]


def test_totals_reach_the_sink_and_what_is_no_order_is_a_dead_letter(tmp_path: Path) -> None:
    def from_lines(env: StreamEnvironment) -> Any:
        return env.source(LINES, "value string", uid="source")

    def to_files(totals: Any) -> None:
        totals.sink(FileSink(tmp_path / "out"), uid="sink")

    env = environment(session(), "test", str(tmp_path / "checkpoints"))
    build(env, add_source=from_lines, order_of=parse, add_sink=to_files)
    job = env.execute()

    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert sorted(row["order_id"] for row in rows) == ["o-1", "o-2"]
    assert max(row["total"] for row in rows) == 150
    assert sum(chain.dead for chain in job.status().chains) == 1
