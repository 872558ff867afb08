"""Where a reader source has come to in a job with checkpoints: goes back to one exactly, and commits behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, assert_never

from ftlayer.runtime.barrier_mode.driver.range_log import RangeLog, Restored
from ftlayer.runtime.driver.range_keeper import Beginning
from ftlayer.runtime.driver.splits import PlannedRange


@dataclass(frozen=True, slots=True)
class RangesRestored:
    """The job goes back to a checkpoint, or begins with it.

    All subtasks of the source are down, and come up behind this.
    """

    restored: Restored


@dataclass(frozen=True, slots=True)
class UnderWay:
    """These checkpoints are under way; told before the barrier of a new one is sent."""

    checkpoints: frozenset[int]


@dataclass(frozen=True, slots=True)
class ReadUpTo:
    """A completed checkpoint has read everything up to here."""

    end: str


LogEvent: TypeAlias = RangesRestored | UnderWay | ReadUpTo


class LogKeeper:
    """`RangeKeeper` where positions are in checkpoints, and nothing is planned before `RangesRestored`.

    The ranges that a checkpoint was in the middle of are read on with the very splits they had. The reader commits
    once a completed checkpoint has read a range to its end, and again for one that was restored. A range without
    splits counts from the next checkpoint on.
    """

    # A subtask goes on until it is told of the restore: its rows will come again.
    outlives_subtasks = False
    # All of them go back together.
    reads_again = False

    def __init__(self, source: str) -> None:
        """``source`` is its uid."""
        self._log = RangeLog(source)
        self._to_commit: deque[str] = deque()
        self._committed: str | None = None
        # For each checkpoint under way the first range that it may not have read to its end.
        self._needed: dict[int, int] = {}

    def capture(self, positions: Mapping[str, bytes]) -> bytes:
        """Return what a checkpoint under way with these positions holds beside them; b"" before the source begins.

        Any thread.
        """
        captured = self._log.capture(positions)
        return b"" if captured is None else captured.pack()

    def handle(self, event: LogEvent, first_unread: int) -> Beginning | None:
        match event:
            case RangesRestored(restored):
                return self._go_back(restored)
            case UnderWay(checkpoints):
                # Whatever is done by now was done before their barriers: this is told before those are sent.
                self._needed = {number: self._needed.get(number, first_unread) for number in checkpoints}
                self._forget(first_unread)
            case ReadUpTo(end):
                if end != (self._to_commit[-1] if self._to_commit else self._committed):
                    self._to_commit.append(end)
            case _:
                assert_never(event)
        return None

    def begun(self, at: str, number: int) -> None:
        if self._log.now is None:
            self._log.begin(at)

    def opened(self, planned: PlannedRange) -> None:
        self._forget(planned.number)
        self._log.opened(planned)

    def moved(self, end: str) -> None:
        self._log.moved(end)

    def passed(self, end: str) -> None:
        """See `RangeKeeper`: checkpoints say what is done."""

    def to_commit(self, complete: str | None) -> str | None:
        """See `RangeKeeper`: what is complete is not durable before a checkpoint has it."""
        return self._to_commit[0] if self._to_commit else None

    def committed(self, end: str) -> None:
        self._to_commit.popleft()
        self._committed = end

    def _go_back(self, restored: Restored) -> Beginning:
        self._log.restore(restored)
        self._needed = {}  # none is under way that was begun before
        captured = restored.captured
        # That the checkpoint is complete is certain; whether the reader was told is not.
        self._committed = None
        self._to_commit = deque(() if captured is None or captured.end is None else (captured.end,))
        now = self._log.now
        if captured is None:
            return Beginning(None if now is None else now.at, 0)
        ranges = tuple((planned, self._log.progress(planned)) for planned in captured.ranges)
        return Beginning(captured.at, captured.last, restored=ranges)

    def _forget(self, first_unread: int) -> None:
        if self._log.now is not None:
            self._log.forget_below(min([first_unread, *self._needed.values()]))
