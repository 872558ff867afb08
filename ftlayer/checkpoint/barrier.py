"""The marks that cut streams into checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Alignment(StrEnum):
    """The demands of a barrier on the tasks that it reaches.

    ALIGNED blocks each channel from its barrier on until the barrier has come on all; AT_LEAST_ONCE waits for all
    and blocks none; UNALIGNED does not wait, and has overtaken records.
    """

    ALIGNED = "aligned"
    AT_LEAST_ONCE = "at-least-once"
    UNALIGNED = "unaligned"


class SnapshotKind(StrEnum):
    """CHECKPOINT: the coordinator's own. SAVEPOINT: asked for by a user; complete, self-contained, never subsumed."""

    CHECKPOINT = "checkpoint"
    SAVEPOINT = "savepoint"


@dataclass(frozen=True, slots=True)
class Barrier:
    """Records before it belong to checkpoint ``checkpoint``, records behind it to the next.

    Attributes:
        checkpoint: id, growing over a job's life and over its restarts.
        started_ms: when the coordinator began it, wall clock, ms since 1970.
        alignment: one that is UNALIGNED may have been ALIGNED where it came from; a SAVEPOINT never is.
        timeout_ms: with ALIGNED: turn unaligned if the barrier is not through all channels of a task this long
            after ``started_ms`` (as the task's wall clock has it); None: never.
        final: the sources have ended, and the job ends with this checkpoint.
        location: directory of a savepoint, "" for a checkpoint.
        full: the state is written as a whole, on top of no earlier checkpoint; a savepoint always is.
    """

    checkpoint: int
    started_ms: int
    alignment: Alignment = Alignment.ALIGNED
    timeout_ms: int | None = None
    kind: SnapshotKind = SnapshotKind.CHECKPOINT
    final: bool = False
    location: str = ""
    full: bool = False


@dataclass(frozen=True, slots=True)
class CancelMarker:
    """In place of a barrier: ``checkpoint`` was given up by a task before this one. Never overtakes."""

    checkpoint: int
