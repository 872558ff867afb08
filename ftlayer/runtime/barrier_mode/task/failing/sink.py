"""The sink of a chain whose records fail alone: it is the chain's only operator, and its unit is the row."""

from __future__ import annotations

from ftlayer.clock import Now
from ftlayer.functions.chains.topology import MAIN
from ftlayer.functions.undo.log import UndoLog
from ftlayer.records.ids import NO_ROOTS
from ftlayer.runtime.barrier_mode.task.contract import CommittingSinkBody
from ftlayer.runtime.barrier_mode.task.failing.attempts import Given, RecordAttempts
from ftlayer.runtime.protocol.elements import EndOfStream, Idle, LatencyMarker, RecordIds, Watermark
from ftlayer.runtime.task.actions import Action
from ftlayer.runtime.task.contract import SinkBody
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.runtime.task.latency import SinkLatencies
from ftlayer.runtime.task.outlet import Routed
from ftlayer.runtime.task.pipeline import Passed, Rows


class RowsToSink:
    """`WayOut` of such a chain, and its `ftlayer.runtime.task.outlet.Outlet`.

    A row that a function refuses fails at once; a two-phase writer refuses rows when it writes them for a checkpoint,
    and gives its letters by itself.

    Attributes:
        latencies: how old records are when the sink has been given them.
    """

    waiting = False
    held = NO_ROOTS

    def __init__(
        self,
        sink: SinkBody,
        attempts: RecordAttempts,
        emitter: Emitter,
        committing: CommittingSinkBody | None = None,
    ) -> None:
        """``emitter`` sends marks to those that take the sink's dead letters.

        ``committing`` is the sink, if its rows become visible with their checkpoint.
        """
        self.latencies = SinkLatencies()
        self._sink = sink
        self._committing = committing
        self._attempts = attempts
        self._emitter = emitter

    @property
    def refused(self) -> int:
        return 0 if self._committing is None else self._committing.refused

    def route(self, given: Given, passed: Passed, log: UndoLog) -> Routed:
        """See `WayOut.route`: there are no functions before the sink, and no state."""
        return Routed({MAIN: (passed.outputs[MAIN], None)}, passed.failures)

    def send(self, given: Given, routed: Routed, now: Now) -> list[Action]:
        self._attempts.ended(given, self._sink.write(given.payload, now.mono_ms).failures, now)
        return []

    def take(self, lineage: RecordIds | None, records: int, passed: Passed, now: Now) -> list[Action]:
        """Rows come by `send`."""
        raise NotImplementedError

    def take_fired(self, outputs: dict[str, Rows], now: Now) -> list[Action]:
        """There are no timers before the sink."""
        raise NotImplementedError

    def mark(self, mark: Watermark | Idle | EndOfStream) -> list[Action]:
        return [*self._emitter.mark(mark)]

    def marker(self, marker: LatencyMarker, now: Now) -> list[Action]:
        self.latencies.came(marker, now)
        return []

    def accepted(self, ticket: int) -> list[Action]:
        """Nothing is persisted here."""
        raise ValueError(f"ticket {ticket} was accepted, and nothing is persisted here")

    def flush(self, now: Now, *, force: bool) -> None:
        """Nothing waits: what a sink gathers is in its committables."""

    def close(self) -> None:
        self._sink.close()

    @property
    def due_ms(self) -> int | None:
        return None
