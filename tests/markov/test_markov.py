"""Markov chains of every affinity against plain matrices: laws, stationary laws, spectra."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest

import nlflow as nl
from nlflow import MarkovChain
from tests.chains import (
    CASES,
    NOT_SYMMETRIC,
    TOLERANCE,
    built,
    directed_ring,
    given,
    lazily,
    normal,
    ring,
    stationary_law,
    transitions,
)
from tests.problems import Floats, torch_on_one_thread
from tests.reference import check_affinity

pytestmark = pytest.mark.numerical

DTYPES = ("float64", "float32")
ALL = pytest.mark.parametrize("name", CASES)
BOTH = pytest.mark.parametrize("dtype", DTYPES)
LAZY = pytest.mark.parametrize("laziness", [0.0, 0.3])


# --- the operator ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@ALL
@BOTH
@LAZY
def test_expectations_and_laws(laziness: float, dtype: str, name: str) -> None:
    """Forwards and backwards, k moves at once, for a start at a node and for a law, with and without channels."""
    affinity, p = built(name, dtype)
    p, shape, tolerance = lazily(p, laziness), affinity.domain.shape, TOLERANCE[dtype]
    chain = MarkovChain(affinity, laziness=laziness)
    n = chain.states
    assert n == len(p) == affinity.domain.size
    for channels in ((), (3,)):
        v = normal(shape + channels, 5, dtype)
        for steps in (0, 1, 4):
            moved = chain.expectation(v, steps)
            assert moved.dtype == v.dtype
            expected = np.linalg.matrix_power(p, steps) @ v.reshape(n, -1).astype(float)
            np.testing.assert_allclose(moved, expected.reshape(v.shape), rtol=0, atol=10 * tolerance)
    np.testing.assert_array_equal(chain.expectation(v, 0), v)
    start = np.random.default_rng(6).random(shape)
    start /= start.sum()
    one = np.zeros(n)
    one[n // 3] = 1
    for begin, law in ((start, start.ravel()), (n // 3, one), (np.int32(n // 3), one)):
        for steps in (0, 1, 7):
            found = chain.law(begin, steps)
            assert found.shape == shape
            assert found.dtype == np.float64
            assert found.min() >= 0
            assert found.sum() == pytest.approx(1, abs=1e-14)
            expected = (law @ np.linalg.matrix_power(p, steps)).reshape(shape)
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@ALL
@BOTH
@LAZY
def test_matrix(laziness: float, dtype: str, name: str) -> None:
    affinity, p = built(name, dtype)
    chain = MarkovChain(affinity, laziness=laziness)
    found = chain.matrix()
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, lazily(p, laziness), rtol=0, atol=TOLERANCE[dtype])
    np.testing.assert_allclose(found.sum(axis=1), 1, rtol=0, atol=1e-14)
    assert np.all(found[lazily(p, laziness) == 0] == 0)  # what cannot happen, cannot happen
    assert np.all(found[lazily(p, laziness) > 1e-14] > 0)
    found[:] = -1.0
    assert chain.matrix().min() >= 0  # a copy


def test_a_matrix_of_many_columns_is_built_in_parts() -> None:
    """2100 states: more than one block of columns."""
    grid = nl.Grid((42, 50), boundary="periodic")
    matrix = MarkovChain(nl.affinity(nl.TopHat(radius=1.0), grid)).matrix()
    index = np.arange(grid.size).reshape(grid.shape)
    expected = np.zeros((grid.size, grid.size))
    for shift, axis in ((0, 0), (1, 0), (-1, 0), (1, 1), (-1, 1)):
        expected[index.ravel(), np.roll(index, shift, axis).ravel()] = 0.2
    np.testing.assert_allclose(matrix, expected, rtol=0, atol=1e-15)


def test_the_contract_finds_a_broken_push(monkeypatch: pytest.MonkeyPatch) -> None:
    affinity, _ = built("queries")
    check_affinity(affinity)
    push = type(affinity)._push
    monkeypatch.setattr(type(affinity), "_push", lambda self, law: push(self, law)[::-1])  # which keeps the mass
    with pytest.raises(AssertionError, match=r"^push"):
        check_affinity(affinity)


@BOTH
def test_torch(dtype: str) -> None:
    torch = torch_on_one_thread()
    keys, queries, v = (normal((12, 3), seed, dtype) for seed in (1, 2, 3))
    points = nl.Points(np.arange(12.0), weights=np.linspace(0.5, 1.5, 12))
    affinity = nl.affinity(nl.ExpDotProduct(), points, torch.as_tensor(keys), queries=torch.as_tensor(queries))
    twin = MarkovChain(nl.affinity(nl.ExpDotProduct(), points, keys, queries=queries), laziness=0.2)
    chain, tolerance = MarkovChain(affinity, laziness=0.2), TOLERANCE[dtype]
    moved = chain.expectation(torch.as_tensor(v), 3)
    assert isinstance(moved, torch.Tensor)
    assert str(moved.dtype) == f"torch.{dtype}"
    np.testing.assert_allclose(moved.numpy(), twin.expectation(v, 3), rtol=0, atol=tolerance)
    np.testing.assert_allclose(chain.law(2, 3), twin.law(2, 3), rtol=0, atol=tolerance)
    np.testing.assert_allclose(chain.matrix(), twin.matrix(), rtol=0, atol=tolerance)
    np.testing.assert_allclose(chain.stationary, twin.stationary, rtol=0, atol=tolerance)
    limit = chain.limit(torch.as_tensor(v))
    assert isinstance(limit, torch.Tensor)
    np.testing.assert_allclose(limit.numpy(), twin.limit(v), rtol=0, atol=tolerance)
    distances = twin.distance_to_limit(v, 4)
    np.testing.assert_allclose(chain.distance_to_limit(torch.as_tensor(v), 4), distances, rtol=0, atol=tolerance)
    assert chain.second_eigenvalue == pytest.approx(twin.second_eigenvalue, abs=tolerance)
    np.testing.assert_array_equal(chain.walk(0, 5, 300, rng=1).shape, (300,))


# --- the stationary law ----------------------------------------------------------------------------------------------


@ALL
@BOTH
@LAZY
def test_stationary_law(laziness: float, dtype: str, name: str) -> None:
    affinity, p = built(name, dtype)
    chain = MarkovChain(affinity, laziness=laziness)
    found = chain.stationary
    assert found.shape == affinity.domain.shape
    assert found.dtype == np.float64
    assert found.min() > 0
    assert found.sum() == pytest.approx(1, abs=1e-14)
    np.testing.assert_allclose(found.ravel(), stationary_law(p), rtol=10 * TOLERANCE[dtype])
    assert chain.irreducible
    assert chain.period == 1
    assert affinity.symmetric == (name not in NOT_SYMMETRIC)
    assert chain.reversible == (name not in ("queries", "directed"))


@ALL
@BOTH
def test_limit(dtype: str, name: str) -> None:
    affinity, p = built(name, dtype)
    chain, n = MarkovChain(affinity), affinity.domain.size
    law = stationary_law(p)
    for channels in ((), (2,)):
        v = 3 + normal((*affinity.domain.shape, *channels), 5, dtype)
        limit = chain.limit(v)
        assert limit.dtype == v.dtype
        expected = law @ v.reshape(n, -1).astype(float)
        np.testing.assert_allclose(np.ravel(limit), expected, rtol=10 * TOLERANCE[dtype])
        assert np.broadcast_shapes(limit.shape, v.shape) == v.shape
        # It is where P^k v goes.
        steps = math.ceil(math.log(1e-8) / math.log(abs(chain.second_eigenvalue)))
        np.testing.assert_allclose(
            chain.expectation(v, steps) - limit, 0, rtol=0, atol=max(1e-6, 30 * TOLERANCE[dtype])
        )


@ALL
@BOTH
def test_distance_to_the_limit(dtype: str, name: str) -> None:
    affinity, p = built(name, dtype)
    chain, law = MarkovChain(affinity), stationary_law(p)
    v = normal((*affinity.domain.shape, 2), 5, dtype)
    flat = v.reshape(len(p), 2).astype(float)
    found = chain.distance_to_limit(v, 6)
    expected = [
        math.sqrt((law[:, None] * (np.linalg.matrix_power(p, k) @ flat - law @ flat) ** 2).sum()) for k in range(7)
    ]
    np.testing.assert_allclose(found, expected, rtol=0, atol=30 * TOLERANCE[dtype])
    if chain.reversible:
        rate = abs(chain.second_eigenvalue)
        assert np.all(found <= found[0] * rate ** np.arange(7) * (1 + 1e-6) + 30 * TOLERANCE[dtype])


# --- spectrum --------------------------------------------------------------------------------------------------------


def by_modulus(values: Any) -> Any:
    """Return eigenvalues in an order that rounding does not change: decreasing modulus, then argument."""
    return values[np.lexsort((np.round(np.angle(values), 4), -np.round(np.abs(values), 4)))]


@ALL
@BOTH
@LAZY
def test_eigenvalues(laziness: float, dtype: str, name: str) -> None:
    affinity, p = built(name, dtype)
    chain, tolerance = MarkovChain(affinity, laziness=laziness), 20 * TOLERANCE[dtype]
    expected = np.linalg.eigvals(lazily(p, laziness)).astype(complex)
    found = chain.eigenvalues()
    assert np.iscomplexobj(found) != chain.reversible
    assert np.all(np.diff(np.abs(found)) <= 1e-12)
    np.testing.assert_allclose(by_modulus(found.astype(complex)), by_modulus(expected), rtol=0, atol=tolerance)
    second = np.sort(np.abs(expected))[-2]
    assert abs(chain.second_eigenvalue) == pytest.approx(second, abs=tolerance)
    assert isinstance(chain.second_eigenvalue, float if chain.reversible else complex)
    assert chain.spectral_gap == pytest.approx(1 - second, abs=tolerance)
    assert chain.relaxation_time == pytest.approx(1 / chain.spectral_gap)
    if chain.reversible:
        assert chain.smallest_eigenvalue == pytest.approx(expected.real.min(), abs=tolerance)
    else:
        with pytest.raises(nl.InputError, match="affinity: got a chain that is not reversible"):
            _ = chain.smallest_eigenvalue


@pytest.mark.parametrize("n", [2, 3, 6, 7])
@pytest.mark.parametrize("stay", [0.0, 0.1, 0.5])
def test_closed_form_of_the_ring(stay: float, n: int) -> None:
    chain = MarkovChain(given(ring(n, stay)))
    values = np.sort(stay + (1 - stay) * np.cos(2 * np.pi * np.arange(n) / n))
    np.testing.assert_allclose(np.sort(chain.eigenvalues()), values, rtol=0, atol=1e-14)
    np.testing.assert_allclose(chain.stationary, 1 / n, rtol=1e-14)
    assert chain.smallest_eigenvalue == pytest.approx(values[0], abs=1e-14)
    assert chain.period == (2 if stay == 0 and n % 2 == 0 else 1)
    if chain.period == 2:
        assert chain.second_eigenvalue == pytest.approx(-1, abs=1e-14)
        assert chain.spectral_gap == pytest.approx(0, abs=1e-14)
        assert chain.relaxation_time == math.inf


# --- where moves and the law underflow -------------------------------------------------------------------------------


def dot_products(size: float, dtype: str, seed: int) -> tuple[MarkovChain, Floats, list[float]]:
    """The chain of keys with logits up to size^2, its P, and the eigenvalues of P, largest first, from 600 digits."""
    keys = np.random.default_rng(seed).standard_normal((5, 2)) * size
    keys[:2] *= 0.1
    keys = keys.astype(dtype)
    chain = MarkovChain(nl.affinity(nl.ExpDotProduct(scale=1.0), nl.Points(np.arange(5.0), np.ones(5)), keys))
    with mpmath.workdps(600):
        k = [[mpmath.e ** mpmath.fdot(map(mpmath.mpf, x.tolist()), map(mpmath.mpf, y.tolist())) for y in keys]
             for x in keys]  # fmt: skip
        p = [[one / mpmath.fsum(row) for one in row] for row in k]
        values = mpmath.eigsy(
            mpmath.matrix([[mpmath.sqrt(p[i][j] * p[j][i]) for j in range(5)] for i in range(5)]), eigvals_only=True
        )
        rates = sorted(1 - value for value in values)
        return chain, np.array(p, np.float64), [float(rate) for rate in rates]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(6))
def test_gaps_and_modes_where_moves_underflow(seed: int, dtype: str) -> None:
    """They have their digits, or are refused by name."""
    found = 0
    for size in (2.0, 4.0, 9.0, 25.0):
        chain, p, rates = dot_products(size, dtype, seed)
        tol = 1e-8 if dtype == "float64" else 1e-2
        try:
            assert chain.spectral_gap == pytest.approx(min(rates[1], 2 - rates[-1]), rel=tol)
            found += 1
        except (nl.NumericalError, nl.InputError):
            assert rates[1] < 1e-19
        try:
            modes = chain.modes(2)
        except nl.NumericalError:
            logs = chain.log_law
            assert logs is not None
            assert logs.min() < (-600 if dtype == "float64" else -150)
            continue
        np.testing.assert_allclose(modes.values, 1 - np.array(rates[:2]), rtol=0, atol=1e-2 * tol)
        left = np.abs(p @ modes.vectors - modes.vectors * modes.values).max(axis=0)
        assert (left <= tol * np.abs(modes.vectors).max(axis=0)).all()
    assert found


@pytest.mark.parametrize(("dtype", "key"), [("float64", 40.0), ("float32", 12.0)])
def test_a_state_that_is_hardly_left(dtype: str, key: float) -> None:
    """Beside one key all others are 0: these walk to any of 6, and come back from that one after exp(key^2) moves."""
    keys = np.array([[key], [0], [0], [0], [0], [0]], dtype)
    chain = MarkovChain(nl.affinity(nl.ExpDotProduct(scale=1.0), nl.Points(np.arange(6.0)), keys))
    assert chain.spectral_gap == pytest.approx(1 / 6, rel=1e-6)
    assert chain.second_eigenvalue == pytest.approx(5 / 6, rel=1e-6)
    assert chain.mixing_time() == math.ceil(math.log(0.25) / math.log(5 / 6))
    low, high = chain.mixing_bounds()
    assert low == pytest.approx(5 * math.log(2), rel=1e-5)
    assert high == pytest.approx(6 * (math.log(4 / 6) + key**2), rel=1e-6)  # with log pi, where pi underflows


def test_closed_form_of_the_lazy_cube() -> None:
    """On {0, 1}^4, staying with 1/2: eigenvalues 1 - j/4 with multiplicities 1, 4, 6, 4, 1."""
    vertices = np.array(list(np.ndindex(2, 2, 2, 2)))
    cube = (np.abs(vertices[:, None] - vertices[None]).sum(axis=2) == 1).astype(float)
    chain = MarkovChain(given(cube), laziness=0.5)
    expected = np.repeat(1 - np.arange(5) / 4, [1, 4, 6, 4, 1])
    np.testing.assert_allclose(np.sort(chain.eigenvalues())[::-1], expected, rtol=0, atol=1e-14)
    assert chain.spectral_gap == pytest.approx(0.25, rel=1e-13)
    assert MarkovChain(given(cube)).period == 2


def test_the_gap_of_a_product_of_chains_whose_least_eigenvalues_crowd_at_0() -> None:
    """On an isolated grid a Gaussian is a product, and so are the eigenvalues: the second is that of one axis."""
    grid = nl.affinity(nl.Gaussian(width=2.0), nl.Grid((33, 33), boundary="isolated"))
    one = nl.affinity(nl.Gaussian(width=2.0), nl.Grid(33, boundary="isolated"))
    assert MarkovChain(grid).spectral_gap == pytest.approx(MarkovChain(one).spectral_gap, rel=1e-6)


@pytest.mark.slow
def test_the_least_eigenvalue_of_many_about_0_comes_from_the_whole_matrix() -> None:
    long = nl.affinity(nl.Gaussian(width=3.0), nl.Grid(1100, boundary="isolated"))
    assert MarkovChain(long).smallest_eigenvalue == pytest.approx(0, abs=1e-12)


def test_closed_form_of_two_states() -> None:
    """With moves a and b the law after k moves is pi + (1 - a - b)^k (start - pi), pi = (b, a) / (a + b)."""
    a, b = 0.3, 0.1
    chain = MarkovChain(given([[1 - a, a], [b, 1 - b]]))
    np.testing.assert_allclose(chain.stationary, [b / (a + b), a / (a + b)], rtol=1e-14)
    assert chain.second_eigenvalue == pytest.approx(1 - a - b, rel=1e-14)
    assert chain.reversible
    np.testing.assert_allclose(chain.total_variation(9, 0), a / (a + b) * 0.6 ** np.arange(10), rtol=1e-12)
    np.testing.assert_allclose(chain.total_variation(9), a / (a + b) * 0.6 ** np.arange(10), rtol=1e-12)
    # 3/4 0.6^k <= eps
    assert chain.mixing_time(0.25) == math.ceil(math.log(1 / 3) / math.log(0.6))
    assert chain.mixing_time(0.01, 0) == math.ceil(math.log(0.04 / 3) / math.log(0.6))
    assert chain.mixing_time(0.8) == chain.mixing_time(0.8, 1) == 0


def test_closed_form_of_the_complete_graph_and_of_one_state() -> None:
    complete = MarkovChain(given(np.ones((6, 6))))
    np.testing.assert_allclose(complete.eigenvalues(), [1, 0, 0, 0, 0, 0], rtol=0, atol=1e-14)
    assert complete.mixing_time() == 1
    one = MarkovChain(given([[3.0]]))
    assert one.stationary.tolist() == [1.0]
    assert (one.period, one.irreducible, one.reversible, one.mixing_time()) == (1, True, True, 0)
    assert (one.second_eigenvalue, one.spectral_gap, one.smallest_eigenvalue) == (0.0, 1.0, 1.0)
    assert one.eigenvalues().tolist() == [1.0]
    assert one.mixing_bounds(0.25)[0] == 0.0
    assert one.expectation(np.array([2.0]), 5).tolist() == [2.0]
    assert one.total_variation(2).tolist() == [0.0, 0.0, 0.0]


def test_closed_form_of_ehrenfest() -> None:
    """Urns: pi binomial, eigenvalues 1 - 2j/n, period 2."""
    n = 10
    k = np.diag(np.arange(1.0, n + 1), -1) + np.diag(np.arange(n, 0.0, -1), 1)
    chain = MarkovChain(given(k))
    assert not chain.affinity.symmetric
    assert chain.reversible
    assert chain.period == 2
    np.testing.assert_allclose(chain.stationary, [math.comb(n, i) / 2**n for i in range(n + 1)], rtol=1e-13)
    np.testing.assert_allclose(np.sort(chain.eigenvalues()), np.sort(1 - 2 * np.arange(n + 1) / n), rtol=0, atol=1e-13)


@pytest.mark.parametrize("many", [False, True])
def test_iterations_agree_with_all_eigenvalues(many: bool) -> None:
    """Lanczos for symmetric k, Arnoldi otherwise; chains with complex, real and negative eigenvalues."""
    rng = np.random.default_rng(3)
    s = rng.random((81, 81)) ** 6
    symmetric = s + s.T
    flip = 0.1 * symmetric + np.pad(np.kron(np.eye(40), [[0.0, 30.0], [30.0, 0.0]]), (0, 1))
    cases = {
        "around": np.kron(directed_ring(3, 0.1), np.ones((27, 27))) + 0.3 * s,
        "symmetric": symmetric,
        "flip": flip,
        "tilted": symmetric * (1 + rng.random((81, 1))),
    }
    for name, k in cases.items():
        p = transitions(k, np.ones(81))
        values = np.linalg.eigvals(p)
        with pytest.MonkeyPatch.context() as patch:
            if many:
                patch.setattr("nlflow.markov.spectrum.DENSE_STATES", 40)
                patch.setattr("nlflow.flows.spectrum._DENSE_NODES", 40)
                patch.setattr("nlflow.flows.spectrum._DENSE_RATE_NODES", 40)
            for laziness in (0.0, 0.4):
                chain = MarkovChain(given(k), laziness=laziness)
                if many:
                    patch.setattr(chain._spectrum, "eigenvalues", None, raising=False)
                lazy = laziness + (1 - laziness) * values
                expected = lazy[np.argsort(-np.abs(lazy))[1]]
                second = chain.second_eigenvalue
                assert abs(second) == pytest.approx(abs(expected), rel=5e-6), name
                assert np.real(second) == pytest.approx(expected.real, rel=1e-5)
                assert isinstance(second, complex if name == "around" else float)
                if name in ("symmetric", "flip"):
                    assert chain.smallest_eigenvalue == pytest.approx(lazy.real.min(), abs=5e-6)


def test_gap_of_a_class_that_is_left_is_not_refused_for_the_rounding_of_another_class() -> None:
    closed, left = np.array([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [0.5, 0.4, 0.1]]), 3e-7
    inside = (1 - left) * np.array([[0.7, 0.3], [0.9, 0.1]])
    p = np.block([[closed, np.zeros((3, 2))], [np.full((2, 3), left / 3), inside]])
    assert MarkovChain.from_transitions(p).spectral_gap == pytest.approx(left, rel=1e-10)
