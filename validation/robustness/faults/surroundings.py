"""What a program meets elsewhere: other threading layers, switches of Python, locales, and limits of the system."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from validation.robustness.contract import Row
from validation.robustness.faults.guest import WAYS
from validation.robustness.faults.processes import Running, Tally, tell_tale
from validation.robustness.faults.victims import CLI

__all__ = ["LIMITS", "SURROUNDINGS", "limited", "met", "surrounded"]

GUEST = Path(__file__).with_name("guest.py")


@dataclass(frozen=True)
class Surrounding:
    """Switches of Python, variables, and the ways in which the program of somebody else starts work there."""

    flags: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    ways: Sequence[str] = ("threads", "asyncio", "fork", "spawn", "loky")


def _layer(name: str) -> Surrounding:
    return Surrounding(variables={"NUMBA_THREADING_LAYER": name, "NUMBA_NUM_THREADS": "4"}, ways=tuple(WAYS))


SURROUNDINGS = {
    "threads by OpenMP": _layer("omp"),
    "threads by Numba": _layer("workqueue"),
    "threads by TBB": _layer("tbb"),
    "python -O": Surrounding(["-O"]),
    "python -OO": Surrounding(["-OO"]),
    "python -W error": Surrounding(["-W", "error"], ways=("threads", "asyncio", "fork", "spawn")),
    "python -X dev": Surrounding(["-X", "dev"]),
    "locale C, no UTF-8": Surrounding(variables={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "decimal commas": Surrounding(variables={"LC_ALL": "de_DE.UTF-8"}),
    "no home, no cache": Surrounding(variables={"HOME": "/nonexistent", "NUMBA_CACHE_DIR": "/proc/none"}),
}


def met() -> list[str]:
    """Return the surroundings that this machine can play."""
    look = "import numba.np.ufunc.tbbpool"
    lacking = set()
    if subprocess.run([sys.executable, "-c", look], capture_output=True, check=False).returncode:
        lacking.add("threads by TBB")
    if shutil.which("localedef") is None or not Path("/usr/share/i18n/locales/de_DE").exists():
        lacking.add("decimal commas")
    return [name for name in SURROUNDINGS if name not in lacking]


def surrounded(name: str, folder: Path) -> Row:
    """Run the program of somebody else in a surrounding."""
    given = SURROUNDINGS[name]
    folder.mkdir(parents=True)
    tally = Tally(f"program of somebody else, {name}", folder)
    if "LC_ALL" in given.variables and given.variables["LC_ALL"] != "C":  # few machines have it
        language = given.variables["LC_ALL"]
        subprocess.run(["localedef", "-i", language.split(".")[0], "-f", "UTF-8", folder / language], check=True)
    variables = {**given.variables, "LOCPATH": str(folder)}
    ended = Running([sys.executable, *given.flags, str(GUEST), *given.ways], variables).end()
    done = [way for way in given.ways if way in ended.text.splitlines()]
    tally.note(tell_tale(ended, (0,)))
    tally.outcomes["the same bits in threads, children or workers"] += len(done)
    return tally.row(len(given.ways), ways=done)


#: Of `ulimit`, from what is far too little on: open files, and KiB of address space and of the stack.
LIMITS = {
    "n": (8, 12, 16, 20, 24, 32, 48, 64),
    "v": (500_000, 600_000, 800_000, 1_200_000, 2_000_000, 4_000_000),
    "s": (64, 128, 256, 512, 1024, 8192),
}
_WORDS = {"n": "open files", "v": "KiB of address space", "s": "KiB of stack"}


def limited(limit: str, folder: Path) -> Row:
    """Denoise a picture under a limit of the system: it is the usual result, or refused in one line."""
    tally = Tally(f"command under ulimit -{limit} ({_WORDS[limit]})", folder)
    folder.mkdir(parents=True)
    np.save(folder / "in.npy", np.random.default_rng(3).normal(128, 20, (48, 48)).clip(0, 255).astype(np.uint8))
    expected = None
    for most in ("unlimited", *reversed(LIMITS[limit])):
        target = folder / f"{most}.npy"
        words = [*CLI, "denoise", str(folder / "in.npy"), str(target), "--sigma", "20", "--quiet"]
        limits = [] if most == "unlimited" else ["sh", "-c", f'ulimit -{limit} {most}; exec "$@"', "sh"]
        ended = Running([*limits, *words], {"OPENBLAS_NUM_THREADS": "1"}).end(120)
        found = target.read_bytes() if target.exists() else None
        if expected is None:
            expected = found
            continue
        left = [path.name for path in folder.iterdir() if path.name.startswith(".nlflow")]
        trouble = f"half a file: {left}" if left else None
        if ended.code == 0 and found == expected:
            tally.outcomes["the same bits"] += 1
        elif found is not None:
            trouble = trouble or f"a file after status {ended.code}"
        elif ended.code == 1 and "Traceback" not in ended.text and ended.text.startswith("nonlocal: "):
            tally.outcomes["refused in a line that says what to do"] += 1
        else:
            trouble = trouble or tell_tale(ended, (0,))
        if trouble is not None and not _starts(limits):
            tally.outcomes["too little for Python and NumPy themselves"] += 1
            continue
        tally.note(trouble, where=str(most))
    return tally.row(len(LIMITS[limit]))


def _starts(limits: list[str]) -> bool:
    """Return whether what the package is made of can be loaded under a limit."""
    look = "import llvmlite.binding, numpy, scipy.linalg, numba"
    return subprocess.run([*limits, sys.executable, "-c", look], capture_output=True, check=False).returncode == 0
