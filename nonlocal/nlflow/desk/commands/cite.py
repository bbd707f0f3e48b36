"""The command ``cite``."""

from __future__ import annotations

from typing import Annotated

import typer

from nlflow.desk.terminal import echo

HELP = """Print BibTeX of the package, and of the theory behind what was run.

WHAT is a kind of study, a study.toml, or one of flows, denoise and attention; by default flows.

\b
Examples:
  nonlocal cite > nlflow.bib
  nonlocal cite equilibrium
  nonlocal cite results/study.toml
"""


def cite(
    what: Annotated[str, typer.Argument(metavar="[WHAT]", help="What was run.", show_default=False)] = "flows",
) -> None:
    """See `HELP`."""
    from nlflow.studies.citing import bibtex
    from nlflow.studies.replay import is_study_file, read_study

    echo(bibtex(read_study(what).kind if is_study_file(what) else what).rstrip())
