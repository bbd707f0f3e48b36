"""Limits of flows for t to infinity: constants, minimizers of E, resolvents of P."""

from __future__ import annotations

from typing import Any

import numpy as np

from nlflow._array import Array, Floats, check_untracked, constant_like, power_of_two, to_numpy, underflowing
from nlflow.equilibria.constrained import Equilibrium, constrained
from nlflow.errors import (
    InputError,
    NumericalError,
    check_choice,
    check_integer,
    check_memory,
    check_number,
    checked_call,
)
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import apply_operator
from nlflow.functionals.energies import E
from nlflow.functionals.fidelity import Fidelity
from nlflow.functionals.krylov import default_rtol, gmres, verdict
from nlflow.markov import MarkovChain
from nlflow.markov.stationary import reduce_states

_METHODS = ("auto", "direct", "iterative")
_DENSE_NODES = 1000


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
    check_frozen(flow, constraint=True)
    method = check_choice("method", method, _METHODS)
    maxiter = check_integer("maxiter", maxiter, minimum=1)
    if rtol is not None:
        rtol = check_number("rtol", rtol, minimum=0, strict=True)
    fidelity, observed = flow.fidelity, flow.observed
    if flow.terms.constraint is not None:
        return constrained(flow, flow.terms.constraint, start, method, rtol, maxiter, memory_limit)
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
            found = _iterate(flow, fidelity, observed, rtol, maxiter, elsewhere=False)
        except NumericalError:
            if not at_hand:
                raise
        else:
            if found.success and holes:
                _check_alike(found, _iterate(flow, fidelity, observed, rtol, maxiter, elsewhere=True), observed)
            if found.success or not at_hand:
                return found
    return _direct(_System(flow, fidelity, observed), rtol, memory_limit)


def _check_alike(one: Equilibrium, other: Equilibrium, observed: Array) -> None:
    """Raise `NumericalError` where two starts lead to two limits: a constant that no fidelity sees has no residual."""
    size = float(np.ptp(to_numpy(observed))) or 1.0
    if float(np.abs(to_numpy(other.u) - to_numpy(one.u)).max()) > 1e-2 * size:
        raise NumericalError(
            "fidelity: the system is singular, or so nearly that iteration does not solve it: some part of the domain "
            "hardly sees a node with a fidelity > 0; give each part one, use a wider kernel or method='direct'"
        )


def _iterate(
    flow: LinearFlow, fidelity: Fidelity, observed: Array, rtol: float, maxiter: int, *, elsewhere: bool
) -> Equilibrium:
    """Solve by iteration, from the observed signal or from `elsewhere`: a constant above it."""
    functional = flow.functional
    if not isinstance(functional, E):
        return _gmres(_System(flow, fidelity, observed), rtol, maxiter, elsewhere=elsewhere)
    start = observed + (float(np.ptp(to_numpy(observed))) or 1.0) if elsewhere else None
    found = functional.minimizer(rtol=rtol, maxiter=maxiter, start=start)
    return Equilibrium(**vars(found), method="conjugate gradients")


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
    if flow.metric == "degree":
        return chain.limit(u)
    chain.require_unique("the limit of the J-flow")
    return flow.mean(u)


class _System:
    """r (I - P) u + phi u = phi f, centred and scaled.

    Attributes
    ----------
    phi : array of shape (N, 1)
    f : array of shape (N, D)
        The observed signal over `size`, less `shift`.
    """

    def __init__(self, flow: LinearFlow, fidelity: Fidelity, observed: Array) -> None:
        self.flow, self._observed = flow, observed
        n = flow.affinity.domain.size
        like = constant_like(np.ones(flow.affinity.domain.shape), observed)
        self.phi = np.asarray(to_numpy(fidelity.times(like)), dtype=np.float64).reshape(n, 1)
        f = np.asarray(to_numpy(observed), dtype=np.float64).reshape(n, -1)
        # Constants pass through the system unchanged. The one that the limit tends to for small fidelities is taken
        # out, so that what is left keeps its digits.
        mass = self.phi * _measure(flow)
        if not np.any(mass):
            mass = self.phi
        # Over powers of two, which are exact, so that products of what is very large or very small stay in range.
        self._size, mass = power_of_two(float(np.abs(f).max())), mass / power_of_two(float(mass.max()))
        f = f / self._size
        self._shift = (mass * f).sum(axis=0, keepdims=True) / mass.sum()
        self.f = f - self._shift

    def solved(self, x: Floats, residual: Floats, b: Floats, iterations: int, method: str, rtol: float) -> Equilibrium:
        """Return the limit from a solution (N, D), with its largest residual over the channels, in maximum norms."""
        scale = np.abs(b).max(axis=0)
        inside = scale > 0
        with np.errstate(over="ignore"):  # infinitely far off, then
            left = np.abs(residual).max(axis=0)[inside] / scale[inside]
        largest = float(left.max()) if np.any(inside) else 0.0
        u = constant_like(((x + self._shift) * self._size).reshape(tuple(self._observed.shape)), self._observed)
        success, advice = verdict(largest, rtol)
        return Equilibrium(u, largest, iterations, success, f"residual {largest:.3g} by {method}{advice}", method)


def _measure(flow: LinearFlow) -> Floats:
    """Return the measure in which r (I - P) has no mean, shape (N, 1); ones where it is not unique."""
    if flow.symmetric:
        return np.asarray(to_numpy(flow.measure(flow.affinity.log_degree)), dtype=np.float64).reshape(-1, 1)
    try:
        return MarkovChain(flow.affinity).stationary.reshape(-1, 1)
    except (InputError, NumericalError):
        return np.ones((flow.affinity.domain.size, 1))


def _direct(system: _System, rtol: float, memory_limit: float | None) -> Equilibrium:
    """Solve by state reduction, in which u* is a mean of f over where walkers are stopped, however slow they are."""
    from scipy.linalg import solve_triangular

    flow, phi, b = system.flow, system.phi, system.phi * system.f
    n = len(phi)
    check_memory(f"a direct solution for {n} nodes", 48 * n * n, "use method='iterative'", memory_limit)
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
    leaving = rates.sum(axis=1, keepdims=True)
    # No refinement: x has the error of a weighted mean however ill-conditioned the system, and a correction would bring
    # in the rounding of the residual, multiplied by the condition number.
    x = np.asarray(solve_triangular(lower, solve_triangular(upper, b, unit_diagonal=True), lower=True))
    return system.solved(x, b - phi * x - (leaving * x - rates @ x), b, 0, "direct", rtol)


def _gmres(system: _System, rtol: float, maxiter: int, *, elsewhere: bool) -> Equilibrium:
    phi, f = system.phi, system.f
    b = phi * f / (1 + phi)

    def apply(v: Floats) -> Floats:
        return apply_operator(system.flow, v) / (1 + phi)  # divided by the diagonal of the system

    start = np.full_like(f, (float(np.ptp(f)) or 1.0) if elsewhere else 0.0)
    # Shorter bases for long signals: they take as much memory as 40 signals, or 512 MiB.
    restart = min(max(2**26 // f.size, 10), 40, len(f))
    found = gmres(apply, b, start, rtol=rtol / 10, maxiter=maxiter, restart=restart)
    return system.solved(found.x, apply(found.x) - b, b, found.iterations, "gmres", rtol)
