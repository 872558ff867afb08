"""Windows over a log of several partitions equal a recount: whatever is read first, and behind kills."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from ftlayer import CheckpointConfig, FixedDelay, JobState, StreamEnvironment, tumbling
from ftlayer.connectors.logs import LogReader

pytestmark = pytest.mark.spark

ROW = "split string, offset bigint, at bigint"
ROWS = 3_000
BEGINS = {"a": 0, "b": 5_000, "c": 200_000, "d": 40}
"""Event times of the partitions' first records: they overlap in part, or not at all."""


def time_of(split: str, offset: int) -> int:
    # Up to 70 ms out of order.
    return BEGINS[split] + 10 * offset - 70 * (offset % 3 == 0)


def recount() -> Counter[tuple[str, int]]:
    return Counter((split, time_of(split, offset) // 1_000) for split in BEGINS for offset in range(ROWS))


def log_of() -> LogReader:
    # Classes and functions of a test travel by value.
    rows, begins = ROWS, dict(BEGINS)

    class Log(LogReader):
        schema = pa.schema([("split", pa.string()), ("offset", pa.int64()), ("at", pa.int64())])

        def starts(self) -> dict[str, int]:
            return dict.fromkeys(begins, 0)

        def ends(self) -> dict[str, int]:
            return dict.fromkeys(begins, rows)

        def first_of(self, splits: Any) -> dict[str, int]:
            return dict.fromkeys(splits, 0)

        def read_split(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
            for first in range(start, end, 50):
                offsets = list(range(first, min(first + 50, end)))
                at = [begins[split] + 10 * offset - 70 * (offset % 3 == 0) for offset in offsets]
                columns = {"split": [split] * len(offsets), "offset": offsets, "at": at}
                yield pa.RecordBatch.from_pydict(columns, schema=self.schema)

    return Log(max_rows=4_000)


def build(env: StreamEnvironment, directory: Path, *, mapped: bool, dies_at: int | None = None) -> None:
    marker, found = str(directory / "died"), str(directory / "windows")

    def passes(row: tuple[str, int, int]) -> tuple[str, int, int]:
        if row[1] == dies_at and row[0] == "d" and not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(1)
        return row

    def keep(batch: pa.RecordBatch) -> None:
        with open(found, "a") as file:
            file.writelines(f"{row['split']} {row['second']} {row['n']}\n" for row in batch.to_pylist())

    rows = env.source(log_of(), ROW, uid="log")
    if mapped:
        rows = rows.map(passes, ROW, uid="pass")
    windows = rows.assign_watermarks("at", "100ms", uid="times").key_by("split").window(tumbling("1s"))
    counted = windows.aggregate(
        lambda: 0,
        lambda count, row: count + 1,
        "split string, second bigint, n bigint",
        result=lambda split, window, count: (split, window.start_ms // 1_000, count),
        volatile_state=dies_at is None,
        uid="count",
    )
    counted.sink(keep)


def windows_in(directory: Path) -> list[tuple[str, int, int]]:
    lines = (line.split() for line in (directory / "windows").read_text().splitlines())
    return [(split, int(second), int(n)) for split, second, n in lines]


@pytest.mark.parametrize(("parallelism", "mapped"), [(1, False), (2, True)])
def test_windows_drop_nothing_of_a_backlog_of_several_partitions(
    environment: Callable[..., Any], tmp_path: Path, parallelism: int, mapped: bool
) -> None:
    env = environment(parallelism=parallelism)
    build(env, tmp_path, mapped=mapped)
    job = env.execute_async(stop_at_latest=True)
    assert job.wait(600)
    assert job.state is JobState.ENDED
    assert sum(chain.late for chain in job.status().chains) == 0
    assert sorted(windows_in(tmp_path)) == sorted((*window, n) for window, n in recount().items())


def test_windows_that_are_over_stay_over_behind_a_restore(spark: SparkSession, tmp_path: Path) -> None:
    env = StreamEnvironment(
        spark,
        name="windows-behind-a-restore",
        parallelism=2,
        restart=FixedDelay(attempts=10, delay="10ms"),
        checkpointing=CheckpointConfig(interval="50ms", directory=str(tmp_path / "checkpoints")),
    )
    build(env, tmp_path, mapped=True, dies_at=2_500)
    job = env.execute_async(stop_at_latest=True)
    assert job.wait(600)
    assert job.state is JobState.ENDED
    assert (tmp_path / "died").exists()
    # Some come twice, to a sink that takes no part in checkpoints; none with a part of its records.
    assert set(windows_in(tmp_path)) == {(*window, n) for window, n in recount().items()}
