"""Metrics between points, and which points are nearest."""

from __future__ import annotations

import importlib.util
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats, power_of_two
from nlflow.backends.threads import cores
from nlflow.errors import InputError, check_choice, not_installed

METRICS = ("euclidean", "cosine", "correlation", "jaccard", "precomputed")
SEARCHES = ("auto", "tree", "brute", "descent")
TREE_COLUMNS = 64
"""Of sparse points: up to so many these are made dense."""
_FLAT = 10.0  # effective dimensions up to which a tree skips most points
_MANY = 20_000  # points from which on all pairs take minutes
_SAMPLE = 1000  # points that tell the effective dimension
_FEW = 64  # queries, for which threads take longer to start
_FAR = 1e150  # in the unit of the points: squares of distances still hold
_PAIRS = 2**16  # of sparse points at a time
BLOCK = 2**18
"""Products at a time, and at least those of one point."""
_MORE = 8  # candidates, whose order products may not know to the last digit
_CANCELS = 1 / 64  # of squared lengths: squared distances below it come from differences
_CHUNK = 32  # numbers, of which the least is found first
_EPS = float(np.finfo(np.float64).eps)
_ROUNDING = 1e-8  # beside the largest distance, up to which a matrix of them is symmetric

Found = tuple[Floats, NDArray[Any]]
"""Distances to the nearest points, nearest first, and their numbers, both (M, count)."""


class Rows(NamedTuple):
    """Rows (N, d), dense or sparse, their squared lengths, and the means not yet subtracted from sparse ones."""

    x: Any
    squares: Floats
    means: Floats | None


class Space:
    """N points, as rows whose squared Euclidean distances give one of `METRICS`."""

    # With rows a and b made for the metric and s = |a - b|^2: ``euclidean`` sqrt(s); ``cosine`` 1 - cos = s / 2 of rows
    # of length 1; ``correlation`` the same of rows less their means; ``jaccard`` 1 - (common) / (all) = 2 s / (|a|^2 +
    # |b|^2 + s) of the sets of columns that are not 0.

    def __init__(self, points: Any, metric: str = "euclidean") -> None:
        self.metric, self.unit, self._middle = metric, 1.0, (0.0, 0.0)
        self._sparse = hasattr(points, "toarray")
        if metric == "euclidean":
            if not self._sparse:
                self._middle = (points.min(axis=0) / 2, points.max(axis=0) / 2)  # their sum could overflow
            moved = points if self._sparse else points - self._middle[0] - self._middle[1]
            # Squares of distances could overflow, too, and be 0.
            self.unit = power_of_two(float(np.abs(moved.data if self._sparse else moved).max(initial=0.0)))
        self.rows = self._made("points", points)

    @property
    def size(self) -> int:
        return int(self.rows.x.shape[0])

    def _made(self, name: str, points: Any) -> Rows:
        """Return points as rows for the metric."""
        x = points if self._sparse else np.asarray(points, np.float64)
        if self.metric == "jaccard":
            sets = _not_zero(x)
            if name == "points" and _says_nothing(x, sets):
                raise InputError(
                    f"{name}: got rows that are not 0 in the same columns, all of them, and metric='jaccard' sees "
                    "these columns alone; give points > threshold, or take metric='cosine'"
                )
            x = sets
        elif self.metric == "euclidean":
            # What lies so far has no digits of distances to lose.
            x = (
                x / self.unit
                if self._sparse
                else np.clip((x - self._middle[0] - self._middle[1]) / self.unit, -_FAR, _FAR)
            )
        else:
            return _of_length_one(name, x, self.metric)
        return Rows(x, _squares(x), None)

    def others(self, queries: Any) -> Rows:
        from scipy.sparse import csr_array

        if self._sparse:
            return self._made("X", csr_array(queries, dtype=np.float64))
        return self._made("X", queries.toarray() if hasattr(queries, "toarray") else queries)

    def _distances(self, squared: Any, here: Any, there: Any) -> Any:
        """Return distances of the metric from squared ones of rows of these squared lengths."""
        if self.metric == "euclidean":
            return np.sqrt(squared)
        if self.metric == "jaccard":
            total = here + there + squared  # twice the union; two empty sets are alike
            return 2 * squared / np.where(total > 0, total, 1)
        return squared / 2

    # ---- which are nearest

    def nearest(self, count: int, search: str) -> Found:
        rows, more = self.rows, count + 1
        if search == "descent":
            distances, found = self._by_descent(more)
        else:
            distances, found = self._of(rows, more, search)
        # A point is its own nearest, though not the first, or none of these, where others lie at its place.
        own = found == np.arange(len(found))[:, None]
        own[~own.any(axis=1), -1] = True
        return distances[~own].reshape(-1, count), found[~own].reshape(-1, count)

    def nearest_of(self, queries: Any, count: int, search: str) -> Found:
        return self._of(self.others(queries), count, "brute" if self._sparse or search != "tree" else "tree")

    def _of(self, rows: Rows, count: int, search: str) -> Found:
        if search == "brute":
            return self._by_products(rows, count)
        workers = cores() if rows.x.shape[0] > _FEW else 1
        found = self._tree.query(rows.x, count, workers=workers)
        distances, ends = (np.asarray(part).reshape(rows.x.shape[0], count) for part in found)
        return (distances if self.metric == "euclidean" else distances**2 / 2), ends

    @cached_property
    def _tree(self) -> Any:
        from scipy.spatial import cKDTree

        return cKDTree(self.rows.x)

    def _by_descent(self, count: int) -> Found:
        rows = self.rows
        metric = "jaccard" if self.metric == "jaccard" else "euclidean" if rows.means is None else "correlation"
        ends = np.asarray(_descent()(rows.x, n_neighbors=count, metric=metric, random_state=0).neighbor_graph[0])
        here = np.repeat(np.arange(len(ends)), count)
        squared = _differences(rows, here, rows, ends.ravel())  # its own are in single precision
        distances = self._distances(squared, rows.squares[here], rows.squares[ends.ravel()]).reshape(ends.shape)
        return distances, ends

    def _by_products(self, queries: Rows, count: int) -> Found:
        """Return the nearest by products of blocks; distances are from differences where products lose digits."""
        rows, size = self.rows, self.size
        ends = np.empty((queries.x.shape[0], count), np.intp)
        distances, more = np.empty(ends.shape), min(size, count + _MORE)
        turned, step = rows.x.T.tocsr() if self._sparse else rows.x.T, max(1, BLOCK // size)
        for start in range(0, len(ends), step):
            part = slice(start, start + step)
            block = Rows(queries.x[part], queries.squares[part], None if queries.means is None else queries.means[part])
            squared = self._products(block, turned)
            order = (
                self._distances(squared, block.squares[:, None], rows.squares) if self.metric == "jaccard" else squared
            )
            few = _smallest(order, more)
            here = np.repeat(np.arange(len(few)), more)
            near, there = np.take_along_axis(squared, few, axis=1).ravel(), few.ravel()
            sizes = block.squares[here] + rows.squares[there]
            close = np.flatnonzero(near < _CANCELS * sizes)
            near[close] = _differences(block, here[close], rows, there[close])
            apart = self._distances(near, block.squares[here], rows.squares[there]).reshape(few.shape)
            best = np.argsort(apart, axis=1, kind="stable")[:, :count]
            ends[part] = np.take_along_axis(few, best, axis=1)
            distances[part] = np.take_along_axis(apart, best, axis=1)
        return distances, ends

    def _products(self, block: Rows, turned: Any) -> Floats:
        """Return squared distances of a block of rows to all points, (m, N), up to the rounding of squared lengths."""
        product = block.x @ turned
        squared: Floats = product.toarray() if self._sparse else product
        squared *= -2
        squared += self.rows.squares
        squared += block.squares[:, None]
        if block.means is not None and self.rows.means is not None:
            squared += 2 * turned.shape[0] * np.outer(block.means, self.rows.means)
        return np.maximum(squared, 0, out=squared)


class Table:
    """Distances between N points, (N, N), dense, or sparse with those that are known."""

    unit = 1.0

    def __init__(self, distances: Any) -> None:
        self._sparse = hasattr(distances, "toarray")
        if distances.ndim != 2 or distances.shape[0] != distances.shape[1]:
            raise InputError(
                f"points: got shape {distances.shape} with metric='precomputed', expected a square matrix of distances"
            )
        _check_distances("points", distances)
        own = distances.diagonal()
        if own.any():
            raise InputError(
                f"points: got distances from {int(np.count_nonzero(own))} points to themselves (the first is "
                f"{int(np.flatnonzero(own)[0])}), expected 0 on the diagonal; weights are affinity='precomputed'"
            )
        back = distances.T
        if self._sparse:  # what is stored in one direction alone is known all the same
            both = distances.multiply(back != 0) - back.multiply(distances != 0)
            apart = float(abs(both).max()) if both.nnz else 0.0
        else:
            apart = float(np.abs(distances - back).max())
        if apart > _ROUNDING * float(distances.max()):
            raise InputError(
                f"points: got distances that differ by up to {apart:.3g} between both directions, expected a symmetric "
                "matrix; take the mean of both, (D + D.T) / 2"
            )
        self._given = distances

    @property
    def size(self) -> int:
        return int(self._given.shape[0])

    def nearest(self, count: int, search: str) -> Found:
        del search
        if self._sparse:
            return _of_stored(self._given, count, own=False)
        given, distances, ends = self._given, np.empty((self.size, count)), np.empty((self.size, count), np.intp)
        step = max(1, BLOCK // self.size)
        for start in range(0, self.size, step):
            block = np.array(given[start : start + step], np.float64)
            own = np.arange(len(block))
            block[own, start + own] = np.inf
            distances[start : start + step], ends[start : start + step] = _sorted(block, count)
        return distances, ends

    def nearest_of(self, queries: Any, count: int, search: str) -> Found:
        del search
        if queries.shape[1] != self.size:
            raise InputError(
                f"X: got shape {queries.shape}, expected rows of distances to the points, (M, {self.size})"
            )
        _check_distances("X", queries)
        if hasattr(queries, "toarray"):
            from scipy.sparse import csr_array

            return _of_stored(csr_array(queries, dtype=np.float64), count, own=True)
        return _sorted(np.asarray(queries, np.float64), count)


def check_metric(metric: str, search: str, *, sparse: bool = False, columns: int = 1) -> None:
    check_choice("metric", metric, METRICS)
    check_choice("search", search, SEARCHES)
    words = "" if metric in ("euclidean", "cosine", "correlation") else f"metric={metric!r}"
    if not words and sparse and columns > TREE_COLUMNS:
        words = f"{columns} columns of sparse points"
    if search == "tree" and words:
        raise InputError(f"search: got 'tree' for {words}, expected 'auto' or 'brute': no tree helps there")
    if search == "descent" and metric == "precomputed":
        raise InputError("search: got 'descent' with metric='precomputed', expected 'auto': the distances are there")


def chosen_search(space: Space | Table, search: str) -> tuple[str, str]:
    if isinstance(space, Table):
        return "brute", "distances were given"
    if search != "auto":
        return search, f"neighbours by {_NAMES[search]}, as asked for"
    sparse, size = hasattr(space.rows.x, "toarray"), space.size
    spread = 0.0 if sparse or space.metric == "jaccard" else effective_dimension(space.rows.x)
    if not sparse and space.metric != "jaccard" and spread <= _FLAT:
        return "tree", f"neighbours by a tree, in about {spread:.1f} effective dimensions"
    kind = "rows are sparse" if sparse else "rows are sets" if space.metric == "jaccard" else (
        f"about {spread:.0f} effective dimensions"
    )  # fmt: skip
    if size > _MANY and importlib.util.find_spec("pynndescent") is not None:
        return "descent", f"most of the nearest neighbours by descent, for {size} points ({kind}); 'brute' finds all"
    return "brute", f"neighbours by products of all pairs ({kind})"


_NAMES = {"tree": "a tree", "brute": "products of all pairs", "descent": "descent, which finds most of them"}


def effective_dimension(x: Floats) -> float:
    few = x[np.linspace(0, len(x) - 1, min(_SAMPLE, len(x))).astype(np.intp)]
    few = few - few.mean(axis=0)
    product = few @ few.T if len(few) < few.shape[1] else few.T @ few
    total = float(np.trace(product))
    return total**2 / float((product**2).sum()) if total > 0 else 0.0


def _not_zero(x: Any) -> Any:
    if not hasattr(x, "toarray"):
        return (x != 0).astype(np.float64)
    result = x.copy()
    result.sum_duplicates()
    result.eliminate_zeros()
    result.data = np.ones(result.nnz)
    return result


def _says_nothing(x: Any, sets: Any) -> bool:
    """Tell whether rows of numbers are the same set, in whose place the numbers were meant."""
    there = np.asarray(sets.sum(axis=0)).ravel()
    if not np.isin(there, (0, sets.shape[0])).all():
        return False
    return not np.isin(x.data if hasattr(x, "toarray") else x, (0, 1)).all()


def _of_length_one(name: str, x: Any, metric: str) -> Rows:
    """Return rows of length 1, less their means for correlations; sparse rows keep theirs."""
    largest = abs(x).max(axis=1)
    largest = np.asarray(largest.toarray() if hasattr(largest, "toarray") else largest).ravel()
    scale = np.where(largest > 0, largest, 1)  # squares of sizes could overflow, or be 0
    x = x / scale[:, None]
    means, columns = None, x.shape[1]
    if metric == "correlation":
        means = np.asarray(x.mean(axis=1)).ravel()
        if not hasattr(x, "toarray"):
            x, means = x - means[:, None], None
    squares = _squares(x)
    least = 0.0 if metric == "cosine" else columns * (8 * _EPS) ** 2  # what rounding leaves of a constant row
    if means is not None:
        whole = squares.copy()
        squares -= columns * means**2
        least = 8 * columns * _EPS * whole
    flat = squares <= least
    if flat.any():
        what = "are 0 in all columns" if metric == "cosine" else "are constant"
        raise InputError(
            f"{name}: got {int(flat.sum())} rows that {what} (the first is {int(np.argmax(flat))}), which have no "
            f"direction for metric={metric!r}; leave them out, or take metric='euclidean'"
        )
    length = np.sqrt(squares)
    x = x / length[:, None]
    return Rows(
        x.tocsr() if hasattr(x, "toarray") else x, np.ones(len(length)), None if means is None else means / length
    )


def _squares(x: Any) -> Floats:
    if hasattr(x, "toarray"):
        return np.asarray(x.multiply(x).sum(axis=1), np.float64).ravel()
    return np.asarray(np.einsum("ij,ij->i", x, x))


def _differences(a: Rows, here: NDArray[Any], b: Rows, there: NDArray[Any]) -> Floats:
    """Return squared distances of pairs of rows, with all their digits."""
    squared = np.zeros(len(here))
    if hasattr(a.x, "toarray"):
        for start in range(0, len(here), _PAIRS):
            part = slice(start, start + _PAIRS)
            squared[part] = _squares(a.x[here[part]] - b.x[there[part]])
    else:
        for left, right in zip(a.x.T, b.x.T, strict=True):  # no table of differences: d times as many numbers as pairs
            squared += (left[here] - right[there]) ** 2
    if a.means is not None and b.means is not None:
        squared -= a.x.shape[1] * (a.means[here] - b.means[there]) ** 2
    return np.maximum(squared, 0)


def _smallest(values: Floats, count: int) -> NDArray[np.intp]:
    """Return the places of the smallest numbers of each row, (m, count), in any order.

    These lie among the numbers of those chunks whose least is smallest.
    """
    size = values.shape[1]
    chunks = size // _CHUNK
    if count >= size:
        return np.tile(np.arange(size), (len(values), 1))
    if chunks <= 2 * count:
        return np.argpartition(values, count - 1, axis=1)[:, :count]
    least = values[:, : chunks * _CHUNK].reshape(len(values), _CHUNK, chunks).min(axis=1)
    best = np.argpartition(least, count - 1, axis=1)[:, :count]
    inside = (best[:, None, :] + chunks * np.arange(_CHUNK)[:, None]).reshape(len(values), -1)
    rest = np.broadcast_to(np.arange(chunks * _CHUNK, size), (len(values), size - chunks * _CHUNK))
    among = np.concatenate([inside, rest], axis=1)
    found = np.argpartition(np.take_along_axis(values, among, axis=1), count - 1, axis=1)[:, :count]
    return np.take_along_axis(among, found, axis=1)


def _sorted(values: Floats, count: int) -> Found:
    ends = _smallest(values, count)
    distances = np.take_along_axis(values, ends, axis=1)
    order = np.argsort(distances, axis=1, kind="stable")
    return np.take_along_axis(distances, order, axis=1), np.take_along_axis(ends, order, axis=1)


def _of_stored(given: Any, count: int, *, own: bool) -> Found:
    """Return the nearest among the distances that a sparse matrix holds, each row's own one left out unless `own`."""
    rows, columns = np.repeat(np.arange(given.shape[0]), np.diff(given.indptr)), given.indices
    kept = np.ones(len(rows), bool) if own else rows != columns
    rows, columns, values = rows[kept], columns[kept], given.data[kept]
    there = np.bincount(rows, minlength=given.shape[0])
    if there.min() < count:
        name = "X" if own else "points"
        raise InputError(
            f"{name}: got {int((there < count).sum())} rows with fewer than {count} stored distances (the first is "
            f"{int(np.argmax(there < count))}, with {int(there[np.argmax(there < count)])}), expected as many as "
            "neighbours; store more, or ask for fewer neighbours"
        )
    order = np.lexsort((values, rows))
    first = np.concatenate([[0], np.cumsum(there)[:-1]])
    places = order[first[:, None] + np.arange(count)]
    return np.asarray(values[places], np.float64), columns[places]


def _check_distances(name: str, distances: Any) -> None:
    data = distances.data if hasattr(distances, "toarray") else distances
    if not data.size:
        return
    if not np.isfinite(data).all() or data.min() < 0:
        wrong = int(np.count_nonzero(~(data >= 0) | np.isinf(data)))
        raise InputError(
            f"{name}: got {wrong} negative, infinite or NaN entries with metric='precomputed', expected distances >= 0"
        )


def _descent() -> Any:
    try:
        from pynndescent import NNDescent
    except ImportError as error:
        raise not_installed("search: 'descent'", "pynndescent", "neighbours") from error
    return NNDescent
