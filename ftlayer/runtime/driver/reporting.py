"""A topology as it is announced: its status in the words of the board, and orders as calls of its handle."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field, replace

from ftlayer import __version__
from ftlayer.checkpoint.coordinator.in_flight import CheckpointState
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.common.printable import shortened, shown_url
from ftlayer.errors import UnsupportedError
from ftlayer.runtime.driver.job import Job
from ftlayer.runtime.driver.job_thread import JobThread
from ftlayer.runtime.driver.rules.job_status import AWAY, LAG, CheckpointTimes, JobStatus
from ftlayer.topology.job_graph import JobGraph, partitioner_name
from ftlayer.vertex.calls import jobs

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
        """Return what chains took and sent in all, and of those with a policy what failed in them.

        Subtasks count anew in each instance, and are gone at the end.
        """
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
    """Return what a graph is made of, without what only runs."""
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
