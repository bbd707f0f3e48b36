"""The report: one HTML page with its figures inside, which needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from nlflow.plotting.page import image, page, text

if TYPE_CHECKING:
    from validation.finding import Finding

_MARKS = {"pass": "✓ pass", "fail": "✗ fail", "error": "✗ error", "not run": "– not run"}


def report_page(findings: Sequence[Finding], wanted: int, quick: bool, environment: dict[str, Any]) -> str:
    """Return the page about what was found, of so many claims."""
    passed = sum(finding.status == "pass" for finding in findings)
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    left = wanted - len(findings)
    missing = f" <strong>{left} more were not run: the run has not ended, or was interrupted.</strong>" if left else ""
    size = "quick experiments" if quick else "full experiments"
    rows = "".join(
        f'<tr><td>{_mark(f)}</td><td><a href="#{f.claim.name}">{text(f.claim.title)}</a></td>'
        f"<td>{text(f.claim.source)}</td><td>{_nearest(f)}</td></tr>"
        for f in findings
    )
    sections = "".join(_section(finding) for finding in findings)
    body = f"""<h1>Validation of nlflow</h1>
<p>{passed} of {len(findings)} claims passed ({size}, {sum(f.seconds for f in findings):.0f} s).{missing}</p>
<p class="mute">{text(versions)}; {text(environment["platform"])}</p>
<table><thead><tr><th></th><th>claim</th><th>source</th><th>figure nearest to its tolerance</th></tr></thead>
<tbody>{rows}</tbody></table>
{sections}"""
    return page("nlflow: validation", body)


def _mark(finding: Finding) -> str:
    return f'<span class="mark {finding.status.replace(" ", "-")}">{_MARKS[finding.status]}</span>'


def _nearest(finding: Finding) -> str:
    if finding.outcome is None or not finding.outcome.checks:
        return text(finding.message)
    worst = finding.outcome.worst
    return f"{text(worst.what)}: {text(worst.relation)}"


def _section(finding: Finding) -> str:
    claim, outcome = finding.claim, finding.outcome
    parts = [
        f'<section id="{claim.name}"><h2>{text(claim.title)} {_mark(finding)}</h2>',
        f'<p class="mute">{text(claim.source)} · {claim.name} · {finding.seconds:.1f} s</p>',
        f"<blockquote><p>{text(claim.statement)}</p></blockquote>",
    ]
    if finding.message:
        parts.append(f"<pre>{text(finding.message)}</pre>")
    if outcome is not None:
        checks = "".join(
            f'<tr><td>{text(check.what)}</td><td class="number">{text(check.relation)}</td>'
            f'<td class="{"pass" if check.passed else "fail"}">{"✓" if check.passed else "✗"}</td></tr>'
            for check in outcome.checks
        )
        parts.append(
            f"<table><thead><tr><th>measured</th><th></th><th></th></tr></thead><tbody>{checks}</tbody></table>"
        )
        parts += [image(picture, caption) for caption, picture in finding.figures.items()]
    parts.append("</section>")
    return "\n".join(parts)
