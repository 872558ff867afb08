"""The interface of a state backend for functions with keys (`ftlayer.state`), operator by operator.

Every table is named, and its entries belong to one key each. Keys are hashable Python values: that of the key's
column, or a tuple of several.
"""

from __future__ import annotations

import copy
import datetime as dt
from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from pickle import dumps, loads
from typing import Any, Protocol
from uuid import UUID

import numpy as np
import pyarrow as pa

from ftlayer.common.checks import Duration, check_bool, duration_ms, known_options
from ftlayer.common.printable import described
from ftlayer.errors import ConfigError, ResultRowError, StateSerializationError
from ftlayer.functions.conversion import Form, concat, misfit_text, schema_text, to_batch
from ftlayer.functions.failures import failure_of, raise_signalled
from ftlayer.functions.retry_rules import RetryRules
from ftlayer.records.failures import RowFailure


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


def misfit_of(
    row: int,
    uid: str,
    gave: str,
    schema: pa.Schema,
    error: BaseException,
    rules: RetryRules,
    wanted: str = "",
) -> RowFailure:
    """Return the failure of an input row for which an operator ``gave`` ("returned", say) what does not fit."""
    said = f"what {uid!r} {gave} does not fit its schema ({schema_text(schema)}): {misfit_text(error)}"
    return failure_of(row, uid, ResultRowError(f"{said}; {wanted}" if wanted else said), rules)


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


# Keyed state that lives for a time. A value with a time to live is stored as a *stamped* one: the time at which it is
# over (processing time, ms since 1970) and the value. Each item of a list or a mapping has its own. Tables of stamped
# values have names of their own, so that a program that takes the time to live off, or puts it on, never reads one as
# the other.


SUFFIX = " (ttl)"
"""Of the names of tables with stamped values."""

Stamped = tuple[int, Any]
"""When it is over, and the value."""


@known_options
@dataclass(frozen=True)
class StateTtl:
    """How long a value is there after it was written: `StateTtlConfig` in Flink.

    By processing time. What is over is never returned; it is removed when its key is used the next time, and is left
    out of snapshots, save where they are copies of what a backend has on its disk. ``time`` may be changed between two
    runs: what is stored keeps the time that it was written with.

    Attributes:
        time: a duration.
        refresh_on_read: reading begins the time anew, as writing does.
    """

    time: Duration
    refresh_on_read: bool = False

    def __post_init__(self) -> None:
        duration_ms(self.time, "StateTtl: time")
        check_bool(self.refresh_on_read, "StateTtl: refresh_on_read")


def lifetime_ms(ttl: StateTtl) -> int:
    return duration_ms(ttl.time, "StateTtl: time")


def is_expired(stamped: Stamped, now_ms: int) -> bool:
    return stamped[0] <= now_ms


def table_name(name: str, ttl: StateTtl | None) -> str:
    """Return the table of a state of this name; ConfigError for one that is kept for others."""
    if name.endswith(SUFFIX):
        raise ConfigError(
            f"a state cannot be named {name!r}: names that end so are those of states with a time to live"
        )
    return name if ttl is None else name + SUFFIX


def plain_name(table: str) -> str:
    return table.removesuffix(SUFFIX)


def holds_stamped(table: str) -> bool:
    """Whether the values of a table of this name (or its lists' and mappings' items) are stamped."""
    return table.endswith(SUFFIX)


Key = Hashable


class ListTable(Protocol):
    """A list for each key. A key without values has no entry."""

    def size(self, key: Key) -> int:
        """Return how many values there are."""

    def get(self, key: Key) -> list[Any]:
        """Return a list of the values, the caller's own."""

    def extend(self, key: Key, values: Iterable[Any]) -> None:
        """Add values behind those that are there."""

    def clear(self, key: Key) -> None:
        """Remove the key's entry."""


class MapTable(Protocol):
    """A mapping for each key. A key without items has no entry."""

    def keys(self) -> Iterable[Key]:
        """Return the keys that have items, in any order; not to be used behind the next change."""

    def items(self, key: Key) -> Mapping[Any, Any]:
        """Return the items, not to be changed, and valid until the next change."""

    def put(self, key: Key, field: Any, value: Any) -> None:
        """Set one item."""

    def remove(self, key: Key, field: Any) -> None:
        """Remove one item; KeyError if there is none."""

    def clear(self, key: Key) -> None:
        """Remove the key's entry."""


class StateCache(Protocol):
    """Has some of an operator's state in a form of its own, and changes it there. In the task's thread."""

    def write_back(self) -> None:
        """Put what has changed into the tables: a snapshot is about to be taken."""

    def tend(self) -> None:
        """Put some of it there, between batches, so that there is never much to be put at once."""


class KeyedState(Protocol):
    """The state of one operator in one subtask.

    A name belongs to one kind of table; ConfigError if it is asked for as another kind.
    """

    def values(self, name: str) -> MutableMapping[Key, Any]:
        """Return the table of single values of this name, the same at every call."""

    def lists(self, name: str) -> ListTable:
        """Return the table of lists of this name."""

    def maps(self, name: str) -> MapTable:
        """Return the table of mappings of this name."""

    def describe(self, name: str, values: str) -> None:
        """Say what the values of a table are, in words that a snapshot keeps.

        `IncompatibleCheckpointError` where a checkpoint that is restored has other words, and no migration.
        """

    def cache(self, cache: StateCache) -> None:
        """Have ``cache`` written back before snapshots, and tended, by backends that take some."""


class TimerQueue(Protocol):
    """The timers of one operator in one subtask, of one kind. There is at most one for a key and a time.

    Times are milliseconds since 1970.
    """

    @property
    def count(self) -> int:
        """How many there are."""

    def add(self, key: Key, time_ms: int) -> bool:
        """Set a timer; whether there was none."""

    def delete(self, key: Key, time_ms: int) -> bool:
        """Remove a timer, if there is one; whether there was."""

    def take(self, until_ms: int) -> tuple[int, list[Key]] | None:
        """Take out the earliest timers up to a time: their time, and keys in the order of setting."""

    def next_ms(self) -> int | None:
        """Return the earliest timer's time; None if there is none."""


class Timers(Protocol):
    """The timers of one operator in one subtask: the watermark takes those of event time, the clock the others."""

    @property
    def event(self) -> TimerQueue: ...

    @property
    def processing(self) -> TimerQueue: ...


class OperatorStates(Protocol):
    """State of one operator in one subtask that belongs to no key. The same object at every call for a name.

    A name belongs to one kind of state; ConfigError if it is asked for as another kind.
    """

    def list(self, name: str, *, union: bool = False) -> list[Any]:
        """Return a list; another parallelism deals its items out, or (``union``) gives all items to all."""

    def broadcast(self, name: str) -> dict[Any, Any]:
        """Return a mapping that every subtask has to fill alike."""

    def log_changes(self, logged: Callable[[Any], Any]) -> None:
        """Give out ``logged(state)`` in the place of each list and mapping; called before the first is asked for."""


class Backend(Protocol):
    """Where operators get their state and timers.

    Attributes:
        copies: whether what is in state is read by others, or taken back: what a function may keep is to be a copy.
    """

    @property
    def copies(self) -> bool:
        """See the class."""

    def state(self, uid: str) -> KeyedState:
        """Return the state of an operator; called once for each."""

    def timers(self, uid: str) -> Timers:
        """Return the timers of an operator; called once for each."""

    def operators(self, uid: str) -> OperatorStates:
        """Return the state of an operator that belongs to no key; called once for each."""
