"""The built-in aggregates as a user writes them down: ``ft.count()``, ``ft.sum("x")``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ftlayer.common.checks import check_text, known_options

AggregateName = Literal["count", "sum", "min", "max", "mean"]


@dataclass(frozen=True)
class Aggregate:
    """One aggregate of a column, or the number of rows: what `count`, `sum`, `min`, `max` and `mean` return.

    Attributes:
        function: which it is.
        column: what is aggregated; None: rows are counted.
        name: of the column of results.
    """

    function: AggregateName
    column: str | None
    name: str


def _aggregate(function: AggregateName, column: str | None, name: str | None) -> Aggregate:
    if column is not None or function != "count":
        check_text(column, f"{function}: column", "the name of a column")
    if name is not None:
        check_text(name, f"{function}: name", "the name of a column, or None")
    return Aggregate(function, column, name or (function if column is None else f"{function}_{column}"))


@known_options
def count(column: str | None = None, *, name: str | None = None) -> Aggregate:
    """Count rows; with a column, those in which it is not null: bigint, ``count`` or ``count_<column>``."""
    return _aggregate("count", column, name)


@known_options
def sum(column: str, *, name: str | None = None) -> Aggregate:
    """Add numbers up, without those that are null; null while there are none: ``sum_<column>``.

    Of integers a bigint, of floats and doubles a double, of decimals one with 10 digits more, 38 at most. A record with
    which the sum of integers or decimals would overflow fails with an `OverflowError`, and changes nothing.
    """
    return _aggregate("sum", column, name)


@known_options
def min(column: str, *, name: str | None = None) -> Aggregate:
    """Keep the smallest value that is not null; null while there is none: ``min_<column>``, of the column's type.

    Of numbers, booleans (false < true), dates, timestamps, and strings and binary by their bytes. NaN is larger than
    any number.
    """
    return _aggregate("min", column, name)


@known_options
def max(column: str, *, name: str | None = None) -> Aggregate:
    """Keep the largest value; as `min`: ``max_<column>``."""
    return _aggregate("max", column, name)


@known_options
def mean(column: str, *, name: str | None = None) -> Aggregate:
    """Divide the sum of numbers that are not null by their number, both as doubles: a double, ``mean_<column>``.

    Null while there are none.
    """
    return _aggregate("mean", column, name)


def given_aggregates(*given: object) -> list[object]:
    """Return what was given in the place of functions, where the first is a built-in aggregate; else nothing."""
    return [each for each in given if each is not None] if isinstance(given[0], Aggregate) else []
