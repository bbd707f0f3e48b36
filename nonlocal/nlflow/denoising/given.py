"""An array as an instrument gives it: which of its samples say nothing, and which channels are no signal.

NaN and masked samples are missing, and so are those of a value that stands for "no data". Nobody has asked to fill them
in, so they stay as they are in the result, to the last bit: what a file says of them stays true. Only a mask that is
given fills in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.layout import Axes, shape_of
from nlflow.domains.samples import as_signal
from nlflow.errors import InputError

Array = NDArray[Any]
Mask = NDArray[np.bool_]

TELL_MISSING: Final = "tell with mask which samples are missing"  # ends messages about what is no number
#: Values that programs write where there is no data: GIS (GDAL, ESRI), the CF conventions, netCDF's own.
_SENTINELS: Final = (-9999.0, -99999.0, -32768.0, -3.4028234663852886e38, 3.4028234663852886e38, 1e20,
                     9.969209968386869e36)  # fmt: skip
_LEAST: Final = 9  # samples of one value that make a hole: a square of 3 x 3
_SOME: Final = 2**16  # samples that tell the values of all
_BULK: Final = 0.01  # of the samples at each end, which do not count for a range: a star, a hot pixel
_EMPTY: Final = 8  # a gap is no step of the scale if it is so many times the widest one between other samples
_CONTINUOUS: Final = 0.05  # of samples that repeat: more are rounded, and a value that repeats means nothing
_NEAR: Final = 0.05  # of the ends of phases
_JUMPS: Final = 0.25  # of a side in length: the lines along which phases jump
_AREA: Final = 64  # samples that a label has, on the average
_ALONE: Final = 0.005  # samples amid a hole, of those of the hole; noise that was clipped leaves more


@dataclass(frozen=True)
class Given:
    """An array as samples, and what is told of it."""

    samples: Array  # (..., C), finite; 0 where they are missing
    restore: Callable[[Array], Any]  # from (..., C) to the shape of the input; what says nothing is as it was
    missing: Mask | None = None  # (...)
    opacity: int | None = None  # the channel that is no signal
    told: tuple[str, ...] = ()  # one sentence for each thing that was found
    guessed: str = ""  # what was found from the values alone, and how to say otherwise

    @property
    def signals(self) -> Mask:
        """Which channels are signals."""
        return np.asarray(np.arange(self.samples.shape[-1]) != (-1 if self.opacity is None else self.opacity))


def as_given(image: Any, axes: Axes, mask: Any = None) -> Given:
    """Look at an array: what is missing, asked for by a mask or found, and what stays as it is.

    A mask says all that is missing but for NaN and masked samples. Without one, a value that stands for "no data" is
    looked for. O(N).

    Raises
    ------
    InputError
        As `as_signal`; for infinity; where every sample is missing; and for masks of another shape.
    """
    masked = isinstance(image, np.ma.MaskedArray)
    array = np.asarray(image)
    if array.dtype.kind not in "biuf" or array.size == 0 or not axes.letters:
        return Given(*as_signal(array if masked else image, axes.channel, TELL_MISSING))  # which refuses it
    bad = ~np.isfinite(array) if array.dtype.kind == "f" else np.zeros((), bool)
    asked = _asked(mask, bad, axes)
    nowhere: Mask = np.zeros((), bool)  # nothing of the size of the array where nothing is found
    lost, told = nowhere, []
    if masked and (hidden := np.ma.getmaskarray(image)).any():
        lost = hidden
        told.append(f"{_count(hidden)} masked, and stay as they are")
    if bad.any():
        nan = np.isnan(array) & ~lost
        _refuse_infinite(bad & ~np.isnan(array) & ~lost, asked, axes)
        nan &= ~_everywhere(asked, axes)
        if nan.any():
            lost = lost | nan
            told.append(f"{_count(nan)} NaN, which counts as missing, and stay as they are")
    empty = _empty_channels(lost, axes)
    found = _in_pixels(lost & ~empty, axes)
    guessed, opacity = "", None
    if mask is None:
        at = None if not found.any() else found
        nodata, why = find_nodata(array, axes.channel, at)
        if nodata is not None:
            found = found | nodata
            told.append(f"{_count(nodata)} {why}, which counts as missing, and stay as they are")
            guessed = f"image: {told[-1]}; if it is data, say with mask which samples are missing, if any"
        opacity, clear = _opacity(array, axes)
        if opacity is not None:
            told.append(f"channel {opacity} is an alpha channel, and stays as it is")
            found = found | clear
    missing = found if asked is None else found | asked
    if missing.all():
        raise InputError(_nothing_left(mask, asked, found, axes))
    # Nobody asked to fill in what was found: all channels of such a sample stay as they are.
    stays = found if asked is None else found & ~asked
    zero = lost | _everywhere(missing, axes)
    if not zero.any():
        samples, restore = as_signal(array if masked else image, axes.channel, TELL_MISSING)
        return Given(samples, _with_mask(restore, image, lost), None, opacity, tuple(told), guessed)
    original = array.astype(_precision(array.dtype))
    samples, restore = as_signal(np.where(zero, array.dtype.type(0), array), axes.channel, TELL_MISSING)
    kept = _everywhere(stays, axes) | empty

    def back(u: Array) -> Any:
        result = np.asarray(restore(u))
        return np.where(kept, original.astype(result.dtype, copy=False), result) if kept.any() else result

    whole = _with_mask(back, image, lost & kept)
    return Given(samples, whole, missing if missing.any() else None, opacity, tuple(told), guessed)


def signals_of(
    image: Any, channel_axis: Any = None, axes: str | None = None, mask: Any = None
) -> tuple[Array, Mask | None, tuple[str, ...]]:
    """Return the samples (..., C) of an array that are signals, which are missing, and what is told of it."""
    given = as_given(image, Axes.of(shape_of("image", image), channel_axis, axes), mask)
    refuse_unordered(given.samples, np.asarray(image).dtype, given.missing)
    samples = given.samples if given.opacity is None else given.samples[..., given.signals]
    return samples, given.missing, given.told


def _asked(mask: Any, bad: Mask, axes: Axes) -> Mask | None:
    """Return where a mask says that samples are missing."""
    if mask is None:
        return None
    if not isinstance(mask, str):
        asked = axes.place("mask", mask)
    elif mask == "nan":
        asked = axes.place("mask", np.broadcast_to(bad, axes.shape))
    else:
        raise InputError(f"mask: got {mask!r}, expected booleans, True where a sample is missing, or 'nan'")
    if asked.all():
        raise InputError("mask: hides every sample; leave at least one")
    return asked


def _everywhere(where: Mask | None, axes: Axes) -> Mask:
    """Return a mask of pixels as one that broadcasts to the shape of the array."""
    if where is None or where.ndim == 0:
        return np.zeros((), bool)
    return where if axes.channel is None else np.expand_dims(where, axes.channel)


def _in_pixels(lost: Mask, axes: Axes) -> Mask:
    """Return which pixels a mask of samples touches."""
    return lost if axes.channel is None or lost.ndim == 0 else np.asarray(lost.any(axis=axes.channel))


def _empty_channels(lost: Mask, axes: Axes) -> Mask:
    """Return the channels of several that have no sample at all: they say nothing of the others."""
    if axes.channel is None or not lost.any():
        return np.zeros((), bool)
    others = tuple(axis for axis in range(lost.ndim) if axis != axes.channel)
    empty: Mask = np.asarray(lost.all(axis=others, keepdims=True))
    return np.zeros((), bool) if empty.all() else empty


def _refuse_infinite(infinite: Mask, asked: Mask | None, axes: Axes) -> None:
    left = infinite & ~_everywhere(asked, axes)
    if left.any():
        first = tuple(int(i) for i in np.argwhere(left)[0])
        raise InputError(
            f"image: got {np.count_nonzero(left)} infinite value(s) (the first at index {first}), expected numbers, or "
            "NaN where a sample is missing; replace them (np.where(np.isinf(x), np.nan, x)), or give mask='nan' to "
            "have them filled in"
        )


def _nothing_left(mask: Any, asked: Mask | None, found: Mask, axes: Axes) -> str:
    if asked is not None and asked.any():
        return f"mask: hides every sample that is not missing already ({np.count_nonzero(found)} are NaN or masked); " \
               "leave at least one, or turn the mask round: True is where a sample is missing"  # fmt: skip
    if axes.channel is not None:
        return "image: got no pixel that all of its channels have (NaN or masked), expected at least one; denoise " \
               "each channel by itself (separate=True), or leave out the one that is empty"  # fmt: skip
    return "image: got no sample that is a number (all are NaN or masked), expected at least one"


def _precision(dtype: np.dtype[Any]) -> type[np.floating[Any]]:
    """Return the floats that `as_signal` computes with."""
    narrow = dtype.itemsize <= 2 if dtype.kind in "biu" else dtype.itemsize <= 4
    return np.float32 if narrow else np.float64


def _with_mask(restore: Callable[[Array], Any], image: Any, hidden: Mask) -> Callable[[Array], Any]:
    """Return a way back that makes a masked array of what was one."""
    if not isinstance(image, np.ma.MaskedArray):
        return restore
    return lambda u: np.ma.array(restore(u), mask=hidden if hidden.ndim else False, fill_value=image.fill_value)


def _count(where: Mask) -> str:
    """Return how many samples there are, in words before what they are."""
    count = int(np.count_nonzero(where))
    return f"{count} sample{'s' if count > 1 else ''} ({count / where.size:.2%}) {'are' if count > 1 else 'is'}"


# ---- values that stand for "no data"


def find_nodata(array: Array, channel: int | None, absent: Mask | None = None) -> tuple[Mask | None, str]:
    """Return where samples have a value that stands for "no data", and which it is, in words; None where none has.

    Either an end of the range: it is farther from all other samples than they are from each other, or the scale has a
    wide gap there and nowhere else. Or, among samples that never repeat, the one value that does. In both cases in
    areas, as noise is not; a value that programs write by convention may be alone. O(N).
    """
    pixels = array if channel is None else np.moveaxis(array, channel, -1)
    present = pixels if absent is None else pixels[~absent]
    if array.dtype.kind == "b" or present.size < 2 * _LEAST:
        return None, ""
    some = _some(array if absent is None else present)
    repeated = _repeated(some)
    for value in dict.fromkeys((present.min(), present.max(), *repeated)):
        rest, sentinel = some[some != value], float(value) in _SENTINELS
        # What some samples come near need not be looked for in all.
        if value not in repeated and not _gap(rest, float(value), _next(rest, value), sentinel):
            continue
        at = pixels == value
        at = at if channel is None else at.all(axis=-1)
        at = at if absent is None else at & ~absent
        others = pixels[~at] if absent is None else pixels[~(at | absent)]
        if np.count_nonzero(at) < (1 if sentinel else _LEAST) or others.size < 2 * _LEAST:
            continue
        next_to = _next(others, value)
        gap = _gap(rest, float(value), next_to, sentinel)
        if gap and (sentinel or _in_areas(at, strictly=gap == "wide")):
            return at, f"{value:g}, apart from all others (the next is {next_to:g})"
        # Samples at an end of the range may be clipped; those beside them come near it then.
        inside = float(others.min()) < value < float(others.max())
        sharp = inside or (value == 0 and _is_sharp(pixels, at, value))
        if value in repeated and sharp and _in_areas(at, strictly=True):
            return at, f"{value:g}, the only value that repeats"
    return None, ""


def _some(values: Array) -> Array:
    """Return some of many values, evenly far apart, of all channels."""
    step = max(values.size // _SOME, 1)
    while math.gcd(step, 6) > 1:  # two, three and four channels lie side by side
        step += 1
    return values.reshape(-1)[::step]


def _repeated(some: Array) -> list[Any]:
    """Return the one value that repeats among floats that do not."""
    if some.dtype.kind != "f":
        return []
    values, counts = np.unique(some, return_counts=True)
    most = int(np.argmax(counts))
    others = some.size - int(counts[most])
    few = others - (len(values) - 1) <= _CONTINUOUS * others
    return [values[most]] if few and counts[most] >= max(_LEAST, _BULK * some.size) else []


def _next(others: Array, value: Any) -> float:
    """Return the value that is nearest to one that is left out."""
    below, above = others[others < value], others[others > value]
    near = ([below.max()] if below.size else []) + ([above.min()] if above.size else [])
    return float(min(near, key=lambda one: abs(float(one) - float(value)))) if near else math.nan


def _gap(rest: Array, value: float, next_to: float, sentinel: bool) -> str:
    """Tell whether a value is an end of the range that no other sample comes near: "far", by a "wide" gap, or not."""
    if rest.size < 2 * _LEAST:
        return ""
    scale = np.unique(rest.astype(np.float64))
    low, high = (float(np.quantile(rest, share)) for share in (_BULK, 1 - _BULK))
    gap, spread = abs(next_to - value), high - low
    if len(scale) <= _LEAST or scale[0] <= value <= scale[-1]:
        return ""
    # Samples at the upper end may be saturated.
    if gap > (spread if value < low or sentinel else _EMPTY * spread):
        return "far"
    inner = scale[(scale >= low) & (scale <= high)]
    steps = np.diff(inner).max(initial=0.0)
    # In pictures of 8 bits black is a colour.
    wide = value < low and rest.dtype != np.uint8 and gap > _EMPTY * steps and 2 * _EMPTY * gap > spread
    return "wide" if wide else ""


def _is_sharp(pixels: Array, at: Mask, value: Any) -> bool:
    """Tell whether hardly a sample beside marked ones comes near their value; of noise that was clipped 5 % do."""
    beside = np.zeros(at.shape, bool)
    for axis in range(at.ndim):
        for shift in (1, -1):
            beside |= np.roll(at, shift, axis)
    away = np.abs(pixels[beside & ~at].astype(np.float64) - float(value))
    return bool(away.size) and float(np.mean(away < 0.05 * np.median(away))) < _BULK


def _in_areas(at: Mask, *, strictly: bool = False) -> bool:
    """Tell whether marked samples lie side by side much more than they would by chance.

    Strictly, hardly any other sample lies alone among them, as many do where noise was clipped.
    """
    whole, alone = at.copy(), ~at
    for axis in range(at.ndim):
        for shift in (1, -1):
            beside = np.roll(at, shift, axis)  # the far side beside an edge, which is as good as any
            whole &= beside
            alone &= beside
    count, share = int(np.count_nonzero(at)), float(at.mean())
    chance = share ** (2 * at.ndim)
    inside = np.count_nonzero(whole) / count
    return bool(1 - inside <= 0.8 * (1 - chance) and not (strictly and np.count_nonzero(alone) > _ALONE * count))


# ---- what has no order, so that no mean of it means anything


def refuse_unordered(samples: Array, dtype: np.dtype[Any], missing: Mask | None = None) -> None:
    """Refuse phases that wrap round and label images, where there is hardly any doubt about it.

    Phases are floats from -pi to pi, or from 0 to 2 pi, that jump by about 2 pi between neighbours, and hardly ever by
    half as much. Labels are whole numbers that count from 0 or 1, in areas beside others of any number.

    Raises
    ------
    InputError
        With what to do about it.
    """
    if samples.shape[-1] != 1 or samples.ndim < 3 or missing is not None:
        return
    values = samples[..., 0]
    if dtype.kind == "f" and _wraps(values):
        raise InputError(
            "image: got phases that jump by 2 pi, which no mean of neighbours can cross; denoise cos(image) and "
            "sin(image) as two channels, and take np.arctan2 of the result (or give sigma if they are none)"
        )
    if dtype.kind in "iu" and (count := _labels(values)):
        raise InputError(
            f"image: got an image of {count} labels, between which there are no values; clean it by a vote in each "
            "neighbourhood (scipy.ndimage.generic_filter, skimage.filters.rank.majority), or give sigma if they are "
            "grey levels"
        )


def _neighbours(values: Array) -> list[tuple[Array, Array]]:
    """Return samples and their next ones along each axis."""
    axes = [np.moveaxis(values, axis, 0) for axis in range(values.ndim)]
    return [(one[:-1], one[1:]) for one in axes]


def _wraps(values: Array) -> bool:
    """Tell whether floats are phases that wrap round."""
    low, high = float(values.min()), float(values.max())
    if not (any(abs(low - at) < _NEAR and abs(high - at - 2 * math.pi) < _NEAR for at in (-math.pi, 0.0))):
        return False
    if len(np.unique(values.ravel()[:_SOME])) < _AREA:  # a drawing
        return False
    steps = np.concatenate([np.abs(b - a).ravel() for a, b in _neighbours(values)]) / math.pi
    jumps, halves = np.count_nonzero(steps > 1.5), np.count_nonzero((steps > 0.75) & (steps < 1.25))
    return bool(jumps > _JUMPS * values.size ** (1 - 1 / values.ndim) and 4 * halves < jumps)


def _labels(values: Array) -> int:
    """Return how many labels an image of whole numbers has; 0 where it is none."""
    low, high = float(values.min()), float(values.max())
    count = int(high - low) + 1
    if low not in (0.0, 1.0) or not 4 <= count <= values.size // _AREA:
        return 0
    if len(np.unique(values)) < 0.9 * count:
        return 0
    inside, borders, far = np.ones(values.shape, bool), 0, 0
    for axis, (a, b) in enumerate(_neighbours(values)):
        same = a == b
        moved = np.moveaxis(inside, axis, 0)
        moved[:-1] &= same
        moved[1:] &= same
        borders += int(np.count_nonzero(~same))
        far += int(np.count_nonzero(np.abs(b - a) > 1))
    common = np.bincount(values.ravel().astype(np.int64)).argmax()
    others = values != common
    filled = np.count_nonzero(inside & others) >= 0.5 * np.count_nonzero(others)
    return count if filled and inside.mean() > 0.7 and 4 * far > borders else 0


# ---- opacity


def _opacity(array: Array, axes: Axes) -> tuple[int | None, Mask]:
    """Return the channel that says how opaque a picture is, and where nothing of it is seen; None where there is none.

    The last of two or four, with the largest value of its type, and nearly everywhere that or 0, as no other is. What
    is hidden is missing if it has one colour, as programs leave it there.
    """
    nowhere: Mask = np.zeros((), bool)
    if axes.channel is None or axes.channels not in (2, 4) or len(axes.letters) != 2 or array.dtype.kind not in "uf":
        return None, nowhere
    planes = np.moveaxis(array, axes.channel, 0)
    full = 1.0 if array.dtype.kind == "f" else float(np.iinfo(array.dtype).max)
    step = max(math.isqrt(planes[0].size // _SOME), 1)
    at_ends = [float(((one == 0) | (one == full)).mean()) for one in planes[:, ::step, ::step]]
    last = planes[-1]
    if at_ends[-1] < 0.8 or last.max() != full or last.min() == full or max(at_ends[:-1]) >= 0.8:
        return None, nowhere
    clear = last == 0
    colours = planes[:-1, clear]
    alike = clear.any() and not clear.all() and bool((colours == colours[:, :1]).all())
    return axes.channels - 1, clear if alike else nowhere
