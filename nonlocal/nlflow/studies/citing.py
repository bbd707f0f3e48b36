"""What to cite, as BibTeX."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from nlflow.backends.machine import source_digest, version
from nlflow.errors import FileFormatError, check_choice

_YEAR = "2026"  # of the copyright, until there is a release
_FLOWS = ("nguyen2023mitigating", "gilboa2008nonlocal")
THEORY: Mapping[str, tuple[str, ...]] = {
    "flows": _FLOWS,
    "denoise": ("buades2005review", "gilboa2008nonlocal", "lebrun2013nonlocal"),
    "attention": ("nguyen2023mitigating", "dong2021attention"),
    "time-order": (*_FLOWS, "hairer1993solving", "dormand1980family"),
    "space-order": ("gilboa2008nonlocal", "trefethen2014exponentially"),
    "monte-carlo": ("gilboa2008nonlocal", "vandervaart1998asymptotic"),
    "samples": ("nguyen2023mitigating", "vandervaart1998asymptotic"),
    "mixing": ("nguyen2023mitigating", "levin2017markov"),
    "equilibrium": _FLOWS,
    "stability": ("nguyen2023mitigating",),
}
"""The works behind a subject: kinds of study, and what else is run."""


def bibtex(subject: str = "flows") -> str:
    keys = THEORY[check_choice("subject", subject, tuple(THEORY))]
    return "\n".join([_package(), *(_entries()[key] for key in keys)])


@cache
def _entries() -> dict[str, str]:
    text = resources.files("nlflow.studies").joinpath("references.bib").read_text(encoding="utf-8")
    found = re.findall(r"^@\w+\{(\w+),.*?^\}\n", text, flags=re.M | re.S)
    whole = re.findall(r"^@\w+\{\w+,.*?^\}\n", text, flags=re.M | re.S)
    return dict(zip(found, whole, strict=True))


def _package() -> str:
    told = _citation()
    fields = {
        "author": "{" + told["author"] + "}",  # a group: no family name and no given ones
        "title": told["title"].replace("nlflow", "{nlflow}"),
        "version": version() if version()[0].isdigit() else told["version"],
    }
    fields |= {name: told[name] for name in ("doi", "url", "year") if name in told}
    fields["note"] = f"{told['license']} license, SHA-256 of the source {source_digest()[:16]}"
    return "@misc{nlflow,\n" + ",\n".join(f"  {name} = {{{value}}}" for name, value in fields.items()) + "\n}\n"


def _citation() -> dict[str, str]:
    """Return what CITATION.cff says, which lies in the package where that is installed, else in the repository."""
    package = Path(__file__).parents[1]
    place = next(
        (path for path in (package / "CITATION.cff", package.parents[1] / "CITATION.cff") if path.is_file()), None
    )
    if place is None:
        raise FileFormatError(f"{package}: got no CITATION.cff, expected it in the package; install nlflow again")
    text = place.read_text(encoding="utf-8")
    told = {key: value.strip('"') for key, value in re.findall(r"^([\w-]+): (.+)$", text, flags=re.M)}
    authors = re.findall(r"^  - name: (.+)$", text, flags=re.M)
    dated = {"year": told["date-released"][:4] if "date-released" in told else _YEAR}
    return {**told, "author": " and ".join(authors), **dated}
