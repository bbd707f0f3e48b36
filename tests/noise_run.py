"""What the tests of counted noise run in other processes: ``python noise_run.py JOB OUT``."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

import nlflow as nl

N = 1001
"""An odd number, so that pairs of nodes are cut between processes."""
NODES = np.arange(float(N))
SEED = 2**63 + 5


def noise(**more: Any) -> nl.Noise:
    return nl.Noise(beta=20.0, rng=SEED, **more)


def run(count: int = 200, **more: Any) -> nl.Solution:
    """Return a run of a stiff flow with noise, of one process."""
    weights = nl.affinity(nl.Gaussian(width=3.0), nl.Grid(N), window=5)
    flow = nl.GradientFlow(nl.J(weights), "degree") + nl.AllenCahn(interval=(-4.0, 4.0)) + noise()
    start = np.stack([np.zeros(N), np.ones(N)], axis=-1)
    step = nl.EulerMaruyama(0.01)
    return nl.solve(flow, start, t_eval=[0.0, 0.505, 0.01 * count], integrator=step, energies=False, **more)


def threads(out: str) -> None:
    from nlflow.flows import normals

    np.savez(out, u=run().u, normals=normals(SEED, (N, 300), node=3, channel=2, step=7, stream=1))


def alone(affinity: Any, u: Any, wide: float) -> Any:
    """Return the flow whose nodes see themselves only (`wide` is 0.05 then), and a start."""
    return nl.GradientFlow(nl.E(affinity(nl.Gaussian(wide)), u, 1.0), "l2") + noise()


def sharded(out: str) -> None:
    import torch
    import torch.distributed as dist

    from nlflow.affinities import sharded

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["INIT"], rank=rank, world_size=size)
    own = sharded.rows(N)
    x, u = torch.from_numpy(NODES[own, None]), torch.zeros(len(NODES[own]), 2, dtype=torch.float64)
    found = {}
    for wide in (0.05, 3.0):
        flow = alone(lambda kernel: sharded.affinity(kernel, sharded.points(NODES[own]), x), u, wide)
        increments = flow.noise.increments(flow, flow.check_signal("u", u), 4, 0.1)
        path = nl.solve(flow, u, t=1.0, integrator=nl.EulerMaruyama(0.1)).final
        found[f"noise {wide}"] = sharded.gather(increments).numpy()
        found[f"path {wide}"] = sharded.gather(flow.affinity.shard(path)).numpy()
        try:
            nl.GradientFlow(nl.J(flow.affinity)) + nl.Noise(beta=1.0)
        except nl.InputError as error:
            found["refused"] = np.array(str(error))
    if rank == 0:
        np.savez(out, **found)
    dist.destroy_process_group()


def killed(out: str) -> None:
    """Run with a checkpoint after each step, and end this process in the middle of one."""
    import signal

    from nlflow.flows import Callback

    steps = iter(range(10**6))

    def die(*_: Any) -> None:
        if next(steps) == 63:
            os.kill(os.getpid(), signal.SIGKILL)

    run(trackers=[nl.Checkpoint(out, seconds=0), Callback(die)])


if __name__ == "__main__":
    {"threads": threads, "sharded": sharded, "killed": killed}[sys.argv[1]](sys.argv[2])
