"""What a shard counts since the start of its incarnation: by stream, and of no stream."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StreamCounters:
    """Rows and events of one stream.

    ``completed`` counts roots (emitted ones, and late ones that cancelled their replay too),
    ``delivered_done`` the delivered rows that a commit finished. ``failed_explicit`` and ``timed_out``
    count attempts that ended so, ``failed_sealed`` those that a batch's seal named. ``recalled`` are pending rows
    that became due at once (`Recall`).
    """

    persisted: int = 0
    ingested: int = 0
    registered: int = 0
    completed: int = 0
    delivered_done: int = 0
    failed_explicit: int = 0
    failed_sealed: int = 0
    timed_out: int = 0
    replayed: int = 0
    dead: int = 0
    requeued: int = 0
    purged: int = 0
    cancelled_replays: int = 0
    duplicate_roots: int = 0
    recovered: int = 0
    recalled: int = 0

    @property
    def failed(self) -> int:
        """How many attempts have ended in a failure, of whatever kind."""
        return self.failed_explicit + self.failed_sealed + self.timed_out


@dataclass(slots=True)
class ShardCounters:
    """Events of no stream that is known.

    ``late_ignored`` are events of unknown roots, ``orphans_dropped`` roots that were not registered after their early
    events.
    """

    late_ignored: int = 0
    orphans_dropped: int = 0
    deduplicated_calls: int = 0
