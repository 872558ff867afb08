"""On a standalone cluster of a master and two workers: TLS, speculation, executors that are killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1_500)]

START_S = 120.0
LINES, FILES = 150, 3


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
    """A master's URL and its workers' process ids.

    The workers have a host each: Spark speculates on another host only.
    """
    directory = tmp_path_factory.mktemp("cluster")
    packages = "org.apache.spark.deploy"
    ports = ("--port", "0", "--webui-port", "0")
    with contextlib.ExitStack() as stack:
        _, said = stack.enter_context(
            daemon(
                directory,
                "master",
                f"{packages}.master.Master",
                *("--host", "127.0.0.1", *ports),
                ready=r"Starting Spark master at (spark://\S+)",
            )
        )
        workers = []
        for host in ("127.0.0.2", "127.0.0.3"):
            pid, _ = stack.enter_context(
                daemon(
                    directory,
                    host,
                    f"{packages}.worker.Worker",
                    *("--host", host, *ports, "--cores", "1", "--memory", "1g", said[1]),
                    ready="Successfully registered with master",
                )
            )
            workers.append(pid)
        yield said[1], workers


@pytest.fixture(scope="module")
def cluster_script(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("cluster_job")


@pytest.fixture(scope="module")
def results(
    cluster: tuple[str, list[int]],
    cluster_script: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
    log_lines: list[str],
    write_files: Callable[[list[str], Path, int], None],
) -> tuple[dict[str, Any], list[str]]:
    """Run all cases in one driver; return what each left, and their lines."""
    directory = tmp_path_factory.mktemp("job")
    lines = [f"{number} {line}" for number, line in enumerate(log_lines[:LINES])]
    lines[50] = "50 slow"
    for case in cluster_script.CASES:
        write_files(lines, directory / case, FILES)
    master, workers = cluster
    config = directory / "job.json"
    config.write_text(json.dumps({"directory": str(directory), "master": master, "workers": workers}))
    log = directory / "log"
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, cluster_script.__file__, config],
            stdout=output,
            stderr=output,
            timeout=1_200,
            check=False,
        )
    assert done.returncode == 0, log.read_text("utf-8", "replace")[-6_000:]
    found = {case: json.loads((directory / f"{case}.json").read_text()) for case in cluster_script.CASES}
    found["speculated"] = (directory / "speculated").exists()
    return found, lines


def check(result: dict[str, Any], lines: list[str], rows: list[tuple[str, int, str]]) -> None:
    """Each line is there twice, and both of one call of the function."""
    assert Counter((line, copy) for line, copy, _ in rows) == Counter(
        (line, copy) for line in lines for copy in (0, 1)
    )
    assert len({nonce for _, _, nonce in rows}) == len(lines)
    status = {name: count for name, count in result["status"].items() if name != "next_due_in_ms"}
    assert status == dict.fromkeys(status, 0)


def test_the_vertex_is_on_the_drivers_address(results: Any) -> None:
    """With TLS, unless the machine has no address but loopback."""
    found, _ = results
    driver, address = found["speculation"]["driver"], found["speculation"]["address"]
    loopback = driver.startswith("127.") or driver == "localhost"
    assert address.startswith(f"grpc://{driver}" if loopback else f"grpc+tls://{driver}")


def test_speculation(results: Any, cluster_script: ModuleType) -> None:
    found, lines = results
    speculation = found["speculation"]
    assert found["speculated"], "no speculative task has run"
    check(speculation, lines, list(cluster_script.rows_of(speculation["calls"])))
    assert {state for _, state, _ in speculation["states"]} == {"new"}, speculation["last_failure"]
    assert len({batch for batch, _ in speculation["calls"]}) == len(speculation["calls"])


def test_executors_killed_between_verdict_and_sink(results: Any, cluster_script: ModuleType) -> None:
    """The sink gets what was sealed, or the batch runs again from its seal; never a mixture of two runs."""
    found, lines = results
    lost = found["lost"]
    assert [bool(killed) for killed in lost["killed"]] == [True, True]
    check(lost, lines, list(cluster_script.rows_of(lost["calls"])))
    assert "sealed" in {state for _, state, _ in lost["states"]}
