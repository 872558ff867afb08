"""Where the elements that a task sends go: a queue in the same slot, or a window towards another one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from ftlayer.checkpoint.barrier import Alignment
from ftlayer.config import TopologyOptions
from ftlayer.records.ids import U64Array
from ftlayer.runtime.protocol.channel_frames import ElementCodec, roots_in, rows_in
from ftlayer.runtime.protocol.elements import (
    Barrier,
    Batch,
    CancelMarker,
    Element,
    EndOfStream,
    Idle,
    LatencyMarker,
    Splits,
    Watermark,
)
from ftlayer.runtime.slot.batching import can_join, cut, joined, size_of
from ftlayer.runtime.slot.credit import SendWindow
from ftlayer.runtime.slot.inbox import Inbox
from ftlayer.topology.job_graph import Channel

LIMIT_FRAMES = 4
"""What a slow receiver lets be in flight is at least so many frames: a task runs for a whole frame at a time, and all
that comes of it is in flight, on top of the limit."""


class Output(Protocol):
    @property
    def has_room(self) -> bool:
        """Whether the task should produce more for it."""

    def send(self, element: Element, now_ms: int) -> None:
        """Take an element, whether there is room or not."""


class LocalOutput:
    """A channel to a task of the same slot: elements are handed over as they are."""

    def __init__(self, channel: Channel, inbox: Inbox) -> None:
        self._channel = channel
        self._inbox = inbox

    @property
    def has_room(self) -> bool:
        """Whether the receiver is not far behind."""
        return self._inbox.has_room(self._channel)

    def send(self, element: Element, now_ms: int) -> None:
        self._inbox.put(self._channel, element, 0)


@dataclass(frozen=True, slots=True)
class LateBarrier:
    """A barrier that waits in an output in its order, and overtakes what waits before it at ``due_ms`` (monotone)."""

    barrier: Barrier
    frame: bytes
    due_ms: int


class RemoteOutput:
    """A channel to another slot: small batches wait for others, then everything for credit.

    Attributes:
        channel, slot: which one, and the slot it leads to.
        waiting_since_ms: since when a small batch waits; None if none does.
        late: barriers with a timeout that wait in their order, the earliest first.
        window: what may be on its way, and what is.
    """

    def __init__(self, channel: Channel, slot: int, codec: ElementCodec, options: TopologyOptions) -> None:
        self.channel = channel
        self.slot = slot
        self.waiting_since_ms: int | None = None
        self.late: deque[LateBarrier] = deque()
        self._codec = codec
        self._batch_rows = options.batch_rows
        self._frame_bytes = self._full = options.channel_bytes
        self.window = SendWindow(options.channel_bytes)
        self._small: tuple[Batch, ...] = ()  # replaced, never changed: another thread looks at it
        self._small_rows = self._small_bytes = 0
        self._mark: Watermark | Idle | Splits | EndOfStream | None = None

    @property
    def has_room(self) -> bool:
        return self.window.has_room

    @property
    def is_empty(self) -> bool:
        """Whether everything was sent and taken by the receiver."""
        return not self._small and self.window.is_empty

    def send(self, element: Element, now_ms: int) -> None:
        """Take an element; it goes out by `flush` and `take`."""
        if not isinstance(element, Batch):
            self.flush()
            if not isinstance(element, Barrier | CancelMarker | LatencyMarker):
                self._mark = element
            self.window.put(self._codec.encode(self.channel, element))
            return
        for part in cut(element, self._rows_at_most(element)):
            if self._small and not can_join(self._small[0], part):
                self.flush()
            self._small += (part,)
            self._small_rows += part.num_rows
            self._small_bytes += size_of(part)
            if self._small_rows >= self._batch_rows or self._small_bytes >= self._frame_bytes:
                self.flush()
            elif self.waiting_since_ms is None:
                self.waiting_since_ms = now_ms

    def flush(self) -> None:
        """Let small batches wait no longer."""
        if self._small:
            self.window.put(self._codec.encode(self.channel, joined(self._small)))
            self._forget_small()

    def take(self) -> bytes | None:
        """Return the next frame to go out, counted as sent; None if none may go."""
        return self.window.take()

    def limit(self, size: int) -> None:
        """From now on at most ``size`` bytes may be on their way, in frames that are much smaller if it is little."""
        self.window.limit = size
        self._frame_bytes = size if size >= self._full else size // LIMIT_FRAMES

    def send_barrier(self, barrier: Barrier, due_ms: int | None) -> None:
        """Take a barrier that goes behind everything; it overtakes it at ``due_ms`` (see `overtake_late`)."""
        self.flush()
        frame = self._codec.encode(self.channel, barrier)
        self.window.put(frame)
        if due_ms is not None:
            self.late.append(LateBarrier(barrier, frame, due_ms))

    def overtake(self, barrier: Barrier) -> tuple[bytes, ...]:
        """Take a barrier that goes ahead of everything; returns the frames with records that it overtakes."""
        self.flush()
        overtaken = _with_records(self.window.waiting())
        self.window.put_first(self._codec.encode(self.channel, barrier))
        return overtaken

    def overtake_late(self, late: LateBarrier) -> tuple[bytes, ...]:
        """Turn one of the late barriers unaligned; returns the frames with records that it overtakes."""
        self.late.remove(late)
        overtaken = _with_records(self.window.pull(late.frame))
        unaligned = replace(late.barrier, alignment=Alignment.UNALIGNED)
        self.window.put_first(self._codec.encode(self.channel, unaligned))
        return overtaken

    def granted(self, size: int) -> None:
        """The receiver's task has taken ``size`` bytes."""
        self.window.granted(size)

    def reset(self) -> int:
        """Forget everything, for a receiver that begins anew; returns the records that had not been sent.

        The last mark is what the new one has to hear first: a watermark, splits, or an end, are not said a second time.
        """
        rows = self._small_rows + sum(rows_in(frame) for frame in self.window.reset())
        self.late.clear()
        self._forget_small()
        if self._mark is not None:
            self.window.put(self._codec.encode(self.channel, self._mark))
        return rows

    def roots(self) -> list[U64Array]:
        """Return the roots of what has not been sent; may be called by any thread."""
        small = [batch.lineage.roots for batch in self._small if batch.lineage is not None]
        return small + [roots_in(frame) for frame in self.window.waiting()]

    def validate(self) -> None:
        """Raise `AssertionError` if what is known does not fit together; for tests."""
        assert self._small_rows == sum(batch.num_rows for batch in self._small), "small rows are miscounted"
        assert (self.waiting_since_ms is None) == (not self._small), "small batches wait for nothing"
        assert self.window.in_flight >= 0, f"{self.channel} has more credit than there is"

    def _rows_at_most(self, batch: Batch) -> int:
        """Return where to cut, so that frames are as small as a limit that was lowered wants them."""
        size = int(batch.payload.nbytes)
        if self._frame_bytes >= self._full or not size:
            return self._batch_rows
        # Only what has more than twice as many rows is cut.
        return max(1, min(self._batch_rows, batch.num_rows * self._frame_bytes // (2 * size)))

    def _forget_small(self) -> None:
        self._small = ()
        self._small_rows = self._small_bytes = 0
        self.waiting_since_ms = None


def _with_records(frames: Iterable[bytes]) -> tuple[bytes, ...]:
    return tuple(frame for frame in frames if rows_in(frame))
