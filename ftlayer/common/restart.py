"""Restart strategies: whether, and after what pause, what failed is started again. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Protocol

from ftlayer.common.checks import (
    Duration,
    check_int,
    check_methods,
    check_number,
    duration_ms,
    known_options,
    shown,
)
from ftlayer.errors import ConfigError


class RestartStrategy(Protocol):
    """Decides after each failure.

    One with a method ``on_success()`` is told of what went well since: a committed batch, a completed checkpoint, rows
    that a source gave. Time alone counts no failure down: what fails slowly would be tried without end.
    """

    def on_failure(self, now_ms: int) -> Duration | None:
        """Return the pause before the next start, or None to give up."""
        ...


def pause_after(strategy: RestartStrategy, now_ms: int) -> int | None:
    """Tell ``strategy`` of a failure, and return its pause in ms; `ConfigError` for one that is none."""
    pause = strategy.on_failure(now_ms)
    return None if pause is None else duration_ms(pause, f"{type(strategy).__name__}.on_failure", least=0)


def restart_of(strategy: RestartStrategy, pause_ms: int) -> str:
    """Return when the restart is that ``strategy`` has granted last, and which of how many, as far as it counts."""
    when = f"in {pause_ms / 1_000:g} s"
    match strategy:
        case FixedDelay(attempts=most, _used=used):
            return f"{when}, {used} of {most}"
        case ExponentialDelay(attempts=int(most), _in_a_row=used):
            return f"{when}, {used} of {most} in a row"
        case FailureRate(max_failures=most, interval=interval, _times=times):
            return f"{when}, {len(times)} of {most} within {interval}"
    return when


def restarts_text(count: int) -> str:
    return "1 restart" if count == 1 else f"{count:,} restarts"


def gave_up(restarts: int, failure: str) -> str:
    return f"the restart strategy has given up after {restarts_text(restarts)}: {failure}"


def note_success(strategy: RestartStrategy) -> None:
    """Tell ``strategy`` of a success, if it wants to know."""
    on_success = getattr(strategy, "on_success", None)
    if on_success is not None:
        on_success()


def check_strategy(value: object, option: str) -> None:
    if isinstance(value, type):
        raise ConfigError(f"{option}: expected a restart strategy, got the class; write {value.__name__}(…)")
    if value is not None and not callable(getattr(value, "on_failure", None)):
        raise ConfigError(
            f"{option}: expected a restart strategy (NoRestart(), FixedDelay(…), ExponentialDelay(…), FailureRate(…), "
            f"or an object with on_failure(now_ms)), got {shown(value)}"
        )
    check_methods(value, ("on_failure",), option)


@known_options
@dataclass
class NoRestart:
    """Give up at the first failure."""

    def on_failure(self, now_ms: int) -> timedelta | None:
        """Give up."""
        return None


@known_options
@dataclass
class FixedDelay:
    """Start again after ``delay``, up to ``attempts`` times in all."""

    attempts: int = 3
    delay: Duration = "1s"
    _used: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        check_int(self.attempts, "attempts", least=1)
        self._delay_ms = duration_ms(self.delay, "delay")

    def on_failure(self, now_ms: int) -> timedelta | None:
        """Pause, or give up once the attempts are used."""
        self._used += 1
        return timedelta(milliseconds=self._delay_ms) if self._used <= self.attempts else None


@known_options
@dataclass
class ExponentialDelay:
    """Start again after a pause that doubles, up to ``max_delay``; back to the first after a success and a quiet time.

    ``attempts`` bounds the failures in a row: of two with a success and ``reset_after`` between them the second begins
    anew; None is no bound.
    ``jitter`` (0 to 1): a pause is up to this part of it longer or shorter, at random, so that jobs which failed
    together do not come back together.
    """

    initial_delay: Duration = "1s"
    max_delay: Duration = "1m"
    reset_after: Duration = "2m"
    attempts: int | None = 10
    jitter: float = 0.0
    _random: Random = field(default_factory=Random, init=False, repr=False, compare=False)
    _in_a_row: int = field(default=0, init=False, repr=False)
    _last_ms: int | None = field(default=None, init=False, repr=False)
    _succeeded: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._initial_ms = duration_ms(self.initial_delay, "initial_delay")
        self._max_ms = duration_ms(self.max_delay, "max_delay")
        self._reset_ms = duration_ms(self.reset_after, "reset_after")
        if self._max_ms < self._initial_ms:
            raise ConfigError(f"max_delay ({self.max_delay}) is below initial_delay ({self.initial_delay})")
        if self.attempts is not None:
            check_int(self.attempts, "attempts", least=1)
        check_number(self.jitter, "jitter", least=0, most=1)

    def on_failure(self, now_ms: int) -> timedelta | None:
        """Pause longer than the last time, or give up."""
        if self._succeeded and self._last_ms is not None and now_ms - self._last_ms >= self._reset_ms:
            self._in_a_row = 0
        self._last_ms, self._succeeded = now_ms, False
        self._in_a_row += 1
        if self.attempts is not None and self._in_a_row > self.attempts:
            return None
        # The exponent is bounded: 2**60 ms is past any max_delay.
        pause = min(self._max_ms, self._initial_ms << min(self._in_a_row - 1, 60))
        jittered = round(pause * (1 + self._random.uniform(-self.jitter, self.jitter)))
        return timedelta(milliseconds=jittered)

    def on_success(self) -> None:
        """Something went well since the last failure."""
        self._succeeded = True


@known_options
@dataclass
class FailureRate:
    """Start again after ``delay`` unless more than ``max_failures`` came within ``interval``, or without a success."""

    max_failures: int = 3
    interval: Duration = "5m"
    delay: Duration = "1s"
    _times: list[int] = field(default_factory=list, init=False, repr=False)
    _succeeded: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_int(self.max_failures, "max_failures", least=1)
        self._interval_ms = duration_ms(self.interval, "interval")
        self._delay_ms = duration_ms(self.delay, "delay")

    def on_failure(self, now_ms: int) -> timedelta | None:
        """Pause, or give up when failures come too fast."""
        if self._succeeded:
            self._times = [time for time in self._times if now_ms - time < self._interval_ms]
        self._succeeded = False
        self._times.append(now_ms)
        return timedelta(milliseconds=self._delay_ms) if len(self._times) <= self.max_failures else None

    def on_success(self) -> None:
        """Something went well since the last failure."""
        self._succeeded = True


def default_restart() -> RestartStrategy:
    """Return the strategy of topologies that were given none: back in half a second; what stays broken gives up."""
    return ExponentialDelay(initial_delay="50ms", max_delay="30s", reset_after="1m", attempts=10)
