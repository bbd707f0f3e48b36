"""What a user should know of a result for which the noise was found out: nearly unchanged, too smooth, unsure."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square
from nlflow.denoising.noise import NoiseEstimate
from nlflow.domains.samples import range_of

_NOTHING: Final = 1 / 2000  # of the range: what was removed is then less than an eighth of a grey level


def doubts(samples: NDArray[Any], u: NDArray[Any], found: NoiseEstimate) -> list[str]:
    """Return warnings about the result u of samples, both of shape (..., C), with noise that was found out."""
    texts = []
    span, removed = range_of(samples), root_mean_square(samples - u)
    if span > 0 and removed < _NOTHING * span and found.confidence != "high":
        texts.append(
            f"the result is nearly the input: {found}; if you see noise, give its standard deviation (sigma) or a "
            "model of it (noise)"
        )
    elif found.confidence == "low":
        texts.append(f"the noise was hard to find out: {found}; {found.reasons[0]}; look at the result, and give sigma "
                     "or noise where it is wrong")  # fmt: skip
    return texts
