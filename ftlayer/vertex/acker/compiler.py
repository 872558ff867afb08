from __future__ import annotations

import errno
import os
import stat
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import numba
from numba.core.caching import FunctionCache


@lru_cache(maxsize=1)
def _warn_about_the_cache(reason: str) -> None:
    warnings.warn(
        "compiled kernels cannot be kept on disk, so every start of the vertex compiles them again "
        f"(some seconds): set NUMBA_CACHE_DIR to a directory that can be written ({reason})",
        RuntimeWarning,
        stacklevel=3,
    )


class _KernelCache(FunctionCache):
    """Numba's; what cannot be read or written there, or what another user may have put there, is compiled."""

    def load_overload(self, signature: Any, target: Any) -> Any:
        return self._tried(partial(super().load_overload, signature, target), self.flush)

    def save_overload(self, signature: Any, data: Any) -> None:
        self._tried(partial(super().save_overload, signature, data))

    def _tried(self, work: Callable[[], Any], mend: Callable[[], None] = lambda: None) -> Any:
        try:
            with suppress(FileNotFoundError):
                status = os.stat(self.cache_path)
                trusted = (0, os.geteuid(), os.stat(__file__).st_uid)
                if status.st_uid not in trusted or status.st_mode & stat.S_IWOTH:
                    _warn_about_the_cache(f"other users can write to {self.cache_path}")
                    return None
            return work()
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise  # who holds all descriptors lets one go again
            _warn_about_the_cache(f"{self.cache_path}: {getattr(error, 'strerror', None) or repr(error)}")
            with suppress(OSError):
                mend()
            return None


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` on its first call: without the GIL, and kept on disk between processes.

    numba looks for a place that can be written: ``NUMBA_CACHE_DIR``, then the ``__pycache__`` beside
    the module, then the user's cache directory. A read-only installation of a user without a home has
    none of them; the kernel is then compiled anew in each process, and a `RuntimeWarning` says so once.
    """
    compiled: Any = numba.njit(nogil=True)(function)
    of_function: Callable[[Any], Any] = _KernelCache
    try:
        compiled._cache = of_function(function)
    except RuntimeError as error:  # numba: "cannot cache function ...: no locator available"
        _warn_about_the_cache(str(error))
    return compiled  # type: ignore[no-any-return]


def helper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile ``function`` into every kernel that calls it; it has no life (or cache) of its own."""
    compiled: Callable[..., Any] = numba.njit(inline="always")(function)
    return compiled
