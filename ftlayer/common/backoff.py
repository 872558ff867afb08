"""When a record that failed is tried again: the rule of acker mode, of wrapped queries and of barrier mode.

Pure: times are arguments, and what is random is a hash of the record and its attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ftlayer.common.checks import Duration, duration_ms, shown
from ftlayer.errors import ConfigError

BACKOFF = ("1s", "2s", "4s", "8s", "16s", "32s", "1m")
"""The pauses of every option called ``backoff`` where none are given: for any number of attempts."""

BACKOFF_MS = tuple(duration_ms(pause, "backoff") for pause in BACKOFF)

_MASK = (1 << 64) - 1


class Retrying(Protocol):
    """How often, and after which pauses, a record is tried again.

    Attributes:
        max_attempts: runs of a record, the first included; None: without end.
        backoff_ms: the pause before attempt 2, 3, …; the last one serves all later ones; none: there is no pause.
        jitter: the share of a pause, 0 to 1, that is drawn.
    """

    @property
    def max_attempts(self) -> int | None:
        """See the class."""

    @property
    def backoff_ms(self) -> tuple[int, ...]:
        """See the class."""

    @property
    def jitter(self) -> float:
        """See the class."""


class Ended(Protocol):
    """How an attempt ended, as `ftlayer.functions.retry_rules.Decision` says it."""

    @property
    def fatal(self) -> bool:
        """The record is dead at once."""

    @property
    def after_ms(self) -> int | None:
        """The pause that the failure asks for."""

    @property
    def uses_attempt(self) -> bool:
        """Whether the failure counts."""


@dataclass(frozen=True, slots=True)
class Retry:
    """The next attempt: its number, and the wall time (ms) before which it does not begin."""

    attempt: int
    not_before_ms: int


def next_attempt(retrying: Retrying, seed: int, attempt: int, ended: Ended, *, wall_ms: int) -> Retry | None:
    """Return what follows when ``attempt`` failed at ``wall_ms``; None when the record is dead.

    A pause that the failure itself asks for is kept as it is; others are `pause_ms`.
    """
    most = retrying.max_attempts
    if ended.fatal or (ended.uses_attempt and most is not None and attempt >= most):
        return None
    pause = pause_ms(retrying, attempt, seed) if ended.after_ms is None else ended.after_ms
    return Retry(attempt + ended.uses_attempt, wall_ms + pause)


def pause_ms(retrying: Retrying, attempt: int, seed: int) -> int:
    """Return the pause behind ``attempt`` (1 is the first), less its drawn share.

    It is the same whenever it is computed for one record, which ``seed`` stands for, and attempt.
    """
    pauses = retrying.backoff_ms
    pause = pauses[min(attempt, len(pauses)) - 1] if pauses else 0
    return round(pause * (1 - retrying.jitter * (_hash64(seed, attempt) / 2**64)))


def pauses_of(backoff: Duration | Sequence[Duration], option: str = "backoff") -> tuple[int, ...]:
    """Return a user's pauses in ms: a duration, or a list of one or more; `ConfigError` names the ``option``."""
    pauses = [backoff] if isinstance(backoff, Duration) else backoff
    if not isinstance(pauses, list | tuple) or not pauses:
        raise ConfigError(
            f"{option}: expected a duration like '5s', or a list of one or more, got {shown(backoff)}"
        )
    names = [option] if pauses[0] is backoff else [f"{option}[{place}]" for place in range(len(pauses))]
    return tuple(map(duration_ms, pauses, names))


def check_pauses(retrying: Retrying, where: str) -> None:
    """Raise `ConfigError` naming ``where`` for more pauses than there are attempts to come behind them.

    The default list is for any number of attempts.
    """
    most, pauses = retrying.max_attempts, retrying.backoff_ms
    if most is None or pauses == BACKOFF_MS:
        return
    if len(pauses) > max(most - 1, 1):
        raise ConfigError(
            f"{where}: backoff has {len(pauses)} pauses, and with max_attempts={most} only {most - 1} can follow the "
            "attempts: leave out the last pauses, or raise max_attempts"
        )


def _hash64(seed: int, attempt: int) -> int:
    """Mix two numbers to 64 bits with SplitMix64's finalizer (Steele, Lea, Flood, 2014)."""
    value = (seed + attempt * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
