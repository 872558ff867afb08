"""Barrier mode's half in the driver: what the rules of the job want of its checkpoints, and what these hear of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from ftlayer.checkpoint.coordinator.statistics import CheckpointCounts
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.checkpoint.storage.results import JobResult
from ftlayer.runtime.barrier_mode.driver.checkpointing import JobCheckpoints
from ftlayer.runtime.barrier_mode.driver.job_mode import BarrierJob, regions_of
from ftlayer.runtime.barrier_mode.driver.loop_watch import LoopWatch
from ftlayer.runtime.barrier_mode.driver.publishing import JobCheckpointParts
from ftlayer.runtime.driver.driver_mode import JobContext
from ftlayer.runtime.driver.events import (
    AllRunning,
    BarrierInstruction,
    Event,
    JobState,
    PrepareRestore,
    RegionDeployed,
    Said,
)
from ftlayer.runtime.driver.job_status import PAUSED, WAITING, chains_with
from ftlayer.runtime.protocol.messages import Heartbeat, SlotFailed


class BarrierDriver:
    """`DriverMode` of a job with checkpoints."""

    def __init__(self, parts: JobCheckpointParts, job: JobContext) -> None:
        """``parts`` are of this job alone."""
        self.rules = BarrierJob(job.crew, regions=regions_of(job.graph), run=job.run, restart=job.restart)
        self.checkpoints = JobCheckpoints(parts, job)
        self._crew, self._tell = job.crew, job.tell
        self._loops = LoopWatch(job.graph)

    @property
    def checkpoint_counts(self) -> CheckpointCounts:
        return self.checkpoints.counts

    @property
    def result(self) -> JobResult | None:
        return self.checkpoints.result

    @property
    def stopped_with(self) -> Checkpoint | None:
        return self.checkpoints.stopped_with

    def before(self, said: Said) -> None:
        match said.message:
            case SlotFailed(reason=reason, damaged=damaged) if damaged:
                self.checkpoints.damaged(damaged, reason)

    def carry_out(self, instruction: BarrierInstruction) -> None:
        match instruction:
            case PrepareRestore():
                self.checkpoints.prepare(instruction)
            case RegionDeployed(slots):
                self._loops.began(slots)
                self.checkpoints.deployed(instruction)
            case AllRunning():
                self.checkpoints.running()
            case _:
                assert_never(instruction)

    def after(self, event: Event, state: JobState, now_ms: int) -> None:
        if state.is_final or state is JobState.STOPPING:
            self.checkpoints.cancel()
        elif isinstance(event, Said) and self._crew.slots[event.slot].is_instance(event.instance):
            if isinstance(event.message, Heartbeat):
                self._beat()
            else:
                self.checkpoints.said(event.message)
        self.checkpoints.tick()

    def _beat(self) -> None:
        slots = self._crew.slots
        self.checkpoints.held(chains_with(PAUSED, slots))
        for slot, message in self._loops.waits_in(chains_with(WAITING, slots)):
            self._tell(slot, message)

    def vertex_status(self) -> None:
        """See `DriverMode`: there is no vertex."""

    def end(
        self,
        state: JobState,
        take_events: Callable[[], None],
        close_by_s: float | None,
        *,
        interrupted: bool,
    ) -> None:
        self.checkpoints.close(state, take_events, close_by_s, interrupted=interrupted)

    def close(self) -> None:
        """See `DriverMode`: `end` has closed everything."""

    def when_done(self, done: Callable[[], None]) -> None:
        self.checkpoints.when_done(done)
