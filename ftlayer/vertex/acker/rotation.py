"""When the buckets of a `RotatingHashMap` rotate: which is the newest now, and which have expired."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from ftlayer.errors import ConfigError

from .rotating_map import MAX_STAMP


@dataclass
class _OpenBucket:
    number: int
    interval: int


class BucketRotation:
    """The buckets of one timeout, by an explicit clock in milliseconds.

    It owns the bucket numbers ``first_bucket`` to ``first_bucket + buckets - 1`` of a table, so rotations
    of several timeouts share a table when their numbers don't overlap; a table's `expire` takes the
    numbers, and stamps come from `bucket_at`. Time is cut into intervals of ``timeout / (buckets - 1)``, a
    bucket for each; one expires ``timeout`` after its interval's end.

    A clock that goes back is taken to stand still: "now" is the latest time given so far. Guaranteed,
    whatever the clock does: an entry stamped by ``bucket_at`` at time t is not expired by an ``advance``
    before ``t + timeout``. If `advance` is called before `bucket_at` with the same
    time (as a rule), it is by the first one with ``now >= t + timeout x (1 + 1 / (buckets - 1))``.

    Raises `ConfigError` for fewer than two buckets, a timeout below ``buckets - 1`` ms, or numbers out of
    a table's range.
    """

    def __init__(self, timeout_ms: int, buckets: int = 3, *, first_bucket: int = 1) -> None:
        if buckets < 2:
            raise ConfigError(f"buckets: expected at least 2, got {buckets}")
        if timeout_ms < buckets - 1:
            raise ConfigError(
                f"timeout_ms: expected at least {buckets - 1} with {buckets} buckets, got {timeout_ms}"
            )
        if first_bucket < 1 or first_bucket + buckets - 1 > MAX_STAMP:
            raise ConfigError(
                f"first_bucket: {first_bucket} with {buckets} buckets is not within 1 to {MAX_STAMP}"
            )
        self.timeout_ms = timeout_ms
        self.buckets = buckets
        self.first_bucket = first_bucket
        self._now = 0
        self._open: deque[_OpenBucket] = deque()
        self._free = deque(range(first_bucket, first_bucket + buckets))

    def bucket_at(self, now_ms: int) -> int:
        interval = self._interval(now_ms)
        if self._open and (self._open[-1].interval == interval or not self._free):
            # Without a free number (`advance` was not called for long) the newest bucket lives longer instead.
            self._open[-1].interval = interval
        else:
            self._open.append(_OpenBucket(self._free.popleft(), interval))
        return self._open[-1].number

    def advance(self, now_ms: int) -> list[int]:
        """Return the expired buckets, oldest first; take their entries out before the next `bucket_at` reuses them."""
        interval = self._interval(now_ms)
        expired = []
        while self._open and self._open[0].interval + self.buckets <= interval:
            expired.append(self._open.popleft().number)
        self._free.extend(expired)
        return expired

    def next_expiry_ms(self) -> int | None:
        """Return the first time at which `advance` has something to expire; None when nothing is stamped."""
        if not self._open:
            return None
        return -(-(self._open[0].interval + self.buckets) * self.timeout_ms // (self.buckets - 1))

    def _interval(self, now_ms: int) -> int:
        self._now = max(self._now, now_ms)
        return self._now * (self.buckets - 1) // self.timeout_ms


class BucketRotations:
    """One `BucketRotation` for each distinct timeout over one table, with bucket numbers of its own."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._rotations: dict[int, BucketRotation] = {}

    def __len__(self) -> int:
        return len(self._rotations)

    def bucket(self, timeout_ms: int, mono_ms: int) -> int:
        rotation = self._rotations.get(timeout_ms)
        if rotation is None:
            rotation = self._rotations[timeout_ms] = self._new(timeout_ms)
        return rotation.bucket_at(mono_ms)

    def expired(self, mono_ms: int) -> list[int]:
        """Return the buckets that have expired; take their entries out before the next `bucket`."""
        return [bucket for rotation in self._rotations.values() for bucket in rotation.advance(mono_ms)]

    def next_ms(self) -> int | None:
        """Return when `expired` has something to return; None when nothing is in any bucket."""
        times = (rotation.next_expiry_ms() for rotation in self._rotations.values())
        return min((time for time in times if time is not None), default=None)

    def _new(self, timeout_ms: int) -> BucketRotation:
        used = {rotation.first_bucket for rotation in self._rotations.values()}
        for first in range(1, MAX_STAMP - self._buckets + 2, self._buckets):
            if first not in used:
                return BucketRotation(timeout_ms, self._buckets, first_bucket=first)
        # Timeouts that streams had once stay empty: their numbers are free.
        for old, rotation in self._rotations.items():
            if rotation.next_expiry_ms() is None:
                del self._rotations[old]
                return BucketRotation(timeout_ms, self._buckets, first_bucket=rotation.first_bucket)
        raise ConfigError(
            f"{len(self._rotations)} different timeouts are in use at once; give streams the same ones"
        )
