"""The C library's heap, told to keep what large messages have used for the next ones."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable

# From malloc.h. Below HEAP_MAX_SIZE (64 MiB), beyond which glibc refuses.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
KEPT_BYTES = 32 << 20
"""Up to so much free memory at the end of each heap stays with the process."""

ARENAS = 4
"""Heaps that threads share; by default there are eight a core, and each would keep its own."""

MOST_FREE_BYTES = 256 << 20
"""More free memory than this does not stay with a process; `give_back_freed_memory`."""

logger = logging.getLogger(__name__)


def keep_freed_memory() -> None:
    """Give freed memory back to the system rarely.

    gRPC reads messages into memory of their own. By default most of it is given back when it is freed and comes back as
    pages that the kernel has to zero: a third of a busy vertex's time. Does nothing where the C library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError) as error:
        logger.debug("this C library's heap cannot be tuned: %s", error)
        return
    mallopt(_M_ARENA_MAX, ARENAS)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)


def give_back_freed_memory(most_bytes: int = MOST_FREE_BYTES) -> bool:
    """Give freed memory back to the system, if there are more than ``most_bytes`` of it; whether there were.

    For now and then: a few large messages leave gigabytes that are free and in pieces. Needs glibc.
    """
    glibc = _glibc()
    if glibc is None:
        return False
    free_bytes, trim = glibc
    if free_bytes() <= most_bytes:
        return False
    trim(0)
    return True


class _MallInfo(ctypes.Structure):
    """What ``mallinfo2`` returns; ``fordblks`` are the bytes that are free, in all arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


@functools.cache
def _glibc() -> tuple[Callable[[], int], Callable[[int], int]] | None:
    try:
        library = ctypes.CDLL(None)
        info, trim = library.mallinfo2, library.malloc_trim
    except (OSError, AttributeError) as error:
        logger.debug("this C library's heap cannot be trimmed: %s", error)
        return None
    info.restype = _MallInfo
    trim.argtypes = [ctypes.c_size_t]
    return lambda: int(info().fordblks), trim
