"""Lines of text as Arrow arrays: without Python for each line."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_NEWLINE, _RETURN = 0x0A, 0x0D


def line_starts(data: bytes) -> npt.NDArray[np.int64]:
    """Return where each line begins; the last one may be without a newline."""
    newlines = np.flatnonzero(np.frombuffer(data, np.uint8) == _NEWLINE)
    starts = np.concatenate([np.zeros(1, np.int64), newlines.astype(np.int64) + 1])
    return starts[:-1] if starts[-1] == len(data) else starts


def texts_of(data: bytes) -> pa.Array:
    """Return each line as a text, without its newline and a carriage return before that.

    What is no UTF-8 is U+FFFD.
    """
    content = np.frombuffer(data, np.uint8)
    is_newline = content == _NEWLINE
    kept = ~is_newline
    kept[:-1] &= ~((content[:-1] == _RETURN) & is_newline[1:])
    starts = line_starts(data)
    # How many bytes are kept before each line.
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept, dtype=np.int64)])
    offsets = np.append(before[starts], before[-1]).astype(np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(content[kept])]
    lines = pa.Array.from_buffers(pa.binary(), len(starts), buffers)
    try:
        return lines.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([line.decode("utf-8", "replace") for line in lines.to_pylist()], pa.string())
