"""Reactions that papers simulate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nlflow._array import Array, namespace, underflowing
from nlflow.affinities import Affinity
from nlflow.affinities.checks import check_affinity
from nlflow.errors import check_number
from nlflow.flows.reactions import Reaction

# Functions of reactions are static: a method of the object would hold it in a cycle of references.


def _columns(u: Array, *columns: Any) -> Array:
    """Return columns, arrays or numbers, side by side in the last axis."""
    result = namespace(u).empty_like(u)
    for index, column in enumerate(columns):
        result[..., index] = column
    return result


def _matrix(u: Array, *rows: tuple[Any, ...]) -> Array:
    xp = namespace(u)
    zero = 0 * u[..., 0]
    return xp.stack([xp.stack([zero + entry for entry in row], axis=-1) for row in rows], axis=-2)


@underflowing
class AllenCahn(Reaction):
    """R(u) = s (u - u^3), which drives values to -1 and 1; its potential is s (u^2 - 1)^2 / 4.

    (Allen and Cahn 1979, doi 10.1016/0001-6160(79)90196-2; with a nonlocal diffusion Bates 2006, in Nonlinear Dynamics
    and Evolution Equations.)

    Parameters
    ----------
    strength : float
        s > 0.
    interval : tuple of float
        Of the values that the signal takes; see `Reaction`.

    Examples
    --------
    >>> from nlflow import AllenCahn
    >>> AllenCahn(3.0).bound
    6.0
    """

    def __init__(self, strength: float = 1.0, *, interval: tuple[float, float] = (-1.0, 1.0)) -> None:
        s = self.strength = check_number("strength", strength, minimum=0, strict=True)
        value, slope, potential = (partial(of, s) for of in (self._value, self._slope, self._potential))
        super().__init__(value, interval, derivative=slope, potential=potential, name="AllenCahn")

    @staticmethod
    def _value(s: float, u: Array) -> Array:
        return s * (u * (1 - u * u))

    @staticmethod
    def _slope(s: float, u: Array) -> Array:
        return s * (1 - 3 * (u * u))

    @staticmethod
    def _potential(s: float, u: Array) -> Array:
        return s / 4 * (u * u - 1) ** 2


@underflowing
class FisherKPP(Reaction):
    """R(u) = r u (1 - u), logistic growth; its potential is r (u^3 / 3 - u^2 / 2).

    (Fisher 1937, doi 10.1111/j.1469-1809.1937.tb02153.x; Kolmogorov, Petrovsky and Piskunov 1937.)

    Parameters
    ----------
    rate : float
        r > 0.
    interval : tuple of float
        Of the values that the signal takes; see `Reaction`. Without diffusion, values below 0 reach minus infinity in
        finite time.

    Examples
    --------
    >>> from nlflow import FisherKPP
    >>> FisherKPP(0.5).bound
    0.5
    """

    def __init__(self, rate: float = 1.0, *, interval: tuple[float, float] = (0.0, 1.0)) -> None:
        r = self.rate = check_number("rate", rate, minimum=0, strict=True)
        value, slope, potential = (partial(of, r) for of in (self._value, self._slope, self._potential))
        super().__init__(value, interval, derivative=slope, potential=potential, name="FisherKPP")

    @staticmethod
    def _value(r: float, u: Array) -> Array:
        return r * (u * (1 - u))

    @staticmethod
    def _slope(r: float, u: Array) -> Array:
        return r * (1 - 2 * u)

    @staticmethod
    def _potential(r: float, u: Array) -> Array:
        return r * (u * u * (u / 3 - 0.5))


@underflowing
class GrayScott(Reaction):
    """R(u, v) = (-u v^2 + F (1 - u), u v^2 - (F + k) v): a substrate that is fed, and an autocatalyst that decays.

    (Gray and Scott 1984, doi 10.1016/0009-2509(84)87017-7; Pearson 1993, doi 10.1126/science.261.5118.189.)

    Parameters
    ----------
    feed, kill : float
        F >= 0 and k >= 0.
    interval
        Of the values; see `Reaction`.

    Examples
    --------
    >>> from nlflow.flows import GrayScott
    >>> GrayScott(0.04, 0.06)
    GrayScott((0, 1), (0, 1))
    """

    def __init__(self, feed: float = 0.04, kill: float = 0.06, *, interval: Any = ((0.0, 1.0), (0.0, 1.0))) -> None:
        f = self.feed = check_number("feed", feed, minimum=0)
        k = self.kill = check_number("kill", kill, minimum=0)
        value, slope = partial(self._value, f, k), partial(self._slope, f, k)
        super().__init__(value, interval, derivative=slope, components=2, name="GrayScott")

    @staticmethod
    def _value(f: float, k: float, u: Array) -> Array:
        eaten = u[..., 0] * u[..., 1] * u[..., 1]
        return _columns(u, f * (1 - u[..., 0]) - eaten, eaten - (f + k) * u[..., 1])

    @staticmethod
    def _slope(f: float, k: float, u: Array) -> Array:
        square, twice = u[..., 1] * u[..., 1], 2 * u[..., 0] * u[..., 1]
        return _matrix(u, (-square - f, -twice), (square, twice - (f + k)))


@underflowing
class FitzHughNagumo(Reaction):
    """R(v, w) = (v - v^3 / 3 - w + I, e (v + a - b w)): a membrane that is excited, and recovers slowly.

    (FitzHugh 1961, doi 10.1016/S0006-3495(61)86902-6; Nagumo, Arimoto and Yoshizawa 1962, doi
    10.1109/JRPROC.1962.288235.)

    Parameters
    ----------
    a, b, epsilon, current : float
        epsilon e > 0, and I the current from outside.
    interval
        Of the values; see `Reaction`.

    Examples
    --------
    >>> from nlflow.flows import FitzHughNagumo
    >>> FitzHughNagumo().components
    2
    """

    def __init__(
        self, a: float = 0.7, b: float = 0.8, epsilon: float = 0.08, current: float = 0.0, *,
        interval: Any = ((-3.0, 3.0), (-3.0, 3.0)),
    ) -> None:  # fmt: skip
        a, b = check_number("a", a), check_number("b", b)
        e, i = check_number("epsilon", epsilon, minimum=0, strict=True), check_number("current", current)
        self.a, self.b, self.epsilon, self.current = a, b, e, i
        value, slope = partial(self._value, a, b, e, i), partial(self._slope, b, e)
        super().__init__(value, interval, derivative=slope, components=2, name="FitzHughNagumo")

    @staticmethod
    def _value(a: float, b: float, e: float, i: float, u: Array) -> Array:
        v, w = u[..., 0], u[..., 1]
        return _columns(u, v - v * v * v / 3 - w + i, e * (v + a - b * w))

    @staticmethod
    def _slope(b: float, e: float, u: Array) -> Array:
        return _matrix(u, (1 - u[..., 0] * u[..., 0], -1.0), (e, -e * b))


@underflowing
class Brusselator(Reaction):
    """R(u, v) = (a - (b + 1) u + u^2 v, b u - u^2 v): Turing's patterns and oscillations, at rest at (a, b / a).

    (Prigogine and Lefever 1968, doi 10.1063/1.1668896.) Without diffusion it oscillates for b > 1 + a^2.

    Parameters
    ----------
    a, b : float
        > 0.
    interval
        Of the values; see `Reaction`.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow.flows import Brusselator
    >>> Brusselator(2.0, 3.0)(np.array([[2.0, 1.5]])).tolist()
    [[0.0, 0.0]]
    """

    def __init__(self, a: float = 1.0, b: float = 3.0, *, interval: Any = ((0.0, 8.0), (0.0, 8.0))) -> None:
        a = self.a = check_number("a", a, minimum=0, strict=True)
        b = self.b = check_number("b", b, minimum=0, strict=True)
        value, slope = partial(self._value, a, b), partial(self._slope, b)
        super().__init__(value, interval, derivative=slope, components=2, name="Brusselator")

    @staticmethod
    def _value(a: float, b: float, u: Array) -> Array:
        bound = u[..., 0] * u[..., 0] * u[..., 1]
        return _columns(u, a - (b + 1) * u[..., 0] + bound, b * u[..., 0] - bound)

    @staticmethod
    def _slope(b: float, u: Array) -> Array:
        square, twice = u[..., 0] * u[..., 0], 2 * u[..., 0] * u[..., 1]
        return _matrix(u, (twice - (b + 1), square), (b - twice, -square))


@underflowing
class PredatorPrey(Reaction):
    """R(u, v) = (r u (1 - Pu) - u v / (u + h), c u v / (u + h) - m v): prey that compete with those around them.

    (Rosenzweig and MacArthur 1963, doi 10.1086/282272; competition at a distance: Britton 1990, doi 10.1137/0150099.)

    Parameters
    ----------
    competition : Affinity, optional
        Its P averages the prey; without one they compete at each node, 1 - u.
    growth, saturation, conversion, mortality : float
        r, h, c and m, > 0; h > 1e-150.
    interval
        Of the values; see `Reaction`.

    Examples
    --------
    >>> from nlflow import Gaussian, Grid, affinity
    >>> from nlflow.flows import PredatorPrey
    >>> PredatorPrey(affinity(Gaussian(width=3.0), Grid(32, boundary="periodic")), mortality=0.3)
    PredatorPrey((0, 3), (0, 3))
    """

    def __init__(
        self, competition: Affinity | None = None, *, growth: float = 1.0, saturation: float = 0.3,
        conversion: float = 1.0, mortality: float = 0.5, interval: Any = ((0.0, 3.0), (0.0, 3.0)),
    ) -> None:  # fmt: skip
        given = {"growth": growth, "saturation": saturation, "conversion": conversion, "mortality": mortality}
        # Slopes are values over the saturation.
        least = {"saturation": 1e-150}
        r, h, c, m = (check_number(n, value, minimum=least.get(n, 0), strict=True) for n, value in given.items())
        self.growth, self.saturation, self.conversion, self.mortality = r, h, c, m
        value, slope = partial(self._value, r, h, c, m), partial(self._slope, r, h, c, m)
        if competition is not None:
            check_affinity(competition, "competition")
        else:
            value, slope = partial(self._value_at_a_node, value), partial(self._slope_at_a_node, slope)
        super().__init__(
            value, interval, derivative=slope, components=2, average=competition, name="PredatorPrey"
        )  # fmt: skip

    @staticmethod
    def _value(r: float, h: float, c: float, m: float, u: Array, around: Array) -> Array:
        eaten = u[..., 0] * u[..., 1] / (u[..., 0] + h)
        return _columns(u, r * u[..., 0] * (1 - around[..., 0]) - eaten, c * eaten - m * u[..., 1])

    @staticmethod
    def _slope(r: float, h: float, c: float, m: float, u: Array, around: Array) -> Array:
        prey, per_prey = u[..., 0], u[..., 0] / (u[..., 0] + h)
        slope = h / (prey + h) * (u[..., 1] / (prey + h))
        return _matrix(
            u,
            (r * (1 - around[..., 0]) - slope, -per_prey, -r * prey, 0.0),
            (c * slope, c * per_prey - m, 0.0, 0.0),
        )

    @staticmethod
    def _value_at_a_node(of: Callable[[Array, Array], Array], u: Array) -> Array:
        return of(u, u)

    @staticmethod
    def _slope_at_a_node(of: Callable[[Array, Array], Array], u: Array) -> Array:
        both = of(u, u)
        return both[..., :2] + both[..., 2:]
