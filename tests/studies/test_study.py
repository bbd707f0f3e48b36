"""Every kind of study finds the rate that theory gives, also for what users bring along."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import ExpDotProduct, Gaussian, Grid, InputError, Laplace, Points, TopHat, run_study
from nlflow.errors import NumericalError
from nlflow.flows.integrators import ExplicitEuler, Integrator, RungeKutta
from nlflow.kernels import RadialKernel
from nlflow.studies import StudyResult
from nlflow.studies.equilibrium import _slow
from nlflow.studies.mixing import _time
from nlflow.studies.stability import _growth


@dataclass(frozen=True)
class Bump(RadialKernel):
    """A user's kernel, k = exp(-(r / width)^4)."""

    width: float = 0.2

    def log_profile(self, squared: Any) -> Any:
        return -(squared**2) / self.width**4

    def support(self, rtol: float) -> float:
        return float(self.width * (-np.log(rtol)) ** 0.25)


def tokens(n: int = 30, d: int = 4, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(3, n, d))


def values(result: StudyResult, what: str) -> list[float]:
    return [fit.slope for fit in result.fits if fit.what.startswith(what)]


def failures(result: StudyResult) -> list[str]:
    return [str(fit) for fit in result.fits if fit.passed is not True]


# --- time-order ------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # what `test_orders` holds, as a study
@pytest.mark.parametrize("boundary", ["periodic", "isolated"])
def test_integrators_have_their_order(boundary: str) -> None:
    result = run_study("time-order", nodes=24, boundary=boundary)
    assert len(result.fits) == 12
    assert failures(result) == []
    for fit in result.fits:
        order = 5 if "runge-kutta" in fit.name else 1
        assert fit.expected == order
        assert abs(fit.slope - order) < 0.05 * order
        assert fit.low < fit.slope < fit.high


@pytest.mark.slow
def test_order_in_two_dimensions_of_many_channels_and_kernels() -> None:
    options: dict[str, Any] = {"metric": "l2", "fidelity": 0.3, "integrator": ["euler", "runge-kutta"]}
    result = run_study(
        "time-order", kernel=[Laplace(0.2), "tophat:radius=0.3"], nodes=8, dimension=2, channels=3, **options
    )
    assert failures(result) == []
    assert [fit.name.split()[0] for fit in result.fits[::2]] == ["laplace:width=0.2", "tophat:radius=0.3"]


@pytest.mark.slow
def test_order_for_attention_against_the_matrix_exponential() -> None:
    q, k, v = tokens()
    result = run_study("time-order", queries=q, keys=k, values=v, fidelity=[0, 0.7])
    assert failures(result) == []
    assert len(result.fits) == 6  # in the degree metric alone
    # And by the formula: (I + dt (P - I))^n against exp(T (P - I)).
    row = next(row for row in result.rows if row["integrator"] == "euler" and row["fidelity"] == 0)
    weights = nl.affinity(nl.ExpDotProduct(), Points(np.zeros(30)), k, queries=q)
    p = weights.average(np.eye(30))
    steps = round(row["t"] / row["dt"])
    from scipy.linalg import expm

    euler = np.linalg.matrix_power(np.eye(30) + row["dt"] * (p - np.eye(30)), steps) @ v
    exact = expm(row["t"] * (p - np.eye(30))) @ v
    pi = np.exp(weights.log_degree) / np.exp(weights.log_degree).sum()
    error = np.sqrt((pi[:, None] * (euler - exact) ** 2).sum())
    np.testing.assert_allclose(row["error"], error, rtol=1e-8)


@pytest.mark.slow
def test_the_order_of_a_users_integrator_is_measured() -> None:
    class Heun(ExplicitEuler):
        order = 2.0

        def step(self, flow: Any, u: Any, dt: float) -> Any:
            first = flow.velocity(u)
            return u + dt / 2 * (first + flow.velocity(u + dt * first))

    class Boast(ExplicitEuler):
        order = 2.0

    def fixed(dt: float) -> Integrator:
        return RungeKutta(dt=dt, adaptive=False)

    result = run_study("time-order", nodes=16, metric="degree", fidelity=0.5, integrator=[Heun, Boast, fixed])
    assert [fit.passed for fit in result.fits] == [True, False, True]
    assert str(result.fits[1]).endswith("expected 2, to within 0.1: disagrees")
    assert result.rows[0]["integrator"] == "Heun"
    with pytest.raises(InputError, match="integrator: got a function that returns int"):
        run_study("time-order", nodes=16, integrator=lambda dt: 1)


@pytest.mark.slow
def test_errors_at_rounding_level_are_not_fitted() -> None:
    options: dict[str, Any] = {"nodes": 16, "metric": "degree", "fidelity": 0.0, "integrator": "runge-kutta", "t": 1.0}
    result = run_study("time-order", dt=[0.1, 0.05, 0.002, 0.001], **options)
    assert [row["used"] for row in result.rows] == [True, True, False, False]
    assert [row["note"] for row in result.rows] == ["", "", "rounding level", "rounding level"]
    assert math.isnan(result.fits[0].slope)
    assert result.fits[0].passed is None
    assert "rounding level" in result.report()
    constant = run_study("time-order", start=np.ones(16), **options)
    assert {row["note"] for row in constant.rows} == {"rounding level"}
    constant.figure()


@pytest.mark.slow
def test_domains_and_signals_of_users() -> None:
    points = Points(np.random.default_rng(1).random((25, 2)), weights=np.linspace(0.5, 1.5, 25))
    common: dict[str, Any] = {"integrator": "euler", "fidelity": 0.5}
    result = run_study("time-order", domain=points, kernel=Bump(0.5), start=lambda x: x[:, 0] - x[:, 1] ** 2, **common)
    assert failures(result) == []
    assert result.rows[0]["nodes"] == 25
    assert "boundary" not in result.rows[0]
    grid = Grid((6, 5), spacing=0.2, boundary="reflect")
    assert failures(run_study("time-order", domain=grid, kernel=Bump(0.5), start=np.eye(6, 5), **common)) == []
    with pytest.raises(InputError, match=r"start: got a function that returns shape \(3,\) for 30 nodes"):
        run_study("time-order", domain=grid, start=lambda x: x[:3, 0], **common)
    with pytest.raises(InputError, match=r"start: got shape \(4,\)"):
        run_study("time-order", domain=grid, start=np.ones(4), **common)


@pytest.mark.slow
def test_order_in_volumes() -> None:
    options = {"nodes": 4, "dimension": 3, "metric": "degree", "integrator": ["euler", "semi-implicit"]}
    result = run_study("time-order", kernel=Gaussian(0.3), boundary="reflect", **options)  # type: ignore[arg-type]
    assert failures(result) == []


# --- space-order -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_grids_converge_spectrally_inside_and_with_order_two_at_edges() -> None:
    result = run_study("space-order", kernel=Gaussian(0.08), dimension=[1, 2])
    assert all(fit.passed for fit in result.fits if not fit.what.startswith("exponential"))
    for fit in result.fits:
        if "isolated" in fit.name:
            assert abs(fit.slope - 2) < 0.1
        elif fit.what.startswith("order"):
            assert fit.slope > 15
        else:
            assert fit.slope < -0.5


@pytest.mark.slow
def test_a_kink_costs_order_one_plus_dimension() -> None:
    result = run_study("space-order", kernel="laplace:width=0.1", boundary=["periodic", "isolated"])
    assert [str(fit) for fit in result.fits if fit.passed is False] == []
    orders = dict(zip([fit.name for fit in result.fits], values(result, "order in 1/N"), strict=True))
    expected = {"1-D periodic": 2, "1-D isolated": 2, "2-D periodic": 3}
    for words, order in expected.items():
        assert abs(orders[f"laplace:width=0.1 {words} channels=1"] - order) < 0.1


def test_what_has_no_known_order_is_reported_without_verdict() -> None:
    result = run_study(
        "space-order", kernel=[TopHat(0.2), Bump()], dimension=1, boundary="periodic", nodes=[20, 40, 81, 160]
    )
    assert [fit.passed for fit in result.fits] == [None, None]
    assert [fit.expected for fit in result.fits] == [None, None]
    assert math.isfinite(result.fits[0].slope)


def test_rounding_level_counts_as_spectral() -> None:
    result = run_study("space-order", dimension=1, boundary="periodic", nodes=[64, 128, 256])
    assert {row["note"] for row in result.rows} == {"rounding level"}
    rate, order = result.fits
    assert (rate.passed, math.isnan(rate.slope)) == (None, True)
    assert (order.passed, order.reason) == (True, "the least that reaches rounding level at N=64")
    assert order.low == pytest.approx(-math.log(50 * 2.0**-52) / math.log(64))
    result.figure()


@pytest.mark.slow
def test_a_signal_of_the_user_that_is_not_smooth_is_found_out() -> None:
    result = run_study(
        "space-order",
        start=lambda x: np.sign(x[:, 0] - 0.512),
        dimension=1,
        boundary="periodic",
        nodes=[16, 31, 64, 127],
    )
    assert result.fits[-1].passed is False


# --- monte-carlo -----------------------------------------------------------------------------------------------------


def test_random_nodes_converge_with_order_one_half() -> None:
    result = run_study("monte-carlo", nodes=[64, 256, 1024], seeds=60, channels=2)
    assert failures(result) == []
    assert len(result.rows) == 2 * 3 * 60
    for fit in result.fits:
        assert abs(fit.slope + 0.5) < 0.05
        assert fit.points == 180
        assert 0.005 < fit.high - fit.slope < 0.1
    assert len(result.table().splitlines()) < 12


def test_drawn_tokens_converge_to_the_average_of_all() -> None:
    q, k, v = tokens(50)
    for options in ({"queries": q, "keys": k, "values": v}, {"keys": k, "kernel": Gaussian(2.0)}):
        result = run_study("monte-carlo", nodes=[50, 200, 800], seeds=60, **options)
        assert failures(result) == []


def test_draws_that_miss_a_target_are_no_fair_sample() -> None:
    result = run_study("monte-carlo", kernel="tophat:radius=0.02", dimension=2, nodes=[64, 128, 256], seeds=5)
    assert {row["used"] for row in result.rows} == {False}
    assert "no node near a target" in {row["note"] for row in result.rows}
    assert math.isnan(result.fits[0].slope)


# --- samples -----------------------------------------------------------------------------------------------


def test_attention_to_random_tokens_converges_to_its_limit() -> None:
    """The constant is e^(s^2 d / 2) (d + s^2 d)^(1/2): with s^2 d = 1 and 1/4, from the moments of a normal law."""
    kernels = [ExpDotProduct(), ExpDotProduct(scale=0.25)]
    result = run_study("samples", kernel=kernels, nodes=[256, 1024, 4096], dimension=4, seeds=150)
    assert not any(fit.verdict == "disagrees" for fit in result.fits)
    assert all(abs(fit.slope - 1) < 0.1 for fit in result.fits[1::2])
    assert [fit.what for fit in result.fits[:2]] == ["order in n", "root mean square error over C n^(-1/2)"]
    for setting, strength in (("dot", 1.0), ("dot:scale=0.25", 0.5)):
        rows = [row for row in result.rows if row["kernel"] == setting and row["nodes"] == 1024]
        predicted = math.exp(strength**2 / 2) * math.sqrt(4 + strength**2) / 32
        assert all(row["predicted"] == pytest.approx(predicted) for row in rows)
        assert np.sqrt(np.mean([row["error"] ** 2 for row in rows])) == pytest.approx(predicted, rel=0.12)
    assert result.figure() is not None
    assert len(result.table().splitlines()) < 18


def test_the_limit_of_attention_is_the_average_over_the_law() -> None:
    """By quadrature in one dimension: E[exp(s q k) k] / E[exp(s q k)] = s q, and the variance that the constant has."""
    x, w = np.polynomial.hermite_e.hermegauss(60)
    for strength in (0.5, 1.0):
        weights = w * np.exp(strength * x)
        limit = weights @ x / weights.sum()
        assert limit == pytest.approx(strength, rel=1e-12)
        square = (w * np.exp(2 * strength * x)) @ (x - limit) ** 2 / weights.sum() ** 2 * w.sum()
        assert square == pytest.approx(math.exp(strength**2) * (1 + strength**2), rel=1e-12)


# --- mixing ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_chains_mix_at_the_rate_of_their_second_eigenvalue() -> None:
    result = run_study("mixing", kernel=["gaussian:width=0.15", TopHat(0.2)], nodes=[12, 20], channels=2)
    assert failures(result) == []
    assert len(values(result, "mixing time")) == 8
    rates = values(result, "log |P^k")
    # By the transfer function of the kernel on the ring: mu_2 = exp(-2 (pi width)^2) for the Gaussian.
    np.testing.assert_allclose(rates[0], -2 * (np.pi * 0.15) ** 2, rtol=1e-3)
    assert result.rows[0]["rate"] == pytest.approx(-rates[0], rel=1e-3)  # > 0, as that of the study equilibrium
    time = values(result, "mixing time")[0]
    first = [row for row in result.rows if (row["kernel"], row["nodes"]) == ("gaussian:width=0.15", 12)]
    distances = {row["k"]: row["total_variation"] for row in first if row["boundary"] == "periodic"}
    assert distances[time] <= 0.25 < distances[time - 1]
    result.figure()


@pytest.mark.slow
def test_mixing_of_attention_and_from_a_given_node() -> None:
    q, k, v = tokens(20, seed=2)
    result = run_study("mixing", queries=q, keys=k, values=v)
    assert result.fits[0].passed is True
    assert "not reversible" in result.fits[1].reason
    given = run_study("mixing", nodes=16, boundary="isolated", origin=8)
    worst = run_study("mixing", nodes=16, boundary="isolated")
    assert given.fits[1].slope < worst.fits[1].slope
    assert failures(given) == []
    lazy = run_study("mixing", nodes=16, boundary="isolated", laziness=0.5)
    assert lazy.fits[1].slope > worst.fits[1].slope
    assert failures(lazy) == []


def test_a_chain_that_hardly_mixes_has_a_rate() -> None:
    """1 - |mu_2| is below the rounding of |mu_2|, but not lost."""
    result = run_study("mixing", domain=Points(np.arange(8.0)), kernel="gaussian:width=0.12", progress=False)
    rate, time = result.fits
    assert rate.expected == pytest.approx(-2 * np.exp(-0.5 / 0.12**2) * (1 - np.cos(np.pi / 8)), rel=1e-6)
    assert rate.verdict == "cannot tell"
    assert time.verdict == "agrees"


@pytest.mark.parametrize("channels", [(), (1,), (2,)])
def test_an_equilibrium_of_an_array(channels: tuple[int, ...]) -> None:
    start = np.random.default_rng(0).normal(size=(8, *channels))
    result = run_study("equilibrium", nodes=8, boundary="periodic", metric="l2", start=start, progress=False)
    assert failures(result) == []
    assert [fit.verdict for fit in result.fits][:2] == ["agrees", "agrees"]


def test_mixing_times_outside_their_bounds_are_told() -> None:
    row = {"lower": 3.5, "upper": 10.2}
    assert [_time("a", {**row, "mixing_time": k}, 0.25).passed for k in (3, 4, 11, 12)] == [False, True, True, False]
    assert _time("a", {"lower": None, "upper": None, "mixing_time": 4}, 0.25).passed is None
    assert _time("a", {"lower": 3.5, "upper": math.inf, "mixing_time": 4}, 0.25).note == ""


def test_a_mixing_time_to_a_small_distance_lies_in_its_bounds() -> None:
    far = Points([0.0, 6.0], [1.0, 1.0])
    result = run_study("mixing", domain=far, kernel="gaussian:width=1", eps=1e-9, start=np.array([1.0, 2.0]))
    assert result.fits[-1].verdict == "agrees"


def test_a_rate_is_not_told_where_another_mode_is_nearly_as_slow() -> None:
    """With -0.1003 a step for the slowest and -0.1052 for the next none rules before rounding."""
    options = {"kernel": "matern:width=1.625,nu=2.5", "nodes": 6, "boundary": "isolated", "laziness": 0.9}
    for seed in range(3):
        fit = run_study("mixing", rng=seed, **options).fits[0]
        assert (fit.verdict, fit.note) == ("cannot tell", "another mode is nearly as slow")


def test_chains_that_do_not_mix() -> None:
    with pytest.raises(InputError, match="reducible"):
        run_study("mixing", kernel=TopHat(0.01))
    swap = Points(np.array([0.0, 1.0]))

    @dataclass(frozen=True)
    class Apart(Bump):
        def log_profile(self, squared: Any) -> Any:
            return np.where(squared > 0.5, 0.0, -np.inf)

    with pytest.raises(InputError, match="period"):
        run_study("mixing", domain=swap, kernel=Apart())


# --- equilibrium -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_diversity_and_rates_of_equilibria() -> None:
    result = run_study("equilibrium", kernel=[Gaussian(0.1), Bump(0.15)], nodes=20, boundary="isolated", channels=2)
    assert [fit for fit in result.fits if fit.passed is False] == []
    assert {row["within"] for row in result.rows} == {True}
    assert all(abs(row["rate_ratio"] - 1) < 1e-3 for row in result.rows)
    assert len(result.rows) == 2 * 2 * 13
    for row in result.rows:
        assert row["low"] <= row["diversity"] <= row["high"]
    wide = run_study("equilibrium", kernel=Gaussian(0.3), nodes=20, metric="degree")
    assert failures(wide) == []
    gap = 1 - np.exp(-2 * (np.pi * 0.3) ** 2)  # by the transfer function of the kernel on the ring
    for row in wide.rows:
        assert abs(row["gap"] - gap) < 1e-6
        assert row["used"] == (row["fidelity"] <= 0.15 * gap)
    result.figure()


@pytest.mark.parametrize(
    ("kind", "options", "symbol"),
    [
        ("stability", {}, r"$\tilde\lambda$"),
        ("equilibrium", {"metric": "degree", "fidelity": [1.0, 2.0, 4.0]}, r"$\tilde\lambda$"),
        ("equilibrium", {"metric": "l2", "fidelity": [1.0, 2.0, 4.0]}, r"$\lambda$"),
        ("equilibrium", {"fidelity": [1.0, 2.0, 4.0]}, r"$\lambda$"),
    ],
)
def test_a_fidelity_in_the_measure_of_degrees_has_its_own_symbol(kind: str, options: Any, symbol: str) -> None:
    result = run_study(kind, nodes=8, boundary="periodic", **options)
    for form in ("markdown", "latex"):
        assert f"{symbol} [1 / time]" in result.table(form)


@pytest.mark.parametrize("width", [0.01, 0.0085])
def test_equilibria_of_nodes_that_almost_fall_into_parts(width: float) -> None:
    fidelity = [1e-3, 1e-2, 1e-1]
    result = run_study(
        "equilibrium", kernel=Gaussian(width), nodes=16, boundary="isolated", fidelity=fidelity, metric="l2"
    )
    assert [fit for fit in result.fits if fit.passed is False] == []
    for row in result.rows:  # the smallest rates of the graph are nothing beside the fidelity
        assert row["rate"] == pytest.approx(row["fidelity"], rel=1e-6)
    x = np.arange(16) / 16
    k = 2 / 16 * np.exp(-((x[:, None] - x) ** 2) / (2 * width**2)) * (1 - np.eye(16))
    gap = np.linalg.eigvalsh(np.diag(k.sum(axis=1)) - k)[1]
    small = gap * np.array([1e-3, 1e-2, 1e-1])
    near = run_study("equilibrium", kernel=Gaussian(width), nodes=16, boundary="isolated", fidelity=small, metric="l2")
    assert [fit for fit in near.fits if fit.passed is False] == []
    for row in near.rows:
        assert np.isnan(row["rate"]) or row["rate"] == pytest.approx(gap + row["fidelity"], rel=1e-3)


def test_too_many_nodes_that_almost_fall_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nlflow.studies.settings.DENSE", 15)
    with pytest.raises(NumericalError, match=r"too long for 16 nodes; use at most 15, or a wider kernel \[in the case"):
        run_study("equilibrium", kernel=Gaussian(0.01), nodes=16, boundary="isolated", metric="l2")


def test_equilibria_of_attention() -> None:
    q, k, v = tokens(25)
    result = run_study("equilibrium", queries=q, keys=k, values=v)
    assert failures(result) == []
    assert {row["metric"] for row in result.rows} == {"degree"}


@pytest.mark.parametrize("apart", [5.5, 8.0])
def test_what_rounding_leaves_of_the_slowest_mode_is_a_signal(apart: float) -> None:
    rng = np.random.default_rng(0)
    queries = 0.3 * rng.normal(size=(12, 2)) + apart * np.repeat([[1, 0], [-1, 0]], 6, axis=0)
    weights = nl.affinity(ExpDotProduct(), Points(np.arange(12.0)), queries + 0.3 * rng.normal(size=(12, 2)))
    assert np.isfinite(_slow(nl.GradientFlow(nl.J(weights)), rng)).all()


def test_a_rate_towards_equilibrium_is_not_told_of_a_mode_that_turns() -> None:
    """Attention to the token a bit further on a circle moves distances about their exponential."""
    angles = 2 * np.pi * np.arange(7) / 7
    keys, queries = (2 * np.column_stack([np.cos(a), np.sin(a)]) for a in (angles, angles + 0.6))
    start = np.column_stack([np.cos(angles) + 1, 0 * angles])
    result = run_study("equilibrium", keys=keys, queries=queries, values=start, fidelity=[0.1, 1.0, 10.0])
    (rate,) = [fit for fit in result.fits if "rate measured" in fit.what]
    assert rate.verdict == "cannot tell"
    assert "that mode turns" in rate.note


def test_no_order_is_told_of_a_gap_that_is_rounding() -> None:
    rng = np.random.default_rng(0)
    keys = 0.3 * rng.normal(size=(12, 2)) + 8 * np.repeat([[1, 0], [-1, 0]], 6, axis=0)
    result = run_study("equilibrium", keys=keys, fidelity=[0.1, 1.0, 10.0])
    assert {fit.verdict for fit in result.fits} == {"agrees", "cannot tell"}
    assert {row["note"] for row in result.rows if row["metric"] == "l2"} == {"the gap is rounding"}


def test_equilibria_of_nothing() -> None:
    with pytest.raises(InputError, match="fidelity: got 0"):
        run_study("equilibrium", fidelity=[0, 1, 2])
    with pytest.raises(InputError, match="start: got a constant signal"):
        run_study("equilibrium", start=np.full(64, 3.0))


# --- stability -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_stable_range_of_neutreno_steps() -> None:
    result = run_study("stability", nodes=20)
    assert failures(result) == []
    limits = dict(zip(["gaussian", "laplace", "tophat"], values(result, "largest stable"), strict=True))
    assert abs(limits["gaussian"] - 1) < 0.005
    assert limits["laplace"] > 1.005
    assert limits["tophat"] < 0.8  # an indefinite kernel
    for row in result.rows:
        assert row["stable"] == row["stable_predicted"]
        assert abs(row["growth"] - row["growth_predicted"]) < 2e-3
    result.figure()


@pytest.mark.slow
def test_the_stable_range_of_attention() -> None:
    q, k, _ = tokens(25, seed=3)
    result = run_study("stability", queries=3 * q, keys=3 * k)
    assert failures(result) == []
    assert result.fits[0].slope < 0.9
    few = run_study("stability", queries=3 * q, keys=3 * k, fidelity=[0.1, result.fits[0].slope - 0.2, 1.4])
    assert "interpolated" in few.fits[0].reason
    assert few.fits[0].low < result.fits[0].slope < few.fits[0].high
    none = run_study("stability", kernel=Gaussian(0.1), nodes=16, fidelity=[0.1, 0.2, 0.3])
    assert "on one side" in none.fits[0].reason


def test_growth_where_two_eigenvalues_compete() -> None:
    """At lambda~ = (1 + mu_min) / 2 two eigenvalues of P - lambda~ are opposite; a rotation has a complex pair."""
    weights = nl.affinity(TopHat(0.1), Grid(20, spacing=1 / 20, boundary="periodic"))
    start = np.random.default_rng(0).normal(size=(20, 2))
    middle = nl.largest_stable_fidelity(weights) / 2
    growth, settled = _growth(nl.AttentionFlow(weights, np.zeros_like(start), middle), start)
    assert settled
    assert abs(growth - (1 - middle)) < 1e-4
    turn = nl.from_matrix(np.roll(np.eye(7), 1, axis=1) + 0.05, Points(np.zeros(7)))
    p = turn.average(np.eye(7))
    start = np.random.default_rng(0).normal(size=(7, 2))
    growth, _ = _growth(nl.AttentionFlow(turn, np.zeros_like(start), 0.8), start)
    assert abs(growth - np.abs(np.linalg.eigvals(p) - 0.8).max()) < 2e-3


# --- options and results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("time", {}, "kind: got 'time', expected one of 'time-order'"),
        ("time-order", {"seeds": 3}, "seeds: the study 'time-order' has no such option; it has kernel"),
        ("time-order", {"dt": [0.1, 0.05]}, "dt: got 2 different"),
        ("time-order", {"dt": [0.1, 0.1, 0.05]}, "dt: got 2 different"),
        ("time-order", {"dt": [0.1, 0.05, 0.0]}, "dt: got 0.0, expected a finite real number > 0"),
        ("time-order", {"dt": [10.0, 5.0, 1.0], "t": 20.0}, "dt: got 10, which is unstable"),
        ("time-order", {"dt": [3.0, 2.0, 1.0], "t": 1.5}, "dt: got 3, expected no step longer"),
        ("time-order", {"t": 1e9}, "t: got 1e[+]09, which takes"),
        ("space-order", {"nodes": [8, 16]}, "nodes: got 2 different"),
        ("space-order", {"kernel": "dot"}, "kernel: got ExpDotProduct, expected a radial kernel"),
        ("space-order", {"start": np.ones(4)}, "start: got an array, expected a function"),
        ("space-order", {"keys": np.ones((4, 2))}, "keys: the study 'space-order' has no such option"),
        ("monte-carlo", {"nodes": 64}, "nodes: got 1 different"),
        ("monte-carlo", {"keys": np.ones((4, 2)), "dimension": 1}, "dimension: got it beside keys"),
        ("equilibrium", {"fidelity": [1.0, 2.0]}, "fidelity: got 2 different"),
        ("stability", {"fidelity": [1.0, 2.0]}, "fidelity: got 2 different"),
        ("mixing", {"eps": 1.0}, "eps: got 1.0, expected a finite real number > 0 and < 1"),
        ("mixing", {"laziness": 1.0}, "laziness: got 1.0, expected a finite real number >= 0 and < 1"),
        ("time-order", {"nodes": []}, "nodes: got an empty list"),
        ("time-order", {"nodes": 2.5}, "nodes: got 2.5, expected an integer"),
        ("time-order", {"dimension": 0}, "dimension: got 0, expected an integer >= 1"),
        ("space-order", {"dimension": [1, 3]}, "dimension: got 3, expected 1 or 2: .* on lines and in planes"),
        ("samples", {"nodes": [8, 16]}, "nodes: got 2 different"),
        ("samples", {"kernel": "gaussian:width=1"}, "expected ExpDotProduct .dot:scale=....* without maps"),
        ("samples", {"channels": 5}, "channels: got 5, expected 4 at most"),
        ("samples", {"kernel": "dot:scale=1", "dimension": [4, 9]}, "logits of size 3 in 9 dimensions"),
        ("monte-carlo", {"dimension": 3}, "dimension: got 3, expected 1 or 2: "),
        ("time-order", {"metric": "l1"}, "metric: got 'l1'"),
        ("time-order", {"boundary": "open"}, "boundary: got 'open'"),
        ("time-order", {"integrator": "leapfrog"}, "integrator: got 'leapfrog'"),
        ("time-order", {"fidelity": -1}, "fidelity: got -1"),
        ("time-order", {"kernel": 3}, "kernel: got int"),
        ("time-order", {"domain": "grid"}, "domain: got str"),
        ("time-order", {"domain": Grid(4), "nodes": 4}, "nodes: got it beside domain"),
        ("time-order", {"keys": np.ones((4, 2)), "boundary": "reflect"}, "boundary: got it beside keys"),
        ("time-order", {"queries": np.ones((4, 2))}, "queries: got an array without keys"),
        ("time-order", {"values": np.ones((4, 2))}, "values: got an array without keys"),
        ("time-order", {"keys": np.ones((4, 2)), "values": np.ones((5, 2))}, "values: got 5 rows, expected 4"),
        ("time-order", {"start": np.ones(64), "channels": 2}, "channels: got them beside start"),
        ("time-order", {"keys": np.ones(4), "values": np.ones(4), "start": np.ones(4)}, "start: got it beside values"),
        ("time-order", {"keys": np.array([[1.0, np.nan]])}, "keys: got 1 NaN"),
        ("time-order", {"rng": -1}, "rng: got -1"),
        ("time-order", {"jobs": 0}, "jobs: got 0"),
        ("time-order", {"jobs": -2}, "jobs: got -2"),
    ],
)  # fmt: skip
def test_wrong_options(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run_study(kind, **options)


@pytest.mark.slow
def test_result_files(tmp_path: Path) -> None:
    result = run_study("time-order", nodes=12, integrator="euler", metric="degree", fidelity=[0, 0.25])
    result.save(tmp_path / "deep" / "folder")
    folder = tmp_path / "deep" / "folder"
    tables = {f"{name}.{ending}" for name in ("table", "fits") for ending in ("csv", "md", "tex")}
    there = {path.name for path in folder.iterdir()}
    assert there == {"figure.pdf", "figure.png", "result.json", "study.toml", *tables}
    with (folder / "table.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["error"]) for row in rows] == [row["error"] for row in result.rows]
    assert list(rows[0]) == list(result.rows[0])
    found = json.loads((folder / "result.json").read_text())
    assert found["rows"] == result.rows
    assert found["fits"][0]["slope"] == result.fits[0].slope
    assert found["options"]["nodes"] == [12]
    assert set(found["provenance"]) == {"versions", "platform", "git", "threads", "device", "seed", "cases"}
    assert (found["provenance"]["seed"], found["provenance"]["device"]) == (0, "cpu")
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_report_says_what_is_shared_once() -> None:
    result = run_study("time-order", nodes=12, integrator="euler", metric="degree", fidelity=[0, 0.25])
    lines = result.report().splitlines()
    assert lines[0].startswith("kernel gaussian:width=0.1, nodes 12")
    assert lines[1].split() == ["fidelity", "t", "dt", "error"]
    (legend,) = (number for number, line in enumerate(lines) if line.startswith("agrees: the interval holds"))
    assert lines[legend - 2].startswith("fidelity=0.25")
    assert lines[legend - 2].endswith("1, to within 0.05  agrees")


@pytest.mark.slow
def test_seeds_change_what_is_drawn_and_generators_are_seeds() -> None:
    options: dict[str, Any] = {"nodes": 12, "integrator": "euler", "metric": "l2", "fidelity": 0}

    def errors(rng: Any) -> list[float]:
        return [row["error"] for row in run_study("time-order", rng=rng, **options).rows]

    assert errors(1) == errors(1) != errors(2)
    assert errors(np.random.default_rng(3)) == errors(np.random.default_rng(3)) != errors(np.random.default_rng(4))
