"""How many threads there are, and how each kind is held to one."""

from __future__ import annotations

import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import numba
import pytest
import threadpoolctl

from nlflow.backends import threads


def blas_counts() -> set[int]:
    return {library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"}


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert threads.cores() >= 1
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(get_num_threads=lambda: 7))
    assert threads.counts() == {"numba": numba.get_num_threads(), "torch": 7}
    monkeypatch.delitem(sys.modules, "torch")
    assert threads.counts() == {"numba": numba.get_num_threads()}


def test_the_pool_is_the_first_that_loads() -> None:
    assert threads._pool("workqueue", ("tbb", "omp")) == "workqueue"
    assert threads._pool("default", ("workqueue", "omp")) == "workqueue"
    loaded = threads._pool("default", ("tbb", "omp", "workqueue"))
    assert loaded in ("tbb", "omp", "workqueue")
    assert threads._pool("forksafe", ()) in ("tbb", "omp")
    assert threads.described().keys() == {"cpu_threads", "numba_threads", "numba_threading_layer"}


def test_one_loop_thread() -> None:
    """Callers overlap, and each may go further inside."""
    before = numba.get_num_threads()
    numba.set_num_threads(numba.config.NUMBA_NUM_THREADS)
    both = threading.Barrier(2)

    def inside() -> int:
        with threads.one_loop_thread(), threads.one_loop_thread():
            both.wait(20)
            return numba.get_num_threads()

    try:
        with ThreadPoolExecutor(2) as pool:
            assert [job.result(20) for job in [pool.submit(inside) for _ in range(2)]] == [1, 1]
        assert numba.get_num_threads() == numba.config.NUMBA_NUM_THREADS
    finally:
        numba.set_num_threads(before)


def test_one_blas_thread() -> None:
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        for context in (threads.one_blas_thread, threads.blas_limited):
            with context() as told:
                assert blas_counts() == {1}
                assert context is not threads.one_blas_thread or told == 2
                with threads.blas_limited():
                    assert blas_counts() == {1}
            assert blas_counts() == {2}


def test_one_torch_thread() -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with threads.one_torch_thread():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
