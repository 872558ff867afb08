from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ftlayer.errors import ConfigError
from ftlayer.monitor.rules.names import JobNames
from ftlayer.monitor.rules.where import Comparison, Every, Negation, Pushed, Some, Value, Where, parse_where
from ftlayer.vertex.calls import Attempt, RecordInfo

NOW_MS = 1_800_000_000_000
RECORD: dict[str, Any] = {
    "price": 12.5,
    "text": "12,5",
    "bytes": b'{"at": "caf\xc3\xa9"}',
    "count": "17",
    "on": True,
    "none": None,
    "who": {"name": "Ada", "odd name": 3},
    "tags": ["a", "b"],
}


def a_record(**fields: Any) -> RecordInfo:
    given_fields: dict[str, Any] = {
        "key": b"\x0a\xff",
        "stream": "3f2a/lines",
        "state": "dead",
        "root": 0xAB,
        "origin": 0xCD,
        "attempt": 3,
        "not_before_ms": 0,
        "history": (
            Attempt(1, NOW_MS - 900_000, "x", "parse"),
            Attempt(2, NOW_MS - 600_000, "TimeoutError: timeout after 5 s", "parse"),
        ),
        "payload": pa.RecordBatch.from_pylist([RECORD]),
    }
    return RecordInfo(**given_fields | fields)


def matches(made: Any, text: str, **fields: Any) -> bool:
    view = made.view(streams=(made.stream("3f2a/lines", "clean"),))
    return parse_where(text).matches("local", a_record(**fields), JobNames([view]), NOW_MS)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "operator = parse",
        "operator=parse and reason~timeout",
        "operator = parse and reason ~ timeout and record.price > 10 and age > 5m",
        "operator != trim and reason !~ refused",
        'reason ~ "timeout after 5"',
        "stream = clean",
        "stream = clean/lines",
        "stream = 3f2a",
        "stream != other",
        "key = 0aFF",
        "root = 00000000000000ab and origin != 00000000000000ab",
        "attempt = 3 and attempt >= 3 and attempt < 4",
        "age >= 10m and age <= 10m and age = 600s and age < 11m",
        "record.price = 12.50",
        "record.count > 9",
        "record.count = 17.0",
        'record.count = "17"',
        "record.text > 11 or record.text = 12,5",
        'record.bytes ~ "café"',
        'record.text < "2"',
        "record.on = true",
        "record.none = null and record.gone = null and record.who.gone = null and record.price.gone = null",
        "record.who.name = Ada",
        'record.who."odd name" = 3',
        "record.tags ~ a and record ~ Ada",
        "not record.on = false",
        "not (operator = trim or operator = split)",
        "(operator = trim or operator = parse) and record.on = true",
        "operator = trim and record.on = true or attempt = 3",
    ],
)
def test_what_holds(made: Any, text: str) -> None:
    assert matches(made, text)


@pytest.mark.parametrize(
    "text",
    [
        "operator = Parse",
        "reason ~ Timeout and not reason ~ TimeoutError",
        "stream = lines",
        "key != 0aff",
        "record.price > 12.5",
        'record.price > "12"',
        "record.text > 11",
        "record.none < 1 or record.none > 1 or record.gone <= 0",
        'record.none = "null" or record.on = "true" or record.price = null',
        "record.none ~ x",
        "operator = trim and (record.on = true or attempt = 3)",
        "age > 10m",
    ],
)
def test_what_does_not_hold(made: Any, text: str) -> None:
    assert not matches(made, text)


def test_a_record_that_has_not_failed_has_no_age(made: Any) -> None:
    assert not matches(made, "age >= 0s or age < 1h", history=())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("operator", "character 9: expected one of != <= >= !~ = < > ~ behind 'operator', got the end"),
        (
            "operator =",
            "character 11: expected a value: a word, a number, or text in double quotes, got the end",
        ),
        ("operator = and", "character 12: expected a value"),
        ("oprator = x", "character 1: expected one of stream, operator, reason, key"),
        ("reason.x = 1", "character 1: expected one of stream"),
        ("record. = 1", "character 1: expected names of columns and fields with dots between them"),
        ("record.a..b = 1", "expected names of columns"),
        ("operator = x y", "character 14: expected 'and', 'or' or the end, got 'y'"),
        ("(operator = x", "character 14: expected ')', got the end"),
        ("operator = x)", "character 13: expected 'and', 'or' or the end"),
        ('operator = "x', "character 12: expected a value"),
        ('operator = "\\q"', "character 12: expected text in quotes as JSON has it"),
        ("stream ~ x", "character 8: 'stream' is compared with = and != alone"),
        ("age ~ 5m", "character 5: 'age' is compared with"),
        ("age > soon", "character 7: age: expected a duration"),
        ("attempt > many", "character 11: expected a whole number"),
        ("key = xyz", "character 7: expected a key, hexadecimal"),
        ("root = 1", "character 8: expected an id as 16 hexadecimal digits"),
        ("not", "character 4: expected one of stream"),
        ("(" * 100 + "operator = x", "at most 50 parentheses"),
        ("not " * 100 + "operator = x", "at most 50 parentheses"),
        ("   ", "expected a filter, got blanks"),
        ("\n", "expected a filter, got blanks"),
        ("x" * 10_001, "expected 10,000 characters at most"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_where(text)
    assert said in str(raised.value)


# ---------------------------------------------------------------- properties

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)


def value_of(text: str) -> Value:
    """Return ``text`` as a value, in quotes where it is no word."""
    is_word = not set(text) & set('"()=<>!~') and len(text.split()) == 1 and text == text.strip()
    return Value(text, quoted=not is_word or text in ("and", "or", "not"))


VALUES = st.one_of(
    TEXTS.map(value_of),
    st.text(st.characters(exclude_categories=("Cs",)), max_size=4).map(lambda text: Value(text, quoted=True)),
    st.sampled_from(["12.5", "null", "true", "-3", "7", "7.0"]).map(Value),
)
ORDERED = ("=", "!=", "<", "<=", ">", ">=")
COMPARISONS = st.one_of(
    st.builds(
        Comparison,
        st.sampled_from([("operator",), ("reason",), ("record",)]),
        st.sampled_from([*ORDERED, "~", "!~"]),
        VALUES,
    ),
    st.builds(
        Comparison,
        st.lists(TEXTS, min_size=1, max_size=3).map(lambda names: ("record", *names)),
        st.sampled_from([*ORDERED, "~", "!~"]),
        VALUES,
    ),
    st.builds(
        Comparison,
        st.just(("age",)),
        st.sampled_from(ORDERED),
        st.sampled_from(["5m", "0s", "1h"]).map(Value),
    ),
    st.builds(Comparison, st.just(("stream",)), st.sampled_from(["=", "!="]), VALUES),
    st.builds(
        Comparison,
        st.just(("key",)),
        st.sampled_from(["=", "!="]),
        st.sampled_from([Value("0aff"), Value("00")]),
    ),
    st.builds(
        Comparison,
        st.sampled_from([("root",), ("origin",)]),
        st.just("="),
        st.sampled_from([Value("00000000000000ab"), Value("0000000000000000")]),
    ),
)
CONDITIONS = st.recursive(
    COMPARISONS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: Every(tuple(parts))),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: Some(tuple(parts))),
        inner.map(Negation),
    ),
    max_leaves=6,
)


@given(CONDITIONS)
def test_a_filter_as_text_is_parsed_to_the_same(condition: Any) -> None:
    assert parse_where(str(Where(condition))).condition == condition


PIECES = st.sampled_from(
    [
        *'()"\\.=<>!~ ',
        "and",
        "or",
        "not",
        "operator",
        "record.",
        "age",
        "5m",
        " = ",
        '"x"',
        "key",
        "0a",
        "\n",
        "é",
    ]
)


@given(st.one_of(st.text(max_size=40), st.lists(PIECES, max_size=12).map("".join)))
def test_any_text_is_a_filter_or_an_error_of_ours(text: str) -> None:
    try:
        where = parse_where(text)
    except ConfigError:
        return
    assert parse_where(str(where)) == where
    where.matches("local", a_record(), JobNames([]), NOW_MS)
    where.pushed(NOW_MS)


@given(CONDITIONS, st.integers(0, 1_200_000), st.sampled_from(["parse", "trim", "7"]))
@example(Comparison(("operator",), "=", Value("7.0")), 0, "7")
def test_a_vertex_gives_at_least_what_holds(condition: Any, age_ms: int, operator: str) -> None:
    where = Where(condition)
    reason = "TimeoutError: timeout after 5 s"
    info = a_record(history=(Attempt(1, NOW_MS - age_ms, reason, operator),))
    names = JobNames([])
    pushed, holds = where.pushed(NOW_MS), where.matches("local", info, names, NOW_MS)
    given_by_vertex = (
        pushed.operator in ("", info.operator)
        and pushed.text in info.reason
        and pushed.root in (0, info.root, info.origin)
        and (not pushed.keys or info.key in pushed.keys)
        and pushed.since_ms <= NOW_MS - age_ms
        and (not pushed.until_ms or NOW_MS - age_ms < pushed.until_ms)
        and (not pushed.stream or ("local", info.stream) in names.streams(pushed.stream))
    )
    assert given_by_vertex or not holds
    if pushed.is_all:
        assert holds == given_by_vertex


def test_what_a_vertex_can_do() -> None:
    where = parse_where(
        "operator = parse and reason ~ timeout and record.price > 10 and age > 5m and stream = clean"
    )
    assert where.pushed(NOW_MS) == Pushed(
        "clean", "parse", "timeout", until_ms=NOW_MS - 300_000, is_all=False
    )
    assert parse_where("operator = parse and age < 5m").pushed(NOW_MS).is_all
    assert parse_where("operator = parse or age < 5m").pushed(NOW_MS) == Pushed(is_all=False)
    assert parse_where("").pushed(NOW_MS) == Pushed()
