"""What is compared: `nlflow.denoise` that knows nothing of the noise, and what is told more or is chosen by the truth.

Each method takes a `Sample` and returns an `Outcome`. One that is not there yet, or not installed, returns the reason.
A method that is ours is measured again when the source of nlflow changes. The others keep their figures: peers, and
what stands for nlflow without a model of the noise (the oracle, and logarithms of speckle).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final
from unittest.mock import patch

import numba
import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import median_filter
from scipy.special import digamma, polygamma

from benchmarks.denoising.methods import Array, eight_bits, threads
from benchmarks.harness import interleaved
from nlflow import denoise, estimate_sigma
from nlflow.denoising import noise as models
from nlflow.errors import InputError, NlflowWarning

BLIND, WHITE, SPECTRUM, LOOKS = "blind {}", "white, estimated", "with the spectrum", "with the looks"
NOISY, ORACLE, OPENCV, BM3D, MEDIAN = "noisy", "best white sigma", "OpenCV NLM, best h", "BM3D, same spectrum", "median"
LOGARITHM, UNBIASED = "logarithm", "logarithm, bias corrected"
TIME = "blind / sigma given, threads: {}"

WHITE_SIGMAS: Final = (3, 5, 7.5, 10, 15, 20, 30, 40)
OPENCV_WIDTHS: Final = (3, 4, 5, 6, 7, 8, 10, 12, 14, 17, 20)
MEDIANS: Final = (3, 5, 7)
_REPEATS: Final = 3  # of a call that is timed, after one that does not count


@dataclass(frozen=True)
class Sample:
    """Samples with noise as a user has them, their truth, its peak, and what is known of the noise.

    The truth is NaN where there is none: where the instrument saw nothing.
    """

    noisy: NDArray[Any]
    truth: Array
    spectrum: Array | None = None
    looks: float | None = None
    peak: float = 255.0

    @property
    def axis(self) -> int | None:
        return -1 if self.noisy.ndim == 3 else None


@dataclass(frozen=True)
class Outcome:
    """A result and what was chosen or found; a value in place of a result; or neither, and the reason."""

    result: NDArray[Any] | None = None
    note: str = ""
    value: float | None = None


@dataclass(frozen=True)
class Method:
    """How a sample is denoised, and whether that depends on the source of nlflow as it is now."""

    call: Callable[[Sample], Outcome]
    ours: bool = True


def psnr(truth: NDArray[Any], result: NDArray[Any], peak: float = 255.0) -> float:
    """Return the PSNR over all channels, where there is a truth; infinite where nothing differs."""
    seen = np.isfinite(truth)
    error = float(np.mean((np.asarray(result, np.float64)[seen] - truth[seen]) ** 2))
    return float(10 * np.log10(peak**2 / error)) if error > 0 else np.inf


def climbed(grid: Sequence[float], start: int, attempt: Callable[[float], tuple[float, Any]]) -> tuple[float, Any]:
    """Return the value of a grid with the highest score, and what it gave; the scores have one maximum along the grid.

    `attempt` returns the score of a value and what it gave.
    """
    found: dict[int, tuple[float, Any]] = {}
    here = start
    while True:
        near = [k for k in (here - 1, here, here + 1) if 0 <= k < len(grid)]
        found |= {k: attempt(grid[k]) for k in near if k not in found}
        best = max(near, key=lambda k: found[k][0])
        if best == here:
            return grid[here], found[here][1]
        here = best


def chosen_by_truth(
    sample: Sample, grid: Sequence[float], start: int, call: Callable[[float], NDArray[Any]], name: str
) -> Outcome:
    def attempt(value: float) -> tuple[float, NDArray[Any]]:
        result = call(value)
        return psnr(sample.truth, result, sample.peak), result

    value, result = climbed(grid, start, attempt)
    return Outcome(result, f"{name} = {value:g}")


# ---- ours


def ours(sample: Sample, *sigma: float, **options: Any) -> Outcome:
    """Return what `denoise` makes of the noisy samples, and what it took the noise for.

    What it refuses by name without being told of any noise, as labels are, stays as it is.
    """
    with warnings.catch_warnings():  # doubts about a verdict are part of what is measured
        warnings.simplefilter("ignore", NlflowWarning)
        try:
            result, info = denoise(
                sample.noisy, *sigma, channel_axis=sample.axis, preserve_range=True, return_info=True, **options
            )
        except InputError as refused:
            if sigma or "noise" in options:
                raise
            return Outcome(np.asarray(sample.noisy, np.float64), f"refused: {str(refused).partition(';')[0]}")
    return Outcome(result, f"{info.noise}, sigma {info.sigma:.3g}")


def blind(quality: str) -> Method:
    return Method(partial(ours, quality=quality))


def white(sample: Sample) -> Outcome:
    """One white sigma, estimated: ``noise='white'``, or the default where that is not known, which does the same."""
    return ours(sample, noise="white") if knows_white() else ours(sample)


@cache
def knows_white() -> bool:
    try:
        denoise(np.arange(64.0).reshape(8, 8), noise="white", quality="fast")
    except InputError:
        return False
    return True


def with_model(name: str, *arguments: Any, **options: Any) -> Callable[[Sample], Outcome]:
    """Return the method that is given a model of the noise, if nlflow has one of this name."""
    model = getattr(models, name, None)
    if model is None:
        return lambda sample: Outcome(note=f"not available: nlflow.denoising.noise has no {name}")
    return partial(ours, noise=model(*arguments, **options))


def with_spectrum(sample: Sample) -> Outcome:
    """Gaussian noise whose power spectrum is given: an array on the grid of the FFT with the mean sigma²."""
    power = sample.spectrum
    assert power is not None
    return with_model("GaussianNoise", float(np.sqrt(np.mean(power))), spectrum=power)(sample)


def with_looks(sample: Sample) -> Outcome:
    return with_model("Speckle", sample.looks)(sample)


def logarithm(sample: Sample, unbiased: bool = False) -> Outcome:
    """Speckle of known looks by hand: white noise of known strength in the logarithm of the samples."""
    assert sample.looks is not None
    level = float(np.sqrt(polygamma(1, sample.looks)))
    bias = float(digamma(sample.looks) - np.log(sample.looks)) if unbiased else 0.0
    return Outcome(np.exp(denoise(np.log(sample.noisy), level) - bias), f"sigma {level:.3g}")


def time_ratio(sample: Sample, count: int) -> Outcome:
    """The seconds of a call that knows nothing over those of a call with sigma given, in turns."""
    options: dict[str, Any] = {"channel_axis": sample.axis}
    given = estimate_sigma(sample.noisy, **options)
    names = {"blind": {}, "given": {"sigma": given}}
    with threads(count):
        seconds = interleaved({n: partial(denoise, sample.noisy, **o, **options) for n, o in names.items()}, _REPEATS)
    note = f"{seconds['blind']:.3g} s / {seconds['given']:.3g} s"
    return Outcome(note=note, value=seconds["blind"] / seconds["given"])


# ---- what they are held against


def noisy(sample: Sample) -> Outcome:
    return Outcome(sample.noisy)


def oracle(sample: Sample) -> Outcome:
    """The best white sigma by the truth."""
    rms = float(np.sqrt(np.mean((sample.noisy - sample.truth) ** 2)))
    start = int(np.argmin(np.abs(np.log(np.asarray(WHITE_SIGMAS) / max(rms, 1e-9)))))

    def attempt(sigma: float) -> NDArray[Any]:
        return denoise(sample.noisy, sigma, channel_axis=sample.axis, preserve_range=True)

    return chosen_by_truth(sample, WHITE_SIGMAS, start, attempt, "sigma")


def opencv(sample: Sample) -> Outcome:
    """OpenCV's nonlocal means for colours with the best width by the truth, that of the colours being the same."""
    if importlib.util.find_spec("cv2") is None:
        return Outcome(note="not measured: OpenCV is not installed")
    import cv2

    cv2.setNumThreads(numba.get_num_threads())
    swapped = np.ascontiguousarray(eight_bits(sample.noisy)[..., ::-1])  # it takes blue first

    def attempt(h: float) -> NDArray[Any]:
        return cv2.fastNlMeansDenoisingColored(swapped, None, float(h), float(h), 7, 21)[..., ::-1]

    return chosen_by_truth(sample, OPENCV_WIDTHS, OPENCV_WIDTHS.index(6), attempt, "h")


def bm3d(sample: Sample) -> Outcome:
    """BM3D with the spectrum, in the units of the package: samples 0...1, the power of the sum over all samples."""
    if importlib.util.find_spec("bm3d") is None:
        return Outcome(note="not measured: bm3d is not installed")
    import bm3d as package

    assert sample.spectrum is not None
    profile = package.BM3DProfile()
    profile.num_threads = numba.get_num_threads()
    power = sample.spectrum * sample.noisy.size / 255**2
    # bm3d 4.0.3 asks for the name that numpy.trapezoid had before NumPy 2.
    with patch.object(np, "trapz", np.trapezoid, create=True):
        return Outcome(255 * np.asarray(package.bm3d(sample.noisy / 255, power, profile)))


def median(sample: Sample) -> Outcome:
    """The median filter of the best size by the truth."""
    return chosen_by_truth(sample, MEDIANS, 0, lambda n: median_filter(sample.noisy, int(n), mode="mirror"), "size")
