"""Ends of spectra by iteration, limits of steps, and functions of A, against dense matrices."""

from __future__ import annotations

import math
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
    affinity_from_graph,
    diversity_bounds,
    from_matrix,
    largest_stable_fidelity,
)
from nlflow.flows import function_of
from nlflow.flows.functions import _growth
from nlflow.flows.integrators.exponential import chebyshev_coefficients
from nlflow.flows.modes import phi, phi_of_matrices
from nlflow.flows.spectrum import relaxation_rate
from nlflow.functionals.preconditioners.elimination import Elimination
from nlflow.functionals.preconditioners.multigrid import DAMPING, Multigrid
from nlflow.functionals.preconditioners.sweeps import Sweeps
from nlflow.functionals.preconditioners.transform import Diagonal, Transform
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

    With the first, those of the largest fidelity of a stable layer, the least Re μ + √(1 − (Im μ)²), and of bounds that
    hold in L²(π) for every chain.

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
    mu = 1 + fidelity - values
    layer = float(np.min(mu.real + np.sqrt(np.maximum(1 - mu.imag**2, 0))))
    slow = largest(
        abs(relaxation_rate(flow) / rate - 1), abs(largest_stable_fidelity(flow.affinity) / layer - 1),
        *(abs(a - b) for a, b in zip(diversity_bounds(flow), (fidelity / (fidelity + 2), 1.0), strict=True)),
    ) if size > 1000 else 0.0  # fmt: skip
    return slow, abs(ExplicitEuler(0.1).stability_limit(flow) / step - 1)


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


def told_errors() -> float:
    """Return by how much errors that are told of g(A) v are off what their bounds are, relative.

    What a whole matrix rounds: 4 n' ε max |g|, and by how much g changes within n' ε ρ, n' = 2 (n + 8), times 1 + log
    n. What expansions round: 2 ε (2 (n + 8) ρ / (ρ − λ) + 4) a step, times their growth. What k steps of Lanczos
    iteration leave out: β max |e_kᵀ (g(T) − g(a)) (T − a)⁻¹ e₁|, and what they round: k ε max |g| and (1 + log k) √k
    times the steepest difference of g times what moves eigenvalues.
    """
    worst, n, eps, k = 0.0, 30, float(np.finfo(np.float64).eps), 6
    weights, kernel, w = cloud(n, 8)
    v = np.random.default_rng(9).standard_normal(n)
    angles = np.concatenate([np.linspace(0, np.pi, 1201), np.pi * np.logspace(-7, -2, 200)])
    for metric, (name, g) in product(("l2", "degree"), FUNCTIONS.items()):
        flow = GradientFlow(E(weights, 0 * v, 0.2, measure=metric), metric)
        a = operator(kernel, w, metric) + 0.2 * np.eye(n)
        m = w if metric == "l2" else w * ((kernel + kernel.T) @ w)
        values = np.sort(np.linalg.eigvals(a).real)
        low, high = flow.spectral_bounds()
        places = low + (high - low) * np.sin(angles / 2) ** 2
        rounds = 2 * eps * ((n + 8) * 2 * high / (high - low) + 4)
        whole = function_of(flow, g, method="dense")
        terms = 2 * (n + 8)
        moved = [np.abs(g(np.clip(values[1:] + side * terms * eps * high, low, high)) - g(values[1:])).max()
                 for side in (-1, 1)]  # fmt: skip
        scale = float(np.abs(g(values)).max())
        wanted = 4 * terms * eps * scale + (1 + math.log(n)) * float(max(moved))
        worst = largest(worst, abs(whole.error / wanted - 1),
                        abs(whole.evaluate(v).error / (wanted + 4 * eps * scale) - 1))  # fmt: skip
        if name != "root":
            series = function_of(flow, g, tol=1e-6, method="chebyshev")
            c, left = chebyshev_coefficients(g, low, high, 1e-6 * series.scale)
            worst = largest(worst, abs(series.error / (left + rounds * _growth(c)) - 1),
                            abs(series.scale / float(np.abs(g(places)).max()) - 1))  # fmt: skip
        # In units in which A is symmetric; without the mean, which is known.
        root = np.sqrt(m)
        alike, start = root[:, None] * a / root, root * (v - m @ v / m.sum())
        krylov = [start / np.linalg.norm(start)]
        for _ in range(k):
            ahead = alike @ krylov[-1]
            for _ in range(2):
                ahead = ahead - sum((one @ ahead) * one for one in krylov)
            beta = float(np.linalg.norm(ahead))
            krylov.append(ahead / beta)
        basis = np.stack(krylov[:k], axis=1)
        ritz, vectors = np.linalg.eigh(basis.T @ alike @ basis)
        places = places[np.abs(places[:, None] - ritz).min(axis=1) > 1e-4 * (high - low)]
        quotients = (g(ritz) - g(places)[:, None]) / (ritz - places[:, None])
        left = beta * float(np.abs(quotients @ (vectors[-1] * vectors[0])).max())
        steep = float(np.abs(quotients[places >= ritz.min()]).max())
        moving = (rounds * (high - low) + k * eps * high) * math.sqrt(k)
        by_steps = function_of(flow, g, tol=1e-12, method="lanczos", maxiter=k)
        rounded = (1 + math.log(k)) * moving * steep + 4 * k * eps * by_steps.scale
        told = by_steps.evaluate(v)
        worst = largest(worst, abs(told.left_out / left - 1), 1e-2 * abs((told.error - told.left_out) / rounded - 1))
    # A signal of single precision has larger roundings, by the ratio of the precisions.
    signal = np.sin(np.arange(12.0))
    flow = GradientFlow(E(affinity(Gaussian(0.3), Grid(12, spacing=0.1)), signal, 0.2))
    series = function_of(flow, np.sqrt, tol=1e-6, method="chebyshev")
    for kind, times in ((np.float64, 1), (np.float32, 2**29)):
        told = series.evaluate(signal.astype(kind))
        worst = largest(worst, abs((told.error - told.left_out) / (times * (series.error - series.left_out)) - 1))
    return worst


def preconditioned() -> float:
    """Return how far a transform's preconditioner is from the inverse of I − P + φ, which it is for one fidelity."""
    r, worst = np.random.default_rng(11).standard_normal((9, 12)), 0.0
    for boundary in ("periodic", "reflect"):
        weights = affinity(Gaussian(0.9), Grid((9, 12), boundary=boundary))
        x = Transform(weights, 0.3)(r)
        worst = largest(worst, float(np.abs(1.3 * x - weights.average(x) - r).max()))
        # The diagonal of a function of P, and what each wave has of a signal.
        basis, p = Diagonal(weights), weights.average(np.eye(108).reshape(9, 12, 108)).reshape(108, 108)
        values, vectors = np.linalg.eigh((p + p.T) / 2)
        told = basis.diagonal(1 / (0.3 + basis.rest))
        wanted = ((vectors**2) / (1.3 - values)).sum(axis=1).reshape(9, 12)
        power = float((basis.power(basis.forward(r)) / (0.3 + basis.rest)).sum())
        parts = float(((vectors.T @ r.ravel()) ** 2 / (1.3 - values)).sum())
        worst = largest(worst, float(np.abs(told - wanted).max()), abs(power / parts - 1))
    return worst


def on_graphs() -> tuple[float, float]:
    """Return how far elimination is from the inverse of I − P + φ on a graph, with held nodes too, and Gauss-Seidel's.

    The latter relative to the residual that is asked for.
    """
    rng, n = np.random.default_rng(12), 40
    ends = np.array([[i, j] for i in range(n) for j in range(i) if rng.random() < 0.15 or j == i - 1]).T
    size = rng.uniform(0.5, 2.0, ends.shape[1])
    graph = affinity_from_graph(np.concatenate([ends, ends[::-1]], axis=1), edge_weight=np.tile(size, 2))
    k = np.zeros((n, n))
    k[ends[0], ends[1]] = k[ends[1], ends[0]] = size
    p, r = k / k.sum(axis=1, keepdims=True), rng.standard_normal((n, 3))
    exactly, by_sweeps = 0.0, 0.0
    for pull in (0.3 * np.ones(n), rng.uniform(0, 1, n), np.zeros(n)):
        for held in (np.arange(n) % 13 == 5, None):
            if held is None and not pull.any():
                continue
            free = np.ones(n, bool) if held is None else ~held
            a = (np.eye(n) - p + np.diag(pull))[np.ix_(free, free)]
            exact = np.zeros((n, 3))
            exact[free] = np.linalg.solve(a, r[free])
            exactly = largest(
                exactly, float(np.abs(Elimination(graph, pull, held)(r) - exact).max() / np.abs(exact).max())
            )
            left = r[free] - a @ Sweeps(graph, pull, 1e-4, 500, held)(r)[free]
            root = np.sqrt(k.sum(axis=1) / (1 + pull))[free, None]  # of rows over the diagonal, which is scaled to 1
            by_sweeps = largest(by_sweeps, float(
                (np.linalg.norm(root * left, axis=0) / np.linalg.norm(root * r[free], axis=0)).max() / 1e-4
            ))  # fmt: skip
    return exactly, by_sweeps


def cycles() -> float:
    """Return how far a cycle of multigrid is from its parts, written out with dense matrices, relative.

    Each grid smooths before and after by S = d/diag; a coarser one is visited once from the finest and twice from each
    other: the error is multiplied by (I − SA)(I − U C Uᵀ A)(I − SA) for each visit, the coarse matrix being Uᵀ A U.
    """
    worst = 0.0
    for boundary, shape, depth in (("reflect", (12, 12), 1), ("periodic", (22, 20), 2)):
        weights = affinity(Gaussian(0.5), Grid(shape, boundary=boundary), window=1, method="stencil")
        n, rng = int(np.prod(shape)), np.random.default_rng(13)
        pull = rng.uniform(0.01, 0.3, n)
        more = pull.reshape(*shape, 1)
        p = weights.average(np.eye(n).reshape(*shape, n)).reshape(n, n)
        degree = weights.measure("degree", np.empty(0)).ravel()
        scaled = np.eye(n) - p + np.diag(pull)
        cycle = Multigrid(
            weights,
            lambda v, p=weights, more=more: v - p.average(v) + more * v,
            degree,
            pull,
        )
        found = cycle(np.eye(n).reshape(*shape, n)).reshape(n, n)

        def inverse(at: int, a: Floats, visits: int) -> Floats:
            if at == len(cycle.levels):  # noqa: B023
                return np.linalg.inv(a)
            up = cycle.levels[at].up.toarray()  # noqa: B023
            step = DAMPING / np.diag(a) * min(1.0, 2 / float((np.abs(a).sum(axis=1) / np.diag(a)).max()))
            smooth = np.eye(len(a)) - step[:, None] * a
            coarse = up @ inverse(at + 1, up.T @ a @ up, 2) @ up.T
            once = smooth @ (np.eye(len(a)) - coarse @ a) @ smooth
            return (np.eye(len(a)) - np.linalg.matrix_power(once, visits)) @ np.linalg.inv(a)

        a = degree[:, None] * scaled
        worst = largest(worst, float(len(cycle.levels) != depth))
        exact = inverse(0, (a + a.T) / 2, 1) * degree
        worst = largest(worst, float(np.abs(found - exact).max() / np.abs(exact).max()))
        # Constants go to the coarse grid as far as no fidelity takes them.
        rows, off = cycle.levels[0].up.toarray().sum(axis=1), a - np.diag(np.diag(a))
        share = np.where((cycle.levels[0].up.toarray() == 1).any(axis=1), 1.0, -off.sum(axis=1) / np.diag(a))
        worst = largest(worst, float(np.abs(rows - share)[rows > 0].max()))
    return worst


def growth() -> float:
    """Return by how much the growth of rounding is off the sum of max |b_j|, b_j = Σ_k c_k U_{k−j}, relative."""
    k, x, worst = np.arange(100), np.cos(np.linspace(0, np.pi, 4001)), 0.0
    u = eval_chebyu(k[:, None], x)
    # The second grows most near -1, not at it.
    for c in (np.random.default_rng(2).standard_normal(30) * 0.9 ** k[:30], (-1.0) ** k * np.cos(0.015 * k + 0.4)):
        parts = [np.abs(c[j:] @ u[: len(c) - j]).max() for j in range(1, len(c))]
        worst = largest(worst, abs(_growth(c) / (sum(parts) + np.abs(c).sum()) - 1))
    return worst


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
    eliminated, swept = on_graphs()
    return Outcome([
        Check("slowest rates by iteration against dense eigenvalues, relative", rates(context.pick(2000, 1010)), 3e-8),
        Check("complex eigenvalues: slowest rate and largest fidelity by iteration, relative", turning(42)[0], 1e-6),
        Check("complex eigenvalues: largest step by trial, relative", turning(18)[1], 2e-6),
        Check("errors of g(A) v over the bounds that are told", beyond, 1.0),
        Check("bounds of g(A) v over the errors", loose, 60.0),
        Check("errors that are told of g(A) v against what their bounds are, relative", told_errors(), 0.05),
        Check("g(A)ᵀ v against NumPy's eigenvectors, over the tolerance", transposed, 20.0),
        Check("a transform's preconditioner against I − P + φ", preconditioned(), 1e-12),
        Check("elimination on graphs against I − P + φ, relative", eliminated, 1e-10),
        Check("residuals of Gauss-Seidel's sweeps over those asked for", swept, 1.0),
        Check("cycles of multigrid against their parts, relative", cycles(), 1e-8),
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
