"""A flow with checkpoints, to be killed: ``python -m validation.robustness.faults.flow KIND FOLDER``.

Goes on from the checkpoint in the folder, writes one after every step, and the solution at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import nlflow as nl
from validation.robustness.faults.program import program

KINDS = ("euler", "runge-kutta", "exponential")
SIZE = 500


def problem(kind: str) -> tuple[nl.flow.Flow, Any]:
    """Return a flow and its integrator; they take some hundred steps, or a second, whatever the kind."""
    rng = np.random.default_rng(5)
    signal = rng.standard_normal((SIZE, 2))
    affinity = nl.affinity(nl.Gaussian(width=1.5), nl.Points(np.sort(rng.uniform(0, SIZE, SIZE))), signal)
    energy = nl.E(affinity, signal, 0.3, measure="degree")
    if kind == "euler":
        return nl.GradientFlow(energy, "degree"), nl.ExplicitEuler(0.01)
    if kind == "runge-kutta":  # its kernel is taken from the signal after every other step
        return nl.GradientFlow(energy, "degree", evolving=True, every=2), nl.RungeKutta(1e-10, 1e-12)
    return nl.GradientFlow(energy, "degree"), nl.Exponential()


def main(kind: str, folder: str) -> int:
    """Integrate, and return the exit status."""
    flow, integrator = problem(kind)
    solution = nl.solve(
        flow,
        t_eval=np.linspace(0, 3, 13),
        integrator=integrator,
        trackers=[nl.Energy(5), nl.Checkpoint(Path(folder) / "checkpoint", seconds=0)],
        resume=True,
    )
    if solution.status is nl.Status.INTERRUPTED:
        return 130
    solution.save(Path(folder) / "solution.npz")
    return 0


if __name__ == "__main__":
    program(main)
