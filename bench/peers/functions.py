"""The functions of the `topology` benchmark's job, the same for every system."""

from __future__ import annotations

KEYS = 10_000
_NAMES = [f"key-{number:016d}" for number in range(KEYS)]
"""20 characters each."""


def names() -> list[str]:
    """All keys, in order."""
    return _NAMES


def with_key(number: int) -> tuple[int, str]:
    """The first function: an id and its key."""
    return number, _NAMES[number % KEYS]


def last(record: tuple[str, int]) -> tuple[str, int]:
    """The last function: (key, count) in, something made of it out."""
    key, count = record
    return key, count + 1
