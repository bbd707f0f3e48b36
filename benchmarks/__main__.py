"""Run the benchmarks: ``python -m benchmarks [NAME ...] [--out DIR]``."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from benchmarks.harness import Row, report, write

NAMES = (
    "pairwise", "scattered", "flows", "equilibrium", "stencil", "exponential", "convolution", "walks", "startup",
    "camera",
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
    for name in arguments.names or NAMES:
        print(f"{name} ...", file=sys.stderr)
        rows += importlib.import_module(f"benchmarks.{name}").run()
        if arguments.out is not None:  # what is measured is kept, whatever happens to the others
            write(rows, arguments.out)
    report(rows, arguments.out)


if __name__ == "__main__":
    main()
