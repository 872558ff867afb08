"""What is given as an option: each class and function that takes some is asked by its own signature."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import types
import typing
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any, TypedDict, Unpack

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ftlayer
from ftlayer import config
from ftlayer.checkpoint import options as checkpoint_options
from ftlayer.common import checks
from ftlayer.common.checks import LONGEST_MS, check_known, duration_ms, wait_seconds
from ftlayer.common.rules import restart
from ftlayer.errors import ConfigError
from ftlayer.functions.retry_rules import RetryRules
from ftlayer.runtime.environment import StreamEnvironment
from ftlayer.spark.facade import FTLayer
from ftlayer.spark.tracked import TrackedStream
from ftlayer.topology.streams.data_stream import DataStream
from ftlayer.topology.streams.keyed_stream import KeyedStream
from ftlayer.transport.address import Address
from ftlayer.vertex.calls import StreamOptions
from ftlayer.vertex.client.client import VertexClient

TOKEN = "t" * 32
HUGE = 1 << 80

NEEDED: dict[str, dict[str, Any]] = {
    "VertexOptions": {"path": "x"},
    "ServeOptions": {"vertex": config.VertexOptions("x"), "token": TOKEN},
    "StateTtl": {"time": "1h"},
    "StateMigration": {"operator": "count", "state": "seen", "version": 2, "migrate": str},
    "VertexClient": {"address": "grpc://127.0.0.1:1", "token": TOKEN},
    "FTLayer.embedded": {"path": "x"},
    "FTLayer.connect": {"address": "grpc://127.0.0.1:1", "token": TOKEN},
    "StreamEnvironment": {
        "spark": types.SimpleNamespace(conf={}),
        "layer": FTLayer.embedded("x"),
        "name": "job",
    },
}


def option_classes() -> list[type]:
    """All dataclasses of options: those that are public names, and those in modules of options."""
    found = {
        one
        for one in (getattr(ftlayer, name) for name in ftlayer.__all__)
        if dataclasses.is_dataclass(one) and one.__name__.endswith(("Options", "Config", "Ttl"))
    }
    for module in (config, checkpoint_options, restart):
        found |= {
            one for one in vars(module).values() if isinstance(one, type) and dataclasses.is_dataclass(one)
        }
    return sorted(
        found - {restart.NoRestart, restart.Retry, Address, RetryRules}, key=lambda one: one.__name__
    )


TAKERS: list[Callable[..., Any]] = [
    *option_classes(),
    FTLayer.embedded,
    FTLayer.connect,
    VertexClient,
    StreamEnvironment,
]
NO_CHECK = {"spark", "source"}
"""What only Spark can judge."""


def wrong_values(hint: Any) -> list[Any]:
    """Values that an argument of this type may not have."""
    takes = set(typing.get_args(hint)) if isinstance(hint, types.UnionType) else {hint}
    wrong: list[Any] = [
        object(),
        {1: 2},
        [None],
        math.nan,
        True,
        -HUGE,
        HUGE,
        2.5,
        0.5,
        "\0wrong",
        b"wrong",
        None,
    ]
    allowed = {type_ for one in takes if isinstance(type_ := typing.get_origin(one) or one, type)}
    if bool in allowed:
        wrong = [one for one in wrong if one is not True]
    if float in allowed:
        wrong = [one for one in wrong if one not in (0.5, 2.5)]
    if type(None) in allowed:
        wrong.remove(None)
    return wrong


def arguments() -> list[Any]:
    found = []
    for taker in TAKERS:
        function = taker.__init__ if isinstance(taker, type) else taker
        hints = typing.get_type_hints(inspect.unwrap(function), vars(types) | _names(taker))
        for name, parameter in inspect.signature(taker).parameters.items():
            if name not in NO_CHECK and parameter.kind is not parameter.VAR_KEYWORD:
                found.append(pytest.param(taker, name, hints[name], id=f"{taker.__qualname__}-{name}"))
    return found


def _names(taker: Callable[..., Any]) -> dict[str, Any]:
    module = inspect.getmodule(inspect.unwrap(taker))
    return {**vars(module), "FTLayer": FTLayer}


def given_to(taker: Callable[..., Any], **options: Any) -> Any:
    return taker(**{**NEEDED.get(taker.__qualname__, {}), **options})


def refusal(taker: Callable[..., Any], options: dict[str, Any]) -> str:
    """What the ConfigError says; "taken" where there is none."""
    try:
        given_to(taker, **options)
    except ConfigError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize("taker", TAKERS, ids=lambda one: one.__qualname__)
def test_what_is_needed_is_enough(taker: Callable[..., Any]) -> None:
    given_to(taker)


@pytest.mark.parametrize(("taker", "name", "hint"), arguments())
def test_a_value_of_another_type_or_size_is_refused_by_name(
    taker: Callable[..., Any], name: str, hint: Any
) -> None:
    for value in wrong_values(hint):
        said = refusal(taker, {name: value})
        assert name in said, f"{name}={value!r}: {said}"
        assert len(said) < 500


@pytest.mark.parametrize("taker", TAKERS, ids=lambda one: one.__qualname__)
def test_an_option_that_there_is_not_is_named_with_the_nearest(taker: Callable[..., Any]) -> None:
    name = list(inspect.signature(taker).parameters)[1]
    name = "status" if taker is FTLayer.embedded else name
    with pytest.raises(ConfigError, match=rf"no option '{name}s': did you mean '{name}'\?"):
        given_to(taker, **{f"{name}s": 1})
    with pytest.raises(ConfigError, match="there is no option 'zzzzzz'; there are .*" + name):
        given_to(taker, zzzzzz=1)


def test_an_option_of_the_vertex_is_known_to_embedded() -> None:
    with pytest.raises(
        ConfigError, match="embedded: there is no option 'durabilty': did you mean 'durability'"
    ):
        FTLayer.embedded("x", durabilty="batch")
    with pytest.raises(ConfigError, match="did you mean 'max_attempts'"):
        FTLayer.embedded("x", max_attemps=3)


@pytest.mark.parametrize(
    ("taker", "word", "name"),
    [
        (FTLayer.embedded, "max_retries", "max_attempts"),
        (FTLayer.embedded, "maxRetries", "max_attempts"),
        (FTLayer.embedded, "retries", "max_attempts"),
        (FTLayer.embedded, "retry_delay", "backoff"),
        (FTLayer.embedded, "delay", "backoff"),
        (FTLayer.embedded, "ttl", "timeout"),
        (FTLayer.embedded, "dlq", "on_dead"),
        (FTLayer.connect, "url", "address"),
        (restart.FixedDelay, "max_retries", "attempts"),
        (restart.FixedDelay, "backoff", "delay"),
        (restart.ExponentialDelay, "delay", "initial_delay"),
        (ftlayer.CheckpointConfig, "checkpoint_interval", "interval"),
        (ftlayer.CheckpointConfig, "checkpointLocation", "directory"),
        (ftlayer.StateTtl, "ttl", "time"),
    ],
)
def test_a_word_of_other_systems_is_understood(taker: Callable[..., Any], word: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"no option '{word}': did you mean '{name}'\?"):
        given_to(taker, **{word: 1})


def test_the_words_of_other_systems_lead_to_options_that_there_are() -> None:
    """A name that has changed here leads nowhere there; operators are asked too, as far as they are checked."""
    operators = (DataStream, KeyedStream, TrackedStream)
    takers = [*TAKERS, *(getattr(one, name) for one in operators for name in vars(one) if name[0] != "_")]
    functions = [taker for taker in takers if callable(taker)]
    known = {name for taker in functions for name in inspect.signature(taker).parameters}
    assert {name for names in checks._SYNONYMS.values() for name in names} <= known
    assert not [word for word, names in checks._SYNONYMS.items() if word in names]


class Options(TypedDict, total=False):
    uid: str | None
    rate: float | None


class Grower(checks.UserFacing):
    def grow(self, by: int, *, twice: bool = False, **options: Unpack[Options]) -> dict[str, Any]:
        return {"by": by, "twice": twice, **options}


def test_a_method_takes_and_shows_the_options_of_its_kind() -> None:
    grow = Grower().grow
    shown = str(inspect.signature(grow)).replace("'", "")
    assert shown == (
        "(by: int, *, twice: bool = False, uid: str | None = None, rate: float | None = None) -> dict[str, Any]"
    )
    assert grow(1, uid="a") == {"by": 1, "twice": False, "uid": "a"}
    with pytest.raises(ConfigError, match="there is no option 'uids': did you mean 'uid'"):
        grow(1, uids="a")  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="missing a required argument: 'by'"):
        grow()  # type: ignore[call-arg]


def test_what_is_missing_is_said() -> None:
    with pytest.raises(ConfigError, match="missing a required argument: 'path'"):
        config.VertexOptions()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_attempts": 2.5}, "max_attempts: expected an integer from 1 to 2147483647, got 2.5"),
        ({"max_attempts": True}, "max_attempts: expected an integer"),
        ({"max_attempts": 1 << 31}, "max_attempts: expected an integer"),
        ({"jitter": "x"}, "jitter: expected a number from 0 to 1, got 'x'"),
        ({"timeout": "1ms"}, "timeout: expected at least 2 ms, got '1ms'"),
        ({"timeout": 1 << 62}, f"timeout: expected at most {LONGEST_MS} ms, which is about 69 years"),
        ({"timeout": 0.5, "timeout_buckets": 1_000}, "timeout: expected at least 999 ms, got 0.5"),
        ({"backoff": []}, "backoff"),
        ({"backoff": ["1s", "soon"]}, r"backoff\[1\]: expected a duration"),
        ({"backoff": b"ab"}, "backoff"),
        ({"strict": "false"}, "strict: expected True or False"),
        ({"status": "of"}, "status: expected one of on, off, got 'of': did you mean 'off'"),
    ],
)
def test_the_layers_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FTLayer.embedded("x", **options)


def test_a_timeout_of_a_source_that_the_vertex_cannot_follow_is_refused_at_the_source() -> None:
    env = StreamEnvironment(types.SimpleNamespace(conf={}), FTLayer.embedded("x"), name="job")
    with pytest.raises(
        ConfigError, match="source: retry: timeout_ms: expected an integer of milliseconds from 2"
    ):
        env.source([1], "id bigint", retry=StreamOptions(timeout_ms=1))
    with pytest.raises(ConfigError, match="retry: expected a StreamOptions"):
        env.source([1], "id bigint", retry={"max_attempts": 3})  # type: ignore[arg-type]


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ConfigError) as refused:
        config.VertexOptions("x", durability="x" * 100_000)
    assert len(str(refused.value)) < 300


UNITS_MS = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds", "Seconds"), 1_000),
    **dict.fromkeys(("m", "min", "mins", "minute", "MINUTES"), 60_000),
    **dict.fromkeys(("h", "hour", "hours"), 3_600_000),
    **dict.fromkeys(("d", "day", "days"), 86_400_000),
    **dict.fromkeys(("w", "week", "weeks"), 604_800_000),
}


@given(st.integers(-(1 << 70), 1 << 70), st.sampled_from([*UNITS_MS]), st.sampled_from(["", " "]))
def test_a_duration_is_its_number_of_units_or_refused(number: int, unit: str, between: str) -> None:
    size = UNITS_MS[unit]
    for least in (-LONGEST_MS, 0, 1):
        if least <= number * size <= LONGEST_MS:
            assert duration_ms(f"{number}{between}{unit}", "x", least=least) == number * size
        else:
            with pytest.raises(ConfigError, match="x: "):
                duration_ms(f"{number}{between}{unit}", "x", least=least)


@given(st.integers(-LONGEST_MS, LONGEST_MS), st.sampled_from([*UNITS_MS]))
def test_a_text_a_timedelta_and_a_number_of_seconds_are_the_same_duration(ms: int, unit: str) -> None:
    exact = Fraction(ms, UNITS_MS[unit]).limit_denominator(1_000_000)
    text = f"{'-' if ms < 0 else ''}{abs(ms) // 1_000}.{abs(ms) % 1_000:03}s"
    given = [f"{ms} ms", text, ms / 1_000, timedelta(milliseconds=ms), *([ms // 1_000] * (ms % 1_000 == 0))]
    if exact == Fraction(ms, UNITS_MS[unit]) and 1_000_000 % exact.denominator == 0:
        given.append(f"{Decimal(exact.numerator) / exact.denominator:f}{unit}")
    assert {duration_ms(one, "x", least=-LONGEST_MS) for one in given} == {ms}
    if ms >= 0:
        assert {wait_seconds(one, "x") for one in given} == {ms / 1_000}


@given(st.floats() | st.timedeltas())
def test_a_number_is_rounded_to_its_milliseconds_and_never_to_none(given: float | timedelta) -> None:
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    try:
        found = duration_ms(given, "x", least=-LONGEST_MS)
    except ConfigError:
        assert not math.isfinite(seconds) or abs(seconds) * 1_000 > LONGEST_MS or 0 < abs(seconds) < 0.001
        return
    assert abs(found - seconds * 1_000) <= 0.5001
    assert (found == 0) == (seconds == 0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        *[
            ("-5s", -5_000),
            (" - 1.5 m", -90_000),
            ("0s", 0),
            ("0", 0),
            ("0 ms", 0),
            (" 0.0h ", 0),
            ("-0min", 0),
        ],
        *[(0, 0), (-0.25, -250), (-2, -2_000), ("250ms", 250), ("0.1 min", 6_000), (1 / 3, 333)],
    ],
)
def test_durations_that_may_be_negative(given: checks.Duration, expected: int) -> None:
    assert duration_ms(given, "lower", least=-LONGEST_MS) == expected


NO_DURATIONS: list[Any] = [
    *("", "5", "5.0", "0x", "s", "-", "--", "5 dayss", "5 ss", "5S", "5M", "1 month", "1 year", "1h30m"),
    *("PT5S", "1 minute 30 seconds", "0:00:05", "1e3s", "5s s", ".5s", "1_000ms", "0 0s", "0.1ms", "1.0005s"),
    *("٣s", "9" * 400 + "s", b"5s", True, None, math.nan, math.inf, -math.inf, 0.0004, 1 << 70, 1e300),
    *(timedelta(microseconds=5), Decimal(5), [5]),
]


@pytest.mark.parametrize("wrong", NO_DURATIONS)
def test_what_is_no_duration_is_named(wrong: Any) -> None:
    for least in (-LONGEST_MS, 0, 1):
        with pytest.raises(ConfigError, match="lower: "):
            duration_ms(wrong, "lower", least=least)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("60", "got '60': write its unit, '60s' for seconds"),
        ("5M", "got '5M': M could be minutes or months, a minute is m"),
        ("2 Months", "got '2 Months': months and years differ in length, write days"),
        ("1.0005s", "a duration is of whole milliseconds"),
        (0.0004, "a duration is at least 1 ms, got 0.0004"),
        ("soon", "expected a duration like '250ms', '30s', '5 minutes', '1h' or '7d', got 'soon'"),
        (None, "'1h' or '7d', a timedelta, or a number of seconds, got None"),
    ],
)
def test_what_is_ambiguous_is_said(wrong: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        duration_ms(wrong, "timeout")
    assert str(refused.value).startswith("timeout: ")
    assert said in str(refused.value)


def test_a_wait_is_as_exact_as_it_is_given_and_never_negative() -> None:
    assert wait_seconds(None, "x") is None
    assert wait_seconds(0.0003, "x") == 0.0003
    assert wait_seconds("2 minutes", "x") == 120
    for wrong in (-1, -1e-9, "-1s", math.inf, "5", True, LONGEST_MS):
        with pytest.raises(ConfigError, match="x: "):
            wait_seconds(wrong, "x")


def test_a_bound_below() -> None:
    assert duration_ms("0s", "idle", least=0) == 0
    with pytest.raises(ConfigError, match="idle: expected 0 or a duration of at least 1 ms, got '-1s'"):
        duration_ms("-1s", "idle", least=0)


@given(st.text(max_size=300))
def test_any_name_that_is_not_known_is_refused_in_a_line(name: str) -> None:
    if name not in ("timeout", "path"):
        with pytest.raises(ConfigError, match="vertex: there is no option"):
            check_known([name], ("timeout", "path"), "vertex")


def test_members_of_enums_and_paths() -> None:
    assert config.VertexOptions(Path("x")).path == Path("x")
    assert checks.member("on", "status", ftlayer.FTStatus) is ftlayer.FTStatus.ON
    assert issubclass(ftlayer.FTStatus, enum.Enum)


def test_the_vertex_keywords_are_its_options() -> None:
    hints = typing.get_type_hints(config.VertexOptions)
    del hints["path"]
    assert typing.get_type_hints(config.VertexKeywords) == hints
