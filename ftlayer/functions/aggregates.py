"""Built-in aggregates: of what types, a record at a time in Python, and of many keys in the C extension's memory.

In Python they are for windows that merge, and what the C extension is compared with. From C they go into a table of
keyed state: looked up once for a key, and written back before a snapshot and when many have changed. So they cost
Python objects for a key that has changed since, not for a record.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ftlayer.common.checks import named_type
from ftlayer.errors import ConfigError
from ftlayer.functions.aggregate_calls import Aggregate
from ftlayer.functions.conversion import VALUES, array_of
from ftlayer.functions.keyed import NAN, Key
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.records.kernels import native
from ftlayer.records.keyhash import key_column

# Aggregates of columns of a certain type: what they give, what they keep, and in which form the C extension has it.
#
# The C extension knows int64, double, decimals of 128 bits, and bytes. Other types are cast to one of these, and back.


MOST_DIGITS = 38
"""Of a decimal."""

MORE_DIGITS = 10
"""A sum of decimals has so many digits more than they have, as Spark's."""

_COUNT_CODE = {True: b"n", False: b"c"}
_CODES = {"sum": b"s", "min": b"<", "max": b">", "mean": b"m"}
_NAMES = "integers, floats, doubles and decimals"
_ORDERED = f"{_NAMES}, booleans, dates, timestamps (microseconds), strings and binary"


@dataclass(frozen=True)
class TypedAggregate:
    """An aggregate of a column of a certain type.

    Attributes:
        call: what the user asked for.
        result: the type that it gives.
        held: the type that the C extension works on; of a count any.
        code, kind, digits: how the C extension is told: `ftlayer._native.Accumulators`.
    """

    call: Aggregate
    result: pa.DataType
    held: pa.DataType

    @property
    def code(self) -> bytes:
        return _CODES.get(self.call.function) or _COUNT_CODE[self.call.column is None]

    @property
    def kind(self) -> bytes:
        if self.call.function == "count":
            return b"-"
        if pa.types.is_decimal(self.held):
            return b"d"
        return {pa.int64(): b"l", pa.float64(): b"g"}.get(self.held, b"z")

    @property
    def digits(self) -> int:
        return self.held.precision if pa.types.is_decimal(self.held) else 0

    @property
    def state(self) -> list[pa.DataType]:
        """The types of the values that are kept: of a mean, sum and number."""
        return [pa.float64(), pa.int64()] if self.call.function == "mean" else [self.result]

    @property
    def state_held(self) -> list[pa.DataType]:
        return [pa.float64(), pa.int64()] if self.call.function == "mean" else [self.held]

    def taken(self, batch: pa.RecordBatch) -> pa.Array:
        """Return what the C extension takes of a batch; of a count of rows any column."""
        if self.call.column is None:
            return batch.column(0)
        column = batch.column(self.call.column)
        return column if self.call.function == "count" else held_as(column, self.held)


def held_as(column: pa.Array, held: pa.DataType) -> pa.Array:
    kind = column.type
    if kind.equals(held):
        return column
    if pa.types.is_date32(kind):
        return column.view(pa.int32()).cast(held)
    if pa.types.is_timestamp(kind):
        return column.view(held)
    # A sum of doubles takes large integers, which are rounded.
    return pc.cast(column, held, safe=False)


def given_as(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Return a column of the C extension as one of the type that a user knows: the way back from `held_as`."""
    if column.type.equals(kind):
        return column
    if pa.types.is_date32(kind):
        return column.cast(pa.int32()).view(kind)
    if pa.types.is_timestamp(kind):
        return column.view(kind)
    return pc.cast(column, kind, safe=False)


@dataclass(frozen=True)
class AggregatePlan:
    """All aggregates of one operator.

    Attributes:
        keys: the key's columns.
        aggregates: in their order.
        input: the schema of what they take.
        output: the key's columns, then one for each aggregate.
    """

    keys: tuple[str, ...]
    aggregates: tuple[TypedAggregate, ...]
    input: pa.Schema
    output: pa.Schema

    @classmethod
    def of(
        cls,
        calls: Sequence[object],
        keys: tuple[str, ...],
        schema: pa.Schema,
        *,
        between: Sequence[pa.Field] = (),
    ) -> AggregatePlan:
        """Find the types of aggregates over records of ``schema``; ``between`` are columns behind the key's.

        Raises `ConfigError` for what is no aggregate, a column that there is not or of a type that it cannot take, and
        two results of one name.
        """
        typed = []
        for call in calls:
            if not isinstance(call, Aggregate):
                raise ConfigError(
                    f"aggregate: expected count(), sum(…), min(…), max(…) or mean(…), got {named_type(call)}; "
                    "or give create, add and schema of an aggregate of your own"
                )
            typed.append(_typed(call, schema))
        nothing = pa.RecordBatch.from_pylist([], schema=schema)
        own = [pa.field(name, key_column(nothing, name).type) for name in keys]
        fields = [*own, *between, *(pa.field(each.call.name, each.result) for each in typed)]
        names = [field.name for field in fields]
        for name in names:
            if [each.lower() for each in names].count(name.lower()) > 1:
                raise ConfigError(
                    f"aggregate: two columns of the result are called {name!r}; name one otherwise: "
                    f"count(…, name='other')"
                )
        return cls(keys, tuple(typed), schema, pa.schema(fields))

    @cached_property
    def state(self) -> pa.Schema:
        """The values that are kept of a key, by numbers."""
        return _numbered([kind for each in self.aggregates for kind in each.state])

    @cached_property
    def state_held(self) -> pa.Schema:
        return _numbered([kind for each in self.aggregates for kind in each.state_held])

    def key_columns(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Return the key's columns, of types that the C extension finds keys by."""
        return [_plain_key(key_column(batch, name)) for name in self.keys]

    def key_results(self, batch: pa.RecordBatch) -> list[pa.Array]:
        return [key_column(batch, name) for name in self.keys]

    def taken(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [each.taken(batch) for each in self.aggregates]
        return pa.RecordBatch.from_arrays(columns, names=[str(place) for place in range(len(columns))])

    def described(self) -> str:
        """Say what is kept: a state of other aggregates, or in another order, is another one."""
        said = []
        for each in self.aggregates:
            of = each.call.column or ""
            said.append(f"{each.call.function}({of}) {', '.join(map(str, each.state))}")
        return "; ".join(said)


def _plain_key(column: pa.Array) -> pa.Array:
    """Return a key's column as one of a type that the C extension knows, whose values are the same in Python."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.string())
    if pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind):
        return column.cast(pa.binary())
    return column.cast(pa.bool_()) if pa.types.is_null(kind) else column


def _numbered(kinds: Sequence[pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(str(place), kind) for place, kind in enumerate(kinds)])


def _typed(call: Aggregate, schema: pa.Schema) -> TypedAggregate:
    if call.column is None:
        return TypedAggregate(call, pa.int64(), pa.int64())
    if call.column not in schema.names:
        raise ConfigError(
            f"{call.function}: there is no column {call.column!r}; there are {', '.join(schema.names)}"
        )
    kind = schema.field(call.column).type
    if call.function == "count":
        return TypedAggregate(call, pa.int64(), pa.int64())
    held = _held(kind)
    if call.function in ("min", "max"):
        if held is None:
            raise _unfit(call, kind, _ORDERED)
        return TypedAggregate(call, kind, held)
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal128(kind)
    if held is None or not is_number:
        raise _unfit(call, kind, _NAMES)
    if call.function == "mean":
        return TypedAggregate(call, pa.float64(), pa.float64())
    if pa.types.is_decimal128(kind):
        held = pa.decimal128(min(MOST_DIGITS, kind.precision + MORE_DIGITS), kind.scale)
    return TypedAggregate(call, held, held)


def _held(kind: pa.DataType) -> pa.DataType | None:
    """Return the type that the C extension has of a column's; None: it cannot take it."""
    if pa.types.is_float32(kind) or pa.types.is_float64(kind):
        return pa.float64()
    if pa.types.is_signed_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_date32(kind):
        return pa.int64()
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return pa.int64()
    return kind if pa.types.is_decimal128(kind) or kind in (pa.string(), pa.binary()) else None


def _unfit(call: Aggregate, kind: pa.DataType, takes: str) -> ConfigError:
    return ConfigError(
        f"{call.function}: column {call.column!r} is {kind}; it takes {takes}: convert it in a map before"
    )


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
    """All aggregates of an operator, for records of the form VALUES. A state is a bare value, or a tuple of several."""

    def __init__(self, plan: AggregatePlan) -> None:
        self._aggregates = [_one_by_one(each) for each in plan.aggregates]
        self._width = len(plan.input)
        self._places = [
            None if each.call.column is None else plan.input.names.index(each.call.column)
            for each in plan.aggregates
        ]
        self._is_bare = len(plan.state) == 1

    def create(self) -> Any:
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
            return OneByOne(
                (0.0, 0),
                lambda old, value: old if value is None else (old[0] + float(value), old[1] + 1),
                lambda a, b: (a[0] + b[0], a[1] + b[1]),
                lambda parts: parts[0] / parts[1] if parts[1] else None,
            )
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


def _is_less(one: Any, other: Any) -> bool:
    return bool(one < other or (other != other and one == one))


@dataclass(frozen=True)
class KeyedAggregate:
    """Built-in aggregates a key: emits for every record its key, and what they are then. ``schema`` is the plan's."""

    uid: str
    plan: AggregatePlan
    keys: tuple[str, ...]
    schema: pa.Schema
    volatile_state: bool = False
    rules: RetryRules = NO_RULES


I32 = npt.NDArray[np.int32]

MOST_CHANGED = 20_000
"""Keys that have changed before they are written back without a snapshot, which would have to wait for it."""

MOST_BYTES = 64 << 20
"""What is kept beside the table; beyond it all of it is written back, and looked up again."""

_SEED = secrets.randbits(64)
_ABSENT = object()

Kept = tuple[native.Accumulators, bytes]
"""What the changes of one batch have replaced."""


class KeyNumbers:
    """The keys of one operator by their numbers (slots), which are given in the order in which keys come."""

    def __init__(self) -> None:
        self._index = native.KeyIndex(_SEED)
        # By slot, one behind the other; each is larger than the next, so that there are few of them.
        self._chunks: list[pa.RecordBatch] = []

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        chunks = sum(int(chunk.nbytes) for chunk in self._chunks)
        return self._index.nbytes + chunks

    def find(self, keys: pa.RecordBatch) -> tuple[I32, list[Key]]:
        """Return the slot of each row's key, int32[n], and the keys that are new: they have the last slots."""
        known = len(self._index)
        slots = np.empty(keys.num_rows, np.int32)
        schema, array = keys.__arrow_c_array__()
        if self._index.find(schema, array, slots) == known:
            return slots, []
        rows = np.flatnonzero(slots >= known)
        _, first = np.unique(slots[rows], return_index=True)
        new = keys.take(pa.array(rows[first]))
        self._append(new)
        return slots, python_keys(new)

    def _append(self, new: pa.RecordBatch) -> None:
        chunks = self._chunks
        chunks.append(new)
        while len(chunks) > 1 and chunks[-2].num_rows <= 2 * chunks[-1].num_rows:
            chunks[-2:] = [pa.concat_batches(chunks[-2:])]

    def of(self, slots: I32) -> list[Key]:
        """Return the keys of slots, which ascend, as state is looked up by them."""
        first = 0
        found: list[Key] = []
        for chunk in self._chunks:
            begin, end = np.searchsorted(slots, [first, first + chunk.num_rows])
            if begin < end:
                found += python_keys(chunk.take(pa.array(slots[begin:end] - first)))
            first += chunk.num_rows
        return found


def python_keys(keys: pa.RecordBatch) -> list[Key]:
    """Return keys as state is looked up by them: bare values, or tuples of several columns; one not-a-number."""
    found = list(VALUES.read(keys))
    if not any(pa.types.is_floating(field.type) for field in keys.schema):
        return found
    if keys.num_columns == 1:
        return [NAN if key != key else key for key in found]
    return [tuple(NAN if part != part else part for part in key) for key in found]


class AggregateValues:
    """Accumulators of the C extension, and their values as Python has them.

    Attributes:
        accumulators: by slot.
    """

    def __init__(self, plan: AggregatePlan) -> None:
        self._plan = plan
        codes, kinds = (
            b"".join(part) for part in zip(*[(a.code, a.kind) for a in plan.aggregates], strict=True)
        )
        self.accumulators = native.Accumulators(codes, kinds, bytes(a.digits for a in plan.aggregates))

    def add(
        self, slots: I32, batch: pa.RecordBatch, *, results: bool, undo: bool
    ) -> tuple[list[pa.Array], list[tuple[int, int]], Kept | None]:
        """Add rows, the slot of each row's key given.

        Returns:
            A column for each aggregate, with what it is behind each row (if ``results``); pairs of a row, and the
            aggregate that cannot take it (such a row changes nothing); and for `restore` what was (if ``undo``).
        """
        taken = self._plan.taken(batch)
        schema, array = taken.__arrow_c_array__()
        columns, failures, kept = self.accumulators.add(slots, schema, array, results, undo)
        found = [
            given_as(array_of(each.held, len(slots), column), each.result)
            for each, column in zip(self._plan.aggregates, columns or (), strict=bool(columns))
        ]
        return found, failures, None if kept is None else (self.accumulators, kept)

    def load(self, slots: I32, values: list[Any]) -> None:
        plan = self._plan
        parts = [values] if len(plan.state) == 1 else zip(*values, strict=True)
        columns = [
            held_as(pa.array(part, given.type), held.type)
            for part, given, held in zip(parts, plan.state, plan.state_held, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=plan.state_held)
        schema, array = batch.__arrow_c_array__()
        self.accumulators.load(slots, schema, array)

    def state_of(self, slots: I32) -> list[Any]:
        plan = self._plan
        columns = [
            given_as(array_of(held.type, len(slots), column), given.type)
            for held, given, column in zip(
                plan.state_held, plan.state, self.accumulators.export(slots), strict=True
            )
        ]
        return list(VALUES.read(pa.RecordBatch.from_arrays(columns, schema=plan.state)))

    def take_changed(self) -> I32:
        """Return the slots that have changed since the last time, ascending."""
        return np.sort(np.frombuffer(self.accumulators.take_dirty(), np.int32))


class AggregateState(Protocol):
    def get(self, key: Key, default: Any, /) -> Any:
        """Return a key's aggregates, or the default."""

    def update(self, pairs: Iterable[tuple[Key, Any]], /) -> None:
        """Set the aggregates of keys."""


class AggregateTable:
    """The running aggregates of an operator's keys: `ftlayer.functions.keyed.StateCache`.

    Attributes:
        plan: which these are.
    """

    def __init__(self, plan: AggregatePlan, table: AggregateState) -> None:
        """``table`` is the keyed state; values are written into it by `write_back`."""
        self.plan = plan
        self._table = table
        self._begin()

    def _begin(self) -> None:
        self._keys = KeyNumbers()
        self._values = AggregateValues(self.plan)

    def add(
        self, batch: pa.RecordBatch, *, undo: bool
    ) -> tuple[list[pa.Array], list[tuple[int, int]], Kept | None]:
        slots, _ = self.number(self.plan.key_columns(batch))
        return self._values.add(slots, batch, results=True, undo=undo)

    def number(self, columns: list[pa.Array]) -> tuple[I32, npt.NDArray[np.bool_]]:
        """Return the slot of each row's key, int32[n], and of the keys that are new whether the state had them.

        New keys have the last slots, in the order in which they come.
        """
        keys = pa.RecordBatch.from_arrays(columns, names=[str(place) for place in range(len(columns))])
        slots, new = self._keys.find(keys)
        self._values.accumulators.reserve(len(self._keys))
        return slots, self._look_up(new)

    def _look_up(self, new: list[Key]) -> npt.NDArray[np.bool_]:
        get = self._table.get
        found = [get(key, _ABSENT) for key in new]
        there = np.array([value is not _ABSENT for value in found], np.bool_)
        if there.any():
            slots = np.arange(len(self._keys) - len(new), len(self._keys), dtype=np.int32)
            self._values.load(slots[there], [value for value in found if value is not _ABSENT])
        return there

    def compact(self) -> None:
        """Give memory of texts back that were replaced. Not while a batch may be taken back."""
        self._values.accumulators.compact()

    def restore(self, kept: Kept, _: object) -> None:
        """Take the changes of a batch back, the latest first."""
        accumulators, before = kept
        assert accumulators is self._values.accumulators, "a batch is in its undo log and was written back"
        accumulators.restore(before)

    def write_back(self) -> None:
        changed = self._values.take_changed()
        if len(changed):
            self._table.update(zip(self._keys.of(changed), self._values.state_of(changed), strict=True))

    def tend(self) -> None:
        """Write back what is many, and give up what is large. Not while a batch may be taken back."""
        accumulators = self._values.accumulators
        if accumulators.dirty > MOST_CHANGED:
            self.write_back()
        if accumulators.nbytes + self._keys.nbytes > MOST_BYTES:
            self.write_back()
            self._begin()
