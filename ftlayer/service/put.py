"""Calls as ``DoPut`` or ``DoExchange`` streams: many of one kind, each a record batch with its answer.

The descriptor's ``command`` is a msgpack map that opens the stream, each batch's ``app_metadata`` a
msgpack map that completes the call, and each call is answered by one reply or error frame
(`ftlayer.service.wire`) with its sequence, as soon as it is done and not always in order.

``{"call": "Persist", "client": c, "stream": s, "key_hashes": bool}``
    columns ``ft.root: uint64``, ``ft.value: uint64``, with ``key_hashes`` then ``ft.key_hash: int32`` or
    ``fixed_size_list<int32>[k]``, and after them the columns of the payload. A batch has
    ``{"sequence": n, "position": {"partition": p, "start": bytes or nil, "end": bytes}, "ids": {…}}``;
    position and ids (`EventIds`, for a vertex with the exact tracker) may be absent.
``{"call": "Ingest", "client": c, "stream": s}``
    the columns of the payload; a batch has ``{"sequence": n}``.
``{"call": "Xor", "client": c}``
    columns ``ft.root: uint64``, ``ft.value: uint64``; a batch has
    ``{"sequence": n, "incarnation": i, "hold": bool, "ids": {…}}``; hold and ids may be absent.
``{"call": "Parts"}``
    for a call whose frame is too long for one message: ``part: binary``, one row a batch, whose concatenation
    is the frame. The last batch has ``{"last": true}``, the others no metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.errors import MalformedRequestError
from ftlayer.layer.calls import I32, U64, Envelope, EventIds, Ingest, Persist, SourcePosition, Xor
from ftlayer.service.checks import check_call, check_name
from ftlayer.service.codec import check_names, dataclass_codec, malformed
from ftlayer.service.wire import envelope_of, pack, unpack_map

BulkCall = Persist | Ingest | Xor

ROOT = pa.field("ft.root", pa.uint64())
VALUE = pa.field("ft.value", pa.uint64())
KEY_HASH = "ft.key_hash"
PART_SCHEMA = pa.schema([pa.field("part", pa.binary())])
_XOR_SCHEMA = pa.schema([ROOT, VALUE])
_POSITION = dataclass_codec(SourcePosition)
_EVENT_IDS = dataclass_codec(EventIds)


@dataclass(frozen=True)
class PutHeader:
    """What a stream's descriptor says of all its calls; ``client`` is "" for parts."""

    call: str
    client: str = ""
    stream: str = ""
    key_hashes: bool = False

    def pack(self) -> bytes:
        """Return the descriptor's command."""
        fields: dict[str, Any] = {"call": self.call}
        if self.client:
            fields["client"] = self.client
        if self.stream:
            fields["stream"] = self.stream
        if self.key_hashes:
            fields["key_hashes"] = True
        return pack(fields, "descriptor")

    @classmethod
    def unpack(cls, command: bytes) -> PutHeader:
        """Read a descriptor's command; `MalformedRequestError` names what is wrong."""
        fields = unpack_map(command, "descriptor", ("call",), ("client", "stream", "key_hashes"))
        header = cls(**fields)
        if header.call not in ("Persist", "Ingest", "Xor", "Parts"):
            raise MalformedRequestError(
                f"descriptor.call: expected Persist, Ingest, Xor or Parts, got {header.call!r}"
            )
        if type(header.key_hashes) is not bool:
            raise malformed("descriptor.key_hashes", "a boolean", header.key_hashes)
        if header.call != "Parts":
            _check_text(header.client, "descriptor.client")
        if header.call in ("Persist", "Ingest"):
            _check_text(header.stream, "descriptor.stream")
        return header


def _check_text(value: object, where: str) -> None:
    if type(value) is not str:
        raise malformed(where, "a name", value)
    check_name(value, where)


# ---------------------------------------------------------------- client's side


def put_schema(call: BulkCall) -> pa.Schema:
    """Return the schema of the stream that can carry ``call``."""
    match call:
        case Xor():
            return _XOR_SCHEMA
        case Ingest():
            return call.payload.schema
        case Persist():
            fields = [ROOT, VALUE]
            if call.key_hashes is not None:
                hashes = call.key_hashes
                width = pa.int32() if hashes.ndim == 1 else pa.list_(pa.int32(), hashes.shape[1])
                fields.append(pa.field(KEY_HASH, width))
            return pa.schema([*fields, *call.payload.schema], metadata=call.payload.schema.metadata)


def put_batch(call: BulkCall, schema: pa.Schema) -> pa.RecordBatch:
    """Return ``call`` as a batch of its stream's ``schema``."""
    match call:
        case Xor():
            return pa.RecordBatch.from_arrays([pa.array(call.roots), pa.array(call.values)], schema=schema)
        case Ingest():
            return call.payload
        case Persist():
            columns = [pa.array(call.roots), pa.array(call.values)]
            if call.key_hashes is not None:
                columns.append(_hash_column(call.key_hashes))
            return pa.RecordBatch.from_arrays([*columns, *call.payload.columns], schema=schema)


def put_metadata(call: BulkCall, sequence: int) -> bytes:
    """Return the ``app_metadata`` of a call's batch."""
    fields: dict[str, Any] = {"sequence": sequence}
    match call:
        case Xor():
            fields |= {"incarnation": call.incarnation, "hold": call.hold}
        case Persist() if call.position is not None:
            fields["position"] = _POSITION.pack(call.position)
    if isinstance(call, (Persist, Xor)) and call.ids is not None:
        fields["ids"] = _EVENT_IDS.pack(call.ids)
    return pack(fields, "app_metadata")


def last_part_metadata() -> bytes:
    """Return the ``app_metadata`` of a frame's last part."""
    return pack({"last": True}, "app_metadata")


def _hash_column(key_hashes: I32) -> pa.Array:
    if key_hashes.ndim == 1:
        return pa.array(key_hashes)
    return pa.FixedSizeListArray.from_arrays(pa.array(key_hashes.reshape(-1)), key_hashes.shape[1])


# ---------------------------------------------------------------- vertex's side


class PutDecoder:
    """Reads the calls of one stream; made when its schema is known, so that the schema is checked once."""

    def __init__(self, header: PutHeader, schema: pa.Schema) -> None:
        """Raise `MalformedRequestError` where the schema is not the one the header asks for."""
        self._header = header
        try:
            check_names(schema)
        except ValueError as error:
            raise MalformedRequestError(f"schema: a column's name is not UTF-8 ({error})") from None
        leading = {"Persist": [ROOT, VALUE], "Xor": [ROOT, VALUE], "Ingest": [], "Parts": list(PART_SCHEMA)}
        for index, wanted in enumerate(leading[header.call]):
            _check_field(schema, index, wanted.name, wanted.type)
        self._payload_from = len(leading[header.call])
        if header.call == "Persist" and header.key_hashes:
            _check_hash_field(schema, self._payload_from)
            self._payload_from += 1
        if header.call in ("Xor", "Parts") and len(schema) != self._payload_from:
            raise MalformedRequestError(
                f"schema: expected {self._payload_from} columns for {header.call}, got {len(schema)}"
            )
        self._payload_schema = pa.schema(list(schema)[self._payload_from :], metadata=schema.metadata)

    def decode(self, batch: pa.RecordBatch, envelope: Envelope, fields: dict[str, Any]) -> BulkCall:
        """Return the call of one batch, checked; `fields` are those `read_metadata` returned."""
        _check_buffers(batch)
        call = self._call(batch, fields)
        check_call(call)
        return call

    def read_metadata(self, metadata: bytes) -> tuple[Envelope, dict[str, Any]]:
        """Return the envelope of a batch and what else its ``app_metadata`` has."""
        required = ("sequence", "incarnation") if self._header.call == "Xor" else ("sequence",)
        optional = {"Xor": ("hold", "ids"), "Persist": ("position", "ids")}.get(self._header.call, ())
        fields = unpack_map(metadata, "app_metadata", required, optional)
        return envelope_of({"client": self._header.client, "sequence": fields["sequence"]}), fields

    def _call(self, batch: pa.RecordBatch, fields: dict[str, Any]) -> BulkCall:
        ids = fields.get("ids")
        event_ids = None if ids is None else _EVENT_IDS.unpack(ids, "app_metadata.ids")
        if self._header.call == "Xor":
            incarnation, hold = fields["incarnation"], fields.get("hold", False)
            if type(incarnation) is not int:
                raise malformed("app_metadata.incarnation", "an integer", incarnation)
            if type(hold) is not bool:
                raise malformed("app_metadata.hold", "a boolean", hold)
            return Xor(_ids(batch, 0), _ids(batch, 1), incarnation, hold, event_ids)
        payload = pa.RecordBatch.from_arrays(batch.columns[self._payload_from :], schema=self._payload_schema)
        if self._header.call == "Ingest":
            return Ingest(self._header.stream, payload)
        position = fields.get("position")
        return Persist(
            self._header.stream,
            payload,
            _ids(batch, 0),
            _ids(batch, 1),
            _key_hashes(batch.column(2)) if self._header.key_hashes else None,
            None if position is None else _POSITION.unpack(position, "app_metadata.position"),
            event_ids,
        )


def part_of(batch: pa.RecordBatch) -> bytes:
    """Return the part of a frame that a batch carries."""
    _check_buffers(batch)
    if batch.num_rows != 1 or batch.column(0).null_count:
        raise MalformedRequestError(f"part: expected one row that is not null, got {batch.num_rows} rows")
    value = batch.column(0)[0].as_py()
    return bytes(value)


def is_last_part(metadata: bytes | None) -> bool:
    """Whether a part's ``app_metadata`` says that the frame is complete."""
    if metadata is None:
        return False
    last = unpack_map(metadata, "app_metadata", ("last",))["last"]
    if type(last) is not bool:
        raise malformed("app_metadata.last", "a boolean", last)
    return last


def _check_buffers(batch: pa.RecordBatch) -> None:
    """Check every offset of a batch, so that nobody reads beyond its buffers."""
    try:
        batch.validate(full=True)
    except (pa.ArrowException, ValueError) as error:
        raise MalformedRequestError(f"record batch: {error}") from None


def _check_field(schema: pa.Schema, index: int, name: str, kind: pa.DataType) -> None:
    got = schema.field(index) if index < len(schema) else None
    if got is None or got.name != name or got.type != kind:
        raise MalformedRequestError(
            f"schema: expected column {index} to be {name}: {kind}, got {_described(got)}"
        )


def _check_hash_field(schema: pa.Schema, index: int) -> None:
    got = schema.field(index) if index < len(schema) else None
    fits = got is not None and (
        got.type == pa.int32()
        or (pa.types.is_fixed_size_list(got.type) and got.type.value_type == pa.int32())
    )
    if got is None or got.name != KEY_HASH or not fits:
        raise MalformedRequestError(
            f"schema: expected column {index} to be {KEY_HASH}: int32 or fixed_size_list<int32>, "
            f"got {_described(got)}"
        )


def _described(field: pa.Field | None) -> str:
    return "no column" if field is None else f"{field.name}: {field.type}"


def _ids(batch: pa.RecordBatch, index: int) -> U64:
    column = batch.column(index)
    if column.null_count:
        raise MalformedRequestError(
            f"{batch.schema.field(index).name}: {column.null_count} of {len(column)} are null"
        )
    # A copy, because kernels are compiled for writable arrays and a view of Arrow's buffer is not one.
    return np.frombuffer(column.buffers()[1], np.uint64, len(column), 8 * column.offset).copy()


def _key_hashes(column: pa.Array) -> I32:
    flat = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
    if column.null_count or flat.null_count:
        raise MalformedRequestError(
            f"{KEY_HASH}: {column.null_count or flat.null_count} of {len(column)} are null"
        )
    values = np.array(flat.to_numpy(), np.int32)
    return values.reshape(len(column), column.type.list_size) if flat is not column else values
