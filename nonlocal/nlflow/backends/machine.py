"""Versions, platform and git state."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from nlflow.backends.threads import blas_loops, counts


def version() -> str:
    try:
        return metadata.version("nlflow")
    except metadata.PackageNotFoundError:
        return "not installed, run from its source"


@cache
def environment() -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in ("numpy", "scipy", "numba")}
    return {
        "versions": {"nlflow": version(), "python": platform.python_version(), **versions},
        "platform": platform.platform(),
    }


@cache
def git_state() -> dict[str, Any] | None:
    """Return the commit of the source and whether tracked files differ from it; None without a git checkout."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    try:
        commit, changes = (
            subprocess.run(
                # A look takes no lock, which would stay if this process were killed.
                ["git", "--no-optional-locks", "-C", str(root), *words],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            ).stdout
            for words in (("rev-parse", "HEAD"), ("status", "--porcelain", "--untracked-files=no"))
        )
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout that belongs to somebody else
        return None
    return {"commit": commit.strip(), "changed": bool(changes.strip())}


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown processor")


def arithmetic() -> dict[str, str]:
    """Return what of the machine decides bits: for which processor Numba compiles, which loops libraries choose."""
    from numba.core.registry import cpu_target
    from numpy.lib.introspect import opt_func_info

    _, name, features = cpu_target.target_context.codegen().magic_tuple()
    numpy = {loop["current"] for loops in opt_func_info().values() for loop in loops.values()}
    library = " ".join(platform.libc_ver()).strip()
    return {
        "processor of numba": f"{name}, features {hashlib.sha256(features.encode()).hexdigest()[:12]}",
        "processor of numpy": " ".join(sorted(numpy)),
        "processor of BLAS": blas_loops(),
        "C library": library or platform.system(),
    }


def machine_name() -> str:
    return f"{platform.system()} {platform.machine()}, {processor()}, {os.cpu_count()} cores"


def provenance(device: str = "cpu", seed: int | None = None) -> dict[str, Any]:
    return {**environment(), "git": git_state(), "threads": counts(), "device": device, "seed": seed}


@cache
def source_digest() -> str:
    return folder_digest(Path(__file__).parents[1])


def folder_digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
