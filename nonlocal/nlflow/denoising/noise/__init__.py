"""Noise: how strong it is, counts and their transform, and how much of it an estimate has left."""

from nlflow.denoising.noise.estimation import estimate_sigma, estimate_sigmas
from nlflow.denoising.noise.risk import discrepancy, perturbation, sure
from nlflow.denoising.noise.stabilizing import Poisson

__all__ = ["Poisson", "discrepancy", "estimate_sigma", "estimate_sigmas", "perturbation", "sure"]
