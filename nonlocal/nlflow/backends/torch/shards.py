"""Signals whose nodes are shared out among processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nlflow.backends.memory import ran_out
from nlflow.backends.torch.attention import WIDEST, fused, widened, width_for
from nlflow.backends.torch.sums import TorchSums
from nlflow.errors import InputError, NlflowError
from nlflow.kernels import Kernel


class ProcessError(NlflowError, RuntimeError):
    """Another process of a distributed computation was lost or did not answer in time."""


class Processes:
    """Processes that share the nodes of a domain, in the order of ranks."""

    # All processes call each of the methods at the same point of their program.
    # - count : int; Number of nodes of this process.
    # - group : ProcessGroup, optional; All processes by default.
    # - rank, size : int
    # - counts : tuple of int; Numbers of nodes by rank.

    def __init__(self, count: int, group: Any = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise InputError(
                "group: there is no process group; call torch.distributed.init_process_group(backend='gloo') first "
                "('nccl' for GPUs), in a script started by torchrun --nproc-per-node"
            )
        self.group: Any = group if group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise InputError("group: this process is not in it")
        self._lost = ""
        self._carriers = dict(part.split(":") for part in dist.get_backend_config(self.group).split(","))
        # Small numbers travel between hosts where the group can do that: nobody waits for a device then.
        self._device = torch.device("cpu") if "cpu" in self._carriers else _own_gpu(self.group)
        self.counts = (count,) * self.size
        self.counts = tuple(numbers[0] for numbers in self.agree("nodes", [count], None, same=False))
        if min(self.counts) < 1:
            raise InputError(f"nodes: got {list(self.counts)} by rank, expected at least one for each process")

    @property
    def total(self) -> int:
        return sum(self.counts)

    def check_carried(self, name: str, value: Tensor) -> None:
        kind = value.device.type
        carrier = self._carriers.get(kind)
        if carrier is None or (kind == "cuda" and carrier == "gloo"):  # which sends none from one GPU to another
            there = " or ".join(device for device, by in self._carriers.items() if (device, by) != ("cuda", "gloo"))
            raise InputError(
                f"{name}: got a tensor on {value.device}, expected one on {there}, from where the group sends; move "
                "it, or call init_process_group with 'nccl' for GPUs, 'gloo' for CPUs, 'cpu:gloo,cuda:nccl' for both"
            )
        if kind == "cuda" and "cpu" not in self._carriers and value.device != self._device:
            raise InputError(
                f"{name}: got a tensor on {value.device}, expected {self._device}, the GPU of this process; call "
                "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first"
            )

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Tell what happened when a process is lost. Nothing is said after that: the others would wait in vain."""
        if self._lost:
            raise ProcessError(self._lost)
        try:
            yield
        except RuntimeError as error:  # all errors of torch.distributed are
            if ran_out(error):
                raise
            self._lost = (
                f"process {self.rank} of {self.size}: another process was lost or did not answer within the timeout of "
                f"the group ({str(error).strip().splitlines()[0]}); look for the first error among the processes, and "
                "start again (from a checkpoint)"
            )
            raise ProcessError(self._lost) from error

    def collect(self, value: Tensor) -> Tensor:
        """Return a small tensor of each process, stacked by rank; all have the same shape."""
        # Gathered and reduced in the order of ranks, so that all processes have the same bits and decide alike.
        carried = value.to(torch.uint8) if value.dtype == torch.bool else value
        found = torch.empty((self.size, *value.shape), dtype=carried.dtype, device=value.device)
        with self._talking():
            dist.all_gather(list(found.unbind()), carried.contiguous(), group=self.group)
        return found.to(value.dtype)

    def agree(
        self, name: str, numbers: list[int], problem: Exception | None, *, same: bool = True
    ) -> list[tuple[int, ...]]:
        """Return integers of each process by rank; an error in one process is raised in all."""
        sent = torch.tensor([int(problem is not None), *numbers], dtype=torch.int64, device=self._device)
        found = [tuple(row) for row in self.collect(sent).tolist()]
        if problem is not None:
            raise problem
        if refused := [rank for rank, row in enumerate(found) if row[0]]:
            raise InputError(f"{name}: process(es) {refused} cannot use what they got; see their messages")
        rest = [row[1:] for row in found]
        if same and len(set(rest)) > 1:
            raise InputError(f"{name}: got {rest} by rank, expected the same in all processes")
        return rest

    def pass_on(self, tensors: Sequence[Tensor], arriving: Sequence[Tensor]) -> Callable[[], None]:
        """Send tensors to the next process while others arrive; return a function that waits for them."""
        ranks = ((self.rank + 1) % self.size, (self.rank - 1) % self.size)
        after, before = (dist.get_global_rank(self.group, rank) for rank in ranks)
        operations = []
        for tag, (sent, received) in enumerate(zip(tensors, arriving, strict=True)):
            operations.append(dist.P2POp(dist.isend, sent, after, self.group, tag))
            operations.append(dist.P2POp(dist.irecv, received, before, self.group, tag))
        with self._talking():
            works = dist.batch_isend_irecv(operations)

        def wait() -> None:
            with self._talking():
                for work in works:
                    work.wait()

        return wait

    @property
    def before(self) -> int:
        return sum(self.counts[: self.rank])

    def bring(self, rows: Tensor) -> Tensor:
        """Return the rows of all processes in the first process, in others their own rows."""
        if self.rank:
            with self._talking():
                dist.send(rows.contiguous(), dist.get_global_rank(self.group, 0), self.group)
            return rows
        whole = rows.new_empty(self.total, *rows.shape[1:])
        parts = torch.split(whole, list(self.counts))
        parts[0].copy_(rows)
        with self._talking():
            for rank in range(1, self.size):
                dist.recv(parts[rank], dist.get_global_rank(self.group, rank), self.group)
        return whole

    def gather(self, rows: Tensor) -> Tensor:
        most = max(self.counts)
        padded = rows.contiguous()
        if rows.shape[0] < most:
            padded = torch.cat([rows, rows.new_zeros(most - rows.shape[0], *rows.shape[1:])])
        whole = padded.new_empty(self.size, most, *rows.shape[1:])
        with self._talking():
            dist.all_gather(list(whole.unbind()), padded, group=self.group)
        if len(set(self.counts)) == 1:
            return whole.flatten(0, 1)
        return torch.cat([part[:count] for part, count in zip(whole.unbind(), self.counts, strict=True)])


def _own_gpu(group: Any) -> torch.device:
    """Return the GPU of this process: what the group is bound to, that of torchrun's rank, or the current one."""
    bound = getattr(group, "bound_device_id", None)
    if bound is not None:
        return torch.device(bound)
    current, rank = torch.cuda.current_device(), os.environ.get("LOCAL_RANK", "")
    # Where nobody has chosen one, the current one is the first in all processes of a machine.
    chosen = int(rank) % torch.cuda.device_count() if current == 0 and rank.isdecimal() else current
    return torch.device("cuda", chosen)


class Shard(Tensor):
    """The rows of a signal that a process has, (n, ...); reductions of the node axis cover all processes."""

    # What may not keep the nodes apart is refused: it might take these rows for the whole signal.

    processes: Processes

    @staticmethod
    def of(rows: Tensor, processes: Processes) -> Shard:
        result = Shard.rows(rows).as_subclass(Shard)
        result.processes = processes
        return result

    @staticmethod
    def rows(tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        # `x.shape` comes as the `__get__` of a descriptor that is called `shape`.
        descriptor = func.__name__ == "__get__"
        name = func.__self__.__name__ if descriptor else func.__name__.strip("_")
        if name in _FACTS and func.__name__ != "requires_grad_":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name in _REDUCTIONS and not descriptor:
            return _reduced(name, func, *args, **kwargs)
        first = next(a for a in _flat([*args, *kwargs.values()]) if isinstance(a, Shard))
        plain = [Shard.rows(a) if isinstance(a, Shard) else a for a in args]
        named = {key: Shard.rows(a) if isinstance(a, Shard) else a for key, a in kwargs.items()}
        if name == "stack":
            return func([Shard.rows(a) for a in args[0]], *args[1:], **kwargs)
        if name in ("cat", "concat"):
            plain[0] = [Shard.rows(a) for a in args[0]]
        if name not in _BY_NODE or descriptor or not _keeps_nodes(name, args):
            raise _refusal(name)
        result = func(*plain, **named)
        if result.ndim == 0 or result.shape[0] != Shard.rows(first).shape[0]:
            raise _refusal(name)
        return Shard.of(result, first.processes)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes an argument that nobody gives
        own = Shard.rows(self)
        return f"Shard(process {self.processes.rank} of {self.processes.size}, {own!r})"

    __str__ = __repr__


# What tells of a tensor without telling values.
_FACTS = {
    "device", "dim", "dtype", "element_size", "grad", "grad_fn", "is_contiguous", "is_cuda", "is_floating_point",
    "is_leaf", "is_meta", "is_nested", "is_quantized", "is_sparse", "layout", "ndim", "nelement", "numel",
    "requires_grad", "shape", "size",
}  # fmt: skip
_REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "all", "any"}
_ARITHMETIC = {"add", "sub", "subtract", "mul", "multiply", "div", "divide", "truediv", "true_divide", "pow"}
_BY_NODE = {
    *_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), "rsub", "neg", "negative", "abs", "absolute", "sqrt", "square",
    "exp", "expm1", "log", "log1p", "logaddexp", "sign", "maximum", "minimum", "clip", "clamp", "where", "isfinite",
    "isnan", "eq", "ne", "lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal", "invert",
    "bitwise_not", "logical_not", "logical_and", "logical_or", "and", "or", "zeros_like", "ones_like", "full_like",
    "empty_like", "to", "type", "float", "double", "clone", "detach", "contiguous", "resolve_neg", "reshape",
    "getitem", "matmul", "cat", "concat",
}  # fmt: skip


def _keeps_nodes(name: str, args: tuple[Any, ...]) -> bool:
    """Tell whether a call leaves the node axis first, as far as its result does not tell."""
    if name == "getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if index and index[0] is Ellipsis:
            return bool(sum(entry is not None for entry in index[1:]) < args[0].ndim)
        return bool(index) and isinstance(index[0], slice) and index[0] == slice(None)
    if name == "matmul":  # rows by a matrix, not a matrix by rows, which would be a sum over nodes
        return isinstance(args[0], Shard) and not isinstance(args[1], Shard)
    return True


def _refusal(name: str) -> InputError:
    return InputError(
        f"torch.{name}: not known for a signal whose nodes are shared out among processes; take the rows of this "
        "process (nlflow.affinities.sharded.local) or the signal of all (nlflow.affinities.sharded.gather)"
    )


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _reduced(name: str, func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a reduction of a shard: another shard where its nodes stay, otherwise a tensor that all processes have."""
    processes, rows = x.processes, Shard.rows(x)
    if any(isinstance(a, Tensor) for a in (*args, *kwargs.values())):
        raise _refusal(name)  # the larger of two tensors has another name too: maximum
    given = args[0] if args else kwargs.get("dim", kwargs.get("axis"))
    if name in ("max", "min"):
        if given is not None:
            raise _refusal(name)  # it would return where they are, too
        func = torch.amax if name == "max" else torch.amin
    axes = tuple(range(rows.ndim)) if given is None else (given,) if isinstance(given, int) else tuple(given)
    if not any(axis % rows.ndim == 0 for axis in axes):
        return Shard.of(func(rows, *args, **kwargs), processes)
    if name != "mean":
        own = func(rows, *args, **kwargs)
        found = processes.collect(own)
        how: dict[str, Any] = {"sum": torch.sum, "all": torch.all, "any": torch.any}
        if name in how:
            return how[name](found, dim=0)
        return torch.amax(found, 0) if name in ("amax", "max") else torch.amin(found, 0)
    count = processes.total
    for axis in axes:
        count *= rows.shape[axis] if axis % rows.ndim else 1
    kept = bool(args[1] if len(args) > 1 else kwargs.get("keepdim", kwargs.get("keepdims", False)))
    own = torch.sum(rows, axes, keepdim=kept, dtype=kwargs.get("dtype"))
    return torch.sum(processes.collect(own), dim=0) / count


class _BlockSums(TorchSums):
    """Sums over one block of keys: averages and the logarithms of their sums of weights in one pass."""

    def pieces(self, values: Tensor) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
        """Yield (rows, columns, average, log of the rows' sums), so that no second signal is formed."""
        # - values : tensor of shape (N, D)
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
    """Averages of rows over the blocks that have come so far, and the logarithms of their sums of weights."""

    # - average : tensor of shape (M, D); Like which the averages are; D = 0 where sums of weights are all that is asked
    #   for.

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
    """Averages over the keys of all processes, which come one block after another: O(n (d + D)) memory."""

    # Without derivatives. queries, keys : (n, d), of this process; weights : (n,), > 0.

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
    """Averages over the keys of all processes, which each of them holds, in O(N (d + D)) memory."""

    def __init__(
        self, kernel: Kernel, queries: Tensor, keys: Tensor, weights: Tensor | None, processes: Processes
    ) -> None:
        self._processes = processes
        everywhere = None if weights is None else processes.gather(weights)
        self._block = _BlockSums(kernel, queries, processes.gather(keys), everywhere)

    def sums(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `RingSums.sums`."""
        merged = _Merged(values)
        merged.add(self._block, self._processes.gather(values) if values.numel() else values)
        return merged.average, merged.logs
