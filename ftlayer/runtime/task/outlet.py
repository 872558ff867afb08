"""Where a chain's rows go: to the channels of its edges, or into its sink. What is settled by that is acknowledged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ftlayer.clock import Now
from ftlayer.errors import JobError
from ftlayer.functions.chains.topology import MAIN
from ftlayer.functions.failures import RowFailure
from ftlayer.functions.undo.log import UndoLog
from ftlayer.handler.handler import Handler
from ftlayer.records.ids import NO_ROOTS, I64Array, U64Array
from ftlayer.recovery import TRACEBACK, is_programs_text
from ftlayer.runtime.protocol.elements import EndOfStream, Idle, LatencyMarker, RecordIds, Watermark
from ftlayer.runtime.task.actions import Action
from ftlayer.runtime.task.contract import SinkBody
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.runtime.task.latency import SinkLatencies
from ftlayer.runtime.task.pipeline import Passed, Rows
from ftlayer.runtime.task.routes import Routes


class Outlet(Protocol):
    """The end of a chain. What it settles and fails lies in the handler, to be taken from there.

    Attributes:
        latencies: how old records are when a sink is done with them; nothing where there is none.
    """

    latencies: SinkLatencies

    def take(self, lineage: RecordIds | None, records: int, passed: Passed, now: Now) -> list[Action]:
        """Take what came of a batch of so many records."""

    def take_fired(self, outputs: dict[str, Rows], now: Now) -> list[Action]:
        """Take what timers put out."""

    def mark(self, mark: Watermark | Idle | EndOfStream) -> list[Action]:
        """Pass a mark on, behind what was taken before it."""

    def marker(self, marker: LatencyMarker, now: Now) -> list[Action]:
        """Pass a latency marker on behind what was taken before it, or see how old it is where that is written."""

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


@dataclass(frozen=True, slots=True)
class Routed:
    """What came of a batch, before any of it is sent.

    Attributes:
        outputs: by tag, with what users' partitioners say of its rows (None where none is asked).
        failures: of records, those that a partitioner refused with them.
    """

    outputs: dict[str, tuple[Rows, Routes | None]]
    failures: list[RowFailure]


class ChannelOutlet:
    due_ms: int | None = None
    waiting = False
    held = NO_ROOTS

    def __init__(self, handler: Handler, emitter: Emitter) -> None:
        self._handler = handler
        self._emitter = emitter
        self.latencies = SinkLatencies()

    def take(self, lineage: RecordIds | None, records: int, passed: Passed, now: Now) -> list[Action]:
        routed = self.route(passed)
        if routed.failures:
            self._handler.xor.fail(lineage, routed.failures)
        return self.send(lineage, records, routed)

    def route(self, passed: Passed, log: UndoLog | None = None) -> Routed:
        """Ask where rows go, if users' functions say so; rows of a record for which one raises are left out.

        With ``log`` of what the chain has changed, raises `LateFailure` for such a record.
        """
        outputs = {tag: (rows, self._emitter.ask(tag, rows.payload)) for tag, rows in passed.outputs.items()}
        refused: dict[int, RowFailure] = {}
        for rows, routes in outputs.values():
            for failure in () if routes is None else routes.failures:
                record = int(rows.parents[failure.row])
                refused.setdefault(record, replace(failure, row=record))
        if not refused:
            return Routed(outputs, passed.failures)
        if log is not None:
            log.late(min(refused))
        for tag, (rows, routes) in outputs.items():
            keep = ~np.isin(rows.parents, list(refused))
            outputs[tag] = rows.keep(keep), None if routes is None else routes.keep(keep)
        return Routed(outputs, [*passed.failures, *refused.values()])

    def send(self, lineage: RecordIds | None, records: int, routed: Routed) -> list[Action]:
        """Send what came of a batch of so many records, and settle those that have not failed."""
        actions: list[Action] = []
        owed: U64Array | None = None
        sent = [
            tag
            for tag, (rows, _) in routed.outputs.items()
            if rows.payload.num_rows and self._emitter.reads(tag)
        ]
        for tag in sent:
            rows, routes = routed.outputs[tag]
            emission = self._emitter.derived(
                tag, rows.payload, lineage, rows.parents, rows.times, routes=routes, only=len(sent) == 1
            )
            actions.extend(emission.sends)
            owed = emission.owed if owed is None else owed ^ emission.owed
        self._handler.xor.settle(lineage, owed, unharmed(records, routed.failures))
        return actions

    def take_fired(self, outputs: dict[str, Rows], now: Now) -> list[Action]:
        actions: list[Action] = []
        for tag, rows in outputs.items():
            if rows.payload.num_rows:
                emission = self._emitter.derived(tag, rows.payload, None, rows.parents, rows.times)
                actions.extend(emission.sends)
        return actions

    def mark(self, mark: Watermark | Idle | EndOfStream) -> list[Action]:
        return [*self._emitter.mark(mark)]

    def marker(self, marker: LatencyMarker, now: Now) -> list[Action]:
        return [*self._emitter.marker(marker)]

    def accepted(self, ticket: int) -> list[Action]:
        raise ValueError(f"ticket {ticket} was accepted, and nothing is persisted here")

    def flush(self, now: Now, *, force: bool) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing to give up."""


class SinkOutlet:
    """Rows go into a sink, and a failure fails the task: no record has to be settled.

    Attributes:
        latencies: how old records are when the sink has been given them.
    """

    waiting = False
    held = NO_ROOTS

    def __init__(self, handler: Handler, sink: SinkBody) -> None:
        self._handler = handler
        self._sink = sink
        self.latencies = SinkLatencies()

    def take(self, lineage: RecordIds | None, records: int, passed: Passed, now: Now) -> list[Action]:
        self._handler.xor.fail(None, passed.failures)
        self._write(passed.outputs[MAIN], now)
        return []

    def take_fired(self, outputs: dict[str, Rows], now: Now) -> list[Action]:
        if MAIN in outputs:
            self._write(outputs[MAIN], now)
        return []

    def mark(self, mark: Watermark | Idle | EndOfStream) -> list[Action]:
        return []

    def marker(self, marker: LatencyMarker, now: Now) -> list[Action]:
        self.latencies.came(marker, now)
        return []

    def accepted(self, ticket: int) -> list[Action]:
        raise ValueError(f"ticket {ticket} was accepted, and nothing is persisted here")

    def flush(self, now: Now, *, force: bool) -> None:
        self._fail(self._sink.flush(now.mono_ms, force=force).failures)

    def close(self) -> None:
        self._sink.close()

    @property
    def due_ms(self) -> int | None:
        return self._sink.due_ms

    def _write(self, rows: Rows, now: Now) -> None:
        if rows.payload.num_rows:
            self._fail(self._sink.write(rows.payload, now.mono_ms).failures)

    def _fail(self, failures: Sequence[RowFailure]) -> None:
        try:
            self._handler.xor.fail(None, failures)
        except JobError as error:
            # A function that writes meets its own mistake with any row; one of a map may have met a row's.
            error.is_programs = is_programs_text(f"{TRACEBACK}\n{failures[0].traceback}")
            raise


def unharmed(records: int, failures: Sequence[RowFailure]) -> I64Array | None:
    """Return which of so many records have no failure; None for all of them."""
    if not failures:
        return None
    alive = np.ones(records, np.bool_)
    alive[[failure.row for failure in failures]] = False
    return np.flatnonzero(alive)
