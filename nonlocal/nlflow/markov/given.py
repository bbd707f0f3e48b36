"""Affinities of chains as users have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nlflow._array import Floats
from nlflow.affinities import Affinity, affinity_from_graph
from nlflow.affinities.given import from_package, matrix_of
from nlflow.affinities.graph import Sparse
from nlflow.errors import InputError, NumericalError
from nlflow.markov.law import balance
from nlflow.markov.moves import communicating_classes

_ROUNDS, _EXACT = 200, 1e-13  # of Newton's method, and the relative residual at which it ends
_ENOUGH = 1e-9  # relative residual with which an estimate is returned
_LONGEST = 2.0  # change of a logarithm in one step


def of_transitions(value: Any, key: str | None, rtol: float, detailed: float | None, limit: float | None) -> Affinity:
    """See `MarkovChain.from_transitions`."""
    p = _matrix("transitions", value, key, limit)
    sums = np.asarray(p.sum(axis=1), np.float64).ravel()
    off = np.abs(sums - 1)
    if not off.max() <= rtol:
        worst = int(np.argmax(off))
        raise InputError(
            f"transitions: {int(np.sum(~(off <= rtol)))} of {len(sums)} rows do not sum to 1 within {rtol:g}; the "
            f"farthest is row {worst}, which sums to {sums[worst]:.10g} (off by {off[worst]:.3g}); divide rows by "
            "their sums, raise rtol, or use from_counts() for counts and from_graph() for weights"
        )
    result: Affinity = affinity_from_graph(p, memory_limit=limit)
    said = (
        f"transition probabilities were given: {len(sums)} states, {p.nnz} moves, rows that sum to 1 to {off.max():.1g}"
    )
    if detailed is not None:
        found = balance(p)
        if not found.misfit <= detailed:
            raise InputError(
                f"balance: got {detailed:g}, but pi_i P_ij and pi_j P_ji differ by up to {found.misfit:.3g} relative; "
                "leave it out, which takes the chain as it is"
            )
        fluxes = found.fluxes(p, result.domain)
        if fluxes is None:
            raise NumericalError("transitions: the fluxes pi_i P_ij span more than floats hold; leave balance out")
        result, said = (
            fluxes,
            f"{said}, in detailed balance to {found.misfit:.1g}: the fluxes of both ways were averaged",
        )
    result.reason = said
    return result


def of_counts(value: Any, key: str | None, reversible: bool, limit: float | None) -> Affinity:
    """See `MarkovChain.from_counts`."""
    counts = _matrix("counts", value, key, limit)
    size = counts.shape[0]
    left = np.asarray(counts.sum(axis=1), np.float64).ravel()
    if not left.min() > 0:
        raise InputError(
            f"counts: no move leaves {int(np.sum(left == 0))} of {size} states (the first is {int(np.argmin(left))}), "
            "so nothing says where walkers go from there; leave these states out"
        )
    kind = "each row by itself"
    if reversible:
        classes, labels = communicating_classes(counts)
        if classes > 1:
            sizes = np.sort(np.bincount(labels))[::-1]
            raise InputError(
                f"counts: got {classes} classes of states that do not communicate (sizes "
                f"{', '.join(map(str, sizes[:5]))}{', ...' if classes > 5 else ''}), expected one, without which no "
                "reversible chain is the likeliest; keep the largest, or use reversible=False"
            )
        counts, kind = likeliest_fluxes(counts), "in detailed balance"
    result = affinity_from_graph(counts, memory_limit=limit)
    result.reason = f"counts were given: the likeliest chain, {kind}, of {size} states and {left.sum():g} moves"
    return result


def of_graph(value: Any, key: str | None, limit: float | None) -> Affinity:
    """See `MarkovChain.from_graph`."""
    if hasattr(value, "obsp"):
        key = "connectivities" if key is None else key
        if str(key).endswith("distances"):  # as scanpy calls them
            raise InputError(
                f"key: got {key!r}, expected the name of weights, which are large between near nodes; use "
                f"{str(key).removesuffix('distances')}connectivities"
            )
        return affinity_from_graph(_matrix("graph", value, key, limit), memory_limit=limit)
    network = from_package(value, "networkx")
    if key is not None and not network:
        raise _key_beside(key, value, "annotated data (obsp) or a networkx graph")
    if isinstance(value, Affinity):
        return value
    return affinity_from_graph(value, attribute="weight" if key is None else key, memory_limit=limit)


def _key_beside(key: Any, value: Any, expected: str) -> InputError:
    return InputError(f"key: got {key!r} beside a {type(value).__name__}, expected it with {expected}")


def _matrix(name: str, value: Any, key: str | None, limit: float | None) -> Sparse:
    """Return a square matrix of numbers >= 0, sorted by rows; a copy."""
    if hasattr(value, "obsp"):
        there = value.obsp if isinstance(value.obsp, Mapping) else {}
        if not isinstance(key, str) or key not in there:
            names = ", ".join(repr(str(one)) for one in there) or "none"
            raise InputError(f"key: got {key!r}, expected the name of a matrix in obsp ({names})")
        value = there[key]
    elif key is not None:
        raise _key_beside(key, value, "annotated data (obsp)")
    model = next((word for word in ("transition_matrix", "count_matrix") if hasattr(value, word)), None)
    if model is not None:
        raise InputError(f"{name}: got a {type(value).__name__}, expected a matrix; give its .{model}")
    result = matrix_of(name, value, limit)
    with np.errstate(over="ignore"):
        if not np.isfinite(result.sum()):
            raise InputError(f"{name}: got entries up to {result.max():g}, whose sum overflows; divide all by that one")
    return result


def likeliest_fluxes(counts: Sparse) -> Sparse:
    """Return the fluxes x_ij = x_ji of the reversible chain P_ij = x_ij / sum_j x_ij that makes counts c_ij likeliest.

    x_ij = (c_ij + c_ji) / (e^u_i + e^u_j), where u minimizes sum_{i<j} (c_ij + c_ji) log(e^u_i + e^u_j) - sum_i u_i
    sum_{j != i} c_ij, which is convex, by Newton's method (Prinz et al. 2011, doi 10.1063/1.3565032, eq. 29 ff.;
    Trendelkamp-Schroer et al. 2015, doi 10.1063/1.4934536). Counts must be those of one communicating class.
    """
    from scipy.sparse import csr_array, diags_array
    from scipy.sparse.linalg import spsolve

    size = counts.shape[0]
    stay = counts.diagonal()
    both = (counts + counts.T).tocoo()
    apart = both.row != both.col
    rows, columns, pairs = both.row[apart], both.col[apart], both.data[apart]
    moved = np.asarray(counts.sum(axis=1), np.float64).ravel() - stay

    def slope(u: Floats) -> tuple[Floats, Floats]:
        share = 1 / (1 + np.exp(u[columns] - u[rows]))
        return np.bincount(rows, pairs * share, size) - moved, share

    def value(u: Floats) -> float:
        return float((pairs * np.logaddexp(u[rows], u[columns])).sum() / 2 - moved @ u)

    u = np.log(moved / np.bincount(rows, pairs, size)) if size > 1 else np.zeros(1)
    left, share = slope(u)
    for _ in range(_ROUNDS if size > 1 else 0):
        if np.abs(left / moved).max() <= _EXACT:
            break
        weights = csr_array((pairs * share * (1 - share), (rows, columns)), shape=(size, size))
        laplacian = csr_array(diags_array(np.asarray(weights.sum(axis=1)).ravel()) - weights)
        step = np.append(spsolve(laplacian[:-1, :-1].tocsc(), -left[:-1]), 0.0)
        step *= min(1.0, _LONGEST / max(float(np.abs(step - step.mean()).max()), 1e-300))
        before, length = value(u), 1.0
        while length > 1e-9 and value(u + length * step) > before + 1e-4 * length * float(left @ step) + 1e-12 * abs(
            before
        ):
            length /= 2
        u = u + length * step
        u -= u.mean()
        worst = np.abs(left / moved).max()
        left, share = slope(u)
        if worst <= _ENOUGH and np.abs(left / moved).max() >= 0.5 * worst:  # rounding is all that is left
            break
    if not (size == 1 or np.abs(left / moved).max() <= _ENOUGH):
        raise NumericalError(
            f"counts: the likeliest reversible chain was reached to {np.abs(left / moved).max():.1g} alone; leave out "
            "states of few counts, or use reversible=False"
        )
    between = csr_array((pairs / (np.exp(u[rows]) + np.exp(u[columns])), (rows, columns)), shape=(size, size))
    result: Any = (between + between.T) / 2 + diags_array(stay / np.exp(u))
    return csr_array(result)
