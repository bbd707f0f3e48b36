"""The command ``nonlocal demo``: known examples with noise, denoised."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nlflow.desk.terminal import check_out, echo, shows_progress

HELP = """Denoise known examples and compare.

Noise is added to a known image and a known signal and removed again. Prints a table and writes figures.

\b
Examples:
  nonlocal demo --out results
"""


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the figures.")] = Path("demo-output"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Denoise known examples and compare."""
    check_out(out)
    from nlflow.desk.commands.demonstration import run_demo

    echo(run_demo(out, progress=shows_progress(quiet)))
