"""The command ``nonlocal info``: versions, threads, memory and devices."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from nlflow.desk.terminal import print_json, print_table

HELP = """Show versions, threads, memory and devices.

\b
Examples:
  nonlocal info --json
"""


def info(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show versions, threads, memory and devices."""
    from nlflow.backends import threads
    from nlflow.backends.devices import found_devices
    from nlflow.backends.machine import git_state
    from nlflow.errors import format_bytes, memory_limit, physical_memory

    report: dict[str, Any] = {
        **_versions(),
        "git": git_state(),
        **threads.described(),
        "numba_cache": str(_loop_cache()),
        "memory": physical_memory(),
        "memory_limit": memory_limit(),
        "devices": found_devices(),
    }
    if as_json:
        print_json(report)
        return
    for name in ("memory", "memory_limit"):
        report[name] = "unknown" if report[name] is None else format_bytes(report[name])
    git = report["git"]
    report["git"] = "no checkout" if git is None else git["commit"] + (", changed" if git["changed"] else "")
    report["devices"] = ", ".join(report["devices"])
    print_table([(name.replace("_", " "), str(value)) for name, value in report.items()])


def _versions() -> dict[str, str]:
    from nlflow.backends.machine import version

    found = {"nlflow": version(), "python": sys.version.split()[0]}
    for name in ("numpy", "scipy", "numba", "scikit-image", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _loop_cache() -> Path:
    """Return the folder in which Numba keeps compiled loops."""
    import numba

    folder = Path(__file__).parents[2] / "backends" / "numba"
    if numba.config.CACHE_DIR:
        return Path(numba.config.CACHE_DIR)
    if os.access(folder, os.W_OK):
        return folder / "__pycache__"
    from numba.misc import appdirs  # as Numba does where the package's folder is read-only

    return Path(appdirs.user_cache_dir(appname="numba", appauthor=False))
