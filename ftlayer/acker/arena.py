"""Address space for a hash table's slots; memory is taken as slots are first written."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

_PAGE = mmap.PAGESIZE
# Linux: don't count untouched pages against the commit limit. Python names the constant from 3.13 on.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if hasattr(mmap, "MADV_DODUMP") else 0)


class Arena:
    """One anonymous mapping seen as a zeroed array of ``rows`` times ``width`` items of ``dtype``.

    Reserving is free; a page costs memory from its first write until `release`. Raises `OSError` where the
    address space (or its limit) is too small.
    """

    def __init__(self, rows: int, width: int, dtype: npt.DTypeLike) -> None:
        self.width = width
        self._row_bytes = np.dtype(dtype).itemsize * width
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._mapping = mmap.mmap(-1, rows * self._row_bytes, flags=flags)
        self.array: npt.NDArray[Any] = np.frombuffer(self._mapping, dtype=dtype, count=rows * width)

    def release(self, start: int, stop: int) -> None:
        """Give back the memory of the pages wholly within rows ``start`` to ``stop``, all zero by now."""
        advice = getattr(mmap, "MADV_DONTNEED", None)
        first = -(-start * self._row_bytes // _PAGE) * _PAGE
        last = stop * self._row_bytes // _PAGE * _PAGE
        if advice is not None and last > first:
            self._mapping.madvise(advice, first, last - first)
