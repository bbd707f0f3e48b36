"""Pictures with noise of all kinds, drawn at random: what the evidence of noise is learned from.

A drawing is a scene, an optics that blurs it, an instrument, and two shots of it. Half the square of the difference of
the shots is the noise, whatever clipping, rounding, interpolation and JPEG made of it, so no truth is needed.

Scenes are photographs of several collections (pieces of them, in colours or grey, halved at times) and drawn ones:
dead leaves, letters, drawings, screens, filaments and cells, skies, phantoms, landscapes, plain shades. Set12 and the
scenes of `benchmarks.blind.instruments` are left out: they judge what was learned.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter, gaussian_filter1d, map_coordinates, zoom

from benchmarks.blind.simulated_camera import DEMOSAICKING, SUBSAMPLING, Camera

Array = NDArray[np.float64]
Generator = np.random.Generator
SIDES: Final = (96, 320)  # of a drawing, in pixels
_WORDS: Final = (
    "noise", "light", "count", "field", "quiet", "flat", "blocks", "hold", "least", "structure", "tell", "which",
    "kind", "it", "has", "0123", "4567", "89",
)  # fmt: skip
_OF_SCIKIT_IMAGE: Final = (
    "coffee", "astronaut", "hubble_deep_field", "brick", "grass", "gravel", "motorcycle_left", "retina", "ihc",
    "rocket",
)  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """Two shots (H, W, C) of a scene, as an instrument writes them, and what it is called."""

    first: NDArray[Any]
    second: NDArray[Any]
    kind: str


# ---- scenes, (H, W, 3) or (H, W, 1), from 0 to 1


class Photographs:
    """Pieces of photographs of some folders, or of some of them."""

    def __init__(self, data: Path, chosen: slice = slice(None)):
        import skimage.data
        import sklearn.datasets

        held = Path(skimage.data.__file__).parent
        paths = [path for name in _OF_SCIKIT_IMAGE for path in held.glob(f"{name}.*")]
        paths += sorted((Path(sklearn.datasets.__file__).parent / "images").glob("*.jpg"))
        paths += sorted((data / "BSD68-even").glob("*.png")) + sorted((data / "Kodak24").glob("*.png"))
        paths += sorted((data / "PolyU-even").glob("*_mean.JPG"))[::2]
        self.paths = paths[chosen]

    def draw(self, rng: Generator, shape: tuple[int, int]) -> Array:
        picture = _read(self.paths[rng.integers(len(self.paths))])
        if rng.random() < 0.3 and min(picture.shape[:2]) >= 2 * min(shape):  # smaller and sharper
            rows, columns = (n // 2 * 2 for n in picture.shape[:2])
            even = picture[:rows, :columns]
            picture = (even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2]) / 4
        return _piece(picture, shape, rng)


@lru_cache(maxsize=128)
def _read(path: Path) -> Array:
    picture = np.asarray(Image.open(path).convert("RGB"), np.float64) / 255
    return picture


def _piece(picture: Array, shape: tuple[int, int], rng: Generator) -> Array:
    size = [min(n, m) for n, m in zip(shape, picture.shape, strict=False)]
    top, left = (rng.integers(0, m - n + 1) for n, m in zip(size, picture.shape, strict=False))
    piece = picture[top : top + size[0], left : left + size[1]]
    return np.ascontiguousarray(np.rot90(piece, rng.integers(4)))


def _colour(rng: Generator) -> Array:
    grey = rng.uniform(0, 1)
    return np.clip(grey + rng.uniform(0, 0.6) * rng.uniform(-0.5, 0.5, 3), 0, 1)


def leaves(rng: Generator, shape: tuple[int, int]) -> Array:
    """Draw dead leaves: discs of all sizes over each other, some with a texture."""
    picture = np.tile(_colour(rng), (*shape, 1))
    rows, columns = np.indices(shape)
    texture = _fractal(rng, shape, rng.uniform(0.8, 2.0))[..., None] - 0.5
    for _ in range(int(rng.integers(20, 200))):
        radius = min(3 / rng.uniform(0.03, 1.0), 80)
        y, x = rng.uniform(0, shape[0]), rng.uniform(0, shape[1])
        inside = (rows - y) ** 2 + (columns - x) ** 2 < radius**2
        own = _colour(rng) + (rng.uniform(0, 0.6) * texture[inside] if rng.random() < 0.4 else 0)
        picture[inside] = own
    return np.clip(gaussian_filter(picture, (0.5, 0.5, 0)), 0, 1)


def _fractal(rng: Generator, shape: tuple[int, int], power: float) -> Array:
    frequency = np.hypot(np.fft.fftfreq(shape[0])[:, None], np.fft.rfftfreq(shape[1])[None])
    frequency[0, 0] = np.inf
    rough = np.fft.irfft2(np.fft.rfft2(rng.normal(size=shape)) / frequency**power, shape)
    return (rough - rough.min()) / np.ptp(rough)


def landscape(rng: Generator, shape: tuple[int, int]) -> Array:
    rough = _fractal(rng, shape, rng.uniform(1.2, 2.5))
    if rng.random() < 0.5:
        rough = np.abs(rough - np.median(rough))
    return (rough / rough.max())[..., None]


def letters(rng: Generator, shape: tuple[int, int]) -> Array:
    size = int(rng.integers(9, 40))
    ground, ink = (235, 25) if rng.random() < 0.6 else rng.integers(0, 256, 2)
    page = Image.new("L", (shape[1], shape[0]), int(ground))
    draw, font = ImageDraw.Draw(page), ImageFont.load_default(size)
    if rng.random() < 0.3:
        draw.fontmode = "1"
    for top in range(int(rng.integers(0, size)), shape[0], int(rng.uniform(1.2, 2) * size)):
        if rng.random() < 0.85:
            draw.text((rng.integers(-10, 20), top), " ".join(rng.choice(_WORDS, 14)), fill=int(ink), font=font)
    if rng.random() < 0.3:
        page = page.rotate(rng.uniform(-4, 4), Image.Resampling.BICUBIC, fillcolor=int(ground))
    return np.asarray(page, np.float64)[..., None] / 255


def screen(rng: Generator, shape: tuple[int, int]) -> Array:
    """Draw a screen: windows, rules, letters, icons, a diagram; plain colours to the last bit."""
    page = Image.new("RGB", (shape[1], shape[0]), tuple((255 * _colour(rng)).astype(int)))
    draw = ImageDraw.Draw(page)
    for _ in range(int(rng.integers(4, 40))):
        x, y = rng.integers(0, shape[1]), rng.integers(0, shape[0])
        w, h = rng.integers(2, 140), rng.integers(2, 90)
        fill = tuple((255 * _colour(rng)).astype(int))
        kind = rng.integers(4)
        if kind == 0:
            draw.rectangle((x, y, x + w, y + h), fill=fill)
        elif kind == 1:
            draw.line((x, y, x + w, y + rng.integers(-60, 60)), fill=fill, width=int(rng.integers(1, 4)))
        elif kind == 2:
            draw.ellipse((x, y, x + w, y + h), outline=fill, width=int(rng.integers(1, 4)))
        else:
            font = ImageFont.load_default(int(rng.integers(9, 24)))
            draw.text((x, y), " ".join(rng.choice(_WORDS, 3)), fill=fill, font=font)
    return np.asarray(page, np.float64) / 255


def cells(rng: Generator, shape: tuple[int, int]) -> Array:
    field = np.zeros(shape)
    for _ in range(int(rng.integers(3, 40))):
        place, angle = rng.uniform(0, 1, 2) * shape, rng.uniform(0, 2 * np.pi)
        for _ in range(300):
            angle += rng.normal(0, 0.06)
            place = place + 0.8 * np.array([np.sin(angle), np.cos(angle)])
            if place.min() < 0 or (place >= shape).any():
                break
            field[tuple(place.astype(int))] += 1
    field = gaussian_filter(field, rng.uniform(0.8, 2))
    field /= max(np.percentile(field, 99.5), 1e-9)
    rows, columns = np.indices(shape)
    for _ in range(int(rng.integers(0, 25))):
        (y, x), (a, b) = rng.uniform(0, 1, 2) * shape, rng.uniform(5, 50, 2)
        field += rng.uniform(0.1, 0.6) * np.exp(-(((rows - y) / a) ** 4) - ((columns - x) / b) ** 4)
    return np.clip(field / field.max() + rng.uniform(0, 0.1), 0, 1)[..., None]


def sky(rng: Generator, shape: tuple[int, int]) -> Array:
    field = np.zeros(shape)
    for _ in range(int(rng.integers(5, 250))):
        field[tuple((rng.uniform(0, 1, 2) * shape).astype(int))] += min(0.002 * (1 + rng.pareto(1.0)), 1.0)
    stars = gaussian_filter(field, rng.uniform(0.8, 2.2))
    rows, columns = np.indices(shape)
    for _ in range(int(rng.integers(0, 6))):
        (y, x), size = rng.uniform(0, 1, 2) * shape, rng.uniform(4, 30)
        stars += rng.uniform(0, 0.05) * stars.max() * np.exp(-np.hypot((rows - y) / size, (columns - x) / size / 0.6))
    return (stars / stars.max() * rng.uniform(0.3, 1) + rng.uniform(0, 0.2))[..., None]


def phantom(rng: Generator, shape: tuple[int, int]) -> Array:
    rows, columns = np.indices(shape)
    picture = np.zeros(shape)
    for k in range(int(rng.integers(4, 18))):
        (y, x) = np.array(shape) / 2 if k < 2 else rng.uniform(0.2, 0.8, 2) * shape
        a, b = (rng.uniform(0.3, 0.48, 2) if k < 2 else rng.uniform(0.02, 0.25, 2)) * shape
        angle = rng.uniform(0, np.pi)
        u = (rows - y) * np.cos(angle) + (columns - x) * np.sin(angle)
        v = -(rows - y) * np.sin(angle) + (columns - x) * np.cos(angle)
        picture[(u / a) ** 2 + (v / b) ** 2 < 1] = rng.uniform(0.1, 1)
    picture *= 1 + rng.uniform(0, 0.2) * (2 * _fractal(rng, shape, rng.uniform(0.8, 2)) - 1)
    return np.clip(gaussian_filter(picture, rng.uniform(0.3, 1.2)), 0, 1)[..., None]


def shades(rng: Generator, shape: tuple[int, int]) -> Array:
    """Draw plain and slowly changing shades, a chart of fields, or a flat field."""
    rows, columns = (np.linspace(-1, 1, n) for n in shape)
    soft = rng.uniform(-1, 1) * rows[:, None] + rng.uniform(-1, 1) * columns + rng.uniform(-1, 1) * rows[:, None] ** 2
    picture = np.tile(_colour(rng), (*shape, 1)) + rng.choice([0, 0.05, 0.3]) * soft[..., None]
    if rng.random() < 0.5:
        side = int(rng.integers(16, 70))
        table = np.array([[_colour(rng) for _ in range(shape[1] // side + 1)] for _ in range(shape[0] // side + 1)])
        picture = 0.2 * picture + 0.8 * table.repeat(side, 0).repeat(side, 1)[: shape[0], : shape[1]]
    return np.clip(picture, 0, 1)


DRAWN: Final[tuple[Callable[[Generator, tuple[int, int]], Array], ...]] = (
    leaves, landscape, letters, screen, cells, sky, phantom, shades,
)  # fmt: skip


def scene(rng: Generator, photographs: Photographs) -> Array:
    """Draw a scene of a random size, seen through an optics."""
    shape = tuple(round(v) for v in np.exp(rng.uniform(*np.log(SIDES), 2)))
    clean = photographs.draw(rng, shape) if rng.random() < 0.55 else DRAWN[rng.integers(len(DRAWN))](rng, shape)
    if clean.shape[-1] == 3 and rng.random() < 0.45:
        clean = clean @ np.array([[0.299], [0.587], [0.114]])
    if rng.random() < 0.4:
        width = rng.uniform(0.3, 1.6)
        clean = gaussian_filter(clean, (width, width, 0))
    if rng.random() < 0.1:  # magnified
        factor = rng.uniform(1.3, 2.5)
        piece = clean[: int(clean.shape[0] / factor) + 2, : int(clean.shape[1] / factor) + 2]
        clean = np.clip(zoom(piece, (factor, factor, 1), order=int(rng.choice([1, 3]))), 0, 1)
    low = rng.uniform(0, 0.3) if rng.random() < 0.3 else 0.0
    return low + (rng.uniform(0.2, 1) if rng.random() < 0.3 else 1.0) * (1 - low) * clean


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
    return np.real(np.fft.ifft2(np.fft.fft2(white, axes=(0, 1)) / frequency[..., None] ** min(width, 1.2), axes=(0, 1)))


def additive(clean: Array, rng: Generator) -> Callable[[], Array]:
    """White or coloured noise, alike everywhere or by the light."""
    level = _loudness(rng)
    light = np.ones(1)
    if rng.random() < 0.4:
        offset, slope = rng.uniform(0.02, 1), rng.choice([-0.9, 1, 1, 1])
        light = np.sqrt(np.maximum(offset + slope * gaussian_filter(clean.mean(-1), 0.5)[..., None], 0.05))
        light = light / np.sqrt(np.mean(light**2))
    kind, width = int(rng.integers(7)), float(rng.uniform(0.3, 2.2))
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


def photograph(clean: Array, rng: Generator) -> Callable[[], Array]:
    """A camera to sRGB, with 8 bits; see `benchmarks.blind.simulated_camera`."""
    camera = Camera(
        np.exp(rng.uniform(np.log(150), np.log(15000))), read=rng.uniform(1, 5),
        demosaicking=str(rng.choice(list(DEMOSAICKING))), gains=(rng.uniform(1.2, 2.4), 1.0, rng.uniform(1.2, 2.4)),
        lens=rng.uniform(0.3, 1.0),
    )  # fmt: skip
    picture = np.clip(255 * (clean if clean.shape[-1] == 3 else clean.repeat(3, -1)), 0, 255)
    rows, columns = (n // 2 * 2 for n in picture.shape[:2])
    raw = camera.raw(picture[:rows, :columns])
    way = rng.integers(4)
    soft = rng.uniform(0.5, 2.0)

    def shot() -> Array:
        found = camera.developed(camera.exposed(raw, rng)) / 255
        if way == 0:  # colours are smoothed, as phones do
            grey = found.mean(-1, keepdims=True)
            found = grey + gaussian_filter(found - grey, (soft, soft, 0))
        if way == 1:
            found = found + 0.7 * (found - gaussian_filter(found, (soft, soft, 0)))
        return found if clean.shape[-1] == 3 else found.mean(-1, keepdims=True)

    return shot


def draw(rng: Generator, photographs: Photographs) -> Drawing:
    """Return two shots of a random scene with a random instrument; a tenth has no noise."""
    clean = scene(rng, photographs)
    which = rng.random()
    if which < 0.13:
        kind, shot = "clean", lambda: clean
    elif which < 0.6:
        kind, shot = "additive", additive(clean, rng)
    elif which < 0.75:
        kind, shot = "counting", counting(clean, rng)
    else:
        kind, shot = "photograph", photograph(clean, rng)
    written = rng.random()
    compressed = written < (0.75 if kind == "photograph" else 0.15)
    quality, colours = int(rng.integers(70, 101)), int(rng.choice(list(SUBSAMPLING.values())))
    halved = rng.random() < (0.25 if kind == "photograph" else 0.05)
    unit = float(np.exp(rng.uniform(-8, 8))) if written > 0.75 and not compressed else 255.0

    def write(values: Array) -> NDArray[Any]:
        if halved:
            rows, columns = (n // 2 * 2 for n in values.shape[:2])
            even = values[:rows, :columns]
            values = (even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2]) / 4
        if not compressed and written > 0.5:
            return values * unit
        levels = np.clip(np.rint(255 * values), 0, 255).astype(np.uint8)
        if not compressed:
            return levels
        stream = io.BytesIO()
        image = Image.fromarray(levels if levels.shape[-1] == 3 else levels[..., 0])
        image.save(stream, "JPEG", quality=quality, subsampling=colours)
        return np.asarray(Image.open(stream)).reshape(levels.shape)

    return Drawing(write(shot()), write(shot()), f"{kind}{', JPEG' if compressed else ''}")
