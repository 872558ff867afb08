from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numba


@lru_cache(maxsize=1)
def _warn_about_the_cache(reason: str) -> None:
    warnings.warn(
        "compiled kernels cannot be kept on disk, so every start of the vertex compiles them again "
        f"(some seconds): set NUMBA_CACHE_DIR to a directory that can be written ({reason})",
        RuntimeWarning,
        stacklevel=3,
    )


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` on its first call: without the GIL, and kept on disk between processes.

    numba looks for a place that can be written: ``NUMBA_CACHE_DIR``, then the ``__pycache__`` beside
    the module, then the user's cache directory. A read-only installation of a user without a home has
    none of them; the kernel is then compiled anew in each process, and a `RuntimeWarning` says so once.
    """
    try:
        compiled: Callable[..., Any] = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError as error:  # numba: "cannot cache function ...: no locator available"
        _warn_about_the_cache(str(error))
        compiled = numba.njit(nogil=True)(function)
    return compiled


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` into every kernel that calls it; it has no life (or cache) of its own."""
    compiled: Callable[..., Any] = numba.njit(inline="always")(function)
    return compiled
