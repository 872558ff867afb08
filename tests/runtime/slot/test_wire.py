from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.barrier import Alignment, SnapshotKind
from ftlayer.errors import CodecError
from ftlayer.records.partitioning import Rebalance
from ftlayer.runtime.protocol.channel_frames import (
    HEADER_BYTES,
    ElementCodec,
    decode_grants,
    encode_grants,
    encode_limits,
    is_barrier,
    is_limits,
    roots_in,
)
from ftlayer.runtime.protocol.messages import (
    Barrier,
    Batch,
    CancelMarker,
    EndOfStream,
    Idle,
    LatencyMarker,
    RecordIds,
    Splits,
    Watermark,
)
from ftlayer.runtime.slot.rules.inbox import can_join, cut, joined, rows_of
from ftlayer.topology.job_graph import Channel, JobEdge

NESTED = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("tags", pa.list_(pa.string())),
        ("at", pa.struct([("x", pa.float64()), ("y", pa.list_(pa.int16()))])),
        ("flag", pa.bool_()),
        ("map", pa.map_(pa.string(), pa.int64())),
    ]
)
CODED = pa.schema([("kind", pa.dictionary(pa.int8(), pa.string())), ("n", pa.int64())])
EMPTY = pa.schema([])


def edge(number: int, schema: pa.Schema) -> JobEdge:
    return JobEdge(number, "a", "b", 0, Rebalance(), schema)


CODEC = ElementCodec([edge(0, NESTED), edge(1, CODED), edge(2, EMPTY)])
CHANNEL = Channel(0, 3, 5)


def nested_rows(n: int, seed: int = 0) -> pa.RecordBatch:
    draw = random.Random(seed)
    rows: list[dict[str, Any]] = [
        {
            "id": draw.getrandbits(40),
            "name": None if i % 7 == 3 else "n" * draw.randrange(9),
            "tags": None if i % 5 == 2 else ["t" * j for j in range(draw.randrange(4))],
            "at": {"x": draw.random(), "y": list(range(draw.randrange(3)))},
            "flag": draw.random() < 0.5,
            "map": [("k", i)] * draw.randrange(2),
        }
        for i in range(n)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=NESTED)


def lineage_of(n: int, many: bool, origins: bool, seed: int = 0) -> RecordIds:
    generator = np.random.default_rng(seed)
    counts = generator.integers(1, 4, n) if many else np.ones(n, np.int64)
    total = int(counts.sum())
    ids = generator.integers(1, 2**64, (4, total), np.uint64)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32) if many else None
    return RecordIds(ids[0], ids[1], offsets, *(ids[2:] if origins else ()))


def same(one: Batch, other: Batch) -> None:
    assert one.payload.equals(other.payload)
    assert (one.lineage is None) == (other.lineage is None)
    if one.lineage is not None and other.lineage is not None:
        for name in ("roots", "ids", "offsets", "origins", "tries"):
            mine, its = getattr(one.lineage, name), getattr(other.lineage, name)
            assert (mine is None) == (its is None)
            assert mine is None or (mine.dtype == its.dtype and np.array_equal(mine, its))
    assert (one.times is None) == (other.times is None)
    assert one.times is None or np.array_equal(one.times, other.times)
    assert one.split == other.split


def batch_of(
    n: int, *, lineage: bool = True, many: bool = False, origins: bool = False, times: bool = False
) -> Batch:
    return Batch(
        nested_rows(n),
        lineage_of(n, many, origins) if lineage else None,
        np.arange(n, dtype=np.int64) if times else None,
        n - 2**62 if times else None,
    )


def test_ids_that_are_the_roots_do_not_travel_and_stay_so_however_batches_are_cut_and_joined() -> None:
    roots = np.arange(1, 9, dtype=np.uint64)
    whole = Batch(nested_rows(8), RecordIds(roots, roots))
    other = Batch(nested_rows(8), RecordIds(roots, roots.copy()))
    frame = CODEC.encode(CHANNEL, whole)
    assert len(CODEC.encode(CHANNEL, other)) - len(frame) == 8 * 8
    _, read = CODEC.decode(pa.py_buffer(frame))
    assert isinstance(read, Batch)
    same(read, whole)
    for batch in (read, joined([rows_of(read, 0, 3), rows_of(read, 3, 8)])):
        assert batch.lineage is not None
        assert batch.lineage.ids is batch.lineage.roots
        assert batch.lineage.take(np.array([2, 1])).ids.tolist() == [3, 2]
    mixed = joined([read, other]).lineage
    assert mixed is not None
    assert mixed.ids.tolist() == [*roots.tolist()] * 2


@settings(deadline=None)
@given(
    st.integers(0, 40),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.integers(0, 9),
)
def test_what_was_written_is_read(
    n: int, lineage: bool, many: bool, origins: bool, times: bool, cut_at: tuple[int, int], shift: int
) -> None:
    start, end = sorted(min(at, n) for at in cut_at)
    batch = rows_of(batch_of(n, lineage=lineage, many=many, origins=origins, times=times), start, end)
    frame = CODEC.encode(CHANNEL, batch)
    # Bytes come at any address.
    channel, read = CODEC.decode(pa.py_buffer(bytes(shift) + frame).slice(shift))
    assert channel == CHANNEL
    assert isinstance(read, Batch)
    same(read, batch)
    read.payload.validate(full=True)
    if batch.lineage is not None:
        assert np.array_equal(roots_in(frame), batch.lineage.roots)
        assert read.lineage is not None
        assert read.lineage.ids.flags.aligned


@pytest.mark.parametrize("element", [Watermark(-(2**63)), Watermark(17), Idle(), EndOfStream()])
def test_marks(element: Watermark | Idle | EndOfStream) -> None:
    frame = CODEC.encode(CHANNEL, element)
    assert CODEC.decode(pa.py_buffer(frame)) == (CHANNEL, element)
    assert len(roots_in(frame)) == 0


BARRIERS = st.builds(
    Barrier,
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**63 - 1),
    st.sampled_from(Alignment),
    st.none() | st.integers(0, 2**63 - 1),
    st.sampled_from(SnapshotKind),
    st.booleans(),
    st.text(max_size=40),
)


@given(BARRIERS)
def test_barriers_with_all_they_say(barrier: Barrier) -> None:
    frame = CODEC.encode(CHANNEL, barrier)
    assert CODEC.decode(pa.py_buffer(frame)) == (CHANNEL, barrier)
    assert is_barrier(frame)
    marker = CODEC.encode(CHANNEL, CancelMarker(barrier.checkpoint))
    assert CODEC.decode(pa.py_buffer(marker)) == (CHANNEL, CancelMarker(barrier.checkpoint))
    assert not is_barrier(marker)


@given(BARRIERS, st.integers(0, 80), st.integers(0, 255))
def test_a_damaged_barrier_is_an_error_or_a_barrier(barrier: Barrier, at: int, byte: int) -> None:
    frame = bytearray(CODEC.encode(CHANNEL, barrier))
    frame[at % len(frame)] = byte
    for damaged in (bytes(frame), bytes(frame[: at % len(frame)])):
        try:
            CODEC.decode(pa.py_buffer(damaged))
        except CodecError:
            continue


SPLITS = st.builds(
    Splits,
    st.lists(st.integers(-(2**63), 2**63 - 1)).map(tuple),
    st.lists(st.integers(-(2**63), 2**63 - 1)).map(tuple),
    st.lists(st.integers(-(2**63), 2**63 - 1)).map(tuple),
    st.booleans(),
)


@given(SPLITS, st.integers(0, 200), st.integers(0, 255))
def test_splits_with_all_they_say_and_damaged(splits: Splits, at: int, byte: int) -> None:
    frame = bytearray(CODEC.encode(CHANNEL, splits))
    assert CODEC.decode(pa.py_buffer(bytes(frame))) == (CHANNEL, splits)
    frame[at % len(frame)] = byte
    for damaged in (bytes(frame), bytes(frame[: at % len(frame)])):
        try:
            CODEC.decode(pa.py_buffer(damaged))
        except CodecError:
            continue


LATENCIES = st.builds(
    LatencyMarker, st.text(max_size=40), st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**64 - 1)
)


@given(LATENCIES)
def test_latency_markers_with_all_they_say(marker: LatencyMarker) -> None:
    frame = CODEC.encode(CHANNEL, marker)
    assert CODEC.decode(pa.py_buffer(frame)) == (CHANNEL, marker)
    assert len(roots_in(frame)) == 0
    assert not is_barrier(frame)


@given(LATENCIES, st.integers(0, 80), st.integers(0, 255))
def test_a_damaged_latency_marker_is_an_error_or_a_mark(marker: LatencyMarker, at: int, byte: int) -> None:
    frame = bytearray(CODEC.encode(CHANNEL, marker))
    frame[at % len(frame)] = byte
    for damaged in (bytes(frame), bytes(frame[: at % len(frame)])):
        try:
            CODEC.decode(pa.py_buffer(damaged))
        except CodecError:
            continue


def test_a_frame_of_another_graph_is_read_as_one_of_an_edge() -> None:
    old = ElementCodec([edge(0, CODED), edge(1, EMPTY), edge(2, NESTED)])
    batch = batch_of(5, lineage=False, times=True)
    frame = pa.py_buffer(old.encode(Channel(2, 0, 0), batch))
    same(CODEC.decode_for(0, frame), batch)
    with pytest.raises(CodecError):
        CODEC.decode_for(1, frame)
    with pytest.raises(CodecError, match="mark"):
        CODEC.decode_for(0, pa.py_buffer(old.encode(Channel(2, 0, 0), Idle())))


def test_a_slice_carries_only_its_rows() -> None:
    batch = batch_of(4_000, many=True)
    whole = len(CODEC.encode(CHANNEL, batch))
    part = len(CODEC.encode(CHANNEL, rows_of(batch, 1_000, 1_040)))
    assert part < whole / 50


def test_dictionaries_travel_with_their_schema() -> None:
    payload = pa.RecordBatch.from_pylist([{"kind": "a", "n": 1}, {"kind": None, "n": 2}], schema=CODED)
    channel = Channel(1, 0, 0)
    _, read = CODEC.decode(pa.py_buffer(CODEC.encode(channel, Batch(payload))))
    assert isinstance(read, Batch)
    assert read.payload.equals(payload)


def with_payload(frame: bytes, old: pa.Buffer, new: pa.Buffer) -> bytes:
    """Return a frame of one batch with another payload in its place."""
    assert frame.endswith(old.to_pybytes())
    return frame[: HEADER_BYTES - 8] + new.size.to_bytes(8, "little") + new.to_pybytes()


def test_a_payload_that_is_larger_than_it_looks_is_refused() -> None:
    rows = pa.record_batch({"x": [b"\0" * 1_000_000]})
    codec = ElementCodec([edge(0, rows.schema)])
    frame = codec.encode(CHANNEL, Batch(rows, None))
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, rows.schema, options=options) as writer:
        writer.write_batch(rows)
    messages = pa.ipc.MessageReader.open_stream(sink.getvalue())
    messages.read_next_message()
    short = with_payload(frame, rows.serialize(), messages.read_next_message().serialize())
    assert len(short) < 10_000
    with pytest.raises(CodecError, match="compress"):
        codec.decode(pa.py_buffer(short))


def test_inner_offsets_that_make_no_sense_are_refused() -> None:
    offsets = pa.py_buffer(np.array([0, 1_000_000, 5], np.int32).tobytes())
    broken = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"hello"))
    rows = pa.RecordBatch.from_arrays([broken], ["x"])
    codec = ElementCodec([edge(0, rows.schema)])
    with pytest.raises(CodecError, match="not readable"):
        codec.decode(pa.py_buffer(codec.encode(CHANNEL, Batch(rows, None))))


def test_another_schema_is_refused_where_it_is_written() -> None:
    with pytest.raises(CodecError, match="edge 0 carries the columns id int64"):
        CODEC.encode(CHANNEL, Batch(pa.record_batch({"id": [1]})))


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_damaged_bytes_are_an_error_or_a_batch(draw: random.Random, many: bool) -> None:
    frame = bytearray(CODEC.encode(CHANNEL, batch_of(9, many=many, origins=True, times=True)))
    for _ in range(draw.randrange(1, 4)):
        frame[draw.randrange(len(frame) if draw.random() < 0.5 else 48)] = draw.randrange(256)
    if draw.random() < 0.3:
        del frame[draw.randrange(len(frame)) :]
    try:
        _, read = CODEC.decode(pa.py_buffer(bytes(frame)))
    except CodecError:
        return
    if isinstance(read, Batch) and read.lineage is not None:
        assert len(read.lineage) == read.num_rows


@given(st.binary(max_size=200))
def test_bytes_from_anywhere(data: bytes) -> None:
    with pytest.raises(CodecError):
        CODEC.decode(pa.py_buffer(b"\x07" + data))
    for read in (roots_in, decode_grants):
        try:
            read(data)
        except CodecError:
            continue


def test_grants() -> None:
    grants = {Channel(1, 2, 3): 2**40, Channel(0, 0, 0): 0}
    assert decode_grants(encode_grants(grants)) == list(grants.items())
    with pytest.raises(CodecError, match="negative"):
        decode_grants(encode_grants({CHANNEL: -1}))
    limits = encode_limits({CHANNEL: 1 << 14})
    assert is_limits(limits)
    assert not is_limits(encode_grants(grants))
    assert decode_grants(limits) == [(CHANNEL, 1 << 14)]
    with pytest.raises(CodecError, match="behind one byte"):
        decode_grants(b"\x02" + limits[1:])


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_joined_batches_are_their_rows_in_order(sizes: list[tuple[int, bool, bool]]) -> None:
    parts = [
        Batch(nested_rows(n, i), lineage_of(n, many, origins, i), np.full(n, i, np.int64))
        for i, (n, many, origins) in enumerate(sizes)
    ]
    whole = joined(parts)
    at = 0
    for part in parts:
        read = rows_of(whole, at, at + part.num_rows)
        assert part.lineage is not None
        assert read.lineage is not None
        assert read.payload.equals(part.payload)
        assert np.array_equal(read.lineage.roots, part.lineage.roots)
        assert np.array_equal(read.lineage.record_of, part.lineage.record_of)
        its = part.lineage.roots if part.lineage.origins is None else part.lineage.origins
        mine = read.lineage.roots if read.lineage.origins is None else read.lineage.origins
        assert np.array_equal(mine, its)
        at += part.num_rows
    assert at == whole.num_rows


def test_what_cannot_be_joined() -> None:
    assert not can_join(batch_of(1), batch_of(1, lineage=False))
    assert not can_join(batch_of(1), batch_of(1, times=True))
    assert can_join(batch_of(1), batch_of(1, many=True))


@settings(deadline=None)
@given(st.integers(0, 100), st.integers(1, 20))
def test_a_cut_keeps_all_rows(n: int, max_rows: int) -> None:
    batch = batch_of(n, many=True)
    parts = cut(batch, max_rows)
    assert all(part.num_rows <= 2 * max_rows for part in parts)
    if n:
        same(joined(parts), batch)


def test_bytes_cut_a_batch_too() -> None:
    wide = pa.record_batch({"d": pa.array([bytes(3 << 20)] * 12, pa.binary())})
    parts = cut(Batch(wide), 4_096)
    assert sum(part.num_rows for part in parts) == 12
    assert max(part.payload.nbytes for part in parts) <= 16 << 20
