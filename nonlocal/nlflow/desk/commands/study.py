"""The command ``nonlocal study``: convergence studies with their fits beside what the theory expects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from nlflow.desk.options import AsJson, DeviceName, Quiet, check_device
from nlflow.desk.terminal import echo, print_json, read_tokens, say, shows_progress, warnings_kept

T = TypeVar("T")

_WHAT = """Measure a rate of convergence, or a limit, and compare it with what the theory says.

\b
KIND is one of
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

`nonlocal study --help-all` has all options, and which kind takes which.
"""

USUAL = (
    "kernel", "nodes", "dimension", "boundary", "fidelity", "integrator", "dt", "seeds", "out", "jobs", "as_json",
    "quiet",
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

Every option has a default, and a comma separates several values; every combination is a case. Kernels are
gaussian:width=0.1, laplace:width=0.1, tophat:radius=0.1 and dot:scale=1 (the softmax kernel, which compares tokens);
--kernel may be repeated. Tokens are .npy files with one row each.

--device says where averages by kernels that compare tokens are computed (kernels of positions on a grid are for the
CPU). cuda: on a GPU; auto: there if there is one, otherwise on the CPU; cpu-tensors: on the CPU by the code of the GPU,
to compare. --dtype float32 measures what single precision reaches, against references in double precision.

With --out the table (table.csv), everything (result.json) and the figure (figure.png) are written to a folder, and
every case as soon as it is done: the same command goes on where an interrupted one ended. A measured value that is not
as expected is marked by DIFFERS, and is no error.

\b
Examples:
  nonlocal study time-order
  nonlocal study space-order --kernel gaussian:width=0.05 --kernel laplace:width=0.1 --dimension 1
  nonlocal study monte-carlo --nodes 64,256,1024,4096 --seeds 500 --jobs 2 --out mc
  nonlocal study mixing --kernel tophat:radius=0.2 --nodes 16,32,64 --boundary reflect
  nonlocal study stability --queries q.npy --keys k.npy --json
  nonlocal study time-order --keys k.npy --values v.npy --device cuda --dtype float32
"""


StudyKind = Literal["time-order", "space-order", "monte-carlo", "samples", "mixing", "equilibrium", "stability"]
Dtype = Literal["float64", "float32"]


def _listed(option: str, text: str | None, kind: Callable[[str], T]) -> list[T] | None:
    """Return the values that commas separate, or None where the option was not given."""
    if text is None:
        return None
    from nlflow.errors import InputError

    try:
        return [kind(part.strip()) for part in text.split(",")]
    except ValueError:
        words = {"int": "whole numbers", "float": "numbers"}[kind.__name__]
        raise InputError(f"{option}: got {text!r}, expected {words} with commas between them") from None


def study(
    kind: Annotated[StudyKind, typer.Argument(metavar="KIND", help="What is studied.", show_default=False)],
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
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Seed of everything random.")] = 0,
    queries: Annotated[Path | None, typer.Option(metavar="FILE", help="Queries of tokens (.npy).")] = None,
    keys: Annotated[Path | None, typer.Option(metavar="FILE", help="Keys of tokens (.npy).")] = None,
    values: Annotated[Path | None, typer.Option(metavar="FILE", help="Values of tokens (.npy).")] = None,
    device: Annotated[DeviceName | None, typer.Option(help="Where to compute [default: cpu].")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Precision [default: float64].")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for results; goes on from one.")] = None,
    jobs: Annotated[int, typer.Option(metavar="COUNT", help="Processes; -1 for all cores.")] = 1,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Dask scheduler whose workers measure the cases; or 'local'.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure a rate of convergence, or a limit, and compare it with what the theory says."""
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
    from nlflow.studies import run_study

    with warnings_kept() as warned:
        progress = shows_progress(quiet)
        result = run_study(kind, out=out, jobs=jobs, scheduler=scheduler, progress=progress, rng=seed, **given)
    for text in () if quiet else warned:
        say("warning", text)
    if out is not None:
        result.save(out)
    if as_json:
        print_json(result.as_dict())
    elif not quiet:
        echo(result.report())
        judged = [fit.passed for fit in result.fits if fit.passed is not None]
        verdict = f"{sum(judged)} of {len(judged)} as expected" + ("" if all(judged) else "; see DIFFERS above")
        echo(f"\n{verdict if judged else 'nothing that could be held against the theory; see the notes above'}")
        if out is not None:
            echo(f"written: table.csv, result.json and figure.png in {out}")
