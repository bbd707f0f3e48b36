"""What the machine can do at most, measured in the same run as what is held against it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic

from nlflow.backends.numba.loading import loader
from nlflow.backends.numba.vectors import Vectors


def best(task: Callable[[], Any], repeats: int = 7) -> float:
    """Return the least seconds of a task: a limit is what is possible, not what is usual."""
    task()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        task()
        times.append(time.perf_counter() - start)
    return min(times)


@intrinsic
def _power_of_two(typingctx: Any, line: Any, count: Any, out: Any) -> Any:
    signature = types.void(line, count, out)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        v = Vectors(builder, signature.args[0].dtype.bitwidth)
        line, out = (context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 2))

        def step(j: Any, state: Any) -> Any:
            v.store(v.exp2(v.load(line, j)), out, j)
            return state

        v.repeat(arguments[1], v.lanes, [], step)
        return context.get_dummy_value()

    return signature, codegen


@njit(parallel=True, cache=True)
def powers_of_two(x: Any, rounds: Any, out: Any) -> None:
    """Powers of two of every line (a multiple of 64 bytes), `rounds` times: what sums cannot be faster than."""
    for row in prange(x.shape[0]):
        for _ in range(rounds):
            _power_of_two(x[row], x.shape[1], out[row])


_loop = loader(lambda f: {"powers_of_two": (powers_of_two, f[:, ::1], types.int64, f[:, ::1])})


@cache
def exponentials(dtype: str) -> float:
    """Return how many powers of two a second all threads form, of lines that stay in the first cache."""
    x = -np.random.default_rng(0).uniform(0, 20, (64, 2048)).astype(dtype)
    out = np.empty_like(x)
    rounds, powers = 200, _loop("powers_of_two", dtype)
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
