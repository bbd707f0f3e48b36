"""What all tests share."""

from __future__ import annotations

import gc
import inspect
import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import hypothesis
import pytest

# Threads of BLAS and of torch that wait keep the cores busy, and processes test side by side: with a thread for each
# core small fits took seventy times as long on a busy machine. What xdist and tests start inherits this; `one_thread`
# holds a NumPy that a plugin has loaded before.
os.environ.setdefault("NLFLOW_TEST_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ["NLFLOW_TEST_THREADS"])
os.environ.setdefault("OMP_NUM_THREADS", os.environ["NLFLOW_TEST_THREADS"])

import numba
import numpy as np
from threadpoolctl import threadpool_limits

from tests.covering import sample

if TYPE_CHECKING:
    from tests.commands import Denoiser

# The same examples each time, so that a run can be repeated.
hypothesis.settings.register_profile("nlflow", derandomize=True, deadline=None, database=None, max_examples=25)
hypothesis.settings.load_profile("nlflow")


# The longest file: started first, no process waits for it at the end, and what it compiles the others only load. Beside
# it run rooms that compile hardly anything, or both would compile the same loops at the same time.
LONGEST = "test_public.py"
BESIDE = ("attention", "desk", "plotting", "store")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=("pretended", "rounded", "cuda"), help="run tests of tensors once more on this device"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("device"):
        from tests.on_device import Twice  # which needs torch

        config.pluginmanager.register(Twice(config.getoption("device")))


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Draw the cases of sampled tests, and put the longest file first and what runs beside it next."""
    drawn = _drawn(items)
    for item in items:
        if item.get_closest_marker("sampled") and item not in drawn:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: (item.path.name != LONGEST, item.path.parent.name not in BESIDE))


def pytest_collection_finish() -> None:
    """Keep the collector of garbage from what was imported and collected: it looks through all of it many times."""
    gc.collect()
    gc.freeze()


def _drawn(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that stay of tests marked ``sampled(k)``, the same ones in every run.

    One for each value of the test's first parameter, and more up to k. Of those that are not slow anyway, and whatever
    else was collected, so that all processes draw alike.
    """
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            assert isinstance(item, pytest.Function)
            cases.setdefault(f"{item.path.name}::{item.name.partition('[')[0]}", []).append(item)
    drawn: set[pytest.Item] = set()
    for name, all_of_it in cases.items():
        marker = all_of_it[0].get_closest_marker("sampled")
        assert marker is not None
        values = [_first_value(item) for item in all_of_it]
        drawn.update(all_of_it[at] for at in sample(values, marker.args[0], random.Random(f"tests/{name}")))
    return drawn


def _first_value(item: pytest.Function) -> str:
    """Return the text of the value that the first parameter has in a case: values need have no hash."""
    given = item.callspec.params
    return repr(given[next(name for name in inspect.signature(item.function).parameters if name in given)])


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute in one thread: on a busy machine the start of a thread costs more than all of a small loop.

    ``NLFLOW_TEST_THREADS`` asks for another number.
    """
    threads = int(os.environ["NLFLOW_TEST_THREADS"])
    from nlflow.backends.numba.launch import start_threads

    start_threads()  # before Numba does, which changes torch's number
    before = numba.get_num_threads()
    numba.set_num_threads(min(threads, before))
    # Where BLAS was told so from outside nobody holds it: under a limit that one thread holds no other can set its own.
    told = os.environ.get("OPENBLAS_NUM_THREADS") == str(threads)
    with nullcontext() if told else threadpool_limits(threads, "blas"):
        yield
    numba.set_num_threads(before)


@pytest.fixture
def strict() -> Iterator[None]:
    """Make every overflow, underflow, division by zero and invalid operation an error."""
    with np.errstate(all="raise"):
        yield


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.fixture
def denoiser(monkeypatch: pytest.MonkeyPatch) -> Denoiser:
    """Return a stand-in that is in the place of the denoiser, for commands."""
    from tests.commands import Denoiser  # which loads all commands

    stand_in = Denoiser()
    monkeypatch.setattr("nlflow.denoising.denoise", stand_in)
    return stand_in
