"""Derivatives of functionals, flows and equilibria with respect to all that they are made of, by torch.

Signals, observed signals, fidelities and the features of an affinity may be tensors that ask for a gradient. A kernel's
width is learnt through its features: those of a Gaussian of width 1, divided by the width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nlflow._array import constant_like, over_channels
from nlflow.errors import InputError, NumericalError, check_integer
from nlflow.fidelity import NodeFidelity
from nlflow.flow import Flow
from nlflow.functional import E, J
from nlflow.integrators import AttentionStep, ExplicitEuler, Integrator, NeutrenoStep, SemiImplicit
from nlflow.krylov import conjugate_gradients, default_rtol, verdict

__all__ = ["minimizer", "run", "value"]

_FIXED = (AttentionStep, ExplicitEuler, NeutrenoStep, SemiImplicit)


def value(functional: J, u: Tensor) -> Tensor:
    """Return J(u) or E(u) with its derivatives.

    Parameters
    ----------
    functional : J or E
        Of an affinity of torch features.
    u : tensor of shape ``domain.shape`` or ``domain.shape + (D,)``

    Returns
    -------
    tensor without axes
        In float64; the derivative with respect to `u` is the gradient of `J.gradient` in the L2 metric times the
        weights w_i.

    Raises
    ------
    InputError
        For what is no tensor, a wrong shape, NaN or infinity.

    Examples
    --------
    >>> import torch
    >>> from nlflow import Gaussian, J, Points, affinity, autograd
    >>> x = torch.tensor([[0.0], [1.0]], dtype=torch.float64, requires_grad=True)
    >>> j = J(affinity(Gaussian(width=1.0), Points([0.0, 1.0], weights=[1.0, 1.0]), x))
    >>> autograd.value(j, torch.tensor([0.0, 2.0], dtype=torch.float64)).backward()
    >>> [round(float(g), 6) for g in x.grad]  # the nodes attract each other the less, the farther they are apart
    [2.426123, -2.426123]
    """
    u = _tensor("u", functional.affinity.check_signal("u", u))
    affinity = functional.affinity
    weights = constant_like(affinity.domain.weights, u.double())
    degree = weights * torch.exp(affinity.log_degree.double())
    # Formed about the mean, so that nothing cancels; a constant changes nothing else, in derivatives neither.
    centred = u - affinity.mean(u.detach(), "degree")
    total = 0.5 * (over_channels(degree, u.double()) * centred * (u - affinity.average(u))).sum(dtype=torch.float64)
    if isinstance(functional, E):
        misfit = u - functional.observed
        measure = degree if functional.measure == "degree" else weights
        weighted = functional.fidelity_in(functional.measure).times(misfit) * misfit
        total = total + 0.5 * (over_channels(measure, u.double()) * weighted).sum(dtype=torch.float64)
    if not bool(torch.isfinite(total.detach())):
        raise NumericalError("value: it overflows; scale the signals, or the kernel's amplitude or logits")
    result: Tensor = total
    return result


def run(flow: Flow, u: Tensor, integrator: Integrator, steps: int) -> Tensor:
    """Return the signal after some steps of an integrator, with its derivatives.

    About sqrt(steps) signals are kept, and what a step forms inside is computed anew for the derivatives, so that k
    steps take O(sqrt(k) N D) memory and three times the averages.

    Parameters
    ----------
    flow : GradientFlow or AttentionFlow
        Of an affinity of torch features; an evolving one has its kernel taken from the signal each ``every`` steps.
    u : tensor of shape ``domain.shape`` or ``domain.shape + (D,)``
    integrator : ExplicitEuler, SemiImplicit, AttentionStep or NeutrenoStep
        One whose steps have a length of their own.
    steps : int

    Raises
    ------
    InputError
        For an integrator that chooses its steps.
    StabilityError
        When the step is outside the stable range.
    """
    u = _tensor("u", flow.affinity.check_signal("u", u))
    steps = check_integer("steps", steps, minimum=0)
    if not isinstance(integrator, _FIXED):
        raise InputError(
            f"integrator: got {integrator!r}, expected one whose steps have a length of their own, such as "
            "ExplicitEuler(dt), SemiImplicit(dt) or AttentionStep()"
        )
    with torch.no_grad():
        integrator.check(flow)

    def several(v: Tensor, first: int, count: int) -> Tensor:
        current = flow
        for step in range(first, first + count):
            if flow.evolving and step > 0:
                current = _evolved(flow, current, v, step)
            v = checkpoint(lambda w, f=current: integrator.advance(f, w, 0.0, math.inf, {})[0], v, use_reentrant=False)
        return v

    if flow.evolving:  # what the kernel is taken from has to stay
        return several(u, 0, steps)
    segment = max(1, math.isqrt(steps))
    for first in range(0, steps, segment):
        u = checkpoint(several, u, first, min(segment, steps - first), use_reentrant=False)
    return u


def _evolved(flow: Flow, current: Flow, v: Tensor, step: int) -> Flow:
    return flow.rebuilt(v) if step % flow.every == 0 else current


class _Solution(torch.autograd.Function):
    """A solution of r(u, theta) = 0 as a function of the value of r at it, whose derivative is -A^-1."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, u: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.solve = solve
        return u.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return -ctx.solve(gradient), None, None


def minimizer(functional: E, *, rtol: float | None = None, maxiter: int = 10_000) -> Tensor:
    """Return the minimiser of E, the equilibrium of its flows, with its derivatives.

    By the implicit function theorem: derivatives with respect to the observed signal, the fidelity and the features of
    the affinity cost one more linear system, whatever the number of iterations.

    Parameters
    ----------
    functional : E
        Of an affinity of torch features.
    rtol : float, optional
        Residual of both systems relative to their right-hand sides; 1e-10 in float64 and 1e-5 in float32 by default.
    maxiter : int

    Raises
    ------
    InputError
        For J, which every constant minimises, and for matrix-valued fidelities.
    NumericalError
        When a system is not solved to `rtol`.
    """
    if not isinstance(functional, E):
        raise InputError(f"functional: got {type(functional).__name__}, expected E(affinity, f, fidelity)")
    _tensor("observed", functional.observed)
    fidelity = functional.fidelity_in("degree")
    if not isinstance(fidelity, NodeFidelity):
        raise InputError("functional: got a matrix for each node as fidelity, expected a number for each")
    affinity = functional.affinity
    with torch.no_grad():
        found = functional.minimizer(rtol=rtol, maxiter=maxiter)
    if not found.success:
        raise NumericalError(f"minimizer: {found.message}")
    u = found.u.detach()
    # In the degree metric, where A = (I - P) + phi is self-adjoint in the measure w d.
    residual = u - affinity.average(u) + fidelity.times(u - functional.observed)
    measure: Any = over_channels(affinity.measure("degree", u).detach(), u)
    values: Any = fidelity.values
    frozen = NodeFidelity(values.detach() if isinstance(values, Tensor) else values)
    axes = tuple(range(len(affinity.domain.shape)))
    tolerance = default_rtol(u) if rtol is None else rtol

    def solve(gradient: Tensor) -> Tensor:
        # A^T = M A M^-1.
        with torch.no_grad():
            b = gradient / measure.to(gradient.dtype)
            solved = conjugate_gradients(
                lambda v: v - affinity.average(v) + frozen.times(v), b, torch.zeros_like(b),
                inner=lambda a, c: (measure * a * c).sum(dim=axes, keepdim=True, dtype=torch.float64),
                precondition=lambda r: frozen.damped(r, 1.0), rtol=tolerance, maxiter=maxiter,
            )  # fmt: skip
        success, why = verdict(solved.residual, tolerance)
        if not success:
            raise NumericalError(f"minimizer: the residual of its derivative is {solved.residual:.2g}{why}")
        result: Tensor = measure.to(gradient.dtype) * solved.x
        return result

    return _Solution.apply(residual, u, solve)  # type: ignore[no-any-return,no-untyped-call]  # torch's is untyped


def _tensor(name: str, u: Any) -> Tensor:
    if not isinstance(u, Tensor):
        raise InputError(
            f"{name}: got {type(u).__name__}, expected a torch tensor, and an affinity of torch features; convert them "
            "(torch.from_numpy)"
        )
    return u
