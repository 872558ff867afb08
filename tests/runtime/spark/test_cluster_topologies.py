"""Topologies on a standalone cluster of a master and two workers: slots on both, executors and a worker killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.faults]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, start_cluster: Any) -> Iterator[tuple[str, list[int]]]:
    """A master's URL and its workers' process ids."""
    with start_cluster(tmp_path_factory.mktemp("cluster"), 2) as started:
        yield started


@pytest.fixture(scope="module")
def found(
    cluster: tuple[str, list[int]],
    load_script: Callable[[str], ModuleType],
    tmp_path_factory: pytest.TempPathFactory,
    real_lines: list[str],
) -> dict[str, Any]:
    """Run all cases in one driver, which checks what comes out; return what else was seen."""
    directory = tmp_path_factory.mktemp("topologies")
    script = load_script("cluster_topologies")
    master, workers = cluster
    config = script.ClusterJob(str(directory), master, workers, real_lines[:2_000]).save()
    log = directory / "log"
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, script.__file__, config], stdout=output, stderr=output, timeout=900, check=False
        )
    assert done.returncode == 0, log.read_text("utf-8", "replace")[-8_000:]
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


def test_slots_on_both_workers(found: Any, cluster: tuple[str, list[int]]) -> None:
    clean = found["clean"]
    assert {worker for (worker,) in clean["places"]} == set(cluster[1])
    assert clean["restarts"] == [0], clean["last_failure"]


def test_the_vertex_is_on_the_drivers_address(found: Any) -> None:
    """With TLS, unless the machine has no address but loopback."""
    driver, address = found["clean"]["driver"], found["clean"]["address"]
    loopback = driver.startswith("127.") or driver == "localhost"
    assert address.startswith(f"grpc://{driver}" if loopback else f"grpc+tls://{driver}")


def test_an_executor_and_a_worker_that_are_killed_take_nothing_with_them(found: Any) -> None:
    """The driver has compared what came out with the recount."""
    result = found["killed"]
    assert [len(pids) for pids in result["killed"]] == [1, 1]
    behind_executor, behind_worker, _ = result["restarts"]
    assert 1 <= behind_executor < behind_worker


def test_state_is_exact_though_an_executor_is_killed(found: Any, cluster: tuple[str, list[int]]) -> None:
    """Barrier mode; the driver has looked for lost, doubled and miscounted rows."""
    barriers = found["barriers"]
    assert {worker for (worker,) in barriers["places"]} == set(cluster[1])
    assert len(barriers["killed"]) == 1
    assert barriers["restarts"] >= 1


def test_speculation_is_refused(found: Any) -> None:
    assert found["speculation"].startswith("spark.speculation is on")
