"""Powers of two and an order that vectorise, and wide vectors to do them in.

After a change here run ``make clean``: compiled loops are cached by the date of their own file.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

__all__ = ["FLAGS", "exp2", "float32_of", "float64_of", "from_ordered_bits", "ordered_bits", "wide_vectors"]

FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}
"""Terms may be reordered and multiply-adds fused. Inputs are finite (checked above); no loop forms an infinity."""

# Reordering would cancel the constant that is added and subtracted to round to an integer. Functions with flags of
# their own are left to LLVM to inline, for numba's ``inline`` gives their code the flags of the caller.
_IN_ORDER = {"contract", "nnan", "ninf", "nsz"}


def _bitcast(source: Any, target: Any, llvm_type: Any) -> Any:
    """Reinterpret the bits of a number; a bitcast vectorises where a scalar view would not."""

    @intrinsic
    def cast(typingctx, value):
        def codegen(context, builder, signature, args):
            return builder.bitcast(args[0], llvm_type)

        return target(source), codegen

    return cast


float32_of = _bitcast(types.int32, types.float32, ir.FloatType())
_int32_of = _bitcast(types.float32, types.int32, ir.IntType(32))
float64_of = _bitcast(types.int64, types.float64, ir.DoubleType())
_int64_of = _bitcast(types.float64, types.int64, ir.IntType(64))


@intrinsic
def wide_vectors(typingctx):
    """Ask for the widest vectors that the machine has in the function that calls this.

    LLVM takes 256 bits on most processors that have 512, for the sake of code that uses them now and then; loops that
    do nothing else are 1.5 times as fast with all of them (measured on an Emerald Rapids Xeon). Elsewhere it does
    nothing.
    """

    def codegen(context, builder, signature, args):
        # The set refuses names that it does not know, though LLVM takes any attribute that is written as a string.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), codegen


# 2^t = 2^n 2^f with n = round(t): adding 1.5 * 2^23 (2^52) leaves n in the lowest bits of the sum, from where a shift
# brings it to the exponent. For 2^f, |f| <= 1/2, minimax polynomials of the relative error, with 2^0 = 1: 2e-7 in
# float32 (degree 5), 3e-18 in float64 (degree 11), where rounding leaves 2e-16. There is no branch, so that the loop
# around it vectorises.
_ROUND32 = np.float32(1.5 * 2**23)
_ROUND64 = 1.5 * 2**52


@njit(types.float32(types.float32), fastmath=_IN_ORDER)
def _shifted32(t):
    return t + _ROUND32


@njit(types.float32(types.float32), fastmath=_IN_ORDER)
def _unshifted32(z):
    return z - _ROUND32


@njit(types.float64(types.float64), fastmath=_IN_ORDER)
def _shifted64(t):
    return t + _ROUND64


@njit(types.float64(types.float64), fastmath=_IN_ORDER)
def _unshifted64(z):
    return z - _ROUND64


@njit(types.float32(types.float32), fastmath=FLAGS, inline="always")
def _exp2_float32(t):
    t = max(t, np.float32(-126.0))
    z = _shifted32(t)
    f = t - _unshifted32(z)
    p = np.float32(1.3276472e-3)
    p = p * f + np.float32(9.675541e-3)
    p = p * f + np.float32(5.550713e-2)
    p = p * f + np.float32(2.4022120e-1)
    p = p * f + np.float32(6.9314697e-1)
    p = p * f + np.float32(1.0)
    return float32_of(np.int32(_int32_of(p) + (_int32_of(z) << np.int32(23))))


@njit(types.float64(types.float64), fastmath=FLAGS, inline="always")
def _exp2_float64(t):
    t = max(t, -1022.0)
    z = _shifted64(t)
    f = t - _unshifted64(z)
    p = 4.4352807803080312e-10
    p = p * f + 7.0741056309666745e-9
    p = p * f + 1.0178198034381919e-7
    p = p * f + 1.3215433089568544e-6
    p = p * f + 1.5252733489958407e-5
    p = p * f + 1.5403530462514660e-4
    p = p * f + 1.3333558146789953e-3
    p = p * f + 9.6181291075883350e-3
    p = p * f + 5.5504108664819921e-2
    p = p * f + 2.4022650695910156e-1
    p = p * f + 6.9314718055994533e-1
    p = p * f + 1.0
    return float64_of(_int64_of(p) + (_int64_of(z) << np.int64(52)))


def exp2(t):
    """Power of two for t <= 0, in the precision of t; 2^-126 (2^-1022) below that. Only called from compiled code."""
    return np.exp2(t)


@overload(exp2, jit_options={"fastmath": FLAGS}, inline="always")
def _exp2_by_type(t):
    if t == types.float32:
        return lambda t: _exp2_float32(t)
    return lambda t: _exp2_float64(t)


def ordered_bits(x):
    """Integer of the bits of a float; it has the order of the floats. Only called from compiled code."""
    return x


def from_ordered_bits(bits):
    """Float of `ordered_bits`."""
    return bits


@overload(ordered_bits, inline="always")
def _ordered_by_type(x):
    if x == types.float32:
        return lambda x: _int32_of(x) ^ ((_int32_of(x) >> np.int32(31)) & np.int32(2**31 - 1))
    return lambda x: _int64_of(x) ^ ((_int64_of(x) >> np.int64(63)) & np.int64(2**63 - 1))


@overload(from_ordered_bits, inline="always")
def _from_ordered_by_type(bits):
    if bits == types.int32:
        return lambda bits: float32_of(np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(2**31 - 1))))
    return lambda bits: float64_of(bits ^ ((bits >> np.int64(63)) & np.int64(2**63 - 1)))
