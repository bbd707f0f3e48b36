"""The command ``nonlocal denoise`` for an image larger than memory: block by block, into a zarr array."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import typer

from nlflow.io.terminal import print_json, print_table

__all__ = ["check_large", "denoise_large"]


def check_large(sources: list[Path], refused: dict[str, Any], existing: str) -> None:
    """Refuse what an image in blocks cannot have."""
    for option, value in refused.items():
        if value is not None:
            raise typer.BadParameter(
                "is decided by the whole image at once, and not by blocks; leave it out, or name OUT .tif or .npy",
                param_hint=option,
            )
    if len(sources) != 1:
        raise typer.BadParameter(f"got {len(sources)} inputs, expected one for an OUT of zarr", param_hint="IN")
    if existing == "skip":
        raise typer.BadParameter("got skip, expected refuse, overwrite or resume for one OUT", param_hint="--existing")


def denoise_large(
    source: Path, target: str, sigma: Any, options: dict[str, Any], *, as_json: bool, quiet: bool
) -> None:
    """Denoise an image block by block into a zarr array."""
    from tqdm import tqdm

    from nlflow.backends.machine import version
    from nlflow.denoising.large import denoise_store

    began = time.perf_counter()
    with tqdm(desc="denoise", unit="block", disable=quiet or not sys.stderr.isatty(), leave=False) as bar:

        def tell(done: int, count: int) -> None:
            bar.total, bar.n = count, done
            bar.refresh()

        info, counts = denoise_store(source, target, sigma, progress=tell, **options)
    details = info.as_dict()
    details.pop("residual")  # nobody has looked
    seconds = time.perf_counter() - began
    report = {"input": str(source), "output": target, "sigma_given": sigma, **counts, "denoise": details,
              "seconds_total": seconds, "version": version()}  # fmt: skip
    if as_json:
        print_json(report)
    elif not quiet:
        kept = f" ({counts['kept']} of them done before)" if counts["kept"] else ""
        origin = "estimated" if info.sigma_estimated else "given"
        rows = [("input", str(source)), ("sigma", f"{info.sigma:.4g} ({origin})"), ("quality", info.quality)]
        rows += [("stopped by", info.stopped_by), ("blocks", f"{counts['blocks']}{kept}")]
        print_table([*rows, ("seconds", f"{seconds:.1f}"), ("written", target)])
