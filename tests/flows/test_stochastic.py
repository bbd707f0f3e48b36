"""Steps with noise: their strong and weak orders, the law of the exact one, and what they are without noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow.affinities import Unlinked
from nlflow.flows import Noise
from tests.problems import Floats

pytestmark = pytest.mark.numerical

PATHS = 100_000
ALONE = Unlinked(nl.Points(np.arange(float(PATHS))))
END = 1.0


class Summed(Noise):
    """Noise whose increments are sums of so many of shorter steps, so that steps of several lengths have one path."""

    ratio = 1

    def increments(self, flow: Any, like: Any, step: int, dt: float, *, stream: int = 0) -> Any:
        first, short = step * self.ratio, dt / self.ratio
        return sum(super(Summed, self).increments(flow, like, first + k, short) for k in range(self.ratio))


def alone(rate: float, start: float, **terms: Any) -> tuple[nl.GradientFlow, Floats]:
    """Return the flow du/dt = -rate u + R(u) of as many nodes as there are paths."""
    return nl.GradientFlow(nl.E(ALONE, np.zeros(PATHS), rate), "l2", **terms), np.full(PATHS, start)


def end_of(flow: nl.GradientFlow, start: Floats, step: Any) -> Floats:
    found = nl.solve(flow, start, t=END, integrator=step, energies=False)
    assert found.success, found.message
    return np.asarray(found.final)


def increments(flow: nl.GradientFlow, start: Floats, steps: int) -> Floats:
    assert flow.noise is not None
    return np.stack([flow.noise.increments(flow, start, k, END / steps) for k in range(steps)])


def slope(steps: list[int], errors: list[float]) -> float:
    return float(-np.polyfit(np.log(steps), np.log(errors), 1)[0])


# --- orders ----------------------------------------------------------------------------------------------------------

RATE, STRENGTH = 1.5, 0.6


def brownian(rate: float, strength: float, step: Callable[[float], Any], steps: int) -> tuple[Floats, Floats]:
    """Return ends of du = -a u dt + s u dW by a step, and u(0) exp(-(a + s^2 / 2) t + s W(t)) for the same W."""
    flow, start = alone(rate, 1.0)
    noisy = flow + Noise(strength=lambda u: strength * u, white="nodes", rng=5)
    exact = np.exp(-(rate + strength**2 / 2) * END + strength * increments(noisy, start, steps).sum(axis=0))
    return end_of(noisy, start, step(END / steps)), exact


@pytest.mark.slow
@pytest.mark.parametrize("step", [nl.EulerMaruyama, nl.Milstein, nl.ExponentialEuler, nl.PlatenWeak2])
def test_strong_orders_for_geometric_brownian_motion(step: Callable[[float], Any]) -> None:
    counts = [16, 32, 64]
    pairs = [brownian(0.3, 0.7, step, steps) for steps in counts]
    errors = [float(np.sqrt(np.mean((found - exact) ** 2))) for found, exact in pairs]
    assert abs(slope(counts, errors) - step(0.1).strong_order) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("step", [nl.EulerMaruyama, nl.Milstein, nl.PlatenWeak2])
def test_weak_orders_for_geometric_brownian_motion(step: Callable[[float], Any]) -> None:
    """By means of differences from exact paths of the same W, whose own mean is known."""
    counts, errors = [16, 32, 64], []
    for steps in counts:
        found, exact = brownian(1.0, 0.3, step, steps)
        errors.append(abs(float(np.mean(found - exact))))
        assert float(np.std(found - exact)) / math.sqrt(PATHS) < 0.03 * errors[-1]
    assert abs(float(np.mean(exact)) - math.exp(-END)) < 5 * float(np.std(exact)) / math.sqrt(PATHS)
    assert abs(slope(counts, errors) - step(0.1).weak_order) < 0.1


ADDITIVE = [
    (nl.EulerMaruyama, [8, 16, 32], 1.0),
    (nl.PlatenWeak2, [4, 8, 16], 2.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "counts", "order"), ADDITIVE, ids=lambda one: getattr(one, "__name__", ""))
def test_weak_orders_for_the_ornstein_uhlenbeck_process(
    step: Callable[[float], Any], counts: list[int], order: float
) -> None:
    """The variance of du = -a u dt + s dW, held against the part of the exact path that increments tell."""
    flow, start = alone(RATE, 0.0)
    noisy = flow + Noise(strength=STRENGTH, white="nodes", rng=6)
    errors = []
    for steps in counts:
        dt = END / steps
        share = np.exp(-RATE * dt * np.arange(steps - 1, -1, -1)) * -math.expm1(-RATE * dt) / (RATE * dt)
        told = STRENGTH * np.tensordot(share, increments(noisy, start, steps), axes=1)
        variance = STRENGTH**2 * -math.expm1(-2 * RATE * END) / (2 * RATE)
        found = end_of(noisy, start, step(dt))
        known = STRENGTH**2 * dt * float(np.sum(share**2))
        errors.append(abs(float(np.mean(found**2 - told**2)) + known - variance))
    assert abs(slope(counts, errors) - order) < 0.1


def swinging(step: Callable[[float], Any], steps: int) -> Floats:
    """Return ends of du = (-u / 2 + 2 sin u) dt + s dW, of the same paths for all numbers of steps."""
    swing = nl.Reaction(lambda u: 2 * np.sin(u), (-50.0, 50.0), derivative=lambda u: 2 * np.cos(u))
    flow, start = alone(0.5, 0.3, reaction=swing)
    noise = Summed(strength=0.5, white="nodes", rng=8)
    noise.ratio = 512 // steps
    return end_of(flow + noise, start, step(END / steps))


@pytest.fixture(scope="module")
def exact_swing() -> Floats:
    return swinging(nl.PlatenWeak2, 512)


@pytest.mark.slow
@pytest.mark.parametrize("step", [nl.EulerMaruyama, nl.PlatenWeak2, nl.ExponentialEuler])
def test_orders_with_a_reaction_and_noise_that_is_added(step: Callable[[float], Any], exact_swing: Floats) -> None:
    method = step(0.1)
    counts = [16, 32, 64] if method.weak_order < 2 else [4, 8, 16]
    ends = [swinging(step, steps) for steps in counts]
    strong = [float(np.sqrt(np.mean((end - exact_swing) ** 2))) for end in ends]
    weak = [abs(float(np.mean(end**2 - exact_swing**2))) for end in ends]
    assert abs(slope(counts, strong) - method.strong_order_additive) < 0.1
    assert abs(slope(counts, weak) - method.weak_order) < 0.1


def test_orders_are_declared_apart_and_told() -> None:
    flow, start = alone(1.0, 1.0)
    for noise, strong in ((Noise(beta=1.0, rng=1), 1.0), (Noise(strength=lambda u: u, rng=1), 0.5)):
        stats = nl.solve(flow + noise, start, t=0.2, integrator=nl.EulerMaruyama(0.1)).stats
        assert (stats["order"], stats["weak_order"], stats["strong_order"]) == (1.0, 1.0, strong)


# --- a step is what it says ------------------------------------------------------------------------------------------

NODES = 30
POINTS = nl.Points(
    np.sort(np.random.default_rng(1).uniform(0, 3, NODES)), np.random.default_rng(2).uniform(0.5, 2, NODES)
)
SPECTRA: dict[str, tuple[Any, str]] = {
    "l2, uneven weights": (nl.affinity(nl.Gaussian(width=0.4), POINTS), "l2"),
    "degree": (nl.affinity(nl.Gaussian(width=0.4), POINTS), "degree"),
    "periodic": (nl.affinity(nl.Gaussian(width=0.4), nl.Grid(NODES, spacing=0.1, boundary="periodic")), "l2"),
    "reflecting": (nl.affinity(nl.Gaussian(width=0.4), nl.Grid(NODES, spacing=0.1, boundary="reflect")), "degree"),
}


def dense(flow: nl.GradientFlow) -> tuple[Floats, Floats]:
    """Return A, and the masses of the nodes from the kernel written out."""
    matrix = np.stack([flow.velocity(np.zeros(NODES)) - flow.velocity(unit) for unit in np.eye(NODES)], axis=1)
    x, w = flow.affinity.domain.nodes[:, 0], flow.affinity.domain.weights.ravel()
    if flow.metric == "l2":
        return matrix, w
    if len(set(w)) == 1:  # a grid, on which the images of nodes make each degree that of the whole line
        line = w[0] * np.exp(-((0.1 * np.arange(-60, 61)) ** 2) / (2 * 0.4**2)).sum()
        return matrix, w * 2 * line
    k = np.exp(-((x[:, None] - x) ** 2) / (2 * 0.4**2))
    return matrix, w * (2 * k @ w)


def power(matrix: Floats, function: Callable[[Floats], Floats], mass: Floats) -> Floats:
    """Return a function of a matrix that is self-adjoint in the masses."""
    root = np.sqrt(mass)
    values, vectors = np.linalg.eigh((root[:, None] * matrix / root + (root[:, None] * matrix / root).T) / 2)
    return np.asarray((vectors * function(np.maximum(values, 1e-300))) @ vectors.T / root[:, None] * root)


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("span", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("fidelity", [0.3, 0.0])
@pytest.mark.slow
def test_the_exact_step_has_the_root_of_the_covariance(name: str, span: float, fidelity: float) -> None:
    """The matrix that multiplies unit normals, squared: C = (1 - exp(-2 t A)) / (beta A) / m by dense eigenvectors."""
    weights, metric = SPECTRA[name]
    functional = nl.E(weights, np.zeros(NODES), fidelity, measure=metric) if fidelity else nl.J(weights)
    flow = nl.GradientFlow(functional, metric) + Noise(beta=4.0, rng=1)
    matrix, mass = dense(flow)

    class Unit(Noise):
        place = 0

        def increments(self, flow: Any, like: Any, step: int, dt: float, *, stream: int = 0) -> Any:
            del step, stream
            white = np.eye(NODES)[self.place] * math.sqrt(dt)
            return white * flow.root_mass(like)

    columns = []
    for place in range(NODES):
        noise = Unit(beta=4.0, rng=1)
        noise.place = place
        one = nl.GradientFlow(functional, metric) + noise
        columns.append(nl.solve(one, np.zeros(NODES), t=span, integrator=nl.ExactGaussian(), energies=False).final)
    root = np.stack(columns, axis=1)
    covariance = power(matrix, lambda a: -np.expm1(-2 * span * a) / (4.0 * a), mass) / mass
    np.testing.assert_allclose(root @ root.T, covariance, atol=1e-9 * np.abs(covariance).max())


@pytest.mark.parametrize("span", [0.5, 20.0])
def test_the_exact_step_between_held_nodes_has_the_covariance_of_the_free_ones(span: float) -> None:
    weights, metric = SPECTRA["l2, uneven weights"]
    nodes, draws = np.array([0, 11, 12]), 4_000
    constraint = nl.Constraint(nodes, 0.0)
    flow = nl.GradientFlow(nl.E(weights, np.zeros((NODES, draws)), 0.3), metric, constraint=constraint)
    u = nl.solve(flow + Noise(beta=4.0, rng=5), t=span, energies=False).final
    matrix, mass = dense(nl.GradientFlow(nl.E(weights, np.zeros(NODES), 0.3), metric))
    free = np.setdiff1d(np.arange(NODES), nodes)
    root = np.sqrt(mass[free])
    alike = root[:, None] * matrix[np.ix_(free, free)] / root
    values, vectors = np.linalg.eigh((alike + alike.T) / 2)
    whiten = vectors.T * root * np.sqrt(4.0 * values / -np.expm1(-2 * span * values))[:, None]
    off = whiten @ (u[free] @ u[free].T / draws) @ whiten.T - np.eye(len(free))
    count = len(free) * (len(free) + 1)
    assert abs(draws * float(np.sum(off**2)) / count - 1) < 5 * math.sqrt(4 / count)
    assert not u[nodes].any()


@pytest.mark.parametrize("white", ["measure", "nodes"])
@pytest.mark.parametrize("span", [0.5, 20.0])
def test_the_exact_step_takes_strengths_that_differ_between_nodes(white: str, span: float) -> None:
    """Covariances of 4 000 channels against a sum over time of exp(-s A) Q exp(-s A^T)."""
    weights, metric = SPECTRA["l2, uneven weights"]
    strength = np.random.default_rng(4).uniform(0.2, 2.0, NODES)
    draws = 4_000
    energy = nl.E(weights, np.zeros((NODES, draws)), 0.3)
    flow = nl.GradientFlow(energy, metric) + Noise(strength=strength, white=white, rng=7)
    u = nl.solve(flow, t=span, energies=False).final
    matrix, mass = dense(nl.GradientFlow(nl.E(weights, np.zeros(NODES), 0.3), metric))
    values, right = np.linalg.eig(matrix)
    left = np.linalg.inv(right)
    noise = left @ np.diag(strength**2 / (mass if white == "measure" else 1)) @ left.T
    rates = values[:, None] + values
    expected = (right @ (noise * -np.expm1(-span * rates) / rates) @ right.T).real
    white_root = np.linalg.inv(np.linalg.cholesky(expected))
    off = white_root @ (u @ u.T / draws) @ white_root.T - np.eye(NODES)
    count = NODES * (NODES + 1)
    assert abs(draws * float(np.sum(off**2)) / count - 1) < 5 * math.sqrt(4 / count)


def test_exponential_euler_is_exact_without_a_reaction() -> None:
    weights, metric = SPECTRA["l2, uneven weights"]
    flow = nl.GradientFlow(nl.E(weights, np.ones(NODES), 0.3), metric) + Noise(beta=4.0, rng=1)
    one = nl.solve(flow, t=0.5, integrator=nl.ExactGaussian()).final
    np.testing.assert_allclose(nl.solve(flow, t=0.5, integrator=nl.ExponentialEuler(0.5)).final, one, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["l2, uneven weights", "degree", "periodic"])
def test_the_stationary_covariance_is_that_of_gibbs(name: str) -> None:
    """Of 10 000 draws after steps of several lengths: whitened, a Wishart matrix of known mean and spread."""
    weights, metric = SPECTRA[name]
    draws = 10_000
    energy = nl.E(weights, np.zeros((NODES, draws)), 0.3, measure=metric)
    flow = nl.GradientFlow(energy, metric) + Noise(beta=4.0, rng=3)
    found = nl.solve(flow, t_eval=[0.0, 100.0, 100.7, 100.71], energies=False).u[1:]
    one = nl.GradientFlow(nl.E(weights, np.zeros(NODES), 0.3, measure=metric), metric)
    matrix, mass = dense(one)
    white = np.sqrt(mass)[:, None] * power(matrix, lambda a: np.sqrt(4.0 * a), mass)
    for u in found:
        sample = white @ (u @ u.T / draws) @ white.T
        off = draws * float(np.sum((sample - np.eye(NODES)) ** 2)) / (NODES * (NODES + 1))
        assert abs(off - 1) < 4 * math.sqrt(2 / (NODES * (NODES + 1) / 2))  # sums of squares of N (N + 1) / 2 normals


def test_heun_and_euler_have_the_stationary_variance_that_is_known() -> None:
    """Euler's is 1 / (1 - a dt / 2) times the right one, and Heun's (1 - x + x^2 / 2)^2 tells its own."""
    flow, start = alone(1.0, 0.0)
    noisy = flow + Noise(strength=1.0, white="nodes", rng=2)
    dt = 0.5
    growth, kick = 1 - dt + dt * dt / 2, (1 - dt / 2) ** 2
    for step, expected in (
        (nl.EulerMaruyama(dt), 0.5 / (1 - dt / 2)),
        (nl.PlatenWeak2(dt), kick * dt / (1 - growth**2)),
    ):
        found = nl.solve(noisy, start, t=8.0, integrator=step, energies=False).final
        assert abs(float(np.var(found)) / expected - 1) < 5 * math.sqrt(2 / PATHS)


def test_noisy_steps_are_what_they_are_without_noise() -> None:
    weights, metric = SPECTRA["degree"]
    flow = nl.GradientFlow(nl.E(weights, np.sin(np.arange(30.0)), 0.3, measure=metric), metric, reaction=nl.AllenCahn())
    for one, other in ((nl.EulerMaruyama(0.1), nl.ExplicitEuler(0.1)), (nl.Milstein(0.1), nl.ExplicitEuler(0.1))):
        assert np.array_equal(nl.solve(flow, t=1.0, integrator=one).u, nl.solve(flow, t=1.0, integrator=other).u)
    plain = nl.GradientFlow(flow.functional, metric)
    one, other = (nl.solve(plain, t=1.0, integrator=s) for s in (nl.ExactGaussian(), nl.Exponential()))
    assert np.array_equal(one.u, other.u)


def test_noise_of_a_system_has_the_measure_of_each_channel() -> None:
    x = np.arange(12.0)
    wide, narrow = (nl.J(nl.affinity(nl.Gaussian(width=s), nl.Points(x))) for s in (2.0, 0.7))
    flow = nl.flows.SystemFlow([wide, narrow], [1.0, 0.2], "degree") + Noise(strength=1.0, rng=9)
    single = [nl.GradientFlow(one, "degree") + Noise(strength=1.0, rng=9) for one in (wide, narrow)]
    assert flow.noise is not None
    white = flow.noise.increments(flow, np.zeros((12, 2)), 0, 1.0)
    raw = nl.flows.normals(9, (12, 2))
    for c, one in enumerate(single):
        np.testing.assert_allclose(white[:, c], raw[:, c] * one.root_mass(x), rtol=1e-14)
    found = nl.solve(flow, np.zeros((12, 2)), t=0.7, integrator=nl.ExactGaussian(), energies=False)
    assert found.success


def test_noise_in_the_conserved_metric_has_the_covariance_of_the_mobility() -> None:
    """Of the modes of a ring: A = m l (l + lambda), and the limit is 1 / (beta (l + lambda)) for all but the mean."""
    weights, _ = SPECTRA["periodic"]
    apart = 0.1 * (np.arange(NODES)[:, None] + NODES * np.arange(-3, 4))
    k = np.exp(-(apart**2) / (2 * 0.4**2)).sum(axis=1)
    place = (np.arange(NODES)[:, None] - np.arange(NODES)) % NODES
    values, vectors = np.linalg.eigh(0.2 * (k.sum() * np.eye(NODES) - k[place]))  # K = 2 k, w = 0.1
    span, fidelity, mobility = 0.3, 0.5, 0.7

    class Unit(Noise):
        place = 0

        def increments(self, flow: Any, like: Any, step: int, dt: float, *, stream: int = 0) -> Any:
            return math.sqrt(dt) * flow.spread(np.eye(NODES)[self.place] * flow.root_mass(like))

    columns = []
    for place_of in range(NODES):
        noise = Unit(beta=4.0, rng=1)
        noise.place = place_of
        energy = nl.E(weights, np.zeros(NODES), fidelity)
        flow = nl.GradientFlow(energy, nl.ConservedMetric(mobility=mobility)) + noise
        columns.append(nl.solve(flow, np.zeros(NODES), t=span, integrator=nl.ExactGaussian(), energies=False).final)
    root = np.stack(columns, axis=1)
    rates = mobility * values * (values + fidelity)
    expected = (vectors * -np.expm1(-2 * span * rates) / (4.0 * (values + fidelity))) @ vectors.T / 0.1
    np.testing.assert_allclose(root @ root.T, expected, atol=1e-9 * np.abs(expected).max())


@pytest.mark.parametrize("step", [nl.ExactGaussian(), nl.EulerMaruyama(0.01), nl.ExponentialEuler(0.05)])
def test_noise_in_the_conserved_metric_adds_no_mass(step: Any) -> None:
    weights, _ = SPECTRA["periodic"]
    start = 0.4 + 0.1 * np.sin(np.arange(float(NODES)))
    flow = nl.GradientFlow(nl.J(weights), "conserved") + Noise(beta=20.0, rng=2)
    found = nl.solve(flow, start, t=1.0, integrator=step)
    assert abs(float(found.final.mean() - start.mean())) < 1e-14
    assert float(np.abs(found.final - start).max()) > 0.1


def test_noise_in_the_conserved_metric_is_refused_where_its_root_is_not_known() -> None:
    ring, scattered = SPECTRA["periodic"][0], SPECTRA["degree"][0]
    moving = nl.ConservedMetric(mobility=lambda u: 1 + 0 * u, largest=1.0)
    cases: list[tuple[Any, Any, Noise]] = [
        (scattered, "conserved", Noise(beta=1.0, rng=1)),
        (ring, moving, Noise(beta=1.0, rng=1)),
        (ring, "conserved", Noise(strength=np.ones(NODES), rng=1)),
        (ring, "conserved", Noise(beta=1.0, white="nodes", rng=1)),
    ]
    for weights, metric, noise in cases:
        with pytest.raises(nl.InputError, match="noise: in the metric 'conserved'"):
            nl.GradientFlow(nl.J(weights), metric) + noise
    held = nl.GradientFlow(nl.J(ring), "conserved") + Noise(beta=1.0, rng=1) + nl.Constraint([0], [1.0])
    with pytest.raises(nl.InputError, match="a constraint"):
        nl.solve(held, np.ones(NODES), t=1.0, integrator=nl.EulerMaruyama(0.01))


def test_waves_take_no_noise() -> None:
    plain = nl.GradientFlow(nl.J(SPECTRA["l2, uneven weights"][0]))
    with pytest.raises(nl.InputError, match="expected a flow without noise"):
        nl.flows.WaveFlow(plain + Noise(beta=1.0, rng=1))
    with pytest.raises(nl.InputError, match="takes no noise"):
        nl.flows.WaveFlow(plain) + Noise(beta=1.0, rng=1)


@pytest.mark.parametrize(
    "step", [nl.ExactGaussian(), nl.EulerMaruyama(0.1), nl.PlatenWeak2(0.1), nl.ExponentialEuler(0.1)]
)
@pytest.mark.parametrize("words", [{"beta": 3.0}, {"beta": 3.0, "channels": [[1.0, 0.0], [0.5, 1.0]]}])
def test_tensors_have_the_noise_of_arrays(step: Any, words: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    x, f = np.linspace(0, 3, 20)[:, None], np.stack([np.arange(20.0), np.ones(20)], axis=-1)
    ends = []
    for kind in (np.asarray, torch.from_numpy):
        weights = nl.affinity(nl.Gaussian(width=0.5), nl.Points(np.arange(20.0)), kind(x))
        flow = nl.GradientFlow(nl.E(weights, kind(f), 0.5, measure="degree"), "degree") + Noise(rng=1, **words)
        ends.append(nl.solve(flow, t=0.5, integrator=step).final)
    assert isinstance(ends[1], torch.Tensor)
    np.testing.assert_allclose(ends[1].numpy(), ends[0], atol=1e-12)
