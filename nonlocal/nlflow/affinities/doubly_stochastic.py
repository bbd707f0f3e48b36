"""Doubly stochastic affinities."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from nlflow._array import Array, check_untracked, constant_like, namespace, scalar, to_numpy, underflowing
from nlflow.affinities.dense import DenseAffinity
from nlflow.affinities.logits import properties
from nlflow.domains import Domain, Points
from nlflow.domains.base import check_domain
from nlflow.domains.mask import Mask, Sight, check_mask
from nlflow.errors import InputError, NumericalError, check_array, check_integer, check_memory, check_number, kind_of
from nlflow.kernels import ExpDotProduct, Kernel

_TOLERANCE = 1e-12
_MOST = 10_000
_INNER = 20  # scalings between two looks at the logarithms
_FAR = 100.0  # logarithms of sums of rows that products may have
_WIDE = 1e100  # how far scalings may move from 1 before they are put into the exponent


@underflowing
class SinkhornAffinity(DenseAffinity):
    """The affinity exp(f_i + g_j) k_ij whose rows and columns have the same sums; `sinkhorn` makes it.

    Attributes
    ----------
    potentials : tuple of arrays of shape (N,), float64
        f and g, one array where k is symmetric.
    residual : float
        Largest deviation of sums of columns, sum_i w_i P_ij / w_j, from 1.
    iterations : int
        Scalings of rows and columns.
    """

    tokens: Array
    method = "sinkhorn"
    reason = "rows and columns were scaled to the same sums"

    def __init__(
        self,
        domain: Domain,
        kernel: Kernel | None,
        logits: Array,
        like: Array,
        *,
        symmetric: bool,
        positive_semidefinite: bool,
        tolerance: float = _TOLERANCE,
        iterations: int = _MOST,
        memory_limit: float | None = None,
    ) -> None:
        xp = namespace(logits)
        weights = constant_like(domain.weights.reshape(-1), logits)
        f, g, self.iterations = _scaled(logits, xp.log(weights), symmetric, tolerance, iterations)
        self.potentials = f, g
        scaled = logits + f[:, None] + g[None, :]
        super().__init__(
            domain, kernel, partial(_rows, scaled), like, symmetric=symmetric,
            positive_semidefinite=positive_semidefinite, memory_limit=memory_limit,
            log_transposed=partial(_rows, xp.matrix_transpose(scaled)),
            kept_bytes=0 if symmetric else 8 * domain.size**2,
        )  # fmt: skip
        self._log_scale = 0.0  # the amplitude of k is taken back by f and g
        columns = xp.sum(xp.exp(scaled + xp.log(weights)[:, None]), axis=0)
        self.residual = scalar(xp.max(xp.abs(columns - 1)))

    @classmethod
    def of_tokens(
        cls,
        kernel: Any,
        domain: Domain,
        tokens: Array,
        mask: Mask | None = None,
        queries: Array | None = None,
        **options: Any,
    ) -> SinkhornAffinity:
        """Compare features (N, d) of the nodes with each other, or with queries; with these it does not evolve."""
        q, k = kernel.map_features(tokens, queries)
        tags = properties(kernel, q, k, mask)
        limit = options.get("memory_limit")
        _check_size(domain.size, limit)
        xp = namespace(k)
        wide = xp.astype(k, xp.float64)
        with np.errstate(over="ignore", invalid="ignore"):  # refused below
            logits = kernel.log_matrix(wide if q is k else xp.astype(q, xp.float64), wide) + math.log(kernel.amplitude)
        if mask is not None:
            sight = Sight(mask, (), domain.size, k)
            logits = sight.applied(logits, slice(None))
            tags["symmetric"] = tags["symmetric"] and sight.symmetric
            _check_support(to_numpy(logits) > -np.inf, domain)
        result = cls(domain, kernel, logits, tokens, **tags, **options)
        if queries is None:
            result._recipe = partial(_again, kernel, domain, mask, options)
        result.tokens = tokens
        return result


def sinkhorn(
    kernel: Kernel | Any,
    domain: Domain | None = None,
    features: Any = None,
    *,
    queries: Any = None,
    mask: Mask | None = None,
    tolerance: float = _TOLERANCE,
    iterations: int = _MOST,
    memory_limit: float | None = None,
) -> SinkhornAffinity:
    """Return the doubly stochastic affinity of a kernel: exp(f_i + g_j) k_ij with rows and columns that add up to 1.

    Rows and columns are scaled in turn (Sinkhorn and Knopp 1967, doi 10.2140/pjm.1967.21.343; in transformers: Sander,
    Ablin, Blondel, Peyre, arXiv 2110.11773); for a symmetric k f = g. O(N^2) time an iteration.

    Parameters
    ----------
    kernel : Kernel, or array_like of shape (N, N)
        Or the matrix of k_ij >= 0.
    domain : Points or Grid
        With equal weights where k has zeros. For a matrix N points of weight 1 by default.
    features : array_like of shape (N, d) or ``domain.shape + (d,)``, optional
        What the kernel compares; positions of the nodes by default.
    queries : array_like like `features`, optional
        What is compared with `features`; then k is not symmetric.
    mask : Mask, optional
    tolerance : float
        Of the sums of columns.
    iterations : int
        Most scalings of rows and columns.
    memory_limit : float, optional
        Bytes; by default ``NLFLOW_MEMORY_LIMIT``, or half of the physical memory. O(N^2) are needed.

    Returns
    -------
    SinkhornAffinity

    Raises
    ------
    InputError
        For negative entries, and for zeros that no doubly stochastic matrix has, such as a causal mask's.
    NumericalError
        When sums are not within the tolerance after so many iterations; large logits take many.
    MemoryLimitError
        When the matrix would pass the limit.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import ExpDotProduct, Points, sinkhorn
    >>> x = np.random.default_rng(0).standard_normal((6, 3))
    >>> p = sinkhorn(ExpDotProduct(), Points(np.arange(6.0), np.ones(6)), x)
    >>> p.symmetric, bool(np.abs(p.matrix.sum(axis=0) - 1).max() < 1e-12)
    (True, True)
    """
    options: dict[str, Any] = {
        "tolerance": check_number("tolerance", tolerance, minimum=0, strict=True),
        "iterations": check_integer("iterations", iterations, minimum=1),
        "memory_limit": memory_limit,
    }
    check_mask(mask)
    if domain is not None:
        check_domain(domain)
    if not isinstance(kernel, Kernel):
        given = {"features": features, "queries": queries, "mask": mask}
        if named := [name for name, value in given.items() if value is not None]:
            raise InputError(
                f"kernel: got {kind_of(kernel)} beside {named[0]}, expected a Kernel such as Gaussian(1.0); for a "
                f"matrix of k leave {named[0]} out"
            )
        return _of_matrix(check_array("kernel", kernel, ndim=2), domain, options)
    if domain is None or domain.leading:
        raise InputError(f"domain: got {kind_of(domain)}, expected a Grid or Points")
    compares = isinstance(kernel, ExpDotProduct)
    if features is None and compares:
        raise InputError(
            f"features: got none for {type(kernel).__name__}, which compares them, expected keys of shape "
            f"{(*domain.shape, 'd')}; domain.nodes compares positions"
        )
    x = _table("features", domain.nodes if features is None else features, domain)
    q = None if queries is None else _table("queries", queries, domain)
    result = SinkhornAffinity.of_tokens(kernel, domain, x, mask, q, **options)
    if features is None:
        result._recipe = None  # positions of nodes do not change with the signal
    return result


def _rows(values: Array, start: int, stop: int) -> Array:
    return values[start:stop, :]


def _again(kernel: Kernel, domain: Domain, mask: Mask | None, options: dict[str, Any], u: Array) -> SinkhornAffinity:
    tokens = namespace(u).reshape(u, (domain.size, -1))
    return SinkhornAffinity.of_tokens(kernel, domain, tokens, mask, **options)


def _table(name: str, value: Any, domain: Domain) -> Array:
    array = check_array(name, value)
    shape = tuple(array.shape)
    if domain.shape != shape[: len(domain.shape)] and shape[:1] != (domain.size,):
        raise InputError(f"{name}: got shape {shape}, expected {(*domain.shape, 'd')}")
    check_untracked(name, bool(getattr(array, "requires_grad", False)), "nlflow.attention.NeutrenoAttention")
    return namespace(array).reshape(array, (domain.size, -1))


def _check_size(count: int, limit: float | None) -> None:
    check_memory(
        f"a doubly stochastic affinity of {count} nodes", 4 * 8 * count * count,
        "use fewer nodes, or raise memory_limit", limit,
    )  # fmt: skip


def _of_matrix(k: Array, domain: Domain | None, options: dict[str, Any]) -> SinkhornAffinity:
    if k.shape[0] != k.shape[1]:
        raise InputError(f"kernel: got a matrix of shape {tuple(k.shape)}, expected (N, N)")
    count = int(k.shape[0])
    domain = Points(np.arange(float(count)), np.ones(count)) if domain is None else domain
    if domain.leading or domain.size != count:
        raise InputError(f"domain: got {domain.size} nodes, expected {count}, one for each row of the matrix")
    check_untracked("kernel", bool(getattr(k, "requires_grad", False)), "nlflow.attention.NeutrenoAttention")
    _check_size(count, options["memory_limit"])
    xp = namespace(k)
    if bool(xp.any(k < 0)):
        raise InputError(
            f"kernel: got entries down to {scalar(xp.min(k)):g}, expected k >= 0; take abs() or exp() of it"
        )
    _check_support(to_numpy(k) > 0, domain)
    with np.errstate(divide="ignore"):  # log 0 = -inf is meant
        logits = xp.log(xp.astype(k, xp.float64))
    return SinkhornAffinity(
        domain, None, logits, k, symmetric=bool(xp.all(k == xp.matrix_transpose(k))), positive_semidefinite=False,
        **options,
    )  # fmt: skip


def _check_support(there: Any, domain: Domain) -> None:
    """Raise `InputError` for zeros with which no scaling has rows and columns of the same sums."""
    # There is one where every entry is on a permutation of entries (total support): numbered along one permutation,
    # every entry joins two nodes of one strongly connected component. O(N^2).
    if there.all():
        return
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components, maximum_bipartite_matching

    for what, empty in (("row", ~there.any(axis=1)), ("column", ~there.any(axis=0))):
        if empty.any():
            raise InputError(
                f"kernel: {what} {int(np.argmax(empty))} is zero, expected an entry > 0 in each row and column; leave "
                "the node out, or give it an entry on the diagonal"
            )
    if not (domain.weights == domain.weights.flat[0]).all():
        raise InputError("domain: got nodes of different weights with zeros in k, expected equal weights, or k > 0")
    matched = maximum_bipartite_matching(csr_array(there), perm_type="column")
    if (matched < 0).any():
        raise InputError(
            f"kernel: got zeros that leave {int((matched < 0).sum())} of {len(there)} rows without a column of their "
            "own, expected a pattern that a doubly stochastic matrix can have; use softmax (nlflow.affinity)"
        )
    along = there[:, matched]
    labels = connected_components(csr_array(along), directed=True, connection="strong")[1]
    lost = along & (labels[:, None] != labels[None, :])
    if lost.any():
        i, j = (int(n) for n in np.unravel_index(np.argmax(lost), lost.shape))
        raise InputError(
            f"kernel: got zeros with which scaling drives {int(lost.sum())} other entries to 0 (the first at row {i}, "
            f"column {int(matched[j])}; of a causal mask all but the diagonal), expected a pattern that a doubly "
            "stochastic matrix can have; use softmax (nlflow.affinity)"
        )


def _scaled(logits: Array, logs: Array, symmetric: bool, tolerance: float, most: int) -> tuple[Array, Array, int]:
    """Return f, g and the number of iterations; `logs` are the logarithms of the weights."""
    xp = namespace(logits)
    f = -_log_sums(logits + logs[None, :])
    if not bool(xp.all(xp.isfinite(f))):
        raise InputError("kernel: got logits that overflow, or a row without any; scale the features or the kernel")
    f = f / 2 if symmetric else f
    g = f if symmetric else 0 * f
    done, off = 0, math.inf
    while done < most:
        ahead = _log_sums(logits + (g + logs)[None, :]) + f
        if scalar(xp.max(xp.abs(ahead))) > _FAR:  # products of such rows could underflow
            done, off = done + 1, math.inf
            if symmetric:
                f = g = f - ahead / 2
            else:
                g = -_log_sums(xp.matrix_transpose(logits) + (f + logs)[None, :])
                f = -_log_sums(logits + (g + logs)[None, :])
            continue
        # With the scalings so far in the exponent, products find the next ones; what underflows here is below 1e-300.
        kernel = xp.exp(logits + f[:, None] + g[None, :] + logs[None, :])
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # found out below
            move, count, off = (_symmetric if symmetric else _alternating)(
                kernel, logs, tolerance, min(_INNER, most - done)
            )
        done += count
        if not (math.isfinite(off) and bool(xp.all(xp.isfinite(move[0]))) and bool(xp.all(xp.isfinite(move[1])))):
            spread = scalar(xp.max(logits)) - scalar(xp.min(xp.where(xp.isfinite(logits), logits, 0 * logits)))
            raise NumericalError(
                f"sinkhorn: sums of columns underflow after {done} iterations, where scalings have no float any more "
                f"(logits spread over {spread:.4g}); use smaller logits (a smaller scale or a larger width)"
            )
        f, g = f + move[0], g + move[1]
        if symmetric:
            g = f
        if off <= tolerance:
            return f, g, done
    raise NumericalError(
        f"sinkhorn: sums of columns are off by {off:.3g} after {done} iterations, the tolerance is {tolerance:g}; use "
        "more iterations, a larger tolerance, or smaller logits (a smaller scale or a larger width)"
    )


def _log_sums(logits: Array) -> Array:
    xp = namespace(logits)
    highest = xp.max(logits, axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):  # -inf - -inf in a row without entries: NaN, which is refused
        return (highest + xp.log(xp.sum(xp.exp(logits - highest), axis=1, keepdims=True)))[:, 0]


def _symmetric(kernel: Array, logs: Array, tolerance: float, most: int) -> tuple[tuple[Array, Array], int, float]:
    """Return how f = g moves: the scaling is the geometric mean of itself and of the one that its rows ask for."""
    del logs  # in the kernel
    xp = namespace(kernel)
    u, off, count = xp.ones_like(kernel[:, 0]), math.inf, 0
    while count < most:
        count += 1
        sums = u * (kernel @ u)
        off = scalar(xp.max(xp.abs(sums - 1)))
        if off <= tolerance or not math.isfinite(off):
            break
        u = u / xp.sqrt(sums)
        if not 1 / _WIDE < scalar(xp.min(u)) <= scalar(xp.max(u)) < _WIDE:
            break
    return (xp.log(u), xp.log(u)), count, off


def _alternating(kernel: Array, logs: Array, tolerance: float, most: int) -> tuple[tuple[Array, Array], int, float]:
    """Return how f and g move: columns, then rows; the sums of columns are looked at when those of rows are 1."""
    xp = namespace(kernel)
    weights = xp.exp(logs)
    u, v, off, count = xp.ones_like(kernel[:, 0]), xp.ones_like(kernel[:, 0]), math.inf, 0
    while count < most:
        count += 1
        # The kernel holds w_j; sums over i need w_i, and w_j divided out.
        sums = v * ((weights * u) @ kernel) / weights
        off = scalar(xp.max(xp.abs(sums - 1)))
        if off <= tolerance and count > 1:
            break
        v = v / sums
        u = 1 / (kernel @ v)
        if not 1 / _WIDE < scalar(xp.min(u)) <= scalar(xp.max(u)) < _WIDE:
            break
    return (xp.log(u), xp.log(v)), count, off
