"""Samples that are missing, stand for "no data", or cannot be averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from nlflow._array import is_tensor
from nlflow.denoising.layout import Axes, shape_of_image
from nlflow.domains.samples import as_signal, has_value
from nlflow.errors import InputError

Array = NDArray[Any]
Mask = NDArray[np.bool_]

TELL_MISSING: Final = "tell with mask which samples are missing"  # ends messages about what is no number
#: Values that programs write where there is no data: GIS (GDAL, ESRI), the CF conventions, netCDF's own.
_SENTINELS: Final = (-9999.0, -99999.0, -32768.0, -3.4028234663852886e38, 3.4028234663852886e38, 1e20,
                     9.969209968386869e36)  # fmt: skip
NO_SAMPLE: Final = "image: got no sample that is a number (all are NaN or masked), expected at least one"
_LEAST: Final = 9  # samples of one value that make a hole: a square of 3 x 3
SOME: Final = 2**16  # samples that tell the values of all
_BULK: Final = 0.01  # of the samples at each end, which do not count for a range: a star, a hot pixel
_EMPTY: Final = 8  # a gap is no step of the scale if it is so many times the widest one between other samples
_CONTINUOUS: Final = 0.05  # of samples that repeat: more are rounded, and a value that repeats means nothing
_NEAR: Final = 0.05  # of the ends of phases
_JUMPS: Final = 0.25  # of a side in length: the lines along which phases jump
_AREA: Final = 64  # samples that a label has, on the average
_ALONE: Final = 0.005  # samples amid a hole, of those of the hole; noise that was clipped leaves more


@dataclass(frozen=True)
class Given:
    """Samples, and notes."""

    samples: Array  # (..., C), finite; 0 where they are missing
    restore: Callable[[Array], Any]  # from (..., C) to the shape of the input; what says nothing is as it was
    missing: Mask | None = None  # (...)
    opacity: int | None = None  # the channel that is no signal
    told: tuple[str, ...] = ()  # one sentence for each thing that was found
    guessed: str = ""  # what was found from the values alone, and how to say otherwise
    fills: bool = True  # whether somebody asked to fill in what is missing

    @property
    def signals(self) -> Mask:
        return np.asarray(np.arange(self.samples.shape[-1]) != (-1 if self.opacity is None else self.opacity))


@dataclass(frozen=True)
class Known:
    """What a whole that is read in parts tells its parts about missing samples, apart from NaN."""

    nodata: Any = None  # the value that stands for "no data", where there is one
    said: bool = False  # by a file, as NaN: a pixel lacks data where one of its channels does; a guess asks all of them
    empty: Mask | None = None  # (C,), the channels without any sample
    told: tuple[str, ...] = ()

    def lacking(self, array: Array, channel: int | None) -> Mask:
        """Return which pixels have the value that stands for "no data"."""
        at = has_value(array, self.nodata)
        return at if channel is None else np.asarray((at.any if self.said else at.all)(axis=channel))


def as_given(image: Any, axes: Axes, mask: Any = None, known: Known | None = None) -> Given:
    masked = isinstance(image, np.ma.MaskedArray)
    if is_tensor(image):
        return Given(*as_signal(image, axes.channel, TELL_MISSING))  # which refuses it
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
        if known is not None and known.nodata is not None:
            lost = lost | (bad & has_value(array, known.nodata))
        nan = np.isnan(array) & ~lost
        _refuse_infinite(bad & ~np.isnan(array) & ~lost & ~_everywhere(asked, axes), known is None)
        nan &= ~_everywhere(asked, axes)
        if nan.any():
            lost = lost | nan
            told.append(told_of(nan, "NaN"))
    if known is not None and known.said and known.nodata is not None:
        lost = lost | has_value(array, known.nodata)
    empty = _empty_channels(lost, axes) if known is None else _everywhere_of(known.empty, axes)
    found = _in_pixels(lost & ~empty, axes)
    guessed, opacity = "", None
    if known is not None and known.nodata is not None and not known.said:
        found = found | known.lacking(array, axes.channel)
    elif known is None and mask is None:
        at = None if not found.any() else found
        nodata, why = find_nodata(array, axes.channel, at)
        if nodata is not None:
            found = found | nodata
            told.append(told_of(nodata, why))
            guessed = guess(told[-1])
        opacity, clear = _opacity(array, axes)
        if opacity is not None:
            told.append(f"channel {opacity} is an alpha channel, and stays as it is")
            found = found | clear
    missing = found if asked is None else found | asked
    if missing.all() and known is None:
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
    fills = asked is not None and bool(asked.any())
    return Given(samples, whole, missing if missing.any() else None, opacity, tuple(told), guessed, fills)


def signals_of(
    image: Any, channel_axis: Any = None, axes: str | None = None, mask: Any = None
) -> tuple[Array, Mask | None, tuple[str, ...]]:
    given = as_given(image, Axes.of(shape_of_image(image), channel_axis, axes), mask)
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


def seen(image: Any, axes: Axes, mask: Any) -> Any:
    """Return an array; integers of more than 16 bits with a mask as a masked array."""
    array = np.asanyarray(image)
    if mask is None or isinstance(mask, str) or array.dtype.kind not in "iu" or array.dtype.itemsize <= 2:
        return image
    return np.ma.array(array, mask=np.broadcast_to(_everywhere(axes.place("mask", mask), axes), axes.shape))


def _everywhere(where: Mask | None, axes: Axes) -> Mask:
    """Return a mask of pixels as one that broadcasts to the shape of the array."""
    if where is None or where.ndim == 0:
        return np.zeros((), bool)
    return where if axes.channel is None else np.expand_dims(where, axes.channel)


def _in_pixels(lost: Mask, axes: Axes) -> Mask:
    return lost if axes.channel is None or lost.ndim == 0 else np.asarray(lost.any(axis=axes.channel))


def _empty_channels(lost: Mask, axes: Axes) -> Mask:
    """Return the channels of several that have no sample at all: they say nothing of the others."""
    if axes.channel is None or not lost.any():
        return np.zeros((), bool)
    others = tuple(axis for axis in range(lost.ndim) if axis != axes.channel)
    empty: Mask = np.asarray(lost.all(axis=others, keepdims=True))
    return np.zeros((), bool) if empty.all() else empty


def _everywhere_of(channels: Mask | None, axes: Axes) -> Mask:
    """Return a mask of channels as one that broadcasts to the shape of the array."""
    if channels is None or axes.channel is None:
        return np.zeros((), bool)
    return channels.reshape([-1 if axis == axes.channel else 1 for axis in range(len(axes.letters) + 1)])


def _refuse_infinite(left: Mask, takes_mask: bool) -> None:
    if left.any():
        first = tuple(int(i) for i in np.argwhere(left)[0])
        raise InputError(
            f"image: got {np.count_nonzero(left)} infinite value(s) (the first at index {first}), expected numbers, or "
            "NaN where a sample is missing; replace them (np.where(np.isinf(x), np.nan, x))"
            + (", or give mask='nan' to have them filled in" if takes_mask else "")
        )


def _nothing_left(mask: Any, asked: Mask | None, found: Mask, axes: Axes) -> str:
    if asked is not None and asked.any():
        return f"mask: hides every sample that is not missing already ({np.count_nonzero(found)} are NaN or masked); " \
               "leave at least one, or turn the mask round: True is where a sample is missing"  # fmt: skip
    if axes.channel is not None:
        return "image: got no pixel that all of its channels have (NaN or masked), expected at least one; denoise " \
               "each channel by itself (separate=True), or leave out the one that is empty"  # fmt: skip
    return NO_SAMPLE


def _precision(dtype: np.dtype[Any]) -> type[np.floating[Any]]:
    """Return the floats that `as_signal` computes with."""
    narrow = dtype.itemsize <= 2 if dtype.kind in "biu" else dtype.itemsize <= 4
    return np.float32 if narrow else np.float64


def _with_mask(restore: Callable[[Array], Any], image: Any, hidden: Mask) -> Callable[[Array], Any]:
    """Return a way back that makes a masked array of what was one."""
    if not isinstance(image, np.ma.MaskedArray):
        return restore
    return lambda u: np.ma.array(restore(u), mask=hidden if hidden.ndim else False, fill_value=image.fill_value)


def _count(where: Mask | tuple[int, int]) -> str:
    """Return how many samples there are, in words before what they are; of a whole in parts how many of how many."""
    count, size = where if isinstance(where, tuple) else (int(np.count_nonzero(where)), where.size)
    return f"{count} sample{'s' if count > 1 else ''} ({count / size:.2%}) {'are' if count > 1 else 'is'}"


def told_of(where: Mask | tuple[int, int], what: str) -> str:
    return f"{_count(where)} {what}, which counts as missing, and stay as they are"


def guess(told: str, remedy: str = "say with mask which samples are missing, if any") -> str:
    return f"image: {told}; if it is data, {remedy}"


# ---- values that stand for "no data"


def find_nodata(array: Array, channel: int | None, absent: Mask | None = None) -> tuple[Mask | None, str]:
    """Return where samples have a value that stands for "no data", and which value that is, in words. O(N).

    It is an end of the range far from all other samples, or the only value that repeats among floats. It fills areas,
    unless it is one that programs write by convention.
    """
    pixels = array if channel is None else np.moveaxis(array, channel, -1)
    present = pixels if absent is None else pixels[~absent]
    if array.dtype.kind == "b" or present.size < 2 * _LEAST:
        return None, ""
    some = some_of(array if absent is None else present)  # without a copy where nothing is missing
    for value in candidates(some, present.min(), present.max()):
        if why := Beside.of(value, array, channel, absent).why(some):
            at = all_are(array, value, channel)
            return (at if absent is None else at & ~absent), why
    return None, ""


def candidates(some: Array, low: Any, high: Any) -> list[Any]:
    repeated, found = _repeated(some), []
    for value in dict.fromkeys((low, high, *repeated)):
        rest = some[some != value]
        # What some samples come near need not be looked for in all.
        if value in repeated or _gap(rest, float(value), _next(rest, value), float(value) in _SENTINELS):
            found.append(value)
    return found


def least_count(value: Any) -> int:
    return 1 if float(value) in _SENTINELS else _LEAST


def all_are(array: Array, value: Any, channel: int | None) -> Mask:
    """Return which pixels have a value in all of their channels."""
    at = has_value(array, value)
    return at if channel is None else np.asarray(at.all(axis=channel))


@dataclass(frozen=True)
class Beside:
    """Counts of the samples that have a value, and of their neighbours."""

    value: Any
    axes: int
    size: int  # pixels
    count: int  # of these with the value in all channels
    whole: int  # of those, the ones among others of their kind
    alone: int  # others, all of whose neighbours have the value
    others: int  # samples of other pixels
    low: float  # of the others
    high: float
    below: float  # of the others the nearest ones
    above: float
    away: Array  # how far samples that lie beside the value are from it; some of them

    @classmethod
    def of(cls, value: Any, array: Array, channel: int | None, absent: Mask | None = None) -> Beside:
        pixels, at = array if channel is None else np.moveaxis(array, channel, -1), all_are(array, value, channel)
        at = at if absent is None else at & ~absent
        others = pixels[~at] if absent is None else pixels[~(at | absent)]
        whole, alone, beside = at.copy(), ~at, np.zeros(at.shape, bool)
        for axis in range(at.ndim):
            for shift in (1, -1):
                near = np.roll(at, shift, axis)  # the far side beside an edge, which is as good as any
                whole &= near
                alone &= near
                beside |= near
        below, above = others[others < value], others[others > value]
        away = np.abs(pixels[beside & ~at].astype(np.float64) - float(value)).ravel()
        count, inner, lone = (int(np.count_nonzero(one)) for one in (at, whole, alone))
        low, high = (float(others.min()), float(others.max())) if others.size else (math.inf, -math.inf)
        nearest = float(below.max()) if below.size else -math.inf, float(above.min()) if above.size else math.inf
        return cls(value, at.ndim, at.size, count, inner, lone, others.size, low, high, *nearest, some_of(away))

    @classmethod
    def of_parts(cls, parts: Sequence[Beside]) -> Beside:
        counts = np.array([[p.size, p.count, p.whole, p.alone, p.others] for p in parts]).sum(axis=0)
        size, count, whole, alone, others = counts.tolist()
        return cls(
            parts[0].value, parts[0].axes, size, count, whole, alone, others, min(p.low for p in parts),
            max(p.high for p in parts), max(p.below for p in parts), min(p.above for p in parts),
            np.concatenate([p.away for p in parts]),
        )  # fmt: skip

    def why(self, some: Array) -> str:
        """Return why the value stands for "no data", or ""."""
        value, sentinel = self.value, float(self.value) in _SENTINELS
        if self.count < least_count(self.value) or self.others < 2 * _LEAST:
            return ""
        next_to = min((self.below, self.above), key=lambda one: abs(one - float(value)))
        gap = _gap(some[some != value], float(value), next_to, sentinel)
        if gap and (sentinel or self._in_areas(strictly=gap == "wide")):
            return f"{value:g}, apart from all others (the next is {next_to:g})"
        # Samples at an end of the range may be clipped; those beside them come near it then.
        sharp = self.low < value < self.high or (value == 0 and self._is_sharp())
        if value in _repeated(some) and sharp and self._in_areas(strictly=True):
            return f"{value:g}, the only value that repeats"
        return ""

    def _is_sharp(self) -> bool:
        """Tell whether hardly a sample beside the value comes near it; of noise that was clipped 5 % do."""
        return bool(self.away.size) and float(np.mean(self.away < 0.05 * np.median(self.away))) < _BULK

    def _in_areas(self, *, strictly: bool = False) -> bool:
        """Tell whether samples of the value lie side by side much more than they would by chance.

        Strictly, hardly any other sample lies alone among them, as many do where noise was clipped.
        """
        chance = (self.count / self.size) ** (2 * self.axes)
        inside = self.whole / self.count
        return 1 - inside <= 0.8 * (1 - chance) and not (strictly and self.alone > _ALONE * self.count)


def some_of(values: Array, count: int = SOME) -> Array:
    step = max(values.size // count, 1)
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


# ---- what has no order, so that no mean of it means anything


def refuse_unordered(samples: Array, dtype: np.dtype[Any], missing: Mask | None = None) -> None:
    """Raise `InputError` for integers that wrapped round, for wrapped phases and for label images."""
    if dtype.kind in "iu" and dtype.itemsize > 1 and any(_overflows(one, dtype) for one in np.moveaxis(samples, -1, 0)):
        raise InputError(
            f"image: got {dtype} whose values jump from one end of its range to the other, as numbers do that went "
            "beyond it; compute them anew in wider numbers (float, or integers of more bits), undo it "
            f"(image.view('{'i' if dtype.kind == 'u' else 'u'}{dtype.itemsize}') if they were below 0), or give sigma "
            "if they are right"
        )
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
    if len(np.unique(values.ravel()[:SOME])) < _AREA:  # a drawing
        return False
    steps = np.concatenate([np.abs(b - a).ravel() for a, b in _neighbours(values)]) / math.pi
    jumps, halves = np.count_nonzero(steps > 1.5), np.count_nonzero((steps > 0.75) & (steps < 1.25))
    return bool(jumps > _JUMPS * values.size ** (1 - 1 / values.ndim) and 4 * halves < jumps)


def _overflows(values: Array, dtype: np.dtype[Any]) -> bool:
    """Tell whether integers have wrapped round.

    Neighbours at both ends of the range of their type are as near across its end as others are to each other. What was
    clipped piles up at an end, and wraps nowhere.
    """
    limits = np.iinfo(dtype)
    period = float(limits.max) - float(limits.min) + 1
    if values.min() > limits.min + _NEAR * period or values.max() < limits.max - _NEAR * period:
        return False
    steps = np.concatenate([np.abs(b - a).ravel() for a, b in _neighbours(values.astype(np.float64))])
    far = steps > 0.75 * period
    counts = np.unique(values, return_counts=True)[1]
    if np.count_nonzero(far) < _LEAST or max(counts[0] / counts[1], counts[-1] / counts[-2]) > 4:
        return False
    halves = np.count_nonzero((steps > 0.375 * period) & (steps < 0.625 * period))
    across = float(np.median(period - steps[far]))
    return bool(4 * halves < np.count_nonzero(far) and across <= 4 * float(np.median(steps[~far])))


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
    step = max(math.isqrt(planes[0].size // SOME), 1)
    at_ends = [float(((one == 0) | (one == full)).mean()) for one in planes[:, ::step, ::step]]
    last = planes[-1]
    if at_ends[-1] < 0.8 or last.max() != full or last.min() == full or max(at_ends[:-1]) >= 0.8:
        return None, nowhere
    clear = last == 0
    colours = planes[:-1, clear]
    alike = clear.any() and not clear.all() and bool((colours == colours[:, :1]).all())
    return axes.channels - 1, clear if alike else nowhere
