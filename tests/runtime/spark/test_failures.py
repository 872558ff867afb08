"""Which failures of a topology are retried, what its functions see of their attempt, and where dead letters go."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import DeadLetter, PermanentFailure, RetryLater, TopologyOptions, current_record
from ftlayer.common.rules.circuit import CircuitState, CircuitStatus
from ftlayer.vertex.calls import Stats

pytestmark = pytest.mark.spark


class Look:
    """Fails some numbers for good, some for a time."""

    def __call__(self, n: int) -> tuple[int, int]:
        attempt = current_record().attempt
        if n == 1:
            raise PermanentFailure("never")
        if n == 2:
            raise KeyError("a rule of the layer")
        if n == 3 and current_record().first_failed_at is None:
            raise RetryLater("busy", after="50ms", uses_attempt=False)
        if n == 4 and attempt < 3:
            raise OSError("twice")
        return n, attempt


class Again:
    """Sees the attempt behind a channel."""

    def __call__(self, it: tuple[int, int]) -> tuple[int, int]:
        return it[0], it[1] * 10 + current_record().attempt


class Append:
    """A sink that appends lines to a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __call__(self, batch: pa.RecordBatch) -> None:
        with open(self.path, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in batch.to_pylist())


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_each_failure_gets_the_retries_that_it_is_worth(
    environment: Any, connect: Any, logs_kit: ModuleType, tmp_path: Path
) -> None:
    told: list[DeadLetter] = []
    layer = connect(dead_on=KeyError, on_dead=told.append)
    env = environment(layer)
    numbers = env.source(list(range(100)), "n bigint", uid="numbers")
    seen = numbers.map(Look(), "n bigint, seen int", uid="look", retry_on=OSError)
    seen.key_by("n").map(Again(), "n bigint, seen int").sink(Append(tmp_path / "out"))
    seen.dead_letters(uid="letters").map(lambda it: (it[0], it[9]), "key string, record string").sink(
        Append(tmp_path / "dead")
    )
    job = env.execute_async()
    # A loop of the vertex's own: nothing of it fails here, so that the letters' own stream has none.
    logs_kit.until(job, lambda: len(rows_of(tmp_path / "out")) == 98)
    logs_kit.until(job, lambda: len(rows_of(tmp_path / "dead")) == 2)
    logs_kit.until(job, lambda: len(told) == 2)
    assert job.drain(600)
    out = {row["n"]: row["seen"] for row in rows_of(tmp_path / "out")}
    assert sorted(out) == [n for n in range(100) if n not in (1, 2)]
    assert out.pop(4) == 33
    assert set(out.values()) == {11}
    assert {letter.record["n"]: (letter.reason, letter.attempts, letter.operator) for letter in told} == {
        1: ("never", 1, "look"),
        2: ("KeyError: 'a rule of the layer'", 1, "look"),
    }
    dead = rows_of(tmp_path / "dead")
    assert {row["key"] for row in dead} == {letter.key for letter in told}
    assert {json.loads(row["record"])["n"] for row in dead} == {1, 2}


class LookUp:
    """Fails while a file is not there."""

    def __init__(self, up: Path) -> None:
        self.up = up

    def __call__(self, n: int) -> tuple[int, int]:
        if not self.up.exists():
            raise ConnectionError("the database is down")
        return n, current_record().attempt


def test_while_too_many_fail_the_source_pauses_and_nothing_dies(
    environment: Any, connect: Any, logs_kit: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layer = connect(max_attempts=2)
    env = environment(layer, options=TopologyOptions(batch_rows=50))
    numbers = env.source(list(range(2_000)), "n bigint", uid="numbers")
    looked = numbers.map(LookUp(tmp_path / "up"), "n bigint, seen int", uid="enrich", max_failing="5%")
    looked.sink(Append(tmp_path / "out"))
    job = env.execute_async()
    logs_kit.until(job, lambda: job.status().circuits.get("enrich", CircuitStatus()).opened >= 3)
    status = job.status()
    assert status.circuits["enrich"].state is not CircuitState.CLOSED
    assert "circuit enrich" in status.line()
    assert status.vertex.dead == 0
    assert layer.client.call(Stats()).circuits[env.name]["enrich"].opened >= 3
    (tmp_path / "up").touch()
    # Draining would end the source where it is.
    logs_kit.until(job, lambda: len(rows_of(tmp_path / "out")) >= 2_000)
    assert job.drain(600)
    rows = rows_of(tmp_path / "out")
    assert sorted(row["n"] for row in rows) == list(range(2_000))
    assert {row["seen"] for row in rows} <= {1, 2}
    assert job.status().vertex.dead == 0
    assert "records failed, more than max_failing: its sources pause" in caplog.text
    assert "the trial went well, it goes on" in caplog.text
