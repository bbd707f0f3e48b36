"""The command ``nonlocal``: thin commands over the package.

Results go to stdout, everything else to stderr. Heavy imports wait until a command needs them, so that help comes at
once.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import typer

from nlflow.backends.interrupts import delivered
from nlflow.commands import attention as cli_attention
from nlflow.commands import denoise as cli_denoise
from nlflow.commands import explore as cli_explore
from nlflow.commands import study as cli_study
from nlflow.commands import validate as cli_validate
from nlflow.io.terminal import echo, mendable, print_json, print_table, terminable

__all__ = ["app", "main"]

P = ParamSpec("P")
T = TypeVar("T")

_STORY = """Nonlocal gradient flows: remove noise from images and signals by averaging what is alike.

\b
  nonlocal denoise noisy.png out.png              estimate the noise, remove it
  nonlocal denoise noisy.png out.png --sigma 20   or tell it, in grey levels
  nonlocal denoise in.png out.png --compare a.pdf draw before and after
  nonlocal denoise photos denoised                all images of a folder
  nonlocal denoise ecg.csv out.csv --json         signals; report for programs
  nonlocal explore noisy.png                      sliders, on a page in the browser
  nonlocal demo                                   noise added and removed again
  nonlocal study time-order                       measured rates beside the theory
  nonlocal attention FOLDER --text "..."          layers of a trained transformer
  nonlocal validate --quick                       the theory, claim by claim
  nonlocal info                                   versions, threads, devices

Images are PNG, JPEG, TIFF or NPY files, signals WAV, CSV or NPY. Outputs appear complete or not at all, and replace
others only if asked. Results go to stdout, progress and notes to stderr. Exit codes: 0 done, 1 error, 2 wrong usage,
130 interrupted. Denoising, demonstration and validation run on the CPU; studies of tokens take --device.
"""

_DEMO = """Denoise known examples and compare.

Noise is added to a known image and a known signal and removed again. Prints a table and writes figures.

\b
Examples:
  nonlocal demo --out results
"""

_INFO = """Show versions, threads, memory and devices.

\b
Examples:
  nonlocal info --json
"""

app = typer.Typer(
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help=_STORY,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # brackets in the texts are meant as such
)


def _reported(command: Callable[P, T]) -> Callable[P, T]:
    """Turn the errors that a user can mend into one line on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with terminable() as terminated:
            try:
                return command(*args, **kwargs)
            except KeyboardInterrupt:
                echo(f"nonlocal: {'terminated' if terminated() else 'interrupted'}", err=True)
                raise typer.Exit(143 if terminated() else 130) from None  # 128 and the signal, as shells have it
            except typer.Exit as leave:
                if leave.exit_code == 130 and terminated():
                    raise typer.Exit(143) from None
                raise
            except BrokenPipeError:  # the reader of stdout has had enough
                raise
            except Exception as error:
                message = mendable(error)
                if message is None:
                    raise
                echo(f"nonlocal: error: {message}", err=True)
                raise typer.Exit(1) from None

    return run


def _print_version(wanted: bool) -> None:
    if wanted:
        from nlflow.backends.machine import version

        echo(f"nlflow {version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


app.command(help=cli_denoise.HELP, short_help="Remove noise from images and signals.")(_reported(cli_denoise.denoise))


@app.command(help=_DEMO)
@_reported
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the figures.")] = Path("demo-output"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Denoise known examples and compare."""
    from nlflow.errors import FileFormatError

    if out.exists() and not out.is_dir():
        raise FileFormatError(f"--out: got {out}, which is a file, expected a folder; choose another name")
    from nlflow.commands.demo import run_demo

    echo(run_demo(out, progress=not quiet and sys.stderr.isatty()))


app.command(help=cli_study.HELP, short_help="Measure rates of convergence beside the theory.")(
    _reported(cli_study.study)
)
app.command(help=cli_attention.HELP, short_help="See what the layers of a transformer do.")(
    _reported(cli_attention.attention)
)
app.command(help=cli_explore.HELP, short_help="Try denoising, flows and layers on a page.")(
    _reported(cli_explore.explore)
)
app.command(help=cli_validate.HELP, short_help="Run the statements of the theory.")(_reported(cli_validate.validate))


@app.command(help=_INFO)
@_reported
def info(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show versions, threads, memory and devices."""
    from nlflow.backends.machine import describe
    from nlflow.errors import format_bytes

    report = describe()
    if as_json:
        print_json(report)
        return
    rows = []
    for name, value in report.items():
        if name.startswith("memory"):
            shown = "unknown" if value is None else format_bytes(value)
        else:
            shown = ", ".join(value) if isinstance(value, list) else str(value)
        if name == "git":
            shown = "no checkout" if value is None else value["commit"] + (", changed" if value["changed"] else "")
        rows.append((name.replace("_", " "), shown))
    print_table(rows)


def main() -> None:
    """Run the command ``nonlocal``."""
    with delivered():
        app(prog_name="nonlocal")


if __name__ == "__main__":
    main()
