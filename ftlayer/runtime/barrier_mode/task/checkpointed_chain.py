"""A chain of functions in a graph with checkpoints: its state and its sink take part in them."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.snapshots import Committable, SubtaskSnapshot
from ftlayer.checkpoint.storage.contract import PieceWriter
from ftlayer.clock import Now
from ftlayer.errors import SnapshotCancelledError
from ftlayer.handler.handler import Handler
from ftlayer.runtime.barrier_mode.task.shared_backend import SharedBackend
from ftlayer.runtime.protocol.elements import Batch, Element
from ftlayer.runtime.task.actions import Action, HoldInput
from ftlayer.runtime.task.chain_task import ChainTask
from ftlayer.runtime.task.contract import CommittingSinkBody
from ftlayer.runtime.task.gate import StatusWatermarkValve
from ftlayer.runtime.task.outlet import Outlet
from ftlayer.runtime.task.pipeline import OperatorChain
from ftlayer.state.contract import BackendSnapshot, Frozen
from ftlayer.topology.job_graph import Channel, JobEdge

RETRY_MS = 100
"""How often a task whose timers are due behind the last barrier looks whether that checkpoint was given up."""

LOOK_MS = 2
"""How often a task whose state is too much for memory looks whether there is room again."""

logger = logging.getLogger(__name__)

Precommitted = Callable[[], tuple[Committable, ...]]


class CheckpointedChainTask(ChainTask):
    """`ChainTask` as a `ftlayer.runtime.task.contract.CheckpointedTask`.

    Behind a barrier that is the job's last no timer of processing time fires: what it gave would be in no checkpoint.
    """

    def __init__(
        self,
        uid: str,
        subtask: int,
        edges: tuple[JobEdge, ...],
        gate: StatusWatermarkValve,
        pipeline: OperatorChain,
        handler: Handler,
        outlet: Outlet,
        backend: SharedBackend | None,
        sink: CommittingSinkBody | None,
    ) -> None:
        """``backend``: None for a chain that keeps no state. ``sink``: the one in ``outlet``, if it commits."""
        super().__init__(uid, subtask, edges, gate, pipeline, handler, outlet)
        self._backend = backend
        self._sink = sink
        self._last_barrier: int | None = None
        self._savepoints: set[int] = set()
        self._given_up: set[int] = set()
        self._opened = False

    def start(self, now: Now) -> list[Action]:
        """See `Task.start`. Timers that were restored fire with the next `on_time`, or the first watermark."""
        self._opened = True
        return super().start(now)

    def input(self, channel: Channel, element: Element, now: Now) -> list[Action]:
        """See `InputTask.input`."""
        actions = super().input(channel, element, now)
        return [*actions, *self._tend(now, element.num_rows if isinstance(element, Batch) else 0)]

    def on_time(self, now: Now) -> list[Action]:
        """See `Task.on_time`."""
        if self._last_barrier is not None and not self._closing:
            self._alarm.rung()
            return [*self._alarm.set(now.mono_ms + RETRY_MS), *self._tend(now)]
        return [*super().on_time(now), *self._tend(now)]

    # ------------------------------------------------------------ checkpoints

    def snapshot(self, barrier: Barrier, now: Now) -> tuple[list[Action], ChainSnapshot]:
        """See `CheckpointedTask.snapshot`."""
        self._outlet.flush(now, force=True)
        if barrier.final:
            self._last_barrier = barrier.checkpoint
        # That it was given up may be known before its barrier has come.
        if barrier.kind is SnapshotKind.SAVEPOINT and barrier.checkpoint not in self._given_up:
            self._savepoints.add(barrier.checkpoint)
        frozen = None if self._backend is None else self._backend.freeze(barrier, now.wall_ms)
        precommitted = None if self._sink is None else self._sink.precommit(barrier.checkpoint)
        return [], ChainSnapshot(self.uid, self.subtask, barrier.checkpoint, frozen, precommitted)

    def completed(self, checkpoint: int, now: Now) -> None:
        """See `CheckpointedTask.completed`; also behind the task's end."""
        if self._backend is not None and not self._backend.closed:
            self._backend.backend.completed(checkpoint)
        self._savepoints = {savepoint for savepoint in self._savepoints if savepoint > checkpoint}
        self._given_up = {other for other in self._given_up if other > checkpoint}
        if self._sink is not None:
            self._sink.completed(checkpoint)

    def aborted(self, checkpoint: int, now: Now) -> None:
        """See `CheckpointedTask.aborted`. What a sink has written goes into the next one by itself."""
        if checkpoint == self._last_barrier:
            self._last_barrier = None
        self._savepoints.discard(checkpoint)
        self._given_up.add(checkpoint)
        if self._backend is not None and not self._backend.closed:
            self._backend.backend.aborted(checkpoint)

    def discard(self, stands: int, acked: int) -> None:
        """See `CheckpointedTask.discard`. What a function raises while it is closed is logged."""
        if self._closing:
            return
        self._closing = self._ended = True
        if self._opened:
            self._close_functions()
        if self._backend is not None:
            self._backend.close()
        if self._sink is not None:
            # A savepoint is a user's: what it holds of the sink stays, whether the job goes on from there or not.
            savepoints = (savepoint for savepoint in self._savepoints if savepoint <= acked)
            self._sink.discard(max([min(stands, acked), *savepoints]))

    def _open_functions(self, now: Now) -> None:
        super()._open_functions(now)
        if self._backend is not None:
            self._backend.backend.opened()

    def _close(self, now: Now) -> list[Action]:
        actions = super()._close(now)
        if self._backend is not None:
            self._backend.close()
        return actions

    def _close_functions(self) -> None:
        try:
            self._pipeline.close()
        except Exception:
            logger.warning("%r does not close cleanly; it starts again", self.uid, exc_info=True)

    def _tend(self, now: Now, handled: int = 0) -> list[Action]:
        if self._backend is None or self._backend.closed:
            return []
        backend = self._backend.backend
        backend.tend(now.mono_ms, handled)
        # Where a snapshot is in the way, it says so by no event.
        return [HoldInput(now.mono_ms + LOOK_MS)] if backend.is_full else []


class ChainSnapshot:
    """`ftlayer.runtime.task.contract.PendingSnapshot` of a chain.

    The caller of `write` syncs the writer, and measures.
    """

    def __init__(
        self,
        uid: str,
        subtask: int,
        checkpoint: int,
        frozen: Frozen | None,
        precommitted: Precommitted | None,
    ) -> None:
        """``frozen`` None: no state. ``precommitted`` None: no sink that commits."""
        self._uid = uid
        self._subtask = subtask
        self._checkpoint = checkpoint
        self._frozen = frozen
        self._precommitted = precommitted

    def write(self, writer: PieceWriter, cancelled: Callable[[], bool]) -> SubtaskSnapshot:
        """See `PendingSnapshot.write`. The state comes first: what a sink has written is seen by others."""
        state = BackendSnapshot(None, ())
        if self._frozen is not None:
            state = self._frozen.write(writer, cancelled)
        committables: tuple[Committable, ...] = ()
        if self._precommitted is not None:
            if cancelled():
                raise SnapshotCancelledError(
                    f"checkpoint {self._checkpoint} was given up before the sink of {self._uid!r} wrote its rows"
                )
            committables = self._precommitted()
        return SubtaskSnapshot(
            self._uid,
            self._subtask,
            keyed=state.keyed,
            operators=state.operators,
            committables=committables,
        )

    def release(self) -> None:
        """See `PendingSnapshot.release`."""
        if self._frozen is not None:
            self._frozen.release()
