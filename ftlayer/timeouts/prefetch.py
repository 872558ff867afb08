"""A software prefetch that numba kernels can call."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_FOR_WRITING = 1
_KEEP_IN_ALL_LEVELS = 3
_DATA_CACHE = 1


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Ask the CPU to fetch the cache line of ``array[index]`` (one-dimensional, C order), for writing.

    Only a hint: it changes nothing, and an index out of range does no harm.
    """
    signature = types.void(array, types.intp)

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        view = context.make_array(sig.args[0])(context, builder, args[0])
        pointer = builder.gep(view.data, [args[1]])
        pointer = builder.bitcast(pointer, cgutils.voidptr_t)
        word = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], function_type)
        hints = (_FOR_WRITING, _KEEP_IN_ALL_LEVELS, _DATA_CACHE)
        builder.call(function, [pointer, *(ir.Constant(word, hint) for hint in hints)])
        return context.get_dummy_value()

    return signature, generate
