"""Pictures with noise of all kinds, drawn at random: what the evidence of noise is learned from.

A drawing is a scene, an optics that blurs it, an instrument, and two shots of it. Half the square of the difference of
the shots is the noise, whatever clipping, rounding, interpolation and JPEG made of it, so no truth is needed.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.ndimage import (
    convolve,
    gaussian_filter,
    gaussian_filter1d,
    map_coordinates,
    median_filter,
    uniform_filter,
    zoom,
)

from benchmarks.blind.drawn_scenes import Photographs, letters, scene, screen
from benchmarks.blind.simulated_camera import (
    DEMOSAICKING,
    GREEN,
    Camera,
    bilinear,
    colours,
    gradient_corrected,
    to_srgb,
)

Array = NDArray[np.float64]
Generator = np.random.Generator
_RESAMPLED: Final = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class Drawing:
    """Two shots (H, W, C) of a scene, as an instrument writes them, what it is called, and what is missing."""

    first: NDArray[Any]
    second: NDArray[Any]
    kind: str
    missing: NDArray[np.bool_] | None = None


# ---- instruments: two shots of a scene


def _loudness(rng: Generator) -> float:
    return float(np.exp(rng.uniform(np.log(0.8), np.log(70)))) / 255


def _coloured(white: Array, kind: int, width: float, rng: Generator) -> Array:
    """Return noise (H, W, C) that is blurred, in one direction or both, sharpened, resampled or like 1/f."""
    if kind == 0:
        return gaussian_filter(white, (width, width, 0))
    if kind == 1:
        return gaussian_filter1d(white, width, axis=int(width * 1000) % 2)
    if kind == 2:  # resampled by lines, at shifts of parts of a pixel
        shift = (width % 1, (7 * width) % 1)
        grid = np.indices(white.shape[:2]) + np.array(shift)[:, None, None]
        return np.stack(
            [map_coordinates(white[..., c], grid, order=1, mode="wrap") for c in range(white.shape[-1])], -1
        )
    if kind == 3:
        return white + (1 + width) * (white - gaussian_filter(white, (1, 1, 0)))
    if kind == 4:  # white, and blurred
        soft = gaussian_filter(white[::-1, ::-1], (1 + width, 1 + width, 0))
        return white + soft / soft.std() * white.std() * min(width, 1.5)
    if kind == 5:  # magnified
        factor = 1.2 + width
        part = white[: int(white.shape[0] / factor) + 2, : int(white.shape[1] / factor) + 2]
        large = zoom(part, (factor, factor, 1), order=1)
        return large[: white.shape[0], : white.shape[1]]
    frequency = np.hypot(np.fft.fftfreq(white.shape[0])[:, None], np.fft.fftfreq(white.shape[1]))
    frequency[0, 0] = frequency[0, 1]
    if kind == 6:  # of a band, as projections that are put together leave it
        shaped = frequency ** (7 * width % 1.5) * np.exp(-((frequency * (1 + 2 * width)) ** 2))
        return np.real(np.fft.ifft2(np.fft.fft2(white, axes=(0, 1)) * shaped[..., None], axes=(0, 1)))
    return np.real(np.fft.ifft2(np.fft.fft2(white, axes=(0, 1)) / frequency[..., None] ** min(width, 1.2), axes=(0, 1)))


def additive(clean: Array, rng: Generator) -> Callable[[], Array]:
    """White or coloured noise, alike everywhere or by the light."""
    level = _loudness(rng)
    light = np.ones(1)
    if rng.random() < 0.4:
        offset, slope = rng.uniform(0.02, 1), rng.choice([-0.9, 1, 1, 1])
        light = np.maximum(offset + slope * gaussian_filter(clean.mean(-1), 0.5)[..., None], 0.05) ** rng.uniform(
            0.3, 1.5
        )
        light = light / np.sqrt(np.mean(light**2))
    kind = int(rng.choice([0, 0, 0, 1, 2, 2, 3, 4, 5, 6, 6, 7]))
    width = float(rng.uniform(0.3, 3.5 if kind == 0 else 2.2))
    colour = rng.random() < 0.5
    each = np.exp(rng.uniform(-0.4, 0.4, clean.shape[-1])) if rng.random() < 0.2 else np.ones(clean.shape[-1])

    def shot() -> Array:
        noise = rng.normal(size=clean.shape)
        if colour:
            noise = _coloured(noise, kind, width, rng)
            noise /= noise.std()
        return clean + level * light * each * noise

    return shot


def counting(clean: Array, rng: Generator) -> Callable[[], Array]:
    """Counts of some light and the noise of a readout; multiplied by chance at times."""
    full = np.exp(rng.uniform(np.log(8), np.log(4000)))
    read, multiplied = rng.uniform(0, 5) * (rng.random() < 0.7), rng.random() < 0.2
    blur = rng.uniform(0.4, 0.9) if rng.random() < 0.15 else 0.0

    def shot() -> Array:
        counts = rng.poisson(full * np.maximum(clean, 0)).astype(np.float64)
        if multiplied:
            counts = rng.gamma(np.maximum(counts, 1e-9), 1.0)
        if blur:
            counts = gaussian_filter(counts, (blur, blur, 0))
        return (counts + rng.normal(0, 1, clean.shape) * read) / full

    return shot


def edge_directed(raw: Array) -> Array:
    """Return all colours: green along the direction that changes less, others by their difference to it.

    After Hamilton and Adams, US patent 5 629 734 (1997).
    """
    at, found = colours(raw.shape), []
    for axis in (0, 1):
        near, far = (
            convolve(raw, np.reshape(k, (-1, 1) if axis == 0 else (1, -1)), mode="mirror")
            for k in ([0.5, 0, 0.5], [-1, 0, 2, 0, -1])
        )
        sides = convolve(raw, np.reshape([1.0, 0, -1], (-1, 1) if axis == 0 else (1, -1)), mode="mirror")
        found.append((near + far / 4, np.abs(sides) + np.abs(far)))
    (down, steep), (along, wide) = found
    green = np.where(at == GREEN, raw, np.where(steep < wide, down, np.where(wide < steep, along, (down + along) / 2)))
    rest = bilinear(np.where(at == GREEN, 0, raw - green))
    return np.stack([green + rest[..., 0], green, green + rest[..., 2]], axis=-1)


def binned(raw: Array) -> Array:
    """Return a picture of half the size, one pixel of each four samples."""
    return np.stack([raw[::2, ::2], (raw[::2, 1::2] + raw[1::2, ::2]) / 2, raw[1::2, 1::2]], axis=-1)


def guided(picture: Array, radius: int, least: float) -> Array:
    """Return a picture smoothed where its variance is below a number (guided filter by itself, He et al. 2010)."""
    size = (2 * radius + 1,) * 2 + (1,)
    mean = uniform_filter(picture, size)
    variance = np.maximum(uniform_filter(picture**2, size) - mean**2, 0)
    share = variance / (variance + least)
    return np.asarray(uniform_filter(share, size) * picture + uniform_filter((1 - share) * mean, size))


def cored(picture: Array, width: float, least: float) -> Array:
    """Return a picture whose fine details are shrunk by a number, and vanish below it."""
    soft = gaussian_filter(picture, (width, width, 0))
    fine = picture - soft
    return np.asarray(soft + np.sign(fine) * np.maximum(np.abs(fine) - least, 0))


@dataclass(frozen=True)
class Development:
    """What a camera makes of a mosaic, drawn at random: each is one of many that there are.

    Demosaicking, a matrix of colours, a tone curve, something against noise of the colours and of the luminance,
    sharpening, another size.
    """

    demosaick: Callable[[Array], Array]
    matrix: Array
    curve: tuple[float, float]  # exponent, strength of the S
    chroma: tuple[int, float]  # way, width
    luma: tuple[int, float, float]  # way, width, level
    sharp: tuple[float, float]  # amount, width
    factor: float
    resampled: Any

    @classmethod
    def draw(cls, rng: Generator) -> Development:
        ways: tuple[Callable[[Array], Array], ...] = (
            bilinear,
            gradient_corrected,
            edge_directed,
            edge_directed,
            binned,
        )
        mixed = (
            rng.uniform(0, 0.5) * np.array([[0, 0.6, 0.4], [0.3, 0, 0.3], [0.2, 0.8, 0]]) * rng.uniform(0.3, 1, (3, 3))
        )
        return cls(
            ways[rng.integers(len(ways))],
            np.diag(1 + mixed.sum(axis=1)) - mixed if rng.random() < 0.7 else np.eye(3),
            (rng.uniform(0.36, 0.6), rng.uniform(0, 0.8)) if rng.random() < 0.6 else (0.0, 0.0),
            (int(rng.integers(4)), rng.uniform(0.5, 2.5)),
            (int(rng.choice([0, 0, 0, 1, 2, 3])), rng.uniform(0.4, 2.0), float(np.exp(rng.uniform(-6, -3)))),
            (rng.uniform(0.2, 1.5) * (rng.random() < 0.5), rng.uniform(0.5, 1.6)),
            rng.uniform(0.4, 1.3) if rng.random() < 0.25 else 1.0, _RESAMPLED[rng.integers(3)],
        )  # fmt: skip

    def __call__(self, balanced: Array) -> Array:
        picture = np.clip(self.demosaick(balanced), 0, 1) @ self.matrix.T
        power, bent = self.curve
        picture = np.clip(picture, 0, 1) ** power if power else to_srgb(picture)
        picture = picture + bent * picture * (1 - picture) * (picture - 0.5)
        grey = picture.mean(axis=-1, keepdims=True)
        picture = self._luma(grey) + self._chroma(picture - grey)
        amount, width = self.sharp
        if amount:
            picture = picture + amount * (picture - gaussian_filter(picture, (width, width, 0)))
        return picture if self.factor == 1 else self._resized(np.clip(picture, 0, 1))

    def _chroma(self, apart: Array) -> Array:
        way, width = self.chroma
        if way == 1:
            return np.asarray(gaussian_filter(apart, (width, width, 0)))
        if way == 2:
            return np.asarray(median_filter(apart, (3 if width < 1.5 else 5,) * 2 + (1,)))
        return guided(apart, round(1 + width), 1e-3) if way == 3 else apart

    def _luma(self, grey: Array) -> Array:
        way, width, level = self.luma
        if way == 1:
            return guided(grey, round(1 + width), level**2)
        if way == 2:
            return cored(grey, width, level / 2)
        return np.asarray(gaussian_filter(grey, (width / 2, width / 2, 0))) if way == 3 else grey

    def _resized(self, picture: Array) -> Array:
        size = tuple(max(round(self.factor * n), 40) for n in picture.shape[1::-1])
        planes = [Image.fromarray(picture[..., c].astype(np.float32)).resize(size, self.resampled) for c in range(3)]
        return np.stack([np.asarray(plane, np.float64) for plane in planes], axis=-1)


def photograph(clean: Array, rng: Generator) -> Callable[[], Array]:
    """A camera to sRGB; see `benchmarks.blind.simulated_camera` and `Development`."""
    camera = Camera(
        np.exp(rng.uniform(np.log(150), np.log(15000))), read=rng.uniform(1, 5),
        demosaicking=str(rng.choice(list(DEMOSAICKING))), gains=(rng.uniform(1.2, 2.4), 1.0, rng.uniform(1.2, 2.4)),
        lens=rng.uniform(0.3, 1.0),
    )  # fmt: skip
    picture = np.clip(255 * (clean if clean.shape[-1] == 3 else clean.repeat(3, -1)), 0, 255)
    rows, columns = (n // 2 * 2 for n in picture.shape[:2])
    raw = camera.raw(picture[:rows, :columns])
    gains = np.asarray(camera.gains)[colours(raw.shape)]
    developed = Development.draw(rng)

    def shot() -> Array:
        found = developed(camera.exposed(raw, rng) * gains)
        return found if clean.shape[-1] == 3 else found.mean(-1, keepdims=True)

    return shot


# ---- what happens to a picture afterwards


def dithered(clean: Array, rng: Generator) -> Array:
    """Return a picture of few levels or of a palette; errors are spread, hidden in a matrix, or stay."""
    levels, way = int(np.exp(rng.uniform(np.log(3), np.log(48)))), rng.integers(4)
    values = np.clip(clean, 0, 1)
    if way == 0:  # ordered (Bayer 1973)
        order = np.array([[0, 2], [3, 1]])
        for _ in range(int(rng.integers(0, 3))):
            order = np.block([[4 * order, 4 * order + 2], [4 * order + 3, 4 * order + 1]])
        rows, columns = np.indices(values.shape[:2]) % len(order)
        return np.floor(values * (levels - 1) + (order[rows, columns, None] + 0.5) / order.size) / (levels - 1)
    if way == 1:
        return np.rint(values * (levels - 1)) / (levels - 1)
    image = Image.fromarray(np.rint(255 * values).astype(np.uint8).squeeze())
    if values.shape[-1] == 3 and rng.random() < 0.5:
        return np.asarray(image.quantize(max(levels, 8), dither=Image.Dither.FLOYDSTEINBERG).convert("RGB")) / 255
    shades = np.rint(np.linspace(0, 255, levels)).astype(int)
    palette = Image.new("P", (1, 1))
    palette.putpalette([int(v) for shade in shades for v in (shade,) * 3])
    planes = [
        np.asarray(plane.convert("RGB").quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG).convert("L"))
        for plane in image.split()
    ]
    return np.stack(planes, axis=-1) / 255


def lost(shape: tuple[int, ...], rng: Generator) -> NDArray[np.bool_]:
    """Draw which samples are missing: blobs, single ones, or what is outside a turned frame."""
    way = rng.integers(3)
    if way == 0:
        blobs = gaussian_filter(rng.normal(size=shape), rng.uniform(1, 8))
        return np.asarray(blobs > np.quantile(blobs, 1 - rng.uniform(0.01, 0.3)))
    if way == 1:
        return rng.random(shape) < rng.uniform(0.002, 0.1)
    rows, columns = (2 * v - 1 for v in np.indices(shape) / np.array(shape)[:, None, None])
    angle = rng.uniform(0, np.pi / 2)
    return np.maximum(
        np.abs(rows * np.cos(angle) - columns * np.sin(angle)), np.abs(rows * np.sin(angle) + columns * np.cos(angle))
    ) > rng.uniform(0.8, 1)


@dataclass(frozen=True)
class File:
    """How a picture is written: as floats in some unit, rounded, or compressed."""

    way: str  # 'floats', 'PNG', 'JPEG', 'WEBP'
    unit: float
    quality: int
    subsampling: int
    halved: bool

    @classmethod
    def draw(cls, rng: Generator, kind: str) -> File:
        written = rng.random()
        compressed = written < (0.75 if kind == "photograph" else 0.15)
        unit = float(np.exp(rng.uniform(-8, 8))) if written > 0.75 and not compressed else 255.0
        way = ("WEBP" if rng.random() < 0.05 else "JPEG") if compressed else "PNG" if written <= 0.5 else "floats"
        if kind == "photograph" and way == "floats":
            way = "PNG"
        return cls(
            way, unit, int(rng.integers(70, 101)), int(rng.choice([0, 1, 2, 2])),
            rng.random() < (0.2 if kind == "photograph" else 0.05),
        )  # fmt: skip

    def write(self, values: Array) -> NDArray[Any]:
        if self.halved:
            rows, columns = (n // 2 * 2 for n in values.shape[:2])
            even = values[:rows, :columns]
            values = (even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2]) / 4
        if self.way == "floats":
            return values * self.unit
        levels = np.clip(np.rint(255 * values), 0, 255).astype(np.uint8)
        if self.way == "PNG":
            return levels
        stream = io.BytesIO()
        image = Image.fromarray(levels if levels.shape[-1] == 3 else levels[..., 0])
        options = {"subsampling": self.subsampling} if self.way == "JPEG" else {}
        image.save(stream, self.way, quality=self.quality, **options)
        read = Image.open(stream)
        return np.asarray(read if levels.shape[-1] == 3 else read.convert("L")).reshape(levels.shape)


def montage(shots: list[NDArray[Any]], rng: Generator) -> list[NDArray[Any]]:
    """Return shots of which a part is covered by plain graphics, the same in both."""
    rows, columns, channels = shots[0].shape
    top, left = (int(rng.uniform(-0.5, 0.9) * n) for n in (rows, columns))
    part = np.s_[
        max(top, 0) : top + int(rng.uniform(0.3, 1.2) * rows),
        max(left, 0) : left + int(rng.uniform(0.3, 1.2) * columns),
    ]
    drawn = (screen if rng.random() < 0.6 else letters)(rng, (rows, columns))
    drawn = drawn.mean(axis=-1, keepdims=True) if channels == 1 else np.broadcast_to(drawn, shots[0].shape)
    low, high = float(shots[0].min()), float(shots[0].max())
    placed = low + (high - low) * drawn
    found = []
    for shot in shots:
        own = shot.copy()
        own[part] = np.rint(placed[part]) if np.issubdtype(shot.dtype, np.integer) else placed[part]
        found.append(own)
    return found


def draw(rng: Generator, photographs: Photographs) -> Drawing:
    """Return two shots of a random scene with a random instrument; a seventh has no noise."""
    clean = scene(rng, photographs)
    which = rng.random()
    shot: Callable[[], Array]
    if which < 0.15:
        kind, picture = "clean", clean
        if rng.random() < 0.25:
            kind, picture = "clean, few levels", dithered(clean, rng)
        shot = partial(np.copy, picture)
    elif which < 0.55:
        kind, shot = "additive", additive(clean, rng)
    elif which < 0.68:
        kind, shot = "counting", counting(clean, rng)
    else:
        kind, shot = "photograph", photograph(clean, rng)
    file = File.draw(rng, kind)
    shots = [file.write(shot()) for _ in range(2)]
    what = f"{kind}, {file.way}"
    if rng.random() < 0.04:
        shots, what = montage(shots, rng), f"{what}, montage"
    missing = lost(shots[0].shape[:2], rng) if rng.random() < 0.05 else None
    return Drawing(shots[0], shots[1], what if missing is None else f"{what}, missing", missing)
