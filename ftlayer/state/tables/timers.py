"""Timers by time: the keys that share a time lie in one bucket, and a heap orders the buckets' times.

Windows give all their keys the same few times, so the heap stays small; and a timer taken back is out of its
bucket at once, wherever its time lies in the heap.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from ftlayer.functions.keyed import Key

SPARE_TIMES = 64
"""Times without a timer that the heap may hold beside as many as there are with one."""


class TimerService:
    """The timers of one operator, of event and of processing time: `ftlayer.functions.keyed.Timers`."""

    def __init__(self) -> None:
        self._event = _Queue()
        self._processing = _Queue()

    def add_event(self, key: Key, time_ms: int) -> bool:
        return self._event.add(key, time_ms)

    def add_processing(self, key: Key, time_ms: int) -> bool:
        return self._processing.add(key, time_ms)

    def delete_event(self, key: Key, time_ms: int) -> bool:
        """Remove a timer of event time, if there is one; whether there was."""
        return self._event.delete(key, time_ms)

    def delete_processing(self, key: Key, time_ms: int) -> bool:
        """Remove a timer of processing time, if there is one; whether there was."""
        return self._processing.delete(key, time_ms)

    def due_event(self, watermark_ms: int) -> tuple[int, list[Key]] | None:
        """Take out the earliest event timers up to the watermark: their time, and keys in the order of setting."""
        return self._event.take(watermark_ms)

    def due_processing(self, now_ms: int) -> tuple[int, list[Key]] | None:
        """Take out the earliest processing timers up to now: their time, and keys in the order of setting."""
        return self._processing.take(now_ms)

    @property
    def next_event_ms(self) -> int | None:
        """The earliest event timer's time; None if there is none."""
        return self._event.next_ms()

    @property
    def next_processing_ms(self) -> int | None:
        """The earliest processing timer's time; None if there is none."""
        return self._processing.next_ms()

    @property
    def event_count(self) -> int:
        return self._event.count

    @property
    def processing_count(self) -> int:
        return self._processing.count

    def freeze(self) -> tuple[Buckets, Buckets]:
        """Return the timers of event and of processing time as they are now, not to be changed.

        Takes time by the number of different times; a bucket is copied when it is changed. Until `thaw`.
        """
        return self._event.freeze(), self._processing.freeze()

    def thaw(self) -> None:
        self._event.thaw()
        self._processing.thaw()


Buckets = dict[int, dict[Key, None]]
"""The keys of each time, in the order of setting: a dict serves as a set that keeps its order."""


class _Queue:
    def __init__(self) -> None:
        self.count = 0
        self._buckets: Buckets = {}
        self._times: list[int] = []
        # The buckets of the last snapshot that is still read: those that are still the same are not to be changed.
        self._frozen: Buckets = {}

    def freeze(self) -> Buckets:
        self._frozen = self._buckets.copy()
        return self._frozen

    def thaw(self) -> None:
        self._frozen = {}

    def _private(self, time_ms: int, bucket: dict[Key, None]) -> dict[Key, None]:
        if self._frozen and self._frozen.get(time_ms) is bucket:
            bucket = self._buckets[time_ms] = bucket.copy()
        return bucket

    def add(self, key: Key, time_ms: int) -> bool:
        bucket = self._buckets.get(time_ms)
        if bucket is None:
            self._buckets[time_ms] = {key: None}
            heappush(self._times, time_ms)
        elif key in bucket:
            return False
        else:
            self._private(time_ms, bucket)[key] = None
        self.count += 1
        return True

    def delete(self, key: Key, time_ms: int) -> bool:
        bucket = self._buckets.get(time_ms)
        if bucket is None or key not in bucket:
            return False
        bucket = self._private(time_ms, bucket)
        del bucket[key]
        self.count -= 1
        if not bucket:
            del self._buckets[time_ms]
            # Its time stays in the heap: a timer that is moved on with every record would fill it.
            if len(self._times) > 2 * len(self._buckets) + SPARE_TIMES:
                self._times = list(self._buckets)
                heapify(self._times)
        return True

    def next_ms(self) -> int | None:
        while self._times and self._times[0] not in self._buckets:
            heappop(self._times)
        return self._times[0] if self._times else None

    def take(self, until_ms: int) -> tuple[int, list[Key]] | None:
        time_ms = self.next_ms()
        if time_ms is None or time_ms > until_ms:
            return None
        heappop(self._times)
        keys = list(self._buckets.pop(time_ms))
        self.count -= len(keys)
        return time_ms, keys
