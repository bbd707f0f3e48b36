"""J_p and E_p: values, gradients and minimizers for 1 < p <= 10, against plain double sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter
from scipy.optimize import minimize, minimize_scalar
from scipy.special import xlogy

from nlflow import Constraint, Ep, Huber, PFlow, Points, affinity_from_graph, from_matrix, nonlocal_tv
from nlflow.denoising import total_variation
from nlflow.flows import ForwardBackward
from nlflow.functionals import L1, Jp, KullbackLeibler
from nlflow.functionals.misfits import Squares
from nlflow.functionals.variational import harmonic_extension
from nlflow.functionals.variational import newton as newton_method
from nlflow.functionals.variational.certificate import fidelity_slack, misfit_slack
from nlflow.functionals.variational.newton import Problem as NewtonProblem
from nlflow.functionals.variational.primal_dual import _Iteration, _Proximal
from nlflow.functionals.variational.reweighted import _FIRST, iterates
from nlflow.functionals.variational.reweighted import _residual as left_over
from nlflow.functionals.variational.reweighted import _searched as searched
from validation.harness import Check, Claim, Context, Outcome, largest, smallest

Floats = NDArray[np.float64]

N, CHANNELS, END = 9, 2, 0.4
POWERS = (1.2, 2.0, 3.0, 4.5)
DELTA = 0.3


@dataclass(frozen=True)
class Problem:
    """Random nodes: k and w, a signal, one that is observed, a fidelity for each node."""

    k: Floats
    w: Floats
    u: Floats
    f: Floats
    fidelity: Floats

    @classmethod
    def drawn(cls, seed: int) -> Problem:
        rng = np.random.default_rng([80, seed])
        u, f = rng.standard_normal((2, N, CHANNELS))
        return cls(rng.random((N, N)) ** 2, rng.uniform(0.3, 2.0, N) / N, u, f, rng.uniform(0.5, 2.0, N))

    def value(self, u: Floats, p: float, isotropic: bool) -> float:
        """Return 1/(2p) Σ w_i w_j K_ij |u_i − u_j|^p, or 1/(2p) Σ w_i (Σ w_j K_ij |u_i − u_j|²)^(p/2)."""
        squares = ((u[:, None] - u[None]) ** 2).sum(axis=2)
        both = self.k + self.k.T
        if isotropic:
            return float(self.w @ (both * squares @ self.w) ** (p / 2)) / (2 * p)
        return float(self.w @ (both * squares ** (p / 2)) @ self.w) / (2 * p)

    def total(self, u: Floats, p: float, misfit: Callable[[Floats, Floats], Floats], isotropic: bool = False) -> float:
        """Return E_p: the same and Σ w_i λ_i g(u_i, f_i)."""
        return self.value(u, p, isotropic) + float((self.w * self.fidelity) @ misfit(u, self.f).sum(axis=1))

    def velocity(self, u: Floats, p: float) -> Floats:
        """Return Σ_j w_j K_ij |u_j − u_i|^(p − 2) (u_j − u_i) + λ_i (f_i − u_i)."""
        apart = u[None] - u[:, None]
        lengths = np.sqrt((apart**2).sum(axis=2)) + np.eye(len(u))
        edges = (self.k + self.k.T) * self.w * lengths ** (p - 2)
        return np.asarray((edges[:, :, None] * apart).sum(axis=1) + self.fidelity[:, None] * (self.f - u))


def squares(u: Floats, f: Floats) -> Floats:
    return np.asarray((u - f) ** 2 / 2)


def huber(u: Floats, f: Floats) -> Floats:
    """Return (u − f)²/2 up to δ apart, and δ |u − f| − δ²/2 beyond."""
    apart = np.abs(u - f)
    return np.where(apart <= DELTA, apart**2 / 2, DELTA * apart - DELTA**2 / 2)


def divergence(u: Floats, f: Floats) -> Floats:
    """Return u − f + f log(f/u)."""
    return np.asarray(u - f + xlogy(f, f / u))


def proximal() -> float:
    """Return errors of proximal maps, conjugates, slopes and curvatures of misfits against SciPy's and formulas."""
    rng, worst, ends = np.random.default_rng(82), 0.0, np.array([0.2, 4.0])
    v, f = rng.uniform(0.3, 3.5, (2, 12))
    f[:2] = 0.0
    step, eps = 0.7, 0.4
    d = v - f
    length = np.sqrt(d**2 + eps**2)
    for misfit, g, slopes in (
        (Squares(), squares, (d, np.ones(12))),
        (Huber(DELTA), huber, (np.clip(d, -DELTA, DELTA), np.where(np.abs(d) <= DELTA, 1.0, eps))),
        (L1(), lambda u, f: np.abs(u - f), (d / length, eps**2 / length**3)),
        (KullbackLeibler(), divergence, (1 - (f + eps) / v, (f + eps) / v**2)),
    ):
        inside = np.clip(f, 0.25, 3.9)
        found, curve = misfit.slopes(v, f, eps)
        moved = [_argmin(lambda z, a, b: g(z, b) + (z - a) ** 2 / (2 * step), a, b, (-6.0, 6.0))  # noqa: B023
                 for a, b in zip(v, f, strict=True)]  # fmt: skip
        # z ↦ pull z − g(z, f) over a box; pulls below and above the steepest slope.
        pulls = np.array([-0.9, -0.2, 0.1, 0.25, 0.6, 0.8])
        best = [_argmin(lambda z, a, b: g(z, b) - a * z, a, b, (0.2, 4.0))  # noqa: B023
                for a, b in zip(pulls, inside[:6], strict=True)]  # fmt: skip
        worst = largest(
            worst,
            float(np.abs(misfit.prox(v, f, step) - moved).max()),
            float(np.abs(misfit.best(pulls, inside[:6], ends) - best).max()),
            float(np.abs(found - slopes[0]).max()), float(np.abs(curve - slopes[1]).max()),
        )  # fmt: skip
    # A long step of the divergence: the positive root of z² − (v − s) z − s f.
    roots = [float(np.roots([1.0, 5.0 - a, -5.0 * b]).max()) for a, b in zip(v, f, strict=True)]
    worst = largest(worst, float(np.abs(KullbackLeibler().prox(v, f, 5.0) - roots).max()))
    q = 0.3
    worst = largest(worst, float(np.abs(L1().bent(v, f, eps, np.full(12, q)) - (1 - q * d / length) / length).max()))
    # The divergence from another zero, g'(u, f) = g(2 u + 1, 2 f + 1)/2: its proximal map, its largest value, smoothed.
    moved_kl, shifted = KullbackLeibler().scaled(2.0, 1.0), lambda u, f: divergence(2 * u + 1, 2 * f + 1) / 2
    least = [_argmin(lambda z, a, b: shifted(z, b) + (z - a) ** 2 / (2 * step), a, b, (-0.49, 6.0))
             for a, b in zip(v, f, strict=True)]  # fmt: skip
    pulls = np.array([-0.9, -0.2, 0.1, 0.25, 0.6, 0.8])
    best = [_argmin(lambda z, a, b: shifted(z, b) - a * z, a, b, (0.2, 4.0))
            for a, b in zip(pulls, np.clip(f, 0.25, 3.9)[:6], strict=True)]  # fmt: skip
    worst = largest(worst, float(np.abs(moved_kl.prox(v, f, step) - least).max()),
                    float(np.abs(moved_kl.best(pulls, np.clip(f, 0.25, 3.9)[:6], ends) - best).max()))  # fmt: skip
    between = KullbackLeibler().value(v, f, eps) - KullbackLeibler().value(v + 1, f, eps)
    worst = largest(worst, float(np.abs(between + 1 - (f + eps) * np.log1p(1 / v)).max()))
    # In other units and from another zero: g(2 u + 1, 2 f + 1) is 2 g'(u, f), and 4 g' of Huber's function.
    worst = largest(worst, float(np.abs(2 * KullbackLeibler().scaled(2.0, 1.0).value(v, f)
                                        - divergence(2 * v + 1, 2 * f + 1)).max()))  # fmt: skip
    return largest(worst, float(np.abs(4 * Huber(DELTA).scaled(2.0, 1.0).value(v, f) - huber(2 * v, 2 * f)).max()))


def _argmin(function: Callable[[Any, Any, Any], Any], a: float, b: float, ends: tuple[float, float]) -> float:
    """Return where a convex function is least, by SciPy from the best of many places."""
    places = np.append(np.linspace(*ends, 2401), np.clip(b, *ends))
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.nan_to_num(function(places, a, b), nan=np.inf)
        first = float(places[np.argmin(values)])
        low, high = max(first - 0.01, ends[0]), min(first + 0.01, ends[1])
        near = minimize_scalar(lambda z: float(np.nan_to_num(function(z, a, b), nan=np.inf)), bounds=(low, high),
                               method="bounded", options={"xatol": 1e-12})  # fmt: skip
    return float(near.x) if near.fun < values.min() else first


def slope(function: Callable[[Floats], float], u: Floats, direction: Floats) -> float:
    """Return the derivative in a direction by differences of order 6."""
    h = 1e-2
    weights = {1: 3 / 4, 2: -3 / 20, 3: 1 / 60}
    return sum(c * (function(u + n * h * direction) - function(u - n * h * direction)) for n, c in weights.items()) / h


def run(context: Context) -> Outcome:
    values, own, gradients, gain, distance, beyond = 0.0, 0.0, 0.0, np.inf, 0.0, -np.inf
    above = -np.inf
    for seed in range(context.pick(5, 1)):
        p_ = Problem.drawn(seed)
        weights = from_matrix(p_.k, Points(np.zeros(N), weights=p_.w))
        positive = np.abs(p_.u) + 0.5, np.abs(p_.f) + 0.5
        for p in POWERS:
            context.step(f"seed {seed}, p = {p:g}")
            for isotropic in (False, True):
                told = Jp(weights, p, isotropic=isotropic)
                wanted = p_.value(p_.u, p, isotropic)
                values = largest(values, abs(told.value(p_.u) / wanted - 1))
                gradients = largest(gradients, _apart(p_, told, lambda u: p_.value(u, p, isotropic), p_.u))  # noqa: B023
            for misfit, g in ((None, squares), (Huber(DELTA), huber)):
                energy = Ep(weights, p_.f, p_.fidelity, p, misfit=misfit)
                values = largest(values, abs(energy.value(p_.u) / p_.total(p_.u, p, g) - 1))
            counts = Problem(p_.k, p_.w, positive[0], positive[1], p_.fidelity)
            energy = Ep(weights, counts.f, counts.fidelity, p, misfit=KullbackLeibler())
            values = largest(values, abs(energy.value(counts.u) / counts.total(counts.u, p, divergence) - 1))
            gradients = largest(
                gradients,
                _apart(counts, energy, lambda u: counts.total(u, p, divergence), counts.u),  # noqa: B023
            )
            energy = Ep(weights, p_.f, p_.fidelity, p)
            gradients = largest(gradients, _apart(p_, energy, lambda u: p_.total(u, p, squares), p_.u))  # noqa: B023
            found = energy.minimizer(rtol=1e-10)
            exact = minimize(
                lambda u: p_.total(u.reshape(N, CHANNELS), p, squares),  # noqa: B023
                found.u.ravel() + 0.01,
                jac=lambda u: -(p_.w[:, None] * p_.velocity(u.reshape(N, CHANNELS), p)).ravel(),  # noqa: B023
                method="BFGS", options={"gtol": 1e-9},
            )  # fmt: skip
            for tolerance in (0.3, 0.03, 1e-3):
                rough = energy.minimizer(rtol=tolerance)
                beyond = largest(beyond, ((1 - rough.residual) * rough.value - exact.fun) / exact.fun)
                own = largest(own, abs(rough.value / p_.total(rough.u, p, squares) - 1))
            gain = smallest(gain, (exact.fun - p_.total(found.u, p, squares)) / exact.fun)
            distance = largest(distance, float(np.abs(found.u - exact.x.reshape(N, CHANNELS)).max()))
        context.step(f"seed {seed}, p = 1")
        for share in (1, 0.05):  # of a weak fidelity it is the larger part of a gap
            held = replace(p_, fidelity=share * p_.fidelity)
            variation, least = Ep(weights, held.f, held.fidelity, 1), _least_variation(held)
            for tolerance in (0.3, 0.03, 1e-3, 1e-6):
                rough = variation.minimizer(rtol=tolerance)
                beyond = largest(beyond, ((1 - rough.residual) * rough.value - least) / least)
                own = largest(own, abs(rough.value / held.total(rough.u, 1, squares) - 1))
                above = largest(above, (held.total(rough.u, 1, squares) - least) / least / tolerance)
    checks = [
        Check("values of J_p and E_p against double sums, relative", values, 1e-12),
        Check("gradients against difference quotients of the double sums, relative", gradients, 1e-9),
        Check("least of E_p by SciPy's BFGS less that of the minimizer, relative", gain, -1e-9, at_least=True),
        Check("minimizers apart", distance, 2e-5),
        Check("proximal maps, conjugates and slopes of misfits against SciPy's minima and formulas", proximal(), 1e-6),
        Check("derivatives in Newton's method against difference quotients, relative", newton(), 1e-6),
        Check("total variation: excess over the least found by SciPy, over the tolerance", above, 1.0),
        Check("p-harmonic extensions along a path against fluxes, relative", _off_path(), 1e-6),
        Check("longest forward-backward steps against a formula, relative", _steps(Problem.drawn(7)), 1e-12),
        Check("values that minimizers tell of themselves against double sums, relative", own, 1e-9),
        Check("residual that nonlocal total variation leaves, over that wanted, less 1", _variation(), 0.01),
        Check("its units, graph and search, over what they may be", _searched(np.random.default_rng(8)), 1.0),
        Check("lower bounds that rough minimizers tell, above the minimum, relative", beyond, 1e-9),
    ]  # fmt: skip
    return Outcome(checks)


def _steps(p_: Problem) -> float:
    """Return errors of the longest forward-backward steps, 1 / ((p − 1) r^(p − 2) max d), r the range, relative."""
    weights, worst = from_matrix(p_.k, Points(np.zeros(N), weights=p_.w)), 0.0
    links = (p_.k + p_.k.T) * p_.w
    degree = links.sum(axis=1) - np.diag(links)  # of others
    span = float(np.linalg.norm(np.ptp(p_.f, axis=0)))
    for p, isotropic in ((2.0, False), (3.0, False), (4.5, True)):
        flow = PFlow(Ep(weights, p_.f, p_.fidelity, p, isotropic=isotropic))
        steep = (p - 1) * (span * (float(np.sqrt(degree).max()) if isotropic else 1.0)) ** (p - 2)
        told = ForwardBackward(0.1).stability_limit(flow)
        worst = largest(worst, abs(told * steep * float(degree.max()) - 1))
    return worst


def _variation() -> float:
    """Return how far the residual of total variation of a noisy step is from what its fidelity is chosen for."""
    noisy = np.where(np.arange(150) < 70, 0.0, 1.0) + np.random.default_rng(4).normal(0, 0.1, 150)
    return largest(*(
        abs(float(np.sqrt(np.mean((nonlocal_tv(noisy, 0.1, residual=wanted) - noisy) ** 2))) / (0.1 * wanted) - 1)
        for wanted in (0.8, 0.9)
    ))  # fmt: skip


def _searched(rng: np.random.Generator) -> float:
    """Return errors of total variation in other units, of its graph and its told value, and of steps of its search.

    The search goes by secants on logarithms, at most 2, where the excess falls hardly at all a tenth of what is usual;
    between two ends where a secant leaves them.
    """
    noisy = np.where(np.add.outer(np.arange(14), np.arange(17)) < 15, 0.0, 1.0) + 0.1 * rng.standard_normal((14, 17))
    plain, found, _ = nonlocal_tv(noisy, 0.1, fidelity=0.6, return_info=True)
    other = nonlocal_tv(3.1 * noisy - 7, 0.31, fidelity=0.6)
    worst = largest(float(np.abs(other - 3.1 * plain + 7).max()) / 1e-5, 1e9 * float(not found.success))
    weights = total_variation._patch_affinity((noisy / 0.1)[..., None], 3, 3, None)
    impulse = np.zeros((17, 17))
    impulse[8, 8] = 1.0
    worst = largest(worst, abs(weights.kernel.sigma / np.linalg.norm(gaussian_filter(impulse, 1.0)) - 1) / 1e-12)
    for tried, wanted in (
        ([(0.0, 0.3)], 1.2), ([(0.0, 0.9)], 2.0), ([(0.0, 0.4), (1.0, 0.1)], 4 / 3), ([(0.0, 0.021), (1.0, 0.02)], 1.8),
        ([(2.0, -0.3), (1.5, -0.1)], 1.25), ([(0.0, 0.5), (3.0, -0.1), (1.0, 0.4), (1.2, 0.39)], 2.1),
    ):  # fmt: skip
        worst = largest(worst, abs(total_variation._next(tried) - wanted) / 1e-12)
    return worst


def _least_variation(problem: Problem) -> float:
    """Return the least E_1 that SciPy finds, with |x| as √(x² + ε²) for ε down to 1e-7."""
    u = problem.f.ravel().copy()
    both = (problem.k + problem.k.T) * problem.w[:, None] * problem.w

    def smoothed(flat: Floats, eps: float) -> tuple[float, Floats]:
        u = flat.reshape(N, CHANNELS)
        apart = u[:, None] - u[None]
        lengths = np.sqrt((apart**2).sum(axis=2) + eps**2)
        pull = (problem.w * problem.fidelity)[:, None] * (u - problem.f)
        slope = ((both / lengths)[:, :, None] * apart).sum(axis=1) + pull
        return float((both * lengths).sum()) / 2 + float((pull * (u - problem.f)).sum()) / 2, slope.ravel()

    for eps in 10.0 ** -np.arange(1, 8):
        found = minimize(smoothed, u, args=(eps,), jac=True, method="L-BFGS-B", options={"gtol": 1e-12, "ftol": 1e-15})
        u = found.x
    return problem.total(u.reshape(N, CHANNELS), 1, squares)


def newton() -> float:
    """Return errors of the derivatives in Newton's method, first and second, against difference quotients, relative."""
    p_ = Problem.drawn(7)
    weights, rng, worst = from_matrix(p_.k, Points(np.zeros(N), weights=p_.w)), np.random.default_rng(83), 0.0
    rigid, way, h = p_.w * p_.fidelity, rng.standard_normal((N, CHANNELS)), 1e-4
    for p, misfit, isotropic, channels, eps in (
        (1.3, L1(), False, 2, 0.3), (1.3, L1(), True, 2, 0.3), (3.0, Squares(), False, 2, 0.3),
        (3.0, Squares(), True, 2, 0.3), (4.0, Squares(), False, 1, 0.3), (1.6, Squares(), False, 1, 0.1),
    ):  # fmt: skip
        u, f, v = p_.u[:, :channels], p_.f[:, :channels], way[:, :channels]
        # With the slope as dual field the second derivative of the misfit is its own.
        dual = misfit.slopes(u, f, eps)[0] if isinstance(misfit, L1) else 0.0
        problem = NewtonProblem(Jp(weights, p, isotropic=isotropic), f, rigid, misfit, 1.4, dual)
        product = problem.hessian(u, eps)[0](v)
        ahead, behind, far, back = (problem.gradient(u + n * h * v, eps) for n in (1, -1, 2, -2))
        quotient = (8 * (ahead - behind) - far + back) / (12 * h)
        told = float(np.sum(problem.gradient(u, eps) * v))
        values = [problem.value(u + n * h * v, eps) for n in (1, -1, 2, -2)]
        plain = (8 * (values[0] - values[1]) - values[2] + values[3]) / (12 * h)
        worst = largest(worst, float(np.abs(product - quotient).max() / np.abs(quotient).max()), abs(told / plain - 1))
    # Where nothing curves, a constant far from an f with |u − f|, matrices are positive nevertheless.
    flat = NewtonProblem(Jp(weights, 4.0), p_.f, rigid, L1(), 1.4, np.ones((N, CHANNELS)))
    worst = largest(worst, float(flat.hessian(np.full((N, CHANNELS), 9.0), 1e-12)[1].min() <= 0))
    return largest(worst, _off_gap(p_, weights), _off_reweighted(p_, weights), _off_slack(), _off_dual(p_, weights),
                   _off_line(p_, weights), _saddle(p_, weights), _extension(p_, weights))  # fmt: skip


def _off_line(p_: Problem, weights: Any) -> float:
    """Return errors of the fall that a line search is told, and of signals that it leaves too near to 0, relative.

    It is that of the slope. For logarithms no step takes more than 0.95 of what a signal has above 0.
    """
    f, worst = np.abs(p_.f) + 0.05, 0.0
    problem = NewtonProblem(Jp(weights, 1.5), f, p_.w * p_.fidelity, KullbackLeibler(), 0.2)
    with mock.patch.object(newton_method, "_searched", wraps=newton_method._searched) as search:
        found = list(islice(newton_method.iterates(problem, 5 * f), 12))
    nearest = []
    for one, after in zip(search.mock_calls, found, strict=True):
        _, u, step, fall, smoothing, floor = one.args
        plain = -float(np.sum(problem.gradient(u, smoothing) * step))
        worst = largest(worst, abs(fall / plain - 1))
        # The step solves Newton's equations to 1e-2, in units in which their diagonal is 1.
        product, diagonal = problem.hessian(u, smoothing)
        gradient = problem.gradient(u, smoothing) / np.sqrt(diagonal)
        rest = np.linalg.norm(product(step) / np.sqrt(diagonal) + gradient) / np.linalg.norm(gradient)
        worst = largest(worst, float(rest > 1.01e-2))
        nearest.append(float(((after.u - floor) / (u - floor)).min()))
    return largest(worst, abs(min(nearest) - 0.05))  # of one


def _off_dual(p_: Problem, weights: Any) -> float:
    """Return errors of the dual field of |u − f| after a step, and of what rounding leaves of E_p, relative.

    The field d/√(d² + ε²) of d = u − f moves with its slope, (1 − q d/√(d² + ε²))/√(d² + ε²) of the field q before.
    """
    step, q, eps = np.random.default_rng(85).normal(0, 0.2, (N, CHANNELS)), 0.1 * p_.f, 0.4
    moving = NewtonProblem(Jp(weights, 1.5), p_.f, p_.w * p_.fidelity, L1(), 1.4, q.copy())
    moving.follow(p_.u, step, eps)
    length = np.sqrt((p_.u - p_.f) ** 2 + eps**2)
    share = (p_.u - p_.f) / length
    worst = float(np.abs(moving.dual - np.clip(share + (1 - q * share) / length * step, -1, 1)).max())
    unit, both = float(np.finfo(np.float64).eps), p_.k + p_.k.T - np.diag(2 * np.diag(p_.k))
    for isotropic in (False, True):  # all differences are the rounding of 1
        apart = (both @ p_.w) ** 0.75 if isotropic else both @ p_.w
        exact = unit**1.5 * float(p_.w @ apart) / 3 + unit**2 * float(p_.w @ p_.fidelity) / 2
        told = Jp(weights, 1.5, isotropic=isotropic).rounding(p_.w * p_.fidelity, np.float64)
        worst = largest(worst, abs(told / exact - 1))
    return worst


def _off_gap(p_: Problem, weights: Any) -> float:
    """Return how far the gap in Newton's method is from value less dual value, both of them sums written out.

    Of the field y_ij = (x² + s²)^(p/2 − 1) (u_i − u_j), for s = 0 and a smoothing: the smaller gap. The dual value is
    Σ f·y' − |y'|²/(2 r) − 1/(2 p') Σ w w K |y|^p', with p' = p/(p − 1) and y' the sums of w w K y.
    """
    p, worst = 1.5, 0.0
    rigid = 900 * p_.w * p_.fidelity
    u = p_.f + 0.01 * p_.u  # near f, where the gap is no difference of large numbers
    lengths = np.sqrt(((u[:, None] - u[None]) ** 2).sum(axis=2))
    for eps in (0.05, 0.3):
        fields = ((lengths**2 + smoothing**2 + np.eye(N)) ** (p / 2 - 1) for smoothing in (0.0, eps))
        exact = min(_dual_gap(p_, u, p, rigid, field) for field in fields)
        told = NewtonProblem(Jp(weights, p), p_.f, rigid, Squares()).gap(u, eps)
        worst = largest(worst, abs(told / exact - 1))
    # Where u is least for the smoothed energy, nothing but the cells' part of its field is left: with a factor too.
    factor, eps = 1.4, 0.3
    rigid, links = 0.01 * p_.w * p_.fidelity, p_.w[:, None] * (p_.k + p_.k.T) * p_.w * (1 - np.eye(N))
    y = (lengths**2 + eps**2) ** (p / 2 - 1) * lengths
    field = factor * (links * (lengths**2 + eps**2) ** (p / 2 - 1))[:, :, None] * (u[:, None] - u[None])
    f = u + field.sum(axis=1) / rigid[:, None]
    cells = factor * float((links * (lengths**p / p + y**3 / 3 - lengths * y)).sum()) / 2
    told = NewtonProblem(Jp(weights, p), f, rigid, Squares(), factor).gap(u, eps)
    return largest(worst, abs(told / cells - 1))


def _dual_gap(p_: Problem, u: Floats, p: float, rigid: Floats, field: Floats) -> float:
    """Return value less dual value of the field y_ij (u_i − u_j)."""
    apart, links = u[:, None] - u[None], p_.w[:, None] * (p_.k + p_.k.T) * p_.w
    flow = ((links * field)[:, :, None] * apart).sum(axis=1)
    dual = float((p_.f * flow).sum() - ((flow**2).sum(axis=1) / (2 * rigid)).sum())
    dual -= float((links * (field * np.sqrt((apart**2).sum(axis=2))) ** (p / (p - 1))).sum()) * (p - 1) / (2 * p)
    return p_.value(u, p, False) + float(rigid @ ((u - p_.f) ** 2).sum(axis=1)) / 2 - dual


def _saddle(p_: Problem, weights: Any) -> float:
    """Return errors of steps for E_1, q + (ū_i − ū_j)/2a within 1, then u with steps a/d, and ū = 2 u − u before.

    a is twice the deviation of f at first, for vectors q of nodes times the root of the mean of d, and is changed by
    how far u and q have moved. Steps for squares are compiled as a whole; those that know the misfit by its proximal
    map are not, and are the same.
    """
    rigid, worst = np.where(np.arange(N) == 4, 0.0, p_.w * p_.fidelity), 0.0
    links = p_.w[:, None] * (p_.k + p_.k.T) * p_.w * (1 - np.eye(N))
    seen = p_.f[rigid > 0]
    box, first = np.array([seen.min(axis=0), seen.max(axis=0)]), 2 * float(seen.std())
    for isotropic in (False, True):
        jp = Jp(weights, 1, isotropic=isotropic)
        made = _Iteration(jp, p_.f, rigid, None, None), _Proximal(Squares(), jp, p_.f, rigid, None, None)
        # Half a bound of |D|², D being differences of edges, or all of a node's, with half the root of its weight.
        degree = (links * np.add.outer(p_.w, p_.w)).sum(axis=1) / 4 if isotropic else links.sum(axis=1)
        a = first * np.sqrt(degree.mean()) if isotropic else first
        u, seen, q = p_.f, p_.f, np.zeros((N, N, CHANNELS))
        for _ in range(4):
            if not isotropic:
                q = q + (seen[:, None] - seen[None]) / (2 * a)
                q = q / np.maximum(np.sqrt((q**2).sum(axis=2, keepdims=True)), 1)
            step = (a / degree)[:, None]
            new = u - step * (links[:, :, None] * q).sum(axis=1)
            new = np.clip((new + step * rigid[:, None] * p_.f) / (1 + step * rigid[:, None]), *box)
            u, seen = new, 2 * new - u
            for one in made:
                one.step()
        ends = [one.saddle.u for one in made]
        u = ends[0] if isotropic else u
        worst = largest(
            worst, *(float(np.abs(end - u).max()) for end in ends), float(np.abs(made[0]._degree / degree - 1).max())
        )
        square = (made[0].saddle.q ** 2).sum(axis=1)
        risen = 2 * float(square.sum()) if isotropic else float((links * (q**2).sum(axis=2)).sum())
        changed = np.sqrt(a * np.sqrt(float(degree @ ((u - p_.f) ** 2).sum(axis=1)) / risen))
        for one in made:
            one.balance()
            worst = largest(worst, abs(one._fall / changed - 1))
    return worst


def _extension(p_: Problem, weights: Any) -> float:
    """Return errors of what p-harmonic extensions look at: flows left over moduli, and steps that lower J_q."""
    u, way, worst = p_.u, p_.f - p_.u, 0.0
    links = p_.w[:, None] * (p_.k + p_.k.T) * p_.w * (1 - np.eye(N))
    apart = u[:, None] - u[None]
    lengths = np.sqrt((apart**2).sum(axis=2)) + np.eye(N)
    free = np.arange(N)[:, None] > 2
    for q in (1.4, 3.0):
        jp = Jp(weights, q)
        edges = links * lengths ** (q - 2)
        flow = np.linalg.norm(((edges[:, :, None] * apart).sum(axis=1))[3:])
        told = left_over(jp, u, free, q)
        worst = largest(worst, abs(told / (flow / np.linalg.norm((edges * lengths).sum(axis=1)[3:])) - 1))
        for sign in (1.0, -1.0):
            moved = searched(jp, u, sign * way, 0.3, 1e-4)
            if moved is None:
                continue
            share = float(((moved - u) * way).sum() / (way**2).sum())
            turns = np.log2(abs(share) / 0.3) if abs(share) < 1 else 0.0
            fell = jp.value(moved) < jp.value(u)
            worst = largest(
                worst, float(np.abs(moved - u - share * way).max()), abs(turns - round(turns)), float(not fell)
            )
    return worst


def _off_path() -> float:
    """Return errors of p-harmonic extensions along a path, between ends in any units, relative.

    What flows is W |u_i − u_j|^(p − 1) on each edge, so differences are in proportion to W^(−1/(p − 1)).
    """
    weights, worst = np.random.default_rng(86).uniform(0.3, 3.0, 6), 0.0
    at = np.arange(6)
    path = affinity_from_graph(np.hstack([[at, at + 1], [at + 1, at]]), edge_weight=np.tile(weights, 2))
    for p in (1.8, 2.6, 4.0):
        steps = weights ** (-1 / (p - 1))
        exact = np.append(0, np.cumsum(steps)) / steps.sum()
        found = [harmonic_extension(Jp(path, p), Constraint([0, 6], [0.0, size]))
                 for size in (2.0**-20, 2.0**20)]  # fmt: skip
        small, large = (one.u / one.u[-1] for one in found)
        worst = largest(worst, float(np.abs(large - exact).max()), 1e5 * float(np.abs(large - small).max()))
        worst = largest(worst, *(float(one.iterations > 10) for one in found))  # as documented
    return worst


def _off_reweighted(p_: Problem, weights: Any) -> float:
    """Return how far values and gaps of the first reweighted signals are from sums written out, relative.

    The field is that of the linear problem, y = 1 at first, or where it is more than the p-th power allows, that.
    """
    worst = 0.0
    for p in (1.5, 3.0):
        found = next(iterates(Jp(weights, p), p_.f, 900 * p_.fidelity, None))
        rigid, u = 900 * p_.w * p_.fidelity, found.u
        lengths = np.sqrt(((u[:, None] - u[None]) ** 2).sum(axis=2))
        allowed = np.maximum(lengths, _FIRST) ** (p - 1) / np.maximum(lengths, 1e-300)
        exact = min(_dual_gap(p_, u, p, rigid, field) for field in (np.ones((N, N)), np.minimum(1.0, allowed)))
        value = p_.value(u, p, False) + float(rigid @ ((u - p_.f) ** 2).sum(axis=1)) / 2
        smoothed = float((p_.w[:, None] * (p_.k + p_.k.T) * p_.w * (lengths**2 + _FIRST**2) ** (p / 2)).sum()) / (2 * p)
        smoothed -= float(np.diag(p_.w[:, None] * (p_.k + p_.k.T) * p_.w).sum()) * _FIRST**p / (2 * p)
        worst = largest(worst, abs(found.gap / exact - 1), abs(found.value / value - 1))
        worst = largest(worst, abs(found.smoothed / (smoothed + value - p_.value(u, p, False)) - 1))
    return worst


def _off_slack() -> float:
    """Return the error of G(u) + G*(−y) + ⟨u, y⟩ within a box, where G* has its maximum by clipping, relative."""
    rng = np.random.default_rng(84)
    u, f, flow = rng.uniform(-1, 1, (3, 30, 2))
    rigid, box = rng.uniform(0.1, 2.0, 30), np.array([[-1.1, -1.0], [1.0, 1.2]])
    stiff = rigid[:, None]
    best = np.clip(f - flow / stiff, *box)
    terms = stiff / 2 * ((u - f) ** 2 - (best - f) ** 2) + flow * (u - best)
    other = misfit_slack(Squares(), u, flow, rigid, f, box)
    return largest(*(abs(one / float(terms.sum()) - 1) for one in (fidelity_slack(u, flow, rigid, f, box), other)))


def _apart(problem: Problem, functional: Jp, value: Callable[[Floats], float], u: Floats) -> float:
    """Return by how much the gradient and the difference quotient of a double sum differ, relative."""
    rng = np.random.default_rng(81)
    worst = 0.0
    for _ in range(3):
        direction = 0.05 * rng.standard_normal(u.shape)
        told = float(np.sum(problem.w[:, None] * functional.gradient(u) * direction))
        size = float(np.linalg.norm(problem.w[:, None] * functional.gradient(u)) * np.linalg.norm(direction))
        worst = largest(worst, abs(told - slope(value, u, direction)) / size)
    return worst


CLAIM = Claim(
    name="p-functionals",
    title="J_p and E_p, their gradients and minimizers",
    statement=(
        "J_p(u) = 1/(2p) Σ w_i w_j K_ij |u_i − u_j|^p, its isotropic form 1/(2p) Σ w_i (Σ w_j K_ij |u_i − u_j|²)^(p/2) "
        "and E_p with squares, Huber's function or the divergence of Kullback and Leibler have the values of double "
        "sums, gradients that are the slopes of these sums, and minimizers that SciPy finds too."
    ),
    source="Elmoataz, Lezoray and Bougleux 2008, doi 10.1109/TIP.2008.924284; Gilboa and Osher 2008",
    run=run,
)
