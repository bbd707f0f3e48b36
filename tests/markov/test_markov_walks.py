"""Random walks: laws, impossible moves, independence and reproducibility.

Tests of laws have fixed seeds, so they either pass for good or fail for good. Each of them would fail for one seed in a
million (`LEVEL`) with right walks; a bias of a percent fails for nearly all.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
import pytest
from scipy import stats

import nlflow as nl
from benchmarks.resident import traced
from nlflow import MarkovChain
from nlflow.markov import walks
from nlflow.markov.walks import AliasTables
from tests.chains import CASES, built, directed_ring, given, ring, transitions
from tests.problems import Floats

LEVEL = 1e-6
WALKERS = 100_003  # no multiple of a block


def agrees(counts: Any, law: Any) -> None:
    """Hold counts against a law by a chi-square test; what is expected less than five times is put together."""
    counts, expected = np.ravel(counts).astype(float), np.ravel(law) * np.sum(counts)
    assert counts[expected == 0].sum() == 0
    counts, expected = counts[expected > 0], expected[expected > 0]
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if len(counts) > 1:
        assert stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue > LEVEL


def histogram(positions: Any, n: int) -> Any:
    return np.bincount(positions, minlength=n)


@pytest.mark.parametrize("laziness", [0.0, 0.4])
@pytest.mark.parametrize("name", CASES)
def test_walkers_follow_the_law(name: str, laziness: float) -> None:
    affinity, p = built(name)
    n = len(p)
    lazy = laziness * np.eye(n) + (1 - laziness) * p
    chain = MarkovChain(affinity, laziness=laziness)
    for steps in (1, 4):
        found = chain.walk(2, steps, WALKERS, rng=steps)
        assert found.shape == (WALKERS,)
        assert found.dtype == np.int64
        agrees(histogram(found, n), np.linalg.matrix_power(lazy, steps)[2])


def test_starts() -> None:
    affinity, p = built("isolated")
    chain, n = MarkovChain(affinity), len(p)
    np.testing.assert_array_equal(chain.walk(3, 0, 5), [3] * 5)
    np.testing.assert_array_equal(chain.walk(np.array([3, 0, 19]), 0, 3), [3, 0, 19])
    np.testing.assert_array_equal(chain.walk(np.uint8(3), 0, 1), [3])
    own = np.arange(WALKERS) % n
    moved = chain.walk(own, 1, WALKERS, rng=3)
    np.testing.assert_array_equal(own, np.arange(WALKERS) % n)  # not changed
    agrees(np.histogram2d(own, moved, bins=[np.arange(n + 1)] * 2)[0], p / n)
    law = np.arange(float(n)).reshape(4, 5)
    law /= law.sum()
    agrees(histogram(chain.walk(law, 0, WALKERS, rng=4), n), law)
    agrees(histogram(chain.walk(law, 2, WALKERS, rng=4), n), law.ravel() @ p @ p)


def test_memory_of_starts_is_what_it_takes() -> None:
    """Numbers that are drawn and states beside them: a limit just below what is used is refused, one above is not."""
    law, walkers = np.full(10, 0.1), 100_000

    def drawn(limit: float | None = None) -> Any:
        return MarkovChain(given(np.ones((10, 10))), memory_limit=limit).walk(law, 0, walkers, rng=0)

    drawn()
    with traced() as taken:
        drawn()
    assert len(drawn(1.03 * taken.bytes)) == walkers
    with pytest.raises(nl.MemoryLimitError, match="a start for each of 100000 walkers"):
        drawn(0.97 * taken.bytes)


def test_one_state_and_one_walker() -> None:
    one = MarkovChain(given([[2.0]]))
    assert one.walk(0, 100, 3).tolist() == [0, 0, 0]
    assert one.stopped_walk(0, 0.01, 3).tolist() == [0, 0, 0]
    around = MarkovChain(given(directed_ring(7)))
    assert around.walk(2, 1000, 1).tolist() == [(2 + 1000) % 7]


@pytest.mark.parametrize("walkers", [1, 255, 256, 257, 1000])
def test_the_same_walks_for_a_seed_and_any_number_of_threads(walkers: int) -> None:
    chain = MarkovChain(built("queries")[0])
    before = numba.get_num_threads()
    results = []
    try:
        for threads in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
            numba.set_num_threads(threads)
            results.append((chain.walk(0, 20, walkers, rng=5), chain.stopped_walk(0, 0.1, walkers, rng=5)))
    finally:
        numba.set_num_threads(before)
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_array_equal(results[0][1], results[1][1])
    again = MarkovChain(built("queries")[0]).walk(0, 20, walkers, rng=np.random.default_rng(5))
    np.testing.assert_array_equal(again, results[0][0])
    if walkers > 1:
        assert np.any(chain.walk(0, 20, walkers, rng=6) != again)
        generator = np.random.default_rng(5)  # which goes on
        assert np.any(chain.walk(0, 20, walkers, rng=generator) != chain.walk(0, 20, walkers, rng=generator))
        assert np.any(chain.walk(0, 20, walkers) != chain.walk(0, 20, walkers))


def test_records() -> None:
    """All positions, and the last are those of the walk that was not recorded."""
    affinity, p = built("patch")
    chain = MarkovChain(affinity)
    record = chain.walk(7, 6, 1000, rng=1, record=True)
    assert record.shape == (7, 1000)
    np.testing.assert_array_equal(record[0], 7)
    np.testing.assert_array_equal(record[-1], chain.walk(7, 6, 1000, rng=1))
    np.testing.assert_array_equal(record[3], chain.walk(7, 3, 1000, rng=1))
    assert np.all(p[record[:-1], record[1:]] > 0)
    np.testing.assert_array_equal(chain.walk(7, 0, 4, rng=1, record=True), [[7] * 4])


def test_more_walkers_than_a_key_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part has its own key: walkers of the same number in different parts go different ways."""
    monkeypatch.setattr(walks, "_CALL", 500)
    chain = MarkovChain(given(ring(50, 0.2)))
    record = chain.walk(0, 40, 1200, rng=1, record=True)
    assert not np.array_equal(record[-1, :500], record[-1, 500:1000])
    agrees(histogram(record[-1], 50), np.linalg.matrix_power(ring(50, 0.2), 40)[0])
    np.testing.assert_array_equal(record[-1], chain.walk(0, 40, 1200, rng=1))
    stopped = chain.stopped_walk(0, 0.05, 1200, rng=1)
    assert not np.array_equal(stopped[:500], stopped[500:1000])


def test_impossible_moves_never_happen() -> None:
    """Rows with few possible moves among many, beside tiny ones."""
    rng = np.random.default_rng(0)
    n = 300
    k = rng.random((n, n)) ** 20 * (rng.random((n, n)) < 0.03) + np.roll(np.eye(n), 7, axis=1)
    p = transitions(k, np.ones(n))
    record = MarkovChain(given(k)).walk(rng.integers(0, n, 5000), 200, 5000, rng=2, record=True)
    assert np.all(p[record[:-1], record[1:]] > 0)


@pytest.mark.parametrize(
    "row",
    [
        [1.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, 5.0],
        [1e-300, 1.0, 1e-12, 1e-3],
        [0.999, 0.0005, 0.0005, 0.0],
        [0.1, 0.2, 0.3, 0.4],
        [1.0] * 7,
        [*(0.5 ** np.arange(20))],
        [1e300, 1e300, 3e300],
        [*np.arange(1000.0)],
    ],
)
def test_one_move_of_any_row(row: list[float]) -> None:
    n = len(row)
    law = np.array(row) / max(row) / (np.array(row) / max(row)).sum()
    tables = AliasTables(np.tile(law, (n, 1)))
    found = tables.walk(np.zeros(WALKERS, np.int64), 1, np.random.default_rng(3), False)
    agrees(histogram(found, n), law)


def test_the_number_zero_leads_nowhere_impossible() -> None:
    """With key 0 the first walker's first number is 0: cell 0, of which nothing is kept where state 0 is impossible."""
    from nlflow.backends.numba.walks import loop

    tables = AliasTables(np.tile([0.0, 0.5, 0.5], (3, 1)))
    states = np.ones(1, np.int64)
    loop("walk along tables")(tables._drawn, np.uint64(0), 1, 0, states)
    assert states[0] in (1, 2)
    # And it does come to state 0 where that is all there is.
    loop("walk along tables")(AliasTables(np.tile([1.0, 0.0, 0.0], (3, 1)))._drawn, np.uint64(0), 1, 0, states)
    assert states[0] == 0


def exact_shares(tables: AliasTables, state: int) -> Floats:
    """Return the probabilities that a table stands for."""
    entries = tables._drawn[0][state]
    n = len(entries)
    kept = (entries >> np.uint64(32)).astype(float) / 2.0**32
    result = np.zeros(n)
    for cell, share in enumerate(kept):
        alias = int(entries[cell] & np.uint64(0xFFFFFFFF))
        result[cell] += share / n
        result[alias] += (1 - share) / n
    return result


def test_tables_are_exact_to_their_last_bit() -> None:
    """Every state within 2^-32 of its probability, those of probability 0 with none, for rows of all kinds."""
    rng = np.random.default_rng(8)
    for n in (1, 2, 3, 17, 256):
        for power in (0, 1, 8, 60):
            rows = rng.random((n, n)) ** power * ((rng.random((n, n)) < 0.6) | np.eye(n, dtype=bool))
            rows /= rows.sum(axis=1, keepdims=True)
            tables = AliasTables(rows)
            for state in range(n):
                shares = exact_shares(tables, state)
                assert np.abs(shares - rows[state]).max() <= 2.0**-31
                assert np.all(shares[rows[state] == 0] == 0)
                small = rows[state] < 1 / n  # a state that is no alias has rounding in its own cell alone
                assert np.all(np.abs(shares - rows[state])[small] <= 2.0**-31)


@pytest.mark.slow
def test_moves_do_not_know_each_other() -> None:
    """Pairs of successive moves of one walker, and of the same move of neighbouring walkers, by chi-square tests."""
    n = 6
    law = np.arange(1.0, n + 1) / np.arange(1.0, n + 1).sum()
    chain = MarkovChain(given(np.tile(law, (n, 1))))  # each move is drawn anew from one law
    record = chain.walk(0, 60, 20_000, rng=9, record=True)[1:]
    expected = np.outer(law, law)
    edges = [np.arange(n + 1)] * 2
    for lag in (1, 2, 32):
        pairs = np.histogram2d(record[:-lag:lag].ravel(), record[lag::lag].ravel(), bins=edges)[0]
        agrees(pairs[::1], expected)
    for lag in (1, 2, 255, 256, 257, 8192):
        pairs = np.histogram2d(record[:, :-lag].ravel(), record[:, lag:].ravel(), bins=edges)[0]
        agrees(pairs, expected)
    diagonal = np.histogram2d(record[:-1, 1:].ravel(), record[1:, :-1].ravel(), bins=edges)[0]
    agrees(diagonal, expected)
    # Means of walkers scatter as those of independent draws do: sums of squares against chi-square.
    means = (record - law @ np.arange(n)).mean(axis=0)
    variance = law @ (np.arange(n) - law @ np.arange(n)) ** 2 / 60
    assert LEVEL / 2 < stats.chi2(len(means)).cdf((means**2).sum() / variance) < 1 - LEVEL / 2


# --- stopped walks ---------------------------------------------------------------------------------------------------


def stopped_law(p: Floats, stop: Floats) -> Floats:
    """Return sum_k ((1 - s) P)^k s row by row: where walkers from each node are stopped."""
    return np.asarray(np.linalg.solve(np.eye(len(p)) - (1 - stop)[:, None] * p, np.diag(stop)))


@pytest.mark.parametrize("name", ["queries", "isolated", "patch", "directed"])
@pytest.mark.parametrize("stop", [1.0, 0.4, 0.02, "some"])
@pytest.mark.sampled(4)
def test_where_walkers_are_stopped(stop: Any, name: str) -> None:
    affinity, p = built(name)
    n = len(p)
    everywhere = np.full(n, stop) if stop != "some" else np.where(np.arange(n) % 3 == 1, 0.3, 0.0)
    given_stop = stop if stop != "some" else everywhere.reshape(affinity.domain.shape)
    chain = MarkovChain(affinity)
    expected = stopped_law(p, everywhere)
    for start in (0, 4):
        found = chain.stopped_walk(start, given_stop, WALKERS, rng=11)
        assert found.dtype == np.int64
        agrees(histogram(found, n), expected[start])
    assert np.all(expected[:, everywhere == 0] == 0)
    spread = np.full(affinity.domain.shape, 1 / n)
    agrees(histogram(chain.stopped_walk(spread, given_stop, WALKERS, rng=12), n), expected.mean(axis=0))


def test_lazy_walkers_are_stopped_before_moves_that_stay_too() -> None:
    p = ring(8)
    lazy = 0.5 * np.eye(8) + 0.5 * p
    found = MarkovChain(given(p), laziness=0.5).stopped_walk(0, 0.2, WALKERS, rng=1)
    agrees(histogram(found, 8), stopped_law(lazy, np.full(8, 0.2))[0])


@pytest.mark.parametrize("fidelity", [0.1, 1.0, 7.0])
def test_the_mean_over_stopped_walkers_is_the_equilibrium(fidelity: float) -> None:
    """Normal tests at every node, at `LEVEL` for all together."""
    affinity, p = built("queries")
    n = len(p)
    f = np.random.default_rng(5).standard_normal(n)
    exact = nl.equilibrium(nl.AttentionFlow(affinity, f, fidelity)).u
    chain, stop = MarkovChain(affinity), fidelity / (1 + fidelity)
    law = stopped_law(p, np.full(n, stop))
    np.testing.assert_allclose(law @ f, exact, rtol=0, atol=1e-12)
    bound = stats.norm.isf(LEVEL / n / 2)
    for node in range(n):
        values = f[chain.stopped_walk(node, stop, WALKERS, rng=node)]
        deviation = math.sqrt(law[node] @ (f - exact[node]) ** 2 / WALKERS)
        assert abs(values.mean() - exact[node]) < bound * deviation


def test_walkers_that_would_never_be_stopped_are_found_before_they_start() -> None:
    """0 <-> 1 -> 2 and 3 -> 0: from 2 there is no way to a stop."""
    k = np.zeros((4, 4))
    k[0, 1] = k[1, 0] = k[1, 2] = k[2, 2] = k[3, 0] = 1.0
    chain = MarkovChain(given(k))
    with pytest.raises(nl.InputError, match=r"stop: got 0 at all nodes that can be reached from node 2.*for ever"):
        chain.stopped_walk(3, np.array([0.5, 0.0, 0.0, 0.0]), 10)
    # Where nobody comes to node 2 there is nothing to complain of: all are stopped at node 0 at the latest.
    found = chain.stopped_walk(3, np.array([1.0, 0.0, 0.0, 0.3]), WALKERS, rng=0)
    agrees(histogram(found, 4), [0.7, 0.0, 0.0, 0.3])
    found = chain.stopped_walk(0, np.array([0.0, 0.0, 0.2, 0.0]), 100, rng=0)
    assert found.tolist() == [2] * 100


def test_walkers_that_hardly_ever_come_by_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walks, "_MOST_MOVES", 10**5)
    chain = MarkovChain(given([[1.0, 1e-15], [1.0, 1.0]]))
    with pytest.raises(nl.NumericalError, match=r"stop: 3 walkers were not stopped within 100000 moves.*equilibrium"):
        chain.stopped_walk(0, np.array([0.0, 1.0]), 3, rng=0)
