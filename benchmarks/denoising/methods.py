"""What is compared: `nlflow.denoise` and its peers, each as a function of the noisy samples and sigma.

Images are floats on the scale 0...255, colours last. The peers' parameters are the best of a grid for the mean PSNR at
each sigma: on Set12 itself for grey, on the middle of every fourth image of Kodak24 for colour. So the peers are
flattered; nothing of ours was chosen on Set12. For signals each choice is a method of its own, and the best of a
family counts for each signal and level.

OpenCV's nonlocal means takes whole numbers of 8 bits, so it gets the noisy samples rounded and clipped. BM3D is the
package ``bm3d``: closed binaries, with a licence for non-commercial use. NL-Ridge and LIChI are the authors' modules
``nlridge`` and ``lichi`` (AGPL), with the parameters of their papers; they want torch and einops. None of the three is
ever installed with nlflow; they are compared with where the user has installed them or names a checkout.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from skimage.restoration import cycle_spin, denoise_nl_means, denoise_tv_chambolle, denoise_wavelet
from threadpoolctl import threadpool_limits

from nlflow import denoise

Array = NDArray[np.float64]
GREY, COLOUR, SIGNAL = "grey", "colour", "1-D"
QUALITIES = ("fast", "balanced", "best")
ESTIMATED = "balanced, sigma estimated"
BY_CHANNEL = "{}, channel by channel"
BM3D, NLM_6, NLM_10 = "BM3D", "scikit-image NLM, d=6", "scikit-image NLM, d=10"
NL_RIDGE, LICHI = "NL-Ridge", "LIChI"
SHRINKING = "BayesShrink, 16 shifts"
TV, WAVELETS, OPENCV = "scikit-image TV", "scikit-image wavelets", "OpenCV NLM"

# By sigma; the nearest counts. Patch size and h / sigma; weight / sigma; wavelet and the factor on sigma.
NLM: dict[tuple[str, int], dict[float, tuple[int, float]]] = {
    (GREY, 6): {15: (5, 0.7), 25: (5, 0.65), 50: (7, 0.6)},
    (GREY, 10): {15: (5, 0.65), 25: (5, 0.6), 50: (7, 0.5)},
    (COLOUR, 6): {15: (3, 0.55), 25: (5, 0.5), 50: (5, 0.45)},
    (COLOUR, 10): {15: (3, 0.5), 25: (5, 0.5), 50: (5, 0.4)},
}
OPENCV_NLM: dict[str, dict[float, tuple[int, float]]] = {
    GREY: {15: (3, 1.2), 25: (5, 1.05), 50: (5, 0.95)},
    COLOUR: {15: (3, 1.1), 25: (3, 1.0), 50: (3, 0.9)},
}
TV_WEIGHT: dict[str, dict[float, float]] = {
    GREY: {15: 0.7, 25: 0.8, 50: 0.9},
    COLOUR: {15: 0.6, 25: 0.7, 50: 0.9},
}
WAVELET: dict[str, dict[float, tuple[str, float]]] = {
    GREY: {15: ("db1", 1.2), 25: ("db1", 1.0), 50: ("db1", 1.0)},
    COLOUR: {15: ("db2", 1.0), 25: ("db2", 1.0), 50: ("db1", 1.0)},
}
# Up to this sigma: patches and members of the two passes, and how often LIChI repeats (arXiv 2203.00570, 2212.00422).
NL_RIDGE_CHOICES: dict[float, dict[str, int]] = {
    15: {"p1": 7, "p2": 7, "k1": 18, "k2": 55}, 35: {"p1": 9, "p2": 9, "k1": 18, "k2": 90},
    np.inf: {"p1": 11, "p2": 9, "k1": 20, "k2": 120},
}  # fmt: skip
LICHI_CHOICES: dict[float, dict[str, int]] = {
    10: {"p1": 9, "p2": 6, "k1": 16, "k2": 64, "M": 6}, 30: {"p1": 11, "p2": 6, "k1": 16, "k2": 64, "M": 9},
    np.inf: {"p1": 13, "p2": 6, "k1": 16, "k2": 64, "M": 11},
}  # fmt: skip
SIGNAL_WAVELETS = tuple(product(("db1", "db2", "sym8"), (4, 6), (1.0, 1.2)))
SIGNAL_WEIGHTS = (0.6, 0.9, 1.2, 1.8, 2.5)


@dataclass(frozen=True)
class Denoiser:
    """A method: its family (of which the best counts), the package imported, its parameters in words, and the call."""

    family: str
    package: str
    parameters: str
    call: Callable[[Array, float], Array]

    @property
    def ours(self) -> bool:
        return self.package == "nlflow"

    def version(self, digest: str) -> str:
        """What the result depends on besides the samples; `digest` is that of our source."""
        return digest if self.ours else version(self.package)


def version(package: str) -> str:
    """Return the version of what brought a package that is imported by this name; for a checkout a digest of it."""
    if package in _distributions():
        return metadata.version(_distributions()[package][0])
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{package}: got no such module, expected one that is installed or in a checkout")
    return "checkout " + hashlib.sha256(Path(found.origin).read_bytes()).hexdigest()[:12]


def use_checkout(folder: Path, package: str) -> None:
    """Import a peer from the folder of a checkout, in this process and in those that it starts.

    Raises
    ------
    SystemExit
        For a folder without the module.
    """
    if not (folder / f"{package}.py").is_file():
        raise SystemExit(f"{folder}: got no file {package}.py, expected a checkout that holds it")
    sys.path.insert(0, str(folder.resolve()))


@cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def nearest(table: dict[float, Any], sigma: float) -> Any:
    """Return the entry whose sigma has the ratio to `sigma` that is nearest to 1."""
    return table[min(table, key=lambda s: abs(np.log(s / max(sigma, 1e-9))))]


def denoisers(kind: str) -> dict[str, Denoiser]:
    """Return the methods for a kind of samples that are installed, by name."""
    return {**_ours(kind), **(_signal_peers() if kind == SIGNAL else _image_peers(kind))}


def _ours(kind: str) -> dict[str, Denoiser]:
    axis = -1 if kind == COLOUR else None

    def preset(quality: str) -> Callable[[Array, float], Array]:
        return lambda y, s: denoise(y, s, quality=quality, channel_axis=axis)

    def each_channel(quality: str) -> Callable[[Array, float], Array]:
        return lambda y, s: np.stack([denoise(y[..., c], s, quality=quality) for c in range(y.shape[-1])], axis=-1)

    found = {q: Denoiser("nlflow", "nlflow", "default", preset(q)) for q in QUALITIES}
    if kind == GREY:
        found[ESTIMATED] = Denoiser("nlflow", "nlflow", "sigma=None", lambda y, s: denoise(y))
    if kind == COLOUR:
        for q in ("fast", "balanced"):
            found[BY_CHANNEL.format(q)] = Denoiser("nlflow", "nlflow", "default", each_channel(q))
    return found


def _image_peers(kind: str) -> dict[str, Denoiser]:
    axis = -1 if kind == COLOUR else None

    def nlm(distance: int) -> Callable[[Array, float], Array]:
        def call(y: Array, s: float) -> Array:
            size, h = nearest(NLM[kind, distance], s)
            options = {"patch_size": size, "patch_distance": distance, "h": h * s, "sigma": s}
            return denoise_nl_means(y, **options, fast_mode=True, channel_axis=axis)

        return call

    def tv(y: Array, s: float) -> Array:
        return denoise_tv_chambolle(y, nearest(TV_WEIGHT[kind], s) * s, channel_axis=axis)

    def wavelets(y: Array, s: float) -> Array:
        wavelet, factor = nearest(WAVELET[kind], s)
        return spun(y, factor * s, wavelet, 4)

    def opencv(y: Array, s: float) -> Array:
        import cv2

        cv2.setNumThreads(numba.get_num_threads())
        size, h = nearest(OPENCV_NLM[kind], s)
        return cv2.fastNlMeansDenoising(eight_bits(y), None, float(h * s), size, 13).astype(np.float64)

    def bm3d(y: Array, s: float) -> Array:
        import bm3d

        profile = bm3d.BM3DProfile()
        profile.num_threads = numba.get_num_threads()
        return (bm3d.bm3d if axis is None else bm3d.bm3d_rgb)(y, s, profile)

    found = {
        NLM_6: Denoiser(NLM_6, "skimage", f"patch size and h / sigma {NLM[kind, 6]}", nlm(6)),
        NLM_10: Denoiser(NLM_10, "skimage", f"patch size and h / sigma {NLM[kind, 10]}", nlm(10)),
        TV: Denoiser(TV, "skimage", f"Chambolle, weight / sigma {TV_WEIGHT[kind]}", tv),
        WAVELETS: Denoiser(WAVELETS, "skimage", f"{SHRINKING}, 4 levels, {WAVELET[kind]}", wavelets),
    }
    if importlib.util.find_spec("cv2"):
        words = f"8 bits, 13 x 13 window, patch size and h / sigma {OPENCV_NLM[kind]}"
        found[OPENCV] = Denoiser(OPENCV, "cv2", words, opencv)
    if importlib.util.find_spec("bm3d"):
        found[BM3D] = Denoiser(BM3D, "bm3d", "default profile", bm3d)
    if kind == GREY:
        found |= _torch_peers()
    return found


def _torch_peers() -> dict[str, Denoiser]:
    """Return NL-Ridge and LIChI, where they are installed or in a checkout: methods for grey images, on torch."""

    def run(
        package: str, name: str, choices: dict[float, dict[str, int]], options: dict[str, Any], y: Array, s: float
    ) -> Array:  # fmt: skip
        import torch

        torch.set_num_threads(numba.get_num_threads())
        chosen = next(choice for limit, choice in choices.items() if s <= limit)
        with torch.no_grad():
            module = getattr(importlib.import_module(package), name)()
            found = module(torch.from_numpy(y.astype(np.float32))[None, None], sigma=s, **chosen, **options)
        return found[0, 0].numpy().astype(np.float64)

    ridge = {"noise_type": "gaussian-homoscedastic", "constraints": "affine", "w": 37, "s": 4}
    lichi = {"constraints": "affine", "method": "n2n", "w": 65, "s": 3}
    found = {}
    for method, package, name, choices, options in (
        (NL_RIDGE, "nlridge", "NLRidge", NL_RIDGE_CHOICES, ridge),
        (LICHI, "lichi", "LIChI", LICHI_CHOICES, lichi),
    ):
        if importlib.util.find_spec(package):
            call = partial(run, package, name, choices, options)
            found[method] = Denoiser(method, package, f"{choices}, {options}", call)
    return found


def _signal_peers() -> dict[str, Denoiser]:
    def wavelets(wavelet: str, levels: int, factor: float) -> Callable[[Array, float], Array]:
        return lambda y, s: spun(y, factor * s, wavelet, levels)

    def tv(weight: float) -> Callable[[Array, float], Array]:
        return lambda y, s: denoise_tv_chambolle(y, weight * s)

    found = {
        f"{WAVELETS}, {w}, {n} levels, {k:g} sigma": Denoiser(WAVELETS, "skimage", SHRINKING, wavelets(w, n, k))
        for w, n, k in SIGNAL_WAVELETS
    }
    found |= {f"{TV}, {k:g} sigma": Denoiser(TV, "skimage", "Chambolle", tv(k)) for k in SIGNAL_WEIGHTS}
    return found


def spun(y: Array, sigma: float, wavelet: str, levels: int) -> Array:
    """Shrink wavelet coefficients for each of 16 shifts, and average (cycle spinning); colours as luma and chroma."""
    colour = y.ndim == 3
    options = {"sigma": sigma, "wavelet": wavelet, "wavelet_levels": levels, "rescale_sigma": colour}
    if colour:  # the change of colours takes 0...1; a shift of the colours would be none of the image
        options |= {"sigma": sigma / 255, "convert2ycbcr": True, "channel_axis": -1}
        return 255 * cycle_spin(y / 255, denoise_wavelet, max_shifts=(3, 3, 0), workers=1, func_kw=options)
    shifts = (15,) if y.ndim == 1 else (3, 3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Level value of", UserWarning)  # signals shorter than 1024
        return cycle_spin(y, denoise_wavelet, max_shifts=shifts, workers=1, func_kw=options)


def eight_bits(y: Array) -> NDArray[np.uint8]:
    return np.clip(np.rint(y), 0, 255).astype(np.uint8)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let compiled loops, linear algebra and the peers use so many threads."""
    kept = numba.get_num_threads()
    numba.set_num_threads(count)
    try:
        with threadpool_limits(count):
            yield
    finally:
        numba.set_num_threads(kept)


def our_digest() -> str:
    """Run every preset once, so that its loops are compiled, and return a digest of the modules that took part."""
    y = np.random.default_rng(0).normal(100, 25, (48, 48, 3))
    for quality in QUALITIES:
        denoise(y, 25.0, quality=quality, channel_axis=-1)
        denoise(y[..., 0], quality=quality)
        denoise(np.tile(y[:, 0, 0], 8), 25.0, quality=quality)
    import nlflow

    root = Path(nlflow.__file__).parent
    digest = hashlib.sha256()
    for name in sorted(sys.modules):
        file = getattr(sys.modules[name], "__file__", None)
        if name.partition(".")[0] == "nlflow" and file and Path(file).is_relative_to(root):
            digest.update(name.encode() + b"\0" + Path(file).read_bytes())
    return digest.hexdigest()
