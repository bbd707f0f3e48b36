"""Affinities whose nodes are shared out among processes.

Each process has consecutive nodes, and their rows of each signal. All run one script, with `nlflow.J`, `nlflow.E`,
flows, `nlflow.solve` and minimizers as in one process::

    import torch
    import torch.distributed as dist
    from nlflow.affinities import sharded as distributed
    from nlflow import E, Gaussian, GradientFlow, solve

    dist.init_process_group(backend="gloo")
    own = distributed.rows(len(x))  # of x and f, tensors that all processes have read
    p = distributed.affinity(Gaussian(width=0.5), distributed.points(x[own].numpy()), x[own])
    solution = solve(GradientFlow(E(p, f[own], 0.3, measure="degree"), metric="degree"), t=5.0)
    whole = distributed.gather(p.shard(solution.final))  # solution.final has the rows of this process
    dist.destroy_process_group()

as ``torchrun --nproc-per-node 2 script.py``. Where a process is lost the others raise `ProcessError`, after the timeout
of ``init_process_group`` at the latest.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nlflow.errors import not_installed

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise not_installed(__name__, "torch", "torch") from error

from nlflow._array import Array, Floats, constant_like, same_kind, to_numpy
from nlflow.affinities.base import Affinity
from nlflow.affinities.logits import MixedAffinity, properties
from nlflow.backends.memory import limit_for
from nlflow.backends.torch.shards import GatheredSums, ProcessError, Processes, RingSums, Shard
from nlflow.domains import Domain, Points
from nlflow.errors import (
    FileFormatError,
    InputError,
    NumericalError,
    check_choice,
    check_integer,
    check_memory,
    check_number,
    kind_of,
)
from nlflow.kernels import ExpDotProduct, Kernel, Patch, RadialKernel


def rows(count: int, group: Any = None) -> slice:
    """Return the slice of this process among `count` nodes; processes have the same number of nodes, or one more."""
    count = check_integer("count", count, minimum=1)
    processes = Processes(1, group)
    if count < processes.size:
        raise InputError(f"count: got {count} nodes, expected at least one for each of the {processes.size} processes")
    return slice(processes.rank * count // processes.size, (processes.rank + 1) * count // processes.size)


def points(nodes: ArrayLike, weights: ArrayLike | None = None, *, volume: float = 1.0, group: Any = None) -> Points:
    """Return the nodes of this process as a domain; called by all processes.

    Parameters
    ----------
    nodes : array_like of shape (n, m) or (n,)
    weights : array_like of shape (n,), optional
        Quadrature weights > 0; by default each is ``volume / N``, N the number of nodes of all processes.
    volume : float
        Of the whole domain.
    group : ProcessGroup, optional
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
    """Return the rows of all processes, (N, ...), as an ordinary tensor in each of them."""
    if not isinstance(signal, Shard):
        raise InputError(f"signal: got {kind_of(signal)}, expected a shard; make one by the affinity's shard()")
    return signal.processes.gather(Shard.rows(signal))


def own_rows(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise InputError(
            f"{name}: got {kind_of(value)}, expected a torch tensor of this process's rows; convert it "
            "(torch.from_numpy)"
        )
    if value.requires_grad:
        raise InputError(
            f"{name}: got a tensor that requires a gradient, expected one that does not: derivatives do not pass "
            "between processes; detach it, or compute in one process"
        )
    return Shard.rows(value)


__all__ = ["MODES", "ProcessError", "ShardedAffinity", "affinity", "gather", "local", "points", "rows"]

MODES = ("ring", "gather")


def affinity(
    kernel: Kernel,
    domain: Points,
    features: Tensor,
    *,
    queries: Tensor | None = None,
    mode: str = "ring",
    group: Any = None,
    memory_limit: float | None = None,
) -> ShardedAffinity:
    """Return the affinity of a kernel between the nodes of all processes; called by all of them.

    Parameters
    ----------
    kernel : RadialKernel or ExpDotProduct
    domain : Points
        The nodes of this process (`points`); their order over all processes is that of ranks.
    features : tensor of shape (n,) or (n, d)
        Positions, or keys of a dot product, of this process.
    queries : tensor like `features`, optional
        Queries of a dot product; the features themselves by default.
    mode : {'ring', 'gather'}
        With ``ring`` keys and values go round, O(n (d + D)) memory for n nodes a process; with ``gather`` each process
        has those of all, O(N (d + D)) memory.
    group : ProcessGroup, optional
        All processes by default.
    memory_limit : float, optional
        Bytes of this process; by default ``NLFLOW_MEMORY_LIMIT``, or what is free on its GPU, or half of the memory.

    Returns
    -------
    ShardedAffinity

    Raises
    ------
    InputError
        Without a process group, for unusable features, and where arguments do not go together; in all processes.
    MemoryLimitError
        When what is needed would pass the limit.
    ProcessError
        Where a process is lost.
    """
    check_choice("mode", mode, MODES)
    if not isinstance(domain, Points):
        raise InputError(
            f"domain: got {kind_of(domain)}, expected Points; for a grid distributed.points(grid.nodes[own], "
            "grid.weights.ravel()[own])"
        )
    if not isinstance(kernel, ExpDotProduct | RadialKernel):
        kind = "patches need their neighbours" if isinstance(kernel, Patch) else "it compares no features"
        raise InputError(f"kernel: got {kind_of(kernel)}, expected a radial kernel or ExpDotProduct: {kind}")
    if queries is not None and not isinstance(kernel, ExpDotProduct):
        raise InputError("queries: a radial kernel compares features with themselves; leave queries out")
    processes = Processes(domain.size, group)
    return _between(processes, kernel, domain, features, queries, mode, memory_limit)


def _between(
    processes: Processes, kernel: Kernel, domain: Points, features: Tensor, queries: Tensor | None, mode: str,
    memory_limit: float | None,
) -> ShardedAffinity:  # fmt: skip
    problem: InputError | None = None
    q = k = torch.empty(0, 0)
    same = False
    try:

        def table(name: str, value: Any) -> Tensor:
            array: Tensor = domain.check_signal(name, own_rows(name, value))
            processes.check_carried(name, array)
            return array.reshape(domain.size, -1)

        keys = table("features", features)
        for name in ("query_map", "key_map"):
            if getattr(kernel, name, None) is not None:
                same_kind(name, getattr(kernel, name), keys)
        q, k = kernel.map_features(keys, None if queries is None else table("queries", queries))
        same = q is k or (q.shape == k.shape and bool((q == k).all()))
    except InputError as error:
        problem = error
    # So that no message has a length that its receiver does not expect.
    processes.agree("features", [int(k.shape[1]), k.element_size(), int(queries is None)], problem)
    # Queries are keys if they are so in all processes.
    same = all(answer for (answer,) in processes.agree("features", [int(same)], None, same=False))
    result = ShardedAffinity(processes, kernel, domain, k if same else q, k, mode=mode, memory_limit=memory_limit)
    if queries is None:
        result._recipe = lambda u: _between(processes, kernel, domain, Shard.rows(u), None, mode, memory_limit)
    return result


class _Sharded(Affinity):
    """What affinities whose nodes are shared out among processes have in common: their signals are shards."""

    shared = True
    _processes: Processes

    def shard(self, values: Tensor) -> Tensor:
        """Return a tensor of this process's rows (n, ...) as a shard of a signal, which shares its memory.

        Raises
        ------
        InputError
            For what is no tensor or has another number of rows, and for one that requires a gradient.
        """
        own = own_rows("values", values)
        if own.ndim == 0 or own.shape[0] != self.domain.size:
            raise InputError(
                f"values: got shape {tuple(own.shape)}, expected {self.domain.size} rows, one for each node of this "
                "process"
            )
        return Shard.of(own, self._processes)

    def check_signal(self, name: str, value: Any) -> Array:
        """Return `value` as a signal that this affinity can average, or raise `InputError` in all processes.

        A tensor of this process's rows becomes a shard, which shares its memory.
        """
        problem, shape = None, [0, 0]
        try:
            value = super().check_signal(name, own_rows(name, value))
            shape = [value.ndim, value.shape[-1] if value.ndim > 1 else 1]
        except InputError as error:
            problem = error
        self._processes.agree(name, shape, problem)
        return Shard.of(value, self._processes)

    def as_signal(self, values: Floats) -> Array:
        """Raise `InputError`: eigenvalues, and whatever else begins with a NumPy vector of all nodes, stay with one."""
        raise InputError(
            f"affinity: method {self.method!r} shares its nodes out among processes, and what was asked for (a "
            "spectrum, a limit of stable steps, a chain) is computed by one; use a step below flow.safe_step, "
            "RungeKutta() or Exponential(), or build the affinity in one process"
        )

    def measure(self, metric: str, like: Array, *, by_item: bool = False) -> Array:
        """Return the node measure of a metric in float64; see `Affinity.measure`."""
        return Shard.of(super().measure(metric, like, by_item=by_item), self._processes)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The node shape of the domain of all processes."""
        return (self._processes.total,)

    def whole(self, u: Array) -> NDArray[Any]:
        """Return a signal at all nodes in the first process, and their own rows in the others."""
        return to_numpy(self._processes.bring(Shard.rows(u)))

    def own(self, whole: NDArray[Any], like: Array) -> Array:
        """Return this process's rows of a NumPy array of all nodes, as a shard with the kind of `like`."""
        before = self._processes.before
        rows = constant_like(whole[before : before + self.domain.size], Shard.rows(like))
        return Shard.of(rows, self._processes)

    def formed(self, rows: Callable[[int, int], Floats], like: Array) -> Array:
        """Return a signal of which this process forms its own rows; see `Affinity.formed`."""
        mine = Shard.rows(like)
        own = rows(self._processes.before, self.domain.size).reshape(tuple(mine.shape))
        return Shard.of(constant_like(own, mine), self._processes)

    def agreed(self, answer: bool) -> bool:
        """Return what the first process thinks."""
        return bool(self._processes.agree("answer", [int(answer)], None, same=False)[0][0])

    def writes(self, step: int) -> bool:
        """Whether this is the first process; raise `FileFormatError` where processes stand at different steps."""
        steps = self._processes.agree("step", [step], None, same=False)
        if len(set(steps)) > 1:
            raise FileFormatError(f"processes stand at steps {[own for (own,) in steps]}: they were interrupted apart")
        return self._processes.rank == 0

    def _push(self, law: Array) -> Array:
        if not self.symmetric:
            raise NumericalError(
                f"{self.method}: p P is not available for queries that are not keys where nodes are shared out among "
                "processes; build the affinity in one process"
            )
        # P is pushed between two scalings by degrees, whose logarithms in float32 have lost digits of the law.
        if self.dtype == torch.float64:
            return Affinity._push(self, law)
        wide = Shard.of(Shard.rows(law).double(), self._processes)
        pushed = Affinity._push(self._in_float64(), wide)
        return Shard.of(Shard.rows(pushed).to(law.dtype), self._processes)

    @abstractmethod
    def _in_float64(self) -> _Sharded:
        """Return the same affinity with its features in float64."""


class ShardedAffinity(_Sharded):
    """The weights between the nodes of all processes, computed anew at each average; `affinity` makes it.

    It takes tensors of this process's rows, and returns shards of the whole (`local`, `gather`).

    """

    method = "sharded"
    kernel: Kernel

    def __init__(
        self, processes: Processes, kernel: Kernel, domain: Domain, queries: Tensor, keys: Tensor, *, mode: str,
        memory_limit: float | None = None,
    ) -> None:  # fmt: skip
        same = queries is keys
        super().__init__(domain, kernel, dtype=keys.dtype, **properties(kernel, queries, keys))
        self.device = keys.device
        self._processes, self.mode, self._limit = processes, mode, memory_limit
        self.reason = f"nodes are shared out among {processes.size} processes, mode={mode!r}"
        count = domain.size if mode == "ring" else processes.total
        check_memory(
            f"sums over {count} nodes with {keys.shape[1]} features",
            count * (8 * int(keys.shape[1]) + 64) * keys.element_size(),
            "use more processes or mode='ring', or raise memory_limit",
            limit_for(keys, memory_limit),
        )
        # Copies, since the features may change later; of one tensor where both are one.
        self._keys = keys.clone()
        self._queries = self._keys if same else queries.clone()
        weights = constant_like(domain.weights, keys.double())
        extremes = processes.collect(torch.stack([weights.min(), weights.max()]))
        # Over the largest, which stays in the range of float32 whatever the units.
        least, largest = extremes[:, 0].min(), extremes[:, 1].max()
        self._shift = float(largest.log())
        shared = None if bool(least == largest) else (weights / largest).to(keys.dtype)
        sums = RingSums if mode == "ring" else GatheredSums
        self._sums = sums(kernel, self._queries, self._keys, shared, processes)
        self._logs: Tensor | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes kept by this process."""
        features = self._keys.numel() * (1 if self._queries is self._keys else 2)
        if self.mode == "gather":
            features += self._keys.shape[1] * self._processes.total
        return int((features + 2 * self.domain.size) * self._keys.element_size())

    def _average(self, u: Array) -> Array:
        flat = Shard.rows(u).reshape(self.domain.size, -1)
        average, logs = self._sums.sums(flat)
        if self._logs is None:
            self._logs = logs
        return Shard.of(average.reshape(u.shape), self._processes)

    def _log_degree(self) -> Array:
        if self._logs is None:
            self._logs = self._sums.sums(self._keys[:, :0])[1]
        return Shard.of(self._logs + self._shift, self._processes)

    def _of(self, queries: Tensor, keys: Tensor) -> ShardedAffinity:
        return ShardedAffinity(
            self._processes, self.kernel, self.domain, queries, keys, mode=self.mode, memory_limit=self._limit
        )

    def _in_float64(self) -> _Sharded:
        keys = self._keys.double()
        return self._of(keys if self._queries is self._keys else self._queries.double(), keys)

    def _symmetrized(self) -> Affinity:
        return _MixedShards(self, self._of(self._keys, self._queries), self._processes)


class _MixedShards(_Sharded, MixedAffinity):
    """The affinity of k + k^T where nodes are shared out among processes."""

    def __init__(self, first: Affinity, second: Affinity, processes: Processes) -> None:
        super().__init__(first, second)
        self._processes = processes

    def _in_float64(self) -> _Sharded:
        first, second = (part._in_float64() for part in self._parts if isinstance(part, _Sharded))
        return _MixedShards(first, second, self._processes)
