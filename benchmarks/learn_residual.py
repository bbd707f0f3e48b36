"""How far the figures of a residual go where the noise is right, and how often they tell where it is wrong.

    python -m benchmarks.learn_residual --data DIR [--every 4] [--out FOLDER]

DIR holds BSD68-even. Pieces of photographs and of what `benchmarks.blind.delicate` draws get noise: white, correlated,
or rising with the intensity. They are denoised with that noise, and with others: too strong, correlated where it is
white, rising or falling. `nlflow.denoising.residual.figures_of` looks at each residual. Where it was right, no figure
may pass its limit (`LIMITS`, above the largest that were seen here, and in photographs from cameras); where the
result is worse than the noisy picture, one should. residual.md says the largest of each figure, and both shares.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from skimage.io import imread

from benchmarks.blind.delicate import CLEAN
from benchmarks.blind.methods import psnr
from nlflow.denoising.frame import observe
from nlflow.denoising.layout import Axes
from nlflow.denoising.noise import GaussianNoise
from nlflow.denoising.options import Options
from nlflow.denoising.residual import LIMITS, Figures, figures_of
from nlflow.denoising.runs import ALONE
from nlflow.store.atomic import make_folder, write_content
from validation.tables import markdown

SIDE: Final = 160
HARM: Final = 0.1  # dB below the noisy picture
OFFSETS: Final = np.arange(-4, 5)
BELL: Final = np.exp(-np.add.outer(OFFSETS**2, OFFSETS**2) / 2)
ENDS: Final = [0.0, 255.0]


def right() -> dict[str, GaussianNoise]:
    found = {f"white {sigma:g}": GaussianNoise(sigma) for sigma in (2.0, 7.0, 20.0)}
    found["correlated"] = GaussianNoise.from_kernel(BELL, 10.0)
    found["rising"] = GaussianNoise(10.0, intensities=ENDS, strengths=[0.4, 1.6])
    return found


def wrong(level: float) -> dict[str, GaussianNoise]:
    return {
        "twice": GaussianNoise(2 * level),
        "four times": GaussianNoise(4 * level),
        "correlated": GaussianNoise.from_kernel(BELL, 2 * level),
        "rising": GaussianNoise(1.5 * level, intensities=ENDS, strengths=[0.2, 1.8]),
        "falling": GaussianNoise(1.5 * level, intensities=ENDS, strengths=[1.8, 0.2]),
    }


def pictures(data: Path, every: int) -> Iterator[tuple[str, Any]]:
    for path in sorted((data / "BSD68-even").glob("*.png"))[::every]:
        yield path.stem, imread(path, as_gray=True)[60 : 60 + SIDE, 60 : 60 + SIDE].astype(np.float64)
    for kind in ("text", "few values", "drawn", "stars"):
        for name, make in list(CLEAN[kind].items())[::every]:
            picture = np.asarray(make(), np.float64)
            yield f"{kind}: {name}", (picture if picture.ndim == 2 else picture.mean(axis=-1))[:SIDE, :SIDE]


def looked_at(noisy: Any, noise: GaussianNoise) -> tuple[Any, Figures | None]:
    """Return the estimate under a noise, and what its residual shows."""
    frame, part = observe(noisy, None, noise, Axes.of(noisy.shape, None, None, None), "balanced", Options())
    estimate, _, _ = frame.solve(part, ALONE)
    return part.restore(part.result(estimate, frame)), figures_of(part.f, estimate, frame)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with BSD68-even/")
    parser.add_argument("--every", type=int, default=4, help="one picture of so many")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the results go")
    arguments = parser.parse_args()
    names = [one.name for one in fields(Figures) if one.name not in ("share", "clumps")]
    good: list[Figures] = []
    bad: list[Figures] = []
    for _, clean in pictures(arguments.data, arguments.every):
        for noise in right().values():
            noisy = noise.sample(clean, rng=0)
            good += [found for _, found in [looked_at(noisy, noise)] if found]
            for other in wrong(float(noise.sigma)).values():
                result, found = looked_at(noisy, other)
                if found and psnr(clean, result) < psnr(clean, noisy) - HARM:
                    bad.append(found)
    lines = []
    for name in names:
        limit, (of_good, of_bad) = getattr(LIMITS, name), ([getattr(f, name) for f in own] for own in (good, bad))
        told = float(np.mean(np.array(of_bad) > limit))
        lines.append([name, f"{np.quantile(of_good, 0.99):.3f}", f"{max(of_good):.3f}", f"{limit:g}", f"{told:.0%}"])
    share = [np.mean([any(getattr(f, n) > getattr(LIMITS, n) for n in names) for f in own]) for own in (good, bad)]
    head = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2]
    table = markdown(["figure", "99 % where right", "largest where right", "limit", "tells of harm"], lines)
    said = f"Doubted: {share[0]:.1%} of {len(good)} that are right, {share[1]:.1%} of {len(bad)} that do harm."
    page = "\n\n".join(["# The residual under noise that is right, and that is wrong", head, table, said]) + "\n"
    print(table, said, sep="\n\n")
    write_content(make_folder(arguments.out) / "residual.md", page.encode())


if __name__ == "__main__":
    main()
