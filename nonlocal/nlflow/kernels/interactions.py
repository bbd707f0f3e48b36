"""Potentials of pairs."""

# Unlike a `Kernel` a potential may be negative, infinite at r = 0, or rise without end.

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np

from nlflow._array import Array, Floats, underflowing
from nlflow.errors import InputError, check_floats, check_number, is_function, kind_of, shortened
from nlflow.kernels.base import RadialKernel, farthest
from nlflow.kernels.differentiation import away_from_zero, derivative
from nlflow.kernels.expressions import FUNCTIONS, SQUARED, Expression, as_expression, number, value
from nlflow.kernels.forms import base_two, called, parsed
from nlflow.kernels.rewriting import compared, multiply, simplified, where

_RADII: Final = np.geomspace(1e-12, 1e12, 4801)
_TINY: Final = (1e-40, 1e-80)
_FARTHEST: Final = 1e150  # whose square is a float
_COMPILED: Final = 400  # operations
_FAR: Final = (1e11, 1e12)


def _last(function: Callable[[Array], Array], rtol: float, near: float = 0.0) -> float:
    """Return the distance r beyond which |f| is at most `rtol` times its largest finite value from `near` r on."""
    # Infinity for none. Found on a grid of distances from 1e-12 to 1e12, and on ever finer ones.
    with np.errstate(all="ignore"):
        sizes = np.abs(function(_RADII))
        sizes[~np.isfinite(sizes)] = 0.0
        largest = np.maximum.accumulate(sizes[::-1])[::-1]  # from each distance on
        return farthest(lambda r: ~(np.abs(function(r)) <= rtol * largest[np.searchsorted(_RADII, near * r)]), _RADII)


@underflowing
@dataclass(frozen=True, repr=False)
class Interaction:
    r"""A potential W(|x - y|) of a pair of particles, of any sign.

    Parameters
    ----------
    w : str, callable or RadialKernel
        As a function of the distance r; text as for `Formula`. Particles move towards smaller W: what falls with the
        distance repels.
    strength : float
        Factor of any sign.
    cutoff : float
        Distance > 0 beyond which there is no force; W is shifted so that it is 0 there.

    Raises
    ------
    InputError
        If W or its slope is not finite at samples of distances from 1e-3 to 10, or cannot be compiled.

    Examples
    --------
    >>> from nlflow.kernels import Interaction
    >>> attraction = Interaction("r**2 / 2")
    >>> float(attraction(3.0)), float(attraction.slope(3.0))
    (4.5, 3.0)
    """

    w: str | Callable[[Any], Any] | RadialKernel
    strength: float = 1.0
    cutoff: float = math.inf
    _potential: Expression = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._set("strength", check_number("strength", self.strength))
        self._set("cutoff", check_number("cutoff", self.cutoff, minimum=0, strict=True, finite=False))
        if _FARTHEST < self.cutoff < math.inf:
            raise InputError(f"cutoff: got {self.cutoff:g}, expected at most {_FARTHEST:g}, or none; change the unit")
        self._set("_potential", self._cut(simplified(self._formula() * as_expression(self.strength))))
        if self.potential.parts > _COMPILED or self.pull.parts > _COMPILED:
            raise InputError(f"w: its formula has more than {_COMPILED} operations, too many for compiled sums")
        radii = np.geomspace(1e-3, 10, 64)
        with np.errstate(all="ignore"):
            wrong = ~(np.isfinite(value(self.potential, radii**2)) & np.isfinite(value(self.pull, radii**2) * radii))
        if wrong.any():
            given = f"w: got {shortened(repr(self.w))}, which" if type(self) is Interaction else f"{self!r}: it"
            raise InputError(
                f"{given} is no finite number, or has no finite slope, at the distance {radii[np.argmax(wrong)]:.4g}; "
                "scale it"
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _formula(self) -> Expression:
        """Return W over the strength, as an expression of the squared distance."""
        r = SQUARED**0.5
        if isinstance(self.w, RadialKernel):
            return self.w.weight() * as_expression(self.w.amplitude)
        if isinstance(self.w, str):
            return parsed(self.w, {"r": r}, "w") * 1
        if is_function(self.w):
            refusal = "w: the function failed on a symbol for distances"
            return called(self.w, r, refusal, "use arithmetic and functions of NumPy") * 1
        raise InputError(f"w: got {kind_of(self.w)}, expected text, a function of r, or a radial kernel")

    def _cut(self, w: Expression) -> Expression:
        if self.cutoff == math.inf:
            return w
        end = float(value(w, np.array([self.cutoff**2]))[0])
        zero, limit = as_expression(0), as_expression(self.cutoff) ** 2
        return simplified(where(compared("lt", SQUARED, simplified(limit)), w - as_expression(end), zero))

    @property
    def potential(self) -> Expression:
        """W as an expression of the squared distance; 0 at r = 0 where it is not proved finite."""
        return away_from_zero(base_two(self._potential))

    @cached_property
    def pull(self) -> Expression:
        """W'(r) / r as an expression of the squared distance; times x - y it is the gradient of W(|x - y|) by x."""
        slope = simplified(derivative(self._potential))
        return away_from_zero(base_two(multiply(slope, number(2))))

    def __call__(self, r: Array | float) -> Array:
        """Return W at distances r > 0."""
        return self._at(r)[1]

    def slope(self, r: Array | float) -> Array:
        """Return W'(r) at distances r > 0."""
        distances, pull = self._at(r, self.pull)
        return np.asarray(pull * distances)

    def _at(self, r: Array | float, part: Expression | None = None) -> tuple[Floats, Floats]:
        """Return distances, and W or another part at them."""
        distances = check_floats("r", r)
        if distances.min() < 0 or distances.max() > _FARTHEST:
            raise InputError(
                f"r: got distances from {distances.min():g} to {distances.max():g}, expected them from 0 to "
                f"{_FARTHEST:g}"
            )
        return distances, value(self.potential if part is None else part, distances * distances)

    @cached_property
    def singular(self) -> bool:
        """Whether |W'| is found to grow without end as r falls to 0."""
        with np.errstate(all="ignore"):
            far, near = (abs(float(self.slope(r))) for r in _TINY)
        return not (math.isfinite(far) and near <= 2 * far + abs(self.strength))

    def reach(self, rtol: float = 0.0) -> float:
        """Return the distance beyond which |W'| is at most `rtol` times its largest value; infinity for none."""
        # If the slope is singular `rtol` counts as 0.
        return _last(self.slope, 0.0 if self.singular else rtol)

    def seen(self, rtol: float, near: float = 0.5) -> float:
        """Return the distance beyond which forces may be left out; infinity for none."""
        # |W'| is at most `rtol` times its largest value from `near` of that distance on. Only a slope that is 0 counts
        # as nothing where it is singular, and where it falls as a power does.
        return self._seen(self.slope, rtol, near)

    def _seen(self, function: Callable[[Array], Array], rtol: float, near: float = 0.5) -> float:
        with np.errstate(all="ignore"):
            powers = self.singular or float(function(np.asarray(_FAR[1]))) != 0
        return _last(function, 0.0 if powers else rtol, near)

    @cached_property
    def far(self) -> float:
        """The limit of W far out; 0 where no finite one is found."""
        with np.errstate(all="ignore"):
            first, last = (float(self(r)) for r in _FAR)
        return last if math.isfinite(last) and abs(first - last) <= 1e-12 * abs(last) else 0.0

    @property
    def beside_far(self) -> tuple[Expression, float]:
        """W less its limit, as an expression of the squared distance, and the distance up to which it counts."""
        # The expression is 0 at distance 0, so that a particle meets all but itself. Nothing is what `seen` says, for
        # 10^-17 of W less its limit.
        zero = as_expression(0)
        apart = where(compared("lt", zero, SQUARED), base_two(self._beside_far), zero)
        return apart, self._seen(lambda r: self(r) - self.far, 1e-17)

    @property
    def _beside_far(self) -> Expression:
        return simplified(self._potential + as_expression(-self.far))

    @cached_property
    def meeting(self) -> float:
        """W less its limit at distance 0; 0 where it is not proved finite."""
        return float(value(away_from_zero(base_two(self._beside_far)), np.zeros(1))[0])

    def __add__(self, other: Interaction) -> Interaction:
        """Return the sum of two potentials."""
        if not isinstance(other, Interaction):
            return NotImplemented
        return _Sum((self, other))

    def __repr__(self) -> str:
        """Return the potential as text; of a function what it does, so that runs can be resumed."""
        w = repr(self.w) if isinstance(self.w, str | RadialKernel) else f"<W: {self._formula()}>"
        return f"Interaction(w={w}, strength={self.strength!r}, cutoff={self.cutoff!r})"


@underflowing
@dataclass(frozen=True, repr=False)
class _Sum(Interaction):
    """W = W_1 + W_2, each with its own strength and cutoff."""

    w: Any

    def _formula(self) -> Expression:
        total: Expression = self.w[0]._potential + self.w[1]._potential
        return total

    def __repr__(self) -> str:
        return f"{self.w[0]!r} + {self.w[1]!r}"


@underflowing
@dataclass(frozen=True, repr=False)
class Morse(Interaction):
    """The Morse potential of swarms, W = c_r exp(-r / l_r) - c_a exp(-r / l_a).

    (D'Orsogna, Chuang, Bertozzi and Chayes 2006, doi 10.1103/PhysRevLett.96.104302.)

    Parameters
    ----------
    repulsion, repulsion_length : float
        c_r >= 0 and l_r > 0.
    attraction, attraction_length : float
        c_a >= 0 and l_a > 0.
    cutoff : float
        See `Interaction`.
    """

    w: Any = field(init=False, default=None)
    strength: float = field(init=False, default=1.0)
    cutoff: float = field(default=math.inf, kw_only=True)
    repulsion: float = 1.0
    repulsion_length: float = 0.5
    attraction: float = 0.5
    attraction_length: float = 1.0

    def __post_init__(self) -> None:
        for name in ("repulsion", "attraction"):
            self._set(name, check_number(name, getattr(self, name), minimum=0))
        for name in ("repulsion_length", "attraction_length"):
            self._set(name, check_number(name, getattr(self, name), minimum=0, strict=True))
        super().__post_init__()

    def _formula(self) -> Expression:
        r = SQUARED**0.5
        repelled: Expression = FUNCTIONS.exp(r * (-1 / as_expression(self.repulsion_length))) * self.repulsion
        attracted: Expression = FUNCTIONS.exp(r * (-1 / as_expression(self.attraction_length))) * self.attraction
        return repelled - attracted

    def __repr__(self) -> str:
        own = ("repulsion", "repulsion_length", "attraction", "attraction_length", "cutoff")
        return f"Morse({', '.join(f'{n}={getattr(self, n)!r}' for n in own)})"


@underflowing
@dataclass(frozen=True, repr=False)
class PowerLaws(Interaction):
    """Attraction and repulsion by powers, W = r^a / a - r^b / b with a > b; the term of the power 0 is log r.

    Sources: Kolokolnikov, Sun, Uminsky and Bertozzi 2011, doi 10.1103/PhysRevE.84.015203; Balague, Carrillo, Laurent
    and Raoul 2013, doi 10.1016/j.physd.2012.10.002.

    Parameters
    ----------
    attraction, repulsion : float
        The powers a and b. For b < 1 the force is singular at r = 0 without softening.
    softening : float
        e >= 0, with which r is sqrt(r^2 + e^2).
    cutoff : float
        See `Interaction`.
    """

    w: Any = field(init=False, default=None)
    strength: float = field(init=False, default=1.0)
    cutoff: float = field(default=math.inf, kw_only=True)
    attraction: float = 2.0
    repulsion: float = 0.0
    softening: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("attraction", "repulsion"):
            self._set(name, check_number(name, getattr(self, name)))
        self._set("softening", check_number("softening", self.softening, minimum=0))
        if not self.attraction > self.repulsion:
            raise InputError(
                f"attraction: got the power {self.attraction:g}, expected more than that of the repulsion, "
                f"{self.repulsion:g}; otherwise particles fly apart or fall together"
            )
        super().__post_init__()

    def _formula(self) -> Expression:
        squared = SQUARED + as_expression(self.softening) ** 2

        def term(power: float) -> Expression:
            half = as_expression(power) * as_expression(0.5)
            return FUNCTIONS.log(squared) * 0.5 if power == 0 else squared**half / as_expression(power)

        return term(self.attraction) - term(self.repulsion)

    def __repr__(self) -> str:
        own = ("attraction", "repulsion", "softening", "cutoff")
        return f"PowerLaws({', '.join(f'{n}={getattr(self, n)!r}' for n in own)})"
