"""Streams of calls: what a record batch has to look like, and what is said when it does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import MalformedRequestError
from ftlayer.layer.calls import Envelope, EventIds, Ingest, Persist, SourcePosition, Xor
from ftlayer.service.checks import check_call
from ftlayer.service.put import (
    BulkCall,
    PutDecoder,
    PutHeader,
    is_last_part,
    part_of,
    put_batch,
    put_metadata,
    put_schema,
)

ROOTS = np.array([1, 2**64 - 1], np.uint64)
PAYLOAD = pa.record_batch({"ft.root": ["a", None], "n": [1, 2]}).replace_schema_metadata({"k": "v"})


def header_of(call: BulkCall) -> PutHeader:
    hashes = isinstance(call, Persist) and call.key_hashes is not None
    return PutHeader(type(call).__name__, "me", getattr(call, "stream", ""), hashes)


def through(call: BulkCall) -> BulkCall:
    header = PutHeader.unpack(header_of(call).pack())
    schema = put_schema(call)
    decoder = PutDecoder(header, schema)
    envelope, fields = decoder.read_metadata(put_metadata(call, 5))
    assert envelope == Envelope("me", 5)
    return decoder.decode(put_batch(call, schema), envelope, fields)


@pytest.mark.parametrize(
    "hashes",
    [None, np.array([1, -1], np.int32), np.arange(6, dtype=np.int32).reshape(2, 3)],
)
@pytest.mark.parametrize("position", [None, SourcePosition("p", b"a", b"b"), SourcePosition("p", None, b"")])
def test_persist_comes_back(hashes: Any, position: SourcePosition | None) -> None:
    call = through(Persist("q/s", PAYLOAD, ROOTS, ROOTS, hashes, position))
    assert isinstance(call, Persist)
    assert call.payload.equals(PAYLOAD, check_metadata=True)
    assert call.roots.tolist() == call.values.tolist() == ROOTS.tolist()
    assert call.roots.flags.writeable
    assert call.position == position
    if hashes is None:
        assert call.key_hashes is None
    else:
        assert call.key_hashes is not None
        assert call.key_hashes.shape == hashes.shape
        assert call.key_hashes.tolist() == hashes.tolist()


def test_ingest_and_xor_come_back() -> None:
    ingest = through(Ingest("ingest/x", PAYLOAD))
    assert isinstance(ingest, Ingest)
    assert ingest.payload.equals(PAYLOAD, check_metadata=True)
    xor = through(Xor(ROOTS, ROOTS, 3, True))
    assert isinstance(xor, Xor)
    assert (xor.roots.tolist(), xor.incarnation, xor.hold) == (ROOTS.tolist(), 3, True)


def test_sliced_columns_are_read_from_their_offset() -> None:
    long = pa.table(
        {"ft.root": pa.array(range(1, 9), pa.uint64()), "ft.value": pa.array(range(8), pa.uint64())}
    )
    batch = long.to_batches()[0].slice(3, 2)
    decoder = PutDecoder(PutHeader("Xor", "me"), batch.schema)
    call = decoder.decode(batch, Envelope("me", 1), {"sequence": 1, "incarnation": 1})
    assert isinstance(call, Xor)
    assert call.roots.tolist() == [4, 5]
    assert call.values.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ({"call": "Stats"}, "descriptor.call"),
        ({"call": ["Xor"]}, "descriptor.call"),
        ({}, "call"),
        ({"call": "Xor"}, "descriptor.client"),
        ({"call": "Xor", "client": 3}, "descriptor.client"),
        ({"call": "Persist", "client": "me"}, "descriptor.stream"),
        ({"call": "Persist", "client": "me", "stream": "s", "key_hashes": 1}, "descriptor.key_hashes"),
        ({"call": "Xor", "client": "me", "more": 1}, "more"),
    ],
)
def test_a_wrong_descriptor_is_named(command: dict[str, Any], named: str) -> None:
    with pytest.raises(MalformedRequestError) as caught:
        PutHeader.unpack(msgpack.packb(command))
    assert named in str(caught.value)


XOR = PutHeader("Xor", "me")
PERSIST = PutHeader("Persist", "me", "s", True)
u64 = pa.uint64()


@pytest.mark.parametrize(
    ("header", "fields", "named"),
    [
        (XOR, [("ft.root", u64)], "ft.value"),
        (XOR, [("root", u64), ("ft.value", u64)], "ft.root"),
        (XOR, [("ft.root", pa.int64()), ("ft.value", u64)], "ft.root"),
        (XOR, [("ft.root", u64), ("ft.value", u64), ("more", u64)], "2 columns"),
        (PERSIST, [("ft.root", u64), ("ft.value", u64)], "ft.key_hash"),
        (PERSIST, [("ft.root", u64), ("ft.value", u64), ("ft.key_hash", pa.int64())], "ft.key_hash"),
        (
            PERSIST,
            [("ft.root", u64), ("ft.value", u64), ("ft.key_hash", pa.list_(pa.int32()))],
            "ft.key_hash",
        ),
        (PutHeader("Parts"), [("part", pa.string())], "part"),
    ],
)
def test_a_wrong_schema_is_named(header: PutHeader, fields: list[Any], named: str) -> None:
    with pytest.raises(MalformedRequestError) as caught:
        PutDecoder(header, pa.schema(fields))
    assert named in str(caught.value)


def column(values: list[int | None], kind: pa.DataType = u64) -> pa.Array:
    return pa.array(values, kind)


@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"ft.root": column([1, None]), "ft.value": column([1, 2])}, "ft.root"),
        ({"ft.root": column([1, 2]), "ft.value": column([None, None])}, "ft.value"),
        ({"ft.root": column([1, 0]), "ft.value": column([1, 2])}, "roots[1]"),
    ],
)
def test_wrong_ids_are_named(columns: dict[str, pa.Array], named: str) -> None:
    batch = pa.record_batch(columns)
    decoder = PutDecoder(XOR, batch.schema)
    with pytest.raises(MalformedRequestError) as caught:
        decoder.decode(batch, Envelope("me", 1), {"sequence": 1, "incarnation": 1})
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "hashes",
    [
        column([1, None], pa.int32()),
        pa.array([[1], None], pa.list_(pa.int32(), 1)),
        pa.array([[1], [None]], pa.list_(pa.int32(), 1)),
    ],
)
def test_null_key_hashes_are_named(hashes: pa.Array) -> None:
    batch = pa.record_batch({"ft.root": column([1, 2]), "ft.value": column([1, 2]), "ft.key_hash": hashes})
    decoder = PutDecoder(PERSIST, batch.schema)
    with pytest.raises(MalformedRequestError, match=r"ft\.key_hash"):
        decoder.decode(batch, Envelope("me", 1), {"sequence": 1})


@pytest.mark.parametrize(
    ("header", "metadata", "named"),
    [
        (XOR, {"sequence": 1}, "incarnation"),
        (XOR, {"incarnation": 1}, "sequence"),
        (XOR, {"sequence": 0, "incarnation": 1}, "sequence"),
        (XOR, {"sequence": 1, "incarnation": 1, "position": 1}, "position"),
        (PERSIST, {"sequence": 1, "hold": True}, "hold"),
    ],
)
def test_wrong_metadata_is_named(header: PutHeader, metadata: dict[str, Any], named: str) -> None:
    fields = [("ft.root", u64), ("ft.value", u64), ("ft.key_hash", pa.int32())]
    decoder = PutDecoder(header, pa.schema(fields[: 3 if header.key_hashes else 2]))
    with pytest.raises(MalformedRequestError) as caught:
        decoder.read_metadata(msgpack.packb(metadata))
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"incarnation": "1"}, "incarnation"),
        ({"incarnation": 1, "hold": 1}, "hold"),
    ],
)
def test_wrong_fields_of_an_xor_are_named(fields: dict[str, Any], named: str) -> None:
    batch = pa.record_batch({"ft.root": column([1]), "ft.value": column([1])})
    with pytest.raises(MalformedRequestError, match=named):
        PutDecoder(XOR, batch.schema).decode(batch, Envelope("me", 1), fields)


def test_a_wrong_position_is_named() -> None:
    call = Persist("s", PAYLOAD, ROOTS, ROOTS)
    decoder = PutDecoder(PutHeader("Persist", "me", "s"), put_schema(call))
    with pytest.raises(MalformedRequestError, match=r"position\.end"):
        decoder.decode(
            put_batch(call, put_schema(call)),
            Envelope("me", 1),
            {"position": {"partition": "p", "start": None}},
        )


def test_offsets_beyond_a_buffer_are_malformed() -> None:
    offsets = pa.py_buffer(np.array([0, 1_000_000, 5], np.int32).tobytes())
    broken = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"hello"))
    batch = pa.RecordBatch.from_arrays([broken], ["text"])
    with pytest.raises(MalformedRequestError, match="record batch"):
        PutDecoder(PutHeader("Ingest", "me", "ingest/x"), batch.schema).decode(batch, Envelope("me", 1), {})


def test_ids_come_back_and_are_checked() -> None:
    ids = EventIds(ROOTS, np.array([0, 1, 2], np.int32), np.array([0, -1], np.int32), ("parse",))
    for call in (Persist("q/s", PAYLOAD, ROOTS, ROOTS, ids=ids), Xor(ROOTS, ROOTS, 3, ids=ids)):
        came = through(call)
        assert isinstance(came, (Persist, Xor))
        assert came.ids is not None
        assert came.ids.ids.tolist() == ROOTS.tolist()
        assert came.ids.owners.tolist() == [0, -1]
        assert came.ids.operators == ("parse",)
        with pytest.raises(MalformedRequestError, match=r"ids: the XOR of list 1"):
            through(dataclasses.replace(call, values=ROOTS[[0, 0]]))
    decoder = PutDecoder(XOR, put_schema(Xor(ROOTS, ROOTS, 3)))
    batch = put_batch(Xor(ROOTS, ROOTS, 3), put_schema(Xor(ROOTS, ROOTS, 3)))
    with pytest.raises(MalformedRequestError, match=r"app_metadata\.ids"):
        decoder.decode(batch, Envelope("me", 1), {"sequence": 1, "incarnation": 3, "ids": [1]})


def test_parts_are_single_rows() -> None:
    assert part_of(pa.record_batch({"part": pa.array([b"abc"])})) == b"abc"
    for rows in ([], [b"a", b"b"], [None]):
        with pytest.raises(MalformedRequestError, match="part"):
            part_of(pa.record_batch({"part": pa.array(rows, pa.binary())}))
    assert not is_last_part(None)
    with pytest.raises(MalformedRequestError, match="last"):
        is_last_part(msgpack.packb({"last": 1}))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_as_descriptor_or_metadata_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedRequestError):
        PutHeader.unpack(data)
    with pytest.raises(MalformedRequestError):
        PutDecoder(XOR, pa.schema([("ft.root", u64), ("ft.value", u64)])).read_metadata(data)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"values": ROOTS[:1]}, "Persist.values"),
        ({"roots": np.zeros(2, np.uint64)}, "Persist.roots[0]"),
        ({"key_hashes": np.zeros(3, np.int32)}, "Persist.key_hashes"),
        ({"key_hashes": np.zeros((2, 0), np.int32)}, "Persist.key_hashes"),
        ({"stream": ""}, "Persist.stream"),
    ],
)
def test_a_call_that_the_vertex_would_refuse_is_refused_before_it_is_sent(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(MalformedRequestError) as caught:
        check_call(dataclasses.replace(Persist("s", PAYLOAD, ROOTS, ROOTS), **changes))
    assert named in str(caught.value)
