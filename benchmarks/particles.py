"""Forces of Morse particles in the plane, against KeOps, torch and a plain compiled loop; and what momentum is left.

All in float32 on the same threads, with the nanoseconds of processor time of an ordered pair as the measure. KeOps is
timed where it is installed. ``python -m benchmarks particles`` takes 65 536 particles, with ``--small`` 8 192.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from benchmarks.harness import Row, interleaved, missing
from nlflow.flows import ParticleFlow
from nlflow.kernels import Morse

NODES, FEW = 65_536, 8_192
DENSE = 4_096


@njit(parallel=True)
def _naive(x: Any, out: Any) -> None:
    """What one would write: two loops and the library's exponential."""
    for i in prange(len(x)):
        first, second = np.float32(0), np.float32(0)
        for j in range(len(x)):
            a, b = x[i, 0] - x[j, 0], x[i, 1] - x[j, 1]
            r = np.sqrt(a * a + b * b)
            if r > 0:
                g = (np.float32(2) * np.exp(np.float32(-2) * r) - np.float32(0.5) * np.exp(-r)) / r
                first += g * a
                second += g * b
        out[i, 0], out[i, 1] = first / len(x), second / len(x)


def _torch(x: Any) -> Any:
    gaps = x[:, None] - x[None]
    r = torch.sqrt((gaps * gaps).sum(-1)).clamp_min(1e-20)
    g = (2 * torch.exp(-2 * r) - 0.5 * torch.exp(-r)) / r
    return (g[..., None] * gaps).sum(dim=1) / len(x)


def _keops(x: Any) -> Callable[[], Any]:
    from pykeops.numpy import Genred

    r = "Norm2(x - y)"
    slope = f"(IntCst(2) * Exp(IntCst(-2) * {r}) - Inv(IntCst(2)) * Exp(Minus({r})))"
    reduction = Genred(
        f"{slope} * Inv({r} + e) * (x - y)", ["x = Vi(2)", "y = Vj(2)", "e = Pm(1)"], reduction_op="Sum", axis=1
    )
    least = np.array([1e-20], np.float32)
    return lambda: reduction(x, x, least, backend="CPU") / len(x)


def run(small: bool = False) -> list[Row]:
    count = FEW if small else NODES
    x = np.random.default_rng(0).uniform(size=(count, 2)).astype(np.float32)
    flow, few = ParticleFlow(x, Morse()), x[:DENSE]
    targets = {"KeOps": 20.0, "torch, dense": None, "numba, two loops": None}
    absent = missing("particles", f"forces of {count} Morse particles", "pykeops", f">= {targets['KeOps']:g}")
    keops = None if absent else _keops(x)
    beside, out = ParticleFlow(few, Morse()), np.empty_like(few)
    # All compute the same; then each is timed.
    found, size = flow.velocity(x), float(np.abs(flow.velocity(x)).max())
    _naive(few, out)
    assert np.abs(out - beside.velocity(few)).max() < 1e-5 * size
    assert np.abs(_torch(torch.from_numpy(few)).numpy() - beside.velocity(few)).max() < 1e-5 * size
    if keops is not None:
        assert np.abs(keops() - found).max() < 1e-5 * size
    pairs = {"nlflow": count, "torch, dense": DENSE, "numba, two loops": DENSE}
    tasks: dict[str, Callable[[], Any]] = {
        "nlflow": lambda: flow.velocity(x),
        "torch, dense": lambda: _torch(torch.from_numpy(few)),
        "numba, two loops": lambda: _naive(few, out),
    }
    if keops is not None:
        pairs["KeOps"], tasks["KeOps"] = count, keops
    times = interleaved(tasks, repeats=3, clock=time.process_time)
    each = {name: 1e9 * seconds / pairs[name] ** 2 for name, seconds in times.items()}
    rows = [] if absent is None else [absent]
    rows += [
        Row.of(
            "particles", f"forces of {count} Morse particles in 2-D, float32, against {name} ({pairs[name]} particles)",
            f"{each[name]:.2f} ns a pair", f"{each['nlflow']:.3f} ns a pair", each[name] / each["nlflow"], least=target,
        )
        for name, target in targets.items() if name in each
    ]  # fmt: skip
    left = float(np.abs(flow.momentum(x)).max()) / float(np.abs(found).mean())
    work = "total momentum over the mean size of a velocity, float32"
    return [*rows, Row.of("particles", work, "0", f"{left:.1e}", left, most=1e-7)]
