"""The file formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from nlflow.desk.apart import begin, call, size_of
from nlflow.desk.formats.media import (
    ARRAYS,
    JPEG_EXIF_LIMIT,
    SOUNDS,
    TABLES,
    Media,
    Writing,
    extension,
    format_of,
    most_for,
)

__all__ = ["FORMATS", "Format", "left_out", "prepare", "written_extension"]


@dataclass(frozen=True)
class Format:
    """A file format; its functions are named, and their module is loaded when one is called."""

    module: str  # in this package
    kinds: str = "image signal volume clip"  # what a file holds: kinds of `Media`
    dtypes: str = ""  # those that a file stores; empty for any
    extras: str = ""  # keys of `Media.extras` that a file has a place for
    folder: bool = False  # whether a "file" is a folder
    # apart, library: what of its decoder runs in a child, "all" or "parts" (see `nlflow.desk.apart`), and what that
    # loads there.
    apart: str = ""
    library: str = ""
    decoder: str = "decode"  # reads a file
    encoder: str = "encode"  # writes samples to an open file, or into a new folder
    # checker, noter: returns what else of a stack a file cannot hold (empty if all is well), and what else there is to
    # say of a file that will be written; empty where there is no such function.
    checker: str = ""
    noter: str = ""
    instead: tuple[str, str] = ("", "")  # of a format that is not written: why, and the extension of another that is

    def _own(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(import_module(f"{__name__}.{self.module}"), name)
        return found

    @property
    def written(self) -> bool:
        return not self.instead[1]

    def decode(self, path: Path, **words: Any) -> Media:
        """Read a file."""
        if self.apart:
            begin(self.library)
        if self.apart == "all":
            function, size = f"{__name__}.{self.module}:{self.decoder}", size_of(path)
            return call(function, path, most_for(path), size=size, **words)  # type: ignore[no-any-return]
        media: Media = self._own(self.decoder)(path, **words)
        return media

    def encode(self, place: Any, values: Any, media: Media, writing: Writing) -> None:
        self._own(self.encoder)(place, values, media, writing)

    def check(self, media: Media, writing: Writing) -> str:
        return str(self._own(self.checker)(media, writing)) if self.checker else ""

    def notes(self, media: Media, writing: Writing) -> list[str]:
        """Return notes."""
        return list(self._own(self.noter)(media, writing)) if self.noter else []


_INTEGERS = "u1 u2 u4 u8 i1 i2 i4 i8"
_STACKED = "image volume clip"
FORMATS = {
    "png": Format("pictures", "image", "u1 u2", "exif icc_profile xmp dpi gamma text", encoder="encode_png"),
    "jpeg": Format("pictures", "image", "u1", "exif icc_profile xmp dpi comment", encoder="encode_jpeg"),
    "tiff": Format("tiff", _STACKED, f"{_INTEGERS} f2 f4 f8", "icc_profile xmp dpi tags tiff", noter="notes"),
    "bmp": Format("pictures", "image", "u1", "dpi", encoder="encode_bmp"),
    "webp": Format("pictures", "image", "u1", "exif icc_profile xmp", apart="all", library="PIL.Image",
                   encoder="encode_webp", checker="check_webp", noter="notes_webp"),
    "pnm": Format("pnm", "image", "u1 u2", "comment netpbm", checker="check"),
    "pbm": Format("pnm", "image", instead=("a PBM file holds black and white, fewer than a result has", ".pgm")),
    "gif": Format("pictures", "image",
                  instead=("a GIF file holds 256 colours, fewer than a result has", ".png")),
    "avif": Format("pictures", "image", apart="all", library="PIL.Image",
                   instead=("AVIF loses detail, so it is read only", ".png")),
    "raw": Format("pictures", "image", apart="all", library="rawpy", decoder="develop",
                  instead=("camera raws are read only", ".tif")),
    "npy": Format("tables", decoder="decode_npy", encoder="encode_npy"),
    "npz": Format("containers"),
    "mat": Format("mat", dtypes=f"{_INTEGERS} f4 f8", checker="check"),
    "hdf5": Format("hdf5", dtypes=f"{_INTEGERS} f2 f4 f8", apart="parts", library="h5py", checker="check"),
    "wav": Format("sound", "signal", "u1 i2 i4 i8 f4 f8"),
    "csv": Format("tables", "signal", decoder="decode_csv", encoder="encode_csv"),
    "parquet": Format("parquet", "signal", apart="all", library="pyarrow.parquet", checker="check"),
    "au": Format("sound", "signal", "i1 i2 i4 f4 f8", decoder="decode_au", encoder="encode_au"),
    "nifti": Format("nifti", _STACKED, f"{_INTEGERS} f4 f8", "nifti", checker="check"),
    "zarr": Format("ngff", _STACKED, f"{_INTEGERS} f2 f4 f8", "ngff", folder=True, apart="all", library="zarr",
                   checker="check"),
    "video": Format("film", "clip", "u1 u2", "video", apart="parts", library="av", checker="check",
                    noter="notes"),
}  # fmt: skip
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


def prepare(paths: Iterable[Path]) -> None:
    for path in paths:
        form = format_of(path)
        if form and FORMATS[form].apart:
            begin(FORMATS[form].library)
            return


def written_extension(path: Path) -> str:
    form = format_of(path)
    return (FORMATS[form].instead[1] if form else "") or extension(path)


def left_out(form: str, media: Media, writing: Writing) -> list[str]:
    names = []
    arrays, bare, anew = form in ARRAYS, False, False
    if "tiff" in media.extras or (form == "tiff" and media.axes):
        from nlflow.desk.formats.tiff import becomes_ome, has_metadata

        bare = not has_metadata(media.extras.get("tiff"))  # a layout and no more
        anew = form == "tiff" and becomes_ome(media, writing)
    if media.alpha is not None and (arrays or (media.axes and (form != "tiff" or anew))):
        names.append("the alpha channel")
    if arrays and media.axes and media.format not in ARRAYS:
        names.append(f"that its axes are {media.axes}{' and how far apart samples are' if media.scale else ''}")
    elif form == "video" and media.format != "video" and set(media.scale) - {"T"}:
        names.append("how far apart pixels are")
    if arrays and media.orientation != 1:
        names.append(f"the orientation (EXIF {media.orientation})")
    if (arrays or form in TABLES) and media.sample_rate is not None:
        names.append(f"the sample rate of {media.sample_rate} Hz")
    if arrays or form in SOUNDS:
        names += ["column names"] if media.header is not None else []
        names += ["the first column"] if media.time is not None else []
    told = int(media.time is not None and form not in TABLES)
    if form != media.format and "sheet" in media.extras and media.extras["sheet"].kept > told:
        names.append("the other columns")
    for key, name in _NAMES.items():
        usual = key == "gamma" and abs(media.extras.get(key, 0) - 1 / 2.2) < 1e-3  # what is assumed anyway
        room = FORMATS[form].extras.split() if key != "tiff" or not anew else ()
        if key in media.extras and key not in room and not usual and not (key == "tiff" and bare):
            names.append(name)
    about = media.extras.get("array", {"others": False, "lost": False})
    if about["others"] and (form != media.format or about["lost"]):
        names.append("the other arrays")
    if form == "jpeg" and len(media.extras.get("exif", b"")) > JPEG_EXIF_LIMIT:
        names.append("the EXIF block, which is too long for JPEG,")
    return names
