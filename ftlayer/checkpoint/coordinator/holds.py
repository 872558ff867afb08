"""Chains that hold their input, since too many of their records fail, or wait: barriers wait there behind records.

A chain may hold its input for as long as a service is down. Others are not to wait for a checkpoint so long: where a
hold lasts, barriers overtake records, as in unaligned checkpoints, and go into the chain ahead of what it holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

LASTING_MS = 5_000
"""A hold that has lasted so long is not waited for."""


class InputHolds:
    """Told which chains hold their input. Times are of one monotone clock, ms."""

    def __init__(self) -> None:
        self._since_ms: dict[str, int] = {}
        self._until_ms: dict[str, int] = {}  # of those that hold it no more

    def told(self, chains: Collection[str], now_ms: int) -> None:
        """These hold their input now, and no others."""
        self._until_ms |= {uid: now_ms for uid in self._since_ms if uid not in chains}
        self._since_ms = {uid: self._since_ms.get(uid, now_ms) for uid in chains}

    @property
    def chains(self) -> Collection[str]:
        return self._since_ms.keys()

    def after(self, mono_ms: int) -> frozenset[str]:
        """Those that hold their input, or have at some time after this one."""
        ended = (uid for uid, until_ms in self._until_ms.items() if until_ms > mono_ms)
        return frozenset((*self._since_ms, *ended))

    def lasting(self, now_ms: int) -> frozenset[str]:
        return frozenset(uid for uid, since_ms in self._since_ms.items() if now_ms - since_ms >= LASTING_MS)

    def lasts_at_ms(self, chains: Iterable[str]) -> int:
        """Return when the first of these, which hold their input, will have for long."""
        return min(self._since_ms[uid] for uid in chains) + LASTING_MS
