"""Scenes at random, (H, W, 3) or (H, W, 1), from 0 to 1: pieces of photographs, and drawn ones.

Set12 and the scenes of `benchmarks.blind.instruments` are left out: they judge what was learned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter, zoom
from scipy.spatial import cKDTree

Array = NDArray[np.float64]
Generator = np.random.Generator
SIDES: Final = (96, 384)  # of a drawing, in pixels
#: Typefaces that come with matplotlib. DejaVu Sans and Serif are left out: they judge what was learned.
_FACES: Final = (
    "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic", "cmr10", "cmss10", "cmtt10", "cmti10", "cmb10",
    "DejaVuSansMono", "DejaVuSansMono-Bold",
)  # fmt: skip
_WORDS: Final = (
    "noise", "light", "count", "field", "quiet", "flat", "blocks", "hold", "least", "structure", "tell", "which",
    "kind", "it", "has", "0123", "4567", "89", "Before", "We", "any", "further,", "hear", "me", "speak.", "You", "are",
    "resolved", "rather", "to", "die", "than", "famish?", "First,", "enemy", "corn", "price",
)  # fmt: skip
_OF_SCIKIT_IMAGE: Final = (
    "coffee", "astronaut", "hubble_deep_field", "brick", "grass", "gravel", "motorcycle_left", "retina", "ihc",
    "rocket",
)  # fmt: skip


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


def _face(rng: Generator, size: int) -> Any:
    if rng.random() < 0.25:
        return ImageFont.load_default(size)
    folder = Path(matplotlib.__file__).parent / "mpl-data/fonts/ttf"
    return ImageFont.truetype(str(folder / f"{rng.choice(_FACES)}.ttf"), size)


def letters(rng: Generator, shape: tuple[int, int]) -> Array:
    """Draw a page of text, at times turned, or on paper that is lit unevenly and has fibres."""
    size = int(rng.integers(9, 40))
    ground, ink = (
        (int(rng.integers(225, 256)), int(rng.integers(0, 60))) if rng.random() < 0.6 else rng.integers(0, 256, 2)
    )
    page = Image.new("L", (shape[1], shape[0]), int(ground))
    draw, font = ImageDraw.Draw(page), _face(rng, size)
    if rng.random() < 0.2:
        draw.fontmode = "1"
    for top in range(int(rng.integers(0, size)), shape[0], int(rng.uniform(1.1, 2) * size)):
        if rng.random() < 0.9:
            draw.text((rng.integers(-10, 20), top), " ".join(rng.choice(_WORDS, 14)), fill=int(ink), font=font)
    if rng.random() < 0.3:
        page = page.rotate(rng.uniform(-4, 4), Image.Resampling.BICUBIC, fillcolor=int(ground))
    picture = np.asarray(page, np.float64)[..., None] / 255
    if rng.random() < 0.25:
        light = 1 + rng.uniform(0, 0.5) * (_fractal(rng, shape, 2.5) - 0.5)
        fibres = rng.uniform(0, 0.04) * gaussian_filter(rng.normal(size=shape), rng.uniform(0.6, 1.5, 2))
        picture = np.clip(picture * (light + fibres)[..., None], 0, 1)
    return picture


def blades(rng: Generator, shape: tuple[int, int]) -> Array:
    """Draw short strokes all over each other, as of grass, hair or straw."""
    page = Image.new("L", (2 * shape[1], 2 * shape[0]), 90)
    draw = ImageDraw.Draw(page)
    angle, turned, length = rng.uniform(0, np.pi), rng.uniform(0.1, 1.5), rng.uniform(6, 60)
    count = int(rng.uniform(0.5, 2) * 4 * shape[0] * shape[1] / length)
    places = rng.uniform(0, 1, (count, 2)) * (2 * shape[1], 2 * shape[0])
    ways = rng.normal(angle, turned, count)
    ends = places + length * np.exp(rng.normal(0, 0.4, (count, 1))) * np.stack([np.cos(ways), np.sin(ways)], axis=1)
    shades, widths = rng.integers(20, 236, count), rng.integers(1, 5, count)
    for place, end, shade, width in zip(places, ends, shades, widths, strict=True):
        draw.line((*place, *end), fill=int(shade), width=int(width))
    picture = np.asarray(page.resize((shape[1], shape[0]), Image.Resampling.BOX), np.float64)[..., None] / 255
    low, contrast = rng.uniform(0, 0.5), rng.uniform(0.1, 1)
    return np.clip(low + contrast * (1 - low) * picture, 0, 1) * (rng.uniform(0.5, 1, 3) if rng.random() < 0.4 else 1.0)


def regions(rng: Generator, shape: tuple[int, int]) -> Array:
    """Draw fields about random seeds: depths, labels, fields of a map."""
    seeds = rng.uniform(0, 1, (int(np.exp(rng.uniform(1, 5.5))), 2)) * shape
    nearest = cKDTree(seeds).query(np.stack(np.indices(shape), axis=-1))[1]
    levels = rng.integers(0, 256, len(seeds)) / 255
    slopes = rng.uniform(-0.5, 0.5, (len(seeds), 2)) / np.array(shape) * (rng.random() < 0.4)
    along = (slopes[nearest] * (np.stack(np.indices(shape), axis=-1) - seeds[nearest])).sum(axis=-1)
    return np.clip(levels[nearest] + along, 0, 1)[..., None]


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
            draw.text((x, y), " ".join(rng.choice(_WORDS, 3)), fill=fill, font=_face(rng, int(rng.integers(9, 24))))
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
    leaves, landscape, letters, letters, screen, cells, sky, phantom, shades, blades, regions,
)  # fmt: skip


def scene(rng: Generator, photographs: Photographs) -> Array:
    """Draw a scene of a random size, seen through an optics."""
    shape = tuple(round(v) for v in np.exp(rng.uniform(*np.log(SIDES), 2)))
    clean = photographs.draw(rng, shape) if rng.random() < 0.5 else DRAWN[rng.integers(len(DRAWN))](rng, shape)
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
