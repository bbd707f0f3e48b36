"""Conjugate gradients in any inner product, for many right-hand sides at once, on any array namespace.

SciPy's solver handles one NumPy vector in the Euclidean inner product; the operators here are self-adjoint in a
weighted one, have one system for each channel, and may live on another device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nlflow._array import Array, namespace

__all__ = ["Solved", "conjugate_gradients"]

_ROUND = 100  # iterations between two looks at the true residual


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
    done = 0
    while done < maxiter and residual > rtol:
        # The recursive residual drifts from the true one, so each round ends with the true one, and starts from it.
        z = precondition(r)
        p = z
        rz = inner(r, z)
        for _ in range(_ROUND):
            q = operator(p)
            alpha = quotient(rz, inner(p, q))
            x = x + alpha * p
            r = r - alpha * q
            done += 1
            if done >= maxiter or relative(r) <= 0.5 * rtol:
                break
            z = precondition(r)
            previous, rz = rz, inner(r, z)
            p = z + quotient(rz, previous) * p
        r = b - operator(x)
        before, residual = residual, relative(r)
        if residual > 0.9 * before:  # rounding is all that is left
            break
    return Solved(x, residual, done)
