"""Diffusion pseudotime against a dense inverse, and branches of a star."""

import itertools

import numpy as np
import pytest
import scipy.sparse
import scipy.stats

from nlflow import Gaussian, Grid, InputError, MarkovChain, affinity
from nlflow.markov.pseudotime import split_point


def star(arm=15):
    """Three arms of states from a centre: weights, and the arm of each state (0, 1, 2)."""
    n = 3 * arm + 1
    k = np.eye(n) * 0.5
    for b in range(3):
        nodes = [0, *range(1 + b * arm, 1 + (b + 1) * arm)]
        for i, j in itertools.pairwise(nodes):
            k[i, j] = k[j, i] = 1.0
    return k, np.append(-1, np.repeat(np.arange(3), arm))


def test_against_a_dense_inverse():
    rng = np.random.default_rng(0)
    k = rng.random((25, 25)) ** 3
    k = k + k.T
    chain = MarkovChain.from_graph(k)
    d = k.sum(axis=1)
    t = k / np.sqrt(np.outer(d, d))
    first = np.sqrt(d / d.sum())
    m = np.linalg.inv(np.eye(25) - (t - np.outer(first, first))) - np.eye(25)
    expected = np.linalg.norm(m - m[3], axis=1)
    found = chain.pseudotime(3, modes=25)
    assert np.abs(found.distances[0] - expected).max() < 1e-12
    assert np.abs(found.times - expected / expected.max()).max() < 1e-12
    assert found.branches is None


def test_shapes_are_those_of_the_domain():
    chain = MarkovChain(affinity(Gaussian(width=0.8), Grid((5, 4))))
    found = chain.pseudotime(0, branching=True)
    assert found.times.shape == found.branches.shape == (5, 4)
    assert found.distances.shape == (3, 5, 4)
    assert np.array_equal(found.times, found.distances[0] / found.distances[0].max())


@pytest.mark.slow
def test_all_modes_of_many_states():
    n = 1010
    k = scipy.sparse.diags_array([np.ones(n - 1), np.ones(n - 1)], offsets=[1, -1])
    few, many = MarkovChain.from_graph(k), MarkovChain.from_graph(k)
    found = many.pseudotime(0, modes=2000).times
    assert np.abs(found - few.pseudotime(0, modes=200).times).max() < 1e-2


def test_branches_of_a_star():
    k, arm = star()
    found = MarkovChain.from_graph(k).pseudotime(15, modes=len(k), branching=True)
    assert found.tips[0] == 15
    assert sorted(arm[found.tips]) == [0, 1, 2]
    for tip in range(3):
        own = arm == arm[found.tips[tip]]
        assert np.mean(found.branches[own] == tip) > 0.7
        assert not np.any(found.branches[own & (found.branches >= 0)] != tip)
    assert found.branches[0] == -1
    assert found.times[15] == 0
    assert found.times.max() == 1


def test_the_split_is_where_rank_correlations_differ_most():
    rng = np.random.default_rng(1)
    a = np.concatenate([np.linspace(3, 2, 20), np.linspace(2, 3, 25)]) + 0.1 * rng.random(45)
    b = np.linspace(5, 1, 45) + 0.1 * rng.random(45)
    scores = {
        i: scipy.stats.kendalltau(a[:i], b[:i]).statistic - scipy.stats.kendalltau(a[i:], b[i:]).statistic
        for i in range(5, 41)
    }
    assert split_point(a, b) == max(scores, key=scores.get)


def test_roots_and_chains_without_one():
    k = star()[0]
    with pytest.raises(InputError, match="root: got 99, expected an integer >= 0 that is below 46"):
        MarkovChain.from_graph(k).pseudotime(99)
    with pytest.raises(InputError, match="pseudotime is not unique"):
        MarkovChain.from_graph(np.kron(np.eye(2), np.ones((3, 3)))).pseudotime(0)
    with pytest.raises(InputError, match="not reversible"):
        MarkovChain.from_graph(np.random.default_rng(0).random((9, 9))).pseudotime(0, modes=4)


@pytest.mark.parametrize("n", [1, 2])
def test_branches_need_three_states(n):
    with pytest.raises(InputError, match=f"branching: got a chain of {n} states, expected at least 3"):
        MarkovChain.from_graph(np.ones((n, n))).pseudotime(0, branching=True)


@pytest.mark.parametrize("k", [np.ones((3, 3)), np.diag([1.0, 1, 1, 1], 1) + np.diag([1.0, 1, 1, 1], -1) + np.eye(5)])
def test_tips_are_three_nodes_where_all_lie_on_a_line(k):
    found = MarkovChain.from_graph(k).pseudotime(0, modes=2, branching=True)
    assert len(set(found.tips.tolist())) == 3
