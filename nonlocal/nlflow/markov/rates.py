"""The slowest rates 1 - mu and 1 + mu of reversible chains, which rounded mu do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nlflow._array import Floats
from nlflow.affinities.graph import Sparse
from nlflow.markov.absorbing import EXACT
from nlflow.markov.reduction import eliminated

_EPS = float(np.finfo(np.float64).eps)
_DIRECT = 1e-2  # of the largest rate: above, eigenvalues of the whole matrix have their digits
_GRADED = 1e-4  # of the largest in a subspace, for which the digits of its matrix suffice
_LEAST = 1e-20  # of the largest: below, the squares of roundings show
_CHUNK = 2**22
_NEAR = 0.1  # 1 - mu below which eigenvalues of the inverse take their place

Form = Callable[[Floats], Floats]


def form_of(flux: Floats | Sparse, sign: int) -> Form:
    """Return V -> V^T diag(pi) (I - sign P) V as sums of squares, of which each has its digits."""
    if isinstance(flux, np.ndarray):
        rows, columns = np.nonzero(flux)
        data = flux[rows, columns]
    else:
        listed: Any = flux.tocoo()
        rows, columns, data = listed.row, listed.col, listed.data
    once = rows >= columns  # the others are the same ones
    if sign > 0:
        once &= rows != columns
    rows, columns, data = rows[once], columns[once], data[once]
    data = np.where(rows == columns, data / 2, data)

    def form(v: Floats) -> Floats:
        gram = np.zeros((v.shape[1],) * 2)
        step = max(1, _CHUNK // v.shape[1])
        for low in range(0, len(data), step):
            part = slice(low, low + step)
            d = v[rows[part]] - sign * v[columns[part]]
            gram += d.T @ (data[part, None] * d)
        return gram

    return form


def form_of_roots(roots: Floats, sign: int) -> Form:
    """Return Y -> Y^T (I - sign S) Y, S_ij = (P_ij P_ji)^1/2, by squares of P_ij^1/2 y_i - sign P_ji^1/2 y_j."""
    rows, columns = np.nonzero((roots > 0) | (roots.T > 0))
    once = rows > columns if sign > 0 else rows >= columns
    rows, columns = rows[once], columns[once]
    here, there = roots[rows, columns, None], roots[columns, rows, None]
    share = np.where(rows == columns, 0.5, 1.0)[:, None]

    def form(y: Floats) -> Floats:
        d = here * y[rows] - sign * there * y[columns]
        return np.asarray(d.T @ (share * d))

    return form


def slow_pairs(form: Form, root: Floats, y: Floats, known: Floats) -> tuple[Floats, Floats]:
    """Return the rates in the span of the columns of y = pi^1/2 v, increasing, and their orthonormal vectors.

    Vectors `known`, of rate 0, are left out.
    """
    # A subspace of slow vectors is taken out again and again: rates that are nothing beside the largest of one get
    # their digits in the next.
    from scipy.linalg import eigh

    rates: list[Floats] = []
    vectors: list[Floats] = []
    while True:
        y = y - known @ (known.T @ y)
        y = y / np.linalg.norm(y, axis=0)
        gram = form(y / root[:, None])
        size = float(np.diagonal(gram).max()) or 1.0
        values, turned = eigh(gram / size, y.T @ y)
        slow = values < _GRADED * values[-1]
        rates.insert(0, np.maximum(values[~slow], 0) * size)
        vectors.insert(0, y @ turned[:, ~slow])
        if not slow.any():
            return np.concatenate(rates), np.concatenate(vectors, axis=1)
        y = y @ turned[:, slow]


def all_rates(
    moves: Floats, root: Floats, sign: int, known: Floats, roots: Floats | None = None
) -> tuple[Floats, Floats]:
    """Return all 1 - sign mu of a reversible chain, increasing, and their vectors, O(N^3).

    Where P or pi underflow, or P is rounded to float32, `roots` has P_ij^1/2, with P_ij / P_ji = pi_j / pi_i.
    """
    # The matrix has its diagonal from the other entries of its rows, so that its error is relative to the largest rate.
    from scipy.linalg import eigh

    likes = np.sqrt(moves) if roots is None else roots
    likes = likes * likes.T
    stay = np.diagonal(likes).copy()
    np.fill_diagonal(likes, 0.0)
    rates = moves if roots is None else roots**2
    out = np.where(np.eye(len(moves), dtype=np.bool_), 0.0, rates).sum(axis=1)
    matrix = -sign * likes + np.diag(out if sign > 0 else 2 * stay + out)
    values, vectors = eigh(matrix + 4 * float(out.max()) * (known @ known.T))
    free = len(moves) - known.shape[1]
    values, vectors = values[:free], vectors[:, :free]
    if not free or values[0] >= _DIRECT * values[-1]:
        return values, vectors
    largest = float(values[-1])
    # Beyond these, what the others have in common with the slowest is too little to be seen in its rate.
    few = int(np.sum(values <= max(values[0], 1e-19 * largest**2 / max(values[0], 1e-15 * largest))))
    if roots is None:
        fluxes = likes * np.outer(root, root)
        np.fill_diagonal(fluxes, stay * root**2)
        form = form_of(fluxes, sign)
    else:
        form, root = form_of_roots(roots, sign), np.ones(len(root))
    values[:few], vectors[:, :few] = slow_pairs(form, root, vectors[:, :few], known)
    values[values < _LEAST * largest] = 0.0
    return values, vectors


def nearest_gap(moves: Floats, law: Floats | None, killed: Floats) -> tuple[float, complex, float]:
    """Return the smallest 1 - |mu| of a class of states, its mu, and a bound of its error, for any chain.

    Errors of eigenvalues of P are roundings over the cosine of the angle between left and right eigenvector (Wilkinson
    1965).
    """
    from scipy.linalg import eig

    if law is None and len(moves) == 1:
        return float(killed[0]), complex(moves[0, 0]), 0.0
    mu, doubt = _eigenvalues(moves, eig)
    if law is not None:
        others = np.arange(len(mu)) != np.argmin(np.abs(mu - 1))
        mu, doubt = mu[others], doubt[others]
    if not len(mu):
        return 1.0, 0.0, 0.0
    gaps = 1 - np.abs(mu)
    if not _sure(gaps, doubt) and len(moves) > 1:
        inverse, error = _eigenvalues(_inverse(moves, law, killed), eig)
        nu = 1 / inverse
        error = error * np.abs(nu) ** 2
        near, far = np.abs(nu) < _NEAR, np.abs(1 - mu) >= _NEAR
        nu, error = nu[near], error[near]
        gaps = np.concatenate([(2 * nu.real - np.abs(nu) ** 2) / (1 + np.abs(1 - nu)), gaps[far]])
        mu, doubt = np.concatenate([1 - nu, mu[far]]), np.concatenate([error, doubt[far]])
    first = int(np.argmin(gaps))
    rivals = gaps - doubt <= gaps[first] + doubt[first]
    return float(gaps[first]), complex(mu[first]), float(doubt[rivals].max())


def _sure(gaps: Floats, doubt: Floats) -> bool:
    least = gaps.min()
    return bool(least > 0 and doubt[gaps - doubt <= least * (1 + EXACT)].max() <= EXACT * least)


def _eigenvalues(matrix: Floats, eig: Any) -> tuple[Any, Floats]:
    values, left, right = eig(matrix, left=True, right=True)
    cosines = np.abs((left.conj() * right).sum(axis=0))
    with np.errstate(divide="ignore"):
        return values, 4 * _EPS * float(np.linalg.norm(matrix)) / cosines


def _inverse(moves: Floats, law: Floats | None, killed: Floats) -> Floats:
    """Return an inverse of I - P, of a closed class on functions that are 0 in its likeliest state.

    There it is G - h pi^T, with the visits G_ik to k before that state, and the times h = G 1 until then.
    """
    if law is None:
        return eliminated(moves, killed, np.eye(len(moves)))
    rest = np.arange(len(moves)) != np.argmax(law)
    inside = moves[np.ix_(rest, rest)]
    visits = eliminated(inside, moves[rest][:, ~rest].sum(axis=1), np.eye(len(inside)))
    return np.asarray(visits - np.outer(visits.sum(axis=1), law[rest]))
