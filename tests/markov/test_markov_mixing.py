"""Distances to the stationary law and mixing times, against trials of every number of moves."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import nlflow as nl
from nlflow import MarkovChain
from tests.chains import CASES, built, directed_ring, given, lazily, ring, stationary_law
from tests.problems import Floats

pytestmark = pytest.mark.numerical


def variation(p: Floats, q: Floats) -> float:
    return float(np.abs(p - q).sum()) / 2


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(3)
def test_total_variation_and_mixing_time(name: str) -> None:
    """The smallest k by trial of every k, from the worst node, from one node and from a law."""
    affinity, p = built(name)
    chain, n = MarkovChain(affinity), len(p)
    law, shape = stationary_law(p), affinity.domain.shape
    powers = list(itertools.accumulate([p] * 2000, np.matmul, initial=np.eye(n)))
    spread = np.full(n, 0.5 / n)
    spread[0] += 0.5
    starts: list[tuple[Any, Any]] = [
        (None, [max(variation(row, law) for row in q) for q in powers]),
        (1, [variation(q[1], law) for q in powers]),
        (spread.reshape(shape), [variation(spread @ q, law) for q in powers]),
    ]
    for start, distances in starts:
        np.testing.assert_allclose(chain.total_variation(7, start), distances[:8], rtol=0, atol=1e-11)
        assert chain.total_variation(0, start).shape == (1,)
        for eps in (0.9, 0.25, 0.013, 1e-4):
            expected = next(k for k, distance in enumerate(distances) if distance <= eps)
            assert chain.mixing_time(eps, start) == expected, (start, eps)
    if chain.reversible:
        for eps in (0.4, 0.25, 0.013, 1e-4):
            low, high = chain.mixing_bounds(eps)
            assert low <= chain.mixing_time(eps) <= high
            time, least = 1 / (1 - np.sort(np.abs(np.linalg.eigvals(p)))[-2]), law.min()
            assert low == pytest.approx(max((time - 1) * math.log(1 / (2 * eps)), 0), rel=1e-9)
            assert high == pytest.approx(time * math.log(1 / (eps * least)), rel=1e-9)
    else:
        with pytest.raises(nl.InputError, match=r"affinity: .* not reversible"):
            chain.mixing_bounds()


def test_the_default_distance_is_a_quarter() -> None:
    chain = MarkovChain(given(ring(9, 0.2)))
    assert chain.mixing_time() == chain.mixing_time(0.25)
    assert chain.mixing_bounds() == chain.mixing_bounds(0.25)


@pytest.mark.parametrize("coupling", [1e-3, 1e-9, 1e-14])
def test_two_clusters_mix_slowly(coupling: float) -> None:
    """1/2 (1 - 2c)^k <= eps; 10^14 moves too, of which the gap keeps its digits."""
    chain = MarkovChain(given([[1.0, coupling], [coupling, 1.0]]))
    c = coupling / (1 + coupling)
    exact = math.log(2 * 0.01) / math.log1p(-2 * c)
    assert chain.mixing_time(0.01) == pytest.approx(exact, rel=1e-9, abs=1)
    low, high = chain.mixing_bounds(0.01)
    assert low <= exact <= high
    assert chain.spectral_gap == pytest.approx(2 * c, rel=1e-12)
    assert chain.mixing_bounds(0.5)[0] == 0.0


@pytest.mark.parametrize("eps", [1e-3, 1e-6, 1e-9, 1e-11])
@pytest.mark.parametrize("coupling", [1e-4, 1e-8])
def test_mixing_times_to_small_distances_keep_their_bounds(coupling: float, eps: float) -> None:
    chain = MarkovChain(given([[1.0, coupling], [coupling, 1.0]]))
    exact = math.log(2 * eps) / math.log1p(-2 * coupling / (1 + coupling))
    time, (low, high) = chain.mixing_time(eps), chain.mixing_bounds(eps)
    assert time == pytest.approx(exact, rel=2e-14 / eps + 1e-9, abs=1)
    assert low <= time <= high


@pytest.mark.parametrize("n", [2, 3, 5])
def test_periodic_chains_need_laziness(n: int) -> None:
    chain = MarkovChain(given(directed_ring(n)))
    assert chain.period == n
    assert chain.irreducible
    np.testing.assert_allclose(chain.stationary, 1 / n, rtol=1e-14)
    assert abs(chain.second_eigenvalue) == pytest.approx(1, abs=1e-14)
    assert chain.spectral_gap == pytest.approx(0, abs=1e-14)
    assert chain.relaxation_time == math.inf
    np.testing.assert_allclose(chain.total_variation(4), 1 - 1 / n, rtol=1e-13)
    for call in (
        chain.mixing_time,
        chain.mixing_bounds,
        lambda: chain.limit(np.ones(n)),
        lambda: chain.mixing_time(0.1, 0),
    ):
        with pytest.raises(nl.InputError, match=rf"affinity: got a periodic chain \(period {n}\).*laziness=0.5"):
            call()
    lazy = MarkovChain(given(directed_ring(n)), laziness=0.5)
    assert lazy.period == 1
    values = 0.5 + 0.5 * np.exp(2j * np.pi * np.arange(n) / n)
    assert abs(lazy.second_eigenvalue) == pytest.approx(np.abs(values[1:]).max(), abs=1e-14)
    v = np.arange(float(n))
    np.testing.assert_allclose(lazy.limit(v), v.mean(), rtol=1e-14)
    powers = [np.linalg.matrix_power(lazily(directed_ring(n), 0.5), k) for k in range(60)]
    expected = next(k for k, q in enumerate(powers) if np.abs(q - 1 / n).sum(axis=1).max() / 2 <= 0.1)
    assert lazy.mixing_time(0.1) == expected


# --- reaching the constant -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rtol", [0.5, 1e-3, 1e-9])
def test_steps_to_limit_are_the_first_that_suffice(rtol: float) -> None:
    rng = np.random.default_rng(11)
    for matrix in (rng.random((20, 20)), np.exp(-np.abs(np.subtract.outer(np.arange(20.0), np.arange(20.0))))):
        chain = nl.MarkovChain(nl.from_matrix(matrix, nl.Points(np.zeros(20))))
        v = rng.standard_normal((20, 2))
        p = matrix / matrix.sum(axis=1, keepdims=True)
        values, vectors = np.linalg.eig(p.T)
        law = np.abs(vectors[:, np.argmax(values.real)].real)
        law /= law.sum()
        distances = []
        u = v
        while not distances or distances[-1] > rtol * distances[0]:
            distances.append(float(np.sqrt((law[:, None] * (u - law @ v) ** 2).sum())))
            u = p @ u
        k = chain.steps_to_limit(v, rtol)
        assert k == len(distances) - 1
        if chain.reversible:
            assert k <= np.ceil(np.log(1 / rtol) / np.log(1 / abs(chain.second_eigenvalue)))


def test_steps_to_limit_below_rounding_are_refused() -> None:
    chain = nl.MarkovChain(nl.affinity(nl.Gaussian(width=2.0), nl.Grid(12, boundary="isolated")))
    v = 1e6 + np.linspace(0, 1, 12)
    with pytest.raises(nl.NumericalError, match="rtol: 1e-12 of the distance"):
        chain.steps_to_limit(v, 1e-12)
    assert chain.steps_to_limit(v, 0.5) > 0
    for wrong in (0.0, 1.0, -1.0, "x"):
        with pytest.raises(nl.InputError, match="rtol"):
            chain.steps_to_limit(v, wrong)
