"""Two drivers of one topology on one vertex: the job that was started first ends with an error that says so."""

from __future__ import annotations

import queue
import threading
from functools import partial
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from ftlayer.common.clock import Now
from ftlayer.common.rules.restart import default_restart
from ftlayer.config import TopologyOptions
from ftlayer.errors import JobError, ProtocolError, StaleOwnerError
from ftlayer.runtime.acker_mode.driver.job_vertex import JobVertexCalls
from ftlayer.runtime.acker_mode.driver.rules.driver_half import AckerDriver
from ftlayer.runtime.driver.job import Job
from ftlayer.runtime.driver.job_thread import JobParts, JobThread
from ftlayer.runtime.driver.rules.events import JobState
from ftlayer.runtime.protocol.messages import Cancel, Deploy, Hello, SlotEnded, SlotFailed, TasksStarted
from ftlayer.topology.job_graph import JobGraph, JobVertex
from ftlayer.topology.operators import IterableSource, Sink, Source
from ftlayer.vertex import calls
from ftlayer.vertex.calls import StreamOptions
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.store import MemoryStore

WAIT_S = 600
ID = pa.schema([("id", pa.int64())])
STREAM = "played/numbers"


class Vertex:
    """A vertex in this process; what a `JobVertexCalls` wants of its client."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self._layer = FTLayerCore(self._store, LayerOptions(), Now(0, 0))
        self._lock = threading.Lock()

    def call(self, call: Any, *, deadline_ms: int = 0) -> Any:
        with self._lock:
            if isinstance(call, calls.ReadingCall):
                with self._store.read() as reading:
                    return self._layer.read(reading, call, Now(0, 0))
            with self._store.write(intake=False) as txn:
                outcome = self._layer.apply(txn, call, None, Now(0, 0))
            outcome.after()
            return outcome.reply


class Played:
    """A job of one slot that runs."""

    def __init__(self, vertex: Vertex, run: str) -> None:
        source = Source("numbers", IterableSource((range(3).__iter__,)), ID)
        vertices = (JobVertex("numbers", (source, Sink("out", print, ID)), 1),)
        options = ((STREAM, StreamOptions()),)
        graph = JobGraph("played", vertices, (), tracked=True, options=options)
        self.calls = JobVertexCalls(vertex, "played", run, dict(options))  # type: ignore[arg-type]
        self.calls.claim()
        self.calls.open()
        self.thread = JobThread(run)
        self.job = Job(self.thread)
        self.submitter = Mock(cancel=self._spark_job_ends)
        parts = JobParts(
            graph,
            TopologyOptions(),
            default_restart(),
            server=Mock(send=self._told),
            submitter=self.submitter,
            planners=Mock(),
            mode=partial(AckerDriver, self.calls),
            on_over=Mock(),
        )
        self.thread.start(parts)
        self.thread.slot_said(0, "a", Hello(0, "a", "grpc://a", "host", 1))
        assert self.job.wait_until_running(WAIT_S)

    def _told(self, instance: str, message: Any) -> None:
        match message:
            case Deploy():
                self.thread.slot_said(0, "a", TasksStarted())
            case Cancel():
                self.thread.slot_said(0, "a", SlotEnded())
                self._spark_job_ends(*self.submitter.submit.call_args.args)

    def _spark_job_ends(self, slot: int, attempt: int) -> None:
        self.thread.spark_job_ended(slot, attempt, None)


def test_a_driver_that_another_one_takes_over_from_ends_at_its_next_call(caplog: Any) -> None:
    caplog.set_level("INFO")
    vertex = Vertex()
    first = Played(vertex, "played-1")
    second = Played(vertex, "played-2")
    assert "'played': played-2 takes over from played-1" in caplog.text
    # The loss has it recall what is pending, which is the second one's now.
    first.thread.slot_lost(0, "a", "its process was killed")
    with pytest.raises(StaleOwnerError, match=r"'played' was started again .*played-2.*played-1, ends"):
        first.job.wait(WAIT_S)
    assert first.job.state is JobState.FAILED
    assert second.job.state is JobState.RUNNING
    assert second.job.cancel(WAIT_S)


def test_a_slot_that_is_refused_ends_the_job_and_is_not_started_again() -> None:
    played = Played(Vertex(), "played-1")
    said = SlotFailed("another driver has it", code=StaleOwnerError.code)
    played.thread.slot_said(0, "a", said)
    with pytest.raises(StaleOwnerError, match="another driver has it"):
        played.job.wait(WAIT_S)
    assert played.submitter.submit.call_count == 1


def test_any_other_refusal_is_the_vertexs_fault() -> None:
    class Refuses:
        def call(self, call: Any) -> Any:
            raise ProtocolError("not now")

    asked = JobVertexCalls(Refuses(), "played", "played-1", {})  # type: ignore[arg-type]
    failed: queue.SimpleQueue[Any] = queue.SimpleQueue()
    asked.status(Mock(), failed.put)
    error = failed.get(timeout=WAIT_S)
    asked.close()
    assert type(error) is JobError
    assert "not now" in str(error)
