"""Credits: how many bytes of one channel may be on their way before its sender has to wait.

The sender counts what it has sent and the receiver has not yet given back; the receiver gives back what its
task has taken. As in Flink's credit-based flow control, the limit is the receiver's memory, so nothing but the
sender ever waits, and no channel waits for another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from ftlayer.errors import CodecError
from ftlayer.runtime.protocol.channel_frames import encode_grants, encode_limits, is_barrier
from ftlayer.runtime.slot.rules.events import Grant, snapshot
from ftlayer.topology.job_graph import Channel

K = TypeVar("K", bound=Hashable)

MAX_WAIT_MS = 5
"""Little credit waits no longer for more: a sender is done only when it has all of it back."""


class SendWindow:
    """Frames of one channel: those that may not go yet, and the bytes of those that are on their way.

    On their way are at most ``limit`` bytes, or one frame that is larger than that; and barriers, which are small and
    need no credit, since a checkpoint is late just when there is none.

    Attributes:
        limit: the channel's credit in bytes; may be changed at any time.
        in_flight: bytes that are on their way.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._queue: deque[bytes] = deque()
        self.in_flight = 0

    @property
    def has_room(self) -> bool:
        return not self._queue and self.in_flight < self.limit

    @property
    def is_empty(self) -> bool:
        return not self._queue and not self.in_flight

    def put(self, frame: bytes) -> None:
        self._queue.append(frame)

    def put_first(self, barrier: bytes) -> None:
        """Queue a barrier's frame ahead of all that waits, save other barriers that are there already."""
        leading = 0
        for frame in self._queue:
            if not is_barrier(frame):
                break
            leading += 1
        self._queue.insert(leading, barrier)

    def pull(self, barrier: bytes) -> list[bytes]:
        """Take a barrier's frame out of those that wait; returns those that were in front of it."""
        frames = list(self._queue)
        place = next(place for place, frame in enumerate(frames) if frame is barrier)
        del self._queue[place]
        return frames[:place]

    def take(self) -> bytes | None:
        """Return the next frame and count it as sent; None if there is none, or no credit for it."""
        if not self._queue:
            return None
        frame = self._queue[0]
        size = len(frame)
        if self.in_flight and self.in_flight + size > self.limit and not is_barrier(frame):
            return None
        self.in_flight += size
        return self._queue.popleft()

    def granted(self, size: int) -> None:
        """The receiver's task has taken ``size`` bytes; `CodecError` if so many were not on their way."""
        if size > self.in_flight:
            raise CodecError(f"{size} bytes of credit came back, {self.in_flight} were on their way")
        self.in_flight -= size

    def waiting(self) -> list[bytes]:
        """Return the frames that wait; may be called by any thread."""
        return snapshot(self._queue)

    def reset(self) -> list[bytes]:
        """Begin anew with full credit; returns the frames that had waited, to be counted."""
        dropped = list(self._queue)
        self._queue.clear()
        self.in_flight = 0
        return dropped


class GrantBook(Generic[K]):
    """What a receiver has taken of each channel and not given back yet.

    Attributes:
        since_ms: since when something waits to go back, which all of it should by `MAX_WAIT_MS`; None: nothing does.
    """

    def __init__(self, limit: int) -> None:
        """Give back by quarters of the channel's ``limit``: rarely, and long before the sender runs dry."""
        self._worth_sending = max(1, limit // 4)
        self._owed: dict[K, int] = {}
        self.since_ms: int | None = None

    def taken(self, channel: K, size: int, now_ms: int) -> bool:
        """Count ``size`` bytes as taken; whether there is enough for a message (`take`)."""
        if self.since_ms is None:
            self.since_ms = now_ms
        owed = self._owed.get(channel, 0) + size
        self._owed[channel] = owed
        return owed >= self._worth_sending

    def take(self, channel: K) -> int:
        return self._owed.pop(channel, 0)

    def take_all(self) -> dict[K, int]:
        owed, self._owed = self._owed, {}
        self.since_ms = None
        return owed


class Crediting(GrantBook[Channel]):
    def __init__(self, senders: Mapping[Channel, int], channel_bytes: int) -> None:
        super().__init__(channel_bytes)
        self._senders = senders

    def give_back(self, channel: Channel, size: int, now_ms: int) -> list[Grant]:
        """A task has taken ``size`` bytes of a channel from another slot."""
        if not self.taken(channel, size, now_ms):
            return []
        return self._by_slot({channel: self.take(channel)}, encode_grants)

    def forget(self, channel: Channel) -> None:
        """The channel's sender is gone, and what it has used with it."""
        self.take(channel)

    def send_all(self) -> list[Grant]:
        return self._by_slot(self.take_all(), encode_grants)

    def limit(self, limits: dict[Channel, int]) -> list[Grant]:
        return self._by_slot(limits, encode_limits)

    def _by_slot(
        self, numbers: dict[Channel, int], encode: Callable[[dict[Channel, int]], bytes]
    ) -> list[Grant]:
        by_slot: dict[int, dict[Channel, int]] = {}
        for channel, number in numbers.items():
            by_slot.setdefault(self._senders[channel], {})[channel] = number
        return [Grant(slot, encode(its)) for slot, its in by_slot.items()]
