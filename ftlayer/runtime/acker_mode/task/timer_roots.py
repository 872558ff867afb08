"""Results of timers, as new roots: persisted first, sent once the vertex has accepted them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ftlayer.clock import Now
from ftlayer.errors import ProtocolError
from ftlayer.handler.handler import Handler
from ftlayer.records.ids import I64Array, U64Array
from ftlayer.runtime.protocol.elements import EndOfStream, Idle, LatencyMarker, RecordIds, Watermark
from ftlayer.runtime.task.actions import Action, FailRoots, PersistRoots, Send
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.runtime.task.outlet import ChannelOutlet
from ftlayer.runtime.task.pipeline import Passed, Rows
from ftlayer.runtime.task.reports import failures_of
from ftlayer.topology.job_graph import JobGraph
from ftlayer.vertex.calls import Failure

Mark = Watermark | Idle | EndOfStream


@dataclass(slots=True)
class _Ticket:
    number: int
    roots: U64Array
    sends: list[Send]
    failures: tuple[Failure, ...]
    accepted: bool = False


class TimerRoots:
    """Persists the output of timers, and keeps marks back until everything before them was sent.

    A watermark says that the records up to it have gone by; those that it made timers put out have gone by once
    they are sent. What is derived from records meanwhile may overtake a mark: that makes nothing late.
    """

    def __init__(
        self, graph: JobGraph, uid: str, operator: str, subtask: int, handler: Handler, emitter: Emitter
    ) -> None:
        """``operator`` is the uid of what has the timers, at the end of the chain ``uid``."""
        self._graph = graph
        self._uid = operator
        self._read = {edge.tag for edge in graph.edges_from(uid)}
        self._subtask = subtask
        self._handler = handler
        self._emitter = emitter
        self._queue: deque[_Ticket | Mark] = deque()
        self._out: dict[int, _Ticket] = {}
        self._tickets = 0
        self._counts: dict[str, int] = {}
        self._held: tuple[U64Array, ...] = ()

    @property
    def waiting(self) -> bool:
        """Whether something has yet to be accepted."""
        return bool(self._queue)

    @property
    def held(self) -> U64Array:
        """The roots that were given to the vertex and are not sent yet. Another thread may look."""
        held = self._held
        return np.concatenate(held) if held else np.zeros(0, np.uint64)

    def persist(self, tag: str, payload: pa.RecordBatch, times: I64Array | None) -> list[Action]:
        """Give rows of an output (the side output ``tag``, "" for the main one) roots and have them persisted.

        Those of an output without readers are dropped.
        """
        if tag not in self._read:
            return []
        stream = self._graph.stream_of(self._uid, tag)
        first = self._counts.get(tag, 0)
        self._counts[tag] = first + payload.num_rows
        persister = self._handler.persister
        among = persister.root_range(stream, 0, self._subtask, first, payload.num_rows)
        if among is None:
            raise ProtocolError(f"{self._uid!r}: timers make new roots only with fault tolerance on")
        roots = among.ids()
        emission = self._emitter.roots(payload, roots, times, tag)
        call = persister.persist(
            stream, payload, among, emission.values, key_hashes=emission.key_hashes, ids=emission.ids
        )
        self._tickets += 1
        ticket = _Ticket(self._tickets, roots, emission.sends, failures_of(roots, emission.failures))
        self._queue.append(ticket)
        self._out[ticket.number] = ticket
        self._publish()
        return [PersistRoots(ticket.number, call)]

    def mark(self, mark: Mark) -> list[Action]:
        """Send a mark behind everything persisted before it, at once if that is nothing."""
        if not self._queue:
            return list(self._emitter.mark(mark))
        if isinstance(mark, Watermark) and isinstance(self._queue[-1], Watermark):
            self._queue.pop()  # a later watermark says all that this one does
        self._queue.append(mark)
        return []

    def accepted(self, number: int) -> list[Action]:
        """Send what the vertex has persisted, and the marks for which it was the last to wait for.

        Raises `ProtocolError` for a ticket that is not out.
        """
        ticket = self._out.pop(number, None)
        if ticket is None:
            raise ProtocolError(f"{self._uid!r}: ticket {number} was accepted, which is not out")
        ticket.accepted = True
        self._publish()
        actions: list[Action] = [*ticket.sends]
        if ticket.failures:
            actions.append(FailRoots(ticket.failures))
        while self._queue:
            head = self._queue[0]
            if isinstance(head, _Ticket):
                if not head.accepted:
                    break
            else:
                actions.extend(self._emitter.mark(head))
            self._queue.popleft()
        return actions

    def _publish(self) -> None:
        self._held = tuple(ticket.roots for ticket in self._out.values())


class TimerRootsOutlet:
    """`ftlayer.runtime.task.outlet.Outlet` of a chain that ends in timers: their results become roots."""

    due_ms: int | None = None

    def __init__(self, channels: ChannelOutlet, roots: TimerRoots) -> None:
        """``channels`` takes what comes of records; both have one emitter."""
        self._channels = channels
        self._roots = roots
        self.latencies = channels.latencies

    def take(self, lineage: RecordIds | None, records: int, passed: Passed, now: Now) -> list[Action]:
        return self._channels.take(lineage, records, passed, now)

    def take_fired(self, outputs: dict[str, Rows], now: Now) -> list[Action]:
        actions: list[Action] = []
        for tag, rows in outputs.items():
            if rows.payload.num_rows:
                actions.extend(self._roots.persist(tag, rows.payload, rows.times))
        return actions

    def mark(self, mark: Mark) -> list[Action]:
        return self._roots.mark(mark)

    def marker(self, marker: LatencyMarker, now: Now) -> list[Action]:
        """See `Outlet.marker`. Results of timers are roots of their own, and it waits for none."""
        return self._channels.marker(marker, now)

    def accepted(self, ticket: int) -> list[Action]:
        return self._roots.accepted(ticket)

    def flush(self, now: Now, *, force: bool) -> None:
        """Nothing waits for time."""

    def close(self) -> None:
        """Nothing to give up."""

    @property
    def waiting(self) -> bool:
        return self._roots.waiting

    @property
    def held(self) -> U64Array:
        return self._roots.held
