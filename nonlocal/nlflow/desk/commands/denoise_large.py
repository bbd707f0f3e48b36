"""The command ``nonlocal denoise`` for an image larger than memory: block by block, into a zarr array."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import typer

from nlflow.backends.machine import version
from nlflow.denoising.noise.names import has_sigma
from nlflow.desk.large import denoise_store
from nlflow.desk.terminal import print_json, print_table, progress_bar, progress_of, say


def denoise_large(
    sources: list[Path], target: str, sigma: Any, words: dict[str, Any], refused: dict[str, Any], *, as_json: bool,
    quiet: bool,
) -> None:  # fmt: skip
    """Denoise an image block by block; none of the options `refused`, which need the whole image, may have a value."""
    for option, value in refused.items():
        if value is not None:
            raise typer.BadParameter(
                "is decided by the whole image at once, and not by blocks; leave it out, or name OUT .tif or .npy",
                param_hint=option,
            )
    if len(sources) != 1:
        raise typer.BadParameter(f"got {len(sources)} inputs, expected one for an OUT of zarr", param_hint="IN")
    if words["existing"] == "skip":
        raise typer.BadParameter("got skip, expected refuse, overwrite or resume for one OUT", param_hint="--existing")
    if words["noise"] == "auto" and sigma is None and not quiet:
        told = "the noise is taken to be white, since blocks know no other; to have it found out, name OUT .tif or .npy"
        say("note", told)
    start, log = time.perf_counter(), progress_of(quiet, str(sources[0]))
    with progress_bar(quiet, desc="denoise", unit="block") as bar:

        def tell(done: int, count: int) -> None:
            bar.total, bar.n = count, done
            bar.refresh()
            if callable(log):
                log(done / count)

        info, counts = denoise_store(sources[0], target, sigma, progress=tell, **words)
    details = info.as_dict()
    details.pop("residual")  # nobody has computed it
    seconds = time.perf_counter() - start
    if as_json:
        print_json({"input": str(sources[0]), "output": target, "sigma_given": sigma, **counts, "denoise": details,
                    "seconds_total": seconds, "version": version()})  # fmt: skip
    elif not quiet:
        kept = f" ({counts['kept']} of them done before)" if counts["kept"] else ""
        origin = "estimated" if info.sigma_estimated else "given"
        sigma_told = f"{info.sigma:.4g} ({origin}): standard deviation of the noise, in the units of the file"
        rows = [("input", str(sources[0])), ("noise", info.noise)]
        rows += [("sigma", sigma_told)] if has_sigma(info.model) else []
        print_table([*rows, ("blocks", f"{counts['blocks']}{kept}"), ("time", f"{seconds:.1f} s"), ("written", target)])
