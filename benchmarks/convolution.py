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
            work = f"10^7 nodes, {boundary}, {np.dtype(dtype).name}: one step against rfft + irfft"
            pair, step = (f"{times[name] * 1e3:.0f} ms" for name in ("pair", "step"))
            rows.append(Row.of("convolution", work, pair, step, times["step"] / times["pair"], most=3))
    return rows
