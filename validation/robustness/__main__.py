"""Run the campaigns: ``python -m validation.robustness``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nlflow.store.atomic import locked, make_folder
from validation.robustness.contract import campaign_table, run_trials


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if anything was lost or wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.robustness",
        description="Kill, starve and mislead the package, and write a table of what came of it.",
    )
    add = parser.add_argument
    add("--only", choices=("faults", "guests", "fuzz"), help="one of the campaigns")
    add("--kills", type=int, default=100, help="by SIGKILL; other faults in proportion (%(default)s)")
    add("--calls", type=int, default=20000, help="in one process (%(default)s)")
    add("--minutes", type=float, default=30.0, help="of fuzzing, for each reader (%(default)s)")
    add("--jobs", type=int, default=2, help="readers that are fuzzed at a time (%(default)s)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("robustness-output"), help="folder for the table (%(default)s)")
    add("--resume", action="store_true", help="keep the good rows of the table in --out, tried as often before; "
        "each says of which source it is")  # fmt: skip
    args = parser.parse_args(arguments)
    if min(args.kills, args.calls, args.jobs) < 1 or args.minutes <= 0:
        parser.error("--kills, --calls, --minutes and --jobs: expected numbers > 0")
    table = campaign_table(args.out)
    with locked(make_folder(args.out), "--out"), tempfile.TemporaryDirectory(prefix="nlflow-robustness-") as name:
        if args.resume:
            table.load(lambda entry: entry.row.good)
        if args.only in (None, "guests"):
            from validation.robustness.faults.campaign import guests

            run_trials(list(guests(args.calls, Path(name))), table)
        if args.only in (
            None,
            "faults",
        ):  # one at a time, since kills come at times of chance in a run whose length was measured
            from validation.robustness.faults.campaign import trials

            run_trials(list(trials(args.kills, args.seed, Path(name))), table)
        if args.only in (None, "fuzz"):
            from validation.robustness.fuzz.campaign import trials as readers

            found = readers(args.minutes, args.out / "fuzz", seed=args.seed)
            run_trials(found, table, jobs=args.jobs, threads=True)
    print(f"table: {table.path.with_suffix('.md')}")
    return 0 if all(entry.row.good for entry in table.entries) else 1


if __name__ == "__main__":
    sys.exit(main())
