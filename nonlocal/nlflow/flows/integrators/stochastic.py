"""Steps with noise."""

from __future__ import annotations

import math
from abc import abstractmethod
from functools import lru_cache
from typing import Any

import numpy as np

from nlflow._array import Array, Floats, constant_like, namespace, over_channels, to_numpy, underflowing
from nlflow.errors import InputError, checked_call
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.exponential import (
    Exponential,
    ExponentialStep,
    chebyshev_coefficients,
    chebyshev_sums,
    modes_of,
)
from nlflow.flows.integrators.fixed_step import ExplicitEuler, FixedStep
from nlflow.flows.linear import LinearFlow, as_linear
from nlflow.flows.modes import deviation, phi
from nlflow.flows.noise import Noise

_KEPT = 64  # expansions
_DENSE_NODES = 1000  # up to which the root of a covariance is that of a whole matrix
_FACTORS = 4  # of whole covariances that a run keeps


def drawn(noise: Noise, flow: Flow, like: Array, dt: float, memory: dict[str, Any]) -> Array:
    """Return the increments of W of the next step, and count them."""
    number = int(memory.get("draws", 0))
    memory["draws"] = number + 1
    return noise.increments(flow, like, number, dt)


class NoisyStep(FixedStep):
    """Base of steps with noise; a subclass defines `noisy`, and `step` for flows without noise."""

    takes_noise = True

    @abstractmethod
    def noisy(self, flow: Flow, u: Array, dt: float, white: Array, noise: Noise) -> Array:
        """Return the signal after a step in which W has the increments `white`."""

    def _moved(self, flow: Flow, u: Array, dt: float, memory: dict[str, Any]) -> Array:
        if flow.noise is None:
            return self.step(flow, u, dt)
        return self.noisy(flow, u, dt, drawn(flow.noise, flow, u, dt, memory), flow.noise)


@checked_call
@underflowing
class EulerMaruyama(NoisyStep, ExplicitEuler):
    """Explicit Euler with noise, ``u + dt v(u) + s(u) dW``; strong order 1/2, weak order 1.

    Of strong order 1 where s does not depend on u (Maruyama 1955, doi 10.1007/BF02846028). The
    stationary variance of a mode with eigenvalue a is 1 / (1 - a dt / 2) times the right one.

    Parameters
    ----------
    dt : float
        Step, below 2 / (rho + b) as that of `ExplicitEuler`.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import AllenCahn, EulerMaruyama, Gaussian, GradientFlow, Grid, J, Noise, affinity, solve
    >>> flow = GradientFlow(J(affinity(Gaussian(width=2.0), Grid(40)))) + AllenCahn() + Noise(beta=50.0, rng=0)
    >>> solve(flow, np.zeros(40), t=3.0, integrator=EulerMaruyama(0.1)).success
    True
    """

    strong_order, strong_order_additive, weak_order = 0.5, 1.0, 1.0
    called, longer = "EulerMaruyama", "ExponentialEuler(dt)"

    def stability_limit(self, flow: Flow) -> float:
        return super().stability_limit(flow) if isinstance(flow, LinearFlow) else math.nan

    def surely_stable(self, flow: Flow) -> bool:
        return isinstance(flow, LinearFlow) and super().surely_stable(flow)

    def noisy(self, flow: Flow, u: Array, dt: float, white: Array, noise: Noise) -> Array:
        return self.step(flow, u, dt) + noise.times(flow, u, white)


@checked_call
@underflowing
class Milstein(EulerMaruyama):
    """Milstein's step for noise that depends on the signal, ``u + dt v(u) + s dW + s s' (dW^2 - dt / m) / 2``.

    Of strong and weak order 1, with a difference in place of s' (Kloeden and Platen 1992, section 11.1, doi
    10.1007/978-3-662-12616-5).

    Parameters
    ----------
    dt : float
    """

    strong_order = 1.0
    called = "Milstein"

    def noisy(self, flow: Flow, u: Array, dt: float, white: Array, noise: Noise) -> Array:
        end = self.step(flow, u, dt)
        if noise.additive:
            return end + noise.times(flow, u, white)
        s, white, spread = noise.strength_at(flow, u), noise.mixed(white), math.sqrt(dt) * noise.spread(flow, u)
        change = noise.strength_at(flow, end + s * spread) - s
        return end + s * white + change * flow.free(white * white - spread * spread) / (2 * spread)


@checked_call
@underflowing
class PlatenWeak2(NoisyStep):
    """Platen's step of weak order 2 and strong order 1 (Kloeden and Platen 1992, section 15.1).

    With e = (dt / m)^1/2, a = u + dt v(u) + s(u) dW and b, c = u + dt v(u) +- s(u) e::

        u' = u + dt (v(u) + v(a)) / 2 + (s(b) + s(c) + 2 s(u)) dW / 4 + (s(b) - s(c)) (dW^2 - e^2) / (4 e)

    Parameters
    ----------
    dt : float
        Step, below 2 / (rho + b). Two velocities each.
    """

    order = 2.0
    takes_time = takes_constraint = True
    strong_order, strong_order_additive, weak_order = 1.0, 1.0, 2.0
    longer = "ExponentialEuler(dt)"

    def stability_limit(self, flow: Flow) -> float:
        return EulerMaruyama(self.dt).stability_limit(flow)

    def surely_stable(self, flow: Flow) -> bool:
        return EulerMaruyama(self.dt).surely_stable(flow)

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        return self._heun(flow, u, dt, 0 * u)

    @staticmethod
    def _heun(flow: Flow, u: Array, dt: float, kick: Array) -> Array:
        first = flow.velocity(u)
        return u + 0.5 * dt * (first + flow.when(flow.time + dt).velocity(u + dt * first + kick)) + kick

    def noisy(self, flow: Flow, u: Array, dt: float, white: Array, noise: Noise) -> Array:
        if noise.additive:
            return self._heun(flow, u, dt, noise.times(flow, u, white))
        first, s, white = flow.velocity(u), noise.strength_at(flow, u), noise.mixed(white)
        spread, moved = math.sqrt(dt) * noise.spread(flow, u), u + dt * first
        last = flow.when(flow.time + dt).velocity(moved + s * white)
        above, below = (noise.strength_at(flow, moved + sign * s * spread) for sign in (1.0, -1.0))
        more = (above - below) * flow.free(white * white - spread * spread) / (4 * spread)
        return u + 0.5 * dt * (first + last) + 0.25 * (above + below + 2 * s) * white + more


def _check_alike(flow: LinearFlow, noise: Noise) -> str | None:
    """Return why the noise of a linear flow is not white in its measure with one strength, None where it is."""
    if not noise.additive:
        return "depends on the signal"
    if not noise.uniform:
        return "differs between nodes"
    if noise.white != "measure" and not _even(flow):
        return "is white between nodes of different measures"
    if flow.mixes:
        return "moves a flow whose linear part mixes channels"
    if noise.channels is not None and flow.width() > 1:
        return "differs between channels that do not move alike"
    return None


def _even(flow: LinearFlow) -> bool:
    xp = namespace(flow.affinity.log_degree)
    mass = flow.mass(flow.affinity.log_degree)
    return float(xp.max(mass)) <= float(xp.min(mass)) * (1 + 1e-12)


@lru_cache(maxsize=_KEPT)
def _root_expansion(span: float, low: float, high: float, tol: float) -> tuple[Floats, float]:
    return chebyshev_coefficients(lambda a: deviation(span, a), low, high, tol * float(deviation(span, low)))


def fluctuation(flow: LinearFlow, white: Array, span: float, tol: float) -> tuple[Array, float]:
    """Return ((1 - exp(-2 t A)) / (2 A))^1/2 `white`, and a bound of its error over its largest eigenvalue."""
    if modes := modes_of(flow, white):
        return modes.back(modes.deviation(span, modes.forward(white)), white.dtype), 0.0
    low, high = flow.spectral_bounds()
    low = max(low, 0.0)
    high = max(high, low + 1e-300, 1e-300)
    coefficients, tail = _root_expansion(span, low, high, tol)
    return chebyshev_sums(flow.on_free, white, low, high, [coefficients])[0], tail / float(deviation(span, low))


def _check_dense(flow: LinearFlow, noise: Noise) -> str | None:
    """Return why the covariance of what a linear flow gathers is not that of eigenvectors, None where it is."""
    why = _check_alike(flow, noise)
    many = flow.affinity.domain.size > _DENSE_NODES
    if why is None or not noise.additive or many or flow.mixes or flow.width() > 1 or not flow.inner.by_nodes:
        return f"{why} (which takes at most {_DENSE_NODES} nodes)" if many and noise.additive else why
    if flow.terms.constraint is not None or not noise.by_node(flow):
        return f"{why}, with a constraint or between channels"
    return None


def covariance_root(flow: LinearFlow, spread: Floats, span: float) -> Floats:
    """Return F with F F^T the covariance of what a linear flow gathers of noise of this spread; O(N^3).

    In eigenvectors of A it is Q_ij (1 - exp(-t (a_i + a_j))) / (a_i + a_j), Q being the covariance of the noise.
    """
    from nlflow.flows.functions import eigenpairs

    values, vectors, root = eigenpairs(flow)
    values = np.maximum(values, 0.0)
    modes = (vectors * (root * spread)[:, None] ** 2).T @ vectors
    covariance = modes * (span * phi(1, span * (values[:, None] + values)))
    variances, axes = np.linalg.eigh((covariance + covariance.T) / 2)
    return np.asarray((vectors @ (axes * np.sqrt(np.maximum(variances, 0.0)))) / root[:, None])


@checked_call
@underflowing
class ExactGaussian(Exponential):
    """The exact law of a linear flow with noise, an Ornstein-Uhlenbeck process, for steps of any length.

    u' = m(u, t) + C^1/2 xi, where m is the step of `Exponential` and, for one strength s, C = s^2 (1 - exp(-2 t A)) /
    (2 A) M^-1, M holding the measure of the nodes (Gillespie 1996, doi 10.1103/PhysRevE.54.2084, for one node).
    By a transform or a Chebyshev expansion; for a strength that differs between nodes (or ``white="nodes"`` where their
    measures do) by eigenvectors, O(N^3) for each length of a step.

    Parameters
    ----------
    tol : float, optional
        That of `Exponential`; for the noise relative to the largest standard deviation of a mode.

    Raises
    ------
    InputError
        For a flow that `Exponential` refuses, for a strength that depends on the signal, and for one that differs
        between more than 1000 nodes.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import E, ExactGaussian, Gaussian, GradientFlow, Grid, Noise, affinity, solve
    >>> energy = E(affinity(Gaussian(width=2.0), Grid(40, boundary="periodic")), np.zeros(40), fidelity=1.0)
    >>> flow = GradientFlow(energy) + Noise(beta=10.0, rng=3)
    >>> solve(flow, t_eval=np.arange(5.0), integrator=ExactGaussian()).stats["steps"]
    4
    """

    takes_noise = True
    strong_order = strong_order_additive = weak_order = math.inf

    def check_kind(self, flow: Flow) -> None:
        super().check_kind(flow)
        why = None if flow.noise is None else _check_dense(as_linear(flow), flow.noise)
        if why is not None:
            raise InputError(
                f"noise: ExactGaussian knows no law of {flow.noise!r}, which {why}; use ExponentialEuler(dt) or "
                "PlatenWeak2(dt)"
            )

    @staticmethod
    def knows(flow: Flow) -> bool:
        if not Exponential.knows(flow):
            return False
        return flow.noise is None or _check_dense(as_linear(flow), flow.noise) is None

    def advance(self, flow: Flow, u: Array, t: float, target: float, memory: dict[str, Any]) -> tuple[Array, float]:
        moved, end = super().advance(flow, u, t, target, memory)
        if flow.noise is None:
            return moved, end
        linear = as_linear(flow)
        tol = self.tol if self.tol is not None else (1e-6 if u.dtype == namespace(u).float32 else 1e-12)
        white = drawn(flow.noise, flow, u, 1.0, memory)
        if _check_alike(linear, flow.noise) is not None:
            return moved + flow.noise.mixed(self._gathered(linear, flow.noise, white, target - t, memory)), end
        kick, tail = fluctuation(linear, white, target - t, tol)
        memory["error_bound"] = memory.get("error_bound", 0.0) + tail
        return moved + flow.noise.times(flow, u, kick), end

    @staticmethod
    def _gathered(flow: LinearFlow, noise: Noise, white: Array, span: float, memory: dict[str, Any]) -> Array:
        """Return noise whose strength differs between nodes, by whole eigenvectors."""
        own = 1.0 if noise.white == "nodes" else flow.root_mass(white)
        factors = memory.setdefault("_factors", {})
        if span not in factors:
            if len(factors) >= _FACTORS:
                factors.pop(next(iter(factors)))
            xp = namespace(white)
            each = xp.asarray(noise.strength_at(flow, white) * over_channels(own, white), dtype=white.dtype)
            spread = to_numpy(xp.broadcast_to(each, tuple(white.shape)))
            spread = spread.reshape(flow.affinity.domain.size, -1)[:, 0].astype(np.float64)
            factors[span] = covariance_root(flow, spread, span)
        unit = to_numpy(flow.affinity.flatten(white / over_channels(own, white))).astype(np.float64)
        return constant_like((factors[span] @ unit).reshape(tuple(white.shape)), white)


@checked_call
@underflowing
class ExponentialEuler(NoisyStep, ExponentialStep):
    """Exponential Euler with noise: exact in the linear part of a frozen symmetric flow, explicit in its reaction.

    With N = phi f + R(u) + g(t) (Jentzen and Kloeden 2009, doi 10.1098/rspa.2008.0325)::

        u' = u + h phi_1(-hA) (N(u, t) - A u) + (s^2 (1 - exp(-2 h A)) / (2 A) M^-1)^1/2 xi

    where s is one number, and exp(-hA) s(u) dW for its last part where it is not (Lord and Rougemont 2004, doi
    10.1093/imanum/24.4.587). Of weak order 1, and of strong order 1 where s does not depend on the signal, else 1/2.

    Parameters
    ----------
    dt : float
        Step, at most 2 / b with a reaction whose slope is bounded by b.
    """

    order = 1.0
    reach = 2.0
    strong_order, strong_order_additive, weak_order = 0.5, 1.0, 1.0
    longer = "EulerMaruyama(dt)"

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        linear = as_linear(flow)
        u = linear.free(u)
        moved = self.applied(linear, linear.drawn(u) - linear.on_free(u), (1, dt))[0]
        return u + self.back(linear, moved, u)

    def noisy(self, flow: Flow, u: Array, dt: float, white: Array, noise: Noise) -> Array:
        linear, end = as_linear(flow), self.step(flow, u, dt)
        if _check_alike(linear, noise) is None:
            tol = 1e-7 if u.dtype == namespace(u).float32 else 1e-14
            return end + noise.times(flow, u, fluctuation(linear, white / math.sqrt(dt), dt, tol)[0])
        kick = self.applied(linear, noise.times(flow, u, white) / dt, (0, dt))[0]
        return end + self.back(linear, kick, u)
