"""Built-in aggregates a record at a time, in Python: for windows that merge, and what the C extension is compared with.

The state of a key, or of a window, is what `AggregatePlan.state` says: a bare value, or a tuple of several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any

import pyarrow as pa

from ftlayer.functions.aggregates.typed import AggregatePlan, TypedAggregate

LEAST_INT, MOST_INT = -(2**63), 2**63 - 1

_EXACT = Context(prec=100)
"""Digits enough for any sum of two decimals of 128 bits."""


@dataclass(frozen=True)
class OneByOne:
    """One aggregate: ``add(parts, value)`` and ``merge(parts, others)`` return what is kept then.

    ``result(parts)`` is what it is.
    """

    create: tuple[Any, ...]
    add: Callable[[tuple[Any, ...], Any], tuple[Any, ...]]
    merge: Callable[[tuple[Any, ...], tuple[Any, ...]], tuple[Any, ...]]
    result: Callable[[tuple[Any, ...]], Any]


class AggregatesPerRecord:
    """All aggregates of an operator, for records of the form VALUES."""

    def __init__(self, plan: AggregatePlan) -> None:
        self._aggregates = [_one_by_one(each) for each in plan.aggregates]
        self._width = len(plan.input)
        self._places = [
            None if each.call.column is None else plan.input.names.index(each.call.column)
            for each in plan.aggregates
        ]
        self._is_bare = len(plan.state) == 1

    def create(self) -> Any:
        """Return the state without any record."""
        return self._joined([each.create for each in self._aggregates])

    def add(self, state: Any, record: Any) -> Any:
        """Return the state with one more record; `OverflowError` if a sum would be too large."""
        values = [self._value(record, place) for place in self._places]
        parts = zip(self._aggregates, self._split(state), values, strict=True)
        return self._joined([each.add(part, value) for each, part, value in parts])

    def merge(self, state: Any, other: Any) -> Any:
        """Return the state of two sets of records; the results are those of ``add`` save for roundings of doubles."""
        parts = zip(self._aggregates, self._split(state), self._split(other), strict=True)
        return self._joined([each.merge(part, more) for each, part, more in parts])

    def results(self, state: Any) -> tuple[Any, ...]:
        return tuple(
            each.result(part) for each, part in zip(self._aggregates, self._split(state), strict=True)
        )

    def _value(self, record: Any, place: int | None) -> Any:
        if place is None:
            return True
        return record if self._width == 1 else record[place]

    def _joined(self, parts: list[tuple[Any, ...]]) -> Any:
        if self._is_bare:
            return parts[0][0]
        return tuple(value for part in parts for value in part)

    def _split(self, state: Any) -> list[tuple[Any, ...]]:
        values = (state,) if self._is_bare else state
        parts, place = [], 0
        for each in self._aggregates:
            parts.append(values[place : place + len(each.create)])
            place += len(each.create)
        return parts


def overflow_error(aggregate: TypedAggregate) -> OverflowError:
    """Return the error of a record with which a sum, or a column of results, would be too large."""
    call = aggregate.call
    if call.function == "sum":
        return OverflowError(f"the sum of {call.column!r} would be beyond {aggregate.result}")
    return OverflowError(
        f"the column {call.name!r} of this batch's results would be beyond 2 GiB; use smaller batches (batch_rows)"
    )


def _one_by_one(aggregate: TypedAggregate) -> OneByOne:
    match aggregate.call.function:
        case "count":
            return OneByOne(
                (0,), lambda old, value: (old[0] + (value is not None),), lambda a, b: (a[0] + b[0],), _only
            )
        case "sum":
            return _folded(_adding(aggregate))
        case "mean":
            return OneByOne((0.0, 0), _add_to_mean, lambda a, b: (a[0] + b[0], a[1] + b[1]), _mean)
        case "min":
            return _folded(lambda old, value: value if _is_less(value, old) else old)
    return _folded(lambda old, value: value if _is_less(old, value) else old)


def _folded(fold: Callable[[Any, Any], Any]) -> OneByOne:
    """Return an aggregate that is one of its values, or made of two of them; None while there is none."""

    def put(old: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
        if value is None:
            return old
        return (value if old[0] is None else fold(old[0], value),)

    return OneByOne((None,), put, lambda one, other: put(one, other[0]), _only)


def _only(parts: tuple[Any, ...]) -> Any:
    return parts[0]


def _adding(aggregate: TypedAggregate) -> Callable[[Any, Any], Any]:
    if pa.types.is_floating(aggregate.result):
        return lambda old, value: old + value

    def add(old: Any, value: Any) -> Any:
        if isinstance(old, Decimal):
            total: Any = _EXACT.add(old, value)
            is_beyond = total.copy_abs() >= Decimal(10) ** (aggregate.held.precision - aggregate.held.scale)
        else:
            total = old + value
            is_beyond = not LEAST_INT <= total <= MOST_INT
        if is_beyond:
            raise overflow_error(aggregate)
        return total

    return add


def _add_to_mean(old: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    return old if value is None else (old[0] + float(value), old[1] + 1)


def _mean(parts: tuple[Any, ...]) -> float | None:
    total, number = parts
    return total / number if number else None


def _is_less(one: Any, other: Any) -> bool:
    return bool(one < other or (other != other and one == one))
