"""Promises of integrators."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np

from nlflow._array import Array, Floats
from nlflow.affinities import Affinity, affinity
from nlflow.domains import Grid, Points
from nlflow.errors import InputError
from nlflow.flows.flow import Flow, as_flow
from nlflow.flows.gradient import GradientFlow
from nlflow.flows.integrators import ExplicitEuler, Integrator, StepFailureError
from nlflow.flows.kinetics import AllenCahn
from nlflow.flows.linear import LinearFlow
from nlflow.flows.noise import Noise
from nlflow.flows.solver import solve
from nlflow.functionals.constraint import Constraint
from nlflow.functionals.energies import E, J
from nlflow.kernels import Gaussian
from nlflow.testing.contract import Contract, random

_NODES = 10
_SLACK = 0.3  # of a measured order
_ROUNDING = 2e-12  # errors below tell nothing of an order
_HALVINGS = 2


def check_integrator(integrator: Integrator, flow: Flow | None = None, start: Array | None = None) -> None:
    """Check the promises of an integrator on small flows whose solutions are known.

    Its order is measured by halving steps, and its ``stability_limit`` is compared with the spectral radius of a step.

    Parameters
    ----------
    integrator : Integrator
        Fixed steps are varied through its attribute ``dt``.
    flow : Flow, optional
        By default gradient flows of J and E in both metrics. With a flow neither the order nor the stability is
        checked.
    start : array, optional
        Where that flow starts; the observed signal by default.

    Raises
    ------
    ContractError
        If a check fails.
    InputError
        For what is no integrator; if it takes none of the flows; for a flow without observed signal and start, and for
        a start without a flow.

    Examples
    --------
    >>> from nlflow import ExplicitEuler
    >>> from nlflow.testing import check_integrator
    >>> check_integrator(ExplicitEuler(0.1))
    """
    contract = Contract("integrator", integrator, Integrator)
    order = getattr(integrator, "order", None)
    contract.holds(
        isinstance(order, int | float) and order > 0, "order is declared", order, "a number > 0, such as 2.0"
    )
    if flow is not None:
        flow = as_flow(flow)
        start = flow.observed if start is None else start
        if start is None:
            raise InputError("start: got none, and the flow has no observed signal; give the signal where it starts")
        _check_steps(contract, integrator, flow, flow.check_signal("start", start))
        return
    if start is not None:
        raise InputError("start: got one without a flow, expected the flow that starts there; give both")
    taken = [one for one in _flows() if _takes(integrator, one)]
    if not taken:
        raise InputError(
            f"flow: got none, and {type(integrator).__name__} takes no gradient flow of J or E; give one that it is for"
        )
    for one in taken:
        u = random(_NODES, seed=1)
        _check_steps(contract, integrator, one, u)
        _check_channels(contract, integrator, one)
        _check_rest(contract, integrator, one)
        _check_stability(contract, integrator, one)
    for what, one, u in _ordered(integrator):
        if _takes(integrator, one):
            _check_order(contract, integrator, what, one, u)
    if integrator.takes_noise:
        _check_noise(contract, integrator)


def _flows() -> list[LinearFlow]:
    """Return flows with eigenvalues that differ, between few nodes."""
    weights, wide = _scattered(0.15), affinity(Gaussian(width=0.1), Grid(_NODES, spacing=0.1, boundary="periodic"))
    f = random(_NODES)
    return [
        GradientFlow(J(weights), "degree"),
        GradientFlow(J(wide), "degree"),
        GradientFlow(J(weights), "l2"),
        GradientFlow(E(weights, f, 0.4, measure="degree"), "degree"),
        GradientFlow(E(weights, f, np.linspace(0.1, 2, _NODES)), "l2"),
    ]


def _points() -> Points:
    return Points(0.1 * np.arange(_NODES) + 0.03 * random(_NODES, seed=9), 0.1 + 0.05 * random(_NODES, seed=8))


def _scattered(width: float) -> Affinity:
    return affinity(Gaussian(width=width), _points())


def _ordered(integrator: Integrator) -> list[tuple[str, LinearFlow, Floats]]:
    """Return flows with which orders are measured, and their starts: what each piece of the right-hand side does."""
    weights, f = _scattered(0.15), random(_NODES)
    energy, smooth = E(weights, f, 0.4, measure="degree"), np.sin(np.arange(_NODES))
    found: list[tuple[str, LinearFlow, Floats]] = [
        ("of a linear flow", GradientFlow(energy, "degree"), smooth),
        ("with a reaction", GradientFlow(energy, "degree", reaction=AllenCahn()), 0.8 * smooth),
    ]
    if integrator.takes_time:
        wave: Callable[[float], Floats] = lambda t: np.cos(3 * t) * smooth  # noqa: E731
        drawn = GradientFlow(energy, "degree", observed=lambda t: f + np.sin(2 * t))
        found += [
            ("with a source that changes", GradientFlow(energy, "degree", source=wave), smooth),
            ("with an observed signal that changes", drawn, smooth),
        ]
    if integrator.takes_constraint:
        held = Constraint(np.array([0, 5]), np.array([1.0, -1.0]))
        found.append(("with a constraint", GradientFlow(energy, "degree", constraint=held), smooth))
    features = affinity(Gaussian(width=1.0), _points(), smooth[:, None])
    evolving = GradientFlow(E(features, np.cos(np.arange(_NODES)), 0.4, measure="degree"), "degree", evolving=True)
    return [*found, ("with a kernel that follows the signal", evolving, smooth)]


def _with_step(integrator: Integrator, dt: float) -> Any:
    other: Any = copy.copy(integrator)
    other.dt = dt
    return other


def _step(integrator: Integrator) -> float | None:
    """Return the length of a step that can be changed, None where there is none."""
    return None if integrator.unit_steps else integrator.length


def _takes(integrator: Integrator, flow: Flow) -> bool:
    short = integrator if _step(integrator) is None else _with_step(integrator, 1e-6)
    try:
        short.check(flow.rebuilt(random(*flow.affinity.domain.shape)) if flow.evolving else flow)
    except InputError:
        return False
    return True


def _advance(integrator: Integrator, flow: Flow, u: Any, t: float, target: float, memory: dict[str, Any]) -> Any:
    return integrator.advance(flow.when(t), u, t, target, memory)


def _check_steps(contract: Contract, integrator: Integrator, flow: Flow, u: Any) -> None:
    """Check what the time loop needs of a step."""
    flow = flow.when(0.0)
    flow = flow.rebuilt(u) if flow.evolving else flow
    u = flow.held(u)
    if (dt := _step(integrator)) is not None:
        limit = contract.asked("stability_limit(flow) is a number", integrator.stability_limit, flow)
        contract.holds(isinstance(limit, float) and not limit <= 0, "stability_limit(flow) > 0", limit, "a number > 0")
        integrator = _with_step(integrator, min(dt, 0.5 * limit) if limit > 0 else dt)
        other = _with_step(integrator, 0.5 * (integrator.length or 1.0))
        apart = repr(other) != repr(integrator)
        contract.holds(apart, "repr tells steps apart", repr(other), "another one for another dt")
    target = 1.0 if integrator.unit_steps else 0.7 * (integrator.length or 0.3)
    promise = "advance(flow, u, t, target, memory) returns the signal and the time"
    memory: dict[str, Any] = {}
    found, t = contract.asked(promise, _advance, integrator, flow, u, 0.0, target, memory)
    contract.kept("advance keeps shape and dtype", found, u)
    contract.holds(0 < t <= target, "advance comes to the target, or on the way", t, f"a time in (0, {target:g}]")
    if integrator.length is not None:
        contract.holds(t == target, "a step that reaches beyond the target ends there", t, f"{target:g}")
    again, _ = _advance(integrator, flow, u, 0.0, target, {})
    contract.near("the same step gives the same signal: state is kept in memory alone", again, found, 0.0)
    kept = {key: value for key, value in memory.items() if not key.startswith("_")}
    plain = all(isinstance(value, bool | int | float | str) or hasattr(value, "shape") for value in kept.values())
    contract.holds(plain, "memory holds numbers, texts and signals, for checkpoints", kept, "plain values")
    ahead = t + (1.0 if integrator.unit_steps else target)
    one, _ = _advance(integrator, flow, found, t, ahead, memory)
    two, _ = _advance(integrator, flow, found, t, ahead, dict(kept))
    contract.near("memory without its underscored entries is enough to go on", two, one, 1e-9)
    if flow.affinity.dtype is None and flow.observed is None:
        single = u.astype(np.float32)
        with suppress(StepFailureError):  # tolerances below the rounding of float32
            contract.kept("advance keeps float32", _advance(integrator, flow, single, 0.0, target, {})[0], single)


def _check_channels(contract: Contract, integrator: Integrator, flow: LinearFlow) -> None:
    """Check that channels are moved one by one; of flows without an observed signal."""
    if flow.observed is not None:
        return
    integrator = integrator if _step(integrator) is None else _with_step(integrator, 0.1)
    u, target = random(_NODES, 2, seed=2), 1.0 if integrator.unit_steps else 0.1
    if integrator.length is None:
        return  # steps that follow an error follow that of all channels
    both = _advance(integrator, flow, u, 0.0, target, {})[0]
    alone = [_advance(integrator, flow, u[:, i].copy(), 0.0, target, {})[0] for i in range(2)]
    contract.near("each channel moves by itself", both, np.stack(alone, axis=-1), 1e-9)


def _check_rest(contract: Contract, integrator: Integrator, flow: LinearFlow) -> None:
    matrix = _operator(flow)
    if flow.observed is None:
        u = np.full(_NODES, 1.5)
    else:
        u = np.linalg.solve(matrix, flow.velocity(np.zeros(_NODES)))
    limit = integrator.stability_limit(flow)
    target = 1.0 if integrator.unit_steps else min(0.1, 0.5 * limit) if limit > 0 else 0.1
    integrator = integrator if _step(integrator) is None else _with_step(integrator, target)
    if not _takes(integrator, flow):
        return
    moved = _advance(integrator, flow, u, 0.0, target, {})[0]
    contract.near("a signal at rest stays at rest", moved, u, 1e-6 if integrator.length is None else 1e-9)


def _check_noise(contract: Contract, integrator: Integrator) -> None:
    """Check that noise is that of its seed and counted, that held nodes get none, and its variance in a short step."""
    plain, short = _flows()[2], 1e-4
    integrator = integrator if _step(integrator) is None else _with_step(integrator, short)

    def moved(flow: Flow, u: Any, t: float, memory: dict[str, Any]) -> Any:
        return _advance(integrator, flow, u, t, t + short, memory)[0]

    noisy = plain + Noise(beta=2.0, rng=1)
    if not _takes(integrator, noisy):
        return
    u, memory = np.zeros((_NODES, 2000)), dict[str, Any]()
    first = contract.asked("advance takes a flow with noise", moved, noisy, u, 0.0, memory)
    contract.near("the same seed gives the same bits", moved(noisy, u, 0.0, {}), first, 0.0)
    kept = {key: value for key, value in memory.items() if not key.startswith("_")}
    second = moved(noisy, first, short, memory)
    contract.near("memory holds which numbers come next", moved(noisy, first, short, kept), second, 0.0)
    apart = {
        "another seed gives other noise": moved(plain + Noise(beta=2.0, rng=2), u, 0.0, {}) - first,
        "another step gives other noise": second - 2 * first,
    }
    for promise, change in apart.items():
        same = float(np.mean(np.abs(change) < 1e-6 * float(np.std(first))))
        contract.holds(same < 0.01, promise, f"the same at {same:.0%} of the nodes", "other numbers everywhere")
    ratio = np.mean(first**2, axis=1) * noisy.mass(first[:, 0]) / short
    worst = float(np.abs(ratio - 1).max())
    contract.holds(
        worst < 0.2, "noise has the variance s^2 dt / m", f"one off by {worst:.0%}", "s^2 dt / m at each node"
    )
    if integrator.takes_constraint:
        held = noisy + Constraint(np.array([0, 5]), 0.0)
        still = moved(held, u, 0.0, {})[[0, 5]]
        contract.holds(not np.any(still), "held nodes get no noise", float(np.abs(still).max()), "0")


def _operator(flow: LinearFlow) -> Floats:
    shift = flow.velocity(np.zeros(_NODES))
    return np.stack([shift - flow.velocity(unit) for unit in np.eye(_NODES)], axis=1)


def _check_stability(contract: Contract, integrator: Integrator, flow: LinearFlow) -> None:
    """Check that steps up to the limit do not let any signal grow: by the matrix of the step."""
    if integrator.unit_steps:
        try:
            integrator.check(flow)
        except InputError:
            return
        lengths = [1.0]
    elif _step(integrator) is None:
        return
    else:
        limit = integrator.stability_limit(flow)
        if math.isnan(limit):
            return
        rho = float(np.abs(np.linalg.eigvals(_operator(flow))).max())
        ends = limit if math.isfinite(limit) else 1e3 / rho
        lengths = [share * ends for share in (0.25, 0.5, 0.9, 0.999)]
    for dt in lengths:
        method = integrator if integrator.unit_steps else _with_step(integrator, dt)

        def moved(u: Floats, method: Integrator = method, dt: float = dt) -> Floats:
            return np.asarray(_advance(method, flow, u, 0.0, dt, {})[0])

        shift = moved(np.zeros(_NODES))
        step = np.stack([moved(unit) - shift for unit in np.eye(_NODES)], axis=1)
        radius = float(np.abs(np.linalg.eigvals(step)).max())
        contract.holds(
            radius <= 1 + 1e-8, "steps within stability_limit(flow) are stable",
            f"a mode that grows by {radius:.6g} in a step of {dt:.6g}, of {flow!r}",
            "no mode that grows; tell a smaller limit, or look whether the step has the order that it tells",
        )  # fmt: skip


def _reference(flow: LinearFlow, u: Floats, end: float) -> Floats:
    """Return the solution by a method of order 8 of SciPy."""
    from scipy.integrate import solve_ivp

    def velocity(t: float, u: Floats) -> Floats:
        return np.asarray(flow.when(t).velocity(u))

    found = solve_ivp(velocity, (0.0, end), u, method="DOP853", rtol=1e-12, atol=1e-13)
    return np.asarray(flow.when(end).held(found.y[:, -1]))


def _check_order(contract: Contract, integrator: Integrator, what: str, flow: LinearFlow, u: Floats) -> None:
    flow = flow.when(0.0)
    u = flow.held(u)
    order = integrator.order_for(flow)
    end = 1.0
    expected = _reference(flow, u, end)
    size = float(np.abs(expected).max())
    if integrator.unit_steps:
        return
    if _step(integrator) is None:
        found = solve(flow, u, t=end, integrator=integrator, energies=False)
        off = float(np.abs(found.final - expected).max())
        contract.holds(
            bool(found.success) and off <= 1e-3 * size, f"the solution {what}", f"{found.message}, off by {off:.3g}",
            "the solution of the flow",
        )  # fmt: skip
        return
    begun = flow.rebuilt(u) if flow.evolving else flow
    limit = integrator.stability_limit(begun)
    euler = ExplicitEuler(1.0).stability_limit(begun)
    longest = min(x for x in (0.4 * limit, 0.5 * euler, 0.25) if not math.isnan(x))
    first = math.ceil(end / longest)
    errors = []
    for count in (first * 2**k for k in range(_HALVINGS)):
        dt = end / count
        found = solve(flow, u, t=end, integrator=_with_step(integrator, dt), energies=False)
        contract.holds(bool(found.success), f"steps {what}", found.message, "a run that ends")
        errors.append(float(np.abs(found.final - expected).max()))
    rounding = _ROUNDING * size
    slopes = [math.log2(a / b) for a, b in pairwise(errors) if b > rounding]
    if not slopes:
        return  # exact for this flow
    contract.holds(
        slopes[-1] >= order - _SLACK, f"order {order:g} {what}",
        f"{slopes[-1]:.2f} (errors {', '.join(f'{error:.2g}' for error in errors)} by halving the step)",
        f"about {order:g}; ask each stage of flow.when(flow.time + c dt), and declare the order that it has",
    )  # fmt: skip
