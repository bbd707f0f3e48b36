"""Probabilities and times of ending in several targets at once, against dense solutions."""

import mpmath
import numpy as np
import pytest
import scipy.sparse

from nlflow import InputError, MarkovChain, MemoryLimitError, NlflowWarning, Points, affinity_from_graph, from_matrix
from nlflow.markov import absorbing, aggregation, passages


def given(p, **options):
    return MarkovChain(from_matrix(np.asarray(p, float), Points(np.arange(float(len(p))), np.ones(len(p)))), **options)


def directed(n, seed=0, drift=0.6):
    """Moves to random states nearby, more of them to larger numbers."""
    rng = np.random.default_rng(seed)
    rows = np.repeat(np.arange(n), 6)
    columns = np.clip(rows + rng.integers(1, 9, rows.size) * np.where(rng.random(rows.size) < drift, 1, -1), 0, n - 1)
    return scipy.sparse.csr_array((rng.random(rows.size) + 0.1, (rows, columns)), shape=(n, n))


def expected(p, targets):
    """Return probabilities and times by NumPy's dense solver."""
    n, ends = len(p), np.concatenate(targets)
    free = np.setdiff1d(np.arange(n), ends)
    right = np.column_stack([*(p[np.ix_(free, k)].sum(axis=1) for k in targets), np.ones(len(free))])
    x = np.linalg.solve(np.eye(len(free)) - p[np.ix_(free, free)], right)
    probabilities, times = np.zeros((n, len(targets))), np.zeros(n)
    for k, nodes in enumerate(targets):
        probabilities[nodes, k] = 1
    probabilities[free], times[free] = x[:, :-1], x[:, -1]
    return probabilities, times


def test_a_gambler_with_two_ends():
    path = np.diag(np.full(5, 0.5), 1) + np.diag(np.full(5, 0.5), -1)
    path[0, 1] = path[5, 4] = 1.0
    found = given(path).absorption({"ruin": 0, "fortune": 5})
    i = np.arange(6.0)
    assert found.names == ("ruin", "fortune")
    assert np.allclose(found.probabilities, np.column_stack([1 - i / 5, i / 5]), atol=1e-15)
    assert np.allclose(found.times, i * (5 - i), atol=1e-13)
    assert (found.method, found.error) == ("state reduction", 0)
    lazy = given(path, laziness=0.5).absorption([0, 5])
    assert np.allclose(lazy.times, 2 * found.times)
    assert np.allclose(lazy.probabilities, found.probabilities)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_many_states_go_by_aggregates_to_an_error_that_is_proved(dtype, monkeypatch):
    monkeypatch.setattr(passages, "DENSE_STATES", 20)
    monkeypatch.setattr(aggregation, "_COARSEST", 20)
    monkeypatch.setattr(absorbing.Killed, "direct", lambda self: iter(()))
    if dtype == "float64":  # as where float32 does not suffice
        every = absorbing.Killed.iterated
        monkeypatch.setattr(absorbing.Killed, "iterated", lambda self: list(every(self))[1:])
    chain = MarkovChain(affinity_from_graph(directed(800)))
    targets = [np.array([0, 1]), np.arange(400, 404), np.array([797, 798, 799])]
    found = chain.absorption(targets)
    probabilities, times = expected(chain.matrix(), targets)
    assert found.method == f"multigrid in {dtype}"
    assert 0 < found.error <= absorbing.EXACT
    assert np.abs(found.probabilities - probabilities).max() < found.error + 1e-14
    assert np.abs(found.times / times.max() - times / times.max()).max() < found.error + 1e-13
    assert found.residual < 1e-13


def test_the_bound_of_the_error_is_one():
    """Of an x that has a few digits: it is above the error, and refuses what is below."""
    a = absorbing.Killed(directed(200), np.where(np.arange(200) % 50 == 0, 0.3, 0.0))
    b = np.random.default_rng(0).random((200, 2))
    exact = np.linalg.solve(np.diag(a.left) - a.rates.toarray(), b)
    way = next(iter(a.iterated()))
    x = way.solve(b, 1e-3)
    known = x, b - a(x), a.rounding(x, b)
    error = float((np.abs(x - exact) / x.max(axis=0)).max())
    assert error > 1e-7
    assert absorbing._proved(a, way, 0.5 * error, known) is None
    found = absorbing._proved(a, way, 1e6 * error, known)
    assert error <= found.error


def test_what_a_bound_lacks_in_a_few_states_is_solved_for():
    """A solution for all states has no digits in some: they cost one more round, and no better solution of all."""
    a = absorbing.Killed(directed(200), np.where(np.arange(200) % 50 == 0, 0.3, 0.0))
    inverse = np.linalg.inv(np.diag(a.left) - a.rates.toarray())
    rounds = []

    def solve(r, rtol):
        rounds.append(rtol)
        return inverse @ (r * np.where((np.arange(200) % 40 == 1) & (r.min() > 0), 0.3, 1.0)[:, None])

    x = inverse @ np.ones((200, 1))
    left = np.full((200, 1), 1e-17)
    found = absorbing._proved(a, absorbing.Way("rough", solve), absorbing.EXACT, (x, left, left))
    assert len(rounds) == 2
    error = inverse @ np.abs(left)
    assert (error / np.maximum(x, 1e-3 * x.max())).max() < found.error < absorbing.EXACT


def test_slow_walks_are_not_given_digits_that_they_do_not_have(monkeypatch):
    """Two halves of a path that hardly see each other: the exact times are those of rational numbers."""
    monkeypatch.setattr(passages, "DENSE_STATES", 20)
    monkeypatch.setattr(aggregation, "_COARSEST", 10)
    n, weak = 60, 1e-9
    edges = np.ones(n - 1)
    edges[n // 2] = weak
    k = scipy.sparse.diags_array([edges, 2 * edges], offsets=[-1, 1]).tocsr()
    found = MarkovChain(affinity_from_graph(k)).absorption([n - 1])
    with mpmath.workdps(50):
        p = [[mpmath.mpf(float(v)) for v in row] for row in k.toarray()]
        a = mpmath.matrix(n - 1, n - 1)
        for i in range(n - 1):
            total = mpmath.fsum(p[i])
            for j in range(n - 1):
                a[i, j] = (i == j) - p[i][j] / total
        times = mpmath.lu_solve(a, mpmath.ones(n - 1, 1))
        assert max(abs(mpmath.mpf(found.times[i]) / times[i] - 1) for i in range(n - 1)) < 1e-9


def test_targets_that_share_nodes_or_are_not_met():
    p = np.array([[0.5, 0.5, 0, 0, 0], [0.2, 0.3, 0.5, 0, 0], [0, 0, 1, 0, 0], [0, 0.5, 0, 0.5, 0], [0, 0, 0, 0, 1.0]])
    chain = given(p)
    with pytest.raises(InputError, match=r"targets: 'a' and 'c' share 1 nodes \(the first is 2\)"):
        chain.absorption({"a": [1, 2], "b": [0], "c": 2})
    with pytest.raises(
        InputError,
        match=r"walks from 1 nodes \(the first is 4\) meet none of 1 targets; they end in 1 "
        r"other classes of states that no walk leaves \(sizes 1, the first with node 4",
    ):
        chain.absorption([2])  # fmt: skip
    with pytest.raises(InputError, match="targets: got int, expected a mapping of names to nodes"):
        chain.absorption(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="targets: got none"):
        chain.absorption([])
    with pytest.raises(InputError, match=r"targets\['a'\]: got nodes 7 to 7, expected 0 to 4"):
        chain.absorption({"a": 7})
    with pytest.warns(NlflowWarning, match="no walk from another node ends in 1"):
        found = chain.absorption([2, 4])
    assert np.allclose(found.probabilities[:, 0], [1, 1, 1, 1, 0])


def test_a_sweep_from_zero_needs_the_earlier_states_alone():
    from nlflow.markov.aggregation import _Level

    rng = np.random.default_rng(0)
    rates = scipy.sparse.random_array((60, 60), density=0.2, rng=rng, format="csr")
    rates.setdiag(0)
    rates.eliminate_zeros()
    leaving = np.asarray(rates.sum(axis=1)) + 0.1
    level = _Level(rates, leaving, "float64")
    shares = rates.toarray() / leaving[:, None]
    for columns in (1, 4, 16):
        b = rng.random((60, columns))
        x = level.swept(b, np.zeros_like(b))
        assert np.abs(x - np.linalg.solve(np.eye(60) - np.tril(shares), b)).max() < 1e-14 * x.max()
        assert np.abs(level.left_over(b, x) - (b - x + shares @ x)).max() < 1e-14 * x.max()
        assert np.abs(level.swept_from_zero(b) - x).max() < 1e-14 * x.max()
        assert np.abs(level.left_by_sweep(x) - level.left_over(b, x)).max() < 1e-14 * x.max()


def test_many_columns_pass_the_limit_of_memory_by_name():
    chain = MarkovChain.from_graph(directed(1200), memory_limit=600_000)
    with pytest.raises(MemoryLimitError, match=r"3 columns of 1200 states needs .*; use fewer targets at a time"):
        chain.absorption([0, 1199])
