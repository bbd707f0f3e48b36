"""Variable bandwidths: the modes of a generator, with an error of first order, wherever points are few."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import numpy as np
from scipy.linalg import eigh
from scipy.special import ndtri

from nlflow._array import Floats
from nlflow.errors import NlflowWarning
from nlflow.plotting import Series, rate_figure
from validation.harness import CannotRunError, Check, Claim, Context, Outcome, largest

_TILT = 0.6  # of the density on the circle and the sphere, from 1 - tilt to 1 + tilt over the mean
_GOLDEN = np.pi * (3 - 5**0.5)


def _circle(n: int) -> Floats:
    """Return points with the density 1 + tilt cos(angle), at its quantiles."""
    wanted = np.arange(n) / n * 2 * np.pi
    angle = wanted.copy()
    for _ in range(60):
        angle -= (angle + _TILT * np.sin(angle) - wanted) / (1 + _TILT * np.cos(angle))
    return np.column_stack([np.cos(angle), np.sin(angle)])


def _sphere(n: int) -> Floats:
    """Return points with the density 1 + tilt z, at quantiles of the height along a spiral."""
    height = (-1 + np.sqrt(1 - 2 * _TILT * (1 - _TILT / 2 - 2 * (np.arange(n) + 0.5) / n))) / _TILT
    around, angle = np.sqrt(1 - height**2), np.arange(n) * _GOLDEN
    return np.column_stack([around * np.cos(angle), around * np.sin(angle), height])


def _widths(points: Floats) -> float:
    """Return how far widths are from s q^β, q_i ∝ Σ_j exp(−|x_i − x_j|²/(2c² r_i r_j)) / r_i^d written out, relative.

    r is the root mean square distance of the eight nearest points, and c that by which sums of Gaussians grow most.
    """
    from nlflow.learning import DiffusionMap

    found = DiffusionMap(2, "rbf", beta=-0.5).fit(points).graph_.widths
    far = np.sqrt(((points[:, None] - points) ** 2).sum(axis=2))
    near = np.sqrt((np.sort(far, axis=1)[:, 1:9] ** 2).mean(axis=1))
    scaled = far**2 / np.outer(near, near)
    density = np.log(np.exp(-scaled / (2 * found._factor**2)).sum(axis=1)) - np.log(near)
    relative = np.exp(-0.5 * (density - density.mean()))
    return float(np.abs(found.points / (np.sqrt(2) * found.curve.best * relative) - 1).max())


def _curve() -> float:
    """Return errors of curves of sums, of the width and dimension that they tell, and of widths in other units."""
    from nlflow.learning import DiffusionMap
    from nlflow.learning.widths import width_curve

    points = _circle(80)
    curve = width_curve(points)
    squared = ((points[:, None] - points) ** 2).sum(axis=2)
    sums = np.array([np.exp(-squared / (2 * w**2)).mean() for w in curve.widths])
    slopes = np.gradient(np.log(sums), np.log(curve.widths))
    rates = [
        DiffusionMap(2, "rbf", beta=-0.5).fit(unit * points).graph_.widths.points / unit for unit in (1.0, 1e-3, 1e4)
    ]
    return largest(
        float(np.abs(curve.sums / sums - 1).max()),
        abs(curve.gamma * 2 * curve.widths[np.argmax(slopes)] ** 2 - 1),
        abs(curve.dimension / slopes.max() - 1),
        *(float(np.abs(one / rates[0] - 1).max()) for one in rates[1:]),
    )


def run(context: Context) -> Outcome:
    if importlib.util.find_spec("sklearn") is None:
        raise CannotRunError("scikit-learn is not installed: pip install 'nlflow[learning]'")
    from nlflow.learning import DiffusionMap

    n = context.pick(1000, 500)
    gammas = np.array([12.5, 25.0, 50.0, 100.0])
    series, slopes, most = [], [], []
    for name, points, expected, more in (
        ("circle", _circle(n), [-1, -1, -4, -4], {}),
        ("sphere", _sphere(2000), [-2, -2, -2, -6, -6, -6, -6, -6], {"n_neighbors": context.pick(400, 300)}),
    ):
        context.step(name)
        affinity = "knn" if more else "rbf"
        off = [
            float(np.abs(DiffusionMap(len(expected), affinity, gamma=gamma, beta=-0.5, **more).fit(points).generator_
                         / expected - 1).max())
            for gamma in gammas
        ]  # fmt: skip
        steps = 1 / (4 * gammas)  # the epsilon of exp(-|x - y|^2 / (4 epsilon))
        slope = float(np.polyfit(np.log(steps), np.log(off), 1)[0])
        series.append(Series(name, steps, np.array(off), slope=slope, expected=1.0, half_width=0.15))
        slopes.append(slope)
        most.append(off[-1])

    context.step("a Gaussian")
    line = ndtri((np.arange(n) + 0.5) / n)[:, None]
    few = {"gamma": context.pick(400.0, 150.0), "alpha": 0.5}
    found = DiffusionMap(2, beta=-0.5, **few).fit(line)
    hermite = float(np.abs(found.generator_ / [-1, -2] - 1).max())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NlflowWarning)  # lone points rule where no width follows the density
        flat = float(np.abs(DiffusionMap(2, beta=0.0, **few).fit(line).generator_ / [-1, -2] - 1).max())
    k = np.exp(-((line - line.T) ** 2) / np.outer(found.widths_, found.widths_))
    v = (k.sum(axis=1) / found.widths_) ** 0.5 * found.widths_**1.5
    k /= np.outer(v, v)
    d = k.sum(axis=1)
    dense = eigh(k - np.diag(d), np.diag(d * found.widths_**2 / 4), eigvals_only=True)[::-1][1:3]
    apart = float(np.abs(found.generator_ / dense - 1).max())
    moved = float(np.abs(found.transform(line) / found.embedding_ - 1).max())

    checks = [
        Check("circle, density 1 + 0.6 cos: slope of the largest relative error of −1, −1, −4, −4 over ε", slopes[0],
              0.15, expected=1.0),
        Check("the same at ε = 1/400", most[0], 0.01),
        Check("sphere, density 1 + 0.6 z: slope of that of −2 (3 times), −6 (5 times) over ε", slopes[1], 0.15,
              expected=1.0),
        Check("the same at ε = 1/400", most[1], 0.01),
        Check("Ornstein-Uhlenbeck, −1 and −2, from quantiles of a Gaussian, β = −1/2", hermite, 0.01),
        Check("with one width (β = 0), where the tails see nobody", flat, 0.5, at_least=True),
        Check("against the dense eigenvalue problem, relative", apart, 1e-8),
        Check("widths against densities written out, relative", _widths(1.3 * _circle(60)), 1e-12),
        Check("sums of Gaussians and what they tell, against NumPy's, and in other units, relative", _curve(), 1e-9),
        Check("modes at the points themselves by one average, relative", moved, 1e-6),
    ]  # fmt: skip
    figures: dict[str, Any] = {
        "Largest relative error of eigenvalues of the Laplacian from points of unequal density, β = −1/2.": rate_figure(
            series, xlabel="ε", ylabel="relative error"
        )
    }
    return Outcome(checks, figures, {"points": n, "slopes": slopes})


CLAIM = Claim(
    name="variable-bandwidths",
    title="Widths that follow the density give the generator where points are few",
    statement=(
        "With k = exp(−|x − y|²/(s(x) s(y))), s = 2 ε^(1/2) q^β, the operator 4 (P − I)/s² of the weights "
        "(s_i s_j)^(−d/2−1) (q_i q_j)^(−α) k_ij tends to Δ + 2 (1 − α) ∇log q · ∇ with an error of order ε. α = 1 "
        "gives the Laplacian of the manifold, α = 1/2 the Ornstein-Uhlenbeck operator of a Gaussian."
    ),
    source="Berry, Harlim 2016, doi 10.1016/j.acha.2015.01.001, arXiv 1406.5064",
    run=run,
)
