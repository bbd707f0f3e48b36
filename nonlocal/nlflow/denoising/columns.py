"""What lies side by side in one array and is denoised each by itself: channels of different units, many images."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import root_mean_square
from nlflow.denoising.info import DenoiseInfo
from nlflow.denoising.inputs import shape_of, spatial_shape
from nlflow.denoising.layout import check_axis
from nlflow.denoising.progress import Trail, within
from nlflow.errors import InputError

Array = NDArray[Any]
_LOST = "returned unchanged: every sample is missing"


def each_by_itself(
    denoise: Callable[..., Any],
    image: Any,
    sigma: Any,
    *,
    channel_axis: int | None,
    mask: Any,
    keep: Any,
    progress: Any,
    **words: Any,
) -> tuple[Array, DenoiseInfo]:
    """Return what `denoise` makes of each channel alone, and what it did; see `nlflow.denoise` with ``separate``.

    Parameters
    ----------
    denoise : callable
        `nlflow.denoise`.
    image, sigma, channel_axis, mask, keep, progress
        As it takes them.
    **words
        What else it takes, the same for all channels.
    """
    shape = shape_of("image", image)
    axis = check_axis(len(shape), channel_axis)
    if axis is None:
        raise InputError(f"separate: got True for shape {shape} without channels; give channel_axis, or leave it out")
    if isinstance(image, np.ma.MaskedArray) or type(image).__module__.startswith("torch"):
        denoise(image, sigma, channel_axis=axis, mask=mask, keep=keep)  # refused as any input of this kind
    count, array = shape[axis], np.asarray(image)
    sigmas = _of_channels("sigma", sigma, shape, axis, numbers=True)
    masks, keeps = _of_channels("mask", mask, shape, axis), _of_channels("keep", keep, shape, axis)
    samples = [np.take(array, c, axis) for c in range(count)]
    lost = [_is_lost(one, hidden) for one, hidden in zip(samples, masks, strict=True)]
    parts, infos = [], []
    for c, one in enumerate(samples):
        # Nothing is left from which a channel could be filled in that is missing as a whole.
        skipped = lost[c] and not all(lost)
        given = np.zeros_like(one) if skipped else one
        hidden = None if skipped else masks[c]
        with _telling(progress, c / count, (c + 1) / count) as told:
            part, info = denoise(given, sigmas[c], mask=hidden, keep=keeps[c], progress=told, return_info=True, **words)
        parts.append(one.astype(part.dtype) if skipped else part)
        infos.append(replace(info, stopped_by=_LOST) if skipped else info)
    if isinstance(progress, Trail) and count > 1:
        progress.course = {}  # channels go ways of their own
    return np.stack(parts, axis), _together(infos)


def each_item(
    denoise: Callable[..., Any],
    items: tuple[int, ...],
    image: Callable[[tuple[int, ...]], Any],
    own: Mapping[str, Callable[[tuple[int, ...]], Any]],
    progress: Any = False,
    **words: Any,
) -> tuple[list[Any], DenoiseInfo]:
    """Return what `denoise` makes of each image of an array of images, in C order, and what it did to all.

    Parameters
    ----------
    denoise : callable
        `nlflow.denoise`, or what takes and returns the like.
    items : tuple of int
        Shape of the array of images; () for one image.
    image : callable
        Gives the image with an index.
    own : mapping of str to callable
        Arguments that each image has of its own, as ``image`` gives the images.
    progress
        As `nlflow.denoise` takes it.
    **words
        What else `denoise` takes, the same for all images.
    """
    results, infos, count = [], [], math.prod(items)
    for number, index in enumerate(np.ndindex(*items)):
        with _telling(progress, number / count, (number + 1) / count) as told:
            given = {**words, **{name: of(index) for name, of in own.items()}}
            result, info = denoise(image(index), return_info=True, **({"progress": told} if told else {}), **given)
        results.append(result)
        infos.append(info)
    return results, infos[0] if count == 1 else _together(infos)


def _of_channels(name: str, value: Any, shape: tuple[int, ...], axis: int, *, numbers: bool = False) -> list[Any]:
    """Return what an argument says of each channel: the same for all, or its own part of an array."""
    count, given = shape[axis], () if value is None or isinstance(value, str) else shape_of(name, value)
    if given == shape:
        return [np.take(np.asarray(value), c, axis) for c in range(count)]
    if given in ((), spatial_shape(shape, axis)):
        return [value] * count
    if numbers and given == (count,):
        return list(np.asarray(value))
    each = f", ({count},) for one number a channel" if numbers else ""
    expected = f"{spatial_shape(shape, axis)} for all channels or {shape}{each}"
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


def _together(infos: list[DenoiseInfo]) -> DenoiseInfo:
    """Return what was done to all channels or images: means over them, what they share, and each by itself."""
    first, risks = infos[0], [info.risk for info in infos]

    def joined(name: str) -> str:
        return "; ".join(dict.fromkeys(str(getattr(info, name)) for info in infos))

    return replace(
        first,
        sigma=root_mean_square(np.array([info.sigma for info in infos])),
        sigma_effective=None,
        noise=joined("noise"),
        functional=joined("functional"),
        parameters=first.parameters if all(info.parameters == first.parameters for info in infos) else {},
        steps=max(info.steps for info in infos),
        stopped_by=joined("stopped_by"),
        method=joined("method"),
        residual=root_mean_square(np.array([info.residual for info in infos])),
        risk=None if None in risks else float(np.mean([risk for risk in risks if risk is not None])),
        tiles=max(info.tiles for info in infos),
        memory_bytes=max(info.memory_bytes for info in infos),
        seconds=sum(info.seconds for info in infos),
        compile_seconds=sum(info.compile_seconds for info in infos),
        columns=tuple(infos),
    )
