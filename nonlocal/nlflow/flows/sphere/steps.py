"""Steps of one length that stay on the sphere: along great circles, by rotations, and as a layer takes them."""

from __future__ import annotations

import math
from typing import Any, cast

from nlflow._array import Array, namespace, underflowing
from nlflow.errors import InputError
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import FixedStep, StepFailureError
from nlflow.flows.sphere.flow import SphereFlow


class SphereStep(FixedStep):
    """What steps on the sphere share."""

    takes_constraint = True

    def stability_limit(self, flow: Flow) -> float:
        """Return 2 / the rate at which tokens of a cluster meet (`SphereFlow.rate`); longer steps throw them apart."""
        return 2 / as_sphere(flow).rate if as_sphere(flow).rate > 0 else math.inf

    def unstable(self, flow: Flow, limit: float) -> str:
        """Return the message for a step above the limit."""
        return (
            f"dt: got {self.dt:g}, which is unstable for this flow: tokens of a cluster meet at the rate "
            f"{as_sphere(flow).rate:.6g}, so {type(self).__name__} needs dt < {limit:.6g}; reduce dt, or use "
            "RungeKutta()"
        )

    def check_kind(self, flow: Flow) -> None:
        """Raise `InputError` for flows that are not on the sphere."""
        if not isinstance(flow, SphereFlow):
            raise InputError(
                f"integrator: {type(self).__name__} is for a SphereFlow, got {type(flow).__name__}; use RungeKutta()"
            )


def as_sphere(flow: Any) -> SphereFlow:
    """Return the flow as one on the sphere, which `SphereStep.check` has seen."""
    return cast(SphereFlow, flow)


def _length(xp: Any, v: Array) -> Array:
    return xp.sqrt(xp.sum(v * v, axis=1, keepdims=True))


def _unit(xp: Any, x: Array) -> Array:
    """Return tokens with the length 1 that rounding has taken from them."""
    return x / _length(xp, x)


def turned(x: Array, centre: Array, direction: Array, dt: float) -> Array:
    """Return x after a rotation by the angle dt |v| that carries `centre` towards v = `direction`, tangent there.

    All (N, d). With x = centre it is the exponential map. O(N d).
    """
    xp = namespace(x)
    size = _length(xp, direction)
    along = direction / xp.where(size > 0, size, xp.ones_like(size))
    angle = dt * size
    a, b = xp.sum(x * centre, axis=1, keepdims=True), xp.sum(x * along, axis=1, keepdims=True)
    # cos - 1 = -2 sin^2(angle / 2), which has its digits for small angles.
    less, sine = -2 * xp.sin(angle / 2) ** 2, xp.sin(angle)
    return _unit(xp, x + less * (a * centre + b * along) + sine * (a * along - b * centre))


@underflowing
class GeodesicEuler(SphereStep):
    """Each token goes along the great circle of its velocity, x <- exp_x(dt dx/dt); order 1.

    Parameters
    ----------
    dt : float
        Step.
    """

    order = 1.0

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        """Return the tokens after one step."""
        return turned(u, u, flow.velocity(u), dt)


@underflowing
class GeodesicMidpoint(SphereStep):
    """Rotations by the velocity at the midpoint: x <- R(y) x with y = exp_x(dt/2 v(x)); order 2.

    The velocity v at y, a tangent there, is the rotation in the plane of y and v; x is turned by dt |v(y)| in it. That
    is the midpoint rule of the group of rotations (Munthe-Kaas 1998, doi 10.1007/BF02510919). Two averages a step.

    Parameters
    ----------
    dt : float
        Step.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import GeodesicMidpoint, SphereFlow, on_sphere, solve
    >>> x = on_sphere(np.random.default_rng(0).standard_normal((8, 3)))
    >>> found = solve(SphereFlow(x, beta=4.0), x, t=5.0, integrator=GeodesicMidpoint(0.1))
    >>> bool(np.abs(np.linalg.norm(found.final, axis=1) - 1).max() < 1e-15)
    True
    """

    order = 2.0

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        """Return the tokens after one step."""
        middle = turned(u, u, flow.velocity(u), dt / 2)
        return turned(u, middle, flow.velocity(middle), dt)


@underflowing
class LayerStep(SphereStep):
    """A layer with residual and norm, x <- (x + dt a) / |x + dt a| with a = sum_j a_ij x_j W_V; order 1.

    Attention as it is, not its tangent part: what is added along x changes the length, and so how far the token turns.

    Parameters
    ----------
    dt : float
        Step; 1 in a transformer whose residual has no factor.
    """

    order = 1.0

    def stability_limit(self, flow: Flow) -> float:
        """Return infinity: the length takes up what attention adds along x, and tokens of a cluster meet in any step.

        That holds where W_V is positive; with other maps a layer may do anything.
        """
        del flow
        return math.inf

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        """Return the tokens after one layer."""
        xp, share = namespace(u), dt / (1 + dt)  # of a sum that is in range for every dt
        found = (1 - share) * u + share * as_sphere(flow).attention(u)
        if not bool(xp.all(_length(xp, found) > 0)):
            raise StepFailureError(
                f"dt: got {dt:g}, with which attention takes away all of a token, so that no direction is left; use "
                "another dt"
            )
        return _unit(xp, found)
