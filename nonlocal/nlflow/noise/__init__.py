"""Noise: how strong it is."""

from nlflow.noise.estimation import estimate_sigma

__all__ = ["estimate_sigma"]
