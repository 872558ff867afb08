"""Frames: what goes in comes out, and nothing else goes in."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from enum import StrEnum
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer import errors
from ftlayer.common import failures
from ftlayer.common.rules.histogram import Exemplar
from ftlayer.errors import FTLayerError, MalformedRequestError, StoreFullError, UnsupportedError
from ftlayer.records.ipc import as_stream
from ftlayer.transport.flight_connection import error_frame
from ftlayer.vertex import calls
from ftlayer.vertex.calls import (
    I32,
    U64,
    Accepted,
    Envelope,
    EventIds,
    Failure,
    Persist,
    RootRange,
    SourcePosition,
    Xor,
)
from ftlayer.vertex.calls.jobs import HistogramDetails
from ftlayer.vertex.wire.frames import dataclass_codec, decode_call, decode_reply, encode_call, encode_reply

texts = st.text(st.characters(codec="utf-8"), max_size=5)
ids = st.integers(1, 2**64 - 1)


@st.composite
def record_batches(draw: st.DrawFn) -> pa.RecordBatch:
    rows = draw(st.integers(0, 3))
    words = st.lists(st.one_of(st.none(), texts), min_size=rows, max_size=rows)
    return pa.record_batch(
        {"word": pa.array(draw(words), pa.string()), "n": pa.array(range(rows), pa.int64())}
    )


def stream_options() -> st.SearchStrategy[calls.StreamOptions]:
    """Options that make sense: others cannot be made."""
    durations = st.integers(1, 1 << 41)
    return st.builds(
        calls.StreamOptions,
        timeout_ms=durations,
        max_attempts=st.none() | st.integers(1, (1 << 31) - 1),
        backoff_ms=st.lists(durations, max_size=2).map(tuple),
        jitter=st.floats(0, 1),
        max_pending=durations,
    )


@st.composite
def histograms(draw: st.DrawFn) -> HistogramDetails:
    """Histograms that make sense: others cannot be made."""
    bounds = sorted(draw(st.sets(st.floats(0, 60), max_size=2)))
    each = {"min_size": len(bounds) + 1, "max_size": len(bounds) + 1}
    counts = draw(st.lists(st.integers(0, 2**63), **each))
    exemplars = draw(st.just([]) | st.lists(st.none() | values_of(Exemplar), **each))
    return HistogramDetails(tuple(bounds), tuple(counts), draw(st.floats(0)), tuple(exemplars))


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for what the codec can carry, by type alone (without what `check_call` asks for)."""
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        bool: st.booleans(),
        str: texts,
        bytes: st.binary(max_size=5),
        U64: st.lists(st.integers(0, 2**64 - 1), max_size=4).map(lambda v: np.array(v, np.uint64)),
        I32: st.lists(st.integers(-(2**31), 2**31 - 1), min_size=4, max_size=4).flatmap(
            lambda v: st.sampled_from([np.array(v, np.int32), np.array(v, np.int32).reshape(2, 2)])
        ),
        pa.RecordBatch: record_batches(),
        RootRange: st.builds(RootRange, st.integers(1, 2**64 - 4), st.integers(0, 4)),
    }
    if hint in plain:
        return plain[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([st.none() if a is type(None) else values_of(a) for a in arguments])
    if origin is tuple and arguments[1:] == (...,):
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, arguments))
    if origin is dict:
        return st.dictionaries(texts, values_of(arguments[1]), max_size=2)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return st.sampled_from(list(hint))
    if hint is calls.StreamOptions:
        return stream_options()
    if hint is HistogramDetails:
        return histograms()
    hints = typing.get_type_hints(hint)
    fields = {field.name: values_of(hints[field.name]) for field in dataclasses.fields(hint)}
    if hint is Failure:
        # As a column: a pause of -1 stands for none.
        fields["after_ms"] = st.none() | st.integers(0, 2**63 - 1)
    return st.builds(hint, **fields)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and np.array_equal(a, b)
    if dataclasses.is_dataclass(a):
        names = [field.name for field in dataclasses.fields(a)]
        return type(a) is type(b) and all(same(getattr(a, name), getattr(b, name)) for name in names)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


@pytest.mark.parametrize(
    "kind", [*calls.CALLS.values(), *calls.REPLIES.values()], ids=lambda kind: kind.__name__
)
def test_every_dataclass_of_the_contract_comes_back_as_it_was(kind: type) -> None:
    codec = dataclass_codec(kind)

    @settings(max_examples=25, deadline=None)
    @given(values_of(kind))
    def check(value: Any) -> None:
        packed = msgpack.unpackb(msgpack.packb(codec.pack(value)))
        assert same(codec.unpack(packed, "x"), value)

    check()


def xor(rows: int = 3) -> Xor:
    return Xor(np.arange(1, rows + 1, dtype=np.uint64), np.arange(rows, dtype=np.uint64), 1, True)


def test_a_call_travels_with_its_envelope() -> None:
    call, envelope = decode_call(encode_call(xor(), Envelope("me", 7)))
    assert same(call, xor())
    assert envelope == Envelope("me", 7)


ROOTS = np.array([1, 2**64 - 1], np.uint64)
PERSIST = Persist("s", pa.record_batch({"n": [1, 2]}).replace_schema_metadata({"k": "v"}), ROOTS, ROOTS)


@pytest.mark.parametrize(
    "hashes", [None, np.array([1, -1], np.int32), np.arange(6, dtype=np.int32).reshape(2, 3)]
)
@pytest.mark.parametrize("position", [None, SourcePosition("p", b"a", b"b"), SourcePosition("p", None, b"")])
def test_persist_comes_back(hashes: Any, position: SourcePosition | None) -> None:
    sent = dataclasses.replace(PERSIST, key_hashes=hashes, position=position)
    call, _ = decode_call(encode_call(sent, Envelope("me", 1)))
    assert isinstance(call, Persist)
    assert call.payload.equals(PERSIST.payload, check_metadata=True)
    assert (call.key_hashes is None) == (hashes is None)
    assert hashes is None or np.array_equal(call.key_hashes, hashes)
    assert (call.roots.tolist(), call.position) == (ROOTS.tolist(), position)


def test_ids_come_back() -> None:
    ids = EventIds(ROOTS, np.array([0, 1, 2], np.int32), np.array([0, -1], np.int32), ("parse",))
    for sent in (dataclasses.replace(PERSIST, ids=ids), Xor(ROOTS, ROOTS, 3, ids=ids)):
        came, _ = decode_call(encode_call(sent, Envelope("me", 1)))
        assert isinstance(came, (Persist, Xor))
        assert same(came.ids, ids)


@pytest.mark.parametrize("roots", [RootRange(1, 2), RootRange(2**64 - 2, 2)])
@pytest.mark.parametrize("values", [None, ROOTS])
def test_a_range_of_roots_comes_back(roots: RootRange, values: U64 | None) -> None:
    sent = dataclasses.replace(PERSIST, roots=roots, values=values)
    came, _ = decode_call(encode_call(sent, Envelope("me", 1)))
    assert isinstance(came, Persist)
    assert came.roots == roots
    assert (came.values is None) == (values is None)


def test_an_event_without_values_has_those_of_its_roots() -> None:
    came, _ = decode_call(encode_call(Xor(ROOTS, None, 3), Envelope("me", 1)))
    assert isinstance(came, Xor)
    assert came.values is None
    assert came.deltas.tolist() == ROOTS.tolist()


def test_arrays_come_writable_because_kernels_are_compiled_for_those() -> None:
    call, _ = decode_call(encode_call(xor(), Envelope("me", 7)))
    assert isinstance(call, Xor)
    assert call.roots.flags.writeable


def test_a_reply_travels_with_its_sequence() -> None:
    assert decode_reply(encode_reply(Accepted(3), 9)) == (Accepted(3), 9)


@pytest.mark.parametrize(
    "kind",
    [
        kind
        for module in (errors, failures)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, FTLayerError)
    ],
)
def test_every_error_comes_back_as_the_class_it_was(kind: type[FTLayerError]) -> None:
    answer, sequence = decode_reply(error_frame(kind("what is wrong"), 4))
    assert type(answer) is kind
    assert str(answer) == "what is wrong"
    assert sequence == 4


def test_an_error_of_a_newer_vertex_is_still_an_error() -> None:
    answer, _ = decode_reply(msgpack.packb({"error": "FROM_THE_FUTURE", "message": "new"}))
    assert type(answer) is FTLayerError


def frame(**changes: Any) -> bytes:
    fields = {"roots": b"\1" + bytes(7), "values": bytes(8), "incarnation": 1, "hold": False}
    whole: dict[str, Any] = {"call": "Xor", "client": "me", "sequence": 1, "fields": fields}
    for name, value in changes.items():
        target = fields if name in fields or name == "extra" else whole
        if value is ...:
            del target[name]
        else:
            target[name] = value
    return typing.cast(bytes, msgpack.packb(whole))


def test_the_frame_that_the_next_test_spoils_is_good() -> None:
    decode_call(frame())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"call": 3}, "call"),
        ({"call": ["Xor"]}, "call"),
        ({"client": ...}, "client"),
        ({"client": ""}, "client"),
        ({"client": "x" * 300}, "client"),
        ({"client": 3}, "client"),
        ({"sequence": 0}, "sequence"),
        ({"sequence": True}, "sequence"),
        ({"sequence": 1 << 63}, "sequence"),
        ({"sequence": "1"}, "sequence"),
        ({"fields": ...}, "fields"),
        ({"fields": 3}, "Xor"),
        ({"another": 3}, "another"),
        ({"roots": bytes(8)}, "Xor.roots[0]"),
        ({"roots": b"123"}, "Xor.roots"),
        ({"roots": "12345678"}, "Xor.roots"),
        ({"roots": None}, "Xor.roots"),
        ({"roots": ...}, "Xor.roots"),
        ({"values": b""}, "Xor.values"),
        ({"incarnation": 1.0}, "Xor.incarnation"),
        ({"hold": 1}, "Xor.hold"),
        ({"extra": 1}, "extra"),
    ],
)
def test_what_is_wrong_with_a_frame_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(MalformedRequestError) as caught:
        decode_call(frame(**changes))
    assert named in str(caught.value)


def test_a_call_of_a_newer_tool_is_unsupported_and_says_who_is_older() -> None:
    with pytest.raises(UnsupportedError, match=r"no call 'Nothing'.*older"):
        decode_call(frame(call="Nothing"))


def test_a_call_without_effect_has_no_envelope() -> None:
    whole = {"call": "Stats", "client": "me", "sequence": 1, "fields": {}}
    with pytest.raises(MalformedRequestError, match="envelope"):
        decode_call(msgpack.packb(whole))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_call_or_malformed(data: bytes) -> None:
    with pytest.raises(MalformedRequestError):
        decode_call(data)


def spoiled(data: bytes) -> st.SearchStrategy[bytes]:
    flips = st.lists(st.tuples(st.integers(0, len(data) - 1), st.integers(1, 255)), min_size=1, max_size=4)

    def flip(changes: list[tuple[int, int]]) -> bytes:
        damaged = bytearray(data)
        for position, mask in changes:
            damaged[position] ^= mask
        return bytes(damaged)

    cuts = st.integers(0, len(data) - 1)
    return st.one_of(flips.map(flip), cuts.map(lambda size: data[:size]), cuts.map(lambda size: data[size:]))


def example_persist() -> calls.Persist:
    columns = {
        "text": pa.array(["a", None, "ccc"]),
        "nested": pa.array([[1], [], [2, 3]], pa.list_(pa.int32())),
        "dictionary": pa.array(["x", "y", "x"]).dictionary_encode(),
    }
    roots = np.array([1, 2, 3], np.uint64)
    hashes = np.arange(6, dtype=np.int32).reshape(3, 2)
    position = calls.SourcePosition("0", None, b"end")
    return calls.Persist("q/s", pa.record_batch(columns), roots, roots, hashes, position)


def read(payload: pa.RecordBatch) -> None:
    """Read every offset: what the vertex does to rows that move. What bytes a text has it does not look at."""
    rows = payload.take(pa.array(range(payload.num_rows)))
    for column in rows.columns:
        with contextlib.suppress(UnicodeDecodeError):
            column.to_pylist()


def example_range() -> calls.Persist:
    return dataclasses.replace(example_persist(), roots=calls.RootRange(1 << 60, 3), values=None)


@settings(max_examples=400, deadline=None)
@given(
    spoiled(encode_call(example_persist(), Envelope("me", 1)))
    | spoiled(encode_call(example_range(), Envelope("me", 1)))
)
def test_a_damaged_frame_is_a_call_or_malformed_and_safe_to_read(data: bytes) -> None:
    try:
        call, _ = decode_call(data)
    except (MalformedRequestError, UnsupportedError):
        return
    if isinstance(call, calls.Persist):
        read(call.payload)


@settings(max_examples=200, deadline=None)
@given(spoiled(as_stream(example_persist().payload).to_pybytes()))
def test_a_damaged_payload_is_malformed_or_safe_to_read(data: bytes) -> None:
    codec = dataclass_codec(calls.Ingest)
    try:
        call = codec.unpack({"stream": "ingest/x", "payload": data}, "Ingest")
    except MalformedRequestError:
        return
    read(call.payload)


def test_an_ipc_stream_with_two_batches_is_malformed() -> None:
    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"x": [1]})
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    with pytest.raises(MalformedRequestError, match="several"):
        dataclass_codec(calls.Ingest).unpack({"stream": "s", "payload": sink.getvalue().to_pybytes()}, "x")


def test_numbers_that_msgpack_cannot_hold_are_malformed_at_the_client() -> None:
    call = calls.BeginBatch("q", 1, 1 << 64)
    with pytest.raises(MalformedRequestError, match="BeginBatch"):
        encode_call(call, Envelope("me", 1))
    with pytest.raises(MalformedRequestError):
        encode_call(calls.BeginBatch("q\ud800", 1, 1), Envelope("me", 1))


def test_which_calls_have_an_envelope() -> None:
    assert calls.Persist.enveloped
    assert not calls.Deliverable.enveloped
    assert not calls.Stats.enveloped


def test_codes_of_errors_are_distinct() -> None:
    assert decode_reply(error_frame(StoreFullError("full")))[0].__class__ is StoreFullError


def fail(*failures: calls.Failure) -> calls.Fail:
    return calls.Fail(failures, 1)


def test_failures_may_come_one_by_one_as_other_clients_write_them() -> None:
    frame = {"call": "Fail", "client": "me", "sequence": 1}
    frame["fields"] = {"failures": [{"root": 7, "reason": "r"}], "incarnation": 1}
    call, _ = decode_call(msgpack.packb(frame))
    assert call == fail(calls.Failure(7, "r"))
    frame["fields"] = {"failures": {"roots": [7]}, "incarnation": 1}
    with pytest.raises(MalformedRequestError, match=r"Fail\.failures: expected a map with roots"):
        decode_call(msgpack.packb(frame))


def test_options_out_of_bounds_are_named_with_their_place() -> None:
    frame = msgpack.unpackb(encode_call(calls.OpenStream("s"), Envelope("me", 1)))
    for name, value in {"timeout_ms": 0, "max_attempts": 1 << 31, "backoff_ms": [-1], "jitter": 2.0}.items():
        wrong = {**frame, "fields": {"stream": "s", "options": {name: value}}}
        with pytest.raises(MalformedRequestError, match=rf"OpenStream\.options\.{name}.*: expected"):
            decode_call(msgpack.packb(wrong))


def test_lone_surrogates_are_escaped_in_a_failure_and_refused_in_a_name() -> None:
    call, _ = decode_call(encode_call(fail(calls.Failure(7, "caf\udce9")), Envelope("me", 1)))
    assert call == fail(calls.Failure(7, "caf\\udce9"))
    with pytest.raises(MalformedRequestError, match="lone surrogate"):
        encode_call(calls.OpenStream("caf\udce9"), Envelope("me", 1))
    error, _ = decode_reply(error_frame(StoreFullError("caf\udce9")))
    assert str(error) == "caf\\udce9"


def test_a_seal_of_many_failures_that_share_a_traceback_is_small() -> None:
    frames = "Traceback (most recent call last):\n" + "  File somewhere, line 1\n" * 85
    count = 10_000
    roots = np.arange(1, count + 1, dtype=np.uint64)
    failures = tuple(
        calls.Failure(i, f"ValueError: {i}", "parse", f"{frames}ValueError: {i}") for i in range(1, count + 1)
    )
    rows = calls.SealedRows("q/s", pa.record_batch({"n": np.zeros(count, np.int8)}), roots, failures)
    frame = encode_call(calls.Seal("q", 1, 0, {}, (rows,)), Envelope("me", 1))
    assert len(frames) > 2_000
    assert len(frame) < 70 * count
    call, _ = decode_call(frame)
    assert isinstance(call, calls.Seal)
    assert call.failed[0].failures == failures
