"""Sources whose rows are read again (``replay="source"``), while slots and vertex are killed with SIGKILL."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ftlayer import FixedDelay, FTLayer, JobState
from ftlayer.errors import SourceChangedError
from ftlayer.topology.connectors import partitions

pytestmark = pytest.mark.spark

RECORDS = 4_000


def paced(part: int) -> Any:
    for number in range(part, RECORDS, 2):
        time.sleep(0.0005)
        yield number


def even() -> Any:
    return paced(0)


def odd() -> Any:
    return paced(1)


def fails_at_first(number: int) -> int:
    if number % 500 == 7:
        raise ValueError(f"{number} cannot be had")
    return number


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(["slot", "vertex"], marks=pytest.mark.faults),
        pytest.param(["slot", "slot"], marks=pytest.mark.campaign),
        pytest.param(["vertex", "slot", "vertex", "slot"], marks=pytest.mark.campaign),
    ],
)
def test_whatever_is_killed_every_record_arrives(
    environment: Any, logs_kit: ModuleType, tmp_path: Path, victims: list[str]
) -> None:
    with FTLayer.embedded(tmp_path / "store", max_attempts=2, backoff="20ms", jitter=0) as layer:
        env = environment(layer, restart=FixedDelay(attempts=100, delay="10ms"))
        numbers = env.source(partitions(even, odd), "id bigint", uid="numbers", replay="source")
        numbers.map(fails_at_first, "id bigint").key_by("id").map(lambda it: it, "id bigint").sink(
            logs_kit.Journal(tmp_path)
        )
        job = env.execute_async()
        out = logs_kit.Notes(tmp_path, "out")
        for victim in victims:
            seen = len(out.rows())
            logs_kit.until(job, lambda seen=seen: len(out.rows()) > seen + 400)
            if victim == "slot":
                os.kill(next(slot for slot in job.status().slots if slot.pid).pid, signal.SIGKILL)
            else:
                assert layer.vertex is not None
                layer.vertex.kill()
        assert job.wait(logs_kit.WAIT_S), job.status()
        assert job.state is JobState.ENDED
        assert job.status().restarts == victims.count("slot")
        bad = {number for number in range(RECORDS) if number % 500 == 7}
        counts = Counter(row[0] for row in out.rows())
        assert set(counts) == set(range(RECORDS)) - bad
        assert layer.stats()["dead_letters"] == len(bad)
        assert layer.stats()["pending"] == 0


@pytest.mark.parametrize("replay", ["store", "source"])
def test_a_source_that_is_shorter_than_its_position_ends_the_topology(
    environment: Any, connect: Any, logs_kit: ModuleType, tmp_path: Path, replay: str
) -> None:
    layer = connect()

    def run(records: int) -> Any:
        env = environment(layer)
        rows = env.source([{"id": number} for number in range(records)], uid="numbers", replay=replay)
        rows.sink(logs_kit.Journal(tmp_path))
        env.execute()

    run(300)
    with pytest.raises(SourceChangedError, match=r"partition 0 ends behind 100 records now, and 300 of it"):
        run(100)
    assert len(logs_kit.Notes(tmp_path, "out").rows()) == 300
