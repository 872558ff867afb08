"""Topologies on a standalone cluster: ``python cluster_topologies.py CONFIG.json``; see test_cluster_topologies.py.

Each case is the topology of ``log_job.py`` over a directory of its own, checked against the recount; what was seen on
the way is in ``result.json``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

CASES = ("clean", "executor", "worker")
# The last case leaves one worker of two cores.
SLOTS = {"clean": 3, "executor": 3, "worker": 2}


@dataclass
class ClusterJob:
    """Where the cluster and the lines are; ``workers`` are the process ids of its workers."""

    directory: str
    master: str
    workers: list[int]
    lines: list[str]

    def save(self) -> Path:
        file = Path(self.directory) / "job.json"
        file.write_text(json.dumps(asdict(self)))
        return file


def children(parent: int) -> list[int]:
    """Return the process ids of a process's children."""
    tasks = Path(f"/proc/{parent}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def descends_from(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def run(kit: ModuleType, spark: Any, layer: Any, job: ClusterJob, case: str) -> dict[str, Any]:
    """Run a case; return what was seen."""
    from ftlayer import StreamEnvironment

    directory = Path(job.directory) / case
    directory.mkdir()
    logs = kit.GrowingLogs(directory, job.lines)
    logs.grow(300)
    env = StreamEnvironment(spark, layer, name=case, parallelism=SLOTS[case])
    kit.build(env, directory)
    running = env.execute_async()
    ledger = kit.Ledger(directory, layer, case)

    def grow() -> None:
        logs.grow(10)

    def until_more_comes() -> None:
        before = len(ledger.sink())
        kit.until(running, lambda: len(ledger.sink()) > before + 100, grow)

    until_more_comes()
    slots = running.status().slots
    places = [[worker for worker in job.workers if descends_from(slot.pid, worker)] for slot in slots]
    killed = []
    lost_s = 0.0
    if case != "clean":
        worker = places[0][0]
        executors = children(worker)
        killed = [worker] if case == "worker" else executors
        began = time.monotonic()
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        kit.until(running, lambda: running.status().slots[0].instance not in ("", slots[0].instance), grow)
        until_more_comes()
        lost_s = time.monotonic() - began
    kit.until(running, ledger.all_there)
    assert running.drain(kit.WAIT_S)
    ledger.check(exact=case == "clean")
    status = running.status()
    return {
        "places": places,
        "killed": killed,
        "lost_s": lost_s,
        "restarts": status.restarts,
        "last_failure": status.last_failure,
        "address": layer.address,
        "driver": spark.conf.get("spark.driver.host"),
    }


def refuse_speculation(spark: Any, layer: Any) -> str:
    """Ask for a topology in a session with speculation; return what it says."""
    from ftlayer import StreamEnvironment
    from ftlayer.errors import ConfigError

    env = StreamEnvironment(spark, layer, name="speculative")
    env.source([1], "id bigint").sink(print)
    try:
        env.execute_async()
    except ConfigError as error:
        return str(error)
    return ""


def main(job: ClusterJob) -> None:
    from pyspark import cloudpickle

    from ftlayer import FTLayer

    spec = importlib.util.spec_from_file_location("log_job", Path(__file__).with_name("log_job.py"))
    assert spec is not None
    assert spec.loader is not None
    kit = importlib.util.module_from_spec(spec)
    sys.modules["log_job"] = kit
    spec.loader.exec_module(kit)
    cloudpickle.register_pickle_by_value(kit)

    spark = session(job)
    layer = FTLayer.embedded(
        Path(job.directory) / "store", max_attempts=kit.MAX_ATTEMPTS, backoff="20ms", jitter=0
    )
    result: dict[str, Any] = {case: run(kit, spark, layer, job, case) for case in CASES}
    spark.stop()
    # Of a session that is to be refused, nothing but its settings counts.
    spark = session(job, master="local[1]", **{"spark.speculation": "true"})
    result["speculation"] = refuse_speculation(spark, layer)
    layer.close()
    spark.stop()
    (Path(job.directory) / "result.json").write_text(json.dumps(result))


def session(job: ClusterJob, master: str = "", **more: str) -> Any:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    java = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    settings = {
        "spark.ui.enabled": "false",
        "spark.log.level": "WARN",
        "spark.driver.extraJavaOptions": java,
        "spark.executor.extraJavaOptions": java,
        "spark.executor.memory": "512m",
        "spark.sql.warehouse.dir": f"{job.directory}/warehouse",
        **more,
    }
    builder = SparkSession.builder.master(master or job.master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


if __name__ == "__main__":
    main(ClusterJob(**json.loads(Path(sys.argv[1]).read_text())))
