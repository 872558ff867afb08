"""A job in barrier mode and its vertex: a dead letter is there once, and requeued it comes back once."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import CheckpointConfig, FailurePolicy, FixedDelay, FTLayer, StreamEnvironment
from ftlayer.vertex.calls import Edit, EditAndRequeue, ListRecords, RecordInfo, Requeue

pytestmark = pytest.mark.spark

SCHEMA = "n bigint, text string"


def until(job: Any, holds: Callable[[], Any]) -> Any:
    """Wait for a condition; a job that is over meanwhile says why."""
    while not (found := holds()):
        if job.over(0.05):
            job.wait()
            raise AssertionError(f"the job is over: {job.status()}")
    return found


def test_letters_go_to_the_vertex_and_come_back(spark: Any, vertex: FTLayer, tmp_path: Path) -> None:
    healed, gate, out = tmp_path / "healed", tmp_path / "gate", tmp_path / "out"
    out.mkdir()

    def rows() -> Any:
        for number in range(40):
            yield number, "bad" if number % 10 == 3 else f"{number}"
        while not gate.exists():
            time.sleep(0.02)

    def strict(record: Any) -> Any:
        _, text = record
        if text == "bad" and not healed.exists():
            raise ValueError(f"no number: {text}")
        return record

    def write(batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            with (out / str(row["n"])).open("a") as file:
                file.write(f"{row['text']}\n")

    env = StreamEnvironment(
        spark,
        name="come-back",
        parallelism=2,
        restart=FixedDelay(attempts=10, delay="10ms"),
        checkpointing=CheckpointConfig(
            interval="100ms",
            directory=str(tmp_path / "checkpoints"),
            failures=FailurePolicy(max_attempts=2, backoff="10ms"),
        ),
        board=vertex,
    )
    stream = env.source(rows, SCHEMA, uid="lines")
    stream.key_by("n").map(strict, SCHEMA, uid="strict").sink(write, uid="out")
    job = env.execute_async()
    client = vertex.client

    def dead() -> list[RecordInfo]:
        return list(client.call(ListRecords("dead", "come-back")).records)

    def waiting() -> list[RecordInfo]:
        return list(client.call(ListRecords("waiting", "come-back")).records)

    try:
        letters = until(job, lambda: len(dead()) >= 4 and dead())
        assert {info.stream for info in letters} == {"come-back/strict"}
        assert {info.payload.to_pylist()[0]["n"] for info in letters} == {3, 13, 23, 33}
        assert {(info.operator, info.attempt) for info in letters} == {("strict", 2)}
        assert all(info.reason == "ValueError: no number: bad" and info.traceback for info in letters)
        # One is given another text, and comes back at once; the others when what refused them is mended.
        first = next(info for info in letters if info.payload.to_pylist()[0]["n"] == 3)
        row = pa.RecordBatch.from_pylist([{"n": 3, "text": "three"}], schema=first.payload.schema)
        client.call(EditAndRequeue((Edit(first.key, row),), "anna"))
        until(job, lambda: (out / "3").exists())
        healed.touch()
        client.call(Requeue(tuple(info.key for info in dead()), "anna"))
        until(job, lambda: not waiting() and not dead())
        gate.touch()
        assert job.wait(600)
    finally:
        gate.touch()
        job.cancel()
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        f"{number}": {3: "three\n"}.get(number, "bad\n" if number % 10 == 3 else f"{number}\n")
        for number in range(40)
    }
    assert not list((tmp_path / "checkpoints").rglob("*.arrow"))
