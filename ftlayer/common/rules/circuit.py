"""A circuit breaker: when so many records fail that something behind the functions must be down, work pauses.

States: CLOSED, all is well; OPEN, nothing is tried until a pause is over; HALF_OPEN, one trial is under way. A trial in
which too many fail opens it again, for twice the pause. Rules alone: times are of one monotone clock, given with each
event, and its owner does the waiting.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ftlayer.common.checks import check_int, shown
from ftlayer.errors import ConfigError

WINDOW_MS = 60_000
"""What `max_failing` is about: the records of the last minute, to the second."""

FIRST_PAUSE_MS = 1_000
LONGEST_PAUSE_MS = 60_000

LEAST_RECORDS = 20
"""A share is one of so many records at least: of three records, one that fails says nothing."""

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_A_MINUTE = re.compile(r"(\d+)\s*/\s*min")


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


@dataclass(frozen=True, slots=True)
class Limit:
    """How many may fail: a ``share`` of the records in the window, or more than ``count`` of them."""

    share: float | None = None
    count: int | None = None

    def __post_init__(self) -> None:
        if self.share is None:
            check_int(self.count, "limit: count", least=0)
        elif self.count is not None or not 0 < self.share < 1:
            raise ConfigError(f"limit: expected a share above 0 and below 1, or a count, got {self!r}")

    @classmethod
    def of(cls, given: str | int, where: str) -> Limit:
        """Read ``"5%"``, or a number of records a minute (``100``, ``"100/min"``); `ConfigError` naming ``where``."""
        a_minute = _A_MINUTE.fullmatch(given.strip()) if isinstance(given, str) else None
        number = given if a_minute is None else int(a_minute[1])
        if isinstance(number, int) and not isinstance(number, bool):
            check_int(number, f"{where}: max_failing", least=0)
            return cls(count=number)
        match = _PERCENT.fullmatch(given.strip()) if isinstance(given, str) else None
        if match is None or not 0 < float(match[1]) < 100:
            raise ConfigError(
                f"{where}: max_failing: expected a share of the records like '5%' (above 0%, below 100%), or a number "
                f"of records a minute like 100 or '100/min', got {shown(given)}"
            )
        return cls(share=float(match[1]) / 100)

    def exceeded(self, records: int, failed: int) -> bool:
        if self.count is not None:
            return failed > self.count
        assert self.share is not None
        return records >= LEAST_RECORDS and failed > self.share * records

    def __str__(self) -> str:
        return f"{self.count}/min" if self.share is None else f"{self.share * 100:g}%"


def limit_of(given: str | int | None, where: str) -> Limit | None:
    return None if given is None else Limit.of(given, where)


@dataclass(frozen=True, slots=True)
class CircuitStatus:
    """The state of a breaker, for users.

    Attributes:
        state: where it is.
        opened: how often it has opened, trials that failed included.
        records, failed: of the outcome that opened it last, with the rest of its window.
        next_trial_in_ms: how long until the next trial; 0 unless it is open.
    """

    state: CircuitState = CircuitState.CLOSED
    opened: int = 0
    records: int = 0
    failed: int = 0
    next_trial_in_ms: int = 0


def together(statuses: Sequence[CircuitStatus]) -> CircuitStatus:
    """Return the status of breakers of the same thing in several places, one at least: the state of the worst.

    The counts are added up; the next trial is the first one's.
    """
    worst = max((status.state for status in statuses), key=_WORSE.index)
    return CircuitStatus(
        worst,
        sum(status.opened for status in statuses),
        sum(status.records for status in statuses),
        sum(status.failed for status in statuses),
        min((status.next_trial_in_ms for status in statuses if status.state is CircuitState.OPEN), default=0),
    )


_WORSE = (CircuitState.CLOSED, CircuitState.HALF_OPEN, CircuitState.OPEN)


class CircuitBreaker:
    """See the module. Not for several threads."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit
        self.state = CircuitState.CLOSED
        self.opened = 0
        self._window: deque[tuple[int, int, int]] = deque()  # second, records, failed
        self._pause_ms = 0
        self._until_ms = 0
        self._seen = (0, 0)

    def outcome(self, records: int, failed: int, now_ms: int) -> CircuitState:
        """Take what became of ``records`` that were tried, ``failed`` of which may pass another time.

        While it is open, outcomes of what was under way before change nothing.
        """
        match self.state:
            case CircuitState.CLOSED:
                self._add(records, failed, now_ms)
                # Where nothing fails there is no reason to pause, however bad the window is.
                if failed and self.limit.exceeded(*self._sums()):
                    self._open(self._sums(), FIRST_PAUSE_MS, now_ms)
            case CircuitState.HALF_OPEN if records:
                # A trial counts by itself, however few there are in it.
                self.tried(records, failed, now_ms, fails=bool(failed) and self.trial_fails(records, failed))
        return self.state

    def tried(self, records: int, failed: int, now_ms: int, *, fails: bool) -> None:
        """Take what became of the trial, which its owner has judged."""
        if fails:
            self._open((records, failed), min(2 * self._pause_ms, LONGEST_PAUSE_MS), now_ms)
        else:
            self.state, self._pause_ms = CircuitState.CLOSED, 0

    def may_try(self, now_ms: int) -> bool:
        """Whether work may go on now; once the pause is over, the next outcome is the trial's."""
        if self.state is CircuitState.OPEN and now_ms >= self._until_ms:
            self.state = CircuitState.HALF_OPEN
        return self.state is not CircuitState.OPEN

    def trial_fails(self, records: int, failed: int) -> bool:
        """Whether too many of a trial's records have failed; of these there may be few."""
        if self.limit.share is not None:
            return failed > self.limit.share * records
        return self.limit.exceeded(records, failed)

    def status(self, now_ms: int) -> CircuitStatus:
        left = max(self._until_ms - now_ms, 0) if self.state is CircuitState.OPEN else 0
        return CircuitStatus(self.state, self.opened, *self._seen, left)

    def _open(self, seen: tuple[int, int], pause_ms: int, now_ms: int) -> None:
        self.state = CircuitState.OPEN
        self.opened += 1
        self._seen = seen
        self._pause_ms, self._until_ms = pause_ms, now_ms + pause_ms
        self._window.clear()

    def _add(self, records: int, failed: int, now_ms: int) -> None:
        second = now_ms // 1_000
        if self._window and self._window[-1][0] == second:
            _, before, failed_before = self._window.pop()
            records, failed = records + before, failed + failed_before
        self._window.append((second, records, failed))
        while self._window[0][0] <= second - WINDOW_MS // 1_000:
            self._window.popleft()

    def _sums(self) -> tuple[int, int]:
        return sum(records for _, records, _ in self._window), sum(failed for _, _, failed in self._window)
