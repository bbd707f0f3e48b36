"""How well noise is told by its law or its place: pictures with it, of all kinds, with other noise, and with none.

    python -m benchmarks.finding FOLDER [FOLDER ...]

Folders hold pictures without noise (photographs); simulated scenes are looked at beside them. The finders of speckle,
of magnitudes and of noise that differs from place to place look at each; where something else is told than what was
drawn, a line says so, and at last the share in which each kind was told.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.ndimage import gaussian_filter

from benchmarks.blind import instruments
from benchmarks.denoising.methods import Array
from nlflow.denoising.noise import find_rician, find_speckle
from nlflow.denoising.noise.finding.places import find_places

SCENES = ("text", "cells", "sky", "phantom", "relief")


def pictures(folders: list[str]) -> Iterator[tuple[str, Array]]:
    for path in (path for folder in folders for path in sorted(Path(folder).iterdir())):
        if path.suffix.lower() in {".png", ".jpg", ".tif", ".bmp"}:
            yield path.name, np.asarray(Image.open(path).convert("L"), np.float64)
    for name in SCENES:
        for number in range(instruments.SCENES):
            yield f"{name} {number}", 255 * getattr(instruments, name)(number)


def noises(clean: Array, rng: np.random.Generator) -> Iterator[tuple[str, str, Array]]:
    """Yield what should be told (a kind, or nothing), a name, and the samples."""
    yield "", "clean", clean
    for sigma in (3, 15, 40):
        noisy = clean + rng.normal(0, sigma, clean.shape)
        yield "", f"white {sigma}", noisy
        yield "", f"white {sigma}, 8 bits", np.clip(np.rint(noisy), 0, 255)
    for peak in (2, 10, 50):
        yield "", f"counts to {peak}", rng.poisson(clean * peak / 255).astype(np.float64)
    blurred = gaussian_filter(rng.normal(size=clean.shape), 1)
    yield "", "correlated", clean + 15 * blurred / blurred.std()
    light = np.maximum(rng.poisson((clean / 255) ** 2.2 * 300) + rng.normal(0, 3, clean.shape), 0) / 300
    yield "", "camera", np.clip(np.rint(255 * light ** (1 / 2.2)), 0, 255)
    mean = clean / 255 * 0.98 + 0.02
    for looks in (1, 2, 4, 16):
        yield "speckle", f"{looks} looks", mean * rng.gamma(looks, 1 / looks, clean.shape)
    field = rng.normal(size=(2, *clean.shape))
    for name, one in (("white", field), ("correlated", gaussian_filter(field, (0, 1, 1)))):
        amplitude = np.hypot(*(one / one.std()))
        yield "speckle", f"amplitudes, {name}", mean * amplitude
        yield "speckle", f"1 look, {name}, 8 bits", np.clip(np.rint(60 * mean * amplitude**2), 0, 255)
        shown = 255 * (20 * np.log10(mean * amplitude + 1e-9) + 50) / 60
        yield "log-speckle", f"decibels, {name}, 8 bits", np.clip(np.rint(shown), 0, 255)
    rows, columns = (np.linspace(-1, 1, n) for n in clean.shape)
    round_ = 8 + 25 * np.exp(-2 * (rows[:, None] ** 2 + columns**2))
    for name, level in (("round", round_), ("ramp", (20 + 15 * rows)[:, None])):
        yield "gaussian", f"white, {name}", clean + level * rng.normal(size=clean.shape)
    if (clean == 0).mean() > 0.1:
        yield "rician", "magnitudes", np.hypot(clean + 12 * field[0], 12 * field[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*")
    told: dict[tuple[str, str], list[str]] = defaultdict(list)
    for number, (name, clean) in enumerate(pictures(parser.parse_args().folders)):
        for kind, noise, samples in noises(clean, np.random.default_rng(number)):
            finders = (find_speckle, find_rician, find_places)
            found = next((one for find in finders if (one := find(samples[..., None])) is not None), None)
            told[kind, noise].append("" if found is None else found.kind)
            if found is not None and found.kind != kind:
                print(f"{name}, {noise}: {found.describe()}")
    for (kind, noise), found in told.items():
        print(f"{noise:32} {kind or 'none':12} {np.mean([one == kind for one in found]):.1%} of {len(found)}")


if __name__ == "__main__":
    main()
