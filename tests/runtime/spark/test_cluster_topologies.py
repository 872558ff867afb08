"""Topologies on a standalone cluster of a master and two workers: slots on both, executors and a worker killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

START_S = 120.0


@contextlib.contextmanager
def daemon(directory: Path, name: str, *arguments: str, ready: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Run a daemon of Spark's; yields its process id and the line that said it was ready."""
    import pyspark

    home = Path(pyspark.__file__).parent
    env = os.environ | {
        "SPARK_HOME": str(home),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "SPARK_WORKER_DIR": str(directory / "work"),
        "SPARK_LOCAL_DIRS": str(directory / "local"),
    }
    log = directory / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [home / "bin" / "spark-class", *arguments], stdout=output, stderr=output, env=env
        )
    try:
        deadline = time.monotonic() + START_S
        while (said := re.search(ready, log.read_text("utf-8", "replace"))) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        yield process.pid, said
    finally:
        # Asked to, a worker ends its executors with it.
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[int]]]:
    """A master's URL and the process ids of its workers, of two cores each."""
    directory = tmp_path_factory.mktemp("cluster")
    packages, ports = "org.apache.spark.deploy", ("--port", "0", "--webui-port", "0")
    with contextlib.ExitStack() as stack:
        master = (f"{packages}.master.Master", "--host", "127.0.0.1", *ports)
        _, said = stack.enter_context(
            daemon(directory, "master", *master, ready=r"Starting Spark master at (spark://\S+)")
        )
        workers = []
        for host in ("127.0.0.2", "127.0.0.3"):
            worker = (f"{packages}.worker.Worker", "--host", host, *ports, "--cores", "2", "--memory", "1g")
            pid, _ = stack.enter_context(
                daemon(directory, host, *worker, said[1], ready="Successfully registered with master")
            )
            workers.append(pid)
        yield said[1], workers


@pytest.fixture(scope="module")
def found(
    cluster: tuple[str, list[int]],
    load_script: Callable[[str], ModuleType],
    tmp_path_factory: pytest.TempPathFactory,
    log_lines: list[str],
) -> dict[str, Any]:
    """Run all cases in one driver, which checks what comes out; return what else was seen."""
    directory = tmp_path_factory.mktemp("topologies")
    script = load_script("cluster_topologies")
    master, workers = cluster
    config = script.ClusterJob(str(directory), master, workers, log_lines[:2_000]).save()
    log = directory / "log"
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, script.__file__, config], stdout=output, stderr=output, timeout=500, check=False
        )
    assert done.returncode == 0, log.read_text("utf-8", "replace")[-8_000:]
    result: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return result


def test_slots_on_both_workers(found: Any, cluster: tuple[str, list[int]]) -> None:
    clean = found["clean"]
    assert {worker for (worker,) in clean["places"]} == set(cluster[1])
    assert clean["restarts"] == 0, clean["last_failure"]


def test_the_vertex_is_on_the_drivers_address(found: Any) -> None:
    """With TLS, unless the machine has no address but loopback."""
    driver, address = found["clean"]["driver"], found["clean"]["address"]
    loopback = driver.startswith("127.") or driver == "localhost"
    assert address.startswith(f"grpc://{driver}" if loopback else f"grpc+tls://{driver}")


@pytest.mark.parametrize("case", ["executor", "worker"])
def test_what_is_killed_loses_nothing(found: Any, case: str) -> None:
    """The driver has compared what came out with the recount."""
    result = found[case]
    assert len(result["killed"]) == 1
    assert result["restarts"] >= 1
    assert result["lost_s"] < 60


def test_speculation_is_refused(found: Any) -> None:
    assert found["speculation"].startswith("spark.speculation is on")
