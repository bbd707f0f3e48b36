"""Run the campaigns: ``python -m validation.robustness``."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from validation.robustness.contract import Row, rows_of
from validation.robustness.report import Entry, line, read, write


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if anything was lost or wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.robustness",
        description="Kill, starve and mislead the package, and write a table of what came of it.",
    )
    add = parser.add_argument
    add("--only", choices=("faults", "fuzz"), help="one of the two campaigns")
    add("--kills", type=int, default=100, help="by SIGKILL; other faults in proportion (%(default)s)")
    add("--minutes", type=float, default=30.0, help="of fuzzing, for each reader (%(default)s)")
    add("--jobs", type=int, default=2, help="readers that are fuzzed at a time (%(default)s)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, default=Path("robustness-output"), help="folder for the table (%(default)s)")
    add("--resume", action="store_true", help="keep the good rows of the table in --out, tried as often before; "
        "each says of which source it is")  # fmt: skip
    args = parser.parse_args(arguments)
    if args.kills < 1 or args.minutes <= 0 or args.jobs < 1:
        parser.error("--kills, --minutes and --jobs: expected numbers > 0")
    entries = [entry for entry in read(args.out) if entry.row.good] if args.resume else []
    with tempfile.TemporaryDirectory(prefix="nlflow-robustness-") as name:
        for key, row in _found(args, Path(name), {entry.key for entry in entries}):
            entries.append(Entry.of(key, row))
            tqdm.write(line(row))
            write(args.out, entries)  # what is known so far
    print(f"table: {args.out / 'robustness.md'}")
    return 0 if all(entry.row.good for entry in entries) else 1


def _found(args: argparse.Namespace, folder: Path, known: set[str]) -> Iterator[tuple[str, Row]]:
    """Yield what is not known yet, as soon as it is found."""
    if args.only != "fuzz":  # one at a time, since kills come at times of chance in a run whose length was measured
        from validation.robustness.faults.campaign import trials

        for trial in trials(args.kills, args.seed, folder):
            if trial.key not in known:
                yield trial.key, trial.run()
    if args.only != "faults":
        from validation.robustness.fuzz.campaign import trials as readers

        left = [trial for trial in readers(args.minutes, args.out / "fuzz", seed=args.seed) if trial.key not in known]
        for trial, row in rows_of(left, args.jobs):
            yield trial.key, row


if __name__ == "__main__":
    sys.exit(main())
