"""Dataclasses ↔ what msgpack can carry, driven by their type hints.

A dataclass becomes a map of its field names; decoding is strict: an unknown field, a missing one without a
default, or a value of another type is a `MalformedRequestError` that names the field's path.

| type | on the wire |
| --- | --- |
| int, bool, float, str, bytes, None | msgpack's own; an int has -2^63 to 2^64-1; text is UTF-8 |
| StrEnum | its value |
| tuple, list | array |
| dict with str keys | map |
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from ftlayer.errors import ConfigError, MalformedRequestError
from ftlayer.transport.frames import malformed

Pack = Callable[[Any], Any]
Unpack = Callable[[Any, str], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Codec:
    """How values of one type are packed, and unpacked at a field's path.

    ``plain``: a value of this very type is what it unpacks to. Most are, and are not worth the path to them.
    """

    pack: Pack
    unpack: Unpack
    plain: type | None = None


class Codecs:
    """Codecs by type hint, made when they are first asked for."""

    def __init__(self, leaves: Mapping[Any, Codec] = types.MappingProxyType({})) -> None:
        """Know the types of the module's table; ``leaves`` are codecs of further ones."""
        self._leaves = {**_PLAIN, **leaves}
        self._dataclasses: dict[type, Codec] = {}

    def add(self, hint: Any, codec: Codec) -> None:
        self._leaves[hint] = codec

    def of(self, hint: Any) -> Codec:
        """Return the codec of a type hint; `TypeError` for a type that has no form."""
        if hint in self._leaves:
            return self._leaves[hint]
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union) and len(arguments) == 2 and type(None) in arguments:
            return _optional(self.of(next(a for a in arguments if a is not type(None))))
        if origin is tuple:
            if arguments[1:] == (...,):
                return list_of(self.of(arguments[0]))
            return _row_of([self.of(argument) for argument in arguments])
        if origin is dict and arguments[0] is str:
            return _map_of(self.of(arguments[1]))
        if isinstance(hint, type) and issubclass(hint, StrEnum):
            return _enum(hint)
        if dataclasses.is_dataclass(hint):
            return self.of_dataclass(typing.cast(type, hint))
        raise TypeError(f"no wire form for {hint!r}")

    def of_dataclass(self, kind: type) -> Codec:
        """Return the codec of a dataclass: a map with a key for each field."""
        codec = self._dataclasses.get(kind)
        if codec is None:
            hints = typing.get_type_hints(kind)
            fields = {field.name: self.of(hints[field.name]) for field in dataclasses.fields(kind)}
            codec = self._dataclasses[kind] = _dataclass(kind, fields)
        return codec


def _unpack_float(value: Any, where: str) -> float:
    if type(value) not in (float, int):
        raise malformed(where, "a number", value)
    return float(value)


def _exactly(kind: type, name: str = "") -> Codec:
    def unpack(value: Any, where: str) -> Any:
        if type(value) is not kind:
            raise malformed(where, name or kind.__name__, value)
        return value

    return Codec(_identity, unpack, kind)


def _identity(value: Any) -> Any:
    return value


_PLAIN: dict[Any, Codec] = {
    float: Codec(_identity, _unpack_float, float),
    int: _exactly(int, "an integer"),
    **{kind: _exactly(kind) for kind in (bool, str, bytes)},
}


def _optional(inner: Codec) -> Codec:
    return Codec(
        lambda value: None if value is None else inner.pack(value),
        lambda value, where: None if value is None else inner.unpack(value, where),
        inner.plain,
    )


def list_of(inner: Codec) -> Codec:

    def unpack(value: Any, where: str) -> Any:
        if type(value) is not list:
            raise malformed(where, "an array", value)
        plain = inner.plain
        return tuple(
            item if type(item) is plain else inner.unpack(item, f"{where}[{index}]")
            for index, item in enumerate(value)
        )

    return Codec(lambda items: [inner.pack(item) for item in items], unpack)


def _row_of(inner: list[Codec]) -> Codec:
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
        plain = inner.plain
        return {
            key: item if type(item) is plain else inner.unpack(item, f"{where}[{key!r}]")
            for key, item in value.items()
        }

    return Codec(lambda items: {key: inner.pack(item) for key, item in items.items()}, unpack)


def _enum(kind: type[StrEnum]) -> Codec:
    def unpack(value: Any, where: str) -> StrEnum:
        if type(value) is not str or value not in kind.__members__.values():
            raise malformed(where, f"one of {', '.join(kind)}", value)
        return kind(value)

    return Codec(str, unpack)


def _dataclass(kind: type, fields: dict[str, Codec]) -> Codec:
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def pack(value: Any) -> dict[str, Any]:
        return {name: codec.pack(getattr(value, name)) for name, codec in fields.items()}

    def unpack(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise malformed(where, "a map", value)
        unknown = [key for key in value if key not in fields]
        if unknown:
            raise MalformedRequestError(f"{where}: unknown field {unknown[0]!r}")
        missing = required - value.keys()
        if missing:
            raise MalformedRequestError(f"{where}.{min(missing)}: missing")
        unpacked = {}
        for name, item in value.items():
            field = fields[name]
            is_plain = type(item) is field.plain
            unpacked[name] = item if is_plain else field.unpack(item, f"{where}.{name}")
        try:
            return kind(**unpacked)
        except ConfigError as error:
            raise MalformedRequestError(f"{where}.{error}") from None

    return Codec(pack, unpack)


plain_codec = Codecs().of_dataclass
"""The codec of a dataclass whose fields are of the types above."""
