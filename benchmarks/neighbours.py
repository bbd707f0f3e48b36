"""GeomLoss and deepinv where they do what is done here: ``python -m benchmarks neighbours [--data DIR]``.

Either of them, where it is installed. GeomLoss scales a Gaussian kernel to a plan whose sums are given, which is what
`sinkhorn` does for sums of 1; it takes a fixed number of steps for a loss, ours iterates until the sums are right.
deepinv brings total variation without weights to download; its threshold is the best of four for each picture, which
flatters it. Set12 lies in DIR. Times are processor seconds on one thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Row, files, missing, timed
from nlflow import Gaussian, Points, denoise, sinkhorn
from nlflow.plotting import psnr

NODES, WIDTH, SCALINGS = 2000, 0.5, (0.5, 0.9, 0.99)
SIGMA, THRESHOLDS, PICTURES = 25.0, (0.06, 0.08, 0.1, 0.12), 7


def plans() -> list[Row]:
    """Sums of a plan between 2000 points and themselves, and the time for them."""
    import torch
    from geomloss import SamplesLoss

    torch.set_num_threads(1)
    x = np.random.default_rng(0).normal(size=(NODES, 2))
    tensor = torch.tensor(x)
    costs = ((x[:, None] - x) ** 2).sum(axis=-1) / 2
    sinkhorn(Gaussian(WIDTH), Points(x[:50], np.ones(50)))  # loads what is compiled
    ours, seconds = timed(sinkhorn, Gaussian(WIDTH), Points(x, np.ones(NODES)))
    rows = []
    for scaling in SCALINGS:
        loss: Any = SamplesLoss("sinkhorn", p=2, blur=WIDTH, scaling=scaling, debias=False, potentials=True,
                                backend="tensorized")  # fmt: skip
        found, theirs = timed(loss, tensor, tensor)
        f, g = (one.flatten().numpy() for one in found)
        plan = np.exp((f[:, None] + g - costs) / WIDTH**2) / NODES
        off = float(np.abs(plan.sum(axis=0) - 1).max())
        work = f"{NODES} points in the plane, scaling {scaling:g}: sums of columns off by"
        peer, own = f"GeomLoss {off:.1e}, {theirs:.2f} s", f"{ours.residual:.0e}, {seconds:.2f} s"
        rows.append(Row.of("neighbours", work, peer, own, theirs / seconds))
    return rows


def pictures(data: Path) -> list[Row]:
    """Total variation of deepinv, and this denoiser, on pictures of Set12 of 256 x 256."""
    import torch
    from deepinv.models import TVDenoiser
    from skimage.io import imread

    torch.set_num_threads(1)
    qualities = ("fast", "balanced")
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ("deepinv", *qualities)}
    for path in files(data, "**/Set12/*.png")[:PICTURES]:
        clean = imread(path).astype(float)
        noisy = clean + np.random.default_rng(0).normal(0, SIGMA, clean.shape)
        given = torch.tensor(noisy / 255, dtype=torch.float32)[None, None]
        tried = [timed(TVDenoiser(n_it_max=300), given, threshold) for threshold in THRESHOLDS]
        found["deepinv"].append(max((psnr(clean, u[0, 0].numpy() * 255), seconds) for u, seconds in tried))
        for name in qualities:
            u, seconds = timed(denoise, noisy, SIGMA, quality=name)
            found[name].append((psnr(clean, u), seconds))
    medians = {name: np.median([seconds for _, seconds in pairs]) for name, pairs in found.items()}
    means = {name: np.mean([quality for quality, _ in pairs]) for name, pairs in found.items()}
    return [
        Row.of(
            "neighbours", f"{len(found[name])} pictures of Set12, sigma {SIGMA:g}: total variation against {name}",
            f"deepinv {means['deepinv']:.2f} dB, {medians['deepinv']:.2f} s",
            f"{means[name]:.2f} dB, {medians[name]:.2f} s", float(means[name] - means["deepinv"]),
        )
        for name in qualities
    ]  # fmt: skip


def run(data: Path | None = None) -> list[Row]:
    """Return the rows of the peers that are installed, and rows that say which are not."""
    rows = [absent] if (absent := missing("neighbours", "plans", "geomloss", "none")) else plans()
    if data is not None:
        rows += [absent] if (absent := missing("neighbours", "pictures", "deepinv", "none")) else pictures(data)
    return rows
