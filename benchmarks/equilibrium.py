"""Minimizers of E on 256 x 256, against SciPy's sparse direct solver of the same system: time and memory.

Each side runs in a process of its own, alone, from the affinity to the solution: the list of edges and the
factorization on the one, the minimizer with whatever preconditioner it takes on the other. Memory is the growth of the
process's peak, which sees what SuperLU allocates, too.

`python -m benchmarks.equilibrium crossover` prints what a set-up of multigrid and its iterations cost in iterations
with the diagonal, from which `nlflow.functionals.preconditioners.PAYS` and `PAYS_EDGE` come.
"""

from __future__ import annotations

import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, interleaved, table
from benchmarks.resident import peak_of
from nlflow import E, Gaussian, Grid, Patch, affinity

SIDE = 256
REPEATS = 3
KERNELS = ("patch 3x3, window 3x3", "patch 3x3, window 5x5", "patch 5x5, window 7x7", "Gaussian, window 5x5")
LARGEST = KERNELS[2]  # half a minute for SciPy, each time
FIDELITIES = ("1", "0.1", "0.01", "0.001", "1 with holes")
DIRECT_ONCE = KERNELS[1:]  # ten seconds and more each time


def photograph() -> Any:
    """Return the camera man on 256 x 256 with noise of standard deviation 20."""
    from skimage.data import camera

    small = camera().astype(np.float64).reshape(SIDE, 2, SIDE, 2).mean(axis=(1, 3))
    return small + np.random.default_rng(0).normal(0, 20, small.shape)


def build(kernel: str, f: Any) -> Any:
    """Return the affinity of one case."""
    if kernel.startswith("Gaussian"):
        return affinity(Gaussian(width=1.0), Grid(f.shape), window=2)
    size, radius, width = {
        KERNELS[0]: (3, 1, 20.0),
        KERNELS[1]: (3, 2, 20.0),
        KERNELS[2]: (5, 3, 12.0),
    }[kernel]
    sigma = 0.0 if radius == 2 else 20.0
    return affinity(Patch(width=width, patch_size=size, search_radius=radius, sigma=sigma), Grid(f.shape), f)


def strength(fidelity: str) -> Any:
    """Return lambda~: a number, or 0 at 30 % of the pixels and on a square of 40 x 40."""
    value, _, holes = fidelity.partition(" ")
    if not holes:
        return float(value)
    seen = np.random.default_rng(1).random((SIDE, SIDE)) > 0.3
    seen[60:100, 60:100] = False
    return np.where(seen, float(value), 0.0)


def direct(k: Any, f: Any, phi: Any) -> Any:
    """Solve with `scipy.sparse.linalg.spsolve`, from the list of edges."""
    from scipy import sparse
    from scipy.sparse.linalg import spsolve

    graph = k.edges()
    measure = (k.domain.weights * k.symmetrized().degree).ravel()
    mass = measure * np.broadcast_to(phi, f.shape).ravel()
    matrix = (sparse.diags_array(np.asarray(graph.sum(axis=1)).ravel() + mass) - graph).tocsc()
    return spsolve(matrix, mass * f.ravel()).reshape(f.shape)


def worker(kernel: str, fidelity: str, side: str, out: str) -> None:
    """Solve one case in this process and write the solution; print seconds, bytes and words."""
    for module in ("scipy.fft", "scipy.sparse.linalg"):  # loaded before anything is measured
        importlib.import_module(module)
    f = photograph()
    k, phi = build(kernel, f), strength(fidelity)
    tiny = f[:24, :24]
    for name in ("diagonal", "multigrid"):  # loops are loaded
        E(build(kernel, tiny), tiny, 0.01, measure="degree").minimizer(preconditioner=name)
    k.average(f)
    solved: dict[str, Any] = {}

    def solve() -> None:
        start = time.perf_counter()
        if side == "direct":
            solved.update(u=direct(k, f, phi), words="spsolve")
        else:
            found = E(k, f, phi, measure="degree").minimizer(preconditioner=side)
            solved.update(u=found.u, words=f"{found.iterations} iterations, {found.message.rpartition(': ')[2]}")
        solved["seconds"] = time.perf_counter() - start

    grown, u = peak_of(solve), solved.pop("u")
    phi = np.broadcast_to(phi, f.shape)
    b = phi * (f - f.mean())
    rest = b - ((u - k.average(u)) + phi * (u - f.mean()))
    measure = k.measure("degree", f)
    residual = float(np.sqrt((measure * rest**2).sum() / (measure * b**2).sum()))
    np.save(out, u)
    print(json.dumps({**solved, "bytes": grown, "residual": residual}))


def measured(kernel: str, fidelity: str, side: str, folder: Path) -> tuple[dict[str, Any], Any]:
    """Return what a worker reports, and its solution."""
    out = folder / f"{side}.npy"
    command = [sys.executable, "-m", "benchmarks.equilibrium", "worker", kernel, fidelity, side, str(out)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1]), np.load(out)


def compare(kernel: str, fidelity: str) -> list[Row]:
    """Return the rows of one case: time and memory."""
    times: dict[str, list[float]] = {"direct": [], "auto": []}
    about: dict[str, dict[str, Any]] = {}
    solutions = {}
    with tempfile.TemporaryDirectory() as name:
        for turn in range(REPEATS):
            for side in times:
                if side == "direct" and turn > 0 and kernel in DIRECT_ONCE:
                    continue
                about[side], solutions[side] = measured(kernel, fidelity, side, Path(name))
                times[side].append(about[side]["seconds"])
    peer, ours = (statistics.median(times[side]) for side in ("direct", "auto"))
    apart = np.abs(solutions["auto"] - solutions["direct"]).max() / np.ptp(solutions["direct"])
    peer_bytes, our_bytes = (about[side]["bytes"] for side in ("direct", "auto"))
    words = (
        f"{about['auto']['words']}, residual {about['auto']['residual']:.0e} (peer {about['direct']['residual']:.0e})"
    )
    work = f"{kernel}, fidelity {fidelity}"
    return [
        Row.of("equilibrium", f"{work}: time ({words}, solutions {apart:.0e} apart)", f"{peer:.2f} s", f"{ours:.2f} s",
               peer / ours, least=5, also=about["auto"]["residual"] <= 2e-10),
        Row.of("equilibrium", f"{work}: peak memory", f"{peer_bytes / 2**20:.0f} MiB", f"{our_bytes / 2**20:.0f} MiB",
               peer_bytes / max(our_bytes, 1), least=10),
    ]  # fmt: skip


def run() -> list[Row]:
    cases = [(kernel, fidelity) for kernel in KERNELS if kernel != LARGEST for fidelity in FIDELITIES]
    return [row for kernel, fidelity in [*cases, (LARGEST, "0.01")] for row in compare(kernel, fidelity)]


def crossover() -> None:
    """Print the cost of multigrid, set-up and iterations, in iterations with the diagonal."""
    f = photograph()
    for kernel in KERNELS:
        e = E(build(kernel, f), f, 1e-3, measure="degree")
        steps = 150
        found = e.minimizer(preconditioner="multigrid").iterations
        times = interleaved(
            {
                "diagonal": lambda e=e, steps=steps: e.minimizer(preconditioner="diagonal", maxiter=steps),
                "multigrid": lambda e=e: e.minimizer(preconditioner="multigrid"),
            },
            repeats=3,
        )
        print(f"{kernel}: {found} iterations, as long as {steps * times['multigrid'] / times['diagonal']:.0f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        worker(*sys.argv[2:])
    elif sys.argv[1:2] == ["crossover"]:
        crossover()
    else:
        print(table(run()))
