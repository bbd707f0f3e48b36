"""Denoising of images and signals by nonlocal flows."""

from nlflow.denoising.api import denoise
from nlflow.denoising.following import Trail
from nlflow.denoising.info import DenoiseInfo

__all__ = ["DenoiseInfo", "Trail", "denoise"]
