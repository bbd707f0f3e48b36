"""Graphs of nearest neighbours."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, underflowing
from nlflow.affinities.distances import BLOCK, TREE_COLUMNS, Found, Space, Table, check_metric, chosen_search
from nlflow.affinities.graph import Sparse, check_undamaged
from nlflow.errors import (
    InputError,
    check_array,
    check_choice,
    check_floats,
    check_integer,
    check_memory,
    check_numpy,
    checked_call,
    kind_of,
    shortened,
    warn_caller,
)
from nlflow.kernels import RadialKernel

KEPT = ("either", "both", "directed")
_BLOCK_BYTES = 24  # of each product of a block: itself, those that are nearest, and their order
_PAIR_BYTES = 80  # at the moment when neighbours, distances, edges and their transpose are there


@checked_call
@underflowing
def neighbour_graph(
    points: Any,
    neighbours: int,
    kernel: RadialKernel | None = None,
    *,
    keep: str = "either",
    metric: str = "euclidean",
    search: str = "auto",
    local: Any = False,
    memory_limit: float | None = None,
) -> Sparse:
    """Return the graph of the nearest neighbours of points, for `affinity_from_graph`.

    Parameters
    ----------
    points : array of shape (N, d) or (N,), or sparse array of shape (N, d)
        Node positions, or features; distances (N, N) with ``metric='precomputed'``, sparse where only those to near
        points are known.
    neighbours : int
        How many nearest other points each point has, 1 to N - 1.
    kernel : Gaussian, Laplace or another radial kernel, optional
        Weights k(x_i, x_j) of the edges, of the distance of `metric`; each counts 1 by default.
    keep : {'either', 'both', 'directed'}
        Which edges: those that one of both ends has among its nearest, those that both have, or i -> j for the
        nearest j of i (not symmetric).
    metric : {'euclidean', 'cosine', 'correlation', 'jaccard', 'precomputed'}
        Distance: |x - y|; 1 less the cosine of the angle between x and y; 1 less their correlation; 1 less the share of
        common ones among the columns that are not 0 in x or y.
    search : {'auto', 'tree', 'brute', 'descent'}
        ``tree``: `scipy.spatial.cKDTree`. ``brute``: all pairs, O(N^2 d), up to the rounding of squared distances.
        ``descent``: most of the nearest, by nearest-neighbour descent (Dong, Moses and Li 2011, doi
        10.1145/1963405.1963487; ``pip install 'nlflow[neighbours]'``). ``auto``: a tree where points lie along few
        directions, else all pairs, and descent for many points where it is installed.
    local : bool or array of shape (N,)
        Compare |x_i - x_j| / sqrt(s_i s_j) by the kernel, for widths s_i that are given, or, with True, the distance of
        point i to the farthest of its neighbours (Zelnik-Manor and Perona 2004, self-tuning spectral clustering).
    memory_limit : float, optional
        Bytes; by default ``NLFLOW_MEMORY_LIMIT``, or half of the physical memory.

    Returns
    -------
    scipy.sparse.csr_array of shape (N, N)
        Rows sorted, without diagonal, float64. Among points at the same distance any may be taken.

    Raises
    ------
    InputError
        For unusable points, distances, widths or numbers of neighbours, local widths without a kernel, and ``descent``
        without pynndescent.
    MemoryLimitError
        If the neighbours would pass the limit.

    Warns
    -----
    NlflowWarning
        When the kernel is 0 between neighbours; such edges are left out.

    Examples
    --------
    >>> from nlflow import neighbour_graph
    >>> neighbour_graph([0.0, 1.0, 3.0], 1).toarray().tolist()
    [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """
    check_choice("keep", keep, KEPT)
    if kernel is not None and not isinstance(kernel, RadialKernel):
        raise InputError(f"kernel: got {kind_of(kernel)}, expected a radial one, such as Gaussian(width=1.0)")
    given = bool(local) if isinstance(local, bool | np.bool_) else _widths(local)
    if given is not False and kernel is None:
        raise InputError("local: got widths without a kernel, expected one, such as Gaussian(width=0.5**0.5)")
    found = nearest_neighbours(points, neighbours, search, memory_limit, metric=metric)
    if isinstance(given, np.ndarray) and len(given) != found.size:
        raise InputError(f"local: got {len(given)} widths, expected {found.size}, one for each point")
    return found.graph(kernel, keep, local=given)


def _widths(given: Any) -> Floats:
    widths = check_floats("local", given, ndim=1)
    if not widths.min(initial=math.inf) > 0:
        raise InputError(f"local: got a width of {widths.min():g}, expected numbers > 0, one for each point")
    return widths


def nearest_neighbours(
    points: Any, neighbours: int, search: str = "auto", memory_limit: float | None = None, *, metric: str = "euclidean"
) -> Neighbours:
    count = check_integer("neighbours", neighbours, minimum=1)
    shape = getattr(points, "shape", (0, 0))
    check_metric(metric, search, sparse=hasattr(points, "toarray"), columns=int(shape[-1]) if shape else 0)
    x = _checked(points, memory_limit, metric)
    size = x.shape[0]
    if count >= size:
        raise InputError(f"neighbours: got {count}, expected at most {size - 1}, the number of other points")
    block = _BLOCK_BYTES * max(BLOCK, size)  # of products, where all pairs are looked at
    copies = 0 if hasattr(x, "toarray") or metric == "precomputed" else 2 * x.nbytes  # in a unit of their own, centred
    check_memory(
        f"the {count} nearest of each of {size} points", _PAIR_BYTES * count * size + block + copies,
        "use fewer neighbours or points, or raise memory_limit", memory_limit,
    )  # fmt: skip
    return Neighbours(Table(x) if metric == "precomputed" else Space(x, metric), count, search)


def _checked(points: Any, limit: float | None, metric: str) -> Any:
    """Return points (N, d) as a NumPy array, or by sparse rows where these are so many columns that no tree helps."""
    from scipy.sparse import csr_array, issparse

    sparse: bool = issparse(points)  # no narrowing to a class without a shape
    if sparse:
        if points.ndim != 2 or 0 in points.shape:
            raise InputError(f"points: got a sparse array of shape {points.shape}, expected (points, coordinates)")
        check_undamaged("points", points)
        check_array("points", points.data if points.nnz else [0.0])  # its entries, as those of any other
        if points.shape[1] > TREE_COLUMNS or metric == "precomputed":
            return csr_array(points, dtype=np.float64)
        check_memory(f"points {points.shape} out of a sparse array", 8 * math.prod(points.shape), "use fewer", limit)
        points = points.toarray()
    x = check_numpy("points", points, ndim=(1, 2))
    return np.ascontiguousarray(x.reshape(len(x), -1), dtype=np.float64)


class LocalWidths(Protocol):
    """Widths of N points, (N,), and those of other points."""

    points: Floats

    def at(self, distances: Floats, ends: NDArray[Any]) -> Floats:
        """Of others."""


class Neighbours:
    """The nearest neighbours, among N points, of these and of other points."""

    def __init__(self, space: Space | Table, count: int, search: str = "auto") -> None:
        self._space, self._count = space, count
        self._search, self.reason = chosen_search(space, search)

    @property
    def size(self) -> int:
        return self._space.size

    def graph(
        self, kernel: RadialKernel | None = None, keep: str = "either", *, local: bool | Floats = False,
        faintest: float = 0.0,
    ) -> Sparse:  # fmt: skip
        distances, ends = self.found
        weights = np.ones(distances.shape)
        if kernel is not None:
            if local is False:
                squared, unit = distances**2, self._space.unit
            else:
                widths = self._scales if local is True else local / self.unit
                squared, unit = distances**2 / widths[:, None] / widths[ends], 1.0
            weights = _weights(kernel, squared, unit)
            weights[weights < faintest] = 0
        graph = _joined(weights, ends, keep)
        lost = int(np.count_nonzero(weights == 0))
        if lost and not faintest:  # edges were chosen before they were weighed
            whole = _joined(np.ones(weights.shape), ends, keep).nnz
            warn_caller(
                f"kernel: it is 0 for {whole - graph.nnz} of {whole} edges between neighbours, which are left out; use "
                "a wider one",
            )
        return graph

    def rows(
        self, queries: Any, kernel: RadialKernel, widths: LocalWidths | None = None
    ) -> tuple[Sparse, Floats, Floats]:
        # Each row is divided by its largest weight, whose logarithm comes with it. Local widths are by default
        # distances to the farthest of the neighbours.
        from scipy.sparse import csr_array

        if widths is None:
            distances, ends = self._space.nearest_of(queries, self._count, self._search)
            own, there = positive(distances[:, -1]), self._scales
        else:
            # One more: a point is its own nearest.
            distances, ends = self._space.nearest_of(queries, min(self._count + 1, self.size), self._search)
            own, there = widths.at(distances, ends) / self.unit, widths.points / self.unit
        logs = kernel.log_profile(distances**2 / (own[:, None] * there[ends]))
        # Rows are divided by their sum: what is far from all points still has nearest ones.
        highest = logs.max(axis=1)
        weights = np.exp(logs - highest[:, None])
        starts = np.arange(0, ends.size + 1, ends.shape[1])
        shape = (len(ends), self._space.size)
        return csr_array((weights.reshape(-1), ends.reshape(-1), starts), shape=shape), highest, own * self.unit

    @property
    def unit(self) -> float:
        return self._space.unit

    @cached_property
    def found(self) -> Found:
        return self._space.nearest(self._count, self._search)

    @cached_property
    def _scales(self) -> Floats:
        """Distance of each point to the farthest of its neighbours."""
        return positive(self.found[0].max(axis=1))


def positive(scales: Floats) -> Floats:
    there = scales > 0
    return np.where(there, scales, scales[there].min() if there.any() else 1.0)


def _weights(kernel: RadialKernel, squared: Floats, unit: float) -> Floats:
    """Return k at squared distances in this unit."""
    with np.errstate(under="ignore", over="ignore"):
        true = squared * unit * unit
        if not np.isfinite(true).all() or np.any((true == 0) & (squared > 0)):
            raise InputError(
                f"points: got coordinates of size {unit:g}, expected distances whose squares a float can hold; change "
                "the unit of points and kernel"
            )
        weights = np.asarray(np.exp(kernel.log_profile(true) + math.log(kernel.amplitude)))
    if not np.isfinite(weights).all():
        raise InputError(
            f"kernel: {shortened(repr(kernel))} overflows between neighbours, expected finite weights; use a kernel "
            "that does not grow so fast, or a smaller amplitude"
        )
    return weights


def _joined(weights: Floats, ends: NDArray[Any], keep: str) -> Sparse:
    """Return the graph of edges to the nearest; either direction of an edge has the same weight up to rounding."""
    from scipy.sparse import csr_array

    n, count = ends.shape
    columns = ends.astype(np.int32 if n * count < 2**31 else np.int64, copy=False)
    starts = np.arange(0, n * count + 1, count, dtype=columns.dtype)
    graph = csr_array((weights.reshape(-1), columns.reshape(-1), starts), shape=(n, n))
    if keep == "either":
        graph = csr_array(graph.maximum(graph.T))
    elif keep == "both":
        graph = csr_array(graph.minimum(graph.T))
    graph.eliminate_zeros()
    graph.sort_indices()
    return graph
