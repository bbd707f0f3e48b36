"""Sums over all pairs without a matrix."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats
from nlflow.affinities.regions import BLOCK, Frame, Regions, along_axes, places_in, squared_limit
from nlflow.errors import InputError, check_memory, kind_of, warn_caller
from nlflow.kernels import ExpDotProduct, Kernel, RadialKernel
from nlflow.kernels.expressions import structure
from nlflow.kernels.forms import rate

WIDEST = 16
"""Columns of features up to which there are boxes around nodes, and squared distances are sums of squares."""
_LOG2E = 1 / math.log(2)
# Relative error of a weight from which float32 features, or squared distances out of squares, are not taken any more.
_ROUNDING = {"float32": 4e-6, "float64": 1e-12}
_WEIGHTS = {"float32": 1e-30, "float64": 1e-280}  # ratio of the least and the largest
_SAME = {"float32": 3e-3, "float64": 1e-6}  # of a compiled weight: its roundings, times the steepness of its parts
_RISING = math.log(1e20)  # log k, from which float32 has little room for sums of weights
_NEAR = 0.5  # of k(0): nodes with at least this much of it give a lower bound of the degree
_FARTHEST = {"float32": 1e18, "float64": 1e150}  # over the width: squares stay in range


class PairSums:
    """The sums sum_j k(x_i, y_j) v_j for all i, with O(N (d + D)) memory and O(N M (d + D)) time."""

    # Radial kernels leave out what cannot change a sum by a hundredth of a rounding: nodes are sorted into compact
    # blocks (`nlflow.affinities.regions`), and blocks that are too far from each other are skipped, so narrow kernels
    # cost less than all pairs. With `rtol` what is left out of a row is, whatever the nodes, at most ``rtol / 2`` of
    # its degree. Pairs are left out for both of their nodes or for none, so that the sums are those of a symmetric
    # kernel.
    # - queries, keys : (M, d) and (N, d), one array where they are the same
    # - weights : (N,), quadrature weights of the keys, > 0; kept over the largest, whose logarithm is `log_unit`
    # - bias : (N,), added to the logits of a dot product

    def __init__(
        self, kernel: Kernel, queries: NDArray[Any], keys: NDArray[Any], weights: Floats, bias: Floats | None = None,
        rtol: float = 0.0,
    ) -> None:  # fmt: skip
        if not isinstance(kernel, RadialKernel | ExpDotProduct):
            raise InputError(_no_sums(kernel))
        self._kernel = kernel
        self.weights, self.log_unit = relative_weights(weights, _WEIGHTS["float64"])
        self._lightest = float(self.weights.min())
        self._same, self._rtol = queries is keys, rtol
        self._tables: dict[str, _Tables] = {}
        if isinstance(kernel, RadialKernel):
            width = kernel.scale
            self._unit = kernel.unit
            k = kernel.weight(self._unit)
            (self._form, self._numbers), self._rate = structure(k), rate(k)
            self._steepness = kernel.steepness
            with np.errstate(over="ignore", under="ignore"):
                self._y = keys * keys.dtype.type(self._unit)
                self._x = self._y if self._same else queries * keys.dtype.type(self._unit)
            with np.errstate(invalid="ignore"):
                middle = np.asarray(self._y.max(axis=0) + self._y.min(axis=0), dtype=np.float64) / 2
                sizes = [float(np.abs(a - middle).max()) / (width * self._unit) for a in (self._x, self._y)]
            self._middle, self._size = middle, max(sizes)
            self._bias = np.zeros(len(keys))
            if not self._size <= _FARTHEST["float64"]:
                raise InputError(
                    f"kernel: its width {width:g} is less than 1e-150 of the features' size; use a wider one"
                )
        else:
            factor = _LOG2E * (1 / math.sqrt(keys.shape[1]) if kernel.scale is None else kernel.scale)
            self._form, self._numbers, self._rate, self._steepness = "", [], None, 1.0
            with np.errstate(over="ignore"):
                self._x, self._y = queries * np.float64(factor), keys
                longest = [np.sqrt(np.max(np.sum(np.square(a, dtype=np.float64), axis=1))) for a in (self._x, self._y)]
            self._bias = np.zeros(len(keys)) if bias is None else bias * _LOG2E
            self._size = float(longest[0] * longest[1]) + float(np.abs(self._bias).max())
            if not math.isfinite(self._size):
                raise InputError("affinity: it has logits that overflow; scale the features or the kernel")

    def precision(self, dtype: Any) -> str:
        # float64 instead of float32 for kernels that jump, and where rounding the features (or the logits) to float32
        # would be seen in the weights.
        name = np.dtype(dtype).name
        if name == "float64" or math.isinf(self._steepness) or self._lightest < _WEIGHTS[name]:
            return "float64"
        # Differences of numbers that are float32 already are exact to a rounding of the difference.
        exact = isinstance(self._kernel, RadialKernel) and self._y.dtype == np.float32
        rounding = 0.0 if exact else self._steepness * self._size * float(np.finfo(np.float32).eps) / 2
        suffices = not self._rises and rounding <= _ROUNDING[name] and self._size <= _FARTHEST[name]
        return name if suffices and self._wrong_code(name) is None else "float64"

    @cached_property
    def _rises(self) -> bool:
        """Whether there are weights far above that of a node itself, as a kernel has that grows with the distance."""
        kernel = self._kernel
        if not isinstance(kernel, RadialKernel) or not kernel.grows:
            return False
        with np.errstate(all="ignore"):
            highs = np.maximum(self._x.max(axis=0), self._y.max(axis=0)).astype(np.float64)
            sides = highs - np.minimum(self._x.min(axis=0), self._y.min(axis=0))
            radii = float(np.linalg.norm(sides)) / self._unit * np.geomspace(1e-9, 1, 181)
            return bool(np.max(kernel.log_profile(radii**2)) > _RISING)

    def _wrong_code(self, name: str) -> float | None:
        """Return a distance at which the compiled weights are not those of the kernel; None where they are."""
        kernel = self._kernel
        if not isinstance(kernel, RadialKernel) or self._rate is not None:
            return None  # products and Gaussians have code of their own, the same for all
        known, place = kernel.compared_code, (self._unit, name)
        if place not in known:
            known[place] = kernel.differs(partial(self._weights_of, np.dtype(name)), self._unit, _SAME[name])
        return known[place]

    def _weights_of(self, f: np.dtype[Any], squared: Floats) -> Floats:
        """Return the compiled weights at squared distances, those to one source at 0."""
        from nlflow.backends.numba.pairwise import loop, weigher

        count, numbers = len(squared), np.array(self._numbers, f)
        tables = _Tables.of(
            self._form, np.sqrt(squared)[None].astype(f), np.zeros((1, 1), f), np.ones(1, f), numbers=numbers,
            queries=Regions.without_end(count), sources=Regions.without_end(1),
        )  # fmt: skip
        weighted = np.zeros((len(tables.y), 1), f)
        weighted[0] = 1
        sums, peaks = np.empty((tables.x.shape[1], 1)), np.empty(tables.x.shape[1])
        q, s = tables.queries, tables.sources
        loop("pair_sums", f.name)(
            weigher(tables.form, f.name), False, numbers, BLOCK, tables.x, tables.y, q.lows, q.highs, q.limits, s.lows,
            s.highs, s.limits, weighted, 0, sums, peaks,
        )  # fmt: skip
        return sums[:count, 0]

    def __call__(
        self,
        values: NDArray[Any],
        rows: NDArray[np.intp] | None = None,
        *,
        degrees: bool = True,
        weighted: bool = True,
        memory_limit: float | None = None,
    ) -> tuple[Floats, Floats, Floats]:
        """Return sum_j w_j k_ij v_j (M, D) and sum_j w_j k_ij (M,), both over exp(peaks_i), and peaks (M,)."""
        # - values : (N, D), float32 or float64, which decides the precision
        # - rows : the queries that are asked for
        # - degrees : whether totals are wanted; they are 0 otherwise
        # - weighted : whether values are multiplied by the quadrature weights; without, sums are relative to
        #   exp(peaks - log_unit)
        # - peaks : the logarithm of the largest weight, so that no unit of w over- or underflows; for dot products what
        #   the logits of each row are relative to besides: within 21 of the largest and never far below it
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
        sums, totals, peaks = self._sum(self._tables[name], values, rows, degrees, weighted)
        return sums, totals, peaks + self.log_unit

    @property
    def memory_bytes(self) -> int:
        kept = {id(a): a.nbytes for a in (self._x, self._y, self._bias)}
        return sum(kept.values()) + sum(t.memory_bytes for t in self._tables.values())

    @cached_property
    def _frame(self) -> Frame:
        return Frame(self._y)

    @cached_property
    def _orders(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Orders of queries and keys in which blocks of them are compact."""
        if not self._skips:
            return np.arange(len(self._x)), np.arange(len(self._y))
        keys = along_axes(self._frame.place(self._y))
        return (keys if self._same else along_axes(self._frame.place(self._x))), keys

    @cached_property
    def _places(self) -> NDArray[np.intp]:
        """Where each query is in that order."""
        return places_in(self._orders[0])

    @cached_property
    def _skips(self) -> bool:
        """Whether there may be blocks that do not see each other."""
        if not isinstance(self._kernel, RadialKernel) or len(self._y) <= BLOCK:
            return False
        widest = 2 * self._size * self._kernel.scale * math.sqrt(self._y.shape[1])
        return self._reach(max(self._cut("float64"), self._rtol / (2 * len(self._y)))) < widest

    @property
    def approximates(self) -> bool:
        return bool(self._rtol and self._same and self._skips and math.isinf(self._reach(0.0)))

    def _reach(self, cut: float) -> float:
        """Return the distance beyond which weights are at most `cut`; a dot product has none."""
        return self._kernel.support(cut) if isinstance(self._kernel, RadialKernel) else math.inf

    def _cut(self, name: str) -> float:
        """Return the weight below which all weights of a row together are a hundredth of a rounding of its own."""
        return float(np.finfo(name).eps) / 100 * self._lightest / float(self.weights.sum())

    def _limit(self, cut: float) -> float:
        """Return the squared distance beyond which weights are at most `cut`."""
        return squared_limit(self._reach(cut) * self._unit, self._frame.slack)

    def share_seen(self) -> float:
        if not self._skips:
            return 1.0
        regions = Regions.of(self._frame.place(self._y[self._orders[1]]), self._limit(self._cut(self._y.dtype.name)))
        return regions.share_seen(regions)

    def _prepare(self, name: str) -> _Tables:
        tables = self._exact_tables(np.dtype(name))
        if not self.approximates:
            return tables
        # The nearest alone give a lower bound of each degree, at little cost.
        near = np.full(len(tables.sources.limits), self._limit(_NEAR))
        few = replace(
            tables, queries=replace(tables.queries, limits=near), sources=replace(tables.sources, limits=near)
        )
        degrees = self._sum(few, np.empty((len(self._y), 0), name), None, True, True)[1][self._orders[1]]
        least = np.minimum.reduceat(degrees, np.arange(0, len(degrees), BLOCK))
        cuts = 0.5 * self._rtol * least / float(self.weights.sum())
        # Down to powers of two, of which there are few.
        cuts, which = np.unique(np.exp2(np.floor(np.log2(np.minimum(cuts, _NEAR)))), return_inverse=True)
        limits = np.minimum(tables.sources.limits, np.array([self._limit(cut) for cut in cuts])[which])
        own = replace(tables.sources, limits=limits)
        return replace(tables, queries=own, sources=own)

    def _exact_tables(self, f: np.dtype[Any]) -> _Tables:
        kernel, (first, last) = self._kernel, self._orders
        y, weights = self._y[last], self.weights[last].astype(f)
        x = y if self._x is self._y else self._x[first]
        if self._skips:
            limit = self._limit(self._cut(f.name))
            sources = Regions.of(self._frame.place(y), limit)
            queries = sources if self._same else Regions.of(self._frame.place(x), limit)
        else:
            queries, sources = Regions.without_end(len(x)), Regions.without_end(len(y))
        regions = {"queries": queries, "sources": sources}
        if not isinstance(kernel, RadialKernel):
            return _Tables.of_products(f, x, y, self._bias, weights, **regions)
        if f != y.dtype and f == np.float32:
            x, y = x - self._middle, y - self._middle  # where float32 has the most digits for differences
        # By |x|^2 + |y|^2 - 2 x.y half as much is to be done as by differences, but not where the squares are so large
        # that their difference has lost its digits, and for Gaussians alone.
        lost = y.shape[1] * self._size**2 * float(np.finfo(f).eps)
        if self._rate is not None and y.shape[1] > WIDEST and lost <= _ROUNDING[f.name]:
            middle, steep = y.mean(axis=0), -2 * self._rate
            x, y = x - middle, y - middle
            tables = _Tables.of_products(f, steep * x, y, -0.5 * steep * np.sum(y * y, axis=1), weights, **regions)
            return replace(tables, offset=np.asarray(-0.5 * steep * np.sum(x * x, axis=1, dtype=np.float64)))
        wrong = self._wrong_code(f.name)
        if wrong is not None:
            raise InputError(
                f"kernel: the compiled sums of {type(kernel).__name__} are wrong at the distance {wrong:.4g}; use "
                "method='dense'"
            )
        return _Tables.of(
            self._form, x.T.astype(f), y.astype(f), weights, numbers=np.array(self._numbers, f), **regions
        )

    def _sum(
        self, tables: _Tables, values: NDArray[Any], rows: NDArray[np.intp] | None, degrees: bool, by_weight: bool
    ) -> tuple[Floats, Floats, Floats]:
        from nlflow.backends.numba.pairwise import DOT_PRODUCT, group, loop, weigher

        f = tables.x.dtype
        # The weights are one more channel, the last: their sum is the degree.
        nodes, channels = values.shape
        weighted = np.zeros((len(tables.y), channels + degrees), f)
        own = weighted[:nodes]
        factors = tables.weights[:, None] if by_weight else f.type(1)
        np.multiply(values[self._orders[1]], factors, out=own[:, :channels], casting="same_kind")
        own[:, channels:] = tables.weights[:, None]
        x, offset, count, queries, sources = tables.x, tables.offset, len(self._x), tables.queries, tables.sources
        if rows is not None:
            places, count = self._places[rows], len(rows)
            x, offset = _filled(x[:, places], 1, group(f)), None if offset is None else offset[places]
            seen = self._frame.place(self._x[rows]) if self._skips else np.empty((count, 0))
            limits = np.maximum.reduceat(queries.limits[places // BLOCK], np.arange(0, count, BLOCK))
            queries = Regions.of(seen, limits)
        sums, peaks = np.empty((x.shape[1], weighted.shape[1])), np.empty(x.shape[1])
        loop("pair_sums", f.name)(
            weigher(tables.form, f.name), tables.form == DOT_PRODUCT, tables.numbers, BLOCK, x, tables.y,
            queries.lows, queries.highs, queries.limits, sources.lows, sources.highs, sources.limits, weighted,
            int(degrees), sums, peaks,
        )  # fmt: skip
        sums, peaks = sums[:count], peaks[:count]
        if offset is not None:  # squared distances: with |x|^2 there is no weight above 1, and none to keep apart
            with np.errstate(under="ignore"):
                sums *= np.exp2(peaks + offset)[:, None]
            peaks = np.zeros(count)
        if self._skips and rows is None:
            sums = sums[self._places]
        totals = sums[:, channels] if degrees else np.zeros(count)
        return sums[:, :channels], totals, peaks * math.log(2)


@dataclass(frozen=True)
class _Tables:
    """What the loop takes, in one precision: features of queries and of keys in order, and which blocks meet."""

    form: str
    """Of the weights, see `nlflow.backends.numba.pairwise`."""
    x: NDArray[Any]
    """(d, M and a few more)"""
    y: NDArray[Any]
    """(N and a few more, d)"""
    weights: NDArray[Any]
    numbers: NDArray[Any]
    """Of the kernel's formula."""
    queries: Regions
    sources: Regions
    offset: Floats | None = None
    """Added to the logits of each query afterwards, (M,)."""

    @classmethod
    def of(cls, form: str, x: NDArray[Any], y: NDArray[Any], weights: NDArray[Any], **others: Any) -> _Tables:
        from nlflow.backends.numba.pairwise import SOURCES, group

        return cls(form, _filled(x, 1, group(x.dtype)), _filled(y, 0, SOURCES), weights, **others)

    @classmethod
    def of_products(
        cls, f: np.dtype[Any], x: NDArray[Any], y: NDArray[Any], bias: NDArray[Any], weights: NDArray[Any],
        **regions: Regions,
    ) -> _Tables:  # fmt: skip
        """Return those of logits x.y + bias; the bias is one more coordinate, where there is one."""
        from nlflow.backends.numba.pairwise import DOT_PRODUCT

        more = 1 if np.any(bias) else 0
        planar, rows = np.ones((x.shape[1] + more, len(x)), f), np.empty((len(y), y.shape[1] + more), f)
        planar[: x.shape[1]], rows[:, : y.shape[1]] = x.T, y
        rows[:, y.shape[1] :] = bias[:, None]
        return cls.of(DOT_PRODUCT, planar, rows, weights, numbers=np.zeros(1, f), **regions)

    @property
    def memory_bytes(self) -> int:
        offset = 0 if self.offset is None else self.offset.nbytes
        regions = {id(r): r.memory_bytes for r in (self.queries, self.sources)}
        return offset + sum(a.nbytes for a in (self.x, self.y, self.weights)) + sum(regions.values())


def not_compiled(kernel: Kernel) -> str | None:
    if isinstance(kernel, ExpDotProduct):
        return None
    if not isinstance(kernel, RadialKernel):
        return _no_sums(kernel)
    try:
        kernel.weight(kernel.unit)
    except InputError as error:
        return str(error)
    return None


def _no_sums(kernel: Kernel) -> str:
    return f"kernel: got {kind_of(kernel)}, expected a RadialKernel or ExpDotProduct for sums without a matrix"


def _filled(a: NDArray[Any], axis: int, multiple: int) -> NDArray[Any]:
    """Repeat the last entry until there is a multiple of entries: that changes neither boxes nor largest logits."""
    more = [(0, 0), (0, 0)]
    more[axis] = (0, -a.shape[axis] % multiple)
    return np.ascontiguousarray(np.pad(a, more, "edge"))


def relative_weights(weights: Floats, least: float) -> tuple[Floats, float]:
    # Raises `InputError` when some are less than the share `least` of the largest, beside which sums would lose them.
    largest = float(weights.max())
    relative = weights / largest
    if not relative.min() >= least:
        raise InputError(f"weights: got some that are less than {least:g} of the largest; leave such nodes out")
    return relative, math.log(largest)


def warn_isolated(totals: NDArray[Any], own: NDArray[Any], kernel: Kernel | None) -> None:
    # For radial kernels, of which k(x, x) is 1. Two nodes at one place see each other.
    if isinstance(kernel, ExpDotProduct) or len(totals) == 1:
        return
    alone = int(np.count_nonzero(totals <= own))
    if alone:
        warn_caller(
            f"affinity: {alone} of {len(totals)} nodes see no other node, every other weight being below rounding; "
            "they keep their value. Use a wider kernel if that is not meant",
        )
