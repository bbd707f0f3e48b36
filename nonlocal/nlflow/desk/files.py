"""Reading and writing of images and signals.

A file is read into a `Media`: the samples in the dtype of the file, and everything that is needed to write a result in
the same way. Nothing is rescaled, so numbers stay in the file's own units (0 to 255 in an 8-bit image, raw samples in
a WAV file). Whatever cannot be kept is either refused, with the remedy, or told in a note. Outputs appear complete or
not at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from nlflow.desk.formats import FORMATS, left_out, ngff, tiff
from nlflow.desk.formats.axes import check_axes, settle
from nlflow.desk.formats.media import (
    ARRAYS,
    EXTENSIONS,
    STACKS,
    Array,
    FirstColumn,
    Kind,
    Media,
    as_stored,
    extension,
    format_of,
    upright,
)
from nlflow.desk.frames import check_frames, load_frames, pictures_in, write_frames
from nlflow.desk.loading import known_format, load
from nlflow.domains.samples import rounded
from nlflow.errors import FileFormatError, InputError, NlflowError, check_choice, check_integer, file_error
from nlflow.store.atomic import write_atomic, write_folder

__all__ = [
    "EXTENSIONS",
    "STACKS",
    "Array",
    "FirstColumn",
    "Kind",
    "Media",
    "as_stored",
    "check_distinct",
    "check_output",
    "check_target",
    "extension",
    "format_of",
    "is_stack",
    "load",
    "pictures_in",
    "read",
    "read_kind",
    "upright",
    "write",
    "write_atomic",
]

_PILLOW = ("png", "jpeg", "bmp", "webp")
_ARTICLES = {"image": "an image", "signal": "a signal", "volume": "a volume", "clip": "a clip"}


def read(
    path: str | os.PathLike[str],
    *,
    kind: Kind | None = None,
    channel_axis: int | None = None,
    first_column: FirstColumn | None = None,
    axes: str | None = None,
    spacing: Sequence[float] | None = None,
    array: str | None = None,
) -> Media:
    """Read an image, a signal or a stack.

    Parameters
    ----------
    path : str or PathLike
        A file of one of `EXTENSIONS` or `STACKS`; its content decides, and where that does not tell, its extension.
        With `axes`, a folder of pictures that are the frames of one clip, or the slices of one volume, in the order of
        their names.
    kind : {"image", "signal"}, optional
        Needed for a two-dimensional array that is a signal (N, C); otherwise the file decides.
    channel_axis : int, optional
        Axis of the channels in an array (NPY, NPZ, MAT, HDF5). By default the last one if the array is
        three-dimensional with 2 to 4 entries there, and none otherwise.
    first_column : {"keep", "denoise"}, optional
        What becomes of the first of several columns in a CSV file. By default it is kept if its name is one of times,
        or if it is strictly monotone.
    axes : str, optional
        Which axis of a stack is which, where the file does not say it: one letter for each (T, Z, C, Y, X).
    spacing : sequence of float, optional
        How far apart the samples of a stack are, in the place of what the file says: one number for each axis but C.
    array : str, optional
        Which array of an NPZ, MAT or HDF5 file (its path in that) is meant, where there are several.

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
        If `kind`, `channel_axis`, `axes`, `spacing` or `array` do not fit the file, or if nobody says what an axis is.
    """
    if kind is not None:
        check_choice("kind", kind, ("image", "signal"))
    if first_column is not None:
        check_choice("first_column", first_column, ("keep", "denoise"))
    path = Path(path)
    if axes is not None and path.is_dir() and not format_of(path):
        media = load_frames(path, pictures_in(path))
    else:
        media = load(path, first_column=first_column, array=array)
    if first_column is not None and media.format != "csv":
        raise InputError(f"first_column: got {first_column!r} for {path}, expected a CSV table; leave it out")
    if media.format in ARRAYS and axes is not None:
        if channel_axis is not None or kind is not None:
            word = "kind" if channel_axis is None else "channel_axis"
            raise InputError(f"{word}: got one beside axes={axes!r}, which say it; leave {word} out")
        if len(check_axes(axes, path)) == 1 or "Y" not in check_axes(axes, path):
            raise InputError(f"axes: got {axes!r}, expected Y and X among them; leave axes out for a signal")
        media = replace(media, axes="?" * media.data.ndim)
    if media.axes:
        return _settled(media, kind, channel_axis, axes, spacing)
    if axes is not None and spacing is None and _is_slice(media, axes):
        note = f"{path}: one picture only, which is denoised as an image"
        return replace(_with_layout(media, kind, channel_axis), notes=(*media.notes, note))
    for name, value in (("axes", axes), ("spacing", spacing)):
        if value is not None:
            raise InputError(f"{name}: got {value!r}, but {path} is {_ARTICLES[media.kind]}, expected a stack; "
                             "leave it out")  # fmt: skip
    return _with_layout(media, kind, channel_axis)


def is_stack(path: Path) -> bool:
    """Return whether a name is that of a stack: a video, NIfTI, a group of OME-Zarr, a TIFF file of many pages."""
    form = format_of(path)
    if form == "zarr":
        return ngff.is_group(path)
    return form in ("nifti", "video") or (form == "tiff" and path.is_file() and tiff.is_stack(path))


def read_kind(path: Path) -> Kind:
    """Return what a file holds."""
    return load(path).kind


def _settled(
    media: Media, kind: Kind | None, channel_axis: int | None, axes: str | None, spacing: Sequence[float] | None
) -> Media:
    """Return a stack with all its axes settled."""
    settled = settle(media, axes, spacing)
    own, ndim = settled.channel_axis, settled.data.ndim
    if kind is not None and kind != settled.kind:
        got = f"kind: got {kind!r}, but {media.path} is {_ARTICLES[settled.kind]} ({settled.axes})"
        raise InputError(f"{got}; leave kind out")
    if channel_axis is not None and (own is None or channel_axis % ndim != own):
        raise InputError(f"channel_axis: got {channel_axis}, but {media.path} is {settled.axes}; leave it out")
    return settled


def _is_slice(media: Media, axes: str) -> bool:
    """Return whether these axes are those of a volume or a clip of which a picture is the only part."""
    wanted = "YXC" if media.data.ndim == 3 else "YX"
    return media.kind == "image" and "".join(a for a in check_axes(axes, media.path) if a not in "TZ") == wanted


def _with_layout(media: Media, kind: Kind | None, channel_axis: int | None) -> Media:
    """Return `media` with kind and channel axis settled, or raise `InputError`."""
    ndim, shape = media.data.ndim, media.data.shape
    what = f"{media.path} with shape {shape}"
    axis = None if channel_axis is None else check_integer("channel_axis", channel_axis, minimum=-ndim)
    if axis is not None and axis >= ndim:
        raise InputError(f"channel_axis: got {axis}, expected {-ndim} to {ndim - 1} for {what}")
    axis = axis + ndim if axis is not None and axis < 0 else axis
    if media.format not in ARRAYS:
        own = ndim - 1 if ndim == (3 if media.kind == "image" else 2) else None
        if kind not in (None, media.kind):
            raise InputError(f"kind: got {kind!r}, expected {media.kind!r} for {what}; leave kind out")
        if axis not in (None, own):
            found = "no channels" if own is None else f"its channels on axis {own}"
            raise InputError(f"channel_axis: got {channel_axis}, but {what} has {found}; leave channel_axis out")
        return replace(media, channel_axis=own)
    if ndim not in (1, 2, 3):
        remedy = "say which axis is which (--axes TZYX)" if ndim in (4, 5) else "save its parts one by one"
        raise file_error(media.path, f"an array of shape {shape}", "one to three dimensions, or axes", remedy)
    if ndim == 3 and axis is None:
        if kind != "signal" and not 2 <= shape[2] <= 4:
            remedy = "give it, or for a stack --axes ZYX (slices of a volume) or TYX (frames)"
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
    if media.format == "frames" and not format_of(path):
        check_frames(path, media)
        return ()
    form = known_format(path)
    why, other = FORMATS[form].instead
    if other:
        raise FileFormatError(f"{path}: {why}; name the output {path.stem}{other}, for example")
    media = replace(media, extras={**media.extras, "target": path.name})
    if not FORMATS[form].folder or not path.is_dir():
        check_target(path)
    elif not ngff.is_store(path) or media.path.resolve().is_relative_to(path.resolve()):
        got = "a folder that holds the input" if ngff.is_store(path) else "a folder that is no zarr store"
        raise file_error(path, got, "a new name", "choose another")
    dtype = media.data.dtype
    count = 1 if media.channel_axis is None else media.data.shape[media.channel_axis]
    got, instead = "", ".tif or .npy"
    kinds, dtypes = FORMATS[form].kinds, FORMATS[form].dtypes
    if media.kind not in kinds.split():
        got = _ARTICLES[media.kind]
        instead = {"image": ".png, .tif or .npy", "signal": ".wav, .csv or .npy", "clip": ".mp4, .tif or .npy",
                   "volume": ".tif, .nii, .ome.zarr or .npy"}[media.kind]  # fmt: skip
    elif dtypes and dtype.str[1:] not in dtypes.split():
        got = f"{dtype} samples"
        instead = ".npy or .csv" if kinds == "signal" else ".npy" if form in ("tiff", *ARRAYS) else instead
    elif form in _PILLOW and count not in (1, 3):
        got = f"{count} channels"
    elif form == "png" and dtype == np.uint16 and (count == 3 or media.alpha is not None):
        got = "16-bit colour or alpha"
    elif form in ("jpeg", "bmp") and media.alpha is not None:
        got, instead = "an alpha channel", ".png or .tif"
    elif form == "wav" and media.sample_rate is None:
        got, instead = f"a signal without sample rate (from {media.format.upper()})", ".npy or .csv"
    elif form in STACKS.values() and not media.axes:
        got = _ARTICLES[media.kind]
    else:
        got = FORMATS[form].check(path, media)
    if got:
        raise FileFormatError(f"{path}: {form.upper()} files cannot hold {got}; name the output {instead}")
    names = left_out(form, media)
    told = FORMATS[form].notes(path, media)
    if not names:
        return tuple(told)
    several = len(names) > 1 or names[0].endswith("s")
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
    return (f"{path}: {listed} {'are' if several else 'is'} left out", *told)


def stored(data: Array, dtype: np.dtype[Any], form: str, bits: int | None) -> Array:
    """Return `data` in the dtype of the output: rounded and clipped, never wrapped, where that is an integer."""
    if form in ("npy", "npz", "csv"):
        return data.astype(np.float32 if dtype in (np.float16, np.float32) else np.float64)
    if dtype.kind not in "iu":
        return data.astype(dtype)
    if not np.isfinite(data).all():
        raise InputError(f"data: got NaN or infinite values, expected finite ones to store as {dtype}; write .npy")
    return rounded(data if bits is None else np.clip(data, 0, 2**bits - 1), dtype)


def write(path: str | os.PathLike[str], data: Array, media: Media) -> None:
    """Write a result in the way its input is stored.

    Integers are rounded and clipped to the range of the input's dtype. NPY, NPZ and CSV files keep the precision of the
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
    if media.format == "frames" and not format_of(path):
        write_frames(path, stored(data, media.data.dtype, "", None), media)
        return
    form = known_format(path)
    values = stored(data, media.data.dtype, form, media.bits)
    media = replace(media, extras={**media.extras, "target": path.name})
    if media.axes and form not in _PILLOW:
        if form in ARRAYS and media.format in ARRAYS:
            values = values.reshape(media.stored_shape)
    elif media.channel_axis is not None and form not in ARRAYS:
        values = np.ascontiguousarray(np.moveaxis(values, media.channel_axis, -1))
    write_whole = write_folder if FORMATS[form].folder else write_atomic
    encode = FORMATS[form].encode
    assert encode is not None  # `check_output` has refused a format that is not written
    try:
        write_whole(path, lambda place: encode(place, values, media))
    except NlflowError:
        raise
    except Exception as error:  # encoders refuse odd metadata in many ways
        raise file_error(path, f"an encoder failure ({error})", f"a {form.upper()} file", "write .npy") from error
