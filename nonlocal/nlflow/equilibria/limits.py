"""Limits of flows for t to infinity: constants, minimizers of E, resolvents of P."""

from __future__ import annotations

from typing import Any

import numpy as np

from nlflow._array import Array, check_untracked, to_numpy, underflowing
from nlflow.equilibria.constrained import constrained
from nlflow.equilibria.systems import Equilibrium, System, by_gmres, direct
from nlflow.errors import (
    InputError,
    NumericalError,
    check_choice,
    check_detached,
    check_integer,
    check_number,
    checked_call,
)
from nlflow.flows.linear import LinearFlow
from nlflow.functionals.energies import E
from nlflow.functionals.krylov import default_rtol
from nlflow.markov import MarkovChain

_DENSE_NODES = 1000
_METHODS = ("auto", "direct", "iterative")


@checked_call
@underflowing
def equilibrium(
    flow: LinearFlow,
    start: Any = None,
    *,
    method: str = "auto",
    rtol: float | None = None,
    maxiter: int = 10_000,
    memory_limit: float | None = None,
) -> Equilibrium:
    """Return the limit of a frozen flow for t to infinity.

    Without fidelity it is a constant: the w-mean of u(0) in the L2 metric, pi^T u(0) in the degree metric and for
    attention. With fidelity it is the minimizer of E, (L + lambda) u = lambda f in the L2 metric and
    ((1 + lambda~) I - P) u = lambda~ f in the degree metric, whatever u(0) is; for a P that is not symmetric the same
    resolvent of P, though no functional is minimized. With a constraint it is the solution of the same system between
    the free nodes, of a J-flow the harmonic extension of its values.

    Parameters
    ----------
    flow : GradientFlow or AttentionFlow
        Frozen.
    start : array, optional
        u(0); needed without fidelity, no part of the answer with one.
    method : {'auto', 'direct', 'iterative'}
        Direct: the whole matrix, O(N^2) memory and O(N^3) time, exact to rounding however weakly nodes see each other.
        Iterative: conjugate gradients where P is symmetric, GMRES otherwise, one average an iteration. ``auto`` takes
        the direct one up to 1000 nodes for a P that is not symmetric, where the fidelity vanishes at some nodes and
        where iteration does not succeed. For a fidelity with matrices, which needs a symmetric P, always conjugate
        gradients.
    rtol : float, optional
        Relative residual, rows over their diagonal; 1e-10 in float64 and 1e-5 in float32 by default.
    maxiter : int
    memory_limit : float, optional
        Bytes, for the direct method.

    Returns
    -------
    Equilibrium

    Raises
    ------
    InputError
        For an evolving flow, whose limit only `solve` finds; for a constraint whose values depend on time, or that a
        part of the domain does not see; for a reducible or periodic chain without fidelity; for a
        fidelity of 0 everywhere; for a fidelity with matrices where P is not symmetric, or with the direct method.
    NumericalError
        When the fidelity does not determine the limit: some part of the domain sees no node where it is > 0.

    Examples
    --------
    >>> import numpy as np
    >>> from nlflow import E, Gaussian, GradientFlow, Grid, affinity, equilibrium
    >>> f = np.array([0.0, 0.0, 1.0, 1.0])
    >>> flow = GradientFlow(E(affinity(Gaussian(width=2.0), Grid(4)), f, 0.5, measure="degree"), metric="degree")
    >>> bool(np.ptp(equilibrium(flow).u) > 0.3)
    True
    """
    check_detached("memory_limit", memory_limit)
    check_frozen(flow, constraint=True)
    method = check_choice("method", method, _METHODS)
    maxiter = check_integer("maxiter", maxiter, minimum=1)
    if rtol is not None:
        rtol = check_number("rtol", rtol, minimum=0, strict=True)
    fidelity, observed = flow.fidelity, flow.observed
    held = flow.terms.constraint
    if held is not None:
        at_hand = method == "auto" and flow.affinity.domain.size <= _DENSE_NODES
        return constrained(flow, held, start, method, rtol, maxiter, memory_limit, at_hand=at_hand)
    if fidelity is None or observed is None:
        if start is None:
            raise InputError("start: needed, since without fidelity the limit is the mean of u(0)")
        u = flow.check_signal("start", start)
        message = "the mean of u(0) in the measure that the flow conserves"
        return Equilibrium(_mean(flow, u) + 0 * u, 0.0, 0, True, message, "mean")
    low, high = fidelity.bounds()
    if high == 0:
        raise InputError("fidelity: got 0 at every node, where the limit depends on u(0); use a flow without fidelity")
    tracked = flow.affinity.tracked or fidelity.tracked or getattr(observed, "requires_grad", False)
    check_untracked("observed, fidelity or features", tracked, "nlflow.flows.derivatives.equilibrium")
    rtol = default_rtol(observed) if rtol is None else rtol
    if fidelity.width > 1:
        _check_iterative(flow, method)
    holes = low <= 1e-8 * high
    # Whether the direct method may be used where iteration fails.
    at_hand = method == "auto" and flow.affinity.domain.size <= _DENSE_NODES and fidelity.width == 1
    if method != "direct" and not (at_hand and (holes or not flow.symmetric)):
        try:
            found = _iterate(flow, observed, rtol, maxiter)
        except NumericalError:
            if not at_hand:
                raise
        else:
            if holes:
                _check_determined(flow, found, observed, rtol, maxiter)
            if found.success or not at_hand:
                return found
    return direct(System(flow, observed), rtol, memory_limit)


def _check_determined(flow: LinearFlow, found: Equilibrium, observed: Array, rtol: float, maxiter: int) -> None:
    """Raise `NumericalError` where a solution has no digits: a constant that no fidelity sees leaves no residual."""
    lost = found.residual <= rtol * 1.0001 and not found.success
    if isinstance(functional := flow.functional, E) and not lost and flow.fidelity is not None:
        if flow.fidelity.width == 1:
            return
        # A direction that no matrix sees has any constant as a minimizer: from another start it is another one.
        size = float(np.ptp(to_numpy(observed))) or 1.0
        other = functional.minimizer(rtol=rtol, maxiter=maxiter, start=observed + size)
        lost = found.success and float(np.abs(to_numpy(other.u) - to_numpy(found.u)).max()) > 1e-2 * size
    if lost:
        raise NumericalError(
            "fidelity: the system is singular, or so nearly that iteration does not solve it: some part of the domain "
            "hardly sees a node with a fidelity > 0; give each part one, use a wider kernel or method='direct'"
        )


def _iterate(flow: LinearFlow, observed: Array, rtol: float, maxiter: int) -> Equilibrium:
    functional = flow.functional
    if not isinstance(functional, E):
        return by_gmres(System(flow, observed), rtol, maxiter)
    return Equilibrium(**vars(functional.minimizer(rtol=rtol, maxiter=maxiter)), method="conjugate gradients")


def check_frozen(flow: Any, *, constraint: bool = False) -> None:
    """Raise `InputError` unless `flow` is linear with a frozen kernel; with a constraint only where that is allowed."""
    if not isinstance(flow, LinearFlow):
        raise InputError(f"flow: got {type(flow).__name__}, expected a GradientFlow or an AttentionFlow")
    if flow.evolving:
        raise InputError("flow: got an evolving kernel, whose limit depends on the way; follow it with solve()")
    if not constraint and flow.terms.constraint is not None:
        raise InputError(
            f"flow: got one with a {flow.terms.constraint!r}, expected one without, for which bounds are known"
        )
    if flow.terms.moving:
        raise InputError(
            f"flow: got a {type(flow).__name__} with a {' and a '.join(flow.terms.moving)}, expected one that is given "
            "by its kernel and its fidelity alone, of which limits are known; follow it with solve()"
        )
    if not flow.inner.by_nodes and flow.fidelity is not None:
        raise InputError(
            f"flow: got the metric {flow.metric!r} with a fidelity, whose limit depends on the start, expected "
            "a metric of nodes, 'l2' or 'degree'; follow it with solve()"
        )
    if name := flow.overridden("average"):
        raise InputError(
            f"flow: got a {type(flow).__name__} whose {name}() is overridden, expected one that is given by its kernel "
            "and its fidelity alone, of which limits are known; follow it with solve()"
        )


def _check_iterative(flow: LinearFlow, method: str) -> None:
    """Raise `InputError` where conjugate gradients, which alone know matrices, are not what solves for the limit."""
    if method == "direct":
        raise InputError("method: got 'direct', expected 'auto' or 'iterative' for a fidelity with matrices")
    if not flow.symmetric:
        raise InputError(
            "fidelity: got matrices with a P that is not symmetric, expected one number or one for each node; follow "
            "the flow with solve(..., integrator=SemiImplicit()) until it is stationary"
        )


def _mean(flow: LinearFlow, u: Array) -> Array:
    """Return the limit of the J-flow from u, one number for each channel."""
    # In continuous time a periodic chain converges too, as the lazy one does, which has the same stationary law.
    chain = MarkovChain(flow.affinity, laziness=0.5)
    if flow.inner.normalized:
        return chain.limit(u)
    chain.require_unique("the limit of the J-flow")
    return flow.mean(u)
