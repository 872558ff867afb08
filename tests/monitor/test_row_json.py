from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import ConfigError
from ftlayer.monitor.rules.row_json import json_of_row, row_of_json, structured_row, value_of_text

INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
UNITS = ("s", "ms", "us", "ns")


def _ints(kind: pa.DataType) -> st.SearchStrategy[pa.Array]:
    least, most = (
        (0, (1 << kind.bit_width) - 1)
        if str(kind)[0] == "u"
        else (-(1 << kind.bit_width - 1), (1 << kind.bit_width - 1) - 1)
    )
    return st.one_of(st.none(), st.integers(least, most)).map(lambda value: pa.array([value], kind))


def _plain_of(kind: pa.DataType, values: st.SearchStrategy[Any]) -> st.SearchStrategy[pa.Array]:
    return st.one_of(st.none(), values).map(lambda value: pa.array([value], kind))


def _bits_of(
    kind: pa.DataType, values: st.SearchStrategy[Any], bits: pa.DataType
) -> st.SearchStrategy[pa.Array]:
    return st.one_of(st.none(), values).map(lambda value: pa.array([value], bits).view(kind))


LEAVES: st.SearchStrategy[pa.Array] = st.one_of(
    *(
        _ints(kind())
        for kind in (pa.int8, pa.int16, pa.int32, pa.int64, pa.uint8, pa.uint16, pa.uint32, pa.uint64)
    ),
    _plain_of(pa.bool_(), st.booleans()),
    _plain_of(pa.float64(), st.floats(allow_nan=False)),
    _plain_of(pa.float32(), st.floats(width=32, allow_nan=False)),
    _plain_of(pa.float16(), st.floats(width=16, allow_nan=False)),
    *(_plain_of(kind(), st.text()) for kind in (pa.string, pa.large_string, pa.string_view)),
    *(_plain_of(kind(), st.binary()) for kind in (pa.binary, pa.large_binary, pa.binary_view)),
    _plain_of(pa.binary(3), st.binary(min_size=3, max_size=3)),
    _bits_of(pa.string(), st.binary(), pa.binary()),
    _plain_of(pa.decimal128(12, 3), st.decimals(-999_999_999, 999_999_999, places=3)),
    _plain_of(pa.decimal256(50, 0), st.integers(-(10**49), 10**49)),
    *(
        _bits_of(pa.timestamp(unit, zone), INT64, pa.int64())
        for unit in UNITS
        for zone in (None, "UTC", "Asia/Tokyo")
    ),
    *(_bits_of(pa.duration(unit), INT64, pa.int64()) for unit in UNITS),
    _bits_of(pa.date32(), INT32, pa.int32()),
    _bits_of(pa.date64(), INT64, pa.int64()),
    *(_bits_of(pa.time64(unit), INT64, pa.int64()) for unit in UNITS[2:]),
    *(_bits_of(pa.time32(unit), INT32, pa.int32()) for unit in UNITS[:2]),
    _plain_of(
        pa.month_day_nano_interval(),
        st.tuples(INT32, INT32, INT64).map(lambda parts: pa.MonthDayNano(list(parts))),
    ),
    st.just(pa.nulls(1)),
)


def _nested(inner: st.SearchStrategy[pa.Array]) -> st.SearchStrategy[pa.Array]:
    def lists(item: pa.Array) -> list[pa.Array]:
        ends = pa.array([0, 1], pa.int32())
        return [
            pa.ListArray.from_arrays(ends, item),
            pa.LargeListArray.from_arrays(ends.cast(pa.int64()), item),
            pa.FixedSizeListArray.from_arrays(item, 1),
            pa.ListViewArray.from_arrays(pa.array([0], pa.int32()), pa.array([1], pa.int32()), item),
            pa.ListArray.from_arrays(pa.array([0, 0], pa.int32()), item),
            pa.ListArray.from_arrays(pa.array([None, 1], pa.int32()), item),
            pa.StructArray.from_arrays([item, item], ["a", "b"]),
            pa.StructArray.from_arrays([item], ["a"], mask=pa.array([True])),
            pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), item),
            pa.MapArray.from_arrays(ends, pa.array(["key"]), item),
        ]

    return st.tuples(inner, st.integers(0, 9)).map(lambda drawn: lists(drawn[0])[drawn[1]])


@given(st.lists(st.recursive(LEAVES, _nested, max_leaves=4), min_size=1, max_size=3))
def test_what_is_not_changed_stays_as_it_was(columns: list[pa.Array]) -> None:
    row = pa.RecordBatch.from_arrays(columns, [f"c{place}" for place in range(len(columns))])
    shown = json.loads(json.dumps(json_of_row(row), allow_nan=False))
    again = row_of_json(shown, row.schema)
    again.validate(full=False)
    assert again.schema.equals(row.schema)
    assert json_of_row(again) == shown


SCHEMA = pa.schema(
    [
        pa.field("id", pa.int32(), nullable=False),
        pa.field("price", pa.decimal128(6, 2)),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("small", pa.float32()),
        pa.field("raw", pa.binary()),
        pa.field("day", pa.date32()),
        pa.field("who", pa.struct([pa.field("name", pa.string(), nullable=False)])),
    ]
)
GOOD: dict[str, Any] = {
    "id": 7,
    "price": "12.50",
    "at": "2026-01-31T12:00:00.25+01:00",
    "tags": ["a", None],
    "small": 1,
    "raw": {"base64": "AAE="},
    "day": "2026-01-31",
    "who": {"name": "x"},
}


def test_bytes_that_are_text_are_shown_as_text() -> None:
    kind = pa.binary()
    for data, shown in (
        (b'{"a": "\xc3\xa9"}\n', '{"a": "é"}\n'),
        (b"", ""),
        (b"\x1b[0m", {"base64": "G1swbQ=="}),
    ):
        assert json_of_row(pa.record_batch({"raw": pa.array([data], kind)})) == {"raw": shown}
        schema = pa.schema({"raw": kind})
        assert row_of_json({"raw": shown}, schema)["raw"].to_pylist() == [data]
        meant = value_of_text(shown if isinstance(shown, str) else json.dumps(shown), "raw", schema)
        assert row_of_json({"raw": meant}, schema)["raw"].to_pylist() == [data]


def test_values_are_read_by_their_types() -> None:
    row = row_of_json(GOOD, SCHEMA)
    assert json_of_row(row) == GOOD | {"at": "2026-01-31T11:00:00.250000Z", "small": 1.0}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": None}, "'id' (int32): it may not be null"),
        ({"id": 7.0}, "'id' (int32): expected a whole number, got 7.0"),
        ({"id": "7"}, "'id' (int32): expected a whole number"),
        ({"id": True}, "'id' (int32): expected a whole number"),
        ({"id": 1 << 31}, "'id' (int32): 2147483648 does not fit"),
        ({"price": "12.505"}, "'price' (decimal128(6, 2)): '12.505' does not fit"),
        ({"price": "99999.00"}, "'price'"),
        ({"price": "NaN"}, "'price' (decimal128(6, 2)): expected a decimal number as text"),
        ({"price": "many"}, "expected a decimal number as text"),
        (
            {"at": "2026-01-31T12:00:00"},
            "'at' (timestamp[us, tz=UTC]): expected a time like '2026-01-31T12:00:00Z'",
        ),
        ({"at": "2026-02-31T12:00:00Z"}, "'at'"),
        ({"at": "2026-01-31T12:00:00.0000001Z"}, "is more exact than us"),
        ({"tags": "a"}, "'tags' (list<item: string>): expected an array"),
        ({"tags": [1]}, "'tags' (list<item: string>): expected text, got 1"),
        ({"small": 1e39}, "'small' (float): 1e+39 is not a float"),
        ({"small": (1 << 60) + 1}, "'small'"),
        ({"raw": 7}, "'raw' (binary): expected text, or bytes as"),
        ({"raw": "\ud800"}, "'raw' (binary): '\\ud800' is no text"),
        ({"raw": {"base64": "!"}}, "'raw' (binary): no Base64"),
        ({"day": "31.1.2026"}, "'day' (date32[day]): expected a date like '2026-01-31'"),
        ({"who": {"name": None}}, "'who' (struct<name: string not null>): 'name' may not be null"),
        ({"who": {}}, "expected an object with name"),
        ({"prise": 1}, "column 'prise' is none of the record's: did you mean 'price'?"),
        ({"zzzz": 1}, "it has id, price"),
    ],
)
def test_what_does_not_fit_names_its_column(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        row_of_json(GOOD | change, SCHEMA)
    assert said in str(raised.value)


def test_a_missing_column_and_a_record_that_is_none() -> None:
    with pytest.raises(ConfigError, match="column 'id' is missing: write null"):
        row_of_json({}, SCHEMA)
    with pytest.raises(ConfigError, match="expected an object with the columns"):
        row_of_json([1], SCHEMA)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(SCHEMA.names), JSON))
def test_any_json_is_a_row_or_an_error_of_ours(values: dict[str, Any]) -> None:
    try:
        row = row_of_json(GOOD | values, SCHEMA)
    except ConfigError:
        return
    row.validate(full=True)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.just({"json": [1]})),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=4,
)
TEXTS = st.one_of(
    st.builds(
        lambda value, indent, ascii: json.dumps(value, indent=indent, ensure_ascii=ascii),
        VALUES,
        st.sampled_from((None, 1, 2)),
        st.booleans(),
    ),
    st.sampled_from(
        (
            *(
                '{"a": 1, "a": 2}',
                '{"n": 9007199254740993}',
                '{"n": 1.50}',
                "[NaN]",
                "[1e3]",
                "[-0]",
                " [ 1 ]",
            ),
            *(
                "[" * 5_000,
                '["\\ud800"]',
                '{"b":1,"a":1}',
                '{"a":1,"b":1}',
                "[1.0]",
                "[1]",
                '{"a":\t1}',
                "{}x",
                "[",
            ),
        )
    ),
).filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text))


@given(st.lists(TEXTS, min_size=1, max_size=3))
def test_texts_of_json_that_are_not_edited_keep_their_bytes(texts: list[str]) -> None:
    """In whatever column they are, and however they are written; through the JSON that an editor has."""
    row = pa.record_batch(
        {
            "text": pa.array([texts[0]]),
            "raw": pa.array([texts[-1].encode()], pa.binary()),
            "many": pa.array([texts], pa.list_(pa.large_string())),
            "map": pa.array(
                [[(texts[0], {"json": texts[-1]})]], pa.map_(pa.string(), pa.struct([("json", pa.string())]))
            ),
        }
    )
    edited = json.loads(json.dumps(structured_row(row), ensure_ascii=False, indent=2))
    assert row_of_json(edited, row.schema, row).equals(row)


def test_a_text_of_json_is_a_structure_and_what_is_edited_in_it_a_text_again() -> None:
    row = pa.record_batch({"raw": pa.array([b'{"who": "\\u00e9", "price": "12,5"}'], pa.binary())})
    assert structured_row(row) == {"raw": {"json": {"who": "é", "price": "12,5"}}}
    edited = {"raw": {"json": {"who": "é", "price": 12.5}}}
    assert row_of_json(edited, row.schema, row)["raw"].to_pylist() == [b'{"who": "\\u00e9", "price": 12.5}']
    assert row_of_json(edited, row.schema)["raw"].to_pylist() == ['{"who":"é","price":12.5}'.encode()]
    for text in (
        '{"a":1,"a":1}',
        "[9007199254740993]",
        "[1.50]",
        "[NaN]",
        "7",
        '"x"',
        "{",
        '{"a":1} x',
        "[-0]",
    ):
        assert structured_row(pa.record_batch({"text": [text]})) == {"text": text}
    # Two texts with one structure could not be told apart.
    assert structured_row(pa.record_batch({"a": ["[1]"], "b": ["[ 1]"]})) == {"a": "[1]", "b": "[ 1]"}
    with pytest.raises(ConfigError, match=r"'raw'.*NaN and Infinity are no JSON"):
        row_of_json({"raw": {"json": [float("nan")]}}, row.schema, row)
