"""N tokens on the sphere follow their mean-field equation up to N^(-1/2)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp
from scipy.interpolate import BarycentricInterpolator
from scipy.special import ive

from nlflow import RungeKutta, SphereFlow, solve
from validation.harness import Check, Claim, Context, Outcome

Floats = NDArray[np.float64]

BETA, KAPPA, TIME = 4.0, 0.5, 1.0
NODES = 48  # of Gauss and Legendre's rule: twice as many change no digit
QUANTILES = 20_000


def heights(q: Any) -> Floats:
    """Return z of the law with the density exp(KAPPA z) on the sphere, below which the share q lies."""
    return np.asarray(np.log(np.exp(-KAPPA) + q * (np.exp(KAPPA) - np.exp(-KAPPA))) / KAPPA)


def mean_field() -> tuple[Floats, Floats, Floats]:
    """Return heights at the start and at the end, and weights, of rings of tokens around the axis of the law.

    A law that is symmetric about an axis stays so, and integrals over the angle are Bessel functions:
    int exp(beta x.y) = exp(beta z z') I_0(beta s s'), s = sqrt(1 - z^2). Rings keep their weights.
    """
    z, weight = np.polynomial.legendre.leggauss(NODES)
    weight = weight * np.exp(KAPPA * z)
    weight /= weight.sum()

    def slope(t: float, z: Floats) -> Floats:
        s = np.sqrt(np.maximum(1 - z**2, 0))
        both = BETA * s[:, None] * s
        grown = np.exp(BETA * z[:, None] * z + both - BETA) * weight
        total = (grown * ive(0, both)).sum(axis=1)
        along, out = (grown * ive(0, both)) @ z / total, (grown * ive(1, both)) @ s / total
        return np.asarray(along * (1 - z**2) - z * s * out)

    end = solve_ivp(slope, (0, TIME), z, method="DOP853", rtol=1e-12, atol=1e-13).y[:, -1]
    return z, end, weight


def moments(x: Floats) -> Floats:
    """Return the means of x and of its products."""
    pairs = (x[:, :, None] * x[:, None]).reshape(len(x), -1)[:, [0, 1, 2, 4, 5, 8]]
    return np.concatenate([x.mean(axis=0), pairs.mean(axis=0)])


def drawn(count: int, seed: int) -> Floats:
    rng = np.random.default_rng([count, seed])
    z, angle = heights(rng.random(count)), rng.uniform(0, 2 * np.pi, count)
    s = np.sqrt(1 - z**2)
    return np.stack([s * np.cos(angle), s * np.sin(angle), z], axis=1)


def moved(x: Floats) -> Floats:
    """Return tokens at the end, in float32, whose rounding is far below N^(-1/2)."""
    start = x.astype(np.float32)
    start /= np.sqrt((start**2).sum(axis=1, keepdims=True))
    step = RungeKutta(dt=0.25, adaptive=False)
    found = solve(SphereFlow(start, beta=BETA), start, t=TIME, integrator=step, energies=False)
    return found.final.astype(np.float64)


def run(context: Context) -> Outcome:
    first, end, weight = mean_field()
    square = weight @ end**2
    expected = np.array([0, 0, weight @ end, (1 - square) / 2, 0, 0, (1 - square) / 2, 0, square])
    curve = BarycentricInterpolator(first, end)
    quantiles = np.asarray(curve(heights((np.arange(QUANTILES) + 0.5) / QUANTILES)))
    counts = context.pick([316, 1000, 3162, 10_000, 31_623, 100_000], [200, 632, 2000])
    repeats = context.pick([400, 200, 100, 64, 24, 8], [200, 140, 100])
    by_moments, by_transport = [], []
    for count, many in zip(counts, repeats, strict=True):
        context.step(f"{count} tokens")
        ends = [moved(drawn(count, seed)) for seed in range(many)]
        by_moments.append(np.sqrt(np.mean([np.sum((moments(x) - expected) ** 2) for x in ends])))
        places = np.arange(QUANTILES) * count // QUANTILES
        by_transport.append(np.mean([np.abs(np.sort(x[:, 2])[places] - quantiles).mean() for x in ends]))
    # The logarithm of a mean of r errors has a variance of about 1 / (4 r): a line through all N alike would hang
    # on the few repeats of the largest.
    exact = np.sqrt(repeats)
    slopes = [np.polyfit(np.log(counts), np.log(errors), 1, w=exact)[0] for errors in (by_moments, by_transport)]
    most = float(np.max(by_moments * np.sqrt(counts)))
    checks = [
        Check("error of first and second moments: power of N", slopes[0], 0.05, expected=-0.5),
        Check("Wasserstein distance of heights: power of N", slopes[1], 0.05, expected=-0.5),
        Check("error of the moments times sqrt(N), at most", most, 5.0),
        Check("mean height over that of the start", weight @ end / (weight @ first), 1.3, at_least=True),
    ]  # fmt: skip
    return Outcome(checks, {}, {"counts": counts, "repeats": repeats, "moments": by_moments, "transport": by_transport})


CLAIM = Claim(
    name="mean-field-limit",
    title="Attention on the sphere has a mean-field limit, to N^(-1/2)",
    statement=(
        "N tokens that are drawn from a law and follow SA stay as near to the mean-field equation ∂μ/∂t + div(μ "
        "p_x ∫ exp(β x·y) y dμ(y) / ∫ exp(β x·y) dμ(y)) = 0 as N draws are to their law: first and second moments "
        "to N^(-1/2) in the root mean square, and the Wasserstein distance of the heights along the axis of the "
        "law as well. The mean-field equation is solved here for a law around an axis, where it is an equation "
        "for heights alone, with Bessel functions, by Gauss and Legendre's rule and SciPy."
    ),
    source="A.-S. Sznitman 1991, doi 10.1007/BFb0085169; arXiv 2312.10794, section 3",
    run=run,
)
