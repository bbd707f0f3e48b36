"""Chebyshev expansions and the exponential built on them: the error stays below the bound known beforehand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.polynomial import chebyshev
from scipy.special import ive

import nlflow as nl
from nlflow.errors import NumericalError
from nlflow.flows.integrators.exponential import chebyshev_coefficients, chebyshev_sums
from tests.covering import pairs
from tests.problems import Floats, Problem, gaussian_matrix, operator, problem, torch_on_one_thread

pytestmark = pytest.mark.numerical

EPS = float(np.finfo(float).eps)
METRICS = ("l2", "degree")
RNG = np.random.default_rng(1)
FIDELITIES = {
    "J": None,
    "small": 1e-3,
    "large": 50.0,
    "zero": 0.0,
    "per node": RNG.uniform(0.1, 2.0, 24),
    "with zeros": np.where(np.arange(24) % 3 == 0, 0.0, 1.0),
    "large with zeros": np.where(np.arange(24) % 3 == 0, 0.0, 200.0),
}


# --- coefficients ----------------------------------------------------------------------------------------------------


def bessel(z: float, count: int) -> Floats:
    """Coefficients of exp(-z (x + 1)) on [-1, 1]: (2 - [k = 0]) (-1)^k e^-z I_k(z)."""
    k = np.arange(count)
    return np.asarray(np.where(k == 0, 1, 2) * (-1.0) ** k * ive(k, z))


@pytest.mark.parametrize("z", [1e-6, 1e-2, 1.0, 30.0, 1e3, 1e4, 1e5, 1e6, 1e7])
@pytest.mark.parametrize("tol", [1e-4, 1e-12])
def test_coefficients_of_the_exponential(z: float, tol: float) -> None:
    span, high = 2 * z / 5.0, 5.0
    coefficients, remainder = chebyshev_coefficients(lambda a: np.exp(-span * a), 0.0, high, tol)
    count = len(coefficients)
    exact = bessel(z, count + 64 + int(10 * np.sqrt(z)))
    # The samples carry a rounding error each, and exp one that grows with its argument where it still counts.
    np.testing.assert_allclose(coefficients, exact[:count], rtol=0, atol=60 * EPS)
    # The remainder bounds what is left out; what lies at the rounding of the samples, 8 eps, may be counted twice.
    noise = 8 * EPS * (8 + 2 * count)
    left_out = np.abs(exact[count:]).sum()
    assert left_out <= remainder * (1 + 1e-9) + 8 * EPS
    assert remainder <= min(tol, 1.02 * left_out) + noise
    # No shorter expansion would do.
    assert np.abs(exact[count - 1 :]).sum() > 0.98 * tol or count == 1


@pytest.mark.parametrize(
    ("function", "low", "high"),
    [(lambda a: 1 / (1 + a), 0.0, 3.0), (np.cos, -2.0, 9.0), (lambda a: a**3 - a, -1.0, 1.0), (np.ones_like, 1.0, 2.0)],
    ids=["rational", "cosine", "cubic", "constant"],
)
@pytest.mark.parametrize("tol", [1e-3, 1e-8, 1e-13])
def test_the_remainder_bounds_the_error(function: Any, low: float, high: float, tol: float) -> None:
    coefficients, remainder = chebyshev_coefficients(function, low, high, tol)
    a = np.linspace(low, high, 999)
    error = chebyshev.chebval((2 * a - low - high) / (high - low), coefficients) - function(a)
    assert np.abs(error).max() <= remainder + 20 * EPS * np.abs(function(a)).max()
    assert remainder <= tol


def test_coefficients_of_polynomials_are_as_many_as_their_degree() -> None:
    assert len(chebyshev_coefficients(lambda a: a**3 - a, -1.0, 1.0, 1e-12)[0]) == 4
    assert chebyshev_coefficients(np.ones_like, 1.0, 2.0, 1e-12)[0].tolist() == pytest.approx([1.0])


def test_too_long_a_span_is_refused() -> None:
    with pytest.raises(NumericalError, match=r"more than 524288 terms for tol=1e-12.*use a shorter span"):
        chebyshev_coefficients(lambda a: np.cos(1e7 * a), 0.0, 1.0, 1e-12)


@pytest.mark.parametrize("high", [1e14, 1e18, 1e30, 1e200])
def test_a_spike_at_the_lower_end_that_no_sample_meets_is_no_zero(high: float) -> None:
    with pytest.raises(NumericalError, match="use a shorter span"):
        chebyshev_coefficients(lambda a: np.exp(-a), 0.0, high, 1e-12, most=2**12)


# --- sums ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [None, 3])
def test_sums_are_polynomials_of_the_operator(channels: int | None) -> None:
    values, low, high = np.linspace(0.5, 4.0, 12), 0.5, 4.0
    shape = (12,) if channels is None else (12, channels)
    v = RNG.standard_normal(shape)
    scaled = values.reshape(-1, *(1,) * (len(shape) - 1))
    applied: list[int] = []

    def apply(x: Floats) -> Floats:
        applied.append(1)
        return scaled * x

    lists = [RNG.standard_normal(7), RNG.standard_normal(4), RNG.standard_normal(1)]
    sums = chebyshev_sums(apply, v, low, high, lists)
    assert len(applied) == 6  # the longest list decides; the others are served on the way
    x = (2 * scaled - low - high) / (high - low)
    for result, coefficients in zip(sums, lists, strict=True):
        np.testing.assert_allclose(result, chebyshev.chebval(x, coefficients) * v, rtol=0, atol=1e-13)
    assert chebyshev_sums(apply, v, low, high, [np.array([2.0])])[0].tolist() == (2 * v).tolist()
    assert len(applied) == 6


# --- the exponential -------------------------------------------------------------------------------------------------


def relative_error(p: Problem, t: float, integrator: nl.Exponential | None = None) -> tuple[float, nl.Solution]:
    """Error over the larger of |u_0| and |f|, and the solution."""
    solution = nl.solve(p.flow, p.start, t=t, integrator=integrator or nl.Exponential())
    scale = p.norm(p.start) if p.flow.fidelity is None else max(p.norm(p.start), p.norm(p.observed))
    return p.norm(solution.final - p.exact(t)) / scale, solution


def test_references_agree() -> None:
    for metric in METRICS:
        for fidelity in FIDELITIES.values():
            p = problem(metric, fidelity, channels=2)
            np.testing.assert_allclose(p.exact(0.7), p.exact(0.7), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("reach", "name", "metric"),
    pairs([1e-3, 1e-2, 0.1, 1.0, 10.0, 1e2, 1e3, 1e4, 1e5], list(FIDELITIES), METRICS),
)
@pytest.mark.sampled(13)
def test_error_stays_below_the_bound(reach: float, name: str, metric: str) -> None:
    p = problem(metric, FIDELITIES[name], channels=2)
    t = reach / p.flow.spectral_bounds()[1]
    error, solution = relative_error(p, t)
    # The bound holds coefficients at the rounding of what is expanded, which is as large as phi t where phi has zeros.
    size = max(1.0, p.fidelity.max() * t) if p.fidelity.min() == 0 else 1.0
    assert solution.stats["error_bound"] <= 1e-12 + 8 * EPS * size * 2 * (1 + solution.stats["applications"])
    # Rounding adds the square root of the number of averages times the precision; the factor is that of an average.
    rounding = 32 * EPS * np.sqrt(1 + solution.stats["applications"])
    if p.fidelity.any():
        # The limit A^-1 phi f itself moves by this much when P is off by eps.
        rounding += 8 * EPS * p.fidelity.max() / p.eigenvalues()[0]
    assert error <= solution.stats["error_bound"] + rounding


@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-8])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fidelity", FIDELITIES.values(), ids=FIDELITIES.keys())
@pytest.mark.sampled(9)
def test_loose_tolerances_are_kept_and_used(fidelity: Any, metric: str, tol: float) -> None:
    p = problem(metric, fidelity)
    t = 300 / p.flow.spectral_bounds()[1]
    error, solution = relative_error(p, t, nl.Exponential(tol))
    assert error <= solution.stats["error_bound"] <= tol
    assert solution.stats["applications"] < relative_error(p, t)[1].stats["applications"]


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fidelity", [None, 1e-7], ids=["J", "E"])
def test_applications_grow_like_the_square_root(fidelity: Any, metric: str) -> None:
    p = problem(metric, fidelity)
    reaches = np.array([1e3, 3e3, 1e4, 3e4])
    counts = [
        nl.solve(p.flow, p.start, t=r / p.flow.spectral_bounds()[1], energies=False).stats["applications"]
        for r in reaches
    ]
    assert np.polyfit(np.log(reaches), np.log(counts), 1)[0] == pytest.approx(0.5, abs=0.05)
    # The remainder of degree n is about 2 exp(-n^2 / reach), so n = sqrt(reach log(1/tol)), give or take a factor.
    assert np.all(np.array(counts) < 1.2 * np.sqrt(reaches * np.log(2e12)))


@pytest.mark.parametrize("reach", [1.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("share", [1e-4, 1e-2, 0.1, 0.5, 0.9, 1.0])
def test_roundings_add_up_to_a_third_over_the_share(share: float, reach: float) -> None:
    """A rounding of step k goes into the mode a = share rho by b_(k+1) of Clenshaw, sum_n c_n U_(n-k-1)."""
    coefficients, _ = chebyshev_coefficients(lambda a: np.exp(-reach * a), 0.0, 1.0, 1e-12)
    now = before = total = 0.0
    for c in coefficients[:0:-1]:
        now, before = c + 2 * (2 * share - 1) * now - before, now
        total += abs(now)
    assert total <= min(1 / (3 * share), reach / 2)


def rounding_of_means(p: Problem, t: float, dtype: Any = float) -> float:
    """Return how far the conserved mean has moved, over its bound 2 (N + 16) eps max |u_0|."""
    start = p.start.astype(dtype)
    final = nl.solve(p.flow, start, t=t, energies=False).final
    law = p.measure / p.measure.sum()
    rows = zip(law, final.reshape(len(law), -1), start.reshape(len(law), -1), strict=True)
    terms = np.array([w * (a.astype(float) - b.astype(float)) for w, a, b in rows])
    moved = max(abs(math.fsum(column)) for column in terms.T)
    return moved / (2 * (len(law) + 16) * float(np.finfo(dtype).eps) * float(np.abs(start).max()))


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("t", [1.0, 1e3, 1e6])
@pytest.mark.sampled(2)
def test_what_is_conserved_is_kept_to_rounding_for_any_time(t: float, metric: str) -> None:
    p = problem(metric, channels=2)
    assert rounding_of_means(p, t) <= 1
    assert rounding_of_means(replace(p, start=p.start + 1e3), t) <= 1
    single = problem(metric, channels=2, dtype="float32")
    assert rounding_of_means(single, t, np.float32) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.sampled(1)
def test_long_times_reach_the_limit(metric: str) -> None:
    """To the coefficients left out, what is left of the slowest mode, and g rho / (3 mu_2) of rounding."""
    p = problem(metric)
    law = p.measure / p.measure.sum()
    mean, n = math.fsum(law * p.start), len(law)
    away, gap, rho = p.norm(p.start - mean), p.eigenvalues()[1], p.flow.spectral_bounds()[1]
    g = 2 * (n + 8) * EPS
    for t in (1e4, 1e6, 1e8):
        solution = nl.solve(p.flow, p.start, t=t, energies=False, integrator=nl.Exponential(1e-15))
        left = solution.stats["error_bound"] + math.exp(-gap * t)
        # Each change between the largest value and the norm costs a factor of 1 / sqrt(min law) at most.
        bound = away * (left / math.sqrt(law.min()) + g * rho / (3 * gap) / law.min())
        assert np.abs(solution.final - mean).max() <= bound + 2 * (n + 16) * EPS * np.abs(p.start).max()


def test_items_of_a_batch_keep_their_own_means() -> None:
    """Parts that do not see each other, each of which is known to be one."""
    points = nl.Points(np.arange(9.0))
    u = np.random.default_rng(2).standard_normal((3, 9, 2)) * np.array([1.0, 1e3]) + np.array([5.0, 0.0])
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Batch(points, 3), u)), "l2")
    final = nl.solve(flow, u, t=1e6, energies=False).final
    for item, start in zip(final, u, strict=True):
        for now, then in zip(item.T, start.T, strict=True):
            assert abs(math.fsum(now - then) / 9) <= 2 * (27 + 16) * EPS * np.abs(then).max()


def test_parts_without_a_link_keep_their_common_mean() -> None:
    u = np.random.default_rng(3).standard_normal(24) + np.repeat([0.0, 5.0], 12)
    x = np.concatenate([np.linspace(0, 1, 12), np.linspace(1e3, 1e3 + 1, 12)])
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(0.3), nl.Points(x, np.ones(24)))), "l2")
    t = 1e6 / flow.spectral_bounds()[1]
    final = nl.solve(flow, u, t=t, energies=False).final
    assert abs(math.fsum(final - u) / 24) <= 2 * (24 + 16) * EPS * np.abs(u).max()
    for part in (slice(12), slice(12, 24)):
        mean = math.fsum(u[part]) / 12
        assert np.abs(final[part] - mean).max() <= 2 * (24 + 8) * EPS * 1e6 / 2 * np.abs(u).max()


def test_tensors_keep_their_mean() -> None:
    torch = torch_on_one_thread()
    u = torch.from_numpy(np.random.default_rng(4).standard_normal((24, 2)))
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Points(np.arange(24.0)), u)), "l2")
    final = nl.solve(flow, u, t=1e4, energies=False).final
    moved = (final - u).numpy()
    for column in moved.T:
        assert abs(math.fsum(column) / 24) <= 2 * (24 + 16) * EPS * float(u.abs().max())


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fidelity", [None, 0.5, FIDELITIES["with zeros"]], ids=["J", "E", "with zeros"])
@pytest.mark.parametrize("reach", [0.1, 10.0, 1e3])
def test_float32(fidelity: Any, metric: str, reach: float) -> None:
    p = problem(metric, None if fidelity is None else np.float32(fidelity), channels=2, dtype="float32")
    t = reach / p.flow.spectral_bounds()[1]
    solution = nl.solve(p.flow, p.start.astype("float32"), t=t, integrator=nl.Exponential())
    assert solution.u.dtype == np.float32
    assert solution.stats["error_bound"] <= 1e-6
    eps32 = float(np.finfo(np.float32).eps)
    # P itself is rounded to float32 once, which moves u(t) by some eps; the rest adds up as in float64.
    rounding = 16 * eps32 * np.sqrt(1 + solution.stats["applications"])
    error = p.norm(solution.final - p.exact(t)) / max(p.norm(p.start), p.norm(p.observed))
    assert error <= solution.stats["error_bound"] + rounding


@pytest.mark.parametrize("fidelity", [None, 0.5], ids=["J", "E"])
def test_no_time_no_change(fidelity: Any) -> None:
    p = problem("l2", fidelity)
    solution = nl.solve(p.flow, p.start, t=0.0, integrator=nl.Exponential())
    assert solution.t.tolist() == [0.0]
    assert np.array_equal(solution.final, p.start)
    assert solution.stats["applications"] == 0


@pytest.mark.parametrize("measure", METRICS)
@pytest.mark.parametrize("metric", METRICS)
def test_fidelity_in_the_other_measure(metric: str, measure: str) -> None:
    p = problem(metric, FIDELITIES["per node"], measure=measure, channels=2)
    error, solution = relative_error(p, 2.0)
    assert error <= solution.stats["error_bound"] + 1e-14


@pytest.mark.parametrize("fidelity", [None, 0.3], ids=["J", "E"])
def test_bounds_of_several_output_times_add_up(fidelity: float | None) -> None:
    p = problem("degree", fidelity)
    t_eval = [0.5, 1.0, 4.0]
    solution = nl.solve(p.flow, p.start, t_eval=t_eval, integrator=nl.Exponential(1e-5))
    single = [nl.solve(p.flow, p.start, t=h, integrator=nl.Exponential(1e-5)).stats for h in (0.5, 0.5, 3.0)]
    assert solution.stats["error_bound"] == pytest.approx(sum(s["error_bound"] for s in single), rel=1e-12)
    assert solution.stats["applications"] == sum(s["applications"] for s in single)
    assert solution.stats["steps"] == 3
    for t, u in zip(solution.t, solution.u, strict=True):
        assert p.norm(u - p.exact(t)) <= solution.stats["error_bound"] * max(p.norm(p.start), p.norm(p.observed))


def test_one_average_serves_both_parts() -> None:
    j_flow, e_flow = problem("degree", None, channels=2), problem("degree", 1e-9, channels=2)
    alone = nl.solve(j_flow.flow, j_flow.start, t=20.0).stats["applications"]
    assert nl.solve(e_flow.flow, e_flow.start, t=20.0).stats["applications"] <= 1.2 * alone


@pytest.mark.parametrize("channels", [None, 1, 3])
@pytest.mark.parametrize("boundary", ["periodic", "reflect", "isolated"])
def test_grids(boundary: Any, channels: int | None) -> None:
    grid = nl.Grid((5, 6), spacing=(0.2, 0.25), boundary=boundary)
    shape = grid.shape if channels is None else (*grid.shape, channels)
    start, observed = RNG.standard_normal((2, *shape))
    fidelity = RNG.uniform(0.0, 2.0, grid.shape)
    affinity = nl.affinity(nl.Gaussian(width=0.3), grid)
    flow = nl.GradientFlow(nl.E(affinity, observed, fidelity), "l2")
    final = nl.solve(flow, start, t=3.0).final
    assert final.shape == shape
    # The dense affinity of the same kernel gives the matrix; its own tests hold it against double sums.
    dense = nl.affinity(nl.Gaussian(width=0.3), grid, method="dense")
    degree = 2 * dense.degree.ravel()
    diffusion = degree[:, None] * (np.eye(30) - dense.matrix)
    if boundary == "isolated":
        k = gaussian_matrix(grid.nodes, 0.3)
        np.testing.assert_allclose(diffusion, operator(k, grid.weights.ravel(), "l2")[0], rtol=0, atol=1e-13)
    p = Problem(
        flow, start.reshape(30, -1), diffusion + np.diag(fidelity.ravel()), degree, fidelity.ravel(),
        observed.reshape(30, -1), grid.weights.ravel(),
    )  # fmt: skip
    np.testing.assert_allclose(final.reshape(30, -1), p.exact(3.0), rtol=0, atol=1e-11)
