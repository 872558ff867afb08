"""The events of a job's rules, and their instructions. Frozen values; `JobThread` carries the instructions out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ftlayer.checkpoint.snapshots import Restore
from ftlayer.errors import FTLayerError, JobStartError, SlotLostError
from ftlayer.runtime.protocol import messages
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
    """Spark's figures on task slots of all executors: all, those ``busy``; and the job's slots whose task runs."""

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
    slot: int
    attempt: int


@dataclass(frozen=True, slots=True)
class CancelSlot:
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


@dataclass
class SlotRecord:
    """One slot: its Spark job, and the instance that is connected.

    Attributes:
        number: which slot.
        attempt: how many Spark jobs were submitted for it.
        submitted: the latest of them has not ended, as far as is known.
        cancelled: it was told to.
        submit_at_ms: when the next one is due; None while none is.
        lost_ms: when an instance was lost that no Spark job was submitted for yet; None: none was.
        patience_ms: until when something is waited for (a Hello; the end of a cancelled Spark job).
        hello: the connected instance; None while there is none.
        deployed: that instance was told to start its tasks.
        started: it has said that they run.
        asked_epoch, dropped_epoch: the last `DropPeers` sent to it and the last it answered.
        heard_ms: when it was heard last.
        heartbeat: what it said last.
        ended: all its tasks have ended; nothing more is wanted of it.
        greeted: some instance of it has been connected.
        failed_starts: Spark jobs that failed before there was one.
        revived: had ended, and starts again because another was lost: no failure of its own.
        excused: was lost to a record, as far as is known: no failure of its own either.
        silent: the last one that was lost did not say why: its process may have ended.
        was_lost: an instance was lost that ran, and nothing was started in its place yet.
        restarts: instances that were started in place of such ones.
        again: when the last of them starts, as `restart_of` says it; "" for at once.
        failure: why the last one was lost, or why its Spark job failed before there was one.
        loss: why the last one that ran was lost, with what Spark said of it.
        loss_in: the chain it was busy with then, as far as is known.
        lost_instance: which one that was.
        death: how that one's process has ended itself; None where nobody has said so.
        spark_error: what Spark said of the latest Spark job when it ended; None if nothing.
    """

    number: int
    attempt: int = 0
    submitted: bool = False
    cancelled: bool = False
    submit_at_ms: int | None = None
    lost_ms: int | None = None
    patience_ms: int = 0
    hello: messages.Hello | None = None
    deployed: bool = False
    started: bool = False
    asked_epoch: int = 0
    dropped_epoch: int = 0
    heard_ms: int = 0
    heartbeat: messages.Heartbeat | None = None
    ended: bool = False
    greeted: bool = False
    failed_starts: int = 0
    revived: bool = False
    excused: bool = False
    silent: bool = False
    was_lost: bool = False
    restarts: int = 0
    again: str = ""
    failure: str = ""
    loss: str = ""
    loss_in: str = ""
    lost_instance: str = ""
    death: messages.Death | None = None
    spark_error: str | None = None

    @property
    def running(self) -> bool:
        return self.deployed and not self.ended

    @property
    def peer(self) -> messages.Peer:
        assert self.hello is not None
        return messages.Peer(self.number, self.hello.instance, self.hello.address, self.hello.socket)

    def is_instance(self, instance: str) -> bool:
        return self.hello is not None and self.hello.instance == instance

    def start_again(self) -> None:
        """Another instance is on its way, or there, in place of one that was lost: count that, once."""
        self.restarts += self.was_lost
        self.was_lost = False

    def connect(self, hello: messages.Hello, now_ms: int) -> None:
        self.start_again()
        self.hello, self.greeted, self.deployed, self.started = hello, True, False, False
        self.heartbeat, self.heard_ms = None, now_ms
        self.failure, self.again, self.spark_error = "", "", None

    def disconnect(self, patience_ms: int) -> None:
        self.hello, self.deployed, self.ended, self.heartbeat = None, False, False, None
        self.started = False
        self.asked_epoch = self.dropped_epoch = 0
        self.patience_ms = patience_ms

    def validate(self) -> None:
        where = f"slot {self.number}"
        assert self.hello is not None or not self.deployed, f"{where} is deployed without an instance"
        assert self.hello is None or self.greeted, f"{where} has an instance that did not say Hello"
        assert self.deployed or not self.started, f"{where} runs tasks that it was not told to start"
        assert self.deployed or not self.ended, f"{where} has ended before it was told to start"
        assert self.attempt or not self.submitted, f"{where} is submitted without an attempt"


class Crew:
    """The slots of a job. ``draining``: whether their sources were told to end."""

    def __init__(self, slots: int, start_timeout_ms: int) -> None:
        """``start_timeout_ms``: how long the next instance of a slot is waited for."""
        self.slots = [SlotRecord(number) for number in range(slots)]
        self.draining = False
        self._start_timeout_ms = start_timeout_ms

    @property
    def running(self) -> Iterator[SlotRecord]:
        return (slot for slot in self.slots if slot.running)

    @property
    def instances(self) -> frozenset[str]:
        return frozenset(slot.hello.instance for slot in self.slots if slot.hello is not None)

    @property
    def all_deployed(self) -> bool:
        return all(slot.deployed for slot in self.slots)

    @property
    def all_started(self) -> bool:
        return all(slot.started or slot.ended for slot in self.slots)

    def tell(self, slot: SlotRecord, message: messages.ToSlot) -> list[JobInstruction]:
        assert slot.hello is not None
        return [SendTo(slot.number, slot.hello.instance, message)]

    def tell_running(self, message: messages.ToSlot) -> list[JobInstruction]:
        return [each for slot in self.running for each in self.tell(slot, message)]

    def deploy(self, slot: SlotRecord, deploy: messages.Deploy, now_ms: int) -> list[JobInstruction]:
        """Tell the instance of a slot to start its tasks; their sources end at once in a job that drains."""
        slot.deployed, slot.heard_ms = True, now_ms
        stop = self.tell(slot, messages.StopSources()) if self.draining else []
        return [*self.tell(slot, deploy), *stop, SlotUp(slot.number)]

    def drop(self, slot: SlotRecord, now_ms: int) -> None:
        """The instance of a slot is gone, or not to be listened to any more: another one is waited for."""
        slot.disconnect(now_ms + self._start_timeout_ms)

    def drain(self) -> list[JobInstruction]:
        if self.draining:
            return []
        self.draining = True
        return self.tell_running(messages.StopSources())

    def validate(self) -> None:
        for slot in self.slots:
            slot.validate()


# A slot lost so soon (ms) after it was given what was pending …
SOON_MS = 10_000
# … so many times in a row, may have been ended by one of the records, which is looked for then.
SUSPICIOUS_LOSSES = 2


_SPARK_SAYS = "; Spark says: "


def with_spark_error(reason: str, spark_error: str | None) -> str:
    # A slot may be tried many times for one reason.
    return f"{reason.partition(_SPARK_SAYS)[0]}{_SPARK_SAYS}{spark_error}" if spark_error else reason


def reason_of(failed: messages.SlotFailed) -> str:
    where = f" in {failed.operator}" if failed.operator else ""
    trace = f"\n{failed.traceback}" if failed.traceback else ""
    return f"it failed{where}: {failed.reason}{trace}"


def not_up(slots: Sequence[SlotRecord], start_timeout_ms: int, counts: TaskCounts | None) -> JobStartError:
    """Return the error for slots that are not there in time. ``counts``: what Spark says of their tasks, if it does."""
    missing = [slot for slot in slots if slot.hello is None]
    failures = sorted({slot.failure for slot in missing if slot.failure})
    were = "was" if len(missing) == 1 else "were"
    return JobStartError(
        f"{_numbers([slot.number for slot in missing])} of {len(slots)} {were} not up within {start_timeout_ms} ms "
        "(start_timeout_ms). "
        + " ".join(_why_not_up([slot.number for slot in missing], counts))
        + "".join(f"; {failure}" for failure in failures)
    )


def _why_not_up(missing: Sequence[int], counts: TaskCounts | None) -> list[str]:
    longer = "give them longer with TopologyOptions(start_timeout_ms=…)"
    if counts is None:
        return [
            "Spark does not tell whether it has started their tasks. Each needs a task slot of its own for as long as "
            f"the job runs: other Spark jobs may hold them. On a machine that is slow or busy {longer}"
        ]
    started = [number for number in missing if number in counts.started]
    waiting = [number for number in missing if number not in counts.started]
    said = []
    if started:
        said.append(
            f"Spark has started the tasks of {_numbers(started)}: their Python processes still start and import what "
            f"they need, which takes its time on a machine that is slow or busy; {longer}."
        )
    if waiting:
        free = max(0, counts.total - counts.busy)
        slots = f"of {counts.total} task slots {counts.busy} are busy and {free} free"
        if not counts.total:
            why = f"there is no executor yet: see that the application gets some, or {longer}."
        elif free >= len(waiting):
            why = f"{slots}, so it is about to: {longer}."
        else:
            why = (
                f"{slots}, and each slot of a topology needs one of its own for as long as the job runs: end the "
                "other Spark jobs that hold them, or start Spark with more (master local[N], or more executors)."
            )
        said.append(f"Spark has not started the tasks of {_numbers(waiting)}: {why}")
    return said


def _numbers(slots: Sequence[int]) -> str:
    return f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"


def never_works(slot: int, failed: messages.SlotFailed) -> JobStartError:
    return JobStartError(f"slot {slot} cannot do its part: {failed.reason}")


def untracked(failure: str) -> SlotLostError:
    return SlotLostError(
        f"{failure}. With FTStatus.OFF nothing says which records it held, so the job ends; with FTStatus.ON they "
        "would be replayed"
    )


def conviction(root: int, slot: SlotRecord) -> Failure:
    """Return what becomes of a record that ended the process of ``slot``, alone, twice."""
    cause = slot.loss.partition(": ")[2].partition("\n")[0]
    operator, trace = slot.loss_in, slot.loss
    if (death := slot.death) is not None:
        cause, operator, trace = death.cause, death.chain or operator, death.stack or trace
    return Failure(
        root,
        f"the process of slot {slot.number} ended while it ran this record and no other, twice: {cause}",
        operator,
        trace,
        fatal=True,
        place=f"slot {slot.number}",
    )


def convicted_by_deaths(death: messages.Death) -> messages.Conviction:
    """Return what becomes of a record over which two processes have ended themselves, this one last."""
    return messages.Conviction(
        death.chain,
        death.digest,
        f"the process of a slot ended while it ran this record and no other, twice: {death.cause}",
        death.stack,
        f"slot {death.slot}",
    )


def died(death: messages.Death) -> str:
    in_hand = f", with a record of {death.chain!r} in hand" if death.digest else ""
    stack = f"\n{death.stack}" if death.stack else ""
    return f"slot {death.slot}: it ended itself{in_hand}: {death.cause}{stack}"


def given_up(error: FTLayerError, quick_losses: int) -> FTLayerError:
    """Return why a slot is given up; says so if a record may end the processes that work on it."""
    if quick_losses < SUSPICIOUS_LOSSES:
        return error
    return SlotLostError(
        f"{quick_losses} times in a row a slot was lost within {SOON_MS // 1_000} s of the replay of what was "
        "pending. What ends slots may be outside (the machine, its memory, Spark), or a record that ends the process "
        "that works on it: it is in the vertex then, among what FTLayer.pending and FTLayer.waiting list, if they "
        f"list any. {error}"
    )
