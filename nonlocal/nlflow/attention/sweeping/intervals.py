"""Simultaneous intervals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow.errors import InputError, check_generator

Floats = NDArray[np.float64]
_LEAST = 10  # items: of fewer a bootstrap repeats whole samples
_ENTRIES = 2**22  # of counts at a time
_SPREAD = 0.35  # least standard error of a draw, in units of that of the items


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
    """Return how far the scores (S, n) of settings are from `stock` (n,) over the same items, with bootstrap intervals.

    The largest difference of each draw of items, in units of its own standard error, gives the bound for all
    (single-step max-T, Westfall and Young 1993; symmetric bootstrap-t, Hall 1988, 10.1214/aos/1176350933). Where some
    items change and others do not, errors are as of one item more that rises and one that falls (Bonett and Price 2012,
    10.3102/1076998611411915).
    """
    gains = np.asarray(scores, float) - np.asarray(stock, float)
    count = gains.shape[1]
    if count < _LEAST:
        raise InputError(f"task: got scores of {count} items, expected at least {_LEAST}; give more texts")
    generator = check_generator(rng)
    mean = gains.mean(axis=1)
    scale = np.abs(gains).max(axis=1, keepdims=True)  # differences in units of the largest: squares do not underflow
    gains = np.divide(gains, scale, out=np.zeros_like(gains), where=scale > 0)
    centred = gains - gains.mean(axis=1, keepdims=True)
    error = centred.std(axis=1, ddof=1) / np.sqrt(count)
    # What is constant but for rounding has no spread.
    error[np.ptp(gains, axis=1) <= 8 * np.finfo(float).eps] = 0
    centred[error == 0] = 0
    squares = centred**2
    largest = np.empty(resamples)
    chunk = max(1, _ENTRIES // count)
    for start in range(0, resamples, chunk):
        stop = min(start + chunk, resamples)
        drawn = generator.multinomial(count, np.full(count, 1 / count), size=stop - start) / count
        means = drawn @ centred.T
        # A draw of few items, again and again, has hardly an error of its own.
        own = np.sqrt(np.maximum(drawn @ squares.T - means**2, 0) / (count - 1))
        own = np.maximum(own, _SPREAD * error)
        sizes = np.divide(np.abs(means), own, out=np.zeros_like(means), where=own > 0)
        largest[start:stop] = sizes.max(axis=1)
    bound = np.quantile(largest, level, method="higher")
    error *= scale[:, 0]
    error = _with_two_more(error, scale[:, 0, None] * gains)
    size = np.abs(mean)
    found = np.divide(size, error, out=np.where(size > 0, np.inf, 0.0), where=error > 0)
    p = (1 + (largest >= found[:, None]).sum(axis=1)) / (resamples + 1)
    return Differences(mean, mean - bound * error, mean + bound * error, p)


def _with_two_more(error: Floats, gains: Floats) -> Floats:
    """Return errors (S,) as of one item more that rises and one that falls, where some items (S, n) are equal."""
    count = gains.shape[1]
    changed = np.count_nonzero(gains, axis=1)
    some = (changed > 0) & (changed < count)
    if not some.any():
        return error
    wider = error * np.sqrt(np.divide((changed + 2) * count, changed * (count + 2), where=some, out=np.ones(len(some))))
    usual = np.linalg.norm(gains[some]) / np.sqrt(changed[some].sum())  # size of a change
    return np.asarray(np.where(changed == 0, usual * np.sqrt(2 / (count + 2) / count), wider))
