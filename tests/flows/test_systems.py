"""Systems of channels, against dense matrices written out and SciPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.linalg import expm

import nlflow as nl
from nlflow.errors import InputError
from nlflow.flows.modes import phi, phi_of_matrices
from nlflow.flows.spectrum import dense_operator
from nlflow.testing import check_flow
from tests.problems import Floats

pytestmark = pytest.mark.numerical

GRID = nl.Grid((6, 5), boundary="reflect")
POINTS = nl.Points(np.random.default_rng(3).uniform(0, 5, (24, 2)), np.random.default_rng(4).uniform(0.5, 1.5, 24))
WIDTHS = (1.2, 2.0)
KINDS: dict[str, tuple[Any, bool, Any]] = {  # domain, whether each channel has a kernel of its own, couplings
    "two kernels": (GRID, True, [1.0, 0.3]),
    "one kernel": (GRID, False, [1.0, 0.3]),
    "couplings": (GRID, False, [[1.0, 0.3], [0.1, 0.5]]),
    "two kernels, couplings": (GRID, True, [[1.0, 0.9], [0.0, 0.5]]),
    "a channel at rest": (GRID, True, [0.0, 0.5]),
    "points": (POINTS, True, [1.0, 0.3]),
    "points, couplings": (POINTS, False, [[1.0, 0.3], [0.3, 0.5]]),
    "points, skew": (POINTS, True, [[1.0, 0.4], [-0.2, 0.5]]),
}


def reacts(u: Any) -> Any:
    """Return the Brusselator's right-hand side, of degree 3."""
    bound = u[..., 0] ** 2 * u[..., 1]
    return np.stack([2 + 2 * bound - 5 * u[..., 0], 3 * u[..., 0] - 2 * bound], axis=-1)


REACTION = nl.Reaction(reacts, (-1, 4), components=2, bound=120)


def kernels(domain: Any, own: bool) -> list[Floats]:
    """Return the kernels of the channels as matrices, of a reflecting grid with the images of each node."""
    if domain is POINTS:
        square = np.sum((domain.nodes[:, None] - domain.nodes) ** 2, axis=-1)
        return [np.exp(-square / (2 * width**2)) for width in (WIDTHS if own else WIDTHS[:1] * 2)]
    return [np.kron(*(_line(n, width) for n in domain.shape)) for width in (WIDTHS if own else WIDTHS[:1] * 2)]


def _line(n: int, width: float) -> Floats:
    i, images = np.arange(n), np.arange(-8, 9)[:, None, None] * 2 * n
    first, second = i[:, None] - i - images, i[:, None] + i + 1 - images
    return np.asarray(sum(np.exp(-(d**2) / (2 * width**2)).sum(axis=0) for d in (first, second)))


def operator(kind: str, metric: str) -> Floats:
    """Return A as a matrix on (channels, nodes)."""
    domain, own, couplings = KINDS[kind]
    weights = domain.weights.ravel()
    blocks = []
    for k in kernels(domain, own):
        both = 2 * k * weights
        degree = both.sum(axis=1)
        blocks.append((np.diag(degree) - both) / (degree[:, None] if metric == "degree" else 1))
    matrix = np.array(couplings)
    matrix = np.diag(matrix) if matrix.ndim == 1 else matrix
    return np.block([[matrix[c, e] * blocks[e] for e in (0, 1)] for c in (0, 1)])


def flow(kind: str, metric: str = "degree", **terms: Any) -> nl.flows.SystemFlow:
    domain, own, couplings = KINDS[kind]
    functionals = [nl.J(nl.affinity(nl.Gaussian(width), domain)) for width in WIDTHS]
    return nl.flows.SystemFlow(functionals if own else functionals[0], couplings, metric, **terms)


def start(kind: str) -> Floats:
    domain = KINDS[kind][0]
    return np.random.default_rng(0).uniform(0.5, 1.5, (*domain.shape, 2))


def flat(u: Floats) -> Floats:
    return u.reshape(-1, 2).T.ravel()


@pytest.mark.parametrize("metric", ["degree", "l2"])
@pytest.mark.parametrize("kind", KINDS)
def test_operator(kind: str, metric: str) -> None:
    problem, matrix = flow(kind, metric), operator(kind, metric)
    u = start(kind)
    assert flat(problem.linear(u)) == pytest.approx(matrix @ flat(u), rel=1e-9, abs=1e-11)
    assert flat(problem.jacobian(u, u)) == pytest.approx(-matrix @ flat(u), rel=1e-9, abs=1e-11)
    values = np.linalg.eigvals(matrix)
    low, high = problem.spectral_bounds()
    assert low <= values.real.min() + 1e-10
    assert np.abs(values).max() <= high * (1 + 1e-10)
    if problem.symmetric:
        assert np.abs(values.imag).max() < 1e-8
    found = np.sort(np.linalg.eigvals(dense_operator(problem)).real)
    assert found == pytest.approx(np.sort(values.real), abs=1e-7 * high)
    assert nl.ExplicitEuler(1.0).stability_limit(problem) == pytest.approx(
        min(2 * v.real / abs(v) ** 2 for v in values if abs(v) > 1e-9), rel=1e-6
    )
    check_flow(problem, u)


INTEGRATORS: dict[str, tuple[Callable[[float], Any], tuple[int, int]]] = {
    "ETD2RK": (nl.ETD2RK, (32, 64)),
    "ETD4RK": (nl.ETD4RK, (20, 40)),
    "IMEX": (nl.IMEX, (32, 64)),
    "ExplicitEuler": (nl.ExplicitEuler, (200, 400)),
}


def measured(problem: Any, u: Floats, exact: Floats, make: Callable[[float], Any], numbers: tuple[int, int]) -> float:
    """Return the order between two numbers of steps to t = 1."""
    errors = []
    for n in numbers:
        found = nl.solve(problem, u, t=1.0, integrator=make(1 / n))
        assert found.success, found.message
        errors.append(float(np.abs(flat(found.final) - exact).max()))
    return math.log(errors[0] / errors[1]) / math.log(numbers[1] / numbers[0])


def reference(kind: str, strength: float) -> Floats:
    """Return the solution of the system with a reaction and a wave, by SciPy."""
    matrix, u = operator(kind, "degree"), start(kind)

    def speed(t: float, y: Floats) -> Floats:
        reacted = flat(strength * reacts(y.reshape(2, -1).T))
        return np.asarray(-matrix @ y + reacted + np.sin(3 * t) * np.cos(np.arange(y.size)))

    return np.asarray(solve_ivp(speed, (0, 1), flat(u), method="DOP853", rtol=3e-14, atol=1e-15).y[:, -1])


def driven(kind: str, reaction: nl.flows.Reaction) -> nl.flows.SystemFlow:
    wave = np.cos(np.arange(start(kind).size)).reshape(2, -1).T.reshape(start(kind).shape)
    return flow(kind) + reaction + nl.flows.Source(lambda t: np.sin(3 * t) * wave)


SLOW = ("points", "points, skew", "couplings", "one kernel")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow if k in SLOW else ()) for k in KINDS])
def test_orders(kind: str) -> None:
    """Against SciPy, with a source that changes: by transforms where there are some, by Krylov methods elsewhere."""
    problem, exact = driven(kind, REACTION), reference(kind, 1.0)
    for name, (make, numbers) in INTEGRATORS.items():
        if name.startswith("ETD") and not problem.symmetric and problem.modes is None:
            with pytest.raises(InputError, match=r"needs a (symmetric affinity|linear part that is self-adjoint)"):
                nl.solve(problem, start(kind), t=1.0, integrator=make(0.1))
            continue
        order = measured(problem, start(kind), exact, make, numbers)
        assert order == pytest.approx(make(1.0).order, abs=0.1), name


def test_order_of_runge_kutta() -> None:
    strong = nl.Reaction(lambda u: 3 * reacts(u), (-1, 4), components=2, bound=360)
    make = lambda dt: nl.RungeKutta(dt=dt, adaptive=False)  # noqa: E731
    exact = reference("two kernels", 3.0)
    assert measured(driven("two kernels", strong), start("two kernels"), exact, make, (112, 160)) == pytest.approx(
        5.0, abs=0.1
    )


@pytest.mark.parametrize("kind", ["two kernels", "points, couplings"])
def test_order_of_convex_splitting(kind: str) -> None:
    mild = nl.Reaction(lambda u: 0.05 * reacts(u), (-1, 4), components=2, bound=6)
    order = measured(driven(kind, mild), start(kind), reference(kind, 0.05), nl.ConvexSplitting, (100, 200))
    assert order == pytest.approx(1.0, abs=0.1)


def test_linear_systems_are_exact() -> None:
    for kind in ("two kernels", "points", "points, couplings"):
        u = start(kind)
        exact = expm(-2.0 * operator(kind, "degree")) @ flat(u)
        assert np.abs(flat(nl.solve(flow(kind), u, t=2.0).final) - exact).max() < 1e-11
        assert np.abs(flat(nl.solve(flow(kind), u, t=2.0, integrator=nl.ETD4RK(2.0)).final) - exact).max() < 1e-11


def test_energy_falls_as_the_double_sum_does() -> None:
    problem, u = flow("points", "l2"), start("points")
    k, w = kernels(POINTS, True), POINTS.weights

    def energy(u: Floats) -> float:
        pairs = [np.sum(w[:, None] * w * k[c] * (u[:, None, c] - u[None, :, c]) ** 2) / 2 for c in (0, 1)]
        return float(pairs[0] + 0.3 * pairs[1])

    assert problem.energy(u) == pytest.approx(energy(u), rel=1e-12)
    found = nl.solve(problem, u, t_eval=[0.0, 0.01, 0.02, 0.1])
    assert np.all(np.diff(found.energy) < 0)
    assert found.energy[-1] == pytest.approx(energy(found.final), rel=1e-10)
    assert problem.mean(found.final).ravel() == pytest.approx((w @ u) / w.sum(), rel=1e-10)
    assert math.isnan(flow("couplings").energy(start("couplings")))


@pytest.mark.parametrize("metric", ["l2", "degree"])
def test_energy_weighs_the_potential_of_a_channel_in_its_own_measure(metric: str) -> None:
    """It falls by |du/dt|^2 in the measure in which each channel descends, also where kernels have other degrees."""
    rng = np.random.default_rng(2)
    functionals = [nl.J(nl.affinity(nl.Gaussian(width), POINTS)) for width in WIDTHS]
    driven = nl.SystemFlow(
        functionals, [1.0, 0.3], metric, reaction=nl.AllenCahn(0.5, interval=(-5, 5)),
        source=rng.standard_normal((24, 2)),
    )  # fmt: skip
    u = rng.standard_normal((24, 2))
    v, h = driven.velocity(u), 1e-6
    masses = [POINTS.weights * (1.0 if metric == "l2" else one.affinity.degree) for one in functionals]
    expected = -float(np.sum(np.stack(masses, axis=-1) * v**2))
    slope = (driven.energy(u + h * v) - driven.energy(u - h * v)) / (2 * h)
    assert slope == pytest.approx(expected, rel=1e-6)


def test_channels_are_added_up_whatever_their_measures() -> None:
    """Kernels of one object and of two objects that are alike have the same norms, speeds and distances."""
    weights = nl.affinity(nl.Gaussian(1.2), POINTS)
    u = np.random.default_rng(5).standard_normal((24, 2))
    one, two = (
        nl.SystemFlow(functionals, [1.0, 0.3]) for functionals in (nl.J(weights), [nl.J(weights), nl.J(weights)])
    )
    assert one.norm(u) == pytest.approx(two.norm(u), rel=1e-14)
    assert one.speed(u) == pytest.approx(two.speed(u), rel=1e-14)
    assert one.distance_to_constant(u) == pytest.approx(two.distance_to_constant(u), rel=1e-14)


def test_held_values() -> None:
    held = nl.Constraint(np.array([0, 7]), np.array([[1.0, 0.2], [0.5, 0.7]]))
    problem, u = flow("two kernels", reaction=REACTION, constraint=held), start("two kernels")
    reference = nl.solve(problem, u, t=1.0, integrator=nl.RungeKutta(1e-10, 1e-12)).final
    assert reference.reshape(-1, 2)[[0, 7]] == pytest.approx(held.values)
    for integrator, allowed in ((nl.ETD4RK(0.02), 1e-6), (nl.IMEX(0.02), 1e-2)):
        assert np.abs(nl.solve(problem, u, t=1.0, integrator=integrator).final - reference).max() < allowed


def test_resumed_runs_have_the_same_bits(tmp_path: Any) -> None:
    problem, u = flow("two kernels", reaction=REACTION), start("two kernels")
    options: dict[str, Any] = {"t_eval": [0.0, 0.5, 1.0], "integrator": nl.ETD2RK(0.05)}
    path = tmp_path / "run.npz"
    stop = nl.flows.Callback(lambda t, u, flow: t >= 0.5)
    nl.solve(problem, u, trackers=[nl.Checkpoint(path, every=1), stop], **options)
    whole, again = nl.solve(problem, u, **options), nl.solve(problem, u, resume=path, **options)
    assert np.array_equal(whole.final, again.final)
    other = nl.flows.SystemFlow(problem.functionals[::-1], [1.0, 0.3], reaction=REACTION)
    with pytest.raises(nl.FileFormatError, match="another problem"):
        nl.solve(other, u, resume=path, **options)


@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_functions_of_matrices(k: int) -> None:
    """Against exp of an augmented matrix; also of a defective one, and of one far from normal."""
    rng = np.random.default_rng(k)
    root = rng.standard_normal((6, 3, 3))
    z = np.concatenate([root @ root.swapaxes(1, 2) * 10.0 ** np.arange(-4, 2)[:, None, None], np.zeros((2, 3, 3))])
    z[-1] = [[1, 30, 0], [0, 1, 2], [0, 0, 1]]
    for one, found in zip(z, phi_of_matrices(k, z), strict=True):
        whole = np.zeros((3 * (k + 1), 3 * (k + 1)))
        whole[:3, :3] = -one
        for j in range(k):
            whole[3 * j : 3 * j + 3, 3 * j + 3 : 3 * j + 6] = np.eye(3)
        exact = expm(whole)[:3, 3 * k :]
        assert np.abs(found - exact).max() < 1e-12 * max(1.0, float(np.abs(exact).max()))
    diagonal = phi_of_matrices(k, np.diag([0.0, 1e-9, 40.0])[None])[0]
    assert np.diag(diagonal) == pytest.approx(phi(k, np.array([0.0, 1e-9, 40.0])), rel=1e-12, abs=1e-15)


_J = nl.J(nl.affinity(nl.Gaussian(1.0), GRID))
_OTHER = nl.J(nl.affinity(nl.Gaussian(1.0), nl.Grid((6, 5), spacing=2.0)))
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "negative": (lambda: nl.flows.SystemFlow(_J, [1.0, -0.1]), "diffusivity: got .* real part -0.1"),
    "grows": (lambda: nl.flows.SystemFlow(_J, [[1.0, 2.0], [2.0, 1.0]]), "diffusivity: got .* real part -1"),
    "not square": (lambda: nl.flows.SystemFlow(_J, np.ones((2, 3))), r"diffusivity: got shape \(2, 3\)"),
    "number": (lambda: nl.flows.SystemFlow(_J, 1.0), r"diffusivity: got 0 dimension.* one number for each channel"),
    "count": (lambda: nl.flows.SystemFlow([_J, _J, _J], [1.0, 0.5]), "functional: got 3 for the 2 channels"),
    "kind": (lambda: nl.flows.SystemFlow(_J.affinity, [1.0]), "functional: got .*Affinity, expected J"),  # type: ignore[arg-type]
    "domains": (
        lambda: nl.flows.SystemFlow([_J, _OTHER], [1.0, 0.5]),
        "functional: got functionals on different domains",
    ),
    "components": (
        lambda: nl.flows.SystemFlow(_J, [1.0] * 3, reaction=REACTION),
        "reaction: .* of 2 components, expected 3",
    ),
    "added": (lambda: nl.flows.SystemFlow(_J, [1.0] * 3) + REACTION, "reaction: .* of 2 components, expected 3"),
    "signal": (lambda: nl.solve(nl.flows.SystemFlow(_J, [1.0, 0.5]), np.ones((6, 5)), t=1.0), r"start: .* \(6, 5, 2\)"),
    "channels": (
        lambda: nl.solve(nl.flows.SystemFlow(_J, [1.0, 2]), np.ones((6, 5, 3)), t=1.0),
        r"start: .* \(6, 5, 2\)",
    ),
    "pieces": (
        lambda: nl.solve(
            nl.flows.SystemFlow(_J, [1.0]), np.ones((6, 5, 1)), t=1.0, integrator=nl.flows.AttentionStep()
        ),
        "AttentionStep is made of the flow's average",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_systems(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("couplings", [[1.0, 0.3], [[1.0, 0.3], [0.0, 0.5]]], ids=["diagonal", "couplings"])
def test_tensors_have_the_results_of_arrays(couplings: Any) -> None:
    torch = pytest.importorskip("torch", reason="optional")
    x, u = np.linspace(0, 1, 9)[:, None], np.random.default_rng(1).standard_normal((9, 2))

    def followed(features: Any, begun: Any) -> Any:
        weights = [nl.J(nl.affinity(nl.Gaussian(width), nl.Points(x), features)) for width in (0.2, 0.5)]
        flow = nl.SystemFlow(weights, couplings, "l2", reaction=nl.AllenCahn(0.5, interval=(-9, 9)))
        found = nl.solve(flow, begun, t=0.5, integrator=nl.RungeKutta(1e-10, 1e-12))
        return np.asarray(found.final), found.energy

    expected, energies = followed(x, u)
    found, others = followed(torch.from_numpy(x), torch.from_numpy(u))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    np.testing.assert_allclose(others, energies, rtol=1e-9)


@pytest.mark.parametrize("metric", ["l2", "degree"])
def test_waves_of_systems_keep_their_energy(metric: str) -> None:
    """Kinetic energy is that of the masses of each channel, in which its kernel pulls it."""
    functionals = [nl.J(nl.affinity(nl.Gaussian(width), POINTS)) for width in WIDTHS]
    wave = nl.WaveFlow(nl.SystemFlow(functionals, [1.0, 0.3], metric), density=np.linspace(0.5, 2.0, 24))
    begun = wave.state(*np.random.default_rng(6).standard_normal((2, 24, 2)))
    found = nl.solve(wave, begun, t_eval=[0.0, 1.0, 4.0], integrator=nl.RungeKutta(1e-10, 1e-12))
    np.testing.assert_allclose(found.energy, found.energy[0], rtol=1e-8)


def test_no_limit_is_told_of_waves_that_grow_of_themselves() -> None:
    """Eigenvalues of A are complex, so that some wave grows however short the step is."""
    skew = nl.SystemFlow(nl.J(nl.affinity(nl.Gaussian(1.2), POINTS)), [[1.0, 0.9], [-0.9, 0.5]])
    rng = np.random.default_rng(8)
    keys, queries = rng.standard_normal((2, 24, 3))
    seeing = nl.AttentionFlow(nl.affinity(nl.ExpDotProduct(), POINTS, keys, queries=queries))
    for flow in (skew, seeing):
        assert np.abs(np.linalg.eigvals(dense_operator(flow)).imag).max() > 1e-3
        assert math.isnan(nl.StoermerVerlet(0.1).stability_limit(nl.WaveFlow(flow)))
