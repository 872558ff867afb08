"""The checkpoints under way: how they begin, and the two ways they end."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum, StrEnum, auto

from ftlayer.checkpoint.barrier import Alignment, Barrier, SnapshotKind
from ftlayer.checkpoint.coordinator.events import (
    Answer,
    CheckpointInstruction,
    DiscardParts,
    FailJob,
    NotifyAborted,
    Subtask,
    Trigger,
)
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, EdgeInfo, OperatorInfo, SubtaskSnapshot
from ftlayer.common.clock import Now
from ftlayer.common.printable import shown_url
from ftlayer.errors import CheckpointError, FTLayerError
from ftlayer.vertex.calls.jobs import CheckpointDetails, CheckpointTotals, SubtaskCheckpointDetails


class CheckpointStage(Enum):
    WRITING = auto()
    WRITTEN = auto()  # by all subtasks
    PUBLISHING = auto()  # the metadata
    COMMITTING = auto()  # sinks


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Facts that all checkpoints of an execution have in common.

    Attributes:
        job, run, max_parallelism, operators, edges: as in `Checkpoint`.
        subtasks: of all chains: each has a part in every checkpoint.
        sources: those of them that say when their data has ended: a source's, and heads of iterations.
        may_overtake: barriers may overtake records where a chain holds its input.
    """

    job: str
    run: str
    max_parallelism: int
    operators: tuple[OperatorInfo, ...]
    subtasks: frozenset[Subtask]
    sources: frozenset[Subtask]
    edges: tuple[EdgeInfo, ...] = ()
    may_overtake: bool = False


@dataclass(eq=False)
class PendingCheckpoint:
    """A checkpoint under way.

    Attributes:
        barrier: what was triggered.
        triggered_ms: by the monotone clock.
        waiting: subtasks whose parts are not there yet.
        stops: whether the job stops with it (a savepoint).
        requests: of users, to be answered with it.
        held_up_by: chains that held their input before their parts came: what is behind them had less than the timeout.
        parts: of the subtasks that have theirs written.
        checkpoint: as it was published.
    """

    barrier: Barrier
    triggered_ms: int
    waiting: set[Subtask]
    stops: bool = False
    requests: list[int] = field(default_factory=list)
    held_up_by: set[str] = field(default_factory=set)
    parts: dict[Subtask, SubtaskSnapshot] = field(default_factory=dict)
    stage: CheckpointStage = CheckpointStage.WRITING
    checkpoint: Checkpoint | None = None

    @property
    def number(self) -> int:
        return self.barrier.checkpoint

    @property
    def is_savepoint(self) -> bool:
        return self.barrier.kind is SnapshotKind.SAVEPOINT

    @property
    def commits(self) -> bool:
        """Whether its completion commits sinks, and makes it what the job is restored from.

        A savepoint that the job goes on behind does neither (as in Flink since 1.15): it is its user's to move or
        delete, so the job cannot count on it, and what it would have committed would come a second time if the job
        were restored from the checkpoint before.
        """
        return not self.is_savepoint or self.stops

    @property
    def may_be_overtaken(self) -> bool:
        """Whether it is aligned for good, and another one would do as well in its place."""
        barrier = self.barrier
        aligned = barrier.alignment is Alignment.ALIGNED and barrier.timeout_ms is None
        replaceable = not self.is_savepoint and not barrier.final
        return self.stage is CheckpointStage.WRITING and aligned and replaceable

    def waits_for(self, chains: Collection[str]) -> list[str]:
        return sorted({uid for uid, _ in self.waiting} & set(chains))

    @property
    def can_be_aborted(self) -> bool:
        return self.stage in (CheckpointStage.WRITING, CheckpointStage.WRITTEN)

    def acked(self, part: SubtaskSnapshot) -> None:
        """Take a part; one that is there already, or was not asked for, is ignored."""
        subtask = (part.uid, part.subtask)
        if subtask in self.waiting:
            # In this order: another thread that looks on finds it in one of the two.
            self.parts[subtask] = part
            self.waiting.discard(subtask)
            if not self.waiting:
                self.stage = CheckpointStage.WRITTEN

    def validate(self, facts: JobFacts) -> None:
        have = self.parts.keys()
        assert self.waiting.isdisjoint(have), f"checkpoint {self.number} waits for parts that it has"
        assert self.waiting | have == facts.subtasks, f"checkpoint {self.number} has lost a subtask"
        writing = self.stage is CheckpointStage.WRITING
        assert writing == bool(self.waiting), f"checkpoint {self.number} is {self.stage}: {self.waiting}"
        committing = self.stage is CheckpointStage.COMMITTING
        assert committing == (self.checkpoint is not None), f"checkpoint {self.number} is {self.stage}"

    def assembled(self, facts: JobFacts, completed_ms: int) -> Checkpoint:
        parts = tuple(self.parts[subtask] for subtask in sorted(self.parts))
        return Checkpoint(
            checkpoint=self.number,
            job=facts.job,
            run=facts.run,
            kind=str(self.barrier.kind),
            started_ms=self.barrier.started_ms,
            completed_ms=completed_ms,
            max_parallelism=facts.max_parallelism,
            operators=facts.operators,
            subtasks=parts,
            unaligned=any(part.channels for part in parts),
            edges=facts.edges,
        )


HISTORY = 100
"""So many checkpoints that have come to their end are remembered."""


class CheckpointState(StrEnum):
    IN_PROGRESS = "in-progress"
    COMPLETED = "completed"
    FAILED = "failed"


class Statistics:
    def __init__(self, config: CheckpointConfig) -> None:
        self.totals = CheckpointTotals(
            tolerable_failures=config.tolerable_failures,
            interval_ms=config.interval_ms or 0,
            directory=shown_url(config.directory or ""),
            savepoint_directory=shown_url(config.savepoint_directory or ""),
        )
        self._ended: tuple[CheckpointDetails, ...] = ()

    def trigger(self) -> None:
        self.totals = replace(self.totals, triggered=self.totals.triggered + 1)

    def restore(self) -> None:
        self.totals = replace(self.totals, restored=self.totals.restored + 1)

    def complete(self, pending: PendingCheckpoint, checkpoint: Checkpoint, wall_ms: int) -> None:
        completed, latest_ms = self.totals.completed + 1, max(self.totals.last_completed_ms, wall_ms)
        self.totals = replace(self.totals, completed=completed, last_completed_ms=latest_ms)
        self._end(details_of(pending, CheckpointState.COMPLETED, wall_ms, location=checkpoint.location))

    def fail(self, pending: PendingCheckpoint, failure: str, wall_ms: int) -> None:
        self.totals = replace(self.totals, failed=self.totals.failed + 1)
        self._end(details_of(pending, CheckpointState.FAILED, wall_ms, failure=failure))

    def _end(self, ended: CheckpointDetails) -> None:
        self._ended = (*self._ended, ended)[-HISTORY:]

    def history(
        self, in_progress: Iterable[PendingCheckpoint], wall_ms: int
    ) -> tuple[CheckpointDetails, ...]:
        """Return those under way and the last `HISTORY` that are not, the latest id first; any thread.

        One that ends meanwhile is in both, and has ended.
        """
        current = [details_of(pending, CheckpointState.IN_PROGRESS, wall_ms) for pending in in_progress]
        found = {each.number: each for each in (*current, *self._ended)}
        return tuple(found[number] for number in sorted(found, reverse=True))


def details_of(
    pending: PendingCheckpoint, state: CheckpointState, now_ms: int, location: str = "", failure: str = ""
) -> CheckpointDetails:
    started_ms = pending.barrier.started_ms
    return CheckpointDetails(
        number=pending.number,
        kind=str(pending.barrier.kind),
        state=str(state),
        final=pending.barrier.final,
        triggered_ms=started_ms,
        ended_ms=0 if state is CheckpointState.IN_PROGRESS else now_ms,
        duration_ms=max(0, now_ms - started_ms),
        expected=len(pending.waiting.union(pending.parts)),
        subtasks=tuple(_part(snapshot) for _, snapshot in sorted(pending.parts.items())),
        location=location,
        failure=failure,
    )


def _part(part: SubtaskSnapshot) -> SubtaskCheckpointDetails:
    times = asdict(part.times) | {"written_bytes": part.written_bytes, "state_bytes": part.state_bytes}
    return SubtaskCheckpointDetails(part.uid, part.subtask, **times)


class AbortReason(Enum):
    """Why a checkpoint was given up: its text, and whether it counts as a failure."""

    EXPIRED = ("it took longer than the timeout", True)
    HELD = ("a chain holds its input", False)
    DECLINED = ("a task could not write its part", True)
    STORAGE = ("its metadata could not be written", True)
    GIVEN_UP = ("a task gave it up", False)
    SUBSUMED = ("a later checkpoint was completed before it", False)
    BASE_GONE = ("it builds on a checkpoint that was discarded meanwhile", False)
    JOB_RESTARTS = ("the job restarts", False)
    JOB_OVER = ("the job is over", False)

    def __init__(self, text: str, counts: bool) -> None:
        self.text = text
        self.counts = counts


class FailureCounter:
    """Counts consecutive failures. Savepoints are none of its business.

    Attributes:
        in_a_row: failures since the last success, or since the job was failed for them.
    """

    REMEMBERED = 1_000
    """So many failed checkpoints are told apart, so that none counts twice."""

    def __init__(self, tolerable: int) -> None:
        self._tolerable = tolerable
        self._succeeded = 0
        self.in_a_row = 0
        self._counted: deque[int] = deque(maxlen=self.REMEMBERED)

    def failed(self, checkpoint: int, reason: AbortReason) -> bool:
        """Take a failure; returns whether it is one too many, and begins to count anew then."""
        if not reason.counts or checkpoint <= self._succeeded or checkpoint in self._counted:
            return False
        self._counted.append(checkpoint)
        self.in_a_row += 1
        if self.in_a_row <= self._tolerable:
            return False
        self.in_a_row = 0
        return True

    def succeeded(self, checkpoint: int) -> None:
        """Take a success; failures of earlier checkpoints that are reported late do not count."""
        if checkpoint > self._succeeded:
            self._succeeded = checkpoint
            self.in_a_row = 0


# A chain whose records fail, or wait, holds its input for as long as a service is down, and barriers wait there behind
# records. Where a hold lasts they overtake these, as in unaligned checkpoints: others are not to wait so long.

LASTING_MS = 5_000
"""A hold that has lasted so long is not waited for."""


class InputHolds:
    """Told which chains hold their input. Times are of one monotone clock, ms."""

    def __init__(self) -> None:
        self._since_ms: dict[str, int] = {}
        self._until_ms: dict[str, int] = {}  # of those that hold it no more

    def told(self, chains: Collection[str], now_ms: int) -> None:
        self._until_ms |= {uid: now_ms for uid in self._since_ms if uid not in chains}
        self._since_ms = {uid: self._since_ms.get(uid, now_ms) for uid in chains}

    @property
    def chains(self) -> Collection[str]:
        return self._since_ms.keys()

    def after(self, mono_ms: int) -> frozenset[str]:
        """Those that hold their input, or have at some time after this one."""
        ended = (uid for uid, until_ms in self._until_ms.items() if until_ms > mono_ms)
        return frozenset((*self._since_ms, *ended))

    def lasting(self, now_ms: int) -> frozenset[str]:
        return frozenset(uid for uid, since_ms in self._since_ms.items() if now_ms - since_ms >= LASTING_MS)

    def lasts_at_ms(self, chains: Iterable[str]) -> int:
        return min(self._since_ms[uid] for uid in chains) + LASTING_MS


def why_held(chains: Sequence[str]) -> str:
    reason = "too many of its records failed (max_failing) or waited (max_waiting)"
    return f"{', '.join(map(repr, chains))} took no input meanwhile, since {reason}"


_REMEMBERED = 1_000
# Of so many checkpoints that were given up, parts that come late are removed.


class PendingCheckpoints:
    """Holds them by their ids, in order.

    Attributes:
        statistics: what has become of all of them.
        failures: those in a row.
        failure: what is to become of the job for it; its owner resets it to None.
        final_failed_ms: when the final checkpoint, or a savepoint to stop with, was given up last; None: never.
    """

    def __init__(self, config: CheckpointConfig, facts: JobFacts) -> None:
        self._config = config
        self._facts = facts
        self._pending: dict[int, PendingCheckpoint] = {}
        self._aborted: dict[int, Barrier] = {}
        self.failures = FailureCounter(config.tolerable_failures)
        self.statistics = Statistics(config)
        self.failure: FailJob | None = None
        self.final_failed_ms: int | None = None

    def __len__(self) -> int:
        return len(self._pending)

    @property
    def all(self) -> tuple[PendingCheckpoint, ...]:
        return tuple(self._pending.values())

    @property
    def expires_ms(self) -> int | None:
        writing = (each.triggered_ms for each in self.all if each.stage is CheckpointStage.WRITING)
        return min((since_ms + self._config.timeout_ms for since_ms in writing), default=None)

    def get(self, checkpoint: int) -> PendingCheckpoint | None:
        return self._pending.get(checkpoint)

    def begin(
        self, barrier: Barrier, now: Now, requests: list[int], *, stops: bool = False
    ) -> list[CheckpointInstruction]:
        waiting = set(self._facts.subtasks)
        self._pending[barrier.checkpoint] = PendingCheckpoint(barrier, now.mono_ms, waiting, stops, requests)
        self.statistics.trigger()
        return [Trigger(barrier)]

    def acked(self, checkpoint: int, part: SubtaskSnapshot, holds: InputHolds) -> list[CheckpointInstruction]:
        """Take a part. One of a checkpoint that was given up is to be removed."""
        pending = self._pending.get(checkpoint)
        if pending is not None:
            if part.uid in pending.waits_for(holds.after(pending.triggered_ms)):
                pending.held_up_by.add(part.uid)
            pending.acked(part)
        elif checkpoint in self._aborted:
            return [DiscardParts(checkpoint, (part,), self._aborted[checkpoint].location)]
        return []

    def complete(
        self, pending: PendingCheckpoint, checkpoint: Checkpoint, now: Now, error: CheckpointError | None
    ) -> list[CheckpointInstruction]:
        """Its sinks are committed, or could not be (``error``)."""
        self.statistics.complete(pending, checkpoint, now.wall_ms)
        del self._pending[pending.number]
        answer = checkpoint if error is None else None
        return [Answer(request, answer, error) for request in pending.requests]

    def abort(
        self,
        pending: PendingCheckpoint,
        reason: AbortReason,
        now: Now,
        detail: str = "",
        final: FTLayerError | None = None,
    ) -> list[CheckpointInstruction]:
        """Give it up; ``final``: the error behind it, where no restart mends it."""
        number, text = pending.number, f"{reason.text}: {detail}" if detail else reason.text
        self.statistics.fail(pending, text, now.wall_ms)
        del self._pending[number]
        self._aborted[number] = pending.barrier
        if len(self._aborted) > _REMEMBERED:
            del self._aborted[next(iter(self._aborted))]
        if pending.barrier.final:
            self.final_failed_ms = now.mono_ms
        if pending.stops:
            self.fail_job(f"the job could not be stopped with savepoint {number}: {text}", final)
        elif not pending.is_savepoint and self.failures.failed(number, reason):
            said = f"more than {self._config.tolerable_failures} checkpoints in a row failed; the last one, {number}"
            self.fail_job(f"{said}: {text}", final)
        error = CheckpointError(f"{pending.barrier.kind} {number} was given up: {text}")
        instructions: list[CheckpointInstruction] = [NotifyAborted(number, text)]
        if pending.parts:
            parts = tuple(pending.parts.values())
            instructions.append(DiscardParts(number, parts, pending.barrier.location))
        return instructions + [Answer(request, error=error) for request in pending.requests]

    def expire(self, now: Now, holds: InputHolds) -> list[CheckpointInstruction]:
        """Give up what takes too long. Where chains have held it up by holding their input, it is no failure."""
        instructions: list[CheckpointInstruction] = []
        latest_ms = now.mono_ms - self._config.timeout_ms
        for pending in self.all:
            if pending.stage is CheckpointStage.WRITING and pending.triggered_ms <= latest_ms:
                chains = pending.held_up_by.union(pending.waits_for(holds.after(pending.triggered_ms)))
                why = f"{AbortReason.EXPIRED.text}, and {why_held(sorted(chains))}" if chains else ""
                reason = AbortReason.HELD if chains else AbortReason.EXPIRED
                instructions += self.abort(pending, reason, now, why)
        return instructions

    def held_up(self, held: Collection[str]) -> list[str]:
        aligned = (pending for pending in self.all if pending.may_be_overtaken)
        return sorted({uid for pending in aligned for uid in pending.waits_for(held)})

    def overtake(self, held: Collection[str], now: Now) -> tuple[list[CheckpointInstruction], list[int]]:
        """Give up aligned checkpoints that wait for ``held`` chains, which hold their input: the next one overtakes.

        Also returns the requests of users that waited for them.
        """
        instructions: list[CheckpointInstruction] = []
        requests: list[int] = []
        for pending in self.all:
            chains = pending.waits_for(held) if pending.may_be_overtaken else []
            if chains:
                requests += pending.requests
                pending.requests = []
                instructions += self.abort(pending, AbortReason.HELD, now, why_held(chains))
        return instructions, requests

    def fail_job(self, reason: str, final: FTLayerError | None) -> None:
        """The job has to be restarted; of several failures at once the last says why, any of them that it is final."""
        before = None if self.failure is None else self.failure.final
        self.failure = FailJob(reason, final or before)

    def counts(self, retained: Iterable[Checkpoint]) -> CheckpointTotals:
        """Return the totals; ``retained`` are those that the job may go back to, the oldest first."""
        return replace(
            self.statistics.totals,
            in_progress=len(self._pending),
            failures_in_a_row=self.failures.in_a_row,
            retained=tuple(shown_url(each.location) for each in retained if each.location),
        )

    def validate(self) -> None:
        numbers = list(self._pending)
        assert numbers == sorted(numbers), f"ids do not grow: {numbers}"
        assert not self._pending.keys() & self._aborted.keys(), "what was given up is under way"
        checkpoints = [pending for pending in self.all if not pending.is_savepoint]
        assert len(checkpoints) <= self._config.max_concurrent, f"{numbers} are too many at a time"
        requests = [request for pending in self.all for request in pending.requests]
        assert len(requests) == len(set(requests)), f"a request is to be answered twice: {requests}"
        for pending in self.all:
            pending.validate(self._facts)
