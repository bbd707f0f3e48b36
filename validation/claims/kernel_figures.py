"""What kernels tell of themselves: reach, scale, unit, slopes, smoothness, and which formulas are refused where."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq

from nlflow import Formula, Gaussian, Grid, J, Patch, Points, affinity
from nlflow.errors import InputError
from nlflow.kernels import (
    Anisotropic,
    Interaction,
    InverseMultiquadric,
    Laplace,
    Matern,
    Morse,
    PowerLaws,
    RationalQuadratic,
    TopHat,
    TruncatedPower,
    Wendland,
)
from nlflow.kernels.expressions import as_float, number, value
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

COUNTS = 4e-6
"""Of k(0): smaller weights are rounded in float32 beside those that count."""
KERNELS: list[tuple[Callable[[float], Any], Callable[[float], float]]] = [
    (lambda w: Gaussian(w), lambda s: float(np.exp(-(s**2) / 2))),
    (lambda w: Laplace(w), lambda s: float(np.exp(-s))),
    (lambda w: Matern(w, 1.5), lambda s: float((1 + np.sqrt(3) * s) * np.exp(-np.sqrt(3) * s))),
    (lambda w: RationalQuadratic(w, 1.7), lambda s: float((1 + s**2 / 3.4) ** -1.7)),
    (lambda w: InverseMultiquadric(w), lambda s: float((1 + s**2) ** -0.5)),
    (lambda w: Wendland(2 * w), lambda s: float(max(1 - s / 2, 0) ** 4 * (1 + 2 * s))),
    (lambda w: TruncatedPower(1.4, 0.3 * w), lambda s: float((max(s, 0.3) / 0.3) ** -1.4)),
    (lambda w: Formula("exp(-r / 2) * (1 + r / 3)", width=w), lambda s: float(np.exp(-s / 2) * (1 + s / 3))),
]
"""Kernels of a width w, and their values at s widths."""


def reaches() -> float:
    """Return errors of where kernels fall to a part of k(0), against roots by Brent's method, in several units."""
    worst = 0.0
    for made, profile in KERNELS:
        for width in (0.7, 3e-5, 4e6):
            kernel = made(width)
            for part in (np.exp(-0.5), 0.02):
                wanted = width * float(brentq(lambda s: profile(s) - part, 0.31, 300, xtol=1e-14, rtol=1e-14))  # noqa: B023
                worst = largest(worst, abs(kernel.support(part) / wanted - 1))
            wanted = width * float(brentq(lambda s: profile(s) - np.exp(-0.5), 0.31, 300, xtol=1e-14))  # noqa: B023
            worst = largest(worst, abs(kernel.scale / wanted - 1))
            # Distances times the unit, a power of two, are from 1/2 to 1 at the scale.
            turns = np.log2(kernel.unit)
            worst = largest(worst, abs(turns - round(turns)), float(not 0.5 <= kernel.scale * kernel.unit <= 1))
    ends = TruncatedPower(1.4, 0.3, 2.0), TopHat(0.9), TruncatedPower(1.4, 0.3, 0.5)
    told = ends[0].support(0.5) / (0.3 * 0.5 ** (-1 / 1.4)), ends[1].support(0.1) / 0.9, ends[2].support(1e-3) / 0.5
    return largest(worst, *(abs(one - 1) for one in told), float(Gaussian(1e-310).unit != 2.0**1000))


def slopes() -> float:
    """Return errors of the steepest slope of log k over the scale, over what samples leave of it.

    Of exp(−r²/2w²) it is √(−2 log 4e-6), where k ceases to count; samples are a 256th of the reach apart. The slope of
    √r has no bound: over the first thousandth of the scale, w/4, it is (1/2) (1/1000)^(−1/2), in any unit.
    """
    worst = 0.0
    for width in (0.7, 3e-5, 4e6):
        told = Gaussian(width).steepness / np.sqrt(-2 * np.log(COUNTS))
        root = Formula("exp(-r**0.5)", width=width).steepness / (0.5 * np.sqrt(1000.0))
        worst = largest(worst, abs(told - 1) * 256, (told - 1) / 1e-9, abs(root - 1) / 1e-6)
        jumps = TopHat(width), TruncatedPower(1.4, 0.3 * width, 2 * width), InverseMultiquadric(width)
        worst = largest(worst, *(float(jump.steepness < (np.inf if i < 2 else 0)) for i, jump in enumerate(jumps)))
    return worst


def smooth() -> float:
    """Return the least p with which k(r) has a term |r|^p that is not even, off `smoothness`.

    Its Fourier transform falls as |ξ|^−(p + m): 2 ν of Matérn's kernels, 1 + the derivatives of Wendland's. Found from
    the odd part of the Taylor series, whose coefficients are divided differences at r > 0 near 0.
    """
    worst = 0.0
    kernels = [*(Matern(0.8, nu) for nu in (0.5, 1.5, 2.5, 3.5)), *(Wendland(1.3, d) for d in (0, 2, 4)), Laplace(0.6)]
    r = 0.25 * (1 - np.cos(np.pi * (np.arange(16) + 0.5) / 16)) / 2
    for kernel in kernels:
        terms = np.polynomial.Polynomial.fit(r, np.exp(kernel.log_profile(r**2)), 15).convert().coef[1:8:2]
        first = int(np.argmax(np.abs(terms) > 1e-2))
        worst = largest(worst, abs(float(kernel.smoothness or 0) - (1 + 2 * first)))
    return worst


def patches() -> float:
    """Return errors of −log k = max(D − 2 σ², 0)/h² of patches, D their mean squared difference, and on a line."""
    rng, worst = np.random.default_rng(3), 0.0
    x, y, image = rng.standard_normal((5, 9)), rng.standard_normal((4, 9)), rng.standard_normal(30)
    for sigma in (0.0, 0.4):
        kernel = Patch(0.6, patch_size=3, search_radius=2, sigma=sigma)
        k = -np.maximum(((x[:, None] - y[None]) ** 2).mean(axis=2) - 2 * sigma**2, 0) / 0.6**2
        worst = largest(worst, float(np.abs(kernel.log_matrix(x, y) - k).max()))
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(image, 1, mode="wrap"), 3)
        apart = ((windows[:, None] - windows[None]) ** 2).mean(axis=2)
        k = np.exp(-np.maximum(apart - 2 * sigma**2, 0) / 0.6**2)
        around = np.abs(np.subtract.outer(np.arange(30), np.arange(30)))
        k *= np.minimum(around, 30 - around) <= 2
        told = affinity(kernel, Grid(30, boundary="periodic"), image).average(image)
        worst = largest(worst, float(np.abs(told - k @ image / k.sum(axis=1)).max()))
    return worst


def pairs() -> float:
    """Return errors of potentials: sums, kernels with an amplitude, and what they say of themselves, relative."""
    r = np.array([0.3, 0.9, 1.4, 2.2])
    morse, power = Morse(1.3, 0.5, 0.4, 2.0), PowerLaws(3.0, 1.5)
    both = 1.3 * np.exp(-r / 0.5) - 0.4 * np.exp(-r / 2) + r**3 / 3 - r**1.5 / 1.5
    steep = -2.6 * np.exp(-r / 0.5) + 0.2 * np.exp(-r / 2) + r**2 - np.sqrt(r)
    weighed = Interaction(Gaussian(0.5, amplitude=1.7), -0.6)
    gauss = -0.6 * 1.7 * np.exp(-2 * r**2)
    reach = float(brentq(lambda s: 2 * s * np.exp(0.5 - 2 * s**2) - 1e-3, 0.6, 9, xtol=1e-14))  # |W'| over its largest
    return largest(
        float(np.abs((morse + power)(r) / both - 1).max()),
        float(np.abs((morse + power).slope(r) / steep - 1).max()),
        float(np.abs(weighed(r) / gauss - 1).max()), abs(weighed.meeting / (-0.6 * 1.7) - 1),
        abs(weighed.reach(1e-3) / reach - 1) / 1e5,
        abs(Interaction("2 - exp(-r)").far / 2 - 1), abs(Interaction("2 - exp(-r)").meeting + 1),
    )  # fmt: skip


def apart() -> float:
    """Return errors of sums on a plane of unequal spacings, of amplitudes, and of weights far out in any unit."""
    grid, rng = Grid((5, 7), spacing=(0.7, 0.4), boundary="isolated"), np.random.default_rng(4)
    u = rng.standard_normal((5, 7))
    r = np.sqrt(((grid.nodes[:, None] - grid.nodes[None]) ** 2).sum(axis=2))
    k = np.exp(-r / 0.6)
    worst = float(np.abs(affinity(Laplace(0.6), grid).average(u).ravel() - k @ u.ravel() / k.sum(axis=1)).max())
    widths, x = np.array([0.5, 2.0]), rng.random((9, 2))
    stretched = Anisotropic(Laplace(0.6, amplitude=1.7), widths=widths, amplitude=0.3)
    k = 0.51 * np.exp(-np.sqrt((((x[:, None] - x[None]) / widths) ** 2).sum(axis=2)) / 0.6)
    v = rng.standard_normal(9)
    energy = float((k * np.subtract.outer(v, v) ** 2).sum()) / 2 / 81
    worst = largest(worst, abs(J(affinity(stretched, Points(x))).value(v) / energy - 1))
    s = np.append(np.linspace(0, 40, 90), [1e3, 1e60, 1e150])
    for width in (1e-30, 0.7, 1e30):  # a polynomial beside an exponential that is hardly 0
        kernel = Formula("exp(-r / 2) * (1 + r / 3)", width=width)
        told = value(kernel.weight(kernel.unit), (s * width * kernel.unit) ** 2)
        worst = largest(worst, float(np.abs(told - np.exp(-s / 2) * (1 + s / 3)).max()))
    return worst


def cancelling() -> float:
    """Return errors of log k of formulas that cancel with factors, over 1 + its size, and of numbers, relative."""
    near, worst = np.geomspace(1e-6, 1e6, 40), 0.0
    third = 1.0 + 3.0**0.3 * near - (-2.0) ** 3 * near  # numbers of a formula, to powers of all kinds
    cases = [
        ("1 - 2 * r / (1 + 2 * r)", -np.log1p(2 * near)),
        ("sqrt(1 + 4 * r**2) - 2 * r", -np.log(np.sqrt(1 + 4 * near**2) + 2 * near)),
        ("1 - 3 * (r + r**2) / (1 + 3 * (r + r**2))", -np.log1p(3 * (near + near**2))),
        ("(1 + 3**0.3 * r - (-2)**3 * r)**-1", -np.log(third)),
        ("1 - 6 * r / (3 + 6 * r)", -np.log1p(2 * near)),
        ("exp(-((r - 2)**2)**1.5) * exp(abs(-2)**3)", 8 - np.abs(near - 2) ** 3),
    ]
    for text, log in cases:
        found = Formula(text).log_profile(near**2)
        worst = largest(worst, float(np.abs((found - log) / (1 + np.abs(log))).max()))
    # 3^6000 over powers of two: near 1, and of more digits than are kept.
    for top, below in ((6000, 9510), (6000, 9300), (4900, 8300)):
        kept, exact = as_float(number(Fraction(3**top, 2**below)).value), float(Fraction(3**top, 2**below))
        worst = largest(worst, abs(kept / exact - 1))
    return worst


def refused() -> float:
    """Return how far the distance at which a formula is refused lies from where it is negative, over its width.

    It is negative from 7.006 to 7.01 widths alone, which one of the samples of 0.008 widths sees; four digits are told.
    """
    worst = 0.0
    for width in (1.0, 3.1):
        try:
            Formula("where(r < 7.006, exp(-r), where(r < 7.01, r - 9, 0))", width=width)
            return np.inf
        except InputError as error:
            told = re.search(r"at the distance (\S+),", str(error))
            worst = largest(worst, abs(float(told[1]) / width - 7.008) if told else np.inf)
    # Code that is wrong from 6.0 to 6.06 scales alone, where k still counts.
    for width in (0.7, 3.1):
        kernel = Gaussian(width)

        def wrong(squared: Floats) -> Floats:
            s = np.sqrt(squared) / width  # noqa: B023
            return np.asarray(np.exp(-(s**2) / 2) * np.where(np.abs(s - 6.03) < 0.031, 2e3, 1.0))

        place = kernel.differs(wrong, 1.0, 1e-6)
        worst = largest(worst, np.inf if place is None else max(abs(place / width - 6.03) - 0.031, 0.0))
    return worst


def run(context: Context) -> Outcome:
    del context
    return Outcome([
        Check("where kernels fall to a part of k(0), scales and units, relative", reaches(), 1e-9),
        Check("steepest slopes of log k, over what samples leave", slopes(), 1.0),
        Check("smoothness, against the least odd power in k", smooth(), 0.0),
        Check("patches with the noise taken off: logarithms and averages", patches(), 1e-12),
        Check("potentials: sums, amplitudes, limits, reach, relative", pairs(), 1e-11),
        Check("unequal spacings, amplitudes, and weights in any unit", apart(), 1e-12),
        Check("formulas that cancel with factors, and long numbers", cancelling(), 1e-12),
        Check("distances at which formulas and code are refused, in widths", refused(), 2e-3),
    ])  # fmt: skip


CLAIM = Claim(
    name="kernel-figures",
    title="What kernels tell of themselves is so",
    statement=(
        "The distance at which a kernel has fallen to a part of k(0), its scale, its unit, the steepest slope of its "
        "logarithm, the decay of its Fourier transform, and the distances at which formulas are refused are those of "
        "its definition, in any unit of length; so are sums of potentials, amplitudes, and patches less their noise."
    ),
    source="Rasmussen and Williams 2006, chapter 4; Wendland 1995, doi 10.1007/BF02123482; "
    "Buades, Coll and Morel 2011, doi 10.5201/ipol.2011.bcm_nlm",
    run=run,
)
