"""Slow and fast rates, laws and walks that end, of small chains that have closed forms or dense matrices."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eig
from scipy.sparse import csr_array, diags_array

from nlflow import Gaussian, MarkovChain, Points, affinity, from_matrix
from nlflow.markov.absorbing import Averaged, Killed, Way, balanced_law, ended, refined
from nlflow.markov.aggregation import _Level
from nlflow.markov.law import balance, left_eigenvector
from nlflow.markov.pseudotime import split_point
from nlflow.markov.rates import _eigenvalues, all_rates, form_of, slow_pairs
from nlflow.markov.reduction import log_state_reduction
from nlflow.markov.spectrum import _doubt
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]
Rng = np.random.Generator


def drawn(states: int, rng: Rng, symmetric: bool = True) -> Floats:
    """Return moves of all pairs of states, those of a symmetric kernel or any."""
    k = rng.random((states, states)) ** 2 + 0.01
    k = k + k.T if symmetric else k
    return np.asarray(k / k.sum(axis=1, keepdims=True))


def law_of(moves: Floats) -> Floats:
    """Return π of πP = π, Σπ = 1, by least squares with rates of leaving; those of the diagonal do not count."""
    rates = moves - np.diag(np.diag(moves))
    rates = (rates - np.diag(rates.sum(axis=1))) / rates.max()
    return np.asarray(np.linalg.lstsq(np.vstack([rates.T, np.ones(len(moves))]), np.eye(len(moves) + 1)[-1])[0])


def blocks(leaving: Floats, sizes: tuple[int, ...], rng: Rng, symmetric: bool = True) -> tuple[Floats, Floats]:
    """Return moves between blocks of states, and their law, for the probabilities to go from block to block.

    Who comes to a block is spread by its own law. So functions of the block alone are mapped to such functions, by the
    matrix of the blocks, whose eigenvalues the chain has.
    """
    inner = [drawn(size, rng, symmetric) for size in sizes]
    laws = [law_of(moves) for moves in inner]
    coarse = law_of(leaving)
    rows = [
        np.hstack([(1 - leaving[a].sum()) * inner[a] if a == b else leaving[a, b] * np.tile(laws[b], (sizes[a], 1))
                   for b in range(len(sizes))]) for a in range(len(sizes))
    ]  # fmt: skip
    return np.vstack(rows), np.concatenate([share * law for share, law in zip(coarse, laws, strict=True)])


def alternating(rng: Rng, stay: float) -> tuple[Floats, Floats]:
    """Return moves between two halves, with a probability to stay, and their law: 1 + μ is 2 stay at the least."""
    k = np.zeros((11, 11))
    k[:5, 5:] = rng.random((5, 6)) + 0.1
    k += k.T
    law = k.sum(axis=1) / k.sum()
    return stay * np.eye(11) + (1 - stay) * k / k.sum(axis=1, keepdims=True), law


def reversible(rng: Rng) -> float:
    """Return errors of rates 1 ∓ μ and their vectors, relative, and of the sums of squares that give their digits."""
    worst = 0.0
    for slow in (0.05, 1e-13):
        p, law = blocks(np.array([[0, slow], [2.6 * slow, 0]]), (5, 7), rng)
        worst = largest(worst, _rates(p, law, 1, 3.6 * slow))
        p, law = alternating(rng, slow)
        worst = largest(worst, _rates(p, law, -1, 2 * slow))
    p, law = blocks(np.array([[0, 1e-25], [2e-25, 0]]), (5, 7), rng)  # below what squares of roundings leave
    return largest(worst, float(all_rates(p, np.sqrt(law), 1, np.sqrt(law)[:, None])[0][0]))


def _rates(p: Floats, law: Floats, sign: int, least: float) -> float:
    root, n = np.sqrt(law), len(p)
    known = root[:, None] if sign > 0 else np.zeros((n, 0))
    rates, vectors = all_rates(p, root, sign, known)
    alike = root[:, None] * p / root
    others = np.sort(1 - sign * np.linalg.eigvalsh((alike + alike.T) / 2))[1 + (sign > 0) :]
    v = np.random.default_rng(5).standard_normal((n, 3))
    gram = v.T @ (law[:, None] * (v - sign * p @ v))
    flux = law[:, None] * p
    return largest(
        abs(rates[0] / least - 1), float(np.abs(rates[1:] / others - 1).max()),
        float(np.abs(vectors.T @ vectors - np.eye(n - (sign > 0))).max()),
        float(np.abs(vectors - sign * alike @ vectors - rates * vectors).max()),
        *(float(np.abs(form_of(one, sign)(v) - gram).max()) for one in (flux, csr_array(flux))),
    )  # fmt: skip


def irreversible(rng: Rng) -> float:
    """Return errors of the gap and the second eigenvalue of chains that drift, slow as they are, relative."""
    worst, turn = 0.0, np.exp(2j * np.pi / 3)
    for slow in (0.05, 3e-7, 1e-13):
        p = blocks(np.array([[0, slow], [2.6 * slow, 0]]), (4, 6), rng, symmetric=False)[0]
        for laziness in (0.0, 0.3):
            chain = MarkovChain.from_transitions(p, laziness=laziness)
            gap = 3.6 * slow * (1 - laziness)
            worst = largest(worst, abs(chain.spectral_gap / gap - 1), abs(chain.second_eigenvalue - (1 - gap)))
            worst = largest(worst, abs(chain.relaxation_time * gap - 1))
        # Three blocks in a ring: 1 − s + s ω, of which 1 − |μ| is (2 a − |ν|²)/(1 + |μ|) with ν = s (1 − ω) = a + ib.
        p = blocks(slow * np.roll(np.eye(3), 1, axis=1), (3, 4, 5), rng, symmetric=False)[0]
        chain, nu = MarkovChain.from_transitions(p), slow * (1 - turn)
        gap = (2 * nu.real - abs(nu) ** 2) / (1 + abs(1 - nu))
        worst = largest(worst, abs(chain.spectral_gap / gap - 1))
        worst = largest(worst, abs(complex(chain.second_eigenvalue).real - (1 - nu.real)))
        # A class that is left, all of whose states are left alike; and one state.
        for size in (5, 1):
            inside = drawn(size, rng, symmetric=False) * (1 - slow)
            p = np.block([[drawn(4, rng), np.zeros((4, size))], [np.full((size, 4), slow / 4), inside]])
            for laziness in (0.0, 0.3):
                told = MarkovChain.from_transitions(p, laziness=laziness).spectral_gap
                worst = largest(worst, abs(told / (slow * (1 - laziness)) - 1))
    return worst


def iterated(rng: Rng) -> float:
    """Return errors of what chains of many states take, on 320 of them: Lanczos, LOBPCG, Arnoldi and elimination."""
    n = 320
    places = np.sort(rng.random(n))
    k = np.exp(-(np.subtract.outer(places, places) ** 2) / (2 * 0.02**2)) * (0.5 + rng.random((n, n)))
    k = np.where((k := k + k.T) > 1e-3, k, 0.0)
    degree = k.sum(axis=1)
    values, vectors = np.linalg.eigh(k / np.sqrt(np.outer(degree, degree)))
    rates, vectors = 1 - values[::-1], vectors[:, ::-1]
    chain = MarkovChain.from_graph(csr_array(k))
    spectrum = chain._spectrum
    assert spectrum._likes is not None
    told = [spectrum._lanczos(4, 1e-9), spectrum._multigrid(spectrum._likes, 3, 1e-9),
            MarkovChain(from_matrix(k, Points(np.zeros(n))))._spectrum._lanczos(4, 1e-9)]  # fmt: skip
    worst = 0.0
    for found in told:
        if found is None:
            return math.inf
        some = slice(4 - found[1].shape[1], 4)
        worst = largest(worst, float(np.abs(found[0][: found[1].shape[1]] - rates[some]).max()))
        worst = largest(worst, float(np.abs(np.abs((found[1] * vectors[:, some]).sum(axis=0)) - 1).max()))
    dense = MarkovChain(from_matrix(k, Points(np.zeros(n))))._spectrum
    for one in (spectrum, dense):
        worst = largest(worst, abs(one._polished_rate() / rates[1] - 1) / 100)
        worst = largest(worst, abs(one._fast_rate(math.inf) / (2 - rates[-1]) - 1) / 100)
    worst = largest(worst, abs(spectrum._eliminated_rate() / (2 - rates[-1]) - 1) / 100)
    worst = largest(worst, float(spectrum._fast_rate(0.01) > 2 - rates[-1]))  # a lower bound suffices
    assert spectrum._fluxes is not None
    worst = largest(
        worst, float(np.abs(spectrum._fluxes.toarray() * degree.sum() / np.maximum(k, 1e-300) - 1)[k > 0].max())
    )
    # Elimination where some rates are slow, and a law that is not flat.
    p, law = alternating(rng, 1e-6)
    quick = MarkovChain.from_graph(csr_array(law[:, None] * p))._spectrum
    worst = largest(worst, abs(quick._eliminated_rate() / 2e-6 - 1) / 100)
    # The space of the slowest of a chain that drifts: P maps it to itself.
    p = blocks(0.01 * (np.ones((3, 3)) - np.eye(3)), (20, 25, 15), rng, symmetric=False)[0]
    found, basis = MarkovChain.from_transitions(p)._spectrum._subspace(lambda v: p @ v.reshape(60, -1), 3, 1e-9)
    exact = np.linalg.eigvals(p)
    exact = exact[np.argsort(-exact.real)][:3]
    return largest(
        worst, float(np.abs(np.sort(found.real) - np.sort(exact.real)).max()),
        float(np.abs(basis.T @ basis - np.eye(3)).max()),
        float(np.abs(p @ basis - basis @ (basis.T @ p @ basis)).max()),
    )  # fmt: skip


def laws(rng: Rng) -> float:
    """Return errors of laws and their logarithms, of distances in total variation, mixing times and bounds."""
    # A path along which the law is a product of ratios, down to e^-1300 and up again: by balance and by reduction.
    n = 41
    up = np.where(np.arange(n - 1) < 25, 1e-24, 0.3)
    down = np.where(np.arange(n - 1) < 25, 0.3, 1e-24) * rng.uniform(0.5, 1.5, n - 1)
    stay = 1 - np.append(up, 0) - np.append(0, down)
    path = diags_array([down, stay, up], offsets=[-1, 0, 1]).tocsr()
    log = np.append(0, np.cumsum(np.log(up) - np.log(down)))
    log -= np.logaddexp.reduce(log)
    order = rng.permutation(n)
    found = balance(path[order][:, order])
    path, back = path[::-1][:, ::-1], log[::-1]  # the least likely first
    with np.errstate(divide="ignore"):
        reduced = log_state_reduction(np.log(path.toarray()))
    told = MarkovChain.from_transitions(path).stationary
    likely = back > -600
    logs = np.abs(found.logs - log[order]).max(), np.abs(reduced - back).max()
    worst = largest(
        found.misfit,
        *(float(one) / 1e3 for one in logs),
        float(np.abs(told[likely] / np.exp(back[likely]) - 1).max()) / 100,
    )
    # Two classes, each with the share of its states.
    k = np.zeros((7, 7))
    k[:3, :3], k[3:, 3:] = rng.random((3, 3)) + 0.1, rng.random((4, 4)) + 0.1
    k += k.T
    law = np.concatenate([k[:3].sum(axis=1) / k[:3].sum() * 3, k[3:].sum(axis=1) / k[3:].sum() * 4]) / 7
    worst = largest(
        worst, float(np.abs(np.exp(balance(csr_array(k / k.sum(axis=1, keepdims=True))).logs) / law - 1).max())
    )
    # So have classes of many states whose fluxes are in balance.
    n, parts = 1300, np.arange(1300) < 400
    k = diags_array([rng.uniform(0.5, 1.5, n - 1) * (parts[1:] == parts[:-1]), np.ones(n)], offsets=[1, 0]).tocsr()
    degree = (k := k + k.T).sum(axis=1)
    chain = MarkovChain.from_transitions(diags_array(1 / degree) @ k)
    law = np.where(parts, degree / degree[parts].sum() * 400, degree / degree[~parts].sum() * 900) / n
    worst = largest(worst, float(np.abs(chain._law.of_parts / law - 1).max()))
    weights, x = rng.uniform(0.3, 2.0, 9), rng.random((9, 2))
    near = affinity(Gaussian(0.3), Points(x, weights=weights), method="dense")
    degree = np.exp(-(((x[:, None] - x[None]) ** 2).sum(axis=2)) / 0.18) @ weights
    log_law = MarkovChain(near).log_law
    assert log_law is not None
    worst = largest(worst, float(np.abs(np.exp(log_law) / (weights * degree / (weights @ degree)) - 1).max()))
    # Laws of chains that drift: by Arnoldi iteration, and from one that is near it and not normed.
    p = drawn(30, rng, symmetric=False)
    law, sparse = law_of(p), csr_array(p)
    worst = largest(worst, float(np.abs(left_eigenvector(lambda q: q @ p, 30) / law - 1).max()))
    worst = largest(worst, float(np.abs(balanced_law(sparse, 3 * law * rng.uniform(0.9, 1.1, 30)) / law - 1).max()))
    lazy = MarkovChain.from_transitions(blocks(np.array([[0, 0.02], [0.03, 0]]), (3, 4), rng)[0], laziness=0.2)
    start, matrix = np.array([0.7, 0.3 + 4e-7, 0, 0, 0, 0, 0]), lazy.matrix()
    law = law_of(matrix)
    powers = [np.linalg.matrix_power(matrix, step) for step in range(200)]
    far = np.array([np.abs(one - law).sum(axis=1).max() for one in powers]) / 2
    own = np.array([np.abs(start / start.sum() @ one - law).sum() for one in powers]) / 2
    worst = largest(
        worst, float(np.abs(lazy.total_variation(60) - far[:61]).max()),
        float(np.abs(lazy.total_variation(60, start) - own[:61]).max()),
        *(abs(lazy.mixing_time(eps) - int(np.argmax(far <= eps))) for eps in (0.25, 0.06)),
        abs(lazy.mixing_time(0.1, start) - int(np.argmax(own <= 0.1))),
    )  # fmt: skip
    # (1/gap − 1) log(1/2ε) and log(1/(ε min π))/gap, to the safe side of a gap that is known to 1e-10.
    gap, bounds = 0.8 * 0.05, lazy.mixing_bounds(0.1)
    exact = (1 / gap - 1) * np.log(1 / 0.2), np.log(1 / (0.1 * law.min())) / gap
    slack = exact[0] / bounds[0] - 1, bounds[1] / exact[1] - 1
    return largest(worst, *(max(-one, 0.0) + (one > 3e-10) for one in slack))


def ends(rng: Rng) -> tuple[float, float]:
    """Return errors of walks that end, A x = b, by iteration and by elimination, and of the errors that are told."""
    n = 60
    rates = np.where(rng.random((n, n)) < 0.2, rng.random((n, n)), 0.0)
    np.fill_diagonal(rates, 0.0)
    killed, b = np.where(rng.random(n) < 0.3, 9 * rng.random(n), 0.0), np.exp(3 * rng.standard_normal((n, 3)))
    matrix = np.diag(killed + rates.sum(axis=1)) - rates
    exact = np.linalg.solve(matrix, b)
    found = ended(csr_array(rates), killed, b, 0, lambda room: None)
    a = Killed(csr_array(rates), killed)
    ways = [*a.iterated(), *a.direct()]
    worst = largest(
        float(np.abs(found.x / exact - 1).max()), float(not found.method.startswith("multigrid")),
        *(float(np.abs(way.solve(b, 1e-6 if "32" in way.name else 1e-12) / exact - 1).max())
          * (1e-8 if "32" in way.name else 1) for way in ways), float(len(ways) != 3),
    )  # fmt: skip
    # Walks that hardly ever end: x is 1e10 times as large as b, and keeps its digits as a sum of two floats.
    seldom, ones = np.eye(n)[7] * 1e-9, np.ones((n, 1))
    rare = ended(csr_array(rates), seldom, ones, 0, lambda room: None)
    law = law_of(rates)
    first = 1e9 / law[7]  # from state 7, by the balance of what comes and ends: Σ law b = law_7 killed_7 x_7
    worst = largest(worst, abs(rare.x[7, 0] / first - 1), float(rare.method == "state reduction"))
    # So it does by a way that leaves a thousandth each time, though b is 1e-10 of x.
    slow, back = Killed(csr_array(rates), seldom), np.linalg.inv(np.diag(seldom + rates.sum(axis=1)) - rates)
    by_parts = refined(slow, ones, Way("0.999 of the inverse", lambda r, rtol: 0.999 * back @ r))
    worst = largest(worst, math.inf if by_parts is None else abs(by_parts.x[7, 0] / first - 1))
    # A way that is wrong by up to a thousandth: what is told of x is what is left of it, and a bound of its error.
    inverse, off = np.linalg.inv(matrix), 1 + 1e-3 * rng.standard_normal((n, n))
    told = 0.0
    for columns in (1, 3):
        rough = refined(a, b[:, :columns], Way("rough", lambda r, rtol: (inverse * off) @ r), exact=3e-4)
        if rough is None:
            return math.inf, math.inf
        left = np.abs(b[:, :columns] - matrix @ rough.x)
        sizes = rough.x.max(axis=0)
        scale = np.maximum(rough.x, rough.x.max(axis=0) * (1e-3 if columns == 1 else 1.0))
        true = float((np.abs(rough.x - exact[:, :columns]) / scale).max())
        most = (left / sizes).max(axis=1)
        bound = float((2 * inverse @ np.maximum(most, 1e-3 * most.max()) / (scale / sizes).min(axis=1)).max())
        told = largest(told, true / rough.error, abs(rough.error / bound - 1) * 100,
                       abs(rough.residual / (left.max(axis=0) / sizes).max() - 1) * 1e6)  # fmt: skip
    # Aggregates: rates between them are added up, and the residual of one is that of its states.
    level = _Level(csr_array(rates), a.left, "float64")
    up = np.eye(level.count)[level.group]
    coarse = up.T @ matrix @ up
    between, ended_, leaving = level.aggregated(csr_array(rates), killed, a.left)
    r = rng.standard_normal((n, 2))
    return largest(
        worst,
        float(np.abs(np.diag(leaving) - between.toarray() - coarse).max()),
        float(np.abs(ended_ - up.T @ killed).max()),
        float(np.abs(level.down(r) - (up.T @ (a.left[:, None] * r)) / np.diag(coarse)[:, None]).max()),
    ), told


def sets(rng: Rng) -> float:
    """Return errors of what is told of metastable sets, in the order of their laws, with weights of one's own too."""
    p, law = blocks(1e-3 * np.array([[0, 1, 2], [2, 0, 1], [3, 3, 0.0]]), (3, 6, 4), rng, symmetric=False)
    worst, own = 0.0, rng.uniform(0.5, 2.0, 13)
    for weights, given in ((law, None), (own / own.sum(), 5e307 * own)):
        found = MarkovChain.from_transitions(p).metastable_sets(3, weights=given)
        inner = found.memberships.T @ (weights[:, None] * found.memberships)
        crisp = float(np.mean(np.diag(inner) / (weights @ found.memberships)))
        block = np.repeat(np.arange(3), (3, 6, 4))
        mass = np.bincount(block, law)
        worst = largest(
            worst, abs(found.crispness - crisp), abs(found.crispness - 1), float(np.abs(found.weights - weights).max()),
            float(np.abs(found.stationary - np.sort(mass)[::-1]).max()),
            float(np.abs(found.memberships - (block[:, None] == np.argsort(-mass))).max()),
        )  # fmt: skip
    return worst


def small(rng: Rng) -> float:
    """Return errors of spectra and modes of few states, lazy ones too, and of what else is found from all moves."""
    worst, n = 0.0, 9
    for symmetric in (True, False):
        p = drawn(n, rng, symmetric)
        for laziness in (0.0, 0.3):
            chain, lazy = MarkovChain.from_transitions(p, laziness=laziness), laziness * np.eye(n) + (1 - laziness) * p
            exact = np.linalg.eigvals(lazy)
            told, law = chain.eigenvalues(), law_of(lazy)
            worst = largest(worst, float(np.abs(np.sort_complex(told) - np.sort_complex(exact)).max()))
            if symmetric:
                modes, second = chain.modes(5), np.sort(exact.real)[::-1]
                v = modes.vectors
                worst = largest(
                    worst, float(np.abs(modes.values - second[:5]).max()), abs(modes.residual),
                    float(np.abs(v.T @ (law[:, None] * v) - np.eye(5)).max()),
                    float(np.abs(lazy @ v - v * modes.values).max()), abs(chain.smallest_eigenvalue - second[-1]),
                    abs(abs(chain.second_eigenvalue) - np.abs(second[1:]).max()),
                )  # fmt: skip
    # No modulus is above 1, however it is rounded; and periods are the common divisors of the lengths of rings.
    few = [MarkovChain.from_transitions(drawn(4, rng, False)).eigenvalues() for _ in range(20)]
    worst = largest(worst, *(max(float(np.abs(one).max()) - 1, 0.0) * 1e6 for one in few))
    for lengths, period in (((3,), 3), ((6, 4), 2), ((6, 9), 3), ((5, 3), 1)):
        size = max(lengths)
        ring = np.roll(np.eye(size), 1, axis=1)
        for length in lengths:
            ring[length - 1, 0] = 1
        worst = largest(worst, abs(MarkovChain.from_graph(csr_array(ring)).period - period))
    # Parts that no move leaves: the eigenvalue 1 of each, and modes that are orthonormal over all.
    k = np.zeros((8, 8))
    k[:3, :3], k[3:, 3:] = rng.random((3, 3)) + 0.1, rng.random((5, 5)) + 0.1
    k += k.T
    modes = MarkovChain.from_graph(csr_array(k)).modes(4)
    law = np.concatenate([k[:3].sum(axis=1), k[3:].sum(axis=1)]) / k.sum()
    exact = np.sort(np.linalg.eigvals(k / k.sum(axis=1, keepdims=True)).real)[::-1]
    gram = modes.vectors.T @ (law[:, None] * modes.vectors)
    worst = largest(worst, float(np.abs(modes.values - exact[:4]).max()), float(np.abs(gram - np.eye(4)).max()))
    # Slow pairs of vectors of any length that have some of what is known, and walks by averages.
    p, law = blocks(np.array([[0, 1e-9], [3e-9, 0]]), (5, 7), rng)
    root = np.sqrt(law)
    step = root * np.where(np.arange(12) < 5, 1.0, -3.0)
    rates, _ = slow_pairs(form_of(law[:, None] * p, 1), root, 1e-150 * (step + 0.3 * root)[:, None], root[:, None])
    inside, x = np.array([1, 4, 6, 9]), rng.standard_normal((4, 2))
    moved = x - p[np.ix_(inside, inside)] @ x
    averaged = Averaged(lambda v: p @ v, 12, inside, False)(x)
    worst = largest(worst, abs(rates[0] / 4e-9 - 1), float(np.abs(averaged - moved).max()))
    worst = largest(
        worst, abs(MarkovChain.from_graph(csr_array(law[:, None] * p))._spectrum._polished_rate() / 4e-9 - 1)
    )
    p, law = blocks(np.array([[0, 0.02], [0.06, 0]]), (5, 7), rng)
    root, y = np.sqrt(law), rng.standard_normal((12, 2))
    alike, one = root[:, None] * p / root, np.outer(root, root)
    solved = np.linalg.solve(np.eye(12) - alike + one, y - one @ y)
    flux = law[:, None] * p
    basis = MarkovChain.from_graph(csr_array(flux + flux.T))._spectrum._potential(y)
    if basis is None:
        return math.inf
    worst = largest(worst, float(np.abs(solved - basis @ (basis.T @ solved)).max() / np.abs(solved).max()) / 10)
    # Errors of eigenvalues: some roundings of the matrix over the cosine between left and right vectors.
    matrix = rng.standard_normal((6, 6))
    doubt, vectors = _eigenvalues(matrix, eig)[1], np.linalg.eig(matrix)[1]
    cosines = 1 / np.linalg.norm(np.linalg.inv(vectors), axis=1)
    told = np.sort(doubt) / np.sort(4 * np.finfo(np.float64).eps * np.linalg.norm(matrix) / cosines)
    single = affinity(Gaussian(0.3), Points(rng.random((9, 2)).astype(np.float32)), method="dense")
    weights = rng.uniform(0.3, 2.0, 5)
    causal = from_matrix(np.tril(np.ones((5, 5))), Points(np.zeros(5), weights=weights))
    return largest(
        worst, float(np.abs(told - 1).max()), float(np.abs(MarkovChain(single).matrix().sum(axis=1) - 1).max()),
        float(np.abs(MarkovChain(causal).norm_weights - weights / weights.sum()).max()),
    )  # fmt: skip


def branches() -> float:
    """Return in how many of 200 short draws a branch ends elsewhere than where rank correlations differ most."""
    wrong = 0
    for seed in range(200):
        m = 11 + seed % 6
        a, b = np.random.default_rng([18, seed]).standard_normal((2, m))
        agree = np.sign(np.subtract.outer(a, a)) * np.sign(np.subtract.outer(b, b))

        def tau(some: slice) -> float:
            inside = agree[some, some]  # noqa: B023
            return float(inside.sum() / (len(inside) * (len(inside) - 1)))

        scores = {i: tau(slice(0, i)) - tau(slice(i, m)) for i in range(5, m - 4)}
        wrong += scores.get(split_point(a, b), -9.0) < max(scores.values()) - 1e-12
    return float(wrong)


def doubts() -> float:
    """Return errors of the bound |r|²/gap of a Rayleigh quotient, or |r| where that is less."""
    r, rates = np.array([[0.03, 1.0], [0.04, 1.0]]), np.array([0.1, 0.4])
    return largest(
        abs(_doubt(r, rates) / (0.05**2 / 0.3) - 1), abs(_doubt(20 * r, rates) - 1), abs(_doubt(r, rates[:1]) - 0.05)
    )


def run(context: Context) -> Outcome:
    del context
    rng = partial(np.random.default_rng, 61)
    errors, told = ends(rng())
    return Outcome([
        Check("rates of reversible chains and their vectors, relative", reversible(rng()), 1e-11),
        Check("gaps of chains that drift, relative", irreversible(rng()), 1e-10),
        Check("iteration and elimination against dense spectra", iterated(rng()), 1e-10),
        Check("spectra, modes and periods of few states", small(rng()), 1e-10),
        Check("laws, distances, mixing times and their bounds", laws(rng()), 1e-11),
        Check("walks that end, by iteration, elimination and aggregates", errors, 1e-10),
        Check("errors and residuals that are told, over what is left", told, 1.0),
        Check("metastable sets of blocks, in the order of their laws", sets(rng()), 1e-9),
        Check("places where short branches end, other than rank correlations tell", branches(), 0),
        Check("bounds of rates from residuals", doubts(), 1e-12),
    ])  # fmt: skip


CLAIM = Claim(
    name="rates-of-chains",
    title="Slow rates, laws and walks that end keep their digits",
    statement=(
        "Chains of blocks have the eigenvalues of the matrix of their blocks, so 1 − μ is known however small it is, "
        "and 1 + μ of chains of two halves. Rates, gaps, laws, distances in total variation, mixing times and walks "
        "that end are those of dense matrices, by each way in which chains of few and of many states find them, and "
        "errors that are told are bounds of the true ones."
    ),
    source="Kemeny and Snell 1976, section 6.3 (lumpability); Levin and Peres 2017, chapter 12; "
    "Grassmann, Taksar and Heyman 1985, doi 10.1287/opre.33.5.1107",
    run=run,
)
