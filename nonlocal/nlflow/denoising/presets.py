"""The presets: for each quality a kernel, a functional, an integrator and a rule to stop.

``fast``
    The patch kernel (`nlflow.Patch`), frozen; E with one fidelity a pixel; semi-implicit steps of 1; stopped when the
    residual holds 0.4 sigma, which is mostly after one step.
``balanced``, ``best``
    Groups of alike patches, evolving; E on each group with the fidelity matrix C / s^2 of its covariance; relaxed
    semi-implicit steps of 1; stopped after a number of steps that leave less and less of the noise.

A step on groups takes the running tokens z for f (a minimizing movement) and the covariance C of the running estimate:
u = (I + C/s^2)^-1 (Pz + C/s^2 z), where s is the noise that z still holds. Of the way from z to u a part is taken such
that a wanted fraction of the noise is left; u itself is the estimate. The first estimate has C from the noisy tokens,
with the eigenvalues lowered by a multiple of the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.patches import Grouping


@dataclass(frozen=True)
class GroupPreset:
    """A flow on groups of alike patches.

    Attributes
    ----------
    steps : int
        Steps after the first estimate.
    first, later : tuple of (limit, Grouping)
        Groups of the first estimate and of the later steps; the first entry whose limit the noise over the signal does
        not exceed is taken.
    shrink : float
        Multiple of the noise variance by which eigenvalues of the first covariances are lowered.
    leave : float
        Step k of n leaves at most the fraction ``leave (1 - k/n)`` of the noise in the state.
    factor : float
        On the noise variance s^2 of the later steps; below 1 since the running estimate lacks some of the signal's
        variance.
    search_every : int
        Groups are found anew every so many steps.
    """

    steps: int
    first: tuple[tuple[float, Grouping], ...]
    later: tuple[tuple[float, Grouping], ...]
    first_signal: Grouping
    later_signal: Grouping
    shrink: float = 1.4
    leave: float = 0.75
    factor: float = 0.8
    search_every: int = 1

    def groupings(self, noise_over_signal: float, dimension: int) -> tuple[Grouping, Grouping]:
        """Return the groupings of the first estimate and of the later steps."""
        if dimension == 1:
            return self.first_signal, self.later_signal
        chosen = [next(g for limit, g in table if noise_over_signal <= limit) for table in (self.first, self.later)]
        return chosen[0], chosen[1]


def noisiness(f: NDArray[np.floating]) -> float:
    """Return the noise over the signal, a channel, for a signal (..., C) in units of its noise."""
    return ratio_of(float(np.var(f, dtype=np.float64)), int(f.shape[-1]))


def ratio_of(variance: float, channels: int) -> float:
    """Return the noise over the signal, a channel, of samples of this variance in units of their noise."""
    return 1 / math.sqrt(max(variance - 1.0, 0.01)) / channels


_SIGNAL_FIRST = Grouping(16, 60, 150, 2)
_SIGNAL_LATER = Grouping(16, 40, 150, 2)

PRESETS = {
    "balanced": GroupPreset(
        steps=5,
        first=((0.4, Grouping(5, 80, 18, 5)), (0.75, Grouping(6, 100, 18, 6)), (math.inf, Grouping(7, 140, 18, 6))),
        later=((0.4, Grouping(5, 48, 18, 5)), (0.75, Grouping(6, 48, 18, 5)), (math.inf, Grouping(7, 48, 18, 5))),
        first_signal=_SIGNAL_FIRST,
        later_signal=_SIGNAL_LATER,
        search_every=2,
    ),
    "best": GroupPreset(
        steps=8,
        first=((0.4, Grouping(5, 90, 18, 4)), (0.75, Grouping(6, 120, 18, 4)), (math.inf, Grouping(7, 160, 18, 4))),
        later=((0.4, Grouping(6, 50, 20, 3)), (0.75, Grouping(7, 56, 20, 3)), (math.inf, Grouping(8, 64, 20, 3))),
        first_signal=_SIGNAL_FIRST,
        later_signal=_SIGNAL_LATER,
    ),
}
