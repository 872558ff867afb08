"""The head of an iteration as a task: a chain that records come back to, and that has to find its own end.

Nothing says that no record is on its way round any more, so a head goes by time, as Flink's does (`iterate` of its
DataStream API): it ends when its ordinary inputs have, and nothing has come back for `max_wait_ms`. Records that wait
somewhere in the loop for another attempt are known of, and are waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ftlayer.common.clock import Now
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, Batch, Element, LoopWaits
from ftlayer.runtime.task.actions import Action, TaskEvent
from ftlayer.runtime.task.chain_task import ChainRows, ChainTask
from ftlayer.runtime.task.contract import ChainCompanion
from ftlayer.runtime.task.event_time import Alarm, StatusWatermarkValve
from ftlayer.runtime.task.pipeline import OperatorChain, Outlet
from ftlayer.topology.job_graph import Channel, JobEdge

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
    """A chain that begins with an `IterationHead`.

    Where the companion has the chain rest, what comes back waits, and goes round again when the rest is over.
    """

    def __init__(
        self,
        uid: str,
        subtask: int,
        edges: tuple[JobEdge, ...],
        gate: LoopGate,
        pipeline: OperatorChain,
        rows: ChainRows,
        outlet: Outlet,
        companion: ChainCompanion,
        max_wait_ms: int,
    ) -> None:
        super().__init__(uid, subtask, edges, gate, pipeline, rows, outlet, companion)
        self._loop = gate
        self._back = {edge.number for edge in edges if edge.feedback}
        self._max_wait_ms = max_wait_ms
        self._quiet = Quiet(max_wait_ms)
        self._bell = Alarm()
        self._is_busy: Callable[[], bool] = lambda: False
        self._loop_waits = False
        self._kept: list[tuple[Channel, Batch]] = []
        self._dropped = 0

    def watch(self, is_busy: Callable[[], bool], later_ms: int = 0) -> None:
        """``is_busy()`` says whether records wait in this slot's part of the loop: such time does not count.

        ``later_ms``: so much later than others it hears of records that wait in other slots (`LoopWaits`). To be
        called before the task starts.
        """
        self._is_busy = is_busy
        self._quiet = Quiet(self._max_wait_ms + later_ms)

    def handle(self, event: TaskEvent, now: Now) -> list[Action]:
        return self._told(event.waits, now) if isinstance(event, LoopWaits) else super().handle(event, now)

    def flush(self, now: Now) -> list[Action]:
        """Settle all that waits in the chain, and what has waited to go round if the rest is over."""
        return [*self._go_on(now), *super().flush(now)]

    @property
    def late(self) -> int:
        """How many records came back behind the loop's end, and were dropped. Any thread may look."""
        return self._dropped

    def _came(self, channel: Channel, element: Element, now: Now) -> list[Action]:
        if channel.edge in self._back and isinstance(element, Batch):
            if self.is_over:
                self._drop(element)
                return []
            if self._companion.rest_ms is not None:
                self._kept.append((channel, element))
                return self._wait(now)
            if self._quiet.due_ms is not None:
                self._quiet.begin(now.mono_ms)
        return [*super()._came(channel, element, now), *self._wait(now)]

    def _told(self, waits: bool, now: Now) -> list[Action]:
        """Records wait somewhere in the loop, or do no more: these are on their way round then."""
        self._loop_waits = waits
        if not waits and self._quiet.due_ms is not None:
            self._quiet.begin(now.mono_ms)
        return self._wait(now)

    def _time_came(self, now: Now) -> list[Action]:
        self._bell.rung()
        actions: list[Action] = []
        due_ms = self._quiet.due_ms
        is_busy = self._loop_waits or self._is_busy()
        if due_ms is not None and due_ms <= now.mono_ms and self._quiet.look(now.mono_ms, is_busy):
            self._loop.let_go()
            actions = [*self.gate_moved(now), *self._companion.loop_ended()]
        return [*actions, *super()._time_came(now), *self._go_on(now), *self._wait(now)]

    def _wait(self, now: Now) -> list[Action]:
        """Begin to wait once nothing new comes, and ask to be called for the next look."""
        if self.is_over:
            for _, batch in self._kept:
                self._drop(batch)
            self._kept = []
            return []
        rest_ms = self._companion.rest_ms
        if self._kept and rest_ms is not None:
            return self._bell.set(now.mono_ms + rest_ms)
        if self._loop.holds and self._quiet.due_ms is None:
            self._quiet.begin(now.mono_ms)
        return self._bell.set(self._quiet.due_ms)

    def _go_on(self, now: Now) -> list[Action]:
        if self._companion.rest_ms is not None or self.is_over:
            return []
        kept, self._kept = self._kept, []
        return [action for channel, batch in kept for action in self._came(channel, batch, now)]

    def _drop(self, batch: Batch) -> None:
        if not self._dropped:
            logger.warning(
                "iteration %r has ended, and records still come back to it: they are dropped, and counted as late; "
                "give iterate() a longer max_wait",
                self.uid,
            )
        self._dropped += batch.num_rows
