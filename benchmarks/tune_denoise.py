"""How the preset ``fast`` of `nlflow.denoise` was chosen; `benchmarks.tune_groups` is the script of the others.

Each choice is varied on its own about its default, on photographs (BSD68, every second image, and Kodak, both grey;
Kodak in colour) and on the synthetic test signals of PyWavelets. The defaults are those values from which no change
gains at most noise levels, rounded, and shared by one and two dimensions where that costs no more than 0.1 dB. What
results are quoted on (Set12, scikit-image's camera, PyWavelets' ecg) is not looked at here. White Gaussian noise,
``default_rng(0)`` for each image, not clipped; signals have variance 1.

    python -m benchmarks.tune_denoise --data DIR [--quick] [--out tune_denoise.json]

DIR holds the folders BSD68-even and Kodak24. With ``--quick`` (a few minutes on 2 cores) fewer and smaller crops are
taken; the order of the values is the same.

Tried as well and left out: a second step whose patches are compared in a blend of the smoothed input and the first
estimate (0.02, 0.07 and 0.2 dB at sigma 10, 25 and 50, for twice the time), and a width that also depends on the noise
over the signal (0.01 dB).
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pywt
from numpy.typing import NDArray
from skimage.io import imread
from skimage.restoration import cycle_spin, denoise_nl_means, denoise_tv_chambolle, denoise_wavelet

from nlflow import NlflowWarning, denoise
from nlflow.denoising import pixelwise

Array = NDArray[np.float64]
GREY, COLOUR, SIGNAL = "grey", "colour", "1-D"
LEVELS = {GREY: (5, 10, 25, 50, 75), COLOUR: (10, 25, 50), SIGNAL: (0.03, 0.1, 0.3, 0.6, 1.0)}
LUMA = (0.299, 0.587, 0.114)

# Constants of nlflow.denoising.pixelwise, and the values that each is tried at.
CONSTANTS: dict[str, tuple[Any, ...]] = {
    "SMOOTHING": (1e-3, 0.4, 0.5, 0.55, 0.6, 0.8),
    "_WIDTH": (1.3, 1.6, 1.9, 2.2, 2.5),
    "_SPATIAL": (0.4, 0.5, 0.6, 0.8, 100.0),
    "_VARIANCE_MARGIN": (1.0, 1.2, 1.4, 1.6, 100.0),
    "_MORE_PIXELS": ((0.2, 0.65), (0.32, 0.5), (0.32, 0.65), (0.32, 0.9), (0.45, 0.65)),
    "_ENOUGH_RESIDUAL": (0.25, 0.4, 0.55, 0.7),
}
# Keywords of denoise: what is varied, and where.
KEYWORDS: dict[str, dict[str, tuple[int, ...]]] = {
    "search_radius": {GREY: (6, 8, 10), COLOUR: (6, 8, 10), SIGNAL: (20, 30, 60, 100, 150)},
    "patch_size": {GREY: (3, 5, 7, 9), COLOUR: (3, 5, 7), SIGNAL: (9, 15, 21)},
}


def load(data: Path, quick: bool) -> dict[str, list[Array]]:
    """Return the tuning material: central crops of grey and colour images, and signals of variance 1."""
    bsd, kodak = (sorted((data / name).glob("*.png")) for name in ("BSD68-even", "Kodak24"))
    if not bsd or not kodak:
        raise SystemExit(f"{data}: the folders BSD68-even and Kodak24 with PNG files are expected there")
    side = 160 if quick else 288

    def crops(paths: list[Path], count: int) -> list[Array]:
        chosen = [paths[i] for i in np.linspace(0, len(paths) - 1, count).astype(int)]
        return [crop(imread(path).astype(np.float64), side) for path in chosen]

    grey = crops(bsd, 6 if quick else 16) + [image @ LUMA for image in crops(kodak, 3 if quick else 8)]
    signals = [np.real(pywt.data.demo_signal(name, None if name in ("Gabor", "sineoneoverx") else 1024))
               for name in pywt.data.demo_signal("list")]  # fmt: skip
    signals.append(np.asarray(pywt.data.nino()[1], np.float64))
    return {
        GREY: grey,
        COLOUR: crops(kodak, 4 if quick else 12),
        SIGNAL: [signal / signal.std() for signal in signals],
    }


def crop(image: Array, side: int) -> Array:
    rows, columns = ((n - min(n, side)) // 2 for n in image.shape[:2])
    return image[rows : rows + side, columns : columns + side]


def noisy(clean: Array, sigma: float) -> Array:
    return clean + np.random.default_rng(0).normal(0, sigma, clean.shape)


def decibel(result: Array, clean: Array) -> float:
    """PSNR (peak 255) of images, SNR of signals (variance 1)."""
    power = 1.0 if clean.ndim == 1 else 255.0**2
    return float(10 * np.log10(power / np.mean((result - clean) ** 2)))


def scores(material: list[Array], kind: str, method: Callable[[Array, float], Array]) -> list[float]:
    """Return the mean quality of a method at each noise level."""
    return [
        float(np.mean([decibel(method(noisy(clean, sigma), sigma), clean) for clean in material]))
        for sigma in LEVELS[kind]
    ]


def ours(kind: str, **options: Any) -> Callable[[Array, float], Array]:
    # Single precision, which images have: the quality is the same and the sweep takes half the time.
    axis = -1 if kind == COLOUR else None
    return lambda y, sigma: denoise(y.astype(np.float32), sigma, quality="fast", channel_axis=axis, **options)


@contextmanager
def constant(name: str, value: Any) -> Iterator[None]:
    kept = getattr(pixelwise, name)
    setattr(pixelwise, name, value)
    try:
        yield
    finally:
        setattr(pixelwise, name, kept)


def peers(kind: str) -> dict[str, Callable[[Array, float], Array]]:
    """Return what scikit-image offers, over parameters of which the best at each noise level counts."""
    if kind != SIGNAL:
        axis = -1 if kind == COLOUR else None
        return {
            f"nl_means p{p} d{d} h{h}": lambda y, s, p=p, d=d, h=h: denoise_nl_means(
                y, patch_size=p, patch_distance=d, h=h * s, sigma=s, fast_mode=True, channel_axis=axis
            )
            for p in (3, 5, 7) for d in (6, 8) for h in (0.5, 0.6, 0.7, 0.8)
        }  # fmt: skip

    def scaled(y: Array, function: Callable[[Array, float], Array]) -> Array:
        low, span = y.min(), float(np.ptp(y))
        return function((y - low) / span, span) * span + low

    result: dict[str, Callable[[Array, float], Array]] = {
        f"TV {k}": lambda y, s, k=k: scaled(y, lambda z, span: denoise_tv_chambolle(z, k * s / span))
        for k in (0.6, 0.9, 1.2, 1.8)
    }
    for wavelet in ("db1", "db2", "sym8"):
        result[f"wavelet {wavelet}, 16 shifts"] = lambda y, s, wavelet=wavelet: scaled(
            y,
            lambda z, span: cycle_spin(
                z, denoise_wavelet, max_shifts=16, workers=1,
                func_kw={"sigma": s / span, "wavelet": wavelet, "wavelet_levels": 4, "rescale_sigma": False},
            ),
        )  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="How the defaults of nlflow.denoise were chosen.")
    parser.add_argument("--data", type=Path, required=True, help="folder with BSD68-even/ and Kodak24/")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller crops")
    parser.add_argument("--out", type=Path, default=Path("tune_denoise.json"), help="where the JSON goes")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    warnings.simplefilter("ignore", NlflowWarning)  # nino is shorter than the largest windows
    material = load(arguments.data, arguments.quick)
    rows: list[dict[str, Any]] = []

    def report(kind: str, name: str, value: Any, default: bool, quality: list[float]) -> None:
        rows.append({"kind": kind, "choice": name, "value": value, "default": default, "decibel": quality})
        shown = "  ".join(f"{q:6.2f}" for q in quality)
        print(f"{kind:7}{name:28}{value!s:>14}{' *' if default else '  '} {shown}", flush=True)

    for kind, inputs in material.items():
        print(f"{kind:7}{'choice (* default)':28}{'value':>14}   " + "  ".join(f"{s:>6}" for s in LEVELS[kind]))
        base = scores(inputs, kind, ours(kind))
        report(kind, "all defaults", "", True, base)
        for name, values in CONSTANTS.items():
            if name == "_MORE_PIXELS" and kind == SIGNAL:
                continue
            for value in values:
                default = value == getattr(pixelwise, name)
                with constant(name, value):
                    report(kind, name, value, default, base if default else scores(inputs, kind, ours(kind)))
        for name, places in KEYWORDS.items():
            for value in places[kind]:
                report(kind, name, value, False, scores(inputs, kind, ours(kind, **{name: value})))
        compared = inputs[:: 3 if kind != SIGNAL else 1]  # scikit-image's nonlocal means take their time
        best: dict[str, list[float]] = {}
        for name, method in peers(kind).items():
            family, quality = f"scikit-image {name.split()[0]}", scores(compared, kind, method)
            best[family] = [max(pair) for pair in zip(best.get(family, quality), quality, strict=True)]
        report(kind, "nlflow, on those below", "", True, scores(compared, kind, ours(kind)))
        for family, quality in best.items():
            report(kind, family, "best", False, quality)
    arguments.out.write_text(
        json.dumps(
            {"quick": arguments.quick, "levels": LEVELS, "seconds": time.perf_counter() - begun, "rows": rows}, indent=1
        )
        + "\n"
    )
    print(f"{time.perf_counter() - begun:.0f} s, {arguments.out}")


if __name__ == "__main__":
    main()
