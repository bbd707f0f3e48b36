"""PSNR on skimage.data.camera() with sigma = 25, against the best of scikit-image's nonlocal means over a grid."""

from __future__ import annotations

import numpy as np
from skimage.data import camera
from skimage.restoration import denoise_nl_means

from benchmarks.harness import Row
from nlflow import denoise
from nlflow.plotting import psnr

SIGMA = 25.0


def run() -> list[Row]:
    clean = camera().astype(np.float64)
    noisy = clean + np.random.default_rng(0).normal(0, SIGMA, clean.shape)
    best, where = -np.inf, ""
    for size in (3, 5, 7):
        for distance in (6, 8, 10, 13):
            for h in (0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8):
                result = denoise_nl_means(
                    noisy, patch_size=size, patch_distance=distance, h=h * SIGMA, sigma=SIGMA, fast_mode=True
                )
                quality = psnr(clean, result)
                if quality > best:
                    best, where = quality, f"patch {size}, distance {distance}, h {h:g} sigma"
    rows = []
    for sigma, name in ((SIGMA, "given"), (None, "estimated")):
        ours = psnr(clean, denoise(noisy, sigma))
        work = f"PSNR at sigma 25 ({name}) against scikit-image's best ({where}), gain in dB"
        rows.append(Row.of("camera", work, f"{best:.2f} dB", f"{ours:.2f} dB", ours - best, least=0))
    return rows
