"""What the package runs on: versions, threads, memory and devices."""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from nlflow.backends.devices import found_devices
from nlflow.errors import memory_limit

__all__ = [
    "describe",
    "environment",
    "folder_digest",
    "git_state",
    "machine_name",
    "processor",
    "provenance",
    "source_digest",
    "version",
]


def version() -> str:
    """Return the version of nlflow."""
    try:
        return metadata.version("nlflow")
    except metadata.PackageNotFoundError:
        return "not installed, run from its source"


@cache
def environment() -> dict[str, Any]:
    """Return the versions and the platform that a result was computed with, as `Solution.provenance` keeps them."""
    versions = {name: metadata.version(name) for name in ("numpy", "scipy", "numba")}
    return {
        "versions": {"nlflow": version(), "python": platform.python_version(), **versions},
        "platform": platform.platform(),
    }


@cache
def git_state() -> dict[str, Any] | None:
    """Return the commit of the source that runs and whether it was changed since; None if it is no git checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        commit, changes = (
            subprocess.run(
                ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=True
            ).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout that belongs to somebody else
        return None
    return {"commit": commit.strip(), "changed": bool(changes.strip())}


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # no Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown processor")


def machine_name() -> str:
    """Return a few words that tell machines apart: system, processor and number of cores."""
    return f"{platform.system()} {platform.machine()}, {processor()}, {os.cpu_count()} cores"


def provenance(device: str = "cpu", seed: int | None = None) -> dict[str, Any]:
    """Return what has to be known to compute a result again: versions, platform, git state, threads, device and seed.

    Parameters
    ----------
    device : str
        Where it was computed.
    seed : int, optional
        Of its random numbers; None where there are none.
    """
    threads = {}
    for name in ("numba", "torch"):  # those that are not loaded had no part in it
        count = getattr(sys.modules.get(name), "get_num_threads", None)
        if count is not None:
            threads[name] = int(count())
    return {**environment(), "git": git_state(), "threads": threads, "device": device, "seed": seed}


@cache
def source_digest() -> str:
    """Return a digest of the package's source, which tells two states of it apart that have the same version."""
    return folder_digest(Path(__file__).parents[1])


def folder_digest(folder: Path) -> str:
    """Return a digest of all Python files in a folder and below."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def describe() -> dict[str, Any]:
    """Return versions, git state, threads, memory (bytes) and devices, by name.

    The compiled loops are not loaded; torch is if it is installed.

    Raises
    ------
    InputError
        If the environment variable ``NLFLOW_MEMORY_LIMIT`` is no number of bytes.
    """
    return {**_versions(), "git": git_state(), **_threads(), **_memory(), "devices": found_devices()}


def _versions() -> dict[str, str]:
    found = {"nlflow": version(), "python": sys.version.split()[0]}
    for name in ("numpy", "scipy", "numba", "scikit-image", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _threads() -> dict[str, Any]:
    import numba

    layer = str(numba.config.THREADING_LAYER)
    # Which layer runs is settled by the first parallel call; until then it is the first of the list that loads.
    modules = {"tbb": "tbbpool", "omp": "omppool", "workqueue": "workqueue"}
    if layer == "default":
        for name in numba.config.THREADING_LAYER_PRIORITY:
            try:
                importlib.import_module(f"numba.np.ufunc.{modules[name]}")
            except ImportError:
                continue
            layer = name
            break
    folder = Path(__file__).parent / "numba"
    if numba.config.CACHE_DIR:
        cache = Path(numba.config.CACHE_DIR)
    elif os.access(folder, os.W_OK):
        cache = folder / "__pycache__"
    else:  # as numba does where the package's folder is read-only
        appdirs = importlib.import_module("numba.misc.appdirs")
        cache = Path(appdirs.user_cache_dir(appname="numba", appauthor=False))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu_threads": usable,
        "numba_threads": numba.get_num_threads(),
        "numba_threading_layer": layer,
        "numba_cache": str(cache),
    }


def _memory() -> dict[str, int | None]:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        total = None
    return {"memory": total, "memory_limit": memory_limit()}
