"""Exactly once: a channel whose barrier has come waits for the others.

The algorithm is the aligned variant of Carbone et al., "Lightweight Asynchronous Snapshots for Distributed
Dataflows" (2015), with what Flink's `SingleCheckpointBarrierHandler` makes of barriers that never come.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ftlayer.checkpoint.barrier import Alignment, Barrier
from ftlayer.checkpoint.handlers.contract import BlockChannel, Decision, GiveUp, TakeSnapshot, Unblock
from ftlayer.checkpoint.handlers.reasons import GIVEN_UP_BEFORE, SUBSUMED
from ftlayer.errors import CheckpointError


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


class AlignedHandler:
    """`BarrierHandler` of tasks whose barriers never overtake records.

    One checkpoint is under way at a time: what comes later on a channel waits behind its block. So a barrier, or
    a cancel marker, of a later checkpoint shows that its channel will never bring the earlier one's.
    """

    def __init__(self, channels: int) -> None:
        """``channels`` is their number, 1 at least."""
        self._open = set(range(channels))
        self._current: AlignmentProgress | None = None
        # Checkpoints up to this one need nothing more; of later ones, those that the coordinator gave up.
        self._over = 0
        self._aborted: set[int] = set()

    def announced(self, channel: int, barrier: Barrier, now_ms: int) -> list[Decision]:
        """Wait for its turn; `CheckpointError` for an UNALIGNED one, which nothing here would count."""
        refuse_unaligned(channel, barrier)
        return []

    def barrier(self, channel: int, barrier: Barrier, now_ms: int) -> list[Decision]:
        """A barrier that is not UNALIGNED has come to its turn."""
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
        """A `CancelMarker` has come to its turn."""
        decisions = self._make_way(checkpoint)
        if self._current is not None and self._current.checkpoint == checkpoint:
            return [*decisions, *self._give_up(self._current, GIVEN_UP_BEFORE)]
        if not self._is_over(checkpoint):
            decisions.append(GiveUp(checkpoint, GIVEN_UP_BEFORE))
        self._forget(checkpoint)
        return decisions

    def ended(self, channel: int, now_ms: int) -> list[Decision]:
        """The channel has ended: it is no longer waited for."""
        self._open.discard(channel)
        return [] if self._current is None else self._through(self._current, channel, now_ms)

    def aborted(self, checkpoint: int, now_ms: int) -> list[Decision]:
        """The coordinator has given the checkpoint up; earlier ones go on."""
        if self._current is not None and self._current.checkpoint == checkpoint:
            return self._drop(self._current)
        if checkpoint > self._over:
            self._aborted.add(checkpoint)
        return []

    def on_time(self, now_ms: int) -> list[Decision]:
        """Nothing here goes by time."""
        return []

    @property
    def due_ms(self) -> int | None:
        return None

    # ------------------------------------------------------------ the checkpoint under way

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
        return self._give_up(current, SUBSUMED)

    def _give_up(self, current: AlignmentProgress, reason: str) -> list[Decision]:
        return [*self._drop(current), GiveUp(current.checkpoint, reason)]

    def _drop(self, current: AlignmentProgress) -> list[Decision]:
        """Be done with what is under way, well or not; return what its channels need."""
        self._current = None
        self._forget(current.checkpoint)
        return [Unblock(channel) for channel in current.blocked]

    # ------------------------------------------------------------ checkpoints that are over

    def _is_over(self, checkpoint: int) -> bool:
        return checkpoint <= self._over or checkpoint in self._aborted

    def _forget(self, checkpoint: int) -> None:
        """Nothing up to ``checkpoint`` matters any more."""
        self._over = max(self._over, checkpoint)
        self._aborted = {aborted for aborted in self._aborted if aborted > self._over}


def refuse_unaligned(channel: int, barrier: Barrier) -> None:
    """Raise `CheckpointError` for a barrier that only a job with unaligned checkpoints has."""
    if barrier.alignment is Alignment.UNALIGNED:
        raise CheckpointError(
            f"channel {channel} brought an unaligned barrier of checkpoint {barrier.checkpoint} to a task whose "
            "barriers overtake nothing; unaligned has to be set for the whole job"
        )
