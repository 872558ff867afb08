"""Tasks that fail and are retried, records that kill their workers, batches that are run again."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ftlayer.common.rules.restart import FixedDelay
from ftlayer.spark.protocol import STEPS
from ftlayer.spark.query.writer import watch_steps
from ftlayer.vertex.calls import BatchState

pytestmark = pytest.mark.spark

PARTITION_BYTES = "spark.sql.files.maxPartitionBytes"
OPEN_COST = "spark.sql.files.openCostInBytes"


@pytest.fixture
def many_partitions(spark: Any) -> Iterator[None]:
    """Cut files into small partitions."""
    before = {key: spark.conf.get(key) for key in (PARTITION_BYTES, OPEN_COST)}
    spark.conf.set(PARTITION_BYTES, "4000b")
    spark.conf.set(OPEN_COST, "1b")
    yield
    for key, value in before.items():
        spark.conf.set(key, value)


def numbered(lines: list[str], files: int, each: int) -> list[str]:
    """Return ``files`` × ``each`` lines with their file's number and their own in front."""
    return [
        f"{file} {number} {lines[(file * each + number) % len(lines)]}"
        for file in range(files)
        for number in range(each)
    ]


def test_tasks_that_fail_on_their_first_attempt_after_half_of_the_rows(
    wrapped: Any, written: Any, log_lines: list[str], tmp_path: Path
) -> None:
    lines = numbered(log_lines, files=3, each=200)
    seen = str(tmp_path)

    def twice(row: dict[str, Any]) -> list[dict[str, Any]]:
        from pyspark import TaskContext

        context = TaskContext.get()
        file, number, _ = row["value"].split(" ", 2)
        if context.attemptNumber() == 0 and number == "100":
            Path(seen, file).touch()
            if file == "0":
                os._exit(3)
            if file == "1":
                os.kill(os.getpid(), signal.SIGABRT)
            os.kill(os.getpid(), signal.SIGKILL)
        if random.random() < 0.005:
            raise RuntimeError("another one in each attempt")
        return [{"value": row["value"], "copy": 0}, {"value": row["value"], "copy": 1}]

    stream = wrapped.source(lines, files=3).flat_map(twice, "value string, copy int").key_by("value")
    query = wrapped.finish(wrapped.writer(stream, written))
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "2"}
    assert {report.state for report in query.recent_batches} == {BatchState.NEW}, query.last_failure
    assert written.rows == Counter((line, copy) for line in lines for copy in (0, 1))
    assert [batch for batch, _ in written.calls] == sorted({batch for batch, _ in written.calls})
    assert wrapped.dead(stream) == {}


def test_records_that_kill_their_worker_are_dead_letters_and_their_neighbours_are_not(
    wrapped: Any, written: Any, log_lines: list[str]
) -> None:
    lines = numbered(log_lines, files=2, each=150)

    def early(row: dict[str, Any]) -> dict[str, Any]:
        if row["value"].startswith("0 70 "):
            os._exit(1)
        if row["value"].startswith("0 71 "):
            os.kill(os.getpid(), signal.SIGKILL)
        if row["value"].startswith("1 30 "):
            sys.exit("no more")
        return row

    def late(row: dict[str, Any]) -> dict[str, Any]:
        if row["value"].startswith("1 149 "):
            os._exit(7)
        return row

    stream = (
        wrapped.source(lines, files=2).map(early, "value string").key_by("value").map(late, "value string")
    )
    query = wrapped.finish(wrapped.writer(stream, written))
    assert {report.state for report in query.recent_batches} == {BatchState.NEW}, query.last_failure
    dead = {" ".join(line.split(" ")[:2]): letter for line, letter in wrapped.dead(stream).items()}
    reasons = {name: letter.reason for name, letter in dead.items()}
    assert set(reasons) == {"0 70", "0 71", "1 30", "1 149"}
    assert "exit code 1)" in reasons["0 70"]
    assert "SIGKILL" in reasons["0 71"]
    assert "exit code 7)" in reasons["1 149"]
    # It is raised, and a failure like others: tried again.
    assert reasons["1 30"] == "SystemExit: no more"
    killed = dead.keys() - {"1 30"}
    assert all("killed the process it ran in" in reasons[name] for name in killed)
    assert {len(dead[name].history) for name in killed} == {1}
    killers = tuple(f"{name} " for name in reasons)
    assert written.rows == Counter((line,) for line in lines if not line.startswith(killers))


@pytest.mark.usefixtures("many_partitions")
def test_batches_run_again_with_other_partitions(
    wrapped: Any, written: Any, log_lines: list[str], tmp_path: Path
) -> None:
    """The n-th step fails once, in batch n; then Spark runs the batch again, cut into other partitions.

    Until then two in five rows fail at random, of equal rows some and others not.
    """
    lines = [
        f"{file} {line}"
        for file in range(len(STEPS) + 1)
        for line in [*log_lines[file * 100 : file * 100 + 60], *["one of many equal rows"] * 60]
    ]
    calm = str(tmp_path)
    partitions: list[tuple[int, int]] = []

    def restless(row: dict[str, Any]) -> dict[str, Any]:
        if not Path(calm, row["value"].split(" ")[0]).exists() and random.random() < 0.4:
            raise RuntimeError("restless")
        return row

    def crash(step: str, batch: int) -> None:
        if batch < len(STEPS) and step == STEPS[batch] and not (tmp_path / str(batch)).exists():
            (tmp_path / str(batch)).touch()
            wrapped.spark.conf.set(PARTITION_BYTES, "1500b" if batch % 2 else "100kb")
            raise ConnectionError(f"crash at {step}")

    (tmp_path / str(len(STEPS))).touch()
    stream = wrapped.source(lines, files=len(STEPS) + 1).map(restless, "value string")

    def sink(rows: Any, batch: int) -> None:
        partitions.append((batch, rows.rdd.getNumPartitions()))
        written(rows, batch)

    writer = wrapped.writer(stream, sink).restart(FixedDelay(attempts=20, delay="10ms"))
    watch_steps(writer, crash)
    query = wrapped.finish(writer)
    assert len(list(tmp_path.iterdir())) == len(STEPS) + 1
    assert wrapped.dead(stream) == {}
    assert written.rows == Counter((line,) for line in lines)

    calls = Counter(batch for batch, _ in written.calls)
    twice = {batch for batch, n in calls.items() if n > 1}
    assert twice == {STEPS.index("written")}
    for batch in twice:
        first, again = (rows for number, rows in written.calls if number == batch)
        assert first == again, "the rows that the seal took were not the ones left out"
        assert len({count for number, count in partitions if number == batch}) == 2
    assert not any(report.differs for report in query.recent_batches)
    states = {report.batch: report.state for report in query.recent_batches}
    assert [states[batch] for batch in range(len(STEPS))] == [
        *[BatchState.NEW] * 3,
        *[BatchState.SEALED] * 2,
        *[BatchState.COMMITTED] * 2,
    ]
