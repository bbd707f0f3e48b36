"""What lies side by side in one array and is denoised each by itself: channels of different units, many images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising.info import DenoiseInfo, together
from nlflow.denoising.layout import Axes, shape_of
from nlflow.denoising.runs import Trail, within
from nlflow.errors import InputError

Array = NDArray[Any]
_LOST = "returned unchanged: every sample is missing"


def each_by_itself(
    denoise: Callable[..., Any], image: Any, sigma: Any, axes: Axes, *, mask: Any, keep: Any, progress: Any,
    **words: Any,
) -> tuple[Array, DenoiseInfo]:  # fmt: skip
    """Return what `nlflow.denoise` makes of each channel alone, and what it did; `words` are the same for all."""
    axis, count = axes.channel, axes.channels
    if axis is None:
        raise InputError(
            f"separate: got True for shape {axes.shape} without channels; give channel_axis, or leave it out"
        )
    if isinstance(image, np.ma.MaskedArray) or type(image).__module__.startswith("torch"):
        denoise(image, sigma, channel_axis=axis, mask=mask, keep=keep)  # refused as any input of this kind
    sigmas = _of_channels("sigma", sigma, axes, numbers=True)
    masks, keeps = _of_channels("mask", mask, axes), _of_channels("keep", keep, axes)
    samples = list(np.moveaxis(np.asarray(image), axis, 0))
    lost = [_is_lost(one, hidden) for one, hidden in zip(samples, masks, strict=True)]
    # Nothing is left from which a channel could be filled in that is missing as a whole.
    skipped = [one and not all(lost) for one in lost]
    given = [
        {"image": np.zeros_like(one) if skip else one.copy(), "sigma": level, "mask": None if skip else hidden,
         "keep": kept, "axes": axes.letters, "spacing": axes.spacing, **words}
        for skip, one, level, hidden, kept in zip(skipped, samples, sigmas, masks, keeps, strict=True)
    ]  # fmt: skip
    parts, infos = _one_by_one(denoise, given, progress, count)
    for c in np.flatnonzero(skipped):
        parts[c], infos[c] = samples[c].astype(parts[c].dtype), replace(infos[c], stopped_by=_LOST)
    if isinstance(progress, Trail) and count > 1:
        progress.course = {}  # channels go ways of their own
    return np.stack(parts, axis), together(infos)


def each_item(
    denoise: Callable[..., Any],
    items: tuple[int, ...],
    image: Callable[[tuple[int, ...]], Any],
    own: Mapping[str, Callable[[tuple[int, ...]], Any]],
    progress: Any = False,
    **words: Any,
) -> tuple[list[Any], DenoiseInfo]:
    """Return what `denoise` makes of each image of an array of images, in C order, and what it did to all.

    `items` is the shape of the array of images, () for one; `image` gives that with an index, and `own` the arguments
    that each has of its own; `words` are the same for all.
    """
    given = (
        {"image": image(index), **words, **{name: of(index) for name, of in own.items()}}
        for index in np.ndindex(*items)
    )
    results, infos = _one_by_one(denoise, given, progress, int(np.prod(items)))
    return results, infos[0] if len(infos) == 1 else together(infos)


def _one_by_one(denoise: Callable[..., Any], given: Any, progress: Any, count: int) -> tuple[list[Any], list[Any]]:
    results, infos = [], []
    for number, words in enumerate(given):
        with _telling(progress, number / count, (number + 1) / count) as told:
            result, info = denoise(
                words.pop("image"), return_info=True, **({"progress": told} if told else {}), **words
            )
        results.append(result)
        infos.append(info)
    return results, infos


def _of_channels(name: str, value: Any, axes: Axes, *, numbers: bool = False) -> list[Any]:
    """Return what an argument says of each channel: the same for all, or its own part of an array."""
    count, given = axes.channels, () if value is None or isinstance(value, str) else shape_of(name, value)
    if given == axes.shape:
        return [np.take(np.asarray(value), c, axes.channel) for c in range(count)]
    if given in ((), axes.spatial):
        return [value] * count
    if numbers and given == (count,):
        return list(np.asarray(value))
    each = f", ({count},) for one number a channel" if numbers else ""
    expected = f"{axes.spatial} for all channels or {axes.shape}{each}"
    raise InputError(f"{name}: got an array of shape {given}, expected {expected}")


def _is_lost(samples: Array, mask: Any) -> bool:
    """Tell whether every sample of a channel is missing."""
    if isinstance(mask, str):
        return mask == "nan" and samples.dtype.kind == "f" and not np.isfinite(samples).any()
    return mask is not None and bool(np.all(mask))


@contextmanager
def _telling(progress: Any, low: float, high: float) -> Iterator[Any]:
    """Give what tells the share of a channel's work, from `low` to `high` of the whole."""
    if isinstance(progress, Trail):
        whole, progress.tell = progress.tell, within(progress.tell, low, high)
        try:
            yield progress
        finally:
            progress.tell = whole
    else:
        yield within(progress, low, high) if callable(progress) else progress
