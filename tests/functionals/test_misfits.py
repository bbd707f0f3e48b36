"""Misfits other than squares, and powers above 2: proximal maps, minimizers with certificates, flows, and refusals."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.optimize import brentq, linprog, minimize, minimize_scalar

import nlflow as nl
from nlflow.errors import InputError, NumericalError, StabilityError
from nlflow.functionals.misfits import Squares
from tests.covering import pairs

pytestmark = pytest.mark.numerical

RNG = np.random.default_rng(5)
N = 7
MATRIX = RNG.random((N, N)) * (RNG.random((N, N)) < 0.7)
W = RNG.uniform(0.5, 1.5, N)
WEIGHTS = nl.from_matrix(MATRIX, nl.Points(np.arange(float(N)), weights=W))
EDGES = W[:, None] * W * (MATRIX + MATRIX.T) * (1 - np.eye(N))  # w_i w_j K_ij
F = RNG.normal(size=N)
COUNTS = np.array([3.0, 0.0, 7.0, 1.0, 0.0, 2.0, 5.0])
LAMBDA = np.where(np.arange(N) == 4, 0.0, RNG.uniform(0.3, 1.0, N))
MISFITS: dict[str, Any] = {"squares": None, "l1": nl.L1(), "huber": nl.Huber(0.3), "kl": nl.KullbackLeibler()}


def plain_misfit(name: str, u: Any, f: Any) -> Any:
    """Return g from its formula."""
    if name == "kl":
        return u - f + np.where(f > 0, f * np.log(np.where(f > 0, f, 1) / u), 0)
    d = np.abs(u - f)
    return {"squares": d**2 / 2, "l1": d, "huber": np.where(d <= 0.3, d**2 / 2, 0.3 * d - 0.045)}[name]


def plain_dirichlet(u: Any, p: float) -> float:
    return float(np.sum(EDGES * np.abs(u[:, None] - u) ** p)) / (2 * p)


def plain_gradient(u: Any, p: float) -> Any:
    d = u[:, None] - u
    return np.sum(EDGES * np.abs(d) ** (p - 1) * np.sign(d), axis=1)


def reference(name: str, f: Any, p: float) -> float:
    """Return the least value, by L-BFGS-B with bounds: |u - f| is v+ + v- with v+, v- >= 0."""
    strength = W * LAMBDA
    if name == "l1":

        def split(x: Any) -> tuple[float, Any]:
            u = f + x[:N] - x[N:]
            slope = plain_gradient(u, p)
            value = plain_dirichlet(u, p) + float(strength @ (x[:N] + x[N:]))
            return value, np.concatenate([slope + strength, strength - slope])

        start, bounds, objective = np.zeros(2 * N), [(0, None)] * (2 * N), split
    else:

        def smooth(u: Any) -> tuple[float, Any]:
            g = {"squares": u - f, "huber": np.clip(u - f, -0.3, 0.3), "kl": 1 - f / u}[name]
            value = plain_dirichlet(u, p) + float(strength @ plain_misfit(name, u, f))
            return value, plain_gradient(u, p) + strength * g

        start, bounds, objective = f + 0.1 * (name == "kl"), [(1e-12 if name == "kl" else None, None)] * N, smooth
    options = {"maxiter": 20_000, "maxfun": 100_000, "ftol": 1e-16, "gtol": 1e-10, "maxcor": 30}
    return float(minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).fun)


@pytest.mark.parametrize("name", MISFITS)
def test_maps_of_one_number(name: str) -> None:
    misfit = MISFITS[name] or Squares()
    for f, v, step in itertools.product((0.0, 0.2, 3.0), (-2.0, 0.1, 0.25, 4.0), (1e-3, 0.5, 10.0)):
        z = float(misfit.prox(np.array(v), np.array(f), step))
        low = 1e-300 if name == "kl" else -10.0

        def objective(x: float, f: float = f, v: float = v, step: float = step) -> float:
            return float(plain_misfit(name, x, np.array(f))) + (x - v) ** 2 / (2 * step)

        found = minimize_scalar(objective, bounds=(low, 10.0), method="bounded", options={"xatol": 1e-12})
        assert objective(max(z, low)) <= found.fun + 1e-12 * (1 + abs(found.fun))
        assert z >= (0 if name == "kl" else -10)
        pull, box = (v - f) / 4, np.array([min(f, 0.0), 5.0])
        best = float(misfit.best(np.array(pull), np.array(f), box))
        assert box[0] <= best <= box[1]
        xs = np.linspace(box[0] + 1e-9, box[1], 4001)
        assert (
            np.max(pull * xs - plain_misfit(name, xs, np.array(f)))
            <= pull * best - float(misfit.value(np.array(best), np.array(f))) + 1e-12
        )
    u = np.array([0.15, 0.5, 2.5, 4.1])
    f, h = np.array([0.0, 0.4, 3.0, 0.2]), 1e-5
    for smoothing in (0.0, 0.1):
        if name == "huber" and smoothing:  # its slope is left as it is
            continue
        values = [misfit.value(u + k * h, f, smoothing) for k in (-1, 0, 1)]
        first, second = misfit.slopes(u, f, smoothing)
        np.testing.assert_allclose((values[2] - values[0]) / (2 * h), first, atol=1e-8)
        np.testing.assert_allclose((values[2] - 2 * values[1] + values[0]) / h**2, second, atol=2e-4)


@pytest.mark.parametrize(
    "p", [pytest.param(1.3, marks=pytest.mark.slow), 2.0, pytest.param(3.0, marks=pytest.mark.slow), 10.0]
)
@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.sampled(2)
def test_minimizers(name: str, p: float) -> None:
    """The value against SciPy's, and the certificate: the least value lies within the gap."""
    f = COUNTS if name == "kl" else F
    for rtol in (1e-3, 1e-6 if p < 2 else 1e-8):
        functional = nl.Ep(WEIGHTS, f, LAMBDA, p, misfit=MISFITS[name])
        found = functional.minimizer(rtol=rtol)
        assert found.success
        least = reference(name, f, p)
        assert found.value == pytest.approx(functional.value(found.u), rel=1e-12)
        plain = plain_dirichlet(found.u, p) + float((W * LAMBDA) @ plain_misfit(name, found.u, f))
        assert found.value == pytest.approx(plain, rel=1e-12)
        slack = 1e-8 * least  # of SciPy's own
        assert (1 - found.gap) * found.value - slack <= least
        assert found.value <= least * (1 + rtol) + slack
        # From elsewhere to the same value.
        again = functional.minimizer(rtol=rtol, start=np.full(N, 0.7))
        assert again.value == pytest.approx(found.value, rel=2 * rtol)


@pytest.mark.parametrize(
    ("name", "p", "isotropic"),
    pairs(list(MISFITS), [1.0, 1.5, 4.0], [False, True]),
)
@pytest.mark.sampled(3)
@pytest.mark.slow
def test_certificates_of_channels(name: str, p: float, isotropic: bool) -> None:
    """With several channels: no neighbour of the minimizer is lower than the certificate allows."""
    f = np.abs(RNG.normal(size=(N, 2))) if name == "kl" else RNG.normal(size=(N, 2))
    functional = nl.Ep(WEIGHTS, f, LAMBDA, p, misfit=MISFITS[name], isotropic=isotropic)
    found = functional.minimizer(rtol=1e-6)
    assert found.success
    lowest = min(
        functional.value(np.maximum(found.u + size * RNG.normal(size=(N, 2)), 1e-12 if name == "kl" else -np.inf))
        for size in (1e-1, 1e-2, 1e-3, 1e-4)
        for _ in range(10)
    )
    assert lowest >= (1 - found.gap) * found.value * (1 - 1e-12)
    moved = nl.Ep(WEIGHTS, 100 * f, LAMBDA * 100 ** (p - (MISFITS[name] or Squares()).degree), p, isotropic=isotropic,
                  misfit=nl.Huber(30.0) if name == "huber" else MISFITS[name]).minimizer(rtol=1e-6)  # fmt: skip
    assert moved.value == pytest.approx(found.value * 100**p, rel=3e-6)
    weights = nl.from_matrix(MATRIX.astype(np.float32), WEIGHTS.domain)
    single = nl.Ep(weights, f.astype(np.float32), LAMBDA, p, misfit=MISFITS[name], isotropic=isotropic).minimizer()
    assert single.u.dtype == np.float32
    assert single.success
    assert single.value == pytest.approx(found.value, rel=3e-4)


@pytest.mark.parametrize("weak", [1.0, 0.2, 1e-6, 1e-25])
def test_total_variation_with_absolute_values_is_a_linear_program(weak: float) -> None:
    """Chan and Esedoglu's model, whose minimum SciPy's simplex method knows."""
    pull = W * LAMBDA
    i, j = np.nonzero(np.triu(EDGES))
    cost = np.concatenate([np.zeros(N), EDGES[i, j] / max(weak, 1e-6), pull])
    incidence = np.zeros((len(i), N))
    incidence[np.arange(len(i)), i], incidence[np.arange(len(i)), j] = 1, -1
    # |D u| <= s and |u - f| <= t.
    zero, one = np.zeros((len(i), N)), np.zeros((N, len(i)))
    upper = np.block([
        [incidence, -np.eye(len(i)), zero], [-incidence, -np.eye(len(i)), zero],
        [np.eye(N), one, -np.eye(N)], [-np.eye(N), one, -np.eye(N)],
    ])  # fmt: skip
    bound = np.concatenate([np.zeros(2 * len(i)), F, -F])
    least = linprog(cost, upper, bound, bounds=(None, None)).fun
    found = nl.Ep(WEIGHTS, F, LAMBDA * weak, 1, misfit=nl.L1()).minimizer(rtol=1e-9)
    assert found.success
    assert (1 - found.gap) * found.value / weak <= least * (1 + 1e-12)
    assert found.value / weak <= least * (1 + 2e-9)


@pytest.mark.parametrize(("name", "isotropic", "dtype"), pairs(list(MISFITS), [False, True], [np.float64, np.float32]))
@pytest.mark.parametrize("weak", [1e-3, 1e-25])
@pytest.mark.sampled(4)
def test_weak_fidelities_leave_constants(name: str, isotropic: bool, dtype: Any, weak: float) -> None:
    """On each part of the graph the best one, found by SciPy."""
    k = np.kron(np.eye(2), np.full((5, 5), 0.5)).astype(dtype)
    strength = np.append(LAMBDA, [0.9, 0.2, 0.5])
    f = np.abs(np.random.default_rng(3).normal(size=(10, 2))).astype(dtype)
    graph = nl.from_matrix(k, nl.Points(np.arange(10.0), weights=np.ones(10)))
    found = nl.Ep(graph, f, strength * weak, 1, misfit=MISFITS[name], isotropic=isotropic).minimizer()
    assert found.success
    assert found.iterations == 0
    total = 0.0
    for part in (slice(0, 5), slice(5, 10)):
        for channel in range(2):
            values = f[part, channel].astype(np.float64)
            best = minimize_scalar(
                lambda c, values=values, part=part: float(strength[part] @ plain_misfit(name, np.full(5, c), values)),
                bounds=(values.min(), values.max()), method="bounded", options={"xatol": 1e-12},
            )  # fmt: skip
            total += best.fun
            np.testing.assert_allclose(found.u[part, channel], best.x, atol=2e-6)
    assert found.value == pytest.approx(weak * total, rel=1e-6 if dtype is np.float32 else 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("p", [1.2, 2.0, 5.0, 10.0])
@pytest.mark.parametrize("size", [1e-60, 1.0, 1e60])
@pytest.mark.sampled(3)
def test_two_nodes(p: float, size: float) -> None:
    """k d^(p-1) = lambda w (a - d) / 2 for squares, and = lambda w for absolute values, d being what is left of a."""
    pair = nl.from_matrix(np.ones((2, 2)), nl.Points([0.0, 1.0], weights=[1.0, 1.0]))  # w_i w_j K_ij = 2
    f = np.array([0.0, size])
    for strength in (1e-3, 1.0, 1e3):
        if abs(np.log10(strength) + (p - 2) * np.log10(size)) < 290:
            fidelity = strength * size ** (p - 2)
            d = brentq(lambda d, c=strength: 2 * d ** (p - 1) - c * (1 - d) / 2, 0, 1, xtol=1e-300, rtol=1e-15)
            found = nl.Ep(pair, f, fidelity, p).minimizer(rtol=1e-12)
            assert (found.u[1] - found.u[0]) / size == pytest.approx(d, abs=3e-6)  # |u - u*|^2 <= 2 gap / lambda
            assert found.u.mean() / size == pytest.approx(0.5, rel=1e-9)
        if abs(np.log10(strength) + p * np.log10(size)) > 290:
            continue
        fidelity = strength * size ** (p - 1)
        d = min((strength / 2) ** (1 / (p - 1)), 1.0)
        found = nl.Ep(pair, f, fidelity, p, misfit=nl.L1()).minimizer(rtol=1e-9)
        assert found.success
        expected = 2 * d**p / p + strength * (1 - d)
        assert found.value == pytest.approx(expected * size**p, rel=3e-9)


def test_absolute_values_take_few_linear_problems() -> None:
    """The dual field beside the signal spares a third of them, and more on larger images."""
    y, x = np.indices((24, 24))
    f = np.sin(x / 5) + np.cos(y / 4)
    f[np.random.default_rng(4).random(f.shape) < 0.15] = 4.0
    weights = nl.affinity(nl.Gaussian(width=1.0), nl.Grid(f.shape), window=1, method="stencil")
    for p in (2.0, 10.0):
        found = nl.Ep(weights, f, 0.5, p, misfit=nl.L1()).minimizer()
        assert found.success
        assert found.iterations <= 36


# ---- flows


def rates(name: str, f: Any, p: float) -> Any:
    def rate(t: float, u: Any) -> Any:
        g = {"squares": u - f, "huber": np.clip(u - f, -0.3, 0.3), "kl": 1 - f / u}[name]
        return -plain_gradient(u, p) / W - LAMBDA * g

    return rate


@pytest.mark.parametrize(
    ("name", "p", "make", "numbers"),
    [
        *(
            (name, p, nl.ForwardBackward, [400, 600, 800])
            for name, p in (("squares", 3.0), ("huber", 2.0), ("kl", 3.0))
        ),
        ("huber", 1.5, nl.LaggedDiffusivity, [50, 100, 200]),
        pytest.param("kl", 1.5, nl.LaggedDiffusivity, [100, 200, 400], marks=pytest.mark.slow),
        ("huber", 2.0, lambda dt: nl.RungeKutta(dt=dt, adaptive=False), None),
        ("kl", 3.0, lambda dt: nl.RungeKutta(dt=dt, adaptive=False), None),
    ],
)
def test_orders_of_flows(name: str, p: float, make: Any, numbers: Any) -> None:
    f = COUNTS + 0.5 if name == "kl" else F
    start = f[::-1] + 0.2
    flow = nl.PFlow(nl.Ep(WEIGHTS, f, LAMBDA, p, misfit=MISFITS[name]))
    end = 0.1 if p == 3.0 else 0.5
    expected = solve_ivp(rates(name, f, p), (0, end), start, method="LSODA", rtol=1e-12, atol=1e-13).y[:, -1]
    if numbers is None:
        found = nl.solve(flow, start, t=end, integrator=nl.RungeKutta(1e-9, 1e-11))
        assert np.abs(found.final - expected).max() < 1e-7
        return
    errors = [np.abs(nl.solve(flow, start, t=end, integrator=make(end / n)).final - expected).max() for n in numbers]
    assert np.polyfit(np.log(numbers), np.log(errors), 1)[0] == pytest.approx(-1.0, abs=0.1)


@pytest.mark.slow
def test_absolute_values_hold_a_signal_that_has_come_to_rest() -> None:
    """Two nodes with f = 0: u' = -2 k u - lambda until u is 0, which takes log(1 + 2 k u_0 / lambda) / (2 k)."""
    pair = nl.from_matrix(np.ones((2, 2)), nl.Points([0.0, 1.0], weights=[1.0, 1.0]))  # u' = -4 u - 1
    flow = nl.PFlow(nl.Ep(pair, np.zeros(2), 1.0, 2, misfit=nl.L1()))
    start, rest = np.array([1.0, -1.0]), np.log(5.0) / 4
    for make in (nl.ForwardBackward, nl.LaggedDiffusivity):
        errors = []
        for n in (100, 200, 400):
            found = nl.solve(flow, start, t=0.9 * rest, integrator=make(0.9 * rest / n)).final
            errors.append(abs(found[0] - (1.25 * np.exp(-3.6 * rest) - 0.25)))
        assert np.polyfit(np.log([100, 200, 400]), np.log(errors), 1)[0] == pytest.approx(-1, abs=0.1)
        assert not nl.solve(flow, start, t=2 * rest, integrator=make(0.01)).final.any()
    with pytest.raises(InputError, match=r"misfit: got L1\(\): the slope of .* jumps"):
        nl.solve(flow, start, t=1.0, integrator=nl.RungeKutta())


@pytest.mark.parametrize("p", [2.0, pytest.param(4.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MISFITS)
def test_energies_fall_to_the_minimum(name: str, p: float) -> None:
    f = COUNTS / 4 if name == "kl" else F
    functional = nl.Ep(WEIGHTS, f, LAMBDA + 1.0, p, misfit=MISFITS[name])
    flow = nl.PFlow(functional)
    start = np.abs(f[::-1]) + 0.3
    step = 0.5 * min(nl.ForwardBackward(1.0).stability_limit(flow), 0.2)
    found = nl.solve(flow, start, t_eval=np.linspace(0, 10, 21), integrator=nl.ForwardBackward(step))
    assert found.success
    assert np.all(np.diff(found.energy) <= 1e-12 * found.energy[0])
    # What is at rest is the minimizer itself; the slowest mode has decayed by exp(-10) at least, but for Huber's
    # function, whose slope beyond delta is 0.3 alone.
    least = functional.minimizer(rtol=1e-9).value
    assert found.energy[-1] == pytest.approx(least, rel=3e-3 if name == "huber" else 1e-4)


def test_what_is_refused() -> None:
    l1 = nl.PFlow(nl.Ep(WEIGHTS, F, 1.0, 1.5, misfit=nl.L1()))
    high = nl.PFlow(nl.Ep(WEIGHTS, F, 1.0, 3.0))
    counts = nl.PFlow(nl.Ep(WEIGHTS, COUNTS, 1.0, 2.0, misfit=nl.KullbackLeibler()))
    quadratic = nl.PFlow(nl.Ep(WEIGHTS, F, 1.0, 2.0, misfit=nl.Huber(1.0)))
    bad: dict[str, Any] = {
        "observed: got -1 somewhere, expected counts >= 0": lambda: nl.Ep(
            WEIGHTS, COUNTS - 1, 1.0, 1.5, misfit=nl.KullbackLeibler()
        ),
        "misfit: got 'l1', expected": lambda: nl.Ep(WEIGHTS, F, 1.0, 1.5, misfit="l1"),  # type: ignore[arg-type]
        "delta: got 0": lambda: nl.Huber(0.0),
        r"p: got 10.1, expected 1 <= p <= 10": lambda: nl.Jp(WEIGHTS, 10.1),
        "ForwardBackward needs p >= 2, got 1.5": lambda: nl.solve(l1, F, t=1, integrator=nl.ForwardBackward(0.1)),
        "LaggedDiffusivity needs p <= 2, got 3": lambda: nl.solve(high, F, t=1, integrator=nl.LaggedDiffusivity(0.1)),
        "ForwardBackward is for a PFlow": lambda: nl.solve(
            nl.GradientFlow(nl.J(WEIGHTS)), F, t=1, integrator=nl.ForwardBackward(0.1)
        ),
        r"start: got values down to -.*, expected values >= 0 for KullbackLeibler\(\)": lambda: nl.solve(
            counts, F, t=1, integrator=nl.ForwardBackward(0.1)
        ),
    }
    for message, call in bad.items():
        with pytest.raises(InputError, match=message):
            call()
    limit = nl.ForwardBackward(1.0).stability_limit(quadratic)
    assert limit == pytest.approx(1 / (EDGES.sum(axis=1) / W).max())
    with pytest.raises(StabilityError, match=f"needs dt < {limit:.6g}"):
        nl.solve(quadratic, F, t=1, integrator=nl.ForwardBackward(1.01 * limit))
    failed = nl.solve(high, 100 * F, t=1, integrator=nl.ForwardBackward(0.1))
    assert not failed.success
    assert "but this signal needs dt <=" in failed.message
    with pytest.raises(NumericalError, match="value: the divergence of a signal that is not above 0"):
        nl.Ep(WEIGHTS, COUNTS, 1.0, 2.0, misfit=nl.KullbackLeibler()).value(COUNTS - 1)
    with pytest.raises(NumericalError, match="has no slope where"):
        nl.Ep(WEIGHTS, COUNTS, 1.0, 2.0, misfit=nl.KullbackLeibler()).gradient(0 * COUNTS)
    with pytest.raises(NumericalError, match="gradient: the powers"):
        nl.Jp(WEIGHTS, 10.0).gradient(1e60 * F)
