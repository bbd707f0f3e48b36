"""Interleaved timing, tables and machine description for all benchmarks."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REPEATS = 7


@dataclass(frozen=True)
class Row:
    """One line of a result: a figure, what it is held against and whether it is met."""

    benchmark: str
    work: str
    peer: str
    ours: str
    ratio: float
    target: str
    met: bool


def interleaved(tasks: dict[str, Callable[[], Any]], repeats: int = REPEATS, warmup: int = 1) -> dict[str, float]:
    """Return the median seconds of each task; the tasks take turns, so that drift of the machine meets all alike."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(warmup + repeats):
        for name, task in tasks.items():
            start = time.perf_counter()
            task()
            if turn >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def machine() -> dict[str, Any]:
    """Describe where the figures were taken."""
    model = platform.processor() or "unknown"
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    versions = {}
    for name in ("nlflow", "numpy", "scipy", "numba", "torch", "finufft", "pykeops", "pygsp", "scikit-image"):
        with suppress(importlib.metadata.PackageNotFoundError):  # not every benchmark needs every peer
            versions[name] = importlib.metadata.version(name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"processor": model, "cores": cores, "load": load, "python": platform.python_version(), **versions}


def markdown(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| benchmark | work | peer | nlflow | ratio | target | met |", "|---|---|---|---|---|---|---|"]
    for r in rows:
        met = "yes" if r.met else "**no**"
        lines.append(f"| {r.benchmark} | {r.work} | {r.peer} | {r.ours} | {r.ratio:.3g} | {r.target} | {met} |")
    return "\n".join(lines)


def write(rows: list[Row], out: Path) -> None:
    """Write the table as Markdown and JSON."""
    about = machine()
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(
        json.dumps({"machine": about, "rows": [{**asdict(r), "met": bool(r.met)} for r in rows]}, indent=1)
    )
    lines = "\n".join(f"- {k}: {v}" for k, v in about.items())
    (out / "results.md").write_text(f"# Benchmarks\n\n{markdown(rows)}\n\nMachine and versions:\n\n{lines}\n")


def report(rows: list[Row], out: Path | None) -> None:
    """Print the table and, with `out`, write it as Markdown and JSON."""
    print(markdown(rows))
    print("\n" + ", ".join(f"{k} {v}" for k, v in machine().items()))
    if out is not None:
        write(rows, out)
        print(f"written to {out}", file=sys.stderr)
