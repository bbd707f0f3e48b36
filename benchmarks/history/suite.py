"""What asv times at each commit: averages by every method, whole flows, minimizers and denoising.

``setup`` builds what is averaged, so that loops are compiled and weights stored before anything is timed.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from nlflow import E, ExpDotProduct, Gaussian, GradientFlow, Grid, J, Patch, Points, affinity, denoise, solve


def _points(n: int, m: int = 2) -> Points:
    return Points(np.random.default_rng(0).uniform(size=(n, m)))


def _image(side: int, dtype: str = "float64") -> Any:
    x = np.linspace(0, 4 * np.pi, side)
    clean = 100 + 50 * np.sign(np.outer(np.sin(x), np.cos(x)))
    return (clean + np.random.default_rng(0).normal(0, 20, clean.shape)).astype(dtype)


class Averages:
    """One average by each method."""

    params: ClassVar = ["dense", "pairwise", "sparse", "nufft", "lowrank", "attention", "stencil", "convolution"]
    param_names: ClassVar = ["method"]

    def setup(self, method: str) -> None:
        rng = np.random.default_rng(1)
        if method == "stencil":
            image = _image(256)
            self.p = affinity(Patch(width=15.0, patch_size=5, search_radius=5), Grid(image.shape), image)
        elif method == "convolution":
            self.p = affinity(Gaussian(5.0), Grid((512, 512)), method=method)
        elif method == "attention":
            q, k = rng.normal(size=(2, 4096, 16)).astype(np.float32)
            self.p = affinity(ExpDotProduct(), Points(np.zeros(4096)), k, queries=q, method="pairwise")
        elif method == "lowrank":
            features = rng.normal(size=(4000, 8))
            self.p = affinity(Gaussian(8.0), Points(np.zeros(4000)), features, method=method, rtol=1e-2)
        else:
            n = {"dense": 2000, "pairwise": 10_000, "sparse": 20_000, "nufft": 100_000}[method]
            width = 0.005 if method == "sparse" else 0.1
            self.p = affinity(Gaussian(width), _points(n), method=method)
        dtype = np.float32 if method == "attention" else np.float64
        self.u = rng.normal(size=self.p.domain.shape).astype(dtype)
        self.p.average(self.u)

    def time_average(self, method: str) -> None:
        self.p.average(self.u)

    def peakmem_average(self, method: str) -> None:
        self.p.average(self.u)


class Flows:
    """Whole flows and equilibria."""

    def setup(self) -> None:
        self.points = _points(4096)
        self.u = np.random.default_rng(1).normal(size=4096)
        image = _image(128)
        self.e = E(affinity(Patch(width=15.0, patch_size=3, search_radius=2), Grid(image.shape), image), image, 0.01)
        self.time_flow()
        self.time_minimizer()

    def time_flow(self) -> None:
        flow = GradientFlow(J(affinity(Gaussian(0.1), self.points, rtol=1e-10)), "degree")
        solve(flow, self.u, t=30.0, energies=False)

    def time_minimizer(self) -> None:
        self.e.minimizer()


class Denoising:
    """Every preset on a small image."""

    params: ClassVar = ["fast", "balanced", "best"]
    param_names: ClassVar = ["quality"]

    def setup(self, quality: str) -> None:
        self.image = _image(128, "float32")
        denoise(self.image, 20.0, quality=quality)

    def time_denoise(self, quality: str) -> None:
        denoise(self.image, 20.0, quality=quality)

    def peakmem_denoise(self, quality: str) -> None:
        denoise(self.image, 20.0, quality=quality)
