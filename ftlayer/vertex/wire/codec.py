"""Calls and replies of the contract ↔ what msgpack can carry: `ftlayer.transport.codec` with the vertex's own types.

| type | on the wire |
| --- | --- |
| uint64 array, shape (n,) | bin: little-endian, 8 bytes an item |
| roots of rows | as a uint64 array, or as array [first, n]: the ids from ``first`` on |
| int32 array, shape (n,) or (n, k) | array [k, bin]: little-endian, 4 bytes an item; k = 0 for (n,) |
| Arrow record batch | bin: an Arrow IPC stream with exactly one batch, not compressed |
| tuple of `Failure` | map of columns (`ftlayer.records.failure_columns`); an array of maps is taken as well |
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.errors import MalformedRequestError
from ftlayer.records.failure_columns import from_columns, to_columns
from ftlayer.records.ipc import UNREADABLE, as_stream, read_one_batch
from ftlayer.transport.codec import Codec, Codecs, list_of
from ftlayer.transport.frames import malformed
from ftlayer.vertex.calls import I32, MAX_ROWS, U64, Failure, RootRange, RowRoots


def _unpack_batch(data: Any, where: str) -> pa.RecordBatch:
    """Read the one batch of an IPC stream; see `ftlayer.records.ipc.read_one_batch` for what is refused."""
    if not isinstance(data, bytes):
        raise malformed(where, "the bytes of an Arrow IPC stream", data)
    try:
        return read_one_batch(data)
    except UNREADABLE as error:
        raise MalformedRequestError(f"{where}: not a readable Arrow IPC stream ({error})") from None


def _unpack_u64(value: Any, where: str) -> U64:
    if type(value) is not bytes or len(value) % 8:
        raise malformed(where, "bytes of little-endian uint64", value)
    # A copy, because kernels are compiled for writable arrays and a view of bytes is not one.
    return np.frombuffer(value, "<u8").astype(np.uint64)


def _pack_roots(roots: RowRoots) -> Any:
    return [roots.first, roots.count] if isinstance(roots, RootRange) else _pack_u64(roots)


def _unpack_roots(value: Any, where: str) -> RowRoots:
    if type(value) is not list:
        return _unpack_u64(value, where)
    if len(value) != 2 or type(value[0]) is not int or type(value[1]) is not int:
        raise malformed(where, "[first, count]", value)
    first, count = value
    if not (first > 0 and 0 <= count <= MAX_ROWS and first + count <= 1 << 64):
        raise malformed(where, f"[first, count] of ids, 1 to 2^64-1, and at most {MAX_ROWS} of them", value)
    return RootRange(first, count)


def _pack_u64(array: U64) -> bytes:
    return np.ascontiguousarray(array, "<u8").tobytes()


def _pack_i32(array: I32) -> list[Any]:
    width = 0 if array.ndim == 1 else array.shape[1]
    return [width, np.ascontiguousarray(array, "<i4").tobytes()]


def _unpack_i32(value: Any, where: str) -> I32:
    if type(value) is not list or len(value) != 2:
        raise malformed(where, "[width, bytes of little-endian int32]", value)
    width, data = value
    if type(width) is not int or not 0 <= width <= 1 << 16:
        raise malformed(f"{where}[0]", "a width of 0 to 65536", width)
    if type(data) is not bytes or len(data) % (4 * max(width, 1)):
        raise malformed(f"{where}[1]", f"bytes of little-endian int32, {max(width, 1)} a row", data)
    array = np.frombuffer(data, "<i4").astype(np.int32)
    return array.reshape(-1, width) if width else array


CODECS = Codecs(
    {
        U64: Codec(_pack_u64, _unpack_u64),
        RowRoots: Codec(_pack_roots, _unpack_roots),
        I32: Codec(_pack_i32, _unpack_i32),
        pa.RecordBatch: Codec(lambda batch: memoryview(as_stream(batch)), _unpack_batch),
    }
)


def _failures() -> Codec:
    one_by_one = list_of(CODECS.of(Failure))

    def unpack(value: Any, where: str) -> Any:
        if type(value) is not dict:
            return one_by_one.unpack(value, where)
        try:
            return tuple(Failure(*row) for row in from_columns(value))
        except ValueError as error:
            raise MalformedRequestError(f"{where}: {error}") from None

    return Codec(to_columns, unpack)


CODECS.add(tuple[Failure, ...], _failures())

dataclass_codec = CODECS.of_dataclass
"""The codec of a call, a reply or a part of one."""
