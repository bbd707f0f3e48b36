"""Rates of blocks of an image larger than memory, and what 10^11 pixels take at them: ``python -m benchmarks.rates``.

Processor time of one thread, so other work on the machine hardly enters; the best of some calls.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import keep, machine
from nlflow.backends.threads import one_loop_thread
from nlflow.denoising.frame import Spread
from nlflow.denoising.groupwise import PRESETS, Groups
from nlflow.denoising.large import denoise_array
from nlflow.denoising.options import Options
from nlflow.denoising.pixelwise import Pixels
from nlflow.denoising.residual import REACH

NAME = "rates"
PIXELS, BLOCK, SIGMA = 1e11, 4096, 60.0
TASKS, TASKS_A_SECOND, STORAGE = 11.6, 5000.0, 1e10  # of a block; of Dask's scheduler, and bytes a second: assumptions
# Times that an image of bytes is read: statistics, the flow; the residual, by 64 blocks with those around; sigma.
READS = {"pixels, radius 1, patch 1": 3.6, "pixels, radius 8, patch 7": 2.6, "fast": 2.0, "balanced": 2.0}
# What is measured: side of the image, of its blocks, and the options.
MODES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pixels, radius 1, patch 1": (2048, 1024, {"quality": "pixels", "steps": 1, "search_radius": 1, "patch_size": 1}),
    "pixels, radius 8, patch 7": (1024, 512, {"quality": "pixels", "steps": 1, "search_radius": 8, "patch_size": 7}),
    "fast": (700, 700, {"quality": "fast"}),
    "balanced": (700, 700, {"quality": "balanced"}),
}


def widest(mode: str) -> int:
    """Return the halo of a grey image under the strongest noise."""
    spread = Spread(1.0, 1.01, 1, np.dtype(np.float32), lambda: np.eye(1))
    _, _, words = MODES.get(mode, (0, 0, {"quality": mode}))
    options = Options(**{name: value for name, value in words.items() if name != "quality"})
    flow = Pixels.of(spread, 2, options) if words["quality"] == "pixels" else Groups.of(
        PRESETS[words["quality"]], spread, 2)  # fmt: skip
    return flow.halo[-1] + REACH


def rate(mode: str, repeats: int) -> float:
    """Return the pixels that a core denoises in a second."""
    import dask.array as da

    side, block, words = MODES[mode]
    y, x = np.mgrid[:side, :side]
    clean = 127 + 60 * np.sin(x / 17) * np.cos(y / 23) + 40 * ((x // 64 + y // 64) % 2)
    noisy = (clean + np.random.default_rng(0).normal(0, SIGMA, clean.shape)).astype(np.float32)
    image = da.from_array(noisy, chunks=(block, block))
    seconds = []
    for _ in range(repeats + 1):  # the first one loads what is compiled
        begun = time.process_time()
        denoise_array(image, SIGMA, **words).compute(scheduler="synchronous")
        seconds.append(time.process_time() - begun)
    return side * side / min(seconds[1:])


def told(number: float) -> str:
    """Return two digits of a number, without a power of ten."""
    return f"{float(f'{number:.2g}'):g}" if number < 1e5 else f"{float(f'{number:.2g}'):.0f}"


def row(mode: str, pixels_a_second: float) -> dict[str, Any]:
    """Return what a rate comes to."""
    halo = widest(mode)
    more = (1 + 2 * halo / BLOCK) ** 2
    seconds = BLOCK**2 * more / pixels_a_second  # a block on a core
    return {
        "benchmark": NAME,
        "mode": mode,
        "halo": halo,
        "with halo": f"{more:.3f}",
        "rate": f"{pixels_a_second / 1e6:.2g}",
        "core hours": told(PIXELS * more / pixels_a_second / 3600),
        "seconds a block": told(seconds),
        "scheduler": told(TASKS_A_SECOND / TASKS * seconds),
        "storage": told(STORAGE / (READS[mode] * pixels_a_second)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rates", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder for rates.json")
    arguments = parser.parse_args()
    rows = []
    with one_loop_thread():
        for mode in MODES:
            rows.append(row(mode, rate(mode, arguments.repeats)))
            print(rows[-1])
    if arguments.out is not None:
        keep(arguments.out, NAME, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
