"""Dataclasses of the contract ↔ what msgpack can carry, driven by their type hints.

A dataclass becomes a map of its field names; decoding is strict: an unknown field, a missing one without a
default, or a value of another type is a `MalformedRequestError` that names the field's path.

| type | on the wire |
| --- | --- |
| int, bool, float, str, bytes, None | msgpack's own; an int has -2^63 to 2^64-1; text is UTF-8 |
| StrEnum | its value |
| tuple, list | array |
| dict with str keys | map |
| uint64 array, shape (n,) | bin: little-endian, 8 bytes an item |
| int32 array, shape (n,) or (n, k) | array [k, bin]: little-endian, 4 bytes an item; k = 0 for (n,) |
| Arrow record batch | bin: an Arrow IPC stream with exactly one batch, not compressed |
| tuple of `Failure` | map of columns (`ftlayer.records.failure_columns`); an array of maps is taken as well |
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.errors import ConfigError, MalformedRequestError
from ftlayer.records.failure_columns import from_columns, to_columns
from ftlayer.records.ipc import UNREADABLE, as_stream, read_one_batch
from ftlayer.transport.frames import malformed
from ftlayer.vertex.calls import I32, U64, Failure

Pack = Callable[[Any], Any]
Unpack = Callable[[Any, str], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """How values of one type are packed, and unpacked at a field's path."""

    pack: Pack
    unpack: Unpack


# ---------------------------------------------------------------- Arrow


def batch_from_ipc(data: Any, where: str) -> pa.RecordBatch:
    """Read the one batch of an IPC stream; see `ftlayer.records.ipc.read_one_batch` for what is refused."""
    if not isinstance(data, bytes):
        raise malformed(where, "the bytes of an Arrow IPC stream", data)
    try:
        return read_one_batch(data)
    except UNREADABLE as error:
        raise MalformedRequestError(f"{where}: not a readable Arrow IPC stream ({error})") from None


# ---------------------------------------------------------------- plain values


def _unpack_int(value: Any, where: str) -> int:
    if type(value) is not int:
        raise malformed(where, "an integer", value)
    return value


def _unpack_float(value: Any, where: str) -> float:
    if type(value) not in (float, int):
        raise malformed(where, "a number", value)
    return float(value)


def _unpack_exactly(kind: type) -> Unpack:
    def unpack(value: Any, where: str) -> Any:
        if type(value) is not kind:
            raise malformed(where, kind.__name__, value)
        return value

    return unpack


def _unpack_u64(value: Any, where: str) -> U64:
    if type(value) is not bytes or len(value) % 8:
        raise malformed(where, "bytes of little-endian uint64", value)
    # A copy, because kernels are compiled for writable arrays and a view of bytes is not one.
    return np.frombuffer(value, "<u8").astype(np.uint64)


def _pack_i32(array: I32) -> list[Any]:
    width = 0 if array.ndim == 1 else array.shape[1]
    return [width, np.ascontiguousarray(array, "<i4").tobytes()]


def _unpack_i32(value: Any, where: str) -> I32:
    if type(value) is not list or len(value) != 2:
        raise malformed(where, "[width, bytes of little-endian int32]", value)
    width, data = value
    if type(width) is not int or not 0 <= width <= 1 << 16:
        raise malformed(f"{where}[0]", "a width of 0 to 65536", width)
    if type(data) is not bytes or len(data) % (4 * max(width, 1)):
        raise malformed(f"{where}[1]", f"bytes of little-endian int32, {max(width, 1)} a row", data)
    array = np.frombuffer(data, "<i4").astype(np.int32)
    return array.reshape(-1, width) if width else array


def _identity(value: Any) -> Any:
    return value


_PLAIN: dict[Any, Codec] = {
    int: Codec(_identity, _unpack_int),
    float: Codec(_identity, _unpack_float),
    bool: Codec(_identity, _unpack_exactly(bool)),
    str: Codec(_identity, _unpack_exactly(str)),
    bytes: Codec(_identity, _unpack_exactly(bytes)),
    U64: Codec(lambda array: np.ascontiguousarray(array, "<u8").tobytes(), _unpack_u64),
    I32: Codec(_pack_i32, _unpack_i32),
    pa.RecordBatch: Codec(lambda batch: memoryview(as_stream(batch)), batch_from_ipc),
}


# ---------------------------------------------------------------- composed types


def codec_for(hint: Any) -> Codec:
    """Return the codec of a type hint; `TypeError` for a type that the wire has no form for."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    if hint == tuple[Failure, ...]:
        return _failures()
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union) and len(arguments) == 2 and type(None) in arguments:
        return _optional(codec_for(next(a for a in arguments if a is not type(None))))
    if origin is tuple:
        return _list_of(arguments[0]) if arguments[1:] == (...,) else _row_of(arguments)
    if origin is dict and arguments[0] is str:
        return _map_of(codec_for(arguments[1]))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return _enum(hint)
    if dataclasses.is_dataclass(hint):
        return dataclass_codec(typing.cast(type, hint))
    raise TypeError(f"no wire form for {hint!r}")


def _optional(inner: Codec) -> Codec:
    return Codec(
        lambda value: None if value is None else inner.pack(value),
        lambda value, where: None if value is None else inner.unpack(value, where),
    )


def _list_of(hint: Any) -> Codec:
    inner = codec_for(hint)

    def unpack(value: Any, where: str) -> Any:
        if type(value) is not list:
            raise malformed(where, "an array", value)
        return tuple(inner.unpack(item, f"{where}[{index}]") for index, item in enumerate(value))

    return Codec(lambda items: [inner.pack(item) for item in items], unpack)


def _row_of(hints: tuple[Any, ...]) -> Codec:
    inner = [codec_for(hint) for hint in hints]

    def unpack(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) != len(inner):
            raise malformed(where, f"an array of {len(inner)}", value)
        return tuple(
            c.unpack(item, f"{where}[{i}]") for i, (c, item) in enumerate(zip(inner, value, strict=True))
        )

    return Codec(lambda row: [c.pack(item) for c, item in zip(inner, row, strict=True)], unpack)


def _map_of(inner: Codec) -> Codec:
    def unpack(value: Any, where: str) -> Any:
        if type(value) is not dict or not all(type(key) is str for key in value):
            raise malformed(where, "a map with text keys", value)
        return {key: inner.unpack(item, f"{where}[{key!r}]") for key, item in value.items()}

    return Codec(lambda items: {key: inner.pack(item) for key, item in items.items()}, unpack)


def _enum(kind: type[StrEnum]) -> Codec:
    def unpack(value: Any, where: str) -> StrEnum:
        if type(value) is not str or value not in kind.__members__.values():
            raise malformed(where, f"one of {', '.join(kind)}", value)
        return kind(value)

    return Codec(str, unpack)


def _failures() -> Codec:
    one_by_one = _list_of(Failure)

    def unpack(value: Any, where: str) -> Any:
        if type(value) is not dict:
            return one_by_one.unpack(value, where)
        try:
            return tuple(Failure(*row) for row in from_columns(value))
        except ValueError as error:
            raise MalformedRequestError(f"{where}: {error}") from None

    return Codec(to_columns, unpack)


@functools.cache
def dataclass_codec(kind: type) -> Codec:
    """Return the codec of a dataclass: a map with a key for each field."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    codecs = {name: codec_for(hints[name]) for name in fields}
    required = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def pack(value: Any) -> dict[str, Any]:
        return {name: codec.pack(getattr(value, name)) for name, codec in codecs.items()}

    def unpack(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise malformed(where, "a map", value)
        unknown = [key for key in value if key not in codecs]
        if unknown:
            raise MalformedRequestError(f"{where}: unknown field {unknown[0]!r}")
        missing = required - value.keys()
        if missing:
            raise MalformedRequestError(f"{where}.{min(missing)}: missing")
        unpacked = {name: codecs[name].unpack(item, f"{where}.{name}") for name, item in value.items()}
        try:
            return kind(**unpacked)
        except ConfigError as error:
            raise MalformedRequestError(f"{where}.{error}") from None

    return Codec(pack, unpack)
