"""What waits for one task: a queue a channel, served in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from ftlayer.records.ids import U64Array
from ftlayer.runtime.elements import Batch, Element
from ftlayer.runtime.slot.batching import can_join, joined, size_of
from ftlayer.runtime.slot.snapshots import snapshot
from ftlayer.stream.job_graph import Channel


@dataclass(frozen=True, slots=True)
class Taken:
    """An element for a task, and the credit that its channel has used for it (0 within a slot)."""

    channel: Channel
    element: Element
    credit: int


@dataclass(frozen=True, slots=True)
class _Waiting:
    element: Element
    credit: int
    size: int


class _ChannelQueue:
    __slots__ = ("bytes", "channel", "items", "rows")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.items: deque[_Waiting] = deque()
        self.rows = 0
        self.bytes = 0

    def put(self, element: Element, credit: int) -> None:
        size = 0
        if isinstance(element, Batch):
            self.rows += element.num_rows
            size = size_of(element)
            self.bytes += size
        self.items.append(_Waiting(element, credit, size))

    def pop(self) -> _Waiting:
        item = self.items.popleft()
        if isinstance(item.element, Batch):
            self.rows -= item.element.num_rows
            self.bytes -= item.size
        return item


class Inbox:
    """Elements of one channel come out in their order; channels take turns."""

    def __init__(self, channels: Iterable[Channel], batch_rows: int, limit_bytes: int) -> None:
        """``batch_rows``: how far batches that wait are joined; ``limit_bytes``: see `has_room`."""
        self._queues = {channel: _ChannelQueue(channel) for channel in channels}
        self._turn: deque[_ChannelQueue] = deque()  # those with elements
        self._batch_rows = batch_rows
        self._limit_bytes = limit_bytes

    def __bool__(self) -> bool:
        return bool(self._turn)

    def put(self, channel: Channel, element: Element, credit: int) -> None:
        """Add an element; KeyError for a channel that does not lead here."""
        queue = self._queues[channel]
        if not queue.items:
            self._turn.append(queue)
        queue.put(element, credit)

    def take(self) -> Taken:
        """Return the next element; batches of one channel that wait behind each other as one."""
        queue = self._turn.popleft()
        first = queue.pop()
        element, credit = first.element, first.credit
        if isinstance(element, Batch) and queue.items:
            batches, rows = [element], element.num_rows
            while queue.items:
                behind = queue.items[0].element
                if not isinstance(behind, Batch) or not can_join(element, behind):
                    break
                rows += behind.num_rows
                if rows > self._batch_rows:
                    break
                batches.append(behind)
                credit += queue.pop().credit
            element = joined(batches)
        if queue.items:
            self._turn.append(queue)
        return Taken(queue.channel, element, credit)

    def has_room(self, channel: Channel) -> bool:
        """Whether a sender in the same slot should produce more for this channel."""
        queue = self._queues[channel]
        return not queue.items or (queue.rows < 2 * self._batch_rows and queue.bytes < self._limit_bytes)

    def drop(self, channel: Channel) -> int:
        """Forget what waits of a channel; returns how many records."""
        queue = self._queues[channel]
        if not queue.items:
            return 0
        rows, queue.rows, queue.bytes = queue.rows, 0, 0
        queue.items.clear()
        self._turn.remove(queue)
        return rows

    def roots(self) -> list[U64Array]:
        """Return the roots of what waits; may be called by any thread."""
        return [
            item.element.lineage.roots
            for queue in self._queues.values()
            for item in snapshot(queue.items)
            if isinstance(item.element, Batch) and item.element.lineage is not None
        ]
