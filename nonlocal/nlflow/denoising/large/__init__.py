"""Images larger than one memory: denoising of Dask arrays, on one machine or on many."""

from nlflow.denoising.large.arrays import denoise_array
from nlflow.denoising.large.sources import open_image
from nlflow.denoising.large.store import denoise_store

__all__ = ["denoise_array", "denoise_store", "open_image"]
