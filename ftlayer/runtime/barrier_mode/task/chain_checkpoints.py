"""A chain's part in checkpoints: its state, and what its sink has set aside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.snapshots import SinkPart, SubtaskSnapshot
from ftlayer.checkpoint.storage.contract import PieceWriter
from ftlayer.clock import Now
from ftlayer.errors import SnapshotCancelledError
from ftlayer.runtime.barrier_mode.task.companion import BarrierCompanion
from ftlayer.runtime.barrier_mode.task.contract import CommittingSinkBody
from ftlayer.runtime.barrier_mode.task.failing.letters import MadeLetters
from ftlayer.runtime.task.actions import Action
from ftlayer.runtime.task.chain_task import ChainTask
from ftlayer.runtime.task.iteration import HeadTask
from ftlayer.runtime.task.suspects import Suspects
from ftlayer.state.contract import BackendSnapshot, Frozen

Precommitted = Callable[[], SinkPart]


class ChainCheckpoints:
    """`ftlayer.runtime.barrier_mode.task.contract.Checkpointed` of a chain: its state, and its sink if that commits."""

    def __init__(
        self,
        chain: ChainTask | HeadTask,
        companion: BarrierCompanion,
        sink: CommittingSinkBody | None,
        suspects: Suspects,
        letters: MadeLetters | None,
    ) -> None:
        """``companion`` and ``suspects`` are the chain's, ``sink`` the one at its end.

        ``letters`` are what its records become that fail; None: they fail the job.
        """
        self._chain = chain
        self._companion = companion
        self._sink = sink
        self._suspects = suspects
        self._letters = letters
        self._savepoints: set[int] = set()
        self._given_up: set[int] = set()

    def snapshot(self, barrier: Barrier, now: Now) -> tuple[list[Action], ChainSnapshot]:
        actions = self._chain.flush(now)
        if barrier.final:
            self._companion.last_barrier = barrier.checkpoint
        # That it was given up may be known before its barrier has come.
        if barrier.kind is SnapshotKind.SAVEPOINT and barrier.checkpoint not in self._given_up:
            self._savepoints.add(barrier.checkpoint)
        backend = self._companion.backend
        frozen = None if backend is None else backend.freeze(barrier, now.wall_ms)
        precommitted = None if self._sink is None else self._sink.precommit(barrier.checkpoint)
        part = SubtaskSnapshot(
            self._chain.uid,
            self._chain.subtask,
            condemned=self._suspects.snapshot(barrier.checkpoint),
            event_times=self._chain.event_times,
            split_times=self._chain.split_times,
        )
        if self._letters is not None:
            letters, readmitted = self._letters.snapshot(barrier.checkpoint)
            waiting = self._chain.failures.waiting
            part = replace(part, letters=letters, waiting=waiting, readmitted=readmitted)
        return actions, ChainSnapshot(part, barrier.checkpoint, frozen, precommitted)

    def completed(self, checkpoint: int) -> None:
        self._suspects.completed(checkpoint)
        if self._letters is not None:
            self._letters.completed(checkpoint)
        backend = self._companion.backend
        if backend is not None and not backend.closed:
            backend.backend.completed(checkpoint)
        self._savepoints = {savepoint for savepoint in self._savepoints if savepoint > checkpoint}
        self._given_up = {other for other in self._given_up if other > checkpoint}
        if self._sink is not None:
            self._sink.completed(checkpoint)

    def aborted(self, checkpoint: int) -> None:
        """See `Checkpointed.aborted`. What a sink has written goes into the next one by itself."""
        if checkpoint == self._companion.last_barrier:
            self._companion.last_barrier = None
        self._savepoints.discard(checkpoint)
        self._given_up.add(checkpoint)
        backend = self._companion.backend
        if backend is not None and not backend.closed:
            backend.backend.aborted(checkpoint)

    def discard(self, stands: int, acked: int) -> None:
        """See `Checkpointed.discard`. What a function raises while it is closed is logged."""
        if self._chain.is_over:
            return
        self._chain.abandon()
        self._companion.closed()
        if self._sink is not None:
            # A savepoint is a user's: what it holds of the sink stays, whether the job goes on from there or not.
            savepoints = (savepoint for savepoint in self._savepoints if savepoint <= acked)
            self._sink.discard(max([min(stands, acked), *savepoints]))


class ChainSnapshot:
    """`ftlayer.runtime.barrier_mode.task.contract.PendingSnapshot` of a chain.

    The caller of `write` syncs the writer, and measures.
    """

    def __init__(
        self,
        part: SubtaskSnapshot,
        checkpoint: int,
        frozen: Frozen | None,
        precommitted: Precommitted | None,
    ) -> None:
        """``part`` is what is there at once. ``frozen`` None: no state. ``precommitted`` None: no sink that commits."""
        self._part = part
        self._checkpoint = checkpoint
        self._frozen = frozen
        self._precommitted = precommitted

    def write(self, writer: PieceWriter, cancelled: Callable[[], bool]) -> SubtaskSnapshot:
        """See `PendingSnapshot.write`. The state comes first: what a sink has written is seen by others."""
        state = BackendSnapshot(None, ())
        if self._frozen is not None:
            state = self._frozen.write(writer, cancelled)
        sink = SinkPart()
        if self._precommitted is not None:
            if cancelled():
                raise SnapshotCancelledError(
                    f"checkpoint {self._checkpoint} was given up before the sink of {self._part.uid!r} wrote its rows"
                )
            sink = self._precommitted()
        return replace(
            self._part,
            keyed=state.keyed,
            operators=state.operators,
            committables=sink.committables,
            letters=self._part.letters + sink.letters,
        )

    def release(self) -> None:
        if self._frozen is not None:
            self._frozen.release()
