"""Elements of a channel as bytes: what slots send each other.

A frame is a fixed header (little-endian, see `_HEADER`), the arrays of the lineage and the times, each at a
multiple of 8 bytes, and the payload as one Arrow IPC message without its schema, which both ends know from
the edge. Schemas with dictionaries travel as a whole IPC stream, since a message alone has none.

Reading copies nothing where the bytes begin at a multiple of 8. Guaranteed for bytes from anywhere: an
element whose parts have the sizes they claim, whose columns can be read and whose text is UTF-8, or `CodecError`.
"""

from __future__ import annotations

import struct
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import Buffer

from ftlayer.checkpoint.barrier import Alignment, SnapshotKind
from ftlayer.common.printable import described
from ftlayer.errors import CodecError, MalformedRequestError
from ftlayer.functions.conversion import schema_text
from ftlayer.records.ids import U64Array
from ftlayer.records.ipc import UNREADABLE, as_message, has_dictionaries, read_batch, read_one_batch
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.protocol.messages import FromSlot, ToSlot
from ftlayer.topology.job_graph import Channel, JobEdge
from ftlayer.transport.codec import plain_codec
from ftlayer.transport.frames import pack, unpack_map

# Frames of the control stream are messages of `ftlayer.runtime.protocol.messages` as msgpack maps,
# ``{"message": name, "fields": {…}}``. Reading is strict: an unknown name or field, a missing field or a value of
# another type is a `MalformedRequestError`.
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


# edge, sender, receiver, bytes; in front of all of them one byte that says what they are.
_GRANT = struct.Struct("<IIIq")
_GRANTS, _LIMITS = b"\x00", b"\x01"


def encode_grants(grants: dict[Channel, int]) -> bytes:
    """Return the bytes of credit that go back to the senders of channels, as bytes."""
    return _encode_numbers(_GRANTS, grants)


def encode_limits(limits: dict[Channel, int]) -> bytes:
    """Return how many bytes may be in flight on channels from now on, as bytes."""
    return _encode_numbers(_LIMITS, limits)


def is_limits(data: bytes) -> bool:
    """Whether bytes that come back to a sender are those of `encode_limits`."""
    return data[:1] == _LIMITS


def decode_grants(data: bytes) -> list[tuple[Channel, int]]:
    if len(data) % _GRANT.size != 1 or data[:1] not in (_GRANTS, _LIMITS):
        raise CodecError(f"credits come in {_GRANT.size} bytes each behind one byte, not in {len(data)}")
    numbers = [(Channel(e, s, r), size) for e, s, r, size in _GRANT.iter_unpack(data[1:])]
    if any(size < 0 for _, size in numbers):
        raise CodecError("a credit is negative")
    return numbers


def _encode_numbers(kind: bytes, numbers: dict[Channel, int]) -> bytes:
    return kind + b"".join(
        _GRANT.pack(channel.edge, channel.sender, channel.receiver, number)
        for channel, number in numbers.items()
    )


# version, kind, flags, edge, sender, receiver, rows, ids, payload bytes (for marks: the time of a watermark or a
# latency marker, or the number of a checkpoint).
_HEADER = struct.Struct("<BBHIIIIIq")
HEADER_BYTES = _HEADER.size
VERSION = 2  # `_SPLIT` and `_SPLITS` came later: nothing that was written before has them.

_BATCH, _WATERMARK, _IDLE, _END, _BARRIER, _CANCEL, _LATENCY, _SPLITS = range(8)

_LINEAGE, _OFFSETS, _ORIGINS, _TIMES, _STREAM, _TRIES, _IDS, _SPLIT = 1, 2, 4, 8, 16, 32, 64, 128
# Without `_IDS`, each record's id is its root.
_OF_LINEAGE = _OFFSETS | _ORIGINS | _TRIES | _IDS
_ALL_FLAGS = _LINEAGE | _OF_LINEAGE | _TIMES | _STREAM | _SPLIT

_PADDING = bytes(8)

# Behind the header of a barrier: started_ms, timeout_ms (-1: none), alignment, kind, final, full; the location follows
# as UTF-8.
_BARRIER_BODY = struct.Struct("<qqBBBB")

# Behind the header of a latency marker: the root; the source's uid follows as UTF-8.
_LATENCY_BODY = struct.Struct("<Q")

# Behind the header of splits, which has in place of the time how many are open: how many are done, and whether they are
# endless; the numbers of all of them follow as int64.
_SPLITS_BODY = struct.Struct("<II")

_ALIGNMENTS = tuple(Alignment)
_KINDS = tuple(SnapshotKind)


class ElementCodec:
    """Writes and reads the elements of a graph's channels."""

    def __init__(self, edges: Sequence[JobEdge]) -> None:
        """Take the graph's edges; an edge's number is its position."""
        self._schemas = [edge.schema for edge in edges]
        self._with_schema = [has_dictionaries(edge.schema) for edge in edges]
        self._channels: dict[tuple[int, int, int], Channel] = {}

    def encode(self, channel: Channel, element: messages.Element) -> bytes:
        """Return a frame; `CodecError` for a payload that has not the columns of the channel's edge."""
        match element:
            case messages.Batch():
                return self._encode_batch(channel, element)
            case messages.Watermark(time_ms):
                return _mark(channel, _WATERMARK, time_ms)
            case messages.Idle():
                return _mark(channel, _IDLE, 0)
            case messages.EndOfStream():
                return _mark(channel, _END, 0)
            case messages.Barrier(checkpoint):
                return _mark(channel, _BARRIER, checkpoint) + _pack_barrier(element)
            case messages.CancelMarker(checkpoint):
                return _mark(channel, _CANCEL, checkpoint)
            case messages.LatencyMarker(source, wall_ms, root):
                return _mark(channel, _LATENCY, wall_ms) + _LATENCY_BODY.pack(root) + source.encode()
            case messages.Splits(first, done, quiet, endless):
                numbers = np.array([*first, *done, *quiet], np.int64).tobytes()
                return _mark(channel, _SPLITS, len(first)) + _SPLITS_BODY.pack(len(done), endless) + numbers

    def decode(self, frame: pa.Buffer) -> tuple[Channel, messages.Element]:
        """Read a frame; arrays and columns are views of it, and cannot be written to.

        Raises `CodecError` for bytes that are truncated or malformed, or of an edge this graph has not.
        """
        header = _Header.read(frame)
        key = header.edge, header.sender, header.receiver
        channel = self._channels.get(key)
        if channel is None:
            if header.edge >= len(self._schemas):
                raise CodecError(f"a frame names edge {header.edge}; there are {len(self._schemas)}")
            channel = self._channels[key] = Channel(*key)
        if header.kind == _BATCH:
            return channel, self._decode_batch(_aligned(frame), header, header.edge)
        return channel, _decode_mark(frame, header)

    def decode_for(self, edge: int, frame: pa.Buffer) -> messages.Batch:
        """Read the batch of a frame that was written for a channel of another graph, as one of ``edge``.

        Raises `CodecError` as `decode`, and for a frame that holds a mark.
        """
        header = _Header.read(frame)
        if header.kind != _BATCH:
            raise CodecError("a frame of records in flight holds a mark")
        return self._decode_batch(_aligned(frame), header, edge)

    def _encode_batch(self, channel: Channel, batch: messages.Batch) -> bytes:
        edge, payload = channel.edge, batch.payload
        self._check_schema(edge, payload.schema)
        flags, ids, parts = 0, 0, [b""]
        lineage = batch.lineage
        if lineage is not None:
            flags, ids = _LINEAGE, len(lineage.roots)
            parts.append(_bytes_of(lineage.roots))
            if lineage.ids is not lineage.roots:
                flags |= _IDS
                parts.append(_bytes_of(lineage.ids))
            if lineage.origins is not None:
                flags |= _ORIGINS
                parts.append(_bytes_of(lineage.origins))
            if lineage.tries is not None:
                flags |= _TRIES
                parts.append(_bytes_of(lineage.tries))
        if batch.times is not None:
            flags |= _TIMES
            parts.append(_bytes_of(batch.times))
        if lineage is not None and lineage.offsets is not None:
            flags |= _OFFSETS
            parts += [_bytes_of(lineage.offsets), _PADDING[: _pad(lineage.offsets.nbytes)]]
        if batch.split is not None:
            flags |= _SPLIT
            parts.append(batch.split.to_bytes(8, "little", signed=True))
        if self._with_schema[edge]:
            flags |= _STREAM
        body = as_message(payload, dictionaries=self._with_schema[edge])
        parts.append(body)
        parts[0] = _HEADER.pack(
            VERSION, _BATCH, flags, edge, channel.sender, channel.receiver, payload.num_rows, ids, body.size
        )
        return b"".join(parts)

    def _check_schema(self, edge: int, schema: pa.Schema) -> None:
        wanted = self._schemas[edge]
        if not schema.equals(wanted) and (schema.names != wanted.names or schema.types != wanted.types):
            raise CodecError(
                f"edge {edge} carries the columns {schema_text(wanted)}, and was given {schema_text(schema)}"
            )

    def _decode_batch(self, frame: pa.Buffer, header: _Header, edge: int) -> messages.Batch:
        lineage, times, split, start = _read_arrays(frame, header)
        if header.number < 0 or start + header.number != frame.size:
            raise CodecError(f"a frame of {frame.size} bytes should have {start} + {header.number}")
        body = frame.slice(start)
        try:
            payload = (
                read_one_batch(body) if header.flags & _STREAM else read_batch(body, self._schemas[edge])
            )
        except UNREADABLE as error:
            raise CodecError(f"the payload of edge {edge} is not readable ({described(error)})") from error
        if payload.num_rows != header.rows:
            raise CodecError(f"a frame of {header.rows} rows has a payload of {payload.num_rows}")
        self._check_schema(edge, payload.schema)
        return messages.Batch(payload, lineage, times, split)


def roots_in(frame: pa.Buffer | bytes) -> U64Array:
    """Return the roots of an encoded element without reading the rest: uint64[m], views of the frame.

    Raises `CodecError` as `ElementCodec.decode`, as far as it looks.
    """
    buffer = pa.py_buffer(frame)
    header = _Header.read(buffer)
    if header.kind != _BATCH or not header.flags & _LINEAGE:
        return np.empty(0, np.uint64)
    _need(buffer, HEADER_BYTES + 8 * header.ids)
    return np.frombuffer(buffer, np.uint64, header.ids, HEADER_BYTES)


def rows_in(frame: bytes) -> int:
    """Return how many records an encoded element has; `CodecError` as `roots_in`."""
    return _Header.read(pa.py_buffer(frame)).rows


def version_of(frame: pa.Buffer) -> int:
    """Return the version of an encoded element, which may not be `VERSION`; `CodecError` for no element."""
    _need(frame, HEADER_BYTES)
    version: int = _HEADER.unpack_from(frame)[0]
    return version


def is_barrier(frame: pa.Buffer | bytes) -> bool:
    """Whether an encoded element is a `Barrier`; of any bytes."""
    seen = memoryview(frame)
    return len(seen) > 1 and seen[1] == _BARRIER


@dataclass(frozen=True, slots=True)
class _Header:
    kind: int
    flags: int
    edge: int
    sender: int
    receiver: int
    rows: int
    ids: int
    number: int

    @classmethod
    def read(cls, frame: pa.Buffer) -> _Header:
        _need(frame, HEADER_BYTES)
        version, *fields = _HEADER.unpack_from(frame)
        header = cls(*fields)
        if version != VERSION:
            raise CodecError(f"a frame of version {version}; this slot reads version {VERSION}")
        if header.kind > _SPLITS or header.flags & ~_ALL_FLAGS or (header.kind != _BATCH and header.flags):
            raise CodecError(f"a frame of kind {header.kind} with flags {header.flags:#x} makes no sense")
        if not header.flags & _LINEAGE and header.flags & _OF_LINEAGE:
            raise CodecError("a frame has parts of a lineage and no lineage")
        return header


def _read_arrays(
    frame: pa.Buffer, header: _Header
) -> tuple[messages.RecordIds | None, npt.NDArray[np.int64] | None, int | None, int]:
    rows, ids, flags = header.rows, header.ids, header.flags
    at = HEADER_BYTES

    def take(kind: type[np.generic], count: int) -> npt.NDArray[Any]:
        nonlocal at
        size = count * np.dtype(kind).itemsize
        _need(frame, at + size)
        array = np.frombuffer(frame, kind, count, at)
        at += size + _pad(size)
        return array

    lineage = None
    if flags & _LINEAGE:
        roots = take(np.uint64, ids)
        record_ids = take(np.uint64, ids) if flags & _IDS else roots
        origins = take(np.uint64, ids) if flags & _ORIGINS else None
        tries = take(np.uint64, ids) if flags & _TRIES else None
    times = take(np.int64, rows) if flags & _TIMES else None
    if flags & _LINEAGE:
        offsets = take(np.int32, rows + 1) if flags & _OFFSETS else None
        _check_offsets(offsets, rows, ids)
        lineage = messages.RecordIds(roots, record_ids, offsets, origins, tries)
    split = int(take(np.int64, 1)[0]) if flags & _SPLIT else None
    return lineage, times, split, at


def _check_offsets(offsets: npt.NDArray[np.int32] | None, rows: int, ids: int) -> None:
    if offsets is None:
        if ids != rows:
            raise CodecError(f"{rows} rows have {ids} ids and nothing says whose they are")
    elif offsets[0] != 0 or offsets[-1] != ids or (np.diff(offsets) < 0).any():
        raise CodecError(f"the offsets of {ids} ids over {rows} rows make no sense")


def _decode_mark(frame: pa.Buffer, header: _Header) -> messages.Element:
    if header.kind == _BARRIER:
        return _unpack_barrier(header.number, frame.slice(HEADER_BYTES))
    if header.kind == _LATENCY:
        return _unpack_latency(header.number, frame.slice(HEADER_BYTES))
    if header.kind == _SPLITS:
        return _unpack_splits(header.number, frame.slice(HEADER_BYTES))
    if frame.size != HEADER_BYTES:
        raise CodecError(f"a mark has {HEADER_BYTES} bytes, not {frame.size}")
    if header.kind == _WATERMARK:
        return messages.Watermark(header.number)
    if header.kind == _CANCEL:
        return messages.CancelMarker(header.number)
    return messages.Idle() if header.kind == _IDLE else messages.EndOfStream()


def _mark(channel: Channel, kind: int, number: int) -> bytes:
    return _HEADER.pack(VERSION, kind, 0, channel.edge, channel.sender, channel.receiver, 0, 0, number)


def _need(frame: pa.Buffer, size: int) -> None:
    if frame.size < size:
        raise CodecError(f"a frame of {frame.size} bytes is truncated; {size} are needed")


def _pad(size: int) -> int:
    return -size % 8


def _aligned(frame: pa.Buffer) -> pa.Buffer:
    """Copy a frame that begins at an odd address: the C kernels take aligned arrays only."""
    return frame if frame.address % 8 == 0 else pa.py_buffer(np.frombuffer(frame, np.uint8).copy())


def _bytes_of(array: npt.NDArray[Any]) -> Any:
    return np.ascontiguousarray(array).data.cast("B") if len(array) else b""


def _pack_barrier(barrier: messages.Barrier) -> bytes:
    """Return all of a barrier but its checkpoint, which is in the header."""
    body = _BARRIER_BODY.pack(
        barrier.started_ms,
        -1 if barrier.timeout_ms is None else barrier.timeout_ms,
        _ALIGNMENTS.index(barrier.alignment),
        _KINDS.index(barrier.kind),
        barrier.final,
        barrier.full,
    )
    return body + barrier.location.encode()


def _unpack_latency(wall_ms: int, body: pa.Buffer) -> messages.LatencyMarker:
    (root,) = _fields_of("a latency marker", _LATENCY_BODY, body)
    source = _text_behind(_LATENCY_BODY, body, "the source of a latency marker")
    return messages.LatencyMarker(source, wall_ms, root)


def _fields_of(what: str, kind: struct.Struct, body: pa.Buffer) -> tuple[Any, ...]:
    if body.size < kind.size:
        raise CodecError(f"{what} of {body.size} bytes is truncated; {kind.size} are needed")
    return kind.unpack_from(body)


def _text_behind(kind: struct.Struct, body: pa.Buffer, what: str) -> str:
    try:
        return str(body[kind.size :].to_pybytes().decode())
    except UnicodeDecodeError as error:
        raise CodecError(f"{what} is not readable ({error})") from None


def _unpack_splits(first: int, body: pa.Buffer) -> messages.Splits:
    count, rest = divmod(body.size - _SPLITS_BODY.size, 8)
    if count < 0 or rest or not 0 <= first <= count:
        raise CodecError(f"{body.size} bytes do not hold the numbers of splits, of which {first} are open")
    done, endless = _SPLITS_BODY.unpack_from(body)
    if done > count - first:
        raise CodecError(f"{count} splits cannot be {first} open ones and {done} that are done")
    numbers = tuple(np.frombuffer(body, "<i8", count, _SPLITS_BODY.size).tolist())
    return messages.Splits(
        numbers[:first], numbers[first : first + done], numbers[first + done :], bool(endless)
    )


def _unpack_barrier(checkpoint: int, body: pa.Buffer) -> messages.Barrier:
    started_ms, timeout_ms, alignment, kind, final, full = _fields_of("a barrier", _BARRIER_BODY, body)
    if alignment >= len(_ALIGNMENTS) or kind >= len(_KINDS) or max(final, full) > 1 or timeout_ms < -1:
        raise CodecError(f"a barrier of checkpoint {checkpoint} makes no sense")
    location = _text_behind(_BARRIER_BODY, body, "the location in a barrier")
    return messages.Barrier(
        checkpoint,
        started_ms,
        _ALIGNMENTS[alignment],
        None if timeout_ms < 0 else timeout_ms,
        _KINDS[kind],
        bool(final),
        location,
        bool(full),
    )
