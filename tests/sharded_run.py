"""What the tests of `nlflow.affinities.sharded` run in several processes, and in one to compare with.

``python sharded_run.py JOB OUT`` in each process, with the environment that torchrun sets; rank 0 writes OUT.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten

import nlflow as nl
from benchmarks.resident import peak_of
from nlflow.affinities import sharded
from nlflow.backends.torch import shards
from nlflow.errors import NlflowError
from tests import pretended

N = 91
"""No multiple of the number of processes, so that shards differ in size."""
RNG = np.random.default_rng(0)
NODES = np.arange(float(N))
FEATURES, QUERIES = (torch.from_numpy(a) for a in RNG.normal(size=(2, N, 3)))
SIGNAL = torch.from_numpy(RNG.normal(size=(N, 2)))
STRENGTH = torch.from_numpy(RNG.uniform(0, 1, N))
WEIGHTS = RNG.uniform(0.5, 2, N)
SINGLE, SINGLE_QUERIES = ((1e-3 * a + torch.tensor([1e3, 0, 0])).float() for a in (FEATURES, QUERIES))
"""Logits of 1e6, of which float32 holds no fraction, with differences of order 1."""
CASES: dict[str, tuple[Any, bool, bool]] = {
    "gaussian": (nl.Gaussian(1.5), False, True),
    "narrow gaussian": (nl.Gaussian(0.05), False, False),
    "top hat": (nl.TopHat(1.0), False, True),
    "laplace": (nl.Laplace(1.0), False, False),
    "dot product": (nl.ExpDotProduct(), False, False),
    "queries": (nl.ExpDotProduct(scale=0.7), True, True),
}
"""Kernel, whether queries are not keys, whether weights are uneven. Fused, in tiles, with blocks that see nothing."""
EVERYTHING, BASICS = tuple(CASES), ("gaussian", "queries")


class One:
    """The problem in one process."""

    own = slice(None)

    def affinity(self, kernel: Any, weights: Any, features: Any, queries: Any = None) -> nl.Affinity:
        return nl.affinity(kernel, nl.Points(NODES, weights), features, queries=queries, method="tiled")

    def shard(self, affinity: nl.Affinity, values: Any) -> Any:
        del affinity
        return values

    def whole(self, affinity: nl.Affinity, values: Any) -> Any:
        del affinity
        return values.numpy()


class Many(One):
    """This process's part of the problem."""

    def __init__(self, mode: str, group: Any = None) -> None:
        self.mode, self.group = mode, group
        self.own = sharded.rows(N, group)

    def affinity(self, kernel: Any, weights: Any, features: Any, queries: Any = None) -> nl.Affinity:
        domain = sharded.points(NODES[self.own], None if weights is None else weights[self.own], group=self.group)
        queries = None if queries is None else queries[self.own]
        return sharded.affinity(kernel, domain, features[self.own], queries=queries, mode=self.mode, group=self.group)

    def shard(self, affinity: Any, values: Any) -> Any:
        return affinity.shard(values[self.own])

    def whole(self, affinity: Any, values: Any) -> Any:
        return sharded.gather(affinity.shard(values)).numpy()


class OnGpus(Many):
    """The same on a pretended GPU in each process, which only tensors of GPUs may leave: as with nccl."""

    def whole(self, affinity: Any, values: Any) -> Any:
        return pretended.take(sharded.gather(affinity.shard(values))).numpy()


class ShardThere(shards.Shard, pretended.Pretended):  # type: ignore[misc]  # one tensor cannot be of both otherwise
    """A shard whose rows lie on the pretended GPU."""

    device, is_cuda = pretended.GPU, True

    @staticmethod
    def of(rows: Any, processes: Any) -> Any:
        result = pretended.Pretended.__new__(ShardThere, shards.Shard.rows(rows).below)
        result.processes = processes
        return result


@contextmanager
def only_from_gpus() -> Iterator[None]:
    """Let messages be those of nccl: each tensor has to be one of a GPU. Below, gloo carries what it is made of."""

    def carried(function: Any) -> Any:
        def call(*arguments: Any, **words: Any) -> Any:
            sent, rest = tree_flatten((arguments, words))
            tensors = [leaf for leaf in sent if isinstance(leaf, torch.Tensor)]
            assert tensors, function.__name__
            assert all(isinstance(tensor, pretended.Pretended) for tensor in tensors), f"{function.__name__}: of a CPU"
            below = [leaf.below if isinstance(leaf, torch.Tensor) else leaf for leaf in sent]
            arguments, words = tree_unflatten(below, rest)
            return function(*arguments, **words)

        return call

    class Operation(dist.P2POp):
        def __new__(cls, op: Any, tensor: Any, *rest: Any) -> Any:
            assert isinstance(tensor, pretended.Pretended), "a message of a CPU"
            return dist.P2POp(op, tensor.below, *rest)

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("objects travel as tensors of the host")

    objects = [name for name in dir(dist) if "object" in name and callable(getattr(dist, name))]
    with ExitStack() as stack:
        for name in ("all_gather", "send", "recv"):
            stack.enter_context(patch.object(shards.dist, name, carried(getattr(dist, name))))
        for name in objects:
            stack.enter_context(patch.object(shards.dist, name, refused))
        stack.enter_context(patch.object(shards.dist, "get_backend_config", lambda _=None: "cuda:nccl"))
        stack.enter_context(patch.object(shards, "dist", _With(shards.dist, P2POp=Operation)))
        stack.enter_context(patch.object(shards.Shard, "of", ShardThere.of))
        yield


class _With:
    """A module with other things in place of some."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module, self.__dict__["others"] = module, others

    def __getattr__(self, name: str) -> Any:
        return self.others[name] if name in self.others else getattr(self._module, name)


def on_gpus() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers of pretended GPUs, and what is copied to the host, and refused."""
    kept = {name: globals()[name] for name in ("FEATURES", "QUERIES", "SIGNAL", "STRENGTH", "SINGLE", "SINGLE_QUERIES")}
    with pretended.gpu(), only_from_gpus():
        globals().update({name: pretended.put(tensor) for name, tensor in kept.items()})
        try:
            problem = OnGpus("ring")
            found = numbers(problem, BASICS)
            p: Any = built(problem, "gaussian")
            u = SIGNAL[problem.own]
            with pretended.counting() as counts:
                p.average(u)
                nl.solve(nl.GradientFlow(nl.J(p), "degree"), u, t=2.0, integrator=nl.SemiImplicit(0.5), energies=False)
            told: dict[str, Any] = {"copies": counts.copies_to_host}
            try:
                sharded.affinity(nl.Gaussian(1.0), sharded.points(NODES[problem.own]), kept["FEATURES"][problem.own])
            except nl.InputError as error:
                told["features of a CPU"] = str(error)
        finally:
            globals().update(kept)
    return found, told


def built(problem: One, name: str) -> nl.Affinity:
    kernel, queries, weights = CASES[name]
    return problem.affinity(kernel, WEIGHTS if weights else None, FEATURES, QUERIES if queries else None)


def numbers(problem: One, names: tuple[str, ...], flows: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return what affinities, functionals, minimizers and some flows give, each as a whole."""
    found: dict[str, Any] = {}
    u = SIGNAL[problem.own]
    for name in names:
        p = built(problem, name)
        found[f"{name}: average"] = problem.whole(p, p.average(u))
        found[f"{name}: log degree"] = problem.whole(p, p.log_degree)
        found[f"{name}: log total"] = p.log_total()
        found[f"{name}: mean"] = p.mean(u, "l2")[0].cpu().numpy()
        both = p.symmetrized()
        found[f"{name}: push"] = problem.whole(both, both.push(u))
        functional = nl.E(p, u, problem.shard(p, STRENGTH))
        found[f"{name}: J"] = nl.J(p).value(2 * u)
        found[f"{name}: E"] = functional.value(2 * u)
        found[f"{name}: gradient"] = problem.whole(p, functional.gradient(2 * u))
        minimum = functional.minimizer(rtol=1e-12)
        found[f"{name}: minimizer"] = problem.whole(p, minimum.u)
    for name in flows:
        p = built(problem, name)
        e = nl.E(p, u, problem.shard(p, STRENGTH), measure="degree")
        l2 = nl.GradientFlow(e, "l2")
        runs: dict[str, tuple[Any, Any, Any, list[Any]]] = {
            "semi-implicit": (nl.GradientFlow(e, "degree"), 2.0, nl.SemiImplicit(0.3), [nl.Energy()]),
            "exponential": (nl.GradientFlow(e, "degree"), 2.0, nl.Exponential(), [nl.Energy()]),
            "runge-kutta": (nl.GradientFlow(e, "degree"), 2.0, nl.RungeKutta(), []),
            "euler": (l2, 9 * l2.safe_step, nl.ExplicitEuler(0.9 * l2.safe_step), [nl.DistanceToConstant()]),
            "stopped at rest": (nl.GradientFlow(e, "degree"), 99.0, nl.SemiImplicit(1.0), [nl.SteadyState(1e-3)]),
            "stopped at noise": (
                nl.GradientFlow(e, "degree"),
                9.0,
                nl.SemiImplicit(0.1),
                [nl.DiscrepancyPrinciple(u, 0.4)],
            ),
            "attention": (nl.AttentionFlow(p, u, 0.5), 3.0, nl.SemiImplicit(1.0), []),
            # Its limit is an eigenvalue, which is known without looking for it where k is positive definite.
            **({"neutreno": (nl.AttentionFlow(p, u, 0.5), 3.0, nl.NeutrenoStep(), [])} if p.symmetric else {}),
        }
        for how, (flow, t, integrator, trackers) in runs.items():
            solution = nl.solve(flow, u, t=t, integrator=integrator, trackers=trackers)
            assert solution.success, solution.message
            assert type(solution.final) is torch.Tensor
            found[f"{name}, {how}: u"] = problem.whole(p, solution.final)
            found[f"{name}, {how}: steps"] = float(solution.stats["steps"])
            if not isinstance(flow, nl.AttentionFlow):
                found[f"{name}, {how}: energy"] = solution.energy
            for record in solution.records.values():
                if "value" in record:
                    found[f"{name}, {how}: record"] = record["value"]
    for name, queries in (("keys", None), ("queries", SINGLE_QUERIES)):
        p = problem.affinity(nl.ExpDotProduct(scale=1.0), WEIGHTS, SINGLE, queries).symmetrized()
        found[f"float32, {name}: push"] = problem.whole(p, p.push(u.float())).astype(np.float64)
    p = problem.affinity(nl.ExpDotProduct(), WEIGHTS, SIGNAL)
    flow = nl.GradientFlow(nl.J(p), "degree", evolving=True, every=2)
    solution = nl.solve(flow, u, t=3.0, integrator=nl.SemiImplicit(0.5))
    found["evolving: u"], found["evolving: energy"] = problem.whole(p, solution.final), solution.energy
    return found


def memory(n: int, channels: int, build: Callable[[Any, Any], nl.Affinity]) -> float:
    """Return the peak of a step of a flow between n of this process's nodes in MiB."""

    def run(n: int, channels: int) -> None:
        u, features = torch.randn(n, channels), torch.randn(n, 8)
        p = build(np.arange(float(n)), features)
        nl.solve(nl.GradientFlow(nl.J(p), "degree"), u, t=1.0, integrator=nl.SemiImplicit(1.0), energies=False)

    run(n, 8)  # loads what is loaded once
    return peak_of(lambda: run(n, channels)) / 2**20


NODES_OF_ALL, CHANNELS = 512, 2**16  # a signal of 128 MiB


def memory_of_one() -> float:
    return memory(NODES_OF_ALL, CHANNELS, lambda x, f: nl.affinity(nl.ExpDotProduct(), nl.Points(x), f, method="tiled"))


def memory_of_many() -> float:
    return memory(
        NODES_OF_ALL // dist.get_world_size(), CHANNELS,
        lambda x, f: sharded.affinity(nl.ExpDotProduct(), sharded.points(x), f),
    )  # fmt: skip


def refusals() -> dict[str, str]:
    """Return what this process is told where one of the processes was given something useless."""
    last = dist.get_rank() == dist.get_world_size() - 1
    problem = Many("ring")
    p: Any = problem.affinity(nl.Gaussian(1.0), None, FEATURES)
    u, x = SIGNAL[problem.own], FEATURES[problem.own]
    domain = sharded.points(NODES[problem.own])
    spoiled = u.clone()
    spoiled[0] = float("nan") if last else 0.0
    attempts: dict[str, Callable[[], Any]] = {
        "nan in one process": lambda: p.average(spoiled),
        "channels that differ": lambda: p.average(u[:, :1] if last else u),
        "numpy": lambda: p.average(u.numpy()),
        "features that differ": lambda: sharded.affinity(nl.ExpDotProduct(), domain, x[:, :2] if last else x),
        "gradient": lambda: sharded.affinity(nl.ExpDotProduct(), domain, x.clone().requires_grad_(last)),
        "grid": lambda: sharded.affinity(nl.ExpDotProduct(), nl.Grid(len(u)), x),  # type: ignore[arg-type]
        "mode": lambda: sharded.affinity(nl.ExpDotProduct(), domain, x, mode="star"),
        "patches": lambda: sharded.affinity(nl.Patch(1.0), domain, x),
        "radial queries": lambda: sharded.affinity(nl.Gaussian(1.0), domain, x, queries=x),
        "memory": lambda: sharded.affinity(nl.Gaussian(1.0), domain, x, memory_limit=100),
        "spectrum": lambda: nl.solve(nl.GradientFlow(nl.J(p)), u, t=1.0, integrator=nl.ExplicitEuler(1e3)),
        "fidelity without shard": lambda: nl.E(p, u, STRENGTH[problem.own]),
        "push by queries": lambda: built(problem, "queries").push(u),
        "unknown operation": lambda: p.average(u).cumsum(0),
        "one node": lambda: p.average(u)[0],
        "a sum over nodes that is not seen": lambda: u.mT @ p.average(u),
        "where the largest is": lambda: p.average(u).max(0),
        "gradient of a signal": lambda: p.average(u.clone().requires_grad_(last)),
        "gradient of a shard": lambda: p.average(u).requires_grad_(),
        "rows of others": lambda: p.shard(STRENGTH),
        "nodes of a signal without channels": lambda: p.average(u[:, 0])[..., torch.arange(len(u))],
        "no shard": lambda: sharded.gather(u),
        "as NumPy": lambda: p.average(u).numpy(),
        "too few nodes": lambda: sharded.rows(1),
    }
    told = {}
    for name, attempt in attempts.items():
        try:
            attempt()
        except NlflowError as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


def resumed(problem: One, path: Path, *, write: bool) -> dict[str, Any]:
    """Return what whole runs give, and others that go on from a checkpoint, which are cut and written here or not."""
    found: dict[str, Any] = {}
    u = SIGNAL[problem.own]
    p = problem.affinity(nl.ExpDotProduct(), WEIGHTS, SIGNAL)
    e = nl.E(p, u, problem.shard(p, STRENGTH))
    runs: dict[str, tuple[Any, Any]] = {
        "evolving": (nl.GradientFlow(nl.J(p), "degree", evolving=True, every=2), nl.SemiImplicit(0.5)),
        "runge-kutta": (nl.GradientFlow(e, "degree"), nl.RungeKutta()),
    }
    for name, (flow, integrator) in runs.items():
        file = f"{path}.{name}"

        def solve(flow: Any = flow, integrator: Any = integrator, **more: Any) -> nl.Solution:
            return nl.solve(flow, u, t_eval=[0.0, 1.0, 3.0, 4.0], integrator=integrator, **more)

        if write:
            steps = iter(range(99))
            stop = nl.Callback(lambda *_, steps=steps: next(steps) >= 5)
            solve(trackers=[nl.Energy(), stop, nl.Checkpoint(file, seconds=0)])
        for how, resume in (("whole", None), ("resumed", file)):
            solution = solve(trackers=[nl.Energy()], resume=resume)
            found[f"{name}, {how}: u"] = problem.whole(p, solution.final)
            found[f"{name}, {how}: first"] = problem.whole(p, solution.u[1])
            found[f"{name}, {how}: energy"] = solution.energy
            found[f"{name}, {how}: applications"] = float(solution.stats["applications"])
        try:
            nl.solve(flow, 2 * u, t_eval=[0.0, 1.0, 3.0, 4.0], integrator=integrator, resume=file)
        except nl.FileFormatError as error:
            found[f"{name}: refused"] = np.array("belongs to another problem" in str(error))
    return found


TIMEOUT = 2.0  # seconds


def lost(how: str, group: Any) -> dict[str, Any]:
    """Return how this process ends where the last one is killed in the third step, or sleeps beyond the timeout."""
    problem = Many("ring", group)
    p = problem.affinity(nl.Gaussian(1.0), None, FEATURES)
    found: dict[str, Any] = {}

    def third(t: float, u: Any, flow: Any) -> None:
        del u, flow
        if t == 3.0:
            found["since"] = time.monotonic()
            if dist.get_rank() == dist.get_world_size() - 1:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(2 * TIMEOUT)

    try:
        nl.solve(
            nl.GradientFlow(nl.J(p), "degree"), SIGNAL[problem.own], t=9.0, integrator=nl.SemiImplicit(1.0),
            trackers=[nl.Callback(third)],
        )  # fmt: skip
    except sharded.ProcessError as error:
        found["error"], found["seconds"] = str(error), time.monotonic() - found["since"]
        begin = time.monotonic()
        try:
            p.average(SIGNAL[problem.own])
        except sharded.ProcessError as again:
            found["again"], found["at once"] = str(again), time.monotonic() - begin
    return found


def main(job: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", timeout=datetime.timedelta(seconds=60), init_method=os.environ.get("INIT", "env://"),
        rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]),
    )  # fmt: skip
    rank = dist.get_rank()

    def write(name: str, found: dict[str, Any]) -> None:
        Path(f"{out}.{name}.{rank}.json").write_text(json.dumps(found))

    if job == "gpus":
        found, told = on_gpus()
        np.savez(f"{out}.ring.{rank}.npz", **found)
        write("told", told)
        dist.destroy_process_group()
        return
    if job == "basics":
        np.savez(f"{out}.ring.{rank}.npz", **numbers(Many("ring"), BASICS))
        dist.destroy_process_group()
        return
    write("refusals", refusals())
    if job == "numbers":
        np.savez(f"{out}.ring.{rank}.npz", **numbers(Many("ring"), EVERYTHING, BASICS))
        np.savez(f"{out}.gather.{rank}.npz", **numbers(Many("gather"), BASICS))
        np.savez(f"{out}.written.{rank}.npz", **resumed(Many("ring"), Path(out).parents[1] / "checkpoint", write=True))
        share = memory_of_many()
        dist.destroy_process_group()
        write("memory", {"share": share, "one": memory_of_one() if rank == 0 else None})
        return
    np.savez(f"{out}.ring.{rank}.npz", **numbers(Many("ring"), BASICS))
    np.savez(f"{out}.resumed.{rank}.npz", **resumed(Many("ring"), Path(out).parents[1] / "checkpoint", write=False))
    short = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT))
    write("stalled", lost("stalled", short))
    write("killed", lost("killed", None))
    os._exit(0)  # a group that has lost a process cannot be left in order


if __name__ == "__main__":
    main(*sys.argv[1:])
