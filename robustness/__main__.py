"""Run the campaigns: ``python -m robustness``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from robustness.contract import Row
from robustness.report import line, write


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if anything was lost or wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m robustness",
        description="Kill, starve and mislead the package, and write a table of what came of it.",
    )
    add = parser.add_argument
    add("--only", choices=("faults", "fuzz"), help="one of the two campaigns")
    add("--kills", type=int, default=100, help="by SIGKILL; other faults in proportion (%(default)s)")
    add("--minutes", type=float, default=30.0, help="of fuzzing, for each reader (%(default)s)")
    add("--jobs", type=int, default=2, help="readers that are fuzzed at a time (%(default)s)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("robustness-output"), help="folder for the table (%(default)s)")
    args = parser.parse_args(arguments)
    if args.kills < 1 or args.minutes <= 0:
        parser.error("--kills and --minutes: expected numbers > 0")
    rows: list[Row] = []
    settings = {"kills": args.kills, "minutes of fuzzing a reader": args.minutes, "seed": args.seed}
    if args.only == "faults":
        del settings["minutes of fuzzing a reader"]
    if args.only == "fuzz":
        del settings["kills"]

    def tell(row: Row) -> None:
        rows.append(row)
        tqdm.write(line(row))
        write(args.out, rows, settings)  # what is known so far

    if args.only != "fuzz":
        from robustness.faults.campaign import campaign

        campaign(args.kills, args.seed, tell)
    if args.only != "faults":
        from robustness.fuzz.campaign import campaign as fuzz

        for row in fuzz(args.minutes, args.out / "fuzz", tqdm.write, jobs=args.jobs, seed=args.seed):
            tell(row)
    print(f"table: {args.out / 'robustness.md'}")
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
