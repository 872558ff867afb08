"""Functions that take longer than a record's timeout, with thousands of records behind them: no storm of replays."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ftlayer import TopologyOptions

pytestmark = pytest.mark.spark

RECORDS = 5_000
TIMEOUT_S = 1.0


class Slow:
    """Takes its time for some records."""

    def __init__(self, every: int, seconds: float) -> None:
        self._every, self._seconds = every, seconds

    def __call__(self, number: int) -> int:
        if number % self._every == 0:
            time.sleep(self._seconds)
        return number


def run(environment: Any, connect: Any, kit: ModuleType, directory: Path, slow: Slow) -> dict[str, float]:
    """Run the topology to its end; return how much the vertex's counters have grown."""
    layer = connect(timeout="1s", max_attempts=10)
    before = layer.stats()
    env = environment(layer, options=TopologyOptions(batch_rows=500))
    source = env.source(range(RECORDS), "id bigint")
    source.key_by("id").map(slow, "id bigint", uid="slow").sink(kit.Journal(directory))
    job = env.execute_async()
    assert job.wait(kit.WAIT_S), job.status()
    assert kit_numbers(kit, directory).keys() == set(range(RECORDS))
    return {name: value - before[name] for name, value in layer.stats().items() if name in before}


def kit_numbers(kit: ModuleType, directory: Path) -> Counter[int]:
    return Counter(row[0] for row in kit.Notes(directory, "out").rows())


def test_queued_records_wait_longer_than_their_timeout(
    environment: Any, connect: Any, logs_kit: ModuleType, tmp_path: Path
) -> None:
    """Each record takes far less than the timeout, and the last ones wait for four of them in queues."""
    grown = run(environment, connect, logs_kit, tmp_path, Slow(100, 4 * TIMEOUT_S * 2 * 100 / RECORDS))
    assert grown["completed"] == RECORDS
    assert grown["replayed"] == grown["timed_out"] == 0
    assert set(kit_numbers(logs_kit, tmp_path).values()) == {1}


def test_a_record_that_takes_too_long_takes_its_batch_along_and_no_more(
    environment: Any, connect: Any, logs_kit: ModuleType, tmp_path: Path
) -> None:
    """One record takes three timeouts. What waits behind it is touched; those in its batch may come again."""
    grown = run(environment, connect, logs_kit, tmp_path, Slow(RECORDS, 3 * TIMEOUT_S))
    assert grown["timed_out"] >= 1
    assert grown["replayed"] <= 4 * 500
    assert grown["dead"] == 0
