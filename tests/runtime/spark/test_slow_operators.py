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

RECORDS = 2_000
BATCH_ROWS = 1_000
TIMEOUT_S = 1.5
"""A record times out between this and half as much again."""


class Slow:
    """Takes its time for some records, where they come for the first time."""

    def __init__(self, kit: ModuleType, directory: Path, every: int, seconds: float) -> None:
        self._first_time, self._directory = kit.first_time, str(directory)
        self._every, self._seconds = every, seconds

    def __call__(self, number: int) -> int:
        if number % self._every == 0 and self._first_time(f"{self._directory}/{number}"):
            time.sleep(self._seconds)
        return number


def run(
    environment: Any, connect: Any, kit: ModuleType, directory: Path, every: int, seconds: float
) -> tuple[dict[str, float], Counter[int]]:
    """Run the topology to its end; return how the vertex's counters have grown, and what came to the sink."""
    layer = connect(timeout=f"{round(TIMEOUT_S * 1_000)}ms", max_attempts=5)
    before = layer.stats()
    env = environment(layer, parallelism=1, options=TopologyOptions(batch_rows=BATCH_ROWS))
    numbers = env.source(range(RECORDS), "id bigint").rebalance()
    slow = numbers.map(Slow(kit, directory, every, seconds), "id bigint", uid="slow")
    slow.rebalance().sink(kit.Journal(directory))
    job = env.execute_async()
    assert job.wait(kit.WAIT_S), job.status()
    grown = {name: value - before[name] for name, value in layer.stats().items() if name in before}
    return grown, Counter(row[0] for row in kit.Notes(directory, "out").rows())


def test_a_slow_function_with_full_queues_before_it(
    environment: Any, connect: Any, logs_kit: ModuleType, tmp_path: Path
) -> None:
    """Each record takes a tenth of the timeout at most, its batch two timeouts, and there are several."""
    grown, came = run(environment, connect, logs_kit, tmp_path, BATCH_ROWS // 20, TIMEOUT_S / 10)
    assert came == Counter(range(RECORDS))
    assert grown["replayed"] == grown["timed_out"] == 0


def test_a_record_that_takes_too_long_is_replayed_alone(
    environment: Any, connect: Any, logs_kit: ModuleType, tmp_path: Path
) -> None:
    """One record takes four timeouts; those in its batch and behind it are not to blame."""
    grown, came = run(environment, connect, logs_kit, tmp_path, RECORDS, 4 * TIMEOUT_S)
    # Its replay is cancelled if it was not sent before the record was done.
    assert came.keys() == set(range(RECORDS))
    assert all(times == 1 for number, times in came.items() if number)
    assert grown["timed_out"] == 1
    assert grown["replayed"] == came[0] - 1
    assert grown["dead"] == 0
