"""The command ``nonlocal validate``, which runs the programs in ``validation/`` of the source tree."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from nlflow.desk.terminal import echo, shows_progress

HELP = """Run the statements of the theory as programs.

Each claim is an experiment with measured figures and tolerances. Prints one line a claim (result, claim, source,
seconds, measured and tolerance), and writes results.json and a page with figures, report.html, to DIR. Exits with 1 if
any claim fails. Each finding is kept as soon as it is known; --resume goes on with a run that ended early. Needs
the source tree: clone the repository; the claims are not part of an installed package.

\b
Examples:
  nonlocal validate --quick
  nonlocal validate proposition-1 stability-limit --out results
"""


def _runner() -> Any:
    """Return the module `validation.runner` of the source tree that this package lies in, or of the working folder."""
    from nlflow.errors import InputError

    for root in (Path(__file__).resolve().parents[4], Path.cwd()):
        if (root / "validation" / "claims" / "proposition_1.py").is_file():
            if str(root) not in sys.path:
                sys.path.insert(0, str(root))
            return importlib.import_module("validation.runner")
    raise InputError(
        "validate: got an installed package without its source tree, expected the folder validation/ beside it or in "
        "the working folder; clone the repository and run it there"
    )


def validate(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Claims to run [default: all].", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller experiments, under three minutes in all.")] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for results.json and report.html.")] = Path(
        "validation-output"
    ),
    resume: Annotated[
        bool, typer.Option("--resume", help="Take from DIR what the same program has found there before.")
    ] = False,
    jobs: Annotated[int, typer.Option(metavar="COUNT", min=-1, help="Claims at a time; -1 for all cores.")] = 1,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Dask scheduler whose workers run the claims; or 'local'.")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with data sets (wikitext-2), which some claims need.")
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="Print the names of the claims and end.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Run the statements of the theory as programs."""
    runner = _runner()
    if only_list:
        for claim in runner.select(()):
            echo(f"{claim.name:<25} {claim.title}")
        return
    findings = runner.run_claims(
        names or (),
        quick=quick,
        out=out,
        resume=resume,
        jobs=jobs,
        scheduler=scheduler,
        data=data,
        progress=shows_progress(quiet),
    )
    echo(runner.summary(findings))
    echo(f"report: {out / 'report.html'}")
    if not runner.succeeded(findings):
        raise typer.Exit(1)
