"""Records between Arrow and Python: what cannot be converted is found, row by row, and never bent to fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from difflib import get_close_matches
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, Protocol, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.lib import string_to_tzinfo

from ftlayer.common.checks import named_type, shown
from ftlayer.common.printable import text_of
from ftlayer.functions.steps import Record
from ftlayer.records.kernels import native

# Records of plain values, between Arrow and Python by the C extension: several times as fast as by Arrow's own way.
#
# Plain are ``None`` and values of exactly the types bool, int, float, str and bytes, in columns of these kinds, and
# tuples of them. What is not plain is for the caller to convert: nothing is bent here to fit.


PLAIN_CODES = {
    pa.bool_(): b"b",
    pa.int8(): b"c",
    pa.int16(): b"s",
    pa.int32(): b"i",
    pa.int64(): b"l",
    pa.float64(): b"g",
    pa.string(): b"u",
    pa.binary(): b"z",
}
"""The C extension's letters for the types of plain columns."""
OTHER_CODE = b"O"
"""The letter of all others: their values stay Python objects."""


def read_plain(batch: pa.RecordBatch) -> list[Any] | None:
    """Return the rows as tuples in column order, those of one column as bare values; None if a type is not plain.

    Raises ValueError for text that is not UTF-8.
    """
    schema, array = batch.__arrow_c_array__()
    return native.read_records(schema, array, 0, batch.num_rows)


def plain_columns(rows: Sequence[Any], schema: pa.Schema) -> list[pa.Array | list[Any]] | None:
    """Convert tuples, or the bare values of a single column.

    Returns:
        A column a field: as an Arrow array, or as a list of values where the field's type is not plain. None if a
        value of a plain column is not plain, out of range, or null where it may not be; or if no column is plain.
    """
    codes = codes_of(schema)
    if not codes.strip(OTHER_CODE) or not isinstance(rows, list | tuple):
        return None
    columns = native.write_records(rows, codes, bytes(field.nullable for field in schema))
    if columns is None:
        return None
    return [array_of(field.type, len(rows), column) for field, column in zip(schema, columns, strict=True)]


def codes_of(schema: pa.Schema) -> bytes:
    return b"".join(PLAIN_CODES.get(field.type, OTHER_CODE) for field in schema)


def array_of(
    kind: pa.DataType, rows: int, column: tuple[bytes | None, bytes | list[Any], bytes | None, int]
) -> pa.Array | list[Any]:
    validity, values, text, nulls = column
    if isinstance(values, list):
        return values
    buffers = [None if validity is None else pa.py_buffer(validity), pa.py_buffer(values)]
    if text is not None:
        buffers.append(pa.py_buffer(text))
    return cast(pa.Array, pa.Array.from_buffers(kind, rows, buffers, nulls))


def raw_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same layout whose every value Python can hold."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind) or pa.types.is_time64(kind):
        return pa.int64()
    if pa.types.is_date32(kind):
        return pa.int32()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(raw_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(raw_type(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(raw_type(kind.key_type), raw_type(kind.item_type))
    return kind


class Form(Protocol):
    def read(self, batch: pa.RecordBatch) -> Sequence[Any]:
        """Return the rows as records; one of `UNREADABLE` if Python cannot hold a value of them."""

    def columns(
        self, rows: Sequence[Any], schema: pa.Schema, *, lax: bool = False
    ) -> Sequence[Sequence[Any] | pa.Array]:
        """Return the columns of records, to be converted as the schema says; TypeError for what is no record.

        One that is an Arrow array fits its field already. ``lax``: keys that are no column are left out.
        """

    def results(self, returned: Any) -> Iterable[Any]:
        """Return what a flat_map returned, to iterate over; TypeError for what is not meant as many records."""

    def expected(self, schema: pa.Schema) -> str:
        """Say what a function has to return."""


NO_RECORDS = (str, bytes, dict)
"""Types that can be iterated over, and are hardly meant as many records."""

_EPOCH = datetime(1970, 1, 1)
_UTC = string_to_tzinfo("UTC")

UNREADABLE = (ValueError, OverflowError, pa.ArrowException)
"""Spark takes strings that are not UTF-8, and dates past the year 9999."""


class _Dicts:
    """A dict from column to value. A column that a dict lacks is null."""

    def read(self, batch: pa.RecordBatch) -> Sequence[Record]:
        rows: list[Record] = batch.to_pylist()
        return rows

    def columns(
        self, rows: Sequence[Any], schema: pa.Schema, *, lax: bool = False
    ) -> Sequence[Sequence[Any]]:
        for kind in set(map(type, rows)):
            if not issubclass(kind, Mapping):
                raise TypeError(f"a {kind.__name__} is not a dict")
        return _fields_of(rows, schema.names, "column", lax=lax)

    def results(self, returned: Any) -> Iterable[Any]:
        # An iterator may yield one dict again and again, changed.
        if isinstance(returned, list | tuple):
            return returned
        return (result.copy() if type(result) is dict else result for result in returned)

    def expected(self, schema: pa.Schema) -> str:
        return "a function returns a dict with these columns (flat_map: an iterable of them)"


class _Values:
    """The bare value of a single column, a tuple in the columns' order of several."""

    def read(self, batch: pa.RecordBatch) -> Sequence[Any]:
        plain = read_plain(batch)
        if plain is not None:
            return plain
        columns = [python_values(column) for column in batch.columns]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def columns(
        self, rows: Sequence[Any], schema: pa.Schema, *, lax: bool = False
    ) -> Sequence[Sequence[Any] | pa.Array]:
        plain = plain_columns(rows, schema)
        if plain is not None:
            return plain
        width = len(schema)
        if width == 1:
            return [rows]
        if not rows:
            return [()] * width
        kinds = set(map(type, rows))
        for kind in kinds:
            if not issubclass(kind, tuple):
                raise TypeError(f"a {kind.__name__} is not a tuple of {width} values")
        if kinds != {tuple}:
            rows = [in_order(row, schema.names) for row in rows]
        for length in set(map(len, rows)):
            if length != width:
                raise TypeError(f"a tuple of {length} values is not one of {width}")
        return [list(map(itemgetter(place), rows)) for place in range(width)]

    def results(self, returned: Any) -> Iterable[Any]:
        if isinstance(returned, NO_RECORDS):
            raise TypeError(f"expected an iterable of records, got {named_type(returned)}; wrap it in a list")
        results: Iterable[Any] = returned
        return results

    def expected(self, schema: pa.Schema) -> str:
        one = "the bare value" if len(schema) == 1 else f"a tuple of {len(schema)} values in this order"
        return f"a function returns {one} (flat_map and process: an iterable of them)"


DICTS: Form = _Dicts()
VALUES: Form = _Values()


def records_of(batch: pa.RecordBatch) -> Sequence[Record | Exception]:
    return records_in_form(batch, DICTS)


def records_in_form(batch: pa.RecordBatch, form: Form) -> Sequence[Any]:
    """Return the rows as records; in the place of one that Python cannot hold, an `Exception` that says why."""
    try:
        return form.read(batch)
    except UNREADABLE:
        return [_record(batch.slice(row, 1), form) for row in range(batch.num_rows)]


def _record(row: pa.RecordBatch, form: Form) -> Any:
    try:
        return form.read(row)[0]
    except UNREADABLE as error:
        name = next((name for name in row.schema.names if not _is_readable(row.column(name))), "?")
        return ValueError(f"column {name!r} of the record cannot be read in Python: {text_of(error)}")


def _is_readable(column: pa.Array) -> bool:
    try:
        python_values(column)
    except UNREADABLE:
        return False
    return True


def python_values(column: pa.Array) -> list[Any]:
    """Return a column's values as its ``to_pylist`` does; timestamps, which that takes microseconds for, sooner."""
    kind = column.type
    # Python has no nanoseconds.
    if not pa.types.is_timestamp(kind) or kind.unit == "ns":
        values: list[Any] = column.to_pylist()
        return values
    since = column.to_numpy(zero_copy_only=False).view(f"m8[{kind.unit}]").tolist()
    # NumPy has numbers for what is too far for Python, and takes the least of all for a null.
    if int in set(map(type, since)) or since.count(None) != column.null_count:
        raise OverflowError("a time lies outside the years 1 to 9999")
    epoch = _EPOCH if kind.tz is None else _EPOCH.replace(tzinfo=_UTC)
    times = [None if span is None else epoch + span for span in since]
    if kind.tz is None or kind.tz == "UTC":
        return times
    zone = string_to_tzinfo(kind.tz)
    return [time and time.astimezone(zone) for time in times]


def to_batch(
    rows: Sequence[Any], schema: pa.Schema, form: Form = DICTS, *, lax: bool = False
) -> pa.RecordBatch:
    """Convert records of a form; ``lax``: keys that are no column are left out.

    Raises `TypeError`, `ValueError` or an Arrow error for what does not fit, where Arrow's own conversion takes
    much silently: see `check_values`.
    """
    columns = []
    for field, values in zip(schema, form.columns(rows, schema, lax=lax), strict=True):
        columns.append(values if isinstance(values, pa.Array) else column_of(values, field, lax=lax))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def column_of(values: Sequence[Any], field: pa.Field, *, lax: bool = False) -> pa.Array:
    check_values(values, field.type, f"column {field.name!r}", lax=lax)
    try:
        column = pa.array(values, field.type)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        got = f"got {shown(values[0])}: " if len(values) == 1 else ""
        raise TypeError(f"column {field.name!r} ({field.type}): {got}{text_of(error)}") from error
    if not field.nullable and column.null_count:
        raise ValueError(f"column {field.name!r} is null and may not be")
    return column


def _fields_of(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], what: str, *, lax: bool
) -> list[list[Any]]:
    """Return the values of dicts by name; TypeError for a key that is none of ``names``, but where ``lax``."""
    complete = set(map(len, rows)) <= {len(names)}
    columns = []
    for name in names:
        try:
            columns.append(list(map(itemgetter(name), rows)))
        except KeyError:
            complete = False
            columns.append([row.get(name) if type(row) is dict else _item(row, name) for row in rows])
    if not complete and not lax:
        known = set(names)
        for row in rows:
            for key in row:
                if key not in known:
                    raise TypeError(no_such(what, key, names))
    return columns


def _item(row: Mapping[str, Any], name: str) -> Any:
    # One of a kind that makes what it lacks (a defaultdict) makes it whichever other rows are beside it.
    try:
        return row[name]
    except KeyError:
        return None


def no_such(what: str, key: object, names: Sequence[str]) -> str:
    """Say that a key names no ``what``, and which one may be meant."""
    meant = get_close_matches(str(key), names, 1)
    hint = f", did you mean {meant[0]!r}?" if meant else ""
    return f"there is no {what} {key!r}{hint} (extra_keys='ignore' leaves such keys out)"


def in_order(row: Any, names: Sequence[str]) -> Any:
    """Return a tuple that has names of its own (a `Row`, a namedtuple) in the columns' order.

    A namedtuple whose names are others is taken by position. Raises TypeError for what would put a value of one column
    into another.
    """
    of_row = getattr(row, "__fields__", None)
    own = list(getattr(row, "_fields", ()) if of_row is None else of_row)
    if not own or own == names:
        return row
    if sorted(own) == sorted(names):
        return tuple(row[own.index(name)] for name in names)
    if of_row is not None or any(
        name in names and [name] != list(names[at : at + 1]) for at, name in enumerate(own)
    ):
        raise TypeError(f"a {type(row).__name__} of {', '.join(own)} is not one of {', '.join(names)}")
    return row


_FITS: dict[int, set[type]] = {
    kind.id: {*classes, type(None)}
    for kind, classes in (
        (pa.bool_(), (bool,)),
        (pa.int64(), (int,)),
        (pa.int32(), (int,)),
        (pa.float64(), (float, int)),
        (pa.string(), (str,)),
        (pa.binary(), (bytes, bytearray)),
        (pa.date32(), (date,)),
        (pa.decimal128(1), (Decimal, int)),
    )
}
"""Of these very classes Arrow loses nothing, or it raises."""
_NO_CLASSES: set[type] = {type(None)}
_OCTETS = (str, bytes, bytearray, memoryview)
_WHOLE = (int, np.integer, type(None), pa.Scalar)
_TIMES = (
    (pa.types.is_duration, (timedelta, np.timedelta64, pa.Scalar)),
    (pa.types.is_time, (time, pa.Scalar)),
    (pa.types.is_temporal, (date, np.datetime64, pa.Scalar)),
)


def check_values(values: Sequence[Any], kind: pa.DataType, what: str, *, lax: bool = False) -> None:
    """Raise `TypeError` or `ValueError` for a value that Arrow would bend to fit a type, in nested ones as well.

    ``docs/reference/values.md`` has the rules. ``lax``: keys of dicts that are no field are left out.
    """
    found = set(map(type, values))
    if found <= _FITS.get(kind.id, _NO_CLASSES):
        return
    found.discard(type(None))
    types = pa.types
    if types.is_integer(kind):
        _refuse(found, (np.bool_, np.datetime64, np.timedelta64), kind, what)
        if any(not issubclass(each, _WHOLE) for each in found):
            _check_whole(values, what)
    elif types.is_floating(kind):
        _refuse(found, (bool, np.bool_), kind, what)
        for value in values if np.uint64 in found else ():
            if isinstance(value, np.uint64) and value > 1 << 53:  # Arrow takes its highest bit for a sign
                raise ValueError(f"{what} is {kind}, which does not hold {value!r}")
        if kind.bit_width < 64 and pc.any(pc.is_inf(pa.array(values, kind))).as_py():
            check_finite(pa.array(values, pa.float64()), kind, what)
    elif kind_of(kind) == "text":
        _refuse(found, (bytes, bytearray, memoryview), kind, what)
    elif kind_of(kind) == "bytes":
        _refuse(found, (str,), kind, what)
    elif isinstance(kind, pa.DictionaryType):
        check_values(values, kind.value_type, what, lax=lax)
    elif types.is_temporal(kind) and not types.is_interval(kind):
        timely = next(classes for of_kind, classes in _TIMES if of_kind(kind))
        _refuse({each for each in found if not issubclass(each, timely)}, (object,), kind, what)
        _check_times(values, found, kind, what)
    elif types.is_map(kind):
        _refuse(found, _OCTETS, kind, what)
        maps = _some(values)
        if found == {dict}:
            keys, items = (list(chain.from_iterable(parts)) for parts in (maps, map(dict.values, maps)))
        else:
            pairs = [
                pair for value in maps for pair in (value.items() if isinstance(value, Mapping) else value)
            ]
            keys, items = (list(map(itemgetter(place), pairs)) for place in (0, 1))
        check_values(keys, kind.key_type, f"{what}: a key", lax=lax)
        check_values(items, kind.item_type, f"{what}: a value", lax=lax)
    elif types.is_struct(kind):
        _refuse(found, _OCTETS, kind, what)
        _check_structs(_some(values), found, kind, what, lax=lax)
    elif types.is_nested(kind) and kind.num_fields == 1:
        _refuse(found, (*_OCTETS, Mapping), kind, what)
        check_values(
            list(chain.from_iterable(_some(values))), kind.field(0).type, f"{what}: an item", lax=lax
        )


def _refuse(found: set[type], classes: tuple[type, ...], kind: pa.DataType, what: str) -> None:
    for each in found:
        if issubclass(each, classes):
            raise TypeError(f"{what} is {kind}, and takes no {each.__name__}")


def _check_whole(values: Sequence[Any], what: str) -> None:
    for value in values:
        # What Arrow calls `int` of: a fraction, a UUID.
        if not isinstance(value, _WHOLE) and value != int(value):
            raise ValueError(f"{what} is an integer, not {value!r}")


def check_finite(wide: pa.Array, kind: pa.DataType, what: str) -> None:
    """Raise `ValueError` where a float of 64 bits would become an infinity in a narrower type."""
    lost = pc.and_(pc.is_inf(wide.cast(kind)), pc.invert(pc.is_inf(wide)))
    if pc.any(lost).as_py():
        raise ValueError(f"{what} is {kind}, which ends before {wide.filter(lost)[0].as_py()!r}")


def _check_times(values: Sequence[Any], found: set[type], kind: pa.DataType, what: str) -> None:
    types = pa.types
    has_zone = (types.is_timestamp(kind) and kind.tz is not None) or types.is_duration(kind)
    zoned = [each for each in found if hasattr(each, "tzinfo")]
    if zoned and not has_zone:
        some = _some(values) if len(zoned) == len(found) else (one for one in values if type(one) in zoned)
        if set(map(attrgetter("tzinfo"), some)) != {None}:
            raise ValueError(f"{what} is {kind}, and would lose the time zone of a value")
    if types.is_date(kind):
        if any(issubclass(each, datetime) for each in found):
            for value in values:
                if isinstance(value, datetime) and value != _midnight(value):
                    raise ValueError(f"{what} is a date, and would lose the time of {value!r}")
        return
    unit = _UNITS[kind.unit]
    if unit > 1 or not found <= _MICROSECONDS:
        for value in values:
            lost = getattr(value, "nanosecond", getattr(value, "nanoseconds", 0)) if unit else 0
            micros = getattr(value, "microsecond", getattr(value, "microseconds", 0))
            if lost or (unit and micros % unit):
                raise ValueError(f"{what} is {kind}, and would lose a part of {value!r}")


_UNITS = {"s": 1_000_000, "ms": 1_000, "us": 1, "ns": 0}
_MICROSECONDS = {datetime, timedelta, time}


def _midnight(value: datetime) -> datetime | None:
    # Of pandas' NaT, which says that it is a datetime, there is none.
    return datetime(value.year, value.month, value.day) if value == value else None


def _some(values: Sequence[Any]) -> list[Any]:
    return [value for value in values if value is not None]


def _check_structs(values: list[Any], found: set[type], kind: pa.DataType, what: str, *, lax: bool) -> None:
    names = [field.name for field in kind]
    dicts = values if found == {dict} else [value for value in values if isinstance(value, Mapping)]
    columns = _fields_of(dicts, names, f"field of {what}:", lax=lax)
    for value in () if dicts is values else values:
        if isinstance(value, tuple) and in_order(value, names) is not value:
            raise TypeError(f"{what} has the fields {', '.join(names)} in another order than {value!r}")
        if isinstance(value, list | tuple):
            pairs = [
                item for item in value if isinstance(item, tuple) and len(item) == 2 and item[0] in names
            ]
            if isinstance(value, list) and not len({item[0] for item in pairs}) == len(value) > 0:
                raise TypeError(f"{what} is {kind}, and takes no list: a dict, or a tuple")
            if len(pairs) == len(value):
                value = [dict(pairs).get(name) for name in names]
            for column, item in zip(columns, value, strict=False):  # Arrow refuses another length
                column.append(item)
    for field, column in zip(kind, columns, strict=True):
        check_values(column, field.type, f"{what}: field {field.name!r}", lax=lax)


def cast_strictly(column: pa.Array, kind: pa.DataType, what: str, *, lax: bool = False) -> pa.Array:
    """Cast a column to a type that means the same; `ValueError` or an Arrow error where it does not, or does not fit.

    A number stays one, a text a text: Arrow itself would parse texts, take ints for times, and cut times to dates.
    ``lax``: structs may have other fields beside, which are left out, and in another order.
    """
    if column.type == kind:
        return column
    if not _means_the_same(column.type, kind, lax):
        raise ValueError(f"{what} is {kind}, not {column.type}")
    if pa.types.is_floating(kind) and kind.bit_width < 64 and pa.types.is_floating(column.type):
        check_finite(column.cast(pa.float64()), kind, what)
    found = cast_by_value(column, kind)
    if pa.types.is_nested(kind) and _infinities(found) > _infinities(column):
        raise ValueError(f"{what} is {kind}, and a number in it is too large for that")
    return found


def _infinities(array: pa.Array) -> int:
    kind, types = array.type, pa.types
    if types.is_floating(kind):
        return pc.sum(pc.is_inf(array)).as_py() or 0
    if types.is_map(kind):
        return _infinities(array.items)
    if types.is_struct(kind):
        return sum(map(_infinities, array.flatten()))
    return _infinities(array.flatten()) if types.is_nested(kind) and kind.num_fields == 1 else 0


def cast_by_value(column: pa.Array, kind: pa.DataType, *, safe: bool = True) -> pa.Array:
    """Cast as Arrow does, but by value: that asks of an integer's type whether a decimal can hold all of it.

    It also refuses each integer beyond 2**24 as a float: what comes back as it was is taken.
    """
    for step in (
        _by_way_of(column.type, kind, _without_booleans),
        _by_way_of(column.type, kind, _wide),
        kind,
    ):
        column = column if column.type == step else _cast(column, step, safe=safe)
    return column


def _cast(column: pa.Array, kind: pa.DataType, *, safe: bool) -> pa.Array:
    try:
        return column.cast(kind, safe=safe)
    except pa.ArrowInvalid:
        if not pa.types.is_integer(column.type) and not pa.types.is_nested(column.type):
            raise
        found = column.cast(kind, safe=False)
        # Else a decimal within others keeps more digits than its type has, and comes back as it was.
        found.validate(full=True)
        if not found.cast(column.type).equals(column):
            raise
        return found


def _without_booleans(old: pa.DataType, new: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_decimal(new) and types.is_boolean(old):
        return pa.int8()
    return pa.int64() if types.is_decimal(old) and types.is_boolean(new) else old


def _wide(old: pa.DataType, new: pa.DataType) -> pa.DataType:
    """Return a decimal that has room for all integers and for the digits behind the point."""
    types = pa.types
    if types.is_decimal(new) and (types.is_integer(old) or types.is_boolean(old)):
        return pa.decimal256(20 + max(new.scale, 0), max(new.scale, 0))
    return _without_booleans(old, new)


def _by_way_of(
    old: pa.DataType, new: pa.DataType, leaf: Callable[[pa.DataType, pa.DataType], pa.DataType]
) -> pa.DataType:
    types = pa.types
    if types.is_struct(old) and types.is_struct(new) and old.num_fields == new.num_fields:
        fields = zip(old, new, strict=True)
        return pa.struct([one.with_type(_by_way_of(one.type, other.type, leaf)) for one, other in fields])
    if types.is_map(old) and types.is_map(new):
        keys, items = (
            _by_way_of(old.key_type, new.key_type, leaf),
            _by_way_of(old.item_type, new.item_type, leaf),
        )
        return pa.map_(keys, old.item_field.with_type(items))
    for is_list, make in ((types.is_list, pa.list_), (types.is_large_list, pa.large_list)):
        if is_list(old) and isinstance(new, pa.ListType | pa.LargeListType):
            return make(old.value_field.with_type(_by_way_of(old.value_type, new.value_type, leaf)))
    return leaf(old, new)


def _means_the_same(old: pa.DataType, new: pa.DataType, lax: bool) -> bool:
    types = pa.types
    if old == new or types.is_null(old):
        return True
    if isinstance(old, pa.DictionaryType):
        return _means_the_same(old.value_type, new, lax)
    if types.is_struct(old) and types.is_struct(new):
        if lax:
            own = {field.name: field.type for field in old}
            return all(
                field.name in own and _means_the_same(own[field.name], field.type, lax) for field in new
            )
        fields = list(zip(old, new, strict=False))
        return old.num_fields == new.num_fields and all(
            one.name == other.name and _means_the_same(one.type, other.type, lax) for one, other in fields
        )
    if types.is_nested(old) or types.is_nested(new):
        return (
            types.is_map(old) is types.is_map(new)
            and 0 < old.num_fields == new.num_fields
            and types.is_nested(new)
            and all(
                _means_the_same(old.field(place).type, new.field(place).type, lax)
                for place in range(old.num_fields)
            )
        )
    kind = kind_of(old)
    if kind == "number" and types.is_decimal(old) != types.is_decimal(new):
        return kind_of(new) == "number" and not (types.is_floating(old) or types.is_floating(new))
    # A reading of a clock without a zone is taken as one of UTC.
    return kind_of(new) == kind or (kind, kind_of(new)) == ("timestamp without a zone", "timestamp")


_BYTES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_binary_view,
    pa.types.is_fixed_size_binary,
)


def kind_of(kind: pa.DataType) -> str:
    """Return what values of a type are, however wide it is; for nested ones, and those that stand alone, their type."""
    types = pa.types
    if types.is_boolean(kind):
        return "boolean"
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        return "number"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "text"
    if any(is_kind(kind) for is_kind in _BYTES):
        return "bytes"
    if types.is_date(kind):
        return "date"
    if types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp without a zone"
    return "time" if types.is_time(kind) else "duration" if types.is_duration(kind) else ""


def concat(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Return the batches as one; raises `pa.ArrowInvalid` where that would pass Arrow's 2 GiB a column."""
    return pa.concat_batches(batches) if batches else pa.RecordBatch.from_pylist([], schema=schema)


def misfit_text(error: BaseException) -> str:
    """Return why a value does not fit, with the name of what a user's object in it has raised."""
    kind, said = type(error), text_of(error)
    return said if issubclass(kind, TypeError | ValueError | OverflowError) else f"{kind.__name__}: {said}"


def schema_text(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
