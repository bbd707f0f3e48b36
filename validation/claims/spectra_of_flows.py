"""Ends of spectra by iteration, limits of steps, and functions of A, against dense matrices."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh, expm
from scipy.special import eval_chebyu

from nlflow import (
    AttentionFlow,
    Constraint,
    E,
    ExplicitEuler,
    Gaussian,
    GradientFlow,
    Grid,
    J,
    Points,
    affinity,
    from_matrix,
)
from nlflow.flows import function_of
from nlflow.flows.functions import _growth
from nlflow.flows.modes import phi, phi_of_matrices
from nlflow.flows.spectrum import relaxation_rate
from nlflow.functionals.preconditioners.transform import Transform
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

FUNCTIONS: dict[str, Callable[[Floats], Floats]] = {
    "heat": lambda a: np.exp(-3 * a),
    "root": np.sqrt,
    "resolvent": lambda a: 1 / (a + 0.05),
}


def cloud(n: int, seed: int) -> tuple[Any, Floats, Floats]:
    """Return an affinity of n nodes, its kernel k and the weights of nodes."""
    rng = np.random.default_rng(seed)
    x, w = np.sort(rng.random(n)), rng.uniform(0.5, 2.0, n) / n
    k = np.exp(-np.abs(np.subtract.outer(x, x)) / 0.15)
    return from_matrix(k, Points(x, weights=w)), k, w


def operator(k: Floats, w: Floats, metric: str) -> Floats:
    """Return r (I − P) of the flow of J: d − K, or 1 − K / d, K = k + kᵀ."""
    links = (k + k.T) * w
    degree = links.sum(axis=1)
    return np.diag(degree) - links if metric == "l2" else np.eye(len(k)) - links / degree[:, None]


def rates(n: int) -> float:
    """Return errors of slowest rates that are found by iteration, relative: with one fidelity, and with several."""
    weights, k, w = cloud(n, 3)
    rng, worst = np.random.default_rng(4), 0.0
    links = (k + k.T) * w
    degree = links.sum(axis=1)
    # 1 − K/d is similar to a symmetric matrix.
    alike = np.eye(n) - (k + k.T) * np.sqrt(np.outer(w / degree, w / degree))
    for fidelity in (0.07, rng.uniform(0.01, 0.4, n)):
        flow = GradientFlow(E(weights, np.zeros(n), fidelity, measure="degree"), "degree")
        exact = eigh(alike + np.diag(np.broadcast_to(fidelity, n)), eigvals_only=True, subset_by_index=(0, 1))
        # Where the fidelity is one, constants have nothing to forget.
        worst = largest(worst, abs(relaxation_rate(flow) / float(exact[0 if np.ndim(fidelity) else 1]) - 1))
    # Between held nodes, and from the symbol of a kernel on a ring.
    held = np.arange(n) % 9 == 4
    flow = GradientFlow(J(weights), "degree", constraint=Constraint(held, np.zeros(int(held.sum()))))
    exact = eigh(alike[np.ix_(~held, ~held)], eigvals_only=True, subset_by_index=(0, 0))
    worst = largest(worst, abs(relaxation_rate(flow) / float(exact[0]) - 1))
    ring = affinity(Gaussian(0.2), Grid(40, spacing=0.1, boundary="periodic"))
    values = np.linalg.eigvalsh(np.eye(40) - ring.average(np.eye(40)))
    told = relaxation_rate(GradientFlow(E(ring, np.zeros(40), 0.3, measure="degree"), "degree"))
    return largest(worst, abs(told / (0.3 + float(values[1])) - 1))


def turning(each: int, fidelity: float = 0.02) -> tuple[float, float]:
    """Return errors of the slowest rate and of the largest stable Euler step of tokens that look ahead in a ring.

    Each of 24 groups looks at the next two alike: P has the eigenvalues (z + z²)/2, z²⁴ = 1, and 0.
    """
    size = 24 * each
    ahead = (np.arange(size) - np.arange(size)[:, None]) % 24
    k = np.where((ahead == 1) | (ahead == 2), 1.0, 0.0)
    flow = AttentionFlow(from_matrix(k, Points(np.zeros(size))), np.arange(size) / size, fidelity)
    z = np.exp(2j * np.pi * np.arange(24) / 24)
    values = np.append(1 + fidelity - (z + z**2) / 2, 1 + fidelity)
    step = float(np.min(2 * values.real / np.abs(values) ** 2))
    rate = float(np.sort(values.real)[1])  # constants have nothing to forget
    return abs(relaxation_rate(flow) / rate - 1), abs(ExplicitEuler(0.1).stability_limit(flow) / step - 1)


def functions() -> tuple[float, float, float]:
    """Return errors of g(A) v over their bounds, bounds over errors, and errors of the transpose, relative."""
    beyond, loose, transposed = 0.0, 0.0, 0.0
    weights, k, w = cloud(70, 8)
    rng = np.random.default_rng(9)
    v, f = rng.standard_normal((2, 70))
    for metric, fidelity in product(("l2", "degree"), (0.2, 0.0)):
        energy: Any = E(weights, f, fidelity, measure=metric) if fidelity else J(weights)
        flow = GradientFlow(energy, metric)
        a = operator(k, w, metric) + fidelity * np.eye(70)
        measure = w if metric == "l2" else w * ((k + k.T) @ w)
        values, vectors = np.linalg.eig(a)
        values = values.real
        values[np.argmin(values)] = fidelity  # constants, to all digits
        for method, tol in (("chebyshev", 1e-4), ("lanczos", 1e-4), ("dense", 1e-12)):
            for name, g in FUNCTIONS.items():
                if name == "root" and not fidelity and method == "chebyshev":
                    continue  # whose slope is infinite at the eigenvalue of constants
                found = function_of(flow, g, tol=tol, method=method)
                twice = found.evaluate(v).applications + found.evaluate(v).applications
                transposed = largest(transposed, 100 * float(found.applications != twice))  # each tells its own
                gains = g(values)
                told, exact = found.evaluate(v), (vectors * gains) @ np.linalg.solve(vectors, v)
                off = np.sqrt(measure @ (told.u - exact) ** 2 / (measure @ v**2))
                beyond = largest(beyond, float(off) / told.error)
                if method != "dense":
                    loose = largest(loose, told.error / float(off))
                row, wanted = found.T @ v, np.linalg.solve(vectors.T, gains * (vectors.T @ v))
                transposed = largest(transposed, float(np.abs(row - wanted).max() / np.abs(wanted).max()) / tol)
    return beyond, loose, transposed


def preconditioned() -> float:
    """Return how far a transform's preconditioner is from the inverse of I − P + φ, which it is for one fidelity."""
    r, worst = np.random.default_rng(11).standard_normal((9, 12)), 0.0
    for boundary in ("periodic", "reflect"):
        weights = affinity(Gaussian(0.9), Grid((9, 12), boundary=boundary))
        x = Transform(weights, 0.3)(r)
        worst = largest(worst, float(np.abs(1.3 * x - weights.average(x) - r).max()))
    return worst


def growth() -> float:
    """Return by how much the growth of rounding is off the sum of max |b_j|, b_j = Σ_k c_k U_{k−j}, relative."""
    c, x = np.random.default_rng(2).standard_normal(30) * 0.9 ** np.arange(30), np.cos(np.linspace(0, np.pi, 4001))
    parts = [np.abs(sum(c[k] * eval_chebyu(k - j, x) for k in range(j, 30))).max() for j in range(1, 30)]
    return abs(_growth(c) / (sum(parts) + np.abs(c).sum()) - 1)


def phis() -> float:
    """Return errors of phi_k(−Z) of matrices, against the exponential of a larger one, relative."""
    rng, worst = np.random.default_rng(5), 0.0
    z = rng.standard_normal((6, 3, 3)) * np.array([1e-3, 0.1, 1.0, 3.0, 10.0, 40.0])[:, None, None]
    z = z @ np.swapaxes(z, 1, 2) / np.linalg.norm(z, axis=(1, 2), keepdims=True)
    for k in range(4):
        found = phi_of_matrices(k, z)
        for one, told in zip(z, found, strict=True):
            large = np.zeros((3 * (k + 1), 3 * (k + 1)))
            large[:3, :3] = -one
            large[: 3 * k, 3:] += np.eye(3 * k)
            exact = expm(large)[:3, 3 * k :]
            worst = largest(worst, float(np.abs(told - exact).max() / np.abs(exact).max()))
        numbers = np.array([0.0, 1e-6, 0.3, 2.0, 40.0])
        alone = phi_of_matrices(k, numbers[:, None, None])[:, 0, 0]
        worst = largest(worst, float(np.abs(phi(k, numbers) / alone - 1).max()))
    return worst


def run(context: Context) -> Outcome:
    beyond, loose, transposed = functions()
    return Outcome([
        Check("slowest rates by iteration against dense eigenvalues, relative", rates(context.pick(2000, 1010)), 3e-8),
        Check("complex eigenvalues: slowest rate by iteration, relative", turning(42)[0], 1e-6),
        Check("complex eigenvalues: largest step by trial, relative", turning(18)[1], 2e-6),
        Check("errors of g(A) v over the bounds that are told", beyond, 1.0),
        Check("bounds of g(A) v over the errors", loose, 60.0),
        Check("g(A)ᵀ v against NumPy's eigenvectors, over the tolerance", transposed, 20.0),
        Check("a transform's preconditioner against I − P + φ", preconditioned(), 1e-12),
        Check("growth of rounding in a Chebyshev sum against SciPy's U_k, relative", growth(), 0.02),
        Check("phi_k of matrices against SciPy's exponential of a larger one, relative", phis(), 1e-12),
    ])  # fmt: skip


CLAIM = Claim(
    name="spectra-of-flows",
    title="Ends of spectra that are found by iteration, and functions of A",
    statement=(
        "The slowest rate of a flow of many nodes, and the largest stable step 2 Re a / |a|² of one whose eigenvalues "
        "are complex, are those of the whole matrix. g(A) v, for heat, the root and a resolvent, is as near to that of "
        "NumPy's eigenvectors as its bound says, and the bound is no more than some ten times the error. Functions "
        "phi_k of matrices that mix channels are blocks of the exponential of a larger matrix."
    ),
    source=(
        "Saad 1992, doi 10.1137/0729014; Frommer and Schweitzer 2016, doi 10.1007/s10543-015-0596-3; Al-Mohy and "
        "Higham 2011, doi 10.1137/100788860"
    ),
    run=run,
)
