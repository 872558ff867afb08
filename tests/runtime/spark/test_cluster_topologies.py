"""Topologies on a standalone cluster with TLS: slots on both workers, executors that are lost, come and go."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, pkcs12

pytestmark = [pytest.mark.spark, pytest.mark.faults]


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, start_cluster: Any, spark_tls: dict[str, str]
) -> Iterator[tuple[str, list[int]]]:
    """A master's URL and its workers' process ids."""
    with start_cluster(tmp_path_factory.mktemp("cluster"), 2, spark_tls) as started:
        yield started


@pytest.fixture(scope="module")
def found(
    cluster: tuple[str, list[int]],
    load_script: Callable[[str], ModuleType],
    tmp_path_factory: pytest.TempPathFactory,
    real_lines: list[str],
    spark_tls: dict[str, str],
) -> dict[str, Any]:
    """Run all cases in one driver, which checks what comes out; return what else was seen."""
    directory = tmp_path_factory.mktemp("topologies")
    script = load_script("cluster_topologies")
    master, workers = cluster
    config = script.ClusterJob(str(directory), master, workers, real_lines[:2_000], spark_tls).save()
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


def test_state_is_exact_though_executors_are_killed_and_decommissioned(
    found: Any, cluster: tuple[str, list[int]]
) -> None:
    """Barrier mode, with dynamic allocation; the driver has looked for lost, doubled and miscounted rows."""
    barriers = found["barriers"]
    assert {worker for (worker,) in barriers["places"]} == set(cluster[1])
    before, behind_kill, behind_decommissioning = barriers["restarts"]
    assert before < behind_kill < behind_decommissioning


def test_a_decommissioned_executor_takes_nothing_with_it(found: Any) -> None:
    """Acker mode, with dynamic allocation; the driver has compared what came out with the recount."""
    assert found["decommissioned"]["restarts"] >= 1


def test_the_cluster_speaks_tls_only(cluster: tuple[str, list[int]], spark_tls: dict[str, str]) -> None:
    """Its master shows the certificate that was made for it."""
    store = Path(spark_tls["spark.ssl.keyStore"]).read_bytes()
    known = pkcs12.load_pkcs12(store, spark_tls["spark.ssl.keyStorePassword"].encode()).cert
    master = urlsplit(cluster[0])
    shown = ssl.get_server_certificate((str(master.hostname), int(master.port or 0)))
    assert known is not None
    assert ssl.PEM_cert_to_DER_cert(shown) == known.certificate.public_bytes(Encoding.DER)


def test_speculation_is_refused(found: Any) -> None:
    assert found["speculation"].startswith("spark.speculation is on")
