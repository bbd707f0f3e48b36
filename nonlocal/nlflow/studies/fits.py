"""Straight lines through measurements, with confidence intervals, and what the theory expects of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nlflow.flows.ensemble import students_t

FEWEST = 3
"""Points that a line with a confidence interval needs."""


@dataclass(frozen=True)
class Line:
    """Least squares y = slope x + intercept, with 95 % confidence intervals of both."""

    slope: float
    slope_half: float
    intercept: float
    intercept_half: float
    points: int


@dataclass(frozen=True)
class Fit:
    """One number that a study is about, and what it should be.

    Attributes
    ----------
    name : str
        The setting that it belongs to.
    what : str
        What was measured, with its unit.
    slope : float
        The number: for most kinds the slope of a regression. NaN when there was too little to fit; `reason` says why.
    low, high : float
        95 % confidence interval, from Student's t of the regression, unless `what` says otherwise.
    expected : float or None
        What the theory says; None where it says nothing.
    relation : {'=', '>='}
        Whether the number should equal `expected` or be at least that.
    tolerance : float
        How far from `expected` still counts as equal, since sizes are finite; for sampled measurements (`sampled`) the
        interval counts in addition.
    passed : bool or None
        Whether the number is as expected; None when nothing is expected, or nothing could be fitted.
    points : int
        Measurements that went into it.
    intercept : float
        Of the regression, in the logarithms that were fitted.
    reason : str
    """

    name: str
    what: str
    slope: float
    low: float
    high: float
    expected: float | None = None
    relation: str = "="
    tolerance: float = 0.0
    passed: bool | None = None
    points: int = 0
    intercept: float = math.nan
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.name}: {self.what} "
        text += f"{self.slope:.4g} [{self.low:.4g}, {self.high:.4g}]" if math.isfinite(self.slope) else "not fitted"
        if self.expected is not None:
            text += f", expected {'at least ' if self.relation == '>=' else ''}{self.expected:.4g}"
        if self.passed is not None:
            text += ": as expected" if self.passed else ": DIFFERS from what is expected"
        return f"{text} ({self.reason})" if self.reason else text


def regress(x: Sequence[float], y: Sequence[float]) -> Line:
    """Return the least-squares line through at least three points.

    The intervals are slope ± t(0.975, n - 2) s / sqrt(sum (x - mean x)^2), with s^2 the sum of squared residuals over
    n - 2, and that of the intercept likewise. `ValueError` for fewer points, or when all x are equal.
    """
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    n = a.size
    spread = float(((a - a.mean()) ** 2).sum())
    if n < FEWEST or spread == 0:
        raise ValueError(f"got {n} points, expected at least {FEWEST} with different x")
    slope = float(((a - a.mean()) * (b - b.mean())).sum() / spread)
    intercept = float(b.mean() - slope * a.mean())
    variance = float(((b - slope * a - intercept) ** 2).sum()) / (n - 2)
    quantile = students_t(n - 2)
    about_zero = variance * (1 / n + float(a.mean()) ** 2 / spread)
    return Line(slope, quantile * math.sqrt(variance / spread), intercept, quantile * math.sqrt(about_zero), n)


def no_fit(name: str, what: str, reason: str, expected: float | None = None, relation: str = "=") -> Fit:
    """Return a fit that could not be made, with the reason."""
    return Fit(name, what, math.nan, math.nan, math.nan, expected, relation=relation, reason=reason)


def at_least(fit: Fit, bound: float) -> Fit:
    """Return a fit that should not be below a bound, with the verdict; none where its interval holds the bound.

    A number of three points that is far above the bound by chance proves nothing.
    """
    if fit.slope >= bound > fit.low:
        why = f"the interval reaches below {bound:.4g}"
        return replace(fit, passed=None, reason=f"{fit.reason}; {why}" if fit.reason else why)
    return replace(fit, passed=fit.slope >= bound)


def range_fit(name: str, what: str, values: Sequence[float], worst: float, *, expected: float, tolerance: float) -> Fit:
    """Return the worst of several measurements that should all be `expected`, with their range as the interval."""
    return Fit(
        name, what, worst, min(values), max(values), expected, tolerance=tolerance,
        passed=abs(worst - expected) <= tolerance, points=len(values),
    )  # fmt: skip


def power_fit(
    name: str,
    what: str,
    x: Sequence[float],
    y: Sequence[float],
    used: Sequence[bool],
    *,
    expected: float | None = None,
    tolerance: float = 0.0,
    sampled: bool = False,
    exponential: bool = False,
) -> Fit:
    """Fit log y on log x (on x itself with `exponential`) through the points that are `used`, both > 0.

    NaN with a reason where fewer than three sizes are left. With `sampled` the points scatter at random: then the
    confidence interval is added to the tolerance. Points of a deterministic sequence scatter since the sequence is not
    straight, and a wide interval excuses nothing.
    """
    chosen = [(float(a), float(b)) for a, b, use in zip(x, y, used, strict=True) if use]
    sizes = len({a for a, _ in chosen})
    if sizes < FEWEST:
        return no_fit(name, what, f"only {sizes} size(s) above rounding level, {FEWEST} are needed", expected)
    across = [a if exponential else math.log(a) for a, _ in chosen]
    line = regress(across, [math.log(b) for _, b in chosen])
    passed = None
    if expected is not None:
        allowed = tolerance + (line.slope_half if sampled else 0.0)
        passed = abs(line.slope - expected) <= allowed
    left_out = len(used) - len(chosen)
    return Fit(
        name, what, line.slope, line.slope - line.slope_half, line.slope + line.slope_half, expected,
        tolerance=tolerance, passed=passed, points=line.points, intercept=line.intercept,
        reason=f"{left_out} point(s) left out" if left_out else "",
    )  # fmt: skip
