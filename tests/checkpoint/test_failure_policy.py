"""`FailurePolicy`: what it takes, what it refuses by name, and the pauses that it makes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark import cloudpickle

from ftlayer import CheckpointConfig, FailurePolicy, PermanentFailure, RetryLater
from ftlayer.common.rules.circuit import Limit
from ftlayer.common.rules.restart import BACKOFF_MS, Retry, next_attempt, pause_ms
from ftlayer.errors import ConfigError
from ftlayer.functions.failures import failure_of
from ftlayer.functions.retry_rules import Decision
from ftlayer.vertex.calls import StreamOptions


def test_the_defaults_are_those_of_acker_mode() -> None:
    policy, options = FailurePolicy(), StreamOptions()
    assert policy.max_attempts == options.max_attempts
    assert policy.backoff_ms == options.backoff_ms == BACKOFF_MS
    assert policy.jitter == options.jitter
    assert policy.rules.levels == ()
    assert policy.rules.limit is None


def test_durations_are_texts_timedeltas_or_seconds_one_or_a_list() -> None:
    assert FailurePolicy(backoff=("1s", 2.5, timedelta(minutes=1))).backoff_ms == (1_000, 2_500, 60_000)
    assert FailurePolicy(backoff="5s").backoff_ms == (5_000,)
    assert FailurePolicy(backoff=["1s", "2s"]) == FailurePolicy(backoff=("1s", "2s"))


def test_it_has_the_rules_and_the_limit_of_failures() -> None:
    policy = FailurePolicy(retry_on=[OSError, TimeoutError], dead_on=KeyError, max_failing="5%")
    assert policy.rules.decide(KeyError("x")).fatal
    assert policy.rules.decide(ValueError("x")).fatal
    assert not policy.rules.decide(OSError("x")).fatal
    assert policy.rules.limit == Limit(share=0.05)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_attempts": 0}, "FailurePolicy: max_attempts: expected an integer from 1"),
        ({"max_attempts": True}, "max_attempts"),
        ({"backoff": ()}, "FailurePolicy: backoff: expected a duration like '5s', or a list of one or more"),
        ({"backoff": ("1s", "soon")}, r"FailurePolicy: backoff\[1\]"),
        ({"backoff": 0}, "backoff"),
        (
            {"max_attempts": 2, "backoff": ("1s", "2s", "3s")},
            "FailurePolicy: backoff has 3 pauses, and with max_attempts=2 only 1 can follow",
        ),
        ({"jitter": 1.5}, "FailurePolicy: jitter: expected a number from 0 to 1"),
        ({"retry_on": 3}, "FailurePolicy: retry_on"),
        ({"dead_on": "KeyError"}, "FailurePolicy: dead_on"),
        ({"max_waiting": 0}, "FailurePolicy: max_waiting: expected an integer from 1"),
        ({"max_waiting": "64MiB"}, "max_waiting"),
        ({"hold_watermark": "yes"}, "FailurePolicy: hold_watermark: expected True or False"),
        ({"max_failing": "many"}, "FailurePolicy: max_failing"),
        ({"max_retries": 3}, r"FailurePolicy.*max_retries.*max_attempts"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FailurePolicy(**options)


def test_checkpointing_takes_a_policy_alone() -> None:
    assert CheckpointConfig().failures is None
    policy = FailurePolicy(max_attempts=2)
    assert CheckpointConfig(failures=policy).failures is policy
    for wrong in (FailurePolicy, "fail", 3):
        with pytest.raises(ConfigError, match="failures: expected"):
            CheckpointConfig(failures=wrong)  # type: ignore[arg-type]


def test_it_travels_to_the_slots() -> None:
    policy = FailurePolicy(retry_on=lambda error: "again" in str(error), backoff=["1s"])
    again = cloudpickle.loads(cloudpickle.dumps(policy))  # type: ignore[no-untyped-call]
    assert not again.rules.decide(ValueError("again")).fatal
    assert again.rules.decide(ValueError("x")).fatal


@given(
    seed=st.integers(0, 2**64 - 1),
    attempt=st.integers(1, 30),
    pauses=st.lists(st.integers(1, 10**6), min_size=1, max_size=5),
    jitter=st.floats(0, 1),
)
def test_a_pause_is_its_entry_less_a_drawn_share_and_always_the_same(
    seed: int, attempt: int, pauses: list[int], jitter: float
) -> None:
    policy = FailurePolicy(max_attempts=None, backoff=[f"{each}ms" for each in pauses], jitter=jitter)
    entry = pauses[min(attempt, len(pauses)) - 1]
    pause = pause_ms(policy, attempt, seed)
    assert entry * (1 - jitter) - 1 <= pause <= entry
    assert pause == pause_ms(policy, attempt, seed)
    assert next_attempt(policy, seed, attempt, Decision(), wall_ms=7) == Retry(attempt + 1, 7 + pause)


def test_what_follows_an_attempt_is_what_its_failure_asks_for() -> None:
    policy = FailurePolicy(max_attempts=3, backoff="1s", jitter=0)

    def after(attempt: int, error: Exception) -> Retry | None:
        return next_attempt(policy, 1, attempt, failure_of(0, "op", error, policy.rules), wall_ms=100)

    assert after(2, ValueError()) == Retry(3, 1_100)
    assert after(3, ValueError()) is None
    assert after(1, PermanentFailure()) is None
    assert after(3, RetryLater(after="30s", uses_attempt=False)) == Retry(3, 30_100)
    assert after(3, RetryLater(after="30s")) is None
