"""What the machine can do at most, measured in the same run as what is held against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from nlflow.backends.numba.pairwise import loop


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
    """Return how many powers of two a second all threads form, of lines that stay in the first cache."""
    x = -np.random.default_rng(0).uniform(0, 20, (64, 2048)).astype(dtype)
    out = np.empty_like(x)
    rounds, powers = 200, loop("powers_of_two", dtype)
    return x.size * rounds / best(lambda: powers(x, rounds, out))


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
