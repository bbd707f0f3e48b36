"""Lines through measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nlflow.flows.ensemble import students_t

FEWEST = 3
"""Points that a line with a confidence interval needs."""

_EXACT = 1e-9  # relative: what rounding leaves of a slope


@dataclass(frozen=True)
class Line:
    """Least squares y = slope x + intercept, with 95 % confidence intervals of both."""

    slope: float
    slope_half: float
    intercept: float
    intercept_half: float
    points: int


FAR = 4.0
"""Tolerances about what is expected within which an interval has to end: a wider one says too little to agree."""

VERDICTS = """\
agrees: the interval holds what is expected and ends within four tolerances of it ("at least" and "at most": it holds no
number that is off by more than one); disagrees: it lies beyond the tolerance; cannot tell: all else. The tolerance,
told after "to within", is what finite sizes, steps and draws may be off. An interval holds 95 % of the scatter, and
where the finer half of the sizes points."""
"""What the verdicts mean, for whoever reads them."""


@dataclass(frozen=True)
class Fit:
    """A measured number beside the one that theory expects.

    Attributes
    ----------
    name : str
        Its setting.
    what : str
        What was measured, with its unit.
    slope : float
        The number; NaN when there was too little to fit.
    low, high : float
        The 95 % interval of the regression (Student's t), extended to the slope of the finer half of the sizes and
        beyond (see `power_fit`); of other numbers the interval that `what` names.
    expected : float or None
        Number that the theory predicts.
    relation : {'=', '>=', '<=', 'in'}
        Whether the number should equal `expected`, be at least or at most that, or (``'in'``) lie between the bounds
        `low` and `high`.
    tolerance : float
        Allowed distance from `expected`.
    points : int
        Number of measurements that were fitted.
    intercept : float
        That of the regression of logarithms.
    reason : str
        Why there is no number, or how many measurements were left out.
    """

    name: str
    what: str
    slope: float
    low: float
    high: float
    expected: float | None = None
    relation: str = "="
    tolerance: float = 0.0
    points: int = 0
    intercept: float = math.nan
    reason: str = ""

    @property
    def verdict(self) -> str:
        """``'agrees'``, ``'disagrees'`` or ``'cannot tell'``; empty where nothing is expected.

        *agrees* if the interval contains `expected` and ends within four tolerances of it, *disagrees* if all of it is
        farther from `expected` than the tolerance. For '>=' and '<=' it agrees if the interval contains allowed numbers
        and none that are off by more than one tolerance.
        """
        return self._judgement[0]

    @property
    def passed(self) -> bool | None:
        """True where it agrees, False where it disagrees, else None."""
        return {"agrees": True, "disagrees": False}.get(self.verdict)

    @property
    def note(self) -> str:
        """What was left out, and why the verdict is *cannot tell*."""
        return "; ".join(filter(None, (self.reason, self._judgement[1])))

    @property
    def expectation(self) -> str:
        if self.relation == "in" and not math.isnan(self.high):
            return "within its bounds"
        if self.expected is None:
            return ""
        words = {"=": "", ">=": "at least ", "<=": "at most "}[self.relation] + f"{self.expected:.4g}"
        return f"{words}, to within {self.tolerance:.2g}" if self.tolerance else words

    @property
    def _judgement(self) -> tuple[str, str]:
        """The verdict, and why nobody can tell."""
        if self.relation == "in":
            if math.isnan(self.slope) or math.isnan(self.high):
                return "", ""
            return "agrees" if not self.slope > self.high and not self.slope < self.low else "disagrees", ""
        if self.expected is None:
            return "", ""
        if math.isnan(self.slope):
            return "cannot tell", ""
        ends = (self.slope if math.isnan(self.low) else self.low, self.slope if math.isnan(self.high) else self.high)
        if self.relation == "=":
            return _equal(*ends, self.expected, self.tolerance)
        if self.relation == "<=":
            return _above(-ends[1], -ends[0], -self.expected, self.tolerance, f"above {self.expected:.4g}")
        return _above(*ends, self.expected, self.tolerance, f"below {self.expected:.4g}")

    def __str__(self) -> str:
        text = f"{self.name}: {self.what} "
        text += f"{self.slope:.4g}" if math.isfinite(self.slope) else "not fitted"
        text += f" [{self.low:.4g}, {self.high:.4g}]" if math.isfinite(self.low) else ""
        text += f", expected {self.expectation}" if self.expectation else ""
        text += f": {self.verdict}" if self.verdict else ""
        return f"{text} ({self.note})" if self.note else text


def _equal(low: float, high: float, expected: float, tolerance: float) -> tuple[str, str]:
    if high < expected - tolerance or low > expected + tolerance:
        return "disagrees", ""
    if not low <= expected <= high:
        return "cannot tell", f"the interval excludes {expected:.4g}, by less than the tolerance"
    if max(high - expected, expected - low) > FAR * tolerance:
        return "cannot tell", f"the interval ends more than {FAR:g} tolerances from {expected:.4g}"
    return "agrees", ""


def _above(low: float, high: float, bound: float, tolerance: float, beyond: str) -> tuple[str, str]:
    if high < bound - tolerance:
        return "disagrees", ""
    if high < bound:
        return "cannot tell", f"the interval lies {beyond}, by less than the tolerance"
    return ("agrees", "") if low >= bound - tolerance else ("cannot tell", f"the interval reaches {beyond}")


def regress(x: Sequence[float], y: Sequence[float]) -> Line:
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
    return Fit(name, what, math.nan, math.nan, math.nan, expected, relation=relation, reason=reason)


def largest(name: str, what: str, values: Sequence[float], bound: float) -> Fit:
    return Fit(name, what, max(values), math.nan, math.nan, bound, relation="<=", points=len(values))


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
    rounding: float = 0.0,
) -> Fit:
    """Fit log y on log x (on x itself with `exponential`) through the points that are `used`, both > 0.

    Unless points are `sampled`, the interval reaches beyond the slope of the finer half, by twice its difference from
    the slope of all points. `rounding` is the relative error of the smallest y.
    """
    chosen = [(float(a), float(b)) for a, b, use in zip(x, y, used, strict=True) if use]
    sizes = {a for a, _ in chosen}
    if len(sizes) < FEWEST:
        return no_fit(name, what, f"only {len(sizes)} size(s) above rounding level, {FEWEST} are needed", expected)
    points = [(a if exponential else math.log(a), math.log(b)) for a, b in chosen]
    line = regress(*zip(*points, strict=True))
    low, high = _reach(points, line, sampled=sampled, rounding=rounding)
    left_out = len(used) - len(chosen)
    return Fit(
        name, what, line.slope, low, high, expected, tolerance=tolerance, points=line.points, intercept=line.intercept,
        reason=f"{left_out} point(s) left out" if left_out else "",
    )  # fmt: skip


def _reach(points: list[tuple[float, float]], line: Line, *, sampled: bool, rounding: float) -> tuple[float, float]:
    """Return the interval of a slope in the limit of fine sizes, those with the smallest y."""
    sizes = sorted({a for a, _ in points})
    count = max(FEWEST, len(sizes) // 2)
    rising = points[int(np.argmin([b for _, b in points]))][0] == sizes[0]
    fine = set(sizes[:count] if rising else sizes[-count:])
    finer = regress(*zip(*((a, b) for a, b in points if a in fine), strict=True))
    ends = [line.slope - line.slope_half, line.slope + line.slope_half, finer.slope]
    ends += [] if sampled else [finer.slope + 2 * (finer.slope - line.slope)]
    x, y = np.array(points).T
    moved = np.abs(x - x.mean()) * np.exp(y.min() - y)  # of the slope, as each point moves
    unsure = _EXACT * abs(line.slope) + rounding * float(moved.sum() / ((x - x.mean()) ** 2).sum())
    return min(ends) - unsure, max(ends) + unsure
