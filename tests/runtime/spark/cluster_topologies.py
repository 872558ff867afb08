"""Topologies on a standalone cluster: ``python cluster_topologies.py CONFIG.json``; see test_cluster_topologies.py.

Each case is the topology of ``log_job.py`` over a directory of its own, checked against the recount (that of barrier
mode is the one of ``barrier_job.py``); what was seen on the way is in ``result.json``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from programs import children_of, is_running

KILLS: dict[str, tuple[str, ...]] = {"clean": (), "killed": ("executor", "worker")}
"""What is killed in each case, one after another: an executor, and then a worker, which leaves one of two cores."""
SLOTS = {"clean": 3, "killed": 2}
WAIT_S = 600.0
"""What has not come about by then will not."""
ELASTIC = {
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.executorIdleTimeout": "1s",
    "spark.executor.cores": "1",
    "spark.decommission.enabled": "true",
    "spark.executor.decommission.forceKillTimeout": "2s",
}
"""Executors that come when tasks wait for them, go when they have none, and may be asked to leave."""
FIXED = {
    "spark.dynamicAllocation.enabled": "false",
    "spark.executor.cores": "2",
    "spark.decommission.enabled": "false",
}
"""An executor a worker. A JVM's later sessions begin with the settings of its first."""


@dataclass
class ClusterJob:
    """Where the cluster and the lines are; ``workers`` are process ids, ``settings`` further ones of Spark."""

    directory: str
    master: str
    workers: list[int]
    lines: list[str]
    settings: dict[str, str]

    def save(self) -> Path:
        file = Path(self.directory) / "job.json"
        file.write_text(json.dumps(asdict(self)))
        return file


def executors_there(job: ClusterJob) -> list[int]:
    return [pid for worker in job.workers for pid in children_of(worker)]


def executor_of(running: Any, job: ClusterJob, slot: int) -> int:
    """Return the process id of the executor that a slot runs in."""
    pid = running.status().slots[slot].pid
    (executor,) = (its for its in executors_there(job) if descends_from(pid, its))
    return executor


def descends_from(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def workers_of(running: Any, job: ClusterJob) -> list[list[int]]:
    """Return the workers that each slot runs on, of which there is one."""
    slots = running.status().slots
    return [[worker for worker in job.workers if descends_from(slot.pid, worker)] for slot in slots]


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
    places = workers_of(running, job)
    killed, restarts = [], []
    for victim in KILLS[case]:
        slot = running.status().slots[0]
        (worker,) = workers_of(running, job)[0]
        killed.append([worker] if victim == "worker" else children_of(worker))
        for pid in killed[-1]:
            os.kill(pid, signal.SIGKILL)
        kit.until(running, lambda: running.status().slots[0].instance not in ("", slot.instance), grow)  # noqa: B023
        until_more_comes()
        restarts.append(running.status().restarts)
    kit.until(running, ledger.all_there)
    assert running.drain(kit.WAIT_S)
    ledger.check(exact=not KILLS[case])
    status = running.status()
    return {
        "places": places,
        "killed": killed,
        "restarts": [*restarts, status.restarts],
        "last_failure": status.last_failure,
        "address": layer.address,
        "driver": spark.conf.get("spark.driver.host"),
    }


def run_elastic(kit: ModuleType, barrier_kit: ModuleType, layer: Any, job: ClusterJob) -> dict[str, Any]:
    """Run both modes in a session whose executors come and go; return what was seen."""
    spark = session(job, **ELASTIC)
    result = {"barriers": run_barriers(barrier_kit, spark, job)}
    # To Spark an executor with a slot is not idle, however long it is there; one without is.
    await_that(lambda: not executors_there(job), "idle executors stay")
    result["decommissioned"] = run_decommissioned(kit, spark, layer, job)
    spark.stop()
    return result


def run_barriers(kit: ModuleType, spark: Any, job: ClusterJob) -> dict[str, Any]:
    """Kill an executor under a topology with exact state, and decommission another; return what was seen."""
    from ftlayer import CheckpointConfig, StreamEnvironment

    directory = Path(job.directory) / "barriers"
    directory.mkdir()
    checkpointing = CheckpointConfig(interval="200ms", directory=str(directory / "checkpoints"))
    env = StreamEnvironment(spark, name="barriers", parallelism=3, checkpointing=checkpointing)
    gate = directory / "gate"
    kit.build(env, directory, sources=3, pace_s=0.05, gate=gate)
    running = env.execute_async()

    def await_checkpoints(more: int) -> None:
        wanted = running.status().checkpoints.completed + more

        def are_taken() -> bool:
            assert not running.over(0.02), "the job ended before its executors were lost"
            return bool(running.status().checkpoints.completed >= wanted)

        await_that(are_taken, running.status)

    await_checkpoints(2)
    places = workers_of(running, job)
    restarts = [running.status().restarts]
    for ask in (signal.SIGKILL, signal.SIGPWR):
        lose_executor(running, job, ask)
        await_checkpoints(1)
        restarts.append(running.status().restarts)
    gate.touch()
    running.wait()
    kit.Ledger(directory, sources=3).check()
    return {"places": places, "restarts": restarts}


def run_decommissioned(kit: ModuleType, spark: Any, layer: Any, job: ClusterJob) -> dict[str, Any]:
    """Decommission an executor under a topology in acker mode; return what was seen."""
    from ftlayer import StreamEnvironment

    directory = Path(job.directory) / "decommissioned"
    directory.mkdir()
    logs = kit.GrowingLogs(directory, job.lines)
    logs.grow(300)
    env = StreamEnvironment(spark, layer, name="decommissioned", parallelism=2)
    kit.build(env, directory)
    running = env.execute_async()
    ledger = kit.Ledger(directory, layer, "decommissioned")
    kit.until(running, ledger.sink)
    lose_executor(running, job, signal.SIGPWR)
    logs.grow(300)
    kit.until(running, ledger.all_there)
    assert running.drain(kit.WAIT_S)
    ledger.check(exact=False)
    return {"restarts": running.status().restarts}


def lose_executor(running: Any, job: ClusterJob, ask: signal.Signals) -> None:
    """Send the executor of a slot a signal; wait until it is gone and the slot runs somewhere else."""
    instance = running.status().slots[0].instance
    executor = executor_of(running, job, 0)
    os.kill(executor, ask)

    def has_moved() -> bool:
        assert not running.over(0.02), "the job ended when its executor was lost"
        return not is_running(executor) and running.status().slots[0].instance not in ("", instance)

    await_that(has_moved, running.status)


def await_that(holds: Callable[[], bool], otherwise: Any) -> None:
    """Wait until it is so; what is said otherwise may be a function."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, otherwise() if callable(otherwise) else otherwise
        time.sleep(0.02)


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


def load(name: str) -> ModuleType:
    """Load a script of this directory; executors get what is in it by value."""
    from pyspark import cloudpickle

    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def main(job: ClusterJob) -> None:
    from ftlayer import FTLayer

    kit, barrier_kit = (load(name) for name in ("log_job", "barrier_job"))
    layer = FTLayer.embedded(
        Path(job.directory) / "store", max_attempts=kit.MAX_ATTEMPTS, backoff="20ms", jitter=0
    )
    # Before the case that leaves one worker.
    result = run_elastic(kit, barrier_kit, layer, job)
    spark = session(job, **FIXED)
    result |= {case: run(kit, spark, layer, job, case) for case in KILLS}
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
    settings = {
        "spark.ui.enabled": "false",
        "spark.log.level": "WARN",
        "spark.executor.extraJavaOptions": os.environ["SPARK_DAEMON_JAVA_OPTS"],
        "spark.executor.memory": "512m",
        "spark.sql.warehouse.dir": f"{job.directory}/warehouse",
        **job.settings,
        **more,
    }
    builder = SparkSession.builder.master(master or job.master)
    for key, value in settings.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


if __name__ == "__main__":
    main(ClusterJob(**json.loads(Path(sys.argv[1]).read_text())))
