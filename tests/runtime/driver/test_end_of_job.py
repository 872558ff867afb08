"""The end of a job that goes wrong itself: all callers that wait hear of it."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from ftlayer.common.rules.restart import FixedDelay, NoRestart
from ftlayer.config import TopologyOptions
from ftlayer.errors import JobError, SlotLostError
from ftlayer.runtime.acker_mode.driver.rules.driver_half import AckerDriver, AckerJob
from ftlayer.runtime.driver.job import Job
from ftlayer.runtime.driver.job_thread import JobParts, JobReport, JobThread
from ftlayer.runtime.driver.rules.events import Crew, JobInstruction, RecallDone, RecallStreams
from ftlayer.runtime.driver.rules.job_core import JobCore
from ftlayer.runtime.driver.rules.job_rules import JobContext
from ftlayer.runtime.protocol.messages import Hello, SlotFailed, TasksStarted
from ftlayer.topology.job_graph import JobGraph, JobVertex
from ftlayer.topology.operators import IterableSource, Source
from ftlayer.vertex.calls import StreamStatus

WAIT_S = 600


def wait_until(holds: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def parts(**changes: Any) -> Any:
    source = Source("numbers", IterableSource((range(3).__iter__,)), pa.schema([("id", pa.int64())]))
    graph = JobGraph("ending", (JobVertex("numbers", (source,), 1),), (), False)
    made = {
        "server": Mock(),
        "submitter": Mock(),
        "planners": Mock(lags=dict, away=dict),
        "mode": Mock(),
        "on_over": Mock(),
    }
    return JobParts(graph, TopologyOptions(), changes.pop("restart", NoRestart()), **made | changes)


@pytest.mark.parametrize("part", ["planners", "server", "vertex"])
def test_a_part_that_cannot_be_closed_leaves_no_one_waiting_and_nothing_open(part: str) -> None:
    broken = Mock()
    broken.close.side_effect = OSError("the disk is gone")
    # What ends the job: its planners do not come up.
    broken.start.side_effect = ValueError("no")
    broken.client.call.return_value = StreamStatus(0, 0, 0, 0, -1)
    planners = broken if part == "planners" else Mock(start=broken.start)
    vertex = Mock(client=broken.client)
    server = broken if part == "server" else Mock()
    vertex = broken if part == "vertex" else vertex
    made = parts(planners=planners, server=server, mode=partial(AckerDriver, vertex))
    thread = JobThread("ending-1")
    job = Job(thread)
    thread.start(made)
    assert job.over(WAIT_S)
    with pytest.raises(JobError, match=r"at the job's end.*the disk is gone"):
        job.wait(WAIT_S)
    for each in (made.planners, made.server, vertex):
        each.close.assert_called_once_with()
    made.on_over.assert_called_once_with()


def test_losses_restarts_and_the_end_are_logged_once_each(caplog: pytest.LogCaptureFixture) -> None:
    def mode(context: JobContext) -> Any:
        def carry_out(instruction: JobInstruction) -> None:
            if isinstance(instruction, RecallStreams):
                context.happened(RecallDone(instruction.number, 0))

        rules = AckerJob(context.crew, run=context.run, restart=context.restart, timeout_ms=1_000)
        return Mock(
            rules=rules,
            carry_out=carry_out,
            vertex_status=lambda: None,
            when_done=lambda tell: tell(),
            stopped_with=None,
            checkpoint_counts=None,
            breakers={},
        )

    caplog.set_level(logging.INFO, "ftlayer.runtime.driver")
    thread = JobThread("logged-1")
    thread.start(parts(mode=mode, restart=FixedDelay(1, "20ms")))
    for attempt, instance in enumerate(("0a", "0b"), 1):
        thread.slot_said(0, instance, Hello(0, instance, f"grpc://{instance}", "host", 1))
        wait_until(lambda: thread.core.slots[0].deployed)
        thread.slot_said(0, instance, TasksStarted())
        assert thread.wait_until_up(WAIT_S)
        thread.slot_said(0, instance, SlotFailed("OSError: disk full", "numbers", "a traceback"))
        thread.spark_job_ended(0, attempt, None)
        wait_until(lambda: not thread.state.is_up)
    assert thread.wait_until_over(WAIT_S)
    assert isinstance(thread.error, SlotLostError)
    why = "slot 0: it failed in numbers: OSError: disk full"
    lost = [
        ("WARNING", f"topology 'ending': {why}"),
        ("INFO", f"topology 'ending': running → recovering: {why}"),
    ]
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("INFO", "topology 'ending': starting → initializing"),
        ("INFO", "topology 'ending': initializing → running"),
        *lost,
        ("WARNING", "topology 'ending': slot 0 is started again (1) in 0.02 s, 1 of 1"),
        ("INFO", "topology 'ending': recovering → running: runs again, restart 1"),
        lost[0],
        ("ERROR", caplog.messages[-2]),
        ("INFO", caplog.messages[-1]),
    ]
    assert re.fullmatch(
        rf"topology 'ending': running → failed: .* given up after 1 restart: {why}", caplog.messages[-2]
    )
    end = r"topology 'ending': failed after .* s · 0 in · 0 out · .* · 1 restart · 0 dead letters"
    assert re.fullmatch(end, caplog.messages[-1])


def test_two_threads_that_ask_for_the_status_count_nothing_twice() -> None:
    """An older answer behind a newer one looks as if the vertex had been started again, and counted from 0."""
    both_ask = threading.Barrier(2)
    newer_is_counted = threading.Event()
    asked = count()

    def call(*_: Any, **__: Any) -> StreamStatus:
        number = next(asked)
        if number in (1, 2):
            # Where one waits for the other they never meet here.
            with suppress(threading.BrokenBarrierError):
                both_ask.wait(0.5)
                if number == 1:
                    assert newer_is_counted.wait(WAIT_S)
        return StreamStatus(0, 0, 0, 0, -1, done=(0, 5, 8)[min(number, 2)])

    def look() -> None:
        if report.status().counters["done"] == 8:
            newer_is_counted.set()

    made = parts()
    crew = Crew(1, made.options.start_timeout_ms)
    context = JobContext(
        "asked-1", made.graph, made.restart, crew, happened=Mock(), later=Mock(), tell=Mock()
    )
    mode = AckerDriver(Mock(client=Mock(call=call)), context)
    core = JobCore(crew, made.options, mode.rules)
    report = JobReport("asked-1", made.graph, core, mode, threading.Lock(), Mock(lags=dict, away=dict))
    lookers = [threading.Thread(target=look) for _ in range(2)]
    for looker in lookers:
        looker.start()
    for looker in lookers:
        looker.join(WAIT_S)
    assert report.status().counters["done"] == 8
