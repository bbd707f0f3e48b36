"""Run the benchmarks: ``python -m benchmarks [NAME ...] [--only PART ...] [--out DIR]``."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, machine, sections_of, table, write
from nlflow.errors import InputError
from nlflow.store.atomic import locked, make_folder
from nlflow.studies.cases import Case, run_cases

NAMES = (
    "pairwise", "scattered", "flows", "equilibrium", "stencil", "exponential", "convolution", "walks", "startup",
    "camera", "fates", "fractional", "functions", "graphs", "learning", "noisy", "particles",
)  # fmt: skip
BESIDE = ("cahn_hilliard", "clean", "deblurring", "gray_scott", "neighbours", "pde", "trained")
"""Those whose peers, models or pictures are no extra of the package, or that take an hour; they run when named."""


def main() -> None:
    known = (*NAMES, *BESIDE)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"any of {', '.join(known)}; without a name all but the last {len(BESIDE)}")  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder for NAME.json and NAME.md; parts that are not run stay there")
    parser.add_argument("--small", action="store_true", help="the short form, of those that have one")
    parser.add_argument("--only", nargs="+", metavar="PART", help="of those that have parts, such as learning")
    parser.add_argument(
        "--data", type=Path, metavar="DIR",
        help="for deblurring and neighbours a folder with Set12, for learning one with CIFAR-10, for trained one of "
        "models",
    )  # fmt: skip
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(known)
    if unknown:
        parser.error(f"NAME: got {', '.join(sorted(unknown))}, expected any of {', '.join(known)}")
    given = {word: value for word in ("small", "data") if (value := getattr(arguments, word))}
    cases = [
        Case(f"{name} {part}".strip(), measured, (name, part, given))
        for name in arguments.names or NAMES
        for part in parts(name, arguments.only)
    ]
    rows: list[Row] = []
    kept: dict[str, dict[str, list[Row]]] = {}
    with nullcontext() if arguments.out is None else locked(make_folder(arguments.out), "--out"):
        for done in run_cases(cases):
            rows += done.finding
            if arguments.out is not None and done.finding:  # what is measured is kept, whatever happens to the others
                name, part = done.case.arguments[:2]
                sections = kept.setdefault(name, sections_of(arguments.out, name))
                sections[part] = done.finding
                write(sections, arguments.out, name, title(name))
    print(table(rows))
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine().items()))
    if arguments.out is not None:
        print(f"written to {arguments.out}", file=sys.stderr)


def parts(name: str, only: list[str] | None) -> tuple[str, ...]:
    """Return the parts of a benchmark that are asked for; one without a name where it has none."""
    known: tuple[str, ...] = getattr(importlib.import_module(f"benchmarks.{name}"), "PARTS", ())
    unknown = set(only or ()) - set(known)
    if unknown:
        there = f"expected any of {', '.join(known)}" if known else "which has no parts; leave it out"
        raise InputError(f"--only: got {', '.join(sorted(unknown))} for {name}, {there}")
    return tuple(only or known or ("",))


def measured(name: str, part: str, given: dict[str, Any]) -> list[Row]:
    """Return the rows of a benchmark, or of a part, which gets the options that were given."""
    run = importlib.import_module(f"benchmarks.{name}").run
    for word in given:
        if word not in inspect.signature(run).parameters:
            raise InputError(f"--{word}: got it for {name}, which has no such option; leave it out")
    print(f"{name} {part}".strip(), "...", file=sys.stderr)
    rows: list[Row] = run(**given, **({"only": (part,)} if part else {}))
    return rows


def title(name: str) -> str:
    """Return what a benchmark measures, of the first line of its text."""
    told = (importlib.import_module(f"benchmarks.{name}").__doc__ or name).partition("\n")[0]
    return told.partition(":")[0].rstrip(".")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"python -m benchmarks: {error}")
