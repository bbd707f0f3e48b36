"""NIfTI files."""

from __future__ import annotations

import gzip
import math
import struct
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from nlflow.desk.formats.axes import arranged, in_unit, scale_of
from nlflow.desk.formats.media import Array, Media, Writing, check_declared, installed
from nlflow.desk.formats.tiff_pages import silent
from nlflow.domains.samples import rounded
from nlflow.errors import FileFormatError, InputError, file_error

_LONGEST = 2**26  # bytes of a header with its extensions
_COLOURS = np.dtype([("R", "u1"), ("G", "u1"), ("B", "u1")])
_UNITS = {"meter": "m", "mm": "mm", "micron": "µm", "sec": "s", "msec": "ms", "usec": "µs"}
_DTYPES = ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f4", "f8")


_need_nibabel = partial(installed, "volumes", "nibabel", "nibabel")


def decode(path: Path) -> Media:
    nibabel = _need_nibabel(path)
    _check_header(path)
    with silent("nibabel.global"):
        image = nibabel.load(path)
        if not isinstance(image, nibabel.Nifti1Image):  # that of NIfTI-2 is one
            raise file_error(path, f"a file of the kind {type(image).__name__}", "NIfTI", "convert it")
        header, proxy = image.header, image.dataobj
        shape = tuple(map(int, proxy.shape))
        raw = header.get_data_dtype()
        check_declared(path, math.prod(shape) * max(raw.itemsize, 4), path.stat().st_size, copies=2)
        stored = np.asanyarray(proxy.get_unscaled())
    slope, inter = float(proxy.slope), float(proxy.inter)
    notes = []
    if stored.dtype == _COLOURS:
        stored = np.ascontiguousarray(stored).view(np.uint8).reshape(*shape, 3)
        axes = "XYZT"[: len(shape)] + "C"
    else:
        axes = _axes(path, shape)
    if (slope, inter) == (1.0, 0.0):
        data = stored
    elif stored.dtype.kind not in "iuf":
        raise file_error(path, f"scaled values of type {stored.dtype}", "real numbers", "convert them")
    else:
        precision = np.float32 if stored.dtype.itemsize <= 2 or stored.dtype == np.float32 else np.float64
        data = (stored * np.float64(slope) + inter).astype(precision)
        notes.append(f"{path}: values are {slope:g} times the {stored.dtype} numbers of the file"
                     + (f" plus {inter:g}" if inter else "") + "; NIfTI results are written so too")  # fmt: skip
    extras = {"nifti": {"image": type(image), "header": header.copy(), "affine": image.affine, "slope": slope,
                        "inter": inter, "dtype": raw, "shape": shape}}  # fmt: skip
    turned = axes[::-1] if not axes.endswith("C") or len(axes) == 5 else axes[-2::-1] + "C"
    data = data.transpose([axes.index(a) for a in turned])
    scale = _scale(header, shape)
    return Media(path, "nifti", "volume", data, extras=extras, notes=tuple(notes), axes=turned, scale=scale)


def upward(affine: Array) -> str:
    columns = {a: affine[:3, k] for k, a in enumerate("XYZ")}
    main = {a: int(np.abs(column).argmax()) for a, column in columns.items()}
    return "".join(a for a, column in columns.items() if main[a] > 0 and column[main[a]] > 0)


def _axes(path: Path, shape: tuple[int, ...]) -> str:
    """Return the axes of a file in its own order; the fifth dimension holds the values of a vector."""
    if len(shape) < 2:
        raise file_error(path, f"an array of shape {shape}", "a volume", "save it as .npy")
    if len(shape) > 5 and max(shape[5:]) > 1:
        got = f"{len(shape)} dimensions"
        raise file_error(path, got, "X, Y, Z, T and the values of a vector", "save its parts one by one")
    return "XYZTC"[: len(shape)] + "?" * max(0, len(shape) - 5)


def _check_header(path: Path) -> None:
    """Refuse the header of a pair of files, and one that tells of extensions beyond all measure."""
    with path.open("rb") as plain:
        stream: Any = gzip.GzipFile(fileobj=plain) if path.suffix.lower() == ".gz" else plain
        head = stream.read(348)
    if head[344:347] == b"ni1" or head[4:7] == b"ni2":
        got = "the header of a pair of files, whose samples are in another one (.img)"
        raise file_error(path, got, "one file with both", "convert it to .nii")
    for order in "<>":
        if len(head) >= 112 and struct.unpack(f"{order}i", head[:4])[0] == 348:
            place = struct.unpack(f"{order}f", head[108:112])[0]
        elif len(head) >= 176 and struct.unpack(f"{order}i", head[:4])[0] == 540:
            place = struct.unpack(f"{order}q", head[168:176])[0]
        else:
            continue
        if not 0 <= place <= _LONGEST:
            raise file_error(path, f"a header of {place:g} bytes", "a whole file", "copy or export it again")
        return
    raise file_error(path, "content that is no NIfTI file", "a NIfTI file", "copy or export it again")


def _scale(header: Any, shape: tuple[int, ...]) -> dict[str, tuple[float, str]]:
    """Return the size of voxels; of a file that names no unit too, since its numbers compare."""
    try:
        space, time = header.get_xyzt_units()
    except (KeyError, ValueError):
        space = time = "unknown"
    sizes = header.get_zooms()
    found = {}
    for letter, size in zip("XYZT", sizes, strict=False):
        unit = _UNITS.get(time if letter == "T" else space, "")
        value = scale_of(size, unit)
        if value is not None and (letter != "T" or unit):
            found[letter] = value
    return found


def check(media: Media, writing: Writing) -> str:
    """See `Format.check`."""
    _need_nibabel(writing.path)
    count = 1 if media.channel_axis is None else media.data.shape[media.channel_axis]
    return f"{count} channels and no slices" if count > 1 and media.kind != "volume" and count != 3 else ""


def encode(stream: BinaryIO, values: Array, media: Media, writing: Writing) -> None:
    """See `Format.encode`."""
    import nibabel

    own = media.extras.get("nifti")
    if own is None:
        image = _anew(nibabel, values, media)
    else:
        colours = own["dtype"] == _COLOURS
        axes = "XYZTC"[: len(own["shape"])] if not colours else "XYZT"[: len(own["shape"])] + "C"
        data = arranged(values, media.axes, axes)
        if colours:
            data = np.ascontiguousarray(np.clip(np.rint(data), 0, 255).astype(np.uint8)).view(_COLOURS)[..., 0]
        elif (own["slope"], own["inter"]) != (1.0, 0.0):
            data = _unscaled(data, own)
        data = data.reshape(own["shape"]).astype(own["dtype"], copy=False)
        header = own["header"].copy()
        header.set_data_dtype(own["dtype"])
        header.set_slope_inter(own["slope"], own["inter"])  # so that numbers are stored as they are
        image = own["image"](data, own["affine"], header, dtype=own["dtype"])
        image.header.set_slope_inter(own["slope"], own["inter"])
    if writing.name.endswith(".gz"):
        # No time and no name inside: the same result makes the same file.
        with gzip.GzipFile("", "wb", 6, stream, mtime=0) as packed:
            image.to_stream(packed)
    else:
        image.to_stream(stream)


def _unscaled(data: Array, own: dict[str, Any]) -> Array:
    """Return values as the numbers of which the slope and the intercept of a file make them."""
    numbers: Array = (data.astype(np.float64) - own["inter"]) / own["slope"]
    if own["dtype"].kind not in "iu":
        return numbers
    if not np.isfinite(numbers).all():
        raise InputError(f"data: got NaN or infinite values, expected finite ones to store as {own['dtype']}")
    return rounded(numbers, own["dtype"])


def _anew(nibabel: Any, values: Array, media: Media) -> Any:
    """Return the image of a stack that comes from another format: sizes of voxels, no place in a scanner."""
    if values.dtype.str[1:] not in _DTYPES:
        raise FileFormatError(f"data: NIfTI files cannot hold {values.dtype} samples; write .npy")
    colours = media.channel_axis is not None and media.data.shape[media.channel_axis] == 3 and values.dtype == np.uint8
    axes = "XYZTC" if media.channel_axis is not None else "XYZT" if "T" in media.axes else "XYZ"
    data = arranged(values, media.axes, axes)
    if colours:
        data = np.ascontiguousarray(data).view(_COLOURS)[..., 0]
        data = data if "T" in media.axes else data[..., 0]
    small = media.scale.get("X", (1.0, ""))[1] in ("µm", "nm", "Å")
    unit, name = ("µm", "micron") if small else ("mm", "mm")
    known = {letter: in_unit(media.scale.get(letter), unit) for letter in "XYZ"}
    sizes = [known[a] or media.scale.get(a, (1.0, ""))[0] for a in "XYZ"]
    kind = nibabel.Nifti2Image if max(data.shape) > 2**15 - 1 else nibabel.Nifti1Image
    image = kind(data, np.diag([*sizes, 1.0]), dtype=data.dtype)
    seconds = in_unit(media.scale.get("T"), "s")
    image.header.set_xyzt_units(name if known["X"] and known["Y"] else None, "sec" if seconds else None)
    if data.ndim > 3:
        image.header.set_zooms([*sizes, seconds or 1.0, *[1.0] * (data.ndim - 4)])
    return image
