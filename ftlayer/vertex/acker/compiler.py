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
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

# Pointers for numba kernels: arrays without bounds, reference counts and negative indices.
#
# numba counts a reference for each array that is handed to an inner function, with atomic instructions that
# cost more than a look-up in the hash table. A pointer is a plain number; ``pointer[i]`` reads and writes as an
# array does. The caller of a kernel keeps the arrays alive, and the kernel keeps to their bounds.


_FOR_WRITING = 1
_KEEP_IN_ALL_LEVELS = 3
_DATA_CACHE = 1


@intrinsic
def _pointer_to(typing_context: Any, array: Any) -> Any:
    pointer: Any = types.CPointer
    signature = pointer(array.dtype)(array)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        return context.make_array(sig.args[0])(context, builder, args[0]).data

    return signature, generate


@intrinsic
def _u64_at(typing_context: Any, address: Any) -> Any:
    pointer: Any = types.CPointer
    return pointer(types.uint64)(types.uint64), _as_pointer


@intrinsic
def _u16_at(typing_context: Any, address: Any) -> Any:
    pointer: Any = types.CPointer
    return pointer(types.uint16)(types.uint64), _as_pointer


def _as_pointer(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    return builder.inttoptr(args[0], context.get_value_type(sig.return_type))


@intrinsic
def _prefetch(typing_context: Any, pointer: Any, index: Any) -> Any:
    signature = types.void(pointer, index)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        address = builder.bitcast(builder.gep(args[0], [args[1]]), cgutils.voidptr_t)
        word = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], function_type)
        hints = (_FOR_WRITING, _KEEP_IN_ALL_LEVELS, _DATA_CACHE)
        builder.call(function, [address, *(ir.Constant(word, hint) for hint in hints)])
        return context.get_dummy_value()

    return signature, generate


# Typed as anything: to mypy an intrinsic has the typing context among its arguments.
pointer_to: Any = _pointer_to
"""Kernel function: the pointer to the first item of a C-ordered array."""

u64_at: Any = _u64_at
"""Kernel function (address): the pointer to the uint64 that is there."""

u16_at: Any = _u16_at
"""Kernel function (address): the pointer to the uint16 that is there."""

prefetch: Any = _prefetch
"""Kernel function (pointer, index): ask the CPU for the item's cache line, for writing; only a hint."""


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

    numba looks for a place that can be written: ``NUMBA_CACHE_DIR``, the ``__pycache__`` beside the module, the user's
    cache directory. Without one it is compiled anew in each process, and a `RuntimeWarning` says so once.
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
