"""The file formats: how each is read and written, and what it has room for; `nlflow.desk.files` is the way in.

A decoder returns the samples as the file stores them and notes every conversion. An encoder gets samples that fit its
format, with the channels on the last axis: `nlflow.desk.files` has checked that before any work began.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nlflow.desk.formats import hdf5, mat, ngff, nifti, npz, pictures, raw, sound, tables, tiff, video
from nlflow.desk.formats.media import ARRAYS, Media, extension, format_of

__all__ = ["FORMATS", "Format", "left_out", "written_extension"]


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes
    ----------
    decode : callable
        Reads a file.
    encode : callable or None
        Writes samples to an open file, or into a new folder; None for a format that is not written.
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
    instead : tuple of str
        Of a format that is not written: why, and the extension of another that is.
    """

    decode: Callable[..., Media]
    encode: Callable[..., None] | None
    kinds: str = "image signal volume clip"
    dtypes: str = ""
    extras: str = ""
    folder: bool = False
    check: Callable[[Path, Media], str] = lambda path, media: ""
    notes: Callable[[Path, Media], list[str]] = lambda path, media: []
    instead: tuple[str, str] = ("", "")


_INTEGERS = "u1 u2 u4 u8 i1 i2 i4 i8"
_STACKED = "image volume clip"
FORMATS = {
    "png": Format(pictures.decode, pictures.encode_png, "image", "u1 u2", "exif icc_profile xmp dpi gamma text"),
    "jpeg": Format(pictures.decode, pictures.encode_jpeg, "image", "u1", "exif icc_profile xmp dpi comment"),
    "tiff": Format(tiff.decode, tiff.encode, _STACKED, f"{_INTEGERS} f2 f4 f8", "icc_profile xmp dpi tags tiff"),
    "bmp": Format(pictures.decode, pictures.encode_bmp, "image", "u1", "dpi"),
    "webp": Format(
        pictures.decode,
        pictures.encode_webp,
        "image",
        "u1",
        "exif icc_profile xmp",
        check=pictures.check_webp,
        notes=pictures.notes_webp,
    ),
    "gif": Format(
        pictures.decode, None, "image", instead=("a GIF file holds 256 colours, fewer than a result has", ".png")
    ),
    "avif": Format(pictures.decode, None, "image", instead=("AVIF loses detail, so it is read only", ".png")),
    "raw": Format(raw.decode, None, "image", instead=("camera raws are read only", ".tif")),
    "npy": Format(tables.decode_npy, tables.encode_npy),
    "npz": Format(npz.decode, npz.encode),
    "mat": Format(mat.decode, mat.encode, dtypes=f"{_INTEGERS} f4 f8", check=mat.check),
    "hdf5": Format(hdf5.decode, hdf5.encode, dtypes=f"{_INTEGERS} f2 f4 f8", check=hdf5.check),
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


def written_extension(path: Path) -> str:
    """Return the extension of an output for this input: its own, or another where its format is not written."""
    form = format_of(path)
    return (FORMATS[form].instead[1] if form else "") or extension(path)


def left_out(form: str, media: Media) -> list[str]:
    """Return the names of what comes with the samples and has no place in a file of this format."""
    names = []
    arrays = form in ARRAYS
    if media.alpha is not None and (arrays or (media.axes and (form != "tiff" or tiff.becomes_ome(media)))):
        names.append("the alpha channel")
    if arrays and media.axes and media.format not in ARRAYS:
        names.append(f"that its axes are {media.axes}{' and how far apart samples are' if media.scale else ''}")
    elif form == "video" and media.format != "video" and set(media.scale) - {"T"}:
        names.append("how far apart pixels are")
    if arrays and media.orientation != 1:
        names.append(f"the orientation (EXIF {media.orientation})")
    if (arrays or form == "csv") and media.sample_rate is not None:
        names.append(f"the sample rate of {media.sample_rate} Hz")
    if arrays or form == "wav":
        names += ["column names"] if media.header is not None else []
        names += ["the first column"] if media.time is not None else []
    for key, name in _NAMES.items():
        usual = key == "gamma" and abs(media.extras.get(key, 0) - 1 / 2.2) < 1e-3  # what is assumed anyway
        bare = key == "tiff" and not tiff.has_metadata(media.extras.get(key))  # a layout and no more
        room = FORMATS[form].extras.split() if key != "tiff" or not tiff.becomes_ome(media) else ()
        if key in media.extras and key not in room and not (usual or bare):
            names.append(name)
    about = media.extras.get("array", {"others": False, "lost": False})
    if about["others"] and (form != media.format or about["lost"]):
        names.append("the other arrays")
    if form == "jpeg" and len(media.extras.get("exif", b"")) > pictures.JPEG_EXIF_LIMIT:
        names.append("the EXIF block, which is too long for JPEG,")
    return names
