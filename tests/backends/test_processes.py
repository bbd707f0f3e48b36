"""Compiled loops in the processes of other people: forked ones, many threads, no cache, and compilers switched off."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numba import types
from numba.core import caching

from nlflow import Gaussian, NlflowWarning, Points, affinity
from nlflow.backends.numba import loading
from validation.robustness import ROOT
from validation.robustness.faults import guest


def summed(seed: int) -> bytes:
    points = np.random.default_rng(seed).normal(size=(1000, 2))
    return bytes(affinity(Gaussian(0.5), Points(points), method="pairwise").average(points).tobytes())


def run(*words: str, **environment: str) -> None:
    """Run the program of somebody else, which fails where a way to start work gives other bits."""
    paths = [str(ROOT / "nonlocal"), str(ROOT)]
    given = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | environment
    ended = subprocess.run([sys.executable, *words], env=given, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    ways = words[words.index(guest.__file__) + 1 :] or guest.WAYS
    assert ended.stdout.split() == list(ways)


def test_threads_of_the_caller():
    expected = [summed(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(summed, range(4))) == expected


def test_loops_are_compiled_in_one_thread_at_a_time():
    """The launcher that they are linked to is a symbol of the process: a second one would be freed while in use."""
    inside: list[int] = []

    class Dispatcher:
        def compile(self, signature: object) -> None:
            inside.append(1)
            time.sleep(0.05)
            assert inside.pop() == 1
            assert not inside

    summed(0)  # the compiler has begun
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: loading.compiled(Dispatcher(), None), range(3)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork, which Windows lacks")
def test_a_forked_child_computes_the_same():
    """The parent's threads do not exist in the child: OpenMP of GNU would end it, other pools would wait for ever."""
    expected = [summed(seed) for seed in range(2)]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map_async(summed, range(2)).get(60) == expected


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["omp", "workqueue", "tbb"])
def test_each_threading_layer(layer: str) -> None:
    if layer == "tbb":
        pytest.importorskip("numba.np.ufunc.tbbpool", reason="needs tbb", exc_type=ImportError)
    run(guest.__file__, NUMBA_THREADING_LAYER=layer, NUMBA_NUM_THREADS="4")


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["default", "workqueue"])
def test_torch_keeps_the_threads_that_its_user_has_set(layer: str) -> None:
    """GNU OpenMP gives the thread that starts Numba's threads their number, and torch asks the same library."""
    pytest.importorskip("torch", reason="torch is optional")
    program = (
        "import torch; torch.set_num_threads(3); torch.get_num_threads();"
        "import nlflow, numpy as np; from nlflow.backends import threads;"
        "threads.described(); nlflow.denoise(np.eye(40), 1.0); print(torch.get_num_threads())"
    )
    given = os.environ | {"NUMBA_THREADING_LAYER": layer, "NUMBA_NUM_THREADS": "2"}
    ended = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, timeout=600)
    assert ended.stdout.split()[-1:] == ["3"], ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["-O"], ["-W", "error"]], ids=" ".join)
def test_switches_of_python(flags: list[str]) -> None:
    run(*flags, guest.__file__, "threads", "fork" if hasattr(os, "fork") else "spawn")


@pytest.mark.slow
def test_a_layer_that_is_not_there_is_named() -> None:
    program = "import nlflow, numpy as np; nlflow.denoise(np.eye(40), 1.0)"
    given = os.environ | {"NUMBA_THREADING_LAYER": "none"}
    ended = subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, timeout=600)
    assert "InputError: NUMBA_THREADING_LAYER: got 'none', which cannot be loaded here" in ended.stderr


@pytest.mark.parametrize("count", ["5000", *(pytest.param(count, marks=pytest.mark.slow) for count in ("0", "-3"))])
def test_a_number_of_threads_that_is_none_is_named(count: str) -> None:
    given = os.environ | {"NUMBA_NUM_THREADS": count}
    command = [sys.executable, "-m", "nlflow.desk.commands.main", "info"]
    ended = subprocess.run(command, env=given, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"nonlocal: error: NUMBA_NUM_THREADS: got {count}, expected a number of threads")


@pytest.mark.slow
def test_a_notebook_runs_loops_in_threads_and_in_children() -> None:
    """Its kernel runs a loop of events, and its threads are not those of a program."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel")
    import nbformat

    source = f"""
import asyncio, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "nonlocal")!r}]
from validation.robustness.faults import guest
expected = [guest.summed(seed) for seed in guest.SEEDS]
awaited = list(await asyncio.gather(*(asyncio.to_thread(guest.summed, seed) for seed in guest.SEEDS)))
[found == expected for found in (awaited, guest.by_threads(), guest.by_pool("{guest.STARTS[0]}"), guest.by_loky())]
"""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
    assert book.cells[0].outputs[-1]["data"]["text/plain"] == "[True, True, True, True]"


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
def test_compilers_switched_off_for_other_functions():
    run(guest.__file__, NUMBA_DISABLE_JIT="1")
