"""Chebyshev expansions of functions of an operator whose spectrum lies in a known interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from nlflow._array import Array, Floats
from nlflow.errors import NumericalError

_MOST = 2**20


def chebyshev_coefficients(
    function: Callable[[Floats], NDArray[Any]], low: float, high: float, tol: float
) -> tuple[Floats, float]:
    """Return Chebyshev coefficients of `function` on [low, high] and a bound of what they leave out.

    The shortest expansion is returned whose remainder, the sum of the moduli of all further coefficients, is at most
    `tol`. Since |T_k| <= 1 on the interval, the remainder bounds the error for every operator with its spectrum there,
    in the norm in which it is self-adjoint, before the operator is applied once (Trefethen, Approximation Theory and
    Approximation Practice, ch. 8).

    Parameters
    ----------
    function : callable
        Of an array of points in [low, high].
    low, high, tol : float

    Returns
    -------
    coefficients : array
    remainder : float
        It includes the coefficients that were dropped since they lie at the rounding of the samples, so it may be above
        `tol` where `tol` asks for more than float64 has.

    Raises
    ------
    NumericalError
        When a million terms do not reach `tol`: the time span is too long for a polynomial.
    """
    n = 32
    while n <= _MOST:
        angles = np.pi * (np.arange(n) + 0.5) / n
        # The distance from the lower end to full relative accuracy, on which exp(-t a) for large t depends.
        values = np.asarray(function(low + (high - low) * np.cos(angles / 2) ** 2))
        coefficients = fft.dct(values, type=2) / n
        coefficients[0] /= 2
        # What lies at the rounding of the samples says nothing about the function.
        noise = np.abs(coefficients) <= 8 * np.finfo(np.float64).eps * float(np.abs(values).max())
        dropped = np.where(noise, np.abs(coefficients), 0.0)
        coefficients[noise] = 0
        remainders = np.append(np.cumsum(np.abs(coefficients[::-1]))[::-1], 0.0)
        # Once the second half is negligible the coefficients have decayed, and those beyond n, which a sample of n
        # nodes cannot see, are smaller still.
        if remainders[n // 2] <= 0.01 * tol:
            count = max(int(np.argmax(remainders <= tol)), 1)
            scale = float(np.abs(values).max())
            if _misfit(function, low, high, coefficients[:count]) <= tol + 1e-12 * scale + float(dropped.sum()):
                # Far beyond the expansion's end there are only roundings left to drop.
                return coefficients[:count], float(remainders[count] + dropped[: 2 * count].sum())
        n *= 2
    raise NumericalError(
        f"the expansion needs more than {_MOST} terms for tol={tol:g}: the time span times the largest eigenvalue "
        f"({high:.4g}) is too large; use a shorter span, or the equilibrium (minimizer) for the limit"
    )


def _misfit(function: Callable[[Floats], NDArray[Any]], low: float, high: float, coefficients: Floats) -> float:
    """Return how far an expansion is from its function near the lower end.

    There exp(-t a) for long t is a spike that a coarse sample does not see at all, and takes for the constant 0.
    """
    angles = np.pi * np.logspace(-8, 0, 49)
    signed = coefficients * (-1.0) ** np.arange(len(coefficients))
    # A few angles at a time: the expansion may be long.
    step = max(1, 2**20 // len(signed))
    blocks = (angles[i : i + step] for i in range(0, len(angles), step))
    values = np.concatenate([np.cos(np.outer(block, np.arange(len(signed)))) @ signed for block in blocks])
    return float(np.abs(values - function(low + (high - low) * np.sin(angles / 2) ** 2)).max())


def chebyshev_sums(
    operator: Callable[[Array], Array], v: Array, low: float, high: float, coefficients: Sequence[Floats]
) -> list[Array]:
    """Return sum_k c_k T_k(A') v for each list of coefficients; A' is A mapped from [low, high] to [-1, 1].

    One application of the operator for each degree, shared by all lists.
    """
    degree = max(len(c) for c in coefficients) - 1
    centre, half = (high + low) / 2, (high - low) / 2

    def mapped(x: Array) -> Array:
        return (operator(x) - centre * x) / half

    before, now = v, v
    sums = [float(c[0]) * v for c in coefficients]
    for k in range(1, degree + 1):
        before, now = now, mapped(now) if k == 1 else 2 * mapped(now) - before
        for index, c in enumerate(coefficients):
            if k < len(c):
                sums[index] = sums[index] + float(c[k]) * now
    return sums
