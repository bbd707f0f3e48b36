"""Run the benchmarks: ``python -m benchmarks [NAME ...] [--out DIR]``."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, machine, table, write
from nlflow.errors import InputError
from nlflow.store.atomic import locked, make_folder
from nlflow.studies.cases import Case, run_cases

NAMES = (
    "pairwise", "scattered", "flows", "equilibrium", "stencil", "exponential", "convolution", "walks", "startup",
    "camera", "fates", "fractional", "functions", "graphs", "learning", "noisy", "particles",
)  # fmt: skip
BESIDE = ("cahn_hilliard", "gray_scott", "neighbours", "pde", "trained")
"""Those whose peers or models are no extra of the package; they run when they are named."""


def main() -> None:
    known = (*NAMES, *BESIDE)
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help=f"any of {', '.join(known)}; without a name all but the last {len(BESIDE)}")  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder for NAME.json and NAME.md")
    parser.add_argument("--small", action="store_true", help="the short form, of those that have one")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="for neighbours a folder with Set12, for trained one of models"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(known)
    if unknown:
        parser.error(f"NAME: got {', '.join(sorted(unknown))}, expected any of {', '.join(known)}")
    given = {word: value for word in ("small", "data") if (value := getattr(arguments, word))}
    rows: list[Row] = []
    with nullcontext() if arguments.out is None else locked(make_folder(arguments.out), "--out"):
        for done in run_cases([Case(name, measured, (name, given)) for name in arguments.names or NAMES]):
            rows += done.finding
            if arguments.out is not None:  # what is measured is kept, whatever happens to the others
                write(done.finding, arguments.out, done.case.name, title(done.case.name))
    print(table(rows))
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine().items()))
    if arguments.out is not None:
        print(f"written to {arguments.out}", file=sys.stderr)


def measured(name: str, given: dict[str, Any]) -> list[Row]:
    """Return the rows of a benchmark, which gets the options that were given."""
    run = importlib.import_module(f"benchmarks.{name}").run
    for word in given:
        if word not in inspect.signature(run).parameters:
            raise InputError(f"--{word}: got it for {name}, which has no such option; leave it out")
    print(f"{name} ...", file=sys.stderr)
    rows: list[Row] = run(**given)
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
