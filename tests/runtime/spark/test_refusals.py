"""What cannot run says why, in one error, before anything runs or within seconds."""

from __future__ import annotations

import re
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import pytest

from ftlayer import CheckpointConfig, DeadLetter, FailurePolicy, JobState, StreamEnvironment
from ftlayer.errors import ConfigError, FunctionLoadError, InvalidTopologyError, JobStartError, SourceRowError
from ftlayer.runtime import environment as environment_module
from ftlayer.runtime.driver.job_thread import JobThread
from ftlayer.runtime.protocol.messages import Hello

pytestmark = pytest.mark.spark


def numbers(env: Any) -> Any:
    return env.source(range(100), "id bigint").key_by("id").map(lambda it: it, "id bigint", uid="same")


def test_too_few_task_slots(environment: Any) -> None:
    env = environment(name="wide", parallelism=3)
    numbers(env).sink(print)
    with pytest.raises(
        JobStartError, match=r"needs 3 task slots .* Spark has 2: start Spark with master local"
    ):
        env.execute_async()


def test_too_few_task_slots_beside_another_topology(environment: Any, logs_kit: Any, tmp_path: Any) -> None:
    env = environment(name="first", parallelism=1)
    env.source(logs_kit.Tail(tmp_path), logs_kit.LINE).sink(print)
    job = env.execute_async()
    beside = environment(name="second")
    numbers(beside).sink(print)
    with pytest.raises(JobStartError, match=r"Spark has 2, of which 'first' holds 1: .*local\[3\]"):
        beside.execute_async()
    same = environment(name="first", parallelism=1)
    numbers(same).sink(print)
    with pytest.raises(ConfigError, match="topology 'first' runs already"):
        same.execute_async()
    assert job.drain(600)


def test_other_jobs_hold_the_task_slots(environment: Any, spark: Any) -> None:
    """They are not counted, since they end; one that does not is found out by the start's timeout."""
    from ftlayer import TopologyOptions

    held = threading.Thread(target=_hold, args=(spark,), daemon=True)
    held.start()
    while len(spark.sparkContext.statusTracker().getActiveJobsIds()) == 0:
        held.join(0.01)
    try:
        env = environment(options=TopologyOptions(start_timeout_ms=4_000))
        numbers(env).sink(print)
        with pytest.raises(
            JobStartError,
            match=r"w(as|ere) not up within 4000 ms .*Spark has not started the task.*end the other Spark jobs",
        ):
            env.execute_async().wait(600)
    finally:
        spark.sparkContext.cancelJobsWithTag("held")
        held.join(600)


def _hold(spark: Any) -> None:
    import contextlib

    def sleep(batches: Any) -> Any:
        time.sleep(600)
        yield from batches

    spark.sparkContext.addJobTag("held")
    spark.sparkContext.setInterruptOnCancel(True)
    with contextlib.suppress(Exception):  # that it was cancelled is what ends it
        spark.range(0, 1, 1, 1).mapInArrow(sleep, "id bigint").collect()


def test_a_function_that_cannot_be_sent(environment: Any) -> None:
    lock = threading.Lock()
    env = environment()
    numbers(env).filter(lambda it: not lock.locked(), uid="guarded").sink(print)
    with pytest.raises(InvalidTopologyError, match=r"'guarded' .*cannot be sent to the slots"):
        env.execute_async()


def test_a_driver_that_slots_do_not_reach(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = environment_module.Endpoint
    # The discard port has no listener.
    monkeypatch.setattr(
        environment_module, "Endpoint", lambda address, *more: endpoint("grpc://127.0.0.1:9", *more)
    )
    env = environment()
    numbers(env).sink(print)
    job = env.execute_async()
    with pytest.raises(JobStartError, match="a slot cannot start"):
        job.wait(600)
    assert job.state is JobState.FAILED


def test_a_slot_that_others_do_not_reach(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where an executor knows itself by an address that means nothing to others, on other machines."""
    said = JobThread.slot_said

    def wrong_address(job: JobThread, slot: int, instance: str, message: Any) -> None:
        if isinstance(message, Hello) and slot == 1:
            message = replace(message, address="grpc://127.0.0.1:9", socket="")
        said(job, slot, instance, message)

    monkeypatch.setattr(JobThread, "slot_said", wrong_address)
    env = environment()
    numbers(env).sink(print)
    job = env.execute_async()
    with pytest.raises(JobStartError, match=r"slot 1 at grpc://127.0.0.1:9 cannot be reached"):
        job.wait(600)


def test_a_source_that_gives_what_does_not_fit_its_schema(
    spark: Any, environment: Any, connect: Any, tmp_path: Path
) -> None:
    """A dead letter where there are some, with the row as it came; else an error that says where it is."""
    said = r"row 2 of split '.*': source 'numbers' gave 'three'.*\(id int64\)"
    letters: SimpleQueue[DeadLetter] = SimpleQueue()
    layer = connect(on_dead=letters.put)
    for replay in ("store", "source"):
        env = environment(layer, name=f"letter-{replay}")
        numbers = env.source([1, 2, "three", 4], "id bigint", uid="numbers", replay=replay)
        numbers.map(lambda it: it).sink(print)
        env.execute_async().wait(600)
        letter = letters.get(timeout=600)
        assert letter.record == {"row": "'three'"}
        assert re.search(said, letter.reason)

    config = CheckpointConfig(
        interval="200ms", directory=str(tmp_path / "letters"), failures=FailurePolicy(max_attempts=1)
    )
    layer.watch_dead("letter-barriers/numbers")
    env = StreamEnvironment(spark, name="letter-barriers", checkpointing=config, board=layer)
    env.source([1, 2, "three", 4], "id bigint", uid="numbers").map(lambda it: it).sink(print)
    env.execute_async().wait(600)
    letter = letters.get(timeout=600)
    assert (letter.stream, letter.record) == ("letter-barriers/numbers", {"row": "'three'"})
    assert re.search(said, letter.reason)

    config = CheckpointConfig(interval="200ms", directory=str(tmp_path / "checkpoints"))
    env = StreamEnvironment(spark, name="misfit", checkpointing=config)
    env.source([1, 2, "three", 4], "id bigint", uid="numbers").map(lambda it: it).sink(print)
    job = env.execute_async()
    with pytest.raises(SourceRowError, match=said):
        job.wait(600)
    assert job.state is JobState.FAILED
    assert job.status().restarts == 0


def test_a_module_that_slots_lack(environment: Any) -> None:
    module = ModuleType("only_in_the_driver")
    exec("def same(record):\n    return record\n", vars(module))
    sys.modules[module.__name__] = module
    try:
        env = environment(name="unloadable")
        env.source([1, 2], "id bigint", uid="numbers").map(module.same).sink(print)
        job = env.execute_async()
        with pytest.raises(
            FunctionLoadError, match=r" \(map\(same\)\): .*No module named 'only_in_the_driver'.*addArtifact"
        ):
            job.wait(600)
    finally:
        del sys.modules[module.__name__]
    assert job.status().restarts == 0
