"""Steps that are implicit in the linear part and explicit in the rest."""

from __future__ import annotations

import math
from typing import Any

from nlflow._array import Array, namespace, over_channels, power_of_two, scalar, underflowing
from nlflow.flows.flow import Flow
from nlflow.flows.integrators.base import StepFailureError
from nlflow.flows.integrators.etd import transform_of
from nlflow.flows.integrators.fixed_step import SplitStep
from nlflow.flows.linear import LinearFlow, as_linear
from nlflow.functionals.fidelity import NodeFidelity
from nlflow.functionals.krylov import conjugate_gradients, gmres

_MOST = 10_000  # averages for one linear system


class ImplicitStep(SplitStep):
    """What steps share that solve (I + s A) x = b in each stage, A being the linear part between free nodes.

    By a transform where one diagonalizes A, else by conjugate gradients, about sqrt(s rho) of them times the logarithm
    of the tolerance, rho being the bound of A; by GMRES where A is not symmetric. The frozen kernel alone is asked for:
    no matrix is formed.
    """

    longer = "ConvexSplitting(dt) or RungeKutta()"

    @staticmethod
    def solved(flow: LinearFlow, b: Array, s: float, shift: float, guess: Array) -> Array:
        """Return x with (1 + s shift) x + s A x = b, of signals that are 0 where a constraint gives values.

        Raises
        ------
        StepFailureError
            When the residual stays above 1e-9 of b (1e-4 in float32), as rounding keeps it for s rho near 10^7.
        """
        xp = namespace(b)
        lift = 1 + s * shift
        if transform := transform_of(flow, b):
            rate = 1.0 if flow.metric == "degree" else transform.degree
            drawn = 0.0 if flow.fidelity is None else (flow.fidelity.uniform or 0.0)
            gain = 1 / (lift + s * (rate * transform.rest + drawn))
            return transform.back(transform.times(gain, transform.forward(b)), b.dtype)
        rtol = 1e-6 if b.dtype == xp.float32 else 1e-11
        size = power_of_two(scalar(xp.max(xp.abs(b))))  # squares of very large and very small values have no float
        b, guess = b / size, guess / size

        def operator(v: Array) -> Array:
            return lift * v + s * flow.on_free(v)

        if not flow.symmetric:
            columns, shape = (flow.affinity.domain.size, -1), tuple(b.shape)
            found = gmres(
                lambda v: xp.reshape(operator(xp.reshape(v, shape)), columns), xp.reshape(b, columns),
                xp.reshape(guess, columns), rtol=rtol, maxiter=_MOST,
            )  # fmt: skip
        else:
            mixed = flow.fidelity is not None and flow.fidelity.width > 1
            axes = tuple(range(b.ndim if mixed else len(flow.affinity.domain.shape)))
            measure = over_channels(flow.measure(b), b)
            # Nodes of a large degree, or a large fidelity, are stiff by themselves: that much is solved exactly.
            fidelity, diagonal = flow.fidelity, lift + s * over_channels(flow._rate, b)
            if isinstance(fidelity, NodeFidelity):
                diagonal = diagonal + s * over_channels(fidelity.values, b)

            def inner(v: Array, w: Array) -> Array:
                return xp.sum(measure * v * w, axis=axes, keepdims=True, dtype=xp.float64)

            found = conjugate_gradients(
                operator, b, guess, inner=inner,
                precondition=lambda r: r / diagonal, rtol=rtol, maxiter=_MOST,
            )  # fmt: skip
        if not found.residual <= 100 * rtol:
            raise StepFailureError(
                f"the linear system of a step was solved to {found.residual:.3g} alone; use a smaller dt, or ETD4RK(dt)"
            )
        return size * xp.reshape(found.x, tuple(b.shape))


@underflowing
class IMEX(ImplicitStep):
    """Implicit-explicit Runge-Kutta step of order 2: diffusion and fidelity implicit, reactions and sources explicit.

    ARS(2,2,2) of Ascher, Ruuth and Spiteri (1997, doi 10.1016/S0168-9274(97)00056-1), L-stable in the linear part: no
    step is too long for the diffusion, and modes that decay within a step are gone after it. With N = R(u) + g(t),
    F = phi f(t), g = 1 - 2^-1/2 and d = 1 - 1 / (2 g)::

        (1 + h g A) a  = u + h g (N(u, t) + F(t + g h))
        (1 + h g A) u' = u + h (1 - g) (F(t + g h) - A a) + h g F(t + h) + h (d N(u, t) + (1 - d) N(a, t + g h))

    A reaction whose slope is at most b asks for h <= 2 / b. For P that is not symmetric too, where `ETD2RK` is not at
    hand. Two linear systems a step; see `ConvexSplitting` for steps of any length. Values of a constraint act as F,
    implicitly.

    Parameters
    ----------
    dt : float
        Step.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import IMEX, AllenCahn, Gaussian, GradientFlow, Grid, J, affinity, solve
    >>> flow = GradientFlow(J(affinity(Gaussian(width=2.0), Grid(40))), reaction=AllenCahn())
    >>> found = solve(flow, np.sin(np.arange(40.0)), t_eval=[0.0, 1.0, 2.0, 3.0], integrator=IMEX(0.1))
    >>> bool(np.all(np.diff(found.energy) < 0))
    True
    """

    order = 2.0
    reach = 2.0

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        """Return the signal after one step."""
        linear = as_linear(flow)
        g = 1 - math.sqrt(0.5)
        d, part = 1 - 1 / (2 * g), linear.free(u)
        middle, end, first = linear.when(flow.time + g * dt), linear.when(flow.time + dt), linear.rest(part)
        pull = middle.toward(part)
        a = self.solved(linear, part + dt * g * (first + pull), dt * g, 0.0, part)
        b = part + dt * (1 - g) * (pull - linear.on_free(a)) + dt * g * end.toward(part)
        b = b + dt * (d * first + (1 - d) * middle.rest(a))
        return self.solved(linear, b, dt * g, 0.0, a)


@underflowing
class ConvexSplitting(ImplicitStep):
    """Implicit step whose energy falls however long it is, (1 + h (A + b)) u' = u + h (F + N + b u); order 1.

    b bounds the slope of the reaction R, so J + b |u|^2 / 2 is convex and its other part, F - b |u|^2 / 2 with F' = -R,
    concave: the first is taken at the end of the step, the second at the beginning (Eyre 1998, doi
    10.1557/PROC-529-39). Where the ends of the reaction's interval are at rest or point inward, as those of `AllenCahn`
    and `FisherKPP`, the signal stays in it, and the energy falls from step to step for any h. A long step only moves
    little: its error is about h b.

    Parameters
    ----------
    dt : float
        Step.
    """

    order = 1.0
    reach = math.inf

    def step(self, flow: Flow, u: Array, dt: float) -> Array:
        """Return the signal after one step."""
        linear: Any = as_linear(flow)
        part, bound = linear.free(u), linear.terms.bound
        b = part + dt * (linear.when(flow.time + dt).toward(part) + linear.rest(part) + bound * part)
        return self.solved(linear, b, dt, bound, part)
