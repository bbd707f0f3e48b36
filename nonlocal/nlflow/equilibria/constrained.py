"""The record of a limit, and the limits of flows with values held at some nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nlflow._array import Array, Floats, check_untracked, constant_like, to_numpy
from nlflow.errors import InputError, NumericalError, check_memory
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import apply_operator, dense_operator
from nlflow.functionals.constraint import Held
from nlflow.functionals.krylov import default_rtol, gmres, verdict
from nlflow.functionals.minimizer import Minimizer


@dataclass(frozen=True)
class Equilibrium(Minimizer):
    """The limit of a flow for t to infinity and how well it was reached; of E the minimizer, where P is symmetric.

    Attributes
    ----------
    u : array
        The limit, shaped like the signal.
    residual : float
        Of its linear system, relative to the right-hand side, recomputed from `u`.
    iterations : int
        0 for direct solutions and closed forms.
    success : bool
        Whether the residual is within the tolerance.
    message : str
    method : {'mean', 'direct', 'conjugate gradients', 'gmres'}
    """

    method: str


def constrained(
    flow: LinearFlow, held: Held, start: Any, method: str, rtol: float | None, maxiter: int, memory_limit: float | None
) -> Equilibrium:
    """Return the limit of a flow with a constraint; see `nlflow.equilibrium`."""
    if held.timed:
        raise InputError(
            "constraint: got values that depend on time, so that there is no limit; follow it with solve()"
        )
    given = flow.observed if start is None else start
    u = flow.held(held.zeros(flow.affinity)) if given is None else flow.check_signal("start", given)
    tracked = flow.affinity.tracked or getattr(u, "requires_grad", False)
    check_untracked("start, observed or features", tracked, "the steps of nlflow.flows.derivatives.run")
    rtol = default_rtol(u) if rtol is None else rtol
    functional = flow.functional
    if method != "direct" and functional is not None:
        found = functional.minimizer(constraint=held, rtol=rtol, maxiter=maxiter, start=u)
        return Equilibrium(**vars(found), method="conjugate gradients")
    if flow.fidelity is not None and flow.fidelity.width > 1:
        raise InputError("method: got 'direct', expected 'auto' or 'iterative' for a fidelity with matrices")
    ones = constant_like(np.ones(held.mask.shape), u)
    held.check_reached(flow.affinity, None if flow.fidelity is None else to_numpy(flow.fidelity.times(ones)) > 0)
    free, columns = ~held.mask.ravel(), (held.mask.size, -1)
    right = np.asarray(to_numpy(flow.drawn(flow.free(u))), dtype=np.float64).reshape(columns)
    if method == "iterative":
        x, done = _iterated(flow, right, rtol, maxiter)
    else:
        check_memory(
            f"a direct solution for {len(free)} nodes", 24 * len(free) ** 2, "use method='iterative'", memory_limit
        )
        x, done = np.zeros_like(right), 0
        try:
            x[free] = np.linalg.solve(dense_operator(flow)[np.ix_(free, free)], right[free])
        except np.linalg.LinAlgError as error:
            raise NumericalError("constraint: the system between the free nodes is singular; constrain more") from error
    scale = float(np.abs(right).max())
    left = float(np.abs(right - apply_operator(flow, x)).max()) / scale if scale > 0 else 0.0
    success, advice = verdict(left, rtol)
    name = "gmres" if method == "iterative" else "direct"
    limit = flow.held(constant_like(x.reshape(tuple(u.shape)), u))
    return Equilibrium(limit, left, done, success, f"residual {left:.3g} by {name}{advice}", name)


def _iterated(flow: LinearFlow, right: Floats, rtol: float, maxiter: int) -> tuple[Floats, int]:
    """Solve between the free nodes by GMRES."""
    found = gmres(
        lambda v: apply_operator(flow, v), right, np.zeros_like(right), rtol=rtol / 10, maxiter=maxiter,
        restart=min(max(2**26 // right.size, 10), 40, len(right)),
    )  # fmt: skip
    x: Array = found.x
    return np.asarray(x), found.iterations
