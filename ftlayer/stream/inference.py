"""The schema of an iterable, read off its first records where they say enough."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from itertools import islice
from typing import Any

import pyarrow as pa

from ftlayer.errors import ConfigError
from ftlayer.stream.dataframes import known_type

FIRST = 1_000
"""Records that are looked at."""

_REMEDY = "give schema=…, a pyarrow.Schema or text like 'id bigint, name string'"
_DECIMAL = pa.decimal128(38, 18)


def schema_of_first(partitions: Sequence[Callable[[], Iterable[Any]]]) -> pa.Schema:
    """Return the schema of an iterable source's records; `ConfigError` with the remedy where they do not say it.

    Columns are called as in namedtuples and `Row`s, else ``_1``, ``_2``, …, as Spark calls them; a bare value's is
    ``value``. A function is not called: it may block, or have an effect.
    """
    first: list[Any] = []
    for partition in partitions:
        items = getattr(partition, "items", None)
        if not isinstance(items, Iterable) or not isinstance(items, Sized):
            raise _unknown("a function is called in the slots alone, and is not asked for its records here")
        first += islice(items, FIRST - len(first))
    if not first:
        raise _unknown("there is no record to read it off")
    if isinstance(first[0], pa.RecordBatch):
        return first[0].schema
    names, columns = _columns(first)
    return pa.schema([(name, _type(name, values)) for name, values in zip(names, columns, strict=True)])


def _columns(records: list[Any]) -> tuple[list[str], list[Sequence[Any]]]:
    tuples = [isinstance(record, tuple) for record in records]
    if not any(tuples):
        return ["value"], [records]
    if not all(tuples):
        raise _unknown("its first records are tuples and others")
    lengths = sorted(set(map(len, records)))
    if len(lengths) > 1:
        raise _unknown(f"its first records have {' and '.join(map(str, lengths))} values")
    if lengths == [0]:
        raise _unknown("its first records have no values")
    names = getattr(records[0], "_fields", None) or getattr(records[0], "__fields__", None)
    names = names or [f"_{place + 1}" for place in range(lengths[0])]
    return list(names), list(zip(*records, strict=True))


def _type(name: str, values: Sequence[Any]) -> pa.DataType:
    kinds = {type(value) for value in values if value is not None}
    if not kinds:
        raise _unknown(f"column {name!r} is null in the first {len(values)} records")
    try:
        if bool in kinds and len(kinds) > 1:
            raise TypeError("true and false among other values")
        found = pa.array(values).type
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise _unknown(f"column {name!r}: {error}") from error
    return _DECIMAL if pa.types.is_decimal(found) else known_type(found)


def _unknown(why: str) -> ConfigError:
    return ConfigError(f"source: its schema is not known: {why}; {_REMEDY}")
