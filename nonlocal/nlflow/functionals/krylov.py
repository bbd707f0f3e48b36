"""Krylov methods for many right-hand sides at once: conjugate gradients in any inner product, and GMRES.

SciPy's solvers handle one NumPy vector in the Euclidean inner product; the operators here are self-adjoint in a
weighted one (conjugate gradients), have one system for each channel, for all of which one average serves, and may live
on another device (conjugate gradients).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nlflow._array import Array, Floats, namespace

__all__ = ["Solved", "conjugate_gradients", "default_rtol", "gmres", "verdict"]

_ROUND = 50  # iterations between two looks at the true residual
_PATIENCE = 1000  # iterations without a smaller residual after which there is no hope of one
_LOOK = 16  # iterations between two questions whether another preconditioner would be better


@dataclass(frozen=True)
class Solved:
    """Solution of a linear system: `x`, the largest relative `residual` over the systems, and `iterations`."""

    x: Array
    residual: float
    iterations: int


def default_rtol(like: Array) -> float:
    """Return the relative residual that is asked for where nobody asks: 1e-5 in float32, 1e-10 in float64."""
    return 1e-5 if like.dtype == namespace(like).float32 else 1e-10


def verdict(residual: float, rtol: float) -> tuple[bool, str]:
    """Return whether a residual is within its tolerance, and what to add to the message if not."""
    if residual <= rtol * 1.0001:
        return True, ""
    return False, f", above rtol={rtol:g}: raise maxiter or rtol, or use a larger fidelity"


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
) -> Solved:
    """Solve ``operator(x) = b`` for an operator that is self-adjoint and positive in `inner`.

    Parameters
    ----------
    operator, precondition : callable
        Linear, both self-adjoint and positive in `inner`.
    b, x : array
        Right-hand sides and first guess.
    inner : callable
        Inner product of two arrays, one number for each system, broadcastable to `b`.
    rtol : float
        Stop when every system's residual norm is at most this times the norm of its right-hand side.
    maxiter : int
    reconsider : callable, optional
        Asked at the start and each 16 iterations, with the iterations and the residual so far, for another
        preconditioner; None keeps the one there is.

    Returns
    -------
    Solved
        Its residual is recomputed from `x`, not the recursive one; infinite or NaN where the iteration broke down.
    """
    xp = namespace(b)
    size = inner(b, b)
    peak = xp.max(xp.abs(b))
    # A system with b = 0 has the solution 0; its scale is set to 1 so that nothing divides by zero.
    scale = xp.where(size > 0, size, xp.ones_like(size))
    x = xp.where(size > 0, x, xp.zeros_like(x))

    def relative(r: Array) -> float:
        # In the largest entry too: `inner` may give some nodes a weight so small that nothing there would show.
        largest = float(xp.max(xp.abs(r)) / peak) if float(peak) > 0 else 0.0
        return max(math.sqrt(float(xp.max(inner(r, r) / scale))), largest)

    def quotient(a: Array, b: Array) -> Array:
        # A system that is solved has p = 0: it stays where it is.
        safe = xp.where(b > 0, b, xp.ones_like(b))
        return xp.astype(xp.where(b > 0, a / safe, xp.zeros_like(a)), x.dtype)

    r = b - operator(x)
    residual = relative(r)
    done, best, at = 0, residual, 0
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
            done += 1
            recursive = relative(r)
            if done >= maxiter or recursive <= 0.5 * rtol or not math.isfinite(recursive):
                break
            other = reconsider(done, recursive) if reconsider is not None and done % _LOOK == 0 else None
            if other is not None:
                precondition, p = other, None
        drifted, r = r, b - operator(x)
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
    return Solved(x, residual, done)


def gmres(
    operator: Callable[[Floats], Floats],
    b: Floats,
    x: Floats,
    *,
    rtol: float,
    maxiter: int,
    restart: int = 40,
) -> Solved:
    """Solve ``operator(x) = b`` for every column of `b`, each in a Krylov space of its own (Saad and Schultz 1986).

    (doi 10.1137/0907058.) Columns are orthogonalised one by one, but the operator is applied to all of them together.

    Parameters
    ----------
    operator : callable
        Linear, on arrays of shape (N, D), the same for each column.
    b, x : array of shape (N, D)
        Right-hand sides and first guess.
    rtol : float
        Stop when every column's residual is at most this times its right-hand side, Euclidean norms.
    maxiter : int
        Applications of the operator.
    restart : int
        Largest dimension of the Krylov spaces, which take ``8 restart N D`` bytes.

    Returns
    -------
    Solved
        Its residual is recomputed from `x`.
    """
    size = np.linalg.norm(b, axis=0)
    # A system with b = 0 has the solution 0; its scale is set to 1 so that nothing divides by zero.
    scale = np.where(size > 0, size, 1.0)
    x = np.where(size > 0, x, 0.0)
    residual = b - operator(x)
    done, relative = 0, float((np.linalg.norm(residual, axis=0) / scale).max())
    while relative > rtol and done < maxiter:
        before = relative
        start = np.linalg.norm(residual, axis=0)
        basis = [residual / np.where(start > 0, start, 1.0)]
        hessenberg = np.zeros((b.shape[1], restart + 1, restart))
        y = np.zeros((b.shape[1], 0))
        for j in range(min(restart, maxiter - done)):
            w = operator(basis[j])
            moved = np.linalg.norm(w, axis=0)
            done += 1
            for i, v in enumerate(basis):
                hessenberg[:, i, j] = np.sum(v * w, axis=0)
                w = w - hessenberg[:, i, j] * v
            length = np.linalg.norm(w, axis=0)
            hessenberg[:, j + 1, j] = length
            # A column whose space holds its solution goes on with 0: what is left of w is rounding.
            basis.append(w / np.where(length > 1e-14 * moved, length, np.inf))
            target = np.zeros((b.shape[1], j + 2))
            target[:, 0] = start
            # Pseudo-inverses, for the columns that are solved already.
            y = np.einsum("cij,cj->ci", np.linalg.pinv(hessenberg[:, : j + 2, : j + 1]), target)
            left = np.linalg.norm(target - np.einsum("cij,cj->ci", hessenberg[:, : j + 2, : j + 1], y), axis=1)
            if float((left / scale).max()) <= 0.5 * rtol:
                break
        x = x + sum((v * y[:, i] for i, v in enumerate(basis[: y.shape[1]])), np.zeros_like(b))
        residual = b - operator(x)
        relative = float((np.linalg.norm(residual, axis=0) / scale).max())
        if relative > 0.99 * before:  # rounding is all that is left
            break
    return Solved(x, relative, done)
