"""Two tasks as one: what the first one sends on the link between them goes into the second at once."""

from __future__ import annotations

import numpy as np

from ftlayer.clock import Now
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.elements import Element
from ftlayer.runtime.task.actions import Action, Send, TaskEnded
from ftlayer.runtime.task.contract import InputTask, SourceRows, SourceTask, Task
from ftlayer.topology.job_graph import Channel


class _Linked:
    """`Task` of two tasks. Tickets are the second one's: the first one persists nothing."""

    def __init__(self, first: Task, link: Channel, second: InputTask) -> None:
        self.uid = first.uid
        self.subtask = first.subtask
        self._first_task = first
        self._link = link
        self._second = second

    def start(self, now: Now) -> list[Action]:
        """See `Task.start`."""
        actions = self._second.start(now)
        return [*actions, *self._pass_on(self._first_task.start(now), now)]

    def on_time(self, now: Now) -> list[Action]:
        """See `Task.on_time`."""
        actions = self._pass_on(self._first_task.on_time(now), now)
        return [*actions, *self._second.on_time(now)]

    def accepted(self, ticket: int, now: Now) -> list[Action]:
        """See `Task.accepted`."""
        return self._second.accepted(ticket, now)

    def held_roots(self) -> U64Array:
        """See `Task.held_roots`."""
        return np.concatenate([self._first_task.held_roots(), self._second.held_roots()])

    @property
    def progress(self) -> int:
        """A number that changes with every record, or pair, that one of the two has done. Any thread may look."""
        return sum(getattr(task, "progress", 0) for task in (self._first_task, self._second))

    @property
    def late(self) -> int:
        """How many records came too late to be kept."""
        return sum(getattr(task, "late", 0) for task in (self._first_task, self._second))

    @property
    def row(self) -> int | None:
        """The row of its batch that the first one works on, None if there is none or it is unknown. For any thread."""
        return getattr(self._first_task, "row", None)

    def _pass_on(self, actions: list[Action], now: Now) -> list[Action]:
        """Carry out what concerns the link, and return the rest. The end is the second one's to tell."""
        rest: list[Action] = []
        for action in actions:
            if isinstance(action, Send) and action.channel == self._link:
                rest.extend(self._second.input(self._link, action.element, now))
            elif not isinstance(action, TaskEnded):
                rest.append(action)
        return rest


class LinkedTask(_Linked):
    """`InputTask` of two of them: a join and what is chained to it."""

    def __init__(self, first: InputTask, link: Channel, second: InputTask) -> None:
        super().__init__(first, link, second)
        self._first = first

    def input(self, channel: Channel, element: Element, now: Now) -> list[Action]:
        """See `InputTask.input`."""
        return self._pass_on(self._first.input(channel, element, now), now)

    def reset(self, channel: Channel, now: Now) -> list[Action]:
        """See `InputTask.reset`."""
        return self._pass_on(self._first.reset(channel, now), now)


class LinkedSourceTask(_Linked):
    """`SourceTask` of one and of what is chained to it, which is so only where nothing is tracked."""

    def __init__(self, first: SourceTask, link: Channel, second: InputTask) -> None:
        super().__init__(first, link, second)
        self._first = first

    def rows(self, rows: SourceRows, now: Now) -> list[Action]:
        """See `SourceTask.rows`."""
        return self._pass_on(self._first.rows(rows, now), now)

    def end(self, now: Now) -> list[Action]:
        """See `SourceTask.end`."""
        return self._pass_on(self._first.end(now), now)
