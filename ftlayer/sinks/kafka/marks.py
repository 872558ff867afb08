"""Which messages of a sink are committed, as a few short texts that are written in the transaction of their rows.

Rules without I/O. A message has a writer and a number, which count up from 1. The text of a mark has the numbers of its
writers as ranges, ``"9f03:1-57 a1b2:~4,7-9"``; of those up to 4 it is not known any more. Brokers take texts of 4,096
bytes (``offset.metadata.max.bytes``), so there may be several, which are written together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import NamedTuple

MOST_BYTES = 4_000
"""Of a text."""

FULL_BYTES = 3_000
"""No writer is added to a text of this length: those that are in it grow."""

MOST_NUMBERS = 300
"""Bytes of one writer."""

MOST_RANGES = 8
"""Of a writer. Those before are forgotten."""


class Fate(Enum):
    """What became of a message."""

    OPEN = "open"
    """It is not committed."""
    COMMITTED = "committed"
    FORGOTTEN = "forgotten"
    """It is not known any more."""


class Committed(NamedTuple):
    """Numbers of a writer's messages: ``ranges`` from first to last, ascending, with gaps between them.

    Of those up to ``forgotten``, and below all ranges, nothing is known.
    """

    ranges: tuple[tuple[int, int], ...] = ()
    forgotten: int = 0

    def fate(self, number: int) -> Fate:
        """Return what became of a message."""
        if any(first <= number <= last for first, last in self.ranges):
            return Fate.COMMITTED
        return Fate.FORGOTTEN if number <= self.forgotten else Fate.OPEN

    def with_number(self, number: int) -> Committed:
        """Return it with one number more; the lowest ranges are forgotten where there are too many."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted((*self.ranges, (number, number))):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        forgotten = max([self.forgotten, *(last for _, last in merged[:-MOST_RANGES])])
        return Committed(tuple(merged[-MOST_RANGES:]), forgotten)


class CommitMarks:
    """What is committed of the messages of all writers of one execution of a sink."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        """``texts`` as `texts` returns them. Raises `ValueError` for what is no mark's."""
        self._parts = [_parsed(text) for text in texts]

    def fate(self, writer: str, number: int) -> Fate:
        """Return what became of a message."""
        return next((part[writer] for part in self._parts if writer in part), Committed()).fate(number)

    def add(self, writer: str, number: int) -> None:
        """A message is committed."""
        part = next((part for part in self._parts if writer in part), None)
        committed = (Committed() if part is None else part.pop(writer)).with_number(number)
        if part is None or _length(part) + MOST_NUMBERS > MOST_BYTES:
            part = self._with_room()
        part[writer] = committed

    def texts(self) -> list[str]:
        """Return what is to be written, all of it each time: brokers forget texts that are not renewed."""
        return [_text(part) for part in self._parts]

    def _with_room(self) -> dict[str, Committed]:
        for part in self._parts:
            if _length(part) < FULL_BYTES:
                return part
        self._parts.append({})
        return self._parts[-1]


def _length(part: Mapping[str, Committed]) -> int:
    return len(_text(part))


def _text(part: Mapping[str, Committed]) -> str:
    return " ".join(f"{writer}:{_numbers(committed)}" for writer, committed in part.items())


def _numbers(committed: Committed) -> str:
    ranges = [f"{first}-{last}" for first, last in committed.ranges]
    return ",".join([f"~{committed.forgotten}", *ranges] if committed.forgotten else ranges)


def _parsed(text: str) -> dict[str, Committed]:
    found: dict[str, Committed] = {}
    for written in text.split():
        writer, _, numbers = written.partition(":")
        parts = numbers.split(",")
        forgotten = int(parts.pop(0)[1:]) if numbers.startswith("~") else 0
        pairs = [each.split("-") for each in parts]
        found[writer] = Committed(tuple((int(first), int(last)) for first, last in pairs), forgotten)
    return found
