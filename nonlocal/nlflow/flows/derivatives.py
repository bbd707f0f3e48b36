"""Derivatives of functionals, flows and equilibria."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from nlflow.errors import not_installed

try:
    import torch
    from torch import Tensor
    from torch.utils.checkpoint import checkpoint
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise not_installed(__name__, "torch", "torch") from error

from nlflow._array import kept_like, over_channels, told_of
from nlflow._looks import Doubt, doubting
from nlflow.errors import InputError, NumericalError, check_integer, check_number, kind_of
from nlflow.flows.flow import as_flow
from nlflow.flows.gradient import AttentionFlow, GradientFlow
from nlflow.flows.integrators import FixedStep, Integrator
from nlflow.flows.integrators.base import check_admitted, check_same_flow, check_terms
from nlflow.flows.linear import LinearFlow
from nlflow.functionals.accuracy import Rows
from nlflow.functionals.energies import E, J
from nlflow.functionals.krylov import Solved, default_rtol, verdict

__all__ = ["equilibrium", "minimizer", "run", "value"]

_BLOCK = 1024  # terms of a sum that one thread adds up


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
        In float64.

    Raises
    ------
    InputError
        For a wrong type or shape, NaN and infinity; `NumericalError` for a value that overflows.

    Examples
    --------
    >>> import torch
    >>> from nlflow import Gaussian, J, Points, affinity
    >>> from nlflow.flows import derivatives
    >>> x = torch.tensor([[0.0], [1.0]], dtype=torch.float64, requires_grad=True)
    >>> j = J(affinity(Gaussian(width=1.0), Points([0.0, 1.0], weights=[1.0, 1.0]), x))
    >>> derivatives.value(j, torch.tensor([0.0, 2.0], dtype=torch.float64)).backward()
    >>> [round(float(g), 6) for g in x.grad]  # the nodes attract each other the less, the farther they are apart
    [2.426123, -2.426123]
    """
    if not isinstance(functional, J):
        raise InputError(f"functional: got {kind_of(functional)}, expected J(affinity) or E(affinity, f, ...)")
    u = _tensor("u", functional.affinity.check_signal("u", u))
    affinity = functional.affinity
    weights = kept_like(affinity.domain.weights, u.double())
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


def run(flow: LinearFlow, u: Tensor, integrator: Integrator, steps: int) -> Tensor:
    """Return the signal after some steps of an integrator, with its derivatives.

    k steps keep O(sqrt(k)) signals and compute the others anew for the derivatives; with a kernel that is held for
    ``every`` > 1 steps they keep k.

    Parameters
    ----------
    flow : GradientFlow or AttentionFlow
        Of an affinity of torch features.
    u : tensor of shape ``domain.shape`` or ``domain.shape + (D,)``
    integrator : FixedStep, AttentionStep or NeutrenoStep
    steps : int

    Raises
    ------
    InputError
        For other integrators, noise, and terms that depend on time; `StabilityError` for a step that is too long.
    NumericalError
        When rounding moves a mean that the flow conserves.
    """
    as_flow(flow)
    u = flow.held(_tensor("u", flow.affinity.check_signal("u", u)))
    steps = check_integer("steps", steps, minimum=0)
    if flow.needs_integrator:
        raise InputError(
            f"flow: got a {type(flow).__name__}, whose steps remember more than a signal; use {flow.differentiated}"
        )
    if not (isinstance(integrator, FixedStep) or getattr(integrator, "unit_steps", False)):
        raise InputError(
            f"integrator: got {integrator!r}, expected one whose steps have a length of their own, such as "
            "ExplicitEuler(dt), SemiImplicit(dt) or AttentionStep()"
        )
    with torch.no_grad():
        now = flow.rebuilt(u) if flow.evolving else flow
        check_admitted(now, integrator)
        check_same_flow(now, integrator, u)
    if flow.noise is not None:
        raise InputError(f"flow: got {flow!r}, which has noise, expected one without; use solve()")
    if flow.timed:
        raise InputError(f"flow: got {flow!r}, whose terms depend on time, expected one that does not; use solve()")
    check_terms(flow, integrator)

    # A kernel that follows the signal is formed within its step, and so is computed anew for the derivatives too.
    follows = flow.evolving and flow.every == 1

    def step(v: Tensor, now: LinearFlow) -> Tensor:
        moved: Tensor = integrator.advance(now.rebuilt(v) if follows else now, v, 0.0, math.inf, {})[0]
        return moved

    def several(v: Tensor, first: int, count: int) -> Tensor:
        now = flow
        for number in range(first, first + count):
            if flow.evolving and not follows and number % flow.every == 0:
                now = flow.rebuilt(v)
            v = checkpoint(step, v, now, use_reentrant=False)
        return v

    doubts: list[Doubt] = []
    with doubting(doubts):
        if flow.evolving and not follows:  # what the kernel is taken from has to stay
            u = several(u, 0, steps)
        else:
            segment = max(1, math.isqrt(steps))
            for first in range(0, steps, segment):
                u = checkpoint(several, u, first, min(segment, steps - first), use_reentrant=False)
    if reason := told_of(doubts):
        raise NumericalError(reason)
    return u


class _Solution(torch.autograd.Function):
    """A solution of r(u, theta) = 0 as a function of the value of r at it, whose derivative is -A^-1."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, u: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.solve = solve
        return u.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():  # a derivative of what is returned here would be wrong without a word
            raise InputError(
                "create_graph: got True, expected False: equilibria have first derivatives only; use derivatives.run "
                "with a number of steps for second ones"
            )
        return -ctx.solve(gradient), None, None


def minimizer(functional: E, *, rtol: float | None = None, maxiter: int = 10_000) -> Tensor:
    """Return the minimizer of E with its first derivatives, which cost one more linear system.

    Parameters
    ----------
    functional : E
        Of an affinity of torch features.
    rtol : float, optional
        Relative residual; 1e-10 in float64 and 1e-5 in float32 by default.
    maxiter : int

    Raises
    ------
    InputError
        For other functionals, and for a fidelity of 0 everywhere.
    NumericalError
        When a system is not solved.
    """
    if not isinstance(functional, E):
        raise InputError(f"functional: got {kind_of(functional)}, expected E(affinity, f, fidelity)")
    _tensor("observed", functional.observed)
    fidelity = functional.fidelity_in("degree")
    affinity = functional.affinity
    with torch.no_grad():
        found = functional.minimizer(rtol=rtol, maxiter=maxiter)
    if not found.success:
        raise NumericalError(f"minimizer: {found.message}")
    u = found.u.detach()
    # In the degree metric, where A = (I - P) + phi is self-adjoint in the measure w d.
    residual = u - affinity.average(u) + fidelity.times(u - functional.observed)
    measure: Any = over_channels(affinity.measure("degree", u, by_item=True).detach(), u)
    axes = tuple(range(len(affinity.domain.shape)))
    tolerance = default_rtol(u) if rtol is None else rtol

    with torch.no_grad():
        rows = Rows.of(lambda v: v - affinity.average(v) + fidelity.times(v), fidelity, u, axes)
        rows = replace(rows, weight=measure)

    run = rows.by_conjugate_gradients(measure, maxiter, measured=rows.scaled)

    def solve(gradient: Tensor) -> Tensor:
        # A^T = M A M^-1.
        with torch.no_grad():
            b = gradient / measure.to(gradient.dtype)
            solved = rows.solved(run, b, torch.zeros_like(b), tolerance)
        scale: Tensor = measure.to(gradient.dtype)
        return scale * _checked("minimizer: the residual of its derivative", solved, tolerance)

    return _Solution.apply(residual, u, solve)  # type: ignore[no-any-return,no-untyped-call]  # torch's is untyped


def equilibrium(flow: LinearFlow, *, rtol: float | None = None, maxiter: int = 10_000) -> Tensor:
    """Return the limit of a flow for t to infinity, with its first derivatives.

    u* = ((I - P) + phi)^-1 phi f, by `minimizer` for a symmetric P, otherwise by GMRES.

    Parameters
    ----------
    flow : GradientFlow or AttentionFlow
        Frozen, with a fidelity, of an affinity of torch features.
    rtol, maxiter
        As those of `minimizer`.

    Raises
    ------
    InputError
        For an evolving flow, a flow without fidelity, and other metrics than 'l2' and 'degree'.
    NumericalError
        When a system is not solved.

    Examples
    --------
    >>> import torch
    >>> from nlflow import AttentionFlow, ExpDotProduct, Points, affinity
    >>> from nlflow.flows import derivatives
    >>> q, k = torch.eye(3, 2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    >>> f = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64, requires_grad=True)
    >>> attention = affinity(ExpDotProduct(), Points(range(3)), k, queries=q)
    >>> derivatives.equilibrium(AttentionFlow(attention, f, 0.5))[0].backward()
    >>> [round(float(g), 4) for g in f.grad]  # where a walker from node 0 is stopped
    [0.5556, 0.2222, 0.2222]
    """
    if not isinstance(flow, GradientFlow | AttentionFlow):
        raise InputError(f"flow: got {kind_of(flow)}, expected a GradientFlow or an AttentionFlow")
    if flow.evolving:
        raise InputError("flow: got an evolving kernel, whose limit depends on the way; follow it with derivatives.run")
    if name := flow.more_than("linear"):
        raise InputError(
            f"flow: got one whose {name}() is more than linear, expected a linear one; use derivatives.run"
        )
    if not flow.inner.by_nodes:
        raise InputError(
            f"flow: got the metric {flow.metric!r}, in which a fidelity has another limit, expected 'l2' or 'degree'; "
            "use derivatives.run"
        )
    if flow.fidelity is None or flow.observed is None:
        raise InputError("flow: got one without fidelity, whose limit is the mean of u(0); give it a fidelity > 0")
    functional = flow.functional
    if isinstance(functional, E):
        return minimizer(functional, rtol=rtol, maxiter=maxiter)
    affinity, fidelity, f = flow.affinity, flow.fidelity, _tensor("observed", flow.observed)
    if fidelity.bounds()[1] == 0:
        raise InputError("fidelity: got 0 at every node, where the limit depends on u(0); set it > 0 somewhere")
    tolerance = default_rtol(f) if rtol is None else check_number("rtol", rtol, minimum=0, strict=True)
    maxiter = check_integer("maxiter", maxiter, minimum=1)
    axes = tuple(range(len(affinity.domain.shape)))

    def inner(v: Tensor, w: Tensor) -> Tensor:
        # Each channel is a system of its own, unless a matrix couples them.
        products = affinity.flatten(v).double() * affinity.flatten(w)
        return _sums(products if fidelity.width == 1 else products.reshape(-1, 1))

    def solve(average: Callable[[Tensor], Tensor], b: Tensor, what: str, beside: Tensor | float = 0.0) -> Tensor:
        with torch.no_grad():
            rows = Rows.of(lambda v: v - average(v) + fidelity.times(v), fidelity, b, axes)
            if average == affinity._push:  # of which no row sums to 1
                rows = replace(rows, stopped=0.0)
            solved = rows.solved(rows.by_gmres(maxiter, inner), b, torch.zeros_like(b), tolerance, beside)
        return _checked(what, solved, tolerance)

    with torch.no_grad():
        # Constants pass through the system unchanged; without this one, what is left keeps its digits.
        measure = over_channels(affinity.measure("l2", f), f)
        shift = fidelity.centre(f, measure, axes).to(f.dtype)
        aside = f - shift
        beside = aside.abs().amax(dim=axes, keepdim=True)
        u = shift + solve(affinity._average, fidelity.times(aside), "equilibrium: its residual", beside)
    residual = u - affinity.average(u) + fidelity.times(u - f)
    transposed = partial(solve, affinity._push, what="equilibrium: the residual of its derivative")
    return _Solution.apply(residual, u, transposed)  # type: ignore[no-any-return,no-untyped-call]  # torch's is untyped


def _sums(columns: Tensor) -> Tensor:
    """Return the sums of the columns of (M, D) in float64, with the same bits for any number of threads."""
    # Threads share out rows of blocks, never the terms of a sum.
    blocks, width = len(columns) // _BLOCK, columns.shape[1]
    whole = columns[: blocks * _BLOCK].reshape(blocks, _BLOCK, width).sum(dim=1, dtype=torch.float64)
    return whole.sum(dim=0) + columns[blocks * _BLOCK :].sum(dim=0, dtype=torch.float64)


def _checked(what: str, solved: Solved, rtol: float) -> Tensor:
    success, why = verdict(solved.residual, rtol, solved.error)
    if not success:
        raise NumericalError(f"{what} is {solved.residual:.2g}{why}")
    solution: Tensor = solved.x
    return solution


def _tensor(name: str, u: Any) -> Tensor:
    if not isinstance(u, Tensor):
        raise InputError(
            f"{name}: got {kind_of(u)}, expected a torch tensor, and an affinity of torch features; convert them "
            "(torch.from_numpy)"
        )
    return u
