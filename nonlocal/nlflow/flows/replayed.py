"""Recorded steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nlflow._array import Array, is_numpy, underflowing
from nlflow.errors import InputError, checked_call, kind_of
from nlflow.flows.flow import Flow
from nlflow.flows.integrators import FixedStep
from nlflow.flows.integrators.base import Around, Integrator

if TYPE_CHECKING:
    from nlflow.backends.torch.graphs import Replay

_KEPT = "_replay"
"""Under which name a run remembers its recording; not in checkpoints, so that a resumed run records anew."""


@checked_call
@underflowing
class Replayed(Around):
    """An integrator with steps of one length whose steps a GPU records once and repeats: CUDA graphs.

    For few nodes, of which the host takes longer to start a step than the device takes for it.

    Parameters
    ----------
    integrator : Integrator
        With steps of one length that wait for no number of the device: ``ExplicitEuler(dt)``, ``ETD2RK(dt)``,
        ``ETD4RK(dt)``, ``SemiImplicit(dt)``, a `NeutrenoStep` or an `AttentionStep`.

    Raises
    ------
    InputError
        For other integrators; in `solve` for NumPy arrays, kernels that follow the signal, noise, and terms that depend
        on time.

    Examples
    --------
    >>> import torch
    >>> from nlflow import ETD2RK, ExpDotProduct, GradientFlow, J, Points, affinity, solve
    >>> from nlflow.flows import Replayed
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> flow = GradientFlow(J(affinity(ExpDotProduct(), Points(x[:, 0].numpy()), x)), "degree")
    >>> solve(flow, x, t=2.0, integrator=Replayed(ETD2RK(0.25))).success
    True
    """

    def __init__(self, integrator: Integrator) -> None:
        given: Any = integrator  # what is not of the type is told by name
        if not isinstance(given, Integrator) or isinstance(given, Replayed):
            raise InputError(
                f"integrator: got {kind_of(integrator)}, expected one that can be recorded, such as ETD2RK(dt)"
            )
        plain = isinstance(integrator, FixedStep) and type(integrator)._moved is FixedStep._moved
        if not plain and not integrator.unit_steps:
            raise InputError(
                f"integrator: got {integrator!r}, which chooses its steps or remembers something from one to the next, "
                "expected steps of one length, such as ExplicitEuler(dt) or ETD2RK(dt)"
            )
        self.integrator = integrator

    @property
    def unit_steps(self) -> bool:  # type: ignore[override]
        return self.integrator.unit_steps

    @property
    def length(self) -> float | None:
        return self.integrator.length

    def surely_stable(self, flow: Flow) -> bool:
        return self.integrator.surely_stable(flow)

    def unstable(self, flow: Flow, limit: float) -> str:
        return self.integrator.unstable(flow, limit)

    def check_kind(self, flow: Flow) -> None:
        changes = [word for word, found in (
            ("whose kernel follows the signal", flow.evolving), ("that depends on time", flow.timed),
            ("with noise", flow.noise is not None), ("of NumPy arrays", flow.affinity.device is None),
        ) if found]  # fmt: skip
        if changes:
            raise InputError(
                f"integrator: Replayed repeats one step, got a flow {' and '.join(changes)}, expected one of tensors "
                f"that is the same at each step; use {self.integrator!r}"
            )
        self.integrator.check(flow)

    def advance(self, flow: Flow, u: Array, t: float, target: float, memory: dict[str, Any]) -> tuple[Array, float]:
        step, remaining = float(self.integrator.length or 1.0), target - t
        if remaining <= step * (1 + 1e-9) and remaining != step and not self.unit_steps:
            return self.integrator.advance(flow, u, t, target, memory)
        if is_numpy(u):
            raise InputError("start: got a NumPy array, expected a tensor, whose steps Replayed can record")
        # Of the integrator's own flow: what a flow holds is in the recording.
        kept: tuple[Flow, int, Replay] | None = memory.get(_KEPT)
        counted = flow.applications
        if kept is None or not flow.is_like(kept[0]):
            kept = self._recorded(flow, u, step)
        after = kept[2](u)
        flow.applications = counted + kept[1]
        memory[_KEPT] = kept
        return after, target if remaining == step else t + step

    def _recorded(self, flow: Flow, u: Array, step: float) -> tuple[Flow, int, Replay]:
        from nlflow.backends.torch.graphs import Replay

        begun = flow.time

        def taken(v: Array) -> Array:
            return self.integrator.advance(flow, v, begun, begun + 2 * step, {})[0]  # a whole step

        before = flow.applications
        taken(u)  # what is kept with a flow is formed here, and averages are counted
        own = flow.applications - before
        return flow, own, Replay(taken, u, f"integrator {self.integrator!r}")
