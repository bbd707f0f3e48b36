"""Events against moments that are known: of modes that decay, of an oscillator, of a ball that bounces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.affinities import Unlinked
from nlflow.errors import InputError
from tests.problems import Floats

pytestmark = pytest.mark.numerical

N = 16
WEIGHTS = nl.affinity(nl.Gaussian(2.0), nl.Grid(N, boundary="periodic"))
MODE = np.cos(2 * np.pi * np.arange(N) / N)
FLOW = nl.GradientFlow(nl.J(WEIGHTS), "degree")
RATE = float((MODE @ FLOW.linear(MODE)) / (MODE @ MODE))
HALF = math.log(2) / RATE  # when the mode has half of its size

ONE = nl.J(Unlinked(nl.Points([0.0])))


def turning(u: Any) -> Any:
    return np.stack([u[..., 1], -u[..., 0]], axis=-1)


def falling(u: Any) -> Any:
    return np.stack([u[..., 1], 0 * u[..., 1] - 1], axis=-1)


OSCILLATOR = nl.GradientFlow(ONE, "degree", reaction=nl.Reaction(turning, (-2, 2), components=2, bound=1))
BALL = nl.GradientFlow(ONE, "degree", reaction=nl.Reaction(falling, (-9, 9), components=2, bound=1))


def size(t: float, u: Any) -> float:
    return float(u[0]) - 0.5


EXACT: dict[str, Any] = {
    "Exponential": nl.Exponential(),
    "ETD4RK": nl.ETD4RK(0.7),
    "RungeKutta": nl.RungeKutta(1e-12, 1e-14),
}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("tol", [1e-3, 1e-11])
def test_moments_to_a_tolerance(name: str, tol: float) -> None:
    event = nl.Event(size, tol=tol, signals=True, action="stop")
    found = nl.solve(FLOW, MODE, t=5 * HALF, integrator=EXACT[name], trackers=[event])
    t = found.records["event"]["t"]
    assert t == pytest.approx([HALF], abs=tol + 2e-11)
    assert found.t[-1] == t[0] >= HALF - 2e-11  # just after it
    assert found.status is nl.Status.STOPPED
    assert found.success
    assert "event 'event' at t=" in found.message
    assert found.records["event"]["u"][0] == pytest.approx(MODE * math.exp(-RATE * t[0]), abs=1e-10)
    assert np.array_equal(found.records["event"]["u"][0], found.final)


@pytest.mark.parametrize(("make", "numbers"), [(nl.IMEX, (20, 40)), (nl.ExplicitEuler, (100, 200)), (nl.ETD2RK, None)])
def test_moments_have_the_order_of_the_method(make: Any, numbers: Any) -> None:
    if numbers is None:  # with a reaction, against tight tolerances
        flow, numbers, end = nl.GradientFlow(nl.J(WEIGHTS), "degree", reaction=nl.AllenCahn(0.2)), (20, 40), 8 * HALF
    else:
        flow, end = FLOW, 2 * HALF
    moments = []
    for integrator in (nl.RungeKutta(1e-12, 1e-14), *(make(end / n / 1.013) for n in numbers)):
        found = nl.solve(flow, 0.9 * MODE, t=end, integrator=integrator, trackers=[nl.Event(size)])
        assert found.success
        assert found.t[-1] == end
        moments.append(float(found.records["event"]["t"][0]))
    errors = np.abs(np.array(moments[1:]) - moments[0])
    assert math.log2(errors[0] / errors[1]) == pytest.approx(make(1.0).order, abs=0.15)


@pytest.mark.parametrize("direction", [0, 1, -1])
@pytest.mark.sampled(3)
@pytest.mark.slow
def test_directions_and_a_start_at_0(direction: int) -> None:
    """sin t is 0 at the start, which is no event, and then at pi, 2 pi, ..."""
    event = nl.Event(lambda t, u: u[0, 0], direction=direction, name="zero")
    found = nl.solve(
        OSCILLATOR, np.array([[0.0, 1.0]]), t=10.0, trackers=[event], integrator=nl.RungeKutta(1e-11, 1e-13)
    )
    expected = np.pi * np.array([1, 2, 3])
    expected = expected if direction == 0 else expected[1::2] if direction == 1 else expected[::2]
    assert found.records["zero"]["t"] == pytest.approx(expected, abs=1e-8)
    assert found.final == pytest.approx(np.array([[np.sin(10), np.cos(10)]]), abs=1e-8)


def test_several_events_and_a_section_of_time() -> None:
    """The first of those in one step counts first; g may be of time alone."""
    events = [nl.Event(lambda t, u, at=at: t - at, name=name) for name, at in (("b", 1.25), ("a", 1.2), ("c", 3.0))]
    found = nl.solve(FLOW, MODE, t=4.0, integrator=nl.Exponential(), trackers=events)
    moments = [found.records[name]["t"] for name in "abc"]
    assert np.concatenate(moments) == pytest.approx([1.2, 1.25, 3.0], abs=1e-9)
    assert found.stats["steps"] == 4


def test_events_at_one_moment_happen_all_of_them() -> None:
    """The resets last: others have the signal before."""
    half = lambda t, u: u[0] - 0.5  # noqa: E731
    reset = nl.Event(half, action=lambda t, u: 3 * u, name="reset")
    events = [reset, nl.Event(half, name="both", signals=True), nl.Event(half, direction=-1, name="falls")]
    found = nl.solve(FLOW, MODE, t=1.5 * HALF, integrator=nl.Exponential(), trackers=events)
    for name in ("reset", "both", "falls"):
        assert found.records[name]["t"] == pytest.approx([HALF], abs=1e-9), name
    assert found.records["both"]["u"][0, 0] == pytest.approx(0.5)
    assert found.final[0] == pytest.approx(1.5 * 0.5**0.5)


@pytest.mark.parametrize("integrator", [nl.RungeKutta(), nl.RungeKutta(dt=0.3, adaptive=False), None])
def test_a_ball_that_loses_speed(integrator: Any) -> None:
    """From the ground with speed 1, keeping 0.8 of it: it comes down at 2, 2 + 1.6, 2 + 1.6 + 1.28, ..."""
    ground = nl.Event(lambda t, u: u[0, 0], direction=-1, action=lambda t, u: np.array([[0.0, -0.8 * u[0, 1]]]))
    found = nl.solve(BALL, np.array([[0.0, 1.0]]), t=6.0, integrator=integrator, trackers=[ground])
    assert found.records["event"]["t"] == pytest.approx(np.cumsum(2 * 0.8 ** np.arange(4)), abs=1e-8)
    assert found.success
    last = found.t[-1] - found.records["event"]["t"][-1]
    assert found.final[0, 0] == pytest.approx(0.8**4 * last - last**2 / 2, abs=1e-8)


def test_resets_without_end_are_told() -> None:
    ground = nl.Event(lambda t, u: u[0, 0], direction=-1, action=lambda t, u: np.array([[0.0, -0.1 * u[0, 1]]]))
    found = nl.solve(BALL, np.array([[0.0, 1.0]]), t=9.0, trackers=[ground])  # comes to rest at t = 2 / 0.9
    assert not found.success
    assert "resets follow each other without end" in found.message
    assert found.t[-1] == pytest.approx(2 / 0.9, abs=1e-6)


@pytest.mark.slow
def test_kernels_that_follow_the_signal() -> None:
    features = np.random.default_rng(0).standard_normal((12, 2))
    weights = nl.affinity(nl.Gaussian(1.0), nl.Points(np.arange(12.0)), features)
    flow = nl.AttentionFlow(weights, evolving=True)
    spread = lambda t, u: float(np.ptp(u)) - 1.0  # noqa: E731
    tight = nl.RungeKutta(1e-11, 1e-13)
    found = nl.solve(flow, features, t=10.0, integrator=tight, trackers=[nl.Event(spread, action="stop")])
    again = nl.solve(flow, features, t=float(found.t[-1]), integrator=tight)
    assert np.ptp(again.final) == pytest.approx(1.0, abs=1e-8)
    assert found.final == pytest.approx(again.final, abs=1e-9)


def test_resumed_runs_have_the_same_bits(tmp_path: Any) -> None:
    path = tmp_path / "run.npz"

    def run(**options: Any) -> Any:
        event = nl.Event(lambda t, u: u[0, 0], signals=True)
        more = options.pop("trackers", [])
        return nl.solve(
            OSCILLATOR,
            np.array([[0.0, 1.0]]),
            t_eval=[0, 4, 10],
            integrator=nl.RungeKutta(),
            trackers=[event, *more],
            **options,
        )

    stop = nl.Callback(lambda t, u, flow: t >= 4)
    run(trackers=[nl.Checkpoint(path, every=1), stop])
    whole, again = run(), run(resume=path)
    assert np.array_equal(whole.final, again.final)
    for key in ("t", "u"):
        assert np.array_equal(whole.records["event"][key], again.records["event"][key])


def start(event: Any, flow: Any = FLOW, u: Floats = MODE, **options: Any) -> Any:
    return nl.solve(flow, u, t=3.0, trackers=[event], **options)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "function": (lambda: nl.Event(3), "function: got int, expected a callable"),  # type: ignore[arg-type]
    "action": (lambda: nl.Event(size, action="halt"), "action: got 'halt', expected 'record', 'stop' or a callable"),
    "direction": (lambda: nl.Event(size, direction=2), "direction: got 2, expected -1, 0 or 1"),
    "tol": (lambda: nl.Event(size, tol=0.0), "tol: got 0.0, expected"),
    "an array": (
        lambda: start(nl.Event(lambda t, u: u)),
        r"the event 'event' returns shape \(16,\) of float64 at t=0, expected a n",
    ),
    "a word": (lambda: start(nl.Event(lambda t, u: "far")), "returns str at t=0, expected a number"),
    "a word in an array": (lambda: start(nl.Event(lambda t, u: np.array("far"))), "at t=0, expected a number"),
    "complex": (lambda: start(nl.Event(lambda t, u: 1j)), "returns complex at t=0, expected a number"),
    "a complex array": (
        lambda: start(nl.Event(lambda t, u: np.complex64(1j))),
        "of complex64 at t=0, expected a number",
    ),
    "nothing": (lambda: start(nl.Event(lambda t, u: None)), "returns NoneType at t=0, expected a number"),
    "array": (lambda: nl.Event(size, action=np.ones(3)), "action: got .*expected 'record', 'stop' or a callable"),
    "signals": (lambda: nl.Event(size, signals="no"), "signals: got 'no', expected True or False"),
    "no value": (lambda: start(nl.Event(lambda t, u: np.nan)), "is nan at t=0, expected a finite number; start where"),
    "layers": (
        lambda: start(nl.Event(size), integrator=nl.AttentionStep()),
        "AttentionStep takes whole ones of length 1",
    ),
    "reset": (
        lambda: start(nl.Event(size, action=lambda t, u: u[:3])),
        r"action: the event 'event' returns shape \(3,\) of float64, expected a signal of shape \(16,\)",
    ),
    "name": (lambda: nl.Event(size, name=["a"]), r"name: got \['a'\], expected text"),
    "reset to nan": (
        lambda: start(nl.Event(size, action=lambda t, u: u * np.nan)),
        "action of the event 'event': got 16 NaN",
    ),
    "noise": (
        lambda: start(nl.Event(size), FLOW + nl.flows.Noise(beta=10.0, rng=0), integrator=nl.flows.EulerMaruyama(0.1)),
        "the event 'event' is located by shorter steps, got a flow with noise",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_events(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(InputError, match=message):
        make()
