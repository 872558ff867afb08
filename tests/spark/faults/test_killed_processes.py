"""Drivers and vertices killed with SIGKILL, at every step of the batch protocol and at random points."""

from __future__ import annotations

import random
import signal
import subprocess
from itertools import cycle, islice
from types import ModuleType
from typing import Any

import pytest

from ftlayer.spark.protocol import STEPS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1_800)]

SPARKS = (("local[2]", 1 << 27), ("local[1]", 5_000), ("local[3]", 9_000))
"""Masters and sizes of partitions: each life cuts the batch that it runs again in another way."""


def kinds_of_spark(life: int) -> dict[str, Any]:
    master, partition_bytes = SPARKS[life % len(SPARKS)]
    return {"master": master, "partition_bytes": partition_bytes}


def each_step(sinks: tuple[str, ...], first: int) -> list[dict[str, str]]:
    """Return kills that have each step at least once, the queries always being at different ones."""
    kills = -(-len(STEPS) // len(sinks))
    steps = iter(islice(cycle(STEPS), first, None))
    return [{sink: next(steps) for sink in sinks} for _ in range(kills)]


def each_step_of_each_query(sinks: tuple[str, ...]) -> list[dict[str, str]]:
    return [dict.fromkeys(sinks, step) for step in STEPS]


def kill_drivers(job_run: Any, kills: list[dict[str, str]]) -> None:
    for life in range(len(kills)):
        code = job_run.run(job_run.job(kills=kills, **kinds_of_spark(life)))
        assert code == -signal.SIGKILL, f"life {life} ended with {code}\n{job_run.log()}"
        assert job_run.kills() == life + 1
    assert job_run.run(job_run.job(kills=kills)) == 0, job_run.log()
    job_run.check()


def kill_vertices(job_run: Any, kills: list[dict[str, str]]) -> None:
    job = job_run.job(kills=kills, victim="vertex", shards=2)
    assert job_run.run(job) == 0, job_run.log()
    assert job_run.kills() == len(kills)
    job_run.check()


def test_driver_killed_at_every_step(make_job: Any, job_script: ModuleType) -> None:
    kills = each_step(job_script.SINKS, first=0)
    kill_drivers(make_job(len(kills) + 1), kills)


def test_vertex_killed_at_every_step(make_job: Any, job_script: ModuleType) -> None:
    kills = each_step(job_script.SINKS, first=1)
    kill_vertices(make_job(len(kills) + 1), kills)


@pytest.mark.campaign
@pytest.mark.parametrize("kill", [kill_drivers, kill_vertices])
def test_all_queries_at_every_step(make_job: Any, job_script: ModuleType, kill: Any) -> None:
    kills = each_step_of_each_query(job_script.SINKS)
    kill(make_job(len(kills) + 1), kills)


def kill_at_random_points(job_run: Any, kills: int, seed: int) -> None:
    """Kill ``kills`` drivers, each some seconds after its queries have started; then let one end.

    Every other time the victim is the driver's JVM, and the driver has to end by itself.
    """
    draw = random.Random(seed)
    for life in range(kills):
        process = job_run.launch(job_run.job(**kinds_of_spark(life)))
        try:
            job_run.await_started(process)
            process.wait(draw.uniform(0.0, 8.0))
        except subprocess.TimeoutExpired:
            if life % 2:
                process.kill()
                assert process.wait() == -signal.SIGKILL
            else:
                job_run.kill_jvm(process)
                assert process.wait(600) == 1
                assert "Spark's JVM has ended" in job_run.log()
        finally:
            process.kill()
            process.wait()
    assert job_run.run(job_run.job()) == 0, job_run.log()
    job_run.check()


def test_the_jvm_killed_at_a_random_point(make_job: Any) -> None:
    kill_at_random_points(make_job(4), kills=1, seed=1)


@pytest.mark.campaign
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", range(3))
def test_driver_killed_at_random_points_20_times(make_job: Any, seed: int) -> None:
    kill_at_random_points(make_job(8), kills=20, seed=100 + seed)
