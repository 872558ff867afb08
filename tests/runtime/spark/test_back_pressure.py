"""A source a hundred times faster than its sink: every process keeps to a bound."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import TopologyOptions, partitions

pytestmark = pytest.mark.spark

ROWS, ROW_BYTES = 1_000, 1_000
MAX_PENDING = 30_000
SINK_S = 0.001
"""A record: 2,000 a second by two subtasks, where the source alone would make far more than 200,000."""

SLOT_MIB = 300
"""Of which 150 are there before the first record."""
VERTEX_MIB = 240
"""Beyond what it has before: pages of its store that are mapped count, too. Other tests have used it as well, and
it keeps what they had it allocate."""


def endless(first: int) -> Iterator[pa.RecordBatch]:
    text = "x" * ROW_BYTES
    while True:
        yield pa.record_batch({"id": list(range(first, first + ROWS)), "text": [text] * ROWS})
        first += ROWS


def slow_sink(batch: pa.RecordBatch) -> None:
    time.sleep(SINK_S * batch.num_rows)


def rss_mib(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 0.0 if found is None else int(found[1]) / 1_024


def hold_back(environment: Any, connect: Any, vertex: Any, kit: ModuleType, seconds: float) -> None:
    layer = connect(max_pending=MAX_PENDING)
    # A cancelled job waits for the sink to come back.
    env = environment(layer, options=TopologyOptions(batch_rows=500))
    source = env.source(partitions(partial(endless, 0), partial(endless, 1 << 40)), "id bigint, text string")
    source.rebalance().sink(slow_sink, uid="slow")
    before = rss_mib(vertex.vertex.pid)
    began = time.monotonic()
    job = env.execute_async()
    kit.until(job, lambda: job.status().counters.get("records_in", 0) > 0)
    most: dict[str, float] = {}

    def look() -> None:
        status = job.status()
        pids = {f"slot {slot.slot}": slot.pid for slot in status.slots} | {"vertex": vertex.vertex.pid}
        for name, pid in pids.items():
            most[name] = max(most.get(name, 0), rss_mib(pid))
        assert status.vertex is None or status.vertex.pending <= MAX_PENDING

    end = time.monotonic() + seconds
    kit.until(job, lambda: time.monotonic() >= end, look)
    status = job.status()
    # However long it took: the sink cannot have taken more than this.
    taken = 2 / SINK_S * (time.monotonic() - began)
    assert job.cancel()
    assert status.restarts == 0
    assert status.counters["persisted"] < taken + MAX_PENDING, "the source was not held back"
    assert max(most["slot 0"], most["slot 1"]) < SLOT_MIB, most
    assert most["vertex"] < before + VERTEX_MIB, (before, most)


def test_back_pressure(environment: Any, connect: Any, vertex: Any, logs_kit: ModuleType) -> None:
    hold_back(environment, connect, vertex, logs_kit, 8)


@pytest.mark.soak
def test_back_pressure_for_a_minute(
    environment: Any, connect: Any, vertex: Any, logs_kit: ModuleType
) -> None:
    hold_back(environment, connect, vertex, logs_kit, 60)
