"""What the machine can do at most, measured in the same run as what is held against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit, prange

from nlflow._numba.exponential import FLAGS, exp2, wide_vectors


@njit(parallel=True, fastmath=FLAGS)
def _exponentials(x: Any, rounds: int, out: Any) -> None:
    """Powers of two of lines that stay in the first cache, again and again."""
    wide_vectors()
    for row in prange(x.shape[0]):
        line, target = x[row], out[row]
        for _ in range(rounds):
            for j in range(x.shape[1]):
                target[j] = exp2(line[j])


def best(task: Callable[[], Any], repeats: int = 7) -> float:
    """Return the least seconds of a task: a limit is what is possible, not what is usual."""
    task()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        task()
        times.append(time.perf_counter() - start)
    return min(times)


@cache
def exponentials(dtype: str) -> float:
    """Return how many exponentials a second all threads form, of numbers in the first cache."""
    x = -np.random.default_rng(0).uniform(0, 20, (64, 2048)).astype(dtype)
    out = np.empty_like(x)
    rounds = 200
    return x.size * rounds / best(lambda: _exponentials(x, rounds, out))


@cache
def products(dtype: str) -> float:
    """Return how many multiplications and additions a second matrix products do."""
    n = 1536
    a = np.random.default_rng(0).normal(size=(n, n)).astype(dtype)
    return 2 * n**3 / best(lambda: a @ a)


@cache
def bandwidth() -> float:
    """Return how many bytes a second are read and written by a copy that no cache holds."""
    a = np.ones(2**26)
    b = np.empty_like(a)
    return 2 * a.nbytes / best(lambda: np.copyto(b, a))
