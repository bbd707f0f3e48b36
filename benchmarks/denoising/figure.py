"""The figure of crops: what the eye says to the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.denoising.methods import BM3D, NLM_6, eight_bits
from benchmarks.denoising.tasks import add_noise, image

SHOWN = (NLM_6, BM3D, "balanced", "best")


def crops_figure(records: list[dict[str, Any]], folder: Path, quick: bool) -> Figure | None:
    """Return noisy, denoised and clean crops side by side, with the PSNR of the crop; None when there are none."""
    kept = [r for r in records if "crop" in r]
    methods = [m for m in SHOWN if any(r["method"] == m for r in kept)]
    names = sorted({r["image"] for r in kept})
    if not methods or not names:
        return None
    columns = ["noisy", *methods, "clean"]
    figure = Figure(figsize=(1.95 * len(columns), 2.12 * len(names)), layout="constrained")
    axes = figure.subplots(len(names), len(columns), squeeze=False)
    for line, name in zip(axes, names, strict=True):
        found = {r["method"]: r for r in kept if r["image"] == name}
        first = found[methods[0]]
        place = tuple(slice(*ends) for ends in first["place"])
        clean = image(folder / f"{name}.png", quick)
        noisy = add_noise(clean, first["sigma"])[place]
        panels = {"noisy": noisy, **{m: np.load(found[m]["crop"]) for m in methods}, "clean": clean[place]}
        for axis, (title, panel) in zip(line, panels.items(), strict=True):
            axis.imshow(eight_bits(panel), interpolation="nearest")
            axis.set_axis_off()
            error = np.mean((panel - clean[place]) ** 2)
            quality = f"\n{10 * np.log10(255**2 / error):.2f} dB" if error > 0 else ""
            axis.set_title(title + quality, fontsize=8)
    figure.suptitle(f"σ = {kept[0]['sigma']:g}; PSNR of the crop", fontsize=9)
    return figure
