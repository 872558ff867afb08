"""Frames: one call, or one reply, as a msgpack map.

call     ``{"call": name, "fields": {…}}``, and for a call that is to have its effect once ``"client"`` and
         ``"sequence"`` as well (see `ftlayer.vertex.calls.Envelope`)
reply    ``{"reply": name, "fields": {…}}``
error    ``{"error": code, "message": text}`` (`ftlayer.transport.flight_connection`); the codes are those of
         `ftlayer.errors`

A reply or an error in a stream of calls has ``"sequence"`` too. Names and meanings of the fields are those of the
dataclasses of `ftlayer.vertex.calls`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer import __version__
from ftlayer.common.printable import described
from ftlayer.errors import FTLayerError, MalformedRequestError, UnreadableReplyError, UnsupportedError
from ftlayer.records.failures import from_columns, to_columns
from ftlayer.records.ipc import UNREADABLE, as_stream, read_one_batch
from ftlayer.transport.codec import Codec, Codecs, list_of
from ftlayer.transport.flight_connection import error_in
from ftlayer.transport.frames import malformed, pack, unpack_map
from ftlayer.vertex import calls

# Calls and replies of the contract ↔ what msgpack can carry: `ftlayer.transport.codec` with the vertex's own types.
#
# | type | on the wire |
# | --- | --- |
# | uint64 array, shape (n,) | bin: little-endian, 8 bytes an item |
# | roots of rows | as a uint64 array, or as array [first, n]: the ids from ``first`` on |
# | int32 array, shape (n,) or (n, k) | array [k, bin]: little-endian, 4 bytes an item; k = 0 for (n,) |
# | Arrow record batch | bin: an Arrow IPC stream with exactly one batch, not compressed |
# | tuple of `Failure` | map of columns (`ftlayer.records.failures`); an array of maps is taken as well |


def _unpack_batch(data: Any, where: str) -> pa.RecordBatch:
    if not isinstance(data, bytes):
        raise malformed(where, "the bytes of an Arrow IPC stream", data)
    try:
        return read_one_batch(data)
    except UNREADABLE as error:
        raise MalformedRequestError(
            f"{where}: not a readable Arrow IPC stream ({described(error)})"
        ) from None


def _unpack_u64(value: Any, where: str) -> calls.U64:
    if type(value) is not bytes or len(value) % 8:
        raise malformed(where, "bytes of little-endian uint64", value)
    # A copy, because kernels are compiled for writable arrays and a view of bytes is not one.
    return np.frombuffer(value, "<u8").astype(np.uint64)


def _pack_roots(roots: calls.RowRoots) -> Any:
    return [roots.first, roots.count] if isinstance(roots, calls.RootRange) else _pack_u64(roots)


def _unpack_roots(value: Any, where: str) -> calls.RowRoots:
    if type(value) is not list:
        return _unpack_u64(value, where)
    if len(value) != 2 or type(value[0]) is not int or type(value[1]) is not int:
        raise malformed(where, "[first, count]", value)
    first, count = value
    if not (first > 0 and 0 <= count <= calls.MAX_ROWS and first + count <= 1 << 64):
        raise malformed(
            where, f"[first, count] of ids, 1 to 2^64-1, and at most {calls.MAX_ROWS} of them", value
        )
    return calls.RootRange(first, count)


def _pack_u64(array: calls.U64) -> bytes:
    return np.ascontiguousarray(array, "<u8").tobytes()


def _pack_i32(array: calls.I32) -> list[Any]:
    width = 0 if array.ndim == 1 else array.shape[1]
    return [width, np.ascontiguousarray(array, "<i4").tobytes()]


def _unpack_i32(value: Any, where: str) -> calls.I32:
    if type(value) is not list or len(value) != 2:
        raise malformed(where, "[width, bytes of little-endian int32]", value)
    width, data = value
    if type(width) is not int or not 0 <= width <= 1 << 16:
        raise malformed(f"{where}[0]", "a width of 0 to 65536", width)
    if type(data) is not bytes or len(data) % (4 * max(width, 1)):
        raise malformed(f"{where}[1]", f"bytes of little-endian int32, {max(width, 1)} a row", data)
    array = np.frombuffer(data, "<i4").astype(np.int32)
    return array.reshape(-1, width) if width else array


CODECS = Codecs(
    {
        calls.U64: Codec(_pack_u64, _unpack_u64),
        calls.RowRoots: Codec(_pack_roots, _unpack_roots),
        calls.I32: Codec(_pack_i32, _unpack_i32),
        pa.RecordBatch: Codec(lambda batch: memoryview(as_stream(batch)), _unpack_batch),
    }
)


def _failures() -> Codec:
    one_by_one = list_of(CODECS.of(calls.Failure))

    def unpack(value: Any, where: str) -> Any:
        if type(value) is not dict:
            return one_by_one.unpack(value, where)
        try:
            return tuple(from_columns(value))
        except ValueError as error:
            raise MalformedRequestError(f"{where}: {error}") from None

    return Codec(to_columns, unpack)


CODECS.add(tuple[calls.Failure, ...], _failures())

dataclass_codec = CODECS.of_dataclass
"""The codec of a call, a reply or a part of one."""


PROTOCOL = 2
"""The number of this protocol: vertices and boards say it with their health."""


def encode_call(call: calls.Call, envelope: calls.Envelope | None) -> bytes:
    """Return the frame of ``call``; `MalformedRequestError` for what msgpack or UTF-8 cannot hold."""
    return frame_of(call, fields_of(call), envelope)


def fields_of(call: calls.Call) -> dict[str, Any]:
    """Return the fields of ``call``, its batches as bytes already: the long part of writing a frame."""
    kind: type = type(call)
    fields: dict[str, Any] = dataclass_codec(kind).pack(call)
    return fields


def frame_of(call: calls.Call, fields: dict[str, Any], envelope: calls.Envelope | None) -> bytes:
    name = type(call).__name__
    frame: dict[str, Any] = {"call": name, "fields": fields}
    if envelope is not None:
        frame |= {"client": envelope.client, "sequence": envelope.sequence}
    return pack(frame, name)


def decode_call(data: bytes | pa.Buffer) -> tuple[calls.AnsweredBy[calls.Reply], calls.Envelope | None]:
    return call_of(open_frame(data))


def open_frame(data: bytes | pa.Buffer) -> dict[str, Any]:
    """Read a call's frame as far as its names; `call_of` reads the rest."""
    return unpack_map(data, "call", ("call", "fields"), ("client", "sequence"))


def call_of(frame: dict[str, Any]) -> tuple[calls.AnsweredBy[calls.Reply], calls.Envelope | None]:
    """Read and check the call in a frame; `MalformedRequestError`, or `UnsupportedError` for an unknown call."""
    name = frame["call"]
    if type(name) is not str:
        raise MalformedRequestError(f"call: expected the name of a call, got {name!r}")
    kind = calls.CALLS.get(name)
    if kind is None:
        raise UnsupportedError(
            f"this vertex, or board, has no call {name!r}: its ftlayer is older than that of the caller. Start it with "
            "the newer ftlayer, or use the tools of its own"
        )
    envelope = None
    if kind.enveloped:
        envelope = envelope_of(frame)
    elif "client" in frame or "sequence" in frame:
        raise MalformedRequestError(f"client: {name} has no envelope")
    call: calls.AnsweredBy[calls.Reply] = dataclass_codec(kind).unpack(frame["fields"], name)
    call.check()
    return call, envelope


def envelope_of(frame: dict[str, Any]) -> calls.Envelope:
    """Return the envelope a frame carries; `MalformedRequestError` where it lacks one."""
    client, sequence = frame.get("client"), frame.get("sequence")
    if type(client) is not str:
        raise malformed("client", "a name", client)
    if type(sequence) is not int:
        raise malformed("sequence", "an integer from 1", sequence)
    envelope = calls.Envelope(client, sequence)
    envelope.check()
    return envelope


def encode_reply(reply: calls.Reply, sequence: int | None = None) -> bytes:
    kind: type = type(reply)
    frame = {"reply": kind.__name__, "fields": dataclass_codec(kind).pack(reply)}
    return pack(frame if sequence is None else frame | {"sequence": sequence}, kind.__name__)


def decode_reply(data: bytes | pa.Buffer) -> tuple[calls.Reply | FTLayerError, int | None]:
    """Read a reply or an error, which is returned, and its sequence; `UnreadableReplyError` for what is neither."""
    try:
        frame = unpack_map(data, "reply", (), ("reply", "fields", "error", "message", "sequence"))
        error = error_in(frame)
        if error is not None:
            return error, frame.get("sequence")
        kind = calls.REPLIES[frame["reply"]]
        return dataclass_codec(kind).unpack(frame["fields"], frame["reply"]), frame.get("sequence")
    except (MalformedRequestError, KeyError, TypeError) as failure:
        raise UnreadableReplyError(f"a reply that this ftlayer cannot read: {failure}") from failure


def encode_health(*, incarnation: int, shards: int, max_message_bytes: int, exact: bool) -> bytes:
    """Return what a vertex, or a board, answers to the action ``health``."""
    health = {
        "protocol": PROTOCOL,
        "incarnation": incarnation,
        "shards": shards,
        "max_message_bytes": max_message_bytes,
        "exact": exact,
        "ftlayer": __version__,
    }
    return pack(health, "health")
