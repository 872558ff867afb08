"""Since when the rows of a delivery log have been there: a time for many rows together, in memory alone."""

from __future__ import annotations

from collections import deque

MARK_MS = 1_000
"""Rows that come within so long have one time, that of the first."""

MAX_MARKS = 1_024
"""When there are more, each two become one: of a log that is not read for hours the times are coarser."""


class LogAge:
    """Times (Unix, ms) of rows, by the offset that they end before. A row is never younger than it says."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, int]] = deque()

    def __len__(self) -> int:
        """Return how many times are kept."""
        return len(self._marks)

    def add(self, end: int, now_ms: int) -> None:
        """Note that the log goes to the offset ``end`` now."""
        if self._marks and now_ms - self._marks[-1][1] < MARK_MS:
            self._marks[-1] = end, self._marks[-1][1]
            return
        self._marks.append((end, now_ms))
        if len(self._marks) > MAX_MARKS:
            marks = list(self._marks)
            pairs = zip(marks[::2], marks[1::2], strict=False)
            self._marks = deque((later_end, since_ms) for (_, since_ms), (later_end, _) in pairs)
            self._marks.extend(marks[len(marks) - len(marks) % 2 :])

    def committed(self, offset: int) -> None:
        """Forget the rows before ``offset``."""
        while self._marks and self._marks[0][0] <= offset:
            self._marks.popleft()

    @property
    def since_ms(self) -> int:
        """Since when the first row that is not committed has been there; 0: there is none."""
        return self._marks[0][1] if self._marks else 0
