"""Limits of flows with values held at some nodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from nlflow._array import check_untracked, constant_like, to_numpy
from nlflow.equilibria.systems import Equilibrium, System, by_gmres, direct
from nlflow.errors import InputError, NumericalError
from nlflow.flows.linear import LinearFlow
from nlflow.functionals.constraint import Held
from nlflow.functionals.krylov import default_rtol


def constrained(
    flow: LinearFlow, held: Held, start: Any, method: str, rtol: float | None, maxiter: int,
    memory_limit: float | None, *, at_hand: bool,
) -> Equilibrium:  # fmt: skip
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
