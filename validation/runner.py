"""Run claims, one after the other or side by side, and write each finding as soon as it is known."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nlflow.backends.interrupts import stopping
from nlflow.backends.machine import environment, provenance
from nlflow.desk.terminal import echo
from nlflow.errors import FileFormatError, InputError
from nlflow.plotting import render
from nlflow.store.atomic import locked, make_folder, write_atomic
from nlflow.store.encoding import plain
from nlflow.studies.cases import Case, run_cases
from validation.claims import all_claims
from validation.finding import Finding, findings_in
from validation.harness import CannotRunError, Claim, Context, Outcome
from validation.report import report_page


def run_claims(
    names: Sequence[str] = (),
    *,
    quick: bool = False,
    out: Path | None = None,
    resume: bool = False,
    jobs: int = 1,
    scheduler: str | None = None,
    data: Path | None = None,
    progress: bool = True,
    tell: Callable[[str], None] = echo,
) -> list[Finding]:
    """Run claims and write ``results.json`` and ``report.html`` to `out`.

    Parameters
    ----------
    names : sequence of str
        Which claims; all by default.
    quick : bool
        Smaller experiments, under three minutes in all.
    out : Path, optional
        Folder, made when it is missing; both files are written anew after every claim, and what it found to ``claims``
        inside. Nothing is written without one.
    resume : bool
        Take from `out` what the same program has found there before; claims that ended in an error are run again.
    jobs : int
        Claims at a time. Those that measure times are disturbed by others.
    scheduler : str, optional
        Address of a scheduler of Dask whose workers have the source tree, or ``'local'``.
    data : Path, optional
        Folder with data sets; without it the claims that need one are not run.
    progress : bool
        Progress bar on stderr.
    tell : callable
        Gets one line a claim as soon as it is known.

    Returns
    -------
    list of Finding
        In the order of the claims.

    Raises
    ------
    InputError
        For names that no claim has, and for a folder that another process writes to.
    """
    claims = select(names)
    if out is not None:
        if out.exists() and not out.is_dir():
            raise FileFormatError(f"--out: got {out}, which is a file, expected a folder; choose another name")
        make_folder(out)
    by_name = {claim.name: claim for claim in claims}
    found: dict[str, Finding] = {}
    bar = tqdm(total=len(claims), desc="validation", disable=not progress, leave=False, file=sys.stderr)
    step = bar.set_postfix_str if jobs == 1 and scheduler is None else None  # other processes have no bar
    cases = [Case(claim.name, _run, (claim.name, quick, step, data)) for claim in claims]
    with nullcontext() if out is None else locked(out, "--out"), bar:
        keeper = None if out is None else findings_in(out, claims, quick)
        run = run_cases(cases, keeper, resume=resume, jobs=jobs, scheduler=scheduler, bar=bar)
        with closing(run) as results:
            for done in results:
                name = done.case.name
                found[name] = Finding.from_plain(by_name[name], done.finding)
                if out is not None:
                    _write(out, [found[claim.name] for claim in claims if claim.name in found], len(claims), quick)
                with tqdm.external_write_mode():
                    tell(found[name].line)
    return [found[claim.name] for claim in claims]


def _run(name: str, quick: bool, step: Callable[[str], None] | None = None, data: Path | None = None) -> dict[str, Any]:
    """Run a claim, here or in another process, and return what it found as plain data."""
    told = (lambda text: None) if step is None else (lambda text: step(f"{name}: {text}"))
    told("starts")
    with stopping():  # a flow answers Ctrl-C with what it has reached: that is no finding
        return run_one(select([name])[0], Context(quick=quick, step=told, data=data)).as_plain()


# ---- results.json and report.html


def _write(out: Path, findings: Sequence[Finding], wanted: int, quick: bool) -> None:
    """Write what is known so far, so that an interruption loses at most the claim in hand."""
    record = json.dumps(plain(describe(findings, wanted, quick)), indent=2, allow_nan=False)
    page = report_page(findings, wanted, quick, environment())
    write_atomic(out / "results.json", lambda file: file.write(record.encode()))
    write_atomic(out / "report.html", lambda file: file.write(page.encode()))


def select(names: Sequence[str]) -> list[Claim]:
    """Return the claims of these names, all by default, in the order of the theory."""
    claims = all_claims()
    known = [claim.name for claim in claims]
    wanted = [name.replace("_", "-") for name in names]
    for name in wanted:
        if name not in known:
            raise InputError(f"NAME: got {name!r}, expected one of {', '.join(known)}")
    return [claim for claim in claims if not wanted or claim.name in wanted]


def run_one(claim: Claim, context: Context) -> Finding:
    """Run one claim; whatever goes wrong in it is a finding."""
    start = time.perf_counter()
    outcome: Outcome | None = None
    figures: dict[str, bytes] = {}
    message = ""
    try:
        outcome = claim.run(context)
        figures = {caption: render(figure, "png") for caption, figure in outcome.figures.items()}
        status = "pass" if outcome.passed else "fail"
    except CannotRunError as reason:
        status, message = "not run", str(reason)
    except Exception as error:  # a claim that cannot be run has failed, and the others are still to be seen
        status, message = "error", f"{type(error).__name__}: {error}"
        print(traceback.format_exc(), file=sys.stderr)
    return Finding(claim, status, outcome, message, time.perf_counter() - start, figures)


def describe(findings: Sequence[Finding], wanted: int, quick: bool) -> dict[str, Any]:
    """Return what was found, of so many claims, in JSON's types."""
    complete = len(findings) == wanted
    return {
        "passed": complete and succeeded(findings),
        "complete": complete,
        "quick": quick,
        "environment": provenance(),
        "claims": [
            {
                "name": finding.claim.name,
                "title": finding.claim.title,
                "statement": finding.claim.statement,
                "source": finding.claim.source,
                "status": finding.status,
                "message": finding.message,
                "seconds": round(finding.seconds, 2),
                "checks": [
                    {
                        name: getattr(check, name)
                        for name in ("what", "measured", "tolerance", "relation", "strain", "passed")
                    }
                    for check in (finding.outcome.checks if finding.outcome else ())
                ],
                "figures": list(finding.figures),
                "details": finding.outcome.details if finding.outcome else {},
            }
            for finding in findings
        ],
    }


def succeeded(findings: Sequence[Finding]) -> bool:
    """Tell whether nothing failed; claims that could not be run for want of a package do not count."""
    return all(finding.status in ("pass", "not run") for finding in findings)


def summary(findings: Sequence[Finding]) -> str:
    """Return one line: how many passed, failed, were not run."""
    counts = {status: sum(f.status == status for f in findings) for status in ("pass", "fail", "error", "not run")}
    words = {"pass": "passed", "fail": "failed", "error": "ended in an error", "not run": "not run"}
    parts = [f"{count} {words[status]}" for status, count in counts.items() if count or status == "pass"]
    plural = "s" if len(findings) != 1 else ""
    return f"{len(findings)} claim{plural}: {', '.join(parts)}; {sum(f.seconds for f in findings):.0f} s"
