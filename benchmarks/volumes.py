"""Volumes, stacks and clips: against bm4d and dipy where they are installed, and against slice by slice.

    python -m benchmarks.volumes --data DIR [--only brain rician counts clips] [--side 96] [--out benchmarks/results]

DIR holds volumes/mni152_t1.nii.gz (read with nibabel) and video/*.mp4 (read with PyAV). The noise is drawn with
`default_rng(0)`, PSNR is over a peak of 1. All methods get the same arrays in the same run, the strength of the noise
among them. Times are seconds of all threads together (a processor's time), which other processes disturb least; both
bm4d and nlflow use all cores.

bm4d is for non-commercial use: it is compared where the user has installed it. Published: VNLB leads V-BM4D by 1.2 to
2.3 dB on Set8 and DAVIS (m-tassano/dvdnet, README). Sections that are not measured keep their rows. A full run takes
about half an hour, so it is not part of ``python -m benchmarks``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import KIND, Row, files, keep, listed, machine, table, timed
from nlflow import denoise
from nlflow.denoising.groupwise import VOLUMES, bytes_needed
from nlflow.denoising.noise import Poisson, Rician
from nlflow.errors import InputError
from nlflow.store.storage import load_record

Array = NDArray[Any]
NAME = "volumes"
row = partial(Row.of, NAME)
STRENGTHS = (0.05, 0.1, 0.15)
PEAKS = (5, 20, 100)
SIGMAS = (10, 20, 40)
FRAMES = 30
QUALITIES = ("fast", "balanced", "best")


def decibels(u: Array, clean: Array) -> float:
    return float(-10 * np.log10(np.mean((u - clean) ** 2)))


def brain(data: Path, side: int) -> Array:
    """The middle of the T1 template over its peak."""
    import nibabel

    volume = np.asarray(nibabel.load(files(data, "volumes/mni152_t1.nii.gz")[0]).get_fdata())
    low = [max((n - side) // 2, 0) for n in volume.shape]
    return np.ascontiguousarray(volume[tuple(slice(k, k + side) for k in low)] / volume.max())


def sliced(noisy: Array, sigma: float) -> Array:
    return np.stack([denoise(one, sigma, quality="balanced") for one in noisy])


def gaussian(data: Path, side: int) -> Iterator[Row]:
    """White noise on the brain: bm4d, slice by slice, memory and the cost of `fast`."""
    clean = brain(data, side)
    denoise(clean[:16, :16, :16], 0.1, quality="best")  # loops are compiled, or loaded
    for sigma in STRENGTHS:
        noisy = clean + np.random.default_rng(0).normal(0, sigma, clean.shape)
        ours = {quality: timed(partial(denoise, noisy, sigma, quality=quality)) for quality in QUALITIES}
        found = {quality: (decibels(u, clean), seconds) for quality, (u, seconds) in ours.items()}
        work = f"T1 {side}^3, white {sigma:.0%}"
        peer = _bm4d(noisy, sigma, clean)
        for quality, least, most in (("fast", None, None), ("balanced", -0.1, 1 / 3), ("best", 0.2, 1.0)):
            gain, cost = found[quality]
            if peer is None:
                yield row(f"{work}, {quality}", "bm4d is not installed", f"{gain:.2f} dB, {cost:.0f} s", float("nan"))
                continue
            texts = f"bm4d {peer[0]:.2f} dB", f"{gain:.2f} dB"
            yield row(f"{work}, {quality}: PSNR less bm4d's", *texts, gain - peer[0], least=least, unit=" dB")
            texts = f"bm4d {peer[1]:.0f} s", f"{cost:.1f} s"
            yield row(f"{work}, {quality}: time over bm4d's", *texts, cost / peer[1], most=most)
        flat = decibels(sliced(noisy, sigma), clean)
        texts = f"slices {flat:.2f} dB", f"{found['balanced'][0]:.2f} dB"
        yield row(f"{work}, balanced: over slice by slice", *texts, found["balanced"][0] - flat, least=2.0, unit=" dB")
        ratio = found["fast"][1] / found["balanced"][1]
        texts = f"balanced {found['balanced'][1]:.1f} s", f"fast {found['fast'][1]:.1f} s"
        yield row(f"{work}: cost of fast over balanced", *texts, ratio, most=1 / 8)
    for quality, preset in VOLUMES.items():
        held = bytes_needed((1, *clean.shape), preset.groupings(1.0, 3), preset.steps, 4) / clean.size
        yield row(f"T1 {side}^3, {quality}: bytes a voxel", "none", f"{held:.0f}", held, most=2000)


def _bm4d(noisy: Array, sigma: float, clean: Array) -> tuple[float, float] | None:
    try:
        import bm4d
    except ImportError:
        return None
    u, seconds = timed(lambda: np.asarray(bm4d.bm4d(noisy, sigma)))
    return decibels(u, clean), seconds


def rician(data: Path, side: int) -> Iterator[Row]:
    """Magnitudes of complex samples: dipy's non-local means, the best of its parameters by the truth."""
    clean = brain(data, side)
    for sigma in STRENGTHS:
        noisy = Rician(sigma).sample(clean, rng=0)
        found = decibels(denoise(noisy, noise=Rician(sigma)), clean)
        work = f"T1 {side}^3, Rician {sigma:.0%}, balanced: PSNR less dipy's"
        peer = _dipy(noisy, sigma, clean)
        if peer is None:
            yield row(work, "dipy is not installed", f"{found:.2f} dB", float("nan"))
        else:
            yield row(work, f"nlmeans {peer:.2f} dB", f"{found:.2f} dB", found - peer, least=1.5, unit=" dB")


def _dipy(noisy: Array, sigma: float, clean: Array) -> float | None:
    try:
        from dipy.denoise.nlmeans import nlmeans
    except ImportError:
        return None
    results = []
    for patch, radius, share in ((1, 3, 0.5), (1, 3, 0.7), (1, 3, 1.0), (1, 5, 0.7), (2, 3, 0.7)):
        u = nlmeans(noisy, sigma * share, patch_radius=patch, block_radius=radius, rician=True, method="classic")
        results.append(decibels(np.asarray(u), clean))
    return max(results)


def cells(shape: tuple[int, int, int] = (24, 128, 128)) -> Array:
    """Drawn nuclei: ellipsoids with a texture on a dim ground, blurred as a microscope does; 0...1."""
    from scipy.ndimage import gaussian_filter

    rng = np.random.default_rng(5)
    places = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"), axis=-1).astype(float)
    volume = np.full(shape, 0.08)
    texture = gaussian_filter(rng.normal(size=shape), (0.7, 2, 2))
    texture = 0.75 + 0.25 * texture / texture.std() / 2
    for _ in range(40):
        middle, radii = rng.uniform(0, shape), rng.uniform((2, 7, 7), (4, 14, 14))
        inside = (((places - middle) / radii) ** 2).sum(axis=-1) < 1
        volume[inside] = (rng.uniform(0.4, 1.0) * texture)[inside]
    return np.clip(gaussian_filter(volume, (0.6, 1, 1)), 0, 1)


def counts(data: Path, side: int) -> Iterator[Row]:
    """Counts of photons in a stack of drawn cells."""
    del data, side
    clean = cells()
    for peak in PEAKS:
        noisy = np.random.default_rng(0).poisson(peak * clean).astype(float)
        flat = np.stack([denoise(one, noise=Poisson()) for one in noisy]) / peak
        whole = denoise(noisy, noise=Poisson(), axes="ZYX", spacing=(2, 1, 1)) / peak
        values = decibels(flat, clean), decibels(whole, clean)
        texts = f"slices {values[0]:.2f} dB", f"{values[1]:.2f} dB"
        yield row(f"cells, counts of peak {peak}, balanced", *texts, values[1] - values[0], least=1.5, unit=" dB")


def _middle(clip: Array, most: tuple[int, int] = (192, 256)) -> Array:
    """The middle of a clip, which is cut to save time."""
    low = [max((n - m) // 2, 0) for n, m in zip(clip.shape[1:], most, strict=True)]
    return np.ascontiguousarray(clip[:, low[0] : low[0] + most[0], low[1] : low[1] + most[1]])


def clips(data: Path, side: int) -> Iterator[Row]:
    """White noise on the middle of clips: frame by frame."""
    import av

    del side
    for path in files(data, "video/*.mp4"):
        with av.open(str(path)) as film:
            frames = [frame.to_ndarray(format="gray") for frame in islice(film.decode(video=0), FRAMES)]
        clean = _middle(np.stack(frames) / 255)
        for level in SIGMAS:
            sigma = level / 255
            noisy = clean + np.random.default_rng(0).normal(0, sigma, clean.shape)
            flat, alone = timed(partial(sliced, noisy, sigma))
            u, seconds = timed(partial(denoise, noisy, sigma, axes="TYX"))
            values = decibels(flat, clean), decibels(u, clean)
            work = f"{path.stem}, {len(clean)} frames of {clean.shape[2]} x {clean.shape[1]}, sigma {level}, balanced"
            texts = f"frames {values[0]:.2f} dB, {alone:.0f} s", f"{values[1]:.2f} dB, {seconds:.0f} s"
            yield row(work, *texts, values[1] - values[0], least=1.5, unit=" dB")


SECTIONS = {"brain": gaussian, "rician": rician, "counts": counts, "clips": clips}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with volumes/ and video/")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections")
    parser.add_argument("--side", type=int, default=96, help="of the part of the brain")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="where the results go")
    arguments = parser.parse_args()
    path = arguments.out / f"{NAME}.json"
    about = machine()
    known = load_record(path, KIND)["sections"] if path.exists() else {}
    for name in arguments.only:
        known[name] = []
        for found in SECTIONS[name](arguments.data, arguments.side):
            known[name].append(asdict(found) | {"machine": about})
            print(table([found]).splitlines()[-1], flush=True)
            rows = [Row(**{k: v for k, v in one.items() if k != "machine"}) for part in known.values() for one in part]
            page = f"# Volumes, stacks and clips\n\n{table(rows)}\n\nMachine and versions:\n\n{listed(about)}\n"
            keep(arguments.out, NAME, {"sections": known}, page)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"python -m benchmarks.volumes: {error}")
