"""Calls by address."""

# What is called by address is compiled once, and not again with each layer that Numba puts around it.

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from nlflow.backends.numba.loading import njit

APART = {"cache": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
"""Options of a function that is called by its address alone: Python cannot call it, and need not unpack arguments."""
HELPER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "error_model": "numpy"}
"""Options of a function that other compiled ones call; none divides by 0, so that no division asks whether it does."""


@intrinsic
def stay_whole(typingctx):
    """Keep LLVM from inlining the function that calls this."""

    def codegen(context, builder, signature, arguments):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


@dataclass(frozen=True)
class Callee:
    """A function that is called by address."""

    function: Any
    arguments: tuple[Any, ...]

    def address(self) -> int:
        result = self.function.get_compile_result(types.void(*self.arguments))
        return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))


def caller(function: Any = None) -> Any:
    """Return an intrinsic ``call(address, arguments)``; with `function` it checks the types of the arguments."""

    @intrinsic
    def call(typingctx, address, arguments):
        kinds = tuple(types.unliteral(kind) for kind in arguments)
        if function is not None and kinds not in function.overloads:
            raise TypeError(f"{function.__name__} is not compiled for {kinds}")
        signature = types.void(types.intp, types.Tuple(kinds))

        def codegen(context, builder, signature, values):
            kinds = tuple(signature.args[1])
            kind = context.call_conv.get_function_type(types.void, kinds)
            pointer = builder.inttoptr(values[0], kind.as_pointer())
            status, _ = context.call_conv.call_function(
                builder, pointer, types.void, kinds, cgutils.unpack_tuple(builder, values[1])
            )
            with cgutils.if_unlikely(builder, status.is_error):
                context.call_conv.return_status_propagate(builder, status)
            return context.get_dummy_value()

        return signature, codegen

    return call


_numbered = caller()


@njit(parallel=True, cache=True)
def each(count, one, arguments):
    for number in prange(count):
        _numbered(one, (np.int64(number), arguments))


EACH = Callee(each, (types.intp, types.intp, types.intp))
"""The parallel loop, which `jobs` needs the address of."""


def jobs(function: Any) -> Any:
    """Return ``run(each, address, count, arguments)``, which calls ``function(number, *arguments)`` in parallel."""
    # `each` is the address of `EACH`, `address` that of the function, whose first argument is an integer.

    @intrinsic
    def run(typingctx, each, address, count, arguments):
        kinds = (types.int64, *(types.unliteral(kind) for kind in arguments))
        if kinds not in function.overloads:
            raise TypeError(f"{function.__name__} is not compiled for {kinds}")
        signature = types.void(types.intp, types.intp, types.intp, types.Tuple(kinds[1:]))

        def codegen(context, builder, signature, values):
            each, address, count, given = values
            word, convention = context.get_value_type(types.intp), context.call_conv
            # What lies in memory: the address of the function, and its arguments after the number.
            frame = cgutils.alloca_once(builder, ir.LiteralStructType([word, given.type]))
            builder.store(address, builder.gep(frame, [index32(0), index32(0)]))
            builder.store(given, builder.gep(frame, [index32(0), index32(1)]))
            unpack = ir.Function(
                builder.module, convention.get_function_type(types.void, (types.intp, types.intp)),
                builder.module.get_unique_name("unpack"),
            )  # fmt: skip
            unpack.linkage = "internal"
            inside = ir.IRBuilder(unpack.append_basic_block())
            result, error, number, place = unpack.args
            held = inside.inttoptr(place, frame.type)
            rest = inside.load(inside.gep(held, [index32(0), index32(1)]))
            target = inside.inttoptr(
                inside.load(inside.gep(held, [index32(0), index32(0)])),
                convention.get_function_type(types.void, kinds).as_pointer(),
            )
            values = [number, *cgutils.unpack_tuple(inside, rest)]
            own = context.get_arg_packer(kinds).as_arguments(inside, values)
            inside.ret(inside.call(target, [result, error, *own]))
            loop = builder.inttoptr(each, convention.get_function_type(types.void, (types.intp,) * 3).as_pointer())
            status, _ = convention.call_function(
                builder, loop, types.void, (types.intp,) * 3,
                [count, builder.ptrtoint(unpack, word), builder.ptrtoint(frame, word)],
            )  # fmt: skip
            with cgutils.if_unlikely(builder, status.is_error):
                convention.return_status_propagate(builder, status)
            return context.get_dummy_value()

        return signature, codegen

    return run


def index32(value: int) -> Any:
    return ir.Constant(ir.IntType(32), value)
