"""Graphs of nearest neighbours between points."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, is_numpy, power_of_two, underflowing
from nlflow.affinities.graph import Sparse
from nlflow.backends.threads import cores
from nlflow.errors import (
    InputError,
    NlflowWarning,
    check_array,
    check_choice,
    check_integer,
    check_memory,
    checked_call,
    install_command,
)
from nlflow.kernels import RadialKernel

KEPT = ("either", "both", "directed")
SEARCHES = ("tree", "descent")
_PAIR_BYTES = 80  # at the moment when neighbours, distances, edges and their transpose are there


@checked_call
@underflowing
def neighbour_graph(
    points: Any,
    neighbours: int,
    kernel: RadialKernel | None = None,
    *,
    keep: str = "either",
    search: str = "tree",
    local: bool = False,
    memory_limit: float | None = None,
) -> Sparse:
    """Return the graph of the nearest neighbours of points, for `affinity_from_graph`.

    Parameters
    ----------
    points : array of shape (N, d) or (N,)
        Node positions, or features.
    neighbours : int
        How many nearest other points each point has, 1 to N - 1.
    kernel : Gaussian, Laplace or another radial kernel, optional
        Weights k(x_i, x_j) of the edges; each counts 1 by default.
    keep : {'either', 'both', 'directed'}
        Which edges: those that one of both ends has among its nearest (symmetric, each point keeps all of them), those
        that both have (symmetric, points may be left without), or i -> j for the nearest j of i (not symmetric).
    search : {'tree', 'descent'}
        ``tree``: exact, by `scipy.spatial.cKDTree`, in O(N log N) time for few dimensions and up to O(N^2 d) for some
        dozens. ``descent``: most of the nearest, by nearest-neighbour descent (Dong, Moses and Li 2011, doi
        10.1145/1963405.1963487; ``pip install 'nlflow[neighbours]'``), for many dimensions or millions of points; the
        same points give the same graph.
    local : bool
        Compare |x_i - x_j| / sqrt(s_i s_j) by the kernel, s_i being the distance of point i to the farthest of its
        neighbours: widths that follow the density. With ``Gaussian(width=0.5**0.5)`` the weights are
        exp(-|x_i - x_j|^2 / (s_i s_j)) (Zelnik-Manor and Perona 2004, self-tuning spectral clustering).
    memory_limit : float, optional
        Bytes; half of the physical memory by default. 80 bytes an edge are needed.

    Returns
    -------
    scipy.sparse.csr_array of shape (N, N)
        Rows sorted, without diagonal, float64. Of points at one distance any may be taken.

    Raises
    ------
    InputError
        For a number of neighbours that there are not, another kernel than a radial one, local widths without a kernel,
        and where pynndescent is asked for and not installed.
    MemoryLimitError
        Before the neighbours are looked for.

    Warns
    -----
    NlflowWarning
        When the kernel is 0 between neighbours, whose edges are left out.

    Examples
    --------
    >>> from nlflow import neighbour_graph
    >>> neighbour_graph([0.0, 1.0, 3.0], 1).toarray().tolist()
    [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """
    x = check_array("points", points, ndim=(1, 2))
    if not is_numpy(x):
        raise InputError(f"points: got {type(x).__name__}, expected a NumPy array; convert it (.cpu().numpy())")
    x = np.ascontiguousarray(x.reshape(len(x), -1), dtype=np.float64)
    count = check_integer("neighbours", neighbours, minimum=1)
    if count >= len(x):
        raise InputError(f"neighbours: got {count}, expected at most {len(x) - 1}, the number of other points")
    check_choice("keep", keep, KEPT)
    check_choice("search", search, SEARCHES)
    if kernel is not None and not isinstance(kernel, RadialKernel):
        raise InputError(f"kernel: got {type(kernel).__name__}, expected a radial one, such as Gaussian(width=1.0)")
    if local and kernel is None:
        raise InputError("local: got True without a kernel, expected one, such as Gaussian(width=0.5**0.5)")
    check_memory(
        f"the {count} nearest of each of {len(x)} points", _PAIR_BYTES * count * len(x),
        "use fewer neighbours or points, or raise memory_limit", memory_limit,
    )  # fmt: skip
    x = x - x.min(axis=0) / 2 - x.max(axis=0) / 2  # their sum could overflow
    unit = power_of_two(float(np.abs(x).max()))  # squares of distances could, too, and be 0
    x = x / unit
    ends = _nearest(x, count, search)
    return _graph(x, unit, ends, kernel, keep, _scales(x, ends) if local else None)


def neighbour_rows(
    points: Floats, queries: Floats, neighbours: int, kernel: RadialKernel | None = None, *, local: bool = False
) -> tuple[Sparse, Floats]:
    """Return the weights of the edges from other points to their nearest among the points of a graph, (M, N).

    Each row is divided by its largest weight, whose logarithm comes with it, (M,). As `neighbour_graph` has them
    between the points, where a point is none of its own neighbours; its arguments. O(M log N) time for few dimensions.
    """
    from scipy.sparse import csr_array
    from scipy.spatial import cKDTree

    tree = cKDTree(points)
    distances, ends = tree.query(queries, neighbours, workers=cores())
    distances, ends = (np.asarray(a).reshape(len(queries), neighbours) for a in (distances, ends))
    weights, highest = np.ones(distances.shape), np.zeros(len(queries))
    if kernel is not None:
        squared = distances**2
        if local:
            own = _positive(distances[:, -1])
            theirs = _positive(np.asarray(tree.query(points, [neighbours + 1], workers=cores())[0]).ravel())
            squared /= own[:, None] * theirs[ends]
        logs = kernel.log_profile(squared)
        # Rows are divided by their sum: what is far from all points still has nearest ones.
        highest = logs.max(axis=1)
        weights = np.exp(logs - highest[:, None])
    starts = np.arange(0, ends.size + 1, neighbours)
    return csr_array((weights.reshape(-1), ends.reshape(-1), starts), shape=(len(queries), len(points))), highest


def _scales(x: Floats, ends: NDArray[Any]) -> Floats:
    """Return the distance of each point to the farthest of its neighbours."""
    squared = np.zeros(len(x))
    for column in ends.T:
        np.maximum(squared, ((x - x[column]) ** 2).sum(axis=1), out=squared)
    return _positive(np.sqrt(squared))


def _positive(scales: Floats) -> Floats:
    """Return scales with the least positive one where all neighbours lie at the place of a point."""
    there = scales > 0
    return np.where(there, scales, scales[there].min() if there.any() else 1.0)


def _nearest(x: Floats, count: int, search: str) -> NDArray[Any]:
    """Return the numbers of the nearest other points, shape (N, count)."""
    if search == "tree":
        from scipy.spatial import cKDTree

        found = cKDTree(x).query(x, count + 1, workers=cores())[1]
    else:
        found = _descent()(x, n_neighbors=count + 1, random_state=0).neighbor_graph[0]
    found = np.asarray(found).reshape(len(x), count + 1)
    # A point is its own nearest, though not the first, or none of these, where others lie at its place.
    own = found == np.arange(len(x))[:, None]
    own[~own.any(axis=1), -1] = True
    return np.asarray(found[~own].reshape(len(x), count))


def _descent() -> Any:
    try:
        from pynndescent import NNDescent
    except ImportError as error:
        raise InputError(
            f"search: 'descent' needs pynndescent, which is not installed: {install_command('neighbours')}"
        ) from error
    return NNDescent


def _graph(
    x: Floats, unit: float, ends: NDArray[Any], kernel: RadialKernel | None, keep: str, scales: Floats | None
) -> Sparse:
    """Return the graph of the points `unit` x from the numbers of the nearest of each."""
    from scipy.sparse import csr_array

    n, count = ends.shape
    columns = ends.astype(np.int32 if n * count < 2**31 else np.int64, copy=False)
    starts = np.arange(0, n * count + 1, count, dtype=columns.dtype)
    graph = csr_array((np.ones(n * count), columns.reshape(-1), starts), shape=(n, n))
    # Chosen before they are weighed: a light edge is one all the same.
    if keep == "either":
        graph = csr_array(graph.maximum(graph.T))
    elif keep == "both":
        graph = csr_array(graph.minimum(graph.T))
    graph.sort_indices()
    if kernel is not None:
        _weigh(graph, x, unit, kernel, scales)
    return graph


def _weigh(graph: Sparse, x: Floats, unit: float, kernel: RadialKernel, scales: Floats | None) -> None:
    """Give the edges the weights k(unit x_i, unit x_j), in place; distances over local scales where there are any."""
    rows = np.repeat(np.arange(len(x)), np.diff(graph.indptr))
    squared = np.zeros(graph.nnz)
    for coordinate in x.T:  # no table of differences, which d times as many numbers as edges would be
        squared += (coordinate[rows] - coordinate[graph.indices]) ** 2
    if scales is not None:
        squared, unit = squared / scales[rows] / scales[graph.indices], 1.0
    with np.errstate(under="ignore", over="ignore"):
        true = squared * unit * unit
        if not np.isfinite(true).all() or np.any((true == 0) & (squared > 0)):
            raise InputError(
                f"points: got coordinates of size {unit:g}, expected distances whose squares a float can hold; change "
                "the unit of points and kernel"
            )
        graph.data = np.asarray(np.exp(kernel.log_profile(true) + math.log(kernel.amplitude)))
    lost = int(np.count_nonzero(graph.data == 0))
    if lost:
        warnings.warn(
            f"kernel: it is 0 for {lost} of {graph.nnz} edges between neighbours, which are left out; use a wider one",
            NlflowWarning,
            stacklevel=6,
        )
        graph.eliminate_zeros()
