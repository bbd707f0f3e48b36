"""One method on one image or signal at one noise level: the noisy samples, the scores, and a cache of them."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pywt
from skimage.io import imread
from skimage.metrics import peak_signal_noise_ratio, structural_similarity
from tqdm import tqdm

from benchmarks.denoising.methods import BM3D, COLOUR, GREY, SIGNAL, Array, denoisers, eight_bits, threads
from nlflow.store.atomic import make_folder, write_atomic

SETS = {"Set12": GREY, "BSD68-even": GREY, "Kodak24": COLOUR, "signals": SIGNAL}
QUICK_SIDE, QUICK_IMAGES = 128, 2
DRAWS = 5  # of the noise, for signals: they are short, and their scores vary from draw to draw

Crop = tuple[slice, slice]


@dataclass(frozen=True)
class Task:
    """One result to be had. `sigma` is that of the noise, over the standard deviation of the signal for signals."""

    set: str
    source: str
    method: str
    sigma: float
    quick: bool = False
    crop: Crop | None = None

    @property
    def kind(self) -> str:
        return SETS[self.set]

    @property
    def image(self) -> str:
        return self.source if self.kind == SIGNAL else Path(self.source).stem

    def clean(self) -> Array:
        return signal(self.source) if self.kind == SIGNAL else image(Path(self.source), self.quick)

    def level(self, clean: Array) -> float:
        return self.sigma * float(clean.std()) if self.kind == SIGNAL else self.sigma

    def seeds(self) -> range:
        return range(DRAWS if self.kind == SIGNAL and not self.quick else 1)


def image(path: Path, quick: bool = False) -> Array:
    """Return an image on the scale 0...255; its middle alone if `quick`."""
    full = imread(path).astype(np.float64)
    if not quick:
        return full
    top, left = ((n - min(n, QUICK_SIDE)) // 2 for n in full.shape[:2])
    return full[top : top + QUICK_SIDE, left : left + QUICK_SIDE]


def signal(name: str) -> Array:
    """Return PyWavelets' ECG or one of its demonstration signals, of 1024 samples where a length can be asked for."""
    if name == "ecg":
        return pywt.data.ecg().astype(np.float64)
    size = None if name in ("Gabor", "sineoneoverx") else 1024
    return np.ascontiguousarray(np.real(pywt.data.demo_signal(name, size)), dtype=np.float64)


def add_noise(clean: Array, sigma: float, seed: int = 0) -> Array:
    """Return the samples with white Gaussian noise, neither clipped nor rounded."""
    return clean + np.random.default_rng(seed).normal(0, sigma, clean.shape)


def score(clean: Array, result: Array, kind: str) -> dict[str, float]:
    """Return the SNR in decibels of a signal, PSNR (peak 255) and SSIM of an image."""
    if kind == SIGNAL:
        return {"snr": float(10 * np.log10(np.var(clean) / np.mean((result - clean) ** 2)))}
    axis = -1 if kind == COLOUR else None
    return {
        "psnr": float(peak_signal_noise_ratio(clean, result, data_range=255)),
        "ssim": float(structural_similarity(clean, result, data_range=255, channel_axis=axis)),
    }


class Cache:
    """Results by method, samples, noise and the version of what computed them, one file each.

    Parameters
    ----------
    folder : Path
        Where the files are.
    digest : str
        Of the source of our own methods.
    """

    def __init__(self, folder: Path, digest: str):
        self.folder = make_folder(folder)
        self.digest = digest
        write_atomic(self.folder / ".gitignore", lambda stream: stream.write(b"*\n"))

    def place(self, task: Task, clean: Array) -> tuple[Path, dict[str, Any]]:
        """Return the file of a result, and all that the result depends on."""
        method = denoisers(task.kind)[task.method]
        key = {
            "method": task.method,
            "parameters": method.parameters,
            "version": method.version(self.digest),
            "set": task.set,
            "image": task.image,
            "samples": hashlib.sha256(np.ascontiguousarray(clean).tobytes()).hexdigest(),
            "shape": list(clean.shape),
            "sigma": task.sigma,
            "seeds": list(task.seeds()),
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        name = re.sub(r"[^\w.=-]+", "-", f"{task.method}-{task.image}-{task.sigma:g}-{digest}")
        return self.folder / task.set / f"{name}.json", key

    def result(self, task: Task) -> dict[str, Any]:
        """Return the scores of a task, from the cache or computed and put there; and the crop that it asks for."""
        clean = task.clean()
        path, key = self.place(task, clean)
        drawn = path.with_suffix(f".{crop_name(task.crop)}.npy") if task.crop else None
        if not path.exists() or (drawn and not drawn.exists()):
            make_folder(path.parent)
            method, kind = denoisers(task.kind)[task.method], task.kind
            scores, seconds = [], []
            for seed in task.seeds():
                noisy, level = add_noise(clean, task.level(clean), seed), task.level(clean)
                begun = time.perf_counter()
                with threads(1):
                    result = method.call(noisy, level)
                seconds.append(time.perf_counter() - begun)
                scores.append(score(clean, result, kind))
            if drawn and task.crop:
                cut = eight_bits(result[task.crop])
                write_atomic(drawn, lambda stream: np.save(stream, cut))
            found = {name: float(np.mean([s[name] for s in scores])) for name in scores[0]}
            text = json.dumps({**key, **found, "seconds": float(np.median(seconds))}, indent=1)
            write_atomic(path, lambda stream: stream.write(text.encode()))
        record: dict[str, Any] = json.loads(path.read_text())
        record["family"] = denoisers(task.kind)[task.method].family
        if drawn and task.crop:
            record |= {"crop": str(drawn), "place": [[part.start, part.stop] for part in task.crop]}
        return record


def crop_name(crop: Crop) -> str:
    return "x".join(f"{part.start}-{part.stop}" for part in crop)


def compute(tasks: Iterable[Task], cache: Cache, jobs: int, name: str) -> list[dict[str, Any]]:
    """Return the results of all tasks, of which `jobs` run at a time, each on one thread."""
    # Here, since a result is kept by the digest of all modules of nlflow that are loaded before.
    from nlflow.studies.cases import Case, run_cases

    # The slowest first: then no process is left alone with one of them at the end.
    cost = {BM3D: 0, "best": 1}
    order = sorted(tasks, key=lambda task: (cost.get(task.method, 2), task.set, task.image, task.sigma))
    cases = [Case(f"{number}", cache.result, (task,)) for number, task in enumerate(order)]
    with (
        tqdm(total=len(order), desc=name, unit="result", smoothing=0.02) as bar,
        joblib.parallel_config(backend="loky", n_jobs=jobs, inner_max_num_threads=1),
    ):
        return [done.finding for done in run_cases(cases, jobs=None, bar=bar)]
