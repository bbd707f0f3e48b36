"""Flows, their limits and chains of extreme problems, while any floating-point exception is an error."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
from extremes import Case, case, columns, exact, floats, signals

import nlflow as nl

pytestmark = [
    pytest.mark.numerical,
    pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning"),
    pytest.mark.usefixtures("strict"),
]

EPS = float(np.finfo(float).eps)
NAMES = ("logits", "queries", "narrow", "wide", "tiny units", "subnormal weights", "subnormal affinities", "one node",
         "two tokens", "duplicates", "two clusters", "compact", "tiny amplitude", "huge amplitude")  # fmt: skip


def resolvent(moves: Any, f: Any, fidelity: float) -> Any:
    """Return lambda~ ((1 + lambda~) I - P)^-1 f to 50 digits, also where lambda~ is 1e-300."""
    with mpmath.workdps(9_500):  # P has entries of exp(-20 000) that decide where nodes hardly see each other
        n, value = moves.rows, mpmath.mpf(fidelity)
        system = mpmath.matrix(n)
        for i in range(n):
            for j in range(n):
                system[i, j] = -moves[i, j]
            system[i, i] = value + mpmath.fsum(moves[i, j] for j in range(n) if j != i)  # 1 - P_ii, exactly
        return mpmath.lu_solve(system, columns(f) * value)


def limits(problem: Case) -> Any:
    with mpmath.workdps(60):
        return problem.transitions(problem.symmetrized)


# ---- limits


@pytest.mark.slow
@pytest.mark.parametrize("fidelity", [1e-300, 1e-12, 1.0, 1e12])
@pytest.mark.parametrize("name", ["wide", "tiny units", "subnormal weights", "one node", "duplicates", "compact",
                                  "two clusters", "two tokens", "huge amplitude"])  # fmt: skip
@pytest.mark.sampled(8)
def test_equilibria(name: str, fidelity: float) -> None:
    """Fidelities from 1e-300 to 1e12, on graphs that fall into parts too: against the resolvent in many digits."""
    problem = case(name)
    affinity = problem.affinity()
    u = signals(problem.n, float)["usual"]
    expected = floats(resolvent(limits(problem), u, fidelity)).ravel()
    for size in (1.0, 1e300, 1e-290):
        flow = nl.GradientFlow(nl.E(affinity, u * size, fidelity, measure="degree"), "degree")
        # State reduction has the error of a weighted mean, n^3 roundings at most, however ill-conditioned the system.
        direct = nl.equilibrium(flow, method="direct").u / size
        assert np.abs(direct - expected).max() <= 2 * problem.n**3 * EPS * np.abs(u).max()
        found = nl.equilibrium(flow)
        if found.success:
            assert np.abs(found.u / size - expected).max() <= 1e-9 * np.abs(u).max()


@pytest.mark.parametrize("method", ["auto", "direct"])
@pytest.mark.parametrize(("name", "fidelity"), [("tiny amplitude", 1e-12), ("tiny amplitude", 1e7),
                                                ("huge amplitude", 1e12)])  # fmt: skip
def test_equilibria_of_fidelities_that_dwarf_degrees(name: str, fidelity: float, method: str) -> None:
    """In the L2 metric lambda / d runs from 1e-288 to 1e307: the limit is f where it is large, else a mean."""
    problem = case(name)
    for size in (1.0, 1e300):
        f = signals(problem.n, float)["usual"] * size
        functional = nl.E(problem.affinity(), f, fidelity)
        found = nl.equilibrium(nl.GradientFlow(functional, "l2"), method=method)
        expected = f if name == "tiny amplitude" else np.full_like(f, f.mean())
        assert np.abs(found.u - expected).max() <= 1e-9 * size
        if name == "tiny amplitude":
            found = functional.minimizer(start=0 * f)
            assert found.success, found.message
            assert np.abs(found.u - expected).max() <= 1e-9 * size


@pytest.mark.parametrize("name", ["wide", "two nodes", "all alike", "subnormal affinities", "queries"])
def test_limits_without_fidelity(name: str) -> None:
    """The J-flow tends to pi^T u, for signals of any size."""
    problem = case(name)
    flow = nl.AttentionFlow(problem.affinity())
    chain = nl.MarkovChain(flow.affinity, laziness=0.5)
    moves = problem.transitions()
    with mpmath.workdps(9_500):
        n = problem.n
        system, right = mpmath.matrix(n), mpmath.zeros(n, 1)
        for i in range(n):  # pi^T (P - I) = 0, the last equation replaced by sum pi = 1
            for j in range(n):
                system[j, i] = moves[i, j] if i != j else -mpmath.fsum(moves[i, k] for k in range(n) if k != i)
        for i in range(n):
            system[n - 1, i] = 1
        right[n - 1] = 1
        law = mpmath.lu_solve(system, right)
    expected = np.array([float(x) for x in law])
    assert np.abs(chain.stationary - expected).max() <= 4 * problem.tolerance() * n
    for size in (1.0, 1e300, 1e-290):
        u = signals(n, float)["usual"] * size
        limit = nl.equilibrium(flow, u).u
        assert np.abs(limit - float(mpmath.fdot(law, exact(u)))).max() <= 4 * n * problem.tolerance() * np.abs(u).max()


@pytest.mark.parametrize("name", ["narrow", "two clusters", "compact", "duplicates"])
def test_parts_that_do_not_see_each_other_have_no_one_limit(name: str) -> None:
    affinity = case(name).affinity()
    u = signals(case(name).n, float)["usual"]
    flow = nl.GradientFlow(nl.J(affinity), "degree")
    with pytest.raises(nl.InputError, match="reducible"):
        nl.equilibrium(flow, u)
    with pytest.raises(nl.InputError, match="reducible"):
        nl.MarkovChain(affinity).mixing_time()
    assert nl.MarkovChain(affinity).irreducible is False


@pytest.mark.parametrize("measure", ["l2", "degree"])
def test_a_fidelity_of_zero_has_no_limit_of_its_own(measure: str) -> None:
    functional = nl.E(case("wide").affinity(), signals(5, float)["usual"], 0.0, measure=measure)
    with pytest.raises(nl.InputError, match="got 0 at every node"):
        functional.minimizer()
    with pytest.raises(nl.InputError, match="got 0 at every node"):
        nl.equilibrium(nl.GradientFlow(functional, measure))


# ---- how much is kept


@pytest.mark.parametrize("size", [1e-300, 1.0, 1e300])
@pytest.mark.parametrize("name", ["wide", "two nodes", "one node", "tiny units", "huge amplitude"])
def test_diversity_of_any_size(name: str, size: float) -> None:
    problem = case(name)
    flow = nl.GradientFlow(nl.J(problem.affinity()), "degree")
    u = signals(problem.n, float)["usual"] * size
    w, d, v = exact(problem.w), problem.degrees(problem.symmetrized), exact(u)
    total = mpmath.fdot(w, d)
    mean = mpmath.fsum(a * b * c for a, b, c in zip(w, d, v, strict=True)) / total
    square = mpmath.fsum(a * b * (c - mean) ** 2 for a, b, c in zip(w, d, v, strict=True)) / total
    error = abs(nl.diversity(flow, u) - mpmath.sqrt(square))
    assert error <= 4 * problem.tolerance() * max(map(abs, v))
    assert flow.distance_to_constant(u) == nl.diversity(flow, u)
    assert math.isfinite(flow.speed(u))


@pytest.mark.parametrize("fidelity", [1e-300, 1e-12, 1.0, 1e12])
@pytest.mark.parametrize("name", ["wide", "two nodes", "tiny units", "subnormal weights", "two clusters"])
def test_bounds_of_diversity(name: str, fidelity: float) -> None:
    """lambda / (lambda + mu) with the extreme eigenvalues of I - P in 50 digits."""
    problem = case(name)
    moves = limits(problem)
    values = sorted(1 - mpmath.re(x) for x in mpmath.eig(moves, left=False, right=False))
    flow = nl.GradientFlow(nl.E(problem.affinity(), np.zeros(problem.n), fidelity, measure="degree"), "degree")
    low, high = nl.diversity_bounds(flow)
    # Eigenvalues of I - P are known to N roundings of 1, whose shift moves a bound by its slope in mu at most.
    for got, value in ((low, values[-1]), (high, values[1])):
        shift = mpmath.mpf(8 * problem.n * EPS)
        ends = [mpmath.mpf(fidelity) / (fidelity + mu) for mu in (value + shift, max(value - shift, mpmath.mpf(0)))]
        assert ends[0] * (1 - 8 * EPS) <= got <= ends[1] * (1 + 8 * EPS)
    assert nl.largest_stable_fidelity(problem.affinity()) == pytest.approx(
        float(2 - values[-1]), abs=8 * problem.n * EPS
    )
    half = nl.fidelity_for_diversity(flow, 0.5)
    assert half == pytest.approx(float(values[-1]), abs=8 * problem.n * EPS)
    assert nl.fidelity_for_diversity(flow, 1e-300) <= 1e-300 * 2
    assert nl.fidelity_for_diversity(flow, 1 - 1e-12) >= 0.9e12 * half


# ---- flows


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["l2", "degree"])
@pytest.mark.parametrize("name", NAMES)
def test_times_from_nothing_to_ages(name: str, metric: str) -> None:
    """Spans of 0, 1e-300 and 1e9: u(0), u(0), and the mean of each part."""
    problem = case(name)
    functional = nl.J(problem.affinity())
    if metric == "l2" and np.abs(functional.affinity.log_degree).max() > 709:
        with pytest.raises(nl.NumericalError, match="log d runs from"):
            nl.GradientFlow(functional, metric)
        return
    flow = nl.GradientFlow(functional, metric)
    for size in (1.0, 1e290, 1e-290):
        u = signals(problem.n, float)["usual"] * size
        np.testing.assert_array_equal(nl.solve(flow, u, t=0).final, u)
        solution = nl.solve(flow, u, t=1e-300)
        if name == "huge amplitude" and metric == "l2":  # a degree of 1e300: the time that such a flow takes
            assert solution.success or (size > 1 and solution.status is nl.Status.DIVERGED)
        else:
            np.testing.assert_allclose(solution.final, u, rtol=1e-11, atol=1e-11 * size)


# Each takes 140 000 averages.
@pytest.mark.parametrize(
    "name", ["two clusters", *(pytest.param(name, marks=pytest.mark.slow) for name in ("wide", "narrow", "one node"))]
)
@pytest.mark.slow
def test_a_thousand_million_time_units(name: str) -> None:
    """The J-flow has come to the mean of each part."""
    problem = case(name)
    flow = nl.GradientFlow(nl.J(problem.affinity()), "degree")
    u = signals(problem.n, float)["usual"]
    solution = nl.solve(flow, u, t=1e9)
    moves = limits(problem)
    with mpmath.workdps(60):  # P^(2^60): every part has mixed long before
        for _ in range(60):
            moves = moves * moves
        expected = floats(moves * columns(u)).ravel()
    # A rounding at one step of the recurrence grows linearly with the steps after it at the end of the spectrum, where
    # constants are: degree^(3/2) roundings in all, the degree being sqrt(t rho log(1 / tol)).
    degree = math.sqrt(1e9 * 2 * math.log(1e12))
    assert np.abs(solution.final - expected).max() <= degree**1.5 * EPS * np.abs(u).max()


@pytest.mark.parametrize("fidelity", [0.0, 1e-300, 1e-12, 1.0, 1e12])
@pytest.mark.parametrize("name", ["wide", "logits", "two clusters", "one node"])
@pytest.mark.sampled(4)
def test_every_integrator(name: str, fidelity: float) -> None:
    """Each reaches the same signal, or refuses the step, or says that the signal overflowed."""
    problem = case(name)
    affinity = problem.affinity()
    u, f = signals(problem.n, float)["usual"], signals(problem.n, float)["usual"][::-1].copy()
    exact_steps = nl.solve(nl.AttentionFlow(affinity, f, fidelity), u, t_eval=[0.25, 2], integrator=nl.Exponential())
    short, long = exact_steps.u
    trackers = lambda: [nl.Energy(), nl.DistanceToConstant(), nl.SteadyState(1e-300, every=100)]  # noqa: E731  # new each time
    for integrator in (
        nl.ExplicitEuler(1e-3), nl.ExplicitEuler(1e9), nl.SemiImplicit(1e-3), nl.SemiImplicit(1e9), nl.RungeKutta(),
        nl.RungeKutta(dt=1e9, adaptive=False), nl.NeutrenoStep(), nl.AttentionStep(),
    ):  # fmt: skip
        flow = nl.AttentionFlow(affinity) if fidelity == 0 else nl.AttentionFlow(affinity, f, fidelity)
        if fidelity > 1 and isinstance(integrator, nl.RungeKutta) and integrator.adaptive:
            continue  # stiff: a million million steps
        try:
            integrator.check(flow)
        except nl.InputError:  # a step outside the stable range, a fidelity where there is to be none
            with pytest.raises(nl.InputError, match=r"dt|fidelity"):
                nl.solve(flow, u, t=2, integrator=integrator)
            continue
        dt = 1.0 if isinstance(integrator, nl.RungeKutta) else getattr(integrator, "dt", 1.0)
        solution = nl.solve(flow, u, t=0.25 if dt < 1 else 2, integrator=integrator, trackers=trackers())
        assert solution.success, solution.message
        if isinstance(integrator, nl.RungeKutta):
            assert np.abs(solution.final - long).max() <= 1e-5 * np.abs(u).max()
        elif dt < 1:
            # With A = I - P + lambda, |u'| <= 2 (1 + lambda) |u| and |u''| <= (2 + lambda) |u'|. A step is off by
            # dt^2 |u''| / 2, an implicit one by dt^2 (1 + lambda) |u'| more: 14 dt^2 |u| for lambda <= 1, and no more
            # for a large lambda, with which u is f after a step.
            assert np.abs(solution.final - short).max() <= 14 * 0.25 * dt * np.abs(u).max()
        elif isinstance(integrator, nl.AttentionStep):
            expected = problem.average(problem.average(u))
            assert np.abs(solution.final - expected).max() <= 4 * problem.tolerance() * np.abs(u).max()


def test_a_signal_that_no_float_holds_is_told() -> None:
    """The largest fidelity times the largest signal."""
    affinity = case("wide").affinity()
    u = signals(5, float)["huge"]
    flow = nl.AttentionFlow(affinity, u, 1e12)
    for integrator in (nl.Exponential(), nl.RungeKutta(dt=1e-13, adaptive=False)):
        solution = nl.solve(flow, 0 * u, t=1e-12, integrator=integrator)
        assert solution.status is nl.Status.DIVERGED
        assert "overflowed" in solution.message
    with pytest.raises(nl.NumericalError, match="overflow"):
        flow.speed(0 * u)
    with pytest.raises(nl.NumericalError, match="overflow"):
        nl.E(affinity, u, 1e12, measure="degree").gradient(0 * u, "degree")


def test_discrepancy_of_any_size() -> None:
    for size in (1e-290, 1.0, 1e290):
        u = signals(5, float)["usual"] * size
        flow = nl.AttentionFlow(case("wide").affinity())
        solution = nl.solve(
            flow, u, t=50, trackers=[nl.DiscrepancyPrinciple(u, 0.1 * size)], integrator=nl.RungeKutta(atol=0)
        )
        assert solution.status is nl.Status.STOPPED


# ---- chains


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.slow
def test_chains(name: str) -> None:
    """Laws, walks and distances of chains whose moves have probabilities down to exp(-20 000)."""
    problem = case(name)
    chain = nl.MarkovChain(problem.affinity(), laziness=0.5)
    moves = floats(problem.transitions())
    matrix = chain.matrix()
    with np.errstate(under="ignore"):
        expected = (np.eye(problem.n) + moves) / 2
    assert np.abs(matrix - expected).max() <= problem.tolerance()
    np.testing.assert_allclose(matrix.sum(axis=1), 1, rtol=0, atol=problem.n * EPS)
    walkers = chain.walk(0, 5, 2000, rng=1)
    law = chain.law(0, 5)
    assert np.abs(np.bincount(walkers, minlength=problem.n) / 2000 - law).max() <= 5 / math.sqrt(2000)
    stopped = chain.stopped_walk(0, 0.5, 2000, rng=1)
    assert stopped.min() >= 0
    if chain.irreducible:
        for size in (1.0, 1e300, 1e-290):
            u = signals(problem.n, float)["usual"] * size
            distances = chain.distance_to_limit(u, 3)
            assert np.all(np.isfinite(distances))
            reference = nl.MarkovChain(problem.affinity(), laziness=0.5).distance_to_limit(u / size, 3)
            np.testing.assert_allclose(distances, reference * size, rtol=1e-10, atol=1e-13 * size)


@pytest.mark.parametrize("count", [1, 2])
def test_batches_and_masks_of_one_and_two_nodes(count: int) -> None:
    """Items whose degrees are out of each other's range, and causal masks, whose first token sees itself alone."""
    features = np.stack([np.full((count, 1), 100.0), np.full((count, 1), 1e-3)])
    batch = nl.Batch(nl.Points(np.arange(float(count))), 2)
    affinity = nl.affinity(nl.ExpDotProduct(scale=1.0), batch, features)
    u = np.arange(2.0 * count).reshape(2, count)
    np.testing.assert_allclose(affinity.average(u), np.repeat(u.mean(axis=1, keepdims=True), count, axis=1), rtol=1e-14)
    masked = nl.affinity(
        nl.ExpDotProduct(scale=1.0), nl.Points(np.arange(float(count))), features[0], mask=nl.Mask(causal=True)
    )
    np.testing.assert_allclose(masked.average(u[1]), [u[1][: i + 1].mean() for i in range(count)], rtol=1e-14)


@pytest.mark.parametrize("scale", [1e-310, 1e-150, 1.0, 1e150, 1e300])
def test_matrices_of_any_size(scale: float) -> None:
    """A given matrix of which only ratios matter; its entries may be subnormal."""
    k = np.array([[2.0, 1.0, 0.0], [1.0, 4.0, 1.0], [0.0, 1.0, 1.0]]) * scale
    affinity = nl.from_matrix(k, nl.Points([0.0, 1.0, 2.0], weights=[1.0, 1.0, 1.0]))
    u = np.array([1.0, -2.0, 5.0])
    expected = floats(mpmath.matrix([[x / mpmath.fsum(exact(row)) for x in exact(row)] for row in k]) * columns(u))
    # Logarithms of entries are rounded: 700 roundings where they are as large as that.
    assert np.abs(affinity.average(u) - expected.ravel()).max() <= 4 * 5 * EPS * (8 + abs(math.log(scale)))
    assert nl.from_matrix([[scale]], nl.Points([0.0])).average(np.array([3.0]))[0] == 3.0


# ---- reactions


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled(3)
def test_reactions_on_extreme_kernels(name: str) -> None:
    """Values keep their range, the energy falls, and constants follow the equation of one number."""
    affinity = case(name).affinity()
    n = case(name).n
    u = np.linspace(-1.0, 1.0, n) if n > 1 else np.array([0.5])
    flow = nl.AttentionFlow(affinity, reaction=nl.AllenCahn(1.0))
    found = nl.solve(flow, u, t_eval=np.arange(0.0, 8.0, 0.25), integrator=nl.ExplicitEuler(0.25))
    assert found.success
    assert np.abs(found.u).max() <= 1 + 8 * EPS
    if flow.has_energy and np.all(np.isfinite(found.energy)):
        assert np.all(np.diff(found.energy / (np.abs(found.energy).max() or 1.0)) <= 1e-12)
    if affinity.symmetric:
        for step in (nl.ETD2RK(0.25), nl.ETD4RK(0.25)):
            close = nl.solve(flow, u, t=7.75, integrator=step).final
            assert np.abs(close - found.final).max() <= 0.5
            assert np.abs(close).max() <= 1 + 1e-3
    logistic = nl.AttentionFlow(affinity, reaction=nl.FisherKPP(1.0))
    for size in (1e-300, 1e-12, 0.5):
        final = nl.solve(logistic, np.full(n, size), t=2.0, integrator=nl.RungeKutta(1e-9, 0.0, dt=0.1)).final
        exact_final = size * math.exp(2) / (1 + size * math.expm1(2))
        assert np.abs(final / exact_final - 1).max() <= 1e-7


@pytest.mark.parametrize("size", [1e-290, 1e290])
def test_reactions_of_any_size(size: float) -> None:
    """R(u) = -u on intervals far from 1."""
    decay = nl.Reaction(lambda u: -u, (-size, size), derivative=lambda u: 0 * u - 1)
    assert decay.bound == 1.0
    flow = nl.AttentionFlow(case("wide").affinity(), reaction=decay)
    final = nl.solve(flow, np.full(case("wide").n, size), t=1.0, integrator=nl.RungeKutta(1e-9, 0.0)).final
    assert np.abs(final / size - math.exp(-1)).max() <= 1e-8
