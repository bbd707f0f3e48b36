"""Sinkhorn's attention: doubly stochastic, self-adjoint, and a gradient flow where softmax's is none."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow import AttentionFlow, ExpDotProduct, GradientFlow, J, Points, affinity, sinkhorn, solve
from nlflow.plotting import new_figure
from nlflow.plotting.base import PALETTE, finish
from validation.harness import Check, Claim, Context, Outcome, largest, smallest

Floats = NDArray[np.float64]

TOKENS, WIDTH = 24, 3


def nodes(count: int) -> Points:
    return Points(np.arange(float(count)), np.ones(count))


def curl(field: Any, x: Floats, step: float = 1e-5) -> float:
    """Return |A - A^T| / |A| of the derivative A of a field at x, by central differences: 0 for gradients in L2."""
    flat = x.ravel()
    columns = []
    for number in range(flat.size):
        ends = []
        for sign in (1, -1):
            moved = flat.copy()
            moved[number] += sign * step
            ends.append(np.asarray(field(moved.reshape(x.shape))).ravel())
        columns.append((ends[0] - ends[1]) / (2 * step))
    slope = np.stack(columns, axis=1)
    return float(np.linalg.norm(slope - slope.T) / np.linalg.norm(slope))


def functional(x: Floats) -> float:
    """Return -1/2 sum_ij a_ij log(N a_ij / k_ij) / N of the doubly stochastic a, that of arXiv 2110.11773."""
    found = sinkhorn(ExpDotProduct(scale=1.0), nodes(len(x)), x)
    a = found.matrix
    return -0.5 * float((a * (np.log(a * len(x)) - x @ x.T)).sum()) / len(x)


def run(context: Context) -> Outcome:
    rng = np.random.default_rng(0)
    sums, asymmetry, balance, rises = [], [], [], 0
    for scale in (0.5, 2.0, 8.0, 50.0):
        context.step(f"logits of size {scale:g}")
        x = rng.standard_normal((TOKENS, WIDTH))
        # With other queries scalings converge the slower the larger the logits: linear convergence.
        kinds: list[Any] = [None] if scale > 2 else [None, rng.standard_normal((TOKENS, WIDTH))]
        for queries in kinds:
            p = sinkhorn(ExpDotProduct(scale=scale), nodes(TOKENS), x, queries=queries)
            sums += [float(np.abs(p.matrix.sum(axis=axis) - 1).max()) for axis in (0, 1)]
            if queries is not None:
                continue
            asymmetry.append(float(np.abs(p.matrix - p.matrix.T).max()))
            u = rng.standard_normal((TOKENS, 2))
            velocity, gradient = AttentionFlow(p).velocity(u), J(p).gradient(u)
            balance.append(float(np.abs(velocity + gradient / 2).max() / np.abs(velocity).max()))
            course = solve(GradientFlow(J(p), metric="l2"), u, t_eval=np.linspace(0, 2, 11))
            rises += int((np.diff(course.energy) >= 0).sum())
    context.step("gradients and curls")
    x = 0.7 * rng.standard_normal((10, WIDTH))

    def moved(kind: Any) -> Any:
        return lambda y: -kind(ExpDotProduct(scale=1.0), nodes(len(y)), features=y).average(y)

    curls = {"Sinkhorn": curl(moved(sinkhorn), x), "softmax": curl(moved(affinity), x)}
    field, step = moved(sinkhorn)(x), 1e-5
    slopes = np.zeros_like(x)
    for i, axis in np.ndindex(x.shape):
        ends = []
        for sign in (1, -1):
            y = x.copy()
            y[i, axis] += sign * step
            ends.append(functional(y))
        slopes[i, axis] = (ends[0] - ends[1]) / (2 * step)
    off = float(np.abs(len(x) * slopes + field).max() / np.abs(field).max())
    checks = [
        Check("sums of rows and columns less 1", largest(*sums), 1e-6),
        Check("P less its transpose, queries equal to keys", largest(*asymmetry), 1e-10),
        Check("Pu - u against -grad J / 2 in L2, relative", largest(*balance), 1e-9),
        Check("outputs at which J did not fall, of 40", rises, 0),
        Check("tokens that move by -Px: against the gradient of the functional, relative", off, 1e-6),
        Check("the same: asymmetry of the derivative, Sinkhorn", curls["Sinkhorn"], 1e-6),
        Check("the same: asymmetry of the derivative, softmax", smallest(curls["softmax"]), 0.01, at_least=True),
    ]
    return Outcome(checks, {CAPTION: draw(rng)}, {"curls": curls})


def draw(rng: Any) -> Any:
    figure = new_figure(9.4, 3.6, dpi=130)
    left, right = figure.subplots(1, 2)
    for number, scale in enumerate((0.5, 2.0, 8.0)):
        y = rng.standard_normal((TOKENS, WIDTH))
        soft = affinity(ExpDotProduct(scale=scale), nodes(TOKENS), y, method="dense").matrix.sum(axis=0)
        left.plot(np.sort(soft)[::-1], color=PALETTE[number], label=f"softmax, scale {scale:g}")
    left.axhline(1.0, color="black", linewidth=1.2, label="Sinkhorn")
    left.set_yscale("log")
    finish(left, "what a token is given in all", "token, sorted", "sum of its column")
    y, u = rng.standard_normal((TOKENS, WIDTH)), rng.standard_normal(TOKENS)
    times = np.linspace(0, 5, 21)
    kinds = {"softmax": affinity(ExpDotProduct(scale=1.0), nodes(TOKENS), y)}
    kinds["Sinkhorn"] = sinkhorn(ExpDotProduct(scale=1.0), nodes(TOKENS), y)
    for number, (name, p) in enumerate(kinds.items()):
        course = solve(AttentionFlow(p), u, t_eval=times, energies=False).u.mean(axis=1)
        right.plot(times, course, color=PALETTE[number], marker=".", label=name)
    finish(right, "mean of a signal under du/dt = Pu − u", "t", "mean over tokens")
    for axis in (left, right):
        axis.legend(fontsize=9, frameon=False)
    return figure


CAPTION = (
    "Left: the sums of columns of softmax attention, which say how much each token is looked at, and those of "
    "Sinkhorn's, which are 1. Right: so the mean over tokens is conserved."
)

CLAIM = Claim(
    name="sinkhorn-attention",
    title="Sinkhorn's attention is doubly stochastic, and a gradient flow",
    statement=(
        "Rows and columns of exp(fᵢ + gⱼ) kᵢⱼ add up to 1, for logits of any size. With queries equal to keys it is "
        "symmetric, and du/dt = Pu − u is half of −∇J in L²: J falls, and the mean is conserved. Where tokens are "
        "moved by their own attention, dx/dt = −P(x)x is the gradient flow of −½ Σ aᵢⱼ log(N aᵢⱼ/kᵢⱼ)/N with "
        "Sinkhorn's weights; with softmax's it is the gradient flow of nothing in L²: its derivative is not symmetric."
    ),
    source="arXiv 2110.11773, propositions 2 and 3",
    run=run,
)
