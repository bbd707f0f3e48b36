"""Tables of a kernel over the offsets of a grid."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import fft

from nlflow._array import Floats
from nlflow.backends.threads import cores
from nlflow.domains import Grid
from nlflow.errors import InputError, check_memory, shortened, warn_caller
from nlflow.kernels import PositionKernel

# Beyond this fraction of k(0) a kernel is left out of a table: below the rounding of float64 by a factor of 1000 even
# when summed over a million nodes.
CUT = 1e-25
_LARGEST = {"float32": 1e12, "float64": 1e150}  # sums of weights, which have room for signals beside them


def warn_shrunk(window: int, radii: tuple[int, ...], grid: Grid) -> None:
    warn_caller(
        f"search window of {2 * window + 1} nodes is larger than the grid {grid.shape}; "
        f"shrunk to {' x '.join(str(2 * r + 1) for r in radii)}",
    )


def table_radius(kernel: PositionKernel, grid: Grid, window: int | None) -> tuple[int, ...]:
    """Return the half sides, in nodes along each axis, of the box that holds the kernel; it may pass the grid."""
    radii = []
    for n, h, reach in zip(grid.shape, grid.spacing, kernel.supports(CUT, grid.ndim), strict=True):
        radius = int(min(np.ceil(reach / h), 2**40))
        if window is not None:
            radius = min(radius, window)
        if grid.boundary == "isolated":
            radius = min(radius, n - 1)
        radii.append(radius)
    return tuple(radii)


def kernel_table(
    kernel: PositionKernel, grid: Grid, window: int | None = None, memory_limit: float | None = None
) -> Floats:
    """Return k at all offsets of the box from `table_radius`, without the amplitude, (2 R + 1, ...)."""
    # Raises `InputError` when their sum is too large for sums with signals, or 0; `MemoryLimitError` as `log_table`.
    logs = log_table(kernel, grid, window, memory_limit)
    with np.errstate(over="ignore", under="ignore"):  # far tails: k -> 0 is right
        table = np.asarray(np.exp(logs))
        total = float(table.sum())
    if not 0 < total < _LARGEST["float64"]:
        raise InputError(
            f"kernel: the weights of {shortened(repr(kernel))} on this grid have the sum {total:.4g} (log k is up to "
            f"{float(logs.max()):.4g}), expected one > 0 and < {_LARGEST['float64']:g}; use method='dense', whose rows "
            "are relative to their largest weight, a window, or a kernel that does not grow so fast"
        )
    return table


def fits(dtype: Any, degrees: Floats) -> bool:
    largest = _LARGEST[np.dtype(dtype).name]
    return bool(1 / largest < degrees.min() and degrees.max() < largest)


def log_table(
    kernel: PositionKernel, grid: Grid, window: int | None = None, memory_limit: float | None = None
) -> Floats:
    """Return log k at all offsets of the box from `table_radius`, without the amplitude, (2 R + 1, ...)."""
    # Raises `MemoryLimitError` when the kernel is so wide against the spacing that the table would pass the limit.
    kernel.compared.check_squares()
    radii = table_radius(kernel, grid, window)
    sides = [2 * r + 1 for r in radii]
    check_memory(
        f"the table of {kernel!r} on a grid of spacing {grid.spacing}",
        16 * int(np.prod([float(s) for s in sides])),
        "use a smaller width, a window, or the boundary 'isolated' (which sums over no images)",
        memory_limit,
    )
    lines = [np.arange(-r, r + 1) * h for r, h in zip(radii, grid.spacing, strict=True)]
    squared = kernel.squared(np.meshgrid(*lines, indexing="ij", sparse=True))
    with np.errstate(over="ignore", under="ignore"):  # far tails: log k -> -inf is right
        return np.asarray(kernel.compared.log_profile(squared))


def table_symbol(table: Floats, grid: Grid) -> Floats:
    # In the layout of `scipy.fft.rfftn` for periodic grids, of the cosine transform of type 2 for reflecting ones.
    if grid.boundary == "periodic":
        return np.asarray(fft.rfftn(wrap(table, grid.shape), workers=cores()).real)
    # A table that is even along each axis has the cosine symbol that a grid of twice the length has in Fourier.
    doubled = tuple(2 * n for n in grid.shape)
    full = fft.rfftn(wrap(table, doubled), workers=cores()).real
    return np.ascontiguousarray(full[tuple(slice(n) for n in grid.shape)])


def wrap(table: Floats, shape: tuple[int, ...]) -> Floats:
    result = table
    for axis, n in enumerate(shape):
        radius = result.shape[axis] // 2
        # Shift the centre to a multiple of n, fill up to whole periods, and add the periods.
        lead = -radius % n
        total = math.ceil((lead + result.shape[axis]) / n) * n
        widths = [(0, 0)] * result.ndim
        widths[axis] = (lead, total - lead - result.shape[axis])
        padded = np.pad(result, widths)
        split = padded.reshape(*padded.shape[:axis], total // n, n, *padded.shape[axis + 1 :])
        result = split.sum(axis=axis)
    return result
