"""The record of a limit, and the system of a flow that comes to rest, solved directly or by GMRES."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nlflow._array import Array, Floats, constant_like, namespace, power_of_two, to_numpy
from nlflow.errors import InputError, NumericalError, check_memory
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import apply_operator
from nlflow.functionals.accuracy import Rows
from nlflow.functionals.krylov import verdict
from nlflow.functionals.minimizer import Minimizer
from nlflow.markov import MarkovChain
from nlflow.markov.reduction import reduce_states


@dataclass(frozen=True)
class Equilibrium(Minimizer):
    """The limit of a flow for t to infinity and how well it was reached; of E the minimizer, where P is symmetric.

    Attributes
    ----------
    u : array
        The limit, shaped like the signal.
    residual : float
        Of its linear system, recomputed from `u`, relative to the right-hand side; of a direct solution relative to
        |A| |u| + |b|, in each row.
    iterations : int
        0 for direct solutions and closed forms.
    success : bool
        See `Minimizer`. A direct solution has the error of a mean of f: some roundings of the largest values.
    message : str
    method : {'mean', 'direct', 'conjugate gradients', 'gmres'}
    """

    method: str


class System:
    """r (I - P) u + phi u = phi f at free nodes, u having the values of a constraint at others; centred and scaled.

    Attributes
    ----------
    phi : array of shape (N, 1)
        0 without a fidelity, and at nodes that are not free.
    f : array of shape (N, D)
        The observed signal, or the values that are held, over `size`, less `shift`.
    free : array of bool of shape (N,)
    """

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

    def solution(
        self, x: Floats, residual: float, iterations: int, method: str, rtol: float, error: float = 0.0
    ) -> Equilibrium:
        """Return the limit from the free nodes of a solution (N, D), and how well it was reached."""
        x = np.where(self.free[:, None], x, self.f)
        u = constant_like(((x + self._shift) * self._size).reshape(tuple(self._like.shape)), self._like)
        success, advice = verdict(residual, rtol, error)
        message = f"residual {residual:.3g} by {method}{advice}"
        return Equilibrium(self.flow.held(u), residual, iterations, success, message, method)


def _measure(flow: LinearFlow) -> Floats:
    """Return the measure in which r (I - P) has no mean, shape (N, 1); ones where it is not unique."""
    if flow.symmetric:
        return np.asarray(to_numpy(flow.measure(flow.affinity.log_degree)), dtype=np.float64).reshape(-1, 1)
    try:
        return MarkovChain(flow.affinity).stationary.reshape(-1, 1)
    except (InputError, NumericalError):
        return np.ones((flow.affinity.domain.size, 1))


def direct(system: System, rtol: float, memory_limit: float | None) -> Equilibrium:
    """Solve by state reduction, in which u* is a mean of f over where walkers are stopped, however slow they are."""
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
    leaving = rates.sum(axis=1)
    diagonal = (stopped + leaving)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        rest = np.abs(b - stopped[:, None] * x - (leaving[:, None] * x - rates @ x)) / diagonal
        size = 2 * np.abs(x).max(axis=0) + np.abs(b) / diagonal
        residual = float(np.max(np.where(rest > 0, rest / np.where(size > 0, size, 1.0), rest)))
    whole = np.zeros_like(system.f)
    whole[free] = x
    return system.solution(whole, residual, 0, "direct", rtol)


def by_gmres(system: System, rtol: float, maxiter: int) -> Equilibrium:
    """Solve by GMRES, each row over its diagonal; for flows in the degree metric."""
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
    return system.solution(found.x, float(left.max()), found.iterations, "gmres", rtol, found.error)
