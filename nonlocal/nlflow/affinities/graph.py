"""Graphs as sparse matrices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nlflow.errors import InputError, NumericalError

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Sparse: TypeAlias = "csr_array[Any, tuple[int, int]]"
"""A sparse matrix by rows; SciPy's module is loaded when the first is made."""


def check_undamaged(name: str, matrix: Any) -> None:
    try:
        if hasattr(matrix, "check_format"):
            matrix.check_format(full_check=True)
    except ValueError as error:
        raise InputError(f"{name}: got a {matrix.format} array that is damaged ({error})") from error


def check_labels(name: str, matrix: Any) -> None:
    if not hasattr(matrix, "columns"):
        return
    rows, columns = (list(map(repr, names)) for names in (matrix.index, matrix.columns))
    if rows == columns or not set(rows) & set(columns):
        return
    alone = sorted(set(rows) ^ set(columns))
    if alone:
        raise InputError(
            f"{name}: got a data frame in which {len(alone)} names are of rows or of columns alone (the first is "
            f"{alone[0]}), expected the same ones; take frame.reindex(index=names, columns=names, fill_value=0)"
        )
    raise InputError(
        f"{name}: got a data frame whose rows and columns have the same names in another order, expected one; "
        "take frame.loc[names, names]"
    )


def functional_graph(graph: Sparse, weights: NDArray[Any], log_scale: float) -> Sparse:
    """Return W_ij = w_i w_j K_ij for i != j, symmetric, from K over exp(log_scale), which it overwrites."""
    # Raises `NumericalError` when the weights overflow.
    from scipy import sparse

    graph.sum_duplicates()
    rows = np.repeat(np.arange(len(weights)), np.diff(graph.indptr))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        graph.data *= weights[rows] * weights.dtype.type(math.exp(min(log_scale, 709.0)))
        graph.data *= weights[graph.indices]
    graph.data[rows == graph.indices] = 0
    if not np.isfinite(graph.data).all():
        raise NumericalError(
            "edges: weights w_i w_j K_ij overflow; scale the kernel's amplitude or logits, or the domain's units"
        )
    # The images of a node at a boundary are summed in another order from either end.
    result = sparse.csr_array((graph + graph.T) * weights.dtype.type(0.5))
    result.eliminate_zeros()
    return result
