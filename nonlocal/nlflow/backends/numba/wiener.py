"""The local Wiener step on one group of patches.

Products of matrices and eigenvalues are left to BLAS and LAPACK, which beat compiled loops here by a factor of 4 to 10.
"""

import math

import numpy as np
from numba import njit, types

from nlflow.backends.numba.calls import Callee

_FLAGS = {"contract", "reassoc", "nnan", "ninf", "nsz"}


@njit(fastmath=_FLAGS)
def _sweep(matrix):
    """Replace a symmetric positive definite matrix by its inverse (Gauss-Jordan, two pivots at a time)."""
    size = matrix.shape[0]
    for k in range(0, size - 1, 2):
        a = matrix[k]
        b = matrix[k + 1]
        p = a[k]
        q = a[k + 1]
        r = b[k + 1]
        scale = 1 / (p * r - q * q)
        p, q, r = r * scale, -q * scale, p * scale
        a[k] = 1
        a[k + 1] = 0
        b[k] = 0
        b[k + 1] = 1
        for j in range(size):
            x = a[j]
            y = b[j]
            a[j] = p * x + q * y
            b[j] = q * x + r * y
        for i in range(size):
            if i != k and i != k + 1:
                row = matrix[i]
                x = row[k]
                y = row[k + 1]
                row[k] = 0
                row[k + 1] = 0
                for j in range(size):
                    row[j] -= x * a[j] + y * b[j]
    if size % 2 == 1:
        last = matrix[size - 1]
        scale = 1 / last[size - 1]
        last[size - 1] = 1
        for j in range(size):
            last[j] *= scale
        for i in range(size - 1):
            row = matrix[i]
            x = row[size - 1]
            row[size - 1] = 0
            for j in range(size):
                row[j] -= x * last[j]


@njit(fastmath=_FLAGS)
def _spd_inverse(matrix):
    """Return the inverse of a symmetric positive definite matrix, through that of its halves and Schur's complement.

    At the sizes of patches it takes half the time of LAPACK's general inverse (which is all that Numba offers), and it
    loses the square of the condition where that loses the condition.
    """
    size = matrix.shape[0]
    half = size // 2
    upper = matrix[:half, :half].copy()
    side = matrix[half:, :half].copy()
    lower = matrix[half:, half:].copy()
    _sweep(upper)
    gain = np.dot(side, upper)
    taken = np.dot(gain, side.T)
    for i in range(size - half):
        for j in range(size - half):
            lower[i, j] -= taken[i, j]
    _sweep(lower)
    coupling = np.dot(lower, gain)
    added = np.dot(gain.T, coupling)
    inverse = np.empty_like(matrix)
    for i in range(half):
        for j in range(half):
            inverse[i, j] = upper[i, j] + added[i, j]
        for j in range(size - half):
            inverse[i, half + j] = -coupling[j, i]
    for i in range(size - half):
        for j in range(half):
            inverse[half + i, j] = -coupling[i, j]
        for j in range(size - half):
            inverse[half + i, half + j] = lower[i, j]
    return inverse


@njit(fastmath=_FLAGS)
def _clipped_inverse(noisy, noise, whitening, basis, shrink):
    """Return (C' + N)^-1, where N^-1/2 C' N^-1/2 has the eigenvalues of N^-1/2 C N^-1/2 less `shrink`.

    C is the covariance of noisy tokens; eigenvalues are cut off at 0. N^-1/2 is the `whitening` (none, when it is
    empty) of samples that were divided by the root of their noise. The columns of a `basis` that is not empty stand in
    for the eigenvectors, the variances along them for the eigenvalues.
    """
    size = noisy.shape[0]
    for i in range(size):
        for j in range(size):
            noisy[i, j] /= math.sqrt(noise[i] * noise[j])
    if whitening.size:
        noisy = np.dot(np.dot(whitening, noisy), whitening)
    if basis.size:
        turned = np.dot(noisy, basis)
        values = np.zeros(size, noise.dtype)
        for i in range(size):
            for k in range(size):
                values[k] += basis[i, k] * turned[i, k]
        vectors = np.asfortranarray(basis)
    else:
        values, vectors = np.linalg.eigh(noisy)
    if whitening.size:
        vectors = np.asfortranarray(np.dot(whitening, np.ascontiguousarray(vectors)))
    scaled = np.empty_like(vectors)
    for k in range(size):
        gain = 1 / (max(values[k] - shrink, 0 * shrink) + 1)
        for i in range(size):
            scaled[i, k] = vectors[i, k] * gain
    inverse = np.ascontiguousarray(np.dot(scaled, vectors.T))
    for i in range(size):
        for j in range(size):
            inverse[i, j] /= math.sqrt(noise[i] * noise[j])
    return inverse


@njit(fastmath=_FLAGS)
def _mix_across(tokens, source, noise, across, fast, change, weight):
    """Mix what the step across the members removes into `change`, and its variances into the variances in `weight`.

    With the covariance K of the members over the samples that is s^2 (K + s^2)^-1 (z - m), where s^2 is the mean noise,
    times n / D for more members than samples.
    """
    count, size = tokens.shape
    ridge = noise.sum() * max(1, count / noise.dtype.type(size))
    inverse = np.dot(source, source.T)
    for k in range(count):
        inverse[k, k] += ridge
    inverse = _spd_inverse(inverse) if fast else np.ascontiguousarray(np.linalg.inv(inverse))
    for k in range(count):
        for other in range(count):
            inverse[k, other] *= ridge
    removed = np.dot(inverse, tokens)
    share = 1 / noise.dtype.type(count)
    for k in range(count):
        kept = max(1 - inverse[k, k], 0 * across) * (1 - share) + share
        for j in range(size):
            change[k, j] += across * (removed[k, j] - change[k, j])
            weight[k, j] += across * (noise[j] * kept - weight[k, j])


@njit(cache=True, fastmath=_FLAGS)
def wiener(tokens, source, noise, correlation, whitening, basis, shrink, across, fast, change, weight):
    """Filter the tokens of a group, all in one precision.

    Parameters
    ----------
    tokens : (n, size)
        z - m.
    source : (n, size)
        What the covariance C is taken from, about its mean.
    noise : (size,)
        The diagonal of N.
    correlation, whitening : (size, size)
        R with N_ij = R_ij (N_ii N_jj)^1/2, and R^-1/2; both are empty for noise that is not correlated.
    basis : (size, size)
        Orthonormal columns that stand in for the eigenvectors of C where `shrink` > 0; empty for those themselves.
    shrink : float
        Multiple of the noise that is taken from the eigenvalues of C.
    across : float
        Share of the step across the members in `change` and in the variances.
    fast : bool
        Whether the fast inverse of C + N is good enough.
    change : (n, size), output
        N (C + N)^-1 (z - m), mixed with the step across the members.
    weight : (n, size), output
        Inverse variance of each sample of the estimate.
    """
    count, size = tokens.shape
    real = noise.dtype.type
    zero, share = real(0), real(1 / count)
    matrix = np.empty((size, size), noise.dtype)
    np.dot(source.T, source, matrix)
    full = np.empty_like(correlation)
    for i in range(correlation.shape[0]):
        for j in range(size):
            full[i, j] = correlation[i, j] * math.sqrt(noise[i] * noise[j])
    for i in range(size):
        for j in range(size):
            matrix[i, j] *= share
        if shrink == 0 and full.size == 0:
            matrix[i, i] += noise[i]
    if shrink == 0 and full.size:
        for i in range(size):
            for j in range(size):
                matrix[i, j] += full[i, j]
    if shrink > 0:
        inverse = _clipped_inverse(matrix, noise, whitening, basis, shrink)
    elif fast:
        inverse = _spd_inverse(matrix)
    else:
        inverse = np.ascontiguousarray(np.linalg.inv(matrix))
    # N (C + N)^-1, transposed, to act on rows.
    if full.size:
        inverse = np.dot(inverse, full)
    else:
        for i in range(size):
            for j in range(size):
                inverse[j, i] *= noise[i]
    for i in range(size):
        # Variance of a sample of the estimate: that of the filter, and that of the mean. The first cannot be negative,
        # whatever rounding leaves of it.
        kept = max(1 - inverse[i, i], zero)
        of_mean = share
        if full.size:
            kept = correlation[i, i]  # 1, or a little more: eigenvalues were raised
            of_mean = share * kept
            for j in range(size):
                kept -= full[i, j] * inverse[j, i] / noise[i]
            kept = max(kept, zero)
        weight[0, i] = noise[i] * (kept * (1 - share) + of_mean)
    np.dot(tokens, inverse, change)
    for k in range(1, count):
        for i in range(size):
            weight[k, i] = weight[0, i]
    if across > 0:
        _mix_across(tokens, source, noise, across, fast, change, weight)
    for k in range(count):
        for i in range(size):
            weight[k, i] = 1 / weight[k, i]


def callee(real):
    """Return `wiener` in the precision of Numba's type `real`."""
    line, matrix = (types.Array(real, dimensions, "C") for dimensions in (1, 2))
    return Callee(wiener, (matrix, matrix, line, *(matrix,) * 3, real, real, types.boolean, matrix, matrix))
