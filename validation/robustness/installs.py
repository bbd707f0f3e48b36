"""Wheel and sdist in empty environments: ``python -m validation.robustness.installs``, or ``make installs``.

Each environment gets the wheel with the lowest or the newest versions of what it asks for, and runs the tests that are
not slow, from the unpacked sdist without its sources. uv finds the versions. Tests that need an extra count apart.
For systems that are not this one only the versions are looked for: there have to be wheels of all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nlflow.backends.machine import machine_name
from nlflow.store.atomic import make_folder, write_content
from validation.tables import markdown

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
VERSIONS = {"lowest": "lowest-direct", "newest": "highest"}
SYSTEMS = ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin", "windows")
TOLD = ("numpy", "scipy", "numba", "scikit-image", "tifffile")
TOOLS = ("pytest>=9.0.3", "hypothesis>=6.108", "PyWavelets>=1.6", "mpmath>=1.3")
# What looks at the sources or at other packages, and says nothing about an installation.
LEFT_OUT = (
    *("docs", "public", "packaging", "hostile", "howto", "gallery", "readme", "mutants", "processors", "validation"),
    *("denoise_benchmark", "robustness", "records", "interrupts"),
)


@dataclass(frozen=True)
class Install:
    """What came of one environment, or of a system without one."""

    python: str
    versions: str
    system: str
    found: str
    outcome: str
    seconds: float


def uv(*words: str | Path, **options: str) -> subprocess.CompletedProcess[str]:
    """Run uv, and return what it said."""
    settings = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return subprocess.run(
        [sys.executable, "-m", "uv", *map(str, words), *settings], capture_output=True, text=True, cwd=ROOT
    )


def packages(out: Path) -> tuple[Path, Path]:
    """Build the wheel and the sdist, check what an index shows of them, and return both."""
    shutil.rmtree(out / "dist", ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build", "--outdir", out / "dist", ROOT], check=True, capture_output=True)
    (wheel,), (sdist,) = ((out / "dist").glob(pattern) for pattern in ("*.whl", "*.tar.gz"))
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist], check=True, capture_output=True)
    return wheel, sdist


def unpacked(sdist: Path, folder: Path) -> Path:
    """Unpack the sdist, take its sources away, and return where the rest lies."""
    shutil.rmtree(folder, ignore_errors=True)
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    shutil.rmtree(inside / "nonlocal")
    return inside


def chosen(text: str) -> str:
    """Return the versions of the packages that matter most, of a list ``name==version``."""
    found = dict(re.findall(r"^([\w.-]+)==(\S+)", text.lower(), flags=re.M))
    return ", ".join(f"{name} {found[name]}" for name in TOLD if name in found)


def outcome(text: str, status: int) -> str:
    """Return how the tests ended, in words: what pytest counted, with skips for want of an extra apart."""
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", text[-400:])}
    wanting = sum(int(count) for count in re.findall(r"^SKIPPED \[(\d+)\].* is not installed$", text, flags=re.M))
    if status not in (0, 1) or "passed" not in counts:
        return f"pytest ended with {status}"
    words = [f"{counts['passed']} passed"]
    if wanting:
        words.append(f"{wanting} need an extra")
    words += [f"{counts[word]} {word}" for word in ("failed", "error") if word in counts]
    return "; ".join(words)


def installed(python: str, versions: str, wheel: Path, sdist: Path, out: Path, only: Sequence[str]) -> Install:
    """Make an environment, install the wheel, and run the tests in it."""
    begun = time.perf_counter()

    def row(found: str, came: str) -> Install:
        return Install(python, versions, "here", found, came, round(time.perf_counter() - begun))

    place = out / f"{python}-{versions}"
    if uv("venv", "--clear", "--no-python-downloads", place / "env", python=python).returncode:
        return row("", "no such Python here")
    run = place / "env" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    # What is asked for is named itself: of a wheel's needs uv would take the newest.
    asked = ["-r", "pyproject.toml", "--extra=desk", f"--resolution={VERSIONS[versions]}"]
    for words in (asked, [wheel, "--no-deps"], [*TOOLS]):
        said = uv("pip", "install", "--only-binary=:all:", *words, python=str(run))
        if said.returncode:
            return row("", f"not installed: {said.stderr.strip().splitlines()[-1]}")
    found = chosen(uv("pip", "freeze", python=str(run)).stdout)
    tests = unpacked(sdist, place / "tests")
    # What is older than its own needs cannot know what these have deprecated since.
    mercy = ["-W", "ignore::DeprecationWarning"] if versions == "lowest" else []
    left_out = [f"--ignore-glob=**/test_{name}.py" for name in LEFT_OUT]
    words = ["-q", "-rs", "-p", "no:cacheprovider", "-p", "validation.robustness.lacking", *mercy, *left_out]
    said = subprocess.run(
        [run, "-m", "pytest", "-m", "not slow", "--continue-on-collection-errors", *words, *(only or ["tests"])],
        capture_output=True, text=True, cwd=tests,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    write_content(place / "pytest.txt", (said.stdout + said.stderr).encode())
    return row(found, outcome(said.stdout, said.returncode))


def resolved(python: str, versions: str, system: str) -> Install:
    """Look whether a system has wheels of all that is asked for."""
    begun = time.perf_counter()
    said = uv(
        "pip", "compile", "--only-binary=:all:", "pyproject.toml", python_version=python, python_platform=system,
        resolution=VERSIONS[versions],
    )  # fmt: skip
    came = "wheels of all" if said.returncode == 0 else f"none: {said.stderr.strip().splitlines()[-1]}"
    return Install(python, versions, system, chosen(said.stdout), came, round(time.perf_counter() - begun))


def table(rows: Sequence[Install]) -> str:
    """Return the page with the table."""
    lines = [[row.python, row.versions, row.system, row.found, row.outcome, f"{row.seconds:.0f}"] for row in rows]
    head = ["Python", "versions", "system", "with", "outcome", "seconds"]
    return (
        f"# Installations\n\nWritten by `make installs`. {time.strftime('%Y-%m-%d')}; {machine_name()}. `here` is an "
        "empty environment on this machine, with the tests that are not slow; for other systems wheels were looked for."
        f"\n\n{markdown(head, lines)}\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if a test failed, or something could not be installed."""
    parser = argparse.ArgumentParser(prog="python -m validation.robustness.installs", description=__doc__)
    add = parser.add_argument
    add("--pythons", nargs="+", default=list(PYTHONS), metavar="VERSION", help="(%(default)s)")
    add("--versions", nargs="+", default=list(VERSIONS), choices=list(VERSIONS), help="(%(default)s)")
    add("--systems", nargs="*", default=list(SYSTEMS), help="for which wheels are looked for (%(default)s)")
    add("--tests", nargs="+", default=[], metavar="FILE", help="these alone")
    add("--out", type=Path, default=Path("installs-output"), help="folder for the table (%(default)s)")
    args = parser.parse_args(arguments)
    out = make_folder(args.out).resolve()
    wheel, sdist = packages(out)
    cases = [(python, versions) for python in args.pythons for versions in args.versions]
    rows = [resolved(*case, system) for system in args.systems for case in cases]
    for case in cases:
        rows.append(installed(*case, wheel, sdist, out, args.tests))
        print(*case, rows[-1].outcome, flush=True)
    write_content(out / "installs.json", json.dumps([asdict(row) for row in rows], indent=1).encode())
    write_content(out / "installs.md", table(rows).encode())
    print(f"table: {out / 'installs.md'}")
    bad = ("failed", "error", "not installed", "none:", "pytest ended")
    return int(any(word in row.outcome for row in rows for word in bad))


if __name__ == "__main__":
    sys.exit(main())
