"""One life of the driver."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from barrier_parts import ControlServer, StepQueue, StepWorker, Submitter
from barrier_storage import WatchedStorage
from barrier_topologies import Case
from pyspark import cloudpickle

from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.checkpoint.coordinator.events import (
    Answer,
    CheckpointEvent,
    CheckpointInstruction,
    NotifyAborted,
    Trigger,
)
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.common.clock import Now
from ftlayer.common.rules.restart import FixedDelay
from ftlayer.config import TopologyOptions
from ftlayer.runtime.barrier_mode.driver.checkpointing import BarrierDriver
from ftlayer.runtime.barrier_mode.driver.opening import open_checkpoints
from ftlayer.runtime.barrier_mode.slot.shell import BarrierSlotFactory
from ftlayer.runtime.driver import job_thread
from ftlayer.runtime.driver.planners import Planners
from ftlayer.runtime.driver.rules.events import JobState, Over
from ftlayer.runtime.driver.rules.job_rules import JobContext
from ftlayer.runtime.protocol.messages import KEY_BYTES, SlotOrder
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.transport.flight_connection import Endpoint


@dataclass(frozen=True)
class Setting:
    """How a world moves. ``pace_ms``: sources wait up to so long between two batches."""

    options: TopologyOptions
    config: CheckpointConfig
    parallelism: int = 2
    pace_ms: int = 8


class Driver:
    """One life of the driver: a real `JobThread`, whose work is done by moves."""

    def __init__(self, world: Any, setting: Setting, case: Case, restore_from: str | None) -> None:
        self.world = world
        self.graph = job_graph(
            case.build(setting.parallelism).build(),
            max_parallelism=setting.config.max_parallelism,
            failures=setting.config.failures,
        )
        self.events = StepQueue()
        self.job = job_thread.JobThread(f"run-{world.lives}", self.events)  # type: ignore[arg-type]
        self.server, self.submitter = ControlServer(), Submitter()
        self.workers: list[StepWorker] = []
        self.answers: list[Future[Any]] = []
        self.ends: Counter[int] = Counter()
        self.triggered: list[int] = []
        self.key = os.urandom(KEY_BYTES)
        parts, plan = open_checkpoints(self.graph, setting.config, self.job.job, restore_from, self.key)
        order = SlotOrder(
            job=self.job.job,
            slot=0,
            coordinator=Endpoint("grpc://driver:1", "t" * 32),
            graph=self.graph,
            options=setting.options,
            mode=BarrierSlotFactory(plan),
            listen_on="127.0.0.1",
            tls_cert=None,
            tls_key=None,
            key=self.key,
        )
        self.order = cloudpickle.dumps(order)
        self.letters = replace(parts.letters, vertex=world.vertex)
        self._checkpoint_parts = replace(
            parts, storage=WatchedStorage(world, parts.storage), letters=self.letters
        )
        self.rules = parts.rules
        self._watch()
        restart = FixedDelay(attempts=10_000, delay="10ms")
        planners = Planners(
            self.graph,
            parts.readers.open,
            self.key,
            send=self.job.send_splits,
            failed=self.job.broken,
            stop_at_latest=True,
            backlog=self.job.source_backlog,
            clock=lambda: world.now,
        )
        self.planners = list(planners.by_source.values())
        self.job.start(
            job_thread.JobParts(
                self.graph,
                setting.options,
                restart,
                self.server,
                self.submitter,
                planners,
                self._open_mode,
                on_over=lambda: None,
            )
        )
        self.job.begin()
        self.ticked_ms = world.mono

    def _open_mode(self, job: JobContext) -> BarrierDriver:
        mode = BarrierDriver(self._checkpoint_parts, job)
        self.checkpoints = mode.checkpoints
        return mode

    def _watch(self) -> None:
        """Check the rules of checkpoints behind each event, and note how each checkpoint ends."""
        handle = self.rules.handle

        def watched(event: CheckpointEvent, now: Now) -> list[CheckpointInstruction]:
            instructions = handle(event, now)
            self.rules.validate()
            for instruction in instructions:
                self._note(instruction)
            self._note_complete()
            return instructions

        self.rules.handle = watched  # type: ignore[method-assign]

    def _note(self, instruction: CheckpointInstruction) -> None:
        match instruction:
            case Trigger(barrier):
                self.triggered.append(barrier.checkpoint)
            case NotifyAborted(checkpoint, _):
                self.ends[checkpoint] += 1
            case Answer(_, Checkpoint(kind=SnapshotKind.SAVEPOINT) as savepoint):
                self.world.note_savepoint(savepoint, self.key)

    def _note_complete(self) -> None:
        for checkpoint in self.rules.completed:
            self.world.note_complete(checkpoint, self.key)

    @property
    def verdict(self) -> Over | None:
        return self.job.verdict

    @property
    def state(self) -> JobState:
        return self.job.state

    def step(self) -> None:
        self.job.step()
        self.job.core.validate()
        self.ticked_ms = self.world.mono

    def request(self, ask: Callable[..., Any]) -> Future[Any]:
        """Have a user's request carried out, as the job's handle does."""
        answer: Future[Any] = Future()
        self.events.put(job_thread.Later(lambda: self.checkpoints.request(ask, answer)))
        self.answers.append(answer)
        return answer
