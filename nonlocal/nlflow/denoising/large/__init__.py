"""Images larger than one memory: denoising of Dask arrays, on one machine or on many."""

from importlib import import_module
from typing import Any

from nlflow.denoising.large.arrays import denoise_array

__all__ = ["denoise_array"]


def __getattr__(name: str) -> Any:
    """Return what was here before files had a room of their own."""
    if name in ("denoise_store", "open_image"):
        return getattr(import_module("nlflow.desk.large"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
