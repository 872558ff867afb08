"""Digests of rows: equal rows have equal digests, however they are cut, laid out in memory, or sliced.

They notice rows that are other ones. They are no protection against somebody who wants two to be alike.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.records.views import without_views

DIGEST_BYTES = 8

_WORD = 8
_CHUNK_WORDS = 1 << 15
"""Words that are summed at once: they and their weights stay in the processor's cache."""

_TEXTS = {kind.id for kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())}

_U64 = npt.NDArray[np.uint64]


def digest_of(batch: pa.RecordBatch) -> bytes:
    """Return `DIGEST_BYTES` bytes that depend on the number of rows, all values and their order.

    Of columns that are unions or run-end encoded their number alone counts.
    """
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    found.update(batch.num_rows.to_bytes(8, "little"))
    for column in without_views(batch).columns:
        _feed(found, column)
    return found.digest()


def _feed(found: Any, column: pa.Array) -> None:
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        _feed(found, column.storage)
        return
    if pa.types.is_dictionary(kind):
        _feed(found, column.dictionary_decode())
        return
    if column.null_count:
        _add(found, column.is_null().cast(pa.uint8()).buffers()[1], 0, len(column))
        if pa.types.is_null(kind):
            return
        column = column.drop_null()
    if pa.types.is_boolean(kind):
        column = column.cast(pa.uint8())
        kind = column.type
    if _is_text(kind):
        _feed_text(found, column)
    elif pa.types.is_struct(kind):
        for child in column.flatten():
            _feed(found, child)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        _feed_lists(found, column)
    elif pa.types.is_fixed_size_list(kind):
        _feed(found, column.flatten())
    elif kind.num_fields == 0 and not pa.types.is_null(kind):
        width = kind.bit_width // 8
        _add(found, column.buffers()[1], column.offset * width, len(column) * width)


def _is_text(kind: pa.DataType) -> bool:
    return kind.id in _TEXTS


def _feed_text(found: Any, column: pa.Array) -> None:
    kind = column.type
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    offsets = _offsets(column, large=large)
    _add(found, np.diff(offsets).astype(np.int64), 0, 8 * len(column))
    data = column.buffers()[2]
    if data is not None:
        _add(found, data, int(offsets[0]), int(offsets[-1] - offsets[0]))


def _feed_lists(found: Any, column: pa.Array) -> None:
    offsets = _offsets(column, large=pa.types.is_large_list(column.type))
    _add(found, np.diff(offsets).astype(np.int64), 0, 8 * len(column))
    if not pa.types.is_map(column.type):
        _feed(found, column.flatten())
        return
    first, size = int(offsets[0]), int(offsets[-1] - offsets[0])
    for child in (column.keys, column.items):
        _feed(found, child if len(child) == size else child.slice(first, size))


def _offsets(column: pa.Array, *, large: bool) -> npt.NDArray[Any]:
    if not len(column):
        return np.zeros(1, np.int64)
    dtype = np.int64 if large else np.int32
    offsets: npt.NDArray[Any] = np.frombuffer(column.buffers()[1], dtype)
    return offsets[column.offset : column.offset + len(column) + 1]


def _add(found: Any, data: Any, start: int, size: int) -> None:
    """Add ``size`` bytes of a buffer: their sum as words, each weighted by its place."""
    found.update(size.to_bytes(8, "little"))
    if not size:
        return
    octets = np.frombuffer(data, np.uint8)[start : start + size] if not isinstance(data, np.ndarray) else data
    octets = np.ascontiguousarray(octets).view(np.uint8)
    whole = size // _WORD * _WORD
    words = octets[:whole].view(np.uint64) if octets[:whole].ctypes.data % _WORD == 0 else None
    if words is None:
        words = octets[:whole].copy().view(np.uint64)
    weights = _weights()
    for at in range(0, len(words), _CHUNK_WORDS):
        part = words[at : at + _CHUNK_WORDS]
        total = int(np.add.reduce(part * weights[: len(part)], dtype=np.uint64))
        found.update(total.to_bytes(8, "little"))
    found.update(octets[whole:].tobytes())


@cache
def _weights() -> _U64:
    """Return odd numbers, the same in every process: an odd weight loses nothing of a word."""
    drawn: _U64 = np.random.Generator(np.random.PCG64(0)).integers(
        0, 1 << 63, _CHUNK_WORDS, dtype=np.uint64, endpoint=False
    )
    return (drawn << np.uint64(1)) | np.uint64(1)
