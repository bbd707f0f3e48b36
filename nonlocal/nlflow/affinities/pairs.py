"""Ways to sum over pairs of features or positions, and the choice among them."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from nlflow._array import Array, is_numpy, is_tensor
from nlflow.affinities.base import Affinity
from nlflow.affinities.logits import check_symmetric
from nlflow.domains import Domain
from nlflow.domains.mask import Mask
from nlflow.errors import InputError, MemoryLimitError, NumericalError
from nlflow.kernels import ExpDotProduct, Kernel, RadialKernel

APPROXIMATE = ("sparse", "nufft", "lowrank")
_DEFAULT_RTOL = 1e-6
_DENSE_NODES = 2048
"""Up to here the matrix is small, and everything that asks for it (spectra, direct solutions) is fast."""
_LOW_RANK_NODES = 8192

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
    """The arguments of `affinity`."""

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
    sound: bool = False  # whether nobody has to look at the features: a flow takes them from its own signal
    why: str = "asked for"
    held: int = 0  # bytes of the memory limit that other items of a batch take

    @property
    def limit(self) -> float | None:
        return self.memory_limit - self.held if self.held and self.memory_limit is not None else self.memory_limit


@dataclass(frozen=True)
class Pairs:
    """A kernel that compares queries (N, d) with keys (N, d), mapped features or node positions."""

    asked: Asked
    queries: Array
    keys: Array

    @property
    def among(self) -> tuple[Kernel, Domain, Array, Array]:
        return self.asked.kernel, self.asked.domain, self.queries, self.keys

    @property
    def options(self) -> dict[str, Any]:
        return {"rtol": self.asked.rtol or _DEFAULT_RTOL, "memory_limit": self.asked.limit}


def _low_rank(kind: Any, pairs: Pairs) -> Affinity:
    # Chosen, not asked for: a rank at which an average costs a tenth of exact sums, or none.
    most = None if pairs.asked.method != "auto" else max(64, pairs.asked.domain.size // 32)
    made: Affinity = kind.from_features(*pairs.among, max_rank=most, **pairs.options)
    return made


Builder = Callable[[Any, Pairs], Affinity]
# Of a method: its module and class, and how the class is made from pairs.
_PAIRS: dict[str, tuple[str, Builder]] = {
    "dense": (
        "dense.DenseAffinity",
        lambda kind, p: kind.from_features(*p.among, p.asked.limit, p.asked.mask),
    ),
    "pairwise": (
        "pairwise.PairwiseAffinity",
        lambda kind, p: kind(*p.among, rtol=p.asked.rtol or 0.0, memory_limit=p.asked.limit),
    ),
    "tiled": (
        "tiled.TiledAffinity",
        lambda kind, p: kind(*p.among, mask=p.asked.mask, precision=p.asked.precision, memory_limit=p.asked.limit),
    ),
    "sparse": (
        "neighbours.NeighbourAffinity",
        lambda kind, p: kind(p.asked.kernel, p.asked.domain, p.keys, **p.options),
    ),
    "nufft": (
        "nonuniform.NonuniformAffinity",
        lambda kind, p: kind(p.asked.kernel, p.asked.domain, p.keys, **p.options),
    ),
    "lowrank": ("lowrank.LowRankAffinity", _low_rank),
}
PAIR_METHODS = ("auto", *_PAIRS)


def loaded(place: str) -> Any:
    """Return a class of this room, or its constructor, whose module is loaded now."""
    module, *names = place.split(".")
    found: Any = import_module(f"nlflow.affinities.{module}")
    for name in names:
        found = getattr(found, name)
    return found


def from_pairs(pairs: Pairs) -> Affinity:
    from nlflow.affinities.pair_sums import not_compiled

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
        check_symmetric(kernel, pairs.queries, keys)
        return _of_pairs("dense", pairs, f"all pairs as a matrix: {problem}")
    if mask is not None:
        if method not in ("auto", "dense"):
            raise InputError(
                f"mask: method {method!r} has none for NumPy features; use method='dense', or torch tensors with "
                "method='tiled'"
            )
        return _of_pairs("dense", pairs, "masks of NumPy features are kept as a matrix")
    if method != "auto":
        return _of_pairs(method, pairs, asked.why)
    if nodes <= _DENSE_NODES:
        return _of_pairs("dense", pairs, f"no more than {_DENSE_NODES} nodes, all pairs")
    if rtol is None:
        return _of_pairs("pairwise", pairs, f"more than {_DENSE_NODES} nodes and no rtol: exact sums without a matrix")
    costs = _costs(pairs)
    tried: list[str] = []
    for name in sorted(costs, key=lambda name: costs[name]):
        share = costs[name] / costs["pairwise"]
        reason = f"rtol={rtol:g}: estimated at {share:.2g} of the cost of sums without a matrix"
        if name == "pairwise":
            reason = f"rtol={rtol:g}: sums without a matrix are estimated to be the fastest"
        try:
            return _of_pairs(name, pairs, "; ".join([reason, *tried]))
        except (NumericalError, MemoryLimitError) as error:
            if name == "pairwise" or (asked.held and isinstance(error, MemoryLimitError)):
                raise
            tried.append(f"{name} was not possible ({error})")
    raise NumericalError("method: none is possible")  # pragma: no cover - pairwise returns or raises


def at_once(kernel: Kernel, features: Any, method: str) -> bool:
    return (
        is_tensor(features)
        and isinstance(kernel.compared, RadialKernel | ExpDotProduct)
        and method in ("auto", "tiled")
    )


def _on_tensors(method: str, pairs: Pairs) -> Affinity:
    if method not in ("auto", "dense", "tiled"):
        raise InputError(f"method: got {method!r}, expected 'auto', 'dense' or 'tiled' for features in torch tensors")
    if method != "auto":
        return _of_pairs(method, pairs, "asked for")
    if pairs.asked.domain.leading:
        return _of_pairs("tiled", pairs, "the items of a batch at once")
    if pairs.asked.domain.size <= _DENSE_NODES:
        return _of_pairs("dense", pairs, f"no more than {_DENSE_NODES} nodes, all pairs")
    return _of_pairs("tiled", pairs, f"more than {_DENSE_NODES} nodes: exact sums without a matrix")


def _costs(pairs: Pairs) -> dict[str, float]:
    """Estimate the nanoseconds of an average of one channel for each method that may serve."""
    from nlflow.affinities.neighbours import count_neighbours
    from nlflow.affinities.nonuniform import count_modes
    from nlflow.affinities.pair_sums import WIDEST, PairSums

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


def _of_pairs(method: str, pairs: Pairs, reason: str) -> Affinity:
    """Return the affinity by one method, with why it was chosen and what its error is measured with."""
    place, build = _PAIRS[method]
    result = build(loaded(place), pairs)
    how = getattr(result, "how", "")  # which kernel of a device sums
    result.reason = f"{reason}; {how}" if how else reason
    if pairs.asked.features is None:
        result.dtype = None  # positions are no features: signals may have either precision
    if method in APPROXIMATE or result.error_estimate > 0:
        kernel, domain, queries, keys = pairs.among
        same = queries is keys
        # Copies, as the affinity has its own: the features may change.
        keys = np.array(keys)
        queries = keys if same else np.array(queries)
        result._exact = partial(_pair_sums, kernel, queries, keys, domain.weights.reshape(-1))
    return result


def _pair_sums(kernel: Kernel, queries: Array, keys: Array, weights: Array) -> Any:
    return loaded("pair_sums.PairSums")(kernel, queries, keys, weights)
