"""Facts about an operator for the rules of a graph: its inputs, outputs, keys, state and timers."""

from __future__ import annotations

import pyarrow as pa

from ftlayer.functions.aggregates.keyed import KeyedAggregate
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.functions.steps import MAIN, Filter, FlatMap, Map, MapAsync, Process, Reduce
from ftlayer.topology.operators import (
    AssignWatermarks,
    CoProcess,
    IterationHead,
    IterationTail,
    Join,
    Operator,
    Replay,
    Sink,
    Source,
)

LETTERS = "dead letters"
"""The tag of the edges that a chain's dead letters leave by in barrier mode; no side output can be called so."""


def inputs_of(operator: Operator) -> int:
    if isinstance(operator, Source | Replay):
        return 0
    return 2 if isinstance(operator, CoProcess | Join) else 1


def reads_again(operator: Operator) -> bool:
    """Whether it is a source whose rows are read again, where in acker mode those of others are stored."""
    return isinstance(operator, Source) and operator.replay == "source"


def side_outputs_of(operator: Operator) -> tuple[tuple[str, pa.Schema], ...]:
    """Return tag and schema of each side output."""
    return operator.side if isinstance(operator, Process | CoProcess) else ()


def outputs_of(operator: Operator) -> dict[str, pa.Schema]:
    """Return the schema of each output by its tag, `MAIN` first."""
    return {MAIN: operator.schema, **dict(side_outputs_of(operator))}


def declared_inputs(operator: Operator) -> tuple[pa.Schema, ...]:
    """Return the schema of each input as far as the operator knows it itself, else ()."""
    if isinstance(operator, CoProcess | Join):
        return operator.inputs
    if isinstance(operator, KeyedAggregate):
        return (operator.plan.input,)
    if isinstance(operator, Reduce) and operator.create is not None:
        return ()
    passing = Filter | Reduce | AssignWatermarks | IterationHead | IterationTail | Sink
    return (operator.schema,) if isinstance(operator, passing) else ()


def keys_of(operator: Operator) -> tuple[tuple[str, ...], ...]:
    """Return the key's columns in each input; () for an input without a key."""
    match operator:
        case Reduce() | KeyedAggregate() | Process():
            return (operator.keys,)
        case CoProcess() | Join():
            return operator.keys
    return ((),) * inputs_of(operator)


def rules_of_operator(operator: Operator) -> RetryRules:
    """Return which failures of an operator are worth a retry; those that only pass records on have no rules."""
    return NO_RULES if isinstance(operator, IterationHead | IterationTail) else operator.rules


def rate_limit_of(operator: Operator) -> float | None:
    """Return how many records a second a subtask takes at most; None: there is no limit."""
    return operator.rate_limit if isinstance(operator, Map | FlatMap | Filter | MapAsync | Process) else None


def is_volatile(operator: Operator) -> bool:
    """Whether its user said that its state may be lost."""
    stateful = Reduce | KeyedAggregate | Process | CoProcess | Join
    return isinstance(operator, stateful) and operator.volatile_state


def keeps_state(operator: Operator) -> bool:
    """Whether it remembers records beyond their call: whatever has keys."""
    return any(keys_of(operator))


def has_timers(operator: Operator) -> bool:
    """Whether it may emit records that come from no input: such are new roots."""
    if not isinstance(operator, Process | CoProcess):
        return False
    from ftlayer.functions.process import uses_timers

    return uses_timers(operator.function)


def emits_roots(operator: Operator) -> bool:
    """Whether what it emits is persisted first, and replayed to where it went."""
    return isinstance(operator, Source) or has_timers(operator)


def needs_watermarks(operator: Operator) -> bool:
    """Whether it works on event time for certain. (Whether a user's function sets such timers cannot be known.)"""
    if isinstance(operator, Process | CoProcess):
        return bool(getattr(operator.function, "needs_event_time", False))
    return isinstance(operator, Join)


def gives_times(operator: Operator) -> bool:
    """Whether records have a time behind it, wherever they come from."""
    return isinstance(operator, AssignWatermarks)
