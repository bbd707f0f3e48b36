"""Total variation with a weak fidelity."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.functionals.misfits import Misfit
from nlflow.functionals.variational.jp import Graph, Jp

_HALVINGS = 64


def constants(jp: Jp, f: NDArray[np.floating], rigid: Floats, misfit: Misfit) -> tuple[Floats, float] | None:
    """Return the minimizer of J_1(u) + sum_i r_i g(u_i, f_i) and its value if it is found to be constant on parts.

    That is so if a flow along edges, |q_ij| <= W_ij without isotropy, has the divergence -r_i g'(u_i, f_i). Only flows
    along a spanning tree are tried.
    """
    from scipy.sparse.csgraph import connected_components

    graph, target, known = jp.graph, f.astype(np.float64), np.flatnonzero(rigid > 0)
    count, part = connected_components(graph._sparse, directed=False)
    u, pulls = _middles(target, rigid, misfit, known, part, count)
    much = not jp.isotropic and np.any(np.linalg.norm(pulls, axis=1) > graph.degree)
    if much or not _carried(graph, pulls, part, jp):
        return None
    return u, float(np.sum(rigid[known, None] * misfit.value(u[known], target[known])))


def _middles(
    f: Floats, rigid: Floats, misfit: Misfit, known: NDArray[np.intp], part: NDArray[np.int32], count: int
) -> tuple[Floats, Floats]:
    """Return the best constants, (N, D), 0 where nothing is observed, and r_i g' there, which sum to 0 on each part."""
    low = np.full((count, f.shape[1]), np.inf)
    high = -low
    np.minimum.at(low, part[known], f[known])
    np.maximum.at(high, part[known], f[known])
    unseen = ~np.isfinite(low)
    low[unseen] = high[unseen] = 0.0
    varies, weights = low < high, rigid[:, None]

    def pulls(c: Floats) -> tuple[Floats, Floats]:
        slopes = np.zeros_like(f)
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            slopes[known] = misfit.slopes(c[part[known]], f[known])[0]
        slopes = np.where(varies[part], weights * slopes, 0.0)
        return slopes, np.stack([np.bincount(part, column, minlength=count) for column in slopes.T], axis=1)

    for _ in range(_HALVINGS):
        middle = low + (high - low) / 2
        above = pulls(middle)[1] > 0
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    (left, deficit), (right, excess) = pulls(low), pulls(high)
    # A slope that jumps between the two has any value there: the one with which the sum is 0.
    share = np.where(excess > deficit, -deficit / np.where(excess > deficit, excess - deficit, 1.0), 0.0)[part]
    inside = np.zeros(f.shape, dtype=bool)
    inside[known] = (low[part[known]] <= f[known]) & (f[known] <= high[part[known]])
    for column, here in enumerate(inside.T):  # a median is one of the values, to the bit
        low[part[here], column] = f[here, column]
    return low[part], left + share * (right - left)


def _carried(graph: Graph, pulls: Floats, part: NDArray[np.int32], jp: Jp) -> bool:
    """Whether a spanning tree of heavy edges carries what each of its branches pulls."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order, minimum_spanning_tree

    nodes = len(pulls)
    weights = graph._sparse
    falling = csr_array((-weights.data, weights.indices, weights.indptr), shape=weights.shape)
    tree = minimum_spanning_tree(falling).tocoo()
    # A root beside the graph joins its parts, so that one walk visits all.
    _, firsts = np.unique(part, return_index=True)
    rows, columns = np.append(tree.row, firsts), np.append(tree.col, np.full(len(firsts), nodes))
    joined: Any = csr_array((np.ones(len(rows)), (rows, columns)), shape=(nodes + 1, nodes + 1))
    order, before = breadth_first_order(joined, nodes, directed=False)
    flows = np.vstack([pulls, np.zeros(pulls.shape[1])])
    for node in order[:0:-1]:
        flows[before[node]] += flows[node]
    inner = np.flatnonzero(before[:nodes] < nodes)
    outer = before[inner]
    weight, load = np.asarray(weights[inner, outer]).ravel(), np.linalg.norm(flows[inner], axis=1)
    if not jp.isotropic:
        return bool(np.all(load <= weight))
    square = load * (load / weight)
    sums = np.bincount(inner, square, minlength=nodes) + np.bincount(outer, square, minlength=nodes)
    return bool(np.all(sums <= jp.measure))
