"""Position kernels on grids by fast transforms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from nlflow._array import Floats, far_unit
from nlflow.affinities.base import Affinity
from nlflow.affinities.table import fits, kernel_table, table_symbol, wrap
from nlflow.backends.threads import cores
from nlflow.domains import Grid
from nlflow.errors import InputError, check_memory, shortened
from nlflow.kernels import PositionKernel

# Rounding of transforms over a degree, in roundings of the signal: what is more loses digits.
_LOST = {"float32": 2.0, "float64": 1e4}


class ConvolutionAffinity(Affinity):
    """A translation-invariant kernel on a `Grid`; O(N log N) time an average, O(N) memory."""

    # By the real Fourier transform on periodic grids, the cosine transform (type 2) on reflecting ones, and zero
    # padding on isolated ones.

    method = "convolution"

    _narrow = True  # whether float32 holds its sums

    def __init__(
        self, kernel: PositionKernel, grid: Grid, window: int | None = None, memory_limit: float | None = None
    ) -> None:
        super().__init__(
            grid, kernel, symmetric=True, positive_semidefinite=kernel.is_definite(grid.ndim) and window is None
        )
        check_memory(
            f"a convolution on {grid.size} nodes", 8 * grid.size * (2 ** (grid.ndim + 1) + 2),
            "use fewer nodes or raise memory_limit", memory_limit,
        )  # fmt: skip
        self._grid = grid
        self._axes = tuple(range(grid.ndim))
        table = kernel_table(kernel, grid, window, memory_limit)
        self._symbols: dict[Any, NDArray[Any]] = {}
        if grid.boundary == "isolated":
            self._lengths = tuple(
                fft.next_fast_len(n + s // 2, real=True) for n, s in zip(grid.shape, table.shape, strict=True)
            )
            self._symbol = fft.rfftn(wrap(table, self._lengths), workers=cores()).real.copy()
            self._degrees = self._convolve(np.ones(grid.shape))
            lost = float(np.linalg.norm(table)) / max(float(self._degrees.min()), np.finfo(float).tiny)
            if not lost <= _LOST["float64"]:
                raise InputError(
                    f"kernel: {shortened(repr(kernel))} has weights of {float(table.max()):.4g} far from nodes whose "
                    "own sum is small, which transforms would lose in rounding; use method='stencil', or 'dense'"
                )
            self._narrow = lost <= _LOST["float32"] and fits(np.float32, self._degrees)
        else:
            self._lengths = grid.shape
            symbol = table_symbol(table, grid)
            # Divided by the degree, which is the same at all nodes.
            total = float(symbol[(0,) * grid.ndim])
            self._symbol = symbol / total
            self._degrees = np.full(grid.shape, total)

    def _symbol_for(self, dtype: Any) -> NDArray[Any]:
        if dtype not in self._symbols:
            self._symbols[dtype] = self._symbol.astype(dtype, copy=False)
        return self._symbols[dtype]

    def _convolve(self, u: NDArray[Any]) -> NDArray[Any]:
        symbol = self._symbol_for(u.dtype)
        symbol = symbol.reshape(symbol.shape + (1,) * (u.ndim - symbol.ndim))
        threads = cores()
        if self._grid.boundary == "reflect":
            transformed = fft.dctn(u, type=2, axes=self._axes, workers=threads)
            transformed *= symbol
            return np.asarray(fft.idctn(transformed, type=2, axes=self._axes, overwrite_x=True, workers=threads))
        transformed = fft.rfftn(u, s=self._lengths, axes=self._axes, workers=threads)
        transformed *= symbol
        back = fft.irfftn(transformed, s=self._lengths, axes=self._axes, overwrite_x=True, workers=threads)
        if self._lengths == self._grid.shape:
            return np.asarray(back)
        return np.ascontiguousarray(back[tuple(slice(n) for n in self._grid.shape)])

    def _average(self, u: NDArray[Any]) -> NDArray[Any]:
        if not self._narrow and u.dtype == np.float32:
            return self._average(u.astype(np.float64)).astype(u.dtype)
        size = far_unit(u, 1e-9)
        result = self._convolve(u if size == 1 else u / u.dtype.type(size))
        if self._grid.boundary == "isolated":
            degrees = self._degrees.astype(u.dtype, copy=False)
            result /= degrees.reshape(degrees.shape + (1,) * (u.ndim - degrees.ndim))
        return result if size == 1 else result * u.dtype.type(size)

    def _push(self, law: NDArray[Any]) -> NDArray[Any]:
        if self._grid.boundary != "isolated":
            return self._convolve(law)  # all degrees are alike
        if not self._narrow and law.dtype == np.float32:
            return self._push(law.astype(np.float64)).astype(law.dtype)
        degrees = self._degrees.astype(law.dtype, copy=False)
        return self._convolve(law / degrees.reshape(degrees.shape + (1,) * (law.ndim - degrees.ndim)))

    def _log_degree(self) -> Floats:
        return np.asarray(np.log(self._degrees) + math.log(self._grid.cell))

    def known_spectrum(self) -> Floats | None:
        return None if self._grid.boundary == "isolated" else self._symbol.ravel()
