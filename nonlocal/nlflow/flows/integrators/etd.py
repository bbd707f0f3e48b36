"""Exponential Runge-Kutta steps: the linear part exactly, reactions and sources by stages."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, Floats, is_numpy, namespace, underflowing
from nlflow.affinities import Affinity
from nlflow.flows.chebyshev import chebyshev_coefficients, chebyshev_sums
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.fixed_step import SplitStep
from nlflow.flows.linear import LinearFlow, as_linear
from nlflow.flows.spectrum import check_bounds
from nlflow.functionals.preconditioners.transform import Diagonal

_TERMS = 20  # of the Taylor series of phi_k on [0, 1]: the next is 1 / 20!, below the rounding of a float64
_GAINS = 16  # functions of a spectrum that are kept, each as large as a signal
_KEPT = 64  # expansions that are kept: of a run's two step lengths, and of those of a few others


def phi(k: int, z: NDArray[Any]) -> Floats:
    """Return phi_k(-z) for z >= 0, to a few roundings.

    phi_0(x) = exp(x), phi_{k+1}(x) = (phi_k(x) - 1 / k!) / x. The recurrence cancels near 0, so below 1 the Taylor
    series sum_j x^j / (j + k)! is taken, by Horner's rule.
    """
    z = np.asarray(z, dtype=np.float64)
    if k == 0:
        return np.asarray(np.exp(-z))
    large = np.maximum(z, 1.0)
    value = -np.expm1(-large) / large
    for j in range(1, k):
        value = (1 / math.factorial(j) - value) / large
    near = np.minimum(z, 1.0)
    series = np.full_like(near, 1 / math.factorial(_TERMS + k))
    for j in range(_TERMS - 1, -1, -1):
        series = 1 / math.factorial(j + k) - near * series
    return np.asarray(np.where(z < 1, series, value))


@lru_cache(maxsize=_KEPT)
def _expansion(k: int, step: float, low: float, high: float, tol: float) -> Floats:
    """Return Chebyshev coefficients of step phi_k(-step a) for a in [low, high], to tol times the step."""
    coefficients, _ = chebyshev_coefficients(lambda a: phi(k, step * a), low, high, tol)
    return np.asarray(step * coefficients)


class ExponentialStep(SplitStep):
    """What exponential Runge-Kutta steps share: du/dt = -A u + N(u, t), exact in A for any step.

    A = r (I - P) + phi is the flow's linear part between free nodes, and N the rest, `LinearFlow.drawn`. A subclass
    defines `step` from it and `applied`, for the part of the signal that is free of a constraint. A dampens: where it
    is not 0 the step is stable beyond its reach.
    """

    self_adjoint = True

    def check_kind(self, flow: Flow) -> None:
        """Raise `InputError` for flows that the step cannot split, or whose spectrum is not where it is said to be."""
        super().check_kind(flow)
        check_bounds(as_linear(flow))

    @staticmethod
    def applied(flow: LinearFlow, v: Array, *functions: tuple[int, float]) -> list[Array]:
        """Return h phi_k(-h A) v for each (k, h): transforms of it, or by one Chebyshev recurrence; see `back`."""
        if transform := transform_of(flow, v):
            image = transform.forward(v)
            return [transform.times(transform.gain(k, h, *transform.numbers(flow)), image) for k, h in functions]
        low, high = flow.spectral_bounds()
        high = max(high, low + 1e-300, 1e-300)
        tol = 1e-7 if v.dtype == namespace(v).float32 else 1e-14
        expansions = [_expansion(k, h, low, high, tol) for k, h in functions]
        return chebyshev_sums(flow.on_free, v, low, high, expansions)

    @staticmethod
    def back(flow: LinearFlow, image: Array, like: Array) -> Array:
        """Return the signal that a sum of what `applied` returns stands for."""
        transform = transform_of(flow, like)
        return image if transform is None else transform.back(image, like.dtype)


class _Diagonal(Diagonal):
    """A transform that keeps the functions it was asked for."""

    def __init__(self, affinity: Affinity) -> None:
        super().__init__(affinity)
        self._log_degree = float(affinity.log_degree.ravel()[0])  # where a transform diagonalizes P all are alike
        self._gains: dict[tuple[int, float, float, float], Floats] = {}

    def numbers(self, flow: LinearFlow) -> tuple[float, float]:
        """Return the rate r and the fidelity of all nodes: the eigenvalues of A are r `rest` + the second."""
        rate = 1.0 if flow.inner.normalized else math.exp(self._log_degree)
        return rate, 0.0 if flow.fidelity is None else (flow.fidelity.uniform or 0.0)

    def gain(self, k: int, h: float, rate: float, drawn: float) -> Floats:
        """Return h phi_k(-h a) at the eigenvalues a = rate (1 - mu) + drawn of A."""
        key = (k, h, rate, drawn)
        if key not in self._gains:
            if len(self._gains) >= _GAINS:
                self._gains.pop(next(iter(self._gains)))  # the oldest
            self._gains[key] = h * phi(k, h * (rate * self.rest + drawn))
        return self._gains[key]


_transforms: WeakKeyDictionary[Affinity, _Diagonal] = WeakKeyDictionary()


def transform_of(flow: LinearFlow, v: Array) -> _Diagonal | None:
    """Return the transform that diagonalizes A, None where there is none."""
    uniform = flow.fidelity is None or flow.fidelity.uniform is not None
    if not flow.plain or flow.terms.constraint is not None or not uniform or not is_numpy(v):
        return None
    # Each stage asks, and to find out whether a stencil has a transform takes one.
    if flow.affinity not in _transforms and Diagonal.offered(flow.affinity):
        _transforms[flow.affinity] = _Diagonal(flow.affinity)
    return _transforms.get(flow.affinity)


@underflowing
class ETD2RK(ExponentialStep):
    """Exponential time differencing of order 2, exact in the linear part of a frozen symmetric flow.

    (Cox and Matthews 2002, doi 10.1006/jcph.2002.6995, eq. 22.) With N = phi f + R(u) + g(t)::

        a  = u + h phi_1(-hA) (N(u, t) - A u)
        u' = a + h phi_2(-hA) (N(a, t + h) - N(u, t))

    No step is too long for the diffusion or the fidelity; a reaction whose slope is at most b asks for h <= 2 / b. What
    is at rest stays at rest. A flow with a source that does not change is exact.

    On periodic and reflecting grids with a position kernel and one fidelity phi_k(-h A) takes a transform and one back
    for each function. Elsewhere it is a Chebyshev expansion to rounding, whose averages grow like sqrt(h rho), rho
    being the bound of A, from about a dozen; on tensors too.

    Parameters
    ----------
    dt : float
        Step.

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
        """Return the signal after one step."""
        linear = as_linear(flow)
        end, u = linear.when(flow.time + dt), linear.free(u)
        first = linear.drawn(u)
        to_end = self.applied(linear, first - linear.on_free(u), (1, dt))[0]
        a = u + self.back(linear, to_end, u)
        change = self.applied(linear, end.drawn(a) - first, (2, dt))[0]
        return a + self.back(linear, change, u)


@underflowing
class ETD4RK(ExponentialStep):
    """Exponential time differencing of order 4, exact in the linear part of a frozen symmetric flow.

    Krogstad's four stages (Krogstad 2005, doi 10.1016/j.jcp.2004.08.006; Hochbruck and Ostermann 2010, doi
    10.1017/S0962492910000048, table 5.1 and section 5.3), as `ETD2RK` otherwise. A reaction whose slope is at most b
    asks for h <= 2.7 / b. Four expansions a step, or five transforms and back. Where h rho is large the order may
    fall to 3, and lower as long as modes that decay within a step are in the signal.

    Parameters
    ----------
    dt : float
        Step.
    """

    order = 4.0
    reach = 2.7

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        """Return the signal after one step."""
        linear, t, half = as_linear(flow), flow.time, dt / 2
        middle, end, u = linear.when(t + half), linear.when(t + dt), linear.free(u)
        first = linear.drawn(u)
        slope = first - linear.on_free(u)
        to_middle, to_end = self.applied(linear, slope, (1, half), (1, dt))
        # Each difference of N from that at u goes through all the functions that some stage needs, in one recurrence.
        d2 = middle.drawn(u + self.back(linear, to_middle, u)) - first
        p2_half, p2, p3 = self.applied(linear, d2, (2, half), (2, dt), (3, dt))
        d3 = middle.drawn(u + self.back(linear, to_middle + 2 * p2_half, u)) - first
        q2, q3 = self.applied(linear, d3, (2, dt), (3, dt))
        d4 = end.drawn(u + self.back(linear, to_end + 2 * q2, u)) - first
        r2, r3 = self.applied(linear, d4, (2, dt), (3, dt))
        return u + self.back(linear, to_end + (2 * (p2 + q2) - r2) + 4 * (r3 - p3 - q3), u)
