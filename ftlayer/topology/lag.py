"""What lies between two offsets of a stream reader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


def lies_before(offset: object, place: object) -> bool:
    """Whether an offset is before a place, as far as the numbers in both tell.

    Numbers whose names all end with a digit are those of splits, and each counts by itself. Of others, as a file's
    number with a line's, one that has grown says that the offset is behind; so may a text that is another one.
    """
    now = dict(_parts(offset, ""))
    pairs = [(name, part, now[name]) for name, part in _parts(place, "") if name in now]
    numbers = [(at, to) for _, at, to in pairs if _is_number(at) and _is_number(to)]
    if not any(to < at for at, to in numbers):
        return False
    if all(name[-1:].isdigit() for name, _, _ in pairs):
        return True
    return not any(to > at for at, to in numbers) and len(numbers) == sum(
        at != to or _is_number(at) for _, at, to in pairs
    )


def _parts(offset: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(offset, dict | list):
        for key, value in offset.items() if isinstance(offset, dict) else enumerate(offset):
            yield from _parts(value, f"{name}/{key}" if isinstance(offset, dict) else f"{name}/{key}]")
    else:
        yield name, offset


def _is_number(part: object) -> bool:
    return isinstance(part, int | float) and not isinstance(part, bool)
