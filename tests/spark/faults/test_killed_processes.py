"""Drivers and vertices killed with SIGKILL, at every step of the batch protocol and at random points."""

from __future__ import annotations

import random
import signal
import subprocess
from types import ModuleType
from typing import Any

import pytest

from ftlayer.spark.protocol import STEPS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1_800)]

SPARKS = (("local[2]", 1 << 27), ("local[1]", 5_000), ("local[3]", 9_000))
"""Masters and sizes of partitions: each life cuts the batch that it runs again in another way."""

CODES = {"driver": -signal.SIGKILL, "jvm": 1, "vertex": 0}
"""How a life ends whose last kill had that victim. A query goes on without a vertex, which comes back."""

JVM_HAS_ENDED = "Spark's JVM has ended"

Kill = tuple[str, dict[str, str]]
"""A victim, and the step of each query by its sink."""


def kinds_of_spark(life: int) -> dict[str, Any]:
    master, partition_bytes = SPARKS[life % len(SPARKS)]
    return {"master": master, "partition_bytes": partition_bytes}


def kill_all(job_run: Any, kills: list[Kill], shards: int = 1) -> None:
    """Run a job through all of the kills; a life begins where the one before has lost its driver or its JVM."""
    made, life = 0, 0
    while made < len(kills):
        code = job_run.run(job_run.job(kills=kills, shards=shards, **kinds_of_spark(life)))
        before, made, life = made, job_run.kills(), life + 1
        assert made > before, job_run.log()
        victim, _ = kills[made - 1]
        assert code == CODES[victim], f"killed {made} times, and ended with {code}\n{job_run.log()}"
        assert victim != "jvm" or job_run.has_said(JVM_HAS_ENDED), job_run.log()
    if victim != "vertex":
        assert job_run.run(job_run.job(kills=kills, shards=shards)) == 0, job_run.log()
    assert job_run.kills() == len(kills)
    job_run.check()


def each_step_of_each_query(victim: str, sinks: tuple[str, ...]) -> list[Kill]:
    return [(victim, dict.fromkeys(sinks, step)) for step in STEPS]


@pytest.mark.faults
def test_vertex_and_driver_are_killed(make_job: Any, job_script: ModuleType) -> None:
    """The vertex at every step, the driver at every other one of a batch that has begun.

    Queries are always at different ones. The JVM is for the campaign.
    """
    assert STEPS == ("begin", "begun", "run", "sealed", "written", "committed", "reported")
    steps = {
        "vertex": [
            ("begin", "begun", "run"),
            ("sealed", "written", "committed"),
            ("reported", "begin", "begun"),
        ],
        "driver": [("begun", "sealed", "committed")],
    }
    kills = [
        (victim, dict(zip(job_script.SINKS, each, strict=True)))
        for victim, all_of_it in steps.items()
        for each in all_of_it
    ]
    kill_all(make_job(len(kills) + 1), kills, shards=2)


@pytest.mark.campaign
@pytest.mark.parametrize("victim", ["driver", "jvm", "vertex"])
def test_all_queries_at_every_step(make_job: Any, job_script: ModuleType, victim: str) -> None:
    kills = each_step_of_each_query(victim, job_script.SINKS)
    kill_all(make_job(len(kills) + 1), kills, shards=2 if victim == "vertex" else 1)


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
                assert job_run.has_said(JVM_HAS_ENDED), job_run.log()
        finally:
            process.kill()
            process.wait()
    assert job_run.run(job_run.job()) == 0, job_run.log()
    job_run.check()


@pytest.mark.campaign
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seed", range(3))
def test_driver_killed_at_random_points_20_times(make_job: Any, seed: int) -> None:
    kill_at_random_points(make_job(8), kills=20, seed=100 + seed)
