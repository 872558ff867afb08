"""The options that operators have in common: who they are, what becomes of their failures, how fast they go."""

from __future__ import annotations

from typing import TypedDict

from ftlayer.checkpoint.failure_policy import OnFailure
from ftlayer.checks import rate_per_second
from ftlayer.errors import ConfigError
from ftlayer.functions.retry_rules import FailureOptions, RetryRules, rules_of


class OperatorOptions(TypedDict, total=False):
    uid: str | None
    """Its stable name."""
    parallelism: int | None
    """Its number of subtasks; by default the environment's."""
    on_failure: OnFailure | None
    """What becomes of records that fail in it, in barrier mode; see `DataStream.on_failure`."""


class FunctionOptions(OperatorOptions, FailureOptions, total=False):
    """Of an operator that calls a function of the user's. In barrier mode those about failures need a policy."""


class RatedOptions(FunctionOptions, total=False):
    """Of an operator whose calls can be paced."""

    rate_limit: float | None
    """Records a second of each subtask, replays among them; None: no limit."""


def rules_in(options: FunctionOptions, method: str) -> RetryRules:
    """Return the rules of failures that ``options`` have; `ConfigError` names the ``method``."""
    if method in ("filter", "sink") and options.get("extra_keys") is not None:
        raise ConfigError(f"{method}: extra_keys: it is of operators that return records")
    return rules_of(
        options.get("retry_on"),
        options.get("dead_on"),
        method,
        options.get("max_failing"),
        options.get("extra_keys"),
    )


def rate_in(options: RatedOptions, method: str) -> float | None:
    """Return the limit of records a second that ``options`` have; `ConfigError` names the ``method``."""
    return rate_per_second(options.get("rate_limit"), f"{method}: rate_limit")
