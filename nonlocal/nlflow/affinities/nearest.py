"""Graphs of nearest neighbours between points."""

from __future__ import annotations

import math
import warnings
from functools import cached_property
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
    shortened,
)
from nlflow.kernels import RadialKernel

KEPT = ("either", "both", "directed")
SEARCHES = ("tree", "descent")
_PAIR_BYTES = 80  # at the moment when neighbours, distances, edges and their transpose are there
_TREE_COLUMNS = 64  # of sparse points up to which they are made dense
_FEW = 64  # queries
_FAR = 1e150  # in the unit of the points: squares of distances still hold
_PAIRS = 2**16  # of sparse points at a time
_BLOCK = 2**22  # products of sparse points at a time
_MORE = 8  # candidates, whose order products may not know to the last digit


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
    points : array of shape (N, d) or (N,), or sparse array of shape (N, d)
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
        dozens; sparse points of more than 64 columns by blocks of products, in O(N^2) times the entries of a row, exact
        but for squared distances that differ by the rounding of squared lengths. ``descent``: most of the nearest, by
        nearest-neighbour descent (Dong, Moses and Li 2011, doi 10.1145/1963405.1963487; ``pip install
        'nlflow[neighbours]'``), for many dimensions or millions of points; the same points give the same graph.
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
    check_choice("keep", keep, KEPT)
    if kernel is not None and not isinstance(kernel, RadialKernel):
        raise InputError(f"kernel: got {type(kernel).__name__}, expected a radial one, such as Gaussian(width=1.0)")
    if local and kernel is None:
        raise InputError("local: got True without a kernel, expected one, such as Gaussian(width=0.5**0.5)")
    return nearest_neighbours(points, neighbours, search, memory_limit).graph(kernel, keep, local=local)


def nearest_neighbours(
    points: Any, neighbours: int, search: str = "tree", memory_limit: float | None = None
) -> Neighbours:
    """Return what knows the nearest of checked points; as `neighbour_graph` takes and refuses them."""
    x = _checked(points, memory_limit)
    size = x.shape[0]
    count = check_integer("neighbours", neighbours, minimum=1)
    if count >= size:
        raise InputError(f"neighbours: got {count}, expected at most {size - 1}, the number of other points")
    check_choice("search", search, SEARCHES)
    check_memory(
        f"the {count} nearest of each of {size} points", _PAIR_BYTES * count * size,
        "use fewer neighbours or points, or raise memory_limit", memory_limit,
    )  # fmt: skip
    return Neighbours(x, count, search)


def _checked(points: Any, limit: float | None) -> Any:
    """Return points (N, d) as a NumPy array, or by sparse rows where these are so many columns that no tree helps."""
    from scipy.sparse import csr_array, issparse

    sparse: bool = issparse(points)  # no narrowing to a class without a shape
    if sparse:
        if points.ndim != 2 or 0 in points.shape:
            raise InputError(f"points: got a sparse array of shape {points.shape}, expected (points, coordinates)")
        check_array("points", points.data if points.nnz else [0.0])  # its entries, as those of any other
        if points.shape[1] > _TREE_COLUMNS:
            return csr_array(points, dtype=np.float64)
        check_memory(f"points {points.shape} out of a sparse array", 8 * math.prod(points.shape), "use fewer", limit)
        points = points.toarray()
    x = check_array("points", points, ndim=(1, 2))
    if not is_numpy(x):
        raise InputError(f"points: got {type(x).__name__}, expected a NumPy array; convert it (.cpu().numpy())")
    return np.ascontiguousarray(x.reshape(len(x), -1), dtype=np.float64)


class Neighbours:
    """The nearest of N points, among themselves and of others; what is found once is kept.

    Parameters
    ----------
    points : array of shape (N, d) or scipy.sparse.csr_array
        float64.
    count : int
        Neighbours of each point.
    search : {'tree', 'descent'}
        See `neighbour_graph`.
    """

    def __init__(self, points: Any, count: int, search: str = "tree") -> None:
        self._count, self._search, self._is_sparse = count, search, hasattr(points, "toarray")
        self._middle = (0.0, 0.0)
        if not self._is_sparse:
            self._middle = (points.min(axis=0) / 2, points.max(axis=0) / 2)  # their sum could overflow
            points = points - self._middle[0] - self._middle[1]
        largest = float(np.abs(points.data if self._is_sparse else points).max(initial=0.0))
        self._unit = power_of_two(largest)  # squares of distances could overflow, too, and be 0
        self._points = points / self._unit

    def graph(self, kernel: RadialKernel | None = None, keep: str = "either", *, local: bool = False) -> Sparse:
        """Return the graph of the points; as `neighbour_graph`."""
        return _graph(self._points, self._unit, self._ends, kernel, keep, self._scales if local else None)

    def rows(self, queries: Any, kernel: RadialKernel) -> tuple[Sparse, Floats]:
        """Return the weights of the edges from other points to their nearest, (M, N), with local widths.

        Each row is divided by its largest weight, whose logarithm comes with it, (M,). As `graph` has them between the
        points, where a point is none of its own neighbours. O(M log N) time for few dimensions.
        """
        from scipy.sparse import csr_array

        distances, ends = self._of_others(queries)
        own = _positive(distances[:, -1])
        logs = kernel.log_profile(distances**2 / (own[:, None] * self._scales[ends]))
        # Rows are divided by their sum: what is far from all points still has nearest ones.
        highest = logs.max(axis=1)
        weights = np.exp(logs - highest[:, None])
        starts = np.arange(0, ends.size + 1, self._count)
        shape = (len(ends), self._points.shape[0])
        return csr_array((weights.reshape(-1), ends.reshape(-1), starts), shape=shape), highest

    @cached_property
    def _tree(self) -> Any:
        from scipy.spatial import cKDTree

        return cKDTree(self._points)

    def _of_others(self, queries: Any) -> tuple[Floats, NDArray[Any]]:
        """Return the distances to the nearest points, in the unit of these, and their numbers, both (M, count)."""
        from scipy.sparse import csr_array

        if self._is_sparse:
            return _by_products(self._points, csr_array(queries, dtype=np.float64) / self._unit, self._count)
        x = queries.toarray() if hasattr(queries, "toarray") else queries
        x = (np.asarray(x, np.float64) - self._middle[0] - self._middle[1]) / self._unit
        workers = cores() if len(x) > _FEW else 1  # threads take longer to start than few queries
        found = self._tree.query(np.clip(x, -_FAR, _FAR), self._count, workers=workers)
        distances, ends = (np.asarray(part).reshape(len(x), self._count) for part in found)
        return distances, ends

    @cached_property
    def _ends(self) -> NDArray[Any]:
        """Numbers of the nearest other points, shape (N, count)."""
        x, more = self._points, self._count + 1
        if self._is_sparse and self._search == "tree":
            found = _by_products(x, x, more)[1]
        elif self._search == "tree":
            found = self._tree.query(x, more, workers=cores())[1]
        else:
            found = _descent()(x, n_neighbors=more, random_state=0).neighbor_graph[0]
        found = np.asarray(found).reshape(x.shape[0], more)
        # A point is its own nearest, though not the first, or none of these, where others lie at its place.
        own = found == np.arange(len(found))[:, None]
        own[~own.any(axis=1), -1] = True
        return np.asarray(found[~own].reshape(len(found), self._count))

    @cached_property
    def _scales(self) -> Floats:
        """Distance of each point to the farthest of its neighbours."""
        squared, own = np.zeros(len(self._ends)), np.arange(len(self._ends))
        for column in self._ends.T:
            np.maximum(squared, _squares(self._points, own, self._points, column), out=squared)
        return _positive(np.sqrt(squared))


def _positive(scales: Floats) -> Floats:
    """Return scales with the least positive one where all neighbours lie at the place of a point."""
    there = scales > 0
    return np.where(there, scales, scales[there].min() if there.any() else 1.0)


def _squares(x: Any, rows: NDArray[Any], y: Any, columns: NDArray[Any]) -> Floats:
    squared = np.zeros(len(rows))
    if hasattr(x, "toarray"):
        for start in range(0, len(rows), _PAIRS):
            part = slice(start, start + _PAIRS)
            apart = x[rows[part]] - y[columns[part]]
            squared[part] = apart.multiply(apart).sum(axis=1)
        return squared
    for here, there in zip(x.T, y.T, strict=True):  # no table of differences: d times as many numbers as pairs
        squared += (here[rows] - there[columns]) ** 2
    return squared


def _by_products(x: Any, queries: Any, count: int) -> tuple[Floats, NDArray[Any]]:
    """Return the distances to the nearest of sparse points, nearest first, and their numbers, both (M, count).

    Candidates, some more than are wanted, come from products of blocks, distances from differences.
    """
    size = x.shape[0]
    ends = np.empty((queries.shape[0], count), np.intp)
    distances, more = np.empty(ends.shape), min(size, count + _MORE)
    lengths, turned, step = x.multiply(x).sum(axis=1), x.T.tocsr(), max(1, _BLOCK // size)
    for start in range(0, len(ends), step):
        block = queries[start : start + step]
        apart = lengths - 2 * (block @ turned).toarray()
        few = np.argpartition(apart, more - 1, axis=1)[:, :more]
        rows = np.repeat(np.arange(len(few)), more)
        squared = _squares(block, rows, x, few.ravel()).reshape(few.shape)
        order = np.argsort(squared, axis=1, kind="stable")[:, :count]
        ends[start : start + step] = np.take_along_axis(few, order, axis=1)
        distances[start : start + step] = np.sqrt(np.take_along_axis(squared, order, axis=1))
    return distances, ends


def _descent() -> Any:
    try:
        from pynndescent import NNDescent
    except ImportError as error:
        raise InputError(
            f"search: 'descent' needs pynndescent, which is not installed: {install_command('neighbours')}"
        ) from error
    return NNDescent


def _graph(
    x: Any, unit: float, ends: NDArray[Any], kernel: RadialKernel | None, keep: str, scales: Floats | None
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


def _weigh(graph: Sparse, x: Any, unit: float, kernel: RadialKernel, scales: Floats | None) -> None:
    """Give the edges the weights k(unit x_i, unit x_j), in place; distances over local scales where there are any."""
    rows = np.repeat(np.arange(x.shape[0]), np.diff(graph.indptr))
    squared = _squares(x, rows, x, graph.indices)
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
    if not np.isfinite(graph.data).all():
        raise InputError(
            f"kernel: {shortened(repr(kernel))} overflows between neighbours, expected finite weights; use a kernel "
            "that does not grow so fast, or a smaller amplitude"
        )
    lost = int(np.count_nonzero(graph.data == 0))
    if lost:
        warnings.warn(
            f"kernel: it is 0 for {lost} of {graph.nnz} edges between neighbours, which are left out; use a wider one",
            NlflowWarning,
            stacklevel=7,
        )
        graph.eliminate_zeros()
