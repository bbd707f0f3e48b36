"""What the loops with an exponential of their own are built from: flags, and the bits of floats."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}
"""Terms may be reordered and multiply-adds fused. Inputs are finite (checked above); no loop forms an infinity."""


def _bitcast(source: Any, target: Any, llvm_type: Any) -> Any:
    """Reinterpret the bits of a number; a bitcast vectorizes where a scalar view would not."""

    @intrinsic
    def cast(typingctx, value):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], llvm_type)

        return target(source), codegen

    return cast


float32_of = _bitcast(types.int32, types.float32, ir.FloatType())
float64_of = _bitcast(types.int64, types.float64, ir.DoubleType())
