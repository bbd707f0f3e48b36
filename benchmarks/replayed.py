"""Steps of flows that a GPU records once and repeats in one launch, beside the same steps started by the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from nlflow import ETD2RK, Batch, ExpDotProduct, ExplicitEuler, GradientFlow, J, Points, affinity
from nlflow.flows import AttentionFlow, Replayed, solve

STEPS = 64
DT = 1 / 64  # a power of two, so that sums of steps meet their times and all of them are repeated


def works(device: str, nodes: int) -> Iterator[tuple[str, Any, Any, Any]]:
    """Give flows of so many nodes by name, their starts and their integrators."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(nodes, 8, generator=generator, device=device) / 4
    points = Points(np.arange(float(nodes)))
    j = GradientFlow(J(affinity(ExpDotProduct(), points, x, method="tiled")), "degree")
    yield "J-flow, Euler", j, x, ExplicitEuler(DT)
    yield "J-flow, ETD2RK", j, x, ETD2RK(DT)
    heads = torch.randn(2, 4, nodes, 8, generator=generator, device=device) / 4
    attention = AttentionFlow(affinity(ExpDotProduct(), Batch(points, (2, 4)), heads))
    yield "attention flow, 2 x 4 heads, Euler", attention, heads, ExplicitEuler(DT)


def rows(
    device: str, nodes: int, measure: Callable[[Callable[[], Any], str], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Give the seconds of a step by the host and of a recorded one, in runs that record once, and whether bits agree.

    `measure` is that of `benchmarks.gpu`: it returns the seconds of a task on a device.
    """
    for name, flow, start, integrator in works(device, nodes):

        def run(integrator: Any, steps: int, flow: Any = flow, start: Any = start) -> Any:
            return solve(flow, start, t=steps * DT, integrator=integrator, energies=False)

        both, again = integrator, Replayed(integrator)
        same = torch.equal(run(both, STEPS).final, run(again, STEPS).final)
        # The difference of a long run and a short one: neither the recording nor the checks of the start are in it.
        seconds = {}
        for kind, one in (("host", both), ("replayed", again)):
            short, long = (
                measure(lambda one=one, steps=steps: run(one, steps), device)["seconds"] for steps in (STEPS, 5 * STEPS)
            )
            seconds[kind] = (long - short) / (4 * STEPS)
        yield {
            "flow": name, "n": nodes, "seconds_host": seconds["host"], "seconds_replayed": seconds["replayed"],
            "times_faster": seconds["host"] / seconds["replayed"], "same_bits": same,
        }  # fmt: skip
