"""The command ``nonlocal explore``: a page in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from nlflow.desk.commands.wording import split_spacing
from nlflow.desk.terminal import check_installed, echo, say

HELP = """Open a page to try denoising, flows and layers of transformers.

The page is on this machine alone (127.0.0.1) and needs no network. Sliders answer at once; of a large input they show a
part. A Python program, or a command, that computes the same can be copied. FILE is an image, a signal, a volume or a
clip with noise, whatever nonlocal denoise reads, with the same --axes, --spacing and --array; --clean is the same
without, --trace a result.json of nonlocal attention --out. Without FILE there is an example. Ctrl-C ends it.

--host opens the page at another address: anybody who reaches it can use the page, without a password.

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
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Noisy image or signal [default: an example].")
    ] = None,
    clean: Annotated[Path | None, typer.Option(metavar="REF", help="The same without noise.")] = None,
    axes: Annotated[str | None, typer.Option(metavar="AXES", help="Which axis of FILE is which, as ZYX.")] = None,
    spacing: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="How far apart the samples of a stack are, as 5,1,1.")
    ] = None,
    array: Annotated[str | None, typer.Option(metavar="NAME", help="Which array of an NPZ, MAT or HDF5 file.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="TRACE", help="result.json of nonlocal attention --out.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any that is free.")] = 5006,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.")] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
    max_upload: Annotated[int, typer.Option(min=1, max=4096, metavar="MB", help="Largest upload.")] = 64,
) -> None:
    """Open a page to try denoising, flows and layers of transformers."""
    check_installed("explore", "panel", "Panel")
    from nlflow.desk.explorer.layers_view import read_layers
    from nlflow.desk.explorer.sources import example, open_source
    from nlflow.desk.explorer.uploads import Limits

    told: dict[str, Any] = {"axes": axes, "spacing": split_spacing(spacing), "array": array}
    source = example() if file is None else open_source(file, **told)
    if clean is not None:
        source = source.with_clean(clean, str(clean))
    layers = None if trace is None else read_layers(trace)
    limits = Limits(content=max_upload * 2**20)

    from nlflow.desk.explorer.page import Contents
    from nlflow.desk.explorer.server import is_loopback, start

    if not is_loopback(host):
        say("warning", f"--host {host}: whoever reaches this address can use the page")
    running = start(Contents(source, layers, limits), host=host, port=port)
    echo(f"nonlocal explore: {running.url} (Ctrl-C ends it)")
    if browser:
        import webbrowser

        webbrowser.open(running.url)
    try:
        running.wait()
    except KeyboardInterrupt:
        echo("", err=True)
    finally:
        running.stop()
