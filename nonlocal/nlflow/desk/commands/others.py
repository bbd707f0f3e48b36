"""The small commands."""

from __future__ import annotations

import importlib
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from nlflow.desk.commands.installed import licences, loop_cache, support
from nlflow.desk.options import ArrayName, AsJson, Axes, parse_axes
from nlflow.desk.terminal import check_installed, check_out, echo, print_json, print_table, say, shows_progress

DEMO_HELP = """Denoise known examples and compare.

Noise is added to a known image and a known signal and removed again. Prints a table and writes a figure.

\b
Examples:
  nonlocal demo --out results
"""


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the figure.")] = Path("demo-output"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """See `DEMO_HELP`."""
    check_out(out)
    from nlflow.desk.commands.demonstration import run_demo

    echo(run_demo(out, progress=shows_progress(quiet)))


EXPLORE_HELP = """Open a page to try denoising, flows and layers of transformers.

FILE is an image, a signal, a volume or a clip with noise, read as by nonlocal denoise; --clean is the same without,
--trace a result.json of nonlocal attention --out. Without FILE there is an example. Of a large input a part is shown. A
Python program, or a command, that computes the same can be copied. Ctrl-C ends it.

The page is on this machine alone (127.0.0.1) and needs no network. The address that is printed holds a token, without
which nobody gets the page. --host opens it at another address, to which the token goes unencrypted.

Needs pip install 'nlflow[explore]'.

\b
Examples:
  nonlocal explore
  nonlocal explore noisy.png --clean original.png
  nonlocal explore ecg.csv --port 5007 --no-browser
  nonlocal explore volume.h5 --array /scan/raw --axes ZYX
  nonlocal explore --trace probe/result.json
"""


def explore(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Noisy image, signal, volume or clip [default: an example].")
    ] = None,
    clean: Annotated[Path | None, typer.Option(metavar="REF", help="The same without noise.")] = None,
    axes: Axes = None,
    array: ArrayName = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="result.json of nonlocal attention --out.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any that is free.")] = 5006,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    max_upload: Annotated[int, typer.Option(min=1, max=4096, metavar="NUMBER", help="Largest upload, in MiB.")] = 64,
) -> None:
    """See `EXPLORE_HELP`."""
    check_installed("explore", "panel", "Panel")
    from nlflow.desk.explorer.layers_view import read_layers
    from nlflow.desk.explorer.sources import example, open_source
    from nlflow.desk.explorer.uploads import Limits

    reading = parse_axes(axes, context.meta.get("former", {})) | ({} if array is None else {"array": array})
    source = example() if file is None else open_source(file, **reading)
    if clean is not None:
        source = source.with_clean(clean, str(clean))
    layers = None if trace is None else read_layers(trace)
    limits = Limits(content=max_upload * 2**20)

    from nlflow.desk.explorer.server import Contents, is_loopback, start

    if not is_loopback(host):
        say("warning", f"--host {host}: whoever reads this address, on its way too, can use the page")
    running = start(Contents(source, layers, limits), host=host, port=port)
    echo(f"nonlocal explore: {running.url} (Ctrl-C ends it)")
    if browser:
        import webbrowser

        webbrowser.open(running.url_for_once())
    try:
        running.wait()
    except KeyboardInterrupt:
        echo("", err=True)
    finally:
        running.stop()


INFO_HELP = """Show versions, threads, memory and devices.

--support shows what a report of a fault needs, as text to copy: versions of all packages, processor, threads, extras,
cache of compiled loops. It holds no path, no name of a user and none of the machine. --licenses lists the packages that
nlflow brings and that are installed, with the licences that their metadata tell, and what wheels hold beside.

\b
Examples:
  nonlocal info --json
  nonlocal info --support
  nonlocal info --licenses
"""


def info(
    as_json: AsJson = False,
    for_support: Annotated[bool, typer.Option("--support", help="What a report of a fault needs.")] = False,
    licenses: Annotated[bool, typer.Option("--licenses", help="Licences of what is installed.")] = False,
) -> None:
    """See `INFO_HELP`."""
    from nlflow.errors import format_bytes

    if for_support and licenses:
        raise typer.BadParameter("is not for --licenses, and both were given; leave one out", param_hint="--support")
    if licenses:
        _licences(as_json)
        return
    report = support() if for_support else _report()
    if as_json:
        print_json(report)
        return
    for name in ("memory", "memory_limit"):
        if name in report:
            report[name] = "unknown" if report[name] is None else format_bytes(report[name])
    git = report["git"]
    report["git"] = "no checkout" if git is None else git["commit"] + (", changed" if git["changed"] else "")
    print_table([(name.replace("_", " "), _in_words(value)) for name, value in report.items()])


def _in_words(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {_in_words(one)}" for name, one in value.items()) or "none"
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def _licences(as_json: bool) -> None:
    found = licences()
    if as_json:
        print_json({"packages": found})
        return
    rows = [(f"{one['name']} {one['version']}", one["license"], one["inside"]) for one in found]
    print_table([(name, f"{told}; its wheel holds {more}" if more else told) for name, told, more in rows])


def _report() -> dict[str, Any]:
    from nlflow.backends import threads
    from nlflow.backends.devices import found_devices
    from nlflow.backends.machine import git_state
    from nlflow.errors import memory_limit, physical_memory

    return {
        **_versions(),
        "git": git_state(),
        **threads.described(),
        "numba_cache": str(loop_cache()[1]),
        "memory": physical_memory(),
        "memory_limit": memory_limit(),
        "devices": found_devices(),
    }


def _versions() -> dict[str, str]:
    from nlflow.backends.machine import version

    found = {"nlflow": version(), "python": sys.version.split()[0]}
    for name in ("numpy", "scipy", "numba", "scikit-image", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


VALIDATE_HELP = """Run the statements of the theory as programs.

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
    quick: Annotated[bool, typer.Option("--quick", help="Smaller experiments.")] = False,
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
    """See `VALIDATE_HELP`."""
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
