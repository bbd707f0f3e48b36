"""Plug-and-play deblurring: the same loop with our denoiser and with bm3d, where the user has installed that.

    python -m benchmarks deblurring --data DIR [--only 1 2 3 4] [--out DIR]

DIR holds Set12/*.png. Blurs and noise are the first four settings of Danielyan, Katkovnik and Egiazarian 2012
(IDD-BM3D, arXiv 1106.6180), which Tirer and Giryes 2019 (IDBP, arXiv 1710.06647) take as well; blurs are circular. The
loop is `nlflow.denoising.priors.reconstruct` with 8 strengths from 49 to that of the noise and a weight of 0.23, those
of Zhang et al. 2021 (DPIR, arXiv 2008.13751); it was tuned for none of the denoisers. The noise is drawn with
`default_rng(0)`, neither clipped nor rounded, on the scale 0...255. Times are seconds of all threads together.

bm3d is for non-commercial use: it is compared where the user has installed it. A full run takes an hour on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.denoising.tasks import image, score
from benchmarks.harness import Row, files, timed
from nlflow.denoising.priors import Denoiser, Forward, reconstruct
from nlflow.errors import InputError

Array = NDArray[Any]
NAME = "deblurring"
IMAGES = ("01", "02", "04")  # cameraman and house, of IDD-BM3D's images, and starfish, of DPIR's
QUALITIES = ("balanced", "best")
STEPS, FIRST = 8, 49.0
row = partial(Row.of, NAME)


def _peaked() -> Array:
    i, j = np.mgrid[-7:8, -7:8]
    return 1 / (1 + i**2 + j**2)


#: For each setting its blur, the variance of the noise (None: 40 dB below the variance of the blurred image), its name.
SETTINGS: dict[str, tuple[Array, float | None, str]] = {
    "1": (_peaked(), 2.0, "1/(1 + i² + j²), σ² = 2"),
    "2": (_peaked(), 8.0, "1/(1 + i² + j²), σ² = 8"),
    "3": (np.ones((9, 9)), None, "9 x 9 uniform, 40 dB"),
    "4": (np.outer([1, 4, 6, 4, 1], [1, 4, 6, 4, 1]), 49.0, "[1 4 6 4 1], σ² = 49"),
}
PARTS = tuple(SETTINGS)


def blur(kernel: Array, shape: tuple[int, int]) -> Forward:
    """Return the circular convolution with a kernel of odd size and sum 1."""
    padded = np.zeros(shape)
    padded[: kernel.shape[0], : kernel.shape[1]] = kernel / kernel.sum()
    transfer = np.fft.rfft2(np.roll(padded, [-(n // 2) for n in kernel.shape], axis=(0, 1)))

    def times(factor: Array) -> Callable[[Array], Array]:
        return lambda u: np.fft.irfft2(np.fft.rfft2(u) * factor, shape)

    return Forward((times(transfer), times(transfer.conj())), shape)


def observed(clean: Array, setting: str) -> tuple[Forward, Array, float]:
    """Return the blur, the blurred image with noise, and the strength of the noise."""
    kernel, variance, _ = SETTINGS[setting]
    forward = blur(kernel, (clean.shape[0], clean.shape[1]))
    blurred = forward.apply(clean)
    sigma = float(np.sqrt(np.var(blurred) / 1e4 if variance is None else variance))
    return forward, blurred + np.random.default_rng(0).normal(0, sigma, clean.shape), sigma


def bm3d() -> Callable[[Array, float], Array] | None:
    """Return bm3d's function where it is installed."""
    if not hasattr(np, "trapz"):  # NumPy 2 has it under another name, which bm3d 4.0.3 does not know
        vars(np)["trapz"] = np.trapezoid
    try:
        import bm3d as package
    except ImportError:
        return None
    return lambda u, strength: np.asarray(package.bm3d(u, strength))


def restored(clean: Array, setting: str, denoiser: Callable[[Array, float], Any]) -> tuple[float, float]:
    """Return the PSNR of the loop with a denoiser, and its seconds."""
    forward, data, sigma = observed(clean, setting)
    strength = np.geomspace(FIRST, sigma, STEPS)
    found, seconds = timed(reconstruct, data, forward, sigma, denoiser=denoiser, strength=strength)
    return score(clean, found.u, "grey")["psnr"], seconds


def measured(data: Path, setting: str) -> Iterator[Row]:
    """Each image under one blur: both qualities beside bm3d in the same loop."""
    rival, what = bm3d(), SETTINGS[setting][2]
    for name in IMAGES:
        clean = image(files(data, f"Set12/{name}.png")[0])
        blurred = score(clean, observed(clean, setting)[1], "grey")["psnr"]
        peer = None if rival is None else restored(clean, setting, rival)
        for quality in QUALITIES:
            value, seconds = restored(clean, setting, Denoiser(quality))
            work = f"{what}, Set12 {name} ({blurred:.2f} dB), {quality}: PSNR less bm3d's"
            ours = f"{value:.2f} dB, {seconds:.0f} s"
            if peer is None:
                yield row(work, "bm3d is not installed", ours, float("nan"))
            else:
                yield row(work, f"bm3d {peer[0]:.2f} dB, {peer[1]:.0f} s", ours, value - peer[0], least=0.0, unit=" dB")


def run(only: Sequence[str] = PARTS, data: Path | None = None) -> list[Row]:
    """Return the rows of some settings."""
    if data is None:
        raise InputError("--data: needed for deblurring, expected a folder with Set12/*.png")
    Denoiser("best")(np.random.default_rng(0).normal(100, 25, (48, 48)), 25.0)  # loops are compiled, or loaded
    return [row for setting in only for row in measured(data, setting)]
