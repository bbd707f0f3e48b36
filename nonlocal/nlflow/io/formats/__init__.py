"""Decoders and encoders, one pair per file format; `nlflow.io.files` is the way in.

A decoder returns the samples as the file stores them and notes every conversion. An encoder gets samples that fit its
format, with the channels on the last axis: `nlflow.io.files` has checked that before any work began.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from nlflow.io.formats import pictures, sound, tables, tiff
from nlflow.io.formats.media import Array, Media

__all__ = ["DECODERS", "ENCODERS", "left_out"]

#: From a format to the function that reads a file of it.
DECODERS: dict[str, Callable[[Path], Media]] = {
    "png": pictures.decode,
    "jpeg": pictures.decode,
    "tiff": tiff.decode,
    "npy": tables.decode_npy,
    "wav": sound.decode,
    "csv": tables.decode_csv,
}
#: From a format to the function that writes samples to an open file.
ENCODERS: dict[str, Callable[[BinaryIO, Array, Media], None]] = {
    "png": pictures.encode_png,
    "jpeg": pictures.encode_jpeg,
    "tiff": tiff.encode,
    "npy": tables.encode_npy,
    "wav": sound.encode,
    "csv": tables.encode_csv,
}
# From what may come with samples to its name, and to the formats that have a place for it.
_EXTRAS = {
    "exif": ("the EXIF block", "png jpeg"),
    "icc_profile": ("the colour profile", "png jpeg tiff"),
    "xmp": ("the XMP block", "png jpeg tiff"),
    "dpi": ("the resolution", "png jpeg tiff"),
    "gamma": ("the gamma of the display", "png"),
    "comment": ("the comment", "jpeg"),
    "text": ("the texts", "png"),
    "tags": ("the description and other tags", "tiff"),
}


def left_out(form: str, media: Media) -> list[str]:
    """Return the names of what comes with the samples and has no place in a file of this format."""
    names = []
    if form == "npy" and media.alpha is not None:
        names.append("the alpha channel")
    if form == "npy" and media.orientation != 1:
        names.append(f"the orientation (EXIF {media.orientation})")
    if form in ("npy", "csv") and media.sample_rate is not None:
        names.append(f"the sample rate of {media.sample_rate} Hz")
    if form in ("npy", "wav"):
        names += ["column names"] if media.header is not None else []
        names += ["the first column"] if media.time is not None else []
    for key, (name, forms) in _EXTRAS.items():
        usual = key == "gamma" and abs(media.extras.get(key, 0) - 1 / 2.2) < 1e-3  # what is assumed anyway
        if key in media.extras and form not in forms.split() and not usual:
            names.append(name)
    if form == "jpeg" and len(media.extras.get("exif", b"")) > pictures.JPEG_EXIF_LIMIT:
        names.append("the EXIF block, which is too long for JPEG,")
    return names
