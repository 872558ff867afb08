"""Which values a user cannot change in place, and copies of those that can be."""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Callable, Sequence
from decimal import Decimal
from enum import Enum
from pickle import dumps, loads
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa

from ftlayer.errors import StateSerializationError
from ftlayer.functions.conversion import Form, concat, to_batch
from ftlayer.functions.failures import raise_signalled
from ftlayer.printable import described


def convert(
    rows: Sequence[Any],
    counts: Sequence[int],
    schema: pa.Schema,
    form: Form,
    fail: Callable[[int, BaseException], None],
    *,
    lax: bool = False,
) -> tuple[pa.RecordBatch, Sequence[int]]:
    """Convert ``rows``, of which ``counts`` says how many belong together; one that does not fit fails its like.

    ``lax`` as for `to_batch`. Calls ``fail(place in counts, error)`` for them, in ascending order. Returns what fits,
    and ``counts`` with 0 for what does not.
    """
    try:
        return to_batch(rows, schema, form, lax=lax), counts
    except BaseException as error:  # noqa: BLE001 - anything may be among what a user's function returned
        raise_signalled(error)
        search = _Search(schema, form, fail, lax=lax)
        search.halves(rows, counts, 0)
        return concat(search.good, schema), search.kept


class _Search:
    def __init__(
        self, schema: pa.Schema, form: Form, fail: Callable[[int, BaseException], None], *, lax: bool
    ) -> None:
        self.good: list[pa.RecordBatch] = []
        self.kept: list[int] = []
        self._schema = schema
        self._form = form
        self._fail = fail
        self._lax = lax

    def halves(self, rows: Sequence[Any], counts: Sequence[int], first: int) -> None:
        half = (len(counts) + 1) // 2
        cut = sum(counts[:half])
        self._part(rows[:cut], counts[:half], first)
        if half < len(counts):
            self._part(rows[cut:], counts[half:], first + half)

    def _part(self, rows: Sequence[Any], counts: Sequence[int], first: int) -> None:
        try:
            self.good.append(to_batch(rows, self._schema, self._form, lax=self._lax))
            self.kept += counts
        except BaseException as error:  # noqa: BLE001 - as above
            raise_signalled(error)
            if len(counts) > 1:
                self.halves(rows, counts, first)
            else:
                self._fail(first, error)
                self.kept.append(0)


NAN = float("nan")
"""The one not-a-number that keys are made of: no other is found again in a dict."""

ATOMS = frozenset({int, float, str, bytes, bool, type(None)})
"""Types of the values that nothing can change, tested first: nearly all state is made of them."""

_IMMUTABLE = ATOMS | {
    complex,
    range,
    Decimal,
    UUID,
    dt.datetime,
    dt.date,
    dt.time,
    dt.timedelta,
    dt.timezone,
    type(Ellipsis),
}
_IMMUTABLE_BASES = (
    Enum,
    np.generic,
    pa.RecordBatch,
    pa.Table,
    pa.Array,
    pa.ChunkedArray,
    pa.Scalar,
    pa.Schema,
)
_STRUCTURED = np.void


def is_immutable(value: Any) -> bool:
    """Return whether nothing in ``value`` can be changed in place. (Objects of users' classes are not trusted.)"""
    kind = type(value)
    if kind in _IMMUTABLE:
        return True
    if kind is tuple or kind is frozenset:
        return all(type(item) in ATOMS or is_immutable(item) for item in value)
    return isinstance(value, _IMMUTABLE_BASES) and not isinstance(value, _STRUCTURED)


def is_marker(value: Any) -> bool:
    """Return whether ``value`` has nothing that can be copied, as ``object()``: programs ask if it is this very one."""
    reduce: Any = type(value).__reduce_ex__
    try:
        return reduce is object.__reduce_ex__ and reduce(value, 4)[1:] == ((type(value),), None, None, None)
    except TypeError:
        # A function, a class, a lock.
        return True


def private_copy(value: Any) -> Any:
    """Return a value that shares nothing with ``value`` that can be changed."""
    kind = type(value)
    if kind is list and _all_immutable(value):
        return value.copy()
    if kind is dict and _all_immutable(value.values()) and _all_immutable(value):
        return value.copy()
    if kind is set:
        # What can be hashed may be an object of the user's; sets of those are rare.
        return value.copy() if _all_immutable(value) else copy.deepcopy(value)
    if is_immutable(value):
        return value
    # What pandas copies deeply goes on to share the objects in its columns.
    return loads(dumps(value)) if kind.__module__.partition(".")[0] == "pandas" else copy.deepcopy(value)


def owned(value: Any) -> Any:
    """Return what a function may keep beside its state: `private_copy`, or `StateSerializationError`."""
    if type(value) in ATOMS:
        return value
    try:
        return private_copy(value)
    except Exception as error:
        raise StateSerializationError(
            f"a {type(value).__name__} in the state cannot be copied ({described(error)}), so it could be "
            "changed behind a snapshot; keep values that can be copied, or say in_place=False where the function "
            "changes none in place"
        ) from error


def owned_all(values: list[Any]) -> list[Any]:
    return values if ATOMS.issuperset(map(type, values)) else list(map(owned, values))


def _all_immutable(values: Any) -> bool:
    return ATOMS.issuperset(map(type, values)) or all(map(is_immutable, values))
