"""Windowed neighbourhoods on grids."""

# All axes but the last are flattened into rows: a line has one row, a volume a row for each pair of outer numbers.

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, far_unit, kept_bytes
from nlflow.affinities.base import Affinity
from nlflow.affinities.graph import Sparse
from nlflow.affinities.logits import check_rows
from nlflow.affinities.table import fits, kernel_table, table_symbol
from nlflow.domains import Grid
from nlflow.errors import check_memory
from nlflow.kernels import Patch, PositionKernel


def _loop(name: str, dtype: Any) -> Any:
    # Imported here so that what does not need a compiled loop does not pay for loading numba.
    from nlflow.backends.numba.stencil import loop

    return loop(name, np.dtype(dtype).name)


def _planar(grid: Grid, u: NDArray[Any], margin: tuple[int, ...], *, isolated: str | None = None) -> NDArray[Any]:
    """Return a signal as (D, rows, columns), padded by `margin`."""
    padded = grid.pad(u, margin, isolated=isolated)
    padded = padded[..., None] if padded.ndim == grid.ndim else padded
    planar = np.ascontiguousarray(np.moveaxis(padded, -1, 0))
    return planar.reshape(planar.shape[0], -1, planar.shape[-1])


def _rows_in(grid: Grid, radii: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return, in rows of the padded signal, where each row's window begins, and its rows from there."""
    # Row i of the signal sees the rows ``starts[i] + steps``, where steps has the shape (planes, rows in a plane). In
    # one and two dimensions there is one plane, and both count 0, 1, 2 and so on.
    outer = tuple(zip(grid.shape[:-1], radii[:-1], strict=True))
    padded = tuple(n + 2 * r for n, r in outer)
    numbers = np.arange(math.prod(padded), dtype=np.int64).reshape(padded)
    starts = numbers[tuple(slice(n) for n, _ in outer)]
    steps = numbers[tuple(slice(2 * r + 1) for _, r in outer)]
    return starts.ravel(), np.ascontiguousarray(steps.reshape(-1, 2 * (0, *radii)[-2] + 1))


def _two(values: tuple[int, ...]) -> tuple[int, int]:
    """Return per-axis integers of a 1-D or 2-D grid as (rows, columns)."""
    return (0, values[0]) if len(values) == 1 else (values[0], values[1])


class _Stencil(Affinity):
    """What both stencils share: averages from weighted sums and the degree from the sums of ones."""

    method = "stencil"
    _grid: Grid
    _radii: tuple[int, ...]
    _degrees: NDArray[Any]

    def _sums(self, planar: NDArray[Any], out: NDArray[Any]) -> None:
        """Write sum_j k_ij u_j of a padded planar signal to `out`."""
        raise NotImplementedError  # pragma: no cover - abstract

    def _weighted_sums(self, u: NDArray[Any]) -> NDArray[Any]:
        planar = _planar(self._grid, u, self._radii)
        out = np.empty((planar.shape[0], self._grid.size // self._grid.shape[-1], self._grid.shape[-1]), u.dtype)
        self._sums(planar, out)
        return out

    def _average(self, u: NDArray[Any]) -> NDArray[Any]:
        size = far_unit(u, 1e-9)
        out = self._weighted_sums(u if size == 1 else u / u.dtype.type(size))
        out /= self._degrees_for(u.dtype)
        if size != 1:
            out *= size
        return np.ascontiguousarray(np.moveaxis(out, 0, -1)).reshape(u.shape)

    def _push(self, law: NDArray[Any]) -> NDArray[Any]:
        # k is symmetric and all cells are alike: p P is the sum of k_ij p_i / d_i.
        flat = np.moveaxis(self.flatten(law).reshape(*self._grid.shape, -1), -1, 0)
        degrees = self._degrees_for(law.dtype).reshape(self._grid.shape)
        out = self._weighted_sums(np.ascontiguousarray(np.moveaxis(flat / degrees, 0, -1)))
        return np.ascontiguousarray(np.moveaxis(out, 0, -1)).reshape(law.shape)

    def _degrees_for(self, dtype: Any) -> NDArray[Any]:
        return self._degrees.astype(dtype, copy=False)

    def _neighbours(self) -> Iterator[tuple[tuple[int, int], NDArray[Any] | float]]:
        """Yield each place (row, column) of the window but its centre with k(x, x + offset).

        As (rows, columns), or as one number for all x.
        """
        raise NotImplementedError  # pragma: no cover - abstract

    def _edge_bound(self) -> int:
        return self._grid.size * (math.prod(2 * r + 1 for r in self._radii) - 1)

    def _edges(self) -> Sparse:
        from scipy.sparse import csr_array

        size, count = self._grid.size, self._edge_bound() // self._grid.size
        columns = self._grid.shape[-1]
        rows = size // columns
        starts, steps = _rows_in(self._grid, self._radii)
        # 0 stands for 'outside'.
        numbers = _planar(self._grid, np.arange(1, size + 1, dtype=np.int32).reshape(self._grid.shape), self._radii)[0]
        ends = np.empty((rows, columns, count), np.int32)
        weights = np.empty((rows, columns, count), self.dtype or np.float64)
        for s, ((row, column), values) in enumerate(self._neighbours()):
            there = numbers[starts + steps.flat[row], column : column + columns]
            ends[:, :, s] = np.maximum(there - 1, 0)
            weights[:, :, s] = np.where(there > 0, values, 0)
        first = np.arange(size + 1, dtype=np.int32 if size * count < 2**31 else np.int64) * count
        return csr_array((weights.ravel(), ends.ravel(), first), shape=(size, size))

    def _log_degree(self) -> NDArray[Any]:
        logarithm = np.log(self._degrees) + self._degrees.dtype.type(math.log(self._grid.cell))
        return np.asarray(logarithm.reshape(self._grid.shape))


class PatchStencil(_Stencil):
    """The patch kernel of nonlocal means in its window, on grids of one or two axes; O(N window D) time an average."""

    # Half of the symmetric stencil is stored, (window area - 1)/2 weights a node, or none with ``store=False``.

    def __init__(
        self,
        kernel: Patch,
        grid: Grid,
        image: NDArray[Any],
        radii: tuple[int, ...],
        *,
        store: bool = True,
        memory_limit: float | None = None,
    ) -> None:
        super().__init__(grid, kernel, symmetric=True, positive_semidefinite=False, dtype=image.dtype)
        self._grid = grid
        self._radii = radii
        patch = (kernel.patch_size // 2,) * grid.ndim
        reach = tuple((2 if kernel.tokens == "patch" else 1) * p for p in patch)
        (ri, rj), (pi, pj) = _two(radii), _two(patch)
        rows, columns = (1, *grid.shape)[-2:]
        self._offsets = np.array(
            [(di, dj) for di in range(ri + 1) for dj in range(-rj, rj + 1) if di > 0 or dj > 0], dtype=np.int64
        ).reshape(-1, 2)
        margin = tuple(r + p for r, p in zip(radii, reach, strict=True))
        stored = (rows + ri) * len(self._offsets) * (columns + rj) * image.dtype.itemsize if store else 0
        padded = (rows + 2 * _two(margin)[0]) * (columns + 2 * _two(margin)[1]) * image.shape[-1] * image.dtype.itemsize
        check_memory(
            f"a stencil of {2 * ri + 1} x {2 * rj + 1} on {grid.size} nodes",
            stored + padded + 4 * grid.size * image.dtype.itemsize,
            f"use {'store=False (weights are computed anew at each step), ' if store else ''}a smaller search_radius, "
            "or raise memory_limit",
            memory_limit,
        )
        scalar = image.dtype.type
        squared = (self._offsets**2).sum(axis=1)
        spatial = np.ones(len(squared)) if kernel.spatial_width is None else np.exp(
            -squared / 2 / kernel.spatial_width / kernel.spatial_width
        )  # fmt: skip
        scale = 1 / ((2 * pi + 1) * (2 * pj + 1) * image.shape[-1])
        # In units of the width, formed in float64: squares of the raw values could leave the range of float32.
        image = (image / np.float64(kernel.width)).astype(image.dtype)
        self._weights_of = (
            _planar(grid, image, margin, isolated="symmetric"),
            self._offsets,
            spatial.astype(image.dtype),
            (ri, rj, pi, pj),
            scalar(kernel.correction),
            scalar(scale),
            kernel.tokens == "patch",
            grid.boundary == "isolated",
        )
        self._stored: NDArray[Any] | None = None
        if store:
            self._stored = np.empty((rows + ri, len(self._offsets), columns + rj), image.dtype)
            _loop("store_weights", image.dtype)(*self._weights_of, self._stored)
            # The image is not needed again; a slice of it would keep it alive.
            self._weights_of = (np.empty((0, 0, 0), image.dtype), *self._weights_of[1:])
        self._degrees = self._weighted_sums(np.ones(grid.shape, image.dtype))

    def _sums(self, planar: NDArray[Any], out: NDArray[Any]) -> None:
        one = out.dtype.type(1)  # k(x, x)
        if self._stored is not None:
            _loop("apply_weights", out.dtype)(self._stored, self._offsets, one, planar, out)
        else:
            _loop("apply_recomputed", out.dtype)(*self._weights_of, one, planar, out)

    def _neighbours(self) -> Iterator[tuple[tuple[int, int], NDArray[Any] | float]]:
        rows, columns = (1, *self._grid.shape)[-2:]
        ri, rj = _two(self._radii)
        stored = self._stored
        if stored is None:
            stored = np.empty((rows + ri, len(self._offsets), columns + rj), self.dtype)
            _loop("store_weights", self.dtype)(*self._weights_of, stored)
        for s, (di, dj) in enumerate(self._offsets.tolist()):
            ahead, behind = max(dj, 0), max(-dj, 0)
            yield (ri + di, rj + dj), stored[ri:, s, ahead : ahead + columns]
            yield (ri - di, rj - dj), stored[ri - di : ri - di + rows, s, behind : behind + columns]

    @property
    def memory_bytes(self) -> int:
        return kept_bytes(self._stored, self._weights_of[0], self._offsets, self._degrees)


class TableStencil(_Stencil):
    """A position kernel truncated to a window, or to where it is negligible; O(N window D) time an average."""

    def __init__(
        self, kernel: PositionKernel, grid: Grid, window: int | None = None, memory_limit: float | None = None
    ) -> None:
        super().__init__(
            grid, kernel, symmetric=True, positive_semidefinite=kernel.is_definite(grid.ndim) and window is None
        )
        check_memory(
            f"a stencil on {grid.size} nodes", 16 * grid.size, "use fewer nodes or raise memory_limit", memory_limit,
            kept=8 * grid.size,
        )  # fmt: skip
        self._grid = grid
        table = kernel_table(kernel, grid, window, memory_limit)
        self._radii = tuple(s // 2 for s in table.shape)
        self._rows = _rows_in(grid, self._radii)
        self._table = np.ascontiguousarray(table.reshape(*self._rows[1].shape, -1))
        self._tables: dict[Any, NDArray[Any]] = {}
        self._degrees = self._sums_of_ones()
        with np.errstate(divide="ignore"):
            check_rows(np.log(self._degrees).ravel())
        self._narrow = fits(np.float32, self._degrees)

    def _sums_of_ones(self) -> NDArray[Any]:
        """Return the degrees, shape (1, rows, columns); beside periodic and reflecting edges, all are that of a node.

        So a kernel as wide as the grid costs its functionals no time before they ask for memory.
        """
        if self._grid.boundary == "isolated":
            return self._weighted_sums(np.ones(self._grid.shape))
        steps, columns = self._rows[1], self._table.shape[-1]
        one = np.empty((1, 1, 1))
        window = np.ones((1, steps.size, columns))
        rows = np.arange(steps.size, dtype=np.int64).reshape(steps.shape)
        _loop("apply_table", one.dtype)(self._table, np.zeros(1, np.int64), rows, window, one)
        shape = (1, self._grid.size // self._grid.shape[-1], self._grid.shape[-1])
        return np.full(shape, one[0, 0, 0])

    def _average(self, u: NDArray[Any]) -> NDArray[Any]:
        if self._narrow:
            return super()._average(u)
        return super()._average(u.astype(np.float64)).astype(u.dtype)

    def _push(self, law: NDArray[Any]) -> NDArray[Any]:
        if self._narrow:
            return super()._push(law)
        return super()._push(law.astype(np.float64)).astype(law.dtype)

    def known_spectrum(self) -> Floats | None:
        if self._grid.boundary == "isolated":
            return None
        symbol = table_symbol(self._table.reshape([2 * r + 1 for r in self._radii]), self._grid).ravel()
        return np.asarray(symbol / symbol[0])

    def _sums(self, planar: NDArray[Any], out: NDArray[Any]) -> None:
        _loop("apply_table", out.dtype)(self._kept(out.dtype, self._table), *self._rows, planar, out)

    def _degrees_for(self, dtype: Any) -> NDArray[Any]:
        return self._kept(dtype, self._degrees)

    def _kept(self, dtype: Any, values: NDArray[Any]) -> NDArray[Any]:
        """Return the table or the degrees in the precision of a signal, converted once."""
        key = (np.dtype(dtype), values is self._table)
        if key not in self._tables:
            self._tables[key] = values.astype(dtype, copy=False)
        return self._tables[key]

    def _neighbours(self) -> Iterator[tuple[tuple[int, int], NDArray[Any] | float]]:
        table = self._table.reshape(-1, self._table.shape[-1])
        for (row, column), value in np.ndenumerate(table):
            if (row, column) != (len(table) // 2, self._radii[-1]):
                yield (row, column), float(value)
