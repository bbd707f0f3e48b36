"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import hypothesis
import numba
import numpy as np
import pytest

# The same examples each time, so that a run can be repeated.
hypothesis.settings.register_profile("nlflow", derandomize=True, deadline=None, database=None, max_examples=25)
hypothesis.settings.load_profile("nlflow")


# Files with one long test: started first, no process waits for them at the end.
LONGEST = ("test_processors.py", "test_docs.py", "test_public.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files with the longest tests first; all else keeps its place."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Run compiled loops in one thread: on a busy machine the start of a thread costs more than all of a small loop.

    ``NLFLOW_TEST_THREADS`` asks for another number.
    """
    before = numba.get_num_threads()
    numba.set_num_threads(min(int(os.environ.get("NLFLOW_TEST_THREADS", "1")), before))
    yield
    numba.set_num_threads(before)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)
