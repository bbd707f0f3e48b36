"""The command ``nonlocal``: thin commands over the package.

Results go to stdout, everything else to stderr. Heavy imports wait until a command needs them, so that help comes at
once.
"""

from __future__ import annotations

import enum
import functools
import math
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from nlflow import cli_study, cli_validate
from nlflow._terminal import echo as _echo
from nlflow._terminal import print_json as _print_json
from nlflow._terminal import stopping

if TYPE_CHECKING:
    from nlflow.files import Media

__all__ = ["app", "main"]

P = ParamSpec("P")
T = TypeVar("T")

_STORY = """Nonlocal gradient flows: remove noise from images and signals by averaging what is alike.

\b
  nonlocal denoise noisy.png out.png              estimate the noise, remove it
  nonlocal denoise noisy.png out.png --sigma 20   or tell it, in grey levels
  nonlocal denoise in.png out.png --compare a.pdf draw before and after
  nonlocal denoise ecg.csv out.csv --json         signals; report for programs
  nonlocal demo                                   noise added and removed again
  nonlocal study time-order                       measured rates beside the theory
  nonlocal validate --quick                       the theory, claim by claim
  nonlocal info                                   versions, threads, devices

Images are PNG, JPEG, TIFF or NPY files, signals WAV, CSV or NPY. Outputs appear complete or not at all. Results go to
stdout, progress and notes to stderr. Exit codes: 0 done, 1 error, 2 wrong usage, 130 interrupted.
"""

_DENOISE = """Remove white noise from an image or a signal.

The result has the size, the type and the units of the input: grey levels 0..255 for an 8-bit image, raw samples
for a WAV file. Alpha channels, sample rates, column names and a first CSV column with times pass through.
OUT may have another format than IN if that can hold the data; NPY and CSV keep all digits.

\b
Examples:
  nonlocal denoise noisy.png out.png
  nonlocal denoise scan.tif out.tif --sigma 350 --compare before-after.png
  nonlocal denoise noisy.png out.png --clean original.png --json > report.json
  nonlocal denoise ecg.csv out.csv --compare ecg.pdf
  nonlocal denoise stack.npy out.npy --channel-axis 0
  nonlocal denoise eeg.npy out.npy --kind signal
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


class Kind(enum.StrEnum):
    """What the samples of a file are."""

    image = "image"
    signal = "signal"


def _print_table(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        _echo(f"{name:<{width}}  {value}")


def _reported(command: Callable[P, T]) -> Callable[P, T]:
    """Turn the errors that a user can mend into one line on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            _echo("nonlocal: interrupted", err=True)
            raise typer.Exit(130) from None
        except BrokenPipeError:  # the reader of stdout has had enough
            raise
        except Exception as error:
            from nlflow.errors import NlflowError

            if not isinstance(error, NlflowError | OSError | MemoryError):
                raise
            message = " ".join(str(error).splitlines()) or "out of memory; crop the input or close other programs"
            _echo(f"nonlocal: error: {message}", err=True)
            raise typer.Exit(1) from None

    return run


def _print_version(wanted: bool) -> None:
    if wanted:
        from nlflow._machine import version

        _echo(f"nlflow {version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _parse_bytes(text: str) -> int:
    """Return a size such as ``2GiB``, ``500 MB`` or ``1e9`` in bytes."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*(?:([kmgt])(i?b)?|b)?\s*", str(text), re.IGNORECASE)
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:
        number = math.nan
    base = 1000 if found and (found[3] or "").lower() == "b" else 1024
    unit = (found[2] or "").lower() if found else ""
    size = number * base ** ("kmgt".index(unit) + 1 if unit else 0)
    if not 1 <= size < 2**63:
        raise typer.BadParameter(f"got {text!r}, expected a number of bytes such as 2000000000, 2GiB or 500MB")
    return int(size)


def _check_figure(path: Path) -> str:
    """Return the format of a figure that can be written to `path`."""
    from nlflow.errors import FileFormatError
    from nlflow.files import check_target

    form = path.suffix.lower().removeprefix(".")
    if form not in ("png", "pdf", "svg"):
        raise FileFormatError(f"--compare: got {path}, expected a name that ends in .png, .pdf or .svg; rename it")
    check_target(path)
    return form


def _read_clean(path: Path, media: Media) -> Any:
    from nlflow.errors import InputError
    from nlflow.files import read

    bare = path.suffix.lower() == ".npy"  # it does not say itself what its axes are
    clean = read(path, kind=media.kind if bare else None, channel_axis=media.channel_axis if bare else None).data
    if clean.shape != media.data.shape:
        raise InputError(
            f"--clean: got {path} of shape {clean.shape}, expected {media.data.shape} as in {media.path}; "
            "give the reference that belongs to the input"
        )
    return clean


@app.command(help=_DENOISE)
@_reported
def denoise(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Image or signal with noise.", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="File to write; replaced if it is there.")],
    sigma: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER", help="Standard deviation of the noise in the file's units [default: estimated]."
        ),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="FIG", help="Also draw input, result and difference (.png, .pdf, .svg).")
    ] = None,
    clean: Annotated[Path | None, typer.Option(metavar="FILE", help="Noise-free reference: report the PSNR.")] = None,
    kind: Annotated[Kind | None, typer.Option(help="What a two-dimensional .npy array is.")] = None,
    channel_axis: Annotated[
        int | None, typer.Option(metavar="INDEX", help="Axis of the channels in an .npy array.")
    ] = None,
    memory_limit: Annotated[
        int | None,
        typer.Option(
            metavar="SIZE", parser=_parse_bytes, help="Refuse to use more, e.g. 2GiB [default: half the memory]."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Report as one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors, and --json.")] = False,
) -> None:
    """Remove white noise from an image or a signal."""
    from nlflow import files
    from nlflow._machine import version

    began = time.perf_counter()
    sources, targets = {"IN": source, "--clean": clean}, {"OUT": target, "--compare": compare}
    files.check_distinct(sources, targets)
    media = files.read(source, kind=None if kind is None else kind.value, channel_axis=channel_axis)
    notes = [*media.notes, *files.check_output(target, media)]
    form = "" if compare is None else _check_figure(compare)
    reference = None if clean is None else _read_clean(clean, media)
    if not quiet:
        for note in notes:
            _echo(f"nonlocal: note: {note}", err=True)

    from nlflow.denoising import denoise as remove_noise

    with stopping(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        result, outcome = remove_noise(
            media.data,
            sigma,
            channel_axis=media.channel_axis,
            preserve_range=True,
            return_info=True,
            progress=not quiet and sys.stderr.isatty(),
            memory_limit=memory_limit,
        )
    warned = [str(warning.message) for warning in caught]
    if not quiet:
        for text in warned:
            _echo(f"nonlocal: warning: {text}", err=True)
    details: dict[str, Any] = outcome.as_dict()
    quality: dict[str, float] = {}
    if reference is not None:
        from nlflow.plotting import psnr

        quality = {"psnr_input": psnr(reference, media.data), "psnr_output": psnr(reference, result)}
    drawn = b""
    if compare is not None:  # drawn before anything is written, so that a failure here leaves nothing behind
        from nlflow.plotting import comparison_figure, render

        axis, level = media.channel_axis, float(details["sigma"])
        figure = comparison_figure(
            media.data, result, channel_axis=axis, sigma=level, clean=reference, title=source.name
        )
        drawn = render(figure, form)
    files.write(target, result, media)
    if compare is not None:
        files.write_atomic(compare, lambda stream: stream.write(drawn))
    report = {
        "input": str(source),
        "output": str(target),
        "figure": None if compare is None else str(compare),
        "kind": media.kind,
        "shape": media.data.shape,
        "channel_axis": media.channel_axis,
        "dtype": str(media.data.dtype),
        "sigma_given": sigma,
        **quality,
        "denoise": details,
        "notes": notes,
        "warnings": warned,
        "seconds_total": time.perf_counter() - began,
        "version": version(),
    }
    if as_json:
        _print_json(report)
    elif not quiet:
        _print_table(_summary(report))


def _summary(report: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines for people: what was given, what was done, what was written."""
    from nlflow.errors import format_bytes

    details = dict(report["denoise"])
    size = " x ".join(map(str, report["shape"]))
    origin = "estimated" if report["sigma_given"] is None else "given"
    rows = [
        ("input", f"{report['input']}, {report['kind']} of {size}, {report['dtype']}"),
        ("sigma", f"{details.pop('sigma'):.4g} ({origin})"),
    ]
    details.pop("sigma_estimated", None)
    seconds = details.pop("seconds", report["seconds_total"])
    for name, value in details.items():
        if isinstance(value, bool | int | float | str):
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            shown = format_bytes(float(value)) if name.endswith("_bytes") else shown
            rows.append((name.removesuffix("_bytes").replace("_", " "), shown))
    if "psnr_input" in report:
        rows.append(("PSNR", f"{report['psnr_input']:.2f} dB before, {report['psnr_output']:.2f} dB after"))
    rows += [("seconds", f"{seconds:.2f}"), ("written", report["output"])]
    return rows + ([("figure", report["figure"])] if report["figure"] else [])


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
    from nlflow.demo import run_demo

    _echo(run_demo(out, progress=not quiet and sys.stderr.isatty()))


app.command(help=cli_study.HELP, short_help="Measure rates of convergence beside the theory.")(
    _reported(cli_study.study)
)
app.command(help=cli_validate.HELP, short_help="Run the statements of the theory.")(_reported(cli_validate.validate))


@app.command(help=_INFO)
@_reported
def info(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Show versions, threads, memory and devices."""
    from nlflow._machine import describe
    from nlflow.errors import format_bytes

    report = describe()
    if as_json:
        _print_json(report)
        return
    rows = []
    for name, value in report.items():
        if name.startswith("memory"):
            shown = "unknown" if value is None else format_bytes(value)
        else:
            shown = ", ".join(value) if isinstance(value, list) else str(value)
        rows.append((name.replace("_", " "), shown))
    _print_table(rows)


def main() -> None:
    """Run the command ``nonlocal``."""
    app(prog_name="nonlocal")


if __name__ == "__main__":
    main()
