"""A camera from the light to the JPEG file, so that noise of a real kind comes with its truth.

A picture in sRGB is turned back into linear light (IEC 61966-2-1), blurred by a lens, divided by the gains of the white
balance, and seen through a Bayer mosaic of which the first rows are RGRG and GBGB. The sensor adds Poisson noise of the
light and Gaussian noise of the readout. Then as in a camera: white balance, demosaicking, clipping to 0...1, the tone
curve of sRGB, 8 bits and JPEG. The white balance comes first, as the corrections of demosaicking suppose that colours
change alike. Without the lens the pictures would be sharper than any camera's, and false colours of the mosaic, which
JPEG halves, would be ten times the noise. Left out: the matrix of colours, the 14 bits of the raw samples (finer than
the noise), sharpening, and what a camera itself does against noise.

The truth is the mean of many files of the same scene, as in pairs of real photographs. So what lens, mosaic, clipping
and JPEG do alike in each shot is in both and no denoiser is asked for it; what varies from shot to shot is the noise.
The way without noise and JPEG would not do: of the error to it at ISO 800 with 4:2:0, most is what JPEG takes away from
colours without any noise.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import convolve, gaussian_filter

from benchmarks.denoising.methods import Array, eight_bits

SUBSAMPLING: Final = {"4:4:4": 0, "4:2:0": 2}  # as Pillow numbers them
RED, GREEN, BLUE = range(3)
SHOTS: Final = 100  # of which the truth is the mean: 1 % of the variance of the noise is left in it

# Demosaicking by lines: of all samples of a colour, the mean of the nearest.
_PLUS: Final = np.array([[0, 1, 0], [1, 4, 1], [0, 1, 0]]) / 4
_SQUARE: Final = np.array([[1, 2, 1], [2, 4, 2], [1, 2, 1]]) / 4
# Malvar, He and Cutler, "High-quality linear interpolation for demosaicing of Bayer-patterned color images", ICASSP
# 2004 (doi 10.1109/ICASSP.2004.1326587), figure 2: the same with a correction by the gradient of the colour at hand.
_GREEN_AT_OTHERS: Final = np.array(
    [[0, 0, -1, 0, 0], [0, 0, 2, 0, 0], [-1, 2, 4, 2, -1], [0, 0, 2, 0, 0], [0, 0, -1, 0, 0]]
) / 8  # fmt: skip
_AT_GREEN_OF_ITS_ROW: Final = np.array(
    [[0, 0, 0.5, 0, 0], [0, -1, 0, -1, 0], [-1, 4, 5, 4, -1], [0, -1, 0, -1, 0], [0, 0, 0.5, 0, 0]]
) / 8  # fmt: skip
_AT_GREEN_OF_OTHER_ROWS: Final = _AT_GREEN_OF_ITS_ROW.T
_AT_THE_OPPOSITE: Final = np.array(
    [[0, 0, -1.5, 0, 0], [0, 2, 0, 2, 0], [-1.5, 0, 6, 0, -1.5], [0, 2, 0, 2, 0], [0, 0, -1.5, 0, 0]]
) / 8  # fmt: skip


def to_light(srgb: NDArray[Any]) -> Array:
    """Return linear light 0...1 of sRGB values 0...1."""
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def to_srgb(light: NDArray[Any]) -> Array:
    """Return sRGB values 0...1 of linear light, which is clipped to 0...1."""
    kept = np.clip(light, 0, 1)
    return np.where(kept <= 0.0031308, kept * 12.92, 1.055 * kept ** (1 / 2.4) - 0.055)


def colours(shape: tuple[int, ...]) -> NDArray[np.int_]:
    """Return which colour each sample of an RGGB mosaic is."""
    rows, columns = np.indices(shape[:2]) % 2
    return rows + columns


def mosaic(light: Array) -> Array:
    """Return one colour a pixel, (H, W) of (H, W, 3)."""
    return np.take_along_axis(light, colours(light.shape)[..., None], axis=-1)[..., 0]


def bilinear(raw: Array) -> Array:
    """Return all colours by linear interpolation of the nearest samples."""
    at = colours(raw.shape)
    kernels = {RED: _SQUARE, GREEN: _PLUS, BLUE: _SQUARE}
    return np.stack([convolve(np.where(at == c, raw, 0), k, mode="mirror") for c, k in kernels.items()], axis=-1)


def gradient_corrected(raw: Array) -> Array:
    """Return all colours by the filters of Malvar, He and Cutler."""
    at, odd_rows = colours(raw.shape), np.indices(raw.shape)[0] % 2 == 1
    green = np.where(at == GREEN, raw, convolve(raw, _GREEN_AT_OTHERS, mode="mirror"))
    own, other, opposite = (
        convolve(raw, kernel, mode="mirror")
        for kernel in (_AT_GREEN_OF_ITS_ROW, _AT_GREEN_OF_OTHER_ROWS, _AT_THE_OPPOSITE)
    )
    red = np.select([at == RED, at == BLUE, ~odd_rows], [raw, opposite, own], other)
    blue = np.select([at == BLUE, at == RED, odd_rows], [raw, opposite, own], other)
    return np.stack([red, green, blue], axis=-1)


DEMOSAICKING: Final = {"bilinear": bilinear, "gradient-corrected": gradient_corrected}


@dataclass(frozen=True)
class Camera:
    """A camera at one of its settings.

    Attributes
    ----------
    electrons : float
        That fill a pixel. They halve with each doubling of the ISO number: 30 000 at ISO 100.
    read : float
        Standard deviation of the noise of the readout, in electrons.
    demosaicking : {'bilinear', 'gradient-corrected'}
    quality : int
        Of JPEG.
    subsampling : {'4:4:4', '4:2:0'}
        Of the colours in JPEG.
    gains : tuple of float
        Of red, green and blue in the white balance.
    lens : float
        Standard deviation of the Gaussian blur, in pixels.
    """

    electrons: float
    read: float = 3.0
    demosaicking: str = "bilinear"
    quality: int = 95
    subsampling: str = "4:2:0"
    gains: tuple[float, float, float] = (2.0, 1.0, 1.6)
    lens: float = 0.7

    def raw(self, picture: NDArray[np.uint8]) -> Array:
        """Return the mosaic (H, W) without noise, 1 where a pixel is full."""
        seen = gaussian_filter(to_light(picture / 255), (self.lens, self.lens, 0), mode="mirror")
        return mosaic(seen / np.asarray(self.gains))

    def variance(self, raw: Array) -> Array:
        """Return the variance of the noise of each sample of a mosaic without noise."""
        return raw / self.electrons + (self.read / self.electrons) ** 2

    def exposed(self, raw: Array, rng: np.random.Generator) -> Array:
        """Return the mosaic with noise. The dark level is known, so that samples below it stay negative."""
        counts = rng.poisson(raw * self.electrons) + rng.normal(0, self.read, raw.shape)
        return counts / self.electrons

    def developed(self, raw: Array) -> Array:
        """Return the picture (H, W, 3) of a mosaic, 0...255, neither rounded nor compressed."""
        balanced = raw * np.asarray(self.gains)[colours(raw.shape)]
        return 255 * to_srgb(DEMOSAICKING[self.demosaicking](balanced))

    def file(self, picture: Array) -> bytes:
        """Return the JPEG file of a picture 0...255."""
        written = io.BytesIO()
        image = Image.fromarray(eight_bits(picture))
        image.save(written, "JPEG", quality=self.quality, subsampling=SUBSAMPLING[self.subsampling])
        return written.getvalue()

    def shots(self, picture: NDArray[np.uint8], rng: np.random.Generator) -> Iterator[NDArray[np.uint8]]:
        """Yield what a reader finds in the file of one shot after the other, without end."""
        raw = self.raw(picture)
        while True:
            yield np.asarray(Image.open(io.BytesIO(self.file(self.developed(self.exposed(raw, rng))))))

    def pair(self, picture: NDArray[np.uint8], rng: np.random.Generator) -> tuple[NDArray[np.uint8], Array]:
        """Return one shot and the mean of `SHOTS` others."""
        shots = self.shots(picture, rng)
        first, total = next(shots), np.zeros(picture.shape)
        for shot in islice(shots, SHOTS):
            total += shot
        return first, total / SHOTS
