"""Affinities of tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from nlflow._array import Array, Floats, constant_like, namespace
from nlflow.affinities.base import Affinity
from nlflow.affinities.logits import MixedAffinity, check_rows, log_transitions, properties
from nlflow.affinities.pair_sums import relative_weights
from nlflow.backends.memory import limit_for
from nlflow.domains import Domain
from nlflow.domains.mask import Mask, Sight
from nlflow.errors import InputError, check_choice, check_memory, warn_caller
from nlflow.kernels import Kernel, RadialKernel

if TYPE_CHECKING:
    from nlflow.backends.torch.sums import MaskedSums, TorchSums

_PRECISIONS = ("float64", "float32", "bfloat16", "float16")
_HALF = {"bfloat16": (2.0**-7, math.inf), "float16": (2.0**-10, 65504.0)}
"""Spacing of numbers above 1, and the largest number; bfloat16 has the range of float32."""
_MOST_IN_FLOAT16 = 2**17
"""Keys in float16: weights below 2^-25 of the largest are lost, together up to N 2^-25; here 2^-8, as in bfloat16."""


class TiledAffinity(Affinity):
    """The weights between all pairs of nodes as tensors, computed anew at each average: O(N d) memory."""

    # An average is fused attention for dot products, and for Gaussians that are not narrow against the domain; tiles of
    # queries for the others. It has first derivatives with respect to features and signal.
    # - queries, keys : (..., N, d), one tensor where queries are the keys. The leading axes are those of the batch, or
    #   ones, or missing: where all items share their features, weights are computed once for all.
    # - precision : half precision is for fused attention, which adds up in float32; errors are relative to the signal's
    #   deviation from its middle, which is taken out before and put back after.

    method = "tiled"
    kernel: Kernel

    def __init__(
        self,
        kernel: Kernel,
        domain: Domain,
        queries: Array,
        keys: Array,
        *,
        mask: Mask | Sight | None = None,
        precision: str | None = None,
        memory_limit: float | None = None,
    ) -> None:
        same = queries is keys
        n, d = domain.item_size, int(keys.shape[-1])
        shared = math.prod(keys.shape[:-2]) == math.prod(queries.shape[:-2]) == 1
        sight = Sight(mask, domain.leading, n, keys) if isinstance(mask, Mask) else mask
        shared = shared and (sight is None or sight.present is None)
        check_memory(
            f"sums over {domain.size} nodes with {d} features",
            (n if shared else domain.size) * (8 * d + 64) * int(keys.dtype.itemsize),
            "use fewer nodes or features, or raise memory_limit",
            limit_for(keys, memory_limit),
        )
        tags = properties(kernel, queries, keys, None if sight is None else sight.mask)
        super().__init__(domain, kernel, dtype=keys.dtype, **tags)
        self.symmetric = self.symmetric and (sight is None or sight.symmetric)
        # Copies, since the features may change later; of one tensor where both are one.
        leading = () if shared else domain.leading
        self._leading = leading
        self._keys = _leading(keys, leading).clone()
        self._queries = self._keys if same else _leading(queries, leading).clone()
        self.device, self._sight = keys.device, sight
        self._precision = None if precision is None else check_choice("precision", precision, _PRECISIONS)
        self._limit = memory_limit
        # Over the largest, which stays in the range of float32 whatever the units.
        least = float(namespace(keys).finfo(keys.dtype).smallest_normal)
        weights, self._shift = relative_weights(domain.item_weights.reshape(-1), least)
        own = None if weights.min() == 1 else constant_like(weights, keys)
        self._sums = self._make_sums(own)
        if self._precision in _HALF:
            if not self.fused:
                raise InputError(
                    f"precision: got {precision!r}, expected 'float32' or 'float64' for {type(kernel).__name__} on "
                    f"{keys.device}: half precision is for dot products in fused attention"
                )
            self._check_half(self._precision)
        self._log_degrees: Array | None = None
        self._wide_degrees: Array | None = None
        if isinstance(kernel, RadialKernel) and kernel.grows:
            xp, logs = namespace(keys), namespace(keys).reshape(self._log_degree(), (-1,))
            check_rows(xp.where(logs == -math.inf, xp.zeros_like(logs), logs))  # a mask may leave a node none
        if sight is not None and sight.mask.rule is not None and not sight.reversed and _compact(kernel):
            check_rows(namespace(keys).reshape(self._log_degree(), (-1,)))  # what a rule lets see may be out of reach

    def _make_sums(self, weights: Array | None) -> MaskedSums | TorchSums:
        kernel, sight, precision = self.kernel, self._sight, self._precision
        if sight is None:
            from nlflow.backends.torch.sums import TorchSums

            return TorchSums(kernel, self._queries, self._keys, weights, precision=precision)
        from nlflow.backends.torch.sums import MaskedSums

        return MaskedSums(kernel, self._queries, self._keys, weights, sight, precision)

    def _check_half(self, precision: str) -> None:
        """Raise `InputError` where half precision does not hold what is averaged; warn where it moves weights far."""
        spacing, most = _HALF[precision]
        mask = None if self._sight is None else self._sight.mask
        n = self.domain.item_size
        seen = n if mask is None or mask.window is None else min(n, 2 * mask.window + 1)
        if precision == "float16" and seen > _MOST_IN_FLOAT16:
            raise InputError(
                f"precision: got 'float16' for {seen} keys, expected 'bfloat16' beyond {_MOST_IN_FLOAT16}: weights "
                f"below 2^-25 of the largest are lost in float16, together up to {seen * 2.0**-25:.2g} of all"
            )
        xp = namespace(self._keys)
        sizes = [xp.max(xp.abs(t)) for t in (self._queries, self._keys)]
        lengths = [xp.max(xp.sum(xp.square(t), axis=-1)) for t in (self._queries, self._keys)]
        *sizes, first, second = (float(x) for x in xp.stack([*sizes, *lengths]).detach().tolist())  # one look
        if not max(sizes) <= most:
            raise InputError(
                f"precision: got {precision!r} for features up to {max(sizes):.4g}, expected at most {most:g}; use "
                "'bfloat16', or scale the features down and the kernel up"
            )
        scale = getattr(self.kernel, "scale", None)
        scale = 1 / math.sqrt(self._keys.shape[-1]) if scale is None else abs(scale)
        moved = spacing * scale * math.sqrt(first) * math.sqrt(second)
        if moved > 1:
            warn_caller(
                f"precision: features rounded to {precision} may move logits by {moved:.3g}, and weights by a factor "
                f"{math.exp(min(moved, 700)):.3g}; use precision='float32', or a smaller scale",
            )

    @property
    def how(self) -> str:
        return self._sums.how

    @property
    def fused(self) -> bool:
        return self._sums.fused

    @property
    def laws_have_more_digits(self) -> bool:
        return self._sums.wide

    def settle(self) -> None:
        if not self.tracked:
            _ = self._sums.wide, self.measure("l2", self._keys)

    @property
    def takes_unsound(self) -> bool:
        ruled = self._sight is not None and self._sight.mask.rule is not None
        return not (isinstance(self.kernel, RadialKernel) and self.kernel.grows) and not ruled

    @property
    def tracked(self) -> bool:
        return bool(self._keys.requires_grad or self._queries.requires_grad)

    @property
    def memory_bytes(self) -> int:
        kept = {id(a): a for a in (self._queries, self._keys, *self._sums.kept)}
        kept.update({id(a): a for a in (self._log_degrees, self._wide_degrees) if a is not None})
        return sum(int(a.numel()) * int(a.dtype.itemsize) for a in kept.values())

    def _by_items(self, of: Callable[[Array], Array], u: Array) -> Array:
        """Apply to a signal what takes (..., N, D)."""
        xp, domain = namespace(u), self.domain
        rows = xp.reshape(u, (*domain.leading, domain.item_size, -1))
        if self._leading == domain.leading:
            return xp.reshape(of(rows), u.shape)
        # One table of weights for all items, which are channels of one signal then.
        items = xp.reshape(rows, (-1, *rows.shape[-2:]))
        beside = xp.reshape(xp.permute_dims(items, (1, 0, 2)), (domain.item_size, -1))
        apart = xp.reshape(of(beside), (domain.item_size, -1, rows.shape[-1]))
        return xp.reshape(xp.permute_dims(apart, (1, 0, 2)), u.shape)

    def _average(self, u: Array) -> Array:
        return self._by_items(self._sums.average, u)

    def _log_degree(self) -> Array:
        if self._log_degrees is not None:
            return self._log_degrees
        logs = namespace(self._keys).astype(self._sums.log_totals(), self._keys.dtype)
        result = self._by_shape(logs + self._shift)
        # Derivatives go through what a tensor was computed from only once; and what is computed without any, has none.
        if not self.tracked:
            self._log_degrees = result
        return result

    def _by_shape(self, logs: Array) -> Array:
        """Return one number for each node of an item, or of all, in the shape of the domain."""
        xp, item = namespace(logs), self.domain.shape[len(self.domain.leading) :]
        return xp.broadcast_to(xp.reshape(logs, (*self._leading, *item)), self.domain.shape)

    def _log_degree_wide(self) -> Array:
        if self.tracked or not self._sums.wide:  # derivatives, or no more digits
            return self._log_degree()
        if self._wide_degrees is None:
            logs = self._by_shape(self._sums.log_totals_wide() + self._shift)
            self._wide_degrees = logs
            if logs.dtype == self._keys.dtype and self._log_degrees is None:  # one pass for both
                self._log_degrees = logs
        return self._wide_degrees

    def _push(self, law: Array) -> Array:
        return self._by_items(self._sums.push, law)

    def _item(self, index: tuple[int, ...]) -> Affinity:
        def of(features: Array) -> Array:
            return features[index] if self._leading else features

        keys = of(self._keys)
        queries = keys if self._queries is self._keys else of(self._queries)
        sight = None if self._sight is None else self._sight.item(index, self.domain.leading)
        result = self._of(self.domain.item, queries, keys, sight)
        result._log_scale = self._log_scale
        return result

    def _log_transitions(self) -> Floats | None:
        if self.domain.leading:
            return None
        logits = self.kernel.log_matrix(self._queries.double(), self._keys.double()).detach()
        if self._sight is not None:
            logits = self._sight.applied(logits, slice(None))
        return log_transitions(logits, self.domain.weights)

    def _symmetrized(self) -> Affinity:
        sight = None if self._sight is None else self._sight.transposed()
        return MixedAffinity(self, self._of(self.domain, self._keys, self._queries, sight))

    def _of(self, domain: Domain, queries: Array, keys: Array, sight: Sight | None) -> Affinity:
        return TiledAffinity(
            self.kernel, domain, queries, keys, mask=sight, precision=self._precision, memory_limit=self._limit
        )


def _leading(features: Array, leading: tuple[int, ...]) -> Array:
    xp = namespace(features)
    if not leading:
        return xp.reshape(features, features.shape[-2:])
    return xp.broadcast_to(features, (*leading, *features.shape[-2:]))


def _compact(kernel: Kernel) -> bool:
    return isinstance(kernel, RadialKernel) and math.isfinite(kernel.support(0.0))
