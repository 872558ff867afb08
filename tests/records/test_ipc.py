"""Arrow IPC from elsewhere: what claims more than it is must be refused before Arrow makes it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.records import ipc
from ftlayer.records.ipc import FREE_ROWS, UNREADABLE, read_batch, read_one_batch

BATCH = pa.record_batch(
    {
        "n": pa.array([1, None, 3], pa.int64()),
        "text": ["a", "b", None],
        "list": [[1], None, [2, 3]],
        "struct": pa.array([{"x": 1, "y": ["a"]}, None, {"x": 2, "y": None}]),
        "at": pa.array([1, 2, 3], pa.timestamp("us", "Europe/Berlin")),
        "map": pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64())),
    }
).replace_schema_metadata({"made": "here"})


def stream(batch: pa.RecordBatch, *more: pa.RecordBatch, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    written = pa.ipc.IpcWriteOptions(**options)
    with pa.ipc.new_stream(sink, batch.schema, options=written) as writer:
        for each in (batch, *more):
            writer.write_batch(each)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def coded(words: list[str]) -> pa.Array:
    return pa.array(words).dictionary_encode()


@pytest.mark.parametrize(
    "batch",
    [
        BATCH,
        BATCH.slice(1, 1),
        BATCH.slice(0, 0),
        pa.record_batch([], schema=pa.schema([])),
        pa.record_batch({"none": pa.nulls(FREE_ROWS)}),
        pa.record_batch({"kind": coded(["a", "b", "a"]), "n": [1, 2, 3]}),
        pa.record_batch({"in": pa.StructArray.from_arrays([coded(["a", "b"])], ["kind"])}),
    ],
)
def test_a_batch_comes_back(batch: pa.RecordBatch) -> None:
    assert read_one_batch(stream(batch)).equals(batch, check_metadata=True)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_buffers_are_refused_before_anything_is_made_of_them(codec: str) -> None:
    zeros = pa.record_batch({"x": [b"\0" * 10_000_000]})
    short = stream(zeros, compression=codec)
    assert len(short) < len(stream(zeros)) / 100
    before = pa.default_memory_pool().max_memory()
    with pytest.raises(ValueError, match="compress"):
        read_one_batch(short)
    with pytest.raises(ValueError, match="compress"):
        read_one_batch(stream(pa.record_batch({"x": coded(["a" * 10_000])}), compression=codec))
    messages = pa.ipc.MessageReader.open_stream(short)
    messages.read_next_message()
    with pytest.raises(ValueError, match="compress"):
        read_batch(messages.read_next_message(), zeros.schema)
    assert pa.default_memory_pool().max_memory() == before


@pytest.mark.parametrize(
    "column",
    [
        pa.nulls(1 << 24),
        pa.ListArray.from_arrays(pa.array([0, 1 << 24], pa.int32()), pa.nulls(1 << 24)),
        pa.FixedSizeBinaryArray.from_buffers(pa.binary(0), 1 << 24, [None, pa.py_buffer(b"")]),
    ],
)
def test_rows_made_of_nothing_are_refused(column: pa.Array) -> None:
    with pytest.raises(ValueError, match="claims"):
        read_one_batch(stream(pa.record_batch({"x": column})))


def test_offsets_beyond_a_buffer_are_refused() -> None:
    offsets = pa.py_buffer(b"\0\0\0\0\x40\x42\x0f\0\x05\0\0\0")
    broken = pa.StringArray.from_buffers(2, offsets, pa.py_buffer(b"hello"))
    with pytest.raises(UNREADABLE):
        read_one_batch(stream(pa.RecordBatch.from_arrays([broken], ["text"])))


def test_a_dictionary_that_grows_is_refused() -> None:
    whole = coded(["a", "b"])
    first = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), whole.dictionary[:1])
    batches = pa.record_batch({"x": first}), pa.record_batch({"x": whole})
    reader = pa.ipc.MessageReader.open_stream(stream(*batches, emit_dictionary_deltas=True))
    schema, one, _, more, rows = (reader.read_next_message().serialize().to_pybytes() for _ in range(5))
    with pytest.raises(ValueError, match="grows"):
        read_one_batch(schema + more + rows)
    with pytest.raises(ValueError, match="followed by more"):
        read_one_batch(schema + one + one + rows)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "begins with a schema"),
        (stream(BATCH)[: BATCH.schema.serialize().size], "got none"),
        (stream(BATCH, BATCH), "got several"),
        (BATCH.serialize().to_pybytes(), "begins with a schema"),
    ],
)
def test_what_is_no_stream_of_one_batch(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_one_batch(data)


# Arrow's format/Message.fbs and Schema.fbs: the position of a field in its table.
MESSAGE_HEADER, SCHEMA_METADATA = 2, 2


def target(data: memoryview, at: int) -> int:
    """Return the place that the offset at ``at`` of a flatbuffer leads to."""
    return at + int.from_bytes(data[at : at + 4], "little")


def field_of(data: memoryview, table: int, number: int) -> int:
    """Return the place of a table's field."""
    fields = table - int.from_bytes(data[table : table + 4], "little", signed=True)
    at = fields + 4 + 2 * number
    return table + int.from_bytes(data[at : at + 2], "little")


def text_length(data: memoryview, table: int, number: int) -> int:
    at = target(data, field_of(data, table, number))
    return int.from_bytes(data[at : at + 4], "little")


def shared_metadata(pairs: int, length: int) -> bytes:
    """Return a stream whose schema's metadata pairs are all one: ``pairs`` times ``length`` bytes, if believed."""
    metadata = {"long": "x" * length} | {f"{number:08}": "" for number in range(pairs)}
    data = bytearray(stream(pa.record_batch({"n": [1]}).replace_schema_metadata(metadata)))
    header = memoryview(data)[8 : 8 + int.from_bytes(data[4:8], "little")]
    schema = target(header, field_of(header, target(header, 0), MESSAGE_HEADER))
    vector = target(header, field_of(header, schema, SCHEMA_METADATA))
    places = [vector + 4 + 4 * index for index in range(len(metadata))]
    long = max((target(header, at) for at in places), key=lambda pair: text_length(header, pair, 1))
    for at in places:
        header[at : at + 4] = (long - at).to_bytes(4, "little")
    return bytes(data)


def test_a_schema_that_says_one_thing_many_times_is_refused() -> None:
    with pytest.raises(ValueError, match="larger than it is"):
        read_one_batch(shared_metadata(1_000, 100_000))


def test_a_schema_that_is_too_long_is_refused() -> None:
    long = BATCH.replace_schema_metadata({"x": "y" * ipc.MAX_SCHEMA_BYTES})
    with pytest.raises(ValueError, match="are the most"):
        read_one_batch(stream(long))


def test_a_wide_schema_is_read() -> None:
    wide = pa.record_batch(
        {f"column number {index}": pa.array([index], pa.int16()) for index in range(3_000)}
    )
    assert read_one_batch(stream(wide)).equals(wide)


WHOLE = stream(BATCH)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([WHOLE, stream(pa.record_batch({"kind": coded(["a", "b", "a"]), "n": [1, 2, 3]}))]),
    st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=6),
    st.integers(0, len(WHOLE)),
)
def test_changed_and_cut_bytes_are_refused_or_safe_to_use(
    data: bytes, changes: list[tuple[int, int]], cut: int
) -> None:
    changed = bytearray(data)
    for at, value in changes:
        changed[at % len(data)] = value
    try:
        batch = read_one_batch(bytes(changed[: len(data) - cut // 4]))
    except UNREADABLE:
        return
    for column in batch.columns:
        if not pa.types.is_temporal(column.type):
            column.to_pylist()


def not_utf8(kind: pa.DataType, values: list[bytes | None]) -> pa.Array:
    as_bytes = {
        pa.string(): pa.binary(),
        pa.large_string(): pa.large_binary(),
        pa.string_view(): pa.binary_view(),
    }
    return pa.array(values, as_bytes[kind]).view(kind)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()], ids=str)
def test_text_that_is_no_utf8_is_kept_at_any_depth(kind: pa.DataType) -> None:
    """A source may give it, its record fails for it, and is to be a dead letter."""
    column = not_utf8(kind, [b"caf\xe9", None, b"\xff\xfe", b"as it should be", b"", b"y"])
    columns = {"plain": column}
    if kind != pa.string_view():
        columns["struct"] = pa.StructArray.from_arrays([column], ["text"])
        columns["list"] = pa.concat_arrays([pa.ListArray.from_arrays([0, 2, 3, 3, 4, 5, 6], column)])
        keys = pa.array([str(number) for number in range(6)])
        columns["map"] = pa.MapArray.from_arrays([0, 1, 2, 3, 4, 5, 6], keys, column)
    batch = pa.record_batch(columns)
    found = read_one_batch(stream(batch))
    assert found.schema == batch.schema
    for name in columns:
        assert found.column(name).equals(batch.column(name))


def test_text_whose_offsets_lead_out_of_it_is_refused() -> None:
    data = bytearray(stream(pa.record_batch({"text": ["abcd", "ef"]})))
    offsets = data.index((0).to_bytes(4, "little") + (4).to_bytes(4, "little") + (6).to_bytes(4, "little"))
    data[offsets + 8 : offsets + 12] = (6_000_000).to_bytes(4, "little")
    with pytest.raises(UNREADABLE):
        read_one_batch(bytes(data))


@pytest.mark.parametrize("batch", [BATCH, pa.record_batch({"word": coded(["a", "b", "a"])})])
def test_a_frame_that_is_cut_anywhere_is_refused(batch: pa.RecordBatch) -> None:
    whole = stream(batch)
    end = len(whole) - 8  # of the mark of a stream's end, which may be left out
    for size in range(end):
        with pytest.raises(UNREADABLE):
            read_one_batch(whole[:size])
    assert read_one_batch(whole[:end]).equals(batch)


def test_a_type_that_pyarrow_has_no_class_for_is_unreadable() -> None:
    data = ipc.as_stream(pa.record_batch([pa.array([1], pa.date32())], ["day"])).to_pybytes()
    date, interval, refused = 8, 11, 0
    for at in (at for at, byte in enumerate(data) if byte == date):
        try:
            ipc.read_one_batch(data[:at] + bytes([interval]) + data[at + 1 :])
        except ipc.UNREADABLE as error:
            refused += isinstance(error, KeyError)
    assert refused
