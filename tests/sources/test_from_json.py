"""JSON messages as rows, held against Python's own reader of JSON."""

from __future__ import annotations

import datetime
import json
import pickle
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.connectors.from_json import CORRUPT, FromJson
from ftlayer.errors import ConfigError

MESSAGES = pa.schema([("key", pa.string()), ("value", pa.binary()), ("offset", pa.int64())])


def messages(*values: bytes | None) -> pa.RecordBatch:
    columns = {"key": ["k"] * len(values), "value": values, "offset": range(len(values))}
    return pa.RecordBatch.from_pydict(columns, schema=MESSAGES)


def test_objects_are_rows_with_the_columns_that_are_kept() -> None:
    parse = FromJson("user string, n bigint", keep=["offset"])
    batch = messages(b'{"user": "ada", "n": 3, "more": [1]}', b' {\n"n": 4\n} ', b'{"user": null}')
    rows = parse(batch)
    assert rows.schema == parse.result_schema(MESSAGES)
    assert rows.to_pylist() == [
        {"user": "ada", "n": 3, "offset": 0},
        {"user": None, "n": 4, "offset": 1},
        {"user": None, "n": None, "offset": 2},
    ]
    assert pickle.loads(pickle.dumps(parse))(batch) == rows
    assert parse(messages()).num_rows == 0


def test_types() -> None:
    schema = "at timestamp, day date, price decimal(10,2), tags array<string>, who struct<name: string, born: date>"
    value = {
        "at": "2026-01-02T03:04:05.678+01:00",
        "day": "2026-01-02",
        "price": 1.25,
        "tags": ["a", None],
        "who": {"name": "ada", "born": "1815-12-10", "died": "1852-11-27"},
    }
    (row,) = FromJson(schema)(messages(json.dumps(value).encode())).to_pylist()
    assert row == {
        "at": datetime.datetime(2026, 1, 2, 2, 4, 5, 678_000, tzinfo=datetime.UTC),
        "day": datetime.date(2026, 1, 2),
        "price": Decimal("1.25"),
        "tags": ["a", None],
        "who": {"name": "ada", "born": datetime.date(1815, 12, 10)},
    }


BAD = [
    b"",
    b"null",
    b"[1]",
    b"7",
    b'{"n": 1',
    b'{"n": "1"}',
    b'{"n": 1.5}',
    b'{"n": 99999999999999999999}',
    b'{"n": 1} {"n": 2}',
    b'{"n": 1}}\n{"#":1,"v":{"n": 2}',
    b'{"user": "\xff"}',
    b'{"n": 1, "n": 2}',
    None,
]


@pytest.mark.parametrize("value", BAD)
def test_a_message_that_does_not_fit_fails_and_is_shown(value: bytes | None) -> None:
    with pytest.raises(ValueError, match="the message does not fit the schema: ") as raised:
        FromJson("user string, n bigint")(messages(value))
    shown = "null" if value is None else value.decode("utf-8", "replace")
    assert str(raised.value).endswith(f": {shown}")


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("float", "1.5", "1e39"),
        ("decimal(5, 2)", "1", "1000"),
        ("timestamp_ntz", '"2024-01-01T10:00:00"', '"2024-01-01T10:00:00+05:30"'),
    ],
)
@pytest.mark.parametrize("nested", ["{}", "array<{}>", "struct<v: {}>"])
def test_a_value_that_its_type_has_not_fails(kind: str, good: str, bad: str, nested: str) -> None:
    text = {"{}": "%s", "array<{}>": "[%s]", "struct<v: {}>": '{"v": %s}'}[nested]
    read = FromJson(f"v {nested.format(kind)}")
    read(messages(b'{"v": %s}' % (text % good).encode())).validate(full=True)
    with pytest.raises(ValueError, match="the message does not fit the schema: "):
        read(messages(b'{"v": %s}' % (text % bad).encode()))


def test_a_null_where_the_schema_has_none_fails() -> None:
    parse = FromJson(pa.schema([pa.field("n", pa.int64(), nullable=False)]))
    assert parse(messages(b'{"n": 1}')).to_pylist() == [{"n": 1}]
    with pytest.raises(ValueError, match="'n' is null"):
        parse(messages(b"{}"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)
VALUES = st.one_of(
    st.fixed_dictionaries({"n": st.integers(-9, 9)}, optional={"user": st.text(max_size=3)}).map(json.dumps),
    JSON.map(json.dumps),
    st.text('{}[]":,n1 \n', max_size=8),
)


def expected(text: str) -> dict[str, Any] | None:
    """What one message is by Python's reader; None: it does not fit."""
    try:
        value = json.loads(text, object_pairs_hook=list)
    except ValueError:
        return None
    if not (isinstance(value, list) and text.lstrip().startswith("{")):
        return None
    found = dict(value)
    named = [name for name, _ in value if name in ("n", "user")]
    n, user = found.get("n"), found.get("user")
    if (
        len(named) > len(set(named))
        or not (n is None or type(n) is int)
        or not (user is None or type(user) is str)
    ):
        return None
    return {"user": user, "n": n}


@given(st.lists(VALUES, max_size=8))
def test_each_row_is_its_messages_object_and_the_others_are_marked(texts: list[str]) -> None:
    batch = messages(*(text.encode("utf-8", "surrogatepass") for text in texts))
    rows = FromJson(f"user string, {CORRUPT} string, n bigint", keep=["offset"])(batch).to_pylist()
    wanted = [expected(text) for text in texts]
    assert [row["offset"] for row in rows] == list(range(len(texts)))
    for row, text, fits in zip(rows, texts, wanted, strict=True):
        if fits is None:
            assert (row["user"], row["n"], row[CORRUPT]) == (None, None, text)
        else:
            assert (row["user"], row["n"], row[CORRUPT]) == (fits["user"], fits["n"], None)


@pytest.mark.parametrize(
    ("schema", "options", "said"),
    [
        (7, {}, "schema: expected a pyarrow.Schema or text"),
        ("m map<string, bigint>", {}, "schema: m is map"),
        ("w struct<m: map<string, bigint>>", {}, "schema: w.m is map"),
        (f"{CORRUPT} string", {}, "no column beside"),
        (f"n int, {CORRUPT} int", {}, "is text, not int32"),
        ("n bigint", {"keep": "offset"}, "keep: expected a list of names, got 'offset'"),
        ("offset bigint", {"keep": ["offset"]}, "keep: the schema has a column 'offset', too"),
    ],
)
def test_schemas_that_cannot_be_read_are_refused(schema: Any, options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FromJson(schema, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"column": "payload"}, "no column 'payload'; messages have key, value, offset"),
        ({"keep": ["partition"]}, "no column 'partition'"),
        ({"column": "offset"}, "column 'offset' is int64: JSON is text or binary"),
    ],
)
def test_messages_without_the_columns_are_refused(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        FromJson("n bigint", **options).result_schema(MESSAGES)
