"""The end of a chain in acker mode: records are acknowledged once the sink has settled their rows."""

from __future__ import annotations

import numpy as np

from ftlayer.clock import Now
from ftlayer.errors import ProtocolError
from ftlayer.functions.chains.topology import MAIN
from ftlayer.handler.handler import Handler
from ftlayer.records.ids import U64Array
from ftlayer.runtime.acker_mode.task.settle import Done, SettleQueue
from ftlayer.runtime.protocol.elements import EndOfStream, Idle, LatencyMarker, RecordIds, Watermark
from ftlayer.runtime.task.actions import Action
from ftlayer.runtime.task.contract import Settled, SinkBody
from ftlayer.runtime.task.latency import SinkLatencies
from ftlayer.runtime.task.outlet import unharmed
from ftlayer.runtime.task.pipeline import Passed, Rows


class AckingSinkOutlet:
    """`ftlayer.runtime.task.outlet.Outlet` of a chain with a sink; records are settled when all their rows are.

    Attributes:
        latencies: how old records are when the sink has settled their rows.
    """

    waiting = False

    def __init__(self, handler: Handler, sink: SinkBody) -> None:
        self._handler = handler
        self._sink = sink
        self._queue = SettleQueue()
        self.latencies = SinkLatencies()

    def take(self, lineage: RecordIds | None, records: int, passed: Passed, now: Now) -> list[Action]:
        if lineage is None:
            raise ProtocolError("a record without RecordIds came to a sink that acknowledges")
        xor = self._handler.xor
        if passed.failures:
            xor.fail(lineage, passed.failures)
        alive = unharmed(records, passed.failures)
        rows = passed.outputs[MAIN]
        nothing = self._queue.empty
        settled = Settled(0)
        if rows.payload.num_rows:
            settled = self._sink.write(rows.payload, now.mono_ms)
        if nothing and settled.rows == rows.payload.num_rows and not settled.failures:
            xor.settle(lineage, None, alive)
            return []
        if alive is None:
            alive = np.arange(records, dtype=np.int64)
        self._done(self._queue.add(lineage, rows.parents, alive))
        self._settle(settled)
        return []

    def take_fired(self, outputs: dict[str, Rows], now: Now) -> list[Action]:
        """Refuse: results of timers become roots before a sink gets them, and a chain ends there."""
        raise ProtocolError("results of timers came to a sink in their own chain, which acknowledges records")

    def mark(self, mark: Watermark | Idle | EndOfStream) -> list[Action]:
        """Do nothing: a sink has no output."""
        return []

    def marker(self, marker: LatencyMarker, now: Now) -> list[Action]:
        self.latencies.came(marker, now, given=self._queue.given, settled=self._queue.settled)
        return []

    def accepted(self, ticket: int) -> list[Action]:
        """Nothing is persisted here."""
        raise ValueError(f"ticket {ticket} was accepted, and nothing is persisted here")

    def flush(self, now: Now, *, force: bool) -> None:
        self.latencies.look(self._queue.settled, now)
        self._settle(self._sink.flush(now.mono_ms, force=force))
        if force:
            # No call may come behind this one.
            self.latencies.look(self._queue.settled, now)

    def close(self) -> None:
        self._sink.close()

    @property
    def due_ms(self) -> int | None:
        """See `Outlet.due_ms`.

        A write takes its time, and no clock is read behind it: the next call sees how old the records are now.
        """
        return 0 if self.latencies.is_due(self._queue.settled) else self._sink.due_ms

    @property
    def held(self) -> U64Array:
        return self._queue.held

    def _settle(self, settled: Settled) -> None:
        for done in self._queue.settle(settled):
            self._done(done)

    def _done(self, done: Done) -> None:
        if done.failures:
            self._handler.xor.fail(done.lineage, done.failures)
        if len(done.records):
            self._handler.xor.settle(done.lineage, None, done.records)
