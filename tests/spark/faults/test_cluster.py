"""On a standalone cluster with authentication: speculation, executors that are lost, and that come and go."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.faults, pytest.mark.timeout(1_500)]

LINES, FILES = 200, 4
SLOW = 10
"""A line of the first file, whose task is slow in its first attempt."""


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, start_cluster: Any, spark_authentication: dict[str, str]
) -> Iterator[tuple[str, list[int]]]:
    """A master's URL and its workers' process ids."""
    with start_cluster(tmp_path_factory.mktemp("cluster"), 1, spark_authentication) as started:
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
    spark_authentication: dict[str, str],
) -> tuple[dict[str, Any], list[str]]:
    """Run the query in a driver; return what it left, and its lines.

    A task of batch 0 is slow, an executor of each worker is killed in batches 1 and 2, and in batch 3 one is
    decommissioned. Executors that Spark's dynamic allocation finds idle go, too.
    """
    directory = tmp_path_factory.mktemp("job")
    lines = [f"{number} {line}" for number, line in enumerate(log_lines[:LINES])]
    lines[SLOW] = f"{SLOW} slow"
    write_files(lines, directory / "lines", FILES)
    master, workers = cluster
    config = directory / "job.json"
    job = cluster_script.ClusterJob(str(directory), master, workers, spark_authentication)
    config.write_text(json.dumps(asdict(job)))
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
    found: dict[str, Any] = json.loads((directory / "result.json").read_text())
    return found, lines


def test_the_vertex_is_on_the_drivers_address(results: Any) -> None:
    """With TLS, unless the machine has no address but loopback."""
    found, _ = results
    loopback = found["driver"].startswith("127.") or found["driver"] == "localhost"
    assert found["address"].startswith(
        f"grpc://{found['driver']}" if loopback else f"grpc+tls://{found['driver']}"
    )


def test_each_line_is_there_twice_and_both_of_one_call_of_the_function(
    results: Any, cluster_script: ModuleType
) -> None:
    found, lines = results
    rows = list(cluster_script.rows_of(found["calls"]))
    assert Counter((line, copy) for line, copy, _ in rows) == Counter(
        (line, copy) for line in lines for copy in (0, 1)
    )
    assert len({nonce for _, _, nonce in rows}) == len(lines)
    status = {name: count for name, count in found["status"].items() if name != "next_due_in_ms"}
    assert status == dict.fromkeys(status, 0)


def test_speculation(results: Any) -> None:
    """Two attempts of a task are one to the batch, which runs once."""
    found, _ = results
    assert found["speculated"], "no speculative task has run"
    assert [state for batch, state, _ in found["states"] if batch == 0] == ["new"], found["last_failure"]
    assert [batch for batch, _ in found["calls"]].count(0) == 1


def test_executors_lost_between_verdict_and_sink(results: Any) -> None:
    """The sink gets what was sealed, or the batch runs again from its seal; never a mixture of two runs.

    So it is with the decommissioned one, whose blocks Spark moves only where another executor is there.
    """
    found, _ = results
    assert [bool(lost) for lost in found["lost"]] == [True, True, True]
    assert "sealed" in {state for _, state, _ in found["states"]}
