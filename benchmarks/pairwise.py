"""Exact sums over all pairs, against KeOps, torch, a plain compiled loop and NumPy, and against the machine's limits.

All in float32, with the nanoseconds of a pair as the measure, so that peers whose matrix does not fit are timed on
fewer nodes. Ours at 65 536 nodes for low-dimensional features, at 16 384 for dot products. The kernel is so wide that
no block of nodes is skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit, prange

from benchmarks import limits
from benchmarks.harness import Row, interleaved, missing
from benchmarks.resident import traced
from nlflow import ExpDotProduct, Gaussian, Points, affinity

NODES, FEWER, DENSE = 65_536, 16_384, 8_192
WIDTH = 0.5


def run() -> list[Row]:
    rows = []
    for d in (1, 2, 3):
        rows += gaussian(d)
    for d in (8, 64):
        rows += attention(d)
    return [*rows, accuracy()]


@njit(parallel=True)
def _naive(x: Any, v: Any, out: Any) -> None:
    """What one would write: two loops and the library's exponential."""
    for i in prange(len(x)):
        total, mass = np.float32(0), np.float32(0)
        for j in range(len(x)):
            square = np.float32(0)
            for c in range(x.shape[1]):
                square += (x[i, c] - x[j, c]) ** 2
            k = np.exp(np.float32(-0.5 / WIDTH**2) * square)
            total += k * v[j]
            mass += k
        out[i] = total / mass


def _numpy(x: Any, v: Any) -> Any:
    square = np.zeros((len(x), len(x)), np.float32)
    for c in range(x.shape[1]):
        square += (x[:, None, c] - x[None, :, c]) ** 2
    k = np.exp(np.float32(-0.5 / WIDTH**2) * square)
    return (k @ v) / k.sum(axis=1)


def _torch(x: Any, v: Any) -> Any:
    square = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") ** 2
    k = torch.exp(square * (-0.5 / WIDTH**2))
    return (k @ v) / k.sum(dim=1)


def _keops(x: Any, v: Any) -> Callable[[], Any]:
    from pykeops.numpy import Genred

    d = x.shape[1]
    names = [f"x = Vi({d})", f"y = Vj({d})", "v = Vj(1)"]
    formula = f"Exp(IntCst(-1) * SqDist(x, y) * Inv(IntCst({round(2 * WIDTH**2 * 1000)}))  * IntCst(1000))"
    # One pass over both sums: the value and the degree.
    reduction = Genred(f"{formula} * Concat(v, IntCst(1))", names, reduction_op="Sum", axis=1)

    def average() -> Any:
        sums = reduction(x, x, v[:, None], backend="CPU")
        return sums[:, 0] / sums[:, 1]

    return average


def gaussian(d: int) -> list[Row]:
    rng = np.random.default_rng(0)
    x, v = rng.uniform(size=(NODES, d)).astype(np.float32), rng.normal(size=NODES).astype(np.float32)
    ours = affinity(Gaussian(WIDTH), Points(np.zeros(NODES)), x, method="pairwise")
    targets = {"KeOps": 15.0, "torch, dense": 50.0, "NumPy, dense": None, "numba, two loops": None}
    what = f"Gaussian average of {NODES} nodes, d = {d}, D = 1, float32"
    absent = missing("pairwise", what, "pykeops", f">= {targets['KeOps']:g}")
    keops = {} if absent else {"KeOps": _keops(x, v)}
    few, values = torch.from_numpy(x[:DENSE]), torch.from_numpy(v[:DENSE])
    out = np.empty(FEWER, np.float32)
    # All compute the same; then each is timed.
    expected = ours.average(v)
    small = affinity(Gaussian(WIDTH), Points(np.zeros(DENSE)), x[:DENSE], method="pairwise").average(v[:DENSE])
    assert all(np.abs(peer() - expected).max() < 1e-4 for peer in keops.values())
    assert np.abs(_torch(few, values).numpy() - small).max() < 1e-4
    assert np.abs(_numpy(x[:DENSE], v[:DENSE]) - small).max() < 1e-4
    pairs = {"nlflow": NODES, "KeOps": NODES, "torch, dense": DENSE, "NumPy, dense": DENSE, "numba, two loops": FEWER}
    times = interleaved(
        {
            "nlflow": lambda: ours.average(v),
            **keops,
            "torch, dense": lambda: _torch(few, values),
            "NumPy, dense": lambda: _numpy(x[:DENSE], v[:DENSE]),
            "numba, two loops": lambda: _naive(x[:FEWER], v[:FEWER], out),
        },
        repeats=5,
    )
    each = {name: 1e9 * seconds / pairs[name] ** 2 for name, seconds in times.items()}
    rows = [] if absent is None else [absent]
    for name, target in targets.items():
        if name not in each:
            continue
        ratio = each[name] / each["nlflow"]
        rows.append(
            Row.of(
                "pairwise",
                f"{what}, against {name} ({pairs[name]} nodes)",
                f"{each[name]:.2f} ns a pair", f"{each['nlflow']:.3f} ns a pair", ratio, least=target,
            )
        )  # fmt: skip
    rate, ours_rate = limits.exponentials("float32"), 1e9 / each["nlflow"]
    work = f"d = {d}: exponentials a second, against no more than exponentials of numbers in the first cache"
    texts = (f"{speed / 1e9:.2f} G/s" for speed in (rate, ours_rate))
    rows.append(Row.of("pairwise", work, *texts, ours_rate / rate))
    if d == 1:
        with traced() as taken:
            affinity(Gaussian(WIDTH), Points(np.zeros(NODES)), x, method="pairwise").average(v)
        matrix = 4 * NODES**2
        work = "peak memory of an affinity and an average, over that of the matrix"
        texts = f"{matrix / 2**30:.0f} GiB", f"{taken.bytes / 2**20:.1f} MiB"
        rows.append(Row.of("pairwise", work, *texts, taken.bytes / matrix, most=0.01))
    return rows


def attention(d: int) -> list[Row]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(FEWER, d)).astype(np.float32) for _ in range(3))
    ours = affinity(ExpDotProduct(), Points(np.zeros(FEWER)), k, queries=q, method="pairwise")
    heads = [torch.from_numpy(a)[None, None] for a in (q, k, v)]

    def peer() -> Any:
        return torch.nn.functional.scaled_dot_product_attention(*heads)

    assert np.abs(peer()[0, 0].numpy() - ours.average(v)).max() < 1e-4
    times = interleaved({"nlflow": lambda: ours.average(v), "torch": peer}, repeats=9)
    each = {name: 1e9 * seconds / FEWER**2 for name, seconds in times.items()}
    # 4 d operations of matrix products and one exponential a pair.
    least = 1e9 * (4 * d / limits.products("float32") + 1 / limits.exponentials("float32"))
    ours_time, torch_time, least_time = (f"{t:.2f} ns a pair" for t in (each["nlflow"], each["torch"], least))
    work = f"dot-product average of {FEWER} nodes, d = D = {d}, float32, against torch attention"
    share = f"d = D = {d}: share of the limit, {4 * d} operations at the rate of matrix products and one exponential"
    ratio, target = each["torch"] / each["nlflow"], 2.0 if d == 8 else 0.95
    return [
        Row.of("pairwise", work, torch_time, ours_time, ratio, least=target),
        Row.of("pairwise", share, least_time, ours_time, least / each["nlflow"]),
    ]


def accuracy() -> Row:
    """Sums of 10^6 terms in float32, at sampled rows, against float64."""
    n = 10**6
    rng = np.random.default_rng(0)
    x, v = rng.uniform(size=(n, 2)).astype(np.float32), rng.uniform(size=n).astype(np.float32)
    rows = np.sort(rng.choice(n, 20, replace=False))
    p = affinity(Gaussian(0.2), Points(np.zeros(n)), x, method="pairwise")
    sums, totals, peaks = p.pairs(v[:, None], rows)
    units = np.exp(peaks)
    worst = 0.0
    for row, value, total in zip(rows, sums[:, 0] * units, totals * units, strict=True):
        k = np.exp(-np.sum((x[row].astype(np.float64) - x) ** 2, axis=1) / (2 * 0.2**2))
        exact = math.fsum(k * v) / n, math.fsum(k) / n
        worst = max(worst, abs(value / exact[0] - 1), abs(total / exact[1] - 1))
    work = "relative error of float32 sums over 10^6 nodes, 20 rows"
    return Row.of("pairwise", work, "none", f"{worst:.1e}", worst, most=1e-5)
