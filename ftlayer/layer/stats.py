"""Counters since the start of an incarnation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Rows and events, counted since the start of this incarnation.

    ``completed`` counts roots (emitted ones, and late ones that cancelled their replay too),
    ``delivered_done`` the delivered rows that a commit finished. ``failed_explicit`` and ``timed_out``
    count attempts that ended so, ``failed_sealed`` those that a batch's seal named. ``late_ignored`` are
    events of unknown roots, ``orphans_dropped`` roots that were not registered after their early events,
    ``recalled`` pending rows that became due at once (`Recall`).
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
    late_ignored: int = 0
    cancelled_replays: int = 0
    orphans_dropped: int = 0
    duplicate_roots: int = 0
    deduplicated_calls: int = 0
    recovered: int = 0
    recalled: int = 0
