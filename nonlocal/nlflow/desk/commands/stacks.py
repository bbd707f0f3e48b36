"""Stacks as the library takes them: volume by volume where there are times beside slices, and as figures show them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from nlflow.desk.commands.inputs import Inputs
from nlflow.desk.files import Array, Media
from nlflow.desk.formats import nifti


@dataclass(frozen=True)
class Part:
    """What one call denoises; `layout` are its words about axes."""

    data: Array
    sigma: Any
    mask: Any
    keep: Array | None
    layout: dict[str, Any]


def layout_of(media: Media) -> dict[str, Any]:
    """Return the words by which the library knows the axes of an input, those of each volume for a stack of many."""
    if not media.stacked:
        return {"channel_axis": media.channel_axis}
    axes = media.axes.replace("T", "") if "Z" in media.axes else media.axes
    return {"channel_axis": None, "axes": axes, "spacing": media.spacing}


def parts(given: Inputs) -> Iterator[Part]:
    """Return what is denoised at once: all of it, or each time of a stack of volumes on its own."""
    media, layout = given.media, layout_of(given.media)
    if not {"T", "Z"} <= set(media.axes):
        yield Part(media.data, given.sigma, given.mask, given.keep, layout)
        return
    time = media.axes.index("T")
    spatial = media.axes.replace("C", "").index("T")

    def at(values: Any, number: int) -> Any:
        """Return the part of an array of this time; numbers and words are the same at all times."""
        if not isinstance(values, np.ndarray) or values.shape not in (media.data.shape, media.spatial_shape):
            return values
        return values.take(number, axis=time if values.shape == media.data.shape else spatial)

    for number in range(media.data.shape[time]):
        yield Part(
            media.data.take(number, axis=time), at(given.sigma, number), at(given.mask, number),
            at(given.keep, number), layout,
        )  # fmt: skip


def count(media: Media) -> int:
    """Return how many parts there are."""
    return media.data.shape[media.axes.index("T")] if {"T", "Z"} <= set(media.axes) else 1


def joined(media: Media, results: list[Array]) -> Array:
    """Return the results of all parts as one array of the input's shape."""
    if len(results) == 1 and results[0].shape == media.data.shape:
        return results[0]
    return np.stack(results, axis=media.axes.index("T"))


def summed(details: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how a stack was denoised: of many volumes the first, with means and sums, and each in ``volumes``."""
    if len(details) == 1:
        return details[0]
    told = dict(details[0])
    for name in ("sigma", "residual"):
        told[name] = float(np.mean([one[name] for one in details]))
    for name in ("steps", "seconds"):
        told[name] = type(told[name])(sum(one[name] for one in details))
    kinds = list(dict.fromkeys(one["noise"] for one in details))
    told["noise"] = "; ".join(kinds[:3]) + (" and others" if len(kinds) > 3 else "")
    keys = ("sigma", "noise", "steps", "stopped_by", "residual", "seconds")
    told["volumes"] = [{key: one[key] for key in keys} for one in details]
    return told


def plane(values: Array, media: Media) -> Array:
    """Return the picture in the middle of a stack."""
    axes = media.axes if values.ndim == len(media.axes) else media.axes.replace("C", "")
    for letter in "TZ":
        if letter in axes:
            place = axes.index(letter)
            values = values.take(values.shape[place] // 2, axis=place)
            axes = axes.replace(letter, "")
    return values


def middle(given: Inputs) -> Inputs:
    """Return the picture in the middle of a stack, with what belongs to it."""
    media = given.media
    axes = media.axes.replace("T", "").replace("Z", "")
    picture = replace(
        media, kind="image", data=plane(media.data, media), axes=axes,
        channel_axis=axes.index("C") if "C" in axes else None,
    )  # fmt: skip

    def of(values: Array | None) -> Any:
        return None if values is None else plane(values, media)

    return replace(given, media=picture, reference=of(given.reference), missing=of(given.missing), keep=of(given.keep))


def upward(media: Media) -> str:
    """Return the axes that a figure shows from bottom to top, as a file of a scan tells them; none by default."""
    own = media.extras.get("nifti")
    return "" if own is None else nifti.upward(own["affine"])
