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
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

from tqdm import tqdm

from nlflow.store.atomic import locked, make_folder
from nlflow.studies.cases import Case, run_cases
from validation.robustness import ROOT
from validation.robustness.mutants.formulas import SCOPE as FORMULAS
from validation.robustness.mutants.formulas import Claims, Formulas, WithDecisions, make_claims_map
from validation.robustness.mutants.operators import SCOPE, Finder, Mutant, draw, mutants_under
from validation.robustness.mutants.results import Result, judged, mark, results_table, survived
from validation.robustness.mutants.selection import Batch, Map, make_map
from validation.robustness.mutants.workshop import Ran, Workshop, copy

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
    unsound : set of str, optional
        Gets the tests that fail without a change.
    """

    def __init__(
        self,
        workshops: Sequence[Workshop],
        tests: Map,
        most: float,
        sound: Sequence[str] = (),
        unsound: set[str] | None = None,
    ) -> None:
        self.free: SimpleQueue[Workshop] = SimpleQueue()
        for workshop in workshops:
            self.free.put(workshop)
        self.tests, self.most = tests, most
        self.sound, self.unsound = set(sound), set[str]() if unsound is None else unsound

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
        return Result(mutant.file, mutant.function, mutant.line, mutant.change(source), outcome, how,
                      ran.test if how else "", ran.tried, ran.selected, spent)  # fmt: skip

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
                ran = self.tests.ask(workshop, (files, seconds), left, self.unsound)
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
    add(
        "--map",
        type=Path,
        help="what coverage wrote with a context a test or claim; made in --out if there is none",
    )
    add("--mirror", action="store_true", help="without a map: tests in the files that mirror a module alone")
    add("--most", type=float, default=300.0, help="seconds that the tests of a mutant may take (%(default)s)")
    add("--only", action="append", default=[], help="of those drawn, some by a part of their names; may be repeated")
    add("--claims", action="store_true", help="break formulas alone, and ask the claims instead of the tests")
    add("--list", action="store_true", help="print what would be tried")
    add("--resume", action="store_true", help="keep the results in --out")
    args = parser.parse_args(arguments)
    if args.list:
        for name, change in _drawn(args, ROOT)[1].items():
            print(f"{name}\n    {change}")
        return 0
    folder = tempfile.TemporaryDirectory(prefix="nlflow-mutants-", ignore_cleanup_errors=True)
    with locked(make_folder(args.out), "--out"), folder as name:
        return _campaign(args, Path(name))


def _drawn(
    args: argparse.Namespace, root: Path, claims: Claims | None = None
) -> tuple[list[Mutant], dict[str, str], str]:
    """Return the mutants that are asked for, what they change by name, and among which; with a map those that it runs.

    So `draw` never takes a formula that no claim runs: how many there are is told with the table.
    """
    scope, finder = (FORMULAS, Formulas) if args.claims else (SCOPE, Finder)
    there = mutants_under(root, scope, finder)
    among = f"{len(there)} changes"
    if claims is not None:
        there = [mutant for mutant in there if claims.tests_of(mutant)]
        more = len(mutants_under(root, scope, WithDecisions))
        among = f"the {len(there)} of {among} that a quick claim runs ({more} with numbers that are only compared)"
    drawn = draw(there, args.number, args.seed, scope)
    drawn = [mutant for mutant in drawn if not args.only or any(part in mutant.name for part in args.only)]
    return drawn, {mutant.name: mutant.change((root / mutant.file).read_bytes()) for mutant in drawn}, among


def _campaign(args: argparse.Namespace, folder: Path) -> int:
    """Do what was asked for with the checkout as it is now, whatever becomes of it meanwhile."""
    root = folder / "checkout"
    copy(ROOT, root)
    claims = Claims([args.map] if args.map else make_claims_map(args.out, root), root) if args.claims else None
    drawn, changes, among = _drawn(args, root, claims)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # loops that never end are ended in any case
    unsound: set[str] = set()
    command = 'make mutants ARGS="--claims"' if args.claims else "make mutants"
    title = f"Written by `{command}`: {args.number} drawn with seed {args.seed} among {among}."
    scope, name = (FORMULAS, "broken-formulas") if args.claims else (SCOPE, "mutants")
    results = results_table(args.out, title, unsound, scope, name)
    if args.resume:
        results.load(lambda entry: changes.get(entry.key) == entry.row.change)
    left = [mutant for mutant in drawn if results.read(mutant.name) is None]
    tests = claims or Map(None if args.mirror else args.map or make_map(args.out, args.jobs, root), root)
    workshops = [Workshop(folder / str(job), root) for job in range(min(args.jobs, len(left)))]
    known = list(claims.seconds) if claims else [entry.row.test for entry in results.entries if entry.row.test]
    campaign = Campaign(workshops, tests, args.most, known, unsound)
    cases = [Case(mutant.name, campaign.tried, (mutant,)) for mutant in left]
    with closing(run_cases(cases, results, jobs=args.jobs, threads=True)) as run:
        try:
            for done in run:
                tqdm.write(done.finding.told)
        finally:
            for workshop in workshops:  # loops that never end are ended before threads are waited for
                workshop.close()
    reasons = judged()
    open_ = [entry for entry in results.entries if survived(entry) and mark(entry) not in reasons]
    print(f"table: {results.path.with_suffix('.md')}; {len(open_)} of {len(results.entries)} survived")
    return 1 if open_ else 0


if __name__ == "__main__":
    sys.exit(main())
