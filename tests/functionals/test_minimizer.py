"""The minimizer of E against a dense solve, and what is said where it is not reached."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from nlflow import E, ExpDotProduct, Gaussian, Grid, Laplace, NumericalError, Patch, Points, affinity, from_matrix
from nlflow.functionals.metrics import METRICS
from tests.covering import pairs
from tests.reference import feature_matrix, patch_matrix, plain_degree, position_matrix

pytestmark = pytest.mark.numerical

LINE, PLANE = Grid(15, 0.3), Grid((5, 6), (0.5, 0.8), "isolated")
POINTS = Points(np.arange(12.0), weights=np.linspace(0.5, 1.5, 12))


def normal(shape: Any, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def ring_matrix() -> Any:
    """A directed ring: each node knows itself and the next one."""
    return np.eye(12) + 2 * np.eye(12, k=1) + np.eye(12, k=-11)


CASES: dict[str, tuple[Any, Any]] = {
    "queries": (
        lambda: affinity(ExpDotProduct(), POINTS, normal((12, 3)), queries=normal((12, 3), 2)),
        lambda: feature_matrix(ExpDotProduct(), normal((12, 3), 2), normal((12, 3))),
    ),
    "directed ring": (lambda: from_matrix(ring_matrix(), POINTS), ring_matrix),
    "convolution": (
        lambda: affinity(Laplace(width=0.4), PLANE, method="convolution"),
        lambda: position_matrix(Laplace(width=0.4), PLANE),
    ),
    "table": (
        lambda: affinity(Gaussian(width=0.5, amplitude=0.1), LINE, method="stencil"),
        lambda: position_matrix(Gaussian(width=0.5, amplitude=0.1), LINE),
    ),
    "patches": (
        lambda: affinity(Patch(0.8, patch_size=3, search_radius=2, tokens="patch"), PLANE, normal((5, 6))),
        lambda: patch_matrix(Patch(0.8, patch_size=3, search_radius=2, tokens="patch"), PLANE, normal((5, 6))),
    ),
}


def solved(k: Any, domain: Any, f: Any, fidelity: Any, measure: str) -> Any:
    """Return the minimizer from the normal equations, (diag(K w) - K diag(w) + Lambda) u = Lambda f."""
    w = domain.weights.ravel()
    both = k + k.T
    degree = plain_degree(both, w)
    values = np.broadcast_to(fidelity, domain.shape).ravel() * (degree if measure == "degree" else 1)
    flat = f.reshape(len(k), -1)
    u = np.linalg.solve(np.diag(degree + values) - both * w, values[:, None] * flat)
    return u.reshape(f.shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fidelity", "measure", "channels"),
    pairs(list(CASES), ["weak", "strong", "per node", "with holes", "one node"], METRICS, [(), (1,), (12,)]),
)
def test_minimizer(name: str, fidelity: str, measure: str, channels: tuple[int, ...]) -> None:
    """Also where data is missing (zeros of the fidelity), down to one node that holds all others."""
    build, matrix = CASES[name]
    k = build()
    per_node = np.random.default_rng(3).random(k.domain.shape)
    values: Any = {
        "weak": 1e-4,
        "strong": 50.0,
        "per node": 0.1 + per_node,
        "with holes": np.where(per_node < 0.5, 0, 1.0),
        "one node": np.where(per_node == per_node.max(), 0.5, 0),
    }[fidelity]
    f = normal(k.domain.shape + channels, 4)
    found = E(k, f, values, measure=measure).minimizer()
    assert found.success, found.message
    assert found.residual <= 1.001e-10
    assert f"after {found.iterations} iterations" in found.message
    expected = solved(matrix(), k.domain, f, values, measure)
    np.testing.assert_allclose(found.u, expected, rtol=0, atol=1e-6 if fidelity in ("weak", "one node") else 1e-8)


@pytest.mark.parametrize("measure", METRICS)
@pytest.mark.parametrize("name", CASES)
def test_minimizer_minimizes(name: str, measure: str) -> None:
    k = CASES[name][0]()
    f = normal((*k.domain.shape, 2), 4)
    e = E(k, f, 0.3, measure=measure)
    u = e.minimizer().u
    for metric in METRICS:
        assert np.abs(e.gradient(u, metric)).max() < 1e-8 * np.abs(e.gradient(f, metric)).max()
    for seed in range(5):
        assert e.value(u + 1e-3 * normal(u.shape, seed)) > e.value(u)
    low, high = f.min(axis=tuple(range(len(k.domain.shape)))), f.max(axis=tuple(range(len(k.domain.shape))))
    assert np.all(u >= low - 1e-9)
    assert np.all(u <= high + 1e-9)
    # A uniform fidelity keeps the mean in its own measure.
    np.testing.assert_allclose(e.affinity.mean(u, measure), e.affinity.mean(f, measure), rtol=0, atol=1e-9)


@pytest.mark.parametrize("fidelity", [0.3, np.where(np.arange(15) % 3 == 0, 1.0, 0)])
@pytest.mark.parametrize("measure", METRICS)
def test_constants(measure: str, fidelity: Any) -> None:
    """f constant: so is u, at once. f shifted: so is u, also by 1e8."""
    k = CASES["table"][0]()
    found = E(k, np.full((15, 2), -7.25), fidelity, measure=measure).minimizer()
    np.testing.assert_allclose(found.u, -7.25, rtol=1e-15)
    assert found.success
    f = normal(15)
    expected = E(k, f, fidelity, measure=measure).minimizer().u
    shifted = E(k, 1e8 + f, fidelity, measure=measure).minimizer()
    assert shifted.success
    np.testing.assert_allclose(shifted.u - 1e8, expected, rtol=0, atol=1e-6)


def test_one_constant_channel_among_others() -> None:
    k = CASES["table"][0]()
    f = np.stack([normal(15), np.full(15, 2.0), np.zeros(15)], axis=-1)
    found = E(k, f, 0.2).minimizer()
    np.testing.assert_allclose(found.u, solved(CASES["table"][1](), LINE, f, 0.2, "l2"), rtol=0, atol=1e-9)
    np.testing.assert_allclose(found.u[:, 1], 2, rtol=1e-14)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("maxiter", [1, 3])
def test_too_few_iterations(name: str, maxiter: int) -> None:
    """The residual that is told is the residual of what is returned."""
    build, matrix = CASES[name]
    k = build()
    f = normal((*k.domain.shape, 3), 4)
    e = E(k, f, 1e-3, measure="degree")
    found = e.minimizer(maxiter=maxiter)
    assert not found.success
    assert found.iterations == maxiter
    assert f"after {maxiter} iterations, above rtol=1e-10: raise maxiter or rtol" in found.message

    w, both = k.domain.weights.ravel(), matrix() + matrix().T
    degree = plain_degree(both, w)
    mass = (w * degree)[:, None]
    u, centred = found.u.reshape(len(w), 3), f.reshape(len(w), 3)
    centred = centred - (mass * centred).sum(axis=0) / mass.sum()
    rest = 1e-3 * (f.reshape(len(w), 3) - u) - (u - both * w @ u / degree[:, None])
    residuals = np.sqrt((mass * rest**2).sum(axis=0) / (mass * (1e-3 * centred) ** 2).sum(axis=0))
    largest = np.abs(rest).max() / np.abs(1e-3 * centred).max()
    assert math.isclose(found.residual, max(residuals.max(), largest), rel_tol=1e-6)
    assert E(k, f, 1e-3, measure="degree").minimizer(maxiter=500).success


def test_tolerance() -> None:
    k, f = CASES["patches"][0](), normal((5, 6), 4)
    iterations = []
    for rtol in (1e-2, 1e-6, 1e-12):
        found = E(k, f, 0.01).minimizer(rtol=rtol)
        assert found.success
        assert found.residual <= 1.001 * rtol
        iterations.append(found.iterations)
    assert iterations == sorted(set(iterations))
    unreachable = E(k, f, 0.01).minimizer(rtol=1e-30, maxiter=200)
    assert not unreachable.success
    assert 1e-30 < unreachable.residual < 1e-13
    np.testing.assert_allclose(unreachable.u, E(k, f, 0.01).minimizer().u, rtol=0, atol=1e-8)


def test_start() -> None:
    k, f = CASES["patches"][0](), normal((5, 6), 4)
    e = E(k, f, 0.01)
    found = e.minimizer()
    again = e.minimizer(start=found.u)
    assert again.iterations == 0
    np.testing.assert_allclose(again.u, found.u, rtol=0, atol=1e-13)
    far = e.minimizer(start=1e6 + normal((5, 6), 5))
    assert far.success
    np.testing.assert_allclose(far.u, found.u, rtol=0, atol=1e-7)


@pytest.mark.parametrize("measure", METRICS)
@pytest.mark.parametrize("fidelity", [1e-6, 1e-2, 1.0, 1e4])
def test_float32(fidelity: float, measure: str) -> None:
    f = normal((5, 6, 3), 4).astype(np.float32)
    image = normal((5, 6)).astype(np.float32)
    kernel = Patch(0.8, patch_size=3, search_radius=2)
    found = E(affinity(kernel, PLANE, image), f, fidelity, measure=measure).minimizer()
    assert found.success, found.message
    assert found.u.dtype == np.float32
    matrix = patch_matrix(kernel, PLANE, image)
    expected = solved(matrix, PLANE, f.astype(np.float64), fidelity, measure)
    np.testing.assert_allclose(found.u, expected, rtol=0, atol=1e-3 if fidelity < 1e-3 else 1e-4)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("up", [True, False])
def test_units_do_not_matter(up: bool, dtype: Any) -> None:
    """The minimizer is linear in f, also where squares of f pass the range of the dtype at either end."""
    f = normal((5, 6), 4).astype(dtype)
    k = affinity(Patch(0.8, patch_size=3, search_radius=2), PLANE, f)
    unit = dtype(2.0 ** ((80 if dtype == np.float32 else 600) * (1 if up else -1)))
    expected, found = E(k, f, 0.1).minimizer(), E(k, f * unit, 0.1).minimizer()
    assert found.success
    np.testing.assert_allclose(found.u / unit, expected.u, rtol=0, atol=1e-4 if dtype == np.float32 else 1e-9)


@pytest.mark.parametrize("fidelity", [1e-30, 1e15])
def test_any_fidelity_in_float32(fidelity: float) -> None:
    """Next to nothing: the mean of f. Next to infinity: f itself."""
    f = normal((5, 6), 4).astype(np.float32)
    e = E(affinity(Patch(0.8, patch_size=3, search_radius=2), PLANE, f), f, fidelity, measure="degree")
    found = e.minimizer()
    expected = f if fidelity > 1 else np.broadcast_to(e.affinity.mean(f, "degree"), (5, 6))
    np.testing.assert_allclose(found.u, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("fidelity", [1e-4, 1e-8])
def test_weak_fidelity_in_float32(fidelity: float) -> None:
    """Next to a fidelity of 1e-8, rounding in u - Pu (6e-8) counts as much as f: it must have no mean."""
    grid = Grid((40, 40))
    f = (5 + normal((40, 40, 3))).astype(np.float32)
    k = affinity(Gaussian(width=1.0), grid, window=2)
    found, exact = (E(k, g, fidelity, measure="degree").minimizer() for g in (f, f.astype(np.float64)))
    assert found.success, found.message
    assert exact.success, exact.message
    np.testing.assert_allclose(found.u, exact.u, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spread", [20.0, 60.0, 1e4])
def test_degrees_of_any_size(spread: float) -> None:
    """Softmax attention between keys of unequal length: degrees apart by e^17, e^54 and more.

    In the degree measure all that counts are P and the fidelity, so that each node's equation holds to the tolerance;
    or else the residual says that it does not.
    """
    keys, f = np.sqrt(spread) * np.linspace(0.1, 1, 6), normal(6)
    k = affinity(ExpDotProduct(scale=1.0), Points(np.arange(6.0)), keys)
    e = E(k, f, 1.0, measure="degree")
    found = e.minimizer()
    equations = 2 * found.u - e.affinity.average(found.u) - f
    assert not found.success or np.abs(equations).max() < 1e-6


def test_fidelity_that_vanishes_against_the_degree() -> None:
    """lambda / d underflows: that is not a fidelity of 0, and is not called one."""
    k = affinity(ExpDotProduct(scale=1.0), POINTS, np.full(12, 100.0))
    with pytest.raises(NumericalError, match="degree"):
        E(k, normal(12), 1.0).minimizer()
