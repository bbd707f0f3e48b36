"""Systems, particles, noise, waves and their steps, far out, while any floating-point exception is an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.affinities import kernel_operator
from nlflow.flows import ParticleFlow

pytestmark = [
    pytest.mark.numerical,
    pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning"),
    pytest.mark.usefixtures("strict"),
]

GRID = nl.Grid(8, boundary="periodic")
FUNCTIONAL = nl.J(nl.affinity(nl.Gaussian(width=2.0), GRID))
U = np.sin(np.arange(8.0))
TWO = np.stack([U, U[::-1]], axis=-1)
UNITS = (1e-290, 1e290)


def check_scales(flow: Any, u: Any, unit: float, step: Any, scaled: Any = None) -> None:
    """A linear flow, whatever the unit of its signal: as in the unit 1."""
    found = nl.solve(flow if scaled is None else scaled, u * unit, t=2.0, integrator=step)
    assert found.success, found.message
    np.testing.assert_allclose(found.final / unit, nl.solve(flow, u, t=2.0, integrator=step).final, rtol=0, atol=1e-13)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("couplings", [[1.0, 0.2], [[1.0, 0.5], [0.1, 0.3]]], ids=["diagonal", "mixed"])
def test_systems_in_any_unit(couplings: Any, unit: float) -> None:
    flow = nl.SystemFlow(FUNCTIONAL, couplings)
    for step in (nl.ETD4RK(0.5), nl.IMEX(0.5), nl.Lie(0.5), nl.Strang(0.5)):
        check_scales(flow, TWO, unit, step)
    expected = nl.solve(flow, TWO, t=2.0, integrator=nl.ETD4RK(0.5)).final
    fast = nl.SystemFlow(FUNCTIONAL, np.array(couplings) * unit)
    found = nl.solve(fast, TWO, t=2 / unit, integrator=nl.ETD4RK(0.5 / unit)).final
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
    assert nl.solve(fast, TWO * unit, t=0.0).success


@pytest.mark.parametrize("size", [1e-310, 1e-150, 1e150])
def test_parameters_of_kinetics(size: float) -> None:
    """Finite values with their derivatives, or the name of what no float holds."""
    for kind, name in (
        (nl.GrayScott, "feed"), (nl.GrayScott, "kill"), (nl.FitzHughNagumo, "epsilon"), (nl.FitzHughNagumo, "current"),
        (nl.Brusselator, "a"), (nl.Brusselator, "b"), (nl.PredatorPrey, "growth"), (nl.PredatorPrey, "saturation"),
        (nl.PredatorPrey, "conversion"), (nl.PredatorPrey, "mortality"),
    ):  # fmt: skip
        try:
            reaction = kind(**{name: size})
        except nl.InputError as error:
            assert name == "saturation" if size < 1 else kind.__name__ in str(error), (kind, name)  # noqa: PT017
            continue
        assert np.isfinite(reaction(np.abs(TWO))).all()
        assert np.isfinite(reaction.bound)
        flow = nl.SystemFlow(FUNCTIONAL, [1.0, 0.1], reaction=reaction)
        final = nl.solve(flow, np.abs(TWO), t=1e-3, integrator=nl.Rosenbrock(dt=1e-3, adaptive=False)).final
        assert np.isfinite(final).all()


@pytest.mark.parametrize("unit", UNITS)
def test_sources_and_events_in_any_unit(unit: float) -> None:
    flow = nl.GradientFlow(FUNCTIONAL, "degree")
    one, many = flow + nl.Source(U), flow + nl.Source(U * unit)
    expected = nl.solve(one, 0 * U, t=2.0, integrator=nl.Strang(0.5)).final
    found = nl.solve(many, 0 * U, t=2.0, integrator=nl.Strang(0.5)).final
    np.testing.assert_allclose(found / unit, expected, rtol=0, atol=1e-13)
    half = nl.Event(lambda t, u: float(np.abs(u).max()) / unit - 0.5, direction=-1)
    moment = nl.Event(lambda t, u: t * unit - 0.5, name="moment")
    decay = nl.GradientFlow(nl.E(FUNCTIONAL.affinity, 0 * U, 1.0, measure="degree"), "degree")
    start = np.full(8, unit)
    found = nl.solve(decay, start, t=2.0, integrator=nl.Exponential(), trackers=[half]).records["event"]["t"]
    np.testing.assert_allclose(found, np.log(2), rtol=0, atol=1e-9)
    found = nl.solve(flow, U, t=1 / unit, integrator=nl.Strang(1 / unit), trackers=[moment]) if unit > 1 else None
    assert found is None or found.records["moment"]["t"] * unit == pytest.approx(0.5, abs=1e-9)


@pytest.mark.parametrize("dt", [1e-300, 1e300])
def test_rosenbrock_of_any_step(dt: float) -> None:
    """One step: what it has no time to move stays, and what no float holds is told."""
    flow = nl.GradientFlow(FUNCTIONAL, "degree")
    found = nl.solve(flow, U, t=dt, integrator=nl.Rosenbrock(dt=dt, adaptive=False))
    assert found.success if dt < 1 else found.status is nl.Status.STEP_FAILED
    np.testing.assert_allclose(found.final, U, rtol=0, atol=1e-15)


@pytest.mark.parametrize("unit", UNITS)
def test_noise_in_any_unit(unit: float) -> None:
    """Paths with the same numbers scale with the strength."""
    decay = nl.GradientFlow(nl.E(FUNCTIONAL.affinity, 0 * U, 1.0, measure="degree"), "degree")
    one, many = decay + nl.Noise(strength=1.0, rng=1), decay + nl.Noise(strength=unit, rng=1)
    for step in (nl.EulerMaruyama(0.1), nl.Milstein(0.1), nl.PlatenWeak2(0.1), nl.ExponentialEuler(0.1)):
        check_scales(one, U, unit, step, many)
    check_scales(one, U, unit, nl.ExactGaussian(), many)
    step = nl.EulerMaruyama(0.1)
    paths = nl.ensemble(many, U * unit, 3, t=1.0, integrator=step).values / unit
    np.testing.assert_allclose(paths, nl.ensemble(one, U, 3, t=1.0, integrator=step).values, rtol=0, atol=1e-13)


@pytest.mark.parametrize("unit", UNITS)
def test_waves_in_any_unit(unit: float) -> None:
    gradient = nl.GradientFlow(FUNCTIONAL, "degree")
    flow = nl.WaveFlow(gradient, damping=0.1)
    for step in (nl.StoermerVerlet(0.5), nl.StoermerVerlet(0.5, 4), nl.WaveExponential()):
        check_scales(flow, flow.state(U, U), unit, step)
    heavy = nl.WaveFlow(gradient, density=1e290)  # nothing pulls it
    final = nl.solve(heavy, heavy.state(U, U), t=1.0, integrator=nl.WaveExponential()).final
    np.testing.assert_allclose(heavy.displacement(final), 2 * U, rtol=0, atol=1e-12)
    light = nl.WaveFlow(gradient, density=1e-290)
    with pytest.raises(nl.StabilityError, match="dt < 2e-145"):
        nl.solve(light, light.state(U), t=1.0, integrator=nl.StoermerVerlet(0.5))
    with pytest.raises(nl.InputError, match="damping: got 1e"):
        nl.WaveFlow(gradient, damping=1e290)


@pytest.mark.parametrize("unit", UNITS)
def test_conserved_metric_in_any_unit(unit: float) -> None:
    flow = nl.GradientFlow(FUNCTIONAL, nl.ConservedMetric())
    for step in (nl.ETD2RK(0.5), nl.IMEX(0.5)):
        check_scales(flow, U, unit, step)
        moved = nl.solve(nl.GradientFlow(FUNCTIONAL, nl.ConservedMetric(mobility=unit)), U, t=1.0, integrator=step)
        expected = U if unit < 1 else np.full(8, U.mean())  # nothing has moved, and all is even
        np.testing.assert_allclose(moved.final, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("method", ["dense", "chebyshev", "lanczos"])
def test_functions_in_any_unit(method: str, unit: float) -> None:
    energy = nl.E(FUNCTIONAL.affinity, 0 * U, 1.0, measure="degree")
    inverse = nl.function_of(energy, lambda a: 1 / a, "degree", method=method)
    np.testing.assert_allclose(inverse(U * unit) / unit, inverse(U), rtol=0, atol=1e-12)
    strong = nl.E(FUNCTIONAL.affinity, 0 * U, unit, measure="degree")
    if method == "lanczos" and unit > 1:
        with pytest.raises(nl.InputError, match="squares a float can hold"):
            nl.function_of(strong, lambda a: unit / a, "degree", method=method)
        return
    expected = U if unit > 1 else nl.function_of(FUNCTIONAL, lambda a: 1 / (1 + a), "degree", method=method)(U)
    found = nl.function_of(
        strong, (lambda a: unit / a) if unit > 1 else (lambda a: 1 / (1 + a)), "degree", method=method
    )(U)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", ["dense", "chebyshev", "lanczos"])
def test_functions_on_graphs_that_fall_apart(method: str) -> None:
    """Constants share the eigenvalue 0 with what is constant on each part."""
    apart = nl.J(nl.affinity(nl.Laplace(1.0), nl.Points([0.0, 0.5, 2000.0, 2000.5, 2001.0]), method="dense"))
    heat = nl.function_of(apart, lambda a: np.exp(-100 * a), "degree", method=method)
    u = np.array([1.0, 1.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(heat(u), u, rtol=0, atol=1e-12)


@pytest.mark.parametrize("unit", [1e-150, 1e150])
def test_particles_and_operators_in_any_unit(unit: float) -> None:
    """Velocities have the unit 1 / length: times grow like its square."""
    x = np.random.default_rng(0).random((6, 2))
    step = nl.RungeKutta(dt=0.1, adaptive=False)
    expected = nl.solve(ParticleFlow(x, nl.Gaussian(1.0)), x, t=0.5, integrator=step).final
    scaled, step = ParticleFlow(x * unit, nl.Gaussian(unit)), nl.RungeKutta(dt=0.1 * unit**2, adaptive=False)
    final = nl.solve(scaled, x * unit, t=0.5 * unit**2, integrator=step).final
    np.testing.assert_allclose(final / unit, expected, rtol=0, atol=1e-12)
    sums = kernel_operator(nl.Gaussian(unit), x * unit, x * unit) @ np.ones(6)
    np.testing.assert_allclose(sums, kernel_operator(nl.Gaussian(1.0), x, x) @ np.ones(6), rtol=1e-13)
