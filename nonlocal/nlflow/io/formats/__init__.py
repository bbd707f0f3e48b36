"""The file formats: how each is read and written, and what it has room for; `nlflow.io.files` is the way in.

A decoder returns the samples as the file stores them and notes every conversion. An encoder gets samples that fit its
format, with the channels on the last axis: `nlflow.io.files` has checked that before any work began.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nlflow.io.formats import ngff, nifti, pictures, sound, tables, tiff, video
from nlflow.io.formats.media import Media

__all__ = ["FORMATS", "Format", "left_out"]


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes
    ----------
    decode : callable
        Reads a file.
    encode : callable
        Writes samples to an open file, or into a new folder.
    kinds : str
        What a file holds: kinds of `Media`.
    dtypes : str
        Those that a file stores; empty for any.
    extras : str
        Keys of `Media.extras` that a file has a place for.
    folder : bool
        Whether a "file" is a folder.
    check : callable
        Returns what else of a stack a file cannot hold; empty if all is well.
    notes : callable
        Returns what else there is to say of a file that will be written.
    """

    decode: Callable[[Path], Media]
    encode: Callable[..., None]
    kinds: str = "image signal volume clip"
    dtypes: str = ""
    extras: str = ""
    folder: bool = False
    check: Callable[[Path, Media], str] = lambda path, media: ""
    notes: Callable[[Path, Media], list[str]] = lambda path, media: []


_INTEGERS = "u1 u2 u4 u8 i1 i2 i4 i8"
_STACKED = "image volume clip"
FORMATS = {
    "png": Format(pictures.decode, pictures.encode_png, "image", "u1 u2", "exif icc_profile xmp dpi gamma text"),
    "jpeg": Format(pictures.decode, pictures.encode_jpeg, "image", "u1", "exif icc_profile xmp dpi comment"),
    "tiff": Format(tiff.decode, tiff.encode, _STACKED, f"{_INTEGERS} f2 f4 f8", "icc_profile xmp dpi tags tiff"),
    "npy": Format(tables.decode_npy, tables.encode_npy),
    "wav": Format(sound.decode, sound.encode, "signal", "u1 i2 i4 i8 f4 f8"),
    "csv": Format(tables.decode_csv, tables.encode_csv, "signal"),
    "nifti": Format(nifti.decode, nifti.encode, _STACKED, f"{_INTEGERS} f4 f8", "nifti", check=nifti.check),
    "zarr": Format(ngff.decode, ngff.encode, _STACKED, f"{_INTEGERS} f2 f4 f8", "ngff", folder=True, check=ngff.check),
    "video": Format(video.decode, video.encode, "clip", "u1 u2", "video", check=video.check, notes=video.notes),
}
_NAMES = {
    "exif": "the EXIF block",
    "icc_profile": "the colour profile",
    "xmp": "the XMP block",
    "dpi": "the resolution",
    "gamma": "the gamma of the display",
    "comment": "the comment",
    "text": "the texts",
    "tags": "the description and other tags",
    "tiff": "the metadata of ImageJ, OME or single pages",
    "nifti": "the NIfTI header with its affine",
    "ngff": "the metadata of the OME-Zarr store",
    "video": "what else the film holds (sound, times of frames)",
}


def left_out(form: str, media: Media) -> list[str]:
    """Return the names of what comes with the samples and has no place in a file of this format."""
    names = []
    if media.alpha is not None and (form == "npy" or (media.axes and (form != "tiff" or tiff.becomes_ome(media)))):
        names.append("the alpha channel")
    if form == "npy" and media.axes and media.format != "npy":
        names.append(f"that its axes are {media.axes}{' and how far apart samples are' if media.scale else ''}")
    elif form == "video" and media.format != "video" and set(media.scale) - {"T"}:
        names.append("how far apart pixels are")
    if form == "npy" and media.orientation != 1:
        names.append(f"the orientation (EXIF {media.orientation})")
    if form in ("npy", "csv") and media.sample_rate is not None:
        names.append(f"the sample rate of {media.sample_rate} Hz")
    if form in ("npy", "wav"):
        names += ["column names"] if media.header is not None else []
        names += ["the first column"] if media.time is not None else []
    for key, name in _NAMES.items():
        usual = key == "gamma" and abs(media.extras.get(key, 0) - 1 / 2.2) < 1e-3  # what is assumed anyway
        bare = key == "tiff" and not tiff.has_metadata(media.extras.get(key))  # a layout and no more
        room = FORMATS[form].extras.split() if key != "tiff" or not tiff.becomes_ome(media) else ()
        if key in media.extras and key not in room and not (usual or bare):
            names.append(name)
    if form == "jpeg" and len(media.extras.get("exif", b"")) > pictures.JPEG_EXIF_LIMIT:
        names.append("the EXIF block, which is too long for JPEG,")
    return names
