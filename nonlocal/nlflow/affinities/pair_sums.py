"""Sums of a kernel over all pairs of nodes without a matrix: which loop, in which precision, in which order."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.affinities.blas import over_tiles
from nlflow.errors import InputError, NlflowWarning, check_memory
from nlflow.kernel import DotProduct, Gaussian, Kernel, Laplace, RadialKernel, TopHat

__all__ = ["BLOCK", "WIDEST", "PairSums", "along_tree", "places_in", "warn_isolated"]

Floats = NDArray[np.float64]

WIDEST = 16
"""Columns of features, or of the signal, up to which the compiled loop is faster than matrix products of tiles."""
_LOG2E = 1 / math.log(2)
# Relative error of a weight from which float32 features, or squared distances out of squares, are not taken any more.
_ROUNDING = {"float32": 4e-6, "float64": 1e-12}
_WEIGHTS = {"float32": 1e-30, "float64": 1e-280}  # ratio of the least and the largest
BLOCK = 1024
"""Nodes whose features and values are in the first cache together, when there are few channels."""
_QUERIES, _SOURCES = 256, 1024  # of a matrix product; the table stays in the second cache
_FARTHEST = {"float32": 1e18, "float64": 1e150}  # over the width: squares stay in range


class PairSums:
    """The sums sum_j k(x_i, y_j) v_j for all i, with O(N (d + D)) memory and O(N M (d + D)) time.

    Radial kernels leave out what cannot change a sum by a hundredth of a rounding: nodes are sorted along a tree
    (`scipy.spatial.cKDTree`), and blocks of them that are too far from each other are skipped, so narrow kernels cost
    less than all pairs.

    Parameters
    ----------
    kernel : Gaussian, Laplace, TopHat or DotProduct
    queries : array of shape (M, d)
    keys : array of shape (N, d)
        The same array as `queries` where they are the same.
    weights : array of shape (N,)
        Quadrature weights of the keys, > 0.
    bias : array of shape (N,), optional
        Added to the logits of a dot product.

    Raises
    ------
    InputError
        For another kernel, and for features whose extent over the kernel's width, whose logits or whose weights no
        float holds.
    """

    def __init__(
        self, kernel: Kernel, queries: NDArray[Any], keys: NDArray[Any], weights: Floats, bias: Floats | None = None
    ) -> None:
        if type(kernel) not in _CODES:
            known = ", ".join(k.__name__ for k in _CODES)
            raise InputError(f"kernel: got {type(kernel).__name__}, expected one of {known} for sums without a matrix")
        self._kernel = kernel
        # Over the largest: sums are multiplied with it in the end.
        self._unit_weight = float(weights.max())
        self._weights = weights / self._unit_weight
        self._lightest = float(self._weights.min())
        if not self._lightest >= _WEIGHTS["float64"]:
            raise InputError("weights: got some that are less than 1e-280 of the largest; leave such nodes out")
        self._same = queries is keys
        self._tables: dict[str, _Tables] = {}
        if isinstance(kernel, RadialKernel):
            width = _width(kernel)
            # By a power of two, which is exact: squares stay in range whatever the units.
            self._unit = 2.0 ** -math.frexp(width)[1]
            self._width = width * self._unit
            with np.errstate(over="ignore", under="ignore"):
                self._y = keys * keys.dtype.type(self._unit)
                self._x = self._y if self._same else queries * keys.dtype.type(self._unit)
            with np.errstate(invalid="ignore"):
                middle = np.asarray(self._y.max(axis=0) + self._y.min(axis=0), dtype=np.float64) / 2
                sizes = [float(np.abs(a - middle).max()) / self._width for a in (self._x, self._y)]
            self._middle, self._size = middle, max(sizes)
            self._bias = np.zeros(len(keys))
            if not self._size <= _FARTHEST["float64"]:
                raise InputError(
                    f"kernel: its width {width:g} is less than 1e-150 of the features' size; use a wider one"
                )
        else:
            scale = getattr(kernel, "scale", None)
            factor = _LOG2E * (1 / math.sqrt(keys.shape[1]) if scale is None else scale)
            self._width = 1.0
            with np.errstate(over="ignore"):
                self._x, self._y = queries * np.float64(factor), keys
                longest = [np.sqrt(np.max(np.sum(np.square(a, dtype=np.float64), axis=1))) for a in (self._x, self._y)]
            self._bias = np.zeros(len(keys)) if bias is None else bias * _LOG2E
            self._size = float(longest[0] * longest[1]) + float(np.abs(self._bias).max())
            if not math.isfinite(self._size):
                raise InputError("affinity: it has logits that overflow; scale the features or the kernel")

    def precision(self, dtype: Any) -> str:
        """Return the float type in which sums for signals of `dtype` are computed.

        float64 instead of float32 for top hats, which jump, and where rounding the features (or the logits) to float32
        would be seen in the weights.
        """
        name = np.dtype(dtype).name
        if name == "float64" or isinstance(self._kernel, TopHat) or self._lightest < _WEIGHTS[name]:
            return "float64"
        # Differences of numbers that are float32 already are exact to a rounding of the difference.
        exact = isinstance(self._kernel, RadialKernel) and self._y.dtype == np.float32
        steepness = 5.0 if isinstance(self._kernel, RadialKernel) else 1.0  # of the logarithm of a weight that counts
        rounding = 0.0 if exact else steepness * self._size * float(np.finfo(np.float32).eps) / 2
        return name if rounding <= _ROUNDING[name] and self._size <= _FARTHEST[name] else "float64"

    def __call__(
        self,
        values: NDArray[Any],
        rows: NDArray[np.intp] | None = None,
        *,
        degrees: bool = True,
        memory_limit: float | None = None,
    ) -> tuple[Floats, Floats, Floats]:
        """Return the sums.

        Parameters
        ----------
        values : array of shape (N, D)
            float32 or float64, which decides the precision.
        rows : array of int, optional
            The queries that are asked for; all by default.
        degrees : bool
            Whether the sums of the weights themselves are wanted; they are 0 otherwise.
        memory_limit : float, optional
            Bytes.

        Returns
        -------
        sums : array of shape (M, D)
            sum_j w_j k(x_i, y_j) v_j over exp(peaks_i).
        totals : array of shape (M,)
            sum_j w_j k(x_i, y_j) over exp(peaks_i).
        peaks : array of shape (M,)
            The largest logit of each row for dot products, 0 for radial kernels.
        """
        name = self.precision(values.dtype)
        count, channels = len(self._x) if rows is None else len(rows), values.shape[1]
        d, itemsize = self._y.shape[1], np.dtype(name).itemsize
        check_memory(
            f"sums over {len(self._y)} nodes with {channels} channels",
            len(self._y) * (3 * d + 2 * channels + 3) * itemsize + count * (channels + 2) * 16,
            "use fewer nodes or channels, or raise memory_limit",
            memory_limit,
        )
        if name not in self._tables:
            self._tables[name] = self._prepare(name)
        tables = self._tables[name]
        compute = self._by_loop if max(d, channels) <= WIDEST else self._by_products
        sums, totals, peaks = compute(tables, values, rows, degrees)
        return sums * self._unit_weight, totals * self._unit_weight, peaks

    @property
    def memory_bytes(self) -> int:
        """Bytes that are kept."""
        kept = {id(a): a.nbytes for a in (self._x, self._y, self._bias)}
        return sum(kept.values()) + sum(t.memory_bytes for t in self._tables.values())

    @cached_property
    def order(self) -> NDArray[np.intp]:
        """Order of the keys in which near ones are near each other in number as well."""
        if isinstance(self._kernel, DotProduct) or self._y.shape[1] > WIDEST or len(self._y) <= BLOCK:
            return np.arange(len(self._y))
        return along_tree(self._y)

    @cached_property
    def _places(self) -> NDArray[np.intp]:
        """Where each node is in that order."""
        return places_in(self.order)

    @property
    def _sorted(self) -> bool:
        """Whether the queries are in that order too; then they are compact, and blocks can be skipped."""
        return self._same and isinstance(self._kernel, RadialKernel)

    def _prepare(self, name: str) -> _Tables:
        order, f = self.order, np.dtype(name)
        x, y = self._x, self._y[order]
        if isinstance(self._kernel, RadialKernel) and f != y.dtype and f == np.float32:
            x, y = x - self._middle, y - self._middle  # where float32 has the most digits for differences
        starts = np.arange(0, len(y), BLOCK)
        lows, highs = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
        kernel = self._kernel
        limit = np.inf
        if isinstance(kernel, RadialKernel):
            # Whatever is farther, all of it together, is below a hundredth of a rounding of the node's own weight.
            cut = float(np.finfo(f).eps) / 100 * self._lightest / float(self._weights.sum())
            limit = (kernel.support(cut) * self._unit) ** 2 * (1 + 1e-6)
        scales: dict[type, float] = {
            Gaussian: -0.5 * _LOG2E / self._width**2,
            Laplace: -_LOG2E / self._width,
            TopHat: (self._width * (1 + 1e-12)) ** 2,
            DotProduct: 0.0,
        }
        weights = self._weights[order].astype(f)
        x = y if self._sorted else x
        code, scale = _CODES[type(kernel)], f.type(scales[type(kernel)])
        return _Tables(
            code, scale, float(limit), np.ascontiguousarray(x.T, f), _planar(y, f),
            _planar(self._bias[order][:, None], f)[0], lows.astype(np.float64), highs.astype(np.float64), weights,
        )  # fmt: skip

    def _by_loop(
        self, tables: _Tables, values: NDArray[Any], rows: NDArray[np.intp] | None, degrees: bool
    ) -> tuple[Floats, Floats, Floats]:
        from nlflow._numba.pairwise import loop

        f = tables.x.dtype
        # The weights are one more channel, the last: their sum is the degree.
        channels = values.shape[1]
        weighted = _rows(channels + degrees, len(values), f)
        own = weighted[:, : len(values)]
        own[:channels] = values[self.order].T
        own[:channels] *= tables.weights
        own[channels:] = tables.weights
        x = self._chosen(tables, rows)
        sums, peaks = np.empty((x.shape[1], len(weighted))), np.empty(x.shape[1])
        loop("pair_sums", f.name)(
            tables.code, tables.scale, min(tables.limit, 1e300), BLOCK, len(values), x, tables.y, tables.bias,
            tables.lows, tables.highs, weighted, sums, peaks,
        )  # fmt: skip
        sums = self._back(sums, rows)
        totals = sums[:, channels] if degrees else np.zeros(len(sums))
        return sums[:, :channels], totals, peaks * math.log(2)

    def _by_products(
        self, tables: _Tables, values: NDArray[Any], rows: NDArray[np.intp] | None, degrees: bool
    ) -> tuple[Floats, Floats, Floats]:
        """Sum by tiles, whose weights times values, and whose logits, are matrix products."""
        from nlflow._numba.pairwise import loop

        f = tables.x.dtype
        radial = isinstance(self._kernel, RadialKernel)
        # Only a Gaussian bears squared distances as |x|^2 + |y|^2 - 2 x.y: others have a kink or a jump.
        # And not where these are so large that their difference has lost its digits.
        lost = len(tables.y) * self._size**2 * float(np.finfo(f).eps)
        expand = isinstance(self._kernel, Gaussian) and len(tables.y) > WIDEST and lost <= _ROUNDING[f.name]
        x, y, bias = self._chosen(tables, rows), tables.y[:, : len(values)], tables.bias[: len(values)]
        if expand:
            middle = y.mean(axis=1, keepdims=True)  # about which it cancels least
            x, y = x - middle, y - middle
            bias = np.sum(y * y, axis=0)
        weighted = values[self.order].astype(f) * tables.weights[:, None]
        count, factor = x.shape[1], f.type(-2 if expand else 1)
        sums, totals = np.zeros((count, values.shape[1])), np.zeros(count)
        peaks, shrink = np.full(count, 0.0 if radial else -1e30), np.empty(count)
        squares, weigh = loop("square_table", f.name), loop("weigh_table", f.name)
        biased = bool(np.any(bias))
        masses = tables.weights[None, :] if degrees else np.empty((0, len(values)), f)

        def tile(query: slice) -> None:
            own = np.ascontiguousarray(x[:, query])
            row_wise = own.T * factor
            square = np.sum(own * own, axis=0)[:, None]
            # One table for all products of the tile: fresh memory costs as much as the exponentials.
            room = _rows(1, own.shape[1] * _SOURCES, f)[0]
            for j in range(0, y.shape[1], _SOURCES):
                key = slice(j, min(j + _SOURCES, y.shape[1]))
                size = own.shape[1] * (key.stop - j)
                table = room[:size].reshape(own.shape[1], -1)
                if radial and not expand:
                    squares(own, tables.y, j, table)
                else:
                    np.matmul(row_wise, y[:, key], out=table)
                    if expand or biased:
                        table += bias[key]
                    if expand:
                        table += square
                weigh(
                    tables.code, tables.scale, BLOCK, table, np.ascontiguousarray(masses[:, key]), totals[query],
                    peaks[query], shrink[query],
                )  # fmt: skip
                sums[query] *= shrink[query, None]
                sums[query] += table @ weighted[key]

        over_tiles(tile, count, _QUERIES)
        return self._back(sums, rows), self._back(totals, rows), peaks * math.log(2)

    def _chosen(self, tables: _Tables, rows: NDArray[np.intp] | None) -> NDArray[Any]:
        """Return the queries that are asked for, (d, M)."""
        if rows is None:
            return tables.x
        return np.ascontiguousarray(tables.x[:, self._places[rows] if self._sorted else rows])

    def _back(self, sums: Floats, rows: NDArray[np.intp] | None) -> Floats:
        """Return sums in the order of the nodes."""
        return sums[self._places] if self._sorted and rows is None else sums


@dataclass(frozen=True)
class _Tables:
    """What the loops take, in one precision: planar features of queries and of keys in order, boxes around blocks."""

    code: int
    scale: Any
    limit: float
    x: NDArray[Any]
    y: NDArray[Any]
    bias: NDArray[Any]
    lows: Floats
    highs: Floats
    weights: NDArray[Any]

    @property
    def memory_bytes(self) -> int:
        return sum(a.nbytes for a in (self.x, self.y, self.bias, self.lows, self.highs, self.weights))


def along_tree(points: NDArray[Any]) -> NDArray[np.intp]:
    """Return an order of points (N, d) in which near ones are near each other in number as well; O(N log N)."""
    from scipy.spatial import cKDTree

    return np.asarray(cKDTree(points, leafsize=64, compact_nodes=False).indices)


def places_in(order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return where each node is in an order: the inverse permutation."""
    places = np.empty_like(order)
    places[order] = np.arange(len(order))
    return places


def _width(kernel: RadialKernel) -> float:
    if isinstance(kernel, TopHat):
        return kernel.radius
    if isinstance(kernel, Gaussian | Laplace):
        return kernel.width
    raise InputError(f"kernel: got {type(kernel).__name__}, which has no width")  # pragma: no cover - not in _CODES


def _rows(count: int, length: int, dtype: Any) -> NDArray[Any]:
    """Return an array of rows of at least `length` whose starts suit the vectors that read them, with 0 at their ends.

    At multiples of 64 bytes, since loads across two lines of the cache take twice as long, and not a multiple of 4096
    bytes apart, which the processor takes for the same place.
    """
    step = 64 // np.dtype(dtype).itemsize
    padded = -(-length // step) * step
    padded += step * ((5 - padded // step) % 8)
    room = np.zeros(count * padded + step, dtype)
    first = (-room.ctypes.data % 64) // room.itemsize
    return room[first : first + count * padded].reshape(count, padded)


def _planar(features: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Return features (N, d), or values, as rows (d, N and more)."""
    result = _rows(features.shape[1], len(features), dtype)
    result[:, : len(features)] = features.T
    return result


def warn_isolated(totals: NDArray[Any], own: NDArray[Any], kernel: Kernel | None) -> None:
    """Warn when nodes see none but themselves: `totals` are degrees, `own` (with its rounding) a node's own part of it.

    For radial kernels, of which k(x, x) is 1. Two nodes at one place see each other.
    """
    if isinstance(kernel, DotProduct) or len(totals) == 1:
        return
    alone = int(np.count_nonzero(totals <= own))
    if alone:
        warnings.warn(
            f"affinity: {alone} of {len(totals)} nodes see no other node, every other weight being below rounding; "
            "they keep their value. Use a wider kernel if that is not meant",
            NlflowWarning,
            stacklevel=2,
        )


_CODES: dict[type, int] = {Gaussian: 0, Laplace: 1, TopHat: 2, DotProduct: 3}
