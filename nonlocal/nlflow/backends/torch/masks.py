"""Sums over the pairs of nodes that see each other: fused attention for causal masks, padding and windows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from nlflow.backends.torch.sums import TorchSums
from nlflow.domains.mask import Sight
from nlflow.kernels import Kernel, RadialKernel

_LEAST_BLOCK = 64  # queries; below, the products are too small to pay
_ALIGNED = 8  # keys; what fused kernels on GPUs want of a table of biases


class MaskedSums:
    """Averages over the keys that a query sees; see `TorchSums`, of which it has the methods.

    Causal masks and padding cost what all pairs do, or half; windows O(N window) time and memory; rules are evaluated
    for each tile of queries at each average, O(N^2).

    Parameters
    ----------
    kernel : Kernel
    queries, keys : tensor of shape (..., N, d)
    weights : tensor of shape (N,), optional
    sight : Sight
    precision : str, optional

    Attributes
    ----------
    fused : bool
        Whether averages are fused attention.
    kept : tuple of tensor
        Those that are as large as the features, or larger.
    """

    def __init__(
        self, kernel: Kernel, queries: Tensor, keys: Tensor, weights: Tensor | None, sight: Sight, precision: str | None
    ) -> None:
        mask, present = sight.mask, sight.present
        self._missing = None if present is None else ~present
        self._rounds = precision is not None
        self._logs = None if weights is None else torch.log(weights)
        if present is not None:
            # What lies at missing nodes shall not matter, to the precision of the others neither.
            same = queries is keys
            keys = _filled(keys, present)
            queries = keys if same else _filled(queries, present)
        band = mask.rule is None and mask.window is not None
        # In the other order, what comes later comes before.
        self._flipped = mask.rule is None and mask.causal and sight.reversed and not band
        if self._flipped:
            queries, keys = queries.flip(-2), keys.flip(-2)
            weights = None if weights is None else weights.flip(-1)
            present = None if present is None else present.flip(-1)
            sight = sight.transposed()
        every = sight.numbers()

        def seen(rows: slice) -> Tensor:
            result: Tensor = sight.pairs(sight.numbers(rows)[:, None], every)
            return result

        self._sums = _BandSums(kernel, queries, keys, weights, sight, precision) if band else TorchSums(
            kernel, queries, keys, weights, precision=precision, present=present,
            seen=seen if mask.causal or mask.rule is not None else None, causal=mask.causal and mask.rule is None,
        )  # fmt: skip
        self.fused, self.kept = self._sums.fused, self._sums.kept

    @property
    def wide(self) -> bool:
        """Whether laws are pushed in float64 though features are not."""
        return self._sums.wide

    def _ordered(self, values: Tensor, axis: int = -2) -> Tensor:
        return values.flip(axis) if self._flipped else values

    def average(self, values: Tensor) -> Tensor:
        """Return the averages of values (..., N, D)."""
        if self._missing is None:
            return self._ordered(self._sums.average(self._ordered(values)))
        # Where deviations from the mean are rounded, missing nodes are no part of it.
        there = _filled(values, ~self._missing) if self._rounds else values
        result = self._ordered(self._sums.average(self._ordered(there)))
        return torch.where(self._missing[..., None], values, result)

    def log_totals(self) -> Tensor:
        """Return the logarithms of the sums of weights, shape (..., N)."""
        return self._with_missing(self._ordered(self._sums.log_totals(), -1))

    def log_totals_wide(self) -> Tensor:
        """Return the same in float64 where float32 would not hold their digits."""
        return self._with_missing(self._ordered(self._sums.log_totals_wide(), -1))

    def _with_missing(self, result: Tensor) -> Tensor:
        """Return logarithms of sums with those of missing nodes, which see themselves alone."""
        if self._missing is None:
            return result
        own = torch.zeros_like(result) if self._logs is None else self._logs.to(result.dtype)
        return torch.where(self._missing, own, result)

    def push(self, law: Tensor) -> Tensor:
        """Return the law after a move, (..., N, D)."""
        if self._missing is None:
            return self._ordered(self._sums.push(self._ordered(law)))
        missing = self._missing[..., None]
        arrived = self._sums.push(self._ordered(law.masked_fill(missing, 0.0)))
        return torch.where(missing, law, self._ordered(arrived))


def _filled(x: Tensor, present: Tensor) -> Tensor:
    """Return features with those of missing nodes replaced by the mean of the others."""
    there = present[..., None]
    total = torch.where(there, x, torch.zeros_like(x)).sum(-2, keepdim=True)
    return torch.where(there, x, (total / there.sum(-2, keepdim=True).clamp(min=1)).detach())


class _BandSums:
    """Averages over the keys within a window: blocks of queries, each with the keys that one of them may see.

    FlexAttention does the same from a compiled description; it needs a compiler where it runs, and has no float64.
    """

    def __init__(
        self, kernel: Kernel, queries: Tensor, keys: Tensor, weights: Tensor | None, sight: Sight, precision: str | None
    ) -> None:
        mask, self._count = sight.mask, int(queries.shape[-2])
        if isinstance(kernel, RadialKernel):  # so that the zeros beyond the ends lie among the keys
            middle = keys.detach().mean(dim=-2, keepdim=True)
            queries, keys = queries - middle, keys - middle
        window = min(int(mask.window or 0), self._count - 1)
        before = 0 if mask.causal and sight.reversed else window
        after = 0 if mask.causal and not sight.reversed else window
        self._size = _aligned(min(max(window, _LEAST_BLOCK), self._count))
        self._blocks = -(-self._count // self._size)
        self._before, self._width = before, _aligned(before + self._size + after)

        def seen(rows: slice) -> Tensor:
            i = torch.arange(self._size, device=keys.device)[rows, None]
            j = torch.arange(self._width, device=keys.device) - before
            return (i - j <= before) & (j - i <= after)

        there = torch.ones_like(keys[..., 0]) if sight.present is None else sight.present.to(keys.dtype)
        nearby = None
        if weights is not None:
            nearby = self._unfolded(weights[:, None])[..., 0]
            nearby = torch.where(nearby > 0, nearby, torch.ones_like(nearby))  # beyond the ends, where nothing is
        self._sums = TorchSums(
            kernel, self._blocked(queries), self._unfolded(keys), nearby, precision=precision,
            present=self._unfolded(there[..., None])[..., 0] > 0, seen=seen, table=True,
        )  # fmt: skip
        self.fused, self.kept = self._sums.fused, self._sums.kept

    @property
    def wide(self) -> bool:
        return self._sums.wide

    def _blocked(self, values: Tensor) -> Tensor:
        """Return (..., N, D) as (..., blocks, size, D)."""
        whole = pad(values, (0, 0, 0, self._blocks * self._size - self._count))
        return whole.reshape(*values.shape[:-2], self._blocks, self._size, values.shape[-1])

    def _unfolded(self, values: Tensor) -> Tensor:
        """Return (..., N, D) as (..., blocks, width, D): for each block the keys that its queries may see."""
        after = (self._blocks - 1) * self._size + self._width - self._before - self._count
        return pad(values, (0, 0, self._before, after)).unfold(-2, self._width, self._size).mT.contiguous()

    def _folded(self, values: Tensor) -> Tensor:
        """Return (..., blocks, width, D) added up at the keys that they belong to, (..., N, D)."""
        pieces = -(-self._width // self._size)
        values = pad(values, (0, 0, 0, pieces * self._size - self._width))
        values = values.reshape(*values.shape[:-2], pieces, self._size, values.shape[-1])
        total = values.new_zeros(*values.shape[:-4], (self._blocks + pieces) * self._size, values.shape[-1])
        for piece in range(pieces):  # those of all blocks lie side by side: the same order of sums on any device
            start = piece * self._size
            total[..., start : start + self._blocks * self._size, :] += values[..., piece, :, :].flatten(-3, -2)
        return total[..., self._before : self._before + self._count, :]

    def average(self, values: Tensor) -> Tensor:
        return self._sums.average(self._unfolded(values)).flatten(-3, -2)[..., : self._count, :]

    def log_totals(self) -> Tensor:
        return self._sums.log_totals().flatten(-2, -1)[..., : self._count]

    def log_totals_wide(self) -> Tensor:
        return self._sums.log_totals_wide().flatten(-2, -1)[..., : self._count]

    def push(self, law: Tensor) -> Tensor:
        return self._folded(self._sums.push(self._blocked(law)))


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
