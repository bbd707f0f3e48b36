"""What files hold."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nlflow.desk.apart import size_of
from nlflow.errors import FileFormatError, check_memory, file_error, format_bytes, install_command, memory_limit

Array: TypeAlias = NDArray[Any]
Kind: TypeAlias = Literal["image", "signal", "volume", "clip"]
FirstColumn: TypeAlias = Literal["keep", "denoise"]

#: The known file name extensions and their formats.
EXTENSIONS = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".tif": "tiff", ".tiff": "tiff"}
EXTENSIONS |= {".npy": "npy", ".wav": "wav", ".csv": "csv", ".tsv": "csv", ".txt": "csv", ".dat": "csv"}
EXTENSIONS |= {".parquet": "parquet", ".au": "au"}
EXTENSIONS |= {".bmp": "bmp", ".webp": "webp", ".gif": "gif", ".avif": "avif"}
EXTENSIONS |= {".pgm": "pnm", ".ppm": "pnm", ".pnm": "pnm", ".pbm": "pbm"}
EXTENSIONS |= {".npz": "npz", ".mat": "mat", ".h5": "hdf5", ".hdf5": "hdf5"}
EXTENSIONS |= dict.fromkeys((".dng", ".nef", ".cr2", ".cr3", ".arw", ".raf", ".orf", ".rw2", ".pef", ".srw"), "raw")
#: Those of files that hold nothing but stacks.
STACKS = {".nii": "nifti", ".nii.gz": "nifti", ".zarr": "zarr"}
STACKS |= dict.fromkeys((".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi"), "video")

#: One extension of each format, for messages.
READABLE = ", ".join(reversed({form: name for name, form in reversed([*EXTENSIONS.items(), *STACKS.items()])}.values()))
#: Formats of files that hold several arrays, each with a name.
CONTAINERS = ("npz", "mat", "hdf5")
#: Formats of arrays, which do not say what their axes are.
ARRAYS = ("npy", *CONTAINERS)
#: Formats of tables, whose columns are signals of their own.
TABLES = ("csv", "parquet")
#: Formats of sound, which have a sample rate.
SOUNDS = ("wav", "au")
#: Formats of single pictures.
PICTURES = ("png", "jpeg", "tiff", "bmp", "webp", "pnm", "pbm", "gif", "avif", "raw")

#: Size in bytes beyond which a JPEG file cannot hold an EXIF block.
JPEG_EXIF_LIMIT = 65533

# Deflate makes at most 1032 bytes of one, for instance in a mask that is almost empty. A header that asks for far more
# only wants to fill memory. Below the floor it may ask.
_MOST, _FLOOR = 2000, 2**24


@dataclass(frozen=True)
class Media:
    """A file's content."""

    path: Path  # the file that was read
    format: str  # its format, a value of `EXTENSIONS`
    # {"image", "signal", "volume", "clip"}: What the samples are; a volume has slices (Z), and may have frames (T) as
    # well; a clip has frames alone.
    kind: Kind
    # The samples in the dtype of the file: an image (H, W) or (H, W, C), a signal (N,) or (N, C); in an .npy file the
    # channels may lie on any axis. A stack has the axes that `axes` names.
    data: Array
    # Axis of the channels, counted from 0, or None for one channel without an axis of its own.
    channel_axis: int | None = None
    alpha: Array | None = None  # the opacity (H, W) of an image, kept aside and written back unchanged
    # How an image has to be turned to be seen upright, 1 (not at all) to 8, as EXIF and TIFF count; ``data`` are as
    # they are stored.
    orientation: int = 1
    sample_rate: int | None = None  # samples per second of a WAV file
    # Column names of a CSV file as they stand there, that of the first column included.
    header: tuple[str, ...] | None = None
    # The cells of a CSV file's first column where it numbers the rows (times, depths, an index), written back
    # unchanged.
    time: tuple[str, ...] | None = None
    delimiter: str = ","  # what separates the columns of a CSV file
    decimal: str = "."  # the decimal point of a CSV file: a comma in many countries
    # What else comes with the samples, written back unchanged where the output's format has a place for it: ``exif``,
    # ``icc_profile``, ``xmp`` and ``comment`` (bytes), ``dpi`` (two numbers), ``gamma`` (a number) and ``text`` (of a
    # PNG file, by keys) of images; ``resolution`` and ``tags`` of a TIFF file; ``bits`` (of a sample) of a WAV file;
    # ``array`` (its name and its shape in the file) of one of several arrays; ``sheet`` (the text of a table);
    # ``channels`` (their names) of a stack; ``packing`` (how the samples of a TIFF file are packed, in words).
    extras: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # the conversions made while reading, for the user
    # One letter for each axis of the data of a stack, and of an image that was read as one: T (time), Z, Y, X, C
    # (channels); "?" where a file does not say it. Empty for other images and signals.
    axes: str = ""
    # Of a stack: from a letter to the distance of two samples along that axis and its unit (empty if unknown).
    scale: dict[str, tuple[float, str]] = field(default_factory=dict)
    # What `nlflow.denoise` is told of it: one number for each letter of `axes` but C and, beside Z, T.
    spacing: tuple[float, ...] | None = None
    # stored_axes, stored_shape: axes and shape in the file, those of one sample included, which `axes` and ``data``
    # lack.
    stored_axes: str = ""
    stored_shape: tuple[int, ...] = ()
    # Where the file says that there is no sample, in the shape of the data: empty cells of a table. They come back so.
    absent: Array | None = None
    bits: int | None = None  # how many bits of an unsigned integer are used, where they are fewer than its type has

    @property
    def stacked(self) -> bool:
        return self.kind in ("volume", "clip")

    @property
    def spatial_shape(self) -> tuple[int, ...]:
        return tuple(size for axis, size in enumerate(self.data.shape) if axis != self.channel_axis)

    def restored(self, data: Array) -> Array:
        """Return a result with the original values where samples are missing or hidden."""
        return data if self.absent is None else np.where(self.absent, self.data, data)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of a table that are signals; else empty."""
        if self.format not in TABLES:
            return ()
        count, first = 1 if self.data.ndim == 1 else self.data.shape[1], int(self.time is not None)
        places = self.extras["sheet"].columns if "sheet" in self.extras else range(first, first + count)
        names = self.header or ()
        return tuple((names[c] if c < len(names) else "") or f"column {c + 1}" for c in places)

    @property
    def separate(self) -> bool:
        return self.format in TABLES and self.channel_axis is not None


@dataclass(frozen=True)
class Writing:
    """How files are written."""

    path: Path  # the output; its extension decides the format
    # Of a film its rate factor, of a JPEG file 1 to 100; that of the format by default.
    quality: int | str | None = None
    replaces: bool = True  # whether a file that is there when the result is complete may be lost

    @property
    def name(self) -> str:
        return self.path.name.lower()

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> Writing:
        known = {one.name for one in fields(cls)} - {"path", "replaces"}
        return cls(Path(), **{name: value for name, value in words.items() if name in known})

    def at(self, path: Path, **words: Any) -> Writing:
        return replace(self, path=path, **words)


def writing_of(target: str | os.PathLike[str] | Writing) -> Writing:
    return target if isinstance(target, Writing) else Writing(Path(target))


def extension(path: Path) -> str:
    name = path.name.lower()
    last = ".nii.gz" if name.endswith(".nii.gz") and name != ".nii.gz" else path.suffix.lower()
    return last if last in EXTENSIONS or last in STACKS else ""


def format_of(path: Path) -> str:
    return (EXTENSIONS | STACKS).get(extension(path), "")


def installed(extra: str, package: str, modules: str, path: Path, *, otherwise: str = "") -> Any:
    try:
        first, *_ = map(import_module, modules.split())
    except ImportError as error:
        remedy = install_command(extra) + otherwise.format(path=path)
        raise FileFormatError(f"{path}: needs {package}, which is not installed; {remedy}") from error
    return first


def most_for(path: Path) -> float:
    return min(memory_limit(), 8 * (_FLOOR + _MOST * size_of(path)))


def check_declared(path: Path, declared: int, stored: int, *, copies: int = 1) -> None:
    """Refuse a file whose header asks for more memory than the limit, or for more than its content can unfold to.

    `declared` is the size of the samples in bytes, of which `copies` are held at once. More than 2000 times the bytes
    of the content and 16 MiB raise `FileFormatError`, more than the limit `MemoryLimitError`.
    """
    check_memory(f"{path}: what its header declares", copies * declared, "crop it, or use a machine with more memory")
    if declared > _FLOOR + _MOST * stored:
        got = f"a header that declares {format_bytes(declared)} of samples in a file of {format_bytes(stored)}"
        raise file_error(path, got, "samples that the file can hold", "it is damaged or made to fill memory")


def upright(data: Array, orientation: int) -> Array:
    """Return a view of an image (H, W, ...), stored in this orientation, as people see it."""
    data = data.swapaxes(0, 1) if orientation >= 5 else data
    return _flipped(data, orientation)


def as_stored(data: Array, orientation: int) -> Array:
    """Return a view of an upright image (H, W, ...) as it is stored in this orientation."""
    data = _flipped(data, orientation)
    return data.swapaxes(0, 1) if orientation >= 5 else data


def _flipped(data: Array, orientation: int) -> Array:
    axes = (0,) * (orientation in (3, 4, 7, 8)) + (1,) * (orientation in (2, 3, 6, 7))
    return np.flip(data, axes) if axes else data
