"""Python objects as one binary column: msgpack, and never pickle, which would run code when it is read.

Carried are None, bool, int of any size, float, str, bytes, list, dict, tuple, Decimal, datetime, date, time,
timedelta and UUID, nested in each other. What comes back equals what went in and has its type, with two
exceptions: a bytearray comes back as bytes, and a datetime or time in a named zone with its offset alone.
Everything else is refused, subclasses included, since they would come back as something else.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any

import msgpack
import pyarrow as pa

from ftlayer.errors import CodecError

MAX_TUPLE_DEPTH = 64
"""At most this many tuples inside each other: each level calls msgpack again, and the C stack has an end."""


def _with_fold(moment: dt.datetime | dt.time) -> str:
    """ISO 8601 has no word for the second of two equal local times; an f at the end stands for it."""
    return moment.isoformat() + ("f" if moment.fold else "")


def _folded(type_: type[dt.datetime] | type[dt.time], text: str) -> dt.datetime | dt.time:
    return type_.fromisoformat(text.removesuffix("f")).replace(fold=int(text.endswith("f")))


def _timedelta(microseconds: str) -> dt.timedelta:
    return dt.timedelta(microseconds=int(microseconds))


_TUPLE = 1
_EXTENSIONS: dict[type, tuple[int, Callable[[Any], str], Callable[[str], Any]]] = {
    Decimal: (2, str, Decimal),
    dt.datetime: (3, _with_fold, partial(_folded, dt.datetime)),
    dt.date: (4, dt.date.isoformat, dt.date.fromisoformat),
    dt.time: (5, _with_fold, partial(_folded, dt.time)),
    dt.timedelta: (6, lambda delta: str(delta // dt.timedelta(microseconds=1)), _timedelta),
    uuid.UUID: (7, str, uuid.UUID),
    int: (8, hex, lambda digits: int(digits, 16)),
}
_READERS = {code: read for code, _, read in _EXTENSIONS.values()}
_FAULTS = (TypeError, ValueError, OverflowError, RecursionError, InvalidOperation, msgpack.UnpackException)


def pack_objects(objects: Sequence[Any]) -> pa.BinaryArray:
    """Write each object as msgpack into one row of a binary column without nulls.

    Raises CodecError, naming the row, for an object of a type that is not carried, nested too deeply or in
    itself, and when all of them together are beyond the 2 GiB of one column.
    """
    rows = []
    for row, value in enumerate(objects):
        try:
            rows.append(_pack(value))
        except _FAULTS as error:
            raise CodecError(f"object {row} ({type(value).__name__}) cannot be stored: {error}") from error
    column = pa.array(rows, pa.binary())
    if isinstance(column, pa.ChunkedArray):
        raise CodecError(f"{len(rows)} objects take more than 2 GiB; store them in smaller batches")
    return column


def unpack_objects(column: pa.BinaryArray) -> list[Any]:
    """Read what `pack_objects` wrote. Raises CodecError, naming the row, for anything else."""
    if not pa.types.is_binary(column.type) or column.null_count:
        raise CodecError(f"objects are stored in a binary column without nulls, not in {column.type}")
    objects = []
    for row, packed in enumerate(column.to_pylist()):
        try:
            objects.append(_unpack(packed))
        except _FAULTS as error:
            raise CodecError(f"object {row} cannot be read: {error}") from error
    return objects


def _pack(value: Any, depth: int = 0) -> bytes:
    # strict_types: a subclass goes to _extend too, which refuses it.
    packed: bytes = msgpack.packb(value, default=partial(_extend, depth=depth), strict_types=True)
    return packed


def _extend(value: Any, depth: int) -> msgpack.ExtType:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, _pack(list(value), _deeper(depth)))
    extension = _EXTENSIONS.get(type(value))
    if extension is None:
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        raise TypeError(f"{name} is not among the types that msgpack can carry; convert it to one that is")
    code, write, _ = extension
    return msgpack.ExtType(code, write(value).encode())


def _unpack(packed: bytes, depth: int = 0) -> Any:
    return msgpack.unpackb(packed, ext_hook=partial(_read_extension, depth=depth), strict_map_key=False)


def _read_extension(code: int, data: bytes, depth: int) -> Any:
    if code == _TUPLE:
        items = _unpack(data, _deeper(depth))
        if not isinstance(items, list):
            raise ValueError("a tuple that is not written as a list")
        return tuple(items)
    if code not in _READERS:
        raise ValueError(f"unknown extension {code}")
    return _READERS[code](data.decode())


def _deeper(depth: int) -> int:
    if depth == MAX_TUPLE_DEPTH:
        raise ValueError(f"tuples are nested more than {MAX_TUPLE_DEPTH} deep")
    return depth + 1
