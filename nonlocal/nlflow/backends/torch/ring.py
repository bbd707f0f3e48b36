"""Averages over the nodes of many processes: blocks of keys and values go round a ring, partial averages are merged.

The average of a row over the keys of several blocks is that of the blocks' averages, weighted with their sums of
weights, which are known by their logarithms: m = log(e^l1 + e^l2), a = e^(l1 - m) a1 + e^(l2 - m) a2. (Liu, Zaharia and
Abbeel, arXiv 2310.01889.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nlflow.backends.torch.attention import WIDEST, fused, widened, width_for
from nlflow.backends.torch.shards import Processes
from nlflow.backends.torch.sums import TorchSums
from nlflow.kernels import Kernel


class _BlockSums(TorchSums):
    """Sums over one block of keys: averages and the logarithms of their sums of weights in one pass."""

    def pieces(self, values: Tensor) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Yield (rows, columns, average, log of the rows' sums), so that no second signal is formed.

        Parameters
        ----------
        values : tensor of shape (N, D)
        """
        if not self.fused:
            for rows in self._tiles():
                logits = self._logits(self._x[rows], rows)
                yield rows, slice(None), torch.softmax(logits, dim=-1) @ values, torch.logsumexp(logits, dim=-1)
            return
        weights = None if self._weights is None else self._column(self._weights)
        step = WIDEST - (weights is not None)
        for start in range(0, values.shape[-1], step):
            columns = slice(start, start + step)
            part = values[:, columns]
            if weights is not None:  # one more channel, as in `TorchSums.average`
                part = torch.cat([weights * part, weights], dim=-1)
            width = width_for(self._x, part.shape[-1])
            q, k, v = (widened(tensor, width) for tensor in (self._x, self._y, part))
            averages, logs = fused(q, k, v, self._form)
            average, log = averages[0, 0, :, : part.shape[-1]], logs[0, 0]
            if weights is not None:
                average, log = average[:, :-1] / average[:, -1:], log + torch.log(average[:, -1])
            yield slice(None), columns, average, log if self._offset is None else log + self._offset


class _Merged:
    """Averages of rows over the blocks that have come so far, and the logarithms of their sums of weights.

    Parameters
    ----------
    average : tensor of shape (M, D)
        Like which the averages are; D = 0 where sums of weights are all that is asked for.
    """

    def __init__(self, average: Tensor) -> None:
        self.average = torch.zeros_like(average)
        self.logs = torch.full_like(average[:, :1].sum(dim=1), -torch.inf)

    def add(self, block: _BlockSums, values: Tensor) -> None:
        """Take up one block of keys, with its values (N, D)."""
        if values.shape[1] == 0:
            self.logs = torch.logaddexp(self.logs, block.log_totals())
            return
        total = self.logs.clone()
        for rows, columns, average, log in block.pieces(values):
            before = self.logs[rows]
            total[rows] = torch.logaddexp(before, log)
            kept, share = (_share(part, total[rows])[:, None] for part in (before, log))
            # Where a block has no weight at all (a top hat out of reach) its average is none.
            average = torch.where(share > 0, average, torch.zeros_like(average))
            self.average[rows, columns].mul_(kept).add_(average.mul_(share))
        self.logs = total


def _share(log: Tensor, total: Tensor) -> Tensor:
    return torch.where(log > -torch.inf, torch.exp(log - total), torch.zeros_like(log))


class RingSums:
    """Averages of this process's queries over the keys of all processes, which come one block after another.

    Memory O(n (d + D)) for n nodes a process; each average sends n (d + D) numbers to a neighbour, once less than there
    are processes, while the block that has come is summed. Without derivatives.

    Parameters
    ----------
    kernel : Kernel
    queries, keys : tensor of shape (n, d)
        Of this process.
    weights : tensor of shape (n,), optional
        Quadrature weights > 0; 1 for all by default.
    processes : Processes
    """

    def __init__(
        self, kernel: Kernel, queries: Tensor, keys: Tensor, weights: Tensor | None, processes: Processes
    ) -> None:
        self._kernel, self._queries, self._processes = kernel, queries, processes
        self._own = (keys.contiguous(),) if weights is None else (keys.contiguous(), weights.contiguous())

    def sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the averages of values (n, D), and the logarithms of the sums of weights (n,); D may be 0."""
        processes = self._processes
        held = (*self._own, values.contiguous())
        merged = _Merged(values)
        for step in range(processes.size):
            arriving: tuple[Tensor, ...] = ()
            if step + 1 < processes.size:
                count = processes.counts[(processes.rank - step - 1) % processes.size]
                arriving = tuple(t.new_empty(count, *t.shape[1:]) for t in held)
                wait = processes.pass_on([t for t in held if t.numel()], [t for t in arriving if t.numel()])
            weights = held[1] if len(held) > 2 else None
            merged.add(_BlockSums(self._kernel, self._queries, held[0], weights), held[-1])
            if arriving:
                wait()
                held = arriving
        return merged.average, merged.logs


class GatheredSums:
    """Averages of this process's queries over the keys of all processes, which each process has as a whole.

    Memory O(N (d + D)) for N nodes in all; one message for each average. Parameters as those of `RingSums`.
    """

    def __init__(
        self, kernel: Kernel, queries: Tensor, keys: Tensor, weights: Tensor | None, processes: Processes
    ) -> None:
        self._processes = processes
        everywhere = None if weights is None else processes.gather(weights)
        self._block = _BlockSums(kernel, queries, processes.gather(keys), everywhere)

    def sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the averages of values (n, D), and the logarithms of the sums of weights (n,); D may be 0."""
        merged = _Merged(values)
        merged.add(self._block, self._processes.gather(values) if values.numel() else values)
        return merged.average, merged.logs
