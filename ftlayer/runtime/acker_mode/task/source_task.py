"""A source's subtask: rows are persisted first, and emitted once the vertex has accepted them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ftlayer.clock import Now
from ftlayer.errors import ProtocolError
from ftlayer.handler.handler import Handler
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.elements import EndOfStream
from ftlayer.runtime.task.actions import Action, FailRoots, PersistRoots, Send, TaskEnded
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.runtime.task.event_time import SplitMarks
from ftlayer.runtime.task.events import (
    RowsPersisted,
    SourceOver,
    SourceRows,
    TaskEvent,
    TaskStart,
    TimeCame,
    refused,
)
from ftlayer.runtime.task.latency import SourceMarkers
from ftlayer.runtime.task.reports import failures_of
from ftlayer.topology.job_graph import JobGraph
from ftlayer.vertex.calls import Failure, Persist


@dataclass(slots=True)
class _Unsent:
    """Rows that the vertex was asked to persist, ready to be sent."""

    roots: U64Array
    sends: list[Send]
    failures: tuple[Failure, ...]
    accepted: bool = False


class PersistingSourceTask:
    """`ftlayer.runtime.task.contract.Task` of a source. Sends rows in the order it got them, and no watermarks."""

    def __init__(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> None:
        """``handler`` is this subtask's own; its run is a name no earlier start of the subtask has had."""
        self.uid = uid
        self.subtask = subtask
        self._stream = graph.stream_of(uid)
        self._handler = handler
        self._emitter = Emitter(graph, uid, subtask, handler)
        self._markers = SourceMarkers(self._emitter, uid)
        self._splits = SplitMarks(self._emitter)
        self._unsent: deque[_Unsent] = deque()
        self._first_ticket = 1  # of the first in `_unsent`
        self._held: tuple[U64Array, ...] = ()
        self._ending = False

    def handle(self, event: TaskEvent, now: Now) -> list[Action]:
        """See `Task.handle`. `ProtocolError` for a ticket that is not out."""
        match event:
            case SourceRows():
                return self._persist(event, now)
            case RowsPersisted(ticket):
                return self._persisted(ticket)
            case SourceOver():
                self._ending = True
                return self._ended()
            case TaskStart() | TimeCame():
                return []
            case _:
                raise refused(self.uid, event)

    def _persist(self, rows: SourceRows, now: Now) -> list[Action]:
        """Make roots of the rows, and have them persisted (none and a position, too)."""
        persister = self._handler.persister
        n = rows.payload.num_rows
        among = persister.root_range(self._stream, self.subtask, rows.number, rows.first_ordinal, n)
        if among is None:
            raise ProtocolError(f"source {self.uid!r} persists rows only with fault tolerance on")
        roots = among.ids()
        if rows.misfit:
            # Replays of its letter fail as well: it has not the source's schema.
            ids = self._emitter.unsent(roots)
            call = persister.persist(self._stream, rows.payload, among, None, position=rows.position, ids=ids)
            failures = (Failure(int(roots[0]), rows.misfit, self.uid, fatal=True),)
            return self._stored(call, _Unsent(roots, self._splits.around(rows, []), failures))
        emission = self._emitter.roots(rows.payload, roots, split=rows.in_time)
        call = persister.persist(
            self._stream,
            rows.payload,
            among,
            emission.values,
            key_hashes=emission.key_hashes,
            position=rows.position,
            ids=emission.ids,
        )
        # It is as old as the rows, which wait for the vertex first.
        markers = self._markers.behind(n, now, int(roots[-1]) if n else 0)
        sends = [*self._splits.around(rows, emission.sends), *markers]
        return self._stored(call, _Unsent(roots, sends, failures_of(roots, emission.failures)))

    def _stored(self, call: Persist, unsent: _Unsent) -> list[Action]:
        self._unsent.append(unsent)
        self._publish()
        return [PersistRoots(self._first_ticket + len(self._unsent) - 1, call)]

    def _persisted(self, ticket: int) -> list[Action]:
        """Send what is persisted, up to the first rows that are not: answers may come in any order."""
        place = ticket - self._first_ticket
        if not 0 <= place < len(self._unsent) or self._unsent[place].accepted:
            raise ProtocolError(f"source {self.uid!r}: ticket {ticket} was accepted, which is not out")
        self._unsent[place].accepted = True
        actions: list[Action] = []
        while self._unsent and self._unsent[0].accepted:
            unsent = self._unsent.popleft()
            actions.extend(unsent.sends)
            if unsent.failures:
                actions.append(FailRoots(unsent.failures))
            self._first_ticket += 1
        self._publish()
        return actions + self._ended()

    def held_roots(self) -> U64Array:
        """Return the roots of all rows that were given to the vertex and are not sent yet."""
        held = self._held
        return np.concatenate(held) if held else np.zeros(0, np.uint64)

    def _ended(self) -> list[Action]:
        if not self._ending or self._unsent:
            return []
        return [*self._emitter.mark(EndOfStream()), TaskEnded()]

    def _publish(self) -> None:
        self._held = tuple(unsent.roots for unsent in self._unsent)
