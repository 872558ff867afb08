"""The handle of a topology that was started, which a user holds."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NoReturn

from ftlayer import __version__
from ftlayer.checkpoint.coordinator.events import (
    CheckpointEvent,
    CheckpointRequested,
    SavepointRequested,
    StopRequested,
)
from ftlayer.checkpoint.coordinator.in_flight import CheckpointState
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage.loading import JobResult
from ftlayer.common.checks import Duration, UserFacing, check_text, wait_seconds
from ftlayer.common.printable import shortened, shown_url
from ftlayer.errors import CheckpointError, FTLayerError, UnsupportedError
from ftlayer.runtime.driver.job_thread import JobThread
from ftlayer.runtime.driver.rules.events import JobState
from ftlayer.runtime.driver.rules.job_status import AWAY, LAG, CheckpointTimes, JobStatus
from ftlayer.topology.job_graph import JobGraph, partitioner_name
from ftlayer.vertex.calls import jobs
from ftlayer.vertex.calls.jobs import CheckpointDetails, CheckpointTotals

# Of the time that `Job.cancel` is given; the rest is for what comes behind the commit.
COMMIT_SHARE = 0.8


_WORDS = {
    "awaittermination awaitcompletion join get getjobexecutionresult": ".wait(timeout) waits for its end",
    "start execute run": "it was started; .wait() waits for its end",
    "stop close shutdown": ".cancel() ends it now, .drain() when its sources' records are through, "
    ".stop_with_savepoint(directory) with a savepoint (barrier mode)",
    "id jobid getjobid": ".job is the id of this execution",
    "isactive isrunning done": ".over() and .state say it",
    "triggersavepoint": ".savepoint(directory)",
    "triggercheckpoint": ".checkpoint()",
    "deadletters listdead requeue purge": "ask the FTLayer: its .list_dead(), .requeue(keys) and .purge(keys)",
}


class Job(UserFacing, words=_WORDS):
    """The handle of a running topology. Any thread may use it. Made by `StreamEnvironment.execute_async`."""

    def __init__(self, execution: JobThread | EndedJob) -> None:
        self._execution = execution

    @property
    def job(self) -> str:
        """The id of this execution."""
        return self._execution.job

    @property
    def name(self) -> str:
        """The topology's name."""
        return self._execution.name

    @property
    def state(self) -> JobState:
        """Where the job is."""
        return self._execution.state

    def status(self) -> JobStatus:
        """Return what is known of the job now; asks the vertex, and does without its answer if there is none.

        Of a job that is over it is what the vertex said at the first call behind its end.
        """
        return self._execution.status()

    def __repr__(self) -> str:
        return f"Job({self.name!r}, {self.state})"

    def _repr_html_(self) -> str:
        return self.status()._repr_html_()

    def wait_until_running(self, timeout: Duration | None = None) -> bool:
        """Wait until all tasks are restored and run, up to ``timeout`` (None: as long as it takes).

        Returns whether they do, or have run to their end meanwhile; not if the job was cancelled before. Raises what
        the job has failed with.
        """
        self._execution.wait_until_up(wait_seconds(timeout, "wait_until_running: timeout"))
        self._raise()
        return self.state.is_up

    @property
    def result(self) -> JobResult | None:
        """How the job has ended, as it is kept with its checkpoints; None before, in acker mode, and in memory."""
        return self._execution.result

    def checkpoints(self) -> tuple[CheckpointDetails, ...]:
        """Return the checkpoints and savepoints under way, and the last 100 others, the latest first."""
        return self._execution.history()

    def checkpoint(self, timeout: Duration | None = None) -> Checkpoint:
        """Take a checkpoint, as soon as all tasks run, and wait for it; raises `CheckpointError` if it fails.

        After ``timeout`` (None: as long as it takes) a `TimeoutError` is raised.
        """
        return self._requested(CheckpointRequested, wait_seconds(timeout, "checkpoint: timeout"))

    def savepoint(self, directory: str = "", timeout: Duration | None = None) -> str:
        """Take a savepoint, as soon as all tasks run, and wait for it; return where it lies.

        It is complete and self-contained, may be moved, and belongs to the caller: the job neither deletes it nor
        goes back to it. What sinks have written for it is committed with the next checkpoint, or by a job that is
        restored from it.

        Args:
            directory: what its own new directory is made in; by default ``savepoint_directory``.
            timeout: None: as long as it takes.

        Raises `CheckpointError` if it fails, `TimeoutError` if it takes longer.
        """
        seconds = wait_seconds(timeout, "savepoint: timeout")
        location = self._savepoint_location(directory, "savepoint")
        taken = self._requested(lambda number: SavepointRequested(number, location), seconds)
        return taken.location

    def stop_with_savepoint(self, directory: str = "", timeout: Duration | None = None) -> str:
        """Take a savepoint, commit it, and end the job; return where it lies. See `savepoint`.

        Sources emit nothing behind the savepoint. If it fails the job goes on from its last checkpoint.
        """
        seconds = wait_seconds(timeout, "stop_with_savepoint: timeout")
        location = self._savepoint_location(directory, "stop_with_savepoint")
        taken = self._requested(lambda number: StopRequested(number, location), seconds)
        self._execution.wait_until_over(None)
        return taken.location

    def _savepoint_location(self, directory: str, method: str) -> str:
        if directory != "":
            check_text(directory, f"{method}: directory", "the path or URL of a directory")
        return self._execution.checkpoints.savepoint_location(directory)

    def _requested(self, ask: Callable[[int], CheckpointEvent], timeout: float | None) -> Checkpoint:
        answer: Future[Checkpoint] = Future()
        execution, checkpoints = self._execution, self._execution.checkpoints
        deadline = None if timeout is None else time.monotonic() + timeout
        if not execution.wait_until_up(timeout):
            raise TimeoutError(
                f"{self.name!r} is {self.state} after {timeout} s; a checkpoint is of running tasks"
            )
        execution.later(lambda: checkpoints.request(ask, answer))
        try:
            if execution.wait_until_over(0) and not answer.done():
                raise CheckpointError(f"the job is {self.state}")
            return answer.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except CheckpointError as refused:
            why = execution.ends_by
            if why is None:
                raise
            raise CheckpointError(f"{self.name!r} has failed: {why}") from (
                why if why is not refused else None
            )

    def cancel(self, timeout: Duration | None = "30s") -> bool:
        """End the job now; what is pending stays in the vertex for the next start of the same topology.

        In barrier mode ``retention`` says whether the last checkpoints stay; with a ``directory`` they do by default.
        Waits up to ``timeout`` (None: as long as it takes) and returns whether it is over. A commit of a sink
        that is under way is waited for no longer than four fifths of that. It goes on in this process, which starts
        no other job of this name meanwhile; a job that is restored from its checkpoint makes it again.
        """
        seconds = wait_seconds(timeout, "cancel: timeout")
        self._execution.cancel(None if seconds is None else time.monotonic() + seconds * COMMIT_SHARE)
        return self._execution.wait_until_over(seconds)

    def interrupt(self, timeout: Duration | None = "30s") -> bool:
        """As `cancel`, and the last checkpoints stay, whatever ``retention`` says: what Ctrl-C in ``execute`` does."""
        seconds = wait_seconds(timeout, "interrupt: timeout")
        self._execution.interrupt()
        return self.cancel(seconds)

    def drain(self, timeout: Duration | None = None) -> bool:
        """End the sources, let everything that is pending come to its end, and end the job.

        Waits for that; returns whether everything was done. After ``timeout`` (None: no limit) the job is
        cancelled instead, and what is pending stays in the vertex for its next start. Raises what the job failed
        with.
        """
        seconds = wait_seconds(timeout, "drain: timeout")
        self._execution.drain()
        if not self._execution.wait_until_over(seconds):
            self.cancel(None)
        self._raise()
        return self.state is JobState.ENDED

    def wait(self, timeout: Duration | None = None) -> bool:
        """Wait until the job is over, up to ``timeout``; return whether it is. Raises what it failed with."""
        over = self._execution.wait_until_over(wait_seconds(timeout, "wait: timeout"))
        self._raise()
        return over

    def over(self, timeout: Duration | None = None) -> bool:
        """Wait until the job is over, up to ``timeout``; return whether it is. Raises nothing."""
        return self._execution.wait_until_over(wait_seconds(timeout, "over: timeout"))

    def exception(self) -> FTLayerError | None:
        """Return what the job failed with; None while it runs, and if it ended or was cancelled."""
        return self._execution.error

    def _raise(self) -> None:
        error = self.exception()
        if error is not None:
            raise error


class EndedJob:
    """What is in a `JobThread`'s place where ``restore_from="latest"`` finds a result: nothing runs."""

    state = JobState.ENDED
    error = None
    ends_by = None

    def __init__(self, result: JobResult) -> None:
        self.job = result.run
        self.name = result.name
        self.result = result

    @property
    def checkpoints(self) -> NoReturn:
        raise self._refusal()

    def status(self) -> JobStatus:
        """Return that it has ended; what an earlier driver had counted is gone."""
        return JobStatus(
            self.name,
            self.job,
            JobState.ENDED,
            epoch=0,
            uptime_s=0.0,
            slots=(),
            chains=(),
            checkpoints=CheckpointTotals(),
            savepoint=self.result.savepoint,
        )

    def history(self) -> tuple[CheckpointDetails, ...]:
        return ()

    def later(self, work: Callable[[], None]) -> NoReturn:
        """Raise `CheckpointError`: what users do in a job's thread is of checkpoints."""
        raise self._refusal()

    def drain(self) -> None: ...

    def cancel(self, close_by_s: float | None) -> None: ...

    def interrupt(self) -> None:
        """Its result stays in any case."""

    def wait_until_over(self, timeout: float | None) -> bool:
        return True

    def wait_until_up(self, timeout: float | None) -> bool:
        return True

    def _refusal(self) -> CheckpointError:
        return CheckpointError(f"no checkpoint: {self.result}")


CHAIN_TOTALS = ("records_in", "records_out", "late")

MAX_TEXT = 4_000
"""Bytes of a failure, with its traceback."""
MAX_CHECKPOINTS = 100
MAX_FAILED_CHECKPOINTS = 50


@dataclass(slots=True)
class TopologyTelling:
    """`ftlayer.monitor.announcer.Telling` of one execution of a topology.

    ``checkpointing`` is barrier mode's, ``mode`` as `JobDetails.mode`; ``links`` as `JobDetails.links`.
    """

    execution: JobThread
    graph: JobGraph
    mode: str
    checkpointing: CheckpointConfig | None = None
    links: dict[str, str] = field(default_factory=dict)
    since_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)
    _checkpoint_times: CheckpointTimes = field(default_factory=CheckpointTimes)

    @property
    def run(self) -> str:
        return self.execution.job

    def details(self, known_checkpoint: int, *, with_plan: bool) -> jobs.JobDetails:
        final = self.execution.wait_until_over(0)
        status = self.execution.status()
        history = () if self.checkpointing is None else self.execution.history()
        times = self._checkpoint_times
        times.take(history)
        return jobs.JobDetails(
            owner=self.graph.name,
            name=self.graph.name,
            kind=jobs.JobKind.TOPOLOGY,
            run=self.run,
            mode=self.mode,
            state=str(status.state),
            final=final,
            since_ms=self.since_ms,
            at_ms=time.time_ns() // 1_000_000,
            ended_ms=self.since_ms + int(status.uptime_s * 1_000) if final else 0,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=__version__,
            line=shortened(status.line().removeprefix(f"{self.graph.name}: "), MAX_TEXT),
            restarts=status.restarts,
            last_failure=shortened(status.last_failure, MAX_TEXT),
            plan=plan_of(self.graph) if with_plan else None,
            slots=tuple(replace(slot, failure=shortened(slot.failure, MAX_TEXT)) for slot in status.slots),
            subtasks=status.subtasks,
            edges=status.edges,
            counters=status.counters | self._of_chains(status) | self._written() | _of_sources(status),
            rates=status.rates,
            histograms=status.histograms
            | {name: jobs.HistogramDetails.of(each) for name, each in times.histograms.items()},
            incidents=(
                *(replace(each, text=shortened(each.text, MAX_TEXT)) for each in status.incidents),
                *_failed(history),
            ),
            checkpoint_totals=status.checkpoints,
            checkpoints=_told(history, known_checkpoint),
            circuits=status.circuits,
            links=self.links,
        )

    def carry_out(self, order: jobs.JobOrder) -> str:
        job = Job(self.execution)
        if job.over(0):
            raise UnsupportedError(f"{job.name!r} is {job.state}: nothing can be asked of it")
        match order.action:
            case jobs.OrderAction.SAVEPOINT:
                return shown_url(job.savepoint(order.directory))
            case jobs.OrderAction.STOP if self.checkpointing is None:
                raise UnsupportedError(
                    f"{job.name!r} runs without checkpoints, so there is no savepoint to stop with: drain it, and all "
                    "that it has read is done first; or cancel it, and what is pending stays for its next start"
                )
            case jobs.OrderAction.STOP:
                return shown_url(job.stop_with_savepoint(order.directory))
            case jobs.OrderAction.DRAIN:
                if job.drain(order.timeout_ms / 1_000 if order.timeout_ms else None):
                    return "everything that it had read is done"
                return f"it is {job.state}: what is pending stays for its next start"
            case jobs.OrderAction.CANCEL:
                return "it is cancelled" if job.cancel() else f"it is {job.state}, and ends as soon as it can"
            case jobs.OrderAction.STACK:
                return self.execution.stack(order.slot)

    def _of_chains(self, status: JobStatus) -> dict[str, int]:
        """Return totals of chains: their subtasks count anew in each instance, and are gone at the end."""
        return {
            f"{name}/{chain.uid}": getattr(chain, name)
            for chain in status.chains
            for name in CHAIN_TOTALS
            + (jobs.FAILING if self.graph.vertex(chain.uid).failures is not None else ())
        }

    def _written(self) -> dict[str, int]:
        if self.checkpointing is None:
            return {}
        written = {"checkpoint_bytes": self._checkpoint_times.written_bytes}
        if any(vertex.failures is not None for vertex in self.graph.vertices):
            written["letters_unsent"] = self.execution.checkpoints.unsent_letters
        return written


def _of_sources(status: JobStatus) -> dict[str, int]:
    lags = {f"{LAG}{uid}": lag for uid, lag in status.lags.items()}
    return lags | {f"{AWAY}{uid}": away_ms for uid, away_ms in status.away.items()}


def plan_of(graph: JobGraph) -> jobs.JobPlan:
    return jobs.JobPlan(
        tuple(
            jobs.PlanNode(
                vertex.uid, tuple(operator.uid for operator in vertex.operators), vertex.parallelism
            )
            for vertex in graph.vertices
        ),
        tuple(
            jobs.PlanEdge(
                edge.source,
                edge.target,
                partitioner_name(edge.partitioner, edge.routing),
                edge.tag,
                edge.feedback,
            )
            for edge in graph.edges
        ),
    )


def _failed(history: tuple[jobs.CheckpointDetails, ...]) -> list[jobs.Incident]:
    failed = [each for each in history if each.state == CheckpointState.FAILED][:MAX_FAILED_CHECKPOINTS]
    return [
        jobs.Incident(
            each.ended_ms,
            "checkpoint",
            shortened(f"{each.kind} {each.number} failed: {each.failure}", MAX_TEXT),
        )
        for each in reversed(failed)
    ]


def _told(history: tuple[jobs.CheckpointDetails, ...], known: int) -> tuple[jobs.CheckpointDetails, ...]:
    """Return checkpoints under way, and those that ended behind ``known``; of too many the oldest ones."""
    new = [each for each in reversed(history) if not each.ended_ms or each.number > known]
    return tuple(
        replace(each, location=shown_url(each.location), failure=shortened(each.failure, MAX_TEXT))
        for each in new[:MAX_CHECKPOINTS]
    )
