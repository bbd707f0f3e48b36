"""Random slow chains against 60 digits: every quantity is right to 1e-10, or refused (a few of many)."""

import pytest

from validation.robustness.chains import QUANTITIES, compare


@pytest.mark.numerical
def test_random_chains():
    counts, _, wrong = compare(6, seed=7, states=5)
    assert not wrong
    assert all(counts[name]["right"] > 0 for name in QUANTITIES)
