"""Bounds of the error of linear systems D x - C x = b with C >= 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, constant_like, namespace, scalar, to_numpy
from nlflow.functionals.fidelity import Fidelity
from nlflow.functionals.krylov import Solved, conjugate_gradients, error_allowed, gmres

_ROUNDINGS = 4  # of a row: two products, their difference, and what averages lose
_ROUGH = 0.5  # residual of the comparison vector
_ROUNDS = 4  # of a solution that is asked for more digits
_SMALL = 1e-2  # of the data: a solution that is smaller is compared with this much of them
_CAREFUL = 10.0  # times what a solution for one right-hand side shows of a system whose inverse has either sign

Map = Callable[[Array], Array]
Run = Callable[[Array, Array, float], Solved]
"""Solves a system for a right-hand side, a first guess and a relative residual of its rows."""


@dataclass(frozen=True)
class Rows:
    """Rows of a system, ``scaled`` by D, with ``stopped`` at most (D - C) 1 over D.

    The inverse has no negative entry, so |x - x*| <= v max_i r_i / (A v)_i for v > 0 with A v > 0, r_i being what is
    left of row i and what rounding can hide there.
    """

    operator: Map
    scaled: Map
    diagonal: Map
    stopped: Array | float
    axes: tuple[int, ...]
    free: Map = lambda v: v
    pull: Fidelity | None = None
    eps: float = 0.0
    weight: Array | float = 1.0

    @property
    def mixed(self) -> bool:
        return self.pull is not None

    @classmethod
    def of(
        cls, operator: Map, fidelity: Fidelity | None, like: Array, axes: tuple[int, ...], *,
        outer: Array | float = 1.0, stopped: Array | float = 0.0, free: Map = lambda v: v,
    ) -> Rows:  # fmt: skip
        """Return the rows of outer ((I - C) + phi) for a fidelity phi, where `stopped` is a part of (I - C) 1."""
        if fidelity is None:
            return cls(operator, lambda r: r / outer, lambda v: free(outer * v), stopped + 0 * outer, axes, free)
        given, pull = fidelity, None if fidelity.width == 1 else fidelity
        if pull is None:
            ones = namespace(like).ones_like(like[..., :1] if like.ndim > len(axes) else like)
            stopped = given.damped(given.times(ones) + stopped, 1.0)
        else:
            low = given.bounds()[0]
            stopped = (stopped + low) / (1 + low)
        return cls(
            operator, lambda r: given.damped(r / outer, 1.0), lambda v: free(outer * (v + given.times(v))), stopped,
            axes, free, pull,
        )  # fmt: skip

    def by_gmres(self, maxiter: int, inner: Callable[[Array, Array], Array] | None = None) -> Run:
        done, products = 0, inner or self._inner

        def run(b: Array, guess: Array, rtol: float) -> Solved:
            nonlocal done
            count = math.prod(b.shape)
            found = gmres(
                lambda v: self.scaled(self.free(self.operator(v))), self.scaled(b), guess, rtol=rtol,
                maxiter=max(maxiter - done, 0), restart=max(min(max(2**26 // count, 10), 40, count), 1), inner=products,
            )  # fmt: skip
            done += found.iterations
            return replace(found, left=None)

        return run

    def by_conjugate_gradients(
        self, measure: Array | float, maxiter: int, precondition: Map | None = None, measured: Map = lambda r: r
    ) -> Run:
        axes = (*self.axes, -1) if self.mixed else self.axes

        def inner(v: Array, w: Array) -> Array:
            xp = namespace(v)
            return xp.sum(measure * v * w, axis=axes, keepdims=True, dtype=xp.float64)

        def run(b: Array, guess: Array, rtol: float) -> Solved:
            return conjugate_gradients(
                self.operator, b, guess, inner=inner, precondition=precondition or self.scaled, rtol=rtol,
                maxiter=maxiter, measured=measured,
            )  # fmt: skip

        return run

    def solved(
        self, run: Run, b: Array, start: Array, rtol: float, beside: Array | float = 0.0, compare: Run | None = None,
        allowed: float | None = None,
    ) -> Solved:  # fmt: skip
        """Solve A x = b until its error is within what is allowed, or rounding is all that is left.

        `beside` is the size of the data that x is a deviation from.
        """
        allowed = error_allowed(rtol) if allowed is None else allowed
        if allowed == math.inf:  # nobody asks for a bound
            return run(b, start, rtol)
        compare, target = compare or run, rtol
        found = run(b, start, rtol)
        if not found.residual <= rtol * 1.0001:  # so it is not solved, however well it is conditioned
            return found
        found = self.judged(found, compare, b, beside, allowed)
        for _ in range(_ROUNDS):
            if not allowed < found.error < math.inf or found.residual > target * 1.0001:
                break
            target *= min(0.3 * allowed / found.error, 0.1)
            more = run(b, found.x, target)
            if not more.residual < found.residual:
                break
            more = replace(more, iterations=found.iterations + more.iterations)
            found = self.judged(more, compare, b, beside, allowed, found.comparison)
        return found

    @np.errstate(over="ignore", invalid="ignore", divide="ignore")
    def judged(
        self, found: Solved, run: Run | None, b: Array, beside: Array | float, allowed: float,
        comparison: float | None = None,
    ) -> Solved:  # fmt: skip
        if not math.isfinite(found.residual):
            return replace(found, error=math.inf)
        xp, x = namespace(found.x), found.x
        largest = self._top(x)
        told = largest
        if not isinstance(self.weight, float):
            told = self._top(x * self.weight) / xp.astype(xp.max(self.weight), x.dtype)
        scale = xp.maximum(told, _SMALL * beside + 0 * told)
        right = self._size(self.scaled(b))
        rounding = _ROUNDINGS * max(float(xp.finfo(x.dtype).eps), self.eps)
        left = self._size(self.scaled(self.free(b - self.operator(x)) if found.left is None else found.left))
        left = left + rounding * (2 * largest + right)
        inside = self.free(xp.ones_like(left)) > 0
        stopped = xp.where(inside, self.stopped + 0 * left, xp.ones_like(left))
        bounds = xp.where(inside & (left > 0), left / stopped, 0 * left)
        scale = xp.where(scale > 0, scale, xp.ones_like(scale))
        error = scalar(xp.max(self._top(bounds) / scale))
        if not error <= allowed and run is not None:
            comparison = self._compared(run, x, rounding) if comparison is None else comparison
            most = self._top(xp.where(inside, left, 0 * left))
            error = min(error if error == error else math.inf, scalar(xp.max(most / scale)) * comparison)
        return replace(found, error=error if error == error else math.inf, comparison=comparison)

    def _compared(self, run: Run, like: Array, rounding: float) -> float:
        """Return max v / min (A v / D 1) for a rough solution v of A v = D 1; infinity where there is none."""
        xp = namespace(like)
        if self.pull is None:
            ones = self.free(xp.ones_like(like[..., :1] if like.ndim > len(self.axes) else like))
        else:
            # Its inverse has entries of either sign, so this is what a right-hand side shows of it, and no bound.
            ones = self.free(xp.zeros_like(like) + constant_like(_seen_shares(self.pull, like, self.axes), like))
        found = run(self.diagonal(ones), 0 * ones, _ROUGH)
        if not math.isfinite(found.residual):
            return math.inf
        largest = scalar(xp.max(self._size(found.x)))
        if self.mixed:
            return _CAREFUL * largest if found.residual <= _ROUGH else math.inf
        least = self.scaled(self.operator(found.x)) - rounding * (2 * largest + 1)
        smallest = scalar(xp.min(xp.where(ones > 0, least, xp.ones_like(least))))
        return largest / smallest if smallest > 0 else math.inf

    def _inner(self, v: Array, w: Array) -> Array:
        xp, axes = namespace(v), None if self.mixed else self.axes
        return xp.reshape(xp.sum(v * w, axis=axes, dtype=xp.float64), (-1,))

    def _size(self, v: Array) -> Array:
        """Return the moduli of a signal's values, or of its vectors where channels are mixed."""
        xp = namespace(v)
        return xp.sqrt(xp.sum(v * v, axis=-1, keepdims=True)) if self.mixed else xp.abs(v)

    def _top(self, v: Array) -> Array:
        return namespace(v).max(self._size(v), axis=self.axes, keepdims=True)


def rounded_residual(left: Floats, diagonal: Floats, sizes: Floats, right: Floats) -> float:
    """Return the largest |b - A u|_i / (2 a_ii max|u| + |b_i|) of rows, which no rounding of u makes large."""
    with np.errstate(over="ignore", invalid="ignore"):
        rest, size = np.abs(left) / diagonal, 2 * sizes.max(axis=0) + np.abs(right) / diagonal
        return float(np.max(np.where(rest > 0, rest / np.where(size > 0, size, 1.0), rest)))


def _seen_shares(pull: Fidelity, like: Array, axes: tuple[int, ...]) -> NDArray[np.float64]:
    """Return a random vector of channels of length 1, without what no node's matrix sees: no limit is asked of that."""
    width, xp = like.shape[-1], namespace(like)
    rows = [pull.times(xp.zeros_like(like) + constant_like(unit, like)) for unit in np.eye(width)]
    values, vectors = np.linalg.eigh(np.array([to_numpy(xp.sum(row, axis=axes, dtype=xp.float64)) for row in rows]))
    seen = vectors[:, values > 1e-12 * values.max()]
    shares = np.random.default_rng(0).standard_normal(width)
    shares = seen @ (seen.T @ shares) if seen.size else shares
    return np.asarray(shares / np.linalg.norm(shares))
