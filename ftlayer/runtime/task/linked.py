"""Two tasks as one: what the first one sends on the link between them goes into the second at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ftlayer.clock import Now
from ftlayer.histogram import Histogram
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.elements import MIN_TIME_MS
from ftlayer.runtime.task.actions import Action, Send, TaskEnded
from ftlayer.runtime.task.contract import Task
from ftlayer.runtime.task.events import ElementCame, RowsPersisted, TaskEvent, TaskStart, TimeCame
from ftlayer.topology.job_graph import Channel


class LinkedTask:
    """`Task` of two of them: a join, or a source where nothing is tracked, and what is chained to it.

    Tickets are the second one's: the first one persists nothing.
    """

    def __init__(self, first: Task, link: Channel, second: Task) -> None:
        self.uid = first.uid
        self.subtask = first.subtask
        self._first = first
        self._link = link
        self._second = second

    def handle(self, event: TaskEvent, now: Now) -> list[Action]:
        match event:
            case TaskStart():
                actions = self._second.handle(event, now)
                return [*actions, *self._pass_on(self._first.handle(event, now), now)]
            case TimeCame():
                actions = self._pass_on(self._first.handle(event, now), now)
                return [*actions, *self._second.handle(event, now)]
            case RowsPersisted():
                return self._second.handle(event, now)
            case _:
                return self._pass_on(self._first.handle(event, now), now)

    def held_roots(self) -> U64Array:
        return np.concatenate([self._first.held_roots(), self._second.held_roots()])

    @property
    def progress(self) -> int:
        """A number that changes with every record, or pair, that one of the two has done. Any thread may look."""
        return sum(getattr(task, "progress", 0) for task in (self._first, self._second))

    @property
    def watermark_ms(self) -> int:
        """The event time that the second one has come to. Any thread may look."""
        return getattr(self._second, "watermark_ms", MIN_TIME_MS)

    @property
    def late(self) -> int:
        """How many records came too late for either."""
        return sum(getattr(task, "late", 0) for task in (self._first, self._second))

    @property
    def latencies(self) -> Mapping[str, Histogram]:
        """By source: how old records are at the second one's sink, if there is one. Any thread may look."""
        return getattr(self._second, "latencies", {})

    @property
    def row(self) -> int | None:
        """The row of its batch that the first one works on, None if there is none or it is unknown. For any thread."""
        return getattr(self._first, "row", None)

    def _pass_on(self, actions: list[Action], now: Now) -> list[Action]:
        """Carry out what concerns the link, and return the rest. The end is the second one's to tell."""
        rest: list[Action] = []
        for action in actions:
            if isinstance(action, Send) and action.channel == self._link:
                rest.extend(self._second.handle(ElementCame(self._link, action.element), now))
            elif not isinstance(action, TaskEnded):
                rest.append(action)
        return rest
