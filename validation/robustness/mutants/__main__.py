"""Measure how strong the tests are: ``python -m validation.robustness.mutants``.

A mutant is a small wrong change of the numerical code. It is killed if a test fails that passes without it. Those that
no test kills show what the tests do not hold, or are equivalent: no input tells them from the original. A person judges
which, and writes the second kind into ``validation/robustness/results/equivalent.toml``.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

from validation.robustness.mutants.operators import Mutant, draw, mutants_under
from validation.robustness.mutants.results import Result, judged, read, write
from validation.robustness.mutants.selection import Batch, Map, make_map
from validation.robustness.mutants.workshop import ROOT, Ran, Workshop, copy
from validation.robustness.report import here

_FAILED = ("failed", "timeout", "died")


class Campaign:
    """Trials of mutants, each in a workshop that is free.

    Parameters
    ----------
    workshops : sequence of Workshop
    tests : Map
    most : float
        Seconds that the tests of one mutant may take, in the map's measure.
    sound : iterable of str
        Tests that are known to pass without a change.
    """

    def __init__(self, workshops: Sequence[Workshop], tests: Map, most: float, sound: Sequence[str] = ()) -> None:
        self.free: SimpleQueue[Workshop] = SimpleQueue()
        for workshop in workshops:
            self.free.put(workshop)
        self.tests, self.most = tests, most
        self.sound, self.unsound, self.here = set(sound), set[str](), here()

    def tried(self, mutant: Mutant) -> Result:
        """Return what came of a mutant."""
        workshop = self.free.get()
        try:
            return self._tried(mutant, workshop)
        finally:
            self.free.put(workshop)

    def _tried(self, mutant: Mutant, workshop: Workshop) -> Result:
        batches = self.tests.tests_of(mutant)
        source = (workshop.tree / mutant.file).read_bytes()
        spent = 0.0
        while True:
            how, ran = self._once(mutant, batches, workshop)
            spent += ran.seconds
            if how in ("", "import") or self._is_sound(ran.test, batches, workshop):
                break
        outcome = "timeout" if ran.outcome == "timeout" and how == "test" else "killed" if how else "survived"
        return Result(mutant.name, mutant.file, mutant.function, mutant.line, mutant.change(source), outcome, how,
                      ran.test if how else "", ran.tried, ran.selected, spent, *self.here)  # fmt: skip

    def _once(self, mutant: Mutant, batches: Sequence[Batch], workshop: Workshop) -> tuple[str, Ran]:
        """Run tests of a mutant until one fails; return what has failed, '' if nothing has, and how it went."""
        left = self.most
        with workshop.changed(mutant):
            total = workshop.imports(mutant.file)
            if total.outcome != "passed":
                return "import", total
            for all_files, seconds in batches:
                files = [file for file in all_files if file not in self.unsound]
                if left <= 0 or not files:
                    total = replace(total, selected=total.selected + len(seconds))
                    continue
                ran = workshop.tests(files, seconds, left, self.unsound)
                total = Ran(ran.outcome, ran.test or files[0], total.tried + ran.tried, total.selected + ran.selected,
                            total.seconds + ran.seconds)  # fmt: skip
                if ran.outcome in _FAILED:
                    return "process" if ran.outcome == "died" else "test", total
                left -= sum(seconds.values())
        return "", total

    def _is_sound(self, test: str, batches: Sequence[Batch], workshop: Workshop) -> bool:
        """Tell whether a test passes without a change; of a file that could not be collected, its first one."""
        if test not in self.sound and test not in self.unsound:
            file, colons, _ = test.partition("::")
            takes = next((seconds[test] for _, seconds in batches if test in seconds), 1.0)
            ran = workshop.tests([file], {test: takes} if colons else {}, 0.0)
            (self.sound if ran.outcome == "passed" else self.unsound).add(test)
        return test not in self.unsound


def line(result: Result) -> str:
    """Return a result as text."""
    told = f" by {result.how} {result.test}".rstrip() if result.how else f" {result.tried} of {result.selected} tests"
    return f"{result.outcome:<9}{result.seconds:4.0f} s  {result.file}:{result.line}{told}\n    {result.change}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if a mutant survived that is not known to be equivalent."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.robustness.mutants", description=__doc__.partition("\n")[0]
    )
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--number", type=int, default=150, help="of mutants (%(default)s)")
    add("--jobs", type=int, default=2, help="mutants that are tried at a time (%(default)s)")
    add("--out", type=Path, default=Path("mutants-output"), help="folder for the table (%(default)s)")
    add("--map", type=Path, help="what coverage wrote with one context a test; made in --out if there is none")
    add("--mirror", action="store_true", help="without a map: tests in the files that mirror a module alone")
    add("--most", type=float, default=300.0, help="seconds that the tests of a mutant may take (%(default)s)")
    add("--only", action="append", default=[], help="of those drawn, some by a part of their names; may be repeated")
    add("--list", action="store_true", help="print what would be tried")
    add("--resume", action="store_true", help="keep the results in --out")
    args = parser.parse_args(arguments)
    if args.list:
        for name, change in _drawn(args, ROOT)[1].items():
            print(f"{name}\n    {change}")
        return 0
    with tempfile.TemporaryDirectory(prefix="nlflow-mutants-", ignore_cleanup_errors=True) as name:
        return _campaign(args, Path(name))


def _drawn(args: argparse.Namespace, root: Path) -> tuple[list[Mutant], dict[str, str]]:
    """Return the mutants that are asked for, and what they change by name."""
    drawn = draw(mutants_under(root), args.number, args.seed)
    drawn = [mutant for mutant in drawn if not args.only or any(part in mutant.name for part in args.only)]
    return drawn, {mutant.name: mutant.change((root / mutant.file).read_bytes()) for mutant in drawn}


def _campaign(args: argparse.Namespace, folder: Path) -> int:
    """Do what was asked for with the checkout as it is now, whatever becomes of it meanwhile."""
    root = folder / "checkout"
    copy(ROOT, root)
    drawn, changes = _drawn(args, root)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # loops that never end are ended in any case
    results = [result for result in read(args.out) if changes.get(result.name) == result.change] if args.resume else []
    left = [mutant for mutant in drawn if mutant.name not in {result.name for result in results}]
    title = f"Written by `make mutants`: {args.number} drawn with seed {args.seed}."
    tests = Map(None if args.mirror else args.map or make_map(args.out, args.jobs, root), root)
    workshops = [Workshop(folder / str(job), root) for job in range(min(args.jobs, len(left)))]
    campaign = Campaign(workshops, tests, args.most, [result.test for result in results if result.test])
    pool = ThreadPoolExecutor(max(args.jobs, 1))
    try:
        for call in as_completed([pool.submit(campaign.tried, mutant) for mutant in left]):
            results.append(call.result())
            tqdm.write(line(results[-1]))
            write(args.out, results, title, sorted(campaign.unsound))  # what is known so far
    finally:
        for workshop in workshops:
            workshop.close()
        pool.shutdown(cancel_futures=True)
    reasons = judged()
    open_ = [r for r in results if r.outcome == "survived" and (r.name, r.change) not in reasons]
    print(f"table: {args.out / 'mutants.md'}; {len(open_)} of {len(results)} survived")
    return 1 if open_ else 0


if __name__ == "__main__":
    sys.exit(main())
