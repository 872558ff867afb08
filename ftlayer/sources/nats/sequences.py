"""A set of sequence numbers, kept and packed as ranges: most are one run without gaps. Rules alone."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise


class Sequences:
    """Whole numbers of at least 1, as sorted ranges with gaps between them."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """``ranges``: first and last number of each, in any order; they may overlap."""
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in ranges:
            self.add(first, last)

    @classmethod
    def unpacked(cls, packed: Sequence[int]) -> Sequences:
        made, at = cls(), 0
        for gap, length in zip(packed[::2], packed[1::2], strict=True):
            first = at + gap
            at = first + length
            made._firsts.append(first)
            made._lasts.append(at)
        return made

    def packed(self) -> list[int]:
        """Return the ranges as small numbers: how far each begins behind the last, and how far it goes."""
        found: list[int] = []
        at = 0
        for first, last in self:
            found += (first - at, last - first)
            at = last
        return found

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._firsts, self._lasts, strict=True)

    def __len__(self) -> int:
        return len(self._firsts)

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._firsts, number) - 1
        return place >= 0 and number <= self._lasts[place]

    @property
    def first(self) -> int:
        """The lowest number, 0 if there is none."""
        return self._firsts[0] if self._firsts else 0

    @property
    def last(self) -> int:
        """The highest number, 0 if there is none."""
        return self._lasts[-1] if self._lasts else 0

    def add(self, first: int, last: int) -> None:
        """Add all numbers from ``first`` to ``last``."""
        lasts = self._lasts
        if lasts and lasts[-1] + 1 == first:
            lasts[-1] = last
            return
        # Those that touch the new one become one with it.
        begin = bisect_left(self._lasts, first - 1)
        end = bisect_right(self._firsts, last + 1)
        if begin < end:
            first = min(first, self._firsts[begin])
            last = max(last, self._lasts[end - 1])
        self._firsts[begin:end] = [first]
        self._lasts[begin:end] = [last]

    def forget_first(self, count: int, below: int) -> None:
        """Forget so many of the lowest ranges, but for those that reach ``below`` or beyond."""
        count = min(count, bisect_left(self._lasts, below))
        del self._firsts[:count], self._lasts[:count]

    def clear(self) -> None:
        self._firsts.clear()
        self._lasts.clear()

    def between(self, first: int, last: int) -> Iterator[int]:
        """Yield its numbers from ``first`` to ``last``."""
        for begin, end in self:
            yield from range(max(begin, first), min(end, last) + 1)

    def missing(self, first: int, last: int) -> Iterator[int]:
        """Yield the numbers from ``first`` to ``last`` that it does not have."""
        edges = [
            (0, first - 1),
            *((max(a, first), min(b, last)) for a, b in self if a <= last and b >= first),
        ]
        for (_, end), (begin, _) in pairwise([*edges, (last + 1, last + 1)]):
            yield from range(end + 1, begin)
