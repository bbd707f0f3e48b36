"""The command ``python -m validation.robustness.fuzz``."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from nlflow.store.atomic import locked, make_folder
from validation.robustness.contract import campaign_table, run_trials
from validation.robustness.fuzz.campaign import trials
from validation.robustness.fuzz.engine import WITHOUT
from validation.robustness.fuzz.targets import TARGETS


def main() -> int:
    """Fuzz readers; return 0 if nothing was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.robustness.fuzz", description="Fuzz the readers of the package."
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--target", choices=TARGETS, action="append", help="a reader; may be repeated")
    which.add_argument("--all", action="store_true", help="all readers")
    which.add_argument("--list", action="store_true", help="print the names of the readers and end")
    parser.add_argument("--minutes", type=float, default=1.0, help="for each reader [1]")
    parser.add_argument(
        "--mutations", type=int, default=0, help="so many for each reader, at random, in place of minutes"
    )
    parser.add_argument("--jobs", type=int, default=2, help="readers at a time [2]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("fuzz-output"), help="folder for findings and corpora")
    given = parser.parse_args()
    if given.list:
        for name, target in TARGETS.items():
            print(f"{name:<10} {target.about}")
        return 0
    if importlib.util.find_spec("atheris") is None:
        print(WITHOUT, file=sys.stderr)
    table = campaign_table(given.out, "fuzz", "Hostile files", "python -m validation.robustness.fuzz")
    minutes = given.minutes if not given.mutations else max(given.minutes, 120.0)
    found = trials(minutes, given.out, names=given.target or (), seed=given.seed, mutations=given.mutations)
    with locked(make_folder(given.out), "--out"):
        run_trials(found, table, jobs=given.jobs, threads=True)
    rows = [entry.row for entry in table.entries]
    for row in rows:
        for name, words in row.details["findings"].items():
            print(f"{row.details['reader']}: {name}: {words}")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
