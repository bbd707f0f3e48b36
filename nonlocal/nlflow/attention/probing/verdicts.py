"""Smoothing or sharpening."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import schur
from scipy.sparse.linalg import ArpackError, svds

from nlflow.errors import InputError, check_number

Floats = NDArray[np.float64]
Complex = NDArray[np.complex128]

SMOOTHING, SHARPENING, NEITHER, UNDECIDED = "smoothing", "sharpening", "neither", "undecided"
VERDICTS = (SMOOTHING, SHARPENING, NEITHER, UNDECIDED)

_SAME = 1e-9  # relative: radii that are nearer are the same but for rounding
_DENSE = 1200  # unknowns up to which all eigenvalues are computed
_FACTOR = 10.0  # of lengths: t_sim from 1/2 to 0.99, or to 0.01
_TOLERANCE = 1e-10  # residual of the iteration, relative
_BASIS, _KEPT = 40, 12  # vectors of the iteration, and those that a restart keeps
_STEPS, _WORK = (80, 600), 2e11  # least and most steps of the iteration; operations that they may take
_LONG = 200  # tokens beyond which the 2-norm of P comes of an iteration


@dataclass(frozen=True)
class Ruling:
    """Which eigenvalue dominates after many layers like this one.

    Attributes
    ----------
    verdict : str
        ``'smoothing'``, ``'sharpening'``, ``'neither'`` where both are the same, or ``'undecided'`` where they differ
        by less than `doubt`.
    smooth : float
        Largest |1 + s w|, of equal tokens.
    other : float
        Largest |1 + s w a| of the others; the spectral radius of what the layer does to X less its mean token.
    omega, alpha : complex
        The eigenvalues of W and of P whose product rules; NaN for several heads, and for neither.
    layers : float
        After how many such layers the ruling part is 10 times as long as the other, from equal lengths; infinite for
        neither and undecided.
    doubt : float
        Residual of the iteration that found `other`; 0 where all eigenvalues were computed.
    """

    verdict: str
    smooth: float
    other: float
    omega: complex = complex(math.nan)
    alpha: complex = complex(math.nan)
    layers: float = math.inf
    doubt: float = 0.0

    @property
    def condition(self) -> str:
        """The verdict's condition."""
        sign = {SMOOTHING: ">", SHARPENING: "<", NEITHER: "=", UNDECIDED: "~"}[self.verdict]
        other = f"{self.other:.4g}" + (f" +- {self.doubt:.1g}" if self.verdict == UNDECIDED else "")
        return f"max |1 + s w| = {self.smooth:.4g} {sign} {other} = max |1 + s w a| over a != 1"


def ruling(alphas: NDArray[np.generic], omegas: NDArray[np.generic], scale: float = 1.0) -> Ruling:
    """Return which of the eigenvalues 1 + s w a of X <- X + s P X W dominates (arXiv 2401.04301), in O(n m) time.

    A layer is smoothing if the largest |1 + s w| is above |1 + s w a| of all others: many such layers make tokens
    equal.

    Parameters
    ----------
    alphas : array of shape (n,)
        Eigenvalues of P, a stochastic matrix: all of them, 1 as often as it is one.
    omegas : array of shape (m,)
        Eigenvalues of W; those of d features, and one 0 where d < D, are enough.
    scale : float
        s, not 0.

    Raises
    ------
    InputError
        For no eigenvalues, for infinite ones and NaN, also times s, and for s = 0.
    """
    scale = check_number("scale", scale)
    if scale == 0:
        raise InputError("scale: got 0, expected another number: with 0 no token moves")
    alphas = np.asarray(alphas, complex)
    with np.errstate(over="ignore", invalid="ignore"):
        omegas = scale * np.asarray(omegas, complex)
    for name, given in (("alphas", alphas), ("omegas", omegas)):
        if given.ndim != 1 or not given.size or not np.isfinite(given).all():
            raise InputError(
                f"{name}: got shape {given.shape}, expected a row of at least one eigenvalue, all of them finite"
            )
    unity = int(np.abs(alphas - 1).argmin())
    others = np.delete(alphas, unity)
    first = np.abs(1 + omegas)
    smooth = float(first.max())
    if not others.size:
        return _ruled(smooth, 0.0, omegas[first.argmax()] / scale, 1.0)
    sizes = np.abs(1 + omegas[:, None] * others)
    i, j = np.unravel_index(int(sizes.argmax()), sizes.shape)
    other = float(sizes[i, j])
    if smooth >= other:
        return _ruled(smooth, other, omegas[first.argmax()] / scale, 1.0)
    return _ruled(smooth, other, omegas[i] / scale, others[j])


def _ruled(
    smooth: float, other: float, omega: complex = math.nan, alpha: complex = math.nan, doubt: float = 0.0
) -> Ruling:
    if not (math.isfinite(smooth) and math.isfinite(other)) or 0 < abs(smooth - other) <= doubt:
        return Ruling(UNDECIDED, smooth, other, doubt=doubt)
    if abs(smooth - other) <= _SAME * max(smooth, other):
        return Ruling(NEITHER, smooth, other, doubt=doubt)
    rate = abs(math.log(smooth / other)) if min(smooth, other) > 0 else math.inf
    verdict = SMOOTHING if smooth > other else SHARPENING
    return Ruling(verdict, smooth, other, complex(omega), complex(alpha), math.log(_FACTOR) / rate, doubt)


def ruling_of_heads(matrices: Floats, values: Floats, output: Floats, scale: float = 1.0) -> Ruling:
    """Return which part dominates in X <- X + s sum_h P_h X V_h O_h: equal tokens, or their differences.

    All eigenvalues are found where N D is at most 1200, else the outermost, in O(H N^2 d + N (H d)^2) a step.
    """
    whole = np.einsum("hij,hjk->ik", values, output)
    width, count = whole.shape[0], matrices.shape[1]
    smooth = float(np.abs(1 + scale * np.linalg.eigvals(whole)).max())
    if count < 2:
        return _ruled(smooth, 0.0)
    if not np.triu(matrices, 1).any():
        return _ruled(smooth, max(_radius_at(matrices[:, i, i], values, output, scale) for i in range(1, count)))
    if count * width <= _DENSE:
        weights = np.einsum("hij,hjk->hik", values, output)
        centred = matrices - matrices.mean(axis=1, keepdims=True)
        dense = np.einsum("hij,hkl->ikjl", centred, weights.transpose(0, 2, 1)).reshape(count * width, -1)
        found = np.linalg.eigvals(scale * dense)
        # The mean token, of which nothing is left, is in as 0, D times; it is none of these.
        nearest = np.sort_complex(found[np.argsort(np.abs(found))][width:])
        return _ruled(smooth, float(np.abs(1 + nearest).max()))
    other, doubt = _radius(matrices, values, output, scale)
    return _ruled(smooth, other, doubt=doubt)


def _radius_at(own: Floats, values: Floats, output: Floats, scale: float) -> float:
    """Return the spectral radius of I + s sum_h P_h[i, i] W_h, of matrices of the features of heads where narrower."""
    heads, width, d = values.shape
    left = (own[:, None, None] * values).transpose(1, 0, 2).reshape(width, heads * d)
    right = output.reshape(heads * d, width)
    found = np.linalg.eigvals(left @ right if width <= heads * d else right @ left)
    radius = float(np.abs(1 + scale * found).max())
    return radius if width <= heads * d else max(radius, 1.0)


def _radius(matrices: Floats, values: Floats, output: Floats, scale: float) -> tuple[float, float]:
    """Return the spectral radius of Y + s (I - 11^T/N) sum_h P_h Y V_h O_h, and the residual it was found with.

    The map is iterated on the values Z_h = Y V_h of the heads, which has its eigenvalues other than 1.
    """
    heads, width, d = values.shape
    count = matrices.shape[1]
    features = heads * d
    inner = scale * output.reshape(features, width) @ values.transpose(1, 0, 2).reshape(width, features)
    centred = matrices - matrices.mean(axis=1, keepdims=True)

    def step(flat: Floats) -> Floats:
        averaged = centred @ flat.reshape(heads, count, d)
        made = averaged.transpose(1, 0, 2).reshape(count, features) @ inner
        moved: Floats = made.reshape(count, heads, d).transpose(1, 0, 2).ravel()
        return moved

    least, most = _STEPS
    work = 2.0 * count * features * (count + features)
    (found,), (residual,) = outermost(step, heads * count * d, steps=int(np.clip(_WORK / work, least, most)))
    radius = float(abs(1 + found))
    return (radius if width <= features else max(radius, 1.0)), float(residual)


def outermost(
    step: Callable[[Floats], Floats], size: int, *, steps: int, centre: float = -1.0, most: int = 1
) -> tuple[Complex, Floats]:
    """Return the `most` eigenvalues of a real linear map that are farthest from `centre`, and residuals of their pairs.

    Krylov-Schur iteration (Stewart 2001, 10.1137/S0895479800371529), for about so many steps at most; fewer eigenvalues
    where the map has a smaller invariant space. 41 vectors of memory.
    """
    basis = min(_BASIS, size)
    kept = min(_KEPT, max(1, basis // 2))
    vectors, small = np.empty((basis + 1, size)), np.zeros((basis + 1, basis))
    first = step(np.random.default_rng(0).standard_normal(size))  # in the range of the map
    length = float(np.linalg.norm(first))
    if length == 0:
        return np.zeros(1, complex), np.zeros(1)
    vectors[0] = first / length
    begin, done = 0, 0
    while True:
        for number in range(begin, basis):
            made = step(vectors[number])
            known, end = vectors[: number + 1], number + 1
            before = float(np.linalg.norm(made))
            for _ in range(2):  # twice is enough to be orthogonal
                shares = known @ made
                made -= shares @ known
                small[:end, number] += shares
            length = float(np.linalg.norm(made))
            done += 1
            if length <= np.finfo(float).eps * before * 10:  # an invariant space
                length = 0.0
                break
            small[end, number] = length
            vectors[end] = made / length
        square = small[:end, :end]
        found, pairs = np.linalg.eig(square)
        order = np.argsort(-np.abs(found - centre), kind="stable")[:most]
        values, residuals = found[order].astype(complex), np.abs(length * pairs[-1, order])
        if (residuals <= _TOLERANCE * np.abs(values - centre)).all() or done >= steps:
            return values, residuals
        form, turn, begin = _outer_first(square, centre, np.sort(np.abs(found - centre))[-kept] * (1 - 1e-12))
        if begin >= end - 1:  # they are all of one size
            return values, residuals
        vectors[:begin] = turn[:, :begin].T @ vectors[:end]
        vectors[begin] = vectors[end]
        small[:] = 0
        small[:begin, :begin] = form[:begin, :begin]
        small[begin, :begin] = length * turn[-1, :begin]


def _outer_first(matrix: Floats, centre: float, level: float) -> tuple[Floats, Floats, int]:
    """Return the real Schur form whose first eigenvalues are at least `level` from `centre`, its vectors, how many."""

    def outer(real: float, imaginary: float = 0.0) -> bool:
        return abs(complex(real, imaginary) - centre) >= level

    form, turn, count = schur(matrix, sort=outer)
    return form, turn, int(count)


def contraction_of(matrix: Floats) -> float:
    centred = matrix - matrix.mean(axis=0)
    if len(matrix) > _LONG and np.isfinite(centred).all():
        start = np.random.default_rng(0).standard_normal(len(matrix))
        try:
            return float(svds(centred, k=1, tol=0, v0=start, return_singular_vectors=False)[0])
        except ArpackError:  # many that are as large; all of them are found below
            pass
    return float(np.linalg.norm(centred, 2))


def random_products(features: int, width: int, draws: int, rng: np.random.Generator) -> Complex:
    left = rng.standard_normal((draws, features, width))
    right = rng.standard_normal((draws, width, features))
    left /= np.linalg.norm(left, axis=(1, 2), keepdims=True)
    right /= np.linalg.norm(right, axis=(1, 2), keepdims=True)
    return np.asarray(np.linalg.eigvals(right @ left), complex)


def random_stochastic(count: int, rng: np.random.Generator, visible: NDArray[np.bool_] | None = None) -> Floats:
    return np.asarray(stochastic(rng.standard_exponential((count, count)), visible))


def stochastic(drawn: Any, visible: Any = None) -> Any:
    """Return exponential variables (..., N, N), 0 where they are not visible, over the sums of their rows."""
    drawn = drawn if visible is None else drawn * visible
    return drawn / drawn.sum(axis=-1, keepdims=True)
