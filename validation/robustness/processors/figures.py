"""Figures of the denoiser on the processor that this interpreter plays.

Run by ``python -m validation.robustness.processors.figures``.

Signals: the largest error of single and of double precision, over draws of the noise. Images: PSNR.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pywt
from numpy.typing import NDArray

from nlflow import denoise
from nlflow.denoising import groupwise
from validation.robustness.processors.settings import in_effect

Floats = NDArray[np.float64]
SIGNALS = tuple(pywt.data.demo_signal("list"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m validation.robustness.processors.figures", description=__doc__)
    parser.add_argument("--draws", type=int, default=0, help="of the noise, for each signal (%(default)s)")
    parser.add_argument("--data", type=Path, help="folder with Set12")
    args = parser.parse_args(arguments)
    found: dict[str, Any] = {"in effect": in_effect()}
    if args.draws:
        found["signals"] = {
            f"{name}, {quality}": worst_errors(name, quality, args.draws)
            for name in SIGNALS
            for quality in ("balanced", "best")
        }
    if args.data:
        found["images"] = {
            f"{path.stem}, {quality}": psnr(path, quality)
            for path in sorted((args.data / "Set12").glob("*.png"))
            for quality in ("fast", "balanced", "best")
        }
    print(json.dumps(found))
    return 0


def demonstration(name: str, samples: int = 1024) -> Floats:
    """Return one of PyWavelets' demonstration signals, real; two of them have a length of their own."""
    own = name in ("Gabor", "sineoneoverx")
    return np.real(pywt.data.demo_signal(name) if own else pywt.data.demo_signal(name, samples)).astype(float)


def worst_errors(name: str, quality: str, draws: int) -> dict[str, float]:
    """Return the largest error over draws, in units of the noise, in single and in double precision."""
    clean = demonstration(name)
    sigma = 0.1 * float(clean.std())
    noisy = [clean + np.random.default_rng(seed).normal(0, sigma, clean.shape) for seed in range(draws)]
    found, usual = {}, groupwise.SINGLE
    for precision, limit in (("single", usual), ("double", 0.0)):
        groupwise.SINGLE = limit
        errors = [float(np.abs(denoise(f, sigma, quality=quality) - clean).max()) / sigma for f in noisy]
        found[precision] = max(errors)
    groupwise.SINGLE = usual
    return found


def psnr(path: Path, quality: str, sigma: float = 25.0) -> float:
    """Return the PSNR of a denoised image with white noise."""
    from skimage.io import imread

    clean = imread(path).astype(np.float32)
    noisy = clean + np.random.default_rng(0).normal(0, sigma, clean.shape).astype(np.float32)
    error = denoise(noisy, sigma, quality=quality).astype(np.float64) - clean
    return float(10 * np.log10(255**2 / np.mean(error**2)))


if __name__ == "__main__":
    sys.exit(main())
