"""The continuum's averages against adaptive quadrature, which knows nothing of polar coordinates."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy.integrate import dblquad, quad

from nlflow import Gaussian, InputError, Laplace, NumericalError, TopHat
from nlflow.kernels import RadialKernel
from nlflow.studies.continuum import continuum_average


@dataclass(frozen=True)
class Cone(RadialKernel):
    """A user's kernel of compact support, k = 1 - r."""

    reach: float = 0.3

    def log_profile(self, squared: Any) -> Any:
        with np.errstate(divide="ignore"):  # log 0 = -inf is meant
            return np.log(np.maximum(1 - np.sqrt(squared) / self.reach, 0))

    def support(self, rtol: float) -> float:
        return self.reach


KERNELS = [Gaussian(0.1), Laplace(0.05), TopHat(0.23), Cone()]


def profile(kernel: RadialKernel, r: float) -> float:
    return float(np.exp(kernel.log_profile(np.array(r**2))))


def fold(y: float, boundary: str) -> float:
    if boundary == "periodic":
        return y % 1
    return 1 - abs(1 - y % 2)


@pytest.mark.parametrize("boundary", ["periodic", "reflect", "isolated"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("x", [0.03, 0.4])
def test_one_dimension(kernel: RadialKernel, boundary: str, x: float) -> None:
    """The signal is continued beyond the edges with a kink, or a jump."""
    reach = kernel.support(1e-18)
    low, high = (max(0.0, x - reach), min(1.0, x + reach)) if boundary == "isolated" else (x - reach, x + reach)
    breaks = [p for p in (x, *range(-5, 6)) if low < p < high]
    # Piece by piece: kinks and jumps at the ends of pieces are none.
    ends = sorted({low, high, *breaks})

    def integral(weighted: bool) -> float:
        def integrand(y: float) -> float:
            inside = y if boundary == "isolated" else fold(y, boundary)
            return profile(kernel, abs(y - x)) * (math.exp(inside) if weighted else 1.0)

        pieces = itertools.pairwise(ends)
        return sum(quad(integrand, a, b, epsabs=1e-14, epsrel=1e-13, limit=200)[0] for a, b in pieces)

    average, error = continuum_average(kernel, lambda y: np.exp(y[:, 0]), np.array([[x]]), boundary)
    assert error < 1e-12
    np.testing.assert_allclose(average[0, 0], integral(True) / integral(False), rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("boundary", ["periodic", "reflect", "isolated"])
@pytest.mark.parametrize("point", [(0.1, 0.3), (0.55, 0.07)])
@pytest.mark.sampled(2)
def test_two_dimensions_smooth(boundary: str, point: tuple[float, float]) -> None:
    kernel = Gaussian(0.08)
    reach = kernel.support(1e-14)

    def u(y: Any) -> Any:
        return np.cos(np.pi * y[:, 0]) * np.exp(np.cos(2 * np.pi * y[:, 1]))

    box = [(p - reach, p + reach) for p in point]
    if boundary == "isolated":
        box = [(max(a, 0.0), min(b, 1.0)) for a, b in box]

    def integral(weighted: bool) -> float:
        def integrand(b: float, a: float) -> float:
            inside = [v if boundary == "isolated" else fold(v, boundary) for v in (a, b)]
            r = math.hypot(a - point[0], b - point[1])
            return profile(kernel, r) * (float(u(np.array([inside]))[0]) if weighted else 1.0)

        # cos(pi a) jumps at a = 0 when it is repeated, so the integral is cut there.
        pieces = [(box[0][0], 0.0), (0.0, box[0][1])] if box[0][0] < 0 < box[0][1] else [box[0]]
        return sum(dblquad(integrand, *piece, *box[1], epsabs=1e-10, epsrel=1e-9)[0] for piece in pieces)

    average, error = continuum_average(kernel, u, np.array([point]), boundary)
    assert error < 1e-9 if boundary == "periodic" else error < 1e-12
    np.testing.assert_allclose(average[0, 0], integral(True) / integral(False), rtol=2e-8)


@pytest.mark.parametrize("point", [(0.1, 0.3), (0.5, 0.12), (0.85, 0.95)])
def test_top_hat_cut_by_the_edges(point: tuple[float, float]) -> None:
    """The mean of y_1^2 over a disk without what the edges cut off, one chord after another."""
    kernel = TopHat(0.25)
    radius = kernel.support(0)

    def chord(a: float) -> float:
        half = math.sqrt(max(radius**2 - (a - point[0]) ** 2, 0))
        return min(point[1] + half, 1) - max(point[1] - half, 0)

    low, high = max(point[0] - radius, 0), min(point[0] + radius, 1)
    kinks = [
        point[0] + s * math.sqrt(radius**2 - d**2) for d in (point[1], 1 - point[1]) if d < radius for s in (-1, 1)
    ]
    kinks = [p for p in kinks if low < p < high] or None
    area = quad(chord, low, high, points=kinks, epsabs=1e-13, limit=500)[0]
    moment = quad(lambda a: a * a * chord(a), low, high, points=kinks, epsabs=1e-13, limit=500)[0]
    average, error = continuum_average(kernel, lambda y: y[:, 0] ** 2, np.array([point]), "isolated")
    assert error < 1e-12
    np.testing.assert_allclose(average[0, 0], moment / area, rtol=1e-9)


def test_plane_laplace_integral_by_its_formula() -> None:
    """Periodic: a plane wave is multiplied by the kernel's Fourier transform, (1 + (w q)^2)^(-3/2) in the plane."""
    width, q = 0.07, 2 * np.pi
    average, _ = continuum_average(Laplace(width), lambda y: np.cos(q * y[:, 0]), np.array([[0.3, 0.9]]), "periodic")
    expected = math.cos(q * 0.3) / (1 + (width * q) ** 2) ** 1.5
    np.testing.assert_allclose(average[0, 0], expected, rtol=1e-12)


def test_channels_and_constants() -> None:
    x = np.array([[0.2, 0.3], [0.9, 0.5]])
    average, _ = continuum_average(Gaussian(0.2), lambda y: np.stack([y[:, 0] * 0 + 3, y[:, 1]], axis=1), x, "isolated")
    assert average.shape == (2, 2)
    np.testing.assert_allclose(average[:, 0], 3, rtol=1e-14)
    assert 0.3 < average[0, 1] < average[1, 1]


def test_kernels_beyond_reach() -> None:
    with pytest.raises(InputError, match=r"reaches over .* periods"):
        continuum_average(Laplace(50.0), lambda y: y[:, 0], np.array([[0.5]]), "periodic")
    average, _ = continuum_average(Laplace(50.0), lambda y: y[:, 0], np.array([[0.5]]), "isolated")
    np.testing.assert_allclose(average[0, 0], 0.5, rtol=1e-12)

    @dataclass(frozen=True)
    class Nothing(Cone):
        def log_profile(self, squared: Any) -> Any:
            return np.full_like(squared, -np.inf)

    with pytest.raises(NumericalError, match="is 0"):
        continuum_average(Nothing(), lambda y: y[:, 0], np.array([[0.5]]), "isolated")
