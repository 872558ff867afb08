"""Which failures are worth a retry: asked where the exception is at hand, and answered as a decision that travels.

The options of checkpoints and of wrapped queries have such rules, so this imports neither NumPy nor Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict, cast

from ftlayer.common.checks import check_choice, check_function, check_ran
from ftlayer.common.failures import PermanentFailure, RetryLater
from ftlayer.common.printable import described
from ftlayer.common.rules.circuit import Limit, limit_of
from ftlayer.errors import ConfigError

Errors: TypeAlias = type[BaseException] | Iterable[type[BaseException]] | Callable[[Any], bool]
"""A rule as users give it: an exception class, several of them, or a function of the exception that says yes or no."""


class FailureOptions(TypedDict, total=False):
    """The options of an operator that say what becomes of its failures."""

    retry_on: Errors | None
    """The errors that are worth another attempt: exception classes, or a function of the exception. No other is."""
    dead_on: Errors | None
    """The errors that are not, asked before ``retry_on``."""
    max_failing: str | int | None
    """How many records may fail in it before work pauses: a share (``"5%"``), or a number a minute."""
    extra_keys: Literal["fail", "ignore"] | None
    """Whether a result with a key, or a batch with a column, that its schema lacks fails its record, as by default, or
    is taken without it."""


_Test: TypeAlias = tuple[type[BaseException], ...] | Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision on a record that failed.

    Attributes:
        fatal: it is a dead letter at once.
        after_ms: the pause before its next attempt; None: as the stream's options say.
        uses_attempt: whether the failure counts.
        note: what went wrong with deciding, "" if nothing did.
    """

    fatal: bool = False
    after_ms: int | None = None
    uses_attempt: bool = True
    note: str = ""


RETRY = Decision()


@dataclass(frozen=True)
class RetryRule:
    """The rules of one level (the layer, a source, an operator). A rule without both says nothing."""

    retry_on: _Test | None = None
    dead_on: _Test | None = None

    @classmethod
    def of(cls, retry_on: Errors | None, dead_on: Errors | None, where: str) -> RetryRule:
        """Make a rule of what a user gave; `ConfigError` naming ``where`` for what cannot be asked."""
        return cls(_test(retry_on, f"{where}: retry_on"), _test(dead_on, f"{where}: dead_on"))

    def worth_a_retry(self, error: BaseException) -> bool | None:
        """Say whether ``error`` is worth a retry; None: this level does not say.

        ``dead_on`` is asked first. ``retry_on`` is the whole list: what it does not name is not worth one.
        """
        if self.dead_on is not None and _matches(self.dead_on, error):
            return False
        return None if self.retry_on is None else _matches(self.retry_on, error)


@dataclass(frozen=True)
class RetryRules:
    """The rules that apply to an operator's failures, the narrowest first; the first that says something decides.

    ``limit`` is the operator's own: how many failures open its circuit breaker. ``lax``: keys that are no column do not
    fail a record.
    """

    levels: tuple[RetryRule, ...] = ()
    limit: Limit | None = None
    lax: bool = False

    def within(self, wider: RetryRules) -> RetryRules:
        return RetryRules(self.levels + wider.levels, self.limit, self.lax)

    def decide(self, error: BaseException) -> Decision:
        """Return what becomes of a record whose function raised ``error``.

        `PermanentFailure` and `RetryLater` decide by themselves. So does a `ConfigError` (of a `RetryLater` that is
        made wrongly, say): the function would make it again. A record whose rule raises is tried again.
        """
        kind = type(error)  # what its `__class__` says may be anything
        if issubclass(kind, PermanentFailure | ConfigError):
            return Decision(fatal=True)
        if issubclass(kind, RetryLater):
            later = cast(RetryLater, error)
            return Decision(after_ms=later.after_ms, uses_attempt=later.uses_attempt)
        for level in self.levels:
            try:
                answer = level.worth_a_retry(error)
            except BaseException as raised:  # noqa: BLE001 - a user's function may raise anything
                note = f"the rule that was to say whether to retry raised {described(raised)}"
                return Decision(note=note)
            if answer is not None:
                return RETRY if answer else Decision(fatal=True)
        return RETRY


NO_RULES = RetryRules()


def rules_of(
    retry_on: Errors | None,
    dead_on: Errors | None,
    where: str,
    max_failing: str | int | None = None,
    extra_keys: str | None = None,
) -> RetryRules:
    """Return the rules of one level, none if it says nothing; errors as `RetryRule.of` and `Limit.of`."""
    rule, limit = RetryRule.of(retry_on, dead_on, where), limit_of(max_failing, where)
    if extra_keys is not None:
        check_choice(extra_keys, f"{where}: extra_keys", ("fail", "ignore"))
    return RetryRules(() if rule == RetryRule() else (rule,), limit, extra_keys == "ignore")


def _test(given: Errors | str | None, option: str) -> _Test | None:
    if given is None:
        return None
    if isinstance(given, type):
        return (_checked(given, option),)
    if isinstance(given, Iterable) and not isinstance(given, str):
        classes = tuple(_checked(each, option) for each in given)
        if not classes:
            raise ConfigError(
                f"{option}: expected one exception class or more, got none; leave it out instead"
            )
        return classes
    if callable(given):
        check_function(given, option, takes=1)
        return given
    raise ConfigError(
        f"{option}: expected exception classes, or a function of the exception that returns True or False, got "
        f"{given!r}"
    )


def _checked(given: object, option: str) -> type[Exception]:
    if isinstance(given, type) and issubclass(given, Exception):
        return given
    raise ConfigError(f"{option}: expected a class of Exception, got {given!r}")


def _matches(test: _Test, error: BaseException) -> bool:
    if isinstance(test, tuple):
        return isinstance(error, test)
    answer = test(error)
    check_ran(answer, "it")
    return bool(answer)
