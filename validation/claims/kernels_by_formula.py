"""The kernels of the package, and formulas that are compiled, against SciPy's special functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln, kv

from nlflow import ExpDotProduct, Formula, Gaussian, Grid, Patch, Points, affinity
from nlflow.errors import InputError
from nlflow.kernels import (
    Anisotropic,
    Interaction,
    InverseMultiquadric,
    Laplace,
    Matern,
    Morse,
    PowerLaws,
    RadialKernel,
    RationalQuadratic,
    TopHat,
    TruncatedPower,
    Wendland,
)
from nlflow.kernels.expressions import value
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]
Profile = Callable[[Floats], Floats]


def matern(r: Floats, width: float, nu: float) -> Floats:
    """Return 2^(1 − ν)/Γ(ν) s^ν K_ν(s), s = √(2ν) r / width."""
    s = np.sqrt(2 * nu) * np.maximum(r, 1e-12) / width
    return np.asarray(np.exp((1 - nu) * np.log(2) - gammaln(nu) + nu * np.log(s)) * kv(nu, s))


def inside(r: Floats, radius: float, power: Profile) -> Floats:
    return np.where(r < radius, power(np.minimum(r / radius, 1.0)), 0.0)


RADIAL: list[tuple[Any, Profile]] = [
    (Gaussian(0.7), lambda r: np.exp(-(r**2) / (2 * 0.7**2))),
    (Laplace(0.6), lambda r: np.exp(-r / 0.6)),
    (Matern(0.8, 1.5), lambda r: matern(r, 0.8, 1.5)),
    (Matern(0.8, 3.5), lambda r: matern(r, 0.8, 3.5)),
    (RationalQuadratic(0.5, 1.7), lambda r: (1 + r**2 / (2 * 1.7 * 0.5**2)) ** -1.7),
    (InverseMultiquadric(0.6), lambda r: (1 + r**2 / 0.6**2) ** -0.5),
    (Wendland(1.3), lambda r: inside(r, 1.3, lambda s: (1 - s) ** 4 * (1 + 4 * s))),
    (Wendland(1.3, 4), lambda r: inside(r, 1.3, lambda s: (1 - s) ** 6 * (1 + 6 * s + 35 / 3 * s**2))),
    (TopHat(0.9), lambda r: (r <= 0.9).astype(float)),
    (TruncatedPower(1.4, 0.3, 2.0), lambda r: np.where(r <= 2.0, (np.maximum(r, 0.3) / 0.3) ** -1.4, 0.0)),
    (Formula("exp(-r / 2) * (1 + r / 3)"), lambda r: np.exp(-r / 2) * (1 + r / 3)),
    (Formula("0.4 / (1 + r**3) + 0.6 * exp(-r**2)"), lambda r: 0.4 / (1 + r**3) + 0.6 * np.exp(-(r**2))),
    (Formula(lambda r: np.exp(-3 * r) * (2 - np.exp(-r))), lambda r: np.exp(-3 * r) * (2 - np.exp(-r))),
]


def off(told: Any, k: Floats, u: Floats) -> float:
    """Return by how much averages and degrees differ from those of a matrix, relative."""
    degree = k.sum(axis=1)
    averages = np.abs(told.average(u) - k @ u / degree).max() / np.abs(u).max()
    return largest(float(averages), float(np.abs(np.exp(told.log_degree) / degree - 1).max()))


@dataclass(frozen=True)
class Ending(RadialKernel):
    """1 up to 1.1 lengths, beyond which its formula is no number."""

    length: float
    positive: ClassVar[tuple[str, ...]] = ("length",)

    def log_profile(self, squared: Any) -> Any:
        return np.where(squared > (1.1 * self.length) ** 2, np.nan, np.zeros_like(squared))


def refused_beyond(length: float) -> float:
    """Return the distance at which a kernel that ends is refused, over that where it ends; 0 if it is taken."""
    try:
        affinity(Ending(length), Points(np.arange(3.0)))
    except InputError as error:
        found = re.search(r"at the distance (\S+),", str(error))
        return float(found[1]) / (1.1 * length) if found else 0.0
    return 0.0


def digits() -> float:
    """Return errors of log k of formulas that cancel, far out too, and of powers and absolute values."""
    near, far = np.geomspace(1e-6, 1e6, 60), np.geomspace(1e-6, 30, 60)
    cases: list[tuple[Any, Profile, Floats]] = [
        ("1 - r / (1 + r)", lambda r: -np.log1p(r), near),
        ("sqrt(1 + r**2) - r", lambda r: -np.log(np.sqrt(1 + r**2) + r), near),
        ("where(r < 0.4, sqrt(4 + 9 * r**2) - 3 * r - 1, 0)", lambda r: np.log(4 / (np.sqrt(4 + 9 * r**2) + 3 * r) - 1),
         far[far < 0.4]),
        ("1 - (1 - exp(-2 * r))", lambda r: -2 * r, far),
        ("1 - r * (1 + r * r)**-0.5", lambda r: -np.log((np.sqrt(1 + r**2) + r) * np.sqrt(1 + r**2)), near),
        (lambda r: 2.0**-r * 0.5 ** np.abs(r - 1) * 2, lambda r: -np.log(2) * (r + abs(r - 1) - 1), far),
        ("where(r < 3, (1 + r**1.5)**-0.75, 0)", lambda r: -0.75 * np.log1p(r**1.5), far[far < 3]),
        ("maximum(exp(-r), pow(1 + r, -2.5)) * minimum(1, exp(-r / 3))",
         lambda r: np.maximum(-r, -2.5 * np.log1p(r)) - r / 3, far),
    ]  # fmt: skip
    worst = 0.0
    for text, log, r in cases:
        worst = largest(worst, float(np.abs((Formula(text).log_profile(r**2) - log(r)) / (1 + abs(log(r)))).max()))
    return worst


def in_any_unit() -> float:
    """Return by how much averages of pairs change, relative, with a unit of distances whose squares no float holds."""
    rng, worst = np.random.default_rng(19), 0.0
    x, u = rng.random((60, 2)), rng.standard_normal(60)
    plain = affinity(Gaussian(0.2), Points(x), method="pairwise").average(u)
    for unit in (2.0**-1040, 2.0**-700, 2.0**700):
        told = affinity(Gaussian(0.2 * unit), Points(x * unit), method="pairwise").average(u)
        worst = largest(worst, float(np.abs(told - plain).max()))
    return worst


def derived() -> float:
    """Return errors of widths and reaches that kernels derive from what they are given, relative."""
    covariance = np.array([[0.5, 0.2], [0.2, 0.3]])
    gauss = Anisotropic(Gaussian(0.8), covariance=covariance)
    reach = gauss.supports(1e-4, 2)  # where exp(−zᵀ C⁻¹ z / (2 · 0.8²)) is 1e-4, farthest along an axis
    wanted = 0.8 * np.sqrt(-2 * np.log(1e-4) * np.diag(covariance))
    widths = Anisotropic(Laplace(1.0), widths=np.array([0.5, 2.0])).supports(np.exp(-3), 2)
    formula = Formula("exp(-r**2 / 3)", width=0.7).gaussian_width or 0.0
    cut = Interaction(Gaussian(0.5), 1.5, cutoff=1.2)
    r, end = np.array([0.3, 0.9, 1.19, 1.3]), np.exp(-(1.2**2) / 0.5)
    # Potentials of one's own, as text and as functions, less what they tend to.
    own = [Interaction("1 - exp(-r) * (1 + r / 2)"), Interaction(lambda r: 1 - np.exp(-r) * (1 + r / 2))]
    beside = [float(np.abs(value(one.beside_far[0], r**2) + np.exp(-r) * (1 + r / 2)).max()) for one in own]
    slopes = [float(np.abs(one.slope(r) - np.exp(-r) * (1 + r) / 2).max()) for one in own]
    values = [float(np.abs(one(r) - 1 + np.exp(-r) * (1 + r / 2)).max()) for one in own]
    held = 1.5 * np.where(r < 1.2, np.exp(-(r**2) / 0.5) - end, 0.0)
    return largest(
        float(np.abs(np.array(reach) / wanted - 1).max()),
        float(np.abs(np.array(widths) / np.array([1.5, 6.0]) - 1).max()),
        abs(formula / (0.7 * np.sqrt(1.5)) - 1),
        float(np.abs(cut(r) - held).max()),
        *(100 * error for error in (*beside, *slopes, *values)),
    )


def run(context: Context) -> Outcome:
    rng = np.random.default_rng(100)
    n = context.pick(300, 60)
    x, u = rng.random((n, 2)) * 3, rng.standard_normal(n)
    points, line = Points(x), Grid(n, spacing=0.1, boundary="isolated")
    r = np.sqrt(((x[:, None] - x[None]) ** 2).sum(axis=2))
    apart = 0.1 * np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
    worst: dict[str, float] = {}
    for kernel, profile in RADIAL:
        name = type(kernel).__name__
        context.step(name)
        worst[name] = largest(worst.get(name, 0.0), off(affinity(kernel, points), profile(r) / n, u))
        worst[name] = largest(worst[name], off(affinity(kernel, line), 0.1 * profile(apart), u))
        compiled = affinity(kernel, points, method="pairwise")
        worst[name] = largest(worst[name], off(compiled, profile(r) / n, u))
        logs = kernel.log_profile(np.linspace(0.05, 2.5, 30) ** 2)
        with np.errstate(divide="ignore"):
            wanted = np.log(profile(np.linspace(0.05, 2.5, 30)))
        there = np.isfinite(wanted)
        worst[name] = largest(worst[name], float(np.abs(logs[there] - wanted[there]).max()))
        worst[name] = largest(worst[name], float(np.sum(np.isfinite(logs) != there)))
    context.step("others")
    stretch = np.array([[1.5, 0.4], [-0.2, 0.8]])
    moved = x @ stretch.T
    k = np.exp(-((moved[:, None] - moved[None]) ** 2).sum(axis=2) / 2)
    worst["Anisotropic"] = off(affinity(Anisotropic(Gaussian(1.0), matrix=stretch), points), k / n, u)
    q, keys = rng.standard_normal((2, n, 4))
    k = np.exp(q @ keys.T / 2)
    worst["ExpDotProduct"] = off(affinity(ExpDotProduct(), Points(np.zeros(n)), keys, queries=q), k / n, u)
    image = rng.standard_normal(n)
    padded = np.pad(image, 1, mode="symmetric")
    patches = np.lib.stride_tricks.sliding_window_view(padded, 3)
    k = np.exp(-((patches[:, None] - patches[None]) ** 2).mean(axis=2) / 0.9**2)
    k *= np.abs(np.subtract.outer(np.arange(n), np.arange(n))) <= 2
    told = affinity(Patch(0.9, patch_size=3, search_radius=2), Grid(n, boundary="reflect"), image)
    inner = slice(3, n - 3)
    worst["Patch"] = float(np.abs(told.average(u) - k @ u / k.sum(axis=1))[inner].max())
    at = np.linspace(0.2, 3, 20)
    morse = Morse(repulsion=1.3, repulsion_length=0.5, attraction=0.4, attraction_length=2.0)
    worst["Morse"] = _potential(morse, lambda r: 1.3 * np.exp(-r / 0.5) - 0.4 * np.exp(-r / 2.0), at)
    worst["PowerLaws"] = _potential(PowerLaws(attraction=3.0, repulsion=1.5), lambda r: r**3 / 3 - r**1.5 / 1.5, at)
    soft = PowerLaws(attraction=3.0, repulsion=1.5, softening=0.6)
    distance = np.sqrt(at**2 + 0.6**2)
    worst["PowerLaws"] = largest(worst["PowerLaws"], float(np.ptp(soft(at) - distance**3 / 3 + distance**1.5 / 1.5)))
    steep = [kernel.steepness / kernel.scale * width - 1 for width in (0.7, 3.0) for kernel in (Laplace(width),)]
    places = [refused_beyond(length) for length in (1e-6, 1.0, 1e6)]
    checks = [Check(f"{name}: averages, degrees and logarithms", error, 1e-9) for name, error in worst.items()]
    checks += [
        Check("where kernels are refused that end, over where they end: least", min(places), 0.999, at_least=True),
        Check("the same: largest", max(places), 1.3),
        Check("formulas that cancel, powers and cases: log k, over 1 + its size", digits(), 1e-12),
        Check("averages in units of distance from 2⁻¹⁰⁴⁰ to 2⁷⁰⁰", in_any_unit(), 1e-7),
        Check("reaches, widths and cut potentials that are derived, relative", derived(), 1e-6),
        Check("steepest slope of the logarithm of exp(−r/w), times w, less 1", largest(*np.abs(steep)), 1e-9),
    ]
    return Outcome(checks)


def _potential(pairs: Any, wanted: Profile, r: Floats) -> float:
    """Return by how much a potential differs from a formula, up to a constant."""
    return float(np.ptp(pairs(r) - wanted(r)))


CLAIM = Claim(
    name="kernels-by-formula",
    title="Kernels and compiled formulas have the values of their definitions",
    statement=(
        "Gaussian, Laplace, Matérn, rational quadratic, inverse multiquadric, Wendland, truncated powers, top hats, "
        "anisotropic, dot-product and patch kernels, and formulas given as text or as functions, average as matrices "
        "of their definitions do, on scattered nodes and on grids."
    ),
    source="Rasmussen and Williams 2006, chapter 4; Wendland 1995, doi 10.1007/BF02123482",
    run=run,
)
