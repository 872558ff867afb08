"""How keys and values of state are written: msgpack, extended so that every type comes back as it went.

| value | written as |
| --- | --- |
| None, bool, float, str, bytes, list, dict, int of 64 bits | msgpack's own |
| tuple, set, frozenset | extension 1, 2, 3: an array |
| datetime, date, time, timedelta | 4, 5, 6, 7: an array of their fields, with fold and zone |
| Decimal, UUID, complex, larger int, bytearray | 8, 9, 10, 11, 17 |
| NumPy scalar, array of plain numbers | 12, 13: dtype, shape, bytes |
| `pa.RecordBatch` | 14: an Arrow IPC stream |
| anything else | 16: a pickle, by value where it is of no importable class |

A pickle is read only from bytes whose keyed checksum was found right: the storage sees to that. Two names for one
object become two objects; so it is in any state that is written and read back.
"""

from __future__ import annotations

import datetime as dt
import pickle
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any, Literal
from uuid import UUID
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import pyarrow as pa

from ftlayer.common.printable import described
from ftlayer.errors import IncompatibleCheckpointError
from ftlayer.functions.keyed import ATOMS
from ftlayer.records.ids import I64Array
from ftlayer.records.ipc import as_stream
from ftlayer.records.kernels import native

NAME = "msgpack"
VERSION = 1

_TUPLE, _SET, _FROZENSET, _DATETIME, _DATE, _TIME, _TIMEDELTA = range(1, 8)
_DECIMAL, _UUID, _COMPLEX, _INT, _SCALAR, _ARRAY, _BATCH = range(8, 15)
_PICKLE, _BYTEARRAY = 16, 17

MAX_DEPTH = 100
"""Containers in containers; what is nested deeper is pickled. msgpack itself ends at 511."""

_PLAIN_DTYPES = "biufcmMSU"


class Serializer:
    def __init__(self) -> None:
        self._packer = msgpack.Packer(strict_types=True, default=_large_int, unicode_errors="surrogatepass")

    def pack(self, value: Any) -> bytes:
        """Return one value's bytes. Raises whatever a user's object raises when it is pickled."""
        packed = native.pack_plain(value)
        return self.pack_any(value) if packed is None else packed

    def pack_any(self, value: Any) -> bytes:
        """Return the same bytes as `pack`, without the C extension."""
        if type(value) not in ATOMS:
            value = _packable(value, MAX_DEPTH)
        packed: bytes = self._packer.pack(value)
        return packed

    def pack_some(self, values: list[Any], places: I64Array, most: int) -> tuple[bytes, int]:
        """Pack values of a list at ``places`` (int64[n]), in order, until they have ``most`` bytes; raises as `pack`.

        Returns the msgpack array, and how many of ``places`` it has: at least one, if there is one.
        """
        return native.pack_values(values, places, most, self.pack_any)


def unpack(data: bytes | memoryview) -> Any:
    return msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass", ext_hook=_from_ext)


def unreadable(where: str, error: Exception) -> IncompatibleCheckpointError:
    """Return the error for packed state that `unpack` raised ``error`` for; ``where`` names operator and state."""
    return IncompatibleCheckpointError(
        f"{where}: the state cannot be read ({described(error)}); are the classes of its values where "
        "they were when it was written?"
    )


def array_header(length: int) -> bytes:
    """Return what is before the items of an array: packed items behind it are a packed list."""
    header: bytes = msgpack.Packer().pack_array_header(length)
    return header


def bytes_header(length: int) -> bytes:
    return b"\xc6" + length.to_bytes(4, "big")


def split_array(data: bytes | memoryview) -> list[bytes]:
    """Return the packed items of a packed list, not unpacked."""
    data = bytes(data)
    reader = msgpack.Unpacker(max_buffer_size=0, strict_map_key=False)
    reader.feed(data)
    ends = [0] * reader.read_array_header()
    begin = reader.tell()
    for place in range(len(ends)):
        reader.skip()
        ends[place] = reader.tell()
    return [data[first:end] for first, end in zip([begin, *ends], ends, strict=False)]


def _large_int(value: Any) -> msgpack.ExtType:
    if type(value) is not int:
        raise TypeError(f"a {type(value).__name__} cannot be written")
    return msgpack.ExtType(_INT, value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True))


def _inner(value: Any) -> bytes:
    packed: bytes = msgpack.packb(
        value, strict_types=True, default=_large_int, unicode_errors="surrogatepass"
    )
    return packed


def _packable(value: Any, depth: int) -> Any:
    """Return what msgpack writes for ``value`` without losing its type."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if depth == 0:
        return _pickled(value)
    if kind is list:
        return value if ATOMS.issuperset(map(type, value)) else [_packable(v, depth - 1) for v in value]
    if kind is dict:
        if ATOMS.issuperset(map(type, value)) and ATOMS.issuperset(map(type, value.values())):
            return value
        return {_packable(k, depth - 1): _packable(v, depth - 1) for k, v in value.items()}
    if kind in _CONTAINERS:
        return msgpack.ExtType(_CONTAINERS[kind], _inner([_packable(v, depth - 1) for v in value]))
    write = _WRITERS.get(kind)
    if write is None and isinstance(value, np.generic):
        write = _write_scalar
    return _pickled(value) if write is None else write(value)


_CONTAINERS: dict[type, int] = {tuple: _TUPLE, set: _SET, frozenset: _FROZENSET}


def _pickled(value: Any) -> msgpack.ExtType:
    try:
        data = pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):
        # Of a class that cannot be imported: written with the class itself.
        from pyspark import cloudpickle

        data = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return msgpack.ExtType(_PICKLE, data)


# ---------------------------------------------------------------- times


def _zone(zone: dt.tzinfo | None) -> Any:
    """Return how a zone is written; a LookupError for one that only a pickle can hold."""
    if zone is None:
        return None
    if type(zone) is ZoneInfo and zone.key is not None:
        return zone.key
    if type(zone) is dt.timezone:
        offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
        return [offset.days, offset.seconds, offset.microseconds, *name]
    raise LookupError


def _read_zone(written: Any) -> dt.tzinfo | None:
    if written is None:
        return None
    if isinstance(written, str):
        return ZoneInfo(written)
    return dt.timezone(dt.timedelta(*written[:3]), *written[3:])


def _zoned(code: int, value: dt.datetime | dt.time, *date: int) -> msgpack.ExtType:
    try:
        zone = _zone(value.tzinfo)
    except LookupError:
        return _pickled(value)
    fields = [*date, value.hour, value.minute, value.second, value.microsecond, value.fold]
    return msgpack.ExtType(code, _inner([*fields, zone]))


def _read_zoned(kind: type[dt.datetime | dt.time], data: bytes) -> dt.datetime | dt.time:
    *fields, fold, zone = unpack(data)
    return kind(*fields).replace(tzinfo=_read_zone(zone), fold=fold)


# ---------------------------------------------------------------- arrays


def _write_scalar(value: np.generic) -> msgpack.ExtType:
    if value.dtype.kind not in _PLAIN_DTYPES or not value.dtype.itemsize:
        return _pickled(value)
    return msgpack.ExtType(_SCALAR, _inner([value.dtype.str, value.tobytes()]))


def _read_scalar(data: bytes) -> Any:
    dtype, raw = unpack(data)
    return np.frombuffer(raw, np.dtype(dtype))[0]


def _write_array(value: np.ndarray[Any, Any]) -> msgpack.ExtType:
    if value.dtype.kind not in _PLAIN_DTYPES or not value.dtype.itemsize or value.dtype.metadata:
        return _pickled(value)
    order: Literal["C", "F"] = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
    raw = value.tobytes(order)
    return msgpack.ExtType(_ARRAY, _inner([value.dtype.str, list(value.shape), order, raw]))


def _read_array(data: bytes) -> Any:
    dtype, shape, order, raw = unpack(data)
    # A copy: what lies on bytes could not be written to.
    return np.frombuffer(raw, np.dtype(dtype)).copy().reshape(shape, order=order)


def _read_batch(data: bytes) -> pa.RecordBatch:
    with pa.ipc.open_stream(data) as reader:
        return reader.read_next_batch()


_WRITERS: dict[type, Callable[[Any], msgpack.ExtType]] = {
    dt.datetime: lambda v: _zoned(_DATETIME, v, v.year, v.month, v.day),
    dt.date: lambda v: msgpack.ExtType(_DATE, _inner([v.year, v.month, v.day])),
    dt.time: partial(_zoned, _TIME),
    dt.timedelta: lambda v: msgpack.ExtType(_TIMEDELTA, _inner([v.days, v.seconds, v.microseconds])),
    Decimal: lambda v: msgpack.ExtType(_DECIMAL, str(v).encode()),
    UUID: lambda v: msgpack.ExtType(_UUID, v.bytes),
    complex: lambda v: msgpack.ExtType(_COMPLEX, _inner([v.real, v.imag])),
    bytearray: lambda v: msgpack.ExtType(_BYTEARRAY, bytes(v)),
    np.ndarray: _write_array,
    pa.RecordBatch: lambda v: msgpack.ExtType(_BATCH, as_stream(v).to_pybytes()),
}

_READERS: dict[int, Callable[[bytes], Any]] = {
    _TUPLE: lambda data: tuple(unpack(data)),
    _SET: lambda data: set(unpack(data)),
    _FROZENSET: lambda data: frozenset(unpack(data)),
    _DATETIME: partial(_read_zoned, dt.datetime),
    _DATE: lambda data: dt.date(*unpack(data)),
    _TIME: partial(_read_zoned, dt.time),
    _TIMEDELTA: lambda data: dt.timedelta(*unpack(data)),
    _DECIMAL: lambda data: Decimal(data.decode()),
    _UUID: lambda data: UUID(bytes=data),
    _COMPLEX: lambda data: complex(*unpack(data)),
    _INT: lambda data: int.from_bytes(data, "big", signed=True),
    _SCALAR: _read_scalar,
    _ARRAY: _read_array,
    _BATCH: _read_batch,
    _PICKLE: pickle.loads,
    _BYTEARRAY: bytearray,
}


def _from_ext(code: int, data: bytes) -> Any:
    try:
        read = _READERS[code]
    except KeyError:
        raise ValueError(
            f"values of kind {code} are not known to version {VERSION} of the serializer"
        ) from None
    return read(data)
