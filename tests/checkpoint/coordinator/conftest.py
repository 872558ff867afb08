"""A coordinator with a manual clock, and slots and a storage that do as they are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.coordinator.coordinator import CheckpointCoordinator
from ftlayer.checkpoint.coordinator.events import (
    CheckpointEvent,
    CheckpointInstruction,
    CheckpointTick,
    PartWritten,
    Published,
    TasksRestarting,
    TasksRestored,
    TasksRunning,
    Trigger,
)
from ftlayer.checkpoint.coordinator.in_flight import JobFacts
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, Committable, OperatorInfo, SubtaskSnapshot
from ftlayer.common.clock import Now

SUBTASKS = (("source", 0), ("source", 1), ("count", 0), ("count", 1))
WALL_MS = 1_700_000_000_000


class Decisions(list[CheckpointInstruction]):
    """Instructions, and what a test asks of them."""

    def of(self, kind: type) -> list[Any]:
        return [decision for decision in self if isinstance(decision, kind)]

    def ids(self, kind: type) -> list[int]:
        """The numbers of the checkpoints that instructions of this kind are about."""
        return [getattr(each.checkpoint, "checkpoint", each.checkpoint) for each in self.of(kind)]

    @property
    def triggered(self) -> list[Barrier]:
        return [decision.barrier for decision in self.of(Trigger)]


class Desk:
    """Calls the coordinator; `said` gathers its instructions, `call` returns those of one event."""

    def __init__(self, config: CheckpointConfig, *, may_overtake: bool = False, **options: Any) -> None:
        facts = JobFacts(
            "job",
            "run",
            128,
            (OperatorInfo("source", "source", "Source", 2), OperatorInfo("count", "count", "Reduce", 2)),
            frozenset(SUBTASKS),
            frozenset(subtask for subtask in SUBTASKS if subtask[0] == "source"),
            may_overtake=may_overtake,
        )
        self.facts = facts
        self.coordinator = CheckpointCoordinator(config, facts, **options)
        self.mono_ms = 1_000
        self.wall_ms = WALL_MS
        self.said = Decisions()

    @property
    def now(self) -> Now:
        return Now(self.mono_ms, self.wall_ms + self.mono_ms)

    def call(self, event: CheckpointEvent) -> Decisions:
        instructions = Decisions(self.coordinator.handle(event, self.now))
        self.coordinator.validate()
        self.said += instructions
        return instructions

    def wait(self, ms: int) -> Decisions:
        """Let time pass, tick by tick as the coordinator foresees."""
        end, decided = self.mono_ms + ms, Decisions()
        while self.mono_ms < end:
            due = self.coordinator.due_ms
            self.mono_ms = end if due is None else min(max(due, self.mono_ms + 1), end)
            decided += self.call(CheckpointTick())
        return decided

    def begin(self) -> Desk:
        """Start the job, from nothing."""
        self.call(TasksRestarting(1))
        self.call(TasksRestored(None))
        self.call(TasksRunning())
        return self

    def trigger(self) -> int:
        """Have a checkpoint of the schedule triggered; returns its id."""
        due = self.coordinator.due_ms
        assert due is not None, "no checkpoint is planned"
        for instruction in self.wait(max(1, due - self.mono_ms)):
            if isinstance(instruction, Trigger):
                return instruction.barrier.checkpoint
        raise AssertionError("no checkpoint was triggered")

    def ack_all(self, checkpoint: int, committables: bool = False) -> Decisions:
        decided = Decisions()
        for uid, subtask in SUBTASKS:
            written = (Committable(uid, b"rows", checkpoint),) if committables and uid == "count" else ()
            part = SubtaskSnapshot(uid, subtask, committables=written, written_bytes=10, state_bytes=100)
            decided += self.call(PartWritten(checkpoint, part))
        return decided

    def publish(self, checkpoint: Checkpoint, location: str = "") -> Decisions:
        return self.call(Published(replace(checkpoint, location=location)))

    def complete(self, checkpoint: int) -> Decisions:
        """All subtasks ack, and it is published: without committables that is all."""
        (publish,) = self.ack_all(checkpoint)
        return self.publish(publish.checkpoint, publish.location)  # type: ignore[union-attr]

    def kinds(self) -> list[str]:
        return [type(instruction).__name__ for instruction in self.said]


@pytest.fixture
def desk() -> Callable[..., Desk]:
    """Make a coordinator of `CheckpointConfig` options; further ones in ``_``."""

    def make(_: dict[str, Any] | None = None, **options: Any) -> Desk:
        return Desk(CheckpointConfig(**options), **(_ or {}))

    return make
