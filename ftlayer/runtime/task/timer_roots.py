"""What timers put out, as new roots: persisted first, sent once the vertex has accepted them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pyarrow as pa

from ftlayer.errors import ProtocolError
from ftlayer.handler.handler import Handler
from ftlayer.records.ids import I64Array
from ftlayer.runtime.actions import Action, PersistRoots
from ftlayer.runtime.elements import EndOfStream, Idle, Watermark
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.stream.job_graph import JobGraph

Mark = Watermark | Idle | EndOfStream


@dataclass(slots=True)
class _Ticket:
    number: int
    accepted: bool = False


class TimerRoots:
    """Persists the output of timers, and keeps marks back until everything before them was sent.

    A watermark says that the records up to it have gone by; those that it made timers put out have gone by once
    they are sent. What is derived from records meanwhile may overtake a mark: that makes nothing late.
    """

    def __init__(self, graph: JobGraph, uid: str, subtask: int, handler: Handler, emitter: Emitter) -> None:
        self._graph = graph
        self._uid = uid
        self._subtask = subtask
        self._handler = handler
        self._emitter = emitter
        self._queue: deque[_Ticket | Mark] = deque()
        self._sends: dict[int, tuple[_Ticket, list[Action]]] = {}
        self._tickets = 0
        self._counts: dict[str, int] = {}

    @property
    def waiting(self) -> bool:
        """Whether something has yet to be accepted."""
        return bool(self._queue)

    def persist(self, tag: str, payload: pa.RecordBatch, times: I64Array | None) -> PersistRoots:
        """Give rows of an output (the side output ``tag``, "" for the main one) roots and have them persisted."""
        stream = self._graph.stream_of(self._uid, tag)
        first = self._counts.get(tag, 0)
        self._counts[tag] = first + payload.num_rows
        persister = self._handler.persister
        roots = persister.roots(stream, 0, self._subtask, first, payload.num_rows)
        if roots is None:
            raise ProtocolError(f"{self._uid!r}: timers make new roots only with fault tolerance on")
        emission = self._emitter.roots(payload, roots, times, tag)
        call = persister.persist(
            stream, payload, roots, emission.values, key_hashes=emission.key_hashes, ids=emission.ids
        )
        self._tickets += 1
        ticket = _Ticket(self._tickets)
        self._queue.append(ticket)
        self._sends[ticket.number] = (ticket, list(emission.sends))
        return PersistRoots(ticket.number, call)

    def mark(self, mark: Mark) -> list[Action]:
        """Send a mark behind everything persisted before it, at once if that is nothing."""
        if not self._queue:
            return list(self._emitter.mark(mark))
        if isinstance(mark, Watermark) and isinstance(self._queue[-1], Watermark):
            self._queue.pop()  # a later watermark says all that this one does
        self._queue.append(mark)
        return []

    def accepted(self, number: int) -> list[Action]:
        """Send what the vertex has persisted, and the marks for which it was the last to wait for."""
        ticket, actions = self._sends.pop(number)
        ticket.accepted = True
        while self._queue:
            head = self._queue[0]
            if isinstance(head, _Ticket):
                if not head.accepted:
                    break
            else:
                actions.extend(self._emitter.mark(head))
            self._queue.popleft()
        return actions
