"""The options that operators have in common: who they are, what becomes of their failures, how fast they go."""

from __future__ import annotations

from typing import TypedDict

from ftlayer.checkpoint.failure_policy import OnFailure
from ftlayer.checks import rate_per_second
from ftlayer.functions.retry_rules import FailureOptions, RetryRules, rules_of


class OperatorOptions(TypedDict, total=False):
    """Of every operator. ``uid``: its stable name; ``parallelism``: its number of subtasks.

    ``on_failure``: what becomes of records that fail in it; see `DataStream.on_failure`.
    """

    uid: str | None
    parallelism: int | None
    on_failure: OnFailure | None


class FunctionOptions(OperatorOptions, FailureOptions, total=False):
    """Of an operator that calls a function of the user's. In barrier mode those about failures need a policy."""


class RatedOptions(FunctionOptions, total=False):
    """Of an operator whose calls can be paced. ``rate_limit``: records a second of each subtask; None: no limit."""

    rate_limit: float | None


def rules_in(options: FunctionOptions, method: str) -> RetryRules:
    """Return the rules of failures that ``options`` have; `ConfigError` names the ``method``."""
    return rules_of(options.get("retry_on"), options.get("dead_on"), method, options.get("max_failing"))


def rate_in(options: RatedOptions, method: str) -> float | None:
    """Return the limit of records a second that ``options`` have; `ConfigError` names the ``method``."""
    return rate_per_second(options.get("rate_limit"), f"{method}: rate_limit")
