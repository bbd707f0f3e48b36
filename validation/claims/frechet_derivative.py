"""Equations 8 and 31: the gradients of J and E."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nlflow import E, J, Points, from_matrix
from nlflow.functionals.forward import EA, Forward
from validation.harness import PAPER, Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

# Name, metric of the gradient, measure of the fidelity (None for J). The last is lambda~ = lambda / d.
CASES = (
    ("∇J, L² metric", "l2", None),
    ("∇J, degree metric", "degree", None),
    ("∇E, L² metric, λ", "l2", "l2"),
    ("∇E, degree metric, λ̃", "degree", "degree"),
    ("∇E, degree metric, λ̃ = λ/d", "degree", "l2"),
)


def double_sum(k: Floats, w: Floats, u: Floats, f: Floats, fidelity: Floats) -> float:
    """Return J + 1/2 sum_i fidelity_i |u_i - f_i|^2 as it is defined, over all pairs with k itself."""
    squares = ((u[:, None, :] - u[None, :, :]) ** 2).sum(axis=2)
    j = 0.5 * float(np.sum(w[:, None] * w[None, :] * k * squares))
    return j + 0.5 * float(np.sum(fidelity[:, None] * (u - f) ** 2))


def run(context: Context) -> Outcome:
    worst = dict.fromkeys((name for name, _, _ in CASES), 0.0)
    trials = context.pick(50, 10)
    for trial in range(trials):
        context.step(f"trial {trial + 1} of {trials}")
        rng = np.random.default_rng(trial)
        n, channels = int(rng.integers(5, 60)), int(rng.integers(1, 5))
        k = rng.random((n, n)) ** 3  # not symmetric
        w = rng.uniform(0.2, 2.0, n) / n
        u, f, direction = rng.standard_normal((3, n, channels))
        degree = (k + k.T) @ w
        strength = float(10 ** rng.uniform(-2, 2))
        affinity = from_matrix(k, Points(np.zeros(n), weights=w))
        for name, metric, measure in CASES:
            functional = J(affinity) if measure is None else E(affinity, f, strength, measure=measure)
            inner = w if metric == "l2" else w * degree
            predicted = float(np.sum(inner[:, None] * functional.gradient(u, metric) * direction))
            fidelity = {None: 0 * w, "l2": strength * w, "degree": strength * w * degree}[measure]
            # A quadratic functional has no third derivative: the central difference is exact at any step.
            ahead, behind = (double_sum(k, w, u + s * direction, f, fidelity) for s in (0.5, -0.5))
            worst[name] = largest(worst[name], abs(ahead - behind - predicted) / (abs(ahead) + abs(behind)))
    checks = [Check(f"{name}, against the difference quotient", value, 1e-13) for name, value in worst.items()]
    return Outcome([*checks, Check("J and E with what is measured, Au, and values over Σ w d", measured(), 1e-12)])


def measured() -> float:
    """Return errors of E with ½ |Au − f|²/σ² in the place of its fidelity, and of values over the total degree."""
    rng = np.random.default_rng(3)
    n, sigma, channels = 9, 0.4, 2
    k, w, a = rng.random((n, n)), rng.uniform(0.2, 2.0, n) / n, rng.standard_normal((4, n))
    u, data = rng.standard_normal((n, channels)), rng.standard_normal((4, channels))
    weights = from_matrix(k, Points(np.zeros(n), weights=w))
    links = w[:, None] * (k + k.T) * w
    degree = (k + k.T) @ w
    matrix = np.diag(links.sum(axis=1)) - links
    energy = EA(weights, data, Forward((lambda u: a @ u, lambda f: a.T @ f), (n, channels)), sigma)
    j = float(np.sum(u * (matrix @ u))) / 2
    whole = j + float(((a @ u - data) ** 2).sum()) / (2 * sigma**2)
    slope = matrix @ u + a.T @ (a @ u - data) / sigma**2
    best = np.linalg.solve(matrix + a.T @ a / sigma**2, a.T @ data / sigma**2)
    pull = float((w * degree * 0.6) @ ((u - 1) ** 2).sum(axis=1)) / 2
    held = float((w * 0.6) @ ((u - 1) ** 2).sum(axis=1)) / 2
    total, ones = float(w @ degree), np.ones((n, channels))
    return largest(
        abs(energy.value(u) / whole - 1), abs(energy.value(u, normalize=True) * total / whole - 1),
        float(np.abs(energy.gradient(u) - slope / w[:, None]).max() / np.abs(slope / w[:, None]).max()),
        float(np.abs(energy.gradient(u, "degree") - slope / (w * degree)[:, None]).max() / np.abs(slope).max()),
        float(np.abs(energy.minimizer(rtol=1e-13).u - best).max() / np.abs(best).max()) / 1e3,
        abs(J(weights).value(u, normalize=True) * total / j - 1),
        abs(E(weights, ones, 0.6, measure="degree").value(u, normalize=True) * total / (j + pull) - 1),
        abs(E(weights, ones, 0.6).value(u, normalize=True) * total / (j + held) - 1),
    )  # fmt: skip


CLAIM = Claim(
    name="frechet-derivative",
    title="The gradients of J and E",
    statement=(
        "With K(x, y) = k(x, y) + k(y, x), ∇J(u)(x) = ∫ (u(x) − u(y)) K(x, y) dy and ∇E = ∇J + λ (u − f), for k that "
        "need not be symmetric. Held against difference quotients of J = ½ ∬ |u(x) − u(y)|² k(x, y) dx dy, formed as "
        "a plain double sum with k itself, for random kernels, weights, signals and directions, in the L² and the "
        "degree metric (where the gradient is divided by the degree d, and λ̃ = λ/d)."
    ),
    source=f"{PAPER}, eq. 8 and 31",
    run=run,
)
