"""How many records lie between two offsets of a stream reader."""

from __future__ import annotations

WAITING = "waiting"
"""Where the latest offset of a queue's reader has how many messages wait in the queue."""


def lag_behind(offset: object, latest: object) -> int | None:
    """Return how many records lie between an offset and what ``reportLatestOffset`` gave.

    That is known of offsets that are numbers by split, and of queues, whose messages are counted by `WAITING`; of
    others this is None.
    """
    if not (isinstance(offset, dict) and isinstance(latest, dict)):
        return None
    begins: dict[str, int] = {split: at for split, at in offset.items() if type(at) is int}
    ends: dict[str, int] = {split: at for split, at in latest.items() if type(at) is int}
    if len(begins) < len(offset) or len(ends) < len(latest):
        return None
    if WAITING in ends:
        return ends[WAITING]
    return sum(max(0, end - begins.get(split, 0)) for split, end in ends.items())
