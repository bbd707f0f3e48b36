"""The local Wiener step on one group of patches.

Matrices have rows that are filled up with zeros to whole vectors (`padded`). They are so small that a call of BLAS or
LAPACK takes longer than what it computes; here a few rows by a few vectors stay in registers.
"""

import math

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from nlflow.backends.numba.calls import Callee
from nlflow.backends.numba.vectors import AVX512, BYTES, Vectors, index

_FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}
ROWS = 4
"""Rows that are multiplied at a time: matrices have a multiple of them, of which the last may hold anything finite."""
_MOST = 4 if AVX512 else 2  # vectors of a row at a time; three where two would leave one
_ITERATIONS = 60  # for an eigenvalue; two are usual


@njit
def padded(size, itemsize):
    """Return the length of rows of `size` numbers, filled up to whole vectors and to a multiple of `ROWS`."""
    most = max(BYTES // itemsize, ROWS)
    return (size + most - 1) // most * most


def _multiplier(vectors):
    """Return an instruction that multiplies `ROWS` rows after `ROWS` rows with some vectors of a row."""

    @intrinsic
    def multiply(typingctx, a, first, row, step, b, start, count, rows, out, width, column):
        signature = types.void(a, first, row, step, b, start, count, rows, out, width, column)

        def codegen(context, builder, signature, arguments):
            _, first, row, step, _, start, count, rows, _, width, column = arguments
            v = Vectors(builder, signature.args[0].dtype.bitwidth)
            a, b, out = (
                context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 4, 8)
            )
            columns = [builder.add(column, index(k * v.lanes)) for k in range(vectors)]

            def some(i, state):
                own = [builder.add(first, builder.mul(builder.add(i, index(k)), row)) for k in range(ROWS)]
                targets = [
                    builder.add(builder.mul(builder.add(i, index(k)), width), c) for k in range(ROWS) for c in columns
                ]

                def term(k, state):
                    sums, places = state[:-2], state[-2:]
                    line = [v.load(b, builder.add(places[1], c)) for c in columns]
                    result = []
                    for r in range(ROWS):
                        value = v.broadcast_from(a, builder.add(own[r], places[0]))
                        for n in range(vectors):
                            result.append(v.multiply_add(value, line[n], sums[r * vectors + n]))
                    return [*result, builder.add(places[0], step), builder.add(places[1], width)]

                sums = v.repeat(count, 1, [*(v.load(out, t) for t in targets), index(0), start], term)
                for value, target in zip(sums, targets, strict=False):
                    v.store(value, out, target)
                return state

            v.repeat(rows, ROWS, [], some)
            return context.get_dummy_value()

        return signature, codegen

    return multiply


_one, _two, _three, _four = (_multiplier(n) for n in (1, 2, 3, 4))


@njit(fastmath=_FLAGS)
def _multiply_add(a, first, row, step, b, start, count, rows, out):
    """Add to the rows i of `out` (.., padded) the sum over k < count of ``a[first + i row + k step] b[start + k]``.

    `a` is flat, rows of `b` and `out` are equally long; `rows` counts as the next multiple of `ROWS`.
    """
    width = out.shape[1]
    lanes = BYTES // out.itemsize
    left = b.reshape(b.size)
    flat = out.reshape(out.size)
    column = 0
    while column < width:
        vectors = (width - column) // lanes
        where = start * width
        if vectors == 1:
            _one(a, first, row, step, left, where, count, rows, flat, width, column)
            column += lanes
        elif vectors == 3:
            _three(a, first, row, step, left, where, count, rows, flat, width, column)
            column += 3 * lanes
        elif vectors < _MOST or _MOST == 2:
            _two(a, first, row, step, left, where, count, rows, flat, width, column)
            column += 2 * lanes
        else:
            _four(a, first, row, step, left, where, count, rows, flat, width, column)
            column += 4 * lanes


@njit(fastmath=_FLAGS)
def _product(a, b, size, out):
    """Write a b to `out`; all are (.., padded)."""
    out[:] = 0
    _multiply_add(a.reshape(a.size), 0, a.shape[1], 1, b, 0, size, size, out)


@njit(fastmath=_FLAGS)
def _invert(matrix, size, room):
    """Replace a symmetric positive definite matrix by its inverse (Gauss-Jordan, `ROWS` pivots at a time).

    Rows from `size` on get those of the identity. The error is that of LAPACK's inverse, a few roundings times the
    condition (Higham 2002, section 14.4, doi 10.1137/1.9780898718027).
    """
    one = matrix.dtype.type(1)
    rows = (size + ROWS - 1) // ROWS * ROWS
    panel = room[0]
    others = room[1].reshape(room[1].size)[: rows * ROWS].reshape(rows, ROWS)
    for i in range(size, rows):
        matrix[i] = 0
        matrix[i, i] = 1
    for k in range(0, rows, ROWS):
        # The pivots, by themselves.
        for p in range(k, k + ROWS):
            scale = one / matrix[p, p]
            matrix[p, p] = 1
            for j in range(k, k + ROWS):
                matrix[p, j] *= scale
            for i in range(k, k + ROWS):
                if i != p:
                    x = matrix[i, p]
                    matrix[i, p] = 0
                    for j in range(k, k + ROWS):
                        matrix[i, j] -= x * matrix[p, j]
        # Their rows times the inverse; then the other rows.
        for i in range(ROWS):
            for j in range(ROWS):
                others[i, j] = matrix[k + i, k + j]
                matrix[k + i, k + j] = i == j
        panel[:ROWS] = 0
        _multiply_add(others.reshape(others.size), 0, ROWS, 1, matrix, k, ROWS, ROWS, panel)
        for i in range(rows):
            for j in range(ROWS):
                others[i, j] = -matrix[i, k + j]
                matrix[i, k + j] = 0
        for i in range(ROWS):
            matrix[k + i] = panel[i]
            others[k + i] = 0
        _multiply_add(others.reshape(others.size), 0, ROWS, 1, panel, 0, ROWS, rows, matrix)


@njit(fastmath=_FLAGS)
def _tridiagonal(matrix, size, vectors, diagonal, beside, line, product):
    """Reduce a symmetric matrix A, which is overwritten, to a tridiagonal one, and turn the rows of `vectors` with it.

    Householder's reflections 1 - 2 v v': A becomes A - 2 (v w' + w v') with w = A v - (v.Av) v.
    """
    width = matrix.shape[1]
    for k in range(size - 1):
        diagonal[k] = matrix[k, k]
        row = matrix[k]
        square = matrix[k, k] * 0
        for j in range(k + 1, size):
            square += row[j] * row[j]
        head = row[k + 1]
        length = -math.copysign(math.sqrt(square), head)
        beside[k] = length
        scale = square - length * head  # half of |x - length e|^2, a sum of two numbers >= 0
        if k == size - 2:
            beside[k] = head
            break
        if scale == 0:
            continue
        scale = math.sqrt(scale + scale)
        for j in range(width):
            line[j] = 0
        for j in range(k + 1, size):
            line[j] = row[j] / scale
        line[k + 1] = (head - length) / scale
        for j in range(width):
            product[j] = 0
        for i in range(k + 1, size):
            other = matrix[i]
            for j in range(width):
                product[j] += line[i] * other[j]
        along = line[0] * 0
        for j in range(width):
            along += line[j] * product[j]
        for j in range(width):
            product[j] -= along * line[j]
        for i in range(k + 1, size):
            other = matrix[i]
            x = 2 * line[i]
            y = 2 * product[i]
            for j in range(width):
                other[j] -= x * product[j] + y * line[j]
        for j in range(width):
            product[j] = 0
        for i in range(k + 1, size):
            other = vectors[i]
            for j in range(width):
                product[j] += 2 * line[i] * other[j]
        for i in range(k + 1, size):
            other = vectors[i]
            for j in range(width):
                other[j] -= line[i] * product[j]
    diagonal[size - 1] = matrix[size - 1, size - 1]
    beside[size - 1] = 0


@njit(fastmath=_FLAGS)
def _diagonal(values, beside, size, vectors):
    """Turn a tridiagonal matrix into its eigenvalues, and the rows of `vectors` with it (QL with implicit shifts).

    See Wilkinson and Reinsch 1971, doi 10.1007/978-3-642-86940-2, contribution II/4.
    """
    width = vectors.shape[1]
    one = values.dtype.type(1)
    zero = one - one
    for first in range(size):
        for _ in range(_ITERATIONS):
            m = first
            while m < size - 1:
                scale = abs(values[m]) + abs(values[m + 1])
                if scale + abs(beside[m]) == scale:
                    break
                m += 1
            if m == first:
                break
            g = (values[first + 1] - values[first]) / (beside[first] + beside[first])
            r = math.sqrt(g * g + one)
            g = values[m] - values[first] + beside[first] / (g + math.copysign(r, g))
            s, c, p = one, one, zero
            for i in range(m - 1, first - 1, -1):
                f = s * beside[i]
                b = c * beside[i]
                r = math.sqrt(f * f + g * g)
                beside[i + 1] = r
                if r == 0:
                    values[i + 1] -= p
                    beside[m] = 0
                    break
                s = f / r
                c = g / r
                g = values[i + 1] - p
                r = (values[i] - g) * s + (c + c) * b
                p = s * r
                values[i + 1] = g + p
                g = c * r - b
                upper = vectors[i]
                lower = vectors[i + 1]
                for j in range(width):
                    kept = lower[j]
                    lower[j] = s * upper[j] + c * kept
                    upper[j] = c * upper[j] - s * kept
            else:
                values[first] -= p
                beside[first] = g
                beside[m] = 0


@njit(fastmath=_FLAGS)
def _clipped_inverse(noisy, size, noise, whitening, basis, shrink, room):
    """Replace C by (C' + N)^-1, where N^-1/2 C' N^-1/2 has the eigenvalues of N^-1/2 C N^-1/2 less `shrink`.

    C is the covariance of noisy tokens; eigenvalues are cut off at 0. N^-1/2 is the `whitening` (none, when it is
    empty) of samples that were divided by the root of their noise. The rows of a `basis` that is not empty stand in for
    the eigenvectors, the variances along them for the eigenvalues.
    """
    width = noisy.shape[1]
    one = noise.dtype.type(1)
    vectors = room[0]
    turned = room[1]
    lines = room[2]
    for i in range(size):
        for j in range(size):
            noisy[i, j] /= math.sqrt(noise[i] * noise[j])
    if whitening.size:
        _product(whitening, noisy, size, turned)
        _product(turned, whitening, size, noisy)
    values = lines[0]
    if basis.size:
        _product(basis, noisy, size, turned)
        for k in range(size):
            values[k] = 0
            for j in range(size):
                values[k] += turned[k, j] * basis[k, j]
            for j in range(width):
                vectors[k, j] = basis[k, j]
    else:
        vectors[:] = 0
        for k in range(size):
            vectors[k, k] = 1
        _tridiagonal(noisy, size, vectors, values, lines[1], lines[2], lines[3])
        _diagonal(values, lines[1], size, vectors)
    if whitening.size:
        _product(vectors, whitening, size, turned)
        for k in range(size):
            for j in range(width):
                vectors[k, j] = turned[k, j]
    for k in range(size):
        gain = one / (max(values[k] - shrink, 0 * shrink) + one)
        for j in range(width):
            turned[k, j] = vectors[k, j] * gain
    noisy[:] = 0
    _multiply_add(turned.reshape(turned.size), 0, 1, width, vectors, 0, size, size, noisy)
    for i in range(size):
        for j in range(size):
            noisy[i, j] /= math.sqrt(noise[i] * noise[j])


@njit(cache=True, fastmath=_FLAGS)
def wiener(tokens, source, count, size, noise, correlation, whitening, basis, shrink, room, change, weight):
    """Filter the tokens of a group, all in one precision. Matrices have rows of a `padded` length.

    Parameters
    ----------
    tokens : (.., padded)
        z - m, of `count` members; as all matrices, a multiple of `ROWS` lines.
    source : (.., padded)
        What the covariance C is taken from, about its mean.
    count, size : int
        Members, and samples of a patch.
    noise : (padded,)
        The diagonal of N.
    correlation, whitening : (padded, padded)
        R with N_ij = R_ij (N_ii N_jj)^1/2, and R^-1/2; both are empty for noise that is not correlated.
    basis : (padded, padded)
        Orthonormal rows that stand in for the eigenvectors of C where `shrink` > 0; empty for those themselves.
    shrink : float
        Multiple of the noise that is taken from the eigenvalues of C.
    room : (5, padded, padded)
        Scratch.
    change : (.., padded), output
        N (C + N)^-1 (z - m).
    weight : (padded,), output
        Inverse variance of each sample of the estimate.
    """
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
    _multiply_add(source.reshape(source.size), 0, 1, width, source, 0, count, size, matrix)
    if shrink > 0:
        for i in range(size):
            for j in range(width):
                matrix[i, j] *= share
        _clipped_inverse(matrix, size, noise, whitening, basis, shrink, room)
    else:
        _invert(matrix, size, room)
        for i in range(size):
            for j in range(width):
                matrix[i, j] *= members
    # N (C + N)^-1, transposed, to act on rows.
    if correlated:
        _product(matrix, full, size, room[0])
        matrix[:] = room[0]
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
        weight[i] = one / (noise[i] * (kept * (one - share) + of_mean))
    change[:] = 0
    _multiply_add(tokens.reshape(tokens.size), 0, width, 1, matrix, 0, size, count, change)


def callee(real):
    """Return `wiener` in the precision of Numba's type `real`."""
    line, matrix, rooms = (types.Array(real, dimensions, "C") for dimensions in (1, 2, 3))
    number = types.int64
    return Callee(
        wiener, (matrix, matrix, number, number, line, matrix, matrix, matrix, real, rooms, matrix, line)
    )  # fmt: skip
