"""What becomes of a record that fails in barrier mode, where it is not to fail the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ftlayer.common.checks import (
    MOST_BYTES,
    Duration,
    check_bool,
    check_int,
    check_number,
    known_options,
    shown,
)
from ftlayer.common.rules.restart import BACKOFF, check_pauses, pauses_of
from ftlayer.config import MIB
from ftlayer.errors import ConfigError
from ftlayer.functions.failures import Errors, RetryRules, rules_of

FAIL = "fail"
"""In place of a policy: a record that fails fails the job."""


@known_options
@dataclass(frozen=True)
class FailurePolicy:
    """What becomes of records that fail: `CheckpointConfig` has one for all operators, ``on_failure`` one for one.

    A chain of operators takes a record whole or not at all: where it fails, all that it changed and put out in the
    chain is taken back, it waits in the chain's state, and it enters the chain again. A record that has no attempt left
    is a dead letter.

    Durations are texts like ``"500ms"`` or milliseconds. Raises `ConfigError` naming the option.

    Attributes:
        max_attempts: runs of a record in a chain, the first included; None: it is tried again without end.
        backoff: the pause before attempt 2, 3, …, one or a list; the last one serves all later ones.
        jitter: the share of a pause, 0 to 1, that is drawn.
        retry_on, dead_on: which errors are worth another attempt; an operator's own rules are asked first.
        max_waiting: bytes of waiting records in a subtask of a chain; beyond it, the chain takes no new input,
            and tries again ten times a second.
        hold_watermark: the chain keeps its output's watermark back while anything waits in it.
        max_failing: a share (``"5%"``) or a number a minute (``100``, ``"100/min"``) of the records of a subtask of a
            chain; while more fail, it pauses. Operators with a ``max_failing`` of their own are not counted.
    """

    max_attempts: int | None = 5
    backoff: Duration | Sequence[Duration] = BACKOFF
    jitter: float = 0.1
    retry_on: Errors | None = None
    dead_on: Errors | None = None
    max_waiting: int = 64 * MIB
    hold_watermark: bool = False
    max_failing: str | int | None = None

    def __post_init__(self) -> None:
        if self.max_attempts is not None:
            check_int(self.max_attempts, "FailurePolicy: max_attempts", least=1)
        pauses_of(self.backoff, "FailurePolicy: backoff")
        if isinstance(self.backoff, Duration):
            object.__setattr__(self, "backoff", (self.backoff,))
        self._make_tuples()
        check_number(self.jitter, "FailurePolicy: jitter", least=0, most=1)
        check_pauses(self, "FailurePolicy")
        check_int(self.max_waiting, "FailurePolicy: max_waiting", least=1, most=MOST_BYTES)
        check_bool(self.hold_watermark, "FailurePolicy: hold_watermark")
        rules_of(self.retry_on, self.dead_on, "FailurePolicy", self.max_failing)

    def _make_tuples(self) -> None:
        """Make the lists tuples: operators of equal policies are chained, and a list could change."""
        for name in ("backoff", "retry_on", "dead_on"):
            given = getattr(self, name)
            if isinstance(given, list | set | frozenset):
                object.__setattr__(self, name, tuple(given))

    @property
    def pauses(self) -> Sequence[Duration]:
        """``backoff`` as a list."""
        return (self.backoff,) if isinstance(self.backoff, Duration) else self.backoff

    @property
    def backoff_ms(self) -> tuple[int, ...]:
        """``backoff`` in ms."""
        return pauses_of(self.backoff)

    @property
    def rules(self) -> RetryRules:
        """Which failures are worth a retry, and how many open the circuit breaker."""
        return rules_of(self.retry_on, self.dead_on, "FailurePolicy", self.max_failing)


OnFailure: TypeAlias = FailurePolicy | Literal["fail"]
"""What an operator's ``on_failure`` takes."""


def check_on_failure(given: object, option: str) -> None:
    """Raise `ConfigError` unless ``given`` is a policy or the word ``"fail"``."""
    if given != FAIL:
        expected = (
            f'{option}: expected FailurePolicy(…), or "fail" where a record that fails is to fail the job'
        )
        if isinstance(given, type):
            raise ConfigError(f"{expected}, got the class; write {given.__name__}(…)")
        if not isinstance(given, FailurePolicy):
            raise ConfigError(f"{expected}, got {shown(given)}")
