"""Denoising of Dask arrays."""

from nlflow import _moved
from nlflow.denoising.large.arrays import denoise_array

__all__ = ["denoise_array"]
__getattr__ = _moved.names(__name__)
