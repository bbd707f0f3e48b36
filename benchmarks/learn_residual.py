"""How far the figures of a residual go where the noise is right, and how often they tell where it is wrong.

    python -m benchmarks.learn_residual --data DIR [--every 4] [--out FOLDER]

DIR holds BSD68-even, a volume and a clip. Pieces of photographs and of what `benchmarks.blind.delicate` draws get
noise: white, correlated, or rising with the intensity; pieces of the volume and the clip, and recordings, get white
noise. They are denoised with that noise (as it is, and clipped and rounded to 8 bits, by 'fast' and 'balanced'), and
with others: too strong, correlated where it is white, rising or falling. `nlflow.denoising.residual.figures_of` looks
at each residual; recordings are met on several scales, as those are whose noise was found. Where it was right, no
figure may pass its limit (`LIMITS`: the largest that was seen here, rounded up; `OF_RECORDINGS` says why one is larger
there); where the result is worse than the noisy picture, one should. residual.md says the largest of each figure, and
both shares.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from skimage.io import imread

from benchmarks.blind.delicate import CLEAN
from benchmarks.blind.instruments import brain_waves, chromatogram, diffraction, heartbeat, raman
from benchmarks.blind.methods import psnr
from nlflow.denoising.frame import observe
from nlflow.denoising.layout import Axes
from nlflow.denoising.noise import GaussianNoise
from nlflow.denoising.noise.models.base import NoiseEstimate
from nlflow.denoising.options import Options
from nlflow.denoising.residual import LIMITS, OF_RECORDINGS, WORDS, Figures, figures_of, seen_in
from nlflow.denoising.runs import ALONE
from nlflow.desk.files import read
from nlflow.store.atomic import make_folder, write_content
from validation.tables import markdown

SIDE: Final = 160
HARM: Final = 0.1  # dB below the noisy picture
OFFSETS: Final = np.arange(-4, 5)
BELL: Final = np.exp(-np.add.outer(OFFSETS**2, OFFSETS**2) / 2)
ENDS: Final = [0.0, 255.0]
KINDS: Final = {"YX": "images", "ZYX": "volumes", "TYX": "clips", "X": "recordings"}


def right(axes: str) -> dict[str, GaussianNoise]:
    found = {f"white {sigma:g}": GaussianNoise(sigma) for sigma in (2.0, 7.0, 20.0)}
    if axes != "YX":
        return found
    found["correlated"] = GaussianNoise.from_kernel(BELL, 10.0)
    found["rising"] = GaussianNoise(10.0, intensities=ENDS, strengths=[0.4, 1.6])
    return found


def wrong(level: float, axes: str) -> dict[str, GaussianNoise]:
    found = {"twice": GaussianNoise(2 * level), "four times": GaussianNoise(4 * level)}
    if axes != "YX":
        return found
    return found | {
        "correlated": GaussianNoise.from_kernel(BELL, 2 * level),
        "rising": GaussianNoise(1.5 * level, intensities=ENDS, strengths=[0.2, 1.8]),
        "falling": GaussianNoise(1.5 * level, intensities=ENDS, strengths=[1.8, 0.2]),
    }


def inputs(data: Path, every: int) -> Iterator[tuple[str, Any]]:
    """Return the axes and the samples of inputs without noise, from 0 to 255."""
    for path in sorted((data / "BSD68-even").glob("*.png"))[::every]:
        yield "YX", imread(path, as_gray=True)[60 : 60 + SIDE, 60 : 60 + SIDE].astype(np.float64)
    for kind in ("text", "few values", "drawn", "stars"):
        for make in list(CLEAN[kind].values())[::every]:
            picture = np.asarray(make(), np.float64)
            yield "YX", (picture if picture.ndim == 2 else picture.mean(axis=-1))[:SIDE, :SIDE]
    brain = read(data / "volumes/mni152_t1.nii.gz").data.astype(np.float64)
    brain *= ENDS[1] / brain.max()
    for start in range(40, 120, 10 * every):
        yield "ZYX", brain[start : start + 32, 80:128, 60:108]
    for path in sorted((data / "video").glob("*.mp4")):
        clip = read(path).data[:16].mean(axis=-1)
        for start in range(0, clip.shape[2] - 64, 24 * every):
            yield "TYX", clip[:, 40:104, start : start + 64]
    for make in (brain_waves, heartbeat, chromatogram, raman, diffraction):
        for number in range(max(8 // every, 1)):
            truth = make(number, np.random.default_rng(number)).truth.astype(np.float64)
            truth = truth if truth.ndim == 1 else truth[..., 0]
            yield "X", ENDS[1] * (truth - truth.min()) / np.ptp(truth)


def looked_at(noisy: Any, noise: GaussianNoise, axes: str, quality: str = "balanced") -> tuple[Any, Figures | None]:
    """Return the estimate under a noise, and what its residual shows."""
    placed = Axes.of(noisy.shape, None, axes if noisy.ndim == 3 else None, None)
    found = NoiseEstimate(noise, "high", ("it was given",)) if noisy.ndim == 1 else None
    frame, part = observe(noisy, None, noise if found is None else "auto", placed, quality, Options(), found=found)
    estimate, _, _ = frame.solve(part, ALONE)
    return part.restore(part.result(estimate, frame)), figures_of(part.f, estimate, frame)


def finite(name: str, found: list[Figures]) -> list[float]:
    """Return one figure of residuals; that of a page, which no flat part bears out, is infinite and does not count."""
    return [value for f in found if math.isfinite(value := getattr(f, name))] or [math.nan]


def doubted(found: list[Figures], axes: str) -> str:
    return f"{sum(bool(seen_in(one, len(axes))) for one in found)} of {len(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with BSD68-even/, volumes/ and video/")
    parser.add_argument("--every", type=int, default=4, help="one picture of so many")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the results go")
    arguments = parser.parse_args()
    names = [one.name for one in fields(Figures) if one.name not in ("share", "clumps")]
    good: dict[str, list[Figures]] = {axes: [] for axes in KINDS}
    bad: dict[str, list[Figures]] = {axes: [] for axes in KINDS}
    for axes, clean in inputs(arguments.data, arguments.every):
        for noise in right(axes).values():
            noisy = noise.sample(clean, rng=0)
            for quality in ("fast", "balanced"):
                for given in (noisy, np.clip(np.rint(noisy), *ENDS)):
                    good[axes] += [found for _, found in [looked_at(given, noise, axes, quality)] if found]
            for other in wrong(float(noise.sigma), axes).values():
                result, found = looked_at(noisy, other, axes)
                if found and psnr(clean, result) < psnr(clean, noisy) - HARM:
                    bad[axes].append(found)
    lines = []
    for name in names:
        largest = [f"{max(finite(name, own)):.3f}" for own in good.values()]
        told = float(np.mean([WORDS[name] in seen_in(f, len(axes)) for axes, own in bad.items() for f in own]))
        limits = dict.fromkeys(f"{getattr(one, name):g}" for one in (LIMITS, OF_RECORDINGS))
        lines.append([name, *largest, ", ".join(limits), f"{told:.0%}"])
    columns = ["figure", *(f"largest where right, {kind}" for kind in KINDS.values()), "limit", "tells of harm"]
    said = " ".join(
        f"{KINDS[axes].capitalize()}: doubted are {doubted(good[axes], axes)} that are right, and "
        f"{doubted(bad[axes], axes)} that do harm."
        for axes in KINDS
    )
    head = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2]
    table = markdown(columns, lines)
    page = "\n\n".join(["# The residual under noise that is right, and that is wrong", head, table, said]) + "\n"
    print(table, said, sep="\n\n")
    write_content(make_folder(arguments.out) / "residual.md", page.encode())


if __name__ == "__main__":
    main()
