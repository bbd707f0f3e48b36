"""Numbers of Markov chains: spectra, passages, likeliest chains, sets and pseudotime against closed forms and NumPy."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from scipy.optimize import linprog, minimize
from scipy.sparse import block_diag, coo_array, csr_array, diags_array, lil_array
from scipy.sparse.linalg import splu, spsolve
from scipy.stats import kendalltau

from nlflow import Gaussian, Grid, MarkovChain, Points, affinity
from nlflow.markov import metastable
from nlflow.markov.law import balance
from nlflow.markov.pseudotime import split_point
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]


def path(nodes: int, ends: float = 0.0) -> csr_array:
    """Return the edges of a path, with loops of a weight at its ends."""
    i = np.arange(nodes - 1)
    rows, columns = np.concatenate([i, i + 1, [0, nodes - 1]]), np.concatenate([i + 1, i, [0, nodes - 1]])
    return csr_array(coo_array((np.append(np.ones(2 * nodes - 2), [ends, ends]), (rows, columns))))


def ring(nodes: int, loops: float) -> csr_array:
    i = np.arange(nodes)
    weights = np.concatenate([np.ones(2 * nodes), np.full(nodes, loops)])
    return csr_array(coo_array((weights, (np.tile(i, 3), np.concatenate([(i + 1) % nodes, (i - 1) % nodes, i])))))


def many_states(nodes: int) -> float:
    """Return relative errors of paths and rings of more states than have a matrix, whose numbers are known."""
    worst = 0.0
    # 1 − cos(πk/(n − 1)) of a path, and 1 − (2 cos(2πk/n) + a)/(2 + a) of a ring with loops.
    chain = MarkovChain.from_graph(path(nodes), laziness=0.25)
    gap = 0.75 * 2 * np.sin(np.pi / (nodes - 1) / 2) ** 2
    worst = largest(worst, abs(chain.spectral_gap / gap - 1), abs(chain.relaxation_time * gap - 1))
    worst = largest(worst, abs(chain.smallest_eigenvalue / -0.5 - 1))
    values = chain.modes(3).values
    expected = 1 - 1.5 * np.sin(np.pi * np.arange(3) / (nodes - 1) / 2) ** 2
    worst = largest(worst, float(np.abs(values - expected).max()))
    even, loops = nodes + nodes % 2, 1e-3
    slow = MarkovChain.from_graph(ring(even, loops))
    worst = largest(worst, abs((1 + slow.smallest_eigenvalue) * (2 + loops) / (2 * loops) - 1))
    # On a path of equal edges it takes k² moves from the end to node k, and targets are met in proportion.
    times = chain.hitting_times(0)
    k = np.arange(nodes)
    worst = largest(worst, float(np.abs(times[1:] * 0.75 / (k * (2 * (nodes - 1) - k))[1:] - 1).max()))
    worst = largest(worst, float(np.abs(chain.committor(0, nodes - 1) - k / (nodes - 1)).max()))
    # A Gaussian kernel round a circle, whose eigenvalues are sums of cosines.
    circle = affinity(Gaussian(2.0), Grid(even, boundary="periodic"), method="convolution")
    row = np.exp(-(np.minimum(i := np.arange(even), even - i) ** 2) / 8)
    waves = np.fft.fft(row).real / row.sum()
    return largest(worst, abs(MarkovChain(circle).spectral_gap / (1 - waves[1]) - 1))


def uneven(nodes: int, rng: np.random.Generator) -> float:
    """Return relative errors of a path of random weights, by eigenvalues of a matrix of three diagonals.

    From k to 0 it takes the sum over edges before k of the mass beyond each, over its weight. And of a ring on which
    walkers drift, whose law is that of a sparse elimination.
    """
    edges, loops = rng.uniform(0.5, 2.0, nodes - 1), rng.uniform(0.1, 1.0, nodes)
    degree = loops + np.append(edges, 0) + np.append(0, edges)
    graph = diags_array([edges, loops, edges], offsets=[-1, 0, 1]).tocsr()
    values = eigh_tridiagonal(1 - loops / degree, -edges / np.sqrt(degree[1:] * degree[:-1]), eigvals_only=True)
    chain = MarkovChain.from_graph(csr_array(graph))
    beyond = np.cumsum(degree[::-1])[::-1][1:]
    worst = largest(
        abs(chain.spectral_gap / values[1] - 1),
        abs(chain.smallest_eigenvalue / (1 - values[-1]) - 1),
        float(np.abs(chain.modes(4).values - 1 + values[:4]).max()),
        float(np.abs(chain.hitting_times(0)[1:] / np.cumsum(beyond / edges) - 1).max()),
        float(np.abs(chain.stationary * degree.sum() / degree - 1).max()),
    )
    i = np.arange(nodes)
    ahead, back = rng.uniform(0.4, 0.7, nodes), rng.uniform(0.1, 0.3, nodes)
    moves = coo_array((np.concatenate([ahead, back, 1 - ahead - back]),
                       (np.tile(i, 3), np.concatenate([(i + 1) % nodes, (i - 1) % nodes, i]))))  # fmt: skip
    system = lil_array((diags_array(np.ones(nodes)) - moves).T)
    system[0] = np.ones(nodes)
    law = splu(system.tocsc()).solve(np.eye(nodes)[0])
    told = MarkovChain.from_transitions(csr_array(moves)).stationary
    return largest(worst, float(np.abs(told / law - 1).max()))


def dense(rng: np.random.Generator) -> float:
    """Return errors of chains that are not reversible, or lazy, against NumPy's solutions."""
    n, worst = 9, 0.0
    p = rng.random((n, n)) ** 3
    p /= p.sum(axis=1, keepdims=True)
    for laziness in (0.0, 0.3):
        chain, lazy = MarkovChain.from_transitions(p, laziness=laziness), laziness * np.eye(n) + (1 - laziness) * p
        values = np.linalg.eigvals(lazy)
        values = values[np.argsort(-np.abs(values))]
        law = np.linalg.matrix_power(lazy, 4096)[0]
        worst = largest(
            worst,
            float(np.abs(np.sort(np.abs(chain.eigenvalues())) - np.sort(np.abs(values))).max()),
            abs(chain.spectral_gap / (1 - abs(values[1])) - 1),
            float(np.abs(chain.stationary / law - 1).max()),
        )
        times = np.zeros((n, n))
        for target in range(n):
            free = np.arange(n) != target
            times[free, target] = np.linalg.solve(np.eye(n - 1) - lazy[np.ix_(free, free)], np.ones(n - 1))
        found = chain.mean_first_passage_times()
        worst = largest(worst, float(np.abs(found - times).max() / times.max()))
        source, target = [0, 4], [2, 7]
        free = ~np.isin(np.arange(n), target)
        to = np.zeros(n)
        to[free] = np.linalg.solve(np.eye(n - 2) - lazy[np.ix_(free, free)], np.ones(n - 2))
        worst = largest(worst, abs(chain.mean_first_passage_time(source, target) * law[source].sum()
                                   / (law[source] @ to[source]) - 1))  # fmt: skip
        # Backward: the chain as it is seen in reverse, and the last of the two sets that was met.
        back = lazy.T * law / law[:, None]
        free &= ~np.isin(np.arange(n), source)
        q = np.zeros(n)
        q[source] = 1.0
        q[free] = np.linalg.solve(np.eye(free.sum()) - back[np.ix_(free, free)],
                                  back[np.ix_(free, source)].sum(axis=1))  # fmt: skip
        worst = largest(worst, float(np.abs(chain.committor(source, target, backward=True) - q).max()))
    # Nearly of two parts, so that the smallest eigenvalue rules; with loops of several weights.
    part = np.arange(8) < 4
    k = np.where(part[:, None] == part, 0.02, 1.0) * (1 + rng.random((8, 8)))
    k += k.T
    least = float(np.linalg.eigvals(k / k.sum(axis=1, keepdims=True)).real.min())
    chain = MarkovChain.from_graph(k)
    return largest(worst, abs(chain.smallest_eigenvalue / least - 1), abs(chain.spectral_gap / (1 + least) - 1))


def fluxes(rng: np.random.Generator) -> float:
    """Return errors of the fluxes π_i P_ij that detailed balance along a tree tells."""
    k = rng.random((9, 9)) ** 2
    k += k.T
    moves = csr_array(k / k.sum(axis=1, keepdims=True))
    found = balance(moves)
    told = found.fluxes(moves, Points(np.zeros(9), weights=np.ones(9)))
    assert told is not None
    matrix = np.exp(told.log_degree)[:, None] * told.average(np.eye(9))
    return largest(float(np.abs(matrix - k / k.sum()).max()), found.misfit)


def likeliest(rng: np.random.Generator) -> float:
    """Return by how much the likeliest reversible chain of counts differs from what SciPy's BFGS finds."""
    n = 5
    counts = rng.poisson(20 * rng.random((n, n))) + 1.0
    upper = np.triu_indices(n)

    def chain(logs: Floats) -> Floats:
        x = np.zeros((n, n))
        x[upper] = np.exp(logs)
        x = np.triu(x) + np.triu(x, 1).T
        return np.asarray(x / x.sum(axis=1, keepdims=True))

    left: list[float] = []

    def solved(matrix: Any, right: Floats) -> Any:
        left.append(float(np.abs(right).max()))
        return spsolve(matrix, right)

    with mock.patch("scipy.sparse.linalg.spsolve", solved):
        found = MarkovChain.from_counts(counts)
    fall = float((np.array(left[1:]) / left[:-1]).min())  # Newton's method squares what is left
    exact = minimize(lambda logs: -float((counts * np.log(chain(logs))).sum()), np.zeros(len(upper[0])), tol=1e-10)
    told = found.matrix()
    flux = found.stationary[:, None] * told
    gain = float((counts * np.log(told)).sum()) + exact.fun  # likelier, or as likely
    plain = MarkovChain.from_counts(counts, reversible=False).matrix()
    return largest(
        float(np.abs(told - chain(exact.x)).max()) / 1e-3, max(-gain, 0.0) / 1e-6,
        float(np.abs(flux - flux.T).max()) / 1e-12, fall / 1e-3,
        float(np.abs(plain - counts / counts.sum(axis=1, keepdims=True)).max()) / 1e-14,
    )  # fmt: skip


def sets(rng: np.random.Generator) -> float:
    """Return errors of metastable sets of weakly joined blocks, and of what is told of them."""
    worst = 0.0
    given = []
    for reversible in (True, False):
        k = rng.random((12, 12))
        k = k + k.T if reversible else k
        block = np.arange(12) // 4
        k = np.where(block[:, None] == block, k, 1e-3 * k)
        given.append((k / k.sum(axis=1, keepdims=True), block))
    given.append(_drifting(400))
    for p, block in given:
        chain = MarkovChain.from_transitions(p)
        found = chain.metastable_sets(3)
        chi, w = found.memberships, found.weights
        pairs = {(one, int(other)) for one, other in zip(block.tolist(), found.sets, strict=True)}
        inner = chi.T @ (w[:, None] * chi)
        coarse = np.linalg.solve(inner, chi.T @ (w[:, None] * (p @ chi)))
        # Sets that P keeps but for what it moves between them: P χ = χ coarse.
        worst = largest(
            worst,
            abs(len(pairs) - 3),
            float(np.abs(chi.sum(axis=1) - 1).max()) / 1e-10,
            -float(chi.min()) / 1e-10,
            float(np.abs(found.coarse - coarse).max()) / 1e-10,
            float(np.abs(p @ chi - chi @ coarse).max()) / 1e-8,
            float(np.abs(found.stationary - chain.stationary @ chi).max()) / 1e-10,
            abs(found.crispness - (np.diag(inner) / (w @ chi)).mean()) / 1e-10,
            (1 - found.crispness) / 0.02,
        )
    return largest(worst, _less_crisp(np.random.default_rng(17)))


def _drifting(nodes: int) -> tuple[csr_array, NDArray[np.int64]]:
    """Return moves of three groups of walkers that drift round a few places each, and hardly change groups."""
    i = np.arange(nodes)
    rows, columns = np.repeat(i, 8), (np.repeat(i, 8) * 7 + np.tile(np.arange(8) ** 2 * 11 + 1, nodes)) % nodes
    one = csr_array(coo_array((np.tile(np.arange(1.0, 9.0), nodes), (rows, columns)), shape=(nodes, nodes)))
    whole = lil_array(block_diag([one, one, one]))
    for group in range(3):
        whole[group * nodes, (group + 1) % 3 * nodes + 5] = 0.5 + group
    graph = csr_array(whole)
    return csr_array(diags_array(1 / np.asarray(graph.sum(axis=1)).ravel()) @ graph), np.repeat(np.arange(3), nodes)


def _less_crisp(rng: np.random.Generator) -> float:
    """Return how much crisper than those found memberships around are, by Nelder and Mead's method, over 1e-8.

    Sets here are hardly metastable. χ = X A with the modes X, rows that sum to 1 and the least entry 0 in each column.
    """
    beyond, m = 0.0, 3
    for _ in range(2):
        k = rng.random((9, 9)) ** 3
        k += k.T
        chain = MarkovChain.from_graph(k)
        with mock.patch("scipy.optimize.linprog", wraps=linprog) as program:
            found, x = chain.metastable_sets(m), chain.modes(m).vectors
        # Tolerances of linear programs are absolute, so costs are of size 1.
        beyond = largest(beyond, *(abs(float(np.abs(one.args[0]).max()) - 1) / 1e-14 for one in program.mock_calls))
        x = x * np.sign(x[0, 0])

        def crispness(free: Floats) -> float:
            a = np.zeros((m, m))
            a[1:, 1:] = free.reshape(m - 1, m - 1)
            a[1:, 0] = -a[1:].sum(axis=1)
            a[0] = -(x @ a).min(axis=0)  # noqa: B023
            chi = x @ a / a[0].sum()  # noqa: B023
            return float(((found.weights @ chi**2) / (found.weights @ chi)).mean())  # noqa: B023

        own = np.linalg.lstsq(x, found.memberships)[0][1:, 1:].ravel()
        starts = [own + 0.1 * np.abs(own).max() * rng.standard_normal(len(own)) for _ in range(3)]
        best = max(-minimize(lambda free: -crispness(free), start, method="Nelder-Mead",
                             options={"xatol": 1e-10, "fatol": 1e-12, "maxiter": 3000}).fun
                   for start in starts)  # fmt: skip
        beyond = largest(beyond, (best - found.crispness) / 1e-8)
    # What linear programs make largest is the slope of the crispness, among rows that keep their sums.
    a, way = rng.uniform(0.2, 1.0, (2, 3, 3))
    way -= way.mean(axis=1, keepdims=True)
    with mock.patch.object(metastable, "_vertex", return_value=a) as vertex:
        metastable._climbed(np.eye(3), [0], a)
    ahead, behind = (((a + h * way) ** 2).sum(axis=0) / (a + h * way)[0] for h in (1e-5, -1e-5))
    return largest(
        beyond, abs(float((vertex.call_args.args[2] * way).sum() / (ahead - behind).sum()) * 2e-5 - 1) / 1e-8
    )


def split() -> float:
    """Return in how many of 20 draws a branch ends elsewhere than where Kendall's correlations by SciPy differ most."""
    wrong = 0
    for seed in range(20):
        a, b = np.random.default_rng([16, seed]).standard_normal((2, 40))
        a[:15] = b[:15] + 1.5 * a[:15]
        scores = {i: kendalltau(a[:i], b[:i]).statistic - kendalltau(a[i:], b[i:]).statistic for i in range(5, 36)}
        found = split_point(a, b)
        wrong += bool(scores.get(found, -2.0) < max(scores.values()) - 1e-12)
    return float(wrong)


def pseudotime(rng: np.random.Generator) -> float:
    """Return errors of pseudotime, |Σ_t (P^t − 1π)| seen from two nodes in the symmetric form, and of branches."""
    k = rng.random((10, 10))
    k += k.T
    chain = MarkovChain.from_graph(k)
    d = k.sum(axis=1)
    likes = k / np.sqrt(d[:, None] * d)
    root = np.sqrt(d / d.sum())
    rest = likes - np.outer(root, root)
    sums = np.linalg.solve(np.eye(10) - rest, rest)  # Σ over t ≥ 1
    apart = np.linalg.norm(sums - sums[3], axis=1)
    found = chain.pseudotime(3, modes=10)
    worst = largest(float(np.abs(found.distances[0] - apart).max()) / 1e-9,
                    float(np.abs(found.times - apart / apart.max()).max()) / 1e-9)  # fmt: skip
    # Three arms of a star, 15 nodes each, and the node in the middle: each arm is a branch, up to some near the middle.
    i = np.arange(45)
    rows, columns = i + 1, np.where(i % 15 == 0, 0, i)
    star = csr_array(coo_array((np.ones(90), (np.append(rows, columns), np.append(columns, rows)))))
    told = MarkovChain.from_graph(star, laziness=0.5).pseudotime(15, modes=10, branching=True)
    assert told.branches is not None
    arms = [set(told.branches[arm * 15 + 4 : arm * 15 + 16].tolist()) for arm in range(3)]
    return largest(worst, float(arms[0] != {0}), float(sorted(map(len, arms)) != [1, 1, 1]),
                   float(arms[1] == arms[2]) * 2, 2 * float(any(-1 in arm for arm in arms)))  # fmt: skip


def run(context: Context) -> Outcome:
    rng = np.random.default_rng(12)
    return Outcome([
        Check("gaps, modes and passages of paths and rings, relative", many_states(context.pick(4000, 1201)), 1e-10),
        Check("the same of paths and rings of random weights", uneven(context.pick(4000, 1010), rng), 1e-9),
        Check("places where branches end, other than Kendall's correlations tell", split(), 0),
        Check("chains that are not reversible, and lazy ones, against NumPy", dense(rng), 1e-10),
        Check("fluxes of detailed balance", fluxes(rng), 1e-12),
        Check("the likeliest reversible chain of counts, over what BFGS may be off", likeliest(rng), 1.0),
        Check("metastable sets of blocks, over what they may be off", sets(rng), 1.0),
        Check("pseudotime and branches, over what they may be off", pseudotime(rng), 1.0),
    ])  # fmt: skip


CLAIM = Claim(
    name="numbers-of-chains",
    title="Spectra, passages, sets and pseudotime of Markov chains",
    statement=(
        "Gaps, modes, passage times and committors of long paths and rings are those of their cosines and parabolas; "
        "of chains that are not reversible, lazy ones too, those of NumPy's eigenvalues and linear systems. The "
        "likeliest chain of counts in detailed balance is the one that BFGS finds. Memberships of metastable sets are "
        "≥ 0, sum to 1 and span a space that P keeps; pseudotime is the distance of rows of Σ (P^t − 1π) in the "
        "symmetric form."
    ),
    source=(
        "Prinz et al. 2011, doi 10.1063/1.3565032; Röblitz and Weber 2013, doi 10.1007/s11634-013-0134-6; Haghverdi et "
        "al. 2016, doi 10.1038/nmeth.3971; Levin, Peres and Wilmer 2009"
    ),
    run=run,
)
