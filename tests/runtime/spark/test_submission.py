"""Slots as Spark jobs: players instead of tasks, real processes, real control streams, real kills."""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.common.rules.restart import ExponentialDelay, NoRestart
from ftlayer.config import TopologyOptions
from ftlayer.errors import JobError, JobStartError, SlotLostError
from ftlayer.records.partitioning import Forward
from ftlayer.runtime.acker_mode.driver.rules import driver_half as suspicion
from ftlayer.runtime.acker_mode.driver.rules.driver_half import AckerDriver
from ftlayer.runtime.driver.control_server import ControlServer
from ftlayer.runtime.driver.job import Job
from ftlayer.runtime.driver.job_thread import JobParts, JobThread
from ftlayer.runtime.driver.planners import Planners
from ftlayer.runtime.driver.rules.events import JobState
from ftlayer.runtime.driver.rules.job_rules import OpenMode
from ftlayer.runtime.driver.session import (
    SlotRunner,
    SlotSubmitter,
    check_task_slots,
    pickled_order,
    task_slots,
)
from ftlayer.runtime.environment import UntrackedDriver, open_untracked
from ftlayer.runtime.protocol.messages import SlotOrder
from ftlayer.runtime.slot.rules.mode import UntrackedSlotFactory
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import FunctionSink, IterableSource, Sink, Source
from ftlayer.transport.address import Address
from ftlayer.transport.flight_connection import Endpoint
from ftlayer.vertex.calls import StreamStatus

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("id", pa.int64())])
WAIT_S = 600


def a_graph(slots: int, tracked: bool) -> JobGraph:
    source = Source("numbers", IterableSource((range(3).__iter__,)), SCHEMA)
    sink = Sink("out", FunctionSink(print), SCHEMA)
    vertices = (JobVertex("numbers", (source,), slots), JobVertex("out", (sink,), slots))
    return JobGraph("played", vertices, (JobEdge(0, "numbers", "out", 0, Forward(), SCHEMA),), tracked)


def a_player(fault: str = "") -> Callable[[Any], None]:
    """What runs in place of a slot: it does what it is told; nested, so that it travels by value."""

    def play(order: Any) -> None:
        import os
        import queue
        import time
        import uuid

        from ftlayer.runtime.protocol.messages import (
            Cancel,
            Deploy,
            DropPeers,
            EndReplays,
            Heartbeat,
            Hello,
            PeersDropped,
            Probe,
            SlotEnded,
            SlotFailed,
            StopSources,
            TasksStarted,
        )
        from ftlayer.runtime.slot.main import ControlClient

        if fault == "raises":
            raise OSError("no such device")
        instance = uuid.uuid4().hex
        told: queue.Queue[Any] = queue.Queue()
        client = ControlClient(order.coordinator, job=order.job, slot=order.slot, instance=instance)
        client.start(told.put, told.put)
        if fault == "fails":
            client.send(SlotFailed("the port is taken", "out", "Traceback: here"))
            client.close()
            return
        client.send(Hello(order.slot, instance, "grpc://127.0.0.1:1", "host", os.getpid()))
        if fault == "deaf":
            time.sleep(600)
        quiet = False
        while True:
            match told.get():
                case str() | Cancel():
                    break
                case Deploy():
                    client.send(TasksStarted())
                case DropPeers(epoch, _):
                    client.send(PeersDropped(epoch))
                case StopSources():
                    quiet = True
                    client.send(Heartbeat(0, 1, True))
                case Probe(number):
                    client.send(Heartbeat(number, 1, quiet, {"records_in": 7}))
                case EndReplays():
                    client.send(SlotEnded({"records_in": 7, "records_in/numbers": 7}))
                    break
        client.close()

    return play


def fake_vertex() -> Any:
    """Answers at once, and has nothing."""
    return SimpleNamespace(
        streams=(),
        client=SimpleNamespace(call=lambda call, deadline_ms: StreamStatus(0, 0, 0, 0, -1)),
        recall=lambda done, failed: done(0),
        status=lambda answer, failed: answer(StreamStatus(0, 0, 0, 0, -1)),
        close=lambda: None,
    )


@pytest.fixture
def start(spark: Any) -> Any:
    jobs = []

    def start(play: Callable[[Any], None], *, slots: int = 2, tracked: bool = True, **changes: Any) -> Job:
        graph = a_graph(slots, tracked)
        thread = JobThread(f"played-{secrets.token_hex(4)}")
        options = changes.get("options", TopologyOptions())
        restart = changes.get("restart", ExponentialDelay("50ms", "1s", "1m"))
        token = secrets.token_urlsafe()
        server = ControlServer(
            listen=Address("127.0.0.1"),
            token=token,
            job=thread.job,
            slots=slots,
            certificate=None,
            on_message=thread.slot_said,
            on_lost=thread.slot_lost,
        )
        endpoint = Endpoint(str(server.address), token)
        order = SlotOrder(
            thread.job,
            0,
            endpoint,
            graph,
            options,
            UntrackedSlotFactory(),
            "127.0.0.1",
            None,
            None,
            b"k" * 32,
        )
        runner = SlotRunner(pickled_order(order), play)
        submitter = SlotSubmitter(
            spark, thread.job, graph.name, runner, thread.spark_job_ended, thread.session_over
        )
        planners = Planners(graph, open_untracked, order.key, send=thread.send_splits, failed=thread.broken)
        mode: OpenMode = partial(AckerDriver, fake_vertex()) if tracked else UntrackedDriver
        thread.start(JobParts(graph, options, restart, server, submitter, planners, mode, lambda: None))
        job = Job(thread)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        assert job.cancel(), job.status()


def until(job: Job, holds: Callable[[Any], bool]) -> Any:
    """Return the first status that is so."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        status = job.status()
        if holds(status):
            return status
        assert not status.state.is_final, status
        job.over(0.02)
    raise AssertionError(job.status())


def test_a_killed_slot_is_submitted_again(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # Losses in a row have a record looked for, and players have none.
    monkeypatch.setattr(suspicion, "SOON_MS", 0)
    job = start(a_player())
    before = until(job, lambda status: status.state is JobState.RUNNING)
    killed, other = before.slots
    assert len({os.getpid(), killed.pid, other.pid}) == 3
    for _ in range(2):
        os.kill(killed.pid, signal.SIGKILL)
        victim = killed.instance
        now = until(
            job, lambda it, victim=victim: it.state is JobState.RUNNING and it.slots[0].instance != victim
        )
        killed = now.slots[0]
    assert now.slots[1].instance == other.instance
    assert (now.epoch, now.restarts, now.slots[0].restarts) == (3, 2, 2)
    assert job.drain(WAIT_S)
    assert job.exception() is None
    last = job.status()
    assert last.state is JobState.ENDED
    assert last.counters["records_in"] == 14
    assert last.chains[0].records_in == 14
    assert "ended" in last.line()


def test_untracked_a_killed_slot_ends_the_job(start: Any) -> None:
    job = start(a_player(), tracked=False)
    status = until(job, lambda status: status.state is JobState.RUNNING)
    os.kill(status.slots[1].pid, signal.SIGKILL)
    with pytest.raises(SlotLostError, match=r"slot 1 \(process \d+ on \S+\): .*With FTStatus\.OFF"):
        job.wait(WAIT_S)
    assert job.state is JobState.FAILED


def test_cancelled_before_anything_is_up(start: Any) -> None:
    job = start(a_player())
    assert job.cancel()
    assert job.state is JobState.CANCELLED
    assert job.wait()


@pytest.mark.parametrize(
    ("fault", "words"), [("raises", "OSError: no such device"), ("fails", "in out: the port is taken")]
)
def test_a_slot_that_cannot_start(start: Any, fault: str, words: str) -> None:
    job = start(a_player(fault), slots=1)
    with pytest.raises(JobStartError, match=words):
        job.wait(WAIT_S)


def test_a_slot_that_hears_nothing_is_ended_by_spark(start: Any) -> None:
    options = TopologyOptions(heartbeat_ms=100, heartbeat_timeout_ms=1_000)
    job = start(a_player("deaf"), slots=1, options=options, restart=NoRestart())
    with pytest.raises(JobError, match=r"(?s)given up.*not heard of for 1000 ms"):
        job.wait(WAIT_S)


def test_task_slots_are_counted(spark: Any) -> None:
    assert task_slots(spark) == 2
    check_task_slots(spark, 2, "wide")
    with pytest.raises(
        JobStartError, match=r"needs 3 task slots .* Spark has 2: start Spark with master local\[3\]"
    ):
        check_task_slots(spark, 3, "wide")
