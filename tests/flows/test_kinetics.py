"""Reactions of time, places, several channels and averages: against formulas written out here, and SciPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp

import nlflow as nl
from nlflow.errors import InputError
from nlflow.testing import check_integrator
from tests.problems import Floats, torch_on_one_thread

pytestmark = pytest.mark.numerical

N = 16
GRID = nl.Grid(N, spacing=0.5, boundary="isolated")
X = GRID.nodes[:, 0]
WEIGHTS = nl.affinity(nl.Gaussian(1.0), GRID, method="dense")
CROWD = nl.affinity(nl.Gaussian(2.0), GRID, method="dense")


def averages(width: float) -> Floats:
    k = np.exp(-((X[:, None] - X) ** 2) / (2 * width**2))
    return np.asarray(k / k.sum(axis=1, keepdims=True))


P, AROUND = averages(1.0), averages(2.0)
RIGHT: dict[str, tuple[Callable[[], Any], Callable[[Floats], Floats], tuple[float, float]]] = {
    "GrayScott": (
        lambda: nl.GrayScott(0.05, 0.06),
        lambda u: np.array([-u[0] * u[1] ** 2 + 0.05 * (1 - u[0]), u[0] * u[1] ** 2 - 0.11 * u[1]]),
        (0.2, 0.8),
    ),
    "FitzHughNagumo": (
        lambda: nl.FitzHughNagumo(current=0.5),
        lambda u: np.array([u[0] - u[0] ** 3 / 3 - u[1] + 0.5, 0.08 * (u[0] + 0.7 - 0.8 * u[1])]),
        (-1.0, 1.0),
    ),
    "Brusselator": (
        lambda: nl.Brusselator(1.2, 2.5),
        lambda u: np.array([1.2 - 3.5 * u[0] + u[0] ** 2 * u[1], 2.5 * u[0] - u[0] ** 2 * u[1]]),
        (0.5, 2.0),
    ),
    "PredatorPrey": (
        lambda: nl.PredatorPrey(CROWD, growth=1.5, mortality=0.4),
        lambda u: np.array([
            1.5 * u[0] * (1 - AROUND @ u[0]) - u[0] * u[1] / (u[0] + 0.3), u[0] * u[1] / (u[0] + 0.3) - 0.4 * u[1],
        ]),
        (0.2, 1.2),
    ),
    "PredatorPrey, local": (
        lambda: nl.PredatorPrey(),
        lambda u: np.array([u[0] * (1 - u[0]) - u[0] * u[1] / (u[0] + 0.3), u[0] * u[1] / (u[0] + 0.3) - 0.5 * u[1]]),
        (0.2, 1.2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_ready_made(name: str) -> None:
    make, rate, (low, high) = RIGHT[name]
    flow = nl.flows.SystemFlow(nl.J(WEIGHTS), [1.0, 0.2], reaction=make())
    start = np.random.default_rng(0).uniform(low, high, (N, 2))

    def speed(t: float, y: Floats) -> Floats:
        u = y.reshape(2, N)
        return np.asarray((np.array([[1.0], [0.2]]) * (u @ P.T - u) + rate(u)).ravel())

    exact = solve_ivp(speed, (0, 1), start.T.ravel(), method="DOP853", rtol=1e-12, atol=1e-13).y[:, -1]
    found = nl.solve(flow, start, t=1.0, integrator=nl.RungeKutta(1e-10, 1e-12))
    assert found.final.T.ravel() == pytest.approx(exact, abs=1e-8)
    v = np.random.default_rng(1).standard_normal((N, 2))
    h = 1e-6
    along = (speed(0, (start + h * v).T.ravel()) - speed(0, (start - h * v).T.ravel())) / (2 * h)
    assert flow.jacobian(start, v).T.ravel() == pytest.approx(along, rel=1e-7, abs=1e-8)


def test_bounds_are_the_largest_slopes() -> None:
    """Where they are largest, at a corner of the box."""
    assert nl.GrayScott(0.05, 0.06).bound == pytest.approx(np.linalg.norm([[-1.05, -2], [1, 1.89]], 2))
    assert nl.FitzHughNagumo().bound == pytest.approx(np.linalg.norm([[-8, -1], [0.08, -0.064]], 2))
    assert nl.Brusselator(1.0, 3.0).bound == pytest.approx(np.linalg.norm([[124, 64], [-125, -64]], 2))


def test_time_places_and_averages() -> None:
    """du/dt = Pu - u + (1 + sin 2t) u (1 - x / 8) - u Qu, one channel; also as a sum, with a derivative in part."""

    def growth(t: float, x: Any, u: Any) -> Any:
        return (1 + np.sin(2 * t)) * u * (1 - x[..., 0] / 8)

    seen = nl.Reaction(
        lambda u, w: -u * w, (0, 4), derivative=lambda u, w: np.stack([-w, -u], axis=-1), average=CROWD, name="crowd"
    )
    place = nl.Reaction(growth, (0, 4), bound=2.0)
    both = nl.Reaction(lambda t, x, u, w: growth(t, x, u) - u * w, (0, 4), bound=16.0, average=CROWD)
    start = 0.5 + 0.3 * np.cos(X)

    def speed(t: float, u: Floats) -> Floats:
        return np.asarray(P @ u - u + (1 + np.sin(2 * t)) * u * (1 - X / 8) - u * (AROUND @ u))

    exact = solve_ivp(speed, (0, 2), start, method="DOP853", rtol=1e-12, atol=1e-13).y[:, -1]
    plain = nl.GradientFlow(nl.J(WEIGHTS), "degree")
    for flow in (plain + both, plain + place + seen, nl.GradientFlow(nl.J(WEIGHTS), "degree", reaction=seen + place)):
        assert flow.timed
        found = nl.solve(flow, start, t=2.0, integrator=nl.RungeKutta(1e-10, 1e-12))
        assert found.final == pytest.approx(exact, abs=1e-8)
        v, now, h = np.sin(X), flow.when(0.7), 1e-6
        along = (speed(0.7, start + h * v) - speed(0.7, start - h * v)) / (2 * h)
        assert now.jacobian(start, v) == pytest.approx(along, abs=1e-7)
        errors = [
            np.abs(nl.solve(flow, start, t=2.0, integrator=nl.ETD4RK(2 / n)).final - exact).max() for n in (40, 80)
        ]
        assert math.log2(errors[0] / errors[1]) == pytest.approx(4, abs=0.1)
    # Two averages for each velocity: of the linear part and of the reaction.
    counted = nl.solve(plain + both, start, t=2.0, integrator=nl.ExplicitEuler(0.1))
    assert counted.stats["applications"] == 40
    assert seen.bound == pytest.approx(8.0)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_coordinates_broadcast_with_channels(kind: str) -> None:
    """Channels of signals move as alone, also where there are as many as nodes: function, derivative and potential."""
    for shape, channels in (((4, 5), 3), ((4,), 4)):
        grid = nl.Grid(shape)
        start = np.random.default_rng(1).random((*shape, channels))
        domain: nl.Grid | nl.Points = grid
        make: Callable[[Any], Any] = np.asarray
        weights = nl.affinity(nl.Gaussian(1.0), grid)
        if kind == "torch":
            torch = torch_on_one_thread()
            make, start = torch.asarray, start.reshape(-1, channels)
            domain = nl.Points(grid.nodes)
            weights = nl.affinity(nl.Gaussian(1.0), domain, make(grid.nodes))
        half = nl.Reaction(
            lambda t, x, u: -x[..., 0] * u,
            (0, 1),
            bound=4.0,
            derivative=lambda t, x, u: -x[..., 0] + 0 * u,
            potential=lambda t, x, u: x[..., 0] * u**2 / 2,
        )
        flow = nl.GradientFlow(nl.J(weights), "degree", reaction=half)
        plain = nl.GradientFlow(nl.J(weights), "degree")
        place = grid.nodes[:, 0].reshape(start.shape[:-1])[..., None]
        u = make(start)
        added = np.asarray(flow.velocity(u)) - np.asarray(plain.velocity(u))
        assert added == pytest.approx(-place * start, abs=1e-14)
        assert np.asarray(flow.jacobian(u, u)) - np.asarray(plain.jacobian(u, u)) == pytest.approx(added, abs=1e-14)
        energy = half.on(weights).potential
        assert energy is not None
        assert np.asarray(energy(u)) == pytest.approx(place * start**2 / 2, abs=1e-14)


def test_functions_that_fail_are_named() -> None:
    """The argument, and what it was given, with the words of the error."""
    weights = nl.affinity(nl.Gaussian(1.0), nl.Grid((4, 5)))
    given = r"for x of shape \(128, 2\) and u of shape \(128,\)"
    bad: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: nl.Reaction(lambda t, x, u: -x[:, :, 0] * u, (0, 1), bound=3.0),
            rf"^function: that of <lambda>\(0, 1\) fails {given} \(too many indices.*; write x\[..., 0\]",
        ),
        (
            lambda: nl.Reaction(lambda t, x, u: -x * u, (0, 1), bound=3.0),
            rf"^function: that of .* fails {given} \(operands could not be broadcast",
        ),
        (
            lambda: nl.Reaction(lambda t, x, u: -u, (0, 1), bound=3.0, derivative=lambda u: -1 + 0 * u),
            rf"^derivative: that of .* fails {given} \(.*takes 1 positional",
        ),
        (
            lambda: nl.Reaction(lambda t, x, u: -u, (0, 1), bound=3.0, potential=lambda t, x, u: u[:, 0]),
            rf"^potential: that of .* fails {given}",
        ),
    ]
    for make, message in bad:
        with pytest.raises(InputError, match=message):
            nl.GradientFlow(nl.J(weights), reaction=make())
    with pytest.raises(InputError, match=r"^function: that of .* fails for u of shape \(128,\)"):
        nl.Reaction(lambda u: u @ np.ones(3), (0, 1), bound=3.0)


def test_checkpoints_tell_averages_and_times_apart(tmp_path: Any) -> None:
    def flow(width: float, rate: float) -> Any:
        crowd = nl.from_matrix(np.exp(-((X[:, None] - X) ** 2) / (2 * width**2)), GRID)
        return nl.GradientFlow(nl.J(WEIGHTS), "degree") + nl.Reaction(
            lambda t, u, w: np.cos(rate * t) * u * (1 - w), (0, 4), bound=9, average=crowd, name="r"
        )

    options: dict[str, Any] = {"t_eval": [0.0, 0.5, 1.0], "integrator": nl.ETD2RK(0.1)}
    path, start = tmp_path / "run.npz", 0.5 + 0.3 * np.cos(X)
    stop = nl.Callback(lambda t, u, flow: t >= 0.5)
    nl.solve(flow(2.0, 1.0), start, trackers=[nl.Checkpoint(path, every=1), stop], **options)
    whole = nl.solve(flow(2.0, 1.0), start, **options).final
    assert np.array_equal(nl.solve(flow(2.0, 1.0), start, resume=path, **options).final, whole)
    for other in (flow(2.1, 1.0), flow(2.0, 1.1)):
        with pytest.raises(nl.FileFormatError, match="another problem"):
            nl.solve(other, start, resume=path, **options)


SPLITTINGS = {"Lie": nl.Lie, "Strang": nl.Strang}


@pytest.mark.parametrize("name", SPLITTINGS)
def test_orders_of_splittings(name: str) -> None:
    make, rate = SPLITTINGS[name], RIGHT["Brusselator"][1]
    start = np.random.default_rng(0).uniform(0.5, 2.0, (N, 2))
    flow = nl.flows.SystemFlow(nl.J(WEIGHTS), [1.0, 0.2], reaction=nl.Brusselator(1.2, 2.5))
    flow = flow + nl.Source(lambda t: np.sin(3 * t) * start)

    def speed(t: float, y: Floats) -> Floats:
        u = y.reshape(2, N)
        moved = np.array([[1.0], [0.2]]) * (u @ P.T - u) + rate(u) + np.sin(3 * t) * start.T
        return np.asarray(moved.ravel())

    exact = solve_ivp(speed, (0, 1), start.T.ravel(), method="DOP853", rtol=1e-12, atol=1e-13).y[:, -1]
    errors = [
        np.abs(nl.solve(flow, start, t=1.0, integrator=make(1 / n)).final.T.ravel() - exact).max() for n in (64, 128)
    ]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(make(1.0).order, abs=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPLITTINGS)
def test_splittings_keep_their_promises(name: str) -> None:
    check_integrator(SPLITTINGS[name](0.1))


def turning(u: Any) -> Any:
    return np.stack([-u[..., 1], u[..., 0] ** 2], axis=-1)


def slopes(u: Any) -> Any:
    zero = 0 * u[..., 0]
    return np.stack([np.stack([zero, zero - 1], -1), np.stack([2 * u[..., 0], zero], -1)], -2)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "jacobian": (
        lambda: nl.Reaction(turning, (-1, 1), derivative=lambda u: slopes(u).swapaxes(-1, -2), components=2),
        r"derivative: it disagrees with the function of turning\(-1, 1\): at u = .*, .* in entry \(0, 1\), expected",
    ),
    "shape of the jacobian": (
        lambda: nl.Reaction(turning, (-1, 1), derivative=lambda u: 0 * u, components=2),
        r"derivative: turning\(-1, 1\) returns shape \(128, 2\), expected shape \(128, 2, 2\)",
    ),
    "too few components": (lambda: nl.Reaction(turning, (-1, 1), bound=9, components=3), r"shape \(128, 2\), expected"),
    "intervals": (lambda: nl.Reaction(turning, ((0, 1),) * 3, bound=9, components=2), r"interval: got shape \(3, 2\)"),
    "an interval": (lambda: nl.Reaction(turning, ((0, 1), (1, 0)), bound=9, components=2), "expected low < high"),
    "arguments": (
        lambda: nl.Reaction(lambda a, b, c, d: a, (0, 1), bound=1),
        r"function: got a callable of 4 arguments, expected one of u, of \(t, u\) or of \(t, x, u\)",
    ),
    "no averages": (lambda: nl.Reaction(lambda u: u, (0, 1), bound=1, average=CROWD), "callable of 1 argument"),
    "average": (lambda: nl.Reaction(lambda u, w: u, (0, 1), bound=1, average=P), "average: got ndarray"),  # type: ignore[arg-type]
    "time without bound": (
        lambda: nl.Reaction(lambda t, u: t * u, (0, 1), derivative=lambda t, u: t + 0 * u),
        "bound: got none for a reaction that depends on t",
    ),
    "potential": (
        lambda: nl.Reaction(turning, (0, 1), bound=9, components=2, potential=turning),
        "potential: got one for a reaction that is not pointwise",
    ),
    "bound": (lambda: nl.Reaction(turning, (-1, 1), bound=1.5, components=2), "bound: got 1.5, but turning.* slope of"),
    "places": (
        lambda: nl.GradientFlow(nl.J(WEIGHTS)) + nl.Reaction(lambda t, x, u: u * x[..., 0], (0, 1), bound=1),
        r"bound: got 1, but <lambda>\(0, 1\) has a slope of 7.75 on its interval",
    ),
    "domain": (
        lambda: nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Grid(5)))) + nl.PredatorPrey(CROWD),
        r"reaction: the average of PredatorPrey.* is on nodes of shape \(16,\), expected \(5,\)",
    ),
    "start": (
        lambda: nl.solve(nl.flows.SystemFlow(nl.J(WEIGHTS), [1, 1], reaction=nl.GrayScott(interval=((0, 2), (0, 1)))),
                         np.stack([1.5 + 0 * X, 1.5 + 0 * X], axis=-1), t=1.0),
        r"start: got values from 1.5 to 1.5, expected them in \[\[0.0, 2.0\], \[0.0, 1.0\]\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_reactions(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(InputError, match=message):
        make()
