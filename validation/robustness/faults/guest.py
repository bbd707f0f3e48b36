"""A program of somebody else, which calls the package in each way that programs start work: it runs as a script.

It fails where a child, a thread or a worker computes other bits than the process itself. Its arguments are ways.
"""

import asyncio
import locale
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context

import numpy as np

from nlflow import Gaussian, Points, affinity, denoise

SEEDS = range(6)
STARTS = ("fork", "forkserver", "spawn") if sys.platform == "linux" else ("spawn",)


def summed(seed):
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(1000, 2))
    averages = affinity(Gaussian(0.5), Points(points)).average(points)
    return averages.tobytes() + denoise(rng.normal(size=(48, 48)), sigma=1.0).tobytes()


class Drawn:
    def __len__(self):
        return len(SEEDS)

    def __getitem__(self, seed):
        return summed(seed)


def by_threads():
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(summed, SEEDS))


def by_asyncio():
    async def awaited():
        return await asyncio.gather(*(asyncio.to_thread(summed, seed) for seed in SEEDS))

    return asyncio.run(awaited())


def by_pool(start):
    with get_context(start).Pool(2) as pool:
        return pool.map_async(summed, SEEDS).get(240)


def by_loky():
    import joblib

    return joblib.Parallel(2)(joblib.delayed(summed)(seed) for seed in SEEDS)


def by_loader(start):
    from torch.utils.data import DataLoader

    loader = DataLoader(Drawn(), batch_size=None, num_workers=2, multiprocessing_context=start, timeout=240)
    return list(loader)


def by_dask():
    from nlflow.backends.workers import completed

    done = dict(completed([(summed, (seed,)) for seed in SEEDS], jobs=2, scheduler="local"))
    return [done[seed] for seed in SEEDS]


WAYS = {"threads": by_threads, "asyncio": by_asyncio, **{start: lambda start=start: by_pool(start) for start in STARTS},
        "loky": by_loky}  # fmt: skip
if find_spec("torch"):
    WAYS |= {f"DataLoader-{start}": lambda start=start: by_loader(start) for start in STARTS}
if find_spec("distributed"):
    WAYS["Dask"] = by_dask


def main():
    locale.setlocale(locale.LC_ALL, "")  # as programs with windows do
    expected = [summed(seed) for seed in SEEDS]
    for name in sys.argv[1:] or WAYS:
        if WAYS[name]() != expected:
            raise SystemExit(f"{name}: other bits")
        print(name, flush=True)


if __name__ == "__main__":
    main()
