"""What is installed."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

_TOOLS = ("bench", "dev", "docs", "fuzz", "installs")  # extras of those who work on the package
#: What wheels hold beside the work that their metadata tell of: a part of a file's name, and whose licence it has.
_INSIDE = {
    "av": {"x264": "x264, GPL-2.0-or-later", "x265": "x265, GPL-2.0-or-later"},
    "finufft": {"libfinufft": "FFTW, GPL-2.0-or-later"},
    "rawpy": {"libraw": "LibRaw, LGPL-2.1-only OR CDDL-1.0"},
}
_LOUD = re.compile(r"(NUMBA|NLFLOW|OMP|MKL|OPENBLAS|KMP)_\w+|PYTHON(WARNINGS|OPTIMIZE|HASHSEED|UTF8)|LANG|LC_\w+")
_PLAIN = re.compile(r"-?[\d.]+|tbb|omp|workqueue|threadsafe|forksafe|safe|default|C|C\.\S+|[a-z]{2}_[A-Z]{2}(\.\S+)?")


def _named(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _found(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def packages() -> list[metadata.Distribution]:
    from packaging.requirements import Requirement

    waiting: list[tuple[str, Iterable[str]]] = [("nlflow", [extra for extra in _extras() if extra not in _TOOLS])]
    asked: dict[str, set[str]] = {}
    found: dict[str, metadata.Distribution] = {}
    while waiting:
        name, wanted = waiting.pop()
        one, known = _found(name), asked.setdefault(_named(name), set())
        fresh = {"", *wanted} - known
        known |= fresh
        if one is None or not fresh:
            continue
        found[_named(name)] = one
        for need in map(Requirement, one.requires or ()):
            if any(need.marker is None or need.marker.evaluate({"extra": extra}) for extra in fresh):
                waiting.append((need.name, need.extras))
    return [found[name] for name in sorted(found)]


def _extras() -> list[str]:
    about = _found("nlflow")
    return [] if about is None else about.metadata.get_all("Provides-Extra") or []


def _state_of_extras() -> dict[str, list[str]]:
    from packaging.requirements import Requirement

    about = _found("nlflow")
    complete, old = [], set()
    needs = [Requirement(line) for line in (about and about.requires) or ()]
    for extra in _extras():
        asked = [need for need in needs if need.marker is not None and need.marker.evaluate({"extra": extra})]
        there = [(need, _found(need.name)) for need in asked]
        late = {
            f"{need.name}{need.specifier}, has {one.version}"
            for need, one in there
            if one is not None and not need.specifier.contains(one.version, prereleases=True)
        }
        if not late and all(one is not None for _, one in there):
            complete.append(extra)
        old |= late
    return {"complete": sorted(complete), "too old": sorted(old)}


def licences() -> list[dict[str, str]]:
    """Return name, version and licence of packages, and of what their wheels hold."""
    return [
        {"name": one.name, "version": one.version, "license": _licence(one), "inside": "; ".join(_inside(one))}
        for one in packages()
    ]


def _licence(one: metadata.Distribution) -> str:
    about: Any = one.metadata  # a message, which says less of itself
    if expression := about.get("License-Expression"):
        return str(expression)
    told = [
        line.rpartition("::")[2].strip() for line in about.get_all("Classifier") or () if line.startswith("License")
    ]
    first = (about.get("License") or "").strip().partition("\n")[0].strip(" =")
    return ", ".join(told) or first or "not told"


def _inside(one: metadata.Distribution) -> list[str]:
    parts = _INSIDE.get(_named(one.name), {})
    names = [file.name for file in one.files or ()] if parts else []
    return [work for part, work in parts.items() if any(part in name for name in names)]


def loop_cache() -> tuple[str, Path]:
    import numba

    folder = Path(__file__).parents[2] / "backends" / "numba"
    if numba.config.CACHE_DIR:
        return "NUMBA_CACHE_DIR", Path(numba.config.CACHE_DIR)
    if os.access(folder, os.W_OK):
        return "the package", folder / "__pycache__"
    from numba.misc import appdirs  # as Numba does where the package's folder is read-only

    return "the user", Path(appdirs.user_cache_dir(appname="numba", appauthor=False))


def _state_of_cache() -> dict[str, Any]:
    owner, folder = loop_cache()
    try:
        sizes = [path.stat().st_size for path in folder.rglob("*.nb[ci]")]
    except OSError:
        sizes = []
    place = next(one for one in (folder, *folder.parents) if one.exists())
    return {"folder of": owner, "writable": os.access(place, os.W_OK), "files": len(sizes), "bytes": sum(sizes)}


def support() -> dict[str, Any]:
    """Return facts for a report of a fault, without paths and names of the user and the machine."""
    from nlflow.backends import threads
    from nlflow.backends.devices import found_devices
    from nlflow.backends.machine import git_state, processor, version
    from nlflow.errors import physical_memory

    released = re.match(r"[\d.]*", platform.release())
    return {
        "versions": {
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "nlflow": version(),
            **{one.name: one.version for one in packages()},
        },
        "git": git_state(),
        "system": f"{platform.system()} {released[0] if released else ''} {platform.machine()}",
        "processor": processor(),
        **threads.described(),
        "memory": physical_memory(),
        "devices": found_devices(),
        "extras": _state_of_extras(),
        "loop cache": _state_of_cache(),
        "environment": {
            name: value if _PLAIN.fullmatch(value) else "set"
            for name, value in sorted(os.environ.items())
            if _LOUD.fullmatch(name)
        },
    }
