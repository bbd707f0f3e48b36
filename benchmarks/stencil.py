"""Patch weights, one step and further steps on 512 x 512, against scikit-image's fast nonlocal means; memory."""

from __future__ import annotations

import numpy as np
from skimage.data import camera
from skimage.restoration import denoise_nl_means

from benchmarks.harness import Row, interleaved
from benchmarks.resident import traced
from nlflow import Grid, Patch, affinity


def run() -> list[Row]:
    sigma = 25.0
    clean = camera().astype(np.float32)
    noisy = (clean + np.random.default_rng(0).normal(0, sigma, clean.shape)).astype(np.float32)
    grid = Grid(noisy.shape)
    rows = []
    for tokens in ("pixel", "patch"):
        kernel = Patch(width=0.6 * sigma, patch_size=7, search_radius=10, sigma=sigma, tokens=tokens)
        kept = affinity(kernel, grid, noisy)
        times = interleaved(
            {
                "scikit-image": lambda: denoise_nl_means(
                    noisy, patch_size=7, patch_distance=10, h=0.6 * sigma, sigma=sigma, fast_mode=True
                ),
                "first": lambda kernel=kernel: affinity(kernel, grid, noisy).average(noisy),
                "further": lambda kept=kept: kept.average(noisy),
                "recomputed": lambda kernel=kernel: affinity(kernel, grid, noisy, store=False).average(noisy),
            }
        )
        peer = times["scikit-image"]
        for name, work, target in (
            ("first", "affinity + one step", 1.0),
            ("further", "every further step", 0.10),
            ("recomputed", "affinity + one step, weights never stored", None),
        ):
            work = f"512x512 float32, 21x21 window, 7x7 {tokens} tokens: {work}"
            seconds = times[name]
            rows.append(
                Row.of("stencil", work, f"{peer * 1e3:.0f} ms", f"{seconds * 1e3:.1f} ms", seconds / peer, most=target)
            )
    for store, target in ((True, 1000), (False, None)):
        with traced() as taken:
            affinity(Patch(width=0.6 * sigma, sigma=sigma), grid, noisy, store=store).average(noisy)
        peak = taken.bytes / noisy.size
        work = f"peak memory a pixel, weights {'stored' if store else 'recomputed'}"
        rows.append(Row.of("stencil", work, "none", f"{peak:.0f} B", peak, most=target, unit=" B"))
    costs = interleaved(
        {
            size: lambda size=size: affinity(Patch(width=20.0, patch_size=size, search_radius=10), grid, noisy)
            for size in (3, 7, 15, 31)
        },
        repeats=5,
    )
    for size in (7, 15, 31):
        least, more = (f"{costs[one] * 1e3:.0f} ms" for one in (3, size))
        work = f"weights with {size}x{size} patches against 3x3"
        rows.append(Row.of("stencil", work, least, more, costs[size] / costs[3]))
    return rows
