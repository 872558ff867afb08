from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import ConfigError
from ftlayer.stream.spans import span_ms


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ("5s", 5_000),
        ("-5s", -5_000),
        (" - 1.5 m", -90_000),
        ("0s", 0),
        ("0 ms", 0),
        ("0.0h", 0),
        ("-0min", 0),
        (0, 0),
        (-250, -250),
        ("250ms", 250),
    ],
)
def test_spans(given_: str | int, expected: int) -> None:
    assert span_ms(given_, "join: lower") == expected


@given(st.integers(), st.sampled_from(["ms", "s", "m", "min", "h"]))
def test_a_minus_turns_a_span_round(number: int, unit: str) -> None:
    assert span_ms(f"-{abs(number)}{unit}", "x") == -span_ms(f"{abs(number)}{unit}", "x")


@pytest.mark.parametrize("wrong", ["", "5", "0", "0x", "s", "-", "--", "5 days", True, None, 1.5, "0 0s"])
def test_what_is_no_span_is_named(wrong: object) -> None:
    with pytest.raises(ConfigError, match="join: lower"):
        span_ms(wrong, "join: lower")  # type: ignore[arg-type]


def test_a_bound_below() -> None:
    assert span_ms("0s", "idle", least=0) == 0
    with pytest.raises(ConfigError, match="idle: expected at least 0 ms, got '-1s'"):
        span_ms("-1s", "idle", least=0)
