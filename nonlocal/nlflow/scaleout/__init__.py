"""Images larger than one memory: denoising of Dask arrays, on one machine or on many."""

from nlflow.scaleout.arrays import denoise_array
from nlflow.scaleout.sources import open_image
from nlflow.scaleout.store import denoise_store

__all__ = ["denoise_array", "denoise_store", "open_image"]
