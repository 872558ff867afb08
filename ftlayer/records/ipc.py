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
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM


def is_string(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    plain = types.is_binary(kind) or types.is_large_binary(kind)
    return bool(plain or types.is_fixed_size_binary(kind) or types.is_binary_view(kind))


def is_list(kind: pa.DataType) -> bool:
    """Whether values are lists. A map is none here."""
    types = pa.types
    plain = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(plain or types.is_list_view(kind) or types.is_large_list_view(kind))


def says(batch: pa.RecordBatch, sought: bytes) -> bool:
    """Whether a text or binary value in ``batch`` has ``sought`` in it. Unions are not looked into."""
    return any(sought in value for column in batch.columns for value in _values(column))


def _values(column: pa.Array) -> Iterator[bytes]:
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        yield from _values(column.storage)
    elif pa.types.is_dictionary(kind):
        yield from _values(column.dictionary_decode())
    elif pa.types.is_struct(kind):
        for part in column.flatten():
            yield from _values(part)
    elif pa.types.is_map(kind):
        # Arrow gives keys and values of the whole array, whatever part of it this is.
        first, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        yield from _values(column.keys.slice(first, end - first))
        yield from _values(column.items.slice(first, end - first))
    elif pa.types.is_nested(kind) and not pa.types.is_union(kind):
        yield from _values(column.flatten())
    elif is_string(kind):
        # As bytes: what is stored need not be UTF-8.
        yield from (value.as_py() for value in column.cast(pa.large_binary()).drop_null())
    elif is_binary(kind):
        yield from (value.as_py() for value in column.drop_null())


# Columns of string views and binary views, whose rows point into text that they may share.
#
# Rows may show the same text any number of times, and Arrow copies none of it before the rows are looked at. Written by
# themselves, a few rows take along all the text of their batch.

_PLAIN = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
_IDS = {kind.id for kind in _PLAIN}
# A view has 16 bytes; the length is the first 4.
_WORDS = 4


def check_views(batch: pa.RecordBatch, most: int) -> None:
    """Raise ValueError if all views of a batch together show more than ``most`` bytes.

    The batch has passed ``validate()``; that its views stay within their text need not be known yet.
    """
    if not _has_views(batch.schema):
        return
    shown = sum(_shown(column) for column in batch.columns)
    if shown > most:
        raise ValueError(
            f"string or binary views that show {shown} bytes, {most} are the most: rows share their text; copy it "
            "(cast the column to string or binary)"
        )


def check_view_types(schema: pa.Schema) -> None:
    """Raise ValueError for columns that cannot be taken apart: run-end encoded ones, views in unions and such."""
    for kind in kinds_within(schema.types):
        if pa.types.is_run_end_encoded(kind):
            raise ValueError("a run-end encoded column; send its rows one by one")
        if not _is_taken_apart(kind) and any(inner.id in _IDS for inner in kinds_within([kind])):
            raise ValueError(f"string or binary views within {kind}; send them as string or binary")


def without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch as one of plain strings and binary, whose rows share nothing; the same where it has no views."""
    if not _has_views(batch.schema):
        return batch
    columns = [_cast(column, retyped(column.type, _PLAIN.get)) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def with_views(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows of what `without_views` made of a batch, as rows of its own schema."""
    columns = [_cast(column, kind) for column, kind in zip(batch.columns, schema.types, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    # Some types cannot even be cast to themselves.
    return column if column.type == kind else column.cast(kind)


# ---------------------------------------------------------------- types


def _has_views(schema: pa.Schema) -> bool:
    # Nearly all have none, and are told by this alone.
    kinds = schema.types
    inner = (pa.DictionaryType, pa.BaseExtensionType)
    return any(
        kind.id in _IDS or ((kind.num_fields or isinstance(kind, inner)) and _views_within(kind))
        for kind in kinds
    )


@functools.lru_cache(maxsize=256)
def _views_within(kind: pa.DataType) -> bool:
    return any(inner.id in _IDS for inner in kinds_within([kind]))


def kinds_within(kinds: Iterable[pa.DataType]) -> Iterator[pa.DataType]:
    waiting = list(kinds)
    while waiting:
        kind = waiting.pop()
        yield kind
        if isinstance(kind, pa.BaseExtensionType):
            waiting.append(kind.storage_type)
        elif pa.types.is_dictionary(kind):
            waiting.append(kind.value_type)
        waiting += [kind.field(index).type for index in range(kind.num_fields)]


def _is_taken_apart(kind: pa.DataType) -> bool:
    """Whether `retyped` looks into a type. A dictionary stays whole whichever of its rows are taken."""
    types = pa.types
    looks = (types.is_struct, types.is_map, types.is_list, types.is_large_list, types.is_fixed_size_list)
    return kind.id in _IDS or types.is_dictionary(kind) or any(is_one(kind) for is_one in looks)


def retyped(kind: pa.DataType, other: Callable[[pa.DataType], pa.DataType | None]) -> pa.DataType:
    """Return a type in which each one within is the ``other`` one; None: it stays, and is looked into."""
    types = pa.types

    def inner(field: pa.Field) -> pa.Field:
        return field.with_type(retyped(field.type, other))

    if (found := other(kind)) is not None:
        return found
    if types.is_struct(kind):
        return pa.struct([inner(field) for field in kind])
    if types.is_map(kind):
        return pa.map_(inner(kind.key_field), inner(kind.item_field), kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return pa.list_(inner(kind.value_field), kind.list_size)
    if types.is_large_list(kind):
        return pa.large_list(inner(kind.value_field))
    if types.is_list(kind):
        return pa.list_(inner(kind.value_field))
    return kind


# ---------------------------------------------------------------- values


def _shown(column: pa.Array) -> int:
    """Return how many bytes the views in a column show, those of rows that are null included."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _shown(column.storage)
    if kind.id in _IDS:
        words = np.frombuffer(column.buffers()[1], np.int32)
        lengths = words[::_WORDS][column.offset : column.offset + len(column)]
        return int(np.maximum(lengths, 0).sum(dtype=np.int64))
    return sum(_shown(child) for child in _children(column))


def _children(column: pa.Array) -> list[pa.Array]:
    kind, types = column.type, pa.types
    if types.is_dictionary(kind):
        return [column.dictionary]
    if types.is_map(kind):
        return [column.keys, column.items]
    if types.is_struct(kind) or types.is_union(kind):
        return [column.field(index) for index in range(kind.num_fields)]
    return [column.values] if kind.num_fields else []


# A row by itself: its buffers hold nothing of the rows beside it.
#
# Arrow pads what it writes of a slice with the bytes that follow, and writes dictionaries, the text of views and the
# values of unions whole. So a slice says more than its rows do.


def may_share(schema: pa.Schema) -> bool:
    """Whether rows of ``schema`` point into values that other rows may point into too."""
    return any(_shares(kind) for kind in kinds_within(schema.types))


def row_alone(batch: pa.RecordBatch, row: int, *, shares: bool) -> pa.RecordBatch:
    """Return a row of ``batch`` as one that owns all of its memory; ``shares`` is `may_share` of its schema."""
    part = batch.slice(row, 1)
    if not shares:
        return copied(part)
    plain = without_views(part)
    columns = [_own(column) for column in copied(plain).columns]
    own = pa.RecordBatch.from_arrays(columns, schema=plain.schema)
    return own if plain is part else with_views(own, batch.schema)


def copied(part: pa.RecordBatch) -> pa.RecordBatch:
    """Return a slice without the values beside it, which Arrow casts and validates too where they are in lists."""
    # A batch that is put together with nothing is copied, and faster than rows are taken.
    return pa.concat_batches([part, part.slice(0, 0)])


def _shares(kind: pa.DataType) -> bool:
    types = pa.types
    is_view = types.is_string_view(kind) or types.is_binary_view(kind)
    return bool(is_view or types.is_dictionary(kind) or types.is_union(kind))


def _own(array: Any) -> Any:
    """Return a copied array whose dictionaries and unions have its own values alone."""
    kind, types = array.type, pa.types
    if not any(_shares(inner) for inner in kinds_within([kind])):
        return array
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _own(array.storage))
    if types.is_dictionary(kind):
        used = pc.unique(array.indices.drop_null())
        indices = pc.index_in(array.indices, value_set=used).cast(kind.index_type)
        return pa.DictionaryArray.from_arrays(
            indices, _own(array.dictionary.take(used)), ordered=kind.ordered
        )
    if types.is_struct(kind):
        fields = [_own(array.field(index)) for index in range(kind.num_fields)]
        return pa.StructArray.from_arrays(fields, fields=list(kind), mask=array.is_null())
    if types.is_fixed_size_list(kind):
        return _with_values(array, kind, 1)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        return _with_values(array, kind, 2)
    return array.take(pa.array(range(len(array)), pa.int64()))


def _with_values(array: Any, kind: Any, buffers: int) -> Any:
    """Return a list, or a map, with values of its own; ``buffers`` are its own, before those of its values."""
    if pa.types.is_map(kind):
        entries = kind.field(0).type
        values = pa.StructArray.from_arrays([_own(array.keys), _own(array.items)], fields=list(entries))
    else:
        values = _own(array.values)
    return pa.Array.from_buffers(kind, len(array), array.buffers()[:buffers], array.null_count, 0, [values])


# Digests of rows: equal rows have equal digests, however they are cut, laid out in memory, or sliced.
#
# They notice rows that are other ones. They are no protection against somebody who wants two to be alike.

DIGEST_BYTES = 16

_KEY, _NONCE = b"ftlayer's digest", bytes(12)  # no secret: a digest is the same in every process
_PIECE = 1 << 30  # the library takes less than 2 GiB at once

_TEXTS = {kind.id for kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())}


def digest_of(batch: pa.RecordBatch) -> bytes:
    """Return `DIGEST_BYTES` bytes that depend on the number of rows, each bit of each value, and their order.

    Batches that are compared have one schema, save that text may be plain, large, in views or in a dictionary. Each
    buffer is hashed by AES-GMAC (NIST SP 800-38D), and all of their tags by BLAKE2b: alone it takes ten times as long.
    """
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    found.update(batch.num_rows.to_bytes(8, "little"))
    for column in without_views(batch).columns:
        _feed(found, column)
    return found.digest()


def _feed(found: Any, column: pa.Array) -> None:
    kind, types = column.type, pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _feed(found, column.storage)
    if types.is_dictionary(kind):
        values = without_views(pa.record_batch([column.dictionary], ["values"])).column(0)
        return _feed(found, pa.DictionaryArray.from_arrays(column.indices, values).dictionary_decode())
    if types.is_run_end_encoded(kind):
        return _feed(found, pc.run_end_decode(column))
    found.update(b"\1" if column.null_count else b"\0")
    if column.null_count:
        _add(found, column.is_null().cast(pa.uint8()).buffers()[1], 0, len(column))
        if types.is_null(kind):
            return None
        column = column.drop_null()
    if types.is_boolean(kind):
        column = column.cast(pa.uint8())
        kind = column.type
    if kind.id in _TEXTS:
        large = types.is_large_string(kind) or types.is_large_binary(kind)
        offsets = _feed_lengths(found, column, large=large)
        _add(found, column.buffers()[2], int(offsets[0]), int(offsets[-1] - offsets[0]))
    elif types.is_struct(kind):
        for child in column.flatten():
            _feed(found, child)
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets = _feed_lengths(found, column, large=types.is_large_list(kind))
        first, size = int(offsets[0]), int(offsets[-1] - offsets[0])
        for child in (column.keys, column.items) if types.is_map(kind) else (column.flatten(),):
            _feed(found, child if len(child) == size else child.slice(first, size))
    elif types.is_fixed_size_list(kind):
        _feed(found, column.flatten())
    elif kind.num_fields:  # unions and views of lists, which no source of Spark's has
        found.update(repr(column.to_pylist()).encode("utf-8", "surrogatepass"))
    elif not types.is_null(kind):
        width = kind.bit_width // 8
        _add(found, column.buffers()[1], column.offset * width, len(column) * width)
    return None


def _feed_lengths(found: Any, column: pa.Array, *, large: bool) -> npt.NDArray[Any]:
    if not len(column):
        return np.zeros(1, np.int64)
    offsets: npt.NDArray[Any] = np.frombuffer(column.buffers()[1], np.int64 if large else np.int32)
    offsets = offsets[column.offset : column.offset + len(column) + 1]
    _add(found, np.diff(offsets).astype(np.int64, copy=False), 0, 8 * len(column))
    return offsets


def _add(found: Any, data: Any, start: int, size: int) -> None:
    found.update(size.to_bytes(8, "little"))
    if not size:
        return
    octets = memoryview(data).cast("B")[start : start + size]
    for at in range(0, size, _PIECE):
        found.update(_gmac().encrypt(_NONCE, b"", octets[at : at + _PIECE]))


@cache
def _gmac() -> AESGCM:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(_KEY)


UNREADABLE = (
    pa.ArrowException,
    OSError,
    EOFError,
    ValueError,
    OverflowError,
    MemoryError,
    LookupError,
    struct.error,
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

_I32, _U32, _U16, _I64 = (struct.Struct(form) for form in ("<i", "<I", "<H", "<q"))
# Before a message: the mark of the format since Arrow 0.15, and the length of the header.
_PREFIX = struct.Struct("<Ii")
_CONTINUATION = 0xFFFFFFFF


def as_stream(batch: pa.RecordBatch) -> pa.Buffer:
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
    return retyped(kind, _BYTES_OF.get)


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
        at = self._place(slot)
        return 0 if at is None else self.data[at]

    def integer(self, slot: int) -> int:
        at = self._place(slot)
        return 0 if at is None else int(_I64.unpack_from(self.data, at)[0])

    def table(self, slot: int) -> _FlatbufferTable | None:
        at = self._place(slot)
        return None if at is None else _FlatbufferTable(self.data, self._target(at))

    def length(self, slot: int) -> int:
        at = self._place(slot)
        return 0 if at is None else int(_U32.unpack_from(self.data, self._target(at))[0])

    def tables(self, slot: int) -> Iterator[_FlatbufferTable]:
        at = self._place(slot)
        if at is not None:
            start = self._target(at)
            for index in range(self.length(slot)):
                yield _FlatbufferTable(self.data, self._target(start + 4 + 4 * index))

    def structs(self, slot: int, size: int) -> memoryview:
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
