"""Linear systems of minimizers: preconditioners, Krylov methods and told errors against dense matrices."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from nlflow import Constraint, E, FractionalLaplacian, Gaussian, Grid, J, Points, affinity, from_matrix
from nlflow.affinities import SparseAffinity
from nlflow.errors import NumericalError
from nlflow.functionals import fractional
from nlflow.functionals.accuracy import Rows, _seen_shares
from nlflow.functionals.fidelity import MatrixFidelity, NodeFidelity
from nlflow.functionals.forward import EA, Forward, nearest
from nlflow.functionals.fractional import Capacitance
from nlflow.functionals.krylov import Lanczos, Solved, conjugate_gradients, gmres
from nlflow.functionals.metrics import ConservedMetric, L2Metric
from nlflow.functionals.preconditioners.choice import Choice, _expected
from nlflow.functionals.preconditioners.elimination import Elimination
from nlflow.functionals.preconditioners.multigrid import Multigrid, galerkin, graph_of, interpolation, inverse
from nlflow.functionals.preconditioners.sweeps import Sweeps
from nlflow.functionals.preconditioners.transform import Diagonal, Transform
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]
Rng = np.random.Generator


def off(told: Any, wanted: Any) -> float:
    """Return the largest difference, over the largest of what is wanted."""
    return float(np.abs(np.asarray(told) - wanted).max() / np.abs(wanted).max())


class Graph:
    """Points on a line with weights w, K between near ones, m = w d, and P."""

    def __init__(self, nodes: int, reach: float, rng: Rng, parts: int = 1) -> None:
        x = np.sort(rng.random(nodes))
        k = np.where(np.abs(np.subtract.outer(x, x)) < reach, 0.2 + rng.random((nodes, nodes)), 0.0)
        group = np.arange(nodes) * parts // nodes
        self.k = np.where(group[:, None] == group, k + k.T, 0.0)
        self.w, self.group = rng.uniform(0.5, 2.0, nodes), group
        self.affinity = SparseAffinity(Points(x, weights=self.w), csr_array(self.w[:, None] * self.k * self.w))
        self.degree = self.k @ self.w
        self.p = self.k * self.w / self.degree[:, None]
        self.measure = self.affinity.measure("degree", np.empty(0)).ravel()
        self.system = np.eye(nodes) - self.p  # I − P

    def scale(self) -> float:
        """Return what the measure is over w d: one number."""
        ratio = self.measure / (self.w * self.degree)
        return float(ratio[0]) if np.ptp(ratio) < 1e-12 * ratio[0] else math.nan


def multigrid(rng: Rng) -> float:
    """Return errors of the parts of multigrid, and of a cycle, as the products of matrices that it is.

    I − M A = S (I − Q (I − X²) Ac⁻¹ Qᵀ A) S with S = I − 2/3 D⁻¹ A, and X the same of the coarse grid, visited twice.
    """
    g = Graph(560, 0.005, rng)
    phi = rng.uniform(0.001, 0.01, 560)
    flux, beside = graph_of(g.affinity)
    outside = g.measure[:, None] * g.p * (1 - np.eye(560))
    worst = largest(off(flux.toarray(), outside), off(beside, outside.sum(axis=1)), float(math.isnan(g.scale())))
    matrix = np.diag(g.measure * (1 + phi)) - g.measure[:, None] * g.p
    cycle = Multigrid(g.affinity, lambda v: v - g.p @ v + phi[:, None] * v, g.measure, phi)
    up = interpolation(flux, np.diag(matrix))
    worst = largest(worst, off(galerkin(flux, np.diag(matrix), up).toarray(), up.T.toarray() @ matrix @ up.toarray()))
    sums, fine = up.sum(axis=1), np.asarray((up != 0).sum(axis=1)).ravel() > 1
    worst = largest(worst, off(sums[fine], (outside.sum(axis=1) / np.diag(matrix))[fine]))
    grids: list[tuple[Floats, Floats]] = [(matrix, np.eye(560))]
    for level in cycle.levels:
        q = level.up.toarray()
        worst = largest(worst, off(level.matrix.toarray(), q.T @ grids[-1][0] @ q), off(level.down.toarray(), q.T))
        grids.append((q.T @ grids[-1][0] @ q, q))
    if len(grids) < 3:
        return math.inf

    def error(depth: int) -> Floats:
        a = grids[depth][0]
        if depth + 1 == len(grids):
            return np.zeros_like(a)
        size = np.abs(a).sum(axis=1) / np.diag(a) if depth else np.ones(1)
        smooth = np.eye(len(a)) - 2 / 3 * min(1.0, 2 / size.max()) * a / np.diag(a)[:, None]
        coarse, q = grids[depth + 1]
        left = error(depth + 1)
        left = left @ left
        return np.asarray(
            smooth @ (np.eye(len(a)) - q @ (np.eye(len(coarse)) - left) @ np.linalg.solve(coarse, q.T @ a)) @ smooth
        )

    told = np.eye(560) - cycle(g.system + np.diag(phi))  # M takes residuals over the measure
    worst = largest(worst, off(told, error(0)))
    half = rng.standard_normal((7, 4))
    return largest(worst, off(inverse(half.T @ half), np.linalg.inv(half.T @ half)) / 10)


def direct(rng: Rng) -> float:
    """Return errors of elimination, sweeps and transforms, as inverses of what they are made of."""
    worst = 0.0
    for parts, few in ((1, True), (2, True), (1, False)):
        g = Graph(150, 0.1, rng, parts)
        held = np.zeros(150, bool)
        held[[3, 8, 149] if few else np.arange(0, 150, 2)] = True
        for phi, out in ((0 * g.w, held), (rng.uniform(0.1, 2, 150), held), (rng.uniform(0.1, 2, 150), held & False)):
            r, free = rng.standard_normal((150, 3)), ~out
            exact = np.zeros((150, 3))
            exact[free] = np.linalg.solve((g.system + np.diag(phi))[np.ix_(free, free)], r[free])
            worst = largest(worst, off(Elimination(g.affinity, phi, out)(r), exact))
            sweeps = Sweeps(g.affinity, phi, 1e-5, 1000, out)
            found = sweeps(r)
            # What is left of rows over the root of the diagonal is at most 3e-6 of the right-hand side.
            root = np.sqrt(g.measure / (1 - np.diag(g.p) + np.where(out, 0, phi)))[free, None]
            left = root * (r - (g.system + np.diag(phi)) @ found)[free]
            share = float((np.linalg.norm(left, axis=0) / np.linalg.norm(root * r[free], axis=0)).max())
            worst = largest(worst, max(share / 4e-6 - 1, 0.0), float(found[out].any()))
            limited = Sweeps(g.affinity, phi, 1e-5, 2, out)
            for _ in range(2):  # of the calls together
                limited(r)
                worst = largest(worst, abs(limited.iterations - 2.0))
    g = Graph(200, 0.02, rng)
    r, phi = rng.standard_normal((200, 2)), np.full(200, 1e-3)
    limited = Sweeps(g.affinity, phi, 1e-5, 20, None)  # rates are looked at after 16
    limited(r)
    worst = largest(worst, abs(limited.iterations - 20.0))
    rows = Rows.of(lambda v: g.system @ v + phi[:, None] * v, NodeFidelity(phi), r, (0,))
    found = rows.by_conjugate_gradients(g.measure[:, None], 500)(r, 0 * r, 1e-12)
    worst = largest(
        worst, off(found.x, np.linalg.solve(g.system + np.diag(phi), r)) / 1e3, float(found.residual > 1e-12)
    )
    for boundary in ("periodic", "reflect"):
        grid = Grid((6, 5), spacing=(0.7, 0.4), boundary=boundary)
        p = J(affinity(Gaussian(0.6), grid, method="convolution")).affinity
        matrix, v = p.average(np.eye(30).reshape(6, 5, 30)).reshape(30, 30), rng.standard_normal((6, 5, 2))
        solved = np.linalg.solve(1.37 * np.eye(30) - matrix, v.reshape(30, 2)).reshape(6, 5, 2)
        worst = largest(worst, off(Transform(p, 0.37)(v), solved))
        diagonal = Diagonal(p)
        values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
        of = vectors @ np.diag(1 / (2 - values) ** 2) @ vectors.T
        worst = largest(worst, off(diagonal.diagonal(1 / (1 + diagonal.rest) ** 2), np.diag(of).reshape(6, 5)))
        power = diagonal.power(diagonal.forward(v))
        moment = [float(v[..., c].ravel() @ (np.eye(30) - matrix) @ v[..., c].ravel()) for c in range(2)]
        worst = largest(worst, off(power.sum(axis=(0, 1)), (v**2).sum(axis=(0, 1))))
        worst = largest(worst, off((diagonal.rest[..., None] * power).sum(axis=(0, 1)), moment))
        # A transform for fidelities from a to b stands for √(a b), and for b/2 where a is 0.
        for low in (0.004, 0.0):
            phi = np.full(grid.shape, 0.01)
            phi[0, 0] = low
            first = Choice(p, NodeFidelity(phi), lambda v: v, v, "transform", 1e-10).first
            ones = np.ones((*grid.shape, 1))
            worst = largest(worst, off(first(ones), ones / (math.sqrt(0.004 * 0.01) if low else 0.005)))
    # Of iterations for a condition number c: √c/2 log(2/ε).
    condition = (2.3 / 0.3) * (1.9 / 1.3)
    return largest(worst, abs(_expected(0.3, 0.9, 10**6, 1e-6) / (math.sqrt(condition) / 2 * math.log(2e6)) - 1))


def flights(rng: Rng) -> float:
    """Return errors of the preconditioner of flights, the inverse on a box without the nodes around the domain.

    Solutions are of the size of the spacing to the power 2 s, for any spacing that floats hold.
    """
    worst = 0.0
    for shape, horizon, width in (((7,), math.inf, 64), ((7,), 2.0, 64), ((5, 4), math.inf, 1), ((5, 4), 1.4, 1)):
        inside = np.ones(shape, bool)
        inside.flat[2] = False
        grid = Grid(shape, 0.7, "isolated")
        flight = FractionalLaplacian(grid, 0.4, inside=inside, horizon=horizon, tempering=0.3)
        lattice, count = flight._lattice, int(inside.sum())
        large = np.isin(np.arange(count), (1, 4))
        extra = lattice.total * np.where(large, rng.uniform(0.2, 2.0, count), rng.uniform(-0.06, 0.09, count))
        found = Capacitance(flight._region, lattice, extra)
        sizes = np.array(found._lengths)
        places = np.indices(sizes).reshape(len(sizes), -1).T
        apart = np.abs(places[:, None] - places[None])
        apart = np.minimum(apart, sizes - apart)
        far = np.array(shape) - 1
        weights = lattice.table(shape)[tuple(np.moveaxis(far + np.minimum(apart, far), -1, 0))]
        box = lattice.total * np.eye(len(places)) - np.where((apart < shape).all(axis=-1), weights, 0.0)
        rate = float(box[0].sum())  # of constants
        least = float(np.linalg.eigvalsh(box + 10 * lattice.total / len(places))[0])  # of all others
        box += max(0.0, 0.5 * least - rate) / len(places)
        nodes = np.ravel_multi_index(tuple(np.argwhere(inside).T), tuple(sizes))
        box[nodes, nodes] += np.where(large, extra, 0.0)
        near = apart[:, nodes].max(axis=-1).min(axis=1) <= width
        kept = np.flatnonzero(~near | np.isin(np.arange(len(places)), nodes))
        at = np.searchsorted(kept, nodes)
        root = np.sqrt(lattice.total / (lattice.total + np.where(large, 0.0, extra)))
        exact = np.linalg.inv(box[np.ix_(kept, kept)])[np.ix_(at, at)] * np.outer(root, root)
        worst = largest(worst, off(found(np.eye(count)), exact))
    seen: list[Rows] = []
    with mock.patch.object(fractional, "Rows", lambda *parts: seen.append(Rows(*parts)) or seen[-1]):
        one, *others = (FractionalLaplacian(Grid(9, h, "isolated"), 0.9).solve(1.0).u for h in (1.0, 1e-130, 1e130))
    for rows in seen:  # bounds of errors are told by the diagonal
        matrix = rows.operator(np.eye(9))
        diagonal = np.diag(matrix)
        worst = largest(worst, off(rows.diagonal(np.ones(9)), diagonal), off(rows.scaled(diagonal), np.ones(9)))
        worst = largest(worst, off(rows.stopped, matrix.sum(axis=1) / diagonal))
    return largest(worst, *(off(u / h**1.8, one) for u, h in zip(others, (1e-130, 1e130), strict=True)))


def krylov(rng: Rng) -> float:
    """Return errors of Krylov methods, which end after as many iterations as a matrix has eigenvalues, off that too."""
    q = np.linalg.qr(rng.standard_normal((9, 9)))[0]
    matrix = q @ np.diag(np.repeat([0.7, 1.9, 3.1], 3)) @ q.T
    b, guess = rng.standard_normal((9, 2)), rng.standard_normal((9, 2))
    exact = np.linalg.solve(matrix, b)

    def inner(v: Floats, w: Floats) -> Floats:
        return np.asarray((v * w).sum(axis=0, keepdims=True))

    worst = 0.0
    for start in (0 * b, guess):
        found = conjugate_gradients(
            lambda v: matrix @ v,
            b,
            start,
            inner=inner,
            precondition=lambda r: 0.3 * r,
            rtol=1e-9,
            maxiter=50,
            beside=lambda: 2,
        )
        worst = largest(worst, off(found.x, exact), abs(found.iterations - 9.0))  # 3, of which each counts as 3
        assert found.left is not None
        worst = largest(worst, float(np.abs(found.left - (b - matrix @ found.x)).max()))
        for restart in (40, 2):
            told = gmres(lambda v: matrix @ v, b, start, rtol=1e-10, maxiter=200, restart=restart)
            left = np.linalg.norm(b - matrix @ told.x, axis=0) / np.linalg.norm(b, axis=0)
            worst = largest(worst, off(told.x, exact), abs(told.iterations - 3.0) if restart == 40 else 0.0)
            worst = largest(worst, abs(told.residual - left.max()))
    for keep in (True, False):
        run = Lanczos(lambda v: matrix @ v, b, lambda v, w: (v * w).sum(axis=0, keepdims=True), keep=keep)
        while run.step():
            pass
        worst = largest(worst, *(off(run.eigen(c)[0], [0.7, 1.9, 3.1]) for c in range(2)))
        worst = largest(worst, off(run.sizes, np.linalg.norm(b, axis=0)))
        if keep:
            v = np.hstack([one[:, :1] for one in run.basis[:3]])
            worst = largest(
                worst,
                off(v.T @ v, np.eye(3)),
                off(
                    v.T @ matrix @ v,
                    np.diag(run.tridiagonal(0)[0])
                    + np.diag(run.tridiagonal(0)[1][:-1], 1)
                    + np.diag(run.tridiagonal(0)[1][:-1], -1),
                ),
            )
    # Many steps, in which rounding would turn the basis.
    many = np.diag(np.arange(1.0, 61))
    run = Lanczos(lambda v: many @ v, np.ones((60, 1)), lambda v, w: (v * w).sum(axis=0, keepdims=True), keep=True)
    while run.step() and len(run.alphas) < 60:
        pass
    basis = np.hstack(run.basis[:55])
    worst = largest(worst, off(basis.T @ basis, np.eye(55)) * 10)
    a, near, data = rng.standard_normal((4, 6)), rng.standard_normal(6), rng.standard_normal(4)
    forward = Forward(a, 6)
    closest = nearest(forward, data, near, 0.7, 1e-12, 100).u
    return largest(
        worst, off(closest, np.linalg.solve(a.T @ a + 0.7 * np.eye(6), a.T @ data + 0.7 * near)),
        max(abs(forward.squared_norm / np.linalg.norm(a, 2) ** 2 - 1) - 1e-6, 0.0),
    )  # fmt: skip


def fidelities(rng: Rng) -> float:
    """Return errors of fidelities of numbers and of matrices, which nodes may share, against solutions node by node."""
    n, d, worst = 5, 3, 0.0
    half = rng.standard_normal((n, d, d))
    full = half @ half.transpose(0, 2, 1)
    v, f, m = rng.standard_normal((n, d)), rng.standard_normal((n, d)), rng.uniform(0.3, 2.0, (n, 1))
    numbers, factor, log_degree = rng.uniform(0.2, 2.0, n), rng.uniform(0.2, 2.0, n), rng.standard_normal(n)
    for given, whole in (
        (NodeFidelity(numbers), numbers[:, None, None] * np.eye(d)), (MatrixFidelity(full), full),
        (MatrixFidelity(full[:1]), np.repeat(full[:1], n, axis=0)),
    ):  # fmt: skip
        for one, scale in ((given, np.ones(n)), (given.scaled(1.7), np.full(n, 1.7)), (given.scaled(factor), factor),
                           (given.scaled(factor).scaled(factor), factor**2),
                           (given.over_degree(log_degree, v), np.exp(-log_degree))):  # fmt: skip
            each = scale[:, None, None] * whole
            moved, solve = np.einsum("nij,nj->ni", each, v), np.eye(d) + 0.7 * each
            values = np.linalg.eigvalsh(each)
            pulled, total = np.einsum("nij,nj->ni", each, f), (m[..., None] * each).sum(axis=0)
            stated = np.asarray(one.stated(v))
            worst = largest(
                worst, off(one.times(v), moved), off(one.damped(v, 0.7), np.linalg.solve(solve, v[..., None])[..., 0]),
                off(one.implicit_step(v, f, 0.7), np.linalg.solve(solve, (v + 0.7 * pulled)[..., None])[..., 0]),
                off(one.bounds(), (values.min(), values.max())),
                off(stated if one.width > 1 else stated[:, None, None] * np.eye(d), each[: len(stated)]),
                off(one.centre(f, m, (0,)), [np.linalg.solve(total, (m * pulled).sum(axis=0))]),
            )  # fmt: skip
    # In a direction in which no matrix sees, the constant is the mean of f; and what overflows is refused.
    along = half[0, :, 0] / np.linalg.norm(half[0, :, 0])
    told = MatrixFidelity(numbers[:, None, None] * np.outer(along, along)).centre(f, m, (0,))[0]
    mean, seen = (m * f).sum(axis=0) / m.sum(), (numbers * m[:, 0] * (f @ along)).sum() / (numbers * m[:, 0]).sum()
    worst = largest(worst, off(told, mean + (seen - mean @ along) * along))
    for given in (NodeFidelity(numbers), MatrixFidelity(full)):
        for size in (-800.0, 800.0):
            try:
                worst = largest(
                    worst, float(np.abs(given.over_degree(size + 0 * log_degree, v).times(v)).max() + (size < 0))
                )
            except NumericalError:
                worst = largest(worst, float(size > 0))
    return largest(worst, learnt(full, v, f, factor))


def learnt(full: Floats, v: Floats, f: Floats, factor: Floats) -> float:
    """Return errors of steps with matrices that are learnt, which are solved for."""
    import torch

    worst, logs = 0.0, np.log(factor)
    signal, observed = torch.tensor(v), torch.tensor(f)
    numbers = torch.tensor([0.3, 0.0, 0.7, 0.0, 1.1], dtype=torch.float64, requires_grad=True)
    over = NodeFidelity(numbers).over_degree(torch.tensor(logs), signal).values
    assert isinstance(over, torch.Tensor)
    over.sum().backward()
    assert numbers.grad is not None
    worst = largest(worst, off(numbers.grad, 1 / factor))  # 0 has a slope too
    for shared in (full, full[:1]):
        given = MatrixFidelity(torch.tensor(shared, requires_grad=True))
        for one, scale in (
            (given, np.ones(len(v))),
            (given.scaled(1.7), 1.7 * np.ones(len(v))),
            (given.scaled(torch.tensor(factor)), factor),
        ):
            each = scale[:, None, None] * shared
            solve, pulled = np.eye(3) + 0.7 * each, np.einsum("nij,nj->ni", each, f)
            worst = largest(
                worst, off(one.damped(signal, 0.7).detach(), np.linalg.solve(solve, v[..., None])[..., 0]),
                off(one.implicit_step(signal, observed, 0.7).detach(),
                    np.linalg.solve(solve, (v + 0.7 * pulled)[..., None])[..., 0]),
            )  # fmt: skip
    return worst


def conserved(rng: Rng) -> float:
    """Return errors of (M μ)_i = Σ_j w_j K_ij (m_i + m_j)/2 (μ_i − μ_j) by each way to a mobility, and of bounds."""
    if L2Metric().bounds(3.0, (0.3, 0.9)) != (0.3, 3.9):  # of r (I − P) + φ
        return math.inf
    g, other, worst = Graph(12, 0.4, rng), Graph(12, 0.5, rng), 0.0
    other.w = g.w
    other.affinity = SparseAffinity(g.affinity.domain, csr_array(g.w[:, None] * other.k * g.w))
    force, mobility = rng.standard_normal((12, 2)), rng.uniform(0.2, 2.0, 12)
    laplacian = np.diag(g.degree) - g.k * g.w
    for metric, links, m in (
        (ConservedMetric(mobility=0.6), g.k, np.full(12, 0.6)), (ConservedMetric(mobility=mobility), g.k, mobility),
        (ConservedMetric(other.affinity, mobility=0.6), 2 * other.k, np.full(12, 0.6)),
        (ConservedMetric(other.affinity, mobility=mobility), 2 * other.k, mobility),
    ):  # fmt: skip
        edges = links * g.w * np.add.outer(m, m) / 2
        whole = np.diag(edges.sum(axis=1)) - edges
        worst = largest(worst, off(metric.moved(force, lambda v: laplacian @ v), whole @ force))
        if metric.affinity is None:  # of the flow itself, whose K is k + k'
            slope = 4 * whole @ laplacian @ force
            worst = largest(worst, off(J(g.affinity).gradient(force, metric), slope))
        # Twice the largest degree bounds L, and largest mobility times that bounds M.
        top = 2 * float(m.max()) * float((links @ g.w).max())
        bound = 2 * float(g.degree.max())
        worst = largest(
            worst, abs(metric.force_bound(bound) / top - 1), abs(metric.diffusion_bound(bound) / (top * bound) - 1),
            abs(metric.bounds(bound, (0.3, 0.9))[1] / (top * (bound + 0.9)) - 1),
        )  # fmt: skip
    return worst


def told(rng: Rng) -> float:
    """Return errors of the bounds of errors that are told, by their formula, and of what is asked for to reach them.

    |x − x*| is at most the largest of r_i/s_i, s being the rate of stopping over the diagonal, and r what is left of a
    row over it with four roundings of 2 max |x| + |b|; or that of r, times max v/min (A v/D 1) for a v > 0.
    """
    n, eps, worst = 7, 1e-3, 0.0
    c = rng.random((n, n))
    c *= 0.9 / c.sum(axis=1, keepdims=True)
    outer, stopped, phi = rng.uniform(0.5, 2.0, n), 0.05 + 0 * c[0], rng.uniform(0.01, 0.4, n)
    a = outer[:, None] * (np.eye(n) - c + np.diag(phi))
    d = outer * (1 + phi)
    b = rng.standard_normal((n, 2))
    exact = np.linalg.solve(a, b)
    x = exact + 1e-3 * rng.standard_normal((n, 2))
    rows = replace(
        Rows.of(lambda v: a @ v, NodeFidelity(phi), b, (0,), outer=outer[:, None], stopped=stopped[:, None]), eps=eps
    )
    v, weight = rng.standard_normal((n, 2)), rng.uniform(0.5, 2.0, (n, 1))
    worst = largest(off(rows.scaled(v), v / d[:, None]), off(rows.diagonal(v), d[:, None] * v))
    top, rate = np.abs(x).max(axis=0), ((stopped + phi) / (1 + phi))[:, None]
    left = np.abs(b - a @ x) / d[:, None] + 4 * eps * (2 * top + np.abs(b) / d[:, None])
    weighed = np.abs(x * weight).max(axis=0) / weight.max()
    comparison = np.linalg.solve(a, d)
    least = (a @ comparison / d - 4 * eps * (2 * comparison.max() + 1)).min()
    for one, beside, size in (
        (rows, 0.0, top),
        (rows, 1e3, np.maximum(top, 10.0)),
        (replace(rows, weight=weight), 0.0, weighed),
    ):
        found = one.judged(Solved(x, 1e-3, 0), None, b, beside, math.inf).error
        worst = largest(worst, abs(found / (left / rate / size).max() - 1))
        by = one.judged(
            Solved(x, 1e-3, 0), lambda r, guess, rtol: Solved(np.linalg.solve(a, r), 0.0, 1), b, beside, 0.0
        )
        wanted = min((left / rate / size).max(), (left.max(axis=0) / size).max() * comparison.max() / least)
        worst = largest(worst, abs(by.error / wanted - 1))
    # Nothing is known of stopping: then the comparison alone tells, and the next residual is 3/10 of what is allowed.
    asked: list[float] = []

    def run(right: Floats, guess: Floats, rtol: float) -> Solved:
        asked.append(rtol)
        return Solved(np.linalg.solve(a, right) * (1 + rtol), rtol, 2)

    plain = Rows.of(lambda v: a @ v, None, b, (0,), outer=outer[:, None])
    worst = largest(worst, off(plain.scaled(v), v / outer[:, None]), off(plain.diagonal(v), outer[:, None] * v))
    done = plain.solved(run, b, 0 * b, 1e-2, allowed=1e-3)
    bounds = plain.judged(Solved(exact * 1.01, 1e-2, 0), run, b, 0.0, 1e-3).error
    worst = largest(
        worst,
        abs(asked[2] / (1e-2 * 0.3 * 1e-3 / bounds) - 1),
        max(done.error / 1e-3 - 1, 0.0),
        float(abs(done.iterations - 2 * (len(asked) - 2))),
    )
    # Channels that a matrix mixes are one system: lengths of vectors, and the least eigenvalue.
    half = rng.standard_normal((2, 1))
    lam = 0.3 * np.eye(2) + half @ half.T
    whole = np.kron(outer[:, None] * (np.eye(n) - c), np.eye(2)) + np.kron(np.diag(outer), lam)
    both = Rows.of(
        lambda v: (whole @ v.ravel()).reshape(n, 2),
        MatrixFidelity(lam[None]),
        b,
        (0,),
        outer=outer[:, None],
        stopped=stopped[:, None],
    )
    x = np.linalg.solve(whole, b.ravel()).reshape(n, 2) * 1.01
    left = np.linalg.norm(
        np.linalg.solve(np.eye(2) + lam, ((b - (whole @ x.ravel()).reshape(n, 2)) / outer[:, None]).T), axis=0
    )
    found = both.judged(Solved(x, 1e-2, 0), None, b, 0.0, math.inf).error
    wanted = left.max() / ((0.05 + 0.3) / 1.3) / np.linalg.norm(x, axis=1).max()
    worst = largest(worst, max(abs(found / wanted - 1) - 1e-11, 0.0))

    def solve(right: Floats, guess: Floats, rtol: float) -> Solved:
        return Solved(np.linalg.solve(whole, right.ravel()).reshape(n, 2), 0.0, 1)

    careful = both.judged(Solved(x, 1e-2, 0), solve, b, 0.0, 0.0)
    shares = _seen_shares(MatrixFidelity(lam[None]), b, (0,))
    v = np.linalg.solve(whole, (outer[:, None] * ((np.eye(2) + lam) @ shares)).ravel()).reshape(n, 2)
    grown = 10 * np.linalg.norm(v, axis=1).max() * left.max() / np.linalg.norm(x, axis=1).max()
    worst = largest(worst, max(abs(careful.error / min(grown, wanted) - 1) - 1e-11, 0.0))
    # Where nothing is known of stopping, it is 10 times what a right-hand side shows.
    loose = replace(both, stopped=1e-9)
    careful = loose.judged(Solved(x, 1e-2, 0), solve, b, 0.0, 0.0)
    worst = largest(worst, max(abs(careful.error / grown - 1) - 1e-11, 0.0))
    unseen = _seen_shares(MatrixFidelity((half @ half.T)[None]), b, (0,))
    along = half[:, 0] / np.linalg.norm(half)
    return largest(worst, abs(np.linalg.norm(shares) - 1), off(unseen * np.sign(unseen @ along), along))


def minimizers(rng: Rng) -> float:
    """Return errors of minimizers with every preconditioner, fidelities of all sizes, sources and constraints."""
    worst = 0.0
    g = Graph(40, 0.2, rng)
    k = 2 * g.k  # of J, K = k + kᵀ
    laplacian = np.diag(k @ g.w) - k * g.w
    f, source, start = rng.standard_normal((3, 40, 2))
    for top in (0.5, 2e3):
        fidelity = rng.uniform(0.1, 1.0, 40) * top
        exact = np.linalg.solve(laplacian + np.diag(fidelity), fidelity[:, None] * f)
        for name in ("auto", "diagonal", "multigrid"):
            for first in (None, start):
                found = E(g.affinity, f, fidelity).minimizer(preconditioner=name, rtol=1e-12, start=first)
                worst = largest(worst, off(found.u, exact), float(not found.success))
    energy = E(g.affinity, f, fidelity).value(start)
    exact = (
        (g.w[:, None] * start * (laplacian @ start)).sum() + ((g.w * fidelity)[:, None] * (start - f) ** 2).sum()
    ) / 2
    worst = largest(worst, abs(energy / exact - 1))
    nodes = [4, 31]
    held = Constraint(nodes, f[nodes])
    free = np.setdiff1d(np.arange(40), nodes)
    fidelity = rng.uniform(0.1, 1.0, 40)
    for phi in (fidelity, None):
        system = laplacian + (0 if phi is None else np.diag(phi))
        right = phi[:, None] * f if phi is not None else source
        exact = f.copy()
        exact[free] = np.linalg.solve(system[np.ix_(free, free)], right[free] - system[np.ix_(free, nodes)] @ f[nodes])
        if phi is not None:
            found = E(g.affinity, f, phi).minimizer(constraint=held, rtol=1e-12)
        else:
            found = J(g.affinity).potential(source, constraint=held, rtol=1e-12)
        worst = largest(worst, off(found.u, exact))
    for parts in (1, 2):
        h = Graph(40, 0.2, rng, parts)
        k, d = 2 * h.k, 2 * h.degree
        s = source.copy()
        for part in range(parts):
            inside = h.group == part
            s[inside] -= (h.w[inside] @ s[inside]) / h.w[inside].sum()
        exact = np.linalg.lstsq(h.w[:, None] * (np.diag(d) - k * h.w), h.w[:, None] * s)[0]
        for part in range(parts):
            inside = h.group == part
            mass = h.w[inside] * d[inside]
            exact[inside] -= (mass @ exact[inside]) / mass.sum()
        for name in ("auto", "diagonal"):
            for first in (None, start):
                found = J(h.affinity).potential(s, preconditioner=name, rtol=1e-11, start=first)
                worst = largest(worst, off(found.u, exact) / 10, float(not found.success))
    # Next to no fidelity: what is left is its mean of f, though rounding leaves a mean too.
    weak = E(g.affinity, f, 1e-13 * fidelity).minimizer(rtol=1e-12)
    worst = largest(worst, off(weak.u, (g.w * fidelity) @ f / (g.w @ fidelity) + 0 * f) / 1e2, float(not weak.success))
    x, w = rng.random((15, 2)), rng.uniform(0.3, 2.0, 15)
    dense = affinity(Gaussian(0.4), Points(x, weights=w), method="dense")
    k = 2 * np.exp(-(((x[:, None] - x[None]) ** 2).sum(axis=2)) / 0.32)
    f, fidelity = rng.standard_normal((15, 2)), rng.uniform(0.2, 3.0, 15)
    exact = np.linalg.solve(np.diag(k @ w + fidelity) - k * w, fidelity[:, None] * f)
    found = E(dense, f, fidelity).minimizer(preconditioner="direct")
    worst = largest(worst, off(found.u, exact), float(found.residual > 1e-13), float(not found.success))
    sizes = (affinity(Gaussian(0.4, amplitude=c), Points(x, weights=w), method="dense") for c in (1.0, 1e308))
    one, other = (E(p, f, fidelity, measure="degree").minimizer(preconditioner="direct").u for p in sizes)
    return largest(worst, off(other, one), beyond_theory(rng))


def beyond_theory(rng: Rng) -> float:
    """Return whether conjugate gradients take more iterations than √c/2 log(2/ε), or than there are unknowns.

    c is the condition number of the system between free nodes with a cycle of multigrid, in which nodes that are held
    have a stiff fidelity.
    """
    g, nodes = Graph(400, 0.01, rng), np.array([4, 100, 233])
    f, phi = rng.standard_normal((400, 1)), rng.uniform(1e-4, 1e-3, 400)
    found = E(g.affinity, f, phi).minimizer(constraint=Constraint(nodes, f[nodes]), preconditioner="multigrid")
    over, p = phi / (2 * g.degree), J(g.affinity).affinity
    stiff, free = over + 1e4 * np.isin(np.arange(400), nodes), np.setdiff1d(np.arange(400), nodes)
    measure = p.measure("degree", np.empty(0)).ravel()
    cycle = Multigrid(p, lambda v: g.system @ v + stiff[:, None] * v, measure, stiff)(np.eye(400))
    inside = np.ix_(free, free)
    values = np.linalg.eigvals(cycle[inside] @ (g.system + np.diag(over))[inside]).real
    most = math.sqrt(values.max() / values.min()) / 2 * math.log(2e10)
    # Weights of six decades, which the diagonal takes out.
    weights, k, a = 10.0 ** rng.uniform(-3, 3, 30), rng.random((30, 30)), rng.standard_normal((5, 30))
    a[0] = np.eye(30)[3] - np.eye(30)[7]  # of which constants show nothing
    energy = EA(from_matrix(k, Points(np.zeros(30), weights=weights)), rng.standard_normal(5), Forward(a, 30), 0.4)
    return float(found.iterations > most) + float(energy.minimizer().iterations > 30)


def run(context: Context) -> Outcome:
    del context

    def rng() -> Rng:
        return np.random.default_rng(62)

    return Outcome([
        Check("multigrid: its parts, and a cycle as products of matrices", multigrid(rng()), 1e-10),
        Check("elimination, sweeps and transforms as inverses", direct(rng()), 1e-10),
        Check("flights: the inverse on a box, and solutions in any unit", flights(rng()), 1e-9),
        Check("Krylov methods: solutions, and ends after three eigenvalues", krylov(rng()), 1e-9),
        Check("fidelities of numbers and matrices, node by node", fidelities(rng()), 1e-11),
        Check("the conserved metric, and bounds of its spectrum", conserved(rng()), 1e-12),
        Check("bounds of errors that are told, by their formula", told(rng()), 1e-10),
        Check("minimizers with fidelities, constraints and sources", minimizers(rng()), 1e-9),
    ])  # fmt: skip


CLAIM = Claim(
    name="linear-systems",
    title="Linear systems of minimizers are solved as dense matrices are",
    statement=(
        "Preconditioners are the matrices that the theory says: a cycle of multigrid is a product of smoothers and of "
        "coarse corrections, elimination and transforms are inverses, sweeps are one up to their tolerance. Krylov "
        "methods end after as many iterations as there are eigenvalues. Fidelities, metrics, minimizers, potentials "
        "and the bounds of errors that are told are those of dense matrices."
    ),
    source="Stüben 2001, doi 10.1016/S0377-0427(00)00516-1; Saad and Schultz 1986, doi 10.1137/0907058; "
    "Buzbee, Dorr, George and Golub 1971, doi 10.1137/0708066",
    run=run,
)
