"""Krylov methods for many right-hand sides at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nlflow._array import Array, Floats, constant_like, namespace, numbers, to_numpy

_ROUND = 50  # iterations between two looks at the true residual
_PATIENCE = 1000  # iterations without a smaller residual after which there is no hope of one
_MAGNIFIED = 1e4  # a relative error beside the residual that was asked for
_LOOK = 16  # iterations between two questions whether another preconditioner would be better


@dataclass(frozen=True)
class Solved:
    """Solution of a linear system: largest relative residual, b - A x as `left`, a bound of the relative error."""

    x: Array
    residual: float
    iterations: int
    left: Array | None = None
    error: float = 0.0
    comparison: float | None = None


def default_rtol(like: Array) -> float:
    return 1e-5 if like.dtype == namespace(like).float32 else 1e-10


def error_allowed(rtol: float) -> float:
    return _MAGNIFIED * rtol if _MAGNIFIED * rtol < 1 else math.inf


def verdict(residual: float, rtol: float, error: float = 0.0) -> tuple[bool, str]:
    if not residual <= rtol * 1.0001:
        return False, f", above rtol={rtol:g}: raise maxiter or rtol, or use a larger fidelity"
    if not error <= error_allowed(rtol):
        known = f"may be {error:.2g} of its largest value" if error < math.inf else "has no bound"
        return False, (
            f", but the error {known}, since rounding or what is left of the residual is magnified: use "
            "equilibrium(flow, method='direct'), a lower rtol, or a larger fidelity"
        )
    return True, ""


@np.errstate(over="ignore", invalid="ignore")  # what overflows ends the iteration, and is told by the residual
def conjugate_gradients(
    operator: Callable[[Array], Array],
    b: Array,
    x: Array,
    *,
    inner: Callable[[Array, Array], Array],
    precondition: Callable[[Array], Array],
    rtol: float,
    maxiter: int,
    reconsider: Callable[[int, float], Callable[[Array], Array] | None] | None = None,
    measured: Callable[[Array], Array] = lambda r: r,
    beside: Callable[[], int] = lambda: 0,
) -> Solved:
    """Solve ``operator(x) = b`` for an operator that is self-adjoint and positive in `inner`, as `precondition` is.

    The residual is infinite or NaN where the iteration broke down.
    """
    xp = namespace(b)
    told = measured(b)
    size = inner(told, told)
    peak = xp.max(xp.abs(told))
    safe_peak = xp.where(peak > 0, peak, xp.ones_like(peak))
    # A system with b = 0 has the solution 0; its scale is set to 1 so that nothing divides by zero.
    scale = xp.where(size > 0, size, xp.ones_like(size))
    x = xp.where(size > 0, x, xp.zeros_like(x))

    def relative(r: Array) -> float:
        r = measured(r)
        # In the largest entry too: `inner` may give some nodes a weight so small that nothing there would show.
        squared, largest, most = numbers(xp.max(inner(r, r) / scale), xp.max(xp.abs(r)) / safe_peak, peak)
        return max(math.sqrt(squared), largest if most > 0 else 0.0)

    def quotient(a: Array, b: Array) -> Array:
        # A system that is solved has p = 0: it stays where it is.
        safe = xp.where(b > 0, b, xp.ones_like(b))
        return xp.astype(xp.where(b > 0, a / safe, xp.zeros_like(a)), x.dtype)

    known = not bool(xp.any(x != 0))  # asked once, since an average is dear
    r = b if known else b - operator(x)
    residual = relative(r)
    done, best, at, asked = 0, residual, 0, 0
    p: Array | None = None
    rz: Array = xp.zeros_like(size)
    if reconsider is not None:
        precondition = reconsider(0, residual) or precondition
    while done < maxiter and residual > rtol:
        # The recursive residual drifts from the true one, so each round ends with the true one, and goes on from it.
        recursive = residual
        for _ in range(_ROUND):
            z = precondition(r)
            previous, rz = rz, inner(r, z)
            p = z if p is None else z + quotient(rz, previous) * p
            q = operator(p)
            alpha = quotient(rz, inner(p, q))
            x = x + alpha * p
            r = r - alpha * q
            done += 1 + beside()
            recursive = relative(r)
            if done >= maxiter or recursive <= 0.5 * rtol or not math.isfinite(recursive):
                break
            known = False
            if reconsider is None or done - asked < _LOOK:
                continue
            asked, other = done, reconsider(done, recursive)
            if other is not None:
                precondition, p = other, None
        # One iteration from 0 is x = alpha p, of which the operator is known; other residuals have drifted.
        drifted, r, known = r, r if known else b - operator(x), False
        before, residual = residual, relative(r)
        if not math.isfinite(residual):
            break
        # In the direction that it had, except where the two residuals have little in common.
        gap = drifted - r
        rz = xp.where(inner(gap, gap) < 1e-2 * inner(drifted, drifted), rz, xp.zeros_like(rz))
        if residual < 0.9 * best:
            best, at = residual, done
        # Norms of residuals may rise for long before they fall. Where the true one stays behind the recursive one,
        # however, or nothing comes of it at all, rounding is all that is left.
        if (residual > 0.9 * before and recursive < 0.5 * residual) or done - at >= _PATIENCE:
            break
    return Solved(x, residual, done, r)


def gmres(
    operator: Callable[[Array], Array],
    b: Array,
    x: Array | None,
    *,
    rtol: float,
    maxiter: int,
    restart: int = 40,
    inner: Callable[[Array, Array], Array] = lambda v, w: (v * w).sum(axis=0),
    subtract: Callable[[Array, Array, Array], Array] | None = None,
) -> Solved:
    """Solve ``operator(x) = b`` for systems side by side, each in a Krylov space of its own (doi 10.1137/0907058)."""
    xp = namespace(b)

    def norm(v: Array) -> Array:
        return xp.sqrt(inner(v, v))

    def over(v: Array, size: Array) -> Array:
        return v / xp.astype(size, v.dtype)

    def minus(w: Array, shares: Array, v: Array) -> Array:
        return w - xp.astype(shares, w.dtype) * v

    less = minus if subtract is None else subtract
    size, guessed = norm(b), x is not None
    # A system with b = 0 has the solution 0; its scale is set to 1 so that nothing divides by zero.
    scale = xp.where(size > 0, size, xp.ones_like(size))
    residual, x = b, xp.zeros_like(b) if x is None else xp.where(size > 0, x, xp.zeros_like(b))
    if guessed:
        residual = b - operator(x)
    start = norm(residual)
    first, scales = to_numpy(xp.stack([start, scale]))
    done, relative = 0, float((first / scales).max())
    while relative > rtol and done < maxiter:
        before = relative
        basis = [over(residual, xp.where(start > 0, start, xp.ones_like(start)))]
        hessenberg = np.zeros((len(first), restart + 1, restart))
        y = np.zeros((len(first), 0))
        for j in range(min(restart, maxiter - done)):
            w = operator(basis[j])
            moved, column = norm(w), []
            done += 1
            for v in basis:
                column.append(inner(v, w))
                w = less(w, column[-1], v)
            length = norm(w)
            hessenberg[:, : j + 2, j] = to_numpy(xp.stack([*column, length])).T
            # A system whose space holds its solution goes on with 0: what is left of w is rounding.
            basis.append(over(w, xp.where(length > 1e-14 * moved, length, math.inf * xp.ones_like(length))))
            target = np.zeros((len(first), j + 2))
            target[:, 0] = first
            # Pseudo-inverses, for the systems that are solved already.
            y = np.einsum("cij,cj->ci", np.linalg.pinv(hessenberg[:, : j + 2, : j + 1]), target)
            left = np.linalg.norm(target - np.einsum("cij,cj->ci", hessenberg[:, : j + 2, : j + 1], y), axis=1)
            if float((left / scales).max()) <= 0.5 * rtol:
                break
        shares = constant_like(y.T, b)
        x = x + sum((v * shares[i, ...] for i, v in enumerate(basis[: y.shape[1]])), xp.zeros_like(b))
        residual = b - operator(x)
        start = norm(residual)
        first = to_numpy(start)
        relative = float((first / scales).max())
        if relative > 0.99 * before:  # rounding is all that is left
            break
    return Solved(x, relative, done, residual)


class Lanczos:
    """Lanczos iterations for vectors side by side: A V = V T + b v e_k^T (Lanczos 1950, doi 10.6028/jres.045.026).

    `betas` ends with b, 0 for an exhausted system.
    """

    def __init__(
        self,
        operator: Callable[[Array], Array],
        v: Array,
        inner: Callable[[Array, Array], Array],
        *,
        keep: bool,
        free: Callable[[Array], Array] = lambda v: v,
    ) -> None:
        self._operator, self._inner, self._keep, self._free = operator, inner, keep, free
        xp = namespace(v)
        size = xp.sqrt(inner(v, v))
        self._rounding = 10 * float(xp.finfo(v.dtype).eps)
        self.sizes = np.ravel(to_numpy(size)).astype(np.float64)
        self.alphas: list[Floats] = []
        self.betas: list[Floats] = []
        self.basis = [_over(v, size)]
        self._moved: Array | None = None  # the largest norm of A v so far
        self._beside: Array | None = None  # the last of `betas`

    def step(self) -> bool:
        now = self.basis[-1]
        xp = namespace(now)
        w = self._operator(now)
        moved = xp.sqrt(self._inner(w, w))
        self._moved = moved if self._moved is None else xp.maximum(self._moved, moved)
        alpha = self._inner(now, w)
        w = w - xp.astype(alpha, w.dtype) * now
        if len(self.basis) > 1:
            w = w - xp.astype(self._beside, w.dtype) * self.basis[-2]
        if self._keep:
            for v in self.basis:  # what rounding has left
                w = w - xp.astype(self._inner(v, w), w.dtype) * v
        w = self._free(w)
        beta = xp.sqrt(self._inner(w, w))
        # What is exhausted is told on the device, which is asked for one row of T.
        self._beside = xp.where(beta > self._rounding * self._moved, beta, xp.zeros_like(beta))
        row = to_numpy(xp.stack([alpha, self._beside])).astype(np.float64).reshape(2, -1)
        self.alphas.append(row[0])
        self.betas.append(row[1])
        w = _over(w, self._beside)
        self.basis = [*self.basis, w] if self._keep else [now, w]
        return bool((row[1] > 0).any())

    def eigen(self, system: int) -> tuple[Floats, Floats]:
        alphas, betas = self.tridiagonal(system)
        return eigen_tridiagonal(alphas, betas[:-1])

    def tridiagonal(self, system: int) -> tuple[Floats, Floats]:
        alphas = np.array([alpha[system] for alpha in self.alphas])
        betas = np.array([beta[system] for beta in self.betas])
        ends = np.flatnonzero(betas == 0)
        count = int(ends[0]) + 1 if len(ends) else len(alphas)
        return alphas[:count], betas[:count]


def eigen_tridiagonal(diagonal: Floats, beside: Floats) -> tuple[Floats, Floats]:
    from scipy.linalg import eigh_tridiagonal

    if len(diagonal) == 1:
        return diagonal, np.ones((1, 1))
    values, vectors = eigh_tridiagonal(diagonal, beside)
    return np.asarray(values, np.float64), np.asarray(vectors, np.float64)


def _over(v: Array, size: Array) -> Array:
    xp = namespace(v)
    safe = xp.where(size > 0, size, xp.ones_like(size))
    return xp.where(size > 0, v / xp.astype(safe, v.dtype), xp.zeros_like(v))
