"""Frames: one call, or one reply, as a msgpack map.

call     ``{"call": name, "fields": {…}}``, and for a call that is to have its effect once ``"client"`` and
         ``"sequence"`` as well (see `ftlayer.vertex.calls.Envelope`)
reply    ``{"reply": name, "fields": {…}}``
error    ``{"error": code, "message": text}`` (`ftlayer.transport.failures`); the codes are those of
         `ftlayer.errors`

A reply or an error in a stream of calls has ``"sequence"`` too. What the fields look like is said in
`ftlayer.vertex.wire.codec`; names and meanings are the dataclasses of `ftlayer.vertex.calls`.
"""

from __future__ import annotations

import typing
from typing import Any

import pyarrow as pa

from ftlayer.errors import FTLayerError, MalformedRequestError, UnsupportedError, VertexError
from ftlayer.transport.failures import error_in
from ftlayer.transport.frames import malformed, pack, unpack_map
from ftlayer.vertex.calls import (
    AnnounceJob,
    AskJob,
    Call,
    Deliverable,
    Envelope,
    MutatingCall,
    ReadingCall,
    Reply,
)
from ftlayer.vertex.wire.checks import check_call, check_envelope
from ftlayer.vertex.wire.codec import dataclass_codec

PROTOCOL = 2
"""The number of this protocol: vertices and boards say it with their health."""

# These change something, but nothing that asking again would change twice.
ENVELOPED = frozenset(typing.get_args(MutatingCall)) - {Deliverable, AnnounceJob, AskJob}
READING = typing.get_args(ReadingCall)
CALLS: dict[str, type] = {
    kind.__name__: kind for kind in typing.get_args(MutatingCall) + typing.get_args(ReadingCall)
}
REPLIES: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Reply)}


# ---------------------------------------------------------------- calls


def encode_call(call: Call, envelope: Envelope | None) -> bytes:
    """Return the frame of ``call``; `MalformedRequestError` for what msgpack or UTF-8 cannot hold.

    The vertex checks the rest (`ftlayer.vertex.wire.checks`).
    """
    return frame_of(call, fields_of(call), envelope)


def fields_of(call: Call) -> dict[str, Any]:
    """Return the fields of ``call``, its batches as bytes already: the long part of writing a frame."""
    kind: type = type(call)
    fields: dict[str, Any] = dataclass_codec(kind).pack(call)
    return fields


def frame_of(call: Call, fields: dict[str, Any], envelope: Envelope | None) -> bytes:
    """Return the frame of ``call``, whose `fields_of` are known."""
    name = type(call).__name__
    frame: dict[str, Any] = {"call": name, "fields": fields}
    if envelope is not None:
        frame |= {"client": envelope.client, "sequence": envelope.sequence}
    return pack(frame, name)


def decode_call(data: bytes | pa.Buffer) -> tuple[Call, Envelope | None]:
    """Read and check a call's frame. Raises as `call_of`."""
    return call_of(open_frame(data))


def open_frame(data: bytes | pa.Buffer) -> dict[str, Any]:
    """Read a call's frame as far as its names; `call_of` reads the rest."""
    return unpack_map(data, "call", ("call", "fields"), ("client", "sequence"))


def call_of(frame: dict[str, Any]) -> tuple[Call, Envelope | None]:
    """Read and check the call in a frame.

    Raises `MalformedRequestError` naming what is wrong, `UnsupportedError` for a call that there is not.
    """
    name = frame["call"]
    if type(name) is not str:
        raise MalformedRequestError(f"call: expected the name of a call, got {name!r}")
    kind = CALLS.get(name)
    if kind is None:
        raise UnsupportedError(
            f"this vertex, or board, has no call {name!r}: its ftlayer is older than that of the caller. Start it with "
            "the newer ftlayer, or use the tools of its own"
        )
    envelope = None
    if kind in ENVELOPED:
        envelope = envelope_of(frame)
    elif "client" in frame or "sequence" in frame:
        raise MalformedRequestError(f"client: {name} has no envelope")
    call = dataclass_codec(kind).unpack(frame["fields"], name)
    check_call(call)
    return call, envelope


def envelope_of(frame: dict[str, Any]) -> Envelope:
    """Return the envelope a frame carries; `MalformedRequestError` where it lacks one."""
    client, sequence = frame.get("client"), frame.get("sequence")
    if type(client) is not str:
        raise malformed("client", "a name", client)
    if type(sequence) is not int:
        raise malformed("sequence", "an integer from 1", sequence)
    envelope = Envelope(client, sequence)
    check_envelope(envelope)
    return envelope


# ---------------------------------------------------------------- replies


def encode_reply(reply: Reply, sequence: int | None = None) -> bytes:
    kind: type = type(reply)
    frame = {"reply": kind.__name__, "fields": dataclass_codec(kind).pack(reply)}
    return pack(frame if sequence is None else frame | {"sequence": sequence}, kind.__name__)


def decode_reply(data: bytes | pa.Buffer) -> tuple[Reply | FTLayerError, int | None]:
    """Read a reply's or an error's frame, and the sequence it answers. The error is returned, not raised.

    Raises `VertexError` for bytes that no vertex of this version sends.
    """
    try:
        frame = unpack_map(data, "reply", (), ("reply", "fields", "error", "message", "sequence"))
        error = error_in(frame)
        if error is not None:
            return error, frame.get("sequence")
        kind = REPLIES[frame["reply"]]
        return dataclass_codec(kind).unpack(frame["fields"], frame["reply"]), frame.get("sequence")
    except (MalformedRequestError, KeyError, TypeError) as failure:
        raise VertexError(f"the vertex sent a reply that this client cannot read: {failure}") from failure


# ---------------------------------------------------------------- health


def encode_health(*, incarnation: int, shards: int, max_message_bytes: int, exact: bool) -> bytes:
    """Return what a vertex, or a board, answers to the action ``health``."""
    health = {
        "protocol": PROTOCOL,
        "incarnation": incarnation,
        "shards": shards,
        "max_message_bytes": max_message_bytes,
        "exact": exact,
    }
    return pack(health, "health")
