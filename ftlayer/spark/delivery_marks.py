"""Which rows of a first stage the vertex delivered: a mark of 40 bytes in the column ``_ft``, null for a source's own.

Layout, little-endian: root (uint64), the range of offsets [start, end) that was read with the row (int64), origin and
tries (uint64, see `ftlayer.records.tries`). One
flat column, because every row of the source pays for it: Spark writes a null struct of three fields to Arrow in twice
the time that the text of a log line takes.
"""

from __future__ import annotations

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
) -> pa.Array:
    """Return one mark a row, as an Arrow binary array."""
    marks = np.empty(len(roots), MARK_DTYPE)
    marks["root"], marks["start"], marks["end"] = roots, start, end
    marks["origin"], marks["tries"] = origins, tries
    offsets = np.arange(len(roots) + 1, dtype=np.int32) * MARK_DTYPE.itemsize
    return pa.Array.from_buffers(
        pa.binary(), len(roots), [None, pa.py_buffer(offsets), pa.py_buffer(marks.tobytes())]
    )


def read_marks(column: pa.Array) -> npt.NDArray[np.void]:
    """Return the marks of the rows that have one, in their order (`MARK_DTYPE`)."""
    return np.frombuffer(b"".join(column.drop_null().to_pylist()), MARK_DTYPE)
