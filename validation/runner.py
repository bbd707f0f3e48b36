"""Runs claims, one after the other or side by side, and writes what they found as soon as it is known."""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_type_hints

from tqdm import tqdm

from nlflow.backends.interrupts import stopping
from nlflow.backends.machine import environment, folder_digest, provenance, source_digest
from nlflow.backends.workers import completed
from nlflow.errors import FileFormatError, InputError, NlflowWarning
from nlflow.io.atomic import make_folder, write_atomic
from nlflow.io.encoding import digest, encode, misfit
from nlflow.io.storage import load_record, locked, save_record
from nlflow.io.terminal import echo, plain
from nlflow.plotting import render
from validation.claims import all_claims
from validation.harness import CannotRunError, Check, Claim, Context, Outcome
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
    resume: bool = False,
    jobs: int = 1,
    scheduler: str | None = None,
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
    found: dict[str, Finding] = {}
    bar = tqdm(total=len(claims), desc="validation", disable=not progress, leave=False, file=sys.stderr)
    with nullcontext() if out is None else locked(out, "--out"), bar, stopping() as look:

        def note(finding: Finding) -> None:
            found[finding.claim.name] = finding
            if out is not None:
                _write(out, [found[claim.name] for claim in claims if claim.name in found], len(claims), quick)
            bar.update()
            bar.clear()
            tell(finding.line)
            bar.refresh()

        left = []
        for claim in claims:
            before = _before(out, claim, quick) if resume and out is not None else None
            if before is None:
                left.append(claim)
            else:
                note(before)
        for finding in _run(left, quick, jobs, scheduler, bar):
            look()  # a flow answers Ctrl-C with what it has reached: that is no finding, and not to be kept as one
            if out is not None:
                _keep(out, finding, quick)
            note(finding)
    return [found[claim.name] for claim in claims]


def _run(claims: Sequence[Claim], quick: bool, jobs: int, scheduler: str | None, bar: Any) -> Iterator[Finding]:
    """Run claims, and yield what each found as soon as it is known."""
    if jobs == 1 and scheduler is None:
        for claim in claims:

            def step(text: str, name: str = claim.name) -> None:
                bar.set_postfix_str(f"{name}: {text}", refresh=True)

            step("starts")
            yield run_one(claim, Context(quick=quick, step=step))
        return
    calls = [(_elsewhere, (claim.name, quick)) for claim in claims]
    with closing(completed(calls, jobs=jobs, scheduler=scheduler)) as results:
        for number, content in results:
            yield _from_plain(claims[number], content)


def _elsewhere(name: str, quick: bool) -> dict[str, Any]:
    """Run a claim in another process, and return what it found as plain data: figures of matplotlib stay here."""
    with stopping():
        return _as_plain(run_one(select([name])[0], Context(quick=quick)))


# ---- what was found, as a record

_KIND = "finding of a claim"


def _as_plain(finding: Finding) -> dict[str, Any]:
    outcome = finding.outcome
    return {
        "status": finding.status,
        "message": finding.message,
        "seconds": finding.seconds,
        "checks": None if outcome is None else [plain_check(check) for check in outcome.checks],
        "details": {} if outcome is None else plain(outcome.details),
        "figures": {caption: b64encode(image).decode() for caption, image in finding.figures.items()},
    }


_FINDING = {"status": str, "message": str, "seconds": float, "checks": list | None, "details": dict, "figures": dict}


def plain_check(check: Check) -> dict[str, Any]:
    """Return a check in JSON's types: its figures may be NumPy's."""
    return {name: value.item() if hasattr(value, "item") else value for name, value in asdict(check).items()}


def _from_plain(claim: Claim, content: dict[str, Any]) -> Finding:
    figures = {caption: b64decode(image, validate=True) for caption, image in content["figures"].items()}
    outcome = None
    if content["checks"] is not None:
        outcome = Outcome([Check(**check) for check in content["checks"]], {}, content["details"])
    return Finding(claim, content["status"], outcome, content["message"], content["seconds"], figures)


def _program(quick: bool) -> str:
    """Return a digest of what computes a finding: it is not mixed with those of another state of the source."""
    versions = environment()["versions"]
    return digest(encode([versions, source_digest(), folder_digest(Path(__file__).parent), quick]))


def _keep(out: Path, finding: Finding, quick: bool) -> None:
    content = {"program": _program(quick), "finding": _as_plain(finding)}
    save_record(make_folder(out / "claims") / f"{finding.claim.name}.json", _KIND, content)


def _before(out: Path, claim: Claim, quick: bool) -> Finding | None:
    """Return what was found before, if this very program found it."""
    path = out / "claims" / f"{claim.name}.json"
    if not path.exists():
        return None
    try:
        content = load_record(path, _KIND)
        trouble = misfit(content, {"program": str, "finding": dict})
        if trouble is None and content["program"] != _program(quick):
            return None  # whose findings may be of another form
        trouble = trouble or _foreign(content["finding"])
        if trouble is not None:
            raise FileFormatError(f"{path}: got {trouble}; it does not hold the finding of a claim")
        found = _from_plain(claim, content["finding"])
        if found.status not in ("pass", "fail"):
            return None
        if found.outcome is None or found.outcome.passed != (found.status == "pass"):
            raise FileFormatError(f"{path}: got {found.status!r}, which its checks do not say")
        return found
    except FileFormatError as error:
        reason = str(error)
    except ValueError as error:  # of base64
        reason = f"{path}: got a picture that is none ({error})"
    warnings.warn(f"{reason}; the claim is run again", NlflowWarning, stacklevel=2)
    return None


def _foreign(finding: Any) -> str | None:
    """Return why plain data is no finding; None if it is. Of its pictures, whether they are text."""
    trouble = misfit(finding, _FINDING) or misfit(finding["figures"], dict.fromkeys(finding["figures"], str))
    if trouble is not None:
        return trouble
    kinds = get_type_hints(Check)
    return next((wrong for check in finding["checks"] or () if (wrong := misfit(check, kinds)) is not None), None)


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
