"""Which failures are worth a retry: what each level says, and that it is asked wherever a function can raise."""

from __future__ import annotations

import pickle
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.failures import PermanentFailure, RetryLater
from ftlayer.errors import ConfigError
from ftlayer.functions.chains.segments import Chain
from ftlayer.functions.retry_rules import NO_RULES, RETRY, Decision, rules_of
from ftlayer.functions.steps import Filter, FlatMap, Map, MapBatches

V = pa.schema([("v", pa.int64())])

ERRORS: list[type[Exception]] = [ValueError, OSError, ConnectionError, TimeoutError, KeyError]
sets = st.none() | st.lists(st.sampled_from(ERRORS), min_size=1, max_size=2, unique=True)
DEAD = Decision(fatal=True)


@given(st.lists(st.tuples(sets, sets), max_size=3), st.sampled_from(ERRORS), st.booleans())
def test_the_narrowest_level_that_says_something_decides(levels: Any, kind: Any, as_function: bool) -> None:
    error = kind("x")

    def given_as(classes: Any) -> Any:
        if classes is None or not as_function:
            return classes
        return lambda raised: isinstance(raised, tuple(classes))

    rules = NO_RULES
    for retry_on, dead_on in levels:
        rules = rules.within(rules_of(given_as(retry_on), given_as(dead_on), "it"))
    expected = RETRY
    for retry_on, dead_on in levels:
        if dead_on is not None and isinstance(error, tuple(dead_on)):
            expected = DEAD
            break
        if retry_on is not None:
            expected = RETRY if isinstance(error, tuple(retry_on)) else DEAD
            break
    assert rules.decide(error) == expected


def test_a_function_that_says_so_itself_is_not_asked_for() -> None:
    rules = rules_of(PermanentFailure, RetryLater, "it")
    assert rules.decide(PermanentFailure("never")) == DEAD
    assert rules.decide(RetryLater("busy", after="30s", uses_attempt=False)) == Decision(
        after_ms=30_000, uses_attempt=False
    )
    assert rules.decide(RetryLater("busy")) == RETRY
    again = pickle.loads(pickle.dumps(RetryLater("busy", after=0.005, uses_attempt=False)))
    assert (str(again), again.after_ms, again.uses_attempt) == ("busy", 5, False)


def test_a_retry_later_that_is_made_wrongly_uses_no_attempts_up() -> None:
    """Its function makes it so again, at every attempt."""
    with pytest.raises(ConfigError) as raised:
        RetryLater("busy", after="120")
    assert NO_RULES.decide(raised.value) == DEAD
    assert rules_of(ValueError, None, "it").decide(raised.value) == DEAD


@pytest.mark.parametrize("after", ["soon", 0, -1, "9000h", True])
def test_a_pause_that_is_none_is_refused(after: Any) -> None:
    with pytest.raises(ConfigError, match="after"):
        RetryLater("busy", after=after)


@pytest.mark.parametrize("rule", [3, "ValueError", int, [], [int], [ValueError, 3]])
def test_what_is_no_rule_is_refused_by_name(rule: Any) -> None:
    with pytest.raises(ConfigError, match="'parse': retry_on"):
        rules_of(rule, None, "'parse'")
    with pytest.raises(ConfigError, match="'parse': dead_on"):
        rules_of(None, rule, "'parse'")


def test_a_rule_that_raises_leads_to_another_attempt_and_is_named() -> None:
    def broken(error: Exception) -> bool:
        raise RuntimeError("no idea")

    (failure,) = (
        Chain([Map("parse", raiser(ValueError("x")), V, rules=rules_of(None, broken, "'parse'"))])
        .run(pa.record_batch([[1]], V))
        .failures
    )
    assert not failure.fatal
    assert failure.reason == (
        "ValueError: x (the rule that was to say whether to retry raised RuntimeError: no idea)"
    )


def raiser(error: Exception) -> Any:
    def function(_: Any) -> Any:
        raise error

    return function


DEAD_VALUES = rules_of(None, ValueError, "it")
DEAD_TYPES = rules_of(None, TypeError, "it")


def refuse_sevens(batch: pa.RecordBatch) -> pa.RecordBatch:
    if 7 in batch.column("v").to_pylist():
        raise ValueError("seven")
    if 8 in batch.column("v").to_pylist():
        raise RetryLater("busy", after="1m", uses_attempt=False)
    return batch


@pytest.mark.parametrize(
    ("step", "fatal"),
    [
        (Map("f", raiser(ValueError("x")), V, rules=DEAD_VALUES), True),
        (Map("f", raiser(OSError("x")), V, rules=DEAD_VALUES), False),
        (Map("f", raiser(PermanentFailure("x")), V), True),
        (FlatMap("f", raiser(ValueError("x")), V, rules=DEAD_VALUES), True),
        (Filter("f", raiser(ValueError("x")), V, rules=DEAD_VALUES), True),
        (Map("f", lambda _: {"v": "no number"}, V, rules=DEAD_TYPES), True),
        (Map("f", lambda _: {"v": "no number"}, V, rules=DEAD_VALUES), False),
        (MapBatches("f", raiser(ValueError("x")), V, "arrow", False, rules=DEAD_VALUES), True),
    ],
)
def test_the_rule_of_the_operator_that_raised_is_asked(step: Any, fatal: bool) -> None:
    (failure,) = Chain([Map("before", dict, V, rules=NO_RULES), step]).run(pa.record_batch([[1]], V)).failures
    assert (failure.operator, failure.fatal) == ("f", fatal)


def test_of_a_batch_the_rows_alone_are_judged() -> None:
    step = MapBatches("f", refuse_sevens, V, "arrow", False, rules=DEAD_VALUES)
    result = Chain([step]).run(pa.record_batch([list(range(20))], V))
    failed = {
        failure.row: (failure.fatal, failure.after_ms, failure.uses_attempt) for failure in result.failures
    }
    assert failed == {7: (True, None, True), 8: (False, 60_000, False)}
    assert sum(batch.num_rows for batch, _ in result.batches) == 18
