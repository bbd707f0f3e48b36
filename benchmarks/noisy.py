"""Counted normals against the generators of NumPy, and steps of noisy paths against the same steps written in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.harness import Row, interleaved
from nlflow import AllenCahn, Gaussian, GradientFlow, Grid, J, affinity, ensemble, solve
from nlflow.flows import EulerMaruyama, Noise, normals

NUMBERS = (1_000_000, 10_000)
SIDE, WIDTH, STEPS = 128, 2.0, 50
NODES, PATHS = 64, 256


def run() -> list[Row]:
    return [*_numbers(), *_sheet(), *_paths()]


def _numbers() -> list[Row]:
    rows = []
    fast, counted = np.random.default_rng(0), np.random.Generator(np.random.Philox(0))
    for count in NUMBERS:
        repeats = max(1, 1_000_000 // count)

        def often(draw: Callable[[], Any], repeats: int = repeats) -> Callable[[], None]:
            return lambda: [draw() for _ in range(repeats)] and None

        times = interleaved({
            "PCG64": often(lambda n=count: fast.standard_normal(n)),
            "Philox": often(lambda n=count: counted.standard_normal(n)),
            "nlflow": often(lambda n=count: normals(0, (n, 1))),
        })  # fmt: skip
        each = {name: f"{1e9 * seconds / (count * repeats):.2f} ns" for name, seconds in times.items()}
        for peer, least in (("PCG64", 1.0), ("Philox", 1.0)):
            ratio = times[peer] / times["nlflow"]
            work = f"{count} normals, each, against numpy.random's {peer}"
            rows.append(Row.of("noisy", work, each[peer], each["nlflow"], ratio, least=least))
    return rows


def _sheet() -> list[Row]:
    """Time steps of a noisy Allen-Cahn equation on a periodic sheet."""
    line = sum(np.exp(-((np.arange(SIDE) + g * SIDE) ** 2) / (2 * WIDTH**2)) for g in range(-3, 4))
    kernel = np.outer(line, line)
    multiplier, mass = np.fft.rfft2(kernel / kernel.sum()), 2 * kernel.sum()
    flow = GradientFlow(J(affinity(Gaussian(WIDTH), Grid((SIDE, SIDE), boundary="periodic"))), "degree")
    flow = flow + AllenCahn(interval=(-2.0, 2.0)) + Noise(beta=0.5, rng=0)
    dt, start = 0.05, np.zeros((SIDE, SIDE))

    def written() -> Any:
        rng, u = np.random.default_rng(0), start
        for _ in range(STEPS):
            moved = np.fft.irfft2(multiplier * np.fft.rfft2(u), s=u.shape) - u + u - u**3
            u = u + dt * moved + math.sqrt(2 * dt / (0.5 * mass)) * rng.standard_normal(u.shape)
        return u

    def ours() -> Any:
        return solve(flow, start, t=STEPS * dt, integrator=EulerMaruyama(dt), energies=False).final

    spread = float(np.std(ours())) / float(np.std(written()))
    times = interleaved({"NumPy": written, "nlflow": ours})
    each = {name: f"{1e3 * seconds / STEPS:.2f} ms" for name, seconds in times.items()}
    work = f"a step of {SIDE} x {SIDE} nodes with a reaction, against NumPy"
    ratio, alike = times["NumPy"] / times["nlflow"], abs(spread - 1) < 0.1
    return [Row.of("noisy", work, each["NumPy"], each["nlflow"], ratio, least=0.8, also=alike)]


def _paths() -> list[Row]:
    """Time paths that run side by side, against one after another."""
    weights = affinity(Gaussian(WIDTH), Grid(NODES), window=5)
    flow = GradientFlow(J(weights), "degree") + AllenCahn(interval=(-2.0, 2.0)) + Noise(beta=5.0, rng=0)

    def paths(together: int) -> Callable[[], Any]:
        return lambda: (
            ensemble(flow, np.zeros(NODES), PATHS, t=1.0, integrator=EulerMaruyama(0.05), side_by_side=together).values
        )

    same = bool(np.array_equal(paths(PATHS)(), paths(1)()))
    times = interleaved({"single": paths(1), "side by side": paths(PATHS)}, repeats=3)
    ratio = times["single"] / times["side by side"]
    shown = [f"{1e3 * times[name]:.0f} ms" for name in ("single", "side by side")]
    work = f"{PATHS} paths of {NODES} nodes side by side, with the same bits, against one after another"
    return [Row.of("noisy", work, *shown, ratio, least=5, also=same)]
