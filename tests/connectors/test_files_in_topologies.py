"""Files that come while a topology loses its slots and is started again, and in plain Structured Streaming."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from ftlayer import CheckpointConfig, FixedDelay, FTLayer, StreamEnvironment
from ftlayer.functions.data_sources import HAS_LIMITS
from ftlayer.sinks import FileSink
from ftlayer.sources import FilesDataSource, FilesSource

pytestmark = [pytest.mark.spark, pytest.mark.campaign]

LINE = pa.schema([("path", pa.string()), ("offset", pa.int64()), ("value", pa.string())])
FILES = 24


class Inbox:
    """A directory into which files are moved: the lines of a text, a large file among them."""

    def __init__(self, directory: Path, lines: list[str]) -> None:
        self.path = directory / "in"
        self.path.mkdir()
        each = len(lines) // FILES
        self._parts = [lines[place : place + each] for place in range(0, each * FILES, each)]
        self._parts[3] = lines
        self.kills_at = (str(self.path / "3.log"), len("\n".join(lines[: len(lines) // 2])) + 1)
        self.expected: list[tuple[str, int, str]] = []

    def put(self, first: int, end: int) -> None:
        for number in range(first, end):
            part = self._parts[number]
            hidden, path = self.path / f".{number}", self.path / f"{number}.log"
            hidden.write_text("\n".join(part) + "\n")
            hidden.rename(path)
            offset = 0
            for line in part:
                self.expected.append((str(path), offset, line))
                offset += len(line) + 1

    def source(self, directory: Path) -> FilesSource:
        return FilesSource(
            self.path, journal=directory / "journal", split_bytes=50_000, max_files=4, poll="50ms"
        )


def killing(at: tuple[str, int], directory: Path) -> Callable[[Any], Any]:
    """Pass a line on; one kills the process that meets it first."""

    def function(line: Any) -> Any:
        if (line[0], line[1]) == at:
            with contextlib.suppress(FileExistsError):
                (directory / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return tuple(line)

    return function


@pytest.fixture
def inbox(tmp_path: Path, real_lines: list[str]) -> Inbox:
    return Inbox(tmp_path, real_lines)


def in_files(out: Path) -> list[tuple[str, int, str]]:
    if not out.exists():
        return []
    rows = ds.dataset(out, LINE, format="parquet").to_table().to_pylist()
    return [tuple(row.values()) for row in rows]


def test_barrier_mode_reads_each_line_once(spark: Any, inbox: Inbox, wait_until: Any, tmp_path: Path) -> None:
    """The job is cancelled in the middle, and goes on from its last checkpoint."""

    def start() -> Any:
        env = StreamEnvironment(
            spark,
            name="files",
            parallelism=2,
            restart=FixedDelay(attempts=20, delay="10ms"),
            checkpointing=CheckpointConfig(interval="200ms", directory=str(tmp_path / "ck")),
        )
        lines = env.source(inbox.source(tmp_path), uid="lines")
        lines.map(killing(inbox.kills_at, tmp_path), LINE, uid="killing").sink(
            FileSink(str(tmp_path / "out")), uid="out"
        )
        return env.execute_async(restore_from="latest")

    for first in range(0, FILES, 6):
        job = start()
        try:
            for number in range(first, first + 6):
                inbox.put(number, number + 1)
                wait_until(
                    lambda: len(in_files(tmp_path / "out")) >= len(inbox.expected) // 2, "lines on their way"
                )
        finally:
            job.cancel()
    job = start()
    try:
        wait_until(lambda: len(in_files(tmp_path / "out")) >= len(inbox.expected), "all lines")
    finally:
        job.cancel()
    assert (tmp_path / "killed").exists()
    assert sorted(in_files(tmp_path / "out")) == sorted(inbox.expected)


def test_acker_mode_loses_no_line(spark: Any, inbox: Inbox, wait_until: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()

    def keep(batch: pa.RecordBatch) -> None:
        with (out / f"{os.getpid()}.txt").open("a") as file:
            file.writelines(f"{row['path']}\t{row['offset']}\t{row['value']}\n" for row in batch.to_pylist())

    def found() -> set[tuple[str, int, str]]:
        lines = [line for path in out.iterdir() for line in path.read_text().splitlines()]
        cut = [line.split("\t", 2) for line in lines if line.count("\t") >= 2]
        return {(path, int(offset), value) for path, offset, value in cut}

    with FTLayer.embedded(str(tmp_path / "ft"), timeout="5s") as layer:
        for first in range(0, FILES, 8):
            env = StreamEnvironment(
                spark, layer, name="files", parallelism=2, restart=FixedDelay(attempts=20, delay="10ms")
            )
            lines = env.source(inbox.source(tmp_path), uid="lines")
            lines.map(killing(inbox.kills_at, tmp_path), LINE, uid="killing").sink(keep, uid="kept")
            job = env.execute_async()
            try:
                inbox.put(first, first + 8)
                wait_until(lambda: len(found()) >= len(inbox.expected) // 2, "lines on their way")
                if first:
                    wait_until(lambda: found() == set(inbox.expected), "all lines")
            finally:
                job.cancel()
    assert (tmp_path / "killed").exists()


def test_plain_spark_reads_each_line_once(spark: Any, inbox: Inbox, tmp_path: Path) -> None:
    spark.dataSource.register(FilesDataSource)
    limit = {"maxFilesPerTrigger": "3"} if HAS_LIMITS else {}

    def run() -> None:
        options = {"journal": str(tmp_path / "journal"), "splitBytes": "50000"} | limit
        lines = spark.readStream.format("ftlayer-files").options(**options).load(str(inbox.path))
        writer = lines.writeStream.format("ftlayer-files").option("path", str(tmp_path / "out"))
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    inbox.put(0, 10)
    run()
    commits = tmp_path / "checkpoint" / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
    assert last > 2 or not HAS_LIMITS
    for note in (str(last), f".{last}.crc"):
        (commits / note).unlink()
    inbox.put(10, FILES)
    run()
    if not HAS_LIMITS:
        run()  # The one before ran the batch again that was not noted, and no other.
    found = [tuple(row) for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    assert sorted(found) == sorted(inbox.expected)
