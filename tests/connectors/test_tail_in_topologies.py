"""A log that a process writes and rotates, followed by a topology that loses its slots and is started again."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from ftlayer import CheckpointConfig, FixedDelay, FTLayer, StreamEnvironment
from ftlayer.sinks import FileSink
from ftlayer.sources import FilesDataSource, TailDataSource, TailSource

pytestmark = pytest.mark.spark

VALUE = pa.schema([("value", pa.string())])
ROTATES_AT = 40_000

WRITER = """
import os, sys, time
log, lines, ended, rotation, at = sys.argv[1:6]
lines = open(lines).read().splitlines()
file = open(log, "a")
for number, line in enumerate(lines):
    text = f"{number} {line}\\n"
    file.write(text[:7])
    file.flush()
    file.write(text[7:])
    if number % 100 == 99:
        file.flush()
        time.sleep(0.02)
    if file.tell() >= int(at):
        file.flush()
        copies = sorted((int(name.rpartition(".")[2]) for name in os.listdir(os.path.dirname(log))
                         if name != os.path.basename(log)), reverse=True)
        for copy in copies:
            os.rename(f"{log}.{copy}", f"{log}.{copy + 1}")
        if rotation == "rename":
            os.rename(log, f"{log}.1")
            file.close()
            file = open(log, "a")
        else:
            with open(log, "rb") as old, open(f"{log}.1", "wb") as new:
                new.write(old.read())
            os.truncate(log, 0)
file.close()
open(ended, "w").close()
"""


class Log:
    """A log that a process of its own writes and rotates, and the lines that will be in it."""

    def __init__(self, directory: Path, lines: list[str], rotation: str = "rename") -> None:
        self.path = directory / "logs" / "app.log"
        self.path.parent.mkdir()
        (directory / "lines").write_text("\n".join(lines))
        self.lines = [f"{number} {line}" for number, line in enumerate(lines)]
        self._ended = directory / "ended"
        command = [sys.executable, "-c", WRITER, str(self.path), str(directory / "lines"), str(self._ended)]
        self.process = subprocess.Popen([*command, rotation, str(ROTATES_AT)])

    @property
    def has_ended(self) -> bool:
        assert self.process.poll() in (None, 0)
        return self._ended.exists()


@pytest.fixture
def make_log(tmp_path: Path, real_lines: list[str]) -> Iterator[Callable[..., Log]]:
    made: list[Log] = []

    def make(count: int, rotation: str = "rename") -> Log:
        made.append(Log(tmp_path, real_lines[:count], rotation))
        return made[-1]

    yield make
    for log in made:
        log.process.kill()
        log.process.wait()


def killing(line: str, directory: Path) -> Callable[[Any], Any]:
    """Pass the text of a line on; one kills the process that meets it first."""

    def function(record: Any) -> Any:
        if record[3] == line:
            with contextlib.suppress(FileExistsError):
                (directory / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return record[3]

    return function


def running(job: Any) -> Any:
    """Raise what has ended a job, which would be waited for in vain."""
    if job.status().state.is_final:
        job.wait()
    return job


def in_files(out: Path) -> list[str]:
    if not out.exists():
        return []
    found: list[str] = ds.dataset(out, VALUE, format="parquet").to_table()["value"].to_pylist()
    return found


@pytest.mark.parametrize(
    ("count", "rotation"),
    [
        (2_000, "rename"),
        pytest.param(10_000, "rename", marks=pytest.mark.campaign),
        pytest.param(10_000, "copytruncate", marks=pytest.mark.campaign),
    ],
)
def test_barrier_mode_reads_each_line_once(
    spark: Any, make_log: Any, wait_until: Any, tmp_path: Path, count: int, rotation: str
) -> None:
    """The job is cancelled in the middle, and goes on from its last checkpoint: the log is rotated meanwhile."""
    log = make_log(count, rotation)
    out = tmp_path / "out"

    def start() -> Any:
        env = StreamEnvironment(
            spark,
            name="tail",
            restart=FixedDelay(attempts=20, delay="10ms"),
            checkpointing=CheckpointConfig(interval="100ms", directory=str(tmp_path / "ck")),
        )
        lines = env.source(TailSource(log.path, rotation=rotation), uid="lines")
        kill = killing(log.lines[count // 4], tmp_path)
        lines.map(kill, VALUE, uid="killing").sink(FileSink(str(out)), uid="out")
        return env.execute_async(restore_from="latest")

    job = start()
    try:
        wait_until(lambda: running(job) and len(in_files(out)) > count // 2, "lines on their way")
    finally:
        job.cancel()
    wait_until(lambda: log.has_ended, "the writer's end")
    job = start()
    try:
        wait_until(lambda: running(job) and len(in_files(out)) >= count, "all lines")
    finally:
        job.cancel()
    assert (tmp_path / "killed").exists()
    assert sorted(in_files(out)) == sorted(log.lines)


@pytest.mark.campaign
def test_acker_mode_loses_no_line(spark: Any, make_log: Any, wait_until: Any, tmp_path: Path) -> None:
    log, out = make_log(10_000), tmp_path / "out"
    out.mkdir()

    def keep(batch: pa.RecordBatch) -> None:
        with (out / f"{os.getpid()}.txt").open("a") as file:
            file.writelines(f"{value}\n" for value in batch.column(0).to_pylist())

    def found() -> set[str]:
        return {line for path in out.iterdir() for line in path.read_text().splitlines()}

    with FTLayer.embedded(str(tmp_path / "ft"), timeout="5s") as layer:
        for part in (3_000, 7_000, 10_000):
            env = StreamEnvironment(spark, layer, name="tail", restart=FixedDelay(attempts=20, delay="10ms"))
            lines = env.source(TailSource(log.path), uid="lines")
            lines.map(killing(log.lines[1_000], tmp_path), VALUE, uid="killing").sink(keep, uid="kept")
            job = env.execute_async()
            try:
                wait_until(
                    lambda part=part, job=job: running(job) and len(found()) >= part, "lines on their way"
                )
            finally:
                job.cancel()
    assert (tmp_path / "killed").exists()
    assert found() == set(log.lines)


@pytest.mark.campaign
def test_plain_spark_reads_each_line_once(spark: Any, make_log: Any, wait_until: Any, tmp_path: Path) -> None:
    for each in (TailDataSource, FilesDataSource):
        spark.dataSource.register(each)
    log = make_log(10_000)

    def run() -> None:
        options = {"spool": str(tmp_path / "spool"), "maxRowsPerTrigger": "700"}
        lines = spark.readStream.format("ftlayer-tail").options(**options).load(str(log.path))
        writer = (
            lines.select("value").writeStream.format("ftlayer-files").option("path", str(tmp_path / "out"))
        )
        writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()

    wait_until(lambda: log.path.exists(), "the log")
    run()
    commits = tmp_path / "checkpoint" / "commits"
    if commits.exists():
        last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
        for note in (str(last), f".{last}.crc"):
            (commits / note).unlink()
    wait_until(lambda: log.has_ended, "the writer's end")
    run()
    assert sorted(in_files(tmp_path / "out")) == sorted(log.lines)
