"""Limits of flows for t to infinity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nlflow._array import Array, Floats, check_untracked, constant_like, namespace, power_of_two, to_numpy, underflowing
from nlflow.errors import (
    InputError,
    NumericalError,
    check_choice,
    check_detached,
    check_integer,
    check_memory,
    check_number,
    checked_call,
    kind_of,
)
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import apply_operator
from nlflow.functionals.accuracy import Rows, rounded_residual
from nlflow.functionals.constraint import Held
from nlflow.functionals.energies import E
from nlflow.functionals.krylov import default_rtol, verdict
from nlflow.functionals.minimizer import Minimizer
from nlflow.markov import MarkovChain
from nlflow.markov.reduction import reduce_states


@dataclass(frozen=True, repr=False)
class Equilibrium(Minimizer):
    """A limit of a flow for t to infinity, or a state of rest.

    Attributes
    ----------
    u : array
        Shaped like the signal.
    residual : float
        Of its equations. Of a direct solution that of `u`, each row of A u = b relative to 2 a_ii max|u| + |b_i|; by
        iteration relative to the right-hand side, of signals less a constant and before `u` is rounded; of
        `find_equilibrium` as its `rtol` says.
    iterations : int
        0 for direct solutions and closed forms.
    success : bool
        See `find_equilibrium`; of a linear system whether it was solved to its `rtol`.
    message : str
    method : {'mean', 'direct', 'conjugate gradients', 'gmres', 'newton', 'transient'}
    """

    method: str


class System:
    """r (I - P) u + phi u = phi f at free nodes, centred and scaled; phi (N, 1) is 0 at the others."""

    def __init__(self, flow: LinearFlow, like: Array) -> None:
        self.flow, self._like = flow, like
        n, held = flow.affinity.domain.size, flow.terms.constraint
        self.free = np.ones(n, bool) if held is None else ~held.mask.ravel()
        self.phi = np.zeros((n, 1))
        if flow.fidelity is not None:
            ones = constant_like(np.ones(flow.affinity.domain.shape), like)
            self.phi = np.asarray(to_numpy(flow.fidelity.times(ones)), dtype=np.float64).reshape(n, 1)
        signal = like if flow.fidelity is None or flow.observed is None else flow.observed
        f = np.asarray(to_numpy(flow.held(signal)), dtype=np.float64).reshape(n, -1)
        self.phi, f = self.phi * self.free[:, None], np.where((self.phi > 0) | ~self.free[:, None], f, 0.0)
        # Constants pass through the system unchanged. The one that the limit tends to for small fidelities is taken
        # out, so that what is left keeps its digits.
        if held is None:
            mass = self.phi * _measure(flow)
            mass = mass if np.any(mass) else self.phi
        else:
            mass = (~self.free[:, None]).astype(np.float64)
        # Over powers of two, which are exact, so that products of what is very large or very small stay in range.
        self._size, mass = power_of_two(float(np.abs(f).max())), mass / power_of_two(float(mass.max()))
        f = f / self._size
        self._shift = (mass * f).sum(axis=0, keepdims=True) / mass.sum()
        self.f = f - self._shift

    def signal(self, x: Floats) -> Array:
        x = np.where(self.free[:, None], x, self.f)
        u = ((x + self._shift) * self._size).reshape(tuple(self._like.shape))
        return self.flow.held(constant_like(u, self._like))

    def rounded(self, u: Array) -> tuple[Floats, Floats, Floats]:
        """Return x of a signal that was rounded, and |u| and |phi f| in the same unit."""
        given = np.asarray(to_numpy(u), dtype=np.float64).reshape(self.f.shape) / self._size
        return given - self._shift, np.abs(given), np.abs(self.phi * (self.f + self._shift))


def _measure(flow: LinearFlow) -> Floats:
    """Return the measure in which r (I - P) has no mean, shape (N, 1); ones where it is not unique."""
    if flow.symmetric:
        return np.asarray(to_numpy(flow.measure(flow.affinity.log_degree)), dtype=np.float64).reshape(-1, 1)
    try:
        return MarkovChain(flow.affinity).stationary.reshape(-1, 1)
    except (InputError, NumericalError):
        return np.ones((flow.affinity.domain.size, 1))


def direct(system: System, rtol: float, memory_limit: float | None) -> Equilibrium:
    from scipy.linalg import solve_triangular

    flow, free, n = system.flow, system.free, len(system.free)
    check_memory(f"a direct solution for {n} nodes", 48 * n * n, "use method='iterative'", memory_limit)
    rates = MarkovChain(flow.affinity).matrix()
    if not isinstance(flow.rate, float):
        rates *= np.asarray(to_numpy(flow.rate), dtype=np.float64).reshape(n, 1)
    np.fill_diagonal(rates, 0.0)
    phi, stopping, rates = system.phi[free], rates[np.ix_(free, ~free)], rates[np.ix_(free, free)]
    b = phi * system.f[free] + stopping @ system.f[~free]
    stopped = phi[:, 0] + stopping.sum(axis=1)
    killed, reduced = stopped.copy(), rates.copy()
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
    # No refinement: x has the error of a weighted mean however ill-conditioned the system, and a correction would bring
    # in the rounding of the residual, multiplied by the condition number.
    x = np.asarray(solve_triangular(lower, solve_triangular(upper, b, unit_diagonal=True), lower=True))
    whole = np.zeros_like(system.f)
    whole[free] = x
    u = system.signal(whole)
    x, sizes, pulls = system.rounded(u)
    x, leaving = x[free], rates.sum(axis=1)
    diagonal = (stopped + leaving)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        left = b - stopped[:, None] * x - (leaving[:, None] * x - rates @ x)
    residual = rounded_residual(left, diagonal, sizes, pulls[free])
    success = residual <= rtol
    advice = "" if success else f", above rtol={rtol:g}, which {str(u.dtype).removeprefix('torch.')} does not reach"
    return Equilibrium(u, residual, 0, success, f"residual {residual:.3g} by direct{advice}", "direct")


def by_gmres(system: System, rtol: float, maxiter: int) -> Equilibrium:
    flow, phi, free = system.flow, system.phi, system.free[:, None]
    held = flow.terms.constraint
    seen = 0.0 if held is None else np.asarray(to_numpy(held.seen(flow.affinity)), np.float64).reshape(-1, 1)
    given = flow.affinity.as_signal(np.where(free, 0.0, system.f).reshape(*flow.affinity.domain.shape, -1))
    beside = np.asarray(to_numpy(flow.affinity._average(given)), np.float64).reshape(system.f.shape)
    rows = Rows(
        lambda v: apply_operator(flow, v), lambda v: v / (1 + phi), lambda v: v * (1 + phi), (phi + seen) / (1 + phi),
        (0,), lambda v: np.where(free, v, 0.0), eps=float(namespace(given).finfo(given.dtype).eps),
    )  # fmt: skip
    b = rows.free(phi * system.f + beside)
    scale = np.abs(b / (1 + phi)).max(axis=0)
    run = rows.by_gmres(maxiter)
    found = rows.solved(
        lambda b, x, left: run(b, x, left / 10), b, np.zeros_like(b), rtol, np.abs(system.f).max(axis=0)
    )
    with np.errstate(over="ignore"):  # infinitely far off, then
        left = np.abs(rows.scaled(b - rows.operator(found.x))).max(axis=0) / np.where(scale > 0, scale, 1.0)
    residual = float(left.max())
    success, advice = verdict(residual, rtol, found.error)
    message = f"residual {residual:.3g} by gmres{advice}"
    return Equilibrium(system.signal(found.x), residual, found.iterations, success, message, "gmres")


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

    Without fidelity and constraint each channel becomes a constant: the w-mean of u(0) in the L2 and conserved metrics,
    pi^T u(0) in the degree metric and for attention. Otherwise it solves (L + lambda) u = lambda f in the L2 metric and
    ((1 + lambda~) I - P) u = lambda~ f in the degree metric and for attention, with a constraint at the free nodes.

    Parameters
    ----------
    flow : GradientFlow or AttentionFlow
        Frozen.
    start : array, optional
        u(0), needed without fidelity and constraint. With a fidelity only its mean counts, and only if the metric
        conserves it; that of f by default.
    method : {'auto', 'direct', 'iterative'}
        Direct: the whole matrix, O(N^2) memory and O(N^3) time. Iterative: conjugate gradients where P is symmetric,
        GMRES otherwise. ``auto`` takes the direct one up to 1000 nodes for a P that is not symmetric, where the
        fidelity vanishes at some nodes and where iteration does not succeed. A fidelity with matrices needs a symmetric
        P and iteration.
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
        For an evolving flow; for a constraint whose values depend on time, or that a part of the domain does not see;
        without fidelity for several classes of nodes that no walk leaves; for a fidelity of 0 everywhere; for a
        fidelity with matrices where P is not symmetric, or with the direct method.
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
    if flow.inner.conserves:
        return conserved(flow, observed if start is None else start, rtol, maxiter)
    if start is not None:
        flow.check_signal("start", start)
    low, high = fidelity.bounds()
    if high == 0:
        raise InputError("fidelity: got 0 at every node, where the limit depends on u(0); use a flow without fidelity")
    check_untracked("observed, fidelity or features", flow.tracked, "nlflow.flows.derivatives.equilibrium")
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


def conserved(flow: LinearFlow, start: Any, rtol: float | None, maxiter: int) -> Equilibrium:
    """Return the limit of an E-flow that conserves the mean: u* + c w with (L + phi) w = 1."""
    functional, u, fidelity = flow.functional, flow.check_signal("start", start), flow.fidelity
    assert isinstance(functional, E) and fidelity is not None  # noqa: PT018  # a GradientFlow with a fidelity
    if fidelity.width > 1 or not fidelity.bounds()[0] > 0:
        raise InputError(
            "fidelity: got one with matrices or with 0 at some node, expected numbers > 0 for the limit in the metric "
            f"{flow.metric!r}; follow it with solve()"
        )
    flat = functional.minimizer(rtol=rtol, maxiter=maxiter)
    lift = functional.with_observed(1 / fidelity.times(namespace(u).ones_like(u))).minimizer(rtol=rtol, maxiter=maxiter)
    change = (flow.mean(u) - flow.mean(flat.u)) / flow.mean(lift.u)
    return Equilibrium(
        flat.u + change * lift.u, max(flat.residual, lift.residual), flat.iterations + lift.iterations,
        flat.success and lift.success, f"{flat.message}, with the mean of u(0)", "conjugate gradients",
    )  # fmt: skip


def check_frozen(flow: Any, *, constraint: bool = False) -> None:
    if not isinstance(flow, LinearFlow):
        raise InputError(f"flow: got {kind_of(flow)}, expected a GradientFlow or an AttentionFlow")
    if flow.evolving:
        raise InputError("flow: got an evolving kernel, whose limit depends on the way; follow it with solve()")
    if not constraint and flow.terms.constraint is not None:
        raise InputError(
            f"flow: got one with a {flow.terms.constraint!r}, expected one without, for which bounds are known"
        )
    if flow.moving:
        raise InputError(
            f"flow: got a {type(flow).__name__} with a {' and a '.join(flow.moving)}, expected one that is given "
            "by its kernel and its fidelity alone, of which limits are known; follow it with solve()"
        )
    given = flow.terms.constraint is not None or (flow.fidelity is not None and not flow.inner.conserves)
    if not flow.inner.by_nodes and (given or not constraint):
        raise InputError(
            f"flow: got the metric {flow.metric!r}, in which a fidelity or a constraint has another limit, expected "
            "'l2' or 'degree'; follow it with solve()"
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


def constrained(
    flow: LinearFlow, held: Held, start: Any, method: str, rtol: float | None, maxiter: int,
    memory_limit: float | None, *, at_hand: bool,
) -> Equilibrium:  # fmt: skip
    """See `equilibrium`."""
    if held.timed:
        raise InputError(
            "constraint: got values that depend on time, so that there is no limit; follow it with solve()"
        )
    given = flow.observed if start is None else start
    u = flow.held(held.zeros(flow.affinity)) if given is None else flow.check_signal("start", given)
    tracked = flow.tracked or getattr(u, "requires_grad", False)
    check_untracked("start, observed, fidelity or features", tracked, "the steps of nlflow.flows.derivatives.run")
    rtol = default_rtol(u) if rtol is None else rtol
    functional, matrices = flow.functional, flow.fidelity is not None and flow.fidelity.width > 1
    if method != "direct" and functional is not None:
        at_hand = at_hand and not matrices  # the direct method, where iteration fails
        try:
            found = functional.minimizer(constraint=held, rtol=rtol, maxiter=maxiter, start=u)
        except NumericalError:
            if not at_hand:
                raise
        else:
            if found.success or not at_hand:
                return Equilibrium(**vars(found), method="conjugate gradients")
    if matrices:
        raise InputError("method: got 'direct', expected 'auto' or 'iterative' for a fidelity with matrices")
    ones = constant_like(np.ones(held.mask.shape), u)
    held.check_reached(flow.affinity, None if flow.fidelity is None else to_numpy(flow.fidelity.times(ones)) > 0)
    system = System(flow, u)
    return by_gmres(system, rtol, maxiter) if method == "iterative" else direct(system, rtol, memory_limit)
