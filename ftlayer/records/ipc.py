"""Record batches as Arrow IPC, and back.

What others have written is looked at, by its message headers, before Arrow reads what they claim. A few bytes can claim
gigabytes: compressed buffers, columns of nulls, a schema whose fields share one name. Arrow makes what is claimed, and
checks nothing of it. So these are refused here:

- compressed buffers, and dictionaries that grow (deltas);
- columns, at any depth, that claim more than `ROWS_PER_BYTE` rows for a byte of their message;
- string and binary views that show more than `VIEWED_PER_BYTE` bytes for a byte of their message, since rows may share
  what they show; views within other types than structs, lists, maps and dictionaries; run-end encoded columns;
- schemas of more than `MAX_SCHEMA_BYTES`, and those whose parts, counted one by one, are more than the schema.

What passes is at most some sixteen times as large in memory as it was in bytes. Arrow has verified a header (that its
offsets stay within it) before it is looked at here.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from ftlayer.records.views import check_view_types, check_views

UNREADABLE = (
    pa.ArrowException,
    OSError,
    EOFError,
    ValueError,
    OverflowError,
    MemoryError,
    struct.error,
    LookupError,
)
"""Errors of reading bytes that are no such stream or batch."""

ROWS_PER_BYTE = 8
"""A column of booleans has that many; what claims more is made of nothing."""

FREE_ROWS = 65_536
"""So many rows may a column of nulls have, however short its message is."""

VIEWED_PER_BYTE = 16
"""Rows of views may share text, as those of a constant do."""

MAX_SCHEMA_BYTES = 4 << 20

_CACHED_SCHEMA_BYTES = 65_536
# What a field takes in a schema besides its name, at the least.
_FIELD_BYTES = 32
_SPARE_BYTES = 16_384

# Arrow's format/Message.fbs and Schema.fbs: the position of a field in its table.
_MESSAGE_HEADER = 2
_SCHEMA_FIELDS, _SCHEMA_METADATA = 1, 2
_FIELD_NAME, _FIELD_KIND, _FIELD_TYPE, _FIELD_DICTIONARY, _FIELD_CHILDREN, _FIELD_METADATA = 0, 2, 3, 4, 5, 6
_DICTIONARY_DATA, _DICTIONARY_DELTA = 1, 2
_ROWS, _NODES, _COMPRESSION = 0, 1, 3
_KIND_TIMESTAMP, _KIND_UNION = 10, 14

_BYTES_OF = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}

_I32 = struct.Struct("<i")
_U32 = struct.Struct("<I")
_U16 = struct.Struct("<H")
_I64 = struct.Struct("<q")
# Before a message: the mark of the format since Arrow 0.15, and the length of the header.
_PREFIX = struct.Struct("<Ii")
_CONTINUATION = 0xFFFFFFFF


def as_stream(batch: pa.RecordBatch) -> pa.Buffer:
    """Return ``batch`` as an IPC stream of its own."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


def as_message(batch: pa.RecordBatch, *, dictionaries: bool) -> pa.Buffer:
    """Return ``batch`` as one IPC message, for readers that know its schema.

    With ``dictionaries`` (see `has_dictionaries`) as a whole stream, since a message alone has none.
    """
    return as_stream(batch) if dictionaries else batch.serialize()


def has_dictionaries(schema: pa.Schema) -> bool:
    """Whether a column, or a part of one, is coded by a dictionary."""

    def within(kind: pa.DataType) -> bool:
        storage = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
        return pa.types.is_dictionary(storage) or any(
            within(storage.field(i).type) for i in range(storage.num_fields)
        )

    return any(within(field.type) for field in schema)


def read_one_batch(data: bytes | pa.Buffer) -> pa.RecordBatch:
    """Read an IPC stream of exactly one record batch, and check every offset in it, so that reading it is safe.

    Copies nothing. Raises one of `UNREADABLE` for anything else.
    """
    buffer = pa.py_buffer(data)
    messages = _messages(buffer)
    schema, dictionaries = _schema(next(messages, None))
    batch, seen = next(messages, None), 0
    while batch is not None and batch.type == "dictionary":
        seen += 1
        _check_dictionary(batch, seen, dictionaries)
        batch = next(messages, None)
    if batch is None or batch.type != "record batch":
        raise ValueError("expected an Arrow IPC stream with one record batch, got none")
    if next(messages, None) is not None:
        raise ValueError("expected an Arrow IPC stream with one record batch, got several")
    if not dictionaries:
        return read_batch(batch, schema)
    _check_claims(batch)
    with pa.ipc.open_stream(buffer) as reader:
        return _validated(reader.read_next_batch(), buffer.size)


def read_batch(message: pa.ipc.Message | pa.Buffer, schema: pa.Schema) -> pa.RecordBatch:
    """Read one record batch whose ``schema``, without dictionaries, is known; as `read_one_batch`."""
    if isinstance(message, pa.Buffer):
        message = pa.ipc.read_message(message)
    if message.type != "record batch":
        raise ValueError(f"expected a record batch, got a message of type {message.type}")
    _check_claims(message)
    body = message.body
    return _validated(pa.ipc.read_record_batch(message, schema), 0 if body is None else body.size)


def check_names(fields: Iterable[pa.Field]) -> None:
    """Raise ValueError for a field, at any depth, whose name or time zone is no UTF-8. Arrow does not look."""
    for field in fields:
        str(field.name)
        if pa.types.is_timestamp(field.type):
            str(field.type.tz)
        check_names(field.type.field(index) for index in range(field.type.num_fields))


def _validated(batch: pa.RecordBatch, size: int) -> pa.RecordBatch:
    batch.validate()
    # Before all that views show is looked at.
    check_views(batch, VIEWED_PER_BYTE * size)
    for column in batch.columns:
        # Text that is no UTF-8 is a value that a source may give, and that may fail for it: it is to be kept, too.
        kind = _with_bytes(column.type)
        (column if kind == column.type else column.view(kind)).validate(full=True)
    return batch


@functools.lru_cache(maxsize=256)
def _with_bytes(kind: pa.DataType) -> pa.DataType:
    """Return a type of the same layout, with bytes for text."""
    found = _BYTES_OF.get(kind)
    if found is not None:
        return found
    if pa.types.is_struct(kind):
        return pa.struct([_field_with_bytes(kind.field(index)) for index in range(kind.num_fields)])
    if pa.types.is_map(kind):
        return pa.map_(_field_with_bytes(kind.key_field), _field_with_bytes(kind.item_field))
    if pa.types.is_list(kind):
        return pa.list_(_field_with_bytes(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_field_with_bytes(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_field_with_bytes(kind.value_field), kind.list_size)
    return kind


def _field_with_bytes(field: pa.Field) -> pa.Field:
    return field.with_type(_with_bytes(field.type))


def _messages(buffer: pa.Buffer) -> Iterator[pa.ipc.Message]:
    reader = pa.ipc.MessageReader.open_stream(buffer)
    while True:
        try:
            yield reader.read_next_message()
        except StopIteration:
            return


# ---------------------------------------------------------------- schemas


def _schema(message: pa.ipc.Message | None) -> tuple[pa.Schema, int]:
    """Return a schema and how many of its fields, at all depths, have a dictionary."""
    if message is None or message.type != "schema":
        raise ValueError("an Arrow IPC stream begins with a schema")
    header = message.metadata
    if header.size > MAX_SCHEMA_BYTES:
        raise ValueError(f"a schema of {header.size} bytes; {MAX_SCHEMA_BYTES} are the most")
    read = _cached_schema if header.size <= _CACHED_SCHEMA_BYTES else _read_schema
    return read(header.to_pybytes())


def _read_schema(header: bytes) -> tuple[pa.Schema, int]:
    dictionaries = _check_schema(header)
    schema = pa.ipc.read_schema(pa.py_buffer(_PREFIX.pack(_CONTINUATION, len(header)) + header))
    check_names(schema)
    check_view_types(schema)
    return schema, dictionaries


# The calls of a stream mostly have the same.
_cached_schema = functools.lru_cache(maxsize=64)(_read_schema)


def _check_schema(header: bytes) -> int:
    """Count what a schema's fields come to one by one, since parts of it may be shared; return dictionaries."""
    table = _FlatbufferTable(memoryview(header)).table(_MESSAGE_HEADER)
    if table is None:
        raise ValueError("a message without its header")
    left = 2 * len(header) + _SPARE_BYTES - _metadata_bytes(table, _SCHEMA_METADATA)
    dictionaries = 0
    waiting = list(table.tables(_SCHEMA_FIELDS))
    while waiting:
        field = waiting.pop()
        left -= _FIELD_BYTES + field.length(_FIELD_NAME) + _metadata_bytes(field, _FIELD_METADATA)
        left -= _type_bytes(field)
        children = field.length(_FIELD_CHILDREN)
        if left < _FIELD_BYTES * (len(waiting) + children):
            raise ValueError(f"a schema of {len(header)} bytes claims to be much larger than it is")
        dictionaries += field.table(_FIELD_DICTIONARY) is not None
        waiting += field.tables(_FIELD_CHILDREN)
    return dictionaries


def _metadata_bytes(table: _FlatbufferTable, slot: int) -> int:
    pairs = table.length(slot)
    # Pairs may be shared too: those beyond what the header can hold are not looked at.
    if pairs * 4 > len(table.data):
        raise ValueError("a schema's metadata are longer than the schema")
    total = 0
    for pair in table.tables(slot):
        total += pair.length(0) + pair.length(1)
    return total


def _type_bytes(field: _FlatbufferTable) -> int:
    kind, details = field.byte(_FIELD_KIND), field.table(_FIELD_TYPE)
    if details is None or kind not in (_KIND_TIMESTAMP, _KIND_UNION):
        return 0
    # A time zone, or the numbers of a union's children.
    return details.length(1) * (4 if kind == _KIND_UNION else 1)


# ---------------------------------------------------------------- batches


def _check_dictionary(message: pa.ipc.Message, seen: int, dictionaries: int) -> None:
    if seen > dictionaries:
        raise ValueError(f"a schema with {dictionaries} dictionaries is followed by more")
    table = _FlatbufferTable(memoryview(message.metadata)).table(_MESSAGE_HEADER)
    if table is None:
        raise ValueError("a message without its header")
    if table.byte(_DICTIONARY_DELTA):
        raise ValueError("a dictionary that grows (a delta); send it whole")
    _check_batch_table(table.table(_DICTIONARY_DATA), message)


def _check_claims(message: pa.ipc.Message) -> None:
    _check_batch_table(_FlatbufferTable(memoryview(message.metadata)).table(_MESSAGE_HEADER), message)


def _check_batch_table(table: _FlatbufferTable | None, message: pa.ipc.Message) -> None:
    what = message.type
    if table is None:
        raise ValueError(f"a {what} without its header")
    if table.table(_COMPRESSION) is not None:
        raise ValueError(f"a {what} with compressed buffers; send it without compression")
    size = len(table.data) + (0 if message.body is None else message.body.size)
    most = max(ROWS_PER_BYTE * size, FREE_ROWS)
    rows = table.integer(_ROWS)
    nodes = table.structs(_NODES, 16)
    # A struct of a field: its length, its nulls.
    lengths = np.frombuffer(nodes, "<i8")[::2] if len(nodes) else np.empty(0, np.int64)
    claimed = max(rows, int(lengths.max()) if len(lengths) else 0)
    least = min(rows, int(lengths.min()) if len(lengths) else 0)
    if least < 0 or claimed > most:
        raise ValueError(f"a {what} of {size} bytes claims {claimed if least >= 0 else least} rows")


class _FlatbufferTable:
    """A table of a flatbuffer that Arrow has verified; a field that is absent is 0, or None."""

    __slots__ = ("_at", "_fields", "_fields_size", "data")

    def __init__(self, data: memoryview, at: int | None = None) -> None:
        """Stand at ``at``, or at the root."""
        self.data = data
        self._at = _U32.unpack_from(data)[0] if at is None else at
        self._fields = self._at - _I32.unpack_from(data, self._at)[0]
        self._fields_size = _U16.unpack_from(data, self._fields)[0]

    def byte(self, slot: int) -> int:
        """Return an unsigned byte, or a boolean."""
        at = self._place(slot)
        return 0 if at is None else self.data[at]

    def integer(self, slot: int) -> int:
        """Return a signed integer of 64 bits."""
        at = self._place(slot)
        return 0 if at is None else int(_I64.unpack_from(self.data, at)[0])

    def table(self, slot: int) -> _FlatbufferTable | None:
        at = self._place(slot)
        return None if at is None else _FlatbufferTable(self.data, self._target(at))

    def length(self, slot: int) -> int:
        """Return the length of a vector or a text."""
        at = self._place(slot)
        return 0 if at is None else int(_U32.unpack_from(self.data, self._target(at))[0])

    def tables(self, slot: int) -> Iterator[_FlatbufferTable]:
        at = self._place(slot)
        if at is not None:
            start = self._target(at)
            for index in range(self.length(slot)):
                yield _FlatbufferTable(self.data, self._target(start + 4 + 4 * index))

    def structs(self, slot: int, size: int) -> memoryview:
        """Return the bytes of a vector of structs."""
        at = self._place(slot)
        if at is None:
            return self.data[:0]
        start = self._target(at) + 4
        return self.data[start : start + size * self.length(slot)]

    def _place(self, slot: int) -> int | None:
        at = 4 + 2 * slot
        if at + 2 > self._fields_size:
            return None
        offset = _U16.unpack_from(self.data, self._fields + at)[0]
        return None if offset == 0 else int(self._at + offset)

    def _target(self, at: int) -> int:
        return at + int(_U32.unpack_from(self.data, at)[0])
