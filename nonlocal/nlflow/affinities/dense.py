"""The N x N averaging matrix."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import array_api_compat
import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, constant_like, is_numpy, namespace, scalar
from nlflow.affinities.base import Affinity
from nlflow.affinities.graph import Sparse
from nlflow.affinities.logits import check_rows, log_transitions, properties
from nlflow.affinities.table import log_table
from nlflow.backends.memory import limit_for
from nlflow.domains import Domain, Grid
from nlflow.domains.mask import Mask, Sight
from nlflow.errors import InputError, check_array, check_memory
from nlflow.kernels import Kernel, Patch, PositionKernel

LogBlock = Callable[[int, int], Array]
"""Rows [start, stop) of log k, shape (stop - start, N)."""

# Blocks of rows, by name: what an affinity keeps of functions made here could not be pickled.


def _logits(kernel: Kernel, q: Array, k: Array, sight: Sight | None, loops: bool, start: int, stop: int) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        logits = kernel.log_matrix(q[start:stop, :], k)
        logits = logits if sight is None else sight.applied(logits, slice(start, stop))
    if not loops:
        own = namespace(k).arange(start, stop) - start
        logits[own, own + start] = -math.inf
    return logits


def _logits_transposed(kernel: Kernel, q: Array, k: Array, sight: Sight | None, start: int, stop: int) -> Array:
    logits = namespace(k).matrix_transpose(kernel.log_matrix(q, k[start:stop, :]))
    return logits if sight is None else sight.transposed().applied(logits, slice(start, stop))


def _logarithms(values: Array, start: int, stop: int) -> Array:
    xp = namespace(values)
    with np.errstate(divide="ignore"):  # log 0 = -inf is meant
        return xp.log(xp.astype(values[start:stop, :], xp.float64))


_BLOCK_BYTES = 2**20  # of the logits of some rows, which stay in the cache until they are weights
_SUMMED = 128  # nodes whose float32 terms are added up before float64 takes over
_REMEDIES = {
    "matrix": "use fewer nodes, or raise memory_limit",
    "grid": "use method='convolution' (a position kernel), method='stencil' (a windowed one), or fewer nodes, or raise "
    "memory_limit",
    "points": "use method='pairwise' (method='tiled' for tensors), which keeps no matrix, or fewer nodes, or raise "
    "memory_limit",
}


class DenseAffinity(Affinity):
    """An affinity that keeps the matrix P; O(N^2) memory and O(N^2 D) time an average."""

    method = "dense"

    def __init__(
        self,
        domain: Domain,
        kernel: Kernel | None,
        log_block: LogBlock,
        like: Array,
        *,
        symmetric: bool,
        positive_semidefinite: bool,
        memory_limit: float | None = None,
        log_transposed: LogBlock | None = None,
        kept_bytes: int = 0,
    ) -> None:
        super().__init__(
            domain, kernel, symmetric=symmetric, positive_semidefinite=positive_semidefinite, dtype=like.dtype
        )
        n = domain.size
        block_bytes = _check_dense(domain, kernel, like, kept_bytes, memory_limit)
        xp = namespace(like)
        # K = k + k^T of a kernel that is not symmetric asks for the logits again, and what float32 has lost.
        kept = not symmetric or (kernel is not None and like.dtype == xp.float32)
        self._log_block = log_block if kept else None
        self._transposed = None if symmetric else log_transposed
        self._kept_bytes = kept_bytes if kept else 0
        self._limit = memory_limit
        log_weights = np.log(domain.weights).reshape(-1)
        weighted = bool(log_weights.any())
        device = array_api_compat.device(like)
        self.device = None if is_numpy(like) else device
        self._matrix = xp.empty((n, n), dtype=like.dtype, device=device)
        self._log_degrees = xp.empty((n,), dtype=xp.float64, device=device)
        step = max(1, block_bytes // (8 * n))
        for start in range(0, n, step):
            stop = min(start + step, n)
            logits = log_block(start, stop)
            if weighted:
                logits = logits + (log_weights if is_numpy(logits) else constant_like(log_weights, logits))
            highest = xp.max(logits, axis=1, keepdims=True)
            check_rows(highest[:, 0], start)
            weights = xp.exp(logits - highest)
            total = xp.sum(weights, axis=1, keepdims=True)
            if is_numpy(weights):
                np.divide(weights, total, out=self._matrix[start:stop], casting="same_kind")
            else:
                self._matrix[start:stop, :] = xp.astype(weights / total, like.dtype)
            self._log_degrees[start:stop] = xp.astype((highest + xp.log(total))[:, 0], xp.float64)
        self._log_degrees = xp.reshape(self._log_degrees, domain.shape)

    # ---- builders

    @classmethod
    def from_features(
        cls,
        kernel: Kernel,
        domain: Domain,
        queries: Array,
        keys: Array,
        memory_limit: float | None = None,
        mask: Mask | None = None,
        *,
        loops: bool = True,
    ) -> DenseAffinity:
        """Compare queries (N, d) with keys (N, d); symmetric when they are the same array, and the mask is."""
        # Without `loops` no node sees itself, k_ii = 0, which keeps the digits of nodes that hardly see others.
        same = queries is keys
        xp = namespace(keys)
        _check_dense(domain, kernel, keys, 0, memory_limit)  # before a rule is asked of all pairs
        sight = None if mask is None else Sight(mask, (), domain.size, keys)
        tags = properties(kernel, queries, keys, mask)
        tags["symmetric"] = tags["symmetric"] and (sight is None or sight.symmetric)
        tags["positive_semidefinite"] = tags["positive_semidefinite"] and loops
        # Copies, since K = k + k^T may be asked for after the features have changed. Logits in float64 whatever the
        # features are: a block of rows is small, and rounding in a logit is multiplied by its size.
        k = xp.astype(keys, xp.float64, copy=True)
        q = k if same else xp.astype(queries, xp.float64, copy=True)

        return cls(
            domain, kernel, partial(_logits, kernel, q, k, sight, loops), keys, memory_limit=memory_limit,
            log_transposed=partial(_logits_transposed, kernel, q, k, sight),
            kept_bytes=(1 if same else 2) * domain.size * int(k.shape[1]) * int(k.dtype.itemsize), **tags,
        )  # fmt: skip

    @classmethod
    def from_matrix(cls, matrix: Any, domain: Domain, memory_limit: float | None = None) -> DenseAffinity:
        """Take the affinities k_ij >= 0 as given, (N, N); exact symmetry is detected, definiteness is not."""
        if domain.leading:
            raise InputError("domain: got a Batch, expected a Grid or Points; give each item a matrix of its own")
        k = check_array("matrix", matrix, ndim=2)
        if tuple(k.shape) != (domain.size, domain.size):
            raise InputError(
                f"matrix: got shape {tuple(k.shape)}, expected {(domain.size,) * 2}, one row for each node"
            )
        xp = namespace(k)
        if (least := scalar(xp.min(k))) < 0:
            raise InputError(f"matrix: got a negative entry ({least:g}), expected affinities >= 0")

        transposed = xp.matrix_transpose(k)
        symmetric = bool(xp.all(k == transposed))
        kept = 0 if symmetric else domain.size**2 * int(k.dtype.itemsize)
        if not symmetric:
            # Kept for K = k + k^T, which may be asked for after the matrix has changed.
            _check_dense(domain, None, k, kept, memory_limit)
            k = xp.astype(k, k.dtype, copy=True)
            transposed = xp.matrix_transpose(k)

        return cls(
            domain, None, partial(_logarithms, k), k, symmetric=symmetric, positive_semidefinite=False,
            memory_limit=memory_limit, log_transposed=partial(_logarithms, transposed), kept_bytes=kept,
        )  # fmt: skip

    @classmethod
    def from_table(
        cls,
        kernel: PositionKernel,
        grid: Grid,
        window: int | None = None,
        dtype: Any = np.float64,
        memory_limit: float | None = None,
    ) -> DenseAffinity:
        """Sum a position kernel over the images of a grid's boundary, node by node."""
        _check_dense(grid, kernel, np.empty(0, dtype), 0, memory_limit)
        result = cls(
            grid, kernel, _rows_of_table(kernel, grid, window, memory_limit), np.empty(0, dtype), symmetric=True,
            positive_semidefinite=kernel.is_definite(grid.ndim) and window is None, memory_limit=memory_limit,
        )  # fmt: skip
        result._make_anew(partial(_rows_of_table, kernel, grid, window, memory_limit))
        result.dtype = None  # positions are no features: signals may have either precision
        return result

    @classmethod
    def from_patches(
        cls, kernel: Patch, grid: Grid, image: NDArray[Any], radii: tuple[int, ...], memory_limit: float | None = None
    ) -> DenseAffinity:
        """Compare the patches of an image (``shape + (C,)``), one node after another."""
        result = cls(
            grid, kernel, _rows_of_patches(kernel, grid, image, radii), image, symmetric=True,
            positive_semidefinite=False, memory_limit=memory_limit, kept_bytes=image.nbytes,
        )  # fmt: skip
        result._make_anew(partial(_rows_of_patches, kernel, grid, image, radii))
        return result

    def _make_anew(self, rows: Callable[[], LogBlock]) -> None:
        """Keep how the logits are made, where they are kept, and not what they are made from."""
        if self._log_block is not None:
            self._log_block = partial(_made_anew, rows)

    # ---- contract

    @property
    def matrix(self) -> Array:
        """The averaging matrix P, (N, N)."""
        return self._matrix

    @property
    def tracked(self) -> bool:
        return bool(getattr(self._matrix, "requires_grad", False))

    @property
    def memory_bytes(self) -> int:
        return self.domain.size * (self.domain.size * int(self._matrix.dtype.itemsize) + 8) + self._kept_bytes

    def _average(self, u: Array) -> Array:
        return self._product(self._matrix, u)

    def _push(self, law: Array) -> Array:
        # Sums of products of numbers >= 0: nothing cancels, and small probabilities keep their digits.
        return self._product(namespace(self._matrix).matrix_transpose(self._matrix), law)

    def _product(self, matrix: Array, u: Array) -> Array:
        xp = namespace(u)
        flat = self.flatten(u)
        v = flat if flat.dtype == matrix.dtype else xp.astype(flat, matrix.dtype)
        if matrix.dtype == xp.float32 and len(v) > _SUMMED:
            # Matrix products add up in float32, one term after another: over thousands of nodes that costs digits.
            parts = (matrix[:, i : i + _SUMMED] @ v[i : i + _SUMMED, :] for i in range(0, len(v), _SUMMED))
            product = sum(xp.astype(part, xp.float64) for part in parts)
        else:
            product = matrix @ v
        return xp.reshape(xp.astype(product, u.dtype, copy=False), u.shape)

    def _log_degree(self) -> Array:
        return namespace(self._matrix).astype(self._log_degrees, self._matrix.dtype, copy=False)

    def _log_degree_wide(self) -> Array:
        return self._log_degrees

    def _log_transitions(self) -> Floats | None:
        if self._log_block is None:
            return None
        return log_transitions(self._log_block(0, self.domain.size), self.domain.weights)

    def _edge_bound(self) -> int:
        return int(np.count_nonzero(self._matrix))

    def _edges(self) -> Sparse:
        from scipy.sparse import csr_array

        graph = csr_array(self._matrix)
        # k_ij = P_ij d_i / w_j, in log space since d alone may not be in range.
        logs = np.repeat(self._log_degrees.ravel().astype(np.float64), np.diff(graph.indptr))
        with np.errstate(over="ignore", under="ignore"):
            logs += np.log(graph.data) - np.log(self.domain.weights).ravel()[graph.indices]
            graph.data = np.exp(logs).astype(graph.dtype)
        return graph

    def _symmetrized(self) -> Affinity:
        direct: Any = self._log_block
        transposed: Any = self._transposed  # kept for k that is not symmetric, and only that is asked here
        xp = namespace(self._matrix)

        def block(start: int, stop: int) -> Array:
            return xp.logaddexp(direct(start, stop), transposed(start, stop))

        return DenseAffinity(
            self.domain, self.kernel, block, self._matrix, symmetric=True, positive_semidefinite=False,
            memory_limit=self._limit, kept_bytes=self._kept_bytes,
        )  # fmt: skip


def _check_dense(domain: Domain, kernel: Kernel | None, like: Array, kept_bytes: int, limit: float | None) -> int:
    """Hold a dense affinity against the memory limit and return the size of the blocks it is built in."""
    nodes = domain.size
    block = min(_BLOCK_BYTES, 8 * nodes * nodes)
    place = "matrix" if kernel is None else "grid" if isinstance(domain, Grid) else "points"
    kept = nodes * (nodes * int(like.dtype.itemsize) + 8) + kept_bytes  # the matrix and the degrees
    what, allowed = f"a dense affinity of {nodes} nodes", limit_for(like, limit)
    check_memory(what, kept + 4 * block, _REMEDIES[place], allowed, kept=kept)
    return block


def _made_anew(rows: Callable[[], LogBlock], start: int, stop: int) -> Array:
    return rows()(start, stop)


def _rows_of_table(kernel: PositionKernel, grid: Grid, window: int | None, limit: float | None) -> LogBlock:
    logs = log_table(kernel, grid, window, limit)
    margin = tuple(s // 2 for s in logs.shape)

    def table(node: tuple[int, ...], seen: NDArray[np.bool_]) -> tuple[Floats, float]:
        # Over the largest that the node sees, whatever else the table has.
        highest = max(float(logs[seen].max()), -sys.float_info.max)
        with np.errstate(over="ignore", under="ignore"):
            return np.where(seen, np.exp(logs - highest), 0.0), highest

    return _images(grid, margin, table)


def _rows_of_patches(kernel: Patch, grid: Grid, image: NDArray[Any], radii: tuple[int, ...]) -> LogBlock:
    reach = (kernel.patch_size // 2,) * grid.ndim
    box = tuple(2 * r + 1 for r in reach)
    window = tuple(2 * r + 1 for r in radii)
    margin = tuple(r + 2 * p for r, p in zip(radii, reach, strict=True))
    padded = grid.pad(image.astype(np.float64), margin, isolated="symmetric")
    patches = np.lib.stride_tricks.sliding_window_view(padded, box, axis=tuple(range(grid.ndim)))

    def pair_weights(corner: tuple[int, ...]) -> Floats:
        """Weights between the node at `corner` + radii and all nodes of its window, in padded coordinates."""
        centre = patches[tuple(c + r for c, r in zip(corner, radii, strict=True))]
        block = patches[tuple(slice(c, c + w) for c, w in zip(corner, window, strict=True))]
        square = (block - centre) ** 2
        distance = square.mean(axis=tuple(range(grid.ndim, square.ndim)))
        return np.asarray(np.exp(-np.maximum(distance / kernel.width**2 - kernel.correction, 0)))

    offsets = np.stack(np.meshgrid(*(np.arange(-r, r + 1) for r in radii), indexing="ij"))
    spatial = np.ones(window)
    if kernel.spatial_width is not None:
        spatial = np.exp(-(offsets**2).sum(axis=0) / 2 / kernel.spatial_width / kernel.spatial_width)

    def table(node: tuple[int, ...], seen: NDArray[np.bool_]) -> tuple[Floats, float]:
        # `patches` has lost `reach` on each side, so node i of the grid sits at i + radii + reach.
        if kernel.tokens == "pixel":
            return spatial * pair_weights(tuple(i + p for i, p in zip(node, reach, strict=True))), 0.0
        total = np.zeros(window)
        for shift in np.ndindex(*box):
            total += pair_weights(tuple(i + s for i, s in zip(node, shift, strict=True)))
        return spatial * total / np.prod(box), 0.0

    return _images(grid, radii, table)


def _images(
    grid: Grid, margin: tuple[int, ...], table: Callable[[tuple[int, ...], NDArray[np.bool_]], tuple[Floats, float]]
) -> LogBlock:
    """Rows of log k from weights over a window, added up over the images that the window holds of each node.

    `table` gives the weights around a node, of which some places are nodes, over the exponential of a number.
    """
    numbers = grid.pad(np.arange(1, grid.size + 1).reshape(grid.shape), margin)  # 0 stands for 'outside'

    def block(start: int, stop: int) -> Floats:
        rows = np.empty((stop - start, grid.size))
        for row in range(start, stop):
            node = tuple(int(i) for i in np.unravel_index(row, grid.shape))
            window = numbers[tuple(slice(i, i + 2 * m + 1) for i, m in zip(node, margin, strict=True))]
            weights, log_unit = table(node, window > 0)
            sums = np.bincount(window.ravel(), weights=weights.ravel(), minlength=grid.size + 1)
            with np.errstate(divide="ignore"):  # log 0 = -inf is meant
                rows[row - start] = np.log(sums[1:]) + log_unit
        return rows

    return block
