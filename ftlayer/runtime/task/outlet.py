"""Where a chain's rows go: to the channels of its edges, or into its sink. What is settled by that is acknowledged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from ftlayer.clock import Now
from ftlayer.functions.failures import RowFailure
from ftlayer.functions.topology import MAIN
from ftlayer.handler.handler import Handler
from ftlayer.records.ids import NO_ROOTS, I64Array, U64Array
from ftlayer.runtime.acker_mode.task.settle import Done, SettleQueue
from ftlayer.runtime.acker_mode.task.timer_roots import TimerRoots
from ftlayer.runtime.protocol.elements import EndOfStream, Idle, Lineage, Watermark
from ftlayer.runtime.task.actions import Action
from ftlayer.runtime.task.contract import Settled, SinkBody
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.runtime.task.pipeline import Passed, Rows
from ftlayer.runtime.task.routes import Routes

_NOTHING_OWED: U64Array = np.zeros(1, np.uint64)


class Outlet(Protocol):
    """The end of a chain. What it settles and fails lies in the handler, to be taken from there."""

    def take(self, lineage: Lineage | None, records: int, passed: Passed, now: Now) -> list[Action]:
        """Take what came of a batch of so many records."""

    def take_fired(self, outputs: dict[str, Rows], now: Now) -> list[Action]:
        """Take what timers put out."""

    def mark(self, mark: Watermark | Idle | EndOfStream) -> list[Action]:
        """Pass a mark on, behind what was taken before it."""

    def accepted(self, ticket: int) -> list[Action]:
        """The vertex has persisted what was asked for."""

    def flush(self, now: Now, *, force: bool) -> None:
        """Settle what has waited long enough (``force``: everything)."""

    def close(self) -> None:
        """Give resources up."""

    @property
    def waiting(self) -> bool:
        """Whether something has yet to be accepted by the vertex before it can be sent."""

    @property
    def due_ms(self) -> int | None:
        """Monotone time (ms) at which `flush` has something to do; None while nothing waits."""

    @property
    def held(self) -> U64Array:
        """Roots of what is held back here. Another thread may look."""


class ChannelOutlet:
    """Rows go to channels, and those of timers become roots first where there are ``timer_roots``."""

    due_ms: int | None = None

    def __init__(self, handler: Handler, emitter: Emitter, timer_roots: TimerRoots | None) -> None:
        self._handler = handler
        self._emitter = emitter
        self._timer_roots = timer_roots

    def take(self, lineage: Lineage | None, records: int, passed: Passed, now: Now) -> list[Action]:
        """See `Outlet.take`."""
        xor = self._handler.xor
        outputs, failures = self._routed(passed)
        if failures:
            xor.fail(lineage, failures)
        actions: list[Action] = []
        owed = _NOTHING_OWED
        for tag, (rows, routes) in outputs.items():
            emission = self._emitter.derived(
                tag, rows.payload, lineage, rows.parents, rows.times, routes=routes
            )
            actions.extend(emission.sends)
            owed = owed ^ emission.owed
        xor.settle(lineage, owed, unharmed(records, failures))
        return actions

    def _routed(self, passed: Passed) -> tuple[dict[str, tuple[Rows, Routes | None]], list[RowFailure]]:
        """Ask where rows go, if users' functions say so; rows of a record for which one raises are left out."""
        outputs = {tag: (rows, self._emitter.ask(tag, rows.payload)) for tag, rows in passed.outputs.items()}
        refused: dict[int, RowFailure] = {}
        for rows, routes in outputs.values():
            for failure in () if routes is None else routes.failures:
                record = int(rows.parents[failure.row])
                refused.setdefault(record, replace(failure, row=record))
        if not refused:
            return outputs, passed.failures
        for tag, (rows, routes) in outputs.items():
            keep = ~np.isin(rows.parents, list(refused))
            outputs[tag] = rows.keep(keep), None if routes is None else routes.keep(keep)
        return outputs, [*passed.failures, *refused.values()]

    def take_fired(self, outputs: dict[str, Rows], now: Now) -> list[Action]:
        """See `Outlet.take_fired`."""
        actions: list[Action] = []
        for tag, rows in outputs.items():
            if not rows.payload.num_rows:
                continue
            if self._timer_roots is None:
                emission = self._emitter.derived(tag, rows.payload, None, rows.parents, rows.times)
                actions.extend(emission.sends)
            else:
                actions.extend(self._timer_roots.persist(tag, rows.payload, rows.times))
        return actions

    def mark(self, mark: Watermark | Idle | EndOfStream) -> list[Action]:
        """See `Outlet.mark`."""
        if self._timer_roots is not None:
            return self._timer_roots.mark(mark)
        return [*self._emitter.mark(mark)]

    def accepted(self, ticket: int) -> list[Action]:
        """See `Outlet.accepted`."""
        if self._timer_roots is None:
            raise ValueError(f"ticket {ticket} was accepted, and nothing is persisted here")
        return self._timer_roots.accepted(ticket)

    def flush(self, now: Now, *, force: bool) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing to give up."""

    @property
    def waiting(self) -> bool:
        """See `Outlet.waiting`."""
        return self._timer_roots is not None and self._timer_roots.waiting

    @property
    def held(self) -> U64Array:
        """See `Outlet.held`."""
        return NO_ROOTS if self._timer_roots is None else self._timer_roots.held


class SinkOutlet:
    """Rows go into a sink; records are settled when the sink has settled all their rows."""

    waiting = False

    def __init__(self, handler: Handler, sink: SinkBody) -> None:
        self._handler = handler
        self._sink = sink
        self._queue = SettleQueue()

    def take(self, lineage: Lineage | None, records: int, passed: Passed, now: Now) -> list[Action]:
        """See `Outlet.take`."""
        xor = self._handler.xor
        if passed.failures:
            xor.fail(lineage, passed.failures)
        alive = unharmed(records, passed.failures)
        rows = passed.outputs[MAIN]
        nothing = self._queue.empty
        settled = Settled(0)
        if rows.payload.num_rows:
            settled = self._sink.write(rows.payload, now.mono_ms)
        if lineage is None:
            xor.fail(None, settled.failures)
            return []
        owed = np.zeros(len(lineage.roots), np.uint64)
        if nothing and settled.rows == rows.payload.num_rows and not settled.failures:
            xor.settle(lineage, owed, alive)
            return []
        if alive is None:
            alive = np.arange(records, dtype=np.int64)
        self._done(self._queue.add(lineage, owed, rows.parents, alive))
        self._settle(settled)
        return []

    def take_fired(self, outputs: dict[str, Rows], now: Now) -> list[Action]:
        """Write rows of timers, which are in a chain with a sink only where nothing is tracked."""
        rows = outputs.get(MAIN)
        if rows is not None and rows.payload.num_rows:
            self._handler.xor.fail(None, self._sink.write(rows.payload, now.mono_ms).failures)
        return []

    def mark(self, mark: Watermark | Idle | EndOfStream) -> list[Action]:
        """Do nothing: a sink has no output."""
        return []

    def accepted(self, ticket: int) -> list[Action]:
        """Nothing is persisted here."""
        raise ValueError(f"ticket {ticket} was accepted, and nothing is persisted here")

    def flush(self, now: Now, *, force: bool) -> None:
        """See `Outlet.flush`."""
        settled = self._sink.flush(now.mono_ms, force=force)
        if self._handler.tracking:
            self._settle(settled)
        else:
            self._handler.xor.fail(None, settled.failures)

    def close(self) -> None:
        """See `Outlet.close`."""
        self._sink.close()

    @property
    def due_ms(self) -> int | None:
        """See `Outlet.due_ms`."""
        return self._sink.due_ms

    @property
    def held(self) -> U64Array:
        """See `Outlet.held`."""
        return self._queue.held

    def _settle(self, settled: Settled) -> None:
        for done in self._queue.settle(settled):
            self._done(done)

    def _done(self, done: Done) -> None:
        if done.failures:
            self._handler.xor.fail(done.lineage, done.failures)
        if len(done.records):
            self._handler.xor.settle(done.lineage, done.owed, done.records)


def unharmed(records: int, failures: Sequence[RowFailure]) -> I64Array | None:
    """Return which of so many records have no failure; None for all of them."""
    if not failures:
        return None
    alive = np.ones(records, np.bool_)
    alive[[failure.row for failure in failures]] = False
    return np.flatnonzero(alive)
