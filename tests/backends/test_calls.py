"""Calls of compiled functions by their address."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit, prange, types

from nlflow.backends.numba.calls import Callee, caller
from nlflow.backends.numba.loading import loader


@njit
def add_row(row: Any, number: Any, out: Any) -> None:
    if number < 0:
        raise ValueError("expected a number >= 0")
    for j in range(len(out)):
        out[j] += number * row[j]


_add_row = caller(add_row)


@njit(parallel=True)
def add_rows(address: Any, rows: Any, number: Any, out: Any) -> None:
    for i in prange(rows.shape[0]):
        _add_row(address, (rows[i], number, out[i]))


@njit
def add_first(address: Any, rows: Any, number: Any, out: Any) -> None:
    _add_row(address, (rows[0], number, out[0]))


def _loops(real: Any) -> dict[str, tuple[Any, ...]]:
    line, plane = (types.Array(real, dimensions, "C") for dimensions in (1, 2))
    called = Callee(add_row, (line, real, line))
    return {name: (loop, called, plane, real, plane) for name, loop in (("all", add_rows), ("first", add_first))}


loop = loader(_loops)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.sampled(1)
def test_a_loop_calls_what_was_compiled_for_its_types(dtype: str) -> None:
    rows, out = np.arange(12, dtype=dtype).reshape(4, 3), np.ones((4, 3), dtype)
    loop("all", dtype)(rows, np.dtype(dtype).type(2), out)
    np.testing.assert_array_equal(out, 1 + 2 * rows)


def test_errors_come_back() -> None:
    with pytest.raises(ValueError, match="expected a number >= 0"):
        loop("first")(np.ones((1, 2)), -1.0, np.ones((1, 2)))


def test_nothing_is_called_for_types_that_it_was_not_compiled_for() -> None:
    """The address alone does not tell them; memory would be overwritten."""
    with pytest.raises(TypeError, match="add_row is not compiled for"):
        add_first.compile(types.void(types.intp, *(types.Array(types.complex128, 2, "C"),) * 3))
