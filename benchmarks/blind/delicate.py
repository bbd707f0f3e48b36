"""Pictures that a denoiser may not harm: without noise, and with noise of which their structure must be told apart.

`CLEAN` holds pictures without noise by kind and name; `NOISY` those with white noise, and the least PSNR in dB that is
asked of them; `sky` isolated stars of known flux.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import matplotlib
import numpy as np
import skimage.data
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from scipy.ndimage import gaussian_filter, zoom

from benchmarks.denoising.methods import Array

Picture = NDArray[np.uint8]
SIDE: Final = 256

PACKAGED: Final = (
    "astronaut", "brick", "camera", "chelsea", "clock", "coffee", "coins", "grass", "gravel", "moon", "rocket", "page",
    "text", "checkerboard", "colorwheel", "horse", "logo", "shepp_logan_phantom",
)  # fmt: skip


def packaged(name: str) -> Picture:
    """Return a picture of scikit-image as 8 bits, without the channel of its opacity."""
    picture = np.asarray(getattr(skimage.data, name)())[..., :3] if name == "logo" else getattr(skimage.data, name)()
    if picture.dtype == np.uint8:
        return np.asarray(picture)
    return np.rint(255.0 * picture).astype(np.uint8)  # of booleans and of 0...1


# ---- letters

LINES: Final = (
    "Before we proceed any further, hear me speak.", "You are all resolved rather to die than to famish?",
    "First, you know Caius Marcius is chief enemy", "Let us kill him, and we'll have corn at our own price.",
    "The superfluity, while it were wholesome, 0123456789",
)  # fmt: skip


def font(size: int, serif: bool) -> Any:
    """Return a typeface that comes with matplotlib."""
    folder = Path(matplotlib.__file__).parent / "mpl-data/fonts/ttf"
    return ImageFont.truetype(str(folder / ("DejaVuSerif.ttf" if serif else "DejaVuSans.ttf")), size)


def letters(
    size: int, ink: int = 0, paper: int = 255, *, smooth: bool = True, serif: bool = False, side: int = SIDE
) -> Picture:
    """Return a page of text of one size; without smooth edges it has two values."""
    page = Image.new("L", (side, side), paper)
    draw = ImageDraw.Draw(page)
    draw.fontmode = "L" if smooth else "1"
    for k, top in enumerate(range(4, side, int(1.4 * size))):
        draw.text((6, top), LINES[k % len(LINES)], fill=ink, font=font(size, serif))
    return np.asarray(page)


def coloured_letters(size: int) -> Picture:
    return np.stack([letters(size, 20 + 60 * c, 250 - 20 * c) for c in range(3)], axis=-1)


def scanned(size: int, blur: float, ink: int = 25, paper: int = 250, serif: bool = True) -> Array:
    """Return a page as a scanner sees it, a little out of focus."""
    return gaussian_filter(letters(size, ink, paper, serif=serif, side=320).astype(np.float64), blur)


def page_of_text(side: int = SIDE) -> Picture:
    """Return lines of smooth black letters on white, of several sizes."""
    image = Image.new("L", (side, side), 255)
    draw, row = ImageDraw.Draw(image), 4
    for size in (10, 12, 14, 18, 24, 36) * 2:
        draw.text(
            (6, row), "Nonlocal flows average what is alike 0123456789", fill=0, font=ImageFont.load_default(size)
        )
        row += int(1.4 * size)
    return np.asarray(image)


# ---- drawings


def line_drawing(side: int = SIDE) -> Picture:
    """Return lines and curves with smooth edges: drawn at four times the size, and made smaller."""
    large = Image.new("L", (4 * side, 4 * side), 240)
    draw = ImageDraw.Draw(large)
    for k in range(12):
        draw.line((40, 60 + 80 * k, 4 * side - 40, 40 + 60 * k), fill=20, width=4 + 2 * k)
        draw.ellipse((512 - 38 * k, 512 - 30 * k, 512 + 38 * k, 512 + 30 * k), outline=90, width=6)
    return np.asarray(large.resize((side, side), Image.Resampling.BOX))


def flat_colours(side: int = SIDE) -> Picture:
    """Return a chart of flat colours with hard edges, as of a diagram."""
    image = Image.new("RGB", (side, side), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    for k, (row, column) in enumerate(product(range(4), range(4))):
        place = (12 + 60 * column, 12 + 60 * row, 60 + 60 * column, 60 + 60 * row)
        fill = (16 * k, 255 - 12 * k, (97 * k) % 256)
        (draw.rectangle if k % 2 else draw.ellipse)(place, fill=fill)
    return np.asarray(image)


def screenshot(dark: bool = False, side: int = 384) -> Picture:
    """Return windows, buttons, a gradient and small text in colours, as of a screen."""
    back, paper, ink = (
        ((24, 26, 30), (40, 44, 52), (220, 222, 226)) if dark else ((210, 216, 224), (255,) * 3, (30,) * 3)
    )
    image = Image.new("RGB", (side, side), back)
    draw = ImageDraw.Draw(image)
    for k, (left, top) in enumerate(((10, 10), (150, 120), (40, 230))):
        draw.rectangle((left, top, left + 220, top + 140), fill=paper, outline=(120, 120, 120))
        for column in range(220):  # a title with a gradient
            draw.line((left + column, top + 1, left + column, top + 16), fill=(40 + column // 2, 90, 200 - column // 3))
        draw.text((left + 6, top + 2), f"Window {k}", fill=(255, 255, 255), font=font(11, serif=False))
        for row in range(6):
            draw.text(
                (left + 8, top + 22 + 15 * row), LINES[row % len(LINES)][:34], fill=ink, font=font(11, serif=k == 1)
            )
        draw.rounded_rectangle((left + 150, top + 116, left + 212, top + 134), 5, fill=(70, 130, 220))
        draw.text((left + 168, top + 118), "OK", fill=(255, 255, 255), font=font(11, serif=False))
    return np.asarray(image)


def plot(side: int = SIDE) -> Picture:
    """Return a curve with axes, a grid and marks, with smooth edges."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(side / 100, side / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    x = np.linspace(0, 10, 200)
    for k in range(3):
        axes.plot(x, np.sin(x + k) * np.exp(-x / 9), label=f"f{k}")
    axes.grid()
    axes.legend()
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


# ---- values that are few


def mask() -> Picture:
    """Return blobs of 255 on 0, as a segmentation gives them."""
    field = gaussian_filter(np.random.default_rng(0).normal(size=(SIDE, SIDE)), 6)
    return (255 * (field > 0)).astype(np.uint8)


def labels(most: int = 40) -> Picture:
    """Return regions about random seeds with the numbers of their labels."""
    rng = np.random.default_rng(1)
    rows, columns = np.mgrid[:SIDE, :SIDE]
    seeds = rng.uniform(0, SIDE, (most, 2))
    return np.argmin([(rows - y) ** 2 + (columns - x) ** 2 for y, x in seeds], axis=0).astype(np.uint8)


def dithered(levels: int = 2) -> Picture:
    """Return a photograph in few grey levels, the error of each spread to those to come (Floyd and Steinberg 1976)."""
    values = np.asarray(gaussian_filter(skimage.data.camera()[:SIDE, :SIDE].astype(np.float64), 1))
    padded, step = np.pad(values, ((0, 1), (1, 1))), 255 / (levels - 1)
    for i, j in product(range(SIDE), range(1, SIDE + 1)):
        old = padded[i, j]
        new = np.clip(np.rint(old / step), 0, levels - 1) * step
        padded[i, j] = new
        for di, dj, share in ((0, 1, 7), (1, -1, 3), (1, 0, 5), (1, 1, 1)):
            padded[i + di, j + dj] += (old - new) * share / 16
    return np.rint(padded[:-1, 1:-1]).astype(np.uint8)


def ordered() -> Picture:
    """Return a photograph dithered by an ordered matrix of 4 x 4 (Bayer 1973)."""
    matrix = np.array([[0, 8, 2, 10], [12, 4, 14, 6], [3, 11, 1, 9], [15, 7, 13, 5]]) * 16 + 8
    return (255 * (skimage.data.camera()[:SIDE, :SIDE] > np.tile(matrix, (SIDE // 4, SIDE // 4)))).astype(np.uint8)


def halftone(pitch: float = 6.0, finer: int = 1) -> Picture:
    """Return a photograph in dots of a turned screen; drawn finer and averaged, its dots have smooth edges."""
    side = SIDE * finer
    values = zoom(skimage.data.camera()[:SIDE, :SIDE].astype(np.float64), finer, order=1) / 255
    rows, columns = np.mgrid[:side, :side] * (2 * np.pi / (pitch * finer))
    screen = (2 + np.cos(rows + columns / 2) + np.cos(columns - rows / 2)) / 4
    dots = 255.0 * (values > screen)
    return np.rint(dots.reshape(SIDE, finer, SIDE, finer).mean(axis=(1, 3))).astype(np.uint8)


def chequers(side: int) -> Picture:
    rows, columns = np.mgrid[:SIDE, :SIDE]
    return np.where((rows // side + columns // side) % 2, 200, 40).astype(np.uint8)


def turned(period: float) -> Picture:
    """Return a turned chequerboard with smooth edges."""
    rows, columns = np.mgrid[: 4 * SIDE, : 4 * SIDE] / (4 * period) * np.pi
    board = np.sin(rows + 0.3 * columns) * np.sin(columns - 0.3 * rows) > 0
    return np.rint(40 + 160 * board.reshape(SIDE, 4, SIDE, 4).mean(axis=(1, 3))).astype(np.uint8)


def grating() -> Picture:
    """Return stripes that get ever finer, to the finest there are."""
    phase = np.cumsum(np.linspace(0.05, np.pi, SIDE))
    return np.rint(128 + 100 * np.sin(phase) * np.ones((SIDE, 1))).astype(np.uint8)


# ---- stars

LEAST_FLUX: Final = 500.0
BACKGROUND: Final = 100.0  # electrons


def sky(seed: int = 0, side: int = 384, width: float = 1.2) -> tuple[Array, Array, Array]:
    """Return the mean counts of a sky of isolated stars, their places (n, 2) and their fluxes, 200 to 50 000 counts."""
    rng = np.random.default_rng(seed)
    pitch = 32
    grid = np.stack(np.mgrid[pitch // 2 : side : pitch, pitch // 2 : side : pitch], axis=-1).reshape(-1, 2)
    places = grid + rng.uniform(-6, 6, grid.shape)
    fluxes = np.exp(rng.uniform(np.log(200), np.log(5e4), len(places)))
    rows, columns = np.mgrid[:side, :side]
    picture = np.full((side, side), BACKGROUND)
    for (y, x), flux in zip(places, fluxes, strict=True):
        picture += flux / (2 * np.pi * width**2) * np.exp(-((rows - y) ** 2 + (columns - x) ** 2) / (2 * width**2))
    return picture, places, fluxes


def fluxes_of(picture: Array, places: Array, radius: float = 6.0, outer: float = 10.0) -> Array:
    """Return the flux within a radius of each place, above the median of a ring around it."""
    rows, columns = np.indices(picture.shape)
    found = []
    for y, x in places:
        distance = np.hypot(rows - y, columns - x)
        ring = (distance > radius + 1) & (distance < outer + 1)
        inside = distance <= radius
        found.append(picture[inside].sum() - np.median(picture[ring]) * np.count_nonzero(inside))
    return np.array(found)


CLEAN: Final[dict[str, dict[str, Callable[[], Any]]]] = {
    "text": {
        f"{size} px, {name}": partial(letters, size, ink, paper)
        for size in (8, 10, 12, 14, 18, 24, 36)
        for name, ink, paper in (("black on white", 0, 255), ("white on black", 255, 0), ("grey on grey", 90, 170))
    }
    | {
        f"{size} px, serif, blurred by {blur:g}": partial(scanned, size, blur)
        for size in (12, 18, 24)
        for blur in (0.5, 0.8, 1.5)
    }
    | {f"{size} px, colours": partial(coloured_letters, size) for size in (10, 18)},
    "two values": {
        **{f"text of {size} px": partial(letters, size, smooth=False) for size in (10, 18)},
        "mask": mask, "mask of booleans": lambda: mask() > 0, "Floyd and Steinberg": dithered, "ordered": ordered,
        "halftone": halftone, "chequers of 1": partial(chequers, 1), "chequers of 8": partial(chequers, 8),
    },
    "few values": {
        "labels": labels, "4 levels, dithered": partial(dithered, 4), "16 levels, dithered": partial(dithered, 16),
        "halftone, smooth": partial(halftone, finer=4), "halftone of 3 px, smooth": partial(halftone, 3.3, 4),
    },
    "drawn": {
        "text of many sizes": page_of_text, "lines": line_drawing, "flat colours": flat_colours,
        "screenshot": screenshot, "dark screenshot": partial(screenshot, True), "plot": plot,
        "chequers, turned": partial(turned, 7.3), "fine chequers, turned": partial(turned, 2.9), "stripes": grating,
    },
    "stars": {"stars": lambda: sky()[0], "sharp stars": lambda: sky(width=0.7)[0]},
}  # fmt: skip

#: Pages with white noise: size of the letters, blur, and strength of the noise.
NOISY: Final = tuple(product((12, 18, 24), (0.5, 0.8), (3.0, 7.0, 15.0)))
