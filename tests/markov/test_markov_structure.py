"""What decides whether a chain has one limit: classes, periods, and stationary laws where little connects the parts."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, shortest_path

import nlflow as nl
from nlflow import MarkovChain
from nlflow.markov.law import _LAWS, left_eigenvector
from nlflow.markov.moves import Moves, reaching, upstream
from nlflow.markov.reduction import state_reduction
from tests.chains import MatrixFree, directed_ring, given, normal, ring, stationary_law, transitions
from tests.problems import Floats

pytestmark = pytest.mark.numerical


def exact_law(matrix: Floats) -> list[Fraction]:
    """Return the stationary law by Gaussian elimination in rational numbers, from the moves off the diagonal alone."""
    n = len(matrix)
    p = [[Fraction(float(matrix[i, j])) for j in range(n)] for i in range(n)]
    for i in range(n):
        p[i][i] = -sum(p[i][j] for j in range(n) if j != i)
    # Columns of the generator are equations sum_i pi_i q_ij = 0; the last is replaced by pi_0 = 1.
    rows = [[p[i][j] for i in range(n)] + [Fraction(0)] for j in range(n - 1)]
    rows.append([Fraction(int(i == 0)) for i in range(n)] + [Fraction(1)])
    for k in range(n):
        pivot = next(r for r in range(k, n) if rows[r][k] != 0)
        rows[k], rows[pivot] = rows[pivot], rows[k]
        rows[k] = [a / rows[k][k] for a in rows[k]]
        for r in range(n):
            if r != k and rows[r][k] != 0:
                rows[r] = [a - rows[r][k] * b for a, b in zip(rows[r], rows[k], strict=True)]
    law = [row[n] for row in rows]
    return [a / sum(law) for a in law]


def relative_errors(found: Floats, exact: list[Fraction]) -> list[float]:
    # Compared as fractions: what is smaller than a float can hold has to come out as 0 or the nearest subnormal number.
    tiny = Fraction(np.finfo(float).tiny)
    return [
        abs(float((Fraction(float(a)) - b) / b)) if b > tiny else float(abs(a - float(b)) > 2 * float(tiny))
        for a, b in zip(found, exact, strict=True)
    ]


def two_clusters(coupling: float, seed: int = 0) -> Floats:
    """Return a chain of two clusters that exchange walkers with probabilities of the size of `coupling`."""
    rng = np.random.default_rng(seed)
    k = rng.random((9, 9))
    k[:4, 4:] *= coupling
    k[4:, :4] *= coupling * 7
    return np.asarray(k)


@pytest.mark.parametrize("coupling", [1.0, 1e-6, 1e-12, 1e-16, 1e-60, 1e-200])
def test_nearly_reducible(coupling: float) -> None:
    """Every entry to rounding, though P differs from a reducible chain by less than rounding."""
    p = transitions(two_clusters(coupling), np.ones(9))
    assert max(relative_errors(state_reduction(p), exact_law(p))) < 1e-14
    chain = MarkovChain(given(two_clusters(coupling)))
    assert chain.irreducible
    # P from logarithms of k has a relative error of about |log k| times rounding.
    assert max(relative_errors(chain.stationary, exact_law(p))) < 1e-12
    assert not chain.reversible


@drawn(st.integers(2, 8), st.integers(0, 10**6), st.sampled_from([2, 40, 200]))
def test_state_reduction_is_exact(n: int, seed: int, decades: int) -> None:
    """Any moves over hundreds of decades, in any order, some of them impossible."""
    rng = np.random.default_rng(seed)
    p = 10.0 ** rng.uniform(-decades, 0, (n, n)) * (rng.random((n, n)) < 0.7)
    p += 10.0 ** rng.uniform(-decades, 0, (n, 1)) * np.roll(np.eye(n), 1, axis=1)
    assert max(relative_errors(state_reduction(p), exact_law(p))) < 1e-13


def test_probabilities_between_which_no_float_lies() -> None:
    """Down by 10^-400 and up by 10^600 along a line: the ratios pi_{i+1} / pi_i are up_i / down_{i+1}."""
    p = np.diag([1e-200, 1e-200, 1.0, 1.0], 1) + np.diag([1.0, 1.0, 1e-300, 1e-300], -1)
    for order in (np.arange(5), np.arange(5)[::-1], np.array([1, 0, 2, 3, 4])):
        found = state_reduction(p[np.ix_(order, order)])
        assert max(relative_errors(found, exact_law(p[np.ix_(order, order)]))) < 1e-14
        assert found[list(order).index(4)] == pytest.approx(1)
    order = np.array([2, 0, 4, 1, 3])  # on the way a probability of 10^-400 is met, and it is not passed over
    with pytest.raises(nl.NumericalError, match="underflow"):
        state_reduction(p[np.ix_(order, order)])


def test_a_law_that_falls_below_all_floats() -> None:
    """Up with 0.1, down with 0.9, 700 states: pi_i = 8/9 9^-i, which ends at 10^-668."""
    n = 700
    p = np.diag(np.full(n - 1, 0.1), 1) + np.diag(np.full(n - 1, 0.9), -1)
    for matrix, law in ((p, state_reduction(p)), (p[::-1, ::-1], state_reduction(p[::-1, ::-1])[::-1])):
        assert matrix.shape == (n, n)
        np.testing.assert_allclose(law[:300], 8 / 9 * 9.0 ** -np.arange(300), rtol=1e-12)
        assert law[-1] == 0.0


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 130, 200])
def test_state_reduction_in_blocks(n: int) -> None:
    p = np.random.default_rng(n).random((n, n)) ** 4 + 1e-3
    p /= p.sum(axis=1, keepdims=True)
    before = p.copy()
    law = state_reduction(p)
    np.testing.assert_array_equal(p, before)
    np.testing.assert_allclose(law, stationary_law(p), rtol=1e-10)
    np.testing.assert_allclose(law @ p, law, rtol=1e-13)


def test_what_underflows_is_told() -> None:
    for p in ([[0.5, 0.5], [1e-310, 1.0]], [[0.5, 0.5], [0.0, 1.0]], [[1.0, 0.0], [0.5, 0.5]]):
        with pytest.raises(nl.NumericalError, match=r"affinity: the probabilities of .* underflow.*wider kernel"):
            state_reduction(np.array(p))


# --- many states -----------------------------------------------------------------------------------------------------


@pytest.fixture
def iterate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have few states treated as many."""
    monkeypatch.setattr("nlflow.markov.law.REDUCED_STATES", 30)


@pytest.mark.usefixtures("iterate")
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["around", "queries", "transient", "tilted"])
def test_arnoldi_agrees_with_state_reduction(name: str, dtype: str) -> None:
    n = 90
    rng = np.random.default_rng(0)
    k = np.kron(directed_ring(3, 0.1), np.ones((30, 30))) + 0.3 * rng.random((n, n))
    if name == "tilted":
        k = rng.uniform(0.5, 2, (n, 1)) * (k + k.T)
    if name == "transient":
        k[:40, 40:] = 0.0  # from states 40 on walks come down and stay
    if name == "queries":
        points = nl.Points(np.arange(float(n)), rng.uniform(0.5, 1.5, n))
        affinity = nl.affinity(nl.ExpDotProduct(), points, normal((n, 4), 1, dtype), queries=normal((n, 4), 2, dtype))
    else:
        affinity = given(k, dtype)
    chain = MarkovChain(affinity)
    inside = slice(0, 40) if name == "transient" else slice(None)
    p = np.asarray(affinity.matrix, dtype=np.float64)  # type: ignore[attr-defined]
    np.testing.assert_allclose(chain.stationary[inside], state_reduction(p[inside, inside]), rtol=1e-5)
    assert np.all(np.delete(chain.stationary, np.arange(n)[inside]) == 0)
    assert chain.stationary.sum() == pytest.approx(1, abs=1e-14)
    assert chain.reversible == (name == "tilted")
    if dtype == "float64":
        assert np.abs(chain.stationary @ p - chain.stationary).sum() < 1e-12


@pytest.mark.usefixtures("iterate")
@pytest.mark.parametrize("coupling", [1e-4, 1e-11])
def test_arnoldi_tells_what_it_does_not_know(coupling: float) -> None:
    k = np.kron([[1.0, coupling], [3 * coupling, 1.0]], np.ones((30, 30))) * np.random.default_rng(0).uniform(1, 2, 60)
    chain = MarkovChain(given(k))
    if coupling > 1e-6:
        np.testing.assert_allclose(chain.stationary, state_reduction(chain.matrix()), rtol=1e-6)
    else:
        with pytest.raises(nl.NumericalError, match=r"affinity: .*(mixes too slowly|uncertain)"):
            _ = chain.stationary


def test_a_law_that_moves_on_is_uncertain() -> None:
    """Moves that are right to 1e-9 alone, next to a gap of 4e-6, leave the law open by 1e-4."""
    p = transitions(np.kron([[1.0, 1e-6], [3e-6, 1.0]], np.ones((30, 30))), np.ones(60))
    np.testing.assert_allclose(left_eigenvector(lambda law: law @ p, 60), state_reduction(p), rtol=1e-6)
    tilt = 1e-9 * np.sin(np.arange(60.0) / 9)
    with pytest.raises(nl.NumericalError, match=r"stationary law is uncertain by .* in total variation"):
        left_eigenvector(lambda law: law @ p + tilt * law, 60)


def test_a_law_that_leaks_is_none() -> None:
    """A move that loses one in ten millions has no eigenvalue 1, however far the next one is."""
    p = transitions(np.ones((60, 60)) + np.eye(60), np.ones(60))
    np.testing.assert_allclose(left_eigenvector(lambda law: law @ p, 60), 1 / 60, rtol=1e-10)
    with pytest.raises(nl.NumericalError, match="the eigenvalue 1 is not separated from the next"):
        left_eigenvector(lambda law: (1 - 1e-7) * (law @ p), 60)


def test_arnoldi_that_does_not_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("law", "spectrum"):
        monkeypatch.setattr(f"nlflow.markov.{part}.RESTARTS", 1)
    p = ring(400, 0.5)
    with pytest.raises(nl.NumericalError, match=r"stationary law was not found by Arnoldi iteration \(.*wider kernel"):
        left_eigenvector(lambda law: law @ p * np.linspace(1, 1 + 1e-9, 400), 400)
    monkeypatch.setattr("nlflow.markov.spectrum.DENSE_STATES", 30)
    with pytest.raises(nl.NumericalError, match=r"second eigenvalue was not found .* use fewer nodes"):
        _ = MarkovChain(given(directed_ring(400, 0.01) + 1e-3 * np.eye(400, k=5))).second_eigenvalue


def test_a_drift_over_1100_states() -> None:
    """Up with 0.6, down with 0.4: far from normal, no eigenvector would be found by iteration."""
    n = 1100
    k = np.diag(np.full(n - 1, 0.6), 1) + np.diag(np.full(n - 1, 0.4), -1)
    k[0, 0], k[-1, -1] = 0.4, 0.6
    chain = MarkovChain(given(k))
    np.testing.assert_allclose(chain.stationary[-800:], (2 / 3) ** np.arange(799.0, -1, -1) / 3, rtol=1e-11)
    assert chain.reversible


# --- classes ---------------------------------------------------------------------------------------------------------


def test_causal_attention_ends_at_the_first_token() -> None:
    """A lower triangular matrix: one closed class {0}, all others transient."""
    p = np.tril(np.random.default_rng(0).random((8, 8)) + 0.1)
    chain = MarkovChain(given(p))
    assert not chain.irreducible
    assert not chain.reversible
    assert chain.period == 1
    np.testing.assert_array_equal(chain.stationary, np.eye(8)[0])
    v = normal((8, 2))
    np.testing.assert_array_equal(chain.limit(v), v[:1])
    np.testing.assert_allclose(chain.expectation(v, 4000) - v[:1], 0, rtol=0, atol=1e-8)
    diagonal = np.sort(np.diagonal(transitions(p, np.ones(8))))[::-1]
    np.testing.assert_allclose(np.sort(chain.eigenvalues().real)[::-1], diagonal, rtol=0, atol=1e-12)
    assert chain.mixing_time(0.1, 0) == 0
    assert 0 < chain.mixing_time(0.1, 7) <= chain.mixing_time(0.1)
    assert chain.mixing_time(0.1) == next(k for k, d in enumerate(chain.total_variation(400)) if d <= 0.1)


def test_transient_states_keep_their_complex_eigenvalues() -> None:
    """Where walks end the chain is reversible; on the way there it goes round."""
    p = np.zeros((4, 4))
    p[1:, 1:] = 0.9 * directed_ring(3)
    p[:, 0] = 0.1
    p[0, 0] = 1.0
    chain = MarkovChain(given(p))
    assert not chain.reversible
    expected = [1.0, *(0.9 * np.exp(2j * np.pi * np.arange(3) / 3))]
    found = chain.eigenvalues()
    assert max(np.abs(found - value).min() for value in expected) < 1e-13
    assert abs(chain.second_eigenvalue) == pytest.approx(0.9, rel=1e-13)


def test_a_rare_cycle_is_no_reversible_chain() -> None:
    """States 3, 4, 5 go round and are hardly ever visited: 10^-30 of the time. Their eigenvalues are complex."""
    p = np.full((6, 6), 1e-30)
    p[:3, :3] = 1.0
    p[3:, 3:] = directed_ring(3) + 1e-3
    p[3:, :3] = 0.05
    chain = MarkovChain(given(p))
    assert chain.stationary[3:].max() < 1e-29
    assert not chain.reversible
    np.testing.assert_allclose(
        np.sort_complex(chain.eigenvalues()), np.sort_complex(np.linalg.eigvals(transitions(p, np.ones(6)))), atol=1e-12
    )


@pytest.mark.parametrize("seed", range(5))
def test_states_upstream_of_some_ends_come_by_their_distance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = np.where(rng.random((40, 40)) < 0.04, rng.random((40, 40)), 0.0)
    ends = np.zeros(40, np.bool_)
    ends[rng.choice(40, 3, replace=False)] = True
    far = shortest_path(matrix > 0, unweighted=True)[:, ends].min(axis=1)  # moves to the nearest end
    for moves in (matrix, csr_array(matrix)):
        order = upstream(moves, ends)
        assert sorted(order.tolist()) == np.flatnonzero(np.isfinite(far)).tolist()
        assert (np.diff(far[order]) >= 0).all()
        assert np.array_equal(reaching(moves, ends), np.isfinite(far))


def test_several_closed_classes() -> None:
    rng = np.random.default_rng(1)
    k = np.zeros((9, 9))
    k[:2, :2], k[2:5, 2:5], k[5:, :] = rng.random((2, 2)), rng.random((3, 3)), rng.random((4, 9))
    order = rng.permutation(9)
    chain = MarkovChain(given(k[np.ix_(order, order)]))
    assert not chain.irreducible
    assert connected_components(k > 0, connection="strong")[0] == 3
    words = r"affinity: got a reducible chain with 2 classes of states that no walk leaves \(sizes 3, 2\).*wider kernel"
    v = np.ones(9)
    for call in (
        lambda: chain.stationary, lambda: chain.period, lambda: chain.second_eigenvalue, lambda: chain.limit(v),
        lambda: chain.mixing_time(), lambda: chain.total_variation(3), lambda: chain.mixing_time(0.1, 0),
        lambda: chain.distance_to_limit(v, 2), lambda: chain.spectral_gap,
    ):  # fmt: skip
        with pytest.raises(nl.InputError, match=words):
            call()
    # What needs no unique law is there.
    values = np.linalg.eigvals(transitions(k, np.ones(9)))
    np.testing.assert_allclose(
        np.sort_complex(chain.eigenvalues()), np.sort_complex(values.astype(complex)), atol=1e-12
    )
    assert chain.law(int(np.flatnonzero(order == 0)[0]), 5)[order >= 2].max() == 0


@pytest.mark.parametrize("tilt", [True, False])
def test_parts_that_do_not_see_each_other(tilt: bool) -> None:
    """Reversible part by part, or not; eigenvalues real or complex accordingly."""
    k = np.kron(np.eye(2), np.ones((3, 3))) * np.random.default_rng(2).uniform(0.5, 2, (6, 1))
    if not tilt:
        k[3:, 3:] = directed_ring(3, 0.1)
    chain = MarkovChain(given(k))
    assert not chain.affinity.symmetric
    assert chain.reversible == tilt
    values = np.linalg.eigvals(transitions(k, np.ones(6)))
    assert np.iscomplexobj(chain.eigenvalues()) != tilt
    np.testing.assert_allclose(np.sort(np.abs(chain.eigenvalues())), np.sort(np.abs(values)), atol=1e-12)


@pytest.mark.parametrize("method", ["dense", "stencil", "convolution"])
@pytest.mark.parametrize("shape", [(12,), (5, 6)])
def test_a_top_hat_below_the_spacing(shape: Any, method: str) -> None:
    chain = MarkovChain(nl.affinity(nl.TopHat(radius=0.4), nl.Grid(shape), method=method))
    assert not chain.irreducible
    np.testing.assert_array_equal(chain.matrix(), np.eye(math.prod(shape)))
    with pytest.raises(nl.InputError, match=rf"reducible chain with {chain.states} classes .*1, 1, 1, 1, 1, \.\.\.\)"):
        _ = chain.stationary


@pytest.mark.parametrize("periods", [(2, 4), (4, 6), (6, 9), (3, 5)])
def test_period_is_the_common_divisor_of_the_round_trips(periods: tuple[int, int]) -> None:
    """Two rings that share state 0, with tails of transient states that lead to them."""
    a, b = periods
    n = a + b - 1
    p = np.zeros((n + 3, n + 3))
    for ring_of in ([0, *range(1, a)], [0, *range(a, n)]):
        p[ring_of, np.roll(ring_of, -1)] = 1.0
    p[0, a] = 1e-5  # seldom tried, but tried
    p[n, n] = p[n + 1, n] = p[n + 2, n + 1] = p[n, 1] = 1.0
    chain = MarkovChain(given(p))
    assert chain.period == math.gcd(a, b)
    order = np.random.default_rng(0).permutation(n + 3)
    assert MarkovChain(given(p[np.ix_(order, order)])).period == math.gcd(a, b)
    assert MarkovChain(given(p), laziness=0.1).period == 1


# --- matrix-free, more states than are looked at one by one ----------------------------------------------------------


# name: how it is built, classes, period
SEARCHED: dict[str, tuple[Callable[[], Any], int, int]] = {
    "five by six": (lambda: MatrixFree((5, 6)), 1, 1),
    "four by six": (lambda: MatrixFree((4, 6)), 1, 2),
    "eleven": (lambda: MatrixFree((11,)), 1, 1),
    "twelve": (lambda: MatrixFree((12,)), 1, 2),
    "in steps of three": (lambda: MatrixFree((12,), 3), 3, 2),
    "grid": (lambda: nl.affinity(nl.TopHat(radius=1.0), nl.Grid((4, 6))), 1, 1),
    "lines": (lambda: nl.affinity(nl.TopHat(radius=0.5), nl.Grid((4, 6), (0.4, 1.0))), 6, 1),
    "lines, convolved": (
        lambda: nl.affinity(nl.TopHat(radius=0.5), nl.Grid((4, 6), (0.4, 1.0)), method="convolution"), 6, 1
    ),
    "convolution": (lambda: nl.affinity(nl.Gaussian(width=0.2), nl.Grid((4, 6)), method="convolution"), 1, 1),
    "patches": (lambda: nl.affinity(nl.Patch(0.8, 3, 2), nl.Grid((6, 7)), normal((6, 7), 3, "float32")), 1, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SEARCHED)
@pytest.mark.parametrize("few", [True, False])
@pytest.mark.sampled(4)
def test_the_search_agrees_with_the_graph(name: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    build, parts, period = SEARCHED[name]
    affinity = build()
    if not few:
        monkeypatch.setattr("nlflow.markov.moves._GRAPH_STATES", 10)
        monkeypatch.setattr(Moves, "dense", None)
    chain = MarkovChain(affinity)
    assert chain.irreducible == (parts == 1)
    if parts == 1:
        assert chain.period == period
        assert chain.stationary.sum() == pytest.approx(1)
        return
    sizes = affinity.domain.size // parts
    words = f"{parts} classes .*sizes {sizes}, " if few else f"one of {sizes} states"
    for call in (lambda: chain.period, lambda: chain.stationary, lambda: chain.second_eigenvalue):
        with pytest.raises(nl.InputError, match=rf"affinity: got a reducible chain with .*{words}"):
            call()


def test_five_thousand_states() -> None:
    """In one dimension the gap is 8e-7, which takes an iteration minutes; that there is one limit takes a moment."""
    chain = MarkovChain(nl.affinity(nl.Gaussian(width=2.0), nl.Grid(5000)))
    assert chain.irreducible
    assert chain.period == 1
    np.testing.assert_allclose(chain.stationary, 1 / 5000, rtol=1e-12)
    v = normal((5000,))
    np.testing.assert_allclose(chain.limit(v), v.mean(), rtol=1e-12)
    even = MarkovChain(MatrixFree((66, 66)))
    assert even.period == 2
    with pytest.raises(nl.InputError, match=r"periodic chain \(period 2\)"):
        even.limit(np.ones((66, 66)))
    split = MarkovChain(nl.affinity(nl.TopHat(radius=0.5), nl.Grid((65, 65))))
    with pytest.raises(nl.InputError, match="reducible"):
        split.limit(np.ones((65, 65)))


@pytest.mark.slow
def test_float32_loses_no_probability_in_many_moves() -> None:
    """Rows of a float32 matrix sum to 1 up to 6e-8 each; over thousands of moves that would add up."""
    n, steps = 60, 2000
    k = ring(n, 0.3) + 0.02 * directed_ring(n)
    single, double = (MarkovChain(given(k, dtype)) for dtype in ("float32", "float64"))
    assert single.law(0, steps).sum() == pytest.approx(1, abs=1e-13)
    np.testing.assert_allclose(single.law(0, steps), double.law(0, steps), rtol=0, atol=2e-6)
    assert single.mixing_time(1e-3, 0) == pytest.approx(double.mixing_time(1e-3, 0), abs=1)
    np.testing.assert_allclose(single.total_variation(steps, 0), double.total_variation(steps, 0), rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_law_of_an_affinity_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(matrix: Any) -> Any:
        calls.append(len(matrix))
        return state_reduction(matrix)

    monkeypatch.setattr("nlflow.markov.law.state_reduction", counted)
    rng = np.random.default_rng(4)
    kernel = nl.ExpDotProduct(query_map=rng.standard_normal((3, 3)), key_map=rng.standard_normal((3, 3)))
    f = rng.standard_normal((12, 3))
    weights = nl.affinity(kernel, nl.Points(np.zeros(12)), f)
    for fidelity in (0.1, 1.0):
        flow = nl.AttentionFlow(weights, f, fidelity)
        nl.diversity(flow, nl.equilibrium(flow).u)
        nl.diversity_bounds(flow)
    chains = [nl.MarkovChain(weights, laziness=laziness) for laziness in (0.0, 0.5)]
    laws = [chain.stationary for chain in chains]
    assert calls == [12]
    np.testing.assert_allclose(laws[0] @ chains[0].matrix(), laws[0], rtol=1e-13)
    laws[0][:] = 0  # what a chain gives is its caller's own
    np.testing.assert_array_equal(nl.MarkovChain(weights).stationary, laws[1])
    assert laws[1].sum() == pytest.approx(1)
    kept = len(_LAWS)
    del weights, flow, chains
    gc.collect()
    assert len(_LAWS) == kept - 1
