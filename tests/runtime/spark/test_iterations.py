"""Loops on Spark: without checkpoints, and with them where that is forced."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftlayer import CheckpointConfig, FTLayer, JobState, StreamEnvironment
from ftlayer.config import FTStatus
from ftlayer.errors import InvalidTopologyError
from ftlayer.topology.connectors import partitions

pytestmark = pytest.mark.spark

NUMBERS = range(1, 300)


@pytest.fixture
def ended() -> Iterator[list[Any]]:
    """Jobs that are ended whatever a test finds."""
    jobs: list[Any] = []
    yield jobs
    for job in jobs:
        job.cancel()


def written(directory: Path) -> Callable[[Any], None]:
    """A sink that writes its numbers into a file a process."""
    directory.mkdir()
    path = str(directory)

    def write(batch: Any) -> None:
        import os

        with open(f"{path}/{os.getpid()}", "a") as file:
            file.writelines(f"{name}\n" for name in batch.column(0).to_pylist())

    return write


def rows(directory: Path) -> Counter[int]:
    return Counter(int(line) for file in directory.iterdir() for line in file.read_text().split())


def collatz(record: tuple[int, int]) -> tuple[int, int]:
    name, n = record
    return name, n // 2 if n % 2 == 0 else 3 * n + 1


def build(env: StreamEnvironment, sink: Callable[[Any], None]) -> None:
    """Each number goes round until it is 1, and to another slot in each round."""
    halves = [[(n, n) for n in NUMBERS if n % 2 == part] for part in range(2)]
    loop = env.source(partitions(*halves), "name bigint, n bigint").iterate("1s", uid="loop")
    body = loop.key_by("n").reduce(lambda before, record: record, volatile_state=True).map(collatz)
    loop.close_with(body.filter(lambda record: record[1] != 1).rebalance())
    body.filter(lambda record: record[1] == 1).sink(sink)


def test_a_loop_without_checkpoints(spark: Any, tmp_path: Path, ended: list[Any]) -> None:
    with FTLayer.embedded(tmp_path / "ft", status=FTStatus.OFF) as layer:
        env = StreamEnvironment(spark, layer, name="loop", parallelism=2)
        build(env, written(tmp_path / "out"))
        job = env.execute_async()
        ended.append(job)
        job.wait(600)
        assert job.state is JobState.ENDED
    assert rows(tmp_path / "out") == Counter(NUMBERS)
    assert job.status().counters["late"] == 0


@pytest.mark.parametrize("unaligned", [False, True])
def test_a_loop_with_checkpoints_is_forced(
    spark: Any, tmp_path: Path, ended: list[Any], unaligned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def environment(**force: bool) -> StreamEnvironment:
        config = CheckpointConfig(interval="50ms", unaligned=unaligned, **force)  # type: ignore[arg-type]
        return StreamEnvironment(spark, name="loop", parallelism=2, checkpointing=config)

    write = written(tmp_path / "out")
    refused = [{}, {"force_iterations": True}] if unaligned else [{}]
    for force in refused:
        env = environment(**force)
        build(env, write)
        with pytest.raises(
            InvalidTopologyError, match=r"iteration 'loop'.*force_(iterations|unaligned)=True"
        ):
            env.execute_async()
    env = environment(force_iterations=True, force_unaligned=unaligned)
    build(env, write)
    with caplog.at_level(logging.WARNING, logger="ftlayer.topology.explain"):
        job = env.execute_async()
    ended.append(job)
    assert [each.getMessage() for each in caplog.records if "iteration 'loop'" in each.getMessage()]
    job.wait(600)
    assert job.state is JobState.ENDED
    assert job.status().checkpoints.completed > 2
    assert rows(tmp_path / "out") == Counter(NUMBERS)
