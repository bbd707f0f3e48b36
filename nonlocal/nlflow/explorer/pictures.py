"""Arrays as pictures in grey levels or colours, and as lines with no more points than a page has pixels.

All pictures of a view have one scale of grey levels, which their captions give. Residuals are drawn in grey levels too,
with 0 in the middle: this is even to the eye, and the same for colour-blind people and on paper.
"""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nlflow.io.formats.media import Array, upright

#: Pixels along the longer side beyond which a picture is shown reduced.
MOST_PIXELS = 1024
_BULK = (0.1, 99.9)  # percentiles: a few hot pixels do not count
_SMALL = 0.25  # of the range of 16 bits
_POINTS = 1600  # of a line: pairs of least and largest value


@dataclass(frozen=True)
class Scale:
    """The values that are drawn black and white."""

    low: float
    high: float

    def levels(self, values: Array) -> NDArray[np.uint8]:
        """Return values as grey levels; values outside the scale are black or white."""
        span = self.high - self.low
        shares = (values.astype(np.float64) - self.low) / (span if span > 0 else 1.0)
        return np.rint(np.clip(shares, 0, 1) * 255).astype(np.uint8)


def grey_scale(values: Array) -> Scale:
    """Return the scale of samples: all of an 8-bit or 16-bit type, otherwise from the least to the largest.

    16-bit samples that use less than a quarter of their range, as those of 12-bit cameras do, are shown from their
    0.1 % to their 99.9 % percentile: in the whole range they would be nearly black.
    """
    if values.dtype == np.uint16 and values.size:
        low, high = (float(x) for x in np.percentile(values, _BULK))
        if 0 < high - low < _SMALL * np.iinfo(np.uint16).max:
            return Scale(low, high)
    if values.dtype in (np.uint8, np.uint16):
        return Scale(0.0, float(np.iinfo(values.dtype).max))
    finite = values[np.isfinite(values)]
    return Scale(float(finite.min()), float(finite.max())) if finite.size else Scale(0.0, 1.0)


def residual_scale(sigma: float) -> Scale:
    """Return the scale of a residual: three standard deviations of the noise to each side of 0."""
    reach = 3 * sigma if sigma > 0 else 1.0
    return Scale(-reach, reach)


def picture(values: Array, scale: Scale, channel_axis: int | None = None, orientation: int = 1) -> tuple[bytes, str]:
    """Return an image as the content of a PNG file, and a note on what is not shown as it is.

    Parameters
    ----------
    values : array of shape (H, W), with an axis of channels if `channel_axis` says so
        Three channels are colours; of other numbers the mean is shown.
    scale : Scale
    channel_axis : int, optional
    orientation : int
        See `nlflow.io.files.Media`.
    """
    from PIL import Image

    notes = []
    if channel_axis is not None:
        values = np.moveaxis(values, channel_axis, -1)
        if values.shape[-1] != 3:
            if values.shape[-1] > 1:
                notes.append(f"the mean of {values.shape[-1]} channels is shown")
            values = values.mean(axis=-1)
    values, factor = _reduced(upright(values, orientation))
    if factor > 1:
        notes.append(f"shown at 1/{factor} of its size, means of {factor} × {factor} pixels")
    stream = io.BytesIO()
    # Little compression: the picture goes over the loopback, and the page waits for it.
    Image.fromarray(np.ascontiguousarray(scale.levels(values))).save(stream, "PNG", compress_level=1)
    return stream.getvalue(), "; ".join(notes)


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
    """Return the content of a PNG file as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def envelope(values: Array) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return places and values of a line (N,) with few points: the least and the largest value of each stretch.

    No peak is lost. Lines of few points come back as they are.
    """
    n = len(values)
    if n <= 2 * _POINTS:
        return np.arange(n, dtype=np.float64), values.astype(np.float64)
    starts = np.linspace(0, n, _POINTS + 1).astype(np.int64)
    low = np.minimum.reduceat(values, starts[:-1])
    high = np.maximum.reduceat(values, starts[:-1])
    places = np.repeat((starts[:-1] + starts[1:] - 1) / 2, 2)
    return places, np.stack([low, high], axis=1).ravel().astype(np.float64)
