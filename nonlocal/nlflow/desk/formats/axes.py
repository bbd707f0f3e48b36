"""Axes and distances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from nlflow.desk.formats.media import ARRAYS, Array, Kind, Media
from nlflow.errors import FileFormatError, InputError, check_choice, check_integer, check_number, file_error

LETTERS = "TZCYX"
ARTICLES = {"image": "an image", "signal": "a signal", "volume": "a volume", "clip": "a clip"}
_COUNTS = {"T": "frames", "Z": "slices", "C": "channels"}
# How formats call units, and how they are shown; OME-XML and NIfTI know the micrometre under the sign beside.
_UNITS = {
    "micron": "µm", "um": "µm", "\\u00b5m": "µm", "\u03bcm": "µm", "micrometer": "µm", "micrometre": "µm",
    "microns": "µm", "nanometer": "nm", "millimeter": "mm", "meter": "m", "centimeter": "cm", "inch": "in",
    "second": "s", "sec": "s", "millisecond": "ms", "msec": "ms", "microsecond": "µs", "usec": "µs", "minute": "min",
    "hour": "h", "angstrom": "Å", "pixel": "", "pixels": "",
}  # fmt: skip
#: From a short unit to its name in OME-Zarr.
LONG_UNITS = {
    "µm": "micrometer", "nm": "nanometer", "mm": "millimeter", "m": "meter", "cm": "centimeter", "in": "inch",
    "s": "second", "ms": "millisecond", "µs": "microsecond", "min": "minute", "h": "hour", "Å": "angstrom",
}  # fmt: skip
_SATURATED = (2**10 - 1, 2**12 - 1, 2**14 - 1)  # the largest values of cameras whose samples are stored in 16 bits
_METRES = {"nm": 1e-9, "µm": 1e-6, "mm": 1e-3, "cm": 1e-2, "m": 1.0, "Å": 1e-10, "in": 0.0254}
_SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "min": 60.0, "h": 3600.0}


def unit_of(name: object) -> str:
    text = str(name).strip("\0 ") if isinstance(name, str) else ""
    return _UNITS.get(text.lower(), text)


def scale_of(value: object, unit: object = "") -> tuple[float, str] | None:
    try:
        number = float(value)  # type: ignore[arg-type]  # whatever it is: a failure tells
    except (TypeError, ValueError):
        return None
    return (number, unit_of(unit)) if math.isfinite(number) and number > 0 else None


def in_unit(scale: tuple[float, str] | None, unit: str) -> float | None:
    for known in (_METRES, _SECONDS):
        if scale is not None and scale[1] in known and unit in known:
            return scale[0] * (known[scale[1]] / known[unit])
    return None


def _check_axes(axes: str, source: object = None) -> str:
    """Return a user's axes in capital letters, or raise `InputError`."""
    text = axes.upper().replace("S", "C")
    if not text or len(set(text)) != len(text) or set(text) - set(LETTERS):
        raise InputError(
            f"axes: got {axes!r}{f' for {source}' if source else ''}, expected one letter for each axis, each once: T "
            "(time), Z, Y, X, C (channels), such as ZYX, TYX or CZYX; correct it"
        )
    return text


def laid_out(
    media: Media, kind: Kind | None, channel_axis: int | None, axes: str | None, spacing: Sequence[float] | None
) -> Media:
    path = media.path
    if kind is not None:
        check_choice("kind", kind, ("image", "signal"))
    if media.format in ARRAYS and axes is not None:
        if channel_axis is not None or kind is not None:
            word = "kind" if channel_axis is None else "channel_axis"
            raise InputError(f"{word}: got one beside axes={axes!r}, which say it; leave {word} out")
        if len(_check_axes(axes, path)) == 1 or "Y" not in _check_axes(axes, path):
            raise InputError(f"axes: got {axes!r}, expected Y and X among them; leave axes out for a signal")
        media = replace(media, axes="?" * media.data.ndim)
    if media.axes:
        return _settled(media, kind, channel_axis, axes, spacing)
    if axes is not None and spacing is None and _is_slice(media, axes):
        note = f"{path}: one picture only, which is denoised as an image"
        return replace(_with_layout(media, kind, channel_axis), notes=(*media.notes, note))
    for name, value in (("axes", axes), ("spacing", spacing)):
        if value is not None:
            raise InputError(f"{name}: got {value!r}, but {path} is {ARTICLES[media.kind]}, expected a stack; "
                             "leave it out")  # fmt: skip
    return _with_layout(media, kind, channel_axis)


def _settled(
    media: Media, kind: Kind | None, channel_axis: int | None, axes: str | None, spacing: Sequence[float] | None
) -> Media:
    settled = settle(media, axes, spacing)
    own, ndim = settled.channel_axis, settled.data.ndim
    if kind is not None and kind != settled.kind:
        got = f"kind: got {kind!r}, but {media.path} is {ARTICLES[settled.kind]} ({settled.axes})"
        raise InputError(f"{got}; leave kind out")
    if channel_axis is not None and (own is None or channel_axis % ndim != own):
        raise InputError(f"channel_axis: got {channel_axis}, but {media.path} is {settled.axes}; leave it out")
    return settled


def _is_slice(media: Media, axes: str) -> bool:
    """Return whether these axes are those of a volume or a clip of which a picture is the only part."""
    wanted = "YXC" if media.data.ndim == 3 else "YX"
    return media.kind == "image" and "".join(a for a in _check_axes(axes, media.path) if a not in "TZ") == wanted


def _with_layout(media: Media, kind: Kind | None, channel_axis: int | None) -> Media:
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


def settle(media: Media, axes: str | None, spacing: Sequence[float] | None) -> Media:
    """Return a stack whose axes and spacing are known, without axes of one sample.

    The user's `axes` are for all axes in the file or for those of more than one sample.
    """
    found, shape = media.axes, media.data.shape
    named = _named(media, found, shape, axes)
    keep = [a for a, size in enumerate(shape) if size > 1 or named[a] in "YX"]
    used = "".join(named[a] for a in keep)
    if "?" in used:
        raise InputError(_question(media, used, [shape[a] for a in keep]))
    if not {"Y", "X"} <= set(used):
        raise InputError(f"axes: got {used} for {media.path}, expected Y and X among them; correct it")
    data = media.data.reshape([shape[a] for a in keep])
    kind: Kind = "volume" if "Z" in used else "clip" if "T" in used else "image"
    settled = replace(
        media, kind=kind, data=data, axes=used, channel_axis=used.index("C") if "C" in used else None,
        stored_axes=named, stored_shape=shape, bits=media.bits,
    )  # fmt: skip
    if kind == "image" and spacing is not None:
        raise InputError(f"spacing: got {list(spacing)}, but {media.path} is an image, expected a stack; leave it out")
    notes = [_told(settled)]
    if kind == "image" and set(named) & set("ZT"):
        what = "slice" if "Z" in named else "frame"
        notes.append(f"{media.path}: one {what} only, which is denoised as an image")
    settled = replace(settled, spacing=_spacing(settled, spacing, notes), bits=_bits(settled, notes))
    if "T" in used and "Z" in used:
        notes.append(f"{media.path}: each of the {data.shape[used.index('T')]} times is a volume, denoised on its own")
    return replace(settled, notes=(*media.notes, *notes))


def in_blocks(media: Media, spacing: Sequence[float] | None) -> Media:
    """Return a stack whose axes are known with its spacing and notes; no sample is looked at, as `settle` does."""
    kind: Kind = "volume" if "Z" in media.axes else "clip" if "T" in media.axes else "image"
    known = replace(media, kind=kind)
    notes = [_told(known)]
    found = _spacing(known, None, notes) if spacing is None else None
    return replace(known, spacing=found, notes=tuple(notes))


def _named(media: Media, found: str, shape: tuple[int, ...], axes: str | None) -> str:
    if axes is None:
        return found
    given = _check_axes(axes, media.path)
    large = [a for a, size in enumerate(shape) if size > 1 or found[a] in "YX"]
    places = list(range(len(shape))) if len(given) == len(shape) else large
    if len(given) != len(places):
        sizes = " x ".join(map(str, shape))
        raise InputError(f"axes: got {axes!r} for {media.path} of {sizes}, expected {len(large)} letters; correct it")
    named = list(found)
    for letter, place in zip(given, places, strict=True):
        if found[place] not in ("?", letter):
            said = "".join(found[a] for a in large).replace("?", "_")
            sizes = " x ".join(str(shape[a]) for a in large)
            raise InputError(
                f"axes: got {axes!r}, but {media.path} says {said} of {sizes}; leave axes out, or correct what the "
                "file says"
            )
        named[place] = letter
    return "".join(named)


def _question(media: Media, used: str, sizes: list[int]) -> str:
    count = sizes[used.index("?")]
    rest = used.replace("?", "", 1)
    examples = f"--axes {used.replace('?', 'Z', 1)} for slices of a volume, {used.replace('?', 'T', 1)} for frames"
    if "?" in rest:
        examples = "for example --axes TZYX" if len(used) == 4 else f"--axes with {len(used)} letters"
    pages = f"{count} pages" if media.format == "tiff" and "?" not in rest else f"axes of {' x '.join(map(str, sizes))}"
    return f"axes: got None for {media.path}, which does not say what its {pages} are; give {examples}"


def _told(media: Media) -> str:
    axes, sizes = media.axes, dict(zip(media.axes, media.data.shape, strict=True))
    names = _COUNTS | ({"T": "times"} if "Z" in axes else {})
    counts = [f"{sizes[a]} {names[a]}" for a in axes if a in names]
    place = f"{sizes['Y']} x {sizes['X']}"
    text = f"{media.path}: read as {axes}, {', '.join(counts)} of {place}" if counts else f"{media.path}: {place}"
    known = [media.scale.get(a) for a in axes if a in "ZYX"]
    if known and all(known):
        units = {scale[1] for scale in known if scale}
        numbers = " x ".join(f"{scale[0]:.4g}" + (f" {scale[1]}" if len(units) > 1 else "") for scale in known if scale)
        text += f", {numbers} {next(iter(units))}".rstrip() if len(units) == 1 else f", {numbers}"
    if "T" in axes and "T" in media.scale:
        step, unit = media.scale["T"]
        text += f", {1 / step:.6g} frames a second" if unit == "s" and media.kind == "clip" else f", {step:.4g} {unit}"
        text += "" if unit == "s" and media.kind == "clip" else " between times"
    return text.rstrip()


def _bits(media: Media, notes: list[str]) -> int | None:
    """Return how many bits of unsigned integers are used, by the file or by its saturated samples; a note says so."""
    dtype = media.data.dtype
    if dtype.kind != "u":
        return None
    bits, source = media.bits, "says so"
    if bits is None and dtype == np.uint16:
        largest = int(media.data.max())
        bits = largest.bit_length() if largest in _SATURATED else None
        source = f"its largest value is {largest}"
    if bits is None or bits >= 8 * dtype.itemsize:
        return None
    notes.append(f"{media.path}: {bits} of {8 * dtype.itemsize} bits are used ({source}); results stay from 0 to "
                 f"{2**bits - 1}")  # fmt: skip
    return bits


def _spacing(media: Media, given: Sequence[float] | None, notes: list[str]) -> tuple[float, ...] | None:
    places = [a for a in media.axes if a != "C"]
    run = [a for a in places if not (a == "T" and "Z" in places)]
    if given is not None:
        numbers = tuple(check_number("spacing", value, minimum=0, strict=True) for value in given)
        if len(numbers) not in (len(places), len(run)):
            raise InputError(
                f"spacing: got {len(numbers)} number(s) for {media.path}, expected {len(run)}, one for each of "
                f"{', '.join(run)}; correct it"
            )
        return numbers if len(numbers) == len(run) else tuple(
            n for a, n in zip(places, numbers, strict=True) if a in run)  # fmt: skip
    if media.kind != "volume":
        return None  # a distance in time is none in space
    known = [media.scale.get(a) for a in run]
    found = [scale for scale in known if scale is not None]
    if len(found) == len(run):
        metres = [in_unit(scale, "m") for scale in found]
        if len({unit for _, unit in found}) == 1:
            return tuple(value for value, _ in found)
        if all(metres):
            return tuple(value for value in metres if value)
    notes.append(
        f"{media.path}: does not say how far apart its slices are; taken to be as far apart as its pixels "
        "(--axes :3,1,1 says otherwise)"
    )
    return None


def arranged(values: Array, axes: str, wanted: str) -> Array:
    lost = [a for a, size in zip(axes, values.shape, strict=True) if a not in wanted and size > 1]
    if lost:
        raise FileFormatError(f"axes: got {axes} to write as {wanted}, which has no {', '.join(lost)}; write .npy")
    kept = [place for place, a in enumerate(axes) if a in wanted]
    letters = [axes[place] for place in kept]
    part = values.reshape([values.shape[place] for place in kept])
    part = part.transpose([letters.index(a) for a in wanted if a in letters])
    sizes = dict(zip(letters, [values.shape[place] for place in kept], strict=True))
    return part.reshape([sizes.get(a, 1) for a in wanted])


# ---- one picture of a stack


def words_of(media: Media) -> dict[str, Any]:
    if not media.stacked:
        return {"channel_axis": media.channel_axis}
    axes = media.axes.replace("T", "") if "Z" in media.axes else media.axes
    return {"axes": axes} | ({} if media.spacing is None else {"spacing": media.spacing})


def through(media: Media, *, channels: bool = False) -> int:
    axes = media.axes if channels else media.axes.replace("C", "")
    return axes.index("T" if "T" in axes else "Z")


def plane_channels(media: Media) -> int | None:
    axes = media.axes.replace("T", "").replace("Z", "")
    return axes.index("C") if "C" in axes else None


def plane(values: Array, media: Media, at: int | None = None) -> Array:
    axes = media.axes if values.ndim == len(media.axes) else media.axes.replace("C", "")
    for letter in "TZ":
        if letter in axes:
            place = axes.index(letter)
            values = values.take(values.shape[place] // 2 if at is None else at, axis=place)
            axes = axes.replace(letter, "")
    return values
