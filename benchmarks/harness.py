"""Interleaved timing, tables and machine description for all benchmarks."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.sources import measured
from nlflow.backends.machine import processor
from nlflow.errors import InputError
from nlflow.store.atomic import make_folder
from nlflow.store.encoding import plain
from nlflow.store.storage import load_record, save_record
from validation.tables import markdown, save_page

KIND = "benchmark"
Result = TypeVar("Result")

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

    @classmethod
    def of(
        cls,
        benchmark: str,
        work: str,
        peer: str,
        ours: str,
        ratio: float,
        *,
        most: float | None = None,
        least: float | None = None,
        unit: str = "",
        also: bool = True,
    ) -> Row:
        """Return a line whose figure is to be at most or at least a target, where something else may have to hold."""
        if least is not None:
            return cls(benchmark, work, peer, ours, ratio, f">= {least:g}{unit}", bool(ratio >= least and also))
        if most is not None:
            return cls(benchmark, work, peer, ours, ratio, f"<= {most:g}{unit}", bool(ratio <= most and also))
        return cls(benchmark, work, peer, ours, ratio, "none", True)


def timed(function: Callable[..., Result], *arguments: Any, **options: Any) -> tuple[Result, float]:
    """Return what a function returns, and the processor seconds of all threads that it took."""
    begun = time.process_time()
    return function(*arguments, **options), time.process_time() - begun


def turns(
    tasks: dict[str, Callable[[], Any]], repeats: int, warmup: int = 0, clock: Callable[[], float] = time.process_time
) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the median seconds of each task, the tasks taking turns, and what each returned last."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    results = {}
    for turn in range(warmup + repeats):
        for name, task in tasks.items():
            start = clock()
            results[name] = task()
            if turn >= warmup:
                times[name].append(clock() - start)
    return {name: statistics.median(values) for name, values in times.items()}, results


def interleaved(
    tasks: dict[str, Callable[[], Any]],
    repeats: int = REPEATS,
    warmup: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Return the median seconds of each task; the tasks take turns, so that drift of the machine meets all alike.

    Beside other programs the clock is `time.process_time`: long tasks are interrupted, short ones are not.
    """
    return turns(tasks, repeats, warmup, clock)[0]


def missing(benchmark: str, work: str, package: str, target: str) -> Row | None:
    """Return a row that says that a peer is not installed; None where it is."""
    if find_spec(package) is not None:
        return None
    return Row(benchmark, work, f"{package}: not installed", "not measured", 0.0, target, False)


def files(data: Path, pattern: str) -> list[Path]:
    """Return the files of a folder, or raise `InputError` where there are none."""
    if not (found := sorted(data.glob(pattern))):
        raise InputError(f"--data: got {data}, expected a folder with {pattern}")
    return found


def machine() -> dict[str, Any]:
    """Describe where the figures were taken."""
    versions = {}
    packages = "nlflow numpy scipy numba torch finufft pykeops bm3d-cupy pygsp scikit-image py-pde geomloss deepinv"
    for name in packages.split():
        with suppress(importlib.metadata.PackageNotFoundError):  # not every benchmark needs every peer
            versions[name] = importlib.metadata.version(name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"processor": processor(), "cores": cores, "load": load, "python": platform.python_version(), **versions}


def table(rows: list[Row]) -> str:
    """Return the rows as a Markdown table."""
    heads = ("benchmark", "work", "peer", "nlflow", "ratio", "target", "met")
    return markdown(
        heads,
        [(r.benchmark, r.work, r.peer, r.ours, f"{r.ratio:.3g}", r.target, "yes" if r.met else "**no**") for r in rows],
    )


def listed(about: dict[str, Any]) -> str:
    """Return names and values as a Markdown list."""
    return "\n".join(f"- {name}: {value}" for name, value in about.items())


def keep(out: Path, name: str, content: dict[str, Any], page: str | None = None) -> None:
    """Write what a benchmark found as the record ``<name>.json``, with its sources, and its page as ``<name>.md``."""
    make_folder(out)
    content = {**content, "sources": measured()}
    path = out / f"{name}.json"
    if page is None:
        save_record(path, KIND, plain(content))
    else:
        save_page(path, KIND, plain(content), page)


def sections_of(out: Path, name: str) -> dict[str, list[Row]]:
    """Return the rows that a record in a folder holds, by part of the benchmark; none where there is no record."""
    path = out / f"{name}.json"
    known = load_record(path, KIND).get("sections", {}) if path.exists() else {}
    return {part: [Row(**row) for row in rows] for part, rows in known.items()}


def write(found: list[Row] | dict[str, list[Row]], out: Path, name: str, title: str) -> None:
    """Write the rows of a benchmark, or of its parts, and what it was measured on, as ``<name>.json`` and ``.md``."""
    sections = found if isinstance(found, dict) else {"": found}
    about, rows = machine(), [row for part in sections.values() for row in part]
    page = f"# {title}\n\n{table(rows)}\n\nMachine and versions:\n\n{listed(about)}\n"
    parts = {part: [asdict(row) for row in one] for part, one in sections.items()}
    keep(out, name, {"machine": about, **({"rows": parts[""]} if "" in parts else {"sections": parts})}, page)
