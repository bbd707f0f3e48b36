"""Channels and images that are denoised one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import on_host
from nlflow.denoising.info import DenoiseInfo, together
from nlflow.denoising.layout import Axes, marks_of, shape_of
from nlflow.denoising.runs import Trail, within
from nlflow.errors import InputError, check_unmasked

Array = NDArray[Any]
_LOST = "returned unchanged: every sample is missing"


def each_by_itself(
    denoise: Callable[..., Any], image: Any, sigma: Any, axes: Axes, *, mask: Any, keep: Any, progress: Any,
    **words: Any,
) -> tuple[Array, DenoiseInfo]:  # fmt: skip
    axis, count = axes.channel, axes.channels
    if axis is None:
        raise InputError(
            f"separate: got True for shape {axes.shape} without channels; give channel_axis, or leave it out"
        )
    sigmas = _of_channels("sigma", sigma, axes, numbers=True)
    masks, keeps = _of_channels("mask", mask, axes), _of_channels("keep", keep, axes)
    masked = isinstance(image, np.ma.MaskedArray)
    samples = list(np.moveaxis(image if masked else np.asarray(image), axis, 0))
    given = (
        {"image": one.copy(), "sigma": level, "mask": hidden, "keep": kept, "axes": axes.letters,
         "spacing": axes.spacing, **words}
        for one, level, hidden, kept in zip(samples, sigmas, masks, keeps, strict=True)
    )  # fmt: skip
    parts, infos = _one_by_one(denoise, given, progress, count)
    if isinstance(progress, Trail) and count > 1:
        progress.course = {}  # channels go ways of their own
    return (np.ma.stack if masked else np.stack)(parts, axis), together(infos)


def each_item(
    denoise: Callable[..., Any],
    items: tuple[int, ...],
    image: Callable[[tuple[int, ...]], Any],
    own: Mapping[str, Callable[[tuple[int, ...]], Any]],
    progress: Any = False,
    **words: Any,
) -> tuple[list[Any], DenoiseInfo]:
    given = (
        {"image": image(index), **words, **{name: of(index) for name, of in own.items()}}
        for index in np.ndindex(*items)
    )
    results, infos = _one_by_one(denoise, given, progress, int(np.prod(items)))
    return results, infos[0] if len(infos) == 1 else together(infos)


def _one_by_one(denoise: Callable[..., Any], given: Any, progress: Any, count: int) -> tuple[list[Any], list[Any]]:
    """Return results and what was done; one of which every sample is missing stays, unless that are all."""
    results, infos, lost = [], [], []
    for number, words in enumerate(given):
        image = words.pop("image")
        if _is_lost(image, words.get("mask")):
            lost.append((number, image, words))
            image, words = np.zeros(image.shape, image.dtype), {**words, "mask": None}
        with _telling(progress, number / count, (number + 1) / count) as told:
            result, info = denoise(image, return_info=True, **({} if told is False else {"progress": told}), **words)
        results.append(result)
        infos.append(info)
    for number, image, words in lost:
        if len(lost) == len(results):
            denoise(image, **words)  # which is refused
        results[number], infos[number] = image.astype(results[number].dtype), replace(infos[number], stopped_by=_LOST)
    return results, infos


def _of_channels(name: str, value: Any, axes: Axes, *, numbers: bool = False) -> list[Any]:
    """Return what an argument says of each channel: the same for all, or its own part of an array."""
    check_unmasked(name, value)
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


def _is_lost(samples: Any, mask: Any) -> bool:
    if not isinstance(samples, np.ndarray) or samples.size == 0:
        return False
    lost = np.ma.getmaskarray(samples)
    if samples.dtype.kind == "f":
        lost = lost | (np.isnan(samples) if mask is None else ~np.isfinite(samples) if isinstance(mask, str) else False)
    if mask is None or isinstance(mask, str):
        return bool(lost.all())
    given, _ = marks_of("mask", on_host(mask, "mask"))
    # Of pixels; which axis is that of the channels is known to those who are asked later.
    return bool(lost.all() or given.all() or (given.shape == lost.shape and (lost | given).all()))


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
