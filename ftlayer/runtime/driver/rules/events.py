"""The events of a job's rules, and their instructions. Frozen values; `JobThread` carries the instructions out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from ftlayer.checkpoint.snapshots import Restore
from ftlayer.errors import FTLayerError
from ftlayer.runtime.protocol.messages import FromSlot, ToSlot
from ftlayer.vertex.calls import Failure, StreamStatus


class JobState(StrEnum):
    """Where a job is; the last three are final.

    STARTING: slots come up. INITIALIZING: all tasks were told to begin; they open their functions and restore their
    state. RUNNING: all do. RECOVERING: a slot was lost, up to when all tasks are restored and run again.
    """

    STARTING = "starting"
    INITIALIZING = "initializing"
    RUNNING = "running"
    RECOVERING = "recovering"
    ISOLATING = "isolating"
    DRAINING = "draining"
    ENDING = "ending"
    STOPPING = "stopping"
    ENDED = "ended"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        """Whether nothing comes after it."""
        return self in (JobState.ENDED, JobState.CANCELLED, JobState.FAILED)

    @property
    def is_up(self) -> bool:
        """Whether all tasks are restored and run, or have run to their end."""
        return self in (
            JobState.RUNNING,
            JobState.ISOLATING,
            JobState.DRAINING,
            JobState.ENDING,
            JobState.ENDED,
        )


@dataclass(frozen=True, slots=True)
class TaskCounts:
    """Spark's figures on task slots.

    Attributes:
        total: how many there are, of all executors.
        busy: how many of them run a task.
        started: the job's slots whose task runs.
    """

    total: int
    busy: int
    started: frozenset[int]


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Said:
    """An instance of a slot sent a message; its first one is its Hello."""

    slot: int
    instance: str
    message: FromSlot


@dataclass(frozen=True, slots=True)
class Broke:
    """The control stream of an instance ended."""

    slot: int
    instance: str
    reason: str


@dataclass(frozen=True, slots=True)
class SparkJobEnded:
    """The Spark job that ran a slot is over; ``error`` None when it ended well.

    ``needed_by``: the operators whose functions refer to what could not be loaded there, "" where that was not it.
    """

    slot: int
    attempt: int
    error: str | None
    needed_by: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class CancelRequested:
    reason: str


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """End the sources, and the job once nothing is pending."""


@dataclass(frozen=True, slots=True)
class StatusKnown:
    number: int
    status: StreamStatus


@dataclass(frozen=True, slots=True)
class RecallDone:
    """The vertex has recalled all streams, as `RecallStreams` with this number asked; ``rows`` became due."""

    number: int
    rows: int


@dataclass(frozen=True, slots=True)
class Condemned:
    """The vertex was told of the failure that `Condemn` gave; the record is dead, or had come to its end before."""

    root: int


@dataclass(frozen=True, slots=True)
class SessionOver:
    """The Spark session has ended, and every Spark job with it."""

    error: FTLayerError


@dataclass(frozen=True, slots=True)
class TasksCounted:
    """Answer to `CountTasks`; ``counts`` None: Spark does not tell."""

    counts: TaskCounts | None


@dataclass(frozen=True, slots=True)
class Broken:
    """The driver's side cannot go on: the vertex or a source's reader failed for good."""

    error: FTLayerError


# Barrier mode alone:


@dataclass(frozen=True, slots=True)
class RestartRequested:
    """All tasks are to be restored: too many checkpoints have failed, say."""

    reason: str


@dataclass(frozen=True, slots=True)
class RestoreReady:
    """The slots of `PrepareRestore` begin with this: checkpoint ``checkpoint`` (0: with nothing), a `Restore` a slot.

    It stands: whatever it holds of sinks is committed. ``undecided``: the latest of those that may turn out to exist,
    0 for none; nothing that it may hold of sinks is to be aborted. ``gone_back``: what to say where a later one is
    damaged.
    """

    number: int
    checkpoint: int
    restores: Mapping[int, Restore]
    undecided: int = 0
    gone_back: str = ""


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """There is nothing that can be restored; ``lasting``: nor will there be."""

    number: int
    error: FTLayerError
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointComplete:
    """A checkpoint is complete that the job may go back to.

    ``condemned``: the records that it holds as dead since they end processes, by chain and digest. ``read``: how many
    records sources had read in it since the job began, over restores.
    """

    condemned: frozenset[tuple[str, bytes]] = frozenset()
    read: int = 0


@dataclass(frozen=True, slots=True)
class EndTasksRequested:
    """The last checkpoint is committed. ``drain``: let the streams end; otherwise tasks end where they are."""

    drain: bool = True


Event = (
    Said
    | Broke
    | SparkJobEnded
    | Tick
    | CancelRequested
    | DrainRequested
    | StatusKnown
    | RecallDone
    | Condemned
    | SessionOver
    | TasksCounted
    | Broken
    | RestartRequested
    | RestoreReady
    | RestoreFailed
    | CheckpointComplete
    | EndTasksRequested
)

# ---------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class SendTo:
    slot: int
    instance: str
    message: ToSlot


@dataclass(frozen=True, slots=True)
class SubmitSlot:
    """Start a Spark job that runs the slot."""

    slot: int
    attempt: int


@dataclass(frozen=True, slots=True)
class CancelSlot:
    """End the Spark job of a slot, whatever it does."""

    slot: int
    attempt: int


@dataclass(frozen=True, slots=True)
class AskSession:
    """Find out whether the Spark session lives; answered by `SessionOver` if it does not, else by nothing."""


@dataclass(frozen=True, slots=True)
class CountTasks:
    """Ask Spark which slots' tasks it has started; answered by `TasksCounted`."""


@dataclass(frozen=True, slots=True)
class RecallStreams:
    """Have the vertex make everything pending due for replay; answered by `RecallDone`."""

    number: int


@dataclass(frozen=True, slots=True)
class Condemn:
    """Have the vertex make a record a dead letter; answered by `Condemned`."""

    failure: Failure


@dataclass(frozen=True, slots=True)
class AskVertexStatus:
    """Ask what is still to do; answered by `StatusKnown`."""

    number: int


@dataclass(frozen=True, slots=True)
class SlotUp:
    """A new instance of the slot was told to start its tasks: sources' splits may be sent to it."""

    slot: int


@dataclass(frozen=True, slots=True)
class SlotDown:
    """The slot will not report the splits that it has not reported as done."""

    slot: int


@dataclass(frozen=True, slots=True)
class PrepareRestore:
    """Barrier mode: find out what these slots are to begin with; answered by `RestoreReady` or `RestoreFailed`.

    Checkpoints under way are given up, and none begins before `AllRunning`.
    """

    number: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RegionDeployed:
    """Barrier mode: these slots were told to start their tasks, from this checkpoint."""

    slots: tuple[int, ...]
    checkpoint: int


@dataclass(frozen=True, slots=True)
class AllRunning:
    """Barrier mode: all tasks of the job are restored and run."""


@dataclass(frozen=True, slots=True)
class Over:
    """The job has come to its final state; nothing of it runs any more."""

    state: JobState
    error: FTLayerError | None = None


JobInstruction = SendTo | SubmitSlot | CancelSlot | AskSession | CountTasks | SlotUp | SlotDown | Over
"""What the rules of any job may want."""

AckerInstruction = RecallStreams | Condemn | AskVertexStatus
BarrierInstruction = PrepareRestore | RegionDeployed | AllRunning
"""What a mode's rules may want beside: its `DriverMode` carries it out."""
