"""Exponential integrators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import fft

from nlflow._array import Array, Floats, is_numpy, namespace, plus, underflowing
from nlflow.errors import InputError, NumericalError, check_number
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.base import Integrator, check_made_of, symmetry_of
from nlflow.flows.integrators.fixed_step import SplitStep
from nlflow.flows.linear import LinearFlow, as_linear
from nlflow.flows.modes import Modes, phi
from nlflow.flows.spectrum import check_bounds

_MOST = 2**20


def chebyshev_coefficients(
    function: Callable[[Floats], NDArray[Any]],
    low: float,
    high: float,
    tol: float,
    most: int = _MOST,
    *,
    phase: Callable[[Floats], Floats] | None = None,
) -> tuple[Floats, float]:
    """Return a Chebyshev expansion of `function` on [low, high], and a bound of what it leaves out: `tol` or rounding.

    (Trefethen, Approximation Theory and Approximation Practice, ch. 8.) The function's rounding grows with `phase`.

    Raises
    ------
    NumericalError
        When `most` samples do not reach `tol`.
    """
    n = 32
    while n <= most:
        angles = np.pi * (np.arange(n) + 0.5) / n
        # The distance from the lower end to full relative accuracy, on which exp(-t a) for large t depends.
        places = low + (high - low) * np.cos(angles / 2) ** 2
        values = np.asarray(function(places))
        coefficients = fft.dct(values, type=2) / n
        coefficients[0] /= 2
        # What lies at the rounding of the samples says nothing about the function.
        size = float(np.abs(values).max())
        if phase is not None:  # roundings of samples are independent: a mean of n has 1 / sqrt(n) of them
            size += float(np.linalg.norm(values * phase(places))) / n
        noise = np.abs(coefficients) <= 8 * np.finfo(np.float64).eps * size
        dropped = np.where(noise, np.abs(coefficients), 0.0)
        coefficients[noise] = 0
        remainders = np.append(np.cumsum(np.abs(coefficients[::-1]))[::-1], 0.0)
        # Once the second half is negligible the coefficients have decayed, and those beyond n, which a sample of n
        # nodes cannot see, are smaller still.
        if remainders[n // 2] <= 0.01 * tol:
            count = max(int(np.argmax(remainders <= tol)), 1)
            scale = float(np.abs(values).max())
            if _misfit(function, low, high, coefficients[:count]) <= tol + 1e-12 * scale + float(dropped.sum()):
                # Far beyond the expansion's end there are only roundings left to drop.
                return coefficients[:count], float(remainders[count] + dropped[: 2 * count].sum())
        n *= 2
    raise NumericalError(
        f"the expansion needs more than {most // 2} terms for tol={tol:g}: the time span times the largest eigenvalue "
        f"({high:.4g}) is too large; use a shorter span, or the equilibrium (minimizer) for the limit"
    )


def _misfit(function: Callable[[Floats], NDArray[Any]], low: float, high: float, coefficients: Floats) -> float:
    """Return how far an expansion is from its function near the lower end, where exp(-t a) is a spike for long t."""
    angles = np.pi * np.append(0.0, np.logspace(-8, 0, 49))  # at the end itself too, beside which a spike may hide
    signed = coefficients * (-1.0) ** np.arange(len(coefficients))
    # A few angles at a time: the expansion may be long.
    step = max(1, 2**20 // len(signed))
    blocks = (angles[i : i + step] for i in range(0, len(angles), step))
    values = np.concatenate([np.cos(np.outer(block, np.arange(len(signed)))) @ signed for block in blocks])
    return float(np.abs(values - function(low + (high - low) * np.sin(angles / 2) ** 2)).max())


def chebyshev_sums(
    operator: Callable[[Array], Array], v: Array, low: float, high: float, coefficients: Sequence[Floats]
) -> list[Array]:
    """Return sum_k c_k T_k(A') v for each list of coefficients; A' is A mapped from [low, high] to [-1, 1]."""
    degree = max(len(c) for c in coefficients) - 1
    centre, half = (high + low) / 2, (high - low) / 2

    def mapped(x: Array) -> Array:
        return (operator(x) - centre * x) / half

    before, now = v, v
    sums = [float(c[0]) * v for c in coefficients]
    for k in range(1, degree + 1):
        before, now = now, mapped(now) if k == 1 else 2 * mapped(now) - before
        for index, c in enumerate(coefficients):
            if k < len(c):
                sums[index] = plus(sums[index], float(c[k]), now)
    return sums


@underflowing
class Exponential(Integrator):
    r"""Exact solution of a frozen symmetric flow, u(t) = exp(-tA) u_0 + psi(A) phi f with psi(a) = (1 - exp(-ta)) / a.

    By a transform for NumPy arrays on periodic and reflecting grids with a position kernel, by `stencil` or
    `convolution`, with one fidelity and without a constraint; otherwise by a Chebyshev expansion, at most about
    sqrt(t rho log(1/tol)) averages where t rho is large (Hochbruck and Lubich 1997, doi 10.1137/S0036142995280572).
    A t rho that is too large for an expansion ends the run with status ``step failed``.

    Parameters
    ----------
    tol : float, optional
        Bound of the error of each step relative to the larger of |u_0| and |f|, root mean square in the flow's measure,
        rounding aside. 1e-12 in float64 and 1e-6 in float32 by default.
    """

    order = math.inf
    takes_constraint = True
    keeps_limit = True

    def __init__(self, tol: float | None = None) -> None:
        self.tol = None if tol is None else check_number("tol", tol, minimum=0, strict=True)

    def stability_limit(self, flow: Flow) -> float:
        del flow
        return math.inf

    def velocity_of(self, flow: Flow, u: Array) -> Array:
        linear = as_linear(flow)
        return linear.drawn(0 * u) - linear.on_free(linear.free(u))

    def check_kind(self, flow: Flow) -> None:
        as_linear(flow)
        if flow.evolving:
            raise InputError("integrator: Exponential needs a frozen kernel; use RungeKutta() or SemiImplicit()")
        if not flow.symmetric:
            advice = "SemiImplicit()" if flow.inner.by_nodes else "IMEX(dt)"
            raise InputError(
                f"integrator: Exponential needs {symmetry_of(as_linear(flow))}; use RungeKutta() or {advice}"
            )
        check_made_of(flow, "linear", self)
        _check_own(as_linear(flow))

    @staticmethod
    def knows(flow: Flow) -> bool:
        """Whether this solves the flow, noise aside."""
        if not isinstance(flow, LinearFlow) or not flow.symmetric or flow.evolving:
            return False
        return not (flow.moving or flow.timed or flow.overridden("linear"))

    def advance(self, flow: Flow, u: Array, t: float, target: float, memory: dict[str, Any]) -> tuple[Array, float]:
        xp, flow = namespace(u), as_linear(flow)
        span = target - t
        if modes := modes_of(flow, u):
            memory.setdefault("error_bound", 0.0)  # nothing is cut off
            return self._by_modes(flow, modes, u, span), target
        tol = self.tol if self.tol is not None else (1e-6 if u.dtype == xp.float32 else 1e-12)
        low, high = flow.spectral_bounds()
        high = max(high, low + 1e-300, 1e-300)

        decay = partial(_decay, span)
        if _decays_to_mean(flow):
            # What is conserved takes no part in the recurrence, nor what rounding adds to it.
            coefficients, tail = chebyshev_coefficients(decay, low, high, tol)
            memory["error_bound"] = memory.get("error_bound", 0.0) + tail
            return _beside_mean(flow, u, lambda v: chebyshev_sums(flow.linear, v, low, high, [coefficients])[0]), target
        if flow.terms.constraint is not None or not (flow.plain and flow.inner.by_nodes):
            # From the velocity, so that what is at rest stays at rest; it and the signal differ by the scale of A.
            size = max(abs(low), abs(high))
            # An expansion as large as the time multiplies its rounding by it: a long step is doubled from a short one.
            eps = float(xp.finfo(u.dtype).eps)
            doublings = max(math.ceil(math.log2(max(span * size * math.sqrt(eps), 1.0))), 0)
            v = flow.free(u)
            slope = (flow.drawn(v) - flow.on_free(v)) / size
            short = span / 2**doublings
            toward, tail = chebyshev_coefficients(
                lambda a: size * _response(short, a), low, high, tol / 2 ** (doublings + 1)
            )
            bound = 2 * tail
            moved = chebyshev_sums(flow.on_free, slope, low, high, [toward])[0]
            for k in range(doublings):
                after, tail = chebyshev_coefficients(
                    partial(_decay, short * 2**k), low, high, tol / 2 ** (doublings - k + 1)
                )
                bound = 2 * (bound + tail)
                moved = flow.without_mean(moved) if flow.conserves_mean else moved
                moved = moved + chebyshev_sums(flow.on_free, moved, low, high, [after])[0]
            memory["error_bound"] = memory.get("error_bound", 0.0) + bound
            return flow.held(_moved(flow, v, moved)), target
        if flow.fidelity is None or flow.observed is None:
            coefficients, tail = chebyshev_coefficients(decay, low, high, tol)
            memory["error_bound"] = memory.get("error_bound", 0.0) + tail
            return chebyshev_sums(flow.linear, u, low, high, [coefficients])[0], target
        source = flow.drawn(u)
        strength = flow.fidelity.bounds()[1]
        decaying, tail = chebyshev_coefficients(decay, low, high, tol / 2)
        responding, other = chebyshev_coefficients(lambda a: strength * _response(span, a), low, high, tol / 2)
        memory["error_bound"] = memory.get("error_bound", 0.0) + tail + other
        # Both expansions run in one recurrence, u and the source side by side as channels: one average serves both.
        flat = u[..., None] if u.ndim == len(flow.affinity.domain.shape) else u
        source = xp.reshape(source, flat.shape)
        both = xp.concat([flat, source / strength if strength > 0 else source], axis=-1)
        sums = chebyshev_sums(flow.linear, both, low, high, [decaying, responding])
        channels = flat.shape[-1]
        return xp.reshape(sums[0][..., :channels] + sums[1][..., channels:], u.shape), target

    @staticmethod
    def _by_modes(flow: LinearFlow, modes: Modes, u: Array, span: float) -> Array:
        if _decays_to_mean(flow):
            # What has decayed leaves no rounding of its size.
            return _beside_mean(flow, u, lambda v: modes.back(modes.phi(0, span, modes.forward(v)) / span, u.dtype))
        moved = modes.back(modes.phi(1, span, modes.forward(flow.drawn(u) - flow.linear(u))), u.dtype)
        return _moved(flow, u, moved)


def _decay(span: float, a: Any) -> Any:
    return np.exp(-span * a)


def _response(span: float, a: Any) -> Any:
    small = np.abs(span * a) < 1e-8
    safe = np.where(small, 1.0, a)
    return np.where(small, span * (1 - span * a / 2), -np.expm1(-span * safe) / safe)


def _decays_to_mean(flow: LinearFlow) -> bool:
    """Whether u(t) is the conserved mean and exp(-tA) of the rest."""
    drawn = flow.terms.drives or (flow.fidelity is not None and flow.observed is not None)
    return flow.conserves_mean and (flow.inner.by_nodes or not drawn)


def _beside_mean(flow: LinearFlow, u: Array, decayed: Callable[[Array], Array]) -> Array:
    mean = flow.mean(u)
    v = u - mean
    moved = decayed(v)
    return moved - (flow.mean(moved) - flow.mean(v)) + mean


def _moved(flow: LinearFlow, u: Array, change: Array) -> Array:
    """Return u + change, with the mean of u where it is conserved."""
    moved = u + flow.kept_mean(u, change)
    if not flow.conserves_mean:
        return moved
    return moved - (flow.mean(moved) - flow.mean(u))


_KEPT = 64  # expansions that are kept: of a run's two step lengths, and of those of a few others


def _check_own(flow: LinearFlow) -> None:
    """Raise `InputError` for an operator of one's own whose spectrum is not where it is said to be."""
    if not flow.has_own_bounds:
        check_bounds(flow)


@lru_cache(maxsize=_KEPT)
def _expansion(k: int, step: float, low: float, high: float, tol: float) -> Floats:
    """Return Chebyshev coefficients of step phi_k(-step a) for a in [low, high], to tol times the step."""
    coefficients, _ = chebyshev_coefficients(lambda a: phi(k, step * a), low, high, tol)
    return np.asarray(step * coefficients)


class ExponentialStep(SplitStep):
    """Base of exponential Runge-Kutta steps of du/dt = -A u + N(u, t), N being `LinearFlow.drawn`."""

    self_adjoint = True

    def check_kind(self, flow: Flow) -> None:
        super().check_kind(flow)
        _check_own(as_linear(flow))

    @staticmethod
    def applied(flow: LinearFlow, v: Array, *functions: tuple[int, float]) -> list[Array]:
        """Return h phi_k(-h A) v for each (k, h), or its image; see `back`."""
        if modes := modes_of(flow, v):
            image = modes.forward(v)
            return [modes.phi(k, h, image) for k, h in functions]
        low, high = flow.spectral_bounds()
        high = max(high, low + 1e-300, 1e-300)
        tol = 1e-7 if v.dtype == namespace(v).float32 else 1e-14
        expansions = [_expansion(k, h, low, high, tol) for k, h in functions]
        return chebyshev_sums(flow.on_free, v, low, high, expansions)

    # In a metric that is not by nodes N and A u are formed as images, where B is a factor: five transforms less. Of
    # systems too, which spares one transform of all channels.

    @staticmethod
    def rest(flow: LinearFlow, u: Array) -> Array:
        """Return N at u, or its image."""
        modes = _moving_modes(flow, u)
        return flow.drawn(u) if modes is None else modes.moved(modes.forward(flow.beside(u)))

    @staticmethod
    def slope(flow: LinearFlow, rest: Array, u: Array) -> Array:
        """Return N - A u, or its image, from `rest`."""
        modes = _moving_modes(flow, u)
        return rest - (flow.on_free(u) if modes is None else modes.linear(modes.forward(u)))

    @classmethod
    def reached(cls, flow: LinearFlow, part: Array, like: Array, *functions: tuple[int, float]) -> list[Array]:
        """Return h phi_k(-h A) of a `rest` or `slope` for each (k, h)."""
        modes = _moving_modes(flow, like)
        if modes is None:
            return cls.applied(flow, part, *functions)
        return [modes.phi(k, h, part) for k, h in functions]

    @staticmethod
    def back(flow: LinearFlow, image: Array, like: Array) -> Array:
        """Return the signal of an image."""
        modes = modes_of(flow, like)
        moved = image if modes is None else modes.back(image, like.dtype)
        return flow.kept_mean(like, moved)


def _moving_modes(flow: LinearFlow, like: Array) -> Modes | None:
    """Return the modes of a system, or a flow in a metric not by nodes, where its pieces are known by themselves."""
    plain = flow.inner.by_nodes and flow.width(diffusion=True) == 1
    return None if plain or not flow.split else modes_of(flow, like)


def modes_of(flow: LinearFlow, v: Array) -> Modes | None:
    """Return the modes of A that a transform gives for signals like `v`, or None."""
    return flow.modes if is_numpy(v) and flow.terms.constraint is None else None


@underflowing
class ETD2RK(ExponentialStep):
    """Exponential time differencing of order 2, exact in the linear part; for frozen symmetric flows.

    With N = phi f + R(u) + g(t) (Cox and Matthews 2002, doi 10.1006/jcph.2002.6995, eq. 22)::

        a  = u + h phi_1(-hA) (N(u, t) - A u)
        u' = a + h phi_2(-hA) (N(a, t + h) - N(u, t))

    A step takes transforms where `Exponential` does, elsewhere O(sqrt(h rho)) averages, rho being the bound of A.

    Parameters
    ----------
    dt : float
        Step, at most 2 / b with a reaction whose slope is bounded by b.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import ETD2RK, AllenCahn, Gaussian, GradientFlow, Grid, J, affinity, solve
    >>> flow = GradientFlow(J(affinity(Gaussian(width=2.0), Grid(40))), reaction=AllenCahn())
    >>> found = solve(flow, np.sin(np.arange(40.0)), t_eval=[0.0, 1.0, 2.0, 3.0], integrator=ETD2RK(0.1))
    >>> bool(np.all(np.diff(found.energy) < 0))
    True
    """

    order = 2.0
    reach = 2.0

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        linear = as_linear(flow)
        end, u = linear.when(flow.time + dt), linear.free(u)
        first = self.rest(linear, u)
        to_end = self.reached(linear, self.slope(linear, first, u), u, (1, dt))[0]
        a = u + self.back(linear, to_end, u)
        change = self.reached(linear, self.rest(end, a) - first, u, (2, dt))[0]
        return a + self.back(linear, change, u)


@underflowing
class ETD4RK(ExponentialStep):
    """Exponential time differencing of order 4, exact in the linear part; see `ETD2RK`.

    With the stages of Krogstad (2005, doi 10.1016/j.jcp.2004.08.006), ETDRK4-B. Where dt rho is large the order may
    fall (Hochbruck and Ostermann 2005, doi 10.1137/040611434).

    Parameters
    ----------
    dt : float
        Step, at most 2.7 / b with a reaction whose slope is bounded by b.
    """

    order = 4.0
    reach = 2.7

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        linear, t, half = as_linear(flow), flow.time, dt / 2
        middle, end, u = linear.when(t + half), linear.when(t + dt), linear.free(u)
        first = self.rest(linear, u)
        slope = self.slope(linear, first, u)
        to_middle, to_end = self.reached(linear, slope, u, (1, half), (1, dt))
        # Each difference of N from that at u goes through all the functions that some stage needs, in one recurrence.
        d2 = self.rest(middle, u + self.back(linear, to_middle, u)) - first
        p2_half, p2, p3 = self.reached(linear, d2, u, (2, half), (2, dt), (3, dt))
        d3 = self.rest(middle, u + self.back(linear, to_middle + 2 * p2_half, u)) - first
        q2, q3 = self.reached(linear, d3, u, (2, dt), (3, dt))
        d4 = self.rest(end, u + self.back(linear, to_end + 2 * q2, u)) - first
        r2, r3 = self.reached(linear, d4, u, (2, dt), (3, dt))
        return u + self.back(linear, to_end + (2 * (p2 + q2) - r2) + 4 * (r3 - p3 - q3), u)
