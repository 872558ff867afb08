from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.errors import CodecError
from ftlayer.records.batch import TRACKED_COLUMNS, TrackedBatch
from ftlayer.records.codec import MAX_ROWS, RULES_KEY, decode, encode, payload_schema_bytes
from ftlayer.records.ids import initial_record_ids

KEY = b"0123456789abcdef"


@st.composite
def payloads(draw: st.DrawFn) -> pa.RecordBatch:
    n = draw(st.integers(0, 6))

    def column(values: st.SearchStrategy[Any], type_: pa.DataType) -> pa.Array:
        return pa.array(draw(st.lists(st.none() | values, min_size=n, max_size=n)), type_)

    makers = {
        "int": lambda: column(st.integers(-5, 5), pa.int64()),
        "text": lambda: column(st.text(max_size=5), pa.string()),
        "flags": lambda: column(st.booleans(), pa.bool_()),
        "list": lambda: column(st.lists(st.integers(0, 9), max_size=3), pa.list_(pa.int32())),
        "struct": lambda: column(
            st.fixed_dictionaries({"x": st.integers(0, 9)}), pa.struct([("x", pa.int8())])
        ),
        "dictionary": lambda: column(st.sampled_from("ab"), pa.string()).dictionary_encode(),
        "view": lambda: column(st.binary(max_size=20), pa.binary_view()),
        "void": lambda: pa.nulls(n),
    }
    names = draw(st.lists(st.sampled_from(sorted(makers)), max_size=3))
    columns = [makers[name]() for name in names]
    whole = pa.record_batch([*columns, pa.nulls(n)], [*names, "rows"]).select(list(range(len(names))))
    return whole.replace_schema_metadata({"user": "metadata"} if draw(st.booleans()) else None)


@st.composite
def batches(draw: st.DrawFn) -> TrackedBatch:
    """Batches in which each tracked column may follow a rule or not."""
    payload = draw(payloads())
    n = payload.num_rows
    selectors = draw(st.integers(1, 3))

    def numbers(dtype: str, low: int, high: int, *shape: int) -> Any:
        drawn = draw(
            st.lists(
                st.integers(low, high), min_size=n * max(shape, default=1), max_size=n * max(shape, default=1)
            )
        )
        return np.array(drawn, dtype).reshape(n, *shape)

    def ids() -> Any:
        return numbers("uint64", 1, 2**64 - 1)

    width = () if selectors == 1 else (selectors,)
    hashes = draw(
        st.sampled_from([None, numbers("int32", 0, 0, *width), numbers("int32", -(2**31), 2**31 - 1, *width)])
    )
    if draw(st.booleans()):
        shards = draw(st.sampled_from([1, 2, 64]))
        batch = TrackedBatch.of_source(
            payload, KEY, draw(st.integers(0, 2**40)), shard=shards - 1, shards=shards, key_hash=hashes
        )
        return batch.slice(draw(st.integers(0, n)), n)
    roots = ids()
    return TrackedBatch(
        payload,
        roots,
        draw(st.sampled_from([roots, initial_record_ids(roots), ids()])),
        key_hash=hashes,
        attempt=draw(st.sampled_from([0, 3, numbers("int32", 0, 2)])),
        origin=draw(st.sampled_from([None, roots.copy(), ids()])),
    )


def assert_same_ids(left: TrackedBatch, right: TrackedBatch) -> None:
    for name in TRACKED_COLUMNS:
        a, b = getattr(left, name), getattr(right, name)
        assert (a.dtype, a.shape, a.tolist()) == (b.dtype, b.shape, b.tolist()), name


def assert_same(left: TrackedBatch, right: TrackedBatch) -> None:
    assert left.payload.schema.equals(right.payload.schema, check_metadata=True)
    assert left.payload.num_rows == right.payload.num_rows
    assert left.payload.to_pylist() == right.payload.to_pylist()
    assert_same_ids(left, right)


@given(batches())
def test_a_batch_comes_back_as_it_was(batch: TrackedBatch) -> None:
    decoded = decode(encode(batch))
    assert_same(decoded, batch)
    assert_same(decode(bytes(encode(decoded))), batch)


def lines(n: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array([f"{i:0100d}" for i in range(n)])], ["line"])


def test_what_has_a_rule_costs_no_bytes_a_row() -> None:
    n = 8192
    batch = TrackedBatch.of_source(lines(n), KEY, 12, shard=1, shards=2)
    plain = len(pa.py_buffer(batch.payload.serialize()))
    assert len(bytes(encode(batch))) < plain + 600
    part = batch.slice(100, 8000)
    assert len(bytes(encode(part))) < plain + 600
    assert_same(decode(encode(part)), part)
    hashed = TrackedBatch.of_source(lines(n), KEY, 12, key_hash=np.arange(n, dtype=np.int32))
    assert len(bytes(encode(hashed))) < plain + 600 + 4 * n
    drawn = TrackedBatch(
        lines(n), batch.source_record_id, initial_record_ids(batch.source_record_id), attempt=2
    )
    assert len(bytes(encode(drawn))) < plain + 700 + 8 * n


def test_decoding_views_the_bytes() -> None:
    data = encode(TrackedBatch.of_source(lines(100), KEY, 0, key_hash=np.arange(100, dtype=np.int32)))
    decoded = decode(data)
    inside = range(data.address, data.address + data.size)
    assert decoded.payload.column(0).buffers()[2].address in inside
    assert decoded.key_hash.__array_interface__["data"][0] in inside


def test_any_arrow_reader_can_open_it() -> None:
    batch = TrackedBatch.of_source(lines(3), KEY, 0, key_hash=np.arange(3, dtype=np.int32))
    table = pa.ipc.open_stream(encode(batch)).read_all()
    assert table.column_names == ["line", "key_hash"]


def test_schemas_are_compared_by_their_bytes() -> None:
    one, two = (TrackedBatch.of_source(lines(n), KEY, 0) for n in (1, 2))
    assert payload_schema_bytes(one) == payload_schema_bytes(two)
    assert pa.ipc.read_schema(pa.py_buffer(payload_schema_bytes(one))).names == ["line"]


# ---------------------------------------------------------------- bytes from anywhere


def touch_everything(batch: TrackedBatch) -> None:
    """Read every value natively: a flipped type can have values that Python has no object for."""
    assert all(isinstance(name, str) for name in batch.payload.schema.names)
    batch.to_arrow().validate(full=True)
    assert_same_ids(decode(encode(batch)), batch)


@given(batches(), st.data())
def test_truncated_bytes_are_an_error(batch: TrackedBatch, data: st.DataObject) -> None:
    encoded = bytes(encode(batch))
    with pytest.raises(CodecError):
        decode(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@given(batches(), st.data())
def test_flipped_bytes_are_an_error_or_a_sound_batch(batch: TrackedBatch, data: st.DataObject) -> None:
    encoded = bytearray(encode(batch))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        touch_everything(decode(bytes(encoded)))


@given(st.binary(max_size=200), st.booleans())
def test_garbage_is_an_error(garbage: bytes, ends_well: bool) -> None:
    with pytest.raises(CodecError):
        decode(garbage + (b"\xff" * 4 + b"\0" * 4 if ends_well else b""))


def stream(rules: Any, batch: pa.RecordBatch, copies: int = 1) -> bytes:
    packed = rules if isinstance(rules, bytes) else msgpack.packb(rules)
    batch = batch.replace_schema_metadata({RULES_KEY: packed})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        for _ in range(copies):
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


GOOD = {
    "version": 1,
    "source_record_id": [KEY, 0, 0, 1],
    "record_id": "initial",
    "key_hash": [7],
    "attempt": 0,
    "origin": "root",
}


def test_the_rules_below_are_good_but_for_one_thing() -> None:
    batch = decode(stream(GOOD, lines(2)))
    assert (batch.key_hash.tolist(), batch.attempt.tolist()) == ([7, 7], [0, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 1"),
        ({"source_record_id": [KEY, 0, 0]}, "source_record_id"),
        ({"source_record_id": [b"short", 0, 0, 1]}, "source_record_id"),
        ({"source_record_id": [KEY, -1, 0, 1]}, "source_record_id"),
        ({"source_record_id": [KEY, True, 0, 1]}, "source_record_id"),
        ({"source_record_id": [KEY, 2**64 - 1, 0, 1]}, "source_record_id.*makes no sense"),
        ({"source_record_id": [KEY, 0, 1, 1]}, "source_record_id.*shard must"),
        ({"source_record_id": [KEY, 0, 0, 3]}, "source_record_id.*power of two"),
        ({"source_record_id": None}, "last columns must be"),
        ({"record_id": "other"}, "'record_id'"),
        ({"record_id": ["root"]}, "'record_id'"),
        ({"key_hash": []}, "'key_hash'"),
        ({"key_hash": [0] * 33}, "'key_hash'"),
        ({"key_hash": [2**31]}, "'key_hash'"),
        ({"key_hash": 5}, "'key_hash'"),
        ({"attempt": -1}, "'attempt'"),
        ({"attempt": 1.0}, "'attempt'"),
        ({"origin": "initial"}, "'origin'"),
    ],
)
def test_rules_that_make_no_sense_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CodecError, match=message):
        decode(stream({**GOOD, **change}, lines(2)))


@pytest.mark.parametrize("rules", [b"", b"\xc1", b"\x93\x01", [1], 5, {1: 2}, b"\x91" * 5000])
def test_rules_that_are_no_map_are_refused(rules: Any) -> None:
    with pytest.raises(CodecError):
        decode(stream(rules, lines(2)))


def test_streams_of_another_shape_are_refused() -> None:
    with pytest.raises(CodecError, match="one record batch"):
        decode(stream(GOOD, lines(2), copies=2))
    with pytest.raises(CodecError, match="one record batch"):
        decode(stream(GOOD, lines(2), copies=0))
    with pytest.raises(CodecError, match="'attempt' is reserved"):
        decode(stream(GOOD, pa.record_batch([pa.array([1])], ["attempt"])))
    with pytest.raises(CodecError, match="column 'attempt' must be int32"):
        decode(stream({**GOOD, "attempt": None}, pa.record_batch([pa.array([1])], ["attempt"])))


def test_rows_that_cost_no_bytes_are_bounded() -> None:
    huge = pa.record_batch([pa.nulls(MAX_ROWS + 1)], ["n"])
    with pytest.raises(CodecError, match="claims"):
        decode(stream(GOOD, huge))
    with pytest.raises(CodecError, match="too large"):
        encode(TrackedBatch.of_source(huge, KEY, 0))


def test_offsets_that_point_outside_are_refused() -> None:
    # Arrow would not write them, so they are put in afterwards.
    good = stream(GOOD, pa.record_batch([pa.array(["hello", ""])], ["s"]))
    offsets, outside = np.array([0, 5, 5], np.int32), np.array([0, 5, 1 << 30], np.int32)
    assert good.count(offsets.tobytes()) == 1
    decode(good)
    with pytest.raises(CodecError, match="not a readable Arrow stream"):
        decode(good.replace(offsets.tobytes(), outside.tobytes()))
