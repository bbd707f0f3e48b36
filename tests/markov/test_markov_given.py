"""Chains of transition matrices, counts, fluxes, graphs and annotated data, and what is refused by name."""

from types import SimpleNamespace

import networkx as nx
import numpy as np
import pytest
import scipy.optimize
import scipy.sparse

from nlflow import InputError, MarkovChain, affinity_from_graph
from nlflow.markov.given import likeliest_fluxes

P = np.array([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25], [0.1, 0.3, 0.6]])
K = np.array([[1.0, 2, 0], [2, 0, 3], [0, 3, 4]])


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_array, scipy.sparse.coo_matrix, np.ndarray.tolist])
def test_transitions_of_any_form(form):
    chain = MarkovChain.from_transitions(form(P))
    assert np.abs(chain.matrix() - P).max() < 1e-15
    assert not chain.reversible
    assert "transition probabilities were given: 3 states, 8 moves" in chain.affinity.reason
    data = SimpleNamespace(obsp={"T_fwd": form(P)})
    assert (
        np.abs(MarkovChain.from_transitions(data, "T_fwd", laziness=0.5).matrix() - (np.eye(3) + P) / 2).max() < 1e-15
    )


def test_graphs_fluxes_and_annotated_data():
    expected = K / K.sum(axis=1, keepdims=True)
    network = nx.Graph()
    network.add_nodes_from(range(3))
    network.add_weighted_edges_from([(i, j, K[i, j]) for i in range(3) for j in range(i, 3) if K[i, j]], weight="tie")
    ways = (
        (scipy.sparse.csr_array(K), None), (K, None), (affinity_from_graph(K), None), (network, "tie"),
        (SimpleNamespace(obsp={"connectivities": scipy.sparse.csr_array(K)}), None),
        (SimpleNamespace(obsp={"a": K}), "a"),
    )  # fmt: skip
    for graph, key in ways:
        chain = MarkovChain.from_graph(graph, key)
        assert np.abs(chain.matrix() - expected).max() < 1e-15
        assert chain.reversible
        assert np.abs(chain.stationary - K.sum(axis=1) / K.sum()).max() < 1e-15  # of fluxes


def test_balance_within_a_tolerance():
    rough = K / K.sum(axis=1, keepdims=True)
    rough[0, :2] += [1e-7, -1e-7]
    assert not MarkovChain.from_transitions(rough).affinity.symmetric
    # A tree balances anything, so a loop is needed for fluxes to differ.
    loop = np.array([[0.5, 0.3, 0.2], [0.3, 0.4, 0.3], [0.2, 0.3 + 1e-5, 0.5 - 1e-5]])
    chain = MarkovChain.from_transitions(loop, balance=1e-3)
    assert chain.affinity.symmetric
    assert np.abs(chain.matrix() - loop).max() < 1e-4
    assert "in detailed balance to 3e-05" in chain.affinity.reason
    with pytest.raises(InputError, match=r"balance: got 1e-06, but pi_i P_ij and pi_j P_ji differ by up to 3.33e-05"):
        MarkovChain.from_transitions(loop, balance=1e-6)


def test_counts():
    counts = np.array([[10.0, 2, 1], [4, 20, 3], [0, 5, 7]])
    chain = MarkovChain.from_counts(counts, reversible=False)
    assert np.abs(chain.matrix() - counts / counts.sum(axis=1, keepdims=True)).max() < 1e-15
    found = MarkovChain.from_counts(scipy.sparse.csr_array(counts))
    assert found.reversible
    assert "in detailed balance, of 3 states and 52 moves" in found.affinity.reason

    # Against a maximization over all symmetric fluxes by SciPy.
    upper = np.triu_indices(3)

    def negative(logs):
        x = np.zeros((3, 3))
        x[upper] = np.exp(logs)
        x = x + np.triu(x, 1).T
        return -(counts * np.log(x / x.sum(axis=1, keepdims=True))).sum()

    best = scipy.optimize.minimize(negative, np.zeros(6), method="BFGS", options={"gtol": 1e-9})
    p = found.matrix()
    assert -(counts * np.log(p)).sum() <= best.fun + 1e-10
    # Two states balance anyway.
    two = MarkovChain.from_counts(counts[:2, :2]).matrix()
    assert np.abs(two - counts[:2, :2] / counts[:2, :2].sum(axis=1, keepdims=True)).max() < 1e-14
    assert np.array_equal(MarkovChain.from_counts([[3.0]]).matrix(), [[1.0]])


@pytest.mark.parametrize("seed", range(3))
def test_the_likeliest_fluxes_solve_their_equations(seed):
    """x_ij = (c_ij + c_ji) / (c_i / x_i + c_j / x_j) (Prinz et al. 2011), counts from 1 to 1e6."""
    rng = np.random.default_rng(seed)
    counts = np.floor(np.exp(14 * rng.random((40, 40))) * (rng.random((40, 40)) < 0.2)) + np.roll(np.eye(40), 1, axis=1)
    x = likeliest_fluxes(scipy.sparse.csr_array(counts)).toarray()
    share = counts.sum(axis=1) / x.sum(axis=1)
    assert np.array_equal(x, x.T)
    assert np.abs(x * (share[:, None] + share) - (counts + counts.T)).max() < 1e-8 * counts.max()


def test_likeliest_fluxes_of_another_package():
    msm = pytest.importorskip("deeptime.markov.msm", reason="deeptime is compared with where it is installed")
    rng = np.random.default_rng(0)
    counts = rng.poisson(10 * rng.random((30, 30)) ** 6).astype(float) + np.roll(np.eye(30), 1, axis=1)
    theirs = msm.MaximumLikelihoodMSM(reversible=True, maxiter=10**6, maxerr=1e-14).fit_fetch(counts)
    assert np.abs(MarkovChain.from_counts(counts).matrix() - theirs.transition_matrix).max() < 1e-12
    again = MarkovChain.from_transitions(theirs.transition_matrix)
    assert np.abs(again.stationary - theirs.stationary_distribution).max() < 1e-12


def repeated(values):
    """Return two states with two entries in one place."""
    return scipy.sparse.coo_array((np.asarray(values), ([0, 0, 1], [1, 1, 0])), shape=(2, 2))


def test_repeated_counts_of_small_integers_add_up():
    chain = MarkovChain.from_counts(repeated(np.array([200, 100, 7], np.uint8)))
    assert "307 moves" in chain.affinity.reason


NEGATIVE, LACKING = np.where(P == 0.3, -0.3, P), np.where(P == 0.3, np.nan, P)
OFF = P + np.array([[0, 0, 0], [0, 0, 1e-3], [0, 0, 1e-4]])


@pytest.mark.parametrize(("call", "message"), [
    (lambda: MarkovChain.from_transitions(OFF), r"transitions: 2 of 3 rows do not sum to 1 within 1e-06; the "
     r"farthest is row 1, which sums to 1.001 \(off by 0.001\)"),
    (lambda: MarkovChain.from_transitions(NEGATIVE), r"transitions: got 1 negative .*-0.3, from node 2 to 1"),
    (lambda: MarkovChain.from_counts(scipy.sparse.csr_array(LACKING)), r"counts: got 1 NaN or infinite .*nan"),
    (lambda: MarkovChain.from_counts(LACKING), "counts: got 1 NaN"),
    (lambda: MarkovChain.from_counts([[0, 1], [0, 0]]), r"counts: no move leaves 1 of 2 states \(the first is 1\)"),
    (lambda: MarkovChain.from_counts(np.eye(3)), r"counts: got 3 classes .*sizes 1, 1, 1.*reversible=False"),
    (lambda: MarkovChain.from_counts(np.ones((2, 3))), r"counts: got shape \(2, 3\), expected \(N, N\)"),
    (lambda: MarkovChain.from_transitions(scipy.sparse.csr_array(P * 1j)), "transitions: got complex128"),
    (lambda: MarkovChain.from_transitions(SimpleNamespace(obsp={"a": P})), r"key: got None, expected .*'a'"),
    (lambda: MarkovChain.from_transitions(P, "a"), "key: got 'a' beside a ndarray"),
    (lambda: MarkovChain.from_graph(SimpleNamespace(obsp={})), r"key: got 'connectivities', expected .*\(none\)"),
    (lambda: MarkovChain.from_graph(-K), "graph: got 6 negative weights"),
    (lambda: MarkovChain.from_counts(repeated([5.0, -3.0, 1.0])), "counts: got 1 negative weights .*-3"),
    (lambda: MarkovChain.from_counts(nx.DiGraph([(0, 1), (1, 0)])), "counts: got a networkx graph"),
    (lambda: MarkovChain.from_graph(K, "weight"), "key: got 'weight' beside a ndarray"),
    (lambda: MarkovChain.from_graph(affinity_from_graph(K), "weight"), "key: got 'weight' beside a SparseAffinity"),
    (lambda: MarkovChain.from_graph(SimpleNamespace(obsp=None)), "key: got 'connectivities'"),
    (lambda: MarkovChain.from_graph(SimpleNamespace(obsp={"a": K}), ["a"]), r"key: got \['a'\]"),
    (lambda: MarkovChain.from_graph(SimpleNamespace(obsp={"x_distances": K}), "x_distances"), "use x_connectivities"),
    (lambda: MarkovChain.from_transitions(P, rtol=1), "rtol: got 1, expected .* < 1"),
    (lambda: MarkovChain.from_counts(K, reversible="no"), "reversible: got 'no', expected True or False"),
    (lambda: MarkovChain.from_transitions(P).committor(0, 1, backward=1), "backward: got 1, expected True or False"),
    (lambda: MarkovChain.from_transitions(P).walk(0, 1, 1, record="no"), "record: got 'no', expected True or False"),
    (lambda: MarkovChain.from_graph(K).pseudotime(0, branching="no"), "branching: got 'no', expected True or False"),
    (lambda: MarkovChain(affinity_from_graph(K), memory_limit="1 GB"), "memory_limit: got '1 GB'"),
    (lambda: MarkovChain.from_transitions(SimpleNamespace(transition_matrix=P)), r"give its \.transition_matrix"),
    (lambda: MarkovChain.from_transitions(P).absorption([0, np.ma.masked_equal([1, 2], 2)]), "got a masked array"),
])  # fmt: skip
def test_what_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


def test_frames_whose_rows_and_columns_are_in_another_order_are_refused():
    pandas = pytest.importorskip("pandas", reason="data frames are pandas'")
    names = list("abc")
    frame = pandas.DataFrame(P, names, names)
    for make in (MarkovChain.from_transitions, MarkovChain.from_graph, affinity_from_graph):
        make(frame)
        make(frame.set_axis(range(3), axis=0))  # names that say nothing
        with pytest.raises(InputError, match="rows and columns have the same names in another order"):
            make(frame[names[::-1]])
        with pytest.raises(InputError, match="2 names are of rows or of columns alone"):
            make(frame.set_axis(["a", "b", "d"], axis=1))
