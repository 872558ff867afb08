"""Frames of the control stream: one message of `ftlayer.runtime.protocol.messages` as a msgpack map.

``{"message": name, "fields": {…}}``; what the fields look like is said in `ftlayer.transport.codec`. Reading is
strict: an unknown name or field, a missing field or a value of another type is a `MalformedRequestError`.
"""

from __future__ import annotations

import typing
from typing import Any, cast

from pyarrow import Buffer

from ftlayer.errors import MalformedRequestError
from ftlayer.runtime.protocol.messages import FromSlot, ToSlot
from ftlayer.transport.codec import plain_codec
from ftlayer.transport.frames import pack, unpack_map

PROTOCOL = 4

_FROM_SLOT: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(FromSlot)}
_TO_SLOT: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(ToSlot)}


def encode(message: FromSlot | ToSlot) -> bytes:
    kind: type = type(message)
    return pack({"message": kind.__name__, "fields": plain_codec(kind).pack(message)}, kind.__name__)


def decode_from_slot(frame: bytes | Buffer) -> FromSlot:
    return cast(FromSlot, _decode(frame, _FROM_SLOT))


def decode_to_slot(frame: bytes | Buffer) -> ToSlot:
    return cast(ToSlot, _decode(frame, _TO_SLOT))


def _decode(frame: bytes | Buffer, kinds: dict[str, type]) -> Any:
    content = unpack_map(frame, "control message", ("message", "fields"))
    name = content["message"]
    kind = kinds.get(name) if type(name) is str else None
    if kind is None:
        raise MalformedRequestError(
            f"control message: no message {name!r} in this direction; there are {', '.join(kinds)}"
        )
    return plain_codec(kind).unpack(content["fields"], name)
