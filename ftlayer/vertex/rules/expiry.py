"""Which bucket an entry belongs to, for any number of timeouts over one table."""

from __future__ import annotations

from ftlayer.acker import MAX_STAMP, ExpirySchedule
from ftlayer.errors import ConfigError


class Schedules:
    """One `ExpirySchedule` for each distinct timeout, with bucket numbers of its own."""

    def __init__(self, buckets: int) -> None:
        self._buckets = buckets
        self._schedules: dict[int, ExpirySchedule] = {}

    def __len__(self) -> int:
        return len(self._schedules)

    def bucket(self, timeout_ms: int, mono_ms: int) -> int:
        """Return the bucket of what is put or touched now and expires after ``timeout_ms``."""
        schedule = self._schedules.get(timeout_ms)
        if schedule is None:
            schedule = self._schedules[timeout_ms] = self._new(timeout_ms)
        return schedule.bucket_at(mono_ms)

    def expired(self, mono_ms: int) -> list[int]:
        """Return the buckets that have expired; take their entries out before the next `bucket`."""
        return [bucket for schedule in self._schedules.values() for bucket in schedule.advance(mono_ms)]

    def next_ms(self) -> int | None:
        """Return when `expired` has something to return; None when nothing is in any bucket."""
        times = (schedule.next_expiry_ms() for schedule in self._schedules.values())
        return min((time for time in times if time is not None), default=None)

    def _new(self, timeout_ms: int) -> ExpirySchedule:
        used = {schedule.first_bucket for schedule in self._schedules.values()}
        for first in range(1, MAX_STAMP - self._buckets + 2, self._buckets):
            if first not in used:
                return ExpirySchedule(timeout_ms, self._buckets, first_bucket=first)
        # Timeouts that streams had once stay empty: their numbers are free.
        for old, schedule in self._schedules.items():
            if schedule.next_expiry_ms() is None:
                del self._schedules[old]
                return ExpirySchedule(timeout_ms, self._buckets, first_bucket=schedule.first_bucket)
        raise ConfigError(
            f"{len(self._schedules)} different timeouts are in use at once; give streams the same ones"
        )
