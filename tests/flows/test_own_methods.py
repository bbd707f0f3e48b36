"""Methods and metrics of one's own: a tableau is an integrator, and a class with an inner product a metric."""

import numpy as np
import pytest

import nlflow as nl
from nlflow.flows.integrators.imex import IMEX
from nlflow.flows.integrators.runge_kutta import RungeKutta, Tableau
from nlflow.functionals.metrics import Metric
from nlflow.testing import check_flow, check_integrator

G = 0.4358665215084590  # the root of x^3 - 3 x^2 + 3 x / 2 = 1 / 6 between 0 and 1 / 2
B1, B2 = -1.5 * G**2 + 4 * G - 1 / 4, 1.5 * G**2 - 5 * G + 5 / 4


class BogackiShampine(RungeKutta):
    tableau = Tableau(
        stages=((1 / 2,), (0.0, 3 / 4), (2 / 9, 1 / 3, 4 / 9)),
        shares=(1 / 2, 3 / 4, 1.0),
        order=3.0,
        reach=2.51,
        error=(-5 / 72, 1 / 12, 1 / 9, -1 / 8),
    )


class Classical(RungeKutta):
    tableau = Tableau(
        ((1 / 2,), (0.0, 1 / 2), (0.0, 0.0, 1.0), (1 / 6, 1 / 3, 1 / 3, 1 / 6)), (0.5, 0.5, 1, 1), 4, 2.78
    )


class ThirdOrderIMEX(IMEX):
    """ARS(3,4,3) of Ascher, Ruuth and Spiteri, with their digits."""

    tableau = Tableau(
        stages=((G,), (0.3212788860, 0.3966543747), (-0.105858296, 0.5529291479, 0.5529291479), (0.0, B1, B2, G)),
        shares=(G, (1 + G) / 2, 1.0, 1.0),
        order=3.0,
        reach=1.5,
        implicit=((G,), ((1 - G) / 2, G), (B1, B2, G), (B1, B2, G, 0.0)),
    )


@pytest.mark.parametrize(
    ("integrator", "order"),
    [
        (BogackiShampine(), 3),
        (BogackiShampine(dt=0.1, adaptive=False), 3),
        (Classical(dt=0.1, adaptive=False), 4),
        (ThirdOrderIMEX(0.1), 3),
    ],
    ids=repr,
)
def test_a_tableau_is_an_integrator(integrator, order):
    assert integrator.order == order
    check_integrator(integrator)


def test_without_an_estimate_of_the_error_no_step_adapts():
    with pytest.raises(nl.InputError, match="adaptive"):
        Classical()


class SobolevMetric(Metric):
    """The inner product <a, L^-1 b> of signals of mean 0: flows in it are fourth-order, and keep the mean."""

    name, measure, by_nodes = "h-1", "l2", False

    def moved(self, force, diffusion):
        return diffusion(force)

    def diffusion_bound(self, bound):
        return bound * bound

    def bounds(self, bound, fidelity):
        return 0.0, bound * (bound + fidelity[1])


WEIGHTS = nl.affinity(nl.Gaussian(width=0.2), nl.Grid(24, spacing=0.1, boundary="periodic"))
START, OBSERVED = (np.random.default_rng(seed).uniform(-0.9, 0.9, 24) for seed in (0, 1))


def operator():
    return np.stack([nl.J(WEIGHTS).gradient(unit) for unit in np.eye(24)], axis=1)


FLOWS = {
    "J": lambda: nl.GradientFlow(nl.J(WEIGHTS), SobolevMetric()),
    "E": lambda: nl.GradientFlow(nl.E(WEIGHTS, OBSERVED, 0.3), SobolevMetric()),
    "Cahn-Hilliard": lambda: nl.GradientFlow(nl.J(WEIGHTS), SobolevMetric(), reaction=nl.AllenCahn(0.5)),
}
METHODS = [nl.RungeKutta(1e-9, 1e-12), nl.Exponential(), nl.ETD4RK(0.02), nl.IMEX(0.005), nl.ExplicitEuler(2e-4)]


@pytest.mark.parametrize("name", FLOWS)
def test_a_metric_of_ones_own_has_all_integrators(name):
    flow, lap = FLOWS[name](), operator()
    check_flow(flow, START)
    rest = {"J": 0 * START, "E": 0.3 * (OBSERVED - START), "Cahn-Hilliard": 0.5 * (START - START**3)}[name]
    np.testing.assert_allclose(flow.velocity(START), lap @ (rest - lap @ START), atol=1e-12)
    expected = nl.solve(flow, START, t=0.3, integrator=METHODS[0]).final
    for method in METHODS[1:]:
        if name == "Cahn-Hilliard" and isinstance(method, nl.Exponential):
            continue
        found = nl.solve(flow, START, t_eval=[0.0, 0.1, 0.3], integrator=method)
        np.testing.assert_allclose(found.final, expected, atol=2e-4)
        assert found.success
        assert np.all(np.diff(found.energy) < 0)
        assert abs(found.final.mean() - START.mean()) < 1e-12


def test_what_a_metric_that_is_not_by_nodes_has_no_answer_for_is_refused():
    flow = FLOWS["E"]()
    with pytest.raises(nl.InputError, match="metric"):
        nl.solve(flow, START, t=1.0, integrator=nl.SemiImplicit(0.1))
    held = nl.GradientFlow(nl.J(WEIGHTS), SobolevMetric(), constraint=nl.Constraint([0], [1.0]))
    for ask in (lambda: nl.equilibrium(flow), lambda: nl.equilibrium(held, START), lambda: nl.diversity_bounds(flow)):
        with pytest.raises(nl.InputError, match="metric"):
            ask()
    with pytest.raises(nl.InputError, match="metric"):
        nl.fidelity_for_diversity(FLOWS["J"](), 0.5)
    np.testing.assert_allclose(nl.equilibrium(FLOWS["J"](), START).u, START.mean())
    np.testing.assert_allclose(nl.J(WEIGHTS).gradient(START, SobolevMetric()), operator() @ operator() @ START)


def predators(u):
    prey, hunter = u[..., 0], u[..., 1]
    result = 0 * u
    result[..., 0] = prey * (1 - prey) - prey * hunter
    result[..., 1] = hunter * (prey - 0.4)
    return result


def coupled(**options):
    return nl.Reaction(predators, (-0.1, 1.2), **{"components": 2, "bound": 4.0, **options})


def test_a_coupled_reaction_moves_its_components_together():
    start = np.stack([0.5 + 0.3 * np.sin(np.arange(24)), 0.3 + 0.2 * np.cos(np.arange(24))], axis=-1)
    flow = nl.GradientFlow(nl.J(WEIGHTS), "degree", reaction=coupled())
    np.testing.assert_allclose(flow.velocity(start), predators(start) - nl.J(WEIGHTS).gradient(start, "degree"))
    check_flow(flow, start)
    expected = nl.solve(flow, start, t=2.0, integrator=nl.RungeKutta(1e-10, 1e-12)).final
    for method, bound in ((nl.ETD4RK(0.05), 1e-7), (nl.IMEX(0.02), 1e-4), (nl.ExplicitEuler(0.01), 1e-2)):
        assert np.abs(nl.solve(flow, start, t=2.0, integrator=method).final - expected).max() < bound
    assert np.isnan(nl.ExplicitEuler(0.01).stability_limit(flow))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: coupled(bound=0.1), "bound"),
        (lambda: coupled(bound=None), "bound"),
        (lambda: coupled(derivative=predators), "derivative"),
        (lambda: coupled(potential=predators), "potential"),
        (lambda: coupled(components=1), "components"),
    ],
)
def test_what_a_coupled_reaction_claims_is_checked(make, match):
    with pytest.raises(nl.InputError, match=match):
        make()


def test_a_coupled_reaction_asks_for_its_channels():
    flow = nl.GradientFlow(nl.J(WEIGHTS), reaction=coupled())
    for start in (np.full(24, 0.5), np.full((24, 3), 0.5)):
        with pytest.raises(nl.InputError, match="components"):
            nl.solve(flow, start, t=1.0)
