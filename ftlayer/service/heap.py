"""The C library's heap, told to keep what large messages have used for the next ones."""

from __future__ import annotations

import ctypes
import logging

# From malloc.h. Below HEAP_MAX_SIZE (64 MiB), beyond which glibc refuses.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
KEPT_BYTES = 32 << 20
"""Up to so much free memory at the end of each heap stays with the process."""

ARENAS = 4
"""Heaps that threads share; by default there are eight a core, and each would keep its own."""

logger = logging.getLogger(__name__)


def keep_freed_memory() -> None:
    """Give freed memory back to the system rarely.

    gRPC reads messages into memory of their own. By default most of it is given back when it is freed and comes
    back as pages that the kernel has to zero: a third of a busy vertex's time. Does nothing where the C library is
    not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError) as error:
        logger.debug("this C library's heap cannot be tuned: %s", error)
        return
    mallopt(_M_ARENA_MAX, ARENAS)
    mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)
    mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
