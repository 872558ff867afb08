"""The handle of a running topology that a user holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ftlayer.checkpoint.coordinator.events import (
    CheckpointEvent,
    CheckpointRequested,
    SavepointRequested,
    StopRequested,
)
from ftlayer.checkpoint.coordinator.statistics import CheckpointStats
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage.results import JobResult
from ftlayer.errors import CheckpointError, FTLayerError
from ftlayer.runtime.driver.driver_mode import CheckpointCalls
from ftlayer.runtime.driver.events import CancelRequested, DrainRequested, JobState
from ftlayer.runtime.driver.job_status import ChainStatus, JobStatus, SlotStatus
from ftlayer.runtime.driver.job_thread import TICK_S, JobThread, Later, now_ms
from ftlayer.runtime.driver.job_thread import JobParts as JobParts
from ftlayer.runtime.driver.slot_record import SlotRecord
from ftlayer.vertex.calls import StreamStatus

# Of the time that `Job.cancel` is given; the rest is for what comes behind the commit.
COMMIT_SHARE = 0.8

_T = TypeVar("_T")


class Job(JobThread):
    """The handle of a running topology. Any thread may use it. Made by `StreamEnvironment.execute_async`."""

    def __init__(self, job: str) -> None:
        super().__init__(job)
        self._last_status: StreamStatus | None = None
        self._asking = threading.Lock()

    @property
    def state(self) -> JobState:
        """Where the job is."""
        return self._core.state

    def status(self) -> JobStatus:
        """Return what is known of the job now; asks the vertex, and does without its answer if there is none.

        Of a job that is over it is what the vertex said at the first call behind its end.
        """
        # One at a time: an older answer behind a newer one would look like a vertex that counts from 0 again.
        with self._asking:
            vertex = self._vertex_status()
            moment_ms = now_ms()
            if vertex is not None:
                with self._lock:
                    self._meter.update_vertex(vertex, moment_ms)
        with self._lock:
            core = self._core
            rates = {} if self._over.is_set() else self._meter.rates(moment_ms)
            totals = self._meter.totals
            return JobStatus(
                name=self.name,
                job=self.job,
                state=core.state,
                epoch=core.epoch,
                uptime_s=(self._ended_ms or moment_ms) / 1_000 - self._started_ms / 1_000,
                slots=tuple(_slot_status(slot, moment_ms) for slot in core.slots),
                chains=tuple(_chain_status(v.uid, totals, rates) for v in self._parts.graph.vertices),
                counters={name: value for name, value in totals.items() if "/" not in name},
                rates={name: rate for name, rate in rates.items() if "/" not in name},
                vertex=vertex,
                before=self._before,
                restarts=core.restarts,
                isolation=core.isolation,
                last_failure=core.last_failure,
                checkpoints=self._mode.checkpoint_counts,
            )

    def _repr_html_(self) -> str:
        """Return the status as HTML, for notebooks."""
        return self.status()._repr_html_()

    def wait_until_running(self, timeout: float | None = None) -> bool:
        """Wait until all tasks are restored and run, up to ``timeout`` seconds (None: as long as it takes).

        Returns whether they do, or have run to their end meanwhile; not if the job was cancelled before. Raises what
        the job has failed with.
        """
        self._until_running(timeout)
        self._raise()
        return self.state.is_up

    @property
    def result(self) -> JobResult | None:
        """How the job has ended, as it is kept with its checkpoints; None before, in acker mode, and in memory."""
        return self._mode.result

    def checkpoints(self) -> tuple[CheckpointStats, ...]:
        """Return the checkpoints and savepoints under way, and the last 100 others, the latest first."""
        return self._in_thread(lambda checkpoints: checkpoints.history())

    def checkpoint(self, timeout: float | None = None) -> Checkpoint:
        """Take a checkpoint, as soon as all tasks run, and wait for it; raises `CheckpointError` if it fails.

        After ``timeout`` seconds (None: as long as it takes) a `TimeoutError` is raised.
        """
        return self._requested(CheckpointRequested, timeout)

    def savepoint(self, directory: str = "", timeout: float | None = None) -> str:
        """Take a savepoint, as soon as all tasks run, and wait for it; return where it lies.

        It is complete and self-contained, may be moved, and belongs to the caller: the job neither deletes it nor
        goes back to it. What sinks have written for it is committed with the next checkpoint, or by a job that is
        restored from it.

        Args:
            directory: what its own new directory is made in; by default ``savepoint_directory``.
            timeout: seconds, None: as long as it takes.

        Raises `CheckpointError` if it fails, `TimeoutError` if it takes longer.
        """
        location = self._with_checkpoints().savepoint_location(directory)
        taken = self._requested(lambda number: SavepointRequested(number, location), timeout)
        return taken.location

    def stop_with_savepoint(self, directory: str = "", timeout: float | None = None) -> str:
        """Take a savepoint, commit it, and end the job; return where it lies. See `savepoint`.

        Sources emit nothing behind the savepoint. If it fails the job goes on from its last checkpoint.
        """
        location = self._with_checkpoints().savepoint_location(directory)
        taken = self._requested(lambda number: StopRequested(number, location), timeout)
        self._over.wait()
        return taken.location

    def _requested(self, ask: Callable[[int], CheckpointEvent], timeout: float | None) -> Checkpoint:
        answer: Future[Checkpoint] = Future()
        checkpoints = self._with_checkpoints()
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._until_running(timeout):
            raise TimeoutError(
                f"{self.name!r} is {self.state} after {timeout} s; a checkpoint is of running tasks"
            )
        self._events.put(Later(lambda: checkpoints.request(ask, answer)))
        try:
            if self._over.is_set() and not answer.done():
                raise CheckpointError(f"the job is {self.state}")
            return answer.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except CheckpointError as refused:
            why = self.exception() or self._core.error
            if why is None:
                raise
            raise CheckpointError(f"{self.name!r} has failed: {why}") from (
                why if why is not refused else None
            )

    def _until_running(self, timeout: float | None) -> bool:
        """Wait until all tasks run, or the job is over; return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: self._over.is_set() or self.state.is_up, timeout)

    def _in_thread(self, work: Callable[[CheckpointCalls], _T]) -> _T:
        """Have something done in the job's thread (in this one if the job is over), and return what it returned."""
        checkpoints = self._with_checkpoints()
        answer: Future[_T] = Future()
        self._events.put(Later(lambda: answer.set_result(work(checkpoints))))
        while not self._over.is_set():
            try:
                return answer.result(TICK_S)
            except TimeoutError:
                continue
        return work(checkpoints)

    def cancel(self, timeout: float | None = 30.0) -> bool:
        """End the job now; what is pending stays in the vertex for the next start of the same topology.

        In barrier mode ``retention`` says whether the last checkpoints stay; with a ``directory`` they do by default.
        Waits up to ``timeout`` seconds (None: as long as it takes) and returns whether it is over. A commit of a sink
        that is under way is waited for no longer than four fifths of that. It goes on in this process, which starts
        no other job of this name meanwhile; a job that is restored from its checkpoint makes it again.
        """
        if timeout is not None:
            self._close_by_s = time.monotonic() + timeout * COMMIT_SHARE
        self._events.put(CancelRequested("the job was cancelled"))
        return self._over.wait(timeout)

    def interrupt(self, timeout: float | None = 30.0) -> bool:
        """As `cancel`, and the last checkpoints stay, whatever ``retention`` says: what Ctrl-C in ``execute`` does."""
        self._interrupted = True
        return self.cancel(timeout)

    def drain(self, timeout: float | None = None) -> bool:
        """End the sources, let everything that is pending come to its end, and end the job.

        Waits for that; returns whether everything was done. After ``timeout`` seconds (None: no limit) the job is
        cancelled instead, and what is pending stays in the vertex for its next start. Raises what the job failed
        with.
        """
        self._events.put(DrainRequested())
        if not self._over.wait(timeout):
            self.cancel(None)
        self._raise()
        return self.state is JobState.ENDED

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the job is over, up to ``timeout`` seconds; return whether it is. Raises what it failed with."""
        over = self._over.wait(timeout)
        self._raise()
        return over

    def over(self, timeout: float | None = None) -> bool:
        """Wait until the job is over, up to ``timeout`` seconds; return whether it is. Raises nothing."""
        return self._over.wait(timeout)

    def exception(self) -> FTLayerError | None:
        """Return what the job failed with; None while it runs, and if it ended or was cancelled."""
        return None if self._verdict is None else self._verdict.error

    def _raise(self) -> None:
        error = self.exception()
        if error is not None:
            raise error

    def _vertex_status(self) -> StreamStatus | None:
        if not self._over.is_set():
            return self._mode.vertex_status()
        if self._last_status is None:
            self._last_status = self._mode.vertex_status()
        return self._last_status


def _slot_status(slot: SlotRecord, now_ms: int) -> SlotStatus:
    hello, beat = slot.hello, slot.heartbeat
    state = (
        "ended"
        if slot.ended
        else "running"
        if slot.started
        else "initializing"
        if slot.deployed
        else "ready"
        if hello is not None
        else "starting"
        if slot.submitted
        else "waiting"
    )
    return SlotStatus(
        slot.number,
        state,
        "" if hello is None else hello.host,
        0 if hello is None else hello.pid,
        "" if hello is None else hello.instance,
        None if beat is None else max(0, now_ms - slot.heard_ms),
        "" if beat is None else beat.busy,
        0 if beat is None else beat.busy_ms,
        "" if beat is None else beat.function,
        slot.restarts,
        slot.failure,
    )


def _chain_status(uid: str, totals: dict[str, int], rates: dict[str, float]) -> ChainStatus:
    taken, sent = f"records_in/{uid}", f"records_out/{uid}"
    return ChainStatus(
        uid,
        totals.get(taken, 0),
        totals.get(sent, 0),
        rates.get(taken, 0.0),
        rates.get(sent, 0.0),
        totals.get(f"late/{uid}", 0),
    )
