"""What waits for one task: a queue a channel, served in turn."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from ftlayer.common.checks import fast_dataclass
from ftlayer.config import TopologyOptions
from ftlayer.records.ids import I32Array, I64Array, U64Array
from ftlayer.runtime.handler import concat_record_ids
from ftlayer.runtime.protocol.messages import Barrier, Batch, Element, RecordIds
from ftlayer.runtime.slot.rules.events import snapshot
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.topology.operators import IterationHead

MAX_BATCH_BYTES = 16 << 20
"""A batch of more bytes is cut, so that credits mean something; a single record may be larger."""


def size_of(batch: Batch) -> int:
    """Return about how many bytes of memory a batch holds on to: what views share is counted for each."""
    size = int(batch.payload.get_total_buffer_size())
    if batch.lineage is not None:
        size += 2 * int(batch.lineage.roots.nbytes)
    return size


def can_join(one: Batch, other: Batch) -> bool:
    """Whether two batches of a channel can be made into one: both have times or neither, and so for lineage.

    They are of the same split, too.
    """
    if one.split != other.split:
        return False
    return (one.lineage is None) == (other.lineage is None) and (one.times is None) == (other.times is None)


def joined(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    lineages = [batch.lineage for batch in batches if batch.lineage is not None]
    return Batch(
        pa.concat_batches([batch.payload for batch in batches]),
        concat_record_ids(lineages) if lineages else None,
        _concatenated([batch.times for batch in batches if batch.times is not None]),
        batches[0].split,
    )


def cut(batch: Batch, max_rows: int) -> list[Batch]:
    """Cut a batch of more than twice ``max_rows``, or of more than `MAX_BATCH_BYTES`, into several views."""
    rows = batch.num_rows
    step = max_rows if rows > 2 * max_rows else rows
    if batch.payload.get_total_buffer_size() > MAX_BATCH_BYTES and batch.payload.nbytes > MAX_BATCH_BYTES:
        step = min(step, max(1, rows * MAX_BATCH_BYTES // batch.payload.nbytes))
    if step >= rows:
        return [batch]
    return [rows_of(batch, start, min(start + step, rows)) for start in range(0, rows, step)]


def rows_of(batch: Batch, start: int, end: int) -> Batch:
    lineage = batch.lineage
    return Batch(
        batch.payload.slice(start, end - start),
        None if lineage is None else _lineage_of(lineage, start, end),
        None if batch.times is None else batch.times[start:end],
        batch.split,
    )


def _lineage_of(lineage: RecordIds, start: int, end: int) -> RecordIds:
    offsets: I32Array | None = None
    if lineage.offsets is not None:
        first, last = int(lineage.offsets[start]), int(lineage.offsets[end])
        offsets = lineage.offsets[start : end + 1] - np.int32(first)
    else:
        first, last = start, end
    origins = None if lineage.origins is None else lineage.origins[first:last]
    tries = None if lineage.tries is None else lineage.tries[first:last]
    roots = lineage.roots[first:last]
    ids = roots if lineage.ids is lineage.roots else lineage.ids[first:last]
    return RecordIds(roots, ids, offsets, origins, tries)


def _concatenated(arrays: list[I64Array]) -> I64Array | None:
    return np.concatenate(arrays) if arrays else None


@fast_dataclass
class Taken:
    """An element for a task, the credit that its channel has used for it (0 within a slot), and its bytes."""

    channel: Channel
    element: Element
    credit: int
    size: int


@fast_dataclass
class _Waiting:
    element: Element
    credit: int
    size: int


@fast_dataclass
class _Capture:
    """``batches`` came before the barrier of a checkpoint, which has not come."""

    checkpoint: int
    batches: list[Batch]


class _ChannelQueue:
    __slots__ = ("blocked", "bytes", "capture", "channel", "items", "restored", "rows")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.items: deque[_Waiting] = deque()
        self.rows = 0
        self.bytes = 0
        self.blocked = False
        self.restored = 0  # so many of the first items
        self.capture: _Capture | None = None

    def put(self, element: Element, credit: int) -> None:
        size = 0
        if isinstance(element, Batch):
            self.rows += element.num_rows
            size = size_of(element)
            self.bytes += size
        self.items.append(_Waiting(element, credit, size))
        if self.capture is not None:
            self._capture(element, self.capture)

    def _capture(self, element: Element, capture: _Capture) -> None:
        if isinstance(element, Batch):
            capture.batches.append(element)
        elif isinstance(element, Barrier) and element.checkpoint >= capture.checkpoint:
            self.capture = None

    def pop(self) -> _Waiting:
        item = self.items.popleft()
        if isinstance(item.element, Batch):
            self.rows -= item.element.num_rows
            self.bytes -= item.size
        return item

    def pop_rows(self, rows: int) -> _Waiting:
        """Take the first element; of a batch of more than ``rows`` the first ones, with their share of the rest."""
        first = self.items[0]
        batch = first.element
        if not isinstance(batch, Batch) or batch.num_rows <= rows:
            return self.pop()
        credit, size = (whole * rows // batch.num_rows for whole in (first.credit, first.size))
        rest = rows_of(batch, rows, batch.num_rows)
        # What waits is never gone from here meanwhile: other threads look at it.
        self.items[0] = _Waiting(rest, first.credit - credit, first.size - size)
        self.rows -= rows
        self.bytes -= size
        return _Waiting(rows_of(batch, 0, rows), credit, size)


class Inbox:
    """Elements of one channel come out in their order; channels take turns, save those that are blocked.

    Attributes:
        turns: the channels from which there is something to `take`: those with elements that are not blocked.
        limit_bytes: see `has_room`.
    """

    def __init__(self, channels: Iterable[Channel], batch_rows: int, limit_bytes: int) -> None:
        """``batch_rows``: how far batches that wait are joined; ``limit_bytes``: see `has_room`."""
        self._queues = {channel: _ChannelQueue(channel) for channel in channels}
        self.turns: deque[_ChannelQueue] = deque()
        self._blocked: set[_ChannelQueue] = set()
        self._batch_rows = batch_rows
        self.limit_bytes = limit_bytes
        self._join_bytes = sys.maxsize
        self._restored = 0
        self._barriers = 0

    @property
    def has_barriers(self) -> bool:
        """Whether a barrier waits here, or for the others of its checkpoint."""
        return bool(self._barriers or self._blocked)

    @property
    def is_empty(self) -> bool:
        return not self.turns and not any(queue.items for queue in self._blocked)

    @property
    def has_records(self) -> bool:
        return any(self.records_of(channel) for channel in self._queues)

    def records_of(self, channel: Channel) -> int:
        return self._queues[channel].rows

    def queued(self) -> list[tuple[Channel, int, int]]:
        """Return each channel, and how many bytes and rows of it wait; may be called by any thread."""
        return [(channel, queue.bytes, queue.rows) for channel, queue in self._queues.items()]

    @property
    def channels(self) -> tuple[Channel, ...]:
        return tuple(self._queues)

    def put(self, channel: Channel, element: Element, credit: int) -> None:
        queue = self._queues[channel]
        if not queue.items and not queue.blocked:
            self.turns.append(queue)
        queue.put(element, credit)
        if isinstance(element, Barrier):
            self._barriers += 1

    def restore(self, channel: Channel, batch: Batch) -> None:
        """Add records that were in flight in a checkpoint, before anything else is put.

        They come out before everything else: with another parallelism, what follows them may come by another channel.
        """
        self.put(channel, batch, 0)
        self._queues[channel].restored += 1
        self._restored += 1

    @property
    def has_records_next(self) -> bool:
        queue = self._restored_queue() if self._restored else self.turns[0] if self.turns else None
        return queue is not None and isinstance(queue.items[0].element, Batch)

    def take(self, most_rows: int = sys.maxsize) -> Taken:
        """Return the next element; batches of one channel that wait behind each other as one.

        A batch of more than ``most_rows`` is cut, and the rest stays in front of what waits behind it.
        """
        if self._restored:
            return self._take_restored(most_rows)
        queue = self.turns.popleft()
        first = queue.pop_rows(most_rows)
        element, credit, size = first.element, first.credit, first.size
        if isinstance(element, Barrier):
            self._barriers -= 1
        elif isinstance(element, Batch) and queue.items:
            batches, rows = [element], element.num_rows
            while queue.items:
                behind = queue.items[0].element
                if not isinstance(behind, Batch) or not can_join(element, behind):
                    break
                rows += behind.num_rows
                size += queue.items[0].size
                if rows > min(self._batch_rows, most_rows) or size > self._join_bytes:
                    size -= queue.items[0].size
                    break
                batches.append(behind)
                credit += queue.pop().credit
            element = joined(batches)
        if queue.items:
            self.turns.append(queue)
        return Taken(queue.channel, element, credit, size)

    def _take_restored(self, most_rows: int) -> Taken:
        queue = self._restored_queue()
        before = len(queue.items)
        item = queue.pop_rows(most_rows)
        whole = before - len(queue.items)
        queue.restored -= whole
        self._restored -= whole
        if not queue.items:
            self.turns.remove(queue)
        return Taken(queue.channel, item.element, item.credit, item.size)

    def _restored_queue(self) -> _ChannelQueue:
        # None of them is blocked: no barrier is taken before what is in front of it.
        return next(queue for queue in self.turns if queue.restored)

    def has_room(self, channel: Channel) -> bool:
        """Whether a sender in the same slot should produce more for this channel."""
        queue = self._queues[channel]
        return not queue.items or (queue.rows < 2 * self._batch_rows and queue.bytes < self.limit_bytes)

    def limit(self, limit_bytes: int, join_bytes: int) -> None:
        """From now on see `has_room` for ``limit_bytes``, and join batches up to ``join_bytes``."""
        self.limit_bytes, self._join_bytes = limit_bytes, join_bytes

    def drop(self, channel: Channel) -> int:
        queue = self._queues[channel]
        if not queue.items:
            return 0
        rows, queue.rows, queue.bytes = queue.rows, 0, 0
        self._restored -= queue.restored
        queue.restored = 0
        self._barriers -= sum(isinstance(item.element, Barrier) for item in queue.items)
        queue.items.clear()
        self._forget_turn(queue)
        return rows

    def roots(self) -> list[U64Array]:
        """Return the roots of what waits; may be called by any thread."""
        return [
            item.element.lineage.roots
            for queue in self._queues.values()
            for item in snapshot(queue.items)
            if isinstance(item.element, Batch) and item.element.lineage is not None
        ]

    # ------------------------------------------------------------ checkpoints

    def block(self, channel: Channel) -> None:
        queue = self._queues[channel]
        self._forget_turn(queue)
        queue.blocked = True
        self._blocked.add(queue)

    def unblock(self, channel: Channel) -> None:
        queue = self._queues[channel]
        if queue.blocked:
            queue.blocked = False
            self._blocked.remove(queue)
            if queue.items:
                self.turns.append(queue)

    def capture(self, channel: Channel, checkpoint: int) -> list[Batch]:
        """Return the batches of a channel that wait in front of a checkpoint's barrier.

        Those that come until that barrier does, or a later one's, are added to the list, until `stop_capture`.
        """
        queue = self._queues[channel]
        batches: list[Batch] = []
        queue.capture = None
        for item in queue.items:
            if isinstance(item.element, Batch):
                batches.append(item.element)
            elif isinstance(item.element, Barrier) and item.element.checkpoint >= checkpoint:
                return batches
        queue.capture = _Capture(checkpoint, batches)
        return batches

    def stop_capture(self, channel: Channel) -> None:
        """Add nothing more to what `capture` returned."""
        self._queues[channel].capture = None

    def take_out(self, channel: Channel, barrier: Barrier) -> None:
        queue = self._queues[channel]
        place = next(place for place, item in enumerate(queue.items) if item.element is barrier)
        del queue.items[place]
        self._barriers -= 1
        if not queue.items:
            self._forget_turn(queue)

    # ------------------------------------------------------------ for tests

    def validate(self) -> None:
        # In one pass: simulations call it behind each event, and most channels are empty.
        barriers = restored = 0
        for queue in self._queues.values():
            rows = size = 0
            for item in queue.items:
                if isinstance(item.element, Batch):
                    rows += item.element.num_rows
                    size += item.size
                elif isinstance(item.element, Barrier):
                    barriers += 1
            assert queue.bytes == size, f"{queue.channel}: bytes are miscounted"
            assert queue.rows == rows, f"{queue.channel}: rows are miscounted"
            waits = bool(queue.items) and not queue.blocked
            assert waits == (queue in self.turns), f"{queue.channel} is forgotten, or has a turn for nothing"
            assert queue.blocked == (queue in self._blocked), f"{queue.channel} is half blocked"
            assert queue.restored <= len(queue.items), f"{queue.channel}: restored elements are miscounted"
            restored += queue.restored
        assert self._barriers == barriers, "barriers are miscounted"
        assert self._restored == restored, "restored elements are miscounted"

    def _forget_turn(self, queue: _ChannelQueue) -> None:
        if queue in self.turns:
            self.turns.remove(queue)


# The way back of an iteration in a slot: a queue that never holds its sender up, and a head that works it off first.
#
# All other channels of a circle hold their senders up as they do elsewhere. The tail's only output always has room, so
# a task that sends to it is let on in the end, and so is the one that sends to that, round to the head: no circle
# of tasks waits for each other.
#
# What that costs is a bound. New records are let in only while less waits on the way back than an ordinary channel
# may hold; so there is never more in a loop than its channels hold and what it makes of that. A loop that makes more
# records of each than leave it fills the slot's memory.


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
        super().__init__(channels, batch_rows, limit_bytes)
        self.feedback = frozenset(channel for channel in self._queues if channel.edge in feedback)
        self._is_new = True

    def take(self, most_rows: int = sys.maxsize) -> Taken:
        for channel in self.feedback:
            queue = self._queues[channel]
            if queue in self.turns and (self._is_new or not self.has_room(channel)):
                self.turns.remove(queue)
                self.turns.appendleft(queue)
        taken = super().take(most_rows)
        self._is_new = taken.channel not in self.feedback
        return taken


def inbox_for(graph: JobGraph, uid: str, channels: Iterable[Channel], options: TopologyOptions) -> Inbox:
    if isinstance(graph.vertex(uid).operators[0], IterationHead):
        back = frozenset(edge.number for edge in graph.edges_into(uid) if edge.feedback)
        return HeadInbox(channels, back, options.batch_rows, options.channel_bytes)
    return Inbox(channels, options.batch_rows, options.channel_bytes)
