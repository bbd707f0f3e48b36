"""J and E: value and gradient against double sums and differences of them, and what is refused."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from nlflow import (
    E,
    ExpDotProduct,
    Gaussian,
    Grid,
    InputError,
    J,
    Laplace,
    NumericalError,
    Patch,
    Points,
    affinity,
    from_matrix,
)
from nlflow.functionals.fidelity import NodeFidelity
from nlflow.functionals.metrics import METRICS
from tests.covering import pairs
from tests.reference import feature_matrix, patch_matrix, plain_degree, plain_dirichlet, position_matrix

pytestmark = pytest.mark.numerical

POINTS = Points(np.arange(8.0), weights=np.linspace(0.5, 1.5, 8))
LINE, PLANE = Grid(9, 0.3, "isolated"), Grid((3, 4), (0.5, 0.8), "periodic")


def normal(shape: Any, seed: int = 1) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def sparse_matrix() -> Any:
    rng = np.random.default_rng(2)
    return rng.random((8, 8)) * (rng.random((8, 8)) < 0.4) + np.eye(8)


# Each: the affinity of k, and k_ij by double sums. The first three are not symmetric.
CASES: dict[str, tuple[Any, Any]] = {
    "queries": (
        lambda: affinity(ExpDotProduct(amplitude=0.5), POINTS, normal((8, 3)), queries=normal((8, 3), 2)),
        lambda: feature_matrix(ExpDotProduct(amplitude=0.5), normal((8, 3), 2), normal((8, 3))),
    ),
    "matrix": (lambda: from_matrix(sparse_matrix(), POINTS), sparse_matrix),
    "maps": (
        lambda: affinity(
            ExpDotProduct(query_map=normal((3, 2), 3)[:, :2], key_map=normal((3, 2), 4)), PLANE, features()
        ),
        lambda: feature_matrix(
            ExpDotProduct(),
            features().reshape(12, 3) @ normal((3, 2), 3),
            features().reshape(12, 3) @ normal((3, 2), 4),
        ),
    ),
    "features": (
        lambda: affinity(Gaussian(width=1.2), POINTS, normal((8, 3))),
        lambda: feature_matrix(Gaussian(width=1.2), normal((8, 3)), normal((8, 3))),
    ),
    "convolution": (
        lambda: affinity(Laplace(width=0.4), PLANE, method="convolution"),
        lambda: position_matrix(Laplace(width=0.4), PLANE),
    ),
    "table": (
        lambda: affinity(Gaussian(width=0.5, amplitude=2.0), LINE, method="stencil"),
        lambda: position_matrix(Gaussian(width=0.5, amplitude=2.0), LINE),
    ),
    "patches": (
        lambda: affinity(Patch(0.8, patch_size=3, search_radius=2), LINE, normal(9)),
        lambda: patch_matrix(Patch(0.8, patch_size=3, search_radius=2), LINE, normal(9)),
    ),
    "patches, recomputed": (
        lambda: affinity(Patch(0.8, patch_size=3, search_radius=1), PLANE, normal((3, 4)), store=False),
        lambda: patch_matrix(Patch(0.8, patch_size=3, search_radius=1), PLANE, normal((3, 4))),
    ),
}


def features() -> Any:
    return 0.7 * normal((3, 4, 3), 5)


class Plain:
    """J and E as double sums over K = k + k^T."""

    def __init__(self, k: Any, domain: Any, observed: Any = None, fidelity: Any = 0.0, measure: str = "l2") -> None:
        self.k, self.observed, self.measure = k, observed, measure
        self.w = domain.weights.ravel()
        self.symmetrized = k + k.T
        self.degree = plain_degree(self.symmetrized, self.w)
        self.fidelity = np.broadcast_to(fidelity, domain.shape).ravel()

    def node_measure(self, metric: str) -> Any:
        return self.w if metric == "l2" else self.w * self.degree

    def value(self, u: Any) -> float:
        value = plain_dirichlet(self.k, self.w, u)
        if self.observed is None:
            return value
        misfit = np.sum((u - self.observed).reshape(len(self.k), -1) ** 2, axis=1)
        return value + 0.5 * math.fsum(self.node_measure(self.measure) * self.fidelity * misfit)

    def gradient(self, u: Any, metric: str) -> Any:
        v = u.reshape(len(self.k), -1)
        f = None if self.observed is None else self.observed.reshape(len(self.k), -1)
        gradient = np.zeros_like(v)
        for i, j in itertools.product(range(len(v)), repeat=2):
            gradient[i] += self.w[j] * self.symmetrized[i, j] * (v[i] - v[j])
        if f is not None:
            gradient += (self.node_measure(self.measure) / self.w * self.fidelity)[:, None] * (v - f)
        return (gradient / (self.node_measure(metric) / self.w)[:, None]).reshape(u.shape)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [(), (1,), (3,)])
@pytest.mark.parametrize("name", CASES)
def test_dirichlet_energy(name: str, channels: tuple[int, ...]) -> None:
    build, matrix = CASES[name]
    j = J(build())
    plain = Plain(matrix(), j.affinity.domain)
    u = normal(j.affinity.domain.shape + channels, 6)
    assert math.isclose(j.value(u), plain.value(u), rel_tol=1e-12)
    assert math.isclose(j.value(u, average=j.affinity.average(u)), plain.value(u), rel_tol=1e-12)
    total = math.fsum(plain.w * plain.degree)
    assert math.isclose(j.value(u, normalize=True), plain.value(u) / total, rel_tol=1e-12)
    for metric in METRICS:
        np.testing.assert_allclose(j.gradient(u, metric), plain.gradient(u, metric), rtol=0, atol=1e-12 * total)
    np.testing.assert_array_equal(j.gradient(u), j.gradient(u, "l2"))
    assert j.observed is None
    assert j.fidelity_in("l2") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "measure", "per_node", "channels"), pairs(list(CASES), METRICS, [False, True], [(), (1,), (3,)])
)
def test_energy_with_fidelity(name: str, measure: str, per_node: bool, channels: tuple[int, ...]) -> None:
    build, matrix = CASES[name]
    k = build()
    f, u, v = (normal(k.domain.shape + channels, seed) for seed in (6, 7, 8))
    fidelity = np.maximum(normal(k.domain.shape, 9), 0) if per_node else 0.7
    e = E(k, f, fidelity, measure=measure)
    plain = Plain(matrix(), k.domain, f, fidelity, measure)
    assert math.isclose(e.value(u), plain.value(u), rel_tol=1e-12)
    assert math.isclose(e.value(u, average=e.affinity.average(u)), plain.value(u), rel_tol=1e-12)
    total = math.fsum(plain.w * plain.degree)
    assert math.isclose(e.value(u, normalize=True), plain.value(u) / total, rel_tol=1e-12)
    for metric in METRICS:
        gradient = e.gradient(u, metric)
        np.testing.assert_allclose(gradient, plain.gradient(u, metric), rtol=0, atol=1e-12 * max(total, 1))
        # E is quadratic, so the central difference over any step is its derivative, up to rounding.
        slope = (plain.value(u + v) - plain.value(u - v)) / 2
        weighted = plain.node_measure(metric).reshape(k.domain.shape + (1,) * len(channels)) * gradient * v
        assert math.isclose(float(weighted.sum()), slope, rel_tol=1e-9, abs_tol=1e-11 * plain.value(u))
        slope = (e.value(u + v) - e.value(u - v)) / 2
        assert math.isclose(float(weighted.sum()), slope, rel_tol=1e-9, abs_tol=1e-11 * plain.value(u))
    assert e.observed is f or np.array_equal(e.observed, f)


@pytest.mark.parametrize("name", CASES)
def test_constants_have_no_energy(name: str) -> None:
    j = J(CASES[name][0]())
    u = np.full(j.affinity.domain.shape, -3.7)
    assert j.value(u) <= 1e-28
    assert np.abs(j.gradient(u, "degree")).max() <= 1e-14
    assert E(CASES[name][0](), u, 2.0).value(u) <= 1e-28


@pytest.mark.parametrize("name", CASES)
def test_nearly_constant_signals(name: str) -> None:
    """J of 1e8 + s is J of s: about the mean nothing cancels (1e8^2 eps is 1)."""
    j = J(CASES[name][0]())
    s = np.round(normal(j.affinity.domain.shape, 6) * 2**20) / 2**20  # 1e8 + s is exact
    assert math.isclose(j.value(1e8 + s), j.value(s), rel_tol=1e-6)


@pytest.mark.parametrize("name", ["features", "table", "convolution"])
def test_nearly_constant_signals_in_float32(name: str) -> None:
    k = CASES[name][0]()
    if name == "features":
        k = affinity(Gaussian(width=1.2), POINTS, normal((8, 3)).astype(np.float32))
    s = np.round(normal(k.domain.shape, 6) * 2**8) / 2**8
    exact = J(CASES[name][0]()).value(s)
    assert math.isclose(J(k).value((2000 + s).astype(np.float32)), exact, rel_tol=2e-3)


@pytest.mark.slow
def test_large_image_in_float32() -> None:
    """Sums over a million nodes with a channel axis last keep the digits that float32 has."""
    u = np.random.default_rng(0).random((1000, 1000, 3)).astype(np.float32)
    k = affinity(Gaussian(width=1.0), Grid((1000, 1000)))
    np.testing.assert_allclose(k.mean(u, "degree").ravel(), u.mean(axis=(0, 1), dtype=np.float64), rtol=2e-6)
    assert math.isclose(J(k).value(u), J(k).value(u.astype(np.float64)), rel_tol=2e-6)


# --- range -----------------------------------------------------------------------------------------------------------


def test_value_that_overflows() -> None:
    u = normal(8, 2)
    k = affinity(ExpDotProduct(scale=1.0), POINTS, math.sqrt(1000.0) + 0.01 * normal(8))
    for energy in (J(k), E(k, normal(8, 3), 1.0, measure="degree"), E(k, normal(8, 3), 1.0)):
        with pytest.raises(NumericalError, match=r"value: the sum of degrees is exp\(\d+\), too .*normalize=True"):
            energy.value(u)
        assert 0 < energy.value(u, normalize=True) < 10
    with pytest.raises(NumericalError, match="degree"):
        E(k, u, 1.0, measure="degree").gradient(u)
    assert np.isfinite(E(k, u, 1.0, measure="degree").gradient(u, "degree")).all()


@pytest.mark.parametrize("method", ["stencil", "convolution", "dense"])
def test_differences_whose_squares_overflow_are_no_value(method: str) -> None:
    k = affinity(Gaussian(width=2.0), Grid(30, boundary="periodic"), method=method)
    assert J(k).value(np.full(30, 1e308)) == 0  # a constant has none
    with pytest.raises(NumericalError, match="value: the squares of the signal overflow"):
        J(k).value(np.tile([1e308, -1e308], 15))


def test_value_in_range_though_the_degrees_are_not() -> None:
    """The product of a small and of a huge number: J is known through its logarithm."""
    keys = np.full((8, 1), math.sqrt(740.0))
    k, u = affinity(ExpDotProduct(scale=1.0), POINTS, keys), normal(8)
    moderate = affinity(ExpDotProduct(scale=1.0), POINTS, np.full((8, 1), math.sqrt(40.0)))
    expected = J(moderate).value(u * 1e-60) * math.exp(700)
    assert math.isclose(J(k).value(u * 1e-60), expected, rel_tol=1e-10)


def test_degrees_that_underflow() -> None:
    """All logits at -1e4: the degree metric knows nothing of it; what cannot be represented says so."""
    keys, u, f = np.full((8, 1), 100.0), normal(8, 2), normal(8, 3)
    k = affinity(ExpDotProduct(scale=-1.0), POINTS, keys)
    assert J(k).value(u) == 0
    same = affinity(ExpDotProduct(scale=0.0), POINTS, keys)
    assert math.isclose(J(k).value(u, normalize=True), J(same).value(u, normalize=True), rel_tol=1e-12)
    e, expected = (E(a, f, 0.5, measure="degree") for a in (k, same))
    np.testing.assert_allclose(e.gradient(u, "degree"), expected.gradient(u, "degree"), rtol=0, atol=1e-13)
    np.testing.assert_allclose(e.minimizer().u, expected.minimizer().u, rtol=0, atol=1e-9)
    e = E(k, f, 0.5)  # lambda / d is about exp(1e4)
    assert math.isclose(e.value(u), 0.25 * math.fsum(POINTS.weights * (u - f) ** 2), rel_tol=1e-12)
    for call in (lambda: e.value(u, normalize=True), lambda: e.gradient(u, "degree"), lambda: e.minimizer()):
        with pytest.raises(NumericalError):
            call()


def test_signal_that_overflows() -> None:
    with pytest.raises(NumericalError, match=r"^value: "):
        J(affinity(Gaussian(width=1.0), LINE)).value(1e200 * normal(9))


# --- types -----------------------------------------------------------------------------------------------------------

FLOAT32: dict[str, Any] = {
    "stencil": lambda f: affinity(Patch(0.8, patch_size=3, search_radius=2), LINE, f),
    "dense": lambda f: affinity(Gaussian(width=1.0), LINE, f),
    "table": lambda f: affinity(Gaussian(width=0.5), LINE, method="stencil"),
    "convolution": lambda f: affinity(Gaussian(width=0.5), LINE, method="convolution"),
}


@pytest.mark.parametrize("measure", METRICS)
@pytest.mark.parametrize("per_node", [False, True])
@pytest.mark.parametrize("name", FLOAT32)
def test_float32_stays_float32(name: str, per_node: bool, measure: str) -> None:
    f, u = normal(9).astype(np.float32), normal(9, 2).astype(np.float32)
    fidelity = np.linspace(0, 1, 9) if per_node else 0.5
    e, exact = E(FLOAT32[name](f), f, fidelity, measure=measure), None
    exact = E(FLOAT32[name](f.astype(np.float64)), f.astype(np.float64), fidelity, measure=measure)
    assert isinstance(e.value(u), float)
    assert math.isclose(e.value(u), exact.value(u.astype(np.float64)), rel_tol=1e-5)
    for metric in METRICS:
        gradient = e.gradient(u, metric)
        np.testing.assert_allclose(gradient, exact.gradient(u.astype(np.float64), metric), rtol=0, atol=1e-5)
        assert gradient.dtype == np.float32
        assert J(e.given).gradient(u, metric).dtype == np.float32
    found = e.minimizer()
    assert found.success, found.message
    np.testing.assert_allclose(found.u, exact.minimizer().u, rtol=0, atol=1e-4)
    assert found.u.dtype == np.float32


@pytest.mark.parametrize("measure", METRICS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_torch_gives_the_numbers_of_numpy(dtype: str, measure: str) -> None:
    torch = pytest.importorskip("torch", reason="the device code")
    keys, queries, f, u = (normal((8, 3), seed).astype(dtype) for seed in (1, 2, 3, 4))
    mask = np.linspace(0, 2, 8).astype(dtype)
    both = []
    for convert in (np.asarray, torch.from_numpy):
        k = affinity(ExpDotProduct(), POINTS, convert(keys), queries=convert(queries))
        both.append(E(k, convert(f), convert(mask), measure=measure))
    here, there = both
    tolerance = 1e-10 if dtype == "float64" else 1e-4
    for normalize in (True, False):
        value = there.value(torch.from_numpy(u), normalize=normalize)
        assert isinstance(value, float)
        assert math.isclose(value, here.value(u, normalize=normalize), rel_tol=tolerance)
    for metric in METRICS:
        gradient = there.gradient(torch.from_numpy(u), metric)
        assert isinstance(gradient, torch.Tensor)
        assert gradient.dtype == getattr(torch, dtype)
        np.testing.assert_allclose(gradient.numpy(), here.gradient(u, metric), rtol=tolerance, atol=tolerance)
    found = there.minimizer()
    assert found.success
    assert isinstance(found.u, torch.Tensor)
    assert found.u.dtype == getattr(torch, dtype)
    np.testing.assert_allclose(found.u.numpy(), here.minimizer().u, rtol=0, atol=10 * tolerance)


def test_another_kernel_keeps_the_rest() -> None:
    k, other = (affinity(Gaussian(width=h), LINE) for h in (0.3, 0.6))
    f, u = normal(9), normal(9, 2)
    e = E(k, f, np.linspace(0, 1, 9), measure="degree").with_affinity(other)
    assert e.value(u) == E(other, f, np.linspace(0, 1, 9), measure="degree").value(u)
    assert e.given is other
    assert J(k).with_affinity(other).value(u) == J(other).value(u)


def test_node_fidelity() -> None:
    v = normal((4, 3))
    scalar, vector = NodeFidelity(0.5), NodeFidelity(np.array([0, 1, 2, 4.0]))
    np.testing.assert_array_equal(scalar.times(v), 0.5 * v)
    np.testing.assert_array_equal(vector.times(v), np.array([[0], [1], [2], [4.0]]) * v)
    np.testing.assert_allclose(scalar.damped(v, 2.0), v / 2)
    np.testing.assert_allclose(vector.damped(v[:, 0], 0.5), v[:, 0] / [1, 1.5, 2, 3])
    assert scalar.bounds() == (0.5, 0.5)
    assert vector.bounds() == (0.0, 4.0)


# --- what is refused -------------------------------------------------------------------------------------------------

K = affinity(Gaussian(width=0.5), LINE)
F = normal(9)
REFUSED: dict[str, tuple[Any, str]] = {
    "no affinity": (lambda: J(np.eye(9)), r"affinity: got ndarray, expected an Affinity; build one with affinity\(\)"),
    "a kernel": (lambda: E(Gaussian(1.0), F, 1.0), r"affinity: got Gaussian, expected an Affinity"),
    "u": (lambda: J(K).value(F[:8]), r"u: got shape \(8,\), expected \(9,\) or \(9, 'D'\)"),
    "u with NaN": (lambda: J(K).gradient(F * np.nan), r"u: got 9 NaN or infinite"),
    "observed": (lambda: E(K, F[:8], 1.0), r"observed: got shape \(8,\), expected \(9,\)"),
    "observed with inf": (
        lambda: E(K, np.full(9, np.inf), 1.0),
        r"observed: got 9 NaN or infinite.*; replace them first, or give a fidelity of 0 there$",
    ),
    "u of other channels": (
        lambda: E(K, F, 1.0).value(F[:, None]),
        r"u: got shape \(9, 1\), expected \(9,\), that of the observed signal",
    ),
    "gradient of other channels": (
        lambda: E(K, F, 1.0).gradient(F[:, None]),
        r"u: got shape \(9, 1\), expected \(9,\)",
    ),
    "negative": (lambda: E(K, F, -1.0), r"fidelity: got -1.0, expected a finite real number >= 0; 0 switches the term"),
    "negative somewhere": (
        lambda: E(K, F, np.linspace(-0.5, 1, 9)),
        r"fidelity: got -0.5 at some node, expected values >= 0 \(0 where data is missing\)",
    ),
    "fidelity for other nodes": (
        lambda: E(K, F, np.ones(8)),
        r"fidelity: got shape \(8,\), expected a number or \(9,\), one for each node",
    ),
    "fidelity for channels": (
        lambda: E(K, F[:, None], np.ones((9, 1))),
        r"fidelity: got shape \(9, 1\), expected a num",
    ),
    "fidelity with NaN": (lambda: E(K, F, np.full(9, np.nan)), r"fidelity: got 9 NaN or infinite"),
    "infinite fidelity": (lambda: E(K, F, math.inf), r"fidelity: got inf, expected a finite real number >= 0"),
    "fidelity in words": (lambda: E(K, F, "strong"), r"fidelity: got 'strong'"),
    "no fidelity": (lambda: E(K, F, None), r"fidelity: got None"),
    "measure": (lambda: E(K, F, 1.0, measure="L2"), r"measure: got 'L2', expected one of 'l2', 'degree'"),
    "metric": (lambda: J(K).gradient(F, "euclid"), r"metric: got 'euclid', expected one of 'l2', 'degree'"),
    "metric of E": (lambda: E(K, F, 1.0).gradient(F, None), r"metric: got None"),
    "metric of the fidelity": (lambda: E(K, F, 1.0).fidelity_in("h1"), r"metric: got 'h1'"),
    "rtol": (lambda: E(K, F, 1.0).minimizer(rtol=0), r"rtol: got 0, expected a finite real number > 0"),
    "maxiter": (lambda: E(K, F, 1.0).minimizer(maxiter=0), r"maxiter: got 0, expected an integer >= 1"),
    "start": (lambda: E(K, F, 1.0).minimizer(start=F[:8]), r"start: got shape \(8,\), expected \(9,\)"),
    "start of other channels": (lambda: E(K, F, 1.0).minimizer(start=np.ones((9, 2))), r"start: got shape \(9, 2\)"),
    "nothing to fit": (
        lambda: E(K, F, 0.0).minimizer(),
        r"fidelity: got 0 at every node, so every constant minimizes the functional; set it > 0 somewhere",
    ),
    "nothing to fit at any node": (lambda: E(K, F, np.zeros(9)).minimizer(), r"fidelity: got 0 at every node"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(InputError, match=f"^{message}"):
        call()


def test_refused_mixtures() -> None:
    torch = pytest.importorskip("torch", reason="the device code")
    f = torch.from_numpy(normal((8, 3)))
    k = affinity(ExpDotProduct(), POINTS, f)
    with pytest.raises(InputError, match=r"observed: got dtype float64, expected torch.float64"):
        E(k, normal((8, 3)), 1.0)
    with pytest.raises(InputError, match="fidelity: got ndarray"):
        E(k, f, np.ones(8))
    with pytest.raises(InputError, match="fidelity: got Tensor"):
        E(affinity(ExpDotProduct(), POINTS, f.numpy()), f.numpy(), torch.ones(8, dtype=torch.float64))
