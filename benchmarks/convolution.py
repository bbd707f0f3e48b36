"""One averaging step on 10^7 nodes against one pair of real transforms of that length."""

from __future__ import annotations

import numpy as np
from scipy import fft

from benchmarks.harness import Row, interleaved
from nlflow import Gaussian, Grid, affinity

NODES = 10**7


def run() -> list[Row]:
    rows = []
    for boundary in ("periodic", "reflect", "isolated"):
        grid = Grid(NODES, spacing=1 / NODES, boundary=boundary)
        built = affinity(Gaussian(width=1e-4), grid, method="convolution")
        for dtype in (np.float32, np.float64):
            u = np.random.default_rng(0).standard_normal(NODES).astype(dtype)
            times = interleaved(
                {
                    "pair": lambda u=u: fft.irfft(fft.rfft(u), n=NODES),
                    "step": lambda u=u, built=built: built.average(u),
                },
                repeats=5,
            )
            ratio = times["step"] / times["pair"]
            rows.append(
                Row(
                    "convolution",
                    f"10^7 nodes, {boundary}, {np.dtype(dtype).name}: one step against rfft + irfft",
                    f"{times['pair'] * 1e3:.0f} ms",
                    f"{times['step'] * 1e3:.0f} ms",
                    ratio,
                    "<= 3",
                    ratio <= 3,
                )
            )
    return rows
