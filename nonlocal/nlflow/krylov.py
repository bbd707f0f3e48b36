"""Conjugate gradients in any inner product, for many right-hand sides at once, on any array namespace.

SciPy's solver handles one NumPy vector in the Euclidean inner product; the operators here are self-adjoint in a
weighted one, have one system for each channel, and may live on another device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from nlflow._array import Array, namespace

__all__ = ["Solved", "conjugate_gradients"]


@dataclass(frozen=True)
class Solved:
    """Solution of a linear system: `x`, the largest relative `residual` over the systems, and `iterations`."""

    x: Array
    residual: float
    iterations: int


def conjugate_gradients(
    operator: Callable[[Array], Array],
    b: Array,
    x: Array,
    *,
    inner: Callable[[Array, Array], Array],
    precondition: Callable[[Array], Array],
    rtol: float,
    maxiter: int,
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

    Returns
    -------
    Solved
        Its residual is recomputed from `x`, not the recursive one.
    """
    xp = namespace(b)
    size = inner(b, b)
    # A system with b = 0 has the solution 0; its scale is set to 1 so that nothing divides by zero.
    scale = xp.where(size > 0, size, xp.ones_like(size))
    x = xp.where(size > 0, x, xp.zeros_like(x))

    def relative(r: Array) -> float:
        return float(xp.sqrt(xp.max(inner(r, r) / scale)))

    r = b - operator(x)
    z = precondition(r)
    p = z
    rz = inner(r, z)
    done = 0
    while done < maxiter and relative(r) > rtol:
        q = operator(p)
        curvature = inner(p, q)
        # A system that is solved has p = 0: it stays where it is.
        alpha = xp.where(curvature > 0, rz / xp.where(curvature > 0, curvature, xp.ones_like(curvature)), 0 * rz)
        x = x + alpha * p
        done += 1
        # The recursive residual drifts from the true one; start afresh from the true one now and then.
        r = b - operator(x) if done % 50 == 0 else r - alpha * q
        z = precondition(r)
        previous, rz = rz, inner(r, z)
        beta = xp.where(previous > 0, rz / xp.where(previous > 0, previous, xp.ones_like(previous)), 0 * rz)
        p = z + beta * p
    return Solved(x, relative(b - operator(x)), done)
