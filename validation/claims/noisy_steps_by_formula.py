"""One step of each integrator with noise, and laws of linear flows, against formulas with whole matrices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.polynomial.chebyshev import Chebyshev
from numpy.typing import NDArray
from scipy.linalg import expm, sqrtm
from scipy.stats import norm, sem
from scipy.stats import t as t_law

from nlflow import E, GradientFlow, J, solve
from nlflow.flows import (
    EulerMaruyama,
    ExactGaussian,
    ExponentialEuler,
    Milstein,
    Noise,
    ParticleFlow,
    PlatenWeak2,
    ensemble,
)
from nlflow.flows.integrators.stochastic import covariance_root, fluctuation
from nlflow.flows.noise import normals
from validation.flow_by_matrices import H, N, Problem, T, apart, phi
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]


def wave(u: Any) -> Any:
    return 0.3 + 0.1 * u * u


def noises(problem: Problem) -> Iterator[tuple[Noise, Callable[[Floats], Floats], Floats, Floats]]:
    """Yield noise of every kind with s(u), the unit of each unknown, and what channels have of W."""
    own = np.random.default_rng(5).uniform(0.2, 1.0, N)
    mixing, shares, unit = np.array([[0.8, 0.3], [-0.2, 1.1]]), np.array([0.7, 1.3]), problem.m**-0.5
    yield Noise(beta=3.1, rng=7), lambda u: np.sqrt(2 / 3.1) + 0 * u, unit, np.eye(2)
    yield Noise(strength=0.4, channels=mixing, rng=8), lambda u: 0.4 + 0 * u, unit, mixing
    nodes = Noise(strength=own, channels=shares, white="nodes", rng=9)
    yield nodes, lambda u: np.repeat(own, 2), np.ones(2 * N), np.diag(shares)
    yield Noise(strength=wave, channels=shares, rng=10), wave, unit, np.diag(shares)
    yield Noise(strength=wave, white="nodes", rng=11), wave, np.ones(2 * N), np.eye(2)


def noisy() -> float:
    """Return errors of steps with noise whose increments are known, relative."""
    worst = 0.0
    for problem in (Problem("nodes", "l2", "number"), Problem("nodes", "degree", "none"),
                    Problem("ring", "degree", "number")):  # fmt: skip
        u, a = problem.start.ravel(), problem.stiff
        v = problem.velocity(T, u)
        drawn = u + H * phi(1, -H * a) @ (problem.beside(T, u) - a @ u)
        decay, root = expm(-H * a), np.real(sqrtm(phi(1, -2 * H * a)))
        for noise, strength, unit, share in noises(problem):
            flow = (problem.flow + noise).when(T)
            white = noise.increments(flow, problem.start, 4, H)
            dw, s, moved = (white @ share.T).ravel(), strength(u), u + H * v
            e = math.sqrt(H) * unit * np.tile(np.diag(share), N)
            ahead, up, down = moved + s * dw, strength(moved + s * e), strength(moved - s * e)
            bent = (up - s) * (dw**2 - e**2) / (2 * e)
            heun = u + H / 2 * (v + problem.velocity(T + H, ahead))
            weak = (up + down + 2 * s) * dw / 4 + (up - down) * (dw**2 - e**2) / (4 * e)
            alike = noise.uniform and noise.white == "measure"
            ends = {
                EulerMaruyama: ahead,
                Milstein: ahead if noise.additive else ahead + bent,
                PlatenWeak2: heun + (s * dw if noise.additive else weak),
                ExponentialEuler: drawn + (root if alike else decay) @ (s * dw),
            }
            for step, wanted in ends.items():
                found = step(H).noisy(flow, problem.start, H, white, noise)  # type: ignore[abstract]
                worst = largest(worst, apart(found.ravel(), wanted))
    # Increments: numbers of node, channel and step, times √(dt / m_i); path 3 has its own channels.
    problem = Problem("nodes", "degree", "number")
    unit, like = problem.m.reshape(N, 2) ** -0.5, problem.start
    for kind, share in (("nodes", 1.0 + 0 * unit), ("measure", unit)):
        noise = Noise(strength=1.0, white=kind, rng=5)
        white = math.sqrt(0.4) * normals(5, (N, 2), node=0, channel=6, step=9, stream=1)
        found = noise.on_path(3).increments(problem.flow + noise.on_path(3), like, 9, 0.4, stream=1)
        other = noise.on_channel(4)
        beside = math.sqrt(0.4) * normals(5, (N, 2), node=0, channel=4, step=9, stream=1)
        there = other.increments(problem.flow + other, like, 9, 0.4, stream=1)
        worst = largest(worst, apart(found, white * share), apart(there, beside * share))
    # Of particles with friction γ the velocities get √(2 γ / β).
    noise = Noise(beta=3.1, rng=7)
    heavy = ParticleFlow(np.eye(3, 2), friction=0.8)
    return largest(worst, abs(float(noise.strength_at(heavy, np.zeros((3, 4)))) ** 2 * 3.1 / 1.6 - 1))


def paths() -> float:
    """Return errors of paths side by side, and of intervals of their mean and variance, relative."""
    problem, worst = Problem("nodes", "degree", "number", drives=False), 0.0
    noise = Noise(strength=0.4, rng=5, path=2)
    options: dict[str, Any] = {"t": 2 * H, "integrator": EulerMaruyama(H)}
    found = ensemble(problem.flow + noise, problem.start, 5, side_by_side=2, **options)
    for number, path in enumerate(found.values):
        alone = solve(problem.flow + noise.on_path(number), problem.start, **options).u
        worst = largest(worst, apart(path, alone), float(len(found.values) != 5))
    x = found.values[:, -1].reshape(5, -1)
    mean, variance = x.mean(axis=0), x.var(axis=0, ddof=1)
    low, high = t_law.interval(0.8, 4, loc=mean, scale=sem(x, axis=0))
    # The variance of a variance (Cramér 1946, 27.4), and Gauss' law.
    moment = ((x - mean) ** 4).mean(axis=0)
    width = norm.ppf(0.9) * np.sqrt(np.maximum(moment - variance**2 * 2 / 4, 0) / 5)
    told, spread = found.interval(0.8), found.interval(0.8, of="variance")
    ends = (low, high, np.maximum(variance - width, 0), variance + width)
    return largest(worst, *(apart(one[-1].ravel(), end) for one, end in zip((*told, *spread), ends, strict=True)))


def gathered(t: float, a: Floats) -> Floats:
    """Return √((1 − exp(−2 t a)) / (2 a))."""
    safe = np.where(a > 1e-12, a, 1.0)
    return np.asarray(np.sqrt(np.where(a > 1e-12, -np.expm1(-2 * t * safe) / (2 * safe), t)))


def laws() -> float:
    """Return errors of steps of linear flows with noise, and of their covariances, relative."""
    worst, span, rng = 0.0, 0.8, np.random.default_rng(6)
    for where, metric, fidelity in (("nodes", "l2", "nodes"), ("nodes", "degree", "none"), ("ring", "l2", "none"),
                                    ("ring", "degree", "number")):  # fmt: skip
        problem = Problem(where, metric, fidelity, drives=False)
        a, m, own, start = problem.stiff[::2, ::2], problem.m[::2], rng.uniform(0.2, 1, N), rng.standard_normal(N)
        energy: Any = J(problem.weights)
        if fidelity != "none":
            energy = E(problem.weights, 0 * start, np.diag(problem.phi)[::2].copy(), measure=metric)
        plain = GradientFlow(energy, metric)
        for noise, strength, unit in (
            (Noise(strength=0.4, rng=3), np.full(N, 0.4), m**-0.5), (Noise(strength=own, rng=3), own, m**-0.5),
            (Noise(strength=own, white="nodes", rng=3), own, np.ones(N)),
        ):  # fmt: skip
            flow, memory = plain + noise, {"draws": 2}
            moved, _ = ExactGaussian().advance(flow, start, T, T + span, memory)
            white = noise.increments(flow, start, 2, 1.0)
            root = 0.4 * np.real(sqrtm(span * phi(1, -2 * span * a))) * unit
            if not noise.uniform:
                root = covariance_root(plain, strength * unit, span)
            if where == "nodes" and noise.uniform:
                low, high = plain.spectral_bounds()
                told = fluctuation(plain, white, span, 1e-6)[1] * float(gathered(span, np.array(low)))
                known: Any = Chebyshev.interpolate(partial(gathered, span), 60, [low, high]).coef
                rests = np.cumsum(np.abs(known[::-1]))[::-1]
                worst = largest(worst, 1e-10 * float(np.abs(told / rests - 1).min()))  # it is one of the remainders
            # ∫ exp(−sA) Q exp(−sAᵀ) ds is a block of an exponential (Van Loan 1978, doi 10.1109/TAC.1978.1101743).
            source = np.diag((strength * unit) ** 2)
            blocks = expm(span * np.block([[a, source], [0 * a, -a.T]]))
            wanted = blocks[N:, N:].T @ blocks[:N, N:]
            worst = largest(worst, apart(root @ root.T, wanted), float(memory["draws"] != 3),
                            apart(moved, expm(-span * a) @ start + root @ (white / unit)))  # fmt: skip
    return worst


def run(context: Context) -> Outcome:
    context.step("steps")
    off = largest(noisy(), paths())
    context.step("laws")
    return Outcome([
        Check("steps with noise whose increments are known, and paths side by side, relative", off, 1e-11),
        Check("exact steps with noise: ends, and covariances, relative", laws(), 1e-9),
    ])  # fmt: skip


CLAIM = Claim(
    name="noisy-steps-by-formula",
    title="One step with noise is its formula with whole matrices",
    statement=(
        "Noise is one number, one for each node, or a function of the signal, white in the measure or at nodes, with "
        "channels mixed or not. One step of Euler and Maruyama, Milstein, Platen and exponential Euler with known "
        "increments is the formula of its paper; the covariance of `ExactGaussian` is the integral of a matrix "
        "exponential, and what it leaves out is what it tells. Paths of an ensemble are the paths alone, and intervals "
        "of their mean and variance those of Student and Cramér."
    ),
    source=(
        "Kloeden and Platen 1992, doi 10.1007/978-3-662-12616-5; Hochbruck and Ostermann 2010, doi "
        "10.1017/S0962492910000048; Van Loan 1978, doi 10.1109/TAC.1978.1101743"
    ),
    run=run,
)
