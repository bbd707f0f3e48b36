"""Compiled loops in the processes of other people: forked ones, many threads, no cache, and compilers switched off."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numba import types
from numba.core import caching

from nlflow import Gaussian, NlflowWarning, Points, affinity
from nlflow.backends.numba import loading

# What each process computes: a loop over pairs in threads, to the bit.
PROGRAM = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
import joblib
import numpy as np
from nlflow import Gaussian, Points, affinity, denoise

SEEDS = range(6)

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

async def awaited():
    return await asyncio.gather(*(asyncio.to_thread(summed, seed) for seed in SEEDS))

def main():
    expected = [summed(seed) for seed in SEEDS]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(summed, SEEDS)) == expected, "threads"
    assert asyncio.run(awaited()) == expected, "asyncio"
    starts = ["fork", "forkserver", "spawn"] if sys.platform == "linux" else ["spawn"]
    for start in starts:
        with get_context(start).Pool(2) as pool:
            assert pool.map_async(summed, SEEDS).get(120) == expected, start
    assert joblib.Parallel(2)(joblib.delayed(summed)(seed) for seed in SEEDS) == expected, "loky"
    try:
        from torch.utils.data import DataLoader
    except ImportError:
        return
    for start in starts:
        loader = DataLoader(Drawn(), batch_size=None, num_workers=2, multiprocessing_context=start, timeout=120)
        assert list(loader) == expected, "DataLoader, " + start

if __name__ == "__main__":
    main()
"""


def summed(seed: int) -> bytes:
    points = np.random.default_rng(seed).normal(size=(1000, 2))
    return bytes(affinity(Gaussian(0.5), Points(points)).average(points).tobytes())


def run(tmp_path, program=PROGRAM, **environment: str) -> str:
    path = tmp_path / "program.py"
    path.write_text(program)
    given = {name: value for name, value in os.environ.items() if name not in environment} | {
        name: value for name, value in environment.items() if value
    }
    ended = subprocess.run([sys.executable, path], env=given, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def test_threads_of_the_caller():
    expected = [summed(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(summed, range(4))) == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which Windows lacks")
def test_a_forked_child_computes_the_same():
    """The parent's threads do not exist in the child: OpenMP of GNU would end it, other pools would wait for ever."""
    expected = [summed(seed) for seed in range(2)]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map_async(summed, range(2)).get(60) == expected


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["omp", "workqueue", "tbb"])
def test_each_threading_layer(layer, tmp_path):
    if layer == "tbb":
        pytest.importorskip("numba.np.ufunc.tbbpool", reason="needs tbb", exc_type=ImportError)
    run(tmp_path, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="4")


def fill(function: Any) -> float:
    out = np.zeros(1)
    loading.compiled(loading.njit(cache=True)(function), types.void(types.float64[::1]))(out)
    return float(out[0])


@pytest.mark.parametrize(
    "fails",
    [
        "CompileResultCacheImpl.__init__",
        pytest.param("Cache.load_overload", marks=pytest.mark.slow),
        "Cache._save_overload",
    ],
)
def test_a_cache_that_cannot_be_written_is_said_once(fails, monkeypatch):
    """Where there is no home, nothing is kept; where a disk is full or a file is broken, Numba says it later."""
    owner, name = fails.split(".")
    error = RuntimeError if name == "__init__" else OSError

    def refuse(*_: object) -> None:
        raise error("no space is left")

    monkeypatch.setattr(getattr(caching, owner), name, refuse)
    monkeypatch.setattr(loading, "uncached", False)
    with pytest.warns(NlflowWarning, match="NUMBA_CACHE_DIR") as said:
        filled = [fill(lambda out: out.fill(3.0)) for _ in range(2)]
    assert filled == [3.0, 3.0]
    assert len(said) == 1


@pytest.mark.slow
def test_compilers_switched_off_for_other_functions(tmp_path):
    run(tmp_path, NUMBA_DISABLE_JIT="1")
