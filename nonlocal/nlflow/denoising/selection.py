"""Where to stop on the path of a flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.noise.risk import discrepancy, perturbation, sure

Array = NDArray[Any]
EPSILON = 0.1
"""By how much of the noise samples are moved for a divergence."""


def select(
    rule: str,
    f: Array,
    path: list[Array],
    rerun: Callable[[Array], list[Array]],
    sigma: Array | float,
    seen: Any,
    seed: int,
    units: Array,
) -> tuple[int, float | None, str]:
    """Return which estimate of a path to take, its estimated mean squared error, and why.

    Parameters
    ----------
    rule : {'discrepancy', 'sure'}
        The estimate whose residual is nearest to the noise, or the one of least estimated risk.
    f : array of shape (..., C)
        In units of the noise.
    path : list of array
    rerun : callable
        From an input to its path; called once for SURE.
    sigma : array of shape (..., 1) or float
        Relative noise.
    seen : bool array of shape (...), or a full slice
        Samples with data.
    seed : int
        Of the perturbation.
    units : array of shape (C,)
        The noise of each channel in the unit of the risk.
    """
    relative = np.broadcast_to(sigma, f.shape)[seen]
    if rule == "discrepancy":
        residuals = [discrepancy(f[seen], u[seen], relative) for u in path]
        best = int(np.argmin(np.abs(np.array(residuals) - 1)))
        return best, None, f"discrepancy: rms residual of {residuals[best]:.4g} sigma, the nearest to sigma"
    signs = perturbation(f.shape, rng=seed, dtype=f.dtype)
    moved = rerun(f + f.dtype.type(EPSILON) * signs)

    def risk(u: Array, v: Array) -> float:
        """Return the mean over the channels, each in its own units of noise."""
        arrays = (f[seen], u[seen], v[seen], signs[seen])
        each = []
        for c in range(len(units)):
            y, estimate, perturbed, b = (x[..., c] for x in arrays)
            each.append(sure(y, estimate, perturbed, b, EPSILON, relative[..., c]))
        return float(np.mean(units**2 * each))

    risks = [risk(u, v) for u, v in zip(path, moved, strict=True)]
    best = int(np.argmin(risks))
    return best, risks[best], f"SURE: least estimated risk, of {len(path)} estimates the number {best + 1}"
