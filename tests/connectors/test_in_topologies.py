"""Every connector of a queue in a topology that loses a slot while its server is restarted."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import CheckpointConfig, FixedDelay, FTLayer, StreamEnvironment

pytestmark = pytest.mark.spark

NUMBER = pa.schema([("number", pa.int64())])
COUNT = 3_000
PART = 500
KILLS_AT = 700


def number_in(kit: Any, directory: Path) -> Callable[[Any], Any]:
    """Make a message its number; one of them kills the process that meets it first."""
    place = kit.queue.schema.names.index(kit.column)

    def function(record: Any) -> int:
        number = int(record[place])
        if number == KILLS_AT:
            with contextlib.suppress(FileExistsError):
                (directory / "killed").touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return number

    return function


def keeping(directory: Path) -> Callable[[pa.RecordBatch], None]:
    """A sink that keeps what it was called with."""

    def keep(batch: pa.RecordBatch) -> None:
        with (directory / f"{os.getpid()}.txt").open("a") as file:
            file.writelines(f"{number}\n" for number in batch.column(0).to_pylist())

    return keep


def while_it_runs(job: Any, found: Callable[[], list[int]]) -> Callable[[], list[int]]:
    """Return what finds numbers; raises what has ended the job, which would be waited for in vain."""

    def find() -> list[int]:
        if job.status().state.is_final:
            job.wait()
        return found()

    return find


def put_all(
    kit: Any,
    wait_until: Callable[[Callable[[], Any], str], Any],
    found: Callable[[], list[int]],
    vertex: Any = None,
) -> None:
    """Send all numbers while they are read; the server, and the vertex if there is one, are killed in the middle."""
    for first in range(0, COUNT, PART):
        kit.put(first, first + PART)
        if first == 3 * PART:
            kit.server.restart()
        if first == 4 * PART and vertex is not None:
            vertex.kill()
        wait_until(lambda first=first: len(set(found())) >= first, "messages on their way")


def test_barrier_mode_reads_each_message_once(spark: Any, kit: Any, wait_until: Any, tmp_path: Path) -> None:
    env = StreamEnvironment(
        spark,
        name="messages",
        parallelism=2,
        restart=FixedDelay(attempts=20, delay="10ms"),
        checkpointing=CheckpointConfig(interval="200ms", directory=str(tmp_path / "checkpoints")),
    )
    messages = env.source(kit.queue, uid="messages", parallelism=kit.parallelism)
    numbers = messages.map(number_in(kit, tmp_path), NUMBER, uid="number")
    numbers.sink(kit.sink("out"), uid="out")

    def found() -> list[int]:
        numbers: list[int] = kit.in_sink("out")
        return numbers

    kit.begin("messages/messages")
    job = env.execute_async()
    found_so_far = while_it_runs(job, found)
    try:
        put_all(kit, wait_until, found_so_far)
        wait_until(lambda: len(set(found_so_far())) >= COUNT, "all messages")
        wait_until(lambda: kit.pending() == 0, "the last acknowledgement")
    finally:
        job.cancel()
    assert (tmp_path / "killed").exists()
    assert set(found()) == set(range(COUNT))
    if kit.enters_once:
        assert len(found()) == COUNT


@pytest.mark.campaign
def test_acker_mode_loses_no_message(spark: Any, kit: Any, wait_until: Any, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()

    def found() -> list[int]:
        texts = [path.read_text() for path in (tmp_path / "out").iterdir()]
        return [int(line) for text in texts for line in text.splitlines()]

    with FTLayer.embedded(str(tmp_path / "ft"), timeout="5s") as layer:
        env = StreamEnvironment(
            spark, layer, name="messages", parallelism=2, restart=FixedDelay(attempts=20, delay="10ms")
        )
        messages = env.source(kit.queue, uid="messages", parallelism=kit.parallelism)
        numbers = messages.map(number_in(kit, tmp_path), NUMBER, uid="number")
        numbers.sink(keeping(tmp_path / "out"), uid="kept")
        kit.begin("messages/messages")
        job = env.execute_async()
        found_so_far = while_it_runs(job, found)
        try:
            assert layer.vertex is not None
            put_all(kit, wait_until, found_so_far, layer.vertex)
            wait_until(lambda: len(set(found_so_far())) >= COUNT, "all messages")
            wait_until(lambda: kit.pending() == 0, "the last acknowledgement")
        finally:
            job.cancel()
    assert (tmp_path / "killed").exists()
    assert set(found()) == set(range(COUNT))


@pytest.mark.campaign
def test_a_savepoint_is_restored_with_fewer_subtasks(
    spark: Any, kit: Any, wait_until: Any, tmp_path: Path
) -> None:
    """What was delivered to subtasks that are there no more comes once, too."""
    (tmp_path / "killed").touch()  # No process is, here.

    def start(parallelism: int, restore_from: str | None) -> Any:
        checkpoints = CheckpointConfig(interval="100ms", directory=str(tmp_path / "checkpoints"))
        env = StreamEnvironment(spark, name="savepoints", parallelism=parallelism, checkpointing=checkpoints)
        numbers = env.source(kit.queue, uid="messages").map(number_in(kit, tmp_path), NUMBER, uid="number")
        numbers.sink(kit.sink("out"), uid="out")
        return env.execute_async(restore_from=restore_from)

    kit.put(0, 1_000)
    job = start(2, None)
    wait_until(lambda: len(kit.in_sink("out")) >= 500, "messages on their way")
    kit.put(1_000, 1_500)
    savepoint = job.stop_with_savepoint(str(tmp_path / "savepoint"), timeout=120)
    kit.put(1_500, 2_000)
    job = start(1, savepoint)
    try:
        wait_until(lambda: len(kit.in_sink("out")) >= 2_000, "all messages")
        wait_until(lambda: kit.pending() == 0, "the last acknowledgement")
    finally:
        job.cancel()
    assert sorted(kit.in_sink("out")) == list(range(2_000))
