"""Both sinks in one topology that raises, and loses a slot: each holds every record exactly once."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from ftlayer import CheckpointConfig, FixedDelay, StreamEnvironment, partitions
from ftlayer.sinks import FileSink, PostgresSink

pytestmark = pytest.mark.spark

ROWS = pa.schema([("partition", pa.int64()), ("number", pa.int64())])
COUNT = 2_000


def rows_of(partition: int) -> Callable[[], Iterator[Any]]:
    """The source of a partition. Nested, as is the next one: slots cannot import this module."""

    def rows() -> Iterator[Any]:
        for number in range(COUNT):
            if number % 100 == 99:
                # Time for checkpoints while the job runs.
                time.sleep(0.03)
            yield partition, number

    return rows


def failing_twice(directory: Path) -> Callable[[Any], Any]:
    """Raise for one record and kill the process for another, once each; files say that it was."""

    def first(name: str) -> bool:
        with contextlib.suppress(FileExistsError):
            (directory / name).touch(exist_ok=False)
            return True
        return False

    def function(record: Any) -> Any:
        if record == (0, 700) and first("raised"):
            raise RuntimeError("meant to fail")
        if record == (1, 1_300) and first("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return record

    return function


def test_every_record_is_there_once(spark: Any, server: Any, tmp_path: Path) -> None:
    server.execute("CREATE TABLE barrier_numbers (partition bigint, number bigint)")
    env = StreamEnvironment(
        spark,
        name="both-sinks",
        parallelism=2,
        restart=FixedDelay(attempts=20, delay="10ms"),
        checkpointing=CheckpointConfig(interval="200ms", directory=str(tmp_path / "checkpoints")),
    )
    stream = env.source(partitions(rows_of(0), rows_of(1)), ROWS, uid="numbers").map(
        failing_twice(tmp_path), ROWS, uid="failing"
    )
    stream.sink(FileSink(str(tmp_path / "out")), uid="files")
    stream.sink(PostgresSink(server.dsn, "barrier_numbers"), uid="postgres")
    job = env.execute_async()
    job.wait()
    assert (tmp_path / "raised").exists()
    assert (tmp_path / "killed").exists()
    expected = sorted((partition, number) for partition in range(2) for number in range(COUNT))
    read = ds.dataset(tmp_path / "out", format="parquet").to_table()
    assert sorted(zip(*(read[name].to_pylist() for name in ROWS.names), strict=True)) == expected
    assert sorted(server.execute("SELECT partition, number FROM barrier_numbers")) == expected
    # More than the final commit.
    assert (
        len(server.execute("SELECT DISTINCT checkpoint FROM ftlayer_commits WHERE sink = 'barrier_numbers'"))
        > 1
    )
