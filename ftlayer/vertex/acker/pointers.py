"""Pointers for numba kernels: arrays without bounds, reference counts and negative indices.

numba counts a reference for each array that is handed to an inner function, with atomic instructions that
cost more than a look-up in the hash table. A pointer is a plain number; ``pointer[i]`` reads and writes as an
array does. The caller of a kernel keeps the arrays alive, and the kernel keeps to their bounds.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

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
