"""Reading and writing of images and signals.

A file is read into a `Media`: the samples in the dtype of the file, and everything that is needed to write a result in
the same way. Nothing is rescaled, so numbers stay in the file's own units (0 to 255 in an 8-bit image, raw samples in
a WAV file). Whatever cannot be kept is either refused, with the remedy, or told in a note. Outputs appear complete or
not at all.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.domains.samples import rounded
from nlflow.errors import InputError, NlflowError, check_choice, check_integer
from nlflow.io.atomic import write_atomic
from nlflow.io.formats import FORMATS, left_out
from nlflow.io.formats.media import EXTENSIONS, Array, FirstColumn, Kind, Media, as_stored, file_error, upright
from nlflow.io.formats.tables import decode_csv

__all__ = [
    "EXTENSIONS",
    "Array",
    "FirstColumn",
    "Kind",
    "Media",
    "as_stored",
    "check_distinct",
    "check_output",
    "check_target",
    "load",
    "read",
    "upright",
    "write",
    "write_atomic",
]


def _format_of(path: Path) -> str:
    try:
        return EXTENSIONS[path.suffix.lower()]
    except KeyError:
        got = f"the extension {path.suffix!r}" if path.suffix else "a name without extension"
        raise file_error(path, got, f"one of {', '.join(EXTENSIONS)}", "convert the file or rename it") from None


def load(path: str | os.PathLike[str], *, first_column: FirstColumn | None = None) -> Media:
    """Read a file without settling what the axes of an .npy array are; see `read`.

    Raises
    ------
    FileFormatError
        If the file is missing, empty, damaged, of an unknown format, or holds what cannot be read without loss.
    """
    path = Path(path)
    form = _format_of(path)
    expected = f"a readable {form.upper()} file"
    if not path.exists():
        raise file_error(path, "no such file", expected, "check the name and the folder")
    if not path.is_file():
        raise file_error(path, "a folder" if path.is_dir() else "no regular file", expected, "name the file itself")
    if path.stat().st_size == 0:
        raise file_error(path, "an empty file", expected, "copy or export it again")
    try:
        path.open("rb").close()
    except OSError as error:
        raise file_error(path, f"{error.strerror}", expected, "check its permissions") from error
    try:
        with warnings.catch_warnings():  # decoders warn about odd metadata; lost samples are errors in every one
            warnings.simplefilter("ignore")
            media = FORMATS[form].decode(path) if form != "csv" else decode_csv(path, first_column)
    except NlflowError:
        raise
    except MemoryError as error:
        raise file_error(path, "more samples than memory can hold", expected, "crop or downsample it") from error
    except Exception as error:  # a damaged file makes decoders fail in any way: IndexError, struct.error, zlib.error
        got = f"a damaged or foreign file ({str(error) or type(error).__name__})"
        raise file_error(path, got, expected, "copy or export it again") from error
    data = media.data
    if data.dtype.kind not in "biuf":
        raise file_error(path, f"values of type {data.dtype}", "real numbers", "convert them, e.g. with astype or abs")
    if data.size == 0:
        raise file_error(path, f"an empty array of shape {data.shape}", "at least one sample", "export it again")
    if not data.dtype.isnative:
        media = replace(media, data=data.astype(data.dtype.newbyteorder("=")))
    return media


def read(
    path: str | os.PathLike[str],
    *,
    kind: Kind | None = None,
    channel_axis: int | None = None,
    first_column: FirstColumn | None = None,
) -> Media:
    """Read an image or a signal.

    Parameters
    ----------
    path : str or PathLike
        A PNG, JPEG, TIFF, NPY, WAV or CSV file; the extension decides.
    kind : {"image", "signal"}, optional
        Needed for a two-dimensional .npy array that is a signal (N, C); otherwise the file decides.
    channel_axis : int, optional
        Axis of the channels in an .npy array. By default the last one if the array is three-dimensional with 2 to 4
        entries there, and none otherwise.
    first_column : {"keep", "denoise"}, optional
        What becomes of the first of several columns in a CSV file. By default it is kept if its name is one of times,
        or if it is strictly monotone.

    Returns
    -------
    Media
        The samples as they are stored (a photograph is not turned) and what is needed to write them back; its
        ``notes`` tell the conversions that were made.

    Raises
    ------
    FileFormatError
        If the file is missing, empty, damaged, of an unknown format, or holds what cannot be read without loss.
    InputError
        If `kind` or `channel_axis` do not fit the file.
    """
    if kind is not None:
        check_choice("kind", kind, ("image", "signal"))
    if first_column is not None:
        check_choice("first_column", first_column, ("keep", "denoise"))
    media = load(path, first_column=first_column)
    if first_column is not None and media.format != "csv":
        raise InputError(f"first_column: got {first_column!r} for {path}, expected a CSV table; leave it out")
    return _with_layout(media, kind, channel_axis)


def _with_layout(media: Media, kind: Kind | None, channel_axis: int | None) -> Media:
    """Return `media` with kind and channel axis settled, or raise `InputError`."""
    ndim, shape = media.data.ndim, media.data.shape
    what = f"{media.path} with shape {shape}"
    axis = None if channel_axis is None else check_integer("channel_axis", channel_axis, minimum=-ndim)
    if axis is not None and axis >= ndim:
        raise InputError(f"channel_axis: got {axis}, expected {-ndim} to {ndim - 1} for {what}")
    axis = axis + ndim if axis is not None and axis < 0 else axis
    if media.format != "npy":
        own = ndim - 1 if ndim == (3 if media.kind == "image" else 2) else None
        if kind not in (None, media.kind):
            raise InputError(f"kind: got {kind!r}, expected {media.kind!r} for {what}; leave kind out")
        if axis not in (None, own):
            found = "no channels" if own is None else f"its channels on axis {own}"
            raise InputError(f"channel_axis: got {channel_axis}, but {what} has {found}; leave channel_axis out")
        return replace(media, channel_axis=own)
    if ndim not in (1, 2, 3):
        remedy = "save its parts one by one"
        raise file_error(media.path, f"an array of shape {shape}", "one to three dimensions", remedy)
    if ndim == 3 and axis is None:
        if kind != "signal" and not 2 <= shape[2] <= 4:
            remedy = "give it, or save one image per file"
            raise InputError(f"channel_axis: got None, expected the axis of the channels for {what}; {remedy}")
        axis = 2
    if ndim == 2 and axis is None and kind == "signal":
        axis = 1
    spatial = ndim - (axis is not None)
    found_kind: Kind = "image" if spatial == 2 else "signal"
    if spatial == 0 or kind not in (None, found_kind):
        raise InputError(
            f"kind: got {kind!r} with channel_axis={channel_axis} for {what}, expected a signal (N,) or (N, C) or an "
            "image (H, W) or (H, W, C); correct kind or channel_axis, or reshape the array"
        )
    return replace(media, kind=found_kind, channel_axis=axis)


def check_target(path: str | os.PathLike[str]) -> None:
    """Check that a file can be created or replaced; nothing is written.

    Raises
    ------
    FileFormatError
        If the folder is missing or not writable, or if `path` is a folder, a device or a write-protected file.
    """
    path = Path(path)
    expected = "a file that can be written"
    if path.is_dir():
        raise file_error(path, "a folder", expected, "add a file name")
    if path.exists() and not path.is_file():
        raise file_error(path, "no regular file", expected, "choose another name")
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        raise file_error(path, f"the folder {folder}, which does not exist", expected, "create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise file_error(path, f"the folder {folder} without write permission", expected, "choose another folder")
    if path.exists() and not os.access(path, os.W_OK):
        raise file_error(path, "a write-protected file", expected, "choose another name or change its permissions")


def check_distinct(sources: Mapping[str, Path | None], targets: Mapping[str, Path | None]) -> None:
    """Refuse outputs that would replace an input or each other.

    Parameters
    ----------
    sources, targets : mapping of str to Path or None
        Inputs and outputs by the names that the message gives them.

    Raises
    ------
    InputError
        If an output is the same file as an input or as another output, links followed.
    """
    seen = {key: name for name, path in sources.items() if path is not None for key in _identity(path)}
    for name, path in targets.items():
        for key in () if path is None else _identity(path):
            if key in seen:
                other = seen[key]
                raise InputError(f"{name}: got {path}, the same file as {other}, expected another; choose a new name")
        if path is not None:
            seen |= dict.fromkeys(_identity(path), name)


def _identity(path: Path) -> list[object]:
    """Return what tells a file from others: its place, and its number on the disk if it is there."""
    try:
        found = path.stat()
    except OSError:
        return [os.path.realpath(path)]
    return [os.path.realpath(path), (found.st_dev, found.st_ino)]


def check_output(path: str | os.PathLike[str], media: Media) -> tuple[str, ...]:
    """Check, before any work, that a result for `media` can be written to `path`; nothing is written.

    Parameters
    ----------
    path : str or PathLike
        The output; its extension decides the format.
    media : Media
        The input that the result belongs to.

    Returns
    -------
    tuple of str
        A note for the user of what the output's format has no place for (the names of columns in an .npy file, say).

    Raises
    ------
    FileFormatError
        If the extension is unknown, the format cannot hold the result, or the file cannot be created.
    """
    path = Path(path)
    form = _format_of(path)
    check_target(path)
    dtype = media.data.dtype
    count = 1 if media.channel_axis is None else media.data.shape[media.channel_axis]
    got, instead = "", ".tif or .npy"
    kind, dtypes = FORMATS[form].kind, FORMATS[form].dtypes
    if kind not in (None, media.kind):
        got = "an image" if media.kind == "image" else "a signal"
        instead = ".png, .tif or .npy" if media.kind == "image" else ".wav, .csv or .npy"
    elif dtypes and dtype.str[1:] not in dtypes.split():
        got = f"{dtype} samples"
        instead = ".npy or .csv" if kind == "signal" else ".npy" if form == "tiff" else instead
    elif form in ("png", "jpeg") and count not in (1, 3):
        got = f"{count} channels"
    elif form == "png" and dtype == np.uint16 and (count == 3 or media.alpha is not None):
        got = "16-bit colour or alpha"
    elif form == "jpeg" and media.alpha is not None:
        got, instead = "an alpha channel", ".png or .tif"
    elif form == "wav" and media.sample_rate is None:
        got, instead = f"a signal without sample rate (from {media.format.upper()})", ".npy or .csv"
    if got:
        expected = f"what {form.upper()} files can hold"
        raise file_error(path, f"{got} to write", expected, f"name the output {instead}")
    names = left_out(form, media)
    if not names:
        return ()
    several = len(names) > 1 or names[0].endswith("s")
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return (f"{path}: {listed} {'are' if several else 'is'} left out",)


def _stored(data: Array, dtype: np.dtype[Any], form: str) -> Array:
    """Return `data` in the dtype of the output: rounded and clipped, never wrapped, where that is an integer."""
    if form in ("npy", "csv"):
        return data.astype(np.float32 if dtype in (np.float16, np.float32) else np.float64)
    if dtype.kind not in "iu":
        return data.astype(dtype)
    if not np.isfinite(data).all():
        raise InputError(f"data: got NaN or infinite values, expected finite ones to store as {dtype}; write .npy")
    return rounded(data, dtype)


def write(path: str | os.PathLike[str], data: Array, media: Media) -> None:
    """Write a result in the way its input is stored.

    Integers are rounded and clipped to the range of the input's dtype. NPY and CSV files keep the precision of the
    result: float32 for an input of half or single precision, float64 otherwise. What came with the samples (opacity,
    orientation, EXIF block, colour profile, resolution, sample rate, column names, a first column) is written back. The
    file appears complete or not at all; see `write_atomic`.

    Parameters
    ----------
    path : str or PathLike
        The output; its extension decides the format.
    data : numpy.ndarray
        The result in the file's own units, of the same shape as ``media.data``.
    media : Media
        The input that the result belongs to.

    Raises
    ------
    FileFormatError
        As in `check_output`, or if the file cannot be written.
    InputError
        If `data` has another shape than the input, or non-finite values that an integer format cannot hold.
    """
    path = Path(path)
    check_output(path, media)
    data = np.asarray(data)
    if data.shape != media.data.shape:
        raise InputError(f"data: got shape {data.shape}, expected {media.data.shape} as in {media.path}")
    form = _format_of(path)
    values = _stored(data, media.data.dtype, form)
    if media.channel_axis is not None and form != "npy":
        values = np.ascontiguousarray(np.moveaxis(values, media.channel_axis, -1))
    try:
        write_atomic(path, lambda stream: FORMATS[form].encode(stream, values, media))
    except NlflowError:
        raise
    except Exception as error:  # encoders refuse odd metadata in many ways
        raise file_error(path, f"an encoder failure ({error})", f"a {form.upper()} file", "write .npy") from error
