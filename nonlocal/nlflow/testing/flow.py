"""Promises of flows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nlflow._array import Array, to_numpy
from nlflow.errors import InputError
from nlflow.flows.flow import Flow
from nlflow.flows.linear import LinearFlow
from nlflow.flows.spectrum import dense_operator
from nlflow.testing.contract import Contract, random

_DENSE = 400  # unknowns, of which the eigenvalues of A are taken


def check_flow(flow: Flow, start: Array | None = None) -> None:
    """Check the promises of a flow at a signal.

    Velocity and energy are not checked if the flow needs an integrator of its own. The energy is checked in float64
    only, and of a kernel and terms that do not change.

    Parameters
    ----------
    flow : Flow
    start : array, optional
        A signal that it may start from; by default the observed one, else noise in one channel. Particles, tokens,
        systems of several channels and a `WaveFlow` need one.

    Raises
    ------
    ContractError
        If a check fails.
    InputError
        For what is no flow, or a signal that does not fit it.

    Examples
    --------
    >>> from nlflow import Gaussian, GradientFlow, Grid, J, affinity
    >>> from nlflow.testing import check_flow
    >>> check_flow(GradientFlow(J(affinity(Gaussian(width=2.0), Grid(12)))))
    """
    contract = Contract("flow", flow, Flow)
    flow = flow.when(0.0)
    shape = flow.affinity.domain.shape
    if start is not None:
        u = flow.check_signal("start", start)
    elif flow.observed is not None:
        u = flow.check_signal("start", flow.observed)
    else:
        try:
            u = flow.check_signal("start", flow.affinity.as_signal(random(*shape)))
        except InputError as error:
            raise InputError(
                f"start: got none, expected a signal of the {type(flow).__name__}, which noise in one channel is not: "
                f"{str(error).removeprefix('start: ')}"
            ) from error
    contract.refuses(
        "a signal of another shape is refused", flow.check_signal, "u", flow.affinity.as_signal(np.ones(3))
    )
    bad = np.array(to_numpy(u), dtype=np.float64)
    bad.flat[0] = np.nan
    contract.refuses("NaN is refused", flow.check_signal, "u", flow.affinity.as_signal(bad))
    contract.holds(type(flow).__name__ in repr(flow), "repr names the class", repr(flow), "its name")
    given = contract.asked("given() lists what tells the flow from others", flow.given)
    contract.holds(isinstance(given, list), "given() lists what tells the flow from others", type(given), "a list")
    later = flow.when(0.5)
    contract.holds(
        later.time == 0.5 and flow.time == 0 and type(later) is type(flow),
        "when(t) is the flow at t",
        later.time,
        "0.5",
    )
    if flow.evolving:
        built = contract.asked("rebuilt(u) is the flow with the kernel of u", flow.rebuilt, u)
        contract.holds(
            type(built) is type(flow), "rebuilt(u) stays of its class", type(built).__name__, "its own class"
        )
        flow = built
    if flow.needs_integrator:
        return
    u = flow.held(u)
    counted = flow.applications
    velocity = contract.kept("velocity keeps shape and dtype", contract.asked("velocity", flow.velocity, u), u)
    contract.holds(flow.applications > counted, "averages are counted in applications", flow.applications, "more")
    contract.near("velocity is a function of the signal and the time", flow.velocity(u), velocity, 0.0)
    _check_descent(contract, flow, u, velocity)
    if isinstance(flow, LinearFlow):
        _check_pieces(contract, flow, u, velocity)


def _check_descent(contract: Contract, flow: Flow, u: Any, velocity: Any) -> None:
    if not flow.has_energy or flow.evolving or flow.timed or str(u.dtype).endswith("float32"):
        return
    size = float(np.abs(to_numpy(velocity)).max())
    if size == 0 or not math.isfinite(size):
        return
    h = 1e-4 * (float(np.abs(to_numpy(u)).max()) or 1.0) / size
    ahead, behind = flow.energy(u + h * velocity), flow.energy(u - h * velocity)
    slope = (ahead - behind) / (2 * h)
    rounding = 1e-9 * (abs(ahead) + abs(behind)) / h
    if not math.isfinite(slope):
        return
    contract.holds(slope <= rounding, "the energy falls along the velocity", f"dE/dt = {slope:.4g}", "dE/dt <= 0")
    if not isinstance(flow, LinearFlow) or not (flow.plain and flow.inner.by_nodes):
        return
    square = np.asarray(to_numpy(velocity), dtype=np.float64).reshape(flow.affinity.domain.size, -1) ** 2
    logs = np.asarray(to_numpy(flow.affinity.log_degree), dtype=np.float64).ravel()
    measure = np.asarray(flow.affinity.domain.weights, dtype=np.float64).ravel()
    measure = measure * np.exp(logs) if flow.inner.normalized else measure
    functional: Any = flow.functional
    if not np.allclose(to_numpy(functional.affinity.log_degree).ravel(), logs):
        return  # of another normalization, as an attention flow's
    expected = -float(measure @ square.sum(axis=1))
    contract.near("the energy falls as that of a gradient flow does, by |du/dt|^2", slope, expected, 1e-4)


def _check_pieces(contract: Contract, flow: LinearFlow, u: Any, velocity: Any) -> None:
    shape = tuple(u.shape)
    v, w = (flow.affinity.as_signal(random(*shape, seed=seed)) for seed in (1, 2))
    promise = "linear(v) is linear"
    both = contract.kept(promise, contract.asked(promise, flow.linear, 2 * v - w), v)
    rounding = 1e-4 if str(u.dtype).endswith("float32") else 1e-9
    contract.near(promise, both, 2 * flow.linear(v) - flow.linear(w), rounding)
    if not flow.evolving and not flow.overridden("linear"):
        free = flow.free(u)
        made = flow.free(flow.drawn(free) - flow.on_free(free))
        contract.near(
            "velocity is made of linear(), pulled() and driven()", made, flow.free(velocity), 100 * rounding,
            "the same du/dt; override velocity() and linear() together, and leave pulled() and driven() to follow",
        )  # fmt: skip
    unknowns = flow.affinity.domain.size * flow.width()
    if flow.symmetric and unknowns <= _DENSE:
        values = np.linalg.eigvals(dense_operator(flow))
        low, high = flow.spectral_bounds()
        slack = 1e-6 * max(abs(low), abs(high)) if rounding < 1e-6 else 1e-3 * max(abs(low), abs(high))
        found = (float(values.real.min()), float(values.real.max()))
        held = low - slack if flow.terms.constraint is None else -slack  # 0 at nodes that are held
        contract.holds(
            held <= found[0] and found[1] <= high + slack and float(np.abs(values.imag).max()) <= 1e3 * slack,
            "spectral_bounds() hold the eigenvalues of linear(), which are real", f"({low:.6g}, {high:.6g})",
            f"bounds of {found[0]:.6g} to {found[1]:.6g}; override spectral_bounds() together with linear()",
        )  # fmt: skip
