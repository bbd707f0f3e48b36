"""The report: one HTML page with its figures inside, which needs no network."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from validation.finding import Finding

_STYLE = """
:root { --good: #1b7f4b; --bad: #b03a2e; --mute: #667; --line: #d9dce3; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1c2230; max-width: 62rem; margin: 0 auto; padding: 2rem 1.2rem; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.25rem; margin: 0; }
p { margin: .5rem 0; } .mute { color: var(--mute); font-size: .9rem; }
table { border-collapse: collapse; width: 100%; margin: .8rem 0; font-size: .9rem; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 600; color: var(--mute); } td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
section { border-top: 2px solid var(--line); padding-top: 1.4rem; margin-top: 2rem; }
.mark { font-weight: 600; white-space: nowrap; } .pass { color: var(--good); }
.fail, .error { color: var(--bad); } .not-run { color: var(--mute); }
figure { margin: 1.2rem 0; }
figure img { width: 100%; height: auto; border: 1px solid var(--line); border-radius: 4px; }
figcaption { color: var(--mute); font-size: .9rem; }
blockquote { margin: .6rem 0; padding: .1rem 1rem; border-left: 3px solid var(--line); }
a { color: #0b5394; text-decoration: none; } a:hover { text-decoration: underline; }
pre { white-space: pre-wrap; background: #f5f6f8; padding: .6rem; border-radius: 4px; font-size: .85rem; }
"""

_MARKS = {"pass": "✓ pass", "fail": "✗ fail", "error": "✗ error", "not run": "– not run"}


def report_page(findings: Sequence[Finding], wanted: int, quick: bool, environment: dict[str, Any]) -> str:
    """Return the page about what was found, of so many claims."""
    passed = sum(finding.status == "pass" for finding in findings)
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    left = wanted - len(findings)
    missing = f" <strong>{left} more were not run: the run has not ended, or was interrupted.</strong>" if left else ""
    size = "quick experiments" if quick else "full experiments"
    rows = "".join(
        f'<tr><td>{_mark(f)}</td><td><a href="#{f.claim.name}">{_text(f.claim.title)}</a></td>'
        f"<td>{_text(f.claim.source)}</td><td>{_nearest(f)}</td></tr>"
        for f in findings
    )
    sections = "".join(_section(finding) for finding in findings)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>nlflow: validation</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>Validation of nlflow</h1>
<p>{passed} of {len(findings)} claims passed ({size}, {sum(f.seconds for f in findings):.0f} s).{missing}</p>
<p class="mute">{_text(versions)}; {_text(environment["platform"])}</p>
<table><thead><tr><th></th><th>claim</th><th>source</th><th>figure nearest to its tolerance</th></tr></thead>
<tbody>{rows}</tbody></table>
{sections}
</body>
</html>
"""


def _text(value: object) -> str:
    return html.escape(str(value))


def _mark(finding: Finding) -> str:
    return f'<span class="mark {finding.status.replace(" ", "-")}">{_MARKS[finding.status]}</span>'


def _nearest(finding: Finding) -> str:
    if finding.outcome is None or not finding.outcome.checks:
        return _text(finding.message)
    worst = finding.outcome.worst
    return f"{_text(worst.what)}: {_text(worst.relation)}"


def _section(finding: Finding) -> str:
    claim, outcome = finding.claim, finding.outcome
    parts = [
        f'<section id="{claim.name}"><h2>{_text(claim.title)} {_mark(finding)}</h2>',
        f'<p class="mute">{_text(claim.source)} · {claim.name} · {finding.seconds:.1f} s</p>',
        f"<blockquote><p>{_text(claim.statement)}</p></blockquote>",
    ]
    if finding.message:
        parts.append(f"<pre>{_text(finding.message)}</pre>")
    if outcome is not None:
        checks = "".join(
            f'<tr><td>{_text(check.what)}</td><td class="number">{_text(check.relation)}</td>'
            f'<td class="{"pass" if check.passed else "fail"}">{"✓" if check.passed else "✗"}</td></tr>'
            for check in outcome.checks
        )
        parts.append(
            f"<table><thead><tr><th>measured</th><th></th><th></th></tr></thead><tbody>{checks}</tbody></table>"
        )
        for caption, picture in finding.figures.items():
            data = base64.b64encode(picture).decode()
            parts.append(
                f'<figure><img alt="{_text(caption)}" src="data:image/png;base64,{data}">'
                f"<figcaption>{_text(caption)}</figcaption></figure>"
            )
    parts.append("</section>")
    return "\n".join(parts)
