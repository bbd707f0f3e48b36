"""Flows on tensors, on a GPU or on the CPU: ``python -m benchmarks.gpu --out DIR [--device cpu] [--quick]``.

First the denoiser (`benchmarks.tensors`), and flows of 2^20 nodes beside fused attention alone, which does equal work;
then operations, synchronizations and copies (`benchmarks.counts`); steps of the J-flow beside fused attention (with
FlashAttention-3 and -4 where torch can take them), attention by a matrix, and KeOps where it is installed; peak memory;
the J-flow and the equilibrium of E; rounding of float32; and the loops of the CPU on two of its threads.
``gpu.json``, and ``gpu.md`` for people, are written after each row, so that a run that is cut short keeps what it has
measured. No row is begun that would not end in time, as far as rows before it tell.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from benchmarks import counts, replayed, tensors
from benchmarks.harness import keep, listed, machine
from nlflow import (
    E,
    ExpDotProduct,
    ExplicitEuler,
    Exponential,
    Gaussian,
    GradientFlow,
    J,
    Laplace,
    Points,
    affinity,
    solve,
)
from nlflow.errors import format_bytes
from nlflow.kernels import Matern, RationalQuadratic
from validation.tables import markdown

REPEATS, LONG, COMPILED = 5, 4.0, 20.0
"""Timed runs after one that warms up; one that takes longer than this many seconds is its own measurement, unless it
may have been the compiler that took them."""

WIDTHS = (8, 64, 128)
PEERS = ("nlflow", "sdpa", "matrix")
OTHERS = ("sdpa-fa3", "sdpa-fa4", "keops")
"""Peers that are rarely there: they are asked for at one size."""

STEPS = {torch.float32: 2, torch.bfloat16: 10}
"""Steps of a large flow: a step of 2^20 nodes in float32 takes some 10 s."""
CPU_THREADS = 2
TIME, FIDELITY = 8.0, 1.0
SAMPLED = 64  # rows that are computed in float64, to know the error of a step
CONSERVED = 1e-6  # what float32 may change a mean by, over the largest value


class Log:
    """Rows, in a file that is complete after each of them, and the time that is left."""

    def __init__(self, out: Path | None, device: str, seconds: float) -> None:
        self._out, self._end = out, time.perf_counter() + seconds
        self.rows: list[dict[str, Any]] = []
        self.about = {**machine(), **hardware(device)}
        self._known: dict[tuple[Any, ...], tuple[int, float, int]] = {}

    @property
    def left(self) -> float:
        return self._end - time.perf_counter()

    def add(self, finished: bool = False, **row: Any) -> None:
        self.rows += [row] if row else []
        if row:
            print("  ".join(f"{key}={_shown(value)}" for key, value in row.items()), flush=True)
        if self._out is not None:
            content = {"about": self.about, "finished": finished, "rows": self.rows}
            keep(self._out, "gpu", content, page(self.about, self.rows, finished))

    def run(self, what: str, n: int, work: Callable[[], dict[str, Any]], share: float = 1.0, **labels: Any) -> None:
        """Do the work of one row, unless fewer nodes took so long that it would not end in time; O(n^2) is assumed."""
        # A shape says how many nodes there are, as n does.
        key = (what, *(value for name, value in labels.items() if name != "shape"))
        before, seconds, repeats = self._known.get(key, (n, 0.0, 1))
        expected = seconds * (n / before) ** 2
        expected *= 1 if repeats == 1 or expected > LONG else 1 + REPEATS
        row = {"what": what, **labels, "n": n}
        if expected > share * self.left:
            self.add(**row, status=f"left out: about {expected:.0f} s, {self.left:.0f} s are left")
            return
        try:
            row |= {"status": "measured", **work()}
        except Exception as error:  # one row, of whatever package; the others still count
            row["status"] = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # for other packages, which take memory of their own
        if "seconds" in row:
            self._known[key] = (n, row["seconds"], row["repeats"])
        self.add(**row)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


HEADINGS = {
    "large": "Large flows: a step of the J-flow beside fused attention alone, n nodes, d columns each",
    "step": "Steps: softmax(k kᵀ / √d) v of n nodes, d columns each",
    "replayed": "Steps that are recorded once, beside those that the host starts",
    "counts": "Operations, synchronizations and copies",
    "energy": "Rounding: relative errors of J against sums in float64",
    "radial step": "Kernels of distances",
    "loops of the CPU": "Compiled loops of the CPU",
    "denoise": "The denoiser",
    "J-flow": "The J-flow of attention, four columns",
    "equilibrium": "The equilibrium of E, four columns",
}


def page(about: dict[str, Any], rows: list[dict[str, Any]], finished: bool) -> str:
    """Return the rows as Markdown, a table for each kind of them; what is not measured says why in the last column."""
    parts = ["# Flows on tensors", *([] if finished else ["The run was cut short: rows are missing."])]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        title = HEADINGS.get(row["what"], row["what"])
        title += ", elsewhere" if row["status"].startswith("published") else ""
        without = ("what", "n") if "shape" in row else ("what",)
        kinds.setdefault(title, []).append({k: v for k, v in row.items() if k not in without and v is not None})
    for title, own in kinds.items():
        heads = [head for head in dict.fromkeys(key for row in own for key in row) if head != "status"]
        lines = [
            [*(_cell(head, row[head]) if head in row else "" for head in heads),
             "" if row["status"] == "measured" else str(row["status"]).replace("|", "/")]
            for row in own
        ]  # fmt: skip
        names = [head.removesuffix("_bytes").replace("_", " ") for head in heads]
        parts += [f"## {title}", markdown((*names, ""), lines)]
    return "\n\n".join([*parts, f"Machine and versions:\n\n{listed(about)}"]) + "\n"


def _cell(head: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{_shown(value[0])} to {_shown(value[-1])}"
    if head.endswith("_bytes"):
        return format_bytes(value)
    if head == "n" and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else _shown(value)


def hardware(device: str) -> dict[str, Any]:
    if device == "cpu":
        return {"device": "cpu", "torch_threads": torch.get_num_threads()}
    about = torch.cuda.get_device_properties(0)
    return {
        "device": about.name, "capability": f"{about.major}.{about.minor}", "device_bytes": about.total_memory,
        "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "matmul": torch.get_float32_matmul_precision(),
    }  # fmt: skip


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure(task: Callable[[], Any], device: str, long: float = LONG) -> dict[str, Any]:
    """Return the median seconds of a task, how often it was run for that, and the peak of memory that it took.

    One that takes longer than `long` seconds is run once; a second time where the first may have compiled something.
    """
    before = None
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()

    def once() -> float:
        synchronize(device)
        start = time.perf_counter()
        task()
        synchronize(device)
        return time.perf_counter() - start

    first = once()
    peak = None if before is None else torch.cuda.max_memory_allocated() - before
    if first > long:
        if first < COMPILED:
            first = once()
        return {"seconds": first, "repeats": 1, "peak_bytes": peak}
    repeats = REPEATS if first > 0.02 else 5 * REPEATS
    return {"seconds": statistics.median(once() for _ in range(repeats)), "repeats": repeats, "peak_bytes": peak}


# ---- steps


def problem(n: int, d: int, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    """Return keys and values, standard normal, (n, d) each."""
    generator = torch.Generator(device).manual_seed(0)
    keys, values = (torch.randn(n, d, generator=generator, device=device).to(dtype) for _ in range(2))
    return keys, values


def domain(n: int) -> Points:
    return Points(np.arange(float(n)))


def error_of(average: Any, keys: Any, values: Any) -> float:
    """Return how far rows of a softmax average are off, over the largest value, against sums in float64."""
    rows = torch.linspace(0, len(keys) - 1, SAMPLED, device=keys.device).long()
    k, v = keys.double(), values.double()
    exact = torch.softmax(k[rows] @ k.T / math.sqrt(keys.shape[1]), dim=-1) @ v
    return float((average[rows].double() - exact).abs().max() / v.abs().max())


def average_by(peer: str, keys: Any, values: Any) -> Callable[[], Any] | str:
    """Return what computes softmax(k k^T / sqrt(d)) v, or why it cannot be done."""
    n, d = keys.shape
    if why := activate(peer.removeprefix("sdpa-").upper() if "-" in peer else "", keys):
        return why
    if peer == "nlflow":
        # Signals stay in float32; averages round them, which is part of a step.
        p, signal = affinity_of(keys), values.float()
        return lambda: p.average(signal)
    if peer.startswith("sdpa"):
        q, v = keys[None, None], values[None, None]

        def fused() -> Any:
            with only_fused():
                return torch.nn.functional.scaled_dot_product_attention(q, q, v)[0, 0]

        return fused
    if peer == "matrix":
        needed, free = 4 * n * n * keys.element_size(), free_bytes(keys)
        if needed > free:
            return f"does not fit: about {needed} bytes, {free} are free"
        return lambda: torch.softmax(keys @ keys.T / math.sqrt(d), dim=-1) @ values
    try:
        from pykeops.torch import LazyTensor
    except ImportError as error:
        return f"not installed: {error}"
    if keys.dtype == torch.bfloat16:
        return "not supported: KeOps has no bfloat16"

    def lazily(k: Any, v: Any) -> Any:
        logits = LazyTensor(k[:, None] / math.sqrt(d)) | LazyTensor(k[None])
        return logits.sumsoftmaxweight(LazyTensor(v[None]), dim=1)

    lazily(keys[:16], values[:16])  # compiles
    return lambda: lazily(keys, values)


def activate(name: str, like: Any) -> str:
    """Let torch take an implementation of FlashAttention (FA3, FA4) from here on, or return why it cannot."""
    attention = torch.nn.attention
    if getattr(attention, "current_flash_attention_impl", lambda: None)() is not None:
        attention.restore_flash_attention_impl()
    if not name:
        return ""
    if like.device.type != "cuda" or like.dtype == torch.float32:
        return "not measured: it is for bfloat16 on a GPU"
    if not hasattr(attention, "activate_flash_attention_impl"):
        return f"not supported: torch {torch.__version__} has no activate_flash_attention_impl"
    try:
        attention.activate_flash_attention_impl(name)
        few = like[None, None, :128]
        with only_fused():
            torch.nn.functional.scaled_dot_product_attention(few, few, few)
    except (ImportError, RuntimeError, ValueError) as error:
        return f"not to be had: {' '.join(str(error).split())[:200]}"
    return ""


@contextmanager
def only_fused() -> Iterator[None]:
    """Forbid attention by a matrix, which torch would take without a word."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    names = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION")  # the last since torch 2.5
    with sdpa_kernel([getattr(SDPBackend, name) for name in names if hasattr(SDPBackend, name)]):
        yield


def free_bytes(like: Any) -> int:
    return torch.cuda.mem_get_info()[0] if like.device.type == "cuda" else 2**32


def steps(log: Log, device: str, sizes: list[int], widths: tuple[int, ...], peers: tuple[str, ...]) -> None:
    for n in sizes:
        for d in widths:
            for dtype in (torch.float32, torch.bfloat16):
                for peer in peers:

                    def work(n: int = n, d: int = d, dtype: Any = dtype, peer: str = peer) -> dict[str, Any]:
                        keys, values = problem(n, d, dtype, device)
                        task = average_by(peer, keys, values)
                        if isinstance(task, str):
                            return {"status": task}
                        found = measure(task, device)
                        rate = 4 * n * n * d / found["seconds"] / 1e12
                        return {**found, "tflops": rate, "error": error_of(task(), keys, values)}

                    log.run("step", n, work, 0.3, d=d, dtype=name_of(dtype), peer=peer)


def large(log: Log, device: str, n: int, d: int) -> None:
    """Flows of many nodes: one average, and a step of a flow as it is solved, beside fused attention of the shape."""
    for dtype in (torch.bfloat16, torch.float32):

        def work(dtype: Any = dtype) -> dict[str, Any]:
            keys, values = problem(n, d, dtype, device)
            bare, own = (average_by(peer, keys, values) for peer in ("sdpa", "nlflow"))
            if isinstance(bare, str) or isinstance(own, str):
                raise RuntimeError(bare if isinstance(bare, str) else own)
            alone, found = measure(bare, device)["seconds"], measure(own, device)
            p = affinity_of(keys)
            flow, count = GradientFlow(J(p), "degree"), STEPS[dtype]
            integrator = ExplicitEuler(0.5)

            def run() -> Any:
                return solve(flow, values.float(), t=0.5 * count, integrator=integrator, energies=False)

            solved = measure(run, device)["seconds"] / count
            return {
                **found, "attention": alone, "flow_step": solved, "average_of_attention": alone / found["seconds"],
                "flow_of_attention": alone / solved, "tflops": 4 * n * n * d / found["seconds"] / 1e12,
                "error": error_of(own(), keys, values), "error_attention": error_of(bare(), keys, values),
                "by": p.how,
            }  # fmt: skip

        log.run("large", n, work, d=d, dtype=name_of(dtype))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def affinity_of(keys: Any) -> Any:
    """Return the affinity of exp(k_i . k_j / sqrt(d)); of keys in half precision one of float32 signals, rounded."""
    if keys.dtype == torch.float32:
        return affinity(ExpDotProduct(), domain(len(keys)), keys, method="tiled")
    return affinity(ExpDotProduct(), domain(len(keys)), keys.float(), method="tiled", precision=name_of(keys.dtype))


def radial_steps(log: Log, device: str, n: int) -> None:
    """Kernels of distances: the Gaussian by fused attention, others by a Triton kernel or in tiles."""
    for kernel in (Gaussian(2.0), Laplace(2.0), Matern(2.0, 2.5), RationalQuadratic(2.0)):

        def work(kernel: Any = kernel) -> dict[str, Any]:
            keys, values = problem(n, 8, torch.float32, device)
            p = affinity(kernel, domain(n), keys, method="tiled")
            found = measure(lambda: p.average(values), device)
            return {**found, "error": radial_error(kernel, p.average(values), keys, values), "by": p.how}

        log.run("radial step", n, work, 0.3, kernel=type(kernel).__name__)


def radial_error(kernel: Any, average: Any, keys: Any, values: Any) -> float:
    """Return how far rows of an average are off, over the largest value, against sums in float64."""
    rows = torch.linspace(0, len(keys) - 1, SAMPLED, device=keys.device).long()
    k, v = keys.double(), values.double()
    weights = torch.exp(kernel.log_profile(((k[rows, None] - k) ** 2).sum(-1)))
    exact = weights @ v / weights.sum(-1, keepdim=True)
    return float((average[rows].double() - exact).abs().max() / v.abs().max())


def loops(log: Log, sizes: list[int]) -> None:
    """The compiled loops of the CPU, on two threads, and how much faster the device was."""
    threads = numba.get_num_threads()
    numba.set_num_threads(min(CPU_THREADS, threads))
    try:
        for n in sizes:
            for d in WIDTHS[:2]:

                def work(n: int = n, d: int = d) -> dict[str, Any]:
                    keys, values = (a.numpy() for a in problem(n, d, torch.float32, "cpu"))
                    affinity(ExpDotProduct(), domain(64), keys[:64], method="pairwise").average(values[:64])  # compiles
                    p = affinity(ExpDotProduct(), domain(n), keys, method="pairwise")
                    found = measure(lambda: p.average(values), "cpu")
                    wanted = {"what": "step", "n": n, "d": d, "dtype": "float32", "peer": "nlflow"}
                    same = [r for r in log.rows if wanted.items() <= r.items() and "seconds" in r]
                    ratio = found["seconds"] / same[0]["seconds"] if same else None
                    return {**found, "threads": numba.get_num_threads(), "times_slower_than_device": ratio}

                log.run("loops of the CPU", n, work, 0.2, d=d)
    finally:
        numba.set_num_threads(threads)


# ---- flows and equilibria


def flow_problem(n: int, device: str) -> tuple[Any, Any]:
    keys, values = problem(n, 8, torch.float32, device)
    return affinity(ExpDotProduct(), domain(n), keys, method="tiled"), values[:, :4].contiguous()


def j_flow(n: int, device: str) -> dict[str, Any]:
    p, u = flow_problem(n, device)
    flow = GradientFlow(J(p), "degree")
    began, before = time.perf_counter(), peak_begins(device)
    solution = solve(flow, u, t=TIME, integrator=Exponential())
    synchronize(device)
    seconds = time.perf_counter() - began
    if not solution.success:
        raise RuntimeError(solution.message)
    measure_ = p.measure("degree", u)[:, None]  # float64, as the sums are
    drift = (measure_ * (solution.final.double() - u.double())).sum(0).abs().max() / u.abs().max()
    return {
        "seconds": seconds, "repeats": 1, "peak_bytes": peak_ends(device, before), "t": TIME,
        "applications": solution.stats["applications"], "energy": [float(e) for e in solution.energy],
        "mean_drift": float(drift), "conserved": bool(drift <= CONSERVED),
    }  # fmt: skip


def equilibrium(n: int, device: str) -> dict[str, Any]:
    p, f = flow_problem(n, device)
    functional = E(p, f, FIDELITY, measure="degree")
    began, before = time.perf_counter(), peak_begins(device)
    found = functional.minimizer()
    synchronize(device)
    seconds = time.perf_counter() - began
    # Its residual anew: the gradient in the degree metric is u - Pu + lambda~ (u - f).
    gradient = functional.gradient(found.u, "degree")
    return {
        "seconds": seconds, "repeats": 1, "peak_bytes": peak_ends(device, before), "iterations": found.iterations,
        "success": found.success, "residual": found.residual,
        "gradient": float(gradient.abs().max() / (FIDELITY * f.abs().max())),
    }  # fmt: skip


def peak_begins(device: str) -> int:
    if device != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def peak_ends(device: str, before: int) -> int | None:
    return int(torch.cuda.max_memory_allocated()) - before if device == "cuda" else None


def flows(log: Log, device: str, n: int) -> None:
    log.run("J-flow", n, lambda: j_flow(n, device))
    log.run("equilibrium", n, lambda: equilibrium(n, device))


# ---- rounding


def energy_by_sums(kernel: Any, x: Any, u: Any) -> float:
    """Return 1/2 sum_ij w w k_ij |u_i - u_j|^2 in float64, from differences, some rows at a time."""
    x, u, total = x.double(), u.double(), 0.0
    for rows in torch.arange(len(x), device=x.device).split(256):
        if isinstance(kernel, ExpDotProduct):
            logits = x[rows] @ x.T / math.sqrt(x.shape[1])
        else:
            logits = kernel.log_profile(((x[rows, None] - x) ** 2).sum(-1))
        total += float((torch.exp(logits) * ((u[rows, None] - u) ** 2).sum(-1)).sum())
    return total / 2 / len(x) ** 2


def rounding(log: Log, device: str, n: int) -> None:
    for kernel in (ExpDotProduct(), Gaussian(2.0), Laplace(2.0)):

        def work(kernel: Any = kernel) -> dict[str, Any]:
            keys, values = problem(n, 8, torch.float32, device)
            u = values[:, :2]
            exact = energy_by_sums(kernel, keys, u)
            single, double = (
                J(affinity(kernel, domain(n), keys.to(dtype), method="tiled")).value(u.to(dtype))
                for dtype in (torch.float32, torch.float64)
            )
            return {"energy": exact, "error_float32": abs(single / exact - 1), "error_float64": abs(double / exact - 1)}

        log.run("energy", n, work, 0.3, kernel=type(kernel).__name__)


SECTIONS = ("denoise", "large", "counts", "flows", "radial", "steps", "rounding", "more", "loops")


def section(name: str, log: Log, device: str, quick: bool) -> None:
    small = [2**power for power in ((10, 12) if quick else (12, 14, 16, 18))]
    if name == "denoise":
        if quick:
            tensors.throughput(log, device, tensors.FEW, partial(measure, long=0.0))
        else:
            tensors.throughput(log, device, tensors.FIRST, measure)
    elif name == "large":
        large(log, device, 2**11 if quick else 2**20, 64)
    elif name == "counts":
        for row, _ in counts.rows():
            log.add(what="counts", status="counted on a pretended GPU", **row)
    elif name == "flows":
        flows(log, device, 2**10 if quick else 2**18)
        for nodes in (128,) if quick else (128, 1024):
            for row in replayed.rows(device, nodes, measure):
                log.add(what="replayed", status="measured", **row)
    elif name == "radial":
        radial_steps(log, device, 2**11 if quick else 2**16)
    elif name == "steps":
        steps(log, device, small, WIDTHS[:1] if quick else WIDTHS, PEERS)
        steps(log, device, small[1:2], WIDTHS[1:2], OTHERS)
    elif name == "rounding":
        rounding(log, device, 2**11 if quick else 2**14)
    elif name == "more":
        tensors.throughput(log, device, () if quick else tensors.MORE, measure)
        tensors.published(log, device)
    else:
        loops(log, [n for n in small if n <= 2**14])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for gpu.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda; with --quick cpu where there is no GPU")
    parser.add_argument("--quick", action="store_true", help="small problems: a minute on two cores")
    parser.add_argument("--seconds", type=float, default=225.0, help="begin no row that would end later [225]")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="sections, in this order")
    chosen = parser.parse_args()
    if chosen.device is None:
        chosen.device = "cpu" if chosen.quick and not torch.cuda.is_available() else "cuda"
    if chosen.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device: got cuda, and torch {torch.__version__} finds none; use --device cpu")
    log = Log(chosen.out, chosen.device, chosen.seconds)
    for name in chosen.only:
        section(name, log, chosen.device, chosen.quick)
    log.add(finished=True)
    wrong = [r for r in log.rows if r["status"].startswith("failed") or r.get("conserved") is False]
    print(f"{len(log.rows)} rows, {len(wrong)} failed or not conserved, {log.left:.0f} s left", file=sys.stderr)
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
