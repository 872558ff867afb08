"""Address space for a hash table's slots; memory is taken as slots are first written."""

from __future__ import annotations

import mmap

import numpy as np
import numpy.typing as npt

_PAGE = mmap.PAGESIZE
_HUGE_PAGE = 2 * 1024 * 1024
# Linux: don't count untouched pages against the commit limit. Python names the constant from 3.13 on.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if hasattr(mmap, "MADV_DODUMP") else 0)


class Arena:
    """One anonymous mapping seen as a zeroed array of ``length`` items of ``dtype``.

    Reserving is free; a page costs memory from its first write until `release`. Raises `MemoryError` or
    `OSError` where the address space (or its limit) is too small.
    """

    def __init__(self, length: int, dtype: npt.DTypeLike) -> None:
        self._item = np.dtype(dtype).itemsize
        size = -(-length * self._item // _HUGE_PAGE) * _HUGE_PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._mapping = mmap.mmap(-1, size, flags=flags)
        self.array: npt.NDArray[np.generic] = np.frombuffer(self._mapping, dtype=dtype, count=length)
        self._address = self.array.ctypes.data

    def use_huge_pages(self, start: int, stop: int) -> None:
        """Ask for huge pages where they lie wholly within items ``start`` to ``stop``.

        Random access into hundreds of megabytes is bound by address translation without them. Only whole
        ones, so that a table of a few thousand entries does not take 2 MiB for each segment.
        """
        advice = getattr(mmap, "MADV_HUGEPAGE", None)
        if advice is not None:
            self._advise(advice, start, stop, _HUGE_PAGE)

    def release(self, start: int, stop: int) -> None:
        """Give back the memory of the pages wholly within items ``start`` to ``stop``, all zero by now."""
        advice = getattr(mmap, "MADV_DONTNEED", None)
        if advice is not None:
            self._advise(advice, start, stop, _PAGE)

    def _advise(self, advice: int, start: int, stop: int, grain: int) -> None:
        first = -(-(self._address + start * self._item) // grain) * grain - self._address
        last = (self._address + stop * self._item) // grain * grain - self._address
        if last > first:
            self._mapping.madvise(advice, first, last - first)
