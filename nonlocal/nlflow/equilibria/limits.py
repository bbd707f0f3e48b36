"""Limits of flows for t to infinity: constants, minimisers of E, resolvents of P."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow._array import Array, check_untracked, constant_like, power_of_two, to_numpy, underflowing
from nlflow.errors import (
    InputError,
    NumericalError,
    check_choice,
    check_integer,
    check_memory,
    check_number,
)
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import apply_operator
from nlflow.functionals.krylov import default_rtol, gmres, verdict
from nlflow.functionals.quadratic import E
from nlflow.markov import MarkovChain
from nlflow.markov.stationary import reduce_states

__all__ = ["Equilibrium", "check_frozen", "equilibrium"]

Floats = NDArray[np.float64]
_METHODS = ("auto", "direct", "iterative")
_DENSE_NODES = 1000


@dataclass(frozen=True)
class Equilibrium:
    """The limit of a flow for t to infinity and how well it was reached.

    Attributes
    ----------
    u : array
        The limit, shaped like the signal.
    residual : float
        Of its linear system, relative to the right-hand side, recomputed from `u`.
    iterations : int
        0 for direct solutions and closed forms.
    method : {'mean', 'direct', 'conjugate gradients', 'gmres'}
    success : bool
        Whether the residual is within the tolerance.
    message : str
    """

    u: Array
    residual: float
    iterations: int
    method: str
    success: bool
    message: str


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
    attention. With fidelity it is the minimiser of E, (L + lambda) u = lambda f in the L2 metric and
    ((1 + lambda~) I - P) u = lambda~ f in the degree metric, whatever u(0) is; for a P that is not symmetric the same
    resolvent of P, though no functional is minimised.

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
        Relative residual; 1e-10 in float64 and 1e-5 in float32 by default.
    maxiter : int
    memory_limit : float, optional
        Bytes, for the direct method.

    Returns
    -------
    Equilibrium

    Raises
    ------
    InputError
        For an evolving flow, whose limit only `solve` finds; for a reducible or periodic chain without fidelity; for a
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
    check_frozen(flow)
    method = check_choice("method", method, _METHODS)
    maxiter = check_integer("maxiter", maxiter, minimum=1)
    if rtol is not None:
        rtol = check_number("rtol", rtol, minimum=0, strict=True)
    if flow.fidelity is None or flow.observed is None:
        if start is None:
            raise InputError("start: needed, since without fidelity the limit is the mean of u(0)")
        u = flow.check_signal("start", start)
        mean = _mean(flow, u)
        return Equilibrium(
            mean + 0 * u, 0.0, 0, "mean", True, "the mean of u(0) in the measure that the flow conserves"
        )
    if flow.fidelity.bounds()[1] == 0:
        raise InputError("fidelity: got 0 at every node, where the limit depends on u(0); use a flow without fidelity")
    given = (flow.observed, flow.fidelity.values)
    tracked = flow.affinity.tracked or any(getattr(array, "requires_grad", False) for array in given)
    check_untracked("observed, fidelity or features", tracked, "nlflow.flows.derivatives.equilibrium")
    rtol = default_rtol(flow.observed) if rtol is None else rtol
    low, high = flow.fidelity.bounds()
    holes = low <= 1e-8 * high
    few = flow.affinity.domain.size <= _DENSE_NODES
    if flow.fidelity.width > 1:
        _check_iterative(flow, method)
        few = False
    if method == "direct" or (method == "auto" and few and (holes or not flow.symmetric)):
        return _direct(flow, rtol, memory_limit)
    try:
        found = _iterate(flow, rtol, maxiter, elsewhere=False)
    except NumericalError:
        if method != "auto" or not few:
            raise
        return _direct(flow, rtol, memory_limit)
    if not found.success and method == "auto" and few:
        return _direct(flow, rtol, memory_limit)
    if holes and found.success:
        # Where no fidelity is seen every constant has a small residual: another start finds another one.
        other = _iterate(flow, rtol, maxiter, elsewhere=True)
        size = float(np.ptp(to_numpy(flow.observed))) or 1.0
        if float(np.abs(to_numpy(other.u) - to_numpy(found.u)).max()) > 1e-2 * size:
            raise NumericalError(
                "fidelity: the system is singular, or so nearly that iteration does not solve it: some part of the "
                "domain hardly sees a node with a fidelity > 0; give each part one, use a wider kernel or "
                "method='direct'"
            )
    return found


def _iterate(flow: LinearFlow, rtol: float, maxiter: int, *, elsewhere: bool) -> Equilibrium:
    """Solve by iteration, from the observed signal or from `elsewhere`: a constant above it."""
    functional = flow.functional
    if not isinstance(functional, E):
        return _gmres(flow, rtol, maxiter, elsewhere=elsewhere)
    start = functional.observed + (float(np.ptp(to_numpy(functional.observed))) or 1.0) if elsewhere else None
    found = functional.minimizer(rtol=rtol, maxiter=maxiter, start=start)
    return Equilibrium(found.u, found.residual, found.iterations, "conjugate gradients", found.success, found.message)


def check_frozen(flow: Any) -> None:
    """Raise `InputError` unless `flow` is a linear flow with a frozen kernel."""
    if not isinstance(flow, LinearFlow):
        raise InputError(f"flow: got {type(flow).__name__}, expected a GradientFlow or an AttentionFlow")
    if flow.evolving:
        raise InputError("flow: got an evolving kernel, whose limit depends on the way; follow it with solve()")
    if name := flow.more_than("average"):
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
    if flow.metric == "degree":
        return chain.limit(u)
    chain.require_unique("the limit of the J-flow")
    return flow.mean(u)


def _system(flow: LinearFlow) -> tuple[Floats, Floats, Floats, float]:
    """Return (fidelity of nodes (N, 1), centred right-hand side (N, D), what was taken out (1, D), unit of both)."""
    fidelity, observed = flow.fidelity, flow.observed
    if fidelity is None or observed is None:  # not reached: callers have looked
        raise InputError("flow: got a flow without fidelity, expected one with a fidelity and an observed signal")
    n = flow.affinity.domain.size
    like = constant_like(np.ones(flow.affinity.domain.shape), observed)
    phi = np.asarray(to_numpy(fidelity.times(like)), dtype=np.float64).reshape(n, 1)
    f = np.asarray(to_numpy(observed), dtype=np.float64).reshape(n, -1)
    # Constants pass through the system unchanged. The one that the limit tends to for small fidelities is taken out, so
    # that what is left keeps its digits.
    mass = phi * _measure(flow)
    if not np.any(mass):
        mass = phi
    # Over powers of two, which are exact, so that products of what is very large or very small stay in range.
    size, mass = power_of_two(float(np.abs(f).max())), mass / power_of_two(float(mass.max()))
    f = f / size
    shift = (mass * f).sum(axis=0, keepdims=True) / mass.sum()
    return phi, f - shift, shift, size


def _measure(flow: LinearFlow) -> Floats:
    """Return the measure in which r (I - P) has no mean, shape (N, 1); ones where it is not unique."""
    if flow.symmetric:
        return np.asarray(to_numpy(flow.measure(flow.affinity.log_degree)), dtype=np.float64).reshape(-1, 1)
    try:
        return MarkovChain(flow.affinity).stationary.reshape(-1, 1)
    except (InputError, NumericalError):
        return np.ones((flow.affinity.domain.size, 1))


def _finish(
    flow: LinearFlow, solution: Floats, residual: float, iterations: int, method: str, rtol: float
) -> Equilibrium:
    observed = flow.observed
    if observed is None:  # not reached: callers have looked
        raise InputError("flow: got a flow without fidelity, expected one with a fidelity and an observed signal")
    u = constant_like(solution.reshape(tuple(observed.shape)), observed)
    success, advice = verdict(residual, rtol)
    return Equilibrium(u, residual, iterations, method, success, f"residual {residual:.3g} by {method}{advice}")


def _relative(residual: Floats, b: Floats) -> float:
    """Return the largest residual over the channels, in the maximum norm relative to the right-hand side."""
    scale = np.abs(b).max(axis=0)
    inside = scale > 0
    with np.errstate(over="ignore"):  # infinitely far off, then
        return float((np.abs(residual).max(axis=0)[inside] / scale[inside]).max()) if np.any(inside) else 0.0


def _direct(flow: LinearFlow, rtol: float, memory_limit: float | None) -> Equilibrium:
    """Solve by state reduction, in which u* is a mean of f over where walkers are stopped, however slow they are."""
    from scipy.linalg import solve_triangular

    n = flow.affinity.domain.size
    check_memory(f"a direct solution for {n} nodes", 48 * n * n, "use method='iterative'", memory_limit)
    phi, f, shift, size = _system(flow)
    rates = MarkovChain(flow.affinity).matrix()
    if flow.metric == "l2":
        rates *= np.asarray(to_numpy(flow.affinity.degree), dtype=np.float64).reshape(n, 1)
    np.fill_diagonal(rates, 0.0)
    killed, reduced = phi[:, 0].copy(), rates.copy()
    try:
        left = reduce_states(reduced, killed)
        if not left[0] > 0:
            raise NumericalError("affinity: no walk that comes to state 0 is stopped")
    except NumericalError as error:
        raise NumericalError(
            "fidelity: the system is singular: some part of the domain sees no node with a fidelity > 0; give each "
            f"part one, or use a wider kernel ({error})"
        ) from error
    upper, lower = -np.triu(reduced, 1), np.diag(left) - np.tril(reduced, -1)
    leaving, b = rates.sum(axis=1, keepdims=True), phi * f

    # No refinement: x has the error of a weighted mean however ill-conditioned the system, and a correction would bring
    # in the rounding of the residual, multiplied by the condition number.
    x = np.asarray(solve_triangular(lower, solve_triangular(upper, b, unit_diagonal=True), lower=True))
    residual = _relative(b - phi * x - (leaving * x - rates @ x), b)
    return _finish(flow, (x + shift) * size, residual, 0, "direct", rtol)


def _gmres(flow: LinearFlow, rtol: float, maxiter: int, *, elsewhere: bool) -> Equilibrium:
    phi, f, shift, size = _system(flow)
    b = phi * f / (1 + phi)

    def apply(v: Floats) -> Floats:
        return apply_operator(flow, v) / (1 + phi)  # divided by the diagonal of the system

    start = np.full_like(f, (float(np.ptp(f)) or 1.0) if elsewhere else 0.0)
    # Shorter bases for long signals: they take as much memory as 40 signals, or 512 MiB.
    restart = min(max(2**26 // f.size, 10), 40, len(f))
    found = gmres(apply, b, start, rtol=rtol / 10, maxiter=maxiter, restart=restart)
    x, steps = found.x, found.iterations
    residual = _relative(apply(x) - b, b)
    return _finish(flow, (x + shift) * size, residual, steps, "gmres", rtol)
