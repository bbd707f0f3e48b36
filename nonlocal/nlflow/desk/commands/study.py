"""The command ``study``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer

from nlflow.desk.options import AsJson, DeviceName, Quiet, check_device
from nlflow.desk.terminal import echo, print_json, read_tokens, say, shows_progress, warnings_kept

T = TypeVar("T")

_WHAT = """Measure a rate of convergence, or a limit, and compare it with what the theory says.

\b
KIND is one of the following, or the study.toml of an earlier study, which is repeated
  time-order   error of integrators over the step; expected: their order
  space-order  error of grid averages over the number of nodes, against the continuum
  monte-carlo  error of averages over N random nodes (or tokens); expected: N^(-1/2)
  samples      error of attention to n random tokens against its limit; expected: C n^(-1/2)
  mixing       how fast the chain of a kernel forgets where it began, and its mixing time
  equilibrium  diversity of equilibria between their bounds, and the rate towards them
  stability    growth under NeuTRENO steps, and the largest stable fidelity
"""

BRIEF = f"""{_WHAT}
\b
Examples:
  nonlocal study time-order
  nonlocal study space-order --kernel gaussian:width=0.05 --kernel laplace:width=0.1 --dimension 1
  nonlocal study monte-carlo --nodes 64,256,1024,4096 --seeds 500 --jobs 2 --out mc
  nonlocal study mc/study.toml
  nonlocal study equilibrium --out eq --format pdf,svg --width 3.3 --style grayscale

`nonlocal study --help-all` has all options, and which kind takes which.
"""

USUAL = (
    "kernel", "nodes", "dimension", "boundary", "fidelity", "integrator", "dt", "seeds", "out", "form", "width",
    "style", "jobs", "as_json", "quiet",
)  # fmt: skip

HELP = f"""{_WHAT}
\b
Options, beside --kernel, --nodes, --dimension and --channels, which all have
  time-order   boundary, fidelity, metric, integrator, dt, queries, keys, values, device, dtype
  space-order  boundary
  monte-carlo  seeds, queries, keys, values
  samples      seeds
  mixing       boundary, laziness, queries, keys, values, device
  equilibrium  boundary, fidelity, metric, queries, keys, values, device
  stability    boundary, fidelity, queries, keys, device, dtype

A comma separates several values; every combination is a case. Kernels are
gaussian:width=0.1, laplace:width=0.1, tophat:radius=0.1, dot:scale=1 (the softmax kernel, which compares tokens) and
your own, 'formula:exp(-r**1.5),width=0.1'; --kernel may be repeated. Tokens are .npy files with one row each.

--device says where averages by kernels that compare tokens are computed (kernels of positions on a grid are for the
CPU). cuda: on a GPU; auto: there if there is one, otherwise on the CPU; cpu-tensors: on the CPU by the code of the GPU,
to compare. --dtype float32 measures what single precision reaches, against references in double precision.

With --out a folder gets tables of measurements and fits (table and fits: .csv has all digits, .md and .tex have symbols
and units), everything (result.json), the figure in each --format (fonts are embedded, text in SVG is text), and the
study itself (study.toml); and every case as soon as it is done: the same command goes on where an interrupted one
ended. `nonlocal study study.toml` measures all of it again, and says whether the bits are the same or which version
or processor differs; then the exit code is 1.

A verdict is no error. agrees: the interval holds what is expected, and ends within four tolerances of it ("at least"
and "at most": it holds no number that is off by more than one). disagrees: it lies beyond the tolerance. cannot tell:
all else.

\b
Examples:
  nonlocal study time-order
  nonlocal study space-order --kernel gaussian:width=0.05 --kernel laplace:width=0.1 --dimension 1
  nonlocal study monte-carlo --nodes 64,256,1024,4096 --seeds 500 --jobs 2 --out mc
  nonlocal study mixing --kernel tophat:radius=0.2 --nodes 16,32,64 --boundary reflect
  nonlocal study stability --queries q.npy --keys k.npy --json
  nonlocal study time-order --keys k.npy --values v.npy --device cuda --dtype float32
  nonlocal study equilibrium --out eq --format pdf,svg --width 3.3 --style grayscale
  nonlocal study eq/study.toml
"""


StudyKind = Literal["time-order", "space-order", "monte-carlo", "samples", "mixing", "equilibrium", "stability"]
Dtype = Literal["float64", "float32"]


def _listed(option: str, text: str | None, kind: Callable[[str], T]) -> list[T] | None:
    if text is None:
        return None
    from nlflow.errors import InputError

    try:
        return [kind(part.strip()) for part in text.split(",")]
    except ValueError:
        words = {"int": "whole numbers", "float": "numbers"}[kind.__name__]
        raise InputError(f"{option}: got {text!r}, expected {words} with commas between them") from None


def study(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="What is studied; or a study.toml.", show_default=False)],
    kernel: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Kernel; may be repeated.", show_default=False)
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="LIST", help="Nodes along each axis; sample sizes with draws.")
    ] = None,
    dimension: Annotated[
        str | None, typer.Option(metavar="LIST", help="1, 2, or more where no continuum is integrated.")
    ] = None,
    boundary: Annotated[str | None, typer.Option(metavar="LIST", help="periodic, reflect, isolated.")] = None,
    channels: Annotated[str | None, typer.Option(metavar="LIST", help="Channels of the signal.")] = None,
    fidelity: Annotated[str | None, typer.Option(metavar="LIST", help="Fidelities.")] = None,
    metric: Annotated[str | None, typer.Option(metavar="LIST", help="l2, degree.")] = None,
    integrator: Annotated[str | None, typer.Option(metavar="LIST", help="euler, semi-implicit, runge-kutta.")] = None,
    dt: Annotated[str | None, typer.Option("--dt", metavar="LIST", help="Steps of time-order.")] = None,
    laziness: Annotated[float | None, typer.Option(metavar="NUMBER", help="Probability to stay, for mixing.")] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="COUNT", help="Draws for each N, of a sample size [default: 200].")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="NUMBER", help="Seed of everything random.")] = 0,
    queries: Annotated[Path | None, typer.Option(metavar="FILE", help="Queries of tokens (.npy).")] = None,
    keys: Annotated[Path | None, typer.Option(metavar="FILE", help="Keys of tokens (.npy).")] = None,
    values: Annotated[Path | None, typer.Option(metavar="FILE", help="Values of tokens (.npy).")] = None,
    device: Annotated[DeviceName | None, typer.Option(help="Where to compute [default: cpu].")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Precision [default: float64].")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for results; goes on from one.")] = None,
    form: Annotated[
        str, typer.Option("--format", metavar="LIST", help="Formats of the figure: pdf, svg, png.")
    ] = "pdf,png",
    width: Annotated[float, typer.Option(metavar="INCHES", help="Width of the figure; a column has 3.3.")] = 7.0,
    style: Annotated[
        str | None, typer.Option(metavar="NAME", help="Style sheet of matplotlib, or a file NAME.mplstyle.")
    ] = None,
    jobs: Annotated[int, typer.Option(metavar="COUNT", help="Processes; -1 for all cores.")] = 1,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Dask scheduler whose workers measure the cases; or 'local'.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """See `HELP`."""
    if kind not in get_args(StudyKind) and not kind.endswith(".toml"):
        kinds = ", ".join(map(repr, get_args(StudyKind)))
        raise typer.BadParameter(f"{kind!r} is not one of {kinds}, nor a file NAME.toml", param_hint="KIND")
    options: dict[str, Any] = {
        "kernel": kernel or None,
        "nodes": _listed("--nodes", nodes, int),
        "dimension": _listed("--dimension", dimension, int),
        "boundary": _listed("--boundary", boundary, str),
        "channels": _listed("--channels", channels, int),
        "fidelity": _listed("--fidelity", fidelity, float),
        "metric": _listed("--metric", metric, str),
        "integrator": _listed("--integrator", integrator, str),
        "dt": _listed("--dt", dt, float),
        "laziness": laziness,
        "seeds": seeds,
        "queries": read_tokens("--queries", queries),
        "keys": read_tokens("--keys", keys),
        "values": read_tokens("--values", values),
        "device": device,
        "dtype": dtype,
    }
    given = {name: value for name, value in options.items() if value is not None}
    if device is not None:
        check_device(device)
    formats = [part.strip() for part in form.split(",")]
    if out is not None:  # before hours of measuring
        from nlflow.plotting.paper import check_paper

        check_paper(formats, width, style)
    from nlflow.studies import run_study

    with warnings_kept() as warned:
        progress = shows_progress(quiet)
        result = run_study(kind, out=out, jobs=jobs, scheduler=scheduler, progress=progress, rng=seed, **given)
    for text in () if quiet else warned:
        say("warning", text)
    written = [] if out is None else result.save(out, formats=formats, width=width, style=style)
    repeated = result.provenance.get("repeated")
    if as_json:
        print_json(result.as_dict())
    elif not quiet:
        echo(f"{result.report()}\n\n{_summary([fit.verdict for fit in result.fits])}")
        if out is not None:
            echo(f"written: {', '.join(written)} in {out}")
        if repeated is not None:
            echo(_told(repeated))
    if repeated is not None and not repeated["same"]:
        if quiet or as_json:
            say("note", _told(repeated))
        raise typer.Exit(1)


def _summary(verdicts: list[str]) -> str:
    counts = {verdict: verdicts.count(verdict) for verdict in ("agrees", "disagrees", "cannot tell")}
    if not any(counts.values()):
        return "nothing that could be held against the theory"
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return f"{told}; see the notes above" if counts["cannot tell"] else told


def _told(repeated: dict[str, Any]) -> str:
    """Return whether a study that was repeated gave the same bits, and what differs."""
    differs = "; ".join(repeated["differs"])
    if repeated["same"]:
        return f"the same bits as {repeated['file']}" + (f", although {differs}" if differs else "")
    why = differs or "with the same versions on the same machine: the study depends on something that its file lacks"
    return f"other bits than {repeated['file']}: {why}"
