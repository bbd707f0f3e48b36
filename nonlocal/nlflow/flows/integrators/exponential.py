"""The exact exponential of frozen symmetric flows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nlflow._array import Array, namespace, underflowing
from nlflow.errors import InputError, check_number
from nlflow.flows.chebyshev import chebyshev_coefficients, chebyshev_sums
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.base import Integrator, check_made_of
from nlflow.flows.linear import LinearFlow, as_linear
from nlflow.flows.spectrum import check_bounds


@underflowing
class Exponential(Integrator):
    r"""Exact solution of a frozen symmetric flow by Chebyshev expansion of the exponential.

    u(t) = exp(-tA) u_0 + psi(A) phi f with psi(a) = (1 - exp(-ta)) / a, expanded in Chebyshev polynomials on the
    interval that holds the spectrum. The number of averages grows like sqrt(t rho log(1/tol)), and the error in the
    flow's norm is at most the sum of the coefficients left out, which is known before the first average. Goes from one
    output time to the next in one step, however long. (Hochbruck and Lubich 1997, doi 10.1137/S0036142995280572.)

    Parameters
    ----------
    tol : float, optional
        Bound of the error relative to the larger of |u_0| and |f|, root mean square in the flow's measure, at each
        step. 1e-12 in float64 and 1e-6 in float32 by default. Rounding adds to it, see the notes.

    Notes
    -----
    A step of the recurrence rounds by at most g = 2 (m + 8) eps times the largest value, where rows of P have m
    entries. A rounding in the mode of eigenvalue a grows as a Chebyshev polynomial of the second kind,
    U_k <= k + 1, at most 1 / sin in between. The coefficients of exp(-ta) fall from term to term and their moduli sum
    to 1, so (by Abel's summation) all steps together add at most g rho / (3 a) to that mode for any t, and at most
    g t rho / 2 where a is about 0. rho is the upper end of the interval; the constant 1/3 was computed, for t rho up
    to 10^7, where it tends to 1/4. At a = 0 roundings of either sign leave about eps times the degree to the power 3/2.

    Of a J-flow the mean m(u_0) is taken out before and put back after, for each channel and each item of a `Batch`.
    What is conserved, sum w u (L2) or sum w d u (degree), is so kept to 2 (N + 16) eps max |u_0| for N nodes, whatever
    t is. The limit is reached to g rho / (3 mu_2) of the size of u_0 - m(u_0), mu_2 > 0 being the smallest other
    eigenvalue. Parts of a graph that do not see each other keep their common mean to the same bound, and the
    differences of their means to the one of a = 0.
    """

    order = math.inf
    takes_constraint = True
    keeps_limit = True

    def __init__(self, tol: float | None = None) -> None:
        self.tol = None if tol is None else check_number("tol", tol, minimum=0, strict=True)

    def stability_limit(self, flow: Flow) -> float:
        """Return infinity: the expansion holds for every step."""
        del flow
        return math.inf

    def velocity_of(self, flow: Flow, u: Array) -> Array:
        """Return N - A u with the N of another signal, since it is taken for a constant."""
        linear = as_linear(flow)
        return linear.drawn(0 * u) - linear.on_free(linear.free(u))

    def check_kind(self, flow: Flow) -> None:
        """Raise `InputError` for evolving and for non-symmetric flows, and for those that are more than linear."""
        as_linear(flow)
        if flow.evolving:
            raise InputError("integrator: Exponential needs a frozen kernel; use RungeKutta() or SemiImplicit()")
        if not flow.symmetric:
            raise InputError("integrator: Exponential needs a symmetric affinity; use RungeKutta() or SemiImplicit()")
        check_made_of(flow, "linear", self)
        check_bounds(as_linear(flow))

    @staticmethod
    def knows(flow: Flow) -> bool:
        """Whether the flow is one whose exact solution this is."""
        if not isinstance(flow, LinearFlow) or not flow.symmetric or flow.evolving:
            return False
        return not (flow.terms.moving or flow.timed or flow.overridden("linear"))

    def advance(self, flow: Flow, u: Array, t: float, target: float, memory: dict[str, Any]) -> tuple[Array, float]:
        """Return the signal at `target`; see `Integrator.advance`."""
        xp, flow = namespace(u), as_linear(flow)
        tol = self.tol if self.tol is not None else (1e-6 if u.dtype == xp.float32 else 1e-12)
        span = target - t
        low, high = flow.spectral_bounds()
        high = max(high, low + 1e-300, 1e-300)

        def decay(a: Any) -> Any:
            return np.exp(-span * a)

        def response(a: Any) -> Any:
            small = np.abs(span * a) < 1e-8
            safe = np.where(small, 1.0, a)
            return np.where(small, span * (1 - span * a / 2), -np.expm1(-span * safe) / safe)

        if flow.terms.constraint is not None or not flow.plain:
            # From the velocity, so that what is at rest stays at rest; it and the signal differ by the scale of A.
            size = max(abs(low), abs(high))
            toward, tail = chebyshev_coefficients(lambda a: size * response(a), low, high, tol / 2)
            memory["error_bound"] = memory.get("error_bound", 0.0) + 2 * tail
            v = flow.free(u)
            slope = (flow.drawn(v) - flow.on_free(v)) / size
            return flow.held(v + chebyshev_sums(flow.on_free, slope, low, high, [toward])[0]), target
        if flow.conserves_mean or flow.fidelity is None or flow.observed is None:
            coefficients, tail = chebyshev_coefficients(decay, low, high, tol)
            memory["error_bound"] = memory.get("error_bound", 0.0) + tail
            if not flow.conserves_mean:
                return chebyshev_sums(flow.linear, u, low, high, [coefficients])[0], target
            # What is conserved takes no part in the recurrence, nor what rounding adds to it.
            mean = flow.mean(u)
            v = u - mean
            moved = chebyshev_sums(flow.linear, v, low, high, [coefficients])[0]
            return moved - (flow.mean(moved) - flow.mean(v)) + mean, target
        source = flow.drawn(u)
        strength = flow.fidelity.bounds()[1]
        decaying, tail = chebyshev_coefficients(decay, low, high, tol / 2)
        responding, other = chebyshev_coefficients(lambda a: strength * response(a), low, high, tol / 2)
        memory["error_bound"] = memory.get("error_bound", 0.0) + tail + other
        # Both expansions run in one recurrence, u and the source side by side as channels: one average serves both.
        flat = u[..., None] if u.ndim == len(flow.affinity.domain.shape) else u
        source = xp.reshape(source, flat.shape)
        both = xp.concat([flat, source / strength if strength > 0 else source], axis=-1)
        sums = chebyshev_sums(flow.linear, both, low, high, [decaying, responding])
        channels = flat.shape[-1]
        return xp.reshape(sums[0][..., :channels] + sums[1][..., channels:], u.shape), target
