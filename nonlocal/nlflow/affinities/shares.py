"""Which nodes a process has where they are shared out among processes, and its rows of a signal."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from nlflow.backends.torch.shards import Processes, Shard
from nlflow.domains import Points
from nlflow.errors import InputError, check_integer, check_number


def rows(count: int, group: Any = None) -> slice:
    """Return which of `count` nodes are this process's: consecutive ones, one more or less than those of others.

    Raises
    ------
    InputError
        Without a process group, or for fewer nodes than processes.
    """
    count = check_integer("count", count, minimum=1)
    processes = Processes(1, group)
    if count < processes.size:
        raise InputError(f"count: got {count} nodes, expected at least one for each of the {processes.size} processes")
    return slice(processes.rank * count // processes.size, (processes.rank + 1) * count // processes.size)


def points(nodes: ArrayLike, weights: ArrayLike | None = None, *, volume: float = 1.0, group: Any = None) -> Points:
    """Return the nodes of this process as a domain.

    Parameters
    ----------
    nodes : array_like of shape (n, m) or (n,)
        Those of this process.
    weights : array_like of shape (n,), optional
        Their quadrature weights, all > 0. By default each is ``volume / N``, N the number of nodes of all processes.
    volume : float
        Of the whole domain.
    group : ProcessGroup, optional
        All processes by default.

    Raises
    ------
    InputError
        As for `nlflow.Points`.
    """
    own = Points(nodes, weights)
    if weights is not None:
        return own
    share = check_number("volume", volume, minimum=0, strict=True) / Processes(own.size, group).total
    return Points(own.nodes, np.full(own.size, share))


def local(signal: Tensor) -> Tensor:
    """Return this process's rows as an ordinary tensor, which shares their memory."""
    return Shard.rows(signal)


def gather(signal: Tensor) -> Tensor:
    """Return the rows of all processes, (N, ...), as an ordinary tensor in each of them; O(N D) memory.

    Raises
    ------
    InputError
        For a tensor that is no shard; `ShardedAffinity.shard` makes one of this process's rows.
    """
    if not isinstance(signal, Shard):
        raise InputError(f"signal: got {type(signal).__name__}, expected a shard; make one by the affinity's shard()")
    return signal.processes.gather(Shard.rows(signal))


def own_rows(name: str, value: Any) -> Tensor:
    """Return this process's rows as an ordinary tensor, or raise `InputError`."""
    if not isinstance(value, Tensor):
        raise InputError(
            f"{name}: got {type(value).__name__}, expected a torch tensor of this process's rows; convert it "
            "(torch.from_numpy)"
        )
    if value.requires_grad:
        raise InputError(
            f"{name}: got a tensor that requires a gradient, expected one that does not: derivatives do not pass "
            "between processes; detach it, or compute in one process"
        )
    return Shard.rows(value)
