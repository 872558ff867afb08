"""Which rows of a first stage the vertex delivered: a mark of 40 bytes in the column ``_ft``, null for a source's own.

Layout, little-endian: root (uint64), the range of offsets [start, end) that was read with the row (int64), origin and
tries (uint64, see `ftlayer.records.tries`); behind them, as UTF-8, why the row does not fit its source any more, where
that is so: then its columns are null. One flat column, because every row of the source pays for it: Spark writes a null
struct of three fields to Arrow in twice the time that the text of a log line takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SOURCE_FT = "binary"
"""The type of the column before the first stage (DDL)."""

MARK_DTYPE = np.dtype(
    [("root", "<u8"), ("start", "<i8"), ("end", "<i8"), ("origin", "<u8"), ("tries", "<u8")]
)


def make_marks(
    roots: npt.NDArray[np.uint64],
    start: int,
    end: int,
    origins: npt.NDArray[np.uint64],
    tries: npt.NDArray[np.uint64],
    misfits: Mapping[int, str] = MappingProxyType({}),
) -> pa.Array:
    """Return one mark a row, as an Arrow binary array; that of a row in ``misfits`` says why it does not fit."""
    marks = np.empty(len(roots), MARK_DTYPE)
    marks["root"], marks["start"], marks["end"] = roots, start, end
    marks["origin"], marks["tries"] = origins, tries
    offsets = np.arange(len(roots) + 1, dtype=np.int32) * MARK_DTYPE.itemsize
    if misfits:
        ends = [mark.tobytes() + misfits.get(row, "").encode() for row, mark in enumerate(marks)]
        return pa.array(ends, pa.binary())
    return pa.Array.from_buffers(
        pa.binary(), len(roots), [None, pa.py_buffer(offsets), pa.py_buffer(marks.tobytes())]
    )


def read_marks(column: pa.Array) -> npt.NDArray[np.void]:
    """Return the marks of the rows that have one, in their order (`MARK_DTYPE`)."""
    size = MARK_DTYPE.itemsize
    return np.frombuffer(b"".join(mark[:size] for mark in column.drop_null().to_pylist()), MARK_DTYPE)


def read_misfits(column: pa.Array) -> dict[int, str]:
    """Return the rows that do not fit their source any more, with the reason."""
    size = MARK_DTYPE.itemsize
    return {
        row: mark[size:].decode()
        for row, mark in enumerate(column.to_pylist())
        if mark is not None and len(mark) > size
    }
