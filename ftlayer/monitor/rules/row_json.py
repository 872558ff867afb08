"""A record as JSON, and back: strictly by the type of each column, so that what is not changed stays as it was.

=====================================  =====================================================================
Arrow type                             JSON
=====================================  =====================================================================
boolean, integers, floats              ``true``, a number; ``"NaN"``, ``"Infinity"``, ``"-Infinity"``
decimal                                text: ``"12.50"`` (a number is taken too)
string                                 text; what is not UTF-8 as bytes
binary                                 text, if it is UTF-8 without control characters; ``{"base64": "…"}``
the two with JSON in them              ``{"json": …}`` where people read and edit: `structured_row`
timestamp, date, time                  ISO 8601, with a zone in UTC (``…Z``); what no calendar has: a whole number
duration                               a whole number of the type's unit
list                                   an array
struct                                 an object with every field
map                                    an array of ``[key, value]``
month-day-nano interval                an array of three whole numbers
=====================================  =====================================================================
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import difflib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from itertools import accumulate
from typing import Any

import pyarrow as pa

from ftlayer.common.checks import shown
from ftlayer.errors import ConfigError
from ftlayer.records.ipc import is_binary, is_list, is_string

BASE64, JSON = "base64", "json"
"""The keys under which bytes stand, and the structure that a text has as JSON."""

EXACT = 1 << 53
"""Whole numbers beyond it are rounded by programs that read JSON."""

IN_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
DAY_S = 86_400
EPOCH = datetime(1970, 1, 1)

# What text has none of, beside tabs and ends of lines.
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class UnfitError(Exception):
    """A value does not fit its type; the text says what does."""


def check_fields(kind: pa.StructType) -> None:
    """Raise `UnfitError` for a struct with two fields of one name."""
    names = [kind.field(i).name for i in range(kind.num_fields)]
    if len(set(names)) < len(names):
        raise UnfitError("two of its fields have one name, which JSON has no form for")


def json_of_row(batch: pa.RecordBatch) -> dict[str, Any]:
    """Return the one row of ``batch`` by columns, as JSON has it.

    Raises `ConfigError` naming the column for a type that has no form here (a union).
    """
    return {name: _plain_of(each, name) for name, each in zip(batch.schema.names, batch.columns, strict=True)}


def json_of_column(batch: pa.RecordBatch, name: str) -> Any:
    """Return one column of the one row of ``batch`` as JSON has it, None where there is none. Raises `ConfigError`."""
    place = batch.schema.get_field_index(name)
    return None if place < 0 else _plain_of(batch.column(place), name)


# How texts of JSON are written: what gives a text again is the style of it.
_STYLES: tuple[dict[str, Any], ...] = tuple(
    {"separators": separators, "indent": indent, "ensure_ascii": ascii}
    for separators, indent in (((",", ":"), None), ((", ", ": "), None), ((",", ": "), 2), ((",", ": "), 4))
    for ascii in (False, True)
)


def structure_of(text: str) -> Any:
    """Return the object or array that ``text`` is as JSON, None where it is none.

    Nor is one that would be another when it is written again: a key twice, numbers like 1.50, 1e3 or beyond 2^53.
    """
    if not text.lstrip(" \t\r\n").startswith(("{", "[")):
        return None
    try:
        found = json.loads(
            text, parse_int=_exact, parse_float=_exact, parse_constant=_exact, object_pairs_hook=_once
        )
        json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return found


def _exact(text: str) -> int | float:
    number: int | float = float(text) if set(text) & set(".eE") else int(text)
    if str(number) != text or (isinstance(number, int) and abs(number) > EXACT):
        raise ValueError
    return number


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError
    return found


def structured_row(batch: pa.RecordBatch) -> dict[str, Any]:
    """Return `json_of_row` with ``{"json": …}`` for what is text of JSON: `row_of_json` makes it text again."""
    row, texts = json_of_row(batch), _texts_in(batch)

    def structured(value: Any) -> Any:
        found = structure_of(value) if isinstance(value, str) else None
        return value if found is None or texts[_key(found)] != value else {JSON: found}

    return {field.name: _leaves(row[field.name], field.type, structured) for field in batch.schema}


def _texts_in(batch: pa.RecordBatch) -> dict[str, str]:
    """Return each text of JSON in a row by its structure; "" for two texts that have the same one."""
    row, texts = json_of_row(batch), dict[str, str]()

    def noted(value: Any) -> Any:
        found = structure_of(value) if isinstance(value, str) else None
        if found is not None and texts.setdefault(_key(found), value) != value:
            texts[_key(found)] = ""
        return value

    for field in batch.schema:
        _leaves(row[field.name], field.type, noted)
    return texts


def _key(structure: Any) -> str:
    return json.dumps(structure)


def _text_again(value: Any, texts: Mapping[str, str]) -> Any:
    """Return the text that ``{"json": …}`` stands for: as it was, or in the style of the record's first one."""
    if not isinstance(value, Mapping) or set(value) != {JSON}:
        return value
    if text := texts.get(_key(value[JSON])):
        return text
    first = next((text for text in texts.values() if text), "")
    like = structure_of(first)
    style = next((style for style in _STYLES if json.dumps(like, **style) == first), _STYLES[0])
    try:
        return json.dumps(value[JSON], allow_nan=False, **style)
    except ValueError:
        raise UnfitError(f"{shown(value)}: NaN and Infinity are no JSON") from None


def _leaves(value: Any, kind: pa.DataType, change: Callable[[Any], Any]) -> Any:
    """Return a value with what ``change`` makes of each text and of bytes in it; of another shape, as it is."""
    if isinstance(kind, pa.BaseExtensionType):
        return _leaves(value, kind.storage_type, change)
    if pa.types.is_dictionary(kind):
        return _leaves(value, kind.value_type, change)
    if pa.types.is_struct(kind) and isinstance(value, Mapping):
        types = {kind.field(i).name: kind.field(i).type for i in range(kind.num_fields)}
        return {name: _leaves(part, types.get(name, pa.null()), change) for name, part in value.items()}
    if pa.types.is_map(kind) and isinstance(value, list):
        pair = pa.struct([("0", kind.key_type), ("1", kind.item_type)])
        return [
            list(_leaves(dict(zip("01", entry, strict=True)), pair, change).values())
            if isinstance(entry, list) and len(entry) == 2
            else entry
            for entry in value
        ]
    if is_list(kind) and isinstance(value, list):
        return [_leaves(item, kind.value_type, change) for item in value]
    return change(value) if is_string(kind) or is_binary(kind) else value


def _plain_of(column: pa.Array, name: str) -> Any:
    try:
        return _plain(column[0])
    except UnfitError as error:
        raise ConfigError(f"column {name!r}: {error}") from None


def _plain(scalar: pa.Scalar) -> Any:
    kind = scalar.type
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.DictionaryScalar | pa.ExtensionScalar):
        return _plain(scalar.value)
    if pa.types.is_struct(kind):
        check_fields(kind)
        return {kind.field(i).name: _plain(scalar[i]) for i in range(kind.num_fields)}
    if pa.types.is_map(kind):
        return [[_plain(entry[0]), _plain(entry[1])] for entry in scalar.values]
    if is_list(kind):
        return [_plain(item) for item in scalar.values]
    return _plain_value(scalar, kind)


def _plain_value(scalar: pa.Scalar, kind: pa.DataType) -> Any:
    if pa.types.is_floating(kind):
        return _plain_float(float(scalar.as_py()))
    if pa.types.is_decimal(kind):
        return str(scalar.as_py())
    if is_string(kind):
        try:
            return scalar.as_py()
        except UnicodeDecodeError:
            return _plain_bytes(scalar.as_buffer().to_pybytes())
    if is_binary(kind):
        return _plain_bytes(scalar.as_py())
    if pa.types.is_timestamp(kind):
        return _plain_timestamp(scalar.value, kind)
    if pa.types.is_date(kind):
        return _plain_date(scalar.value, kind)
    if pa.types.is_time(kind):
        return _plain_time(scalar.value, kind.unit)
    if pa.types.is_duration(kind):
        return scalar.value
    if pa.types.is_boolean(kind) or pa.types.is_integer(kind):
        return scalar.as_py()
    if kind == pa.month_day_nano_interval():
        return list(scalar.as_py())
    raise UnfitError(f"values of type {kind} have no form in JSON")


def _plain_float(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else "Infinity" if value > 0 else "-Infinity"


def _plain_bytes(value: bytes) -> str | dict[str, str]:
    with contextlib.suppress(UnicodeDecodeError):
        text = value.decode()
        if not _CONTROLS.search(text):
            return text
    return {BASE64: base64.b64encode(value).decode("ascii")}


def _plain_timestamp(value: int, kind: pa.TimestampType) -> str | int:
    second, part = divmod(value, IN_A_SECOND[kind.unit])
    try:
        at = EPOCH + timedelta(seconds=second)
    except OverflowError:
        return value
    return f"{at.isoformat()}{_fraction(part, kind.unit)}{'' if kind.tz is None else 'Z'}"


def _plain_date(value: int, kind: pa.DataType) -> str | int:
    days, rest = divmod(value, 1 if pa.types.is_date32(kind) else DAY_S * 1_000)
    try:
        return value if rest else (EPOCH + timedelta(days=days)).date().isoformat()
    except OverflowError:
        return value


def _plain_time(value: int, unit: str) -> str | int:
    second, part = divmod(value, IN_A_SECOND[unit])
    if not 0 <= second < DAY_S:
        return value
    return f"{(EPOCH + timedelta(seconds=second)).time().isoformat()}{_fraction(part, unit)}"


def _fraction(part: int, unit: str) -> str:
    digits = len(str(IN_A_SECOND[unit])) - 1
    return f".{part:0{digits}}" if part else ""


def array_of(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return what `reader_of` gave as an array; nested ones by parts, since ``pa.array`` cannot make all types."""
    nulls = pa.array([value is None for value in values], pa.bool_())
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, array_of(values, kind.storage_type))
    if pa.types.is_dictionary(kind):
        places = pa.array(
            [None if value is None else place for place, value in enumerate(values)], kind.index_type
        )
        return pa.DictionaryArray.from_arrays(places, array_of(values, kind.value_type), ordered=kind.ordered)
    if pa.types.is_struct(kind) and kind.num_fields:
        fields = [kind.field(i) for i in range(kind.num_fields)]
        parts = [array_of([value and value[each.name] for value in values], each.type) for each in fields]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=nulls)
    if pa.types.is_map(kind):
        entries = [entry for value in values for entry in value or ()]
        keys = array_of([key for key, _ in entries], kind.key_type)
        items = array_of([item for _, item in entries], kind.item_type)
        return pa.MapArray.from_arrays(_offsets(values, pa.int32()), keys, items, type=kind)
    if is_list(kind):
        return _list_array(values, kind, nulls)
    if is_string(kind):
        # Arrow would refuse what is not UTF-8; Spark's strings need not be.
        raw = [value.encode() if isinstance(value, str) else value for value in values]
        short = pa.binary_view() if pa.types.is_string_view(kind) else pa.binary()
        return pa.array(raw, pa.large_binary() if pa.types.is_large_string(kind) else short).view(kind)
    return pa.array(values, kind)


def _list_array(values: list[Any], kind: Any, nulls: pa.Array) -> pa.Array:
    items = [item for value in values for item in value or ()]
    if pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        items = [item for value in values for item in ([None] * size if value is None else value)]
        if len(items) != size * len(values):
            raise UnfitError(f"expected arrays of {size}")
        return pa.FixedSizeListArray.from_arrays(array_of(items, kind.value_type), type=kind, mask=nulls)
    inner = array_of(items, kind.value_type)
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(_offsets(values, pa.int64()), inner, type=kind)
    if pa.types.is_list(kind):
        return pa.ListArray.from_arrays(_offsets(values, pa.int32()), inner, type=kind)
    return _array_of_views(values, kind, inner, nulls)


def _array_of_views(values: list[Any], kind: Any, inner: pa.Array, nulls: pa.Array) -> pa.Array:
    is_large = pa.types.is_large_list_view(kind)
    whole = pa.int64() if is_large else pa.int32()
    starts = pa.array(_starts(values)[:-1], whole)
    sizes = pa.array([len(value or ()) for value in values], whole)
    return (pa.LargeListViewArray if is_large else pa.ListViewArray).from_arrays(
        starts, sizes, inner, type=kind, mask=nulls
    )


def _offsets(values: list[Any], whole: pa.DataType) -> pa.Array:
    """Return where each list begins; null for a list that is."""
    *starts, end = _starts(values)
    begins = [None if value is None else start for start, value in zip(starts, values, strict=True)]
    return pa.array([*begins, end], whole)


def _starts(values: list[Any]) -> list[int]:
    return list(accumulate((len(value or ()) for value in values), initial=0))


_NO_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_DATE = r"(?P<date>\d{4}-\d{2}-\d{2})"
_TIME = r"(?P<time>\d{2}:\d{2}:\d{2})(?:\.(?P<fraction>\d{1,9}))?"
_TIMESTAMP = re.compile(f"{_DATE}[T ]{_TIME}(?P<zone>Z|[+-]\\d{{2}}:\\d{{2}})?", re.ASCII)
_TIME_OF_DAY = re.compile(_TIME, re.ASCII)


def reader_of(kind: pa.DataType) -> Callable[[Any], Any]:
    """Return what reads a value that is not null, as Arrow takes it for this type."""
    if isinstance(kind, pa.BaseExtensionType):
        return reader_of(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return reader_of(kind.value_type)
    if pa.types.is_struct(kind):
        return lambda value: _struct(value, kind)
    if pa.types.is_map(kind):
        return lambda value: _map(value, kind)
    if is_list(kind):
        return lambda value: _list(value, kind)
    return lambda value: _value(value, kind)


def _nested(value: Any, field: pa.Field) -> Any:
    if value is None and not field.nullable:
        raise UnfitError(f"{field.name!r} may not be null")
    return None if value is None else reader_of(field.type)(value)


def _struct(value: Any, kind: pa.StructType) -> dict[str, Any]:
    check_fields(kind)
    fields = {kind.field(i).name: kind.field(i) for i in range(kind.num_fields)}
    if not isinstance(value, Mapping) or set(value) != set(fields):
        raise UnfitError(f"expected an object with {', '.join(fields) or 'no fields'}, got {shown(value)}")
    return {name: _nested(value[name], field) for name, field in fields.items()}


def _map(value: Any, kind: pa.MapType) -> list[tuple[Any, Any]]:
    if not isinstance(value, list) or not all(isinstance(entry, list) and len(entry) == 2 for entry in value):
        raise UnfitError(f"expected an array of [key, value], got {shown(value)}")
    return [(_nested(entry[0], kind.key_field), _nested(entry[1], kind.item_field)) for entry in value]


def _list(value: Any, kind: Any) -> list[Any]:
    if not isinstance(value, list):
        raise UnfitError(f"expected an array, got {shown(value)}")
    return [_nested(item, kind.value_field) for item in value]


def _value(value: Any, kind: pa.DataType) -> Any:
    if pa.types.is_boolean(kind):
        return _of(value, bool, "true or false")
    if pa.types.is_integer(kind) or pa.types.is_duration(kind):
        return _whole(value)
    if pa.types.is_floating(kind):
        return _float(value, kind)
    if pa.types.is_decimal(kind):
        return _decimal(value)
    if is_string(kind):
        return _bytes(value) if isinstance(value, Mapping) else _of(value, str, "text")
    if is_binary(kind):
        return _bytes(value)
    if pa.types.is_timestamp(kind):
        return _timestamp(value, kind)
    if pa.types.is_date(kind):
        return _date(value, kind)
    if pa.types.is_time(kind):
        return _time(value, kind.unit)
    if kind == pa.month_day_nano_interval():
        return _interval(value)
    if pa.types.is_null(kind):
        raise UnfitError(f"expected null, got {shown(value)}")
    raise UnfitError("values of this type cannot be read from JSON")


def _of(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind):
        raise UnfitError(f"expected {what}, got {shown(value)}")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise UnfitError(f"expected a whole number, got {shown(value)}")
    return value


def _float(value: Any, kind: pa.DataType) -> float:
    if isinstance(value, str) and value in _NO_NUMBERS:
        return _NO_NUMBERS[value]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UnfitError(f"expected a number, got {shown(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    stored = float(pa.scalar(number, pa.float64()).cast(kind, safe=False).as_py())
    if (isinstance(value, int) and number != value) or math.isinf(stored):
        raise UnfitError(f"{shown(value)} is not a {kind}")
    return number


def _decimal(value: Any) -> Decimal:
    number = Decimal("NaN")
    if isinstance(value, str | int | float | Decimal) and not isinstance(value, bool):
        with contextlib.suppress(InvalidOperation):
            number = Decimal(str(value))
    if not number.is_finite():
        raise UnfitError(f'expected a decimal number as text, like "12.50", got {shown(value)}')
    return number


def _bytes(value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise UnfitError(f"{shown(value)} is no text that UTF-8 has bytes for") from None
    if isinstance(value, Mapping) and set(value) == {BASE64} and isinstance(value[BASE64], str):
        try:
            return base64.b64decode(value[BASE64], validate=True)
        except (binascii.Error, ValueError) as error:
            raise UnfitError(f"no Base64: {error}") from None
    raise UnfitError(f'expected text, or bytes as {{"{BASE64}": "…"}}, got {shown(value)}')


def _timestamp(value: Any, kind: pa.TimestampType) -> int:
    if not isinstance(value, str):
        return _whole(value)
    zoned = kind.tz is not None
    example = "2026-01-31T12:00:00Z" if zoned else "2026-01-31T12:00:00"
    match = _TIMESTAMP.fullmatch(value)
    if match is None or (match["zone"] is not None) != zoned:
        raise UnfitError(f"expected a time like {example!r}, got {shown(value)}")
    try:
        at = datetime.fromisoformat(f"{match['date']}T{match['time']}{match['zone'] or ''}")
        since = at.replace(tzinfo=None) - (at.utcoffset() or timedelta()) - EPOCH
    except (ValueError, OverflowError) as error:
        raise UnfitError(f"expected a time like {example!r}, got {shown(value)}: {error}") from None
    return _in_units(since, match["fraction"], kind.unit, value)


def _date(value: Any, kind: pa.DataType) -> int:
    if not isinstance(value, str):
        return _whole(value)
    try:
        days = (datetime.strptime(value, "%Y-%m-%d").replace(tzinfo=UTC) - EPOCH.replace(tzinfo=UTC)).days
    except ValueError:
        raise UnfitError(f"expected a date like '2026-01-31', got {shown(value)}") from None
    return days if pa.types.is_date32(kind) else days * DAY_S * 1_000


def _time(value: Any, unit: str) -> int:
    if not isinstance(value, str):
        return _whole(value)
    match = _TIME_OF_DAY.fullmatch(value)
    try:
        if match is None:
            raise ValueError
        at = datetime.fromisoformat(f"1970-01-01T{match['time']}")
    except ValueError:
        raise UnfitError(f"expected a time of day like '12:00:00', got {shown(value)}") from None
    return _in_units(at - EPOCH, match["fraction"], unit, value)


def _in_units(since: timedelta, fraction: str | None, unit: str, value: str) -> int:
    per_second = IN_A_SECOND[unit]
    nanoseconds = int((fraction or "").ljust(9, "0"))
    step = 10**9 // per_second
    if nanoseconds % step:
        raise UnfitError(f"{shown(value)} is more exact than {unit}")
    return (since.days * DAY_S + since.seconds) * per_second + nanoseconds // step


def _interval(value: Any) -> pa.MonthDayNano:
    if not isinstance(value, list) or len(value) != 3:
        raise UnfitError(f"expected [months, days, nanoseconds], got {shown(value)}")
    return pa.MonthDayNano([_whole(part) for part in value])


def row_of_json(values: object, schema: pa.Schema, before: pa.RecordBatch | None = None) -> pa.RecordBatch:
    """Return one row of ``schema`` from its columns as JSON has them, or as `structured_row` has those of ``before``.

    Raises `ConfigError` naming the column that is missing, unknown, null and may not be, or whose value does not fit.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"expected an object with the columns of the record, got {shown(values)}")
    for name in values:
        _check_named(str(name), schema)
    columns, texts = [], {} if before is None else _texts_in(before)
    for field in schema:
        if field.name not in values:
            raise ConfigError(f"column {field.name!r} is missing: write null for no value")
        try:
            given = _leaves(values[field.name], field.type, lambda value: _text_again(value, texts))
            columns.append(_column(given, field))
        except UnfitError as error:
            raise ConfigError(f"column {field.name!r} ({field.type}): {error}") from None
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def value_of_text(text: str, name: str, schema: pa.Schema) -> Any:
    """Return what a person means by ``text`` as a value of a column: itself for text and bytes, else as JSON has it.

    What is no JSON is text too, so that times and numbers of decimals need no quotes. `ConfigError` for a column that
    is none.
    """
    _check_named(name, schema)
    kind = schema.field(name).type
    if is_string(kind):
        return text
    try:
        value = json.loads(text, parse_float=str if pa.types.is_decimal(kind) else None)
    except ValueError:
        return text
    is_bytes = isinstance(value, dict) and set(value) == {BASE64}
    return text if is_binary(kind) and value is not None and not is_bytes else value


def _check_named(name: str, schema: pa.Schema) -> None:
    if name not in schema.names:
        near = difflib.get_close_matches(name, schema.names, n=1)
        meant = f": did you mean {near[0]!r}?" if near else f"; it has {', '.join(schema.names)}"
        raise ConfigError(f"column {name!r} is none of the record's{meant}")


def _column(value: Any, field: pa.Field) -> pa.Array:
    found = None if value is None else reader_of(field.type)(value)
    if found is None and not field.nullable:
        raise UnfitError("it may not be null")
    try:
        return array_of([found], field.type)
    except (pa.ArrowException, OverflowError, ValueError, TypeError) as error:
        raise UnfitError(f"{shown(value)} does not fit: {error}") from None


Stretches = tuple[tuple[str, bool], ...]
"""A value as JSON, in stretches: their text, and whether it is what differs. () is no value."""

_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_PLAIN_NAME = re.compile(r'[^\s"()=<>!~.\[\]]+')
_MOST_PAIRS = 250_000
"""Words of two texts are compared while their numbers multiply to no more: it takes so long."""
_KEPT, _MOST_SHOWN = 40, 2_000


@dataclass(frozen=True, slots=True)
class Difference:
    """A value that differs. ``path``: names, places in arrays, None from a text to the structure that it is as JSON.

    In an array the place is that in both; of what is there once, that in the one that has it.
    """

    path: tuple[str | int | None, ...]
    before: Stretches
    after: Stretches

    @property
    def place(self) -> str:
        """The path as a filter has it, ``[0]`` for a place and ``(JSON)`` behind a text that is some."""
        return "".join(map(_written, self.path)).removeprefix(".")

    def shown(self) -> tuple[Stretches, Stretches]:
        """Return both sides with ``…`` for what is long."""
        return _excerpt(self.before), _excerpt(self.after)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Difference]:
    return list(_between(dict(before), dict(after), ()))


def _between(before: Any, after: Any, path: tuple[str | int | None, ...]) -> Iterator[Difference]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            if name not in after:
                yield Difference((*path, name), _stretch(before[name]), ())
            elif name not in before:
                yield Difference((*path, name), (), _stretch(after[name]))
            else:
                yield from _between(before[name], after[name], (*path, name))
    elif isinstance(before, list) and isinstance(after, list):
        yield from _between_arrays(before, after, path)
    elif _json(before) != _json(after):
        if isinstance(before, str) and isinstance(after, str):
            yield from _between_texts(before, after, path)
        else:
            yield Difference(path, _stretch(before), _stretch(after))


def _between_arrays(
    before: list[Any], after: list[Any], path: tuple[str | int | None, ...]
) -> Iterator[Difference]:
    old, new = [*map(_json, before)], [*map(_json, after)]
    start, end = _common(old, new)
    olds, news = range(start, len(old) - end), range(start, len(new) - end)
    for place in range(start, max(olds.stop, news.stop)):
        if place not in news:
            yield Difference((*path, place), _stretch(before[place]), ())
        elif place not in olds:
            yield Difference((*path, place), (), _stretch(after[place]))
        else:
            yield from _between(before[place], after[place], (*path, place))


def _between_texts(before: str, after: str, path: tuple[str | int | None, ...]) -> Iterator[Difference]:
    old, new = structure_of(before), structure_of(after)
    if old is not None and new is not None and (found := list(_between(old, new, (*path, None)))):
        yield from found
        return
    olds, news = _WORD.findall(before), _WORD.findall(after)
    start, end = _common(olds, news)
    middle, other = olds[start : len(olds) - end], news[start : len(news) - end]
    blocks = [(0, len(middle), 0, len(other))]
    if len(middle) * len(other) <= _MOST_PAIRS:
        matcher = difflib.SequenceMatcher(None, middle, other, autojunk=False)
        blocks = [place for tag, *place in matcher.get_opcodes() if tag != "equal"]  # type: ignore[misc]
    yield Difference(
        path,
        _marked(olds, [(start + block[0], start + block[1]) for block in blocks]),
        _marked(news, [(start + block[2], start + block[3]) for block in blocks]),
    )


def _common(before: list[str], after: list[str]) -> tuple[int, int]:
    """Return how many of two lists are the same at their beginning, and behind that at their end."""
    least = min(len(before), len(after))
    start = next((place for place in range(least) if before[place] != after[place]), least)
    least -= start
    return start, next((place for place in range(least) if before[-1 - place] != after[-1 - place]), least)


def _marked(words: list[str], changed: list[tuple[int, int]]) -> Stretches:
    found, at = [('"', False)], 0
    for start, end in [*changed, (len(words), len(words))]:
        found += [(_inner(words[at:start]), False), (_inner(words[start:end]), True)]
        at = end
    return tuple((text, mark) for text, mark in (*found, ('"', False)) if text)


def _inner(words: list[str]) -> str:
    return _json("".join(words))[1:-1]


def _stretch(value: Any) -> Stretches:
    return ((_json(value), True),)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _written(part: str | int | None) -> str:
    if part is None:
        return f" ({JSON.upper()})"
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part if _PLAIN_NAME.fullmatch(part) else _json(part)}"


def _excerpt(stretches: Stretches) -> Stretches:
    return tuple(
        (text if len(text) <= most else f"{text[: most // 2]}…{text[-most // 2 :]}", mark)
        for text, mark in stretches
        for most in (_MOST_SHOWN if mark else 2 * _KEPT,)
    )
