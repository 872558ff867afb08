"""Frames of calls, replies and control messages: msgpack maps, read strictly."""

from __future__ import annotations

import typing
from typing import Any

import msgpack
import pyarrow as pa

from ftlayer.errors import MalformedRequestError
from ftlayer.transport.packed import unpack


def pack(value: Any, what: str) -> bytes:
    """Return ``value`` as msgpack; `MalformedRequestError` for an integer or a text it cannot hold."""
    try:
        return typing.cast(bytes, msgpack.packb(value))
    except UnicodeEncodeError as error:
        raise MalformedRequestError(
            f"{what}: a text with a lone surrogate, which UTF-8 does not have: {error.object!r}"
        ) from None
    except (ValueError, OverflowError, TypeError) as error:
        raise MalformedRequestError(f"{what}: {error}") from None


def unpack_map(
    data: bytes | pa.Buffer, what: str, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Read a msgpack map with exactly these keys; `MalformedRequestError` names what is wrong in ``what``."""
    try:
        value = unpack(data)
    except ValueError as error:
        raise MalformedRequestError(f"{what}: {error}") from None
    if type(value) is not dict:
        raise malformed(what, "a msgpack map", value)
    for key in required:
        if key not in value:
            raise MalformedRequestError(f"{what}: {key!r} is missing")
    for key in value:
        if key not in required and key not in optional:
            raise MalformedRequestError(f"{what}: unknown key {key!r}")
    return value


def malformed(where: str, wanted: str, got: object) -> MalformedRequestError:
    """Return the error for a field that is not what it should be."""
    return MalformedRequestError(f"{where}: expected {wanted}, got {_shown(got)}")


def _shown(value: object) -> str:
    if isinstance(value, (bytes, str, list, tuple, dict)):
        return f"{type(value).__name__} of length {len(value)}"
    return f"{type(value).__name__} {value!r}" if value is not None else "nothing"
