"""Arrays as pictures."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nlflow.desk.formats.media import Array, as_stored, upright

#: Pixels along the longer side beyond which a picture is shown reduced.
MOST_PIXELS = 2048
_BULK = (0.1, 99.9)  # percentiles: a few hot pixels do not count
_SMALL = 0.25  # of the range of 8 bits
_SAMPLED = 2**20  # numbers at most from which a scale and a histogram are taken
_BINS = 64
_OVERVIEW = 360  # pixels along the longer side of a whole picture that is shown small
_POINTS = 2048  # of a line: pairs of least and largest value, at least one for each pixel of its drawing

_CORNERS = np.stack(np.meshgrid([0.0, 1.0], [0.0, 1.0], indexing="ij"), axis=-1)  # of an image, in shares of its axes


@dataclass(frozen=True)
class Scale:
    """Values that are shown black and white."""

    low: float
    high: float

    def levels(self, values: Array) -> NDArray[np.uint8]:
        span = self.high - self.low
        shares = (values.astype(np.float64) - self.low) / (span if span > 0 else 1.0)
        return np.rint(np.clip(shares, 0, 1) * 255).astype(np.uint8)


def sampled(values: Array) -> Array:
    some = values.reshape(-1)[:: -(-values.size // _SAMPLED) | 1]
    if some.dtype.kind == "b":
        return some.astype(np.uint8)
    return some if some.dtype.kind in "ui" else some[np.isfinite(some)]


def full_range(values: Array) -> Scale:
    if values.dtype == np.uint8:
        return Scale(0.0, 255.0)
    some = sampled(values)
    return Scale(float(some.min()), float(some.max())) if some.size else Scale(0.0, 1.0)


def grey_scale(values: Array) -> Scale:
    """Return the scale that is fitted to samples: from their 0.1 % to their 99.9 % percentile.

    For 8 bits it is the whole range, unless the samples use less than a quarter of it.
    """
    whole, some = full_range(values), sampled(values)
    if not some.size:
        return whole
    low, high = (float(x) for x in np.percentile(some, _BULK))
    keeps = values.dtype == np.uint8 and high - low >= _SMALL * (whole.high - whole.low)
    return whole if keeps or high <= low else Scale(low, high)


def histogram(values: Array, whole: Scale) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    # A range without room for bins, as that of a constant, gets some.
    room = _BINS * np.spacing(max(abs(whole.low), abs(whole.high)))
    high = whole.high if whole.high - whole.low > room else whole.low + max(abs(whole.low), 1.0)
    counts, edges = np.histogram(sampled(values), _BINS, (whole.low, high))
    return (edges[:-1] + edges[1:]) / 2, counts / max(int(counts.max()), 1)


def residual_scale(sigma: float) -> Scale:
    reach = 3 * sigma if sigma > 0 else 1.0
    return Scale(-reach, reach)


def picture(values: Array, scale: Scale, channel_axis: int | None = None, orientation: int = 1) -> tuple[bytes, str]:
    notes = []
    channels = 1 if channel_axis is None else values.shape[channel_axis]
    if channels not in (1, 3):
        notes.append(f"the mean of {channels} channels is shown")
    values, factor = _reduced(upright(_colours(values, channel_axis), orientation))
    if factor > 1:
        notes.append(f"shown at 1/{factor} of its size, means of {factor} × {factor} pixels")
    return _png(scale.levels(values)), "; ".join(notes)


def overview(values: Array, scale: Scale, channel_axis: int | None = None, orientation: int = 1) -> bytes:
    from PIL import Image

    axes = [axis for axis in range(values.ndim) if axis != channel_axis]
    # Some of the pixels of a very large image: it is there to find a place in it.
    step = max(max(values.shape[axis] for axis in axes) // (4 * _OVERVIEW), 1)
    some = values[tuple(slice(None, None, step) if axis in axes else slice(None) for axis in range(values.ndim))]
    image = Image.fromarray(scale.levels(upright(_colours(some, channel_axis), orientation)))
    image.thumbnail((_OVERVIEW, _OVERVIEW), Image.Resampling.BOX)
    return _png(np.asarray(image))


def _colours(values: Array, channel_axis: int | None) -> Array:
    if channel_axis is None:
        return values
    values = np.moveaxis(values, channel_axis, -1)
    return values if values.shape[-1] == 3 else values.mean(axis=-1)


def _png(levels: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    # Little compression: the picture goes over the loopback, and the page waits for it.
    Image.fromarray(np.ascontiguousarray(levels)).save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def stored_place(seen: tuple[float, float], orientation: int) -> tuple[float, float]:
    return _moved(seen, upright(_CORNERS, orientation))


def seen_box(part: Sequence[tuple[float, float]], orientation: int) -> tuple[float, float, float, float]:
    corners = as_stored(_CORNERS, orientation)
    (y, x), (v, w) = (_moved((part[0][end], part[1][end]), corners) for end in (0, 1))
    return min(y, v), min(x, w), abs(v - y), abs(w - x)


def _moved(place: tuple[float, float], corners: NDArray[np.float64]) -> tuple[float, float]:
    """Return where a turn or a mirror takes a place, by where the corners come from."""
    first = corners[0, 0]
    y, x = first + place[0] * (corners[1, 0] - first) + place[1] * (corners[0, 1] - first)
    return float(y), float(x)


def _reduced(values: Array) -> tuple[Array, int]:
    """Return an image reduced by means over square blocks if it is too large for a page, and the side of the blocks."""
    factor = math.ceil(max(values.shape[:2]) / MOST_PIXELS)
    if factor == 1:
        return values, 1
    rows, columns = (max(n // factor, 1) for n in values.shape[:2])
    height, width = (min(factor, n) for n in values.shape[:2])
    cut = values[: rows * height, : columns * width]
    return cut.reshape(rows, height, columns, width, *values.shape[2:]).mean(axis=(1, 3)), factor


def data_url(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def envelope(values: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    n = len(values)
    if n <= 2 * _POINTS:
        return np.arange(n, dtype=np.float64), values.astype(np.float64)
    starts = np.linspace(0, n, _POINTS + 1).astype(np.int64)
    low = np.minimum.reduceat(values, starts[:-1])
    high = np.maximum.reduceat(values, starts[:-1])
    places = np.repeat((starts[:-1] + starts[1:] - 1) / 2, 2)
    return places, np.stack([low, high], axis=1).ravel().astype(np.float64)
