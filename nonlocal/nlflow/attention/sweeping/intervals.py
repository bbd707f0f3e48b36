"""Paired differences of many settings from one, with intervals that hold for all of them at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.errors import InputError

Floats = NDArray[np.float64]

_LEAST = 10  # items: of fewer a bootstrap repeats whole samples
_ENTRIES = 2**22  # of counts at a time


@dataclass(frozen=True)
class Differences:
    """Mean differences (S,) of S settings, with the ends of their intervals and p-values, all of them simultaneous."""

    mean: Floats
    low: Floats
    high: Floats
    p: Floats


def paired_differences(
    scores: Any, stock: Any, *, level: float = 0.95, resamples: int = 10_000, rng: Any = 0
) -> Differences:
    """Return how far settings are from one of them, over the same items, with intervals by the bootstrap of max \\|t\\|.

    Items are drawn again, the same for all settings. The largest studentized difference of each draw from what was
    found gives the bound for all: at level 0.95, all intervals hold together in 95 % of experiments, however the
    settings depend on each other (single-step max-T, Westfall and Young 1993). So the best may be picked afterwards.

    Parameters
    ----------
    scores : array of shape (S, n)
        Of each setting, for each item.
    stock : array of shape (n,)
        What they are compared with.
    level : float
    resamples : int
        O(resamples S n) operations.
    rng : numpy.random.Generator or seed

    Raises
    ------
    InputError
        For fewer than 10 items.
    """
    gains = np.asarray(scores, float) - np.asarray(stock, float)
    count = gains.shape[1]
    if count < _LEAST:
        raise InputError(f"task: got scores of {count} items, expected at least {_LEAST}; give more texts")
    generator = np.random.default_rng(rng)
    mean = gains.mean(axis=1)
    scale = np.abs(gains).max(axis=1, keepdims=True)  # differences in units of the largest: squares do not underflow
    gains = np.divide(gains, scale, out=np.zeros_like(gains), where=scale > 0)
    centred = gains - gains.mean(axis=1, keepdims=True)
    error = centred.std(axis=1, ddof=1) / np.sqrt(count)
    # What is constant but for rounding has no spread.
    error[np.ptp(gains, axis=1) <= 8 * np.finfo(float).eps] = 0
    largest = np.empty(resamples)
    chunk = max(1, _ENTRIES // count)
    for start in range(0, resamples, chunk):
        stop = min(start + chunk, resamples)
        drawn = generator.multinomial(count, np.full(count, 1 / count), size=stop - start) / count
        shift = drawn @ centred.T
        spread = np.sqrt(np.maximum(drawn @ np.square(centred).T - np.square(shift), 0) / (count - 1))
        largest[start:stop] = _ratios(shift, spread, error > 0).max(axis=1)
    bound = float(np.quantile(largest, level, method="higher"))
    found = _ratios(mean / np.where(scale[:, 0] > 0, scale[:, 0], 1), error, np.ones(len(mean), bool))
    p = (1 + (largest >= found[:, None]).sum(axis=1)) / (resamples + 1)
    reach = np.where(error > 0, bound * error * scale[:, 0], 0.0)
    return Differences(mean, mean - reach, mean + reach, p)


def _ratios(shift: Floats, spread: Floats, wanted: NDArray[np.bool_]) -> Floats:
    """Return |shift| / spread; 0 for 0 / 0 and what is not wanted, infinite beyond a spread of 0."""
    size = np.abs(shift)
    ratios = np.divide(size, spread, out=np.where(size > 0, np.inf, 0.0), where=spread > 0)
    return np.where(wanted, ratios, 0.0)
