"""Criteria of the fidelity, fields of E and limits of flows against whole matrices."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.polynomial.chebyshev import Chebyshev
from numpy.typing import NDArray
from scipy.linalg import eigvals, sqrtm
from scipy.optimize import minimize_scalar
from scipy.stats import chi2, multivariate_normal, norm, sem, t

from nlflow import (
    AttentionFlow,
    ConservedMetric,
    Constraint,
    E,
    Gaussian,
    GradientFlow,
    Grid,
    J,
    Points,
    affinity,
    equilibrium,
    from_matrix,
)
from nlflow.equilibria import GaussianField, choose_fidelity, choose_parameter, trace_of
from nlflow.equilibria.bounds import _limit_by_iteration
from nlflow.equilibria.choice import _Criteria
from nlflow.equilibria.sums import half_width, positive, spectral_sums
from nlflow.flows.functions import symmetric_flow
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

GRID = np.geomspace(1e-2, 1e2, 5)
BETA, SIGMA = 1.7, 0.5
FUNCTIONS: tuple[Callable[[Floats], Floats], ...] = (lambda a: np.exp(-3 * a), lambda a: 1 / (a + 0.5))
SINGULAR: tuple[Callable[[Floats], Floats], ...] = (lambda a: 1 / (a + 0.5), lambda a: np.log(a + 0.01))


class Problem:
    """Weighted nodes on a line, two channels that are observed, with the matrices of J and of the fidelity.

    `shares` is the fidelity of nodes, 0 where they have holes; `seen` says which nodes are observed.
    """

    def __init__(self, measure: str, fidelity: str, n: int = 14, width: float = 0.1) -> None:
        rng = np.random.default_rng([21, n])
        self.n, self.measure, self.kind = n, measure, fidelity
        x, w = np.sort(rng.random((n, 1)), axis=0), rng.uniform(0.5, 2, n) / n
        k = 20 * np.exp(-((x - x.T) ** 2) / (2 * width**2))
        self.f = np.stack([np.sin(3 * x[:, 0]), x[:, 0] ** 2], axis=1) + rng.normal(0, 0.5, (n, 2))
        shares = rng.uniform(0.5, 2, n)
        self.shares = {"number": np.ones(n), "nodes": shares, "holes": shares * (np.arange(n) % 4 != 1)}[fidelity]
        self.w, self.weights = w, from_matrix(k, Points(x, weights=w))
        self.links = 2 * w[:, None] * k * w
        self.degree = 2 * k @ w
        self.laplacian = np.diag(self.links.sum(axis=1)) - self.links
        self.m = w if measure == "l2" else w * self.degree
        self.held = self.m * self.shares
        self.seen = self.shares > 0

    def energy(self, strength: float = 1.0) -> E:
        fidelity: Any = strength if self.kind == "number" else strength * self.shares
        return E(self.weights, self.f, fidelity, measure=self.measure)

    def hat(self, strength: float) -> Floats:
        """Return S, u = S f."""
        fidelity = np.diag(strength * self.held)
        return np.asarray(np.linalg.solve(self.laplacian + fidelity, fidelity))

    def told(self, strength: float) -> dict[str, float]:
        """Return mean squared residual, roughness and traces at a fidelity."""
        hat = self.hat(strength)
        u = hat @ self.f
        return {
            "residual": float(self.held @ ((self.f - u) ** 2).mean(axis=1) / self.held.sum()),
            "roughness": float(np.sum(u * (self.laplacian @ u))),
            "share": float(np.trace(hat)) / self.observed,
            "squares": float(np.trace(hat @ hat)) / self.observed,
        }

    @property
    def observed(self) -> int:
        return int(np.count_nonzero(self.seen))

    def prior(self) -> Floats:
        """Return the precision of J between observed nodes, the others being where they make it least."""
        seen, beside = np.flatnonzero(self.seen), np.flatnonzero(~self.seen)
        cross = self.laplacian[np.ix_(beside, seen)]
        inner = self.laplacian[np.ix_(beside, beside)]
        return np.asarray(self.laplacian[np.ix_(seen, seen)] - cross.T @ np.linalg.solve(inner, cross))

    def evidence(self, strength: float, beta: Callable[[float], float]) -> float:
        """Return SciPy's log density of contrasts of f, which do not see the mean that exp(−βJ) says nothing of.

        The covariance is C^T (L⁺ + 1/(λm)) C / β; `beta` gets half the squares that it weighs.
        """
        contrasts = np.linalg.svd(np.ones((1, self.observed)))[2][1:].T
        noise = np.diag(1 / (strength * self.held[self.seen]))
        spread = contrasts.T @ (np.linalg.pinv(self.prior()) + noise) @ contrasts
        z = contrasts.T @ self.f[self.seen]
        scaled = spread / beta(float(np.sum(z * np.linalg.solve(spread, z))) / 2)
        return float(sum(multivariate_normal.logpdf(column, cov=scaled) for column in z.T))

    def criterion(self, method: str, strength: float) -> float:
        if method == "lcurve":
            return -self.curvature(strength)
        if method.startswith("evidence"):
            count = self.observed
            free = (count - 1) * 2
            if method == "evidence, sigma":
                return -self.evidence(strength, lambda half: count / (SIGMA**2 * self.held.sum() * strength))
            return -self.evidence(strength, lambda half: free / (2 * half))  # the likeliest
        told = self.told(strength)
        plain = told["residual"] / (1 - told["share"]) ** 2
        return {
            "gcv": plain,
            "rgcv": plain * (0.3 + 0.7 * told["squares"]),
            "sure": told["residual"] - SIGMA**2 + 2 * SIGMA**2 * told["share"],
            "discrepancy": abs(math.sqrt(told["residual"]) - 1.1 * SIGMA),
        }[method]

    def at(self, method: str, log_strength: float) -> float:
        return self.criterion(method, math.exp(log_strength))

    def curvature(self, strength: float) -> float:
        """Return that of log roughness over log residual, of polynomials through dense systems."""

        def logs(log_strengths: Floats) -> Floats:
            found = [self.told(math.exp(one)) for one in log_strengths]
            return np.log([[one["residual"] for one in found], [one["roughness"] for one in found]])

        ends = [math.log(strength) - 0.5, math.log(strength) + 0.5]
        nodes = (ends[0] + ends[1]) / 2 + 0.5 * np.cos(np.pi * (np.arange(15) + 0.5) / 15)
        both = [Chebyshev.fit(nodes, values, 14, domain=ends) for values in logs(nodes)]
        (x1, x2), (y1, y2) = ([log.deriv(order)(math.log(strength)) for order in (1, 2)] for log in both)
        return float((x1 * y2 - y1 * x2) / (x1**2 + y1**2) ** 1.5)


KINDS = [(measure, kind) for measure in ("l2", "degree") for kind in ("number", "nodes", "holes")]
METHODS = ("gcv", "rgcv", "sure", "discrepancy", "evidence", "evidence, sigma", "lcurve")


def criteria() -> tuple[float, float]:
    """Return errors of all criteria and what is told beside them, relative, and of the fidelities that are chosen."""
    worst, chosen = 0.0, 0.0
    for measure, kind in KINDS:
        problem = Problem(measure, kind)
        values = {strength: problem.told(strength) for strength in GRID}
        for method in METHODS:
            sigma = None if method in ("gcv", "rgcv", "evidence", "lcurve") else SIGMA
            energy = problem.energy(3.1 if kind == "number" else 1.0)  # a number does not count
            found = choose_fidelity(energy, GRID, method=method.split(",")[0], sigma=sigma, factor=1.1)
            exact = np.array([problem.criterion(method, strength) for strength in GRID])
            worst = largest(worst, float(np.abs(found.curve - exact).max() / np.abs(exact).max()))
            for i, told in enumerate(values.values()):
                worst = largest(
                    worst, abs(found.residual[i] ** 2 / told["residual"] - 1), abs(found.trace_error[i]),
                    abs(found.roughness[i] / told["roughness"] - 1),
                    abs(found.trace[i] / (told["share"] * problem.observed) - 1),
                )  # fmt: skip
            best = int(np.argmin(exact))
            kept = np.broadcast_to(np.asarray(found.energy.fidelity), problem.n)
            chosen = largest(chosen, float(np.abs(kept - found.value * problem.shares).max()) / 1e-9)
            if method != "discrepancy" and 0 < best < len(GRID) - 1:
                ends = np.log(GRID[[best - 1, best + 1]])
                lowest: Any = minimize_scalar(
                    partial(problem.at, method), bounds=tuple(ends), method="bounded", options={"xatol": 1e-9}
                )
                chosen = largest(chosen, abs(math.log(found.value) - float(lowest.x)) / 1e-3)
        default = choose_fidelity(problem.energy(), method="gcv").values
        if kind != "holes":
            high = 2 * float(problem.degree.max()) if measure == "l2" else 2.0
            chosen = largest(chosen, float(np.abs(default / (high * np.geomspace(1e-5, 10, 61)) - 1).max()) / 1e-9)
    return worst, chosen


def widths() -> float:
    """Return errors of the evidence of several widths, each at its own fidelity, relative."""
    worst = 0.0
    for kind in ("number", "nodes"):
        problems = [Problem("l2", kind, width=width) for width in (0.08, 0.12, 0.2)]
        strengths = [0.7, 1.6, 2.9]
        made = [problem.energy(s) for problem, s in zip(problems, strengths, strict=True)]
        found = choose_parameter(dict(zip((0.08, 0.12, 0.2), made, strict=True)).__getitem__, [0.08, 0.12, 0.2],
                                 method="gcv")  # fmt: skip
        exact = [problem.criterion("gcv", s) for problem, s in zip(problems, strengths, strict=True)]
        worst = largest(worst, float(np.abs(found.curve / exact - 1).max()),
                        abs(found.value - [0.08, 0.12, 0.2][int(np.argmin(exact))]))  # fmt: skip
    return worst


class Units:
    """In place of random numbers: first the unit vectors of edges, then those of nodes."""

    def __init__(self) -> None:
        self.before = 0

    def standard_normal(self, shape: tuple[int, int]) -> Floats:
        found = np.eye(*shape, k=self.before)
        self.before += shape[0]
        return found


def fields() -> tuple[float, float]:
    """Return errors of covariances, determinants, evidences and bands, and of variances by samples that are known."""
    worst, sampled = 0.0, 0.0
    for measure, kind in KINDS:
        problem = Problem(measure, kind)
        n, energy = problem.n, problem.energy(0.7)
        field = GaussianField(energy, beta=BETA)
        precision = BETA * (problem.laplacian + 0.7 * np.diag(problem.held))
        covariance = np.linalg.inv(precision)
        mean = BETA * 0.7 * covariance @ (problem.held[:, None] * problem.f)
        sd = np.sqrt(np.diag(covariance))[:, None]
        found, band = field.variance(), field.band(0.9)
        logs = np.linalg.slogdet(precision)[1]
        worst = largest(
            worst, float(np.abs(found.value / sd[:, 0] ** 2 - 1).max()), float(np.abs(field.mean - mean).max()),
            float(np.abs(band.upper - mean - norm.ppf(0.95) * sd).max()),
            float(np.abs(band.lower - mean + norm.ppf(0.95) * sd).max()), abs(field.log_determinant().value / logs - 1),
            float(np.abs((found.upper - found.lower) / found.value).max()) / 1e-2,
        )  # fmt: skip
        # The error that is told is 8 roundings of the condition of what is inverted, constants being lifted.
        whole = precision / BETA / np.sqrt(np.multiply.outer(problem.m, problem.m))
        constant = np.sqrt(problem.m / problem.m.sum())
        whole += (np.trace(whole) / n if kind == "number" else 0.0) * np.outer(constant, constant)
        condition = np.linalg.norm(whole, np.inf) * np.linalg.norm(np.linalg.inv(whole), np.inf)
        wide = (found.upper - found.lower) / (16 * np.finfo(np.float64).eps * condition * found.value)
        worst = largest(worst, 2e-7 * float(np.abs(wide - 1).max()))  # within 5 %
        if kind != "holes":
            evidence = field.log_evidence().value
            worst = largest(worst, abs(evidence / problem.evidence(0.7, lambda half: BETA) - 1))
            edges = n * (n - 1) // 2
            drawn = np.asarray(field.deviations(edges + n, Units(), "perturbed"))  # type: ignore[arg-type]
            worst = largest(worst, float(np.abs(drawn @ drawn.T / covariance - 1).max()) / 10)
        # The root: (L + Λ)^-1/2 of white noise.
        z = np.random.default_rng(4).standard_normal((n, 3))
        root = np.sqrt(problem.m)[:, None]
        whitened = precision / BETA / root / root.T
        wanted = np.real(np.linalg.inv(sqrtm(whitened))) @ z / root / math.sqrt(BETA)
        drawn = np.asarray(field.deviations(3, np.random.default_rng(4), "root"))
        sampled = largest(sampled, float(np.abs(drawn - wanted).max()))
        drawn = np.asarray(field.deviations(32, np.random.default_rng(4)))[:, :2]
        signals = np.asarray(field.sample(17, rng=4))
        sampled = largest(
            sampled, float(np.abs(signals[0] - field.mean - drawn).max()), float(signals.shape != (17, n, 2))
        )
        # G_ii = own (1 + P_ii / (1 + λ̃)) + (P G P*)_ii / (1 + λ̃)², the two estimated.
        rng, draws = np.random.default_rng(8), 17
        p, weight = problem.links / problem.links.sum(axis=1, keepdims=True), problem.w * problem.degree
        stay = 1 + 0.7 * problem.held / weight
        signs = 2.0 * rng.integers(0, 2, (n, 32), dtype=np.int8) - 1
        loops = signs * (p @ signs)
        u = np.concatenate([np.asarray(field.deviations(count, rng)) for count in (16, 1)], axis=1)
        known = 0.0
        if kind == "number":  # then that of the mean is
            known = 1 / (BETA * 0.7 * problem.m.sum())
            u = u - problem.m @ u / problem.m.sum()
        said = ((p @ u / stay[:, None]) ** 2).sum(axis=1)
        own = 1 / (BETA * weight * stay)
        value = own * (1 + loops.mean(axis=1) / stay) + known / stay**2 + said / draws
        low, high = chi2.ppf(0.025, draws), chi2.ppf(0.975, draws)
        doubt = own * t.ppf(0.975, 31) * sem(loops, axis=1) / stay
        told = field.variance(method="samples", samples=draws, rng=8)
        sampled = largest(
            sampled, float(np.abs(told.value / value - 1).max()),
            float(np.abs(told.upper - value - np.hypot(doubt, said / low - said / draws)).max() / value.max()),
            float(np.abs(told.lower - np.maximum(value - np.hypot(doubt, said / draws - said / high), 0)).max()
                  / value.max()),
        )  # fmt: skip
    # A noise that is the same at all nodes tells the temperature.
    problem = Problem("degree", "number")
    even = E(problem.weights, problem.f, 0.7 / problem.m, measure="degree")
    worst = largest(worst, abs(GaussianField(even, sigma=0.3).beta * 0.3**2 * 0.7 - 1))
    # Whole signals are within a band as often as their largest deviation is below its factor.
    field = GaussianField(problem.energy(0.7), beta=BETA)
    band = field.band(0.8, simultaneous=True, samples=33, rng=9)
    rng = np.random.default_rng(9)
    drawn = np.concatenate([np.asarray(field.deviations(count, rng)) for count in (16, 16, 1)], axis=1)
    sizes = np.abs(drawn / np.sqrt(field.variance().value)[:, None]).max(axis=0)
    return largest(worst, abs(band.factor / float(np.quantile(sizes, 0.8)) - 1)), sampled


def lifted() -> float:
    """Return the width of intervals of variances of a field whose constants hardly anything holds, relative."""
    field = GaussianField(Problem("l2", "number").energy(1e-9), beta=BETA)
    found = field.variance()
    return float(((found.upper - found.lower) / found.value).max())


def rules(measures: Any, function: Callable[[Floats], Floats]) -> Floats:
    """Return the sums of both rules for each vector."""
    return np.array([[w @ function(a) for a, w in zip(one.nodes, one.weights, strict=True)] for one in measures])


def bracketed() -> float:
    """Return the largest ratio of a quadratic form's error after few averages and the bound that is told, or inverse.

    Gauss' rule is on one side and Radau's, with a node at the smallest eigenvalue, on the other: bounds are near.
    """
    rng, n, worst = np.random.default_rng(0), 60, 0.0
    k, f = rng.random((n, n)) ** 4, rng.standard_normal(n)
    flow = symmetric_flow(J(from_matrix(k, Points(np.zeros(n)))))
    links = (k + k.T) / n
    values, vectors = np.linalg.eigh(np.diag(links.sum(axis=1)) - links)
    parts = (vectors.T @ (f - f.mean()))[1:] ** 2 / n
    for averages in (2, 3, 4):
        sums: Any = spectral_sums(flow, f, method="lanczos", samples=2, averages=averages, rng=0)
        for function in SINGULAR:
            told, bound = sums.form(function)
            # The mean of the two rules, and half of what is between them.
            ((first, second),) = rules(sums.forms, function)
            worst = largest(
                worst, abs(told - (first + second) / 2) / 1e-12, abs(2 * bound / abs(first - second) - 1) / 1e-9
            )
            off = abs(told - float(parts @ function(values[1:])))
            worst = largest(worst, off / bound, bound / (12 * off))
    return worst


def _shrinking(strength: float, a: Floats) -> Floats:
    return np.asarray(np.log(positive(a) / (a + strength)))


def doubts() -> float:
    """Return errors of what random traces leave open of a criterion, against it at the ends of their intervals."""
    rng, n, sigma, worst = np.random.default_rng(12), 60, 0.5, 0.0
    k, f = rng.random((n, n)) ** 4, rng.standard_normal(n)
    energy = E(from_matrix(k, Points(np.zeros(n))), f, 1.0)
    options: dict[str, Any] = {"method": "lanczos", "samples": 5, "averages": 30, "rng": 2}
    for name in ("gcv", "sure", "evidence"):
        criteria = _Criteria(energy, name, sigma, 1.0, options)
        for strength in (0.1, 1.0):
            trace, error = criteria.trace(strength)
            residual = criteria.mean_square(strength)
            if name == "gcv":  # to first order
                ends = [residual / (1 - (trace + side * 1e-4 * error) / n) ** 2 for side in (-1, 1)]
                wanted = (ends[1] - ends[0]) / 2e-4
            elif name == "sure":
                ends = [residual + sigma**2 * (2 * (trace + side * error) / n - 1) for side in (-1, 1)]
                wanted = (ends[1] - ends[0]) / 2
            else:  # half of the sum of logarithms, of which the same vectors tell the interval
                logs = spectral_sums(symmetric_flow(J(energy.given)), f, **options, gap=True)
                wanted = logs.trace(partial(_shrinking, strength)).error / 2
            worst = largest(worst, abs(criteria.doubt(strength) / wanted - 1))
    return worst


def by_transform() -> float:
    """Return errors of variances by a transform, in a unit of length, and of 95 % intervals of means, relative."""
    worst = 0.0
    for boundary in ("periodic", "reflect"):
        weights = affinity(Gaussian(0.6), Grid((7, 8), spacing=0.5, boundary=boundary), method="convolution")
        for measure in ("l2", "degree"):
            field = GaussianField(E(weights, np.zeros((7, 8)), 0.4, measure=measure), beta=1.7)
            exact = field.variance(method="dense").value
            worst = largest(worst, float(np.abs(field.variance(method="transform").value / exact - 1).max()))
    values = np.random.default_rng(3).standard_normal((4, 9))
    low, high = t.interval(0.95, 8, loc=values.mean(axis=1), scale=sem(values, axis=1))
    return largest(worst, float(np.abs(2 * half_width(values) / (high - low) - 1).max()))


def of_evidence() -> float:
    """Return how far errors of log evidence are from half those of traces of logarithms, prior and posterior, relative.

    Times the number of channels; and by how much values are off, over twice that.
    """
    rng, worst = np.random.default_rng(6), 0.0
    x, w, shares = rng.random((200, 2)), rng.uniform(0.5, 2, 200) / 200, rng.uniform(0.05, 1, 200)
    weights = affinity(Gaussian(0.1, amplitude=3.0), Points(x, weights=w))
    options: dict[str, Any] = {"method": "lanczos", "samples": 8, "averages": 40, "rng": 2}
    prior = spectral_sums(GradientFlow(J(weights), "l2"), **options, gap=True)
    left = prior.trace(lambda a: np.log(np.where(a > 0, a, 1.0))).error
    for channels in (1, 3):
        field = GaussianField(E(weights, rng.standard_normal((200, channels)), shares, measure="l2"), beta=BETA)
        told, exact = field.log_evidence(**options), field.log_evidence(method="dense").value
        wanted = channels * (left + field.log_determinant(**options).error) / 2
        worst = largest(worst, abs(told.error / wanted - 1), 1e-8 * abs(told.value - exact) / (2 * told.error))
    return worst


def limits() -> tuple[float, float]:
    """Return errors of limits of flows against dense systems, relative, and of residuals that are told."""
    worst, told, rng, n = 0.0, 0.0, np.random.default_rng(31), 12
    k, w = rng.random((n, n)) ** 2, rng.uniform(0.5, 2.0, n) / n
    weights, links = from_matrix(k, Points(np.zeros(n), weights=w)), (k + k.T) * w
    f, start = rng.standard_normal((2, n, 2)) + 3.0
    p = k * w / (k @ w)[:, None]
    lowered = np.diag(links.sum(axis=1)) - links
    shares, holes, held = rng.uniform(0.2, 1.5, n), np.arange(n) % 3 == 1, np.arange(n) % 4 == 2
    free = ~held
    for strength in (0.7 * np.ones(n), shares, np.where(holes, 0.0, shares)):
        fidelity: Any = 0.7 if np.ptp(strength) == 0 else strength
        for constraint in (None, Constraint(held, start[held])):
            moving = np.ones(n, bool) if constraint is None else free
            flows: list[tuple[Any, Floats]] = [
                (AttentionFlow(weights, f, fidelity, constraint=constraint), np.eye(n) - p),
                (GradientFlow(E(weights, f, fidelity), constraint=constraint), lowered),
            ]
            for flow, operator in flows:
                for method in ("direct", "iterative"):
                    found = equilibrium(flow, start, method=method, rtol=1e-12)
                    matrix = (operator + np.diag(strength))[np.ix_(moving, moving)]
                    right = (strength[:, None] * f)[moving]
                    if constraint is not None:
                        right = right - operator[np.ix_(moving, held)] @ start[held]
                    exact = np.linalg.solve(matrix, right)
                    worst = largest(worst, float(np.abs(np.asarray(found.u)[moving] - exact).max()))
    # What few iterations leave: the largest residual over the diagonal, over that of the right-hand side.
    flow = AttentionFlow(weights, f, shares)
    found = equilibrium(flow, method="iterative", rtol=1e-12, maxiter=2)
    over = 1 + shares[:, None]
    shift = (shares * _law(p)) @ f / (shares * _law(p)).sum()
    left = np.abs((shares[:, None] * (f - found.u) - (np.eye(n) - p) @ found.u) / over).max(axis=0)
    told = abs(found.residual / float((left / np.abs(shares[:, None] * (f - shift) / over).max(axis=0)).max()) - 1)
    # In a metric that conserves the mean dE/du is one constant, the one of the mean of u(0).
    metric = ConservedMetric(mobility=0.6)
    for strength in (0.7 * np.ones(n), shares):
        fidelity = 0.7 if np.ptp(strength) == 0 else strength
        u = np.asarray(equilibrium(GradientFlow(E(weights, f, fidelity), metric), start, rtol=1e-12).u)
        whole = np.block([[lowered + np.diag(strength), -np.ones((n, 1))], [w[None], np.zeros((1, 1))]])
        exact = np.linalg.solve(whole, np.concatenate([strength[:, None] * f, w[None] @ start]))[:n]
        worst = largest(worst, float(np.abs(u - exact).max()))
    # The fidelity up to which layers are stable, by iteration: the least Re μ + √(1 − (Im μ)²).
    for power in (1, 6, 20):
        k = rng.random((40, 40)) ** power
        values = eigvals(k / k.sum(axis=1, keepdims=True))
        limit = float(np.min(values.real + np.sqrt(np.maximum(1 - values.imag**2, 0))))
        by_steps = _limit_by_iteration(AttentionFlow(from_matrix(k, Points(np.zeros(40)))))
        worst = largest(worst, abs(by_steps / limit - 1) / 1e2)
    return worst, told


def _law(p: Floats) -> Floats:
    values, vectors = np.linalg.eig(p.T)
    law = np.abs(vectors[:, int(np.argmax(values.real))].real)
    return np.asarray(law / law.sum())


def traces() -> float:
    """Return errors of traces of functions against eigenvalues, relative; matrices of channels are one operator."""
    rng, n = np.random.default_rng(12), 9
    k, w = rng.random((n, n)), rng.uniform(0.5, 2, n) / n
    links = (k + k.T) * w
    lowered = np.diag(links.sum(axis=1)) - links
    roots = rng.uniform(-1, 1, (n, 2, 2))
    matrices = roots @ roots.transpose(0, 2, 1) + 0.1 * np.eye(2)
    whole = np.kron(lowered, np.eye(2))
    for i, matrix in enumerate(matrices):
        whole[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] += matrix
    weights, f = from_matrix(k, Points(np.zeros(n), weights=w)), rng.standard_normal((n, 2))
    worst = 0.0
    cases: list[tuple[J, Any]] = [
        (J(weights), np.linalg.eigvals(lowered).real), (E(weights, f, matrices), np.linalg.eigvals(whole).real),
        (E(weights, f, 0.7), 0.7 + np.linalg.eigvals(lowered).real),
    ]  # fmt: skip
    for functional, values in cases:
        for function in FUNCTIONS:
            exact = float(np.sum(function(values)))
            worst = largest(worst, abs(trace_of(functional, function).value / exact - 1))
            drawn = trace_of(functional, function, method="lanczos", samples=40, averages=30)
            # Of few averages: Student's interval of means, and half of what is between the rules.
            few: Any = spectral_sums(symmetric_flow(functional), method="lanczos", samples=5, averages=3, rng=0)
            both, told = rules(few.probes, function), few.trace(function)
            middle = both.mean(axis=1)
            wide = t.ppf(0.975, 4) * sem(middle) + abs(both[:, 0].mean() - both[:, 1].mean()) / 2
            worst = largest(worst, abs(told.value / middle.mean() - 1), abs(told.error / wide - 1))
            worst = largest(worst, 1e-12 * abs(drawn.value - exact) / drawn.error, 1e-13 * drawn.error / (0.1 * exact))
    return worst


def run(context: Context) -> Outcome:
    context.step("criteria")
    worst, chosen = criteria()
    context.step("fields")
    exact, sampled = fields()
    context.step("limits")
    limited, told = limits()
    return Outcome(
        [
            Check("criteria, residuals and traces against hat matrices and SciPy's densities, relative", worst, 1e-7),
            Check("fidelities that are chosen, in logarithms over 1e-3, and what they are of", chosen, 1.0),
            Check("criteria of several widths, relative", widths(), 1e-8),
            Check("variances, determinants, evidences, bands of fields against dense matrices, relative", exact, 1e-8),
            Check("signals and variances of samples whose noise is known, relative", sampled, 1e-5),
            Check("intervals of variances where constants are hardly held, relative", lifted(), 1e-11),
            Check("variances by a transform, and half widths of intervals, relative", by_transform(), 1e-9),
            Check("errors of evidence against those of traces, relative; values over twice them", of_evidence(), 1e-8),
            Check("what random traces leave open, against ends of their intervals, relative", doubts(), 1e-6),
            Check("quadratic forms in few averages: errors over bounds, and bounds over 12 errors", bracketed(), 1.0),
            Check("traces of functions, relative", traces(), 1e-10),
            Check("limits of flows against dense systems", limited, 1e-9),
            Check("residuals that are told of them, relative", told, 1e-6),
        ]
    )


CLAIM = Claim(
    name="fields-by-matrices",
    title="Criteria, fields and limits are those of whole matrices",
    statement=(
        "With u = S f, S = (L + λm)⁻¹ λm, the criteria of generalized cross-validation, its robust form, Stein's "
        "estimate, discrepancy, evidence and the L-curve are those of S written out, of one fidelity, one for each "
        "node and with holes, in both measures; the one that is chosen is where SciPy finds them least. A field has "
        "the covariance (L + Λ)⁻¹ / β, also of signals whose noise is known; told errors are those of intervals. "
        "Limits of flows, with held nodes or a mean that stays, solve the dense system."
    ),
    source=(
        "G. H. Golub, M. Heath and G. Wahba 1979, doi 10.1080/00401706.1979.10489751; M. A. Lukas 2006, doi "
        "10.1088/0266-5611/22/5/021; P. C. Hansen 1992, doi 10.1137/1034115; P. Sidén et al. 2018, arXiv 1705.08656"
    ),
    run=run,
)
