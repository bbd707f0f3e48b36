"""Exact affinities of torch features without a matrix, on their device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from nlflow._array import Array, constant_like, namespace
from nlflow.affinities.base import Affinity, properties
from nlflow.affinities.mixed import MixedAffinity
from nlflow.domain import Domain
from nlflow.errors import InputError, check_choice, check_memory
from nlflow.kernel import DotProduct, Kernel

if TYPE_CHECKING:
    from nlflow._torch.sums import TorchSums

__all__ = ["TiledAffinity"]

_PRECISIONS = ("float64", "float32", "bfloat16", "float16")


class TiledAffinity(Affinity):
    """The weights between all pairs of nodes as tensors, computed anew at each average: O(N d) memory, O(N^2 d) time.

    An average is fused attention for dot products, and for Gaussians that are not narrow against the domain; tiles of
    queries for the others. It stays on the device of the features, and has first derivatives with respect to features
    and signal.

    Parameters
    ----------
    kernel : Gaussian, Laplace, TopHat or DotProduct
    domain : Grid or Points
    queries, keys : tensor of shape (N, d)
        The same tensor where queries are the keys.
    precision : {'float64', 'float32', 'bfloat16', 'float16'}, optional
        What features and signals are rounded to inside an average; that of the features by default. Half precision is
        for fused attention, which adds up in float32; errors are relative to the signal's deviation from its middle,
        which is taken out before and put back after.
    memory_limit : float, optional
        Bytes.

    Raises
    ------
    InputError
        For half precision where no fused attention serves the kernel and the device.
    """

    method = "tiled"

    def __init__(
        self,
        kernel: Kernel,
        domain: Domain,
        queries: Array,
        keys: Array,
        *,
        precision: str | None = None,
        memory_limit: float | None = None,
    ) -> None:
        from nlflow._torch.sums import TorchSums

        same = queries is keys
        super().__init__(domain, kernel, dtype=keys.dtype, **properties(kernel, queries, keys))
        n, d = domain.size, int(keys.shape[1])
        check_memory(
            f"sums over {n} nodes with {d} features",
            n * (8 * d + 64) * int(keys.dtype.itemsize),
            "use fewer nodes or features, or raise memory_limit",
            memory_limit,
        )
        # Copies, since the features may change later; of one tensor where both are one.
        self._keys = keys.clone()
        self._queries = self._keys if same else queries.clone()
        self._limit = memory_limit
        self._precision = None if precision is None else check_choice("precision", precision, _PRECISIONS)
        # Over the largest, which stays in the range of float32 whatever the units.
        weights = domain.weights.reshape(-1)
        largest = float(weights.max())
        self._shift = float(np.log(largest))
        shared = None if weights.min() == largest else constant_like(weights / largest, keys)
        self._sums: TorchSums = TorchSums(kernel, self._queries, self._keys, shared, precision=self._precision)
        if self._precision in ("bfloat16", "float16") and not self.fused:
            raise InputError(
                f"precision: got {precision!r}, expected 'float32' or 'float64' for {type(kernel).__name__} on "
                f"{keys.device}: half precision is for dot products in fused attention"
            )
        self._log_degrees: Array | None = None

    @property
    def fused(self) -> bool:
        """Whether averages are fused attention."""
        return self._sums.fused

    @property
    def tracked(self) -> bool:
        """Whether it was made from tensors that require a gradient."""
        return bool(self._keys.requires_grad or self._queries.requires_grad)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the affinity keeps."""
        kept = {id(a): a for a in (self._queries, self._keys, self._sums._x, self._sums._y)}
        if self._log_degrees is not None:
            kept[id(self._log_degrees)] = self._log_degrees
        return sum(int(a.numel()) * int(a.dtype.itemsize) for a in kept.values())

    def _average(self, u: Array) -> Array:
        return namespace(u).reshape(self._sums.average(self.flatten(u)), u.shape)

    def _log_degree(self) -> Array:
        if self._log_degrees is not None:
            return self._log_degrees
        xp = namespace(self._keys)
        result = xp.astype(self._sums.log_totals(), self._keys.dtype) + self._shift
        result = xp.reshape(result, self.domain.shape)
        # Derivatives go through what a tensor was computed from only once; and what is computed without any, has none.
        if not self.tracked:
            self._log_degrees = result
        return result

    def _push(self, law: Array) -> Array:
        return namespace(law).reshape(self._sums.push(self.flatten(law)), law.shape)

    def _symmetrised(self) -> Affinity:
        if not isinstance(self.kernel, DotProduct):  # not reached: the others are symmetric
            return super()._symmetrised()
        other = TiledAffinity(
            self.kernel, self.domain, self._keys, self._queries, precision=self._precision, memory_limit=self._limit
        )
        return MixedAffinity(self, other)
