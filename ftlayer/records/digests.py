"""Digests of rows: equal rows have equal digests, however they are cut, laid out in memory, or sliced.

They notice rows that are other ones. They are no protection against somebody who wants two to be alike.
"""

from __future__ import annotations

import hashlib
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ftlayer.records.views import without_views

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

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
        offsets = _feed_lengths(
            found, column, large=types.is_large_string(kind) or types.is_large_binary(kind)
        )
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
