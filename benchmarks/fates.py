"""Absorption into ten targets (fates) of directed graphs beside SciPy's GMRES, one fate after another.

``python -m benchmarks fates`` runs all rows; start it with one thread. Cells lie along a branching tree in ten
dimensions, each moves to its 30 nearest neighbours, and `drift` says how much rather along the tree than against it;
the ends of its branches are the fates, of 30 cells each. SciPy solves (I - Q) x = r for each fate, which is what
CellRank does with the same function and a tolerance of 1e-6. Times are processor seconds, of SciPy those of one run, of
nlflow the least of three, between which the sizes take turns. Time grows by what is done and by what an edge costs:
vectors of the small graph fit into a cache, and those of the large one do not. So edges that are passed are counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks.harness import Row
from benchmarks.resident import peak
from nlflow import MarkovChain
from nlflow.backends.numba import chains, edges

NAME = "fates"
PARTS = ("time", "edges")
SIZES, DRIFTS = (18_000, 100_000), (4.0, 1.0, 0.0)
FATES, NEIGHBOURS, DIMENSION, CELLS = 10, 30, 10, 30
RTOL, RESTARTS, TURNS = 1e-8, 85, 3


def tree(count: int, drift: float) -> tuple[Any, list[Any]]:
    """Return the moves of cells along a tree with ten ends, and the cells at each end."""
    from scipy.sparse import csr_array
    from scipy.spatial import cKDTree

    rng = np.random.default_rng(0)

    def unit() -> Any:
        v = rng.normal(size=DIMENSION)
        return v / np.linalg.norm(v)

    first = 2 * unit()
    starts, stops, ends = [np.zeros(DIMENSION)], [first], [first]
    while len(ends) < FATES:
        at = ends.pop(0)
        for _ in range(2):
            starts.append(at)
            stops.append(at + 1.5 * unit())
            ends.append(stops[-1])
    low, high = np.array(starts), np.array(stops)
    lengths = np.linalg.norm(high - low, axis=1)
    on = rng.choice(len(low), size=count, p=lengths / lengths.sum())
    x = low[on] + rng.random((count, 1)) * (high - low)[on]
    x += 0.15 / math.sqrt(DIMENSION) * rng.normal(size=x.shape)
    distances, near = (part[:, 1:] for part in cKDTree(x).query(x, NEIGHBOURS + 1))
    steps = x[near] - x[:, None]
    along = np.einsum("nkd,nd->nk", steps, ((high - low) / lengths[:, None])[on]) / np.linalg.norm(steps, axis=2)
    weights = np.exp(drift * along - (distances / distances[:, -1:]) ** 2)
    weights /= weights.sum(axis=1, keepdims=True)
    rows = np.arange(0, near.size + 1, NEIGHBOURS)
    p = csr_array((weights.ravel(), near.ravel(), rows), shape=(count, count))
    return p, [np.argsort(np.linalg.norm(x - end, axis=1))[:CELLS] for end in ends]


def by_hand(p: Any, fates: list[Any], some: int) -> tuple[Any, float, int]:
    """Return what SciPy's GMRES finds for the first fates, its processor seconds for each, and restarts not reached."""
    from scipy.sparse import csr_array, eye_array
    from scipy.sparse.linalg import gmres

    free = np.ones(p.shape[0], np.bool_)
    free[np.concatenate(fates)] = False
    rows = p[free]
    start = time.process_time()
    a = csr_array(eye_array(int(free.sum())) - rows[:, free])
    found, failed = [], 0
    for nodes in fates[:some]:
        x, info = gmres(a, np.asarray(rows[:, nodes].sum(axis=1)).ravel(), rtol=RTOL, atol=0.0, maxiter=RESTARTS)
        found.append(x)
        failed += info != 0
    return np.stack(found, axis=1), (time.process_time() - start) / some, failed


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yield a list of which the only number is how many edges loops have passed, times the columns of each."""
    passed, real = [0], (chains.loop, edges.loop)

    def named(loop: Any) -> Any:
        def made(name: str, *dtype: str) -> Any:
            run = loop(name, *dtype)

            def counting(*given: Any) -> None:
                if name in ("sweep", "left_over"):
                    passed[0] += int((given[1] - given[0]).sum()) * given[4].shape[1]
                elif name in ("edge_flux", "edge_changes"):
                    passed[0] += len(given[1]) * given[3].shape[1]
                run(*given)

            return counting

        return made

    chains.loop, edges.loop = map(named, real)
    try:
        yield passed
    finally:
        chains.loop, edges.loop = real


def run(
    only: Sequence[str] = PARTS, drifts: tuple[float, ...] = DRIFTS, sizes: tuple[int, ...] = SIZES, some: int = 1
) -> list[Row]:
    """Return the rows of some parts: time beside SciPy's, of `some` of the fates, and edges; how both grow."""
    return [row for part in only for row in {"time": of_time, "edges": of_edges}[part](drifts, sizes, some)]


def grown(low: int, high: int, drift: float, what: str, of: dict[int, Any]) -> Row:
    """Return by which power of N something grows."""
    power = math.log(of[high] / of[low]) / math.log(high / low)
    work = f"{low} to {high} cells, drift {drift:g}: {what} as N to the power"
    return Row.of(NAME, work, "", f"{power:.2f}", power, most=1.2)


def of_edges(drifts: tuple[float, ...], sizes: tuple[int, ...], _some: int) -> list[Row]:
    """Return how the number of edges that are passed grows, on which no machine has a part."""
    rows = []
    for drift in drifts:
        done = {}
        for count in (sizes[0], sizes[-1]):
            p, fates = tree(count, drift)
            with counted() as passed:
                MarkovChain.from_transitions(p).absorption(fates)
            done[count] = passed[0]
        rows.append(grown(*done, drift, "edges that are passed grow", done))
    return rows


def of_time(drifts: tuple[float, ...], sizes: tuple[int, ...], some: int) -> list[Row]:
    """Return a row for each size and drift, with `some` of the fates by hand, and the growth of each drift."""
    rows = []
    for drift in drifts:
        made, spent = {count: tree(count, drift) for count in sizes}, dict.fromkeys(sizes, math.inf)
        MarkovChain.from_transitions(made[sizes[0]][0]).absorption(made[sizes[0]][1])  # compiles, or loads
        for count in sizes * TURNS:
            start = time.process_time()
            MarkovChain.from_transitions(made[count][0]).absorption(made[count][1])
            spent[count] = min(spent[count], time.process_time() - start)
        for count, (p, fates) in made.items():
            theirs, each, failed = by_hand(p, fates, some)
            found = MarkovChain.from_transitions(p).absorption(fates)
            free = np.setdiff1d(np.arange(count), np.concatenate(fates))
            apart = float(np.abs(found.probabilities[free][:, :some] - theirs).max())
            work = (
                f"{count} cells, drift {drift:g}, {FATES} fates and times: {found.method}, error at most "
                f"{found.error:.0e}, {apart:.0e} from theirs (tolerance {RTOL:g}"
                f"{f', not reached in {RESTARTS} restarts' if failed else ''}); peak {peak() / 2**30:.2f} GiB"
            )
            rows.append(Row.of(
                NAME, work, f"SciPy, {some} of {FATES} fates scaled up: {FATES * each:.1f} s", f"{spent[count]:.1f} s",
                FATES * each / spent[count], least=1, also=found.error <= RTOL,
            ))  # fmt: skip
        rows.append(grown(sizes[0], sizes[-1], drift, "time grows", spent))
    return rows
