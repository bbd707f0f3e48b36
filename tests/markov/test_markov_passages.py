"""First passages, slow modes and metastable sets, against exact small chains, SciPy and other packages."""

import itertools

import mpmath
import numpy as np
import pytest
import scipy.linalg
import scipy.sparse
import scipy.spatial

from nlflow import (
    Gaussian,
    InputError,
    MarkovChain,
    MemoryLimitError,
    NumericalError,
    Points,
    affinity,
    affinity_from_graph,
    from_matrix,
)
from nlflow import neighbour_graph as neighbours
from nlflow.flows import spectrum
from nlflow.markov import absorbing, passages
from nlflow.markov.law import balance


def chain_of(k, **options):
    return MarkovChain(from_matrix(np.asarray(k, float), Points(np.arange(len(k)), np.ones(len(k)))), **options)


def blocks(n, m, eps=1e-2, seed=0):
    """Symmetric weights between n states in m groups that hardly see each other."""
    rng = np.random.default_rng(seed)
    k = rng.random((n, n)) * eps
    for b in range(m):
        inside = slice(b * n // m, (b + 1) * n // m)
        k[inside, inside] += rng.random((n // m, n // m))
    return k + k.T


GAMBLER = np.diag(np.ones(5), 1) + np.diag(np.ones(5), -1)  # steps of a path, reflected at its ends


def test_a_gambler_by_hand():
    chain = chain_of(GAMBLER)
    assert np.allclose(chain.committor(0, 5), np.arange(6) / 5, atol=1e-15)
    assert np.allclose(chain.committor(0, 5, backward=True), 1 - np.arange(6) / 5, atol=1e-15)
    # From i to n on a path reflected at 0: n^2 - i^2 moves.
    assert np.allclose(chain.hitting_times(5), 25 - np.arange(6.0) ** 2, atol=1e-12)
    assert chain.mean_first_passage_time([0, 1], 5) == pytest.approx((1 * 25 + 2 * 24) / 3)
    lazy = chain_of(GAMBLER, laziness=0.5)
    assert np.allclose(lazy.hitting_times(5), 2 * chain.hitting_times(5))
    assert np.allclose(lazy.committor(0, 5), chain.committor(0, 5))
    assert np.allclose(lazy.mean_first_passage_times()[:, 5], lazy.hitting_times(5))
    assert chain.mean_first_passage_time(range(6), 5) == pytest.approx(chain.stationary @ chain.hitting_times(5))


def test_a_chain_that_is_not_reversible():
    rng = np.random.default_rng(1)
    chain = chain_of(rng.random((7, 7)) ** 4)
    p, law = chain.matrix(), chain.stationary
    free = np.array([1, 2, 4, 5])
    for moves, forward in ((p, True), (p.T * law / law[:, None], False)):
        ends = [6] if forward else [0, 3]
        expected = np.linalg.solve(np.eye(4) - moves[np.ix_(free, free)], moves[np.ix_(free, ends)].sum(axis=1))
        assert np.abs(chain.committor([0, 3], 6, backward=not forward)[free] - expected).max() < 1e-14
    times = chain.mean_first_passage_times()
    for j in range(7):
        rest = np.delete(np.arange(7), j)
        expected = np.linalg.solve(np.eye(6) - p[np.ix_(rest, rest)], np.ones(6))
        assert np.abs(chain.hitting_times(j)[rest] / expected - 1).max() < 1e-13
        assert np.abs(times[rest, j] / expected - 1).max() < 1e-11
    with pytest.raises(InputError, match="not reversible"):
        chain.modes(2)


def test_walkers_that_never_come():
    moves = np.array([[0, 1, 1, 0.0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])
    chain = chain_of(moves)
    assert chain.hitting_times(1).tolist() == [np.inf, 0, np.inf, np.inf]
    assert chain.hitting_times([2, 3]).tolist() == pytest.approx([3, 4, 0, 0])
    with pytest.raises(InputError, match=r"walks from 2 nodes \(the first is 2\) do not meet it"):
        chain.committor(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False])
def test_many_states(symmetric, monkeypatch):
    monkeypatch.setattr(passages, "DENSE_STATES", 50)
    rng = np.random.default_rng(0)
    graph = neighbours(rng.normal(size=(300, 2)), 8, Gaussian(width=1.0), keep="either" if symmetric else "directed")
    chain = MarkovChain(affinity_from_graph(graph))
    p = chain.matrix()
    free = np.ones(300, bool)
    free[[0, 1, 2]] = False
    expected = np.linalg.solve(np.eye(297) - p[np.ix_(free, free)], p[free][:, 2])
    assert np.abs(chain.committor([0, 1], 2)[free] - expected).max() < 1e-9
    expected = np.linalg.solve(np.eye(297) - p[np.ix_(free, free)], np.ones(297))
    assert np.abs(chain.hitting_times([0, 1, 2])[free] / expected - 1).max() < 1e-8


def test_committors_keep_small_digits():
    # Against the wind by 1e-9 at each of four steps: a probability of about 1e-36.
    chain = chain_of([[0, 1, 0, 0, 0, 0.0], [1, 0, 1e-9, 0, 0, 0], [0, 1, 0, 1e-9, 0, 0], [0, 0, 1, 0, 1e-9, 0],
                      [0, 0, 0, 1, 0, 1e-9], [0, 0, 0, 0, 1, 0]])  # fmt: skip
    found = chain.committor(0, 5)
    wind = 1e9 ** np.arange(5.0)
    assert np.abs(found[1:] / (np.cumsum(wind) / wind.sum()) - 1).max() < 1e-14


@pytest.mark.parametrize(("source", "target", "message"), [
    (0, 0, "node 0 is a source too"), (0, 9, "expected 0 to 5"), (0, [], "got no node"),
    (0.5, 1, "expected node numbers"),
    (np.zeros(3, bool), 1, "got a mask of shape"), (range(6), 1, "got all 6 nodes"),
    (np.ma.array([0, 1]), 2, "source: got a masked array"),
    ([0, 0, 1, 0, 1, 0], 1, "got 6 integers that are 0 or 1"), ([[1], [1, 2]], 0, "parts of uneven lengths"),
])  # fmt: skip
def test_bad_nodes(source, target, message):
    with pytest.raises(InputError, match=message):
        chain_of(GAMBLER).committor(list(source) if isinstance(source, range) else source, target)


@pytest.mark.parametrize("given", [[0, 0], [1, 1], [0, 1], [1, 0]])
def test_zeros_and_ones_are_no_numbers_of_two_nodes(given):
    """They name other nodes than the mask that they look like."""
    chain = chain_of([[0.5, 0.5], [0.25, 0.75]])
    message = "got 2 integers that are 0 or 1, expected node numbers, or a mask"
    with pytest.raises(InputError, match=f"target: {message}"):
        chain.hitting_times(given)
    with pytest.raises(InputError, match=f"source: {message}"):
        chain.mean_first_passage_time(given, 1)
    for one in ([1], 1, [False, True]):
        np.testing.assert_allclose(chain.hitting_times(one), [2.0, 0.0])


# ---- modes


@pytest.mark.parametrize("matrix_free", [False, True])
def test_modes(matrix_free, monkeypatch):
    if matrix_free:
        monkeypatch.setattr("nlflow.markov.spectrum.DENSE_STATES", 10)
    k = blocks(40, 4)
    chain = chain_of(k)
    law, p = chain.stationary, chain.matrix()
    modes = chain.modes(5)
    root = np.sqrt(law)
    expected = scipy.linalg.eigvalsh(root[:, None] * p / root)[::-1][:5]
    assert np.abs(modes.values - expected).max() < 1e-12
    assert np.abs(p @ modes.vectors - modes.values * modes.vectors).max() < 1e-9
    assert np.abs(modes.vectors.T @ (law[:, None] * modes.vectors) - np.eye(5)).max() < 1e-9
    lazy = chain_of(k, laziness=0.25).modes(5)
    assert np.abs(lazy.values - (0.25 + 0.75 * expected)).max() < 1e-12
    with pytest.raises(NumericalError, match="residual"):
        chain.modes(5, rtol=1e-30)


@pytest.mark.parametrize("states", [10**6, 10])
def test_modes_of_float32_are_asked_for_its_digits(states, monkeypatch):
    monkeypatch.setattr("nlflow.markov.spectrum.DENSE_STATES", states)
    k, domain = blocks(40, 4), Points(np.arange(40.0))
    single, double = (MarkovChain(from_matrix(k.astype(dtype), domain)) for dtype in ("float32", "float64"))
    assert np.abs(single.modes(5).values - double.modes(5).values).max() < 1e-5
    assert single.modes(5).residual > 1e-9 > double.modes(5).residual
    assert np.array_equal(single.metastable_sets(4).sets, double.metastable_sets(4).sets)


def test_modes_of_a_graph_in_parts(monkeypatch):
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=(60, 2)), rng.normal(size=(40, 2)) + 50])
    graph = affinity_from_graph(neighbours(x, 6, Gaussian(width=1.0)))
    expected = MarkovChain(graph).modes(6)
    monkeypatch.setattr("nlflow.markov.spectrum.DENSE_STATES", 10)
    found = MarkovChain(graph).modes(6)
    assert (found.values[:2] == 1).all()
    assert np.abs(found.values - expected.values).max() < 1e-9
    assert passages.DENSE_STATES > 10


@pytest.mark.parametrize("states", [9, 1200])
def test_sets_that_are_a_choice_of_many_are_refused(states):
    """Around a ring slow modes are pairs; where the number parts none, the sets are there."""
    around = np.arange(states)
    ends = np.concatenate([around, np.roll(around, 1)]), np.concatenate([np.roll(around, 1), around])
    chain = MarkovChain.from_graph(scipy.sparse.csr_array((np.ones(2 * states), ends)), laziness=0.5)
    with pytest.raises(InputError, match=r"^count: got 2, which parts equal eigenvalues"):
        chain.metastable_sets(2, rtol=1e-6)
    assert chain.modes(2, rtol=1e-6).parted
    assert not chain.modes(3, rtol=1e-6).parted
    assert abs(chain.metastable_sets(3, rtol=1e-6).memberships.sum(axis=1) - 1).max() < 1e-12


def test_metastable_sets_of_blocks():
    for m in (2, 3, 4):
        found = chain_of(blocks(24, m)).metastable_sets(m)
        chi = found.memberships
        assert chi.min() >= 0
        assert np.abs(chi.sum(axis=1) - 1).max() < 1e-12
        assert all(len(set(found.sets[b * 24 // m : (b + 1) * 24 // m])) == 1 for b in range(m))
        assert np.abs(found.coarse.sum(axis=1) - 1).max() < 1e-12
        assert np.abs(np.sort(np.linalg.eigvals(found.coarse).real) - np.sort(found.modes.values)).max() < 1e-10
        assert np.abs(found.stationary @ found.coarse - found.stationary).max() < 1e-12


def test_sets_that_do_not_see_each_other():
    k = np.kron(np.eye(3), np.ones((2, 2)))
    found = chain_of(k).metastable_sets(3)
    assert np.abs(found.memberships.max(axis=1) - 1).max() < 1e-9
    assert found.crispness == pytest.approx(1)


def matched(a, b):
    from scipy.optimize import linear_sum_assignment

    return b[:, linear_sum_assignment(-a.T @ b)[1]]


def crispest_of_all(x):
    """Return the crispest memberships by trying every m facets of the convex hull of the modes as borders of the sets.

    A membership that is 0 at m - 1 states of a corner of what is allowed is 0 along a facet of the hull.
    """
    m, best, result = x.shape[1], 0.0, None
    planes = scipy.spatial.ConvexHull(x[:, 1:]).equations
    columns = -np.column_stack([planes[:, -1], planes[:, :-1]])
    for some in itertools.combinations(columns, m):
        a = np.transpose(some)
        if np.linalg.cond(a) > 1e10:
            continue
        factors = np.linalg.solve(a, np.eye(m)[0])
        if factors.min() > 0:
            a = a * factors
            crispness = ((a**2).sum(axis=0) / a[0]).mean()
            if crispness > best:
                best, result = crispness, x @ a
    return best, result


@pytest.mark.slow
@pytest.mark.parametrize(("m", "eps"), [(3, 1e-3), (3, 1e-1), (4, 1e-2)])
def test_no_memberships_are_crisper(m, eps):
    found = chain_of(blocks(24, m, eps)).metastable_sets(m)
    x = found.modes.vectors.copy()
    x[:, 0] = 1
    best, expected = crispest_of_all(x)
    assert found.crispness == pytest.approx(best, abs=1e-13)
    # Of two solutions of one linear program with entries up to 1, whose condition is that of the corners of the modes.
    assert np.abs(found.memberships - matched(found.memberships, expected)).max() < 1e-12


def test_two_sets_lie_along_the_second_mode():
    found = chain_of(blocks(24, 2)).metastable_sets(2)
    second = found.modes.vectors[:, 1]
    expected = (second - second.min()) / np.ptp(second)
    expected = matched(found.memberships, np.column_stack([expected, 1 - expected]))
    assert np.abs(found.memberships - expected).max() < 1e-13


@pytest.mark.slow
def test_memberships_of_chains_without_sets():
    for seed in range(3):  # of the next, some have crisper vertices far from the corners
        k = np.random.default_rng(seed).random((20, 20)) ** 4
        found = chain_of(k + k.T).metastable_sets(3)
        x = found.modes.vectors.copy()
        x[:, 0] = 1
        assert found.crispness == pytest.approx(crispest_of_all(x)[0], abs=1e-13)
        assert np.abs(np.sort(found.memberships, axis=0)[:2]).max() < 1e-12  # a vertex


def settled(search):
    """Return the simplex search of another package, which ends at 1e-4, continued."""

    def run(function, start, args=(), **options):
        for _ in range(12):
            start = search(function, start, args=args, xtol=1e-13 * np.abs(start).max(), ftol=1e-16, disp=False)
        return (start, function(start, *args), 0, 0, 0) if options.get("full_output") else start

    return run


@pytest.mark.parametrize("m", [2, 3])
def test_pcca_of_other_packages(m, monkeypatch):
    pcca = pytest.importorskip("deeptime.markov", reason="deeptime is compared with where it is installed").pcca
    import scipy.optimize

    monkeypatch.setattr(scipy.optimize, "fmin", settled(scipy.optimize.fmin))
    chain = chain_of(blocks(24, m))
    found = chain.metastable_sets(m)
    theirs = pcca(chain.matrix(), m).memberships
    assert np.abs(found.memberships - matched(found.memberships, theirs)).max() < 1e-8


def turning(n=30, m=3, seed=0):
    """Weights that are not symmetric between n states in m groups that hardly see each other."""
    rng = np.random.default_rng(seed)
    return 1e-2 * rng.random((n, n)) + np.kron(np.eye(m), np.ones((n // m, n // m))) * rng.random((n, n)) ** 3


@pytest.mark.parametrize("dense", [True, False])
def test_sets_of_a_chain_that_is_not_reversible(dense, monkeypatch):
    if not dense:
        monkeypatch.setattr("nlflow.markov.spectrum.DENSE_STATES", 10)
    chain = chain_of(turning())
    assert not chain.reversible
    found = chain.metastable_sets(3)
    law, p, chi = chain.stationary, chain.matrix(), found.memberships
    assert chi.min() >= 0
    assert np.abs(chi.sum(axis=1) - 1).max() < 1e-12
    assert all(len(set(found.sets[10 * b : 10 * b + 10])) == 1 for b in range(3))
    assert np.abs(p @ chi - chi @ found.coarse).max() < 1e-9  # P maps their span to itself
    values = np.linalg.eigvals(p)
    leading = values[np.argsort(-values.real)][:3]
    assert np.abs(np.sort_complex(np.linalg.eigvals(found.coarse)) - np.sort_complex(leading)).max() < 1e-9
    assert found.crispness == pytest.approx(np.mean((law @ chi**2) / (law @ chi)), abs=1e-13)
    x = found.modes.vectors @ np.linalg.qr(np.column_stack([found.modes.vectors.T @ law, np.eye(3)[:, 1:]]))[0]
    x[:, 0] = 1
    assert found.crispness == pytest.approx(crispest_of_all(x)[0], abs=1e-12)


def test_sets_of_a_chain_with_transient_states_have_all_of_its_law():
    p = [
        [0.5, 0.3, 0.2, 0, 0],
        [0.1, 0.1, 0.4, 0.4, 0],
        [0, 0, 0.5, 0.4, 0.1],
        [0, 0, 0.2, 0.7, 0.1],
        [0, 0, 0.1, 0.1, 0.8],
    ]
    chain = MarkovChain.from_transitions(p)
    found = chain.metastable_sets(2)
    assert np.allclose(found.stationary, chain.stationary @ found.memberships, rtol=1e-13)
    assert found.stationary.sum() == pytest.approx(1, abs=1e-13)
    assert np.allclose(found.weights, 0.2)


def test_a_reversible_chain_has_the_same_sets_by_schur_vectors():
    chain = chain_of(blocks(24, 3))
    found, other = chain.metastable_sets(3), chain.metastable_sets(3, weights=chain.stationary)
    assert np.abs(found.memberships - other.memberships).max() < 1e-10


def test_counts_that_part_a_pair_and_weights_that_are_none_are_refused():
    ring = np.roll(np.eye(9), 1, axis=1) + 0.2 * np.eye(9)  # eigenvalues on a circle: 1, then pairs
    with pytest.raises(InputError, match=r"count: got 2, which parts the complex eigenvalues .*expected 1 or 3"):
        chain_of(ring).metastable_sets(2)
    with pytest.raises(InputError, match=r"weights: got shape .* expected numbers > 0"):
        chain_of(ring).metastable_sets(3, weights=np.zeros(9))
    with pytest.raises(InputError, match="count: got 8, expected at most 7"):
        chain_of(ring).metastable_sets(8)


@pytest.mark.parametrize("mu", [0.0, 10.0, 1000.0, None])
def test_gpcca_of_other_packages(mu, monkeypatch):
    """Nine states in three groups, of which mu more moves lead from one to the next; and a chain that turns."""
    theirs = pytest.importorskip("pygpcca._gpcca", reason="pyGPCCA is compared with where it is installed")
    k = turning() if mu is None else 1000 * np.eye(9) + 100 * (np.kron(np.eye(3), np.ones((3, 3))) - np.eye(9))
    if mu is not None:
        for i, j, rate in ((0, 3, 10), (3, 6, 10), (2, 4, mu), (5, 7, mu)):
            k[i, j] = k[j, i] = rate
    chain, eta = chain_of(k), np.full(len(k), 1 / len(k))
    found = chain.metastable_sets(3, weights=eta)
    crispness = []
    for search_of in (theirs.fmin, settled(theirs.fmin)):
        monkeypatch.setattr(theirs, "fmin", search_of)
        model = theirs.GPCCA(chain.matrix(), eta=eta, z="LR", method="brandts").optimize(3)
        crispness.append(float(np.mean((eta @ model.memberships**2) / (eta @ model.memberships))))
    assert found.crispness >= max(crispness) - 1e-12
    assert found.crispness == pytest.approx(crispness[1], abs=1e-8)
    assert np.abs(found.memberships - matched(found.memberships, model.memberships)).max() < 1e-8


@pytest.mark.parametrize(("count", "message"), [(1, ">= 2"), (99, "at most")])
def test_bad_counts(count, message):
    with pytest.raises(InputError, match=message):
        chain_of(blocks(12, 2)).metastable_sets(count)


# ---- slow, large and transient chains


def path(n, weak=1.0):
    """A path of n states with a loop at each end, and a weak edge in the middle: weights and those of the edges."""
    edges = np.ones(n - 1)
    edges[n // 2 - 1] = weak
    k = scipy.sparse.diags_array([edges, edges], offsets=[-1, 1]).tolil()
    k[0, 0] = k[n - 1, n - 1] = 1.0
    return k.tocsr(), edges


def steps(k, edges):
    """Mean times from each state of a path to the next, either way: the degrees behind over the weight of the edge."""
    degree = np.asarray(k.sum(axis=1)).ravel()
    return np.cumsum(degree)[:-1] / edges, np.cumsum(degree[::-1])[:-1][::-1] / edges


@pytest.mark.parametrize("weak", [1.0, 1e-9, 1e-15])
def test_all_passage_times_of_a_slow_path(weak):
    k, edges = path(9, weak)
    right, left = steps(k, edges)
    expected = [[right[i:j].sum() if i < j else left[j:i].sum() for j in range(9)] for i in range(9)]
    found = MarkovChain(affinity_from_graph(k)).mean_first_passage_times()
    assert np.array_equal(np.diagonal(found), np.zeros(9))
    apart = ~np.eye(9, dtype=bool)
    assert np.abs(found[apart] / np.array(expected)[apart] - 1).max() < 1e-13


def test_passage_times_of_transient_states():
    chain = chain_of([[0.5, 0.5, 0], [0.2, 0.5, 0.3], [0, 0, 1.0]])
    times = [[0, 2, 20 / 3], [np.inf, 0, 14 / 3], [np.inf, np.inf, 0]]
    assert np.allclose(chain.mean_first_passage_times(), times, rtol=1e-14)
    assert chain.mean_first_passage_time([0], [2]) == pytest.approx(20 / 3, rel=1e-14)
    with pytest.raises(InputError, match="source: got 2 transient nodes"):
        chain.mean_first_passage_time([0, 1], [2])
    # Walks that must come through a transient state meet it.
    through = chain_of([[0, 1, 0, 0.0], [0, 0, 1, 1], [0, 0, 1, 0], [0, 0, 0, 1]]).mean_first_passage_times()
    assert through.tolist() == [[0, 1, np.inf, np.inf], [np.inf, 0, *[np.inf] * 2], [*[np.inf] * 2, 0, np.inf],
                                [*[np.inf] * 3, 0]]  # fmt: skip


def test_walkers_in_parts_of_a_large_graph(monkeypatch):
    monkeypatch.setattr(passages, "DENSE_STATES", 20)
    one = path(30)[0]
    chain = MarkovChain(affinity_from_graph(scipy.sparse.block_diag([one, one]).tocsr()))
    times = chain.hitting_times(29)
    assert np.isinf(times[30:]).all()
    assert times[0] == pytest.approx(30 * 29, rel=1e-12)
    with pytest.raises(InputError, match="walks from 30 nodes"):
        chain.committor(0, 29)
    # The same by averages alone, of two clusters that do not see each other.
    x = np.concatenate([np.linspace(0, 3, 15), np.linspace(1000, 1003, 15)])
    far = MarkovChain(affinity(Gaussian(1.0), Points(x, np.ones(30))))
    assert np.isinf(far.hitting_times(3)[15:]).all()
    near = chain_of(np.exp(-((x[:15, None] - x[:15]) ** 2) / 2)).hitting_times(3)
    assert np.allclose(far.hitting_times(3)[:15], near, rtol=1e-9)


@pytest.mark.parametrize("weak", [1.0, 1e-6])
def test_a_backward_committor_has_its_own_digits(weak, monkeypatch):
    k, edges = path(60, weak)
    for dense in (1000, 20):
        monkeypatch.setattr(passages, "DENSE_STATES", dense)
        chain = MarkovChain(affinity_from_graph(k))
        expected = np.append(np.cumsum(1 / edges[::-1])[::-1], 0) / (1 / edges).sum()
        found = chain.committor(0, 59, backward=True)
        assert np.abs(found[:-1] / expected[:-1] - 1).max() < 1e-10
        assert found[-1] == 0


def test_digits_that_are_not_there_are_refused(monkeypatch):
    monkeypatch.setattr(passages, "DENSE_STATES", 20)
    monkeypatch.setattr(absorbing, "REDUCED_STATES", 20)
    chain = MarkovChain(affinity_from_graph(path(60, 1e-15)[0]))
    with pytest.raises(NumericalError, match="neither iteration nor elimination reached a relative error of 1e-10"):
        chain.hitting_times(59)
    monkeypatch.setattr(absorbing, "REDUCED_STATES", 60)
    assert chain.hitting_times(59)[0] == pytest.approx(steps(*path(60, 1e-15))[0].sum(), rel=1e-13)


def test_many_states_of_a_directed_graph_are_iterated(monkeypatch):
    monkeypatch.setattr(passages, "DENSE_STATES", 20)
    monkeypatch.setattr(absorbing.Killed, "direct", lambda self: iter(()))
    monkeypatch.setattr(absorbing, "REDUCED_STATES", 20)
    rng = np.random.default_rng(3)
    k = scipy.sparse.random_array((300, 300), density=0.03, rng=rng).tocsr() + path(300)[0] * 0.1
    chain = MarkovChain(affinity_from_graph(k))
    p = chain.matrix()
    expected = np.linalg.solve(np.eye(299) - p[1:, 1:], np.ones(299))
    assert np.abs(chain.hitting_times(0)[1:] / expected - 1).max() < 1e-10


@pytest.mark.filterwarnings("ignore:affinity. . of . nodes see no other node")
@pytest.mark.parametrize("method", ["dense", "pairwise"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_walks_by_moves_that_float32_loses(dtype, method):
    """Moves of e^-98 and e^-112.5, of which float32 has three digits, and none."""
    x = np.array([[0.0], [14.0], [29.0]], dtype)

    def chain(*nodes):
        domain = Points(np.arange(float(len(nodes))), np.ones(len(nodes)))
        return MarkovChain(affinity(Gaussian(1.0), domain, x[list(nodes)], method=method))

    for two, expected in (((0, 1), 98.0), ((1, 2), 112.5)):
        pair = chain(*two)
        assert np.log(pair.hitting_times(1)[0]) == pytest.approx(expected, abs=1e-8)
        assert np.log(pair.mean_first_passage_times()[1, 0]) == pytest.approx(expected, abs=1e-8)
        assert pair.irreducible
    three, first = chain(0, 1, 2), 1 / (1 + np.exp(98 - 112.5))
    assert three.committor(2, 0)[1] == pytest.approx(first, rel=1e-8)
    ends = three.absorption({"left": [0], "right": [2]})
    assert ends.probabilities[1] == pytest.approx([first, 1 - first], rel=1e-7)
    assert np.log(ends.times[1]) == pytest.approx(98 - np.log1p(np.exp(98 - 112.5)), abs=1e-8)


# ---- the gap


@pytest.mark.slow
@pytest.mark.parametrize("laziness", [0.0, 0.5])
@pytest.mark.parametrize("n", [40, 3000])
def test_the_gap_of_a_path(n, laziness):
    chain = MarkovChain(affinity_from_graph(path(n)[0]), laziness=laziness)
    gap = (1 - laziness) * 2 * np.sin(np.pi / 2 / n) ** 2
    assert chain.spectral_gap == pytest.approx(gap, rel=1e-12)
    assert chain.relaxation_time == pytest.approx(1 / gap, rel=1e-12)
    assert chain.second_eigenvalue == 1 - chain.spectral_gap
    assert -1 <= chain.smallest_eigenvalue <= 1
    assert chain.smallest_eigenvalue == pytest.approx(2 * laziness - 1 + gap, rel=1e-10)


@pytest.mark.parametrize("laziness", [0.0, 0.5])
def test_the_gap_of_a_single_transient_state(laziness):
    moves = np.array([[1 - 2.0**-40, 2.0**-40], [0.0, 1.0]])
    chain = MarkovChain(from_matrix(moves, Points(np.arange(2.0))), laziness=laziness)
    assert chain.spectral_gap == pytest.approx((1 - laziness) * 2.0**-40, rel=1e-14)


@pytest.mark.parametrize("weak", [1e-5, 1e-15])
def test_gaps_between_blocks(weak):
    """Two states in each block that see each other by 1, blocks by weak: 1 - mu_2 = 2 weak / (1 + weak) + ..."""
    k = np.array([[1, 1, 0, 0], [1, 1, weak, 0], [0, weak, 1, 1], [0, 0, 1, 1.0]])
    chain = chain_of(k)
    with mpmath.workdps(50):
        p = mpmath.matrix([[mpmath.mpf(x) / mpmath.fsum(map(mpmath.mpf, row)) for x in row] for row in k.tolist()])
        exact = 1 - sorted(map(mpmath.re, mpmath.eig(p, left=False, right=False)))[-2]
        assert abs(mpmath.mpf(chain.spectral_gap) / exact - 1) < 1e-12
    # And one way round a ring, of which the gap is not that of a symmetric matrix.
    turning = chain_of([[1, weak, 0], [0, 1, weak], [weak, 0, 1.0]])
    c = weak / (1 + weak)
    assert turning.spectral_gap == pytest.approx(1.5 * c, rel=1e-4 if weak > 1e-9 else 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("dense", [False, True])
def test_moves_of_a_reversible_chain_go_by_its_symmetric_form(dense, monkeypatch):
    for part in ("spectrum", "passages", "law"):
        monkeypatch.setattr(f"nlflow.markov.{part}.DENSE_STATES", 20)
    monkeypatch.setattr("nlflow.markov.moves._MATRIX_STATES", 20)
    monkeypatch.setattr("nlflow.markov.moves._FEW", 0.2)
    graph = neighbours(np.random.default_rng(0).normal(size=(200, 2)), 6, Gaussian(width=1.0))
    degree = np.asarray(graph.sum(axis=1)).ravel()
    moves = scipy.sparse.csr_array(scipy.sparse.diags_array(1 / degree) @ graph)
    chain = chain_of(moves.toarray()) if dense else MarkovChain(affinity_from_graph(moves))
    fluxes = MarkovChain(affinity_from_graph(graph))
    monkeypatch.setattr("nlflow.markov.law.state_reduction", None)  # not asked
    assert chain.reversible
    assert not chain.affinity.symmetric
    assert np.abs(chain.stationary * degree.sum() / degree - 1).max() < 1e-13
    assert np.abs(chain.modes(4).values - fluxes.modes(4).values).max() < 1e-12
    assert chain.spectral_gap == pytest.approx(fluxes.spectral_gap, rel=1e-11)
    assert np.abs(chain.committor(0, 1, backward=True) - fluxes.committor(1, 0)).max() < 1e-12
    if not dense:
        two = MarkovChain(affinity_from_graph(scipy.sparse.block_diag([moves, moves]).tocsr()))
        assert two.reversible
        assert np.abs(two.modes(4).values - np.repeat(fluxes.modes(2).values, 2)).max() < 1e-12
        rough = moves.copy()
        rough.data *= 1 + 1e-5 * np.random.default_rng(1).random(rough.nnz)
        with pytest.raises(InputError, match=r"differ by up to .*e-0.* relative"):
            MarkovChain(affinity_from_graph(rough)).modes(2)


def test_eigenvalues_have_the_residuals_that_they_are_asked_for():
    matrix = np.diag(np.arange(30.0))
    assert spectrum.extreme(lambda v: matrix @ v, 30, "LA", symmetric=True)[0] == pytest.approx(29)
    with pytest.raises(NumericalError, match="has the residual"):  # Lanczos iteration of what is not symmetric
        spectrum.extreme(lambda v: matrix @ v + 5 * np.roll(v, 1), 30, "LA", symmetric=True)
    with pytest.raises(NumericalError, match="not found by iteration"):
        spectrum.extreme(lambda v: matrix @ v, 30, "LA", symmetric=True, maxiter=1, ncv=3)


def test_each_class_has_its_share_of_a_balanced_law():
    k = scipy.linalg.block_diag(blocks(4, 2, seed=3), blocks(6, 2, seed=4))
    found = balance(scipy.sparse.csr_array(k / k.sum(axis=1, keepdims=True)))
    law = np.exp(found.logs)
    assert found.misfit < 1e-12
    assert [law[:4].sum(), law[4:].sum()] == pytest.approx([0.4, 0.6], rel=1e-13)
    np.testing.assert_allclose(law[4:] * k[4:].sum(), 0.6 * k[4:].sum(axis=1), rtol=1e-12)


def test_passages_between_all_states_are_refused_before_they_are_allocated():
    chain = chain_of(blocks(100, 2), memory_limit=2e5)
    with pytest.raises(MemoryLimitError, match="passage times of 100 states"):
        chain.mean_first_passage_times()
