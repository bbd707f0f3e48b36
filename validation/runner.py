"""Runs claims one after the other, with a progress bar, and writes what they found."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from nlflow._atomic import make_folder, write_atomic
from nlflow._machine import environment
from nlflow._terminal import echo, plain, stopping
from nlflow.errors import FileFormatError, InputError
from nlflow.plotting import render
from validation.claims import all_claims
from validation.harness import CannotRunError, Claim, Context, Outcome
from validation.report import report_page


@dataclass(frozen=True)
class Finding:
    """A claim with what came of it; figures are PNG files by caption."""

    claim: Claim
    status: str  # 'pass', 'fail', 'error' or 'not run'
    outcome: Outcome | None
    message: str
    seconds: float
    figures: dict[str, bytes]

    @property
    def line(self) -> str:
        """Claim, source, measured and tolerance, result."""
        found = self.message
        if self.outcome is not None and self.outcome.checks:
            worst = self.outcome.worst
            found = f"{worst.what}: {worst.relation}"
            if len(self.outcome.checks) > 1:
                found += f" (nearest of {len(self.outcome.checks)})"
        source = self.claim.source.replace("arXiv 2312.00751, ", "")
        return f"{self.status:<8}{self.claim.name:<25} {source:<34.34} {self.seconds:5.1f} s  {found}"


def run_claims(
    names: Sequence[str] = (),
    *,
    quick: bool = False,
    out: Path | None = None,
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
        Folder, made when it is missing; both files are written anew after every claim. Nothing is written without one.
    progress : bool
        Progress bar on stderr.
    tell : callable
        Gets one line a claim as soon as it is known.

    Raises
    ------
    InputError
        For names that no claim has.
    """
    claims = select(names)
    if out is not None:
        if out.exists() and not out.is_dir():
            raise FileFormatError(f"--out: got {out}, which is a file, expected a folder; choose another name")
        make_folder(out)
    findings = []
    bar = tqdm(total=len(claims), desc="validation", disable=not progress, leave=False, file=sys.stderr)
    with bar, stopping() as look:
        for claim in claims:

            def step(text: str, name: str = claim.name) -> None:
                bar.set_postfix_str(f"{name}: {text}", refresh=True)

            step("starts")
            finding = run_one(claim, Context(quick=quick, step=step))
            look()  # what was cut short says nothing about its claim
            findings.append(finding)
            if out is not None:
                _write(out, findings, len(claims), quick)
            bar.update()
            bar.clear()
            tell(finding.line)
            bar.refresh()
    return findings


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
        "environment": environment(),
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
                        "what": check.what,
                        "measured": check.measured,
                        "tolerance": check.tolerance,
                        "relation": check.relation,
                        "passed": check.passed,
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
    return f"{len(findings)} claims: {', '.join(parts)}; {sum(f.seconds for f in findings):.0f} s"
