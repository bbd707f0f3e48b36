"""Images on the disk that are larger than one memory: opened block by block, and denoised from file to file."""

from nlflow.desk.large.sources import open_image
from nlflow.desk.large.store import denoise_store

__all__ = ["denoise_store", "open_image"]
