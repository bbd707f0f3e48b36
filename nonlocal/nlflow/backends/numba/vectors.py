"""Vector instructions for LLVM."""

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

_FEATURES = frozenset(cpu_target.target_context.codegen().magic_tuple()[2].split(","))
AVX512 = {"+avx512f", "+avx512dq"} <= _FEATURES
BYTES = 64 if AVX512 else 32 if "+avx" in _FEATURES else 16
"""Of a vector."""

# Minimax polynomials of the relative error of 2^f, |f| <= 1/2, with 2^0 = 1, highest power first: 2e-7 in float32,
# 3e-18 in float64, where rounding leaves 2e-16.
_POWERS = {
    4: [float(np.float32(c)) for c in (1.3276472e-3, 9.675541e-3, 5.550713e-2, 2.4022120e-1, 6.9314697e-1, 1.0)],
    8: [
        4.4352807803080312e-10, 7.0741056309666745e-9, 1.0178198034381919e-7, 1.3215433089568544e-6,
        1.5252733489958407e-5, 1.5403530462514660e-4, 1.3333558146789953e-3, 9.6181291075883350e-3,
        5.5504108664819921e-2, 2.4022650695910156e-1, 6.9314718055994533e-1, 1.0,
    ],
}  # fmt: skip
_DIGITS = {4: 23, 8: 52}  # of a mantissa
_ARTANH = {4: 4, 8: 10}  # terms of its series after the first: s^2 <= 0.0295
_MOST_PRODUCTS = 32  # up to which powers are products
_LEAST = {4: -126.0, 8: -1022.0}  # exponent of a normal number

_I32, _I64 = ir.IntType(32), ir.IntType(64)


def index(value: int) -> Any:
    return ir.Constant(_I64, value)


class Vectors:
    """Writer of instructions on vectors of at most `most` bytes, with floats of `bits` (32 or 64)."""

    # Vectors have `most` bytes at most: short rows need no long ones.

    def __init__(self, builder: Any, bits: int, most: int = BYTES) -> None:
        self.builder = builder
        self.size = bits // 8
        self.lanes = min(BYTES, most) // self.size
        self.number = ir.FloatType() if bits == 32 else ir.DoubleType()
        self.type = ir.VectorType(self.number, self.lanes)
        self._word = ir.IntType(bits)
        self._words = ir.VectorType(self._word, self.lanes)
        # LLVM takes 256 bits on most processors that have 512, for the sake of code that uses them now and then. The
        # set refuses names that it does not know, though LLVM takes any attribute that is written as a string.
        set.add(builder.function.attributes, f'"prefer-vector-width"="{8 * BYTES}"')

    def constant(self, value: float) -> Any:
        return ir.Constant(self.type, [ir.Constant(self.number, value)] * self.lanes)

    def load(self, pointer: Any, place: Any) -> Any:
        return self.builder.load(self._at(pointer, place), align=self.size)

    def lanes_before(self, count: Any) -> Any:
        numbers = ir.VectorType(_I32, self.lanes)
        own = ir.Constant(numbers, list(range(self.lanes)))
        return self.builder.icmp_signed("<", own, self._spread(self.builder.trunc(count, _I32), numbers))

    def load_some(self, pointer: Any, place: Any, inside: Any) -> Any:
        """Return the numbers at a place in the lanes `inside`, and 0 in the others, which are not read."""
        where, nothing = self._at(pointer, place), self.constant(0.0)
        kind = ir.FunctionType(self.type, [where.type, _I32, inside.type, self.type])
        name = f"llvm.masked.load.{self._suffix}.p0"
        load = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(load, [where, ir.Constant(_I32, self.size), inside, nothing])

    def store(self, value: Any, pointer: Any, place: Any) -> None:
        self.builder.store(value, self._at(pointer, place), align=self.size)

    def broadcast(self, number: Any) -> Any:
        return self._spread(number, self.type)

    def broadcast_from(self, pointer: Any, place: Any) -> Any:
        return self.broadcast(self.builder.load(self.builder.gep(pointer, [place])))

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        # One instruction where the processor has it.
        return self._call(f"llvm.fmuladd.{self._suffix}", (a, b, c))

    def square_root(self, a: Any) -> Any:
        return self._call(f"llvm.sqrt.{self._suffix}", (a,))

    def inverse_root(self, a: Any) -> Any:
        """Return 1 / sqrt(a) for a >= 0, to two roundings; at most 1e19 (1e154 in float64)."""
        most = self.constant({4: 9e18, 8: 6e153}[self.size])
        if self.size == 8 or "+avx" not in _FEATURES:
            return self.smaller(self.builder.fdiv(self.constant(1.0), self.square_root(a)), most)
        if AVX512:
            every = ir.Constant(ir.IntType(self.lanes), -1)
            y = self._call("llvm.x86.avx512.rsqrt14.ps.512", (a, a, every))
        else:
            y = self._call("llvm.x86.avx.rsqrt.ps.256", (a,))
        y, multiply = self.smaller(y, most), self.builder.fmul
        less = multiply(multiply(self.constant(-0.5), a), y)
        return multiply(y, self.multiply_add(less, y, self.constant(1.5)))

    def magnitude(self, a: Any) -> Any:
        return self._call(f"llvm.fabs.{self._suffix}", (a,))

    def rounded(self, a: Any) -> Any:
        """Return the nearest whole number of |a| < 2^21 (2^50 in float64)."""
        large = self.constant(1.5 * 2.0 ** _DIGITS[self.size])
        return self.builder.fsub(self.builder.fadd(a, large), large)

    def total(self, a: Any) -> Any:
        kind = ir.FunctionType(self.number, [self.number, self.type])
        name = f"llvm.vector.reduce.fadd.{self._suffix}"
        add = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(add, [ir.Constant(self.number, -0.0), a], fastmath=("reassoc",))

    def larger(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b, flags=("nnan", "nsz")), a, b)

    def smaller(self, a: Any, b: Any) -> Any:
        return self.builder.select(self.builder.fcmp_ordered("<", a, b, flags=("nnan", "nsz")), a, b)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return self.builder.select(condition, a, b)

    def compare(self, sign: str, a: Any, b: Any) -> Any:
        return self.builder.fcmp_ordered(sign, a, b)

    def power(self, a: Any, power: Fraction) -> Any:
        """Return a power; unless the exponent is a multiple of 1/4, of a >= 0 only."""
        if power < 0:
            return self.builder.fdiv(self.constant(1.0), self.power(a, -power))
        if power.denominator not in (1, 2, 4) or power > _MOST_PRODUCTS:
            result = self.exp2(self.builder.fmul(self.constant(float(power)), self.log2(a)))
            return self.where(self.compare(">", a, self.constant(0.0)), result, self.constant(0.0))
        result, base, count = None, a, int(power * power.denominator)
        for _ in range(power.denominator.bit_length() - 1):
            base = self.square_root(base)
        while count:
            if count % 2:
                result = base if result is None else self.builder.fmul(result, base)
            count //= 2
            base = self.builder.fmul(base, base) if count else base
        return result

    def log2(self, a: Any) -> Any:
        """Return the logarithm to the base 2 of normal numbers > 0, to a few roundings."""
        # a = 2^n m with m within sqrt(1/2) ... sqrt(2), and log m = 2 artanh (m - 1)/(m + 1), whose series is cut off
        # where the next term is below a rounding.
        builder, digits, one = self.builder, _DIGITS[self.size], self.constant(1.0)
        bits = builder.bitcast(a, self._words)
        # The exponent of a / sqrt(1/2), and what is left of a without it.
        root = int(np.array(math.sqrt(0.5), f"f{self.size}").view(f"i{self.size}"))
        n = builder.ashr(builder.sub(bits, self._whole(root)), self._whole(digits))
        m = builder.bitcast(builder.sub(bits, builder.shl(n, self._whole(digits))), self.type)
        s = builder.fdiv(builder.fsub(m, one), builder.fadd(m, one))
        square = builder.fmul(s, s)
        total = self.constant(0.0)
        for k in range(_ARTANH[self.size], -1, -1):
            total = self.multiply_add(total, square, self.constant(2 * math.log2(math.e) / (2 * k + 1)))
        return self.multiply_add(total, s, builder.sitofp(n, self.type))

    def _whole(self, value: int) -> Any:
        return ir.Constant(self._words, [ir.Constant(self._word, value)] * self.lanes)

    def exp2(self, t: Any) -> Any:
        """Return 2^t for t <= 100 (1000 in float64); from 2^-126 (2^-1022) downwards it stays there."""
        builder, least = self.builder, self.constant(_LEAST[self.size])
        t = self.larger(t, least)
        if AVX512:
            # t - round(t), and p 2^n, are one instruction each.
            suffix, mask, current = "ps" if self.size == 4 else "pd", ir.IntType(self.lanes), ir.Constant(_I32, 4)
            every, nearest = ir.Constant(mask, -1), ir.Constant(_I32, 8)
            f = self._call(f"llvm.x86.avx512.mask.reduce.{suffix}.512", (t, nearest, t, every, current))
            p, n = self._power(f), builder.fsub(t, f)
            return self._call(f"llvm.x86.avx512.mask.scalef.{suffix}.512", (p, n, p, every, current))
        # Adding 1.5 * 2^23 (2^52) leaves round(t) in the lowest bits of the sum, from where a shift brings it to the
        # exponent.
        digits = _DIGITS[self.size]
        large = self.constant(1.5 * 2.0**digits)
        z = builder.fadd(t, large)
        p = self._power(builder.fsub(t, builder.fsub(z, large)))
        exponent = builder.shl(builder.bitcast(z, self._words), self._whole(digits))
        return builder.bitcast(builder.add(builder.bitcast(p, self._words), exponent), self.type)

    def repeat(self, count: Any, step: Any, state: Iterable[Any], body: Callable[[Any, list[Any]], list[Any]]) -> Any:
        """Write a loop over 0, step, ... < count, which runs at least once, and return its last state."""
        builder, before = self.builder, self.builder.block
        inside, after = builder.append_basic_block("repeat"), builder.append_basic_block("done")
        builder.branch(inside)
        builder.position_at_end(inside)
        place = builder.phi(_I64)
        place.add_incoming(index(0), before)
        held = []
        for value in state:
            held.append(builder.phi(value.type))
            held[-1].add_incoming(value, before)
        following = body(place, held)
        then = builder.add(place, index(step) if isinstance(step, int) else step)
        place.add_incoming(then, builder.block)
        for phi, value in zip(held, following, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", then, count), inside, after)
        builder.position_at_end(after)
        return following

    def _spread(self, number: Any, kind: Any) -> Any:
        undefined = ir.Constant(kind, ir.Undefined)
        first = ir.Constant(ir.VectorType(_I32, self.lanes), [ir.Constant(_I32, 0)] * self.lanes)
        one = self.builder.insert_element(undefined, number, ir.Constant(_I32, 0))
        return self.builder.shuffle_vector(one, undefined, first)

    @property
    def _suffix(self) -> str:
        return f"v{self.lanes}f{8 * self.size}"

    def _at(self, pointer: Any, place: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(pointer, [place]), self.type.as_pointer())

    def _call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        kind = ir.FunctionType(self.type, [a.type for a in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def _power(self, f: Any) -> Any:
        first, *others = _POWERS[self.size]
        p = self.constant(first)
        for c in others:
            p = self.multiply_add(p, f, self.constant(c))
        return p
