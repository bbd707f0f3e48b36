"""Random chains against 60 digits: ``python -m validation.robustness.chains``.

The truth is the chain that the package was given: P_ij = w_j k_ij / sum_l w_l k_il of the floats k and w, exactly, in
mpmath with 60 digits, by elimination written here. I - P is taken from the moves to other states alone, so that no
1 - P_ii is rounded.

Errors are relative to each number; of eigenvalues to 1, the spectral radius, and of modes in the norm of pi. A quantity
is refused where the package raises one of its own errors. Where a quantity is not defined (several classes have no one
law), refusing is right.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from mpmath import mp
from numpy.typing import NDArray
from scipy.sparse import csr_array

from nlflow import MarkovChain, NlflowError, NlflowWarning, Points, affinity_from_graph, from_matrix
from nlflow.store.atomic import make_folder
from validation.tables import markdown

DIGITS, EXACT = 60, 1e-10
_TRIES = 8  # of other matrices with the same eigenvalues
KINDS = ("symmetric", "reversible", "any", "transient", "classes")
QUANTITIES = (
    "stationary law", "hitting times", "passage times, all pairs", "passage time, sets", "committor",
    "committor, backward", "gap", "relaxation time", "eigenvalues", "Kemeny constant", "mixing bounds", "modes",
)  # fmt: skip
Numbers = list[Any]


@dataclass(frozen=True)
class Draw:
    """A chain: weights k of shape (N, N), quadrature weights, laziness, and whether it is given as a sparse graph."""

    k: NDArray[np.float64]
    weights: NDArray[np.float64]
    laziness: float
    sparse: bool

    def chain(self) -> MarkovChain:
        """Return it as the package takes it."""
        points = Points(np.arange(float(len(self.k))), self.weights)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NlflowWarning)  # of nodes without edges, which are meant
            given = affinity_from_graph(csr_array(self.k), points) if self.sparse else from_matrix(self.k, points)
        return MarkovChain(given, laziness=self.laziness)


def draw(rng: np.random.Generator, states: int = 8) -> Draw:
    """Return a random chain: metastable blocks with couplings from 1e-1 to 1e-15, of one of `KINDS`."""
    n, kind = int(rng.integers(2, states + 1)), KINDS[rng.integers(len(KINDS))]
    block = rng.integers(0, rng.integers(1, 4), n)
    k = rng.random((n, n)) ** rng.integers(1, 5)
    k *= rng.random((n, n)) < rng.choice([1.0, 0.6])
    for a in range(n):
        apart = block != block[a]
        k[a, apart] *= 10.0 ** -rng.uniform(1, 15)
    if kind in ("symmetric", "reversible"):
        k = k + k.T
    if kind == "reversible":
        k *= 10.0 ** rng.uniform(-3, 3, n)[:, None]
    if kind == "transient":
        k[n // 2 :, : n // 2] = 0
    if kind == "classes":
        k[block[:, None] != block] = 0
    k[np.arange(n), np.arange(n)] *= 10.0 ** rng.uniform(-9, 1)
    k[k.sum(axis=1) == 0, np.flatnonzero(k.sum(axis=1) == 0)] = 1.0
    weights = np.ones(n) if rng.random() < 0.5 else rng.uniform(0.5, 2.0, n)
    return Draw(k, weights, float(rng.choice([0.0, 0.0, 0.5, 0.9])), bool(rng.random() < 0.5))


class Exact:
    """The same chain with 60 digits."""

    def __init__(self, given: Draw) -> None:
        n = self.n = len(given.k)
        rates = [[mp.mpf(float(k)) * mp.mpf(float(w)) for k, w in zip(row, given.weights, strict=True)]
                 for row in given.k]  # fmt: skip
        lazy = mp.mpf(given.laziness)
        self.p = [[(1 - lazy) * rate / mp.fsum(row) for rate in row] for row in rates]
        for i, row in enumerate(self.p):
            row[i] += lazy
        self.out = [[-self.p[i][j] if i != j else mp.fsum(q for m, q in enumerate(self.p[i]) if m != i)
                     for j in range(n)] for i in range(n)]  # fmt: skip
        seen = (given.k > 0) | np.eye(n, dtype=bool)
        for _ in range(n):
            seen = seen @ seen
        self.seen = seen
        self.closed = [i for i in range(n) if all(seen[j, i] for j in range(n) if seen[i, j])]
        self.unique = all(seen[i, self.closed[0]] for i in range(n))
        self.whole = all(seen[j, i] for i in range(n) for j in range(n) if seen[i, j])  # no state is transient
        self.pi = self.law()
        self.reversible = self.whole and all(
            abs(self.pi[i] * self.p[i][j] - self.pi[j] * self.p[j][i]) <= mp.mpf(10) ** -13 * self.pi[i] * self.p[i][j]
            for i in range(n) for j in range(n)
        )  # fmt: skip

    def solved(self, free: list[int], b: Numbers, reverse: bool = False) -> Numbers:
        """Return x with x = b + P x between free states, of P or its reversal, for all states; 0 at the others."""

        def entry(i: int, j: int) -> Any:
            return self.out[j][i] * self.pi[j] / self.pi[i] if reverse else self.out[i][j]

        found = [mp.mpf(0)] * self.n
        if free:
            system = mp.matrix([[entry(i, j) for j in free] for i in free])
            for i, value in zip(free, mp.lu_solve(system, mp.matrix([b[i] for i in free])), strict=True):
                found[i] = value
        return found

    def law(self) -> Numbers:
        """Return the mean of the laws of all classes: visits to each state between two to one of its class."""
        law = [mp.mpf(0)] * self.n
        for first in self.closed:
            if law[first] > 0:
                continue
            rest = [i for i in self.closed if self.seen[first, i] and i != first]
            visits = [mp.mpf(1)]
            if rest:
                system = mp.matrix([[self.out[j][i] for j in rest] for i in rest])
                visits += list(mp.lu_solve(system, mp.matrix([self.p[first][i] for i in rest])))
            for i, value in zip([first, *rest], visits, strict=True):
                law[i] = value / mp.fsum(visits)
        return [value / mp.fsum(law) for value in law]

    def hitting(self, targets: set[int]) -> Numbers:
        """Return mean times to some states, infinite where walks may end without meeting them."""
        meets = [any(self.seen[i, t] for t in targets) for i in range(self.n)]
        # Walks that go to where none meets them, by states that are no targets.
        lost = {i for i in range(self.n) if not meets[i]}
        for _ in range(self.n):
            lost |= {i for i in range(self.n) if i not in targets and any(self.p[i][j] > 0 for j in lost)}
        free = [i for i in range(self.n) if i not in targets and i not in lost]
        times = self.solved(free, [mp.mpf(1)] * self.n)
        return [mp.inf if i in lost else time for i, time in enumerate(times)]

    def committor(self, source: set[int], target: set[int], backward: bool) -> Numbers | None:
        """Return the committor, None where walks meet neither, or where a reversed chain has transient states."""
        if backward and not self.whole:
            return None
        ends = source if backward else target
        if not all(any(self.seen[i, t] for t in source | target) for i in range(self.n)):
            return None
        free = [i for i in range(self.n) if i not in source | target]
        moves = [mp.fsum(self.pi[j] * self.p[j][i] / self.pi[i] if backward else self.p[i][j] for j in ends)
                 for i in range(self.n)]  # fmt: skip
        found = self.solved(free, moves, reverse=backward)
        return [mp.mpf(1) if i in ends else found[i] for i in range(self.n)]

    @cached_property
    def eigenvalues(self) -> Numbers:
        """All of them."""
        matrix, rng = mp.matrix(self.p), np.random.default_rng(0)
        for _ in range(_TRIES):
            with contextlib.suppress(RuntimeError):  # iterations may turn in a circle, as of permutations
                return list(mp.eig(matrix, left=False, right=False))
            turned = mp.eye(self.n) + mp.matrix(np.tril(rng.integers(-2, 3, (self.n, self.n)), -1).tolist())
            matrix = turned * matrix * mp.inverse(turned)
        raise RuntimeError("mpmath found no eigenvalues")

    @cached_property
    def gap(self) -> Any:
        """1 - |mu_2|; None for several classes."""
        others = sorted(self.eigenvalues, key=lambda value: abs(value - 1))[1:]
        return None if not self.unique else 1 - max(map(abs, others), default=mp.mpf(0))


def error_of(found: Any, exact: Numbers) -> float:
    """Return the largest error of numbers, relative to each."""
    worst = mp.mpf(0)
    for a, b in zip(np.ravel(found), exact, strict=True):
        if mp.isinf(b):
            worst = worst if np.isinf(a) else mp.inf
        elif not np.isfinite(a):
            return float("inf")
        elif a != b:
            worst = mp.inf if b == 0 else max(worst, abs((mp.mpf(float(a)) - b) / b))
    return float(worst)


def paired(found: Any, exact: Numbers) -> float:
    """Return the largest distance of eigenvalues from the exact ones, each paired with the nearest that is left."""
    left, worst = list(exact), 0.0
    for value in np.asarray(found):
        distances = [float(abs(mp.mpc(complex(value)) - other)) for other in left]
        worst = max(worst, min(distances))
        left.pop(int(np.argmin(distances)))
    return worst


def comparisons(given: Draw, rng: np.random.Generator) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield each quantity and the function that finds its error, infinite where there is none and it is not refused."""
    chain, exact, n = given.chain(), Exact(given), len(given.k)
    nodes = rng.permutation(n)
    cut = int(rng.integers(1, n))
    periodic = exact.gap is not None and abs(exact.gap) < mp.mpf(10) ** -40
    source, target = nodes[: rng.integers(1, cut + 1)], nodes[cut:]

    def against(found: Any, truth: Numbers | None) -> float:
        return float("inf") if truth is None else error_of(found, truth)

    def bounds() -> float:
        low, high = chain.mixing_bounds()
        gap = exact.gap
        if not (exact.reversible and exact.unique) or periodic:
            return float("inf")
        lower = max((1 / gap - 1) * mp.log(2), mp.mpf(0))
        # The lower bound is rounded relative to 1 / gap, and the upper one leaves room for what is allowed of the gap.
        return max(
            float(abs(mp.mpf(low) - lower) * gap) / 3,
            error_of(high, [mp.log(4 / min(exact.pi)) / gap]) / 3,
        )

    def modes() -> float:
        found = chain.modes(n)
        worst = paired(found.values, exact.eigenvalues)
        # The slowest beside constants, where the next one is apart: the others have to be orthogonal to it in pi.
        root = [mp.sqrt(value) for value in exact.pi]
        alike = mp.matrix([[root[i] * exact.p[i][j] / root[j] for j in range(n)] for i in range(n)])
        rates, vectors = mp.eigsy((alike + alike.T) / 2)
        if exact.unique and n > 2 and (1 - rates[n - 2]) < mp.mpf("0.9") * (1 - rates[n - 3]):
            inner = mp.fsum(root[i] * mp.mpf(float(found.vectors[i, 1])) * vectors[i, n - 2] for i in range(n))
            worst = max(worst, float(mp.sqrt(abs(1 - abs(inner)))) ** 2)
        return worst

    yield "stationary law", lambda: against(chain.stationary, exact.pi if exact.unique else None)
    times = [exact.hitting({j}) for j in range(n)]
    yield "hitting times", lambda: max(error_of(chain.hitting_times(j), times[j]) for j in range(n))
    yield "passage times, all pairs", lambda: max(map(error_of, chain.mean_first_passage_times().T, times))

    def sets() -> float:
        times = exact.hitting(set(target.tolist()))
        found = chain.mean_first_passage_time(source, target)
        if len(source) == 1:
            return error_of(found, [times[source[0]]])
        mass = mp.fsum(exact.pi[i] for i in source) if exact.unique else 0
        if mass == 0:
            return float("inf")
        return error_of(found, [mp.fsum(exact.pi[i] * times[i] for i in source if exact.pi[i]) / mass])

    yield "passage time, sets", sets
    ends = set(source.tolist()), set(target.tolist())
    for name, backward in (("committor", False), ("committor, backward", True)):
        yield (
            name,
            lambda backward=backward: against(
                chain.committor(source, target, backward=backward), exact.committor(*ends, backward)
            ),
        )
    gap = exact.gap
    yield "gap", lambda: against(chain.spectral_gap, gap and [mp.mpf(0) if periodic else gap])
    yield "relaxation time", lambda: against(chain.relaxation_time, gap and [mp.inf if periodic else 1 / gap])
    yield "eigenvalues", lambda: paired(chain.eigenvalues(), exact.eigenvalues)
    if exact.unique and exact.whole:
        kemeny = mp.fsum(exact.pi[j] * times[j][0] for j in range(n))
        yield (
            "Kemeny constant",
            lambda: error_of(chain.mean_first_passage_times()[0] @ chain.stationary.ravel(), [kemeny]),
        )
    yield "mixing bounds", bounds
    yield "modes", modes


def compare(
    count: int, seed: int, states: int = 8
) -> tuple[dict[str, collections.Counter[str]], dict[str, float], list[str]]:
    """Return how often each quantity is right, refused and wrong, the largest error where right, and what is wrong."""
    counts = {name: collections.Counter[str]() for name in QUANTITIES}
    largest, wrong = dict.fromkeys(QUANTITIES, 0.0), []
    with mp.workdps(DIGITS):
        for number in range(count):
            given = draw(np.random.default_rng([seed, number]), states)
            for name, error in comparisons(given, np.random.default_rng([seed, number, 1])):
                try:
                    found = error()
                except NlflowError:
                    counts[name]["refused"] += 1
                    continue
                verdict = "right" if found <= EXACT else "wrong"
                counts[name][verdict] += 1
                if verdict == "right":
                    largest[name] = max(largest[name], found)
                else:
                    wrong.append(f"chain {number} of seed {seed}: {name} is off by {found:.2g}")
    return counts, largest, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m validation.robustness.chains", description=__doc__)
    parser.add_argument("--chains", type=int, default=2000, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path("robustness-output"), help="folder for the table (%(default)s)"
    )
    args = parser.parse_args(arguments)
    begun = time.monotonic()
    counts, largest, wrong = compare(args.chains, args.seed)
    heads = ("quantity", "right", "refused", "wrong", "largest error of right ones")
    lines = [
        (name, counts[name]["right"], counts[name]["refused"], counts[name]["wrong"], f"{largest[name]:.1e}")
        for name in QUANTITIES
    ]
    table = markdown(heads, lines, numbers=heads[1:])
    spent = time.monotonic() - begun
    said = (
        f"{args.chains} chains of 2 to 8 states, seed {args.seed}, against {DIGITS} digits: right to {EXACT:g} "
        f"relative, or refused by name. Written by `python -m validation.robustness.chains` in {spent:.0f} s."
    )
    (make_folder(args.out) / "chains.md").write_text(f"# Random chains\n\n{said}\n\n{table}\n", encoding="utf-8")
    print("\n".join([table, *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
