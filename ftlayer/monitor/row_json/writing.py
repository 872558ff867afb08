"""A row of Arrow as JSON has it."""

from __future__ import annotations

import base64
import contextlib
import math
import re
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from ftlayer.errors import ConfigError
from ftlayer.records.sought import is_binary, is_list, is_string

BASE64 = "base64"
"""The key under which bytes stand."""

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
    return {
        name: _plain_of(column, name) for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }


def json_of_column(batch: pa.RecordBatch, name: str) -> Any:
    """Return one column of the one row of ``batch`` as JSON has it, None where there is none. Raises `ConfigError`."""
    place = batch.schema.get_field_index(name)
    return None if place < 0 else _plain_of(batch.column(place), name)


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
