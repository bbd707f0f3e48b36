"""Approximate sums between scattered nodes: how much faster than exact ones, how far off, and how their cost grows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import Row, interleaved
from nlflow import Gaussian, Grid, Points, affinity

MILLION = 10**6
SIZES = (10_000, 31_623, 100_000, 316_228, 1_000_000)
NEIGHBOURS = 40
ROWS = 4096


def run() -> list[Row]:
    return [*against_exact(1), *against_exact(2), *growth()]


def against_exact(m: int) -> list[Row]:
    """A Gaussian sum of 10^6 nodes to 1e-6; the exact one is timed at some rows, whose cost is the same for all."""
    rng = np.random.default_rng(0)
    domain, u = Points(rng.uniform(size=(MILLION, m))), rng.normal(size=MILLION)
    kernel = Gaussian(0.1)
    start = time.perf_counter()
    fast = affinity(kernel, domain, method="nufft", rtol=1e-6)
    setup = time.perf_counter() - start
    error = fast.measure_error(u, samples=200)
    exact = affinity(kernel, domain, method="pairwise")
    some = np.sort(rng.choice(MILLION, ROWS, replace=False))
    times = interleaved({"exact": lambda: exact.pairs(u[:, None], some), "nufft": lambda: fast.average(u)}, repeats=5)
    peer = times["exact"] * MILLION / ROWS
    ours = times["nufft"]
    work = (
        f"Gaussian average of 10^6 nodes in {m}-D, width 0.1 of the domain, rtol 1e-6, float64, against exact sums "
        f"({ROWS} rows, scaled); set-up {setup:.2f} s"
    )
    accuracy = f"{m}-D: measured error at 200 nodes (estimate {fast.error_estimate:.1e})"
    return [
        Row.of("scattered", work, f"{peer:.0f} s", f"{ours:.2f} s", peer / ours, least=100),
        Row.of("scattered", accuracy, "none", f"{error:.1e}", error, most=1e-6),
    ]


def growth() -> list[Row]:
    """How the time of an average grows: the kernel's width shrinks such that each node has as many neighbours."""
    rng = np.random.default_rng(0)

    def convolution(n: int) -> Callable[[], Any]:
        side = round(n**0.5)
        p = affinity(Gaussian(3.0), Grid((side, side)), method="convolution")
        u = rng.normal(size=(side, side))
        return lambda: p.average(u)

    def scattered(method: str) -> Callable[[int], Callable[[], Any]]:
        def build(n: int) -> Callable[[], Any]:
            domain = Points(rng.uniform(size=(n, 2)))
            width = (NEIGHBOURS / (np.pi * n * 2 * np.log(2e4))) ** 0.5
            p = affinity(Gaussian(width), domain, method=method, rtol=1e-3 if method == "sparse" else 1e-6)
            u = rng.normal(size=n)
            return lambda: p.average(u)

        return build

    paths = {"FFT on a grid": convolution, "NUFFT": scattered("nufft"), "sparse": scattered("sparse")}
    rows = []
    for name, build in paths.items():
        times = interleaved({str(n): build(n) for n in SIZES}, repeats=7)
        seconds = np.array([times[str(n)] for n in SIZES])
        exponent = float(np.polyfit(np.log(SIZES), np.log(seconds), 1)[0])
        work = f"{name}: exponent of the time of an average over N = 10^4 ... 10^6"
        few, many = f"{seconds[0] * 1e3:.2f} ms", f"{seconds[-1] * 1e3:.0f} ms"
        rows.append(Row.of("scattered", work, few, many, exponent, most=1.15))
    return rows
