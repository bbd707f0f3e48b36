"""Layers without viewers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.denoising import DenoiseInfo, denoise
from nlflow.denoising.columns import each_item
from nlflow.desk.terminal import warnings_kept
from nlflow.domains.samples import check_axis, rounded
from nlflow.errors import InputError, check_choice

Array = NDArray[Any]

TAKES = {"planes": "YX", "volumes": "ZYX", "clips": "TYX"}
_PREVIEW = {"planes": (192, 192), "volumes": (16, 64, 64), "clips": (8, 96, 96)}
_KINDS = 3  # of noise that are told
_UNCHANGED = "returned unchanged: "


@dataclass(frozen=True)
class Settings:
    """How a layer is denoised.

    Attributes
    ----------
    takes : {'planes', 'volumes', 'clips'}
        What is denoised at once: each plane of the last two axes without that of channels, each volume of the last
        three, or each clip of the last three, of which the first is time.
    channel_axis : int, optional
        Axis of channels that are denoised together; of an RGB layer the colours are.
    sigma : float, optional
        Noise in the units of the layer; estimated by default.
    noise, quality, strength
        As `nlflow.denoise` takes them.
    """

    takes: str = "planes"
    channel_axis: int | None = None
    sigma: float | None = None
    noise: str = "auto"
    quality: str = "balanced"
    strength: float = 1.0


@dataclass(frozen=True)
class Samples:
    """Samples of a layer, or of a part that begins at `corner`; with `opaque` the last channel is opacity."""

    data: Any
    axes: str
    spacing: tuple[float, ...] | None
    corner: tuple[int, ...]
    opaque: bool
    rgb: bool


@dataclass(frozen=True)
class Result:
    """What a layer gets."""

    data: Array
    corner: tuple[int, ...]
    said: tuple[str, ...]


def denoise_layer(layer: Any, settings: Settings | None = None) -> tuple[Array, dict[str, Any], str]:
    """Denoise a layer of napari, and return data, attributes and kind of a new layer.

    The cost is that of `nlflow.denoise` for each plane, volume or clip; all of the result is in memory.

    Parameters
    ----------
    layer : napari.layers.Image
    settings : Settings, optional

    Returns
    -------
    data : array
        In the units of the layer: floats, but the same type for an RGB layer of integers.
    attributes : dict
        Those of the layer with another name; ``metadata['nlflow']`` is a list of texts that say what was done.
    kind : str
        ``'image'``.

    Raises
    ------
    InputError
        For what is no image layer, for an empty or complex one and one of several scales, for axes that it does not
        have, and as `nlflow.denoise`.
    """
    chosen = Settings() if settings is None else settings
    return layer_of(layer, denoised(samples_of(layer, chosen), chosen), "denoised")


def samples_of(layer: Any, settings: Settings, point: Sequence[float] | None = None) -> Samples:
    """Return what is denoised of a layer, for a point (in coordinates of data) a part around it."""
    letters = TAKES[check_choice("takes", settings.takes, tuple(TAKES))]
    data, rgb = _checked(layer), bool(layer.rgb)
    axes = list(range(data.ndim))
    channel = _channel(settings.channel_axis, data.ndim, rgb)
    if channel is not None:
        axes.remove(channel)
    if len(axes) < len(letters):
        remedy = "choose 'planes'" if len(axes) > 1 else "take nlflow.denoise for a signal"
        raise InputError(f"takes: got {settings.takes!r} for a layer of shape {data.shape}, expected one with "
                         f"{len(letters)} axes beside channels; {remedy}")  # fmt: skip
    known = dict(zip(axes[-len(letters) :], letters, strict=True)) | ({} if channel is None else {channel: "C"})
    part = [slice(None)] * data.ndim
    if point is not None:
        widths = dict(zip(axes[-len(letters) :], _PREVIEW[settings.takes], strict=True))
        for axis, where in zip(axes if rgb else range(data.ndim), point, strict=True):
            if axis != channel:
                part[axis] = _around(float(where), int(data.shape[axis]), widths.get(axis, 1))
    scale = [abs(float(one)) for one in layer.scale]
    return Samples(
        data[tuple(part)],
        "".join(known.get(axis, "I") for axis in range(data.ndim)),
        tuple(scale[axis] for axis in axes[-3:]) if settings.takes == "volumes" else None,
        tuple(one.start or 0 for one in part[: data.ndim - rgb]),
        rgb and data.shape[-1] == 4,
        rgb,
    )


def _checked(layer: Any) -> Any:
    if layer is None:
        raise InputError("layer: got none, expected an image layer; open or choose one")
    kind = type(layer).__name__
    if not hasattr(layer, "as_layer_data_tuple") or layer.as_layer_data_tuple()[2] != "image":
        raise InputError(f"layer: got {kind} {getattr(layer, 'name', '')!r}, expected an Image layer, whose values are "
                         "samples with noise")  # fmt: skip
    if layer.multiscale:
        raise InputError(f"layer: got {layer.name!r} of {len(layer.data)} scales, expected one; add "
                         "layer.data[0] as a layer of its own")  # fmt: skip
    data = layer.data
    if np.dtype(data.dtype).kind not in "biuf":
        raise InputError(f"layer: got {layer.name!r} of {data.dtype}, expected real numbers; denoise its real and "
                         "imaginary part as layers of their own")  # fmt: skip
    if 0 in data.shape:
        raise InputError(f"layer: got {layer.name!r} of shape {tuple(data.shape)}, expected at least one sample")
    return data


def _channel(given: int | None, ndim: int, rgb: bool) -> int | None:
    if rgb:
        if given is not None:
            raise InputError(f"channel_axis: got {given} for an RGB layer, whose colours are its channels; leave it "
                             "out")  # fmt: skip
        return ndim - 1
    return check_axis(ndim, given)


def _around(place: float, length: int, width: int) -> slice:
    """Return the samples around a place along an axis, as many as there are up to `width`."""
    start = min(max(round(place) - width // 2, 0), max(length - width, 0))
    return slice(start, min(start + width, length))


def denoised(samples: Samples, settings: Settings, progress: Any = False) -> Result:
    shape, axes = samples.data.shape, samples.axes
    single = axes.replace("I", "")
    side = [axis for axis, letter in enumerate(axes) if letter == "I"]
    colours = slice(0, 3) if samples.opaque else slice(None)

    def place(index: tuple[int, ...]) -> tuple[Any, ...]:
        own = dict(zip(side, index, strict=True))
        return tuple(own.get(axis, colours if letter == "C" else slice(None)) for axis, letter in enumerate(axes))

    given = np.dtype(samples.data.dtype)
    whole = given.kind in "biu"
    kept = samples.rgb and whole  # the viewer takes colours in integers, or in floats from 0 to 1
    found = np.empty(shape, given if kept else np.float32 if given.itemsize <= 2 else given if not whole else float)
    if samples.opaque:
        found[..., 3] = samples.data[..., 3]
    with warnings_kept() as warned:
        images, info = each_item(
            denoise, tuple(shape[axis] for axis in side), lambda index: np.asarray(samples.data[place(index)]), {},
            progress, sigma=settings.sigma, axes=single, spacing=samples.spacing, noise=settings.noise,
            quality=settings.quality, strength=settings.strength, preserve_range=True,
        )  # fmt: skip
    for index, image in zip(np.ndindex(*(shape[axis] for axis in side)), images, strict=True):
        found[place(index)] = rounded(image, given) if kept else image
    return Result(found, samples.corner, (*_lines(info), *warned))


def _lines(info: DenoiseInfo) -> list[str]:
    each = info.columns or (info,)
    idle = [one for one in each if one.stopped_by.startswith(_UNCHANGED)]
    busy = [one for one in each if one not in idle]
    lines = []
    if busy:
        levels = [one.sigma for one in busy]
        size = f"{min(levels):.4g}" + (f" to {max(levels):.4g}" if max(levels) > min(levels) else "")
        kinds = list(dict.fromkeys(one.noise for one in busy))
        lines += [
            f"noise: {'; '.join(kinds[:_KINDS])}{' and others' if len(kinds) > _KINDS else ''}",
            f"sigma: {size} ({'found out' if info.sigma_estimated else 'as given'})",
            f"removed: {info.residual:.4g} (root mean square), in {info.seconds:.2g} s",
        ]
    for reason in dict.fromkeys(one.stopped_by.removeprefix(_UNCHANGED) for one in idle):
        count = sum(one.stopped_by == _UNCHANGED + reason for one in idle)
        what = "nothing was done" if len(each) == 1 else f"nothing was done to {count} of {len(each)}"
        lines.append(f"{what}: {reason}")
    return lines


def layer_of(layer: Any, result: Result, word: str) -> tuple[Array, dict[str, Any], str]:
    """Return data, attributes and kind of a layer at the place of a part of another one."""
    _, attributes, kind = layer.as_layer_data_tuple()
    attributes = dict(attributes)
    for name in ("multiscale", "locked_data_level"):  # of the data, which are others
        attributes.pop(name, None)
    attributes |= {
        "name": f"{layer.name} {word}",
        "metadata": {**layer.metadata, "nlflow": list(result.said)},
        "translate": _translate(layer, result.corner),
    }
    return result.data, attributes, kind


def _translate(layer: Any, corner: tuple[int, ...]) -> list[float]:
    """Return where the part of a layer that begins at a corner lies in the space that the layer's `affine` maps."""
    place = np.asarray(layer.data_to_world(corner)) - np.asarray(layer.data_to_world([0.0] * len(corner)))
    moved = np.linalg.solve(np.asarray(layer.affine.linear_matrix), place) if any(corner) else 0.0
    return [float(one) for one in np.asarray(layer.translate) + moved]
