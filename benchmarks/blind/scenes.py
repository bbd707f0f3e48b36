"""What is denoised: the scenes of each section, each a picture with noise and its truth, and the methods for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import skimage.data
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from skimage.io import imread

from benchmarks.blind import methods as by
from benchmarks.blind.delicate import CLEAN, PACKAGED, packaged
from benchmarks.blind.methods import Method, Sample
from benchmarks.blind.simulated_camera import Camera
from benchmarks.denoising.methods import Array
from benchmarks.denoising.tasks import add_noise

Picture = NDArray[np.uint8]


@dataclass(frozen=True)
class Scene:
    """One picture under one setting of a section, and what makes its sample."""

    section: str
    setting: str
    picture: str
    make: Callable[[], Sample]


@dataclass(frozen=True)
class Section:
    """How the scenes of a section are listed, from the folder of data and a number of pictures (None for all), and the
    methods by name, from the qualities that are measured."""

    scenes: Callable[[Path, int | None], Iterator[Scene]]
    methods: Callable[[Sequence[str]], dict[str, Method]]
    qualities: tuple[str, ...] = ("balanced",)
    alone: bool = False  # no other process may run


@lru_cache(maxsize=2)  # the methods of a scene follow each other
def sample_of(scene: Scene) -> Sample:
    return scene.make()


def files(data: Path, name: str, pattern: str, count: int | None) -> list[Path]:
    paths = sorted((data / name).glob(pattern))
    if not paths:
        raise SystemExit(f"{data / name}: got no files {pattern}, expected those of {name}; see --data")
    return paths[:count]


def blinds(qualities: Sequence[str]) -> dict[str, Method]:
    return {by.BLIND.format(quality): by.blind(quality) for quality in qualities}


# ---- cameras


def cameras(data: Path, count: int | None) -> Iterator[Scene]:
    def pair(path: Path) -> Sample:
        return Sample(imread(path), imread(path.with_name(f"{name(path)}_mean.JPG")).astype(np.float64))

    def name(path: Path) -> str:
        return path.stem.removesuffix("_real")

    for path in files(data, "PolyU-even", "*_real.JPG", count):
        yield Scene("cameras", "PolyU-even", name(path), partial(pair, path))


# Electrons of a full pixel by ISO number. Each picture is taken with two of these cameras by turns, since all by all
# would take a day.
ISO: Final = {800: 3750.0, 3200: 940.0, 12800: 235.0}
CAMERAS: Final = tuple(
    (iso, Camera(ISO[iso], demosaicking=way, quality=quality, subsampling=colours))
    for iso, way, quality, colours in (
        (800, "bilinear", 95, "4:2:0"),
        (3200, "gradient-corrected", 95, "4:4:4"),
        (12800, "bilinear", 90, "4:2:0"),
        (3200, "bilinear", 100, "4:4:4"),
        (800, "gradient-corrected", 90, "4:2:0"),
        (12800, "gradient-corrected", 100, "4:4:4"),
        (3200, "gradient-corrected", 80, "4:2:0"),
        (12800, "bilinear", 80, "4:4:4"),
    )
)


def simulated(data: Path, count: int | None) -> Iterator[Scene]:
    def pair(path: Path, camera: Camera) -> Sample:
        return Sample(*camera.pair(imread(path), np.random.default_rng(0)))

    half = len(CAMERAS) // 2
    for number, path in enumerate(files(data, "Kodak24", "*.png", count)):
        for k in (number % half, number % half + half):
            iso, camera = CAMERAS[k]
            setting = f"ISO {iso}, {camera.demosaicking}, JPEG {camera.quality} {camera.subsampling}"
            yield Scene("simulated", setting, path.stem, partial(pair, path, camera))


# ---- Set12 with noise of a kind


def set12(data: Path, count: int | None, extra: bool = False) -> Iterator[tuple[str, Callable[[], Picture]]]:
    """Yield names and what reads a picture; with a piece of scikit-image's camera if it is asked for."""
    yield from ((path.stem, partial(imread, path)) for path in files(data, "Set12", "*.png", count))
    if extra:
        yield "camera[100:356, 100:356]", lambda: np.asarray(skimage.data.camera()[100:356, 100:356])


def blurred(shape: tuple[int, ...], width: float) -> Array:
    """Return the power spectrum of white noise after a Gaussian blur, up to a factor."""
    impulse = np.zeros(shape)
    impulse[0, 0] = 1
    return np.abs(np.fft.fft2(gaussian_filter(impulse, width, mode="wrap"))) ** 2


def in_rows(shape: tuple[int, ...]) -> Array:
    power = np.zeros(shape)
    power[:, 0] = 1
    return power


def one_over_f(shape: tuple[int, ...]) -> Array:
    frequency = np.hypot(*np.meshgrid(*(np.fft.fftfreq(n) for n in shape), indexing="ij"))
    frequency[0, 0] = np.inf  # no noise in the mean
    return 1 / frequency


RMS: Final = 20.0
SPECTRA: Final[dict[str, Callable[[tuple[int, ...]], Array]]] = {
    **{f"blur {width:g} px": partial(blurred, width=width) for width in (0.5, 1.0, 2.0)},
    "rows": in_rows,
    "1/f": one_over_f,
}


def coloured_noise(power: Array, rms: float, rng: np.random.Generator) -> Array:
    """Return periodic Gaussian noise with a power spectrum up to a factor, and exactly this root mean square."""
    noise = np.real(np.fft.ifft2(np.fft.fft2(rng.normal(size=power.shape)) * np.sqrt(power)))
    return noise * (rms / np.sqrt(np.mean(noise**2)))


def coloured(data: Path, count: int | None) -> Iterator[Scene]:
    def sample(read: Callable[[], Picture], spectrum: Callable[[tuple[int, ...]], Array]) -> Sample:
        clean = read().astype(np.float64)
        power = spectrum(clean.shape)
        noise = coloured_noise(power, RMS, np.random.default_rng(0))
        return Sample(clean + noise, clean, spectrum=power * (RMS**2 / power.mean()))

    for (setting, spectrum), (name, read) in product(SPECTRA.items(), set12(data, count, extra=True)):
        yield Scene("coloured", setting, name, partial(sample, read, spectrum))


def impulses(data: Path, count: int | None) -> Iterator[Scene]:
    def sample(read: Callable[[], Picture], share: float) -> Sample:
        clean, rng = read(), np.random.default_rng(0)
        hit, salt = rng.random(clean.shape) < share, rng.random(clean.shape) < 0.5
        return Sample(np.where(hit, np.where(salt, 255, 0), clean).astype(np.uint8), clean.astype(np.float64))

    for share, (name, read) in product((0.05, 0.2), set12(data, count)):
        yield Scene("impulses", f"{share:.0%}", name, partial(sample, read, share))


def speckle(data: Path, count: int | None) -> Iterator[Scene]:
    def sample(read: Callable[[], Picture], looks: int) -> Sample:
        clean = np.maximum(read(), 1).astype(np.float64)  # what is black stays black, and has no logarithm
        return Sample(clean * np.random.default_rng(0).gamma(looks, 1 / looks, clean.shape), clean, looks=looks)

    for looks, (name, read) in product((1, 2, 4, 8, 16), set12(data, count)):
        yield Scene("speckle", f"{looks} looks" if looks > 1 else "1 look", name, partial(sample, read, looks))


def white(data: Path, count: int | None) -> Iterator[Scene]:
    def sample(read: Callable[[], Picture], sigma: float) -> Sample:
        clean = read().astype(np.float64)
        return Sample(add_noise(clean, sigma), clean)

    for sigma, (name, read) in product((10.0, 15.0, 25.0, 50.0), set12(data, count)):
        yield Scene("white", f"sigma {sigma:g}", name, partial(sample, read, sigma))


# ---- pictures without noise


def clean(data: Path, count: int | None) -> Iterator[Scene]:
    def sample(read: Callable[[], Picture]) -> Sample:
        picture = np.asarray(read())
        return Sample(picture, picture.astype(np.float64), peak=1.0 if picture.dtype == bool else 255.0)

    kinds: dict[str, list[tuple[str, Callable[[], Any]]]] = {
        "Kodak24": [(path.stem, partial(imread, path)) for path in files(data, "Kodak24", "*.png", count)],
        "means of PolyU": [
            (path.stem, partial(imread, path)) for path in files(data, "PolyU-even", "*_mean.JPG", count)
        ],
        "scikit-image": [(name, partial(packaged, name)) for name in PACKAGED[:count]],
        **{kind: list(own.items())[:count] for kind, own in CLEAN.items()},
    }
    for setting, pictures in kinds.items():
        for name, read in pictures:
            yield Scene("clean", setting, name, partial(sample, read))


# ---- time


def timed(data: Path, count: int | None) -> Iterator[Scene]:
    def grey() -> Sample:
        picture = skimage.data.camera().astype(np.float64)
        return Sample(add_noise(picture, 25.0), picture)

    first = next(cameras(data, 1))
    yield Scene("time", "colour", first.picture, first.make)
    yield Scene("time", "grey", "camera, sigma 25", grey)


def counts() -> list[int]:
    import numba

    return sorted({1, numba.config.NUMBA_NUM_THREADS})


NOISY: Final = {by.NOISY: Method(by.noisy, ours=False)}
ORACLE: Final = {by.ORACLE: Method(by.oracle, ours=False)}

SECTIONS: Final = {
    "cameras": Section(
        cameras,
        lambda q: {**NOISY, **blinds(q), **ORACLE, by.OPENCV: Method(by.opencv, ours=False)},
        ("balanced", "best"),
    ),
    "simulated": Section(simulated, lambda q: {**NOISY, **blinds(q), **ORACLE}),
    "coloured": Section(
        coloured,
        lambda q: {
            **NOISY, **blinds(q), by.SPECTRUM: Method(by.with_spectrum), **ORACLE,
            by.BM3D: Method(by.bm3d, ours=False),
        },
    ),
    "impulses": Section(impulses, lambda q: {**NOISY, **blinds(q), by.MEDIAN: Method(by.median, ours=False)}),
    "speckle": Section(
        speckle,
        lambda q: {
            **NOISY, **blinds(q), by.LOOKS: Method(by.with_looks), by.LOGARITHM: Method(by.logarithm, ours=False),
            by.UNBIASED: Method(partial(by.logarithm, unbiased=True), ours=False),
        },
    ),
    "white": Section(white, lambda q: {**NOISY, **blinds(q), by.WHITE: Method(by.white)}),
    "clean": Section(clean, blinds),
    "time": Section(
        timed,
        lambda q: {by.TIME.format(n): Method(partial(by.time_ratio, count=n)) for n in counts()},
        alone=True,
    ),
}  # fmt: skip
