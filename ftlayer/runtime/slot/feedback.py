"""The way back of an iteration in a slot: a queue that never holds its sender up, and a head that works it off first.

All other channels of a circle hold their senders up as they do elsewhere. The tail's only output always has room, so
a task that sends to it is let on in the end, and so is the one that sends to that, round to the head: no circle
of tasks waits for each other.

What that costs is a bound. New records are let in only while less waits on the way back than an ordinary channel may
hold; so there is never more in a loop than its channels hold and what it makes of that. A loop that makes more records
of each than leave it fills the slot's memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from ftlayer.config import TopologyOptions
from ftlayer.runtime.protocol.elements import Batch, Element
from ftlayer.runtime.slot.inbox import Inbox, Taken
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.topology.operators import IterationHead


class FeedbackOutput:
    """A channel back to a head in the same slot: takes records whether there is room or not, and no marks."""

    has_room = True

    def __init__(self, channel: Channel, inbox: Inbox) -> None:
        self._channel = channel
        self._inbox = inbox

    def send(self, element: Element, now_ms: int) -> None:
        """Put records into the head's queue. Watermarks, barriers and ends of streams do not go round."""
        if isinstance(element, Batch):
            self._inbox.put(self._channel, element, 0)


class HeadInbox(Inbox):
    """What waits for a head: records that came back and new ones take turns, and many that came back come first.

    Attributes:
        feedback: the channels by which they come back.
    """

    def __init__(
        self, channels: Iterable[Channel], feedback: frozenset[int], batch_rows: int, limit_bytes: int
    ) -> None:
        """``feedback`` are the numbers of the edges that lead back."""
        super().__init__(channels, batch_rows, limit_bytes)
        self.feedback = frozenset(channel for channel in self._queues if channel.edge in feedback)
        self._is_new = True

    def take(self, most_rows: int = sys.maxsize) -> Taken:
        for channel in self.feedback:
            queue = self._queues[channel]
            if queue in self._turn and (self._is_new or not self.has_room(channel)):
                self._turn.remove(queue)
                self._turn.appendleft(queue)
        taken = super().take(most_rows)
        self._is_new = taken.channel not in self.feedback
        return taken


def inbox_for(graph: JobGraph, uid: str, channels: Iterable[Channel], options: TopologyOptions) -> Inbox:
    """Return the inbox of a chain's subtask."""
    if isinstance(graph.vertex(uid).operators[0], IterationHead):
        back = frozenset(edge.number for edge in graph.edges_into(uid) if edge.feedback)
        return HeadInbox(channels, back, options.batch_rows, options.channel_bytes)
    return Inbox(channels, options.batch_rows, options.channel_bytes)
