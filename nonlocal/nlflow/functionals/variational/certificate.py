"""How near a signal is to a minimizer: the duality gap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.functionals.minimizer import Minimizer
from nlflow.functionals.misfits import Misfit

NO_EDGES = "the graph has no edges, so that J is 0 and the observed signal the minimizer"
"""Message of a minimization that has nothing to do."""


@dataclass(frozen=True, repr=False)
class CertifiedMinimizer(Minimizer):
    """A minimizer with its duality gap.

    Attributes
    ----------
    u, iterations, message
        See `Minimizer`.
    residual : float
        Relative duality gap: the minimum is at least ``(1 - residual) * value``.
    success : bool
        Whether the gap is within `rtol`.
    value : float
        The functional at `u`.
    """

    value: float = 0.0

    @property
    def gap(self) -> float:
        """The relative duality gap."""
        return self.residual


def bounding_box(u: NDArray[Any], f: NDArray[Any], rigid: NDArray[Any]) -> NDArray[Any]:
    """Return the smallest box with all values of `u` and the observed ones of `f`, shape (2, D)."""
    # Projection onto it never raises E_p, so restricting G to it leaves the minimum and makes the dual value finite.
    known = np.concatenate([u, f[rigid > 0]])
    return np.stack([known.min(axis=0), known.max(axis=0)])


def fidelity_slack(u: NDArray[Any], flow: Floats, rigid: NDArray[Any], f: NDArray[Any], box: NDArray[Any]) -> float:
    """Return G(u) + G*(-flow) + <u, flow> for the fidelity G restricted to a box, a sum of terms >= 0."""
    stiff = np.asarray(rigid, dtype=np.float64)[:, None]
    target, here = f.astype(np.float64), u.astype(np.float64)
    # Where G* is attained: a point between, or a corner of the box where there is no fidelity.
    free = np.clip(target - flow / np.where(stiff > 0, stiff, 1.0), box[0], box[1])
    best = np.where(stiff > 0, free, np.where(flow > 0, box[0], box[1]))
    terms = (best - here) * (-flow - 0.5 * stiff * (best + here - 2 * target))
    return float(np.maximum(terms, 0).sum())


def misfit_slack(
    misfit: Misfit, u: NDArray[Any], flow: Floats, rigid: NDArray[Any], f: NDArray[Any], box: NDArray[Any]
) -> float:
    stiff = np.broadcast_to(np.asarray(rigid, dtype=np.float64)[:, None], u.shape)
    seen, here, target = stiff > 0, u.astype(np.float64), f.astype(np.float64)
    with np.errstate(over="ignore"):
        pull = np.where(seen, -flow / np.where(seen, stiff, 1.0), 0.0)
    best = np.where(seen, misfit.best(pull, target, box), np.where(flow > 0, box[0], box[1]))
    values = [misfit.value(np.where(seen, u, target), target) for u in (here, best)]
    gain = np.where(seen, stiff * (values[0] - values[1]), 0.0)
    return float(np.maximum(gain + (here - best) * flow, 0).sum())
