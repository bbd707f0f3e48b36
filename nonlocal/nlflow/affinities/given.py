"""Graphs as users have them, as one sparse matrix of k."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, check_untracked, is_tensor, to_numpy, underflowing
from nlflow.affinities.base import Affinity
from nlflow.affinities.graph import Sparse, check_labels, check_undamaged
from nlflow.affinities.sparse import SparseAffinity
from nlflow.domains import Domain, Points
from nlflow.errors import (
    InputError,
    as_numpy,
    check_floats,
    check_integer,
    check_memory,
    check_tensor,
    check_text,
    checked_call,
    kind_of,
    listed,
    warn_caller,
)

_EDGE_BYTES = 60  # at the moment when edges, their sums and the transpose are there
_ROUNDING = 8 * float(np.finfo(np.float64).eps)  # by which sums of repeated edges may differ between the directions
_SPAN = 1e290  # of the weights: beyond, light edges have lost digits beside heavy ones


@checked_call
@underflowing
def affinity_from_graph(
    graph: Any,
    domain: Domain | None = None,
    *,
    edge_weight: Any = None,
    attribute: str | None = "weight",
    nodes: int | None = None,
    memory_limit: float | None = None,
) -> Affinity:
    """Return the affinity of a given graph: k_ij is the weight of the edge from i to j; O(E) memory.

    Parameters
    ----------
    graph : scipy.sparse matrix or array, networkx graph, edge list or matrix
        Matrices have shape (N, N). Nodes of networkx are in the order of ``graph.nodes``, its undirected edges in both
        directions. An edge list has integers of shape (2, E), the ends i and j, with undirected edges in both
        directions; for E = 2 give `nodes`.
    domain : Grid or Points, optional
        Of N nodes, numbered in C order; by default N points with a quadrature weight of 1 each.
    edge_weight : array of shape (E,), optional
        Weights of an edge list; 1 by default.
    attribute : str or None
        Name of the weight of a networkx edge; with None each edge counts 1, and so it does where no edge has 'weight'.
    nodes : int, optional
        N of an edge list without a domain; by default one more than the largest number in it.
    memory_limit : float, optional
        Bytes; by default ``NLFLOW_MEMORY_LIMIT``, or half of the physical memory.

    Returns
    -------
    SparseAffinity

    Raises
    ------
    InputError
        For negative and non-finite weights, ends that are no nodes, sizes that do not agree, an attribute that only
        some edges have, and other kinds of graphs.
    MemoryLimitError
        If the edges would pass the limit.

    Warns
    -----
    NlflowWarning
        When nodes have no edges.

    Notes
    -----
    Repeated edges add up; self-loops count in the degree, not in J. A node that no edge leaves keeps its value, and its
    w_i d_i is the mean over nodes that edges leave. Averages at i are over the nodes j that edges lead to from i
    (messages of torch_geometric run the other way).

    Examples
    --------
    >>> import numpy as np
    >>> from scipy.sparse import coo_array
    >>> from nlflow import affinity_from_graph
    >>> path = affinity_from_graph(np.array([[0, 1, 1, 2], [1, 0, 2, 1]]))
    >>> path.reason
    'the graph was given: 3 nodes, 4 edges i -> j, 1 connected component'
    >>> path.average(np.array([0.0, 3.0, 2.0])).tolist()
    [3.0, 1.0, 3.0]
    >>> affinity_from_graph(coo_array(np.diag([2.0, 1.0], k=1))).symmetric
    False
    """
    if domain is not None and getattr(domain, "leading", True):  # of a batch, or of no domain
        raise InputError(f"domain: got {kind_of(domain)}, expected a Grid or Points")
    k = _weights_of(graph, edge_weight, attribute, _node_count(nodes, domain), memory_limit)
    size = k.shape[0]
    if nodes is not None and nodes != size:
        raise InputError(f"nodes: got {nodes}, but the graph has {size}; they are asked for with an edge list alone")
    if domain is None:
        domain = Points(np.arange(float(size)), np.ones(size))
    if size != domain.size:
        raise InputError(f"graph: got {size} nodes, expected {domain.size}, those of the domain")
    k, symmetric = _symmetry(k)
    edges = k.nnz
    result = SparseAffinity.from_weights(domain, k, symmetric=symmetric)
    result.reason = f"the graph was given: {size} nodes, {edges} edges i -> j, {_pieces(result)}"
    _warn_isolated(result)
    return result


def _node_count(nodes: int | None, domain: Domain | None) -> int | None:
    if nodes is None:
        return None if domain is None else domain.size
    count = check_integer("nodes", nodes, minimum=1)
    if domain is not None and count != domain.size:
        raise InputError(f"nodes: got {count}, expected {domain.size}, those of the domain; leave it out")
    return count


def _weights_of(graph: Any, edge_weight: Any, attribute: str | None, nodes: int | None, limit: float | None) -> Sparse:
    """Return k of any kind of graph as rows of sorted edges without repetitions and zeros, float64; a copy."""
    from scipy.sparse import issparse

    sparse: bool = issparse(graph)
    network = from_package(graph, "networkx")
    if attribute is not None:
        check_text("attribute", attribute)
    if attribute != "weight" and not network:
        raise InputError(f"attribute: got {attribute!r} for a {type(graph).__name__}, expected it for networkx alone")
    if not (sparse or network):
        return _of_arrays(graph, edge_weight, nodes, limit)
    if edge_weight is not None:
        raise InputError("edge_weight: got weights beside a graph that has its own, expected them with an edge list")
    return matrix_of("graph", graph, limit) if sparse else _of_networkx(graph, attribute, limit)


def _of_arrays(graph: Any, edge_weight: Any, nodes: int | None, limit: float | None) -> Sparse:
    check_labels("graph", graph)
    array = _plain("graph", graph)
    whole = array.dtype.kind in "iu"
    listed = whole and array.ndim == 2 and array.shape[0] == 2
    if listed and array.shape[1] == 2 and edge_weight is None and nodes is None:
        raise InputError(
            "graph: got integers of shape (2, 2), which may be two edges or a matrix; give nodes= for edges, or floats "
            "for a matrix"
        )
    if listed:
        return _of_list(array, edge_weight, nodes, limit)
    if edge_weight is not None:
        raise InputError(
            f"graph: got shape {array.shape} of {array.dtype} with edge_weight, expected integers of shape (2, E): the "
            "ends of each edge"
        )
    if array.ndim != 2 or array.shape[0] != array.shape[1]:
        raise InputError(
            f"graph: got shape {array.shape} of {array.dtype}, expected a matrix (N, N), integers (2, E), a SciPy "
            "sparse array or a networkx graph"
        )
    return matrix_of("graph", array, limit)


def matrix_of(name: str, value: Any, limit: float | None) -> Sparse:
    from scipy.sparse import issparse

    sparse: bool = issparse(value)
    if not sparse:
        if from_package(value, "networkx"):
            raise InputError(f"{name}: got a networkx graph, expected a matrix; from_graph() takes graphs")
        check_labels(name, value)
        value = check_floats(name, value, ndim=2)
    if value.ndim != 2 or value.shape[0] != value.shape[1] or value.shape[0] == 0:
        raise InputError(f"{name}: got shape {value.shape}, expected (N, N), from row to column")
    if not sparse:
        rows, columns = np.nonzero(value)
        return _assembled(name, rows, columns, value[rows, columns], len(value), limit)
    if value.dtype.kind not in "biuf":
        raise InputError(f"{name}: got {value.dtype}, expected real numbers")
    check_undamaged(name, value)
    try:
        listed = value.tocoo()
    except ValueError as error:
        raise InputError(f"{name}: got a {value.format} array that is damaged ({error})") from error
    return _assembled(name, listed.row, listed.col, listed.data, value.shape[0], limit)


def from_package(value: Any, package: str) -> bool:
    return any(kind.__module__.split(".")[0] == package for kind in type(value).__mro__)


def _plain(name: str, value: Any) -> NDArray[Any]:
    """Return an array, a tensor or a sequence as a NumPy array of any dtype."""
    if is_tensor(value):
        if not hasattr(value, "layout") or "sparse" in str(value.layout):
            raise InputError(
                f"{name}: got a torch tensor of layout {getattr(value, 'layout', None)}, expected a dense one or an "
                "edge list; give coalesce().indices() with edge_weight=coalesce().values()"
            )
        check_tensor(name, value)
        check_untracked(name, bool(value.requires_grad), "nlflow.from_matrix")
        return to_numpy(value)
    array = as_numpy(name, value)
    if array.dtype.kind not in "biuf":
        raise InputError(
            f"{name}: got {type(value).__name__} ({array.dtype}), expected a SciPy sparse array, a networkx graph, "
            "integers of shape (2, E) or a matrix of shape (N, N)"
        )
    return array


def _of_networkx(graph: Any, attribute: str | None, limit: float | None) -> Sparse:
    """Return k of a networkx graph, read through its own methods."""
    numbers = {node: number for number, node in enumerate(graph)}
    if not numbers:
        raise InputError("graph: got a networkx graph without nodes, expected at least one")
    count = graph.number_of_edges()
    _check_edges(2 * count, len(numbers), limit)
    ends = np.empty((2, count), np.int64)
    values: list[Any] = []
    for place, (start, end, value) in enumerate(_bare(graph) if attribute is None else graph.edges(data=attribute)):
        ends[:, place] = numbers[start], numbers[end]
        values.append(value)
    weights = _attributes(values, attribute)
    if not graph.is_directed():
        others = ends[0] != ends[1]  # a loop has one direction
        ends, weights = np.hstack([ends, ends[::-1, others]]), np.concatenate([weights, weights[others]])
    return _assembled("graph", ends[0], ends[1], weights, len(numbers), limit)


def _bare(graph: Any) -> Any:
    return ((start, end, 1.0) for start, end in graph.edges())


def _attributes(values: list[Any], attribute: str | None) -> Floats:
    """Return the weights of networkx edges, None where one has none."""
    lacking = sum(value is None for value in values)
    if lacking and lacking == len(values) and attribute == "weight":
        return np.ones(len(values))
    if lacking:
        raise InputError(
            f"attribute: {lacking} of {len(values)} edges have no {attribute!r}; give it to each of them, or use "
            "attribute=None, by which each edge counts 1"
        )
    try:
        return np.array([float(value) for value in values], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InputError(f"attribute: got a value of {attribute!r} that is no number ({error})") from error


def _of_list(ends: NDArray[Any], edge_weight: Any, nodes: int | None, limit: float | None) -> Sparse:
    count = ends.shape[1]
    if count == 0 and nodes is None:
        raise InputError("graph: got no edges, expected at least one, or nodes= to say how many nodes there are")
    low, high = (int(ends.min()), int(ends.max())) if count else (0, -1)
    size = high + 1 if nodes is None else nodes
    if low < 0 or high >= size:
        raise InputError(f"graph: got edges between nodes {low} to {high}, expected 0 to {size - 1}")
    if edge_weight is None:
        weights = np.ones(count)
    else:
        given = _plain("edge_weight", edge_weight)
        if given.shape not in ((count,), (count, 1)):
            raise InputError(f"edge_weight: got shape {given.shape}, expected ({count},), one for each edge")
        weights = given.reshape(-1).astype(np.float64)
    return _assembled("graph", ends[0], ends[1], weights, size, limit)


def _check_edges(edges: int, nodes: int, limit: float | None) -> None:
    check_memory(
        f"a graph of {edges} edges between {nodes} nodes", _EDGE_BYTES * edges + 80 * nodes,
        "leave out light edges, or raise memory_limit", limit,
    )  # fmt: skip


def _assembled(
    name: str, rows: NDArray[Any], columns: NDArray[Any], weights: NDArray[Any], size: int, limit: float | None
) -> Sparse:
    from scipy.sparse import coo_array, csr_array

    _check_edges(len(rows), size, limit)
    number: Any = np.int32 if size < 2**31 and len(rows) < 2**31 else np.int64
    ends = rows.astype(number, copy=False), columns.astype(number, copy=False)
    # Checked before repeated entries are added up, in which a negative one could hide and small integers overflow.
    _check_weights(name, weights, rows, columns)
    return _summed(name, csr_array(coo_array((weights.astype(np.float64), ends), shape=(size, size))))


def _check_weights(name: str, weights: NDArray[Any], rows: NDArray[Any], columns: NDArray[Any]) -> None:
    """Raise `InputError` for weights that no average can have, naming the first."""
    finite = np.isfinite(weights)
    for wrong, what, remedy in (
        (~finite, "NaN or infinite", "leave these edges out, or give them a weight"),
        (weights < 0, "negative", "take abs() or exp() of all weights, or leave these edges out"),
    ):
        if wrong.any():
            place = int(np.argmax(wrong))
            raise InputError(
                f"{name}: got {int(wrong.sum())} {what} weights (the first, {float(weights[place]):g}, from node "
                f"{int(rows[place])} to {int(columns[place])}), expected finite weights >= 0; {remedy}"
            )


def _summed(name: str, k: Sparse) -> Sparse:
    """Return k with repeated edges added up, zeros left out and rows sorted; in place."""
    k.sum_duplicates()
    k.eliminate_zeros()
    if not k.nnz:
        return k
    lightest, heaviest = float(k.data.min()), float(k.data.max())
    if not heaviest < np.inf or lightest < heaviest / _SPAN:
        raise InputError(
            f"{name}: got weights from {lightest:g} to {heaviest:g}, repeated edges added up, expected a ratio below "
            f"{_SPAN:g}, beyond which sums lose light edges; leave these out, or scale the weights"
        )
    return k


def _symmetry(k: Sparse) -> tuple[Sparse, bool]:
    """Return k and whether it is symmetric; what differs by the order of a sum is made equal."""
    back = k.T.tocsr()
    if not (np.array_equal(back.indptr, k.indptr) and np.array_equal(back.indices, k.indices)):
        return k, False
    middle = k.data / 2 + back.data / 2
    if np.any(np.abs(k.data - back.data) > _ROUNDING * middle):
        return k, False
    k.data = middle
    return k, True


def _pieces(affinity: SparseAffinity) -> str:
    """Return in words how many connected components there are, and how large."""
    count = affinity.component_count
    if count == 1:
        return "1 connected component"
    sizes = np.sort(np.bincount(affinity.components.ravel()))[::-1]
    return f"{count} connected components (sizes {listed(sizes)})"


def _warn_isolated(affinity: SparseAffinity) -> None:
    alone = int(np.count_nonzero(np.bincount(affinity.components.ravel()) == 1)) if affinity.domain.size > 1 else 0
    if alone:
        warn_caller(
            f"graph: {alone} of {affinity.domain.size} nodes have no edge to another node; they keep their value. "
            "Connect them, or leave them out, if that is not meant",
        )
