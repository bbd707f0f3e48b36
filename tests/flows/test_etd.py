"""Exponential time differencing: its functions, its transforms and expansions, what it keeps and what it refuses."""

from __future__ import annotations

from typing import Any

import mpmath
import numpy as np
import pytest

import nlflow as nl
from nlflow.errors import InputError, StabilityError
from nlflow.flows.integrators import exponential

RNG = np.random.default_rng(11)
STEPS = [nl.ETD2RK, nl.ETD4RK]


def flow(boundary: Any = "periodic", metric: str = "l2", fidelity: Any = 0.7, **terms: Any) -> nl.GradientFlow:
    """Return a flow of two channels on a grid; stiff in the L2 metric, where the degree is about 200."""
    grid = nl.Grid((12, 10), spacing=(1 / 12, 0.1), boundary=boundary)
    weights = nl.affinity(nl.Gaussian(width=0.2, amplitude=400.0), grid, method="convolution")
    return nl.GradientFlow(nl.E(weights, F, fidelity, measure=metric), metric, **terms)


F = RNG.uniform(-1, 1, (12, 10, 2))


@pytest.mark.slow
@pytest.mark.numerical
@pytest.mark.parametrize("k", range(5))
@pytest.mark.sampled(2)
def test_phi(k: int) -> None:
    z = np.concatenate([[0.0], np.logspace(-20, 4, 25), [np.nextafter(1, 0), 1.0, 5e-324]])
    with mpmath.workdps(150):
        exact = [
            float(mpmath.nsum(lambda j, x=x: (-mpmath.mpf(x)) ** j / mpmath.factorial(j + k), [0, mpmath.inf]))
            if x < 30
            else None
            for x in map(float, z)
        ]
    for x, value, expected in zip(z, exponential.phi(k, z), exact, strict=True):
        if expected is not None:
            assert value == pytest.approx(expected, rel=4e-15)
        elif k:  # phi_k(-z) = 1 / (z (k - 1)!) - phi_{k-1}-like terms that fall as 1 / z^2
            assert value * x * float(mpmath.factorial(k - 1)) == pytest.approx(1, abs=4 * k / x)


@pytest.mark.numerical
@pytest.mark.parametrize("integrator", STEPS)
@pytest.mark.parametrize("metric", ["l2", "degree"])
@pytest.mark.parametrize("boundary", ["periodic", "reflect"])
@pytest.mark.sampled(2)
def test_transforms_and_expansions_agree(boundary: str, metric: str, integrator: Any, monkeypatch: Any) -> None:
    problem = flow(boundary, metric, reaction=nl.AllenCahn(2.0))
    by_transform = nl.solve(problem, F, t=1.0, integrator=integrator(0.1))
    monkeypatch.setattr(exponential, "modes_of", lambda flow, v: None)
    by_expansion = nl.solve(problem, F, t=1.0, integrator=integrator(0.1))
    assert np.abs(by_transform.final - by_expansion.final).max() < 1e-13
    assert by_transform.stats["applications"] == 10
    assert by_expansion.stats["applications"] > 100


@pytest.mark.numerical
@pytest.mark.parametrize("integrator", STEPS)
@pytest.mark.parametrize("fidelity", ["number", "nodes", "matrices"])
def test_linear_flows_are_exact_in_one_step(fidelity: str, integrator: Any) -> None:
    """However stiff: h rho is a few thousand here."""
    matrices = np.array([[2.0, 1.0], [1.0, 3.0]]) * np.ones((12, 10, 1, 1))
    values = {"number": 0.7, "nodes": RNG.uniform(0.1, 2, (12, 10)), "matrices": matrices}[fidelity]
    problem = flow(fidelity=values)
    start = RNG.uniform(-1, 1, F.shape)
    one = nl.solve(problem, start, t=10.0, integrator=integrator(10.0))
    assert one.stats["steps"] == 1
    assert np.abs(one.final - nl.solve(problem, start, t=10.0).final).max() < 1e-10


@pytest.mark.parametrize("integrator", STEPS)
def test_long_steps_are_stable_where_diffusion_is_stiff(integrator: Any) -> None:
    """Explicit steps would have to be a twentieth of these; energies fall all the same."""
    problem = flow(fidelity=0.0, reaction=nl.AllenCahn(3.0))
    assert nl.ExplicitEuler(0.2).stability_limit(problem) < 0.01
    found = nl.solve(problem, F, t_eval=np.arange(0, 4, 0.2), integrator=integrator(0.2))
    assert found.success
    assert np.all(np.diff(found.energy) <= 1e-12)
    assert np.abs(found.u).max() <= 1 + 1e-12
    rest = nl.solve(problem, np.ones_like(F), t=4.0, integrator=integrator(0.2)).final
    assert np.abs(rest - 1).max() < 1e-14  # what is at rest stays there


@pytest.mark.parametrize("integrator", STEPS)
def test_what_is_refused(integrator: Any) -> None:
    name = integrator.__name__
    points = nl.Points(np.arange(9.0))
    features = RNG.standard_normal((9, 2))
    evolving = nl.affinity(nl.Gaussian(width=1.0), points, features)
    queries = nl.affinity(nl.ExpDotProduct(), points, features, queries=features[::-1].copy())

    class More(nl.GradientFlow):
        def velocity(self, u: Any) -> Any:
            return super().velocity(u) + u

    bad = {
        rf"^integrator: {name} needs a frozen kernel": nl.GradientFlow(nl.J(evolving), "degree", evolving=True),
        rf"^integrator: {name} needs a symmetric affinity": nl.AttentionFlow(queries),
        rf"^integrator: {name} is made of .*whose velocity\(\) says more": More(nl.J(evolving)),
    }
    for message, problem in bad.items():
        with pytest.raises(InputError, match=message):
            nl.solve(problem, features, t=1.0, integrator=integrator(0.1))
    steep = nl.GradientFlow(nl.J(evolving), reaction=nl.AllenCahn(10.0, interval=(-3, 3)))
    limit = integrator(1.0).stability_limit(steep)
    assert limit == pytest.approx(integrator.reach / 260)
    with pytest.raises(StabilityError, match=rf"{name} needs dt < {limit:.6g}"):
        nl.solve(steep, features.clip(-3, 3), t=1.0, integrator=integrator(1.01 * limit))


@pytest.mark.numerical
def test_a_piece_that_is_overridden_is_used() -> None:
    """No transform knows an average of one's own."""

    class Twice(nl.GradientFlow):
        def average(self, u: Any) -> Any:
            return super().average(super().average(u))

    plain = flow("periodic", "degree", fidelity=0.0)
    twice = Twice(plain.functional, "degree", reaction=nl.AllenCahn())
    found = nl.solve(twice, F, t=1.0, integrator=nl.ETD4RK(0.05)).final
    assert np.abs(found - nl.solve(twice, F, t=1.0, integrator=nl.RungeKutta(1e-9, 1e-12)).final).max() < 1e-6


@pytest.mark.numerical
def test_functions_that_are_kept_are_few() -> None:
    problem = flow(reaction=nl.AllenCahn())
    for number in range(1, 9):
        nl.solve(problem, F, t=0.1, integrator=nl.ETD4RK(0.1 / number))
    transform = exponential.modes_of(problem, F)
    assert transform is not None
    assert len(transform._gains) <= 16
