"""The choice among the methods that serve kernels between scattered nodes or features: exact ones, and faster ones."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nlflow._array import Array, is_numpy, to_numpy
from nlflow.affinities.base import Affinity
from nlflow.affinities.dense import DenseAffinity
from nlflow.affinities.lowrank import LowRankAffinity
from nlflow.affinities.neighbours import NeighbourAffinity, count_neighbours
from nlflow.affinities.nonuniform import NonuniformAffinity, count_modes
from nlflow.affinities.pair_sums import WIDEST, PairSums, not_compiled
from nlflow.affinities.pairwise import PairwiseAffinity
from nlflow.affinities.tiled import TiledAffinity
from nlflow.domains import Domain
from nlflow.domains.mask import Mask
from nlflow.errors import InputError, MemoryLimitError, NumericalError
from nlflow.kernels import ExpDotProduct, Kernel, RadialKernel

APPROXIMATE = ("sparse", "nufft", "lowrank")
METHODS = ("auto", "dense", "pairwise", "tiled", *APPROXIMATE)
_DEFAULT_RTOL = 1e-6
_DENSE_NODES = 2048
"""Up to here the matrix is small, and everything that asks for it (spectra, direct solutions) is fast."""
_LOW_RANK_NODES = 8192
_SAMPLED = 32  # nodes between which symmetry is looked at

# Nanoseconds on 2 cores, float64, one channel (`python -m benchmarks pairwise` measures them): what a pair, a node
# under a transform in 1, 2 and 3 dimensions, a mode, and a stored pair cost an average. A stored pair costs 60 times as
# much when the matrix is made (150 times in 15 dimensions), of which a twentieth is counted, since flows take a few
# dozen averages.
_PAIR, _COORDINATE = 0.2, 0.02
_NODE = (150.0, 300.0, 1500.0)
_MODE = 40.0
_STORED = 5.0


@dataclass(frozen=True)
class Asked:
    """What was asked for: the arguments of `nlflow.affinity`."""

    kernel: Any
    domain: Domain
    features: Any = None
    queries: Any = None
    method: str = "auto"
    window: int | None = None
    store: bool = True
    rtol: float | None = None
    mask: Mask | None = None
    precision: str | None = None
    memory_limit: float | None = None


@dataclass(frozen=True)
class Pairs:
    """A kernel that compares queries (N, d) with keys (N, d): features as the kernel maps them, or node positions."""

    asked: Asked
    queries: Array
    keys: Array

    @property
    def among(self) -> tuple[Kernel, Domain, Array, Array]:
        """What every method that compares queries with keys is built from."""
        return self.asked.kernel, self.asked.domain, self.queries, self.keys

    @property
    def options(self) -> dict[str, Any]:
        """Options of the methods that approximate."""
        return {"rtol": self.asked.rtol or _DEFAULT_RTOL, "memory_limit": self.asked.memory_limit}


def from_pairs(pairs: Pairs) -> Affinity:
    """Return the affinity of a kernel that compares queries with keys, all with all or as a mask says."""
    asked, keys = pairs.asked, pairs.keys
    kernel, method, mask, nodes, rtol = asked.kernel, asked.method, asked.mask, asked.domain.size, asked.rtol
    if asked.precision is not None:
        if is_numpy(keys) or method not in ("auto", "tiled"):
            raise InputError(
                "precision: only method='tiled', of torch features, rounds inside averages; leave it out, or convert "
                "the features"
            )
        method = "tiled"
    if not is_numpy(keys) and isinstance(kernel, RadialKernel | ExpDotProduct):
        return _on_tensors(method, pairs)
    if method == "tiled":
        raise InputError("method: got 'tiled', expected 'pairwise' for NumPy features; 'tiled' is for torch tensors")
    if problem := not_compiled(kernel):
        if method not in ("auto", "dense"):
            raise InputError(f"method: got {method!r}, expected 'auto' or 'dense': {problem}")
        _check_symmetric(kernel, pairs.queries, keys)
        return _built("dense", pairs, f"all pairs as a matrix: {problem}")
    if mask is not None:
        if method not in ("auto", "dense"):
            raise InputError(
                f"mask: method {method!r} has none for NumPy features; use method='dense', or torch tensors with "
                "method='tiled'"
            )
        return _built("dense", pairs, "masks of NumPy features are kept as a matrix")
    if method != "auto":
        return _built(method, pairs, "asked for")
    if nodes <= _DENSE_NODES:
        return _built("dense", pairs, f"no more than {_DENSE_NODES} nodes, all pairs")
    if rtol is None:
        return _built("pairwise", pairs, f"more than {_DENSE_NODES} nodes and no rtol: exact sums without a matrix")
    costs = _costs(pairs)
    tried: list[str] = []
    for name in sorted(costs, key=lambda name: costs[name]):
        share = costs[name] / costs["pairwise"]
        reason = f"rtol={rtol:g}: estimated at {share:.2g} of the cost of sums without a matrix"
        if name == "pairwise":
            reason = f"rtol={rtol:g}: sums without a matrix are estimated to be the fastest"
        try:
            return _built(name, pairs, "; ".join([reason, *tried]))
        except (NumericalError, MemoryLimitError) as error:
            if name == "pairwise":
                raise
            tried.append(f"{name} was not possible ({error})")
    raise NumericalError("method: none is possible")  # pragma: no cover - pairwise returns or raises


def _check_symmetric(kernel: Kernel, queries: Array, keys: Array) -> None:
    """Raise `InputError` when a kernel that is said to be symmetric is not, between a few of the nodes."""
    if queries is not keys or not kernel.symmetric:
        return
    few = keys[:: max(1, len(keys) // _SAMPLED)]
    logs = to_numpy(kernel.log_matrix(few, few)).astype(np.float64)
    same = np.isclose(logs, logs.T, rtol=1e-3, atol=1e-3) | (logs == logs.T)
    if not same.all():
        i, j = np.argwhere(~same)[0]
        raise InputError(
            f"kernel: {type(kernel).__name__} has log k = {logs[i, j]:.6g} between two nodes and {logs[j, i]:.6g} "
            "back, though it says that it is symmetric; set symmetric = False in its class, or average both"
        )


def at_once(kernel: Kernel, features: Array, method: str) -> bool:
    """Tell whether one affinity serves a batch whole; of the others there is one for each item."""
    return (
        not is_numpy(features)
        and isinstance(kernel.compared, RadialKernel | ExpDotProduct)
        and method in ("auto", "tiled")
    )


def _on_tensors(method: str, pairs: Pairs) -> Affinity:
    """Return the affinity of features in torch tensors."""
    if method not in ("auto", "dense", "tiled"):
        raise InputError(f"method: got {method!r}, expected 'auto', 'dense' or 'tiled' for features in torch tensors")
    if method != "auto":
        return _built(method, pairs, "asked for")
    if pairs.asked.domain.leading:
        return _built("tiled", pairs, "the items of a batch at once")
    if pairs.asked.domain.size <= _DENSE_NODES:
        return _built("dense", pairs, f"no more than {_DENSE_NODES} nodes, all pairs")
    return _built("tiled", pairs, f"more than {_DENSE_NODES} nodes: exact sums without a matrix")


def _costs(pairs: Pairs) -> dict[str, float]:
    """Estimate the nanoseconds of an average of one channel for every method that may serve."""
    kernel, domain, _, keys = pairs.among
    n, d, rtol = domain.size, int(keys.shape[-1]), pairs.options["rtol"]
    every = (_PAIR + _COORDINATE * d) * n * n
    share = PairSums(kernel, pairs.queries, keys, domain.weights.reshape(-1)).share_seen()
    costs = {"pairwise": share * every}
    if isinstance(kernel, RadialKernel) and d <= WIDEST:
        points = np.asarray(keys, dtype=np.float64)
        # `NeighbourAffinity` cuts in proportion to the least degree, which is taken for a thousandth of all weight.
        cut = 0.5e-3 * rtol
        costs["sparse"] = _STORED * n * count_neighbours(points, [kernel.support(cut)])[0]
        width = kernel.gaussian_width
        if width is not None and d <= len(_NODE) and importlib.util.find_spec("finufft"):
            modes, _ = count_modes(np.ptp(points, axis=0), width, 1e-3 * rtol)
            costs["nufft"] = _NODE[d - 1] * n + _MODE * math.prod(modes)
    many = not isinstance(kernel, RadialKernel) or d > len(_NODE)  # dimensions; in few, the others are better
    if n >= _LOW_RANK_NODES and kernel.is_definite(d) and many:
        # Before it is built nobody knows the rank; it is tried, and given up early where it would not pay.
        costs["lowrank"] = 0.1 * every
    return costs


def _built(method: str, pairs: Pairs, reason: str) -> Affinity:
    """Return the affinity by one method, with why it was chosen and what its error is measured with."""
    result = _BUILDERS[method](pairs)
    result.reason = reason
    if pairs.asked.features is None:
        result.dtype = None  # positions are no features: signals may have either precision
    if method in APPROXIMATE or result.error_estimate > 0:
        kernel, domain, queries, keys = pairs.among
        same = queries is keys
        # Copies, as the affinity has its own: the features may change.
        keys = np.array(keys)
        queries = keys if same else np.array(queries)
        result._exact = lambda: PairSums(kernel, queries, keys, domain.weights.reshape(-1))
    return result


def _low_rank(pairs: Pairs) -> Affinity:
    # Chosen, not asked for: a rank at which an average costs a tenth of exact sums, or none.
    most = None if pairs.asked.method != "auto" else max(64, pairs.asked.domain.size // 32)
    return LowRankAffinity.from_features(*pairs.among, max_rank=most, **pairs.options)


_BUILDERS: dict[str, Callable[[Pairs], Affinity]] = {
    "dense": lambda p: DenseAffinity.from_features(*p.among, p.asked.memory_limit, p.asked.mask),
    "pairwise": lambda p: PairwiseAffinity(*p.among, rtol=p.asked.rtol or 0.0, memory_limit=p.asked.memory_limit),
    "tiled": lambda p: TiledAffinity(
        *p.among, mask=p.asked.mask, precision=p.asked.precision, memory_limit=p.asked.memory_limit
    ),
    "sparse": lambda p: NeighbourAffinity(p.asked.kernel, p.asked.domain, p.keys, **p.options),
    "nufft": lambda p: NonuniformAffinity(p.asked.kernel, p.asked.domain, p.keys, **p.options),
    "lowrank": _low_rank,
}
