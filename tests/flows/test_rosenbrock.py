"""The linearly implicit step: its order for each kind of flow, and stiff problems against SciPy's implicit methods."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.linalg import expm

import nlflow as nl
from nlflow.affinities import Unlinked
from nlflow.errors import InputError
from nlflow.testing import check_integrator
from tests.problems import Floats

pytestmark = pytest.mark.numerical

N = 12
X = np.linspace(0, 1, N)
WEIGHTS = nl.affinity(nl.Gaussian(0.2), nl.Points(X))
PERIODIC = nl.affinity(nl.Gaussian(2.0), nl.Grid(N, boundary="periodic"))
START = 0.4 + 0.5 * np.cos(5 * X**2)


def van_der_pol(m: float) -> Any:
    """Return the flow of x' = v, v' = m (1 - x^2) v - x at two nodes, in time of length m."""

    def function(u: Any) -> Any:
        x, v = u[..., 0], u[..., 1]
        return np.stack([m * v, m * (m * (1 - x * x) * v - x)], axis=-1)

    def derivative(u: Any) -> Any:
        x, v = u[..., 0], u[..., 1]
        rows = [[0 * x, m + 0 * x], [m * (-2 * m * x * v - 1), m * m * (1 - x * x)]]
        return np.stack([np.stack(row, axis=-1) for row in rows], axis=-2)

    term = nl.Reaction(function, ((-3, 3), (-2, 2)), derivative=derivative, components=2)
    return nl.GradientFlow(nl.J(Unlinked(nl.Points([0.0, 1.0]))), "degree", reaction=term)


def wave(t: float) -> Floats:
    return np.sin(3 * t) * np.cos(3 * X)


def ends(t: float) -> Floats:
    return np.array([np.sin(2 * t), np.cos(3 * t)])


FEATURES = nl.affinity(nl.Gaussian(1.2), nl.Points(X), START[:, None])
EVOLVING = nl.AttentionFlow(FEATURES, evolving=True)
HELD = nl.Constraint(np.array([0, N - 1]), ends)
WINDOW = nl.affinity(nl.Gaussian(1.0), nl.Grid(N), window=3)
DRIVEN: dict[str, Any] = {"reaction": nl.AllenCahn(2.0, interval=(-2, 2)), "source": wave}
NERVE = nl.FitzHughNagumo(current=0.5)
FLOWS: dict[str, tuple[Any, Floats, tuple[int, int]]] = {  # and numbers of steps to t = 1
    "oscillator": (van_der_pol(1.0), np.array([[1.0, 0.5], [0.5, -0.5]]), (12, 18)),
    "source": (nl.GradientFlow(nl.J(WEIGHTS), "degree", **DRIVEN), START, (54, 80)),
    "system": (
        nl.flows.SystemFlow(nl.J(PERIODIC), [1.0, 20.0], reaction=NERVE),
        np.stack([START, 0.5 - START], -1),
        (18, 27),
    ),
    "p-flow": (nl.PFlow(nl.Jp(WINDOW, p=3.0)), START, (12, 18)),
    "evolving": (EVOLVING, 2 * START, (68, 100)),
    "values": (
        nl.GradientFlow(nl.J(WEIGHTS), reaction=nl.FisherKPP(interval=(-2, 2)), constraint=HELD),
        START,
        (16, 24),
    ),
}
SLOW = ("source", "evolving", "values", "system")


def exact(flow: Any, u: Floats, t: float, method: str = "DOP853", rtol: float = 1e-13) -> Floats:
    def speed(t: float, y: Floats) -> Floats:
        return np.asarray(flow.when(t).velocity(y.reshape(u.shape))).ravel()

    start = flow.held(u)
    found = solve_ivp(speed, (0, t), start.ravel(), method=method, rtol=rtol, atol=1e-2 * rtol).y[:, -1]
    return np.asarray(flow.when(t).held(found.reshape(u.shape)))


@pytest.mark.parametrize("name", [pytest.param(k, marks=pytest.mark.slow if k in SLOW else ()) for k in FLOWS])
def test_orders(name: str) -> None:
    flow, u, numbers = FLOWS[name]
    reference, errors = exact(flow, u, 1.0), []
    for n in numbers:
        found = nl.solve(flow, u, t=1.0, integrator=nl.Rosenbrock(dt=1 / n, adaptive=False), energies=False)
        assert found.success, found.message
        errors.append(float(np.abs(found.final - reference).max()))
    order = math.log(errors[0] / errors[1]) / math.log(numbers[1] / numbers[0])
    assert order == pytest.approx(4.0, abs=0.1), errors


@pytest.mark.slow
def test_a_stiff_oscillator() -> None:
    """Slow motion, jumps and slow motion of van der Pol's equation with m = 1000, to the tolerance."""
    flow, u = van_der_pol(1000.0), np.array([[2.0, 0.0], [1.5, 0.0]])
    reference = exact(flow, u, 1.0, "Radau", 1e-9)
    found = nl.solve(flow, u, t=1.0, integrator=nl.Rosenbrock(1e-4, 1e-7))
    assert found.success, found.message
    assert found.stats["steps"] < 500
    assert np.abs(found.final - reference)[:, 0].max() < 1e-4
    explicit = nl.solve(flow, u, t=1e-3, integrator=nl.RungeKutta(1e-4, 1e-7))
    assert explicit.stats["steps"] > 500  # a thousandth of the way


@pytest.mark.slow
def test_what_decays_is_gone_after_a_long_step() -> None:
    """The linear flow with rates from 0 to 10^6, of a kernel on points: no transform helps."""
    flow = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(0.2, amplitude=1e5), nl.Points(X))))
    found = nl.solve(flow, START, t=1.0, integrator=nl.Rosenbrock(dt=0.5, adaptive=False))
    assert found.success, found.message
    assert np.abs(found.final - START.mean()).max() < 1e-6
    matrix = np.stack([flow.linear(e) for e in np.eye(N)], axis=1)
    adaptive = nl.solve(flow, START, t=1e-4, integrator=nl.Rosenbrock(1e-8, 1e-10)).final
    assert adaptive == pytest.approx(expm(-1e-4 * matrix) @ START, abs=1e-7)


def test_p_below_2_by_steps_that_follow_their_error() -> None:
    """The flow of p = 1.5, whose diffusivity has no bound where neighbours are alike."""
    flow = nl.PFlow(nl.Jp(nl.affinity(nl.Gaussian(1.0), nl.Grid(N), window=2), p=1.5))
    reference = exact(flow, START, 0.2, "RK45", 1e-9)
    found = nl.solve(flow, START, t=0.2, integrator=nl.Rosenbrock(1e-5, 1e-7))
    assert found.success, found.message
    assert np.abs(found.final - reference).max() < 1e-3
    assert found.final.mean() == pytest.approx(START.mean(), abs=1e-9)


@pytest.mark.slow
def test_transforms_precondition() -> None:
    """With rates of 10^6 a few iterations a stage are enough; at once means are left, which react by themselves."""
    flow = nl.flows.SystemFlow(nl.J(PERIODIC), [1e6, 1e5], reaction=nl.Brusselator(1.2, 2.5))
    start = np.stack([1 + START, 1.5 - START], axis=-1)
    found = nl.solve(flow, start, t=1.0, integrator=nl.Rosenbrock(1e-6, 1e-8))
    assert found.success, found.message

    def reacts(t: float, u: Floats) -> Floats:
        return np.array([1.2 - 3.5 * u[0] + u[0] ** 2 * u[1], 2.5 * u[0] - u[0] ** 2 * u[1]])

    means = solve_ivp(reacts, (0, 1), start.mean(axis=0), method="DOP853", rtol=1e-12, atol=1e-13).y[:, -1]
    assert found.final == pytest.approx(np.broadcast_to(means, (N, 2)), abs=5e-5)
    tried = found.stats["steps"] + found.stats["rejected"]
    assert found.stats["applications"] < 35 * tried  # 26; 51 with another shift


@pytest.mark.slow
def test_promises() -> None:
    check_integrator(nl.Rosenbrock())
    check_integrator(nl.Rosenbrock(dt=0.1, adaptive=False))


def test_float32_and_refusals() -> None:
    found = nl.solve(
        FLOWS["system"][0], FLOWS["system"][1].astype(np.float32), t=0.5, integrator=nl.Rosenbrock(1e-4, 1e-5)
    )
    assert found.success, found.message
    assert found.final.dtype == np.float32
    with pytest.raises(InputError, match="dt: needed when adaptive=False"):
        nl.Rosenbrock(adaptive=False)
    with pytest.raises(InputError, match="rtol: got 0 with atol 0"):
        nl.Rosenbrock(0.0, 0.0)
