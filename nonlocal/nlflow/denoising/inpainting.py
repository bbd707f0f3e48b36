"""What is missing is filled in, to start from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.affinities import affinity
from nlflow.domains import Grid
from nlflow.functionals.energies import E
from nlflow.kernels import Gaussian

FILLING_STEPS = 3  # of a flow that only fills in
_STRONGEST = 0.6  # noise assumed first, of the signal
_FALL = 0.7  # of the assumed noise from one flow to the next
_OBSERVED = 10.0  # lambda~ where there is data


def filled(f: NDArray[Any], missing: NDArray[np.bool_]) -> NDArray[Any]:
    """Return samples (..., C) with what is missing filled in: the minimizer of E with fidelity 0 there.

    The kernel is a Gaussian of one sample in a window of 5: a discrete harmonic extension. O(N) a conjugate gradient
    iteration, of which there are about as many as the largest hole is wide.
    """
    grid = Grid(missing.shape, boundary="reflect")
    functional = E(affinity(Gaussian(width=1.0), grid, window=min(2, max(missing.shape) - 1) or 1), f,
                   np.where(missing, 0.0, _OBSERVED).astype(f.dtype), measure="degree")  # fmt: skip
    found = functional.minimizer(rtol=1e-4)
    return np.where(missing[..., None], found.u, f)


def filling_levels(f: NDArray[Any]) -> list[float]:
    """Return the noise levels at which holes are filled in, in units of the noise, from strong to 1.

    A first filling is far from the truth, so the flow begins as if there were more noise, which lets it move what is
    missing, and goes on with less and less; what is observed is the observation again at each level (continuation).

    Parameters
    ----------
    f : array of shape (n, C)
        The observed samples, in units of the noise.
    """
    strongest = max(_STRONGEST * float(np.std(f, dtype=np.float64)), 1.0)
    count = math.ceil(math.log(strongest) / -math.log(_FALL))
    return [strongest ** (1 - k / count) for k in range(count)] + [1.0]
