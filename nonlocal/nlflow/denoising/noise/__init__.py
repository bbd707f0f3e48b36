"""Noise: how strong it is, counts and their transform, and how much of it an estimate has left."""

from nlflow.denoising.noise.estimation import estimate_sigma, estimate_sigmas
from nlflow.denoising.noise.impulses import Impulses, find_impulses
from nlflow.denoising.noise.risk import discrepancy, perturbation, sure
from nlflow.denoising.noise.speckle import Speckle, find_speckle
from nlflow.denoising.noise.stabilizing import Poisson
from nlflow.denoising.noise.stripes import Stripes, find_stripes

__all__ = [
    "Impulses",
    "Poisson",
    "Speckle",
    "Stripes",
    "discrepancy",
    "estimate_sigma",
    "estimate_sigmas",
    "find_impulses",
    "find_speckle",
    "find_stripes",
    "perturbation",
    "sure",
]
