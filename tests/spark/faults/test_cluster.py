"""On a standalone cluster of a master and two workers: TLS, speculation, executors that are killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.timeout(1_500)]

LINES, FILES = 100, 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, start_cluster: Any) -> Iterator[tuple[str, list[int]]]:
    """A master's URL and its workers' process ids."""
    with start_cluster(tmp_path_factory.mktemp("cluster"), 1) as started:
        yield started


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
