"""Plain double sums in float64, written from the definitions: nothing here calls the package for a number.

A grid is described by its shape, spacing and boundary alone. A signal goes on beyond the edge as the boundary says, and
a sum over y runs over the *images* of each node, one after another.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import types
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from nlflow import ExpDotProduct, Gaussian, Grid, Laplace, Patch, TopHat
from nlflow.affinities import Affinity

Matrix = np.ndarray[Any, np.dtype[np.float64]]
Node = tuple[int, ...]

TOLERANCE = {np.dtype(np.float64): 1e-10, np.dtype(np.float32): 1e-5}
"""What an affinity may differ from a double sum, relative to the largest value."""


# --- the boundary ----------------------------------------------------------------------------------------------------


def image_of(i: int, n: int, boundary: str) -> int | None:
    """Return the node of which position `i` is an image, on an axis of `n` nodes; None where there is nothing."""
    if boundary == "periodic":
        return i % n
    if boundary == "reflect":  # d c b a | a b c d | d c b a: the pattern has length 2 n
        i %= 2 * n
        return i if i < n else 2 * n - 1 - i
    return i if 0 <= i < n else None


def seen_at(position: Node, shape: Node, boundary: str) -> Node:
    """Return the node whose value a *patch* sees at a position: mirrored where an isolated grid ends."""
    mode = "reflect" if boundary == "isolated" else boundary
    return tuple(image_of(i, n, mode) for i, n in zip(position, shape, strict=True))  # type: ignore[misc]


def node_at(position: Node, shape: Node, boundary: str) -> Node | None:
    """Return the node of which a position is an image, or None."""
    node = tuple(image_of(i, n, boundary) for i, n in zip(position, shape, strict=True))
    return None if None in node else node  # type: ignore[return-value]


def nodes(shape: Node) -> Iterator[Node]:
    return itertools.product(*(range(n) for n in shape))


@cache
def box(radii: Node) -> tuple[Node, ...]:
    return tuple(itertools.product(*(range(-r, r + 1) for r in radii)))


def add(a: Node, b: Node) -> Node:
    return tuple(map(operator.add, a, b))


def number(node: Node, shape: Node) -> int:
    """Return the flat number of a node, the last axis fastest."""
    flat = 0
    for i, n in zip(node, shape, strict=True):
        flat = flat * n + i
    return flat


# --- affinity matrices -----------------------------------------------------------------------------------------------


def profile(kernel: Any) -> Callable[[float], float]:
    """Return k as a function of the distance, with the amplitude."""
    a = kernel.amplitude
    if isinstance(kernel, Gaussian):
        return lambda r: a * math.exp(-r * r / (2 * kernel.width * kernel.width))
    if isinstance(kernel, Laplace):
        return lambda r: a * math.exp(-r / kernel.width)
    assert isinstance(kernel, TopHat)
    return lambda r: a if r <= kernel.radius + 1e-9 else 0.0


@cache
def position_matrix(kernel: Any, grid: Grid, window: int | None = None) -> Matrix:
    """Return k_ij = sum over the images g of j of k(x_i - g x_j), shape (N, N)."""
    k = profile(kernel)
    radii = []
    for n, h in zip(grid.shape, grid.spacing, strict=True):
        r = 0
        while k(r * h) > 1e-18 * k(0) and (grid.boundary != "isolated" or r < n):
            r += 1
        radii.append(r if window is None else min(r, window))
    matrix = np.zeros((grid.size, grid.size))
    for offset in box(tuple(radii)):
        distance = math.sqrt(math.fsum((s * h) ** 2 for s, h in zip(offset, grid.spacing, strict=True)))
        for x in nodes(grid.shape):
            y = node_at(add(x, offset), grid.shape, grid.boundary)
            if y is not None:
                matrix[number(x, grid.shape), number(y, grid.shape)] += k(distance)
    return matrix


def feature_matrix(kernel: Any, queries: Any, keys: Any) -> Matrix:
    """Return k_ij of feature vectors, shape (N, N); a dot product without its maps."""
    queries, keys = (np.asarray(a, dtype=np.float64).reshape(len(a), -1) for a in (queries, keys))
    matrix = np.empty((len(queries), len(keys)))
    for i, x in enumerate(queries):
        for j, y in enumerate(keys):
            if isinstance(kernel, ExpDotProduct):
                scale = 1 / math.sqrt(len(x)) if kernel.scale is None else kernel.scale
                matrix[i, j] = kernel.amplitude * math.exp(scale * math.fsum(x * y))
            else:
                matrix[i, j] = profile(kernel)(math.sqrt(math.fsum((x - y) ** 2)))
    return matrix


class PatchSums:
    """The patch kernel's affinities of single nodes, from loops over the pixels of patches."""

    def __init__(self, kernel: Patch, grid: Grid, image: Any) -> None:
        self.kernel, self.grid = kernel, grid
        self.image = np.asarray(image, dtype=np.float64).reshape(*grid.shape, -1)
        self.radii = tuple(min(kernel.search_radius, (n - 1) // 2) for n in grid.shape)
        self.patch = (kernel.patch_size // 2,) * grid.ndim
        self._values: dict[Node, Any] = {}
        self._pairs: dict[tuple[Node, Node], float] = {}

    def value(self, position: Node) -> Any:
        if position not in self._values:
            self._values[position] = self.image[seen_at(position, self.grid.shape, self.grid.boundary)].tolist()
        return self._values[position]

    def pair(self, x: Node, y: Node) -> float:
        """Return exp(-max(D - 2 sigma^2, 0) / width^2) of the patches around two positions."""
        if (x, y) not in self._pairs:
            squares = [
                (a - b) ** 2
                for o in box(self.patch)
                for a, b in zip(self.value(add(x, o)), self.value(add(y, o)), strict=True)
            ]
            distance = math.fsum(squares) / len(squares)
            kernel = self.kernel
            self._pairs[x, y] = math.exp(-max(distance - 2 * kernel.sigma**2, 0.0) / kernel.width**2)
        return self._pairs[x, y]

    def affinity(self, x: Node, offset: Node) -> float:
        """Return k(x, x + offset)."""
        y = add(x, offset)
        kernel = self.kernel
        if kernel.tokens == "pixel":
            value = self.pair(x, y)
        else:
            shifted = [self.pair(add(x, o), add(y, o)) for o in box(self.patch)]
            value = math.fsum(shifted) / len(shifted)
        if kernel.spatial_width is not None:
            value *= math.exp(-math.fsum(s * s for s in offset) / (2 * kernel.spatial_width**2))
        return kernel.amplitude * value

    def row(self, x: Node) -> Matrix:
        """Return k_ij for one node i, shape (N,)."""
        row = np.zeros(self.grid.size)
        for offset in box(self.radii):
            y = node_at(add(x, offset), self.grid.shape, self.grid.boundary)
            if y is not None:
                row[number(y, self.grid.shape)] += self.affinity(x, offset)
        return row


def patch_matrix(kernel: Patch, grid: Grid, image: Any) -> Matrix:
    """Return k_ij of a patch kernel, shape (N, N)."""
    sums = PatchSums(kernel, grid, image)
    return np.array([sums.row(x) for x in nodes(grid.shape)])


# --- sums ------------------------------------------------------------------------------------------------------------


def plain_degree(matrix: Matrix, weights: Any) -> Matrix:
    """Return d_i = sum_j w_j k_ij, shape (N,)."""
    w = np.asarray(weights).ravel()
    return np.array([math.fsum(row * w) for row in matrix])


def plain_average(matrix: Matrix, weights: Any, u: Any) -> Matrix:
    """Return sum_j w_j k_ij u_j / d_i, shaped like `u`."""
    w = np.asarray(weights).ravel()
    values = np.asarray(u, dtype=np.float64).reshape(len(matrix), -1)
    sums = [[math.fsum(row * w * column) for column in values.T] for row in matrix]
    return (np.array(sums) / plain_degree(matrix, weights)[:, None]).reshape(np.shape(u))


def plain_dirichlet(matrix: Matrix, weights: Any, u: Any) -> float:
    """Return 1/2 sum_ij w_i w_j k_ij |u_i - u_j|^2."""
    w = np.asarray(weights).ravel()
    values = np.asarray(u, dtype=np.float64).reshape(len(matrix), -1)
    return 0.5 * math.fsum(
        w[i] * w[j] * matrix[i, j] * math.fsum((values[i] - values[j]) ** 2)
        for i in range(len(matrix))
        for j in range(len(matrix))
    )


# --- the contract ----------------------------------------------------------------------------------------------------


def kept_bytes(affinity: Affinity) -> int:
    """Return the bytes of all buffers that an affinity keeps alive, its domain and kernel apart."""
    owners: dict[int, int] = {}
    seen: set[int] = set()
    stack: list[Any] = [affinity]
    while stack:
        item = stack.pop()
        if id(item) in seen or item is affinity.domain or item is affinity.kernel:
            continue
        seen.add(id(item))
        if isinstance(item, np.ndarray):
            while isinstance(item.base, np.ndarray):  # a view keeps all of its owner
                item = item.base
            owners[id(item)] = item.nbytes
        elif isinstance(item, types.FunctionType):
            stack.extend(cell.cell_contents for cell in item.__closure__ or ())
        elif isinstance(item, functools.partial):
            stack.extend((item.func, *item.args, *item.keywords.values()))
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif isinstance(item, Affinity):
            stack.extend(vars(item).values())
    return sum(owners.values())


def require(holds: bool, message: str) -> None:
    """Raise `AssertionError` unless `holds`; works in modules whose asserts pytest does not rewrite."""
    if not holds:
        raise AssertionError(message)


def require_close(what: str, got: Any, expected: Any, tolerance: float) -> None:
    error = float(np.max(np.abs(np.asarray(got, dtype=np.float64) - expected)))
    require(error <= tolerance, f"{what}: differs by {error:.3g}, allowed {tolerance:.3g}")


def check_affinity(
    affinity: Affinity, matrix: Matrix | None = None, *, dtype: Any = np.float64, tolerance: float | None = None
) -> None:
    """Hold an affinity against its contract and, when given, against the matrix k_ij; an `AssertionError` says where.

    The contract: shapes and dtypes are kept, constants stay, averages stay in the range of the signal, the operator is
    linear, it is self-adjoint in the inner product sum_i w_i d_i a_i b_i when it is called symmetric, laws are pushed
    by its transpose, and `memory_bytes` is what is kept.
    """
    dtype = np.dtype(dtype)
    domain = affinity.domain
    weights = domain.weights
    rng = np.random.default_rng(20)
    tolerance = TOLERANCE[dtype] if tolerance is None else tolerance
    rounding = 200 * float(np.finfo(dtype).eps)

    log_degree = affinity.log_degree
    require(log_degree.shape == domain.shape, f"log_degree: shape {log_degree.shape}")
    require(bool(np.isfinite(log_degree).all()), "log_degree: not finite")
    if matrix is not None:
        require_close("log_degree", log_degree.ravel(), np.log(plain_degree(matrix, weights)), tolerance)

    def average(*channels: Any) -> list[Matrix]:
        """Return the averages of signals that are the channels of one array, as float64."""
        v = np.stack(channels, axis=-1)
        pv = affinity.average(v)
        require(pv.shape == v.shape, f"average: shape {pv.shape} from {v.shape}")
        require(pv.dtype == dtype, f"average: dtype {pv.dtype} from {dtype}")
        return list(np.moveaxis(pv.astype(np.float64), -1, 0))

    u, v = (rng.standard_normal(domain.shape).astype(dtype) for _ in range(2))
    pu = affinity.average(u)
    require(pu.shape == u.shape, f"average: shape {pu.shape} from {u.shape}")
    require(pu.dtype == dtype, f"average: dtype {pu.dtype} from {dtype}")
    (pv,) = average(v)
    combined = average(u, v, 2 * u - 3 * v)
    one, large, positive = average(np.ones_like(u), np.full_like(u, -3e5), u - u.min())
    size = float(max(np.abs(u).max(), np.abs(v).max()))
    if matrix is not None:
        for signal, got in ((u, pu), (v, pv), (u, combined[0]), (v, combined[1])):
            require_close("average", got, plain_average(matrix, weights, signal), tolerance * size)
    require_close("channels", combined[0], pu, rounding * size)
    require_close("constants", one, 1, rounding)
    require_close("constants", large, -3e5, 3e5 * rounding)
    low, high = float(u.min()) - rounding * size, float(u.max()) + rounding * size
    require(low <= float(pu.min()) and float(pu.max()) <= high, "range: an average leaves the range of its signal")
    require(float(positive.min()) >= -2 * rounding * size, "positivity: an average of values >= 0 is negative")
    require_close("linearity", combined[2], 2 * pu.astype(np.float64) - 3 * pv, 5 * rounding * size)
    if affinity.symmetric:
        # In the degree that the affinity states, so that a wrong one shows.
        measure = weights * np.exp(log_degree.astype(np.float64) - log_degree.max())
        left, right = float((measure * v * pu).sum()), float((measure * pv * u).sum())
        terms = float((measure * (np.abs(v * pu) + np.abs(pv * u))).sum())
        require(abs(left - right) <= rounding * terms, f"adjoint: <v, Pu> = {left}, <Pv, u> = {right}")

    # sum_j (p P)_j v_j = sum_i p_i (P v)_i for each of two laws.
    laws = rng.random((*domain.shape, 2)).astype(dtype)
    pushed = affinity.push(laws)
    require(pushed.shape == laws.shape, f"push: shape {pushed.shape} from {laws.shape}")
    require(pushed.dtype == dtype, f"push: dtype {pushed.dtype} from {dtype}")
    for p, q in zip(np.moveaxis(laws, -1, 0), np.moveaxis(pushed.astype(np.float64), -1, 0), strict=True):
        left, right = float((q * v).sum()), float((p * pv).sum())
        terms = float((np.abs(q * v) + np.abs(p * pv)).sum())
        require(abs(left - right) <= rounding * terms, f"push: sum (pP) v = {left}, sum p (Pv) = {right}")
        if matrix is not None:
            shares = p.ravel() / plain_degree(matrix, weights)
            expected = np.array([w * math.fsum(shares * k) for w, k in zip(weights.ravel(), matrix.T, strict=True)])
            require_close("push", q.ravel(), expected, tolerance * float(expected.max()))

    # Small arrays (offsets, tables) may go uncounted.
    kept, stated = kept_bytes(affinity), affinity.memory_bytes
    require(abs(kept - stated) <= 0.1 * kept + 2**16, f"memory_bytes: {stated} stated, {kept} kept")
