"""Flows of E_p, and minimizers with other misfits, against SciPy's integrators and minima."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp
from scipy.optimize import minimize

from nlflow import Ep, Huber, PFlow, Points, RungeKutta, from_matrix, solve
from nlflow.flows import ForwardBackward, LaggedDiffusivity
from nlflow.functionals import KullbackLeibler
from validation.claims.p_functionals import CHANNELS, DELTA, POWERS, N, Problem, divergence, huber
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

END = 0.4


def run(context: Context) -> Outcome:
    courses = {"RungeKutta": 0.0, "LaggedDiffusivity": 0.0, "ForwardBackward": 0.0}
    for seed in range(context.pick(5, 1)):
        p_ = Problem.drawn(seed)
        weights = from_matrix(p_.k, Points(np.zeros(N), weights=p_.w))
        for p in POWERS:
            context.step(f"seed {seed}, p = {p:g}")
            for name, error in _courses(p_, Ep(weights, p_.f, p_.fidelity, p), p).items():
                courses[name] = largest(courses[name], error)
    excess, lower = held_by_misfits()
    return Outcome([
        Check("other misfits: excess over the least found by SciPy, over the tolerance", excess, 1.0),
        Check("other misfits: lower bounds above the minimum, and values, relative", lower, 1e-9),
        Check("longest steps of signals as wide as the observed one, relative", limits(), 1e-12),
        *(Check(f"{name} at t = {END}, against SciPy's DOP853", error, 1e-7 if name == "RungeKutta" else 4e-3)
          for name, error in courses.items()),
    ])  # fmt: skip


def held_by_misfits() -> tuple[float, float]:
    """Return the excess over SciPy's least of minimizers with other misfits, over the tolerance, and of bounds."""
    p_, excess, beyond = Problem.drawn(3), -np.inf, -np.inf
    weights, rtol = from_matrix(p_.k, Points(np.zeros(N), weights=p_.w)), 1e-4
    positive = replace(p_, u=np.abs(p_.u) + 0.5, f=np.abs(p_.f) + 0.5)
    for p, isotropic in ((1.0, False), (1.0, True), (1.5, False), (3.0, True)):
        for misfit, g, one in ((Huber(DELTA), huber, p_), (KullbackLeibler(), divergence, positive)):
            found = Ep(weights, one.f, one.fidelity, p, misfit=misfit, isotropic=isotropic).minimizer(rtol=rtol)

            def total(flat: Floats) -> float:
                u = np.maximum(flat.reshape(N, CHANNELS), 1e-3 if g is divergence else -np.inf)  # noqa: B023
                return one.total(u, p, g, isotropic)  # noqa: B023

            least = min(minimize(total, at.ravel(), method="Powell", options={"ftol": 1e-9, "maxfev": 20_000}).fun
                        for at in (found.u,))  # fmt: skip
            value = total(found.u.ravel())
            excess = largest(excess, (value - least) / least / rtol)
            beyond = largest(beyond, ((1 - found.residual) * found.value - least) / least, abs(found.value / value - 1))
    return excess, beyond


def limits() -> float:
    """Return errors of the longest steps for signals as wide as the observed one, relative."""
    p_, worst = Problem.drawn(4), 0.0
    weights = from_matrix(p_.k, Points(np.zeros(N), weights=p_.w))
    degree = ((p_.k + p_.k.T) * (1 - np.eye(N))) @ p_.w  # of differences: no node is one's own neighbour
    wide = float(np.linalg.norm(np.ptp(p_.f, axis=0)))
    for p, isotropic in ((2.0, False), (3.0, False), (3.5, True)):
        flow = PFlow(Ep(weights, p_.f, p_.fidelity, p, isotropic=isotropic))
        share = np.sqrt(degree.max()) ** (p - 2) if isotropic else 1.0
        steepest = (p - 1) * wide ** (p - 2) * share * degree.max()
        worst = largest(worst, abs(ForwardBackward(0.1).stability_limit(flow) * steepest - 1))
    return worst


def _courses(problem: Problem, energy: Ep, p: float) -> dict[str, float]:
    """Return the errors of the integrators at the end; of those of order 1 extrapolated from two steps, h and h/2."""
    shape = problem.u.shape
    exact = solve_ivp(
        lambda t, u: problem.velocity(u.reshape(shape), p).ravel(), (0, END), problem.u.ravel(), method="DOP853",
        rtol=1e-11, atol=1e-12,
    ).y[:, -1].reshape(shape)  # fmt: skip
    flow = PFlow(energy)

    def reached(integrator: Any) -> Floats:
        return np.asarray(solve(flow, problem.u, t=END, integrator=integrator).final)

    ends = {"RungeKutta": reached(RungeKutta(1e-9, 1e-10))}
    for step, takes in ((LaggedDiffusivity, p <= 2), (ForwardBackward, p >= 2)):
        if takes:
            ends[step.__name__] = 2 * reached(step(END / 80)) - reached(step(END / 40))
    return {name: float(np.abs(end - exact).max()) for name, end in ends.items()}


CLAIM = Claim(
    name="p-flows",
    title="Flows of E_p, and its minimizers with other misfits",
    statement=(
        "The flow du_i/dt = Σ w_j K_ij |u_j − u_i|^(p−2) (u_j − u_i) + λ_i (f_i − u_i) has the course that SciPy's "
        "integrator of order 8 finds; E_p with Huber's function or the divergence of Kullback and Leibler has the "
        "minima that SciPy finds. Explicit steps are as long as the steepest slope allows."
    ),
    source="Elmoataz, Lezoray and Bougleux 2008, doi 10.1109/TIP.2008.924284; Gilboa and Osher 2008",
    run=run,
)
