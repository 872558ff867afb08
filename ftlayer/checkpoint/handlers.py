from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field, replace

from ftlayer.checkpoint.barrier import Alignment, Barrier, SnapshotKind
from ftlayer.checkpoint.options import CheckpointingMode
from ftlayer.errors import CheckpointError, ConfigError

# One handler serves one task with n input channels, which it knows by numbers from 0 to n-1. Its owner hands elements
# of a channel to the task in their order, leaves blocked channels alone, and carries decisions out in their order,
# before it hands on anything else. Times are wall-clock ms, as in `Barrier.started_ms`.


@dataclass(frozen=True, slots=True)
class BlockChannel:
    channel: int


@dataclass(frozen=True, slots=True)
class Unblock:
    """Go on with this channel; what has waited comes first."""

    channel: int


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """Take the task's snapshot now, and send ``barrier`` on to all its outputs (ahead of everything if UNALIGNED).

    ``alignment_ms``: time since the first barrier of this checkpoint was reached.
    ``start_delay_ms``: from the coordinator's beginning to the first barrier here.
    With an UNALIGNED barrier each of ``capture`` has records in front of its barrier: those that wait now belong to
    the checkpoint, and so do those that still come until the barrier does, or until `StopCapture`.
    """

    barrier: Barrier
    alignment_ms: int
    start_delay_ms: int
    capture: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StopCapture:
    """Nothing more of this channel belongs to the checkpoint: its barrier has come, or it has ended."""

    checkpoint: int
    channel: int


@dataclass(frozen=True, slots=True)
class AllBarriers:
    """The barrier has come on all channels: what was captured of an unaligned checkpoint is complete."""

    checkpoint: int
    alignment_ms: int


@dataclass(frozen=True, slots=True)
class GiveUp:
    """This checkpoint cannot be taken here: say so to the coordinator, and send `CancelMarker` to all outputs.

    If its snapshot was begun it is cancelled.
    """

    checkpoint: int
    reason: str


Decision = BlockChannel | Unblock | TakeSnapshot | StopCapture | AllBarriers | GiveUp


class BarrierHandler(ABC):
    """Each checkpoint leads to one `TakeSnapshot` or one `GiveUp` at most; every channel is released."""

    def __init__(self, channels: int) -> None:
        self._open = set(range(channels))
        # Checkpoints up to this one need nothing more.
        self._over = 0

    def announced(self, channel: int, barrier: Barrier, now_ms: int) -> list[Decision]:
        """A barrier waits in a channel behind records that the task has not had yet.

        Told for every barrier of a remote or local channel when it arrives. An UNALIGNED one is not handed out again
        by `barrier`: its owner takes it out of the channel, it counts as come, and what was before it stays. Where
        nothing would count it, it is a `CheckpointError`: only a job with unaligned checkpoints has it.
        """
        if barrier.alignment is Alignment.UNALIGNED:
            raise CheckpointError(
                f"channel {channel} brought an unaligned barrier of checkpoint {barrier.checkpoint} to a task whose "
                "barriers overtake nothing; unaligned has to be set for the whole job"
            )
        return []

    @abstractmethod
    def barrier(self, channel: int, barrier: Barrier, now_ms: int) -> list[Decision]:
        """A barrier that is not UNALIGNED has come to its turn."""

    @abstractmethod
    def cancelled(self, channel: int, checkpoint: int, now_ms: int) -> list[Decision]:
        """A `CancelMarker` has come to its turn."""

    @abstractmethod
    def ended(self, channel: int, now_ms: int) -> list[Decision]:
        """The channel has ended; nothing comes on it any more. It counts as through for every checkpoint."""

    @abstractmethod
    def aborted(self, checkpoint: int, now_ms: int) -> list[Decision]:
        """The coordinator has given this checkpoint up (and maybe all before it).

        No `GiveUp` follows, and no cancel marker need be sent.
        """

    def on_time(self, now_ms: int) -> list[Decision]:
        return []

    @property
    def due_ms(self) -> int | None:
        """When `on_time` has something to do; None: not foreseen."""
        return None


SUBSUMED = "a later checkpoint came before this one's barriers did"
"""A channel has gone on to a later checkpoint, or that one is unaligned and could not wait."""

GIVEN_UP_BEFORE = "a task before this one gave it up"
"""A cancel marker has come."""

TOO_MANY = "too many checkpoints under way"
"""`TrackingHandler` has let the earliest one go."""


@dataclass(slots=True)
class AlignmentProgress:
    """The checkpoint that is under way.

    Attributes:
        barrier: its first one.
        first_ms: when that was reached.
        missing: the channels whose barrier has not come.
        blocked: channels that wait, in the order in which they were blocked.
        captures: its snapshot is taken already, and what comes on ``missing`` channels belongs to it.
    """

    barrier: Barrier
    first_ms: int
    missing: set[int]
    blocked: list[int] = field(default_factory=list)
    captures: bool = False

    @property
    def checkpoint(self) -> int:
        return self.barrier.checkpoint

    def alignment_ms(self, now_ms: int) -> int:
        """Return the time since the first barrier; 0 if the clock was set back."""
        return max(0, now_ms - self.first_ms)

    def snapshot(self, barrier: Barrier, now_ms: int, capture: tuple[int, ...] = ()) -> TakeSnapshot:
        """Return the decision that takes the snapshot, and sends ``barrier`` on."""
        delay = max(0, self.first_ms - barrier.started_ms)
        return TakeSnapshot(barrier, self.alignment_ms(now_ms), delay, capture)


class AlignedHandler(BarrierHandler):
    """Of tasks whose barriers never overtake records: a channel whose barrier has come waits for the others.

    The aligned variant of Carbone et al., "Lightweight Asynchronous Snapshots for Distributed Dataflows" (2015), with
    what Flink's `SingleCheckpointBarrierHandler` makes of barriers that never come. One checkpoint is under way at a
    time, so a barrier, or a cancel marker, of a later one shows that its channel will never bring the earlier one's.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self._current: AlignmentProgress | None = None
        # Of those after ``_over``, those that the coordinator gave up.
        self._aborted: set[int] = set()

    def barrier(self, channel: int, barrier: Barrier, now_ms: int) -> list[Decision]:
        decisions = self._make_way(barrier.checkpoint)
        if self._is_over(barrier.checkpoint):
            return decisions
        current = self._current or self._begin(barrier, now_ms)
        decisions += self._through(current, channel, now_ms)
        if self._current is current and not current.captures:
            current.blocked.append(channel)
            decisions.append(BlockChannel(channel))
        return decisions

    def cancelled(self, channel: int, checkpoint: int, now_ms: int) -> list[Decision]:
        decisions = self._make_way(checkpoint)
        if self._current is not None and self._current.checkpoint == checkpoint:
            return [*decisions, *self._drop(self._current), GiveUp(checkpoint, GIVEN_UP_BEFORE)]
        if not self._is_over(checkpoint):
            decisions.append(GiveUp(checkpoint, GIVEN_UP_BEFORE))
        self._forget(checkpoint)
        return decisions

    def ended(self, channel: int, now_ms: int) -> list[Decision]:
        self._open.discard(channel)
        return [] if self._current is None else self._through(self._current, channel, now_ms)

    def aborted(self, checkpoint: int, now_ms: int) -> list[Decision]:
        if self._current is not None and self._current.checkpoint == checkpoint:
            return self._drop(self._current)
        if checkpoint > self._over:
            self._aborted.add(checkpoint)
        return []

    def _begin(self, barrier: Barrier, now_ms: int) -> AlignmentProgress:
        self._forget(barrier.checkpoint - 1)
        self._current = AlignmentProgress(barrier, now_ms, set(self._open))
        return self._current

    def _through(self, current: AlignmentProgress, channel: int, now_ms: int) -> list[Decision]:
        """Wait for ``channel`` no longer; the last one completes the checkpoint."""
        current.missing.discard(channel)
        if current.missing:
            return []
        return [current.snapshot(current.barrier, now_ms), *self._drop(current)]

    def _make_way(self, checkpoint: int) -> list[Decision]:
        """Give up what is under way if it is earlier than ``checkpoint``."""
        current = self._current
        if current is None or current.checkpoint >= checkpoint:
            return []
        return [*self._drop(current), GiveUp(current.checkpoint, SUBSUMED)]

    def _drop(self, current: AlignmentProgress) -> list[Decision]:
        """Be done with what is under way, well or not; return what its channels need."""
        self._current = None
        self._forget(current.checkpoint)
        return [Unblock(channel) for channel in current.blocked]

    def _is_over(self, checkpoint: int) -> bool:
        return checkpoint <= self._over or checkpoint in self._aborted

    def _forget(self, checkpoint: int) -> None:
        self._over = max(self._over, checkpoint)
        self._aborted = {aborted for aborted in self._aborted if aborted > self._over}


class AlternatingHandler(AlignedHandler):
    """Of tasks whose checkpoints are unaligned, or turn so, after Flink's alternating states.

    A checkpoint begins aligned, and turns unaligned at one stroke, never back: when an UNALIGNED barrier of it arrives,
    or when its time is up. Then a barrier counts as come when it arrives: what waits in front of it was captured at its
    arrival, so an aligned barrier of the checkpoint that comes to its turn later is nothing new. A snapshot that was
    taken is given up (`GiveUp`) if a later checkpoint comes before all barriers have.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        # Barriers that have arrived and not come to their turn; channels without one are not in it.
        self._waiting: dict[int, deque[Barrier]] = {}

    def announced(self, channel: int, barrier: Barrier, now_ms: int) -> list[Decision]:
        if barrier.alignment is not Alignment.UNALIGNED:
            self._waiting.setdefault(channel, deque()).append(barrier)
        if self._is_over(barrier.checkpoint):
            return []
        decisions: list[Decision] = []
        if barrier.alignment is Alignment.UNALIGNED:
            decisions = self._turn(barrier, now_ms)
        current = self._current
        if current is not None and current.captures and current.checkpoint == barrier.checkpoint:
            return [*decisions, *self._through(current, channel, now_ms)]
        return [*decisions, *self.on_time(now_ms)]

    def barrier(self, channel: int, barrier: Barrier, now_ms: int) -> list[Decision]:
        self._taken(channel, barrier.checkpoint)
        return [*super().barrier(channel, barrier, now_ms), *self.on_time(now_ms)]

    def cancelled(self, channel: int, checkpoint: int, now_ms: int) -> list[Decision]:
        self._taken(channel, checkpoint)
        return super().cancelled(channel, checkpoint, now_ms)

    def ended(self, channel: int, now_ms: int) -> list[Decision]:
        self._waiting.pop(channel, None)
        return super().ended(channel, now_ms)

    def on_time(self, now_ms: int) -> list[Decision]:
        decisions: list[Decision] = []
        while (barrier := self._may_turn()) is not None and self._due_ms(barrier) <= now_ms:
            decisions += self._turn(barrier, now_ms)
        return decisions

    @property
    def due_ms(self) -> int | None:
        barrier = self._may_turn()
        return None if barrier is None else self._due_ms(barrier)

    @staticmethod
    def _due_ms(barrier: Barrier) -> int:
        return barrier.started_ms + (barrier.timeout_ms or 0)

    def _may_turn(self) -> Barrier | None:
        """Return the barrier of the next checkpoint that time may turn.

        That is the one under way, if it is still aligned: a savepoint that aligns is left in peace, whatever waits.
        Otherwise it is the earliest one that waits behind records.
        """
        current = self._current
        if current is not None and not current.captures:
            first: Barrier | None = current.barrier
        else:
            begun = 0 if current is None else current.checkpoint
            later = [barrier for barrier in self._live() if barrier.checkpoint > begun]
            first = min(later, key=lambda barrier: barrier.checkpoint, default=None)
        if first is None or first.timeout_ms is None or first.kind is SnapshotKind.SAVEPOINT:
            return None
        return first

    def _live(self) -> list[Barrier]:
        waiting = (barrier for barriers in self._waiting.values() for barrier in barriers)
        return [barrier for barrier in waiting if not self._is_over(barrier.checkpoint)]

    def _turn(self, barrier: Barrier, now_ms: int) -> list[Decision]:
        """Take the snapshot now if it is not taken, with what waits in front of barriers and is still to come."""
        decisions = self._overtake(barrier.checkpoint)
        current = self._current or self._begin(barrier, now_ms)
        if current.captures:
            return decisions
        unaligned = replace(barrier, alignment=Alignment.UNALIGNED)
        decisions.append(current.snapshot(unaligned, now_ms, tuple(sorted(current.missing))))
        decisions += [Unblock(channel) for channel in current.blocked]
        current.blocked.clear()
        current.captures = True
        for channel, barriers in sorted(self._waiting.items()):
            if any(waits.checkpoint == barrier.checkpoint for waits in barriers):
                decisions += self._through(current, channel, now_ms)
        return decisions

    def _overtake(self, checkpoint: int) -> list[Decision]:
        """Give up all that is earlier than an unaligned checkpoint: what is under way, and what waits."""
        decisions = self._make_way(checkpoint)
        earlier = {barrier.checkpoint for barrier in self._live() if barrier.checkpoint < checkpoint}
        return decisions + [GiveUp(overtaken, SUBSUMED) for overtaken in sorted(earlier)]

    def _through(self, current: AlignmentProgress, channel: int, now_ms: int) -> list[Decision]:
        if not current.captures:
            return super()._through(current, channel, now_ms)
        if channel not in current.missing:
            return []
        current.missing.discard(channel)
        decisions: list[Decision] = [StopCapture(current.checkpoint, channel)]
        if not current.missing:
            decisions += self._drop(current)
            decisions.append(AllBarriers(current.checkpoint, current.alignment_ms(now_ms)))
        return decisions

    def _drop(self, current: AlignmentProgress) -> list[Decision]:
        still = sorted(current.missing) if current.captures else []
        stops = [StopCapture(current.checkpoint, channel) for channel in still]
        return [*stops, *super()._drop(current)]

    def _taken(self, channel: int, checkpoint: int) -> None:
        """Barriers that wait in ``channel`` up to ``checkpoint`` wait no more."""
        barriers = self._waiting.get(channel)
        while barriers and barriers[0].checkpoint <= checkpoint:
            barriers.popleft()
        if not barriers:
            self._waiting.pop(channel, None)


MAX_TRACKED = 50
"""Checkpoints that are remembered at a time, those included that were given up and have barriers to come.

As many as Flink's tracker has. Beyond it the earliest is given up: barriers are missing, or it was given up.
"""


@dataclass(slots=True)
class Tracked:
    """A checkpoint some of whose barriers have not come.

    ``barrier`` and ``first_ms`` are those of the first one; None and 0: it was given up before one came.
    """

    missing: set[int]
    barrier: Barrier | None = None
    first_ms: int = 0
    is_over: bool = False


class TrackingHandler(BarrierHandler):
    """Of tasks that may see a record again after a failure, as Flink's `CheckpointBarrierTracker`.

    Channels are never blocked: records behind a channel's barrier reach the task before its snapshot, so after a
    restore they are in its state, and come again.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        # Those after ``_over``, by id, ascending.
        self._tracked: dict[int, Tracked] = {}

    def barrier(self, channel: int, barrier: Barrier, now_ms: int) -> list[Decision]:
        if barrier.checkpoint <= self._over:
            return []
        decisions = self._pass_over(channel, barrier.checkpoint)
        tracked = self._track(barrier.checkpoint)
        if tracked.barrier is None:
            tracked.barrier, tracked.first_ms = barrier, now_ms
        decisions += self._through(barrier.checkpoint, channel, now_ms)
        return decisions + self._limit()

    def cancelled(self, channel: int, checkpoint: int, now_ms: int) -> list[Decision]:
        if checkpoint <= self._over:
            return []
        decisions = self._pass_over(channel, checkpoint)
        tracked = self._track(checkpoint)
        if not tracked.is_over:
            tracked.is_over = True
            decisions.append(GiveUp(checkpoint, GIVEN_UP_BEFORE))
        decisions += self._through(checkpoint, channel, now_ms)
        return decisions + self._limit()

    def ended(self, channel: int, now_ms: int) -> list[Decision]:
        self._open.discard(channel)
        decisions: list[Decision] = []
        for checkpoint in list(self._tracked):
            decisions += self._through(checkpoint, channel, now_ms)
        return decisions

    def aborted(self, checkpoint: int, now_ms: int) -> list[Decision]:
        if checkpoint <= self._over:
            return []
        self._track(checkpoint).is_over = True
        return self._limit()

    def _track(self, checkpoint: int) -> Tracked:
        tracked = self._tracked.get(checkpoint)
        if tracked is None:
            tracked = self._tracked[checkpoint] = Tracked(set(self._open))
            self._tracked = dict(sorted(self._tracked.items()))
        return tracked

    def _through(self, checkpoint: int, channel: int, now_ms: int) -> list[Decision]:
        """Wait for ``channel`` no longer; with the last one the checkpoint is complete, or forgotten."""
        tracked = self._tracked.get(checkpoint)
        if tracked is None:
            return []
        tracked.missing.discard(channel)
        if tracked.missing:
            return []
        # All channels are past it, so all that is earlier has been decided too.
        self._forget(checkpoint)
        if tracked.is_over or tracked.barrier is None:
            return []
        delay = max(0, tracked.first_ms - tracked.barrier.started_ms)
        return [TakeSnapshot(tracked.barrier, max(0, now_ms - tracked.first_ms), delay)]

    def _pass_over(self, channel: int, checkpoint: int) -> list[Decision]:
        """Give up what is earlier than ``checkpoint`` and misses ``channel``'s barrier: it will not come any more."""
        decisions: list[Decision] = []
        for earlier, tracked in self._tracked.items():
            if earlier < checkpoint and channel in tracked.missing:
                tracked.missing.discard(channel)
                if not tracked.is_over:
                    tracked.is_over = True
                    decisions.append(GiveUp(earlier, SUBSUMED))
        return decisions

    def _limit(self) -> list[Decision]:
        decisions: list[Decision] = []
        while len(self._tracked) > MAX_TRACKED:
            earliest = next(iter(self._tracked))
            if not self._tracked[earliest].is_over:
                decisions.append(GiveUp(earliest, TOO_MANY))
            self._forget(earliest)
        return decisions

    def _forget(self, checkpoint: int) -> None:
        self._over = max(self._over, checkpoint)
        self._tracked = {later: tracked for later, tracked in self._tracked.items() if later > self._over}


def make_handler(mode: CheckpointingMode, unaligned: bool, channels: int) -> BarrierHandler:
    """Return the handler of a task with so many input channels, over all of its inputs.

    ``unaligned``: some checkpoints may be; whether one begins unaligned, or turns so, is in its barriers.
    Raises ConfigError for no channels at all, and for ``unaligned`` with AT_LEAST_ONCE.
    """
    if channels < 1:
        raise ConfigError(f"channels: a handler needs at least 1, got {channels}")
    if mode is CheckpointingMode.AT_LEAST_ONCE:
        if unaligned:
            raise ConfigError(
                "unaligned, mode: at-least-once never holds a channel up; choose one of the two"
            )
        return TrackingHandler(channels)
    return AlternatingHandler(channels) if unaligned else AlignedHandler(channels)
