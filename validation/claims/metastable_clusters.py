"""How long clusters of tokens last: a time that is exponential in beta."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow import Callback, RungeKutta, SphereFlow, on_sphere, solve
from nlflow.plotting import new_figure
from nlflow.plotting.base import PALETTE, finish
from nlflow.studies.fits import regress
from validation.harness import Check, Claim, Context, Outcome

Floats = NDArray[np.float64]

TOGETHER = 0.99  # cosine from which tokens count as one cluster
ANGLE = np.pi / 3  # between the two clusters that meet first


def tokens(per_cluster: int = 5, spread: float = 0.05) -> Floats:
    """Return tokens of three clusters: two at `ANGLE`, the third far from both."""
    centres = np.array([[1, 0, 0], [np.cos(ANGLE), np.sin(ANGLE), 0], [-0.5, -0.3, 0.8]])
    noise = np.random.default_rng(0).standard_normal((3, per_cluster, 3))
    noise -= noise.mean(axis=1, keepdims=True)
    return np.asarray(on_sphere((centres[:, None] + spread * noise).reshape(-1, 3)))


def lifetime(beta: float, most: float) -> tuple[float, list[tuple[float, float]]]:
    """Return when the first two clusters are one, and the times and cosines of their centres until then."""
    x = tokens()
    flow, seen, counts = SphereFlow(x, beta), [], []
    half = len(x) // 3

    def look(t: float, u: Any, energy: Any) -> str | None:
        del energy
        counts.append(int(flow.clusters(u, TOGETHER).max()) + 1)
        centres = [on_sphere(u[n * half : (n + 1) * half].mean(axis=0)[None])[0] for n in range(2)]
        seen.append((t, float(centres[0] @ centres[1])))
        return "met" if counts[-1] <= 2 else None

    solve(flow, x, t=most, integrator=RungeKutta(rtol=1e-7, atol=1e-10), trackers=[Callback(look)], energies=False)
    return (seen[-1][0] if counts[-1] == 2 else float("nan")), seen


def predicted(beta: float, cosine: float) -> float:
    """Return the time in which two clusters of equal size go from a cosine to `TOGETHER`, as two tokens do.

    c' = 2 exp(beta c) (1 - c^2) / (exp(beta) + exp(beta c)), so t is an integral over c, by SciPy's quadrature.
    """
    from scipy.integrate import quad

    def slowness(c: float) -> float:
        return float((np.exp(beta * (1 - c)) + 1) / (2 * (1 - c**2)))

    return float(quad(slowness, cosine, TOGETHER, limit=200, epsrel=1e-10)[0])


def run(context: Context) -> Outcome:
    betas = np.array(context.pick([12, 14, 16, 18, 20, 22], [12, 14, 16, 18]), dtype=float)
    times, integrals, courses = [], [], {}
    x = tokens()
    centres = [on_sphere(part.mean(axis=0)[None])[0] for part in np.split(x, 3)]
    cosine = float(centres[0] @ centres[1])
    for beta in betas:
        context.step(f"beta = {beta:g}")
        integrals.append(predicted(beta, cosine))
        time, seen = lifetime(beta, 3 * integrals[-1])
        times.append(time)
        courses[beta] = seen
    found, integral = np.array(times), np.array(integrals)
    line = regress(betas, np.log(betas * found))
    rest = np.log(betas * found) - line.slope * betas - line.intercept
    spread = np.log(betas * found) - np.log(betas * found).mean()
    share = 1 - float((rest**2).sum() / (spread**2).sum())
    plain = np.log(found) - np.polyval(np.polyfit(betas, np.log(found), 1), betas)
    bare = 1 - float((plain**2).sum() / ((np.log(found) - np.log(found).mean()) ** 2).sum())
    checks = [
        Check("log(beta T) over beta: R^2", share, 0.99, at_least=True),
        Check("log T over beta: R^2", bare, 0.99, at_least=True),
        Check("log(beta T) over beta: slope over 1 - c", line.slope / (1 - cosine), 0.05, expected=1.0),
        Check("T over the integral of two tokens, furthest from 1",
              float((found / integral)[np.argmax(np.abs(np.log(found / integral)))]), 0.1, expected=1.0),
    ]  # fmt: skip
    details = {"beta": betas, "time": found, "integral": integral, "cosine of the centres": cosine, "slope": line.slope}
    return Outcome(checks, {CAPTION: draw(betas, found, integral, courses)}, details)


def draw(betas: Floats, found: Floats, integral: Floats, courses: Any) -> Any:
    figure = new_figure(9.4, 3.6, dpi=130)
    left, right = figure.subplots(1, 2)
    left.semilogy(betas, integral, color="black", linewidth=1, label="two tokens, integral")
    left.semilogy(betas, found, "o", color=PALETTE[0], label="15 tokens in three clusters")
    finish(left, "how long three clusters last", "β", "time to the first meeting")
    left.legend(fontsize=9, frameon=False)
    for colour, (beta, seen) in zip(PALETTE, list(courses.items())[::2], strict=False):
        right.semilogx(*np.array(seen[1:]).T, color=colour, label=f"β = {beta:g}")
    finish(right, "the two clusters that meet first", "t", "cosine of their centres")
    right.legend(fontsize=9, frameon=False)
    return figure


CAPTION = (
    "Left: the time at which two of three clusters become one, over beta; the line is not fitted. Right: the cosine "
    "of the two that meet, which hardly moves for a time that is exponential in beta, and then all at once."
)

CLAIM = Claim(
    name="metastable-clusters",
    title="Clusters of tokens last for a time that is exponential in beta",
    statement=(
        "Under SA with the identity for all maps, tokens gather in clusters at once, and then clusters are drawn to "
        "each other by exp(−β(1 − c)), c being the cosine of the nearest two. So they last "
        "T ≈ exp(β(1 − c)) / (2β(1 − c²)): log(βT) is linear in β with the slope 1 − c, up to terms of order 1/β². "
        "Fifteen tokens in three clusters, the nearest two 60° apart; the time at which these are one, over β, and "
        "against the integral of the scalar equation of two tokens."
    ),
    source="arXiv 2410.06833; derived from arXiv 2312.10794, section 6",
    run=run,
)
