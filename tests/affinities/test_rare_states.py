"""Stationary laws that underflow: diversity, fidelities and bounds in log space, against mpmath."""

from __future__ import annotations

from functools import cache
from typing import Any

import mpmath
import numpy as np
import pytest

import nlflow as nl
from tests.problems import torch_on_one_thread

SIZES = (1, 700, 1000, 1500)
METHODS = ("dense", "pairwise", "tiled")


def features(size: float, n: int, seed: int) -> tuple[Any, Any]:
    """Queries and keys with logits up to `size`."""
    rng = np.random.default_rng(seed)
    keys, queries = rng.standard_normal((2, n, 2))
    return queries * (size / np.abs(queries @ keys.T).max()), keys


def built(queries: Any, keys: Any, method: str) -> nl.Affinity:
    n = len(keys)
    if method == "tiled":
        torch = torch_on_one_thread()
        queries, keys = torch.from_numpy(queries), torch.from_numpy(keys)
    return nl.affinity(
        nl.ExpDotProduct(scale=1.0), nl.Points(np.arange(float(n)), np.ones(n)), keys, queries=queries, method=method
    )  # fmt: skip


def exact(queries: Any, keys: Any) -> tuple[Any, Any]:
    """P and its stationary law, in 700 digits."""
    n = len(keys)
    moves = mpmath.matrix(n, n)
    for i in range(n):
        row = [mpmath.e ** mpmath.fdot(map(mpmath.mpf, queries[i]), map(mpmath.mpf, key)) for key in keys]
        for j in range(n):
            moves[i, j] = row[j] / mpmath.fsum(row)
    system, right = moves.T - mpmath.eye(n), mpmath.matrix(n, 1)
    right[n - 1] = 1
    for j in range(n):
        system[n - 1, j] = 1
    return moves, mpmath.lu_solve(system, right)


@cache
def kept(n: int, seed: int, size: float) -> tuple[float, float, tuple[float, ...]]:
    """The diversity of 0, 1, ..., the norm of I - P across constants, and the bounds for a fidelity of 1/2."""
    queries, keys = features(size, n, seed)
    f = np.arange(float(n))
    with mpmath.workdps(700):
        moves, law = exact(queries, keys)
        mean = mpmath.fsum(p * x for p, x in zip(law, f, strict=True))
        spread = mpmath.sqrt(mpmath.fsum(p * (x - mean) ** 2 for p, x in zip(law, f, strict=True)))
        similar = mpmath.matrix(n, n)
        for i in range(n):
            for j in range(n):
                similar[i, j] = mpmath.sqrt(law[i] / law[j]) * ((i == j) - moves[i, j])
    with mpmath.workdps(400):
        # I - P maps constants, and nothing else, to 0, and all to what has mean 0.
        values = sorted(mpmath.svd_r(similar, compute_uv=False), reverse=True)
        bounds = tuple(float(mpmath.mpf("0.5") / v) for v in _shifted(similar, law))
        return float(spread), float(values[0]), bounds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:a NeuTRENO layer with lambda~")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("n", "seed"), [(2, 0), (2, 1), (3, 1), (5, 1)])
def test_what_is_kept_where_the_law_underflows(n: int, seed: int, size: float, method: str) -> None:
    queries, keys = features(size, n, seed)
    f = np.arange(float(n))
    affinity = built(queries, keys, method)
    flow = nl.AttentionFlow(affinity, affinity.as_signal(f), 0.5)
    spread, high, shifted = kept(n, seed, size)
    if spread < 1e-300:
        with pytest.raises(nl.NumericalError, match="below the smallest float"):
            nl.diversity(flow, affinity.as_signal(f))
    else:
        assert nl.diversity(flow, affinity.as_signal(f)) == pytest.approx(spread, rel=1e-11)
    assert nl.fidelity_for_diversity(flow, 0.5) == pytest.approx(high, rel=1e-9)
    assert nl.diversity_bounds(flow) == pytest.approx(shifted, rel=1e-9)
    assert high > 0


def _shifted(similar: Any, law: Any) -> tuple[Any, Any]:
    """The extreme singular values of the matrix + 1/2 across the direction of sqrt(pi), which it maps to one half."""
    n = similar.rows
    root = mpmath.matrix([mpmath.sqrt(p) for p in law])
    across = mpmath.eye(n) - root * root.T
    values = sorted(mpmath.svd_r(across * (similar + mpmath.eye(n) / 2) * across, compute_uv=False), reverse=True)
    return values[0], values[n - 2]


@pytest.mark.parametrize("method", METHODS)
def test_one_norm_whatever_the_logits(method: str) -> None:
    """log diversity of two nodes is linear in large logits, through those at which moves underflow."""
    queries, keys = features(1.0, 2, 0)
    logs = []
    for size in range(500, 1500, 50):
        affinity = built(size * queries, keys, method)
        logs.append(np.log(nl.diversity(nl.AttentionFlow(affinity), affinity.as_signal(np.array([0.0, 1.0])))))
    np.testing.assert_allclose(np.diff(logs), np.diff(logs)[0], rtol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_the_law_is_right_or_refused(method: str) -> None:
    """Moves that underflow in both directions decide between two nodes: no law comes of what the loops leave there."""
    for size in (300, 700, 1000, 1200, 1500, 5000):
        queries, keys = features(size, 2, 0)
        with mpmath.workdps(700):
            expected = [float(p) for p in exact(queries, keys)[1]]
        try:
            law = nl.MarkovChain(built(queries, keys, method)).stationary
        except nl.NlflowError as error:
            assert "reducible" in str(error) or "underflow" in str(error)  # noqa: PT017
            continue
        np.testing.assert_allclose(law, expected, rtol=1e-10, atol=1e-290)


def test_symmetric_kernels() -> None:
    """pi_2 = e^-1200 beside pi_1: the root of the law exists, and only one node counts."""
    keys = np.array([[40.0], [20.0]])
    affinity = nl.affinity(nl.ExpDotProduct(scale=1.0), nl.Points([0.0, 1.0], [1.0, 1.0]), keys)
    with mpmath.workdps(700):
        law, _ = (mpmath.e**1600 + mpmath.e**800, 0)
        other = mpmath.e**800 + mpmath.e**400
        expected = float(mpmath.sqrt(law * other) / (law + other))
    found = nl.diversity(nl.AttentionFlow(affinity), np.array([0.0, 1.0]))
    assert found == pytest.approx(expected, rel=1e-11)


def test_constants_have_no_diversity() -> None:
    """In a chain that falls apart, too."""
    alone = nl.from_matrix(np.eye(3), nl.Points(np.arange(3.0)))
    assert nl.diversity(nl.AttentionFlow(alone), np.full(3, 0.1)) == 0
    assert nl.diversity(nl.AttentionFlow(built(*features(1000, 3, 1), "dense")), np.full(3, 0.1)) == 0


def test_no_fidelity_of_zero() -> None:
    alone = nl.from_matrix(np.eye(3), nl.Points(np.arange(3.0)))
    single = nl.from_matrix(np.ones((1, 1)), nl.Points([0.0]))
    for affinity in (alone, single, built(*features(5000, 2, 0), "dense")):
        with pytest.raises(nl.InputError, match="none sees another in float64"):
            nl.fidelity_for_diversity(nl.AttentionFlow(affinity), 0.5)


def test_transient_states_keep_the_quadrature_weights() -> None:
    """Causal attention: pi is that of the first node, and the norm that of L2(w), at any size of the logits."""
    for size in (1.0, 1000.0):
        queries, keys = features(size, 4, 0)
        weights = np.array([1.0, 2.0, 3.0, 4.0])
        affinity = nl.affinity(
            nl.ExpDotProduct(scale=1.0), nl.Points(np.arange(4.0), weights), keys, queries=queries,
            mask=nl.Mask(causal=True),
        )  # fmt: skip
        u = np.array([1.0, -1.0, 2.0, 5.0])
        expected = np.sqrt((weights * (u - 1) ** 2).sum() / 10)
        assert nl.diversity(nl.AttentionFlow(affinity), u) == pytest.approx(expected, rel=1e-12)


def test_what_does_not_know_its_logarithms_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    affinity = built(*features(1000, 3, 1), "dense")
    monkeypatch.setattr(type(affinity), "_log_transitions", lambda self: None)
    with pytest.raises(nl.NumericalError, match=r"^affinity: got method='dense' on 3 nodes with a stationary law"):
        nl.diversity(nl.AttentionFlow(affinity), np.arange(3.0))
