"""Seconds and peak memory of each denoiser on one grey photograph of 512 x 512, sigma 25.

Time: the methods take turns, first all on one thread, which is what the targets are held against, then all on as many
as there are. Memory: each method has a process to itself, in which a corner of 48 x 48 is denoised first, so that what
the packages themselves take does not count; peak resident memory for the whole image, on as many threads as there are,
less what was resident before.

    python -m benchmarks.denoising.cost METHOD [--side 512]

prints the memory of one method in bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
from skimage.data import camera
from tqdm import tqdm

from benchmarks.denoising.methods import BM3D, ESTIMATED, GREY, Array, denoisers, threads
from benchmarks.denoising.tasks import add_noise
from benchmarks.harness import interleaved
from benchmarks.resident import peak_of

SIGMA, SIDE, QUICK_SIDE = 25.0, 512, 128
# Those that take seconds, and how often each kind is repeated after a turn that does not count.
SLOW = ("balanced", "best", BM3D)
REPEATS, SLOW_REPEATS = 7, 3


def noisy_camera(side: int) -> Array:
    return add_noise(camera().astype(float), SIGMA)[:side, :side].copy()


def methods() -> dict[str, Callable[[Array, float], Array]]:
    return {name: method.call for name, method in denoisers(GREY).items() if name != ESTIMATED}


def times(side: int = SIDE, repeats: tuple[int, int] = (REPEATS, SLOW_REPEATS)) -> dict[int, dict[str, float]]:
    """Return the median seconds of each method, by the number of threads."""
    noisy, found = noisy_camera(side), {}
    for count in sorted({1, numba.config.NUMBA_NUM_THREADS}):
        found[count] = {}
        with threads(count):
            for slow, turns in ((False, repeats[0]), (True, repeats[1])):
                tasks = {name: call for name, call in methods().items() if (name in SLOW) == slow}
                with tqdm(total=(turns + 1) * len(tasks), desc=f"time, {count} threads", unit="call") as bar:

                    def counted(call: Callable[[Array, float], Array], bar: Any = bar) -> None:
                        call(noisy, SIGMA)
                        bar.update()

                    found[count] |= interleaved({n: partial(counted, c) for n, c in tasks.items()}, turns)
    return found


def memory(side: int = SIDE) -> dict[str, float]:
    """Return the peak memory of each method in bytes a pixel."""
    found = {}
    for name in tqdm(methods(), desc="memory", unit="method"):
        command = [sys.executable, "-m", "benchmarks.denoising.cost", name, "--side", str(side)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[name] = int(done.stdout.split()[-1]) / side**2
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of one denoiser, in bytes.")
    parser.add_argument("method", choices=methods(), metavar="METHOD", help=f"one of: {'; '.join(methods())}")
    parser.add_argument("--side", type=int, default=SIDE, help="the image is SIDE x SIDE")
    arguments = parser.parse_args()
    call, noisy = methods()[arguments.method], noisy_camera(arguments.side)
    call(noisy[:48, :48].copy(), SIGMA)
    print(peak_of(lambda: call(noisy, SIGMA)))


if __name__ == "__main__":
    main()
