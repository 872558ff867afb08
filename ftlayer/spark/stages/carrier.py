"""A carrier: the ids of a record that is handed to another query, as 20 bytes in any column or header.

Layout, little-endian: root (uint64), record id (uint64), incarnation of the vertex (uint32).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.errors import CodecError

CARRIER_DTYPE = np.dtype([("root", "<u8"), ("id", "<u8"), ("incarnation", "<u4")])
CARRIER_BYTES = CARRIER_DTYPE.itemsize


def make_carriers(roots: npt.NDArray[np.uint64], ids: npt.NDArray[np.uint64], incarnation: int) -> pa.Array:
    """Return one carrier a row, as an Arrow binary array."""
    carriers = np.empty(len(roots), CARRIER_DTYPE)
    carriers["root"] = roots
    carriers["id"] = ids
    carriers["incarnation"] = incarnation
    offsets = np.arange(len(roots) + 1, dtype=np.int32) * CARRIER_BYTES
    return pa.Array.from_buffers(
        pa.binary(), len(roots), [None, pa.py_buffer(offsets), pa.py_buffer(carriers.tobytes())]
    )


def check_carriers(column: pa.Array, name: str) -> bytes:
    """Return the carriers of a column end to end; `CodecError` names the first row that has none."""
    if not pa.types.is_binary(column.type) and not pa.types.is_large_binary(column.type):
        raise CodecError(
            f"column {name!r} is {column.type}; a carrier is binary, {CARRIER_BYTES} bytes a row"
        )
    values = column.to_pylist()
    for row, value in enumerate(values):
        if value is None or len(value) != CARRIER_BYTES or value[:8] == bytes(8) or value[8:16] == bytes(8):
            raise CodecError(
                f"column {name!r}: row {row} holds no carrier of a tracked record "
                f"({'null' if value is None else f'{len(value)} bytes'}); every record that is resumed must "
                "have been handed on by emit()"
            )
    return b"".join(values)


def read_carriers(data: bytes) -> npt.NDArray[np.void]:
    """Return carriers laid end to end as a structured array (`CARRIER_DTYPE`)."""
    return np.frombuffer(data, CARRIER_DTYPE)
