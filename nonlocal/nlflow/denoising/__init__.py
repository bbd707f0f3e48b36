"""Denoising of images and signals by nonlocal flows."""

from nlflow.denoising.api import denoise, problem
from nlflow.denoising.info import DenoiseInfo
from nlflow.denoising.options import Options
from nlflow.denoising.progress import Trail
from nlflow.denoising.runs import Problem

__all__ = ["DenoiseInfo", "Options", "Problem", "Trail", "denoise", "problem"]
