"""What all kernels share."""

# Functionals use K(x, y) = k(x, y) + k(y, x); a paper that states K itself therefore has k = K/2 (``amplitude=0.5``).

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import cdist

from nlflow._array import Array, Floats, is_numpy, namespace, underflowing
from nlflow.errors import InputError, check_number
from nlflow.kernels.expressions import FUNCTIONS, SQUARED, Expression, value
from nlflow.kernels.forms import rate, traced, weight

_DISTANCES: Final = np.geomspace(1e-30, 1e30, 6001)
_PARTS, _ROUNDS = 256, 6  # after which neighbours of those distances are less than a rounding apart
_COUNTS: Final = 4e-6  # of k(0): smaller weights are rounded in float32 beside those that count
_NOTHING: Final = 1e-30  # of k(0)
_RADII: Final = np.append(
    np.geomspace(1e-9, 1e9, 181) * (1 + 1e-9), np.linspace(0.03, 12, 200)
)  # no corner of a formula
_SAME: Final = 1e-6  # of a weight, beside those that count
_COMPILED: Final = 400  # operations
_DOUBLE: Final = np.finfo(np.float64)
_BEYOND: Final = 1e3  # times the scale: tails that fall slowly count that far out
_ONE: Final = 1e-6  # log k(0) of a kernel that is 1 at 0, with the rounding of float32


def farthest(counts: Callable[[Floats], NDArray[np.bool_]], radii: Floats) -> float:
    # Found on a grid of distances, and on ever finer ones around the last that counts.

    def last(radii: Floats) -> int:
        found = np.flatnonzero(counts(radii))
        return int(found[-1]) if len(found) else -1

    i = last(radii)
    if i < 0:
        return float(radii[0])
    if i == len(radii) - 1:
        return math.inf
    for _ in range(_ROUNDS):
        radii = np.linspace(radii[i], radii[i + 1], _PARTS + 1)
        i = min(max(last(radii), 0), _PARTS - 1)  # what counts at both ends is known
    return float(radii[i + 1])


def fall(rtol: float) -> float:
    """Return -log(rtol), infinity for 0; `InputError` unless 0 <= rtol <= 1."""
    part = check_number("rtol", rtol, minimum=0)
    if part > 1:
        raise InputError(f"rtol: got {part:g}, expected a part of k(0), from 0 to 1")
    return abs(math.log(part)) if part > 0 else math.inf


@dataclass(frozen=True, kw_only=True)
class Kernel(ABC):
    """Base of all kernels k(x, y) >= 0.

    Parameters
    ----------
    amplitude : float
        Factor > 0 of the formula; averages do not depend on it.
    """

    amplitude: float = 1.0

    formula: ClassVar[str]
    positive: ClassVar[tuple[str, ...]] = ()
    """Names of further parameters that must be > 0."""
    symmetric: ClassVar[bool] = True
    positive_semidefinite: ClassVar[bool] = False
    dimensions: ClassVar[float] = math.inf
    """Up to how many it is positive semidefinite, where it is."""

    def __post_init__(self) -> None:
        for name in ("amplitude", *self.positive):
            self._set(name, check_number(name, getattr(self, name), minimum=0, strict=True))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def compared(self) -> Any:
        """The kernel of what `map_features` returns."""
        return self

    @property
    def positional(self) -> bool:
        """Whether it compares positions of nodes if no features are given."""
        return isinstance(self.compared, RadialKernel)

    def is_definite(self, dimensions: int) -> bool:
        """Return whether k is known to be positive semidefinite in so many dimensions."""
        return self.positive_semidefinite and dimensions <= self.dimensions

    @abstractmethod
    def log_matrix(self, x: Array, y: Array) -> Array:
        """Return log k(x_i, y_j) without the amplitude, (N, M), for features (N, d) and (M, d); -inf where k = 0."""

    def map_features(self, features: Array, queries: Array | None = None) -> tuple[Array, Array]:
        """Return what is compared: (features of x, features of y)."""
        return (features if queries is None else queries), features


@underflowing
@dataclass(frozen=True, kw_only=True)
class RadialKernel(Kernel):
    """A kernel of the Euclidean distance r = |x - y| alone.

    A subclass states `log_profile`; compiled sums call it with a symbol instead of an array.

    Attributes
    ----------
    smoothness : float or None
        2 nu of a kernel whose Fourier transform decays as |xi|^-(2 nu + m) in m dimensions, infinity for one that
        decays faster; None where it is not known.
    """

    smoothness: ClassVar[float | None] = None

    @abstractmethod
    def log_profile(self, squared: Array) -> Array:
        """Return log k as a function of the squared distance r^2, without the amplitude; -inf where k = 0."""

    def support(self, rtol: float) -> float:
        """Return the radius beyond which k(r) <= rtol k(0), as found on samples; infinity where there is none.

        Raises
        ------
        InputError
            For rtol outside of [0, 1].
        """
        length = float(getattr(self, self.positive[0])) if self.positive else 1.0
        least = -fall(rtol)
        with np.errstate(all="ignore"):
            start = float(self.log_profile(np.zeros(1))[0])
            return farthest(lambda r: self.log_profile(r**2) - start > least, length * _DISTANCES)

    def supports(self, rtol: float, axes: int) -> tuple[float, ...]:
        """Return how far along each axis points lie where k is more than rtol k(0)."""
        return (self.support(rtol),) * axes

    def squared(self, offsets: Sequence[Floats]) -> Floats:
        """Return the squared length of offsets, one array an axis."""
        total = offsets[0] ** 2
        for line in offsets[1:]:
            total = total + line**2
        return total

    @property
    def gaussian_width(self) -> float | None:
        """Width of the Gaussian that k is found to be, else None."""
        try:
            slope = rate(self.weight())
        except InputError:
            return None
        return None if slope is None else math.sqrt(-0.5 / (slope * math.log(2)))

    @cached_property
    def scale(self) -> float:
        """Distance beyond which k is at most exp(-1/2) k(0)."""
        return self.support(math.exp(-0.5))

    @cached_property
    def grows(self) -> bool:
        """Whether k is more than e k(0) at a sampled distance."""
        radii = np.append(0.0, (self.scale if 0 < self.scale < math.inf else 1.0) * _RADII)
        with np.errstate(all="ignore"):
            logs = np.asarray(self.log_profile(radii**2))
        return bool(np.max(logs) > logs[0] + 1)

    @property
    def unit(self) -> float:
        """A power of two that brings squares of distances about the `scale` into range."""
        return 2.0 ** min(-math.frexp(self.scale)[1], 1000)  # subnormal widths: 2^1073 has no float

    @cached_property
    def steepness(self) -> float:
        """The steepest slope of log k where k counts beside 1, times the `scale`; infinite where k ends in a jump."""
        end, scale = self.support(_COUNTS), self.scale
        if math.isinf(end):
            return math.inf
        radii = np.union1d(np.linspace(0, end, 257), np.geomspace(max(1e-3 * scale, math.ulp(0.0)), end, 257))
        radii = np.append(radii, end * (1 + 1e-9))
        with np.errstate(all="ignore"):
            logs = np.maximum(self.log_profile(radii**2), 2 * math.log(_COUNTS))
        if logs[-1] < math.log(_COUNTS) - 1:
            return math.inf
        return float(np.max(np.abs(np.diff(logs[:-1]) / np.diff(radii[:-1])))) * scale

    def weight(self, unit: float = 1.0) -> Expression:
        """Return k as an expression of squared distances times unit^2; `InputError` if compiled sums cannot take it."""
        if unit not in self._weights:
            self._weights[unit] = self._weight(unit)
        return self._weights[unit]

    @cached_property
    def compared_code(self) -> dict[tuple[float, str], float | None]:
        """Where compiled code was found to differ from k, by unit and precision."""
        return {}

    @cached_property
    def _weights(self) -> dict[float, Expression]:
        return {}

    def check_unit(self) -> None:
        """Raise `InputError` unless k is 1 at r = 0."""
        with np.errstate(all="ignore"):
            start = float(np.asarray(self.log_profile(np.zeros(1)))[0])
        if not abs(start) <= _ONE:
            remedy = (
                "divide the formula by k(0) and pass that as the amplitude" if start > -math.inf
                else "make a dense matrix of it: from_matrix(k)"
            )  # fmt: skip
            raise InputError(
                f"kernel: {type(self).__name__} is {math.exp(min(start, 700.0)):.4g} at r = 0, expected 1 for sums "
                f"without a matrix; {remedy}"
            )

    def _weight(self, unit: float) -> Expression:
        self.check_unit()
        k = weight(traced(self.log_profile, unit))
        far = self.support(_NOTHING)
        if k.operation == "multiply" and math.isfinite(far):
            # A polynomial that overflows beside an exponential that is hardly 0 is no weight: it ends where k is 0.
            near = FUNCTIONS.minimum(SQUARED, Fraction(far) ** 2 * Fraction(unit) ** 2)
            k = weight(traced(self.log_profile, unit, near))
        self._check_weight(k, unit)
        return k

    def _check_weight(self, k: Expression, unit: float) -> None:
        """Raise `InputError` unless what code is made of is k at distances of many decades, and short enough."""
        if k.parts > _COMPILED:
            raise InputError(f"kernel: its formula has more than {_COMPILED} operations, too many for compiled sums")

        def found(squared: Floats) -> Floats:
            return np.asarray(value(k, squared))

        wrong = self.differs(found, unit, _SAME)
        if wrong is not None:
            raise InputError(
                f"kernel: {type(self).__name__} has another value at the distance {wrong:.4g} once compiled; "
                "method='dense' takes it"
            )

    def differs(self, weights: Callable[[Floats], Floats], unit: float, rtol: float) -> float | None:
        """Return a sampled distance at which weights are not k, or None."""
        scale = self.scale
        with np.errstate(all="ignore"):
            radii = np.append(0.0, (scale if 0 < scale < math.inf else 1.0) * _RADII)
            squares = radii**2, (radii * unit) ** 2
            inside = np.all([(s > 1e-300) & (s < math.inf) for s in squares], axis=0) | (radii == 0)
            expected = np.exp(self.log_profile(squares[0]))
            same = ~inside | (np.abs(weights(squares[1]) - expected) <= rtol * np.maximum(expected, _COUNTS))
        return None if bool(np.all(same)) else float(radii[np.argmin(same)])

    def check_profile(self) -> None:
        """Raise `InputError` unless k is a number >= 0 at sampled distances, and finite."""
        scale = self.scale
        with np.errstate(all="ignore"):
            radii = np.append(0.0, (scale if 0 < scale < math.inf else 1.0) * np.geomspace(1e-12, 1e12, 241))
            logs = np.asarray(self.log_profile(radii**2), dtype=np.float64)
        if logs.shape != radii.shape:
            raise InputError(f"kernel: the formula of {self!r} gave shape {logs.shape} for distances {radii.shape}")
        wrong = np.flatnonzero(np.isnan(logs) | (logs == math.inf))
        if len(wrong):
            r = radii[wrong[0]]
            what = "infinite" if logs[wrong[0]] == math.inf else "negative, or no number,"
            raise InputError(
                f"kernel: {self!r} is {what} at the distance {r:.4g}, expected a finite number >= 0"
                + ("; bound it near 0, as TruncatedPower does" if r == 0 and "inf" in what else "")
            )

    def check_squares(self, limits: Any = _DOUBLE) -> None:
        """Raise `InputError` unless floats with these limits (`finfo`) hold squares of distances about the `scale`."""
        least, most = math.sqrt(float(limits.smallest_normal)), math.sqrt(float(limits.max)) / _BEYOND
        if 0 < self.scale < math.inf and not least < self.scale < most:
            if limits.bits < 32:
                raise InputError(
                    f"x: got {limits.dtype}, which does not hold squares of distances, expected float32 or float64; "
                    "convert it (.float())"
                )
            raise InputError(
                f"kernel: {self!r} falls within {self.scale:.3g}, expected a distance from {least:.1e} to {most:.1e}, "
                "whose square is a float; change the unit of points and kernel, or use method='pairwise' "
                "for points in NumPy arrays"
            )

    def log_matrix(self, x: Array, y: Array) -> Array:
        if is_numpy(x):
            self.check_squares()
            return self.log_profile(cdist(x, y, "sqeuclidean"))
        self.check_squares(namespace(x).finfo(x.dtype))
        # Differences, not |x|^2 - 2 x.y + |y|^2: the expansion cancels for close points.
        squared = (x[:, None, 0] - y[None, :, 0]) ** 2
        for column in range(1, x.shape[1]):
            squared = squared + (x[:, None, column] - y[None, :, column]) ** 2
        return self.log_profile(squared)
