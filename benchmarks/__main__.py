"""Run the benchmarks: ``python -m benchmarks [NAME ...] [--out DIR]``."""

from __future__ import annotations

import argparse
import importlib
import sys
from contextlib import nullcontext
from pathlib import Path

from benchmarks.harness import Row, machine, table, write
from nlflow.store.atomic import locked, make_folder
from nlflow.studies.cases import Case, run_cases

NAMES = (
    "pairwise", "scattered", "flows", "equilibrium", "stencil", "exponential", "convolution", "walks", "startup",
    "camera", "fates", "fractional", "functions", "graphs", "learning", "noisy", "particles",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(NAMES)}; all by default")
    parser.add_argument("--out", type=Path, help="folder for results.json and results.md")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(NAMES)
    if unknown:
        parser.error(f"NAME: got {', '.join(sorted(unknown))}, expected any of {', '.join(NAMES)}")
    rows: list[Row] = []
    with nullcontext() if arguments.out is None else locked(make_folder(arguments.out), "--out"):
        for done in run_cases([Case(name, measured, (name,)) for name in arguments.names or NAMES]):
            rows += done.finding
            if arguments.out is not None:  # what is measured is kept, whatever happens to the others
                write(rows, arguments.out)
    print(table(rows))
    print("\n" + ", ".join(f"{name} {value}" for name, value in machine().items()))
    if arguments.out is not None:
        print(f"written to {arguments.out}", file=sys.stderr)


def measured(name: str) -> list[Row]:
    """Return the rows of a benchmark."""
    print(f"{name} ...", file=sys.stderr)
    return importlib.import_module(f"benchmarks.{name}").run()


if __name__ == "__main__":
    main()
