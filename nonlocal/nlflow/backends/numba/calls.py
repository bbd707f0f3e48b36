"""Calls by address: what is called is compiled by itself, and not again with each layer that Numba puts around it.

Numba links what a function calls into the library of that function, and optimizes all of it once more. There are four
such layers around the body of a parallel loop. A body that the loop calls by its address is optimized once.
"""

from dataclasses import dataclass
from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@dataclass(frozen=True)
class Callee:
    """A function that is called by its address.

    Attributes
    ----------
    function : dispatcher
        It returns nothing.
    arguments : tuple
        Numba's types of its arguments.
    """

    function: Any
    arguments: tuple[Any, ...]

    def address(self) -> int:
        """Return where the compiled function lies, which stays there as long as the process lives."""
        result = self.function.get_compile_result(types.void(*self.arguments))
        return int(result.library.get_pointer_to_function(result.fndesc.llvm_func_name))


def caller(function: Any = None) -> Any:
    """Return the instruction ``call(address, arguments)`` for a function of a `Callee`, or for any of some arguments.

    The types of the arguments have to be among those for which the function was compiled already; where the function is
    not known, who passes its address sees to that.
    """

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
