"""The head of an iteration as a task: a chain that records come back to, and that has to find its own end.

Nothing says that no record is on its way round any more, so a head goes by time, as Flink's does (`iterate` of its
DataStream API): it ends when its ordinary inputs have, and nothing has come back for `max_wait_ms`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.clock import Now
from ftlayer.runtime.barrier_mode.task.checkpointed_chain import ChainSnapshot, CheckpointedChainTask
from ftlayer.runtime.barrier_mode.task.companion import RETRY_MS
from ftlayer.runtime.protocol.elements import MAX_TIME_MS, Batch, Element
from ftlayer.runtime.task.actions import Action, DataEnded
from ftlayer.runtime.task.alarm import Alarm
from ftlayer.runtime.task.chain_task import ChainTask
from ftlayer.runtime.task.gate import StatusWatermarkValve
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.topology.operators import IterationHead

LOOKS = 10
"""So often a head looks around while it waits. What a slot is kept from looking at, by a function that takes long,
counts as one look: the time in which it could not have seen a record come back is no evidence of its absence."""

logger = logging.getLogger(__name__)


class LoopGate(StatusWatermarkValve):
    """The ordinary inputs of a head, which say nothing of their end before `let_go`.

    `MAX_TIME_MS` is the watermark behind the last record, and some may still be on their way round.

    Attributes:
        holds: every ordinary channel has ended, or has said `MAX_TIME_MS`, and it keeps that to itself.
    """

    holds = False
    _open = True

    def let_go(self) -> None:
        """The loop is over, too."""
        self._open = False
        self._update()

    def _update(self) -> None:
        before_ms = self.time_ms
        super()._update()
        self.holds = self._open and self.time_ms == MAX_TIME_MS
        if self.holds:
            self.time_ms, self.ended = before_ms, False


class Quiet:
    """Whether nothing has come back for ``max_wait_ms``, by `LOOKS` looks.

    ``due_ms`` is the monotone time of the next one, None for none.
    """

    def __init__(self, max_wait_ms: int) -> None:
        self._every_ms = -(-max_wait_ms // LOOKS)
        self._looks = -(-max_wait_ms // self._every_ms)
        self._seen = 0
        self.due_ms: int | None = None

    def begin(self, now_ms: int) -> None:
        """Something happens: wait from now on."""
        self._seen, self.due_ms = 0, now_ms + self._every_ms

    def look(self, now_ms: int, is_busy: bool) -> bool:
        """Look; whether it was the last time. Early looks do not count, and those that see a busy loop.

        (Such ones do not begin anew, either: barriers on their way to other slots look like records.)
        """
        if self.due_ms is None or now_ms < self.due_ms:
            return False
        self._seen += not is_busy
        self.due_ms = now_ms + self._every_ms if self._seen < self._looks else None
        return self.due_ms is None


class HeadTask(ChainTask):
    """A chain that begins with an `IterationHead`. `attach` it to its loop before it is started.

    Attributes:
        late: records that came back behind the loop's end, and were dropped.
    """

    late = 0

    def attach(self, graph: JobGraph, gate: LoopGate) -> None:
        """``gate`` is the one that it was made with."""
        head = graph.vertex(self.uid).operators[0]
        assert isinstance(head, IterationHead)
        self._back = {edge.number for edge in graph.edges_into(self.uid) if edge.feedback}
        self._loop = gate
        self._quiet = Quiet(head.max_wait_ms)
        self._bell = Alarm()
        self._is_busy: Callable[[], bool] = lambda: False

    def watch(self, is_busy: Callable[[], bool]) -> None:
        """``is_busy()`` says whether records wait in this slot's part of the loop: such time does not count."""
        self._is_busy = is_busy

    def input(self, channel: Channel, element: Element, now: Now) -> list[Action]:
        """See `InputTask.input`."""
        if channel.edge in self._back and isinstance(element, Batch):
            if self._closing:
                self._drop(element)
                return []
            if self._quiet.due_ms is not None:
                self._quiet.begin(now.mono_ms)
        return [*super().input(channel, element, now), *self._wait(now)]

    def on_time(self, now: Now) -> list[Action]:
        """See `Task.on_time`."""
        self._bell.rung()
        actions: list[Action] = []
        due_ms = self._quiet.due_ms
        if due_ms is not None and due_ms <= now.mono_ms and self._quiet.look(now.mono_ms, self._is_busy()):
            actions = self._loop_ended(now)
        return [*actions, *super().on_time(now), *self._wait(now)]

    def _loop_ended(self, now: Now) -> list[Action]:
        self._loop.let_go()
        return self._gate_moved(now)

    def _wait(self, now: Now) -> list[Action]:
        """Begin to wait once nothing new comes, and ask to be called for the next look."""
        if self._loop.holds and self._quiet.due_ms is None:
            self._quiet.begin(now.mono_ms)
        return self._bell.set(self._quiet.due_ms)

    def _drop(self, batch: Batch) -> None:
        if not self.late:
            logger.warning(
                "iteration %r has ended, and records still come back to it: they are dropped, and counted as late; "
                "give iterate() a longer max_wait",
                self.uid,
            )
        self.late += batch.num_rows


class CheckpointedHeadTask(HeadTask, CheckpointedChainTask):
    """`HeadTask` as a `ftlayer.runtime.task.contract.CheckpointedTask`.

    Its loop's end is the end of a source's data to the coordinator: the job's last checkpoint waits for it. Behind the
    barrier of that checkpoint nothing that comes back goes round again: what came of it would be in no checkpoint.
    """

    def attach(self, graph: JobGraph, gate: LoopGate) -> None:
        """See `HeadTask.attach`."""
        super().attach(graph, gate)
        self._kept: list[tuple[Channel, Batch]] = []

    def input(self, channel: Channel, element: Element, now: Now) -> list[Action]:
        """See `InputTask.input`."""
        if (
            self._beside.last_barrier is not None
            and channel.edge in self._back
            and isinstance(element, Batch)
        ):
            self._kept.append((channel, element))
            return self._bell.set(now.mono_ms + RETRY_MS)
        return super().input(channel, element, now)

    def on_time(self, now: Now) -> list[Action]:
        """See `Task.on_time`."""
        return [*super().on_time(now), *self._go_on(now)]

    def snapshot(self, barrier: Barrier, now: Now) -> tuple[list[Action], ChainSnapshot]:
        """See `CheckpointedTask.snapshot`."""
        going_on = self._go_on(now)
        actions, pending = super().snapshot(barrier, now)
        return [*going_on, *actions], pending

    def _go_on(self, now: Now) -> list[Action]:
        """Let what was kept go round, if the last checkpoint was given up: there is another one to come."""
        if self._beside.last_barrier is not None or self._closing:
            return []
        kept, self._kept = self._kept, []
        return [action for channel, batch in kept for action in self.input(channel, batch, now)]

    def _loop_ended(self, now: Now) -> list[Action]:
        return [*super()._loop_ended(now), DataEnded(self.uid, self.subtask)]

    def _wait(self, now: Now) -> list[Action]:
        if self._kept:
            return self._bell.set(now.mono_ms + RETRY_MS)
        return super()._wait(now)

    def _close(self, now: Now) -> list[Action]:
        for _, batch in self._kept:
            self._drop(batch)
        return super()._close(now)
