"""Acker mode's half in the driver: what the rules want of the vertex, and what the vertex says of circuit breakers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import assert_never

from ftlayer.errors import FTLayerError, VertexError
from ftlayer.runtime.acker_mode.driver.circuit_watch import CircuitWatch
from ftlayer.runtime.acker_mode.driver.isolation import ReplayInput
from ftlayer.runtime.acker_mode.driver.job_mode import AckerJob
from ftlayer.runtime.acker_mode.driver.job_vertex import JobVertexCalls
from ftlayer.runtime.driver.driver_mode import CheckpointCalls, JobContext, no_checkpoints
from ftlayer.runtime.driver.events import (
    AckerInstruction,
    AskVertexStatus,
    Broken,
    Condemn,
    Condemned,
    Event,
    JobState,
    RecallDone,
    RecallStreams,
    Said,
    StatusKnown,
)
from ftlayer.vertex.calls import StreamStatus, StreamStatusCall

STATUS_DEADLINE_MS = 5_000

logger = logging.getLogger(__name__)


class AckerDriver:
    """`DriverMode` of a job whose records the vertex follows."""

    checkpoint_counts = result = stopped_with = None

    def __init__(self, vertex: JobVertexCalls, job: JobContext) -> None:
        """``vertex`` has claimed the job, and is closed by this."""
        graph = job.graph
        self.rules = AckerJob(
            job.crew,
            run=job.run,
            restart=job.restart,
            replays=[ReplayInput(uid, graph.slot_of(uid, 0)) for uid in graph.replays],
            timeout_ms=min((options.timeout_ms for _, options in graph.options), default=0),
        )
        self._vertex = vertex
        self._job = job
        self._circuits = CircuitWatch(
            graph.name, has_any=any(options.circuits for _, options in graph.options)
        )

    @property
    def checkpoints(self) -> CheckpointCalls:
        raise no_checkpoints(self._job.graph.name)

    def before(self, said: Said) -> None:
        """See `DriverMode`."""

    def carry_out(self, instruction: AckerInstruction) -> None:
        happened = self._job.happened
        match instruction:
            case RecallStreams(number):
                self._vertex.recall(lambda rows: happened(RecallDone(number, rows)), self._broken)
            case Condemn(failure):
                logger.warning("root %016x ends processes: %s", failure.root, failure.reason)
                self._vertex.condemn(failure, lambda: happened(Condemned(failure.root)), self._broken)
            case AskVertexStatus(number):
                self._vertex.status(lambda status: happened(StatusKnown(number, status)), self._broken)
            case _:
                assert_never(instruction)

    def after(self, event: Event, state: JobState, now_ms: int) -> None:
        if isinstance(event, StatusKnown):
            # A job that ends asks the vertex a last time: what it says of breakers is told too.
            self._log_circuits(event.status)
        if self._circuits.is_due(now_ms):
            self._vertex.status(
                lambda status: self._job.later(lambda: self._log_circuits(status)), self._broken
            )

    def vertex_status(self) -> StreamStatus | None:
        try:
            reply = self._vertex.client.call(
                StreamStatusCall(self._vertex.streams), deadline_ms=STATUS_DEADLINE_MS
            )
        except VertexError as error:
            logger.info("no status of the vertex: %s", error)
            return None
        assert isinstance(reply, StreamStatus)
        return reply

    def end(
        self,
        state: JobState,
        take_events: Callable[[], None],
        close_by_s: float | None,
        *,
        interrupted: bool,
    ) -> None:
        """See `DriverMode`."""

    def close(self) -> None:
        self._vertex.close()

    def when_done(self, done: Callable[[], None]) -> None:
        done()

    def _broken(self, error: FTLayerError) -> None:
        self._job.happened(Broken(error))

    def _log_circuits(self, status: StreamStatus) -> None:
        for line in self._circuits.told(status.circuits):
            logger.warning("%s", line)
