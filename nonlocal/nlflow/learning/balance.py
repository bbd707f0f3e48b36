"""What is added to scores so that classes have given shares."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Floats

_COOLER = 0.5  # a temperature over the one before
_COLDEST = 1e-13  # of the spread of scores
_NEWTON = 4  # steps at a temperature
_BEYOND = 600.0  # logarithm of a factor that a float no longer holds with its neighbours


def quotas(prior: Floats, count: int) -> NDArray[np.intp]:
    exact = prior / prior.sum() * count
    whole = np.floor(exact).astype(np.intp)
    order = np.argsort(whole - exact, kind="stable")
    whole[order[: count - int(whole.sum())]] += 1
    return np.asarray(whole, np.intp)


def counts_of(scores: Floats) -> NDArray[np.intp]:
    return np.asarray(np.bincount(scores.argmax(axis=1), minlength=scores.shape[1]), np.intp)


def shifts(scores: Floats, wanted: NDArray[np.intp]) -> Floats:
    """Return numbers b with which about `wanted` rows have each class as the largest of scores + b.

    They are prices of the best assignment with these counts (Calder, Cook, Thorpe and Slepcev 2020). Scores (N, C) are
    -inf where a row can never have a class.
    """
    highest = scores.max(axis=1, keepdims=True)
    s = scores - highest
    spread = float(-s[np.isfinite(s)].min(initial=0.0))
    if spread == 0:
        return np.zeros(len(wanted))
    aims = np.maximum(wanted, 0.5)  # a class that nobody is to have has no lowest price
    aims *= len(s) / aims.sum()
    b = best = np.zeros(len(wanted))
    missed, temperature = np.inf, spread
    while temperature > _COLDEST * spread:
        for _ in range(_NEWTON):
            off = int(np.abs(counts_of(s + b) - wanted).sum())
            if off < missed:
                missed, best = off, b
            if not missed:
                return best
            b, calm = _newton(s, b, aims, temperature)
            if calm:
                break
        temperature *= _COOLER
    return best


def _newton(s: Floats, b: Floats, aims: Floats, temperature: float) -> tuple[Floats, bool]:
    """Return prices after a step of Newton's method, shortened until it descends, and whether none was needed."""
    value, shares = _smoothed(s, b, aims, temperature)
    slope = shares.sum(axis=0) - aims
    if np.abs(slope).max() < 0.01:  # of a sample
        return b, True
    curvature = (np.diag(shares.sum(axis=0)) - shares.T @ shares) / temperature
    # Constants do not matter, and where no row hesitates nothing curves.
    floor = 1e-6 * max(float(np.trace(curvature)), 1e-9 * len(s) / temperature) + 1e-9 / temperature
    step = -np.linalg.solve(curvature + floor * np.eye(len(b)), slope)
    step *= min(1.0, 20 * temperature / float(np.abs(step).max()))
    while np.abs(step).max() >= 1e-3 * _COLDEST * temperature:
        trial = b + step
        if _smoothed(s, trial, aims, temperature)[0] <= value + 1e-4 * float(slope @ step):
            return trial, False
        step = step / 4
    return b, True


def _smoothed(s: Floats, b: Floats, aims: Floats, temperature: float) -> tuple[float, Floats]:
    """Return the smoothed sum of largest scores less what was asked for, and the shares of each row, (N, C)."""
    raised = (s + b) / temperature
    top = raised.max(axis=1, keepdims=True)
    shares = np.exp(raised - top)
    total = shares.sum(axis=1, keepdims=True)
    return temperature * float((top + np.log(total)).sum()) - float(aims @ b), shares / total


def factors(scores: Floats, wanted: NDArray[np.intp]) -> Floats:
    """Return factors with which about `wanted` rows have each class as their largest score."""
    scores = scores[(scores > 0).any(axis=1)]
    with np.errstate(divide="ignore"):
        found = shifts(np.log(np.maximum(scores, 0)), quotas(wanted.astype(np.float64), len(scores)))
    return np.exp(np.clip(found, -_BEYOND, _BEYOND))
