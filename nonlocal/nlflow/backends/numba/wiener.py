"""The Wiener step on one group, compiled."""

# Matrices have rows that are filled up with zeros to whole vectors (`padded`). They are so small that a call of BLAS or
# LAPACK takes longer than what it computes; here a few rows by a few vectors stay in registers.

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from nlflow.backends.numba.calls import APART, HELPER, Callee, stay_whole
from nlflow.backends.numba.loading import njit
from nlflow.backends.numba.vectors import AVX512, BYTES, Vectors, index

_FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}
ROWS = 4
"""Rows that are multiplied at a time: matrices have a multiple of them, of which the last may hold anything finite."""
_MOST = 4 if AVX512 else 2  # vectors of a row at a time


def padded(size: int, itemsize: int) -> int:
    """Return the length of a row of `size` numbers, raised to whole vectors and to a multiple of `ROWS`."""
    most = max(BYTES // itemsize, ROWS)
    return (size + most - 1) // most * most


def _multiplier(module, bits):
    """Return the function that `_multiply_add` calls: written once, as it is called from a dozen places."""
    whole, name = ir.IntType(64), f"nlflow_multiply_add_{bits}"
    number = (ir.FloatType() if bits == 32 else ir.DoubleType()).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [number, whole, whole, number, whole, whole, number, whole])
    function = cgutils.get_or_insert_function(module, kind, name)
    if function.blocks:
        return function
    function.linkage = "linkonce_odr"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block())
    a, row, step, b, count, rows, out, width = function.args
    v = Vectors(builder, bits)

    def tile(column, vectors):
        columns = [builder.add(column, index(k * v.lanes)) for k in range(vectors)]

        def some(i, state):
            places = [builder.add(i, index(k)) for k in range(ROWS)]
            own = [builder.mul(place, row) for place in places]
            targets = [builder.add(builder.mul(place, width), c) for place in places for c in columns]

            def term(k, state):
                *sums, here, there = state
                line = [v.load(b, builder.add(there, c)) for c in columns]
                values = (v.broadcast_from(a, builder.add(one, here)) for one in own)
                products = [(value, other) for value in values for other in line]
                result = [v.multiply_add(x, y, total) for (x, y), total in zip(products, sums, strict=True)]
                return [*result, builder.add(here, step), builder.add(there, width)]

            sums = v.repeat(count, 1, [*(v.load(out, t) for t in targets), index(0), index(0)], term)
            for value, target in zip(sums, targets, strict=False):
                v.store(value, out, target)
            return state

        v.repeat(rows, ROWS, [], some)

    begin = index(0)
    for vectors in range(_MOST, 0, -1):
        before, size = builder.block, index(vectors * v.lanes)
        test, inside, after = (builder.append_basic_block(name) for name in ("test", "inside", "after"))
        builder.branch(test)
        builder.position_at_end(test)
        column = builder.phi(whole)
        column.add_incoming(begin, before)
        then = builder.add(column, size)
        builder.cbranch(builder.icmp_signed("<=", then, width), inside, after)
        builder.position_at_end(inside)
        tile(column, vectors)
        column.add_incoming(then, builder.block)
        builder.branch(test)
        builder.position_at_end(after)
        begin = column
    builder.ret_void()
    return function


@intrinsic
def _multiply_add(typingctx, a, first, row, step, b, start, count, rows, out, to):
    """Add products to rows of `out`: ``out[to + i] += sum_k a[first + i row + k step] b[start + k]``.

    `a` is told by places in its memory, rows of `b` and `out` are equally long; `rows` counts as the next multiple of
    `ROWS`.
    """
    signature = types.void(a, first, row, step, b, start, count, rows, out, to)

    def codegen(context, builder, signature, arguments):
        _, first, row, step, _, start, count, rows, _, to = arguments
        left, right, target = (context.make_array(signature.args[i])(context, builder, arguments[i]) for i in (0, 4, 8))
        width = builder.extract_value(target.shape, 1)
        function = _multiplier(builder.module, signature.args[0].dtype.bitwidth)
        b, out = (builder.gep(x.data, [builder.mul(at, width)]) for x, at in ((right, start), (target, to)))
        builder.call(function, [builder.gep(left.data, [first]), row, step, b, count, rows, out, width])
        return context.get_dummy_value()

    return signature, codegen


@njit(fastmath=_FLAGS, **HELPER)
def _product(a, b, size, out):
    """Write a b to `out`; all are (.., padded)."""
    stay_whole()
    out[:] = 0
    _multiply_add(a, 0, a.shape[1], 1, b, 0, size, size, out, 0)


@njit(fastmath=_FLAGS, **HELPER)
def _invert(matrix, size, lower, others):
    """Replace a symmetric positive definite matrix by its inverse, W' D^-1 W with W = L^-1 of its factors L D L'."""
    # Elimination needs no pivots, and keeps the product with the matrix near 1: to n roundings times the condition
    # (Higham 2002, sections 10.1 and 14.3, doi 10.1137/1.9780898718027). That of Gauss and Jordan keeps the entries
    # alone so near, and what is far above the noise does not stay whole. `lower` and `others` are scratch.
    stay_whole()
    width = matrix.shape[1]
    one = matrix.dtype.type(1)
    zero = one - one
    rows = (size + ROWS - 1) // ROWS * ROWS
    for i in range(rows):
        for j in range(width):
            lower[i, j] = zero
            if i >= size:
                matrix[i, j] = zero
        lower[i, i] = one
        if i >= size:
            matrix[i, i] = one
    for k in range(0, rows, ROWS):
        # Some rows by themselves,
        for p in range(ROWS):
            scale = one / matrix[k + p, k + p]
            for q in range(p + 1, ROWS):
                x = matrix[k + q, k + p] * scale
                for j in range(width):
                    matrix[k + q, j] -= x * matrix[k + p, j]
                    lower[k + q, j] -= x * lower[k + p, j]
            # how often those below have to be taken off,
            for i in range(k + ROWS, rows):
                x = matrix[i, k + p] * scale
                others[i, p] = -x
                for q in range(p + 1, ROWS):
                    matrix[i, k + q] -= x * matrix[k + p, k + q]
        # and off the rows below. What is left of these columns is not looked at again.
        first, below = (k + ROWS) * width, rows - k - ROWS
        if below > 0:
            _multiply_add(others, first, width, 1, matrix, k, ROWS, below, matrix, k + ROWS)
            _multiply_add(others, first, width, 1, lower, k, ROWS, below, lower, k + ROWS)
    for i in range(rows):
        scale = one / matrix[i, i]
        for j in range(width):
            others[i, j] = lower[i, j] * scale
    for i in range(rows):
        for j in range(width):
            matrix[i, j] = zero
    _multiply_add(lower, 0, 1, width, others, 0, rows, rows, matrix, 0)


@njit(fastmath=_FLAGS, **HELPER)
def _quadratic(powers, linear, square, size, out):
    """Write a sum of 1, a matrix and its square to `out`, by three `powers`."""
    stay_whole()
    for i in range(size):
        for j in range(linear.shape[1]):
            out[i, j] = powers[1] * linear[i, j] + powers[2] * square[i, j]
        out[i, i] += powers[0]


@njit(fastmath=_FLAGS, **HELPER)
def _shrunk_inverse(noisy, size, noise, whitening, powers, room):
    """Replace C, the covariance of noisy tokens, by N^-1/2 h(N^-1/2 C N^-1/2) N^-1/2."""
    # h is what goes of noisy tokens, a polynomial in B = (1 + N^-1/2 C N^-1/2)^-1, for which no eigenvectors are asked;
    # see `nlflow.denoising.patches.filters.removed`, which gives its `powers`. N^-1/2 is the `whitening` (none, when it
    # is empty) of samples that were divided by the root of their noise.
    stay_whole()
    width = noisy.shape[1]
    one, half = noise.dtype.type(1), noise.dtype.type(0.5)
    square, rest, result, cube = room[0], room[1], room[2], room[5]
    for i in range(size):
        for j in range(size):
            noisy[i, j] /= math.sqrt(noise[i] * noise[j])
    if whitening.size:
        _product(whitening, noisy, size, rest)
        _product(rest, whitening, size, noisy)
    for i in range(size):
        noisy[i, i] += one
    _invert(noisy, size, square, rest)
    for i in range(size):
        for j in range(width):
            noisy[i, j] += noisy[i, j]
        noisy[i, i] -= one
    # With S = 2 B - 1: (q0 + q1 S + q2 S^2) + S^3 ((q3 + q4 S + q5 S^2) + S^3 (q6 + q7 S + q8 S^2)).
    _product(noisy, noisy, size, square)
    _product(noisy, square, size, cube)
    _quadratic(powers[6:9], noisy, square, size, rest)
    _quadratic(powers[3:6], noisy, square, size, result)
    _multiply_add(cube, 0, width, 1, rest, 0, size, size, result, 0)
    _quadratic(powers[0:3], noisy, square, size, rest)
    _multiply_add(cube, 0, width, 1, result, 0, size, size, rest, 0)
    for i in range(size):
        for j in range(width):
            rest[i, j] *= half
            result[i, j] = rest[i, j]
    _multiply_add(noisy, 0, width, 1, rest, 0, size, size, result, 0)
    if whitening.size:
        _product(result, whitening, size, rest)
        _product(whitening, rest, size, result)
    for i in range(size):
        for j in range(size):
            noisy[i, j] = result[i, j] / math.sqrt(noise[i] * noise[j])


@njit(fastmath=_FLAGS, **HELPER)
def _take_coefficients(tokens, count, size, root, basis, scaled, out):
    """Write the coefficients of tokens in units of their noise to `out`; `scaled` is scratch."""
    stay_whole()
    width = tokens.shape[1]
    zero = root.dtype.type(0)
    for k in range(count):
        for j in range(size):
            scaled[k, j] = tokens[k, j] / root[j]
        for j in range(width):
            out[k, j] = zero
    _multiply_add(scaled, 0, width, 1, basis, 0, size, count, out, 0)


@njit(fastmath=_FLAGS, **HELPER)
def _filter_along(tokens, source, count, size, noise, basis, shrink, room, change, weight):
    """Write what goes of tokens to `change`, and what variance stays to `weight`, where C is diagonal in a basis."""
    # Then no matrix is inverted: with v the variance of a coefficient, 1 / (1 + max(v - shrink, 0)) of it goes.
    stay_whole()
    width = tokens.shape[1]
    zero, one = noise.dtype.type(0), noise.dtype.type(1)
    share = one / count
    scaled, own, gains, root = room[0], room[1], room[2, 0], room[2, 1]
    for j in range(size):
        root[j] = math.sqrt(noise[j])
        gains[j] = zero
    _take_coefficients(source, count, size, root, basis[0], scaled, own)
    for k in range(count):
        for j in range(size):
            gains[j] += own[k, j] * own[k, j]
    for j in range(size):
        gains[j] = one / (max(gains[j] * share - shrink, zero) + one)
    if source is not tokens:
        _take_coefficients(tokens, count, size, root, basis[0], scaled, own)
    for k in range(count):
        for j in range(size):
            own[k, j] *= gains[j]
        for j in range(width):
            change[k, j] = zero
    _multiply_add(own, 0, width, 1, basis[1], 0, size, count, change, 0)
    for k in range(count):
        for j in range(size):
            change[k, j] *= root[j]
    for i in range(size):
        weight[0, i] = zero
    for j in range(size):
        kept = (one - gains[j]) * (one - share) + share  # of what is filtered, and of the mean
        for i in range(size):
            weight[0, i] += kept * basis[1, j, i] * basis[1, j, i]
    for i in range(size):
        weight[0, i] *= noise[i]


@njit(fastmath=_FLAGS, **HELPER)
def _mix_across(tokens, source, count, size, noise, across, members, removed, change, weight):
    """Mix what the step across the members removes into `change`, and its variances into the variances in `weight`."""
    # With the covariance K of the members over the samples that is s^2 (K + s^2)^-1 (z - m), where s^2 is the mean
    # noise, times n / D for more members than samples. `members` (4, .., padded) and `removed` (.., padded) are
    # scratch.
    stay_whole()
    width, breadth = tokens.shape[1], members.shape[2]
    real = noise.dtype.type
    zero, one, share = real(0), real(1), real(1 / count)
    turned, inverse, ridge = members[0], members[1], zero
    for j in range(size):
        ridge += noise[j]
        for k in range(breadth):
            turned[j, k] = source[k, j] if k < count else zero
    ridge *= real(max(1.0, count / size))
    for k in range(count):
        for j in range(breadth):
            inverse[k, j] = zero
        inverse[k, k] = ridge
    _multiply_add(source, 0, width, 1, turned, 0, size, count, inverse, 0)
    _invert(inverse, count, members[2], members[3])
    removed[:] = 0
    _multiply_add(inverse, 0, breadth, 1, tokens, 0, count, count, removed, 0)
    for k in range(count):
        kept = max(one - ridge * inverse[k, k], zero) * (one - share) + share
        for j in range(size):
            change[k, j] += across * (ridge * removed[k, j] - change[k, j])
            weight[k, j] += across * (noise[j] * kept - weight[k, j])


@njit(fastmath=_FLAGS, **HELPER)
def _filter_by_covariance(
    tokens, source, count, size, noise, correlation, whitening, shrink, powers, room, change, weight
):
    """Write N (C + N)^-1 (z - m) to `change`, and the variances that stay to `weight`."""
    stay_whole()
    width = tokens.shape[1]
    real = noise.dtype.type
    zero, one, members, share = real(0), real(1), real(count), real(1 / count)
    matrix = room[3]
    full = room[4]
    correlated = correlation.size > 0
    # C + N; without the members that it is divided by, which the inverse gets.
    scale = zero if shrink > 0 else members
    for i in range(size):
        for j in range(width):
            matrix[i, j] = 0
        matrix[i, i] = scale * noise[i]
    if correlated:
        for i in range(size):
            for j in range(size):
                full[i, j] = correlation[i, j] * math.sqrt(noise[i] * noise[j])
                matrix[i, j] = scale * full[i, j]
            for j in range(size, width):
                full[i, j] = 0
    _multiply_add(source, 0, 1, width, source, 0, count, size, matrix, 0)
    if shrink > 0:
        for i in range(size):
            for j in range(width):
                matrix[i, j] *= share
        _shrunk_inverse(matrix, size, noise, whitening, powers, room)
    else:
        _invert(matrix, size, room[0], room[1])
        for i in range(size):
            for j in range(width):
                matrix[i, j] *= members
    # N (C + N)^-1, transposed, to act on rows.
    if correlated:
        _product(matrix, full, size, room[0])
        for i in range(size):
            for j in range(width):
                matrix[i, j] = room[0, i, j]
    else:
        for i in range(size):
            for j in range(width):
                matrix[i, j] *= noise[j]
    for i in range(size):
        # Variance of a sample of the estimate: that of the filter, and that of the mean. The first cannot be negative,
        # whatever rounding leaves of it.
        kept = max(one - matrix[i, i], zero)
        of_mean = share
        if correlated:
            kept = correlation[i, i]  # 1, or a little more: eigenvalues were raised
            of_mean = share * kept
            for j in range(size):
                kept -= full[i, j] * matrix[j, i] / noise[i]
            kept = max(kept, zero)
        weight[0, i] = noise[i] * (kept * (one - share) + of_mean)
    change[:] = 0
    _multiply_add(tokens, 0, width, 1, matrix, 0, size, count, change, 0)


@njit(fastmath=_FLAGS, **APART)
def wiener(
    tokens, source, count, size, noise, correlation, whitening, basis, shrink, powers, across, room, among, change,
    weight,
):  # fmt: skip
    """Filter the tokens of a group, all in one precision. Matrices have rows of a `padded` length."""
    # - tokens : (.., padded); z - m, of `count` members; as all matrices, a multiple of `ROWS` lines.
    # - source : (.., padded); What the covariance C is taken from, about its mean.
    # - count, size : int; Members, and samples of a patch.
    # - noise : (padded,); The diagonal of N.
    # - correlation, whitening : (padded, padded); R with N_ij = R_ij (N_ii N_jj)^1/2, and R^-1/2; both are empty for
    #   noise that is not correlated.
    # - basis : (2, padded, padded); What takes tokens in units of their noise to coefficients that count as
    #   independent, and what takes them back, both from the right; empty where C itself is taken.
    # - shrink : float; Multiple of the noise that is taken from the eigenvalues of C.
    # - powers : (9,) or (0,); As in `nlflow.denoising.patches.filters.Stage`.
    # - across : float; Share of the step across the members in `change` and in the variances.
    # - room : (6, max(padded, members), padded); Scratch.
    # - among : (4, max(padded, samples), padded by members); Scratch of the step across the members.
    # - change : (.., padded), output; N (C + N)^-1 (z - m), mixed with the step across the members.
    # - weight : (.., padded), output; Inverse variance of each sample of the estimate; without a step across the
    #   members in its first row alone.
    one = noise.dtype.type(1)
    if basis.size:
        _filter_along(tokens, source, count, size, noise, basis, shrink, room, change, weight)
    else:
        _filter_by_covariance(
            tokens, source, count, size, noise, correlation, whitening, shrink, powers, room, change, weight
        )
    rows = 1
    if across > 0:
        rows = count
        for k in range(1, count):
            for i in range(size):
                weight[k, i] = weight[0, i]
        _mix_across(tokens, source, count, size, noise, across, among, room[5], change, weight)
    for k in range(rows):
        for i in range(size):
            weight[k, i] = one / weight[k, i]


def callee(real):
    line, matrix, rooms = (types.Array(real, dimensions, "C") for dimensions in (1, 2, 3))
    number = types.int64
    return Callee(
        wiener,
        (matrix, matrix, number, number, line, matrix, matrix, rooms, real, line, real, rooms, rooms, matrix, matrix),
    )  # fmt: skip
