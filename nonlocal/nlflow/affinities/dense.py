"""Dense affinity: the N x N averaging matrix, for small N, any kernel, and as the reference of all others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, constant_like, is_numpy, namespace
from nlflow.affinities.base import Affinity
from nlflow.affinities.table import kernel_table
from nlflow.domain import Domain, Grid
from nlflow.errors import InputError, check_array, check_memory
from nlflow.kernel import Kernel, Patch, RadialKernel

__all__ = ["DenseAffinity"]

LogBlock = Callable[[int, int], Array]
"""Rows [start, stop) of log k, shape (stop - start, N)."""

_BLOCK_BYTES = 2**26
_DENSE_REMEDY = (
    "use fewer nodes, a grid with a position kernel (method='convolution'), a windowed kernel (method='stencil'), "
    "or raise memory_limit"
)


class DenseAffinity(Affinity):
    """An affinity that keeps the matrix P; O(N^2) memory and O(N^2 D) time an average.

    Rows are normalised in log space, so logits of any size work. Built from `from_features`, `from_matrix`,
    `from_table` or `from_patches`, or through `nlflow.affinity`.
    """

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
    ) -> None:
        super().__init__(
            domain, kernel, symmetric=symmetric, positive_semidefinite=positive_semidefinite, dtype=like.dtype
        )
        n = domain.size
        size = int(like.dtype.itemsize)
        check_memory(
            f"a dense affinity of {n} nodes", n * n * size + 2 * _BLOCK_BYTES, _DENSE_REMEDY, limit=memory_limit
        )
        self._log_block = log_block
        self._like = like
        self._limit = memory_limit
        xp = namespace(like)
        log_weights = np.log(domain.weights).reshape(-1)
        rows, degrees = [], []
        step = max(1, _BLOCK_BYTES // (8 * n))
        for start in range(0, n, step):
            logits = log_block(start, min(start + step, n))
            logits = logits + (log_weights if is_numpy(logits) else constant_like(log_weights, logits))
            highest = xp.max(logits, axis=1, keepdims=True)
            if not bool(xp.all(xp.isfinite(highest))):
                row = start + int(xp.argmax(xp.astype(~xp.isfinite(highest[:, 0]), xp.int32)))
                raise InputError(
                    f"affinity: row {row} is zero or not finite; every node needs a neighbour (itself, say)"
                )
            weights = xp.exp(logits - highest)
            total = xp.sum(weights, axis=1, keepdims=True)
            rows.append(xp.astype(weights / total, like.dtype))
            degrees.append(xp.astype((highest + xp.log(total))[:, 0], like.dtype))
        self._matrix = xp.concat(rows, axis=0) if len(rows) > 1 else rows[0]
        self._log_degrees = xp.reshape(xp.concat(degrees, axis=0), domain.shape)

    # ---- builders

    @classmethod
    def from_features(
        cls,
        kernel: Kernel,
        domain: Domain,
        queries: Array,
        keys: Array,
        memory_limit: float | None = None,
    ) -> DenseAffinity:
        """Compare queries (N, d) with keys (N, d); symmetric when they are the same array."""
        same = queries is keys
        if is_numpy(queries):
            # Logits in float64 whatever the features are: a block of rows is small, and rounding in a logit is
            # multiplied by its size.
            q = queries.astype(np.float64)
            k = q if same else keys.astype(np.float64)
        else:
            q, k = queries, keys

        def block(start: int, stop: int) -> Array:
            with np.errstate(over="ignore", under="ignore"):
                return kernel.log_matrix(q[start:stop, :], k)

        result = cls(
            domain, kernel, block, keys, symmetric=kernel.symmetric and same,
            positive_semidefinite=same and kernel.positive_semidefinite,
            memory_limit=memory_limit,
        )  # fmt: skip
        result._transposed = lambda start, stop: namespace(q).matrix_transpose(kernel.log_matrix(q, k[start:stop, :]))
        return result

    @classmethod
    def from_matrix(cls, matrix: Any, domain: Domain, memory_limit: float | None = None) -> DenseAffinity:
        """Take the affinities k_ij >= 0 as given, shape (N, N); symmetry is detected, definiteness is not.

        Raises
        ------
        InputError
            For a wrong shape, negative or non-finite entries, or a row of zeros.
        """
        k = check_array("matrix", matrix, ndim=2)
        if tuple(k.shape) != (domain.size, domain.size):
            raise InputError(
                f"matrix: got shape {tuple(k.shape)}, expected {(domain.size,) * 2}, one row for each node"
            )
        xp = namespace(k)
        if float(xp.min(k)) < 0:
            raise InputError(f"matrix: got a negative entry ({float(xp.min(k)):g}), expected affinities >= 0")

        def block(start: int, stop: int) -> Array:
            with np.errstate(divide="ignore"):  # log 0 = -inf is meant
                return xp.log(k[start:stop, :])

        transposed = xp.matrix_transpose(k)
        result = cls(
            domain, None, block, k, symmetric=bool(xp.all(k == transposed)), positive_semidefinite=False,
            memory_limit=memory_limit,
        )  # fmt: skip

        def transposed_block(start: int, stop: int) -> Array:
            with np.errstate(divide="ignore"):
                return xp.log(transposed[start:stop, :])

        result._transposed = transposed_block
        return result

    @classmethod
    def from_table(
        cls,
        kernel: RadialKernel,
        grid: Grid,
        window: int | None = None,
        dtype: Any = np.float64,
        memory_limit: float | None = None,
    ) -> DenseAffinity:
        """Sum a position kernel over the images of a grid's boundary, node by node."""
        table = kernel_table(kernel, grid, window, memory_limit)
        margin = tuple(s // 2 for s in table.shape)
        return cls(
            grid, kernel, _images(grid, margin, lambda node: table), np.empty(0, dtype), symmetric=True,
            positive_semidefinite=kernel.positive_semidefinite and window is None, memory_limit=memory_limit,
        )  # fmt: skip

    @classmethod
    def from_patches(
        cls,
        kernel: Patch,
        grid: Grid,
        image: NDArray[Any],
        radii: tuple[int, ...],
        memory_limit: float | None = None,
    ) -> DenseAffinity:
        """Compare the patches of an image (``shape + (C,)``) in plain NumPy, one node after another."""
        reach = (kernel.patch_size // 2,) * grid.ndim
        box = tuple(2 * r + 1 for r in reach)
        window = tuple(2 * r + 1 for r in radii)
        margin = tuple(r + 2 * p for r, p in zip(radii, reach, strict=True))
        padded = grid.pad(image.astype(np.float64), margin, isolated="symmetric")
        patches = np.lib.stride_tricks.sliding_window_view(padded, box, axis=tuple(range(grid.ndim)))

        def pair_weights(corner: tuple[int, ...]) -> NDArray[np.float64]:
            """Weights between the node at `corner` + radii and all nodes of its window, in padded coordinates."""
            centre = patches[tuple(c + r for c, r in zip(corner, radii, strict=True))]
            block = patches[tuple(slice(c, c + w) for c, w in zip(corner, window, strict=True))]
            square = (block - centre) ** 2
            distance = square.mean(axis=tuple(range(grid.ndim, square.ndim)))
            return np.asarray(np.exp(-np.maximum(distance / kernel.width**2 - kernel.correction, 0)))

        offsets = np.stack(np.meshgrid(*(np.arange(-r, r + 1) for r in radii), indexing="ij"))
        spatial = np.ones(window)
        if kernel.spatial_width is not None:
            spatial = np.exp(-(offsets**2).sum(axis=0) / (2 * kernel.spatial_width**2))

        def table(node: tuple[int, ...]) -> NDArray[np.float64]:
            # `patches` has lost `reach` on each side, so node i of the grid sits at i + radii + reach.
            if kernel.tokens == "pixel":
                return spatial * pair_weights(tuple(i + p for i, p in zip(node, reach, strict=True)))
            total = np.zeros(window)
            for shift in np.ndindex(*box):
                total += pair_weights(tuple(i + s for i, s in zip(node, shift, strict=True)))
            return spatial * total / np.prod(box)

        return cls(
            grid, kernel, _images(grid, radii, table), image, symmetric=True, positive_semidefinite=False,
            memory_limit=memory_limit,
        )  # fmt: skip

    # ---- contract

    _transposed: LogBlock | None = None

    @property
    def matrix(self) -> Array:
        """The averaging matrix P, shape (N, N), rows summing to 1."""
        return self._matrix

    @property
    def memory_bytes(self) -> int:
        """Bytes that the affinity keeps."""
        return self.domain.size * (self.domain.size + 1) * int(self.dtype.itemsize)

    def _average(self, u: Array) -> Array:
        xp = namespace(u)
        return xp.reshape(self._matrix @ self.flatten(u), u.shape)

    def _log_degree(self) -> Array:
        return self._log_degrees

    def _symmetrised(self) -> Affinity:
        direct, transposed = self._log_block, self._transposed
        if transposed is None:  # only builders of symmetric affinities leave it out
            return super()._symmetrised()
        xp = namespace(self._like)

        def block(start: int, stop: int) -> Array:
            return xp.logaddexp(direct(start, stop), transposed(start, stop))

        return DenseAffinity(
            self.domain, self.kernel, block, self._like, symmetric=True, positive_semidefinite=False,
            memory_limit=self._limit,
        )  # fmt: skip


def _images(grid: Grid, margin: tuple[int, ...], table: Callable[[tuple[int, ...]], NDArray[np.float64]]) -> LogBlock:
    """Rows of log k from weights over a window, added up over the images that the window holds of each node."""
    numbers = grid.pad(np.arange(1, grid.size + 1).reshape(grid.shape), margin)  # 0 stands for 'outside'

    def block(start: int, stop: int) -> NDArray[np.float64]:
        rows = np.empty((stop - start, grid.size))
        for row in range(start, stop):
            node = tuple(int(i) for i in np.unravel_index(row, grid.shape))
            window = numbers[tuple(slice(i, i + 2 * m + 1) for i, m in zip(node, margin, strict=True))]
            sums = np.bincount(window.ravel(), weights=table(node).ravel(), minlength=grid.size + 1)
            rows[row - start] = sums[1:]
        with np.errstate(divide="ignore"):  # log 0 = -inf is meant
            return np.log(rows)

    return block
