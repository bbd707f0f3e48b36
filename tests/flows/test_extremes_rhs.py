"""Right-hand sides, constraints and misfits far out, while any floating-point exception is an error."""

from __future__ import annotations

import numpy as np
import pytest
from extremes import case

import nlflow as nl
from tests.covering import pairs

pytestmark = [
    pytest.mark.numerical,
    pytest.mark.filterwarnings("ignore::nlflow.NlflowWarning"),
    pytest.mark.usefixtures("strict"),
]


BLIND = ("logits",)  # some nodes see the others below rounding alone


@pytest.mark.parametrize("size", [1e-300, 1e300])
@pytest.mark.parametrize("name", ["wide", "tiny units", "subnormal weights", "two tokens", "huge amplitude", "logits"])
def test_values_of_any_size(name: str, size: float) -> None:
    """Harmonic extensions and flows scale with the values, and stay between them."""
    problem = case(name)
    affinity, n = problem.affinity(), problem.n
    values = np.array([-1.0, 0.5])
    one = nl.Constraint([0, n - 1], values)
    held = nl.Constraint([0, n - 1], values * size)
    if n == 2:
        with pytest.raises(nl.InputError, match="nodes: got all 2"):
            nl.J(affinity).minimizer(constraint=held)
        return
    if name in BLIND:
        with pytest.raises(nl.InputError, match="see no constrained one"):
            nl.J(affinity).minimizer(constraint=held)
        return
    found = nl.J(affinity).minimizer(constraint=held)
    assert found.success
    assert np.array_equal(found.u[[0, n - 1]], values * size)
    assert found.u.max() <= size * (0.5 + 1e-6)
    assert found.u.min() >= -size * (1 + 1e-6)
    np.testing.assert_allclose(found.u / size, nl.J(affinity).minimizer(constraint=one).u, atol=1e-6)
    flow = nl.GradientFlow(nl.J(affinity), "degree", constraint=held)
    final = nl.solve(flow, np.zeros(n), t=5.0, integrator=nl.ExplicitEuler(0.5)).final
    close = nl.solve(flow, np.zeros(n), t=5.0).final
    assert np.abs(close / size).max() <= 1 + 1e-9
    assert np.abs(close / size - final / size).max() <= 0.2  # of order 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    affinity = case("wide").affinity()
    with pytest.raises(nl.InputError, match="values: got 1 NaN or infinite"):
        nl.Constraint([0], [value])
    flow = nl.GradientFlow(nl.J(affinity), constraint=nl.Constraint([0], lambda t: value))
    with pytest.raises(nl.NumericalError, match="values: NaN or infinite at t=0"):
        nl.solve(flow, np.zeros(case("wide").n), t=1.0)
    single = nl.GradientFlow(nl.J(nl.affinity(nl.Gaussian(1.0), nl.Grid(4))), constraint=nl.Constraint([0], 1e300))
    with pytest.raises(nl.NumericalError, match="values: too large for float32"):
        nl.solve(single, np.zeros(4, np.float32), t=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("misfit", "p", "size"),
    pairs([None, nl.L1(), nl.Huber(1.0), nl.KullbackLeibler()], [1.0, 1.1, 10.0], [1e-150, 1.0, 1e150]),
    ids=repr,
)
@pytest.mark.sampled(3)
def test_minimizers_of_any_size(misfit: object, p: float, size: float) -> None:
    """However much one part outweighs the other: a constant or f, or what lies between, with its certificate."""
    weights = nl.from_matrix(np.ones((3, 3)), nl.Points(np.arange(3.0)))
    f = np.array([0.0, 1.0, 5.0]) * size
    for fidelity in (1e-200, 1e-3, 1e3, 1e200):
        functional = nl.Ep(weights, f, fidelity, p, misfit=misfit)  # type: ignore[arg-type]
        if misfit is None and p <= 2:  # in units of the size, as ever
            continue
        found = functional.minimizer(rtol=1e-4, maxiter=300 if p > 1 else 2000)
        flat = np.ptp(found.u) <= 1e-6 * size  # what differences there are is lost in rounding, and so is the gap
        alike = np.abs(found.u - f).max() <= 1e-9 * size
        assert found.success or flat or alike, (fidelity, found.message)
        assert found.u.min() >= -1e-9 * size
        assert found.u.max() <= 5 * size * (1 + 1e-9)


@pytest.mark.parametrize("size", [1e-150, 1e20])
def test_flows_with_misfits_of_any_size(size: float) -> None:
    weights = nl.from_matrix(np.ones((3, 3)), nl.Points(np.arange(3.0)))
    f = np.array([0.0, 1.0, 5.0]) * size
    for misfit in (nl.L1(), nl.Huber(size), nl.KullbackLeibler()):
        flow = nl.PFlow(nl.Ep(weights, f, 1.0, 2, misfit=misfit))
        step = nl.ForwardBackward(0.25)
        found = nl.solve(flow, f, t=2.0, integrator=step, energies=False)
        assert found.success
        assert 0 <= found.final.min() <= found.final.max() <= 5 * size


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-290, 1.0, 1e290])
@pytest.mark.parametrize("name", ["wide", "tiny units", "one node", "two tokens"])
@pytest.mark.sampled(3)
def test_implicit_and_adaptive_steps(name: str, size: float) -> None:
    """Flows of signals of any size, in steps that are implicit, and that follow their error."""
    affinity, n = case(name).affinity(), case(name).n
    u = np.linspace(-1.0, 1.0, n) * size
    flow = nl.GradientFlow(nl.J(affinity), "degree")
    exact = nl.solve(flow, u, t=2.0, integrator=nl.Exponential()).final
    for step, allowed in ((nl.IMEX(0.05), 0.01), (nl.ConvexSplitting(0.05), 0.1)):
        found = nl.solve(flow, u, t=2.0, integrator=step)
        assert found.success
        assert np.abs(found.final / size - exact / size).max() <= allowed
        found = nl.solve(flow, u, t=2.0, integrator=nl.Adaptive(step, 1e-4, 1e-5 * size))
        assert found.success
        assert np.abs(found.final / size - exact / size).max() <= 2e-3
        held = nl.solve(flow, u, t=1e4, integrator=type(step)(1e4))  # one step: what decays is gone
        assert held.success
        assert np.abs(held.final).max() <= size * (1 + 1e-6)
