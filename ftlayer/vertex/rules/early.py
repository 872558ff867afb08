"""Failures that came before their root's registration: kept for it, within bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ftlayer.store.rows import U64
from ftlayer.vertex.rules.retry import MAX_REASON, MAX_TRACEBACK, Cause, cut

MAX_HELD = 10_000
"""With a long traceback each, about 90 MB."""


class EarlyFailures:
    """Why roots failed that are not registered yet, the first reason of each.

    Each is in a bucket of the caller's, which drops it when its time is over. Of more than `MAX_HELD` the oldest ones
    are dropped: their roots time out instead.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Cause]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, root: int, cause: Cause, bucket: int) -> int:
        """Keep why ``root`` failed; return how many were dropped for it."""
        if root in self._held:
            return 0
        kept = replace(
            cause, reason=cut(cause.reason, MAX_REASON), traceback=cut(cause.traceback, MAX_TRACEBACK)
        )
        self._held[root] = bucket, kept
        if len(self._held) <= MAX_HELD:
            return 0
        del self._held[next(iter(self._held))]
        return 1

    def take(self, roots: U64) -> dict[int, Cause]:
        """Return, and forget, what is held for any of these roots."""
        if not self._held:
            return {}
        return {root: self._held.pop(root)[1] for root in set(roots.tolist()) & self._held.keys()}

    def drop(self, buckets: Sequence[int]) -> int:
        """Forget what is in these buckets; return how many that were."""
        over = [root for root, (bucket, _) in self._held.items() if bucket in buckets]
        for root in over:
            del self._held[root]
        return len(over)
