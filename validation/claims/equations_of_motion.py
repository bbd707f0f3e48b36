"""Particles, waves, oscillators and kinetics: velocities, energies and motions against equations written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import solve_ivp
from scipy.linalg import eigvalsh, expm

from nlflow import (
    AllenCahn,
    Constraint,
    E,
    ExplicitEuler,
    FisherKPP,
    Gaussian,
    GradientFlow,
    Grid,
    J,
    Points,
    Reaction,
    RungeKutta,
    Source,
    StoermerVerlet,
    WaveExponential,
    WaveFlow,
    affinity,
    from_matrix,
    solve,
)
from nlflow.affinities import Unlinked
from nlflow.flows import (
    AveragingFlow,
    Brusselator,
    Event,
    FitzHughNagumo,
    GrayScott,
    Kuramoto,
    ParticleFlow,
    PredatorPrey,
    mean_shift,
    trap,
)
from nlflow.flows.flow import Flow
from nlflow.flows.wave import _Responses
from nlflow.kernels import Interaction, Morse, PowerLaws, TopHat
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]
Field = Callable[[Floats], Floats]

END = 0.9


@dataclass
class Found:
    """The largest errors so far: of velocities, derivatives, energies and motions."""

    velocities: float = 0.0
    derivatives: float = 0.0
    energies: float = 0.0
    motions: float = 0.0
    steps: float = 0.0
    modes: float = 0.0

    def velocity(self, flow: Flow, u: Floats, field: Field) -> None:
        self.velocities = largest(self.velocities, apart(flow.velocity(u), field(u)))

    def derivative(self, flow: Flow, u: Floats, field: Field) -> None:
        """Hold the derivative along a direction against that of analytic functions, Im f(u + ih v) / h."""
        v = np.cos(1.0 + np.arange(u.size)).reshape(u.shape)
        slope = np.imag(field(u + 1e-30j * v)) / 1e-30
        self.derivatives = largest(self.derivatives, apart(flow.jacobian(u, v), slope))

    def energy(self, told: float, wanted: float) -> None:
        self.energies = largest(self.energies, abs(told / wanted - 1))

    def motion(self, flow: Flow, u: Floats, field: Field, integrator: Any, order: int = 0) -> None:
        """Hold a solution against that of DOP853; steps of an order are extrapolated from two lengths."""
        exact = dop853(field, u)
        if not order:
            self.motions = largest(self.motions, apart(solve(flow, u, t=END, integrator=integrator).final, exact))
            return
        errors = [apart(solve(flow, u, t=END, integrator=integrator(END / n)).final, exact) for n in (16, 32)]
        self.steps = largest(self.steps, abs(np.log2(errors[0] / errors[1]) - order), errors[1] / 1e-2)


def apart(found: Any, wanted: Floats) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def dop853(field: Field, u: Floats, **options: Any) -> Any:
    found = solve_ivp(lambda t, y: field(y.reshape(u.shape)).ravel(), (0, END), u.ravel(), method="DOP853",
                      rtol=1e-12, atol=1e-13, **options)  # fmt: skip
    return found if options else found.y[:, -1].reshape(u.shape)


# ---- particles


def particles(found: Found, rng: np.random.Generator) -> None:
    """Hold particles with and without inertia against double sums, in and out of a box."""
    x, v = rng.uniform(0, 2, (6, 2)), rng.standard_normal((6, 2))
    w = rng.uniform(0.5, 1.5, 6)
    centre = np.array([0.9, 1.2])
    gauss = 0.4
    cases: list[tuple[Any, Callable[[Floats], Floats], Callable[[Floats], Floats], float]] = [
        (Morse(1.2, 0.4, 0.7, 1.1),
         lambda r: 1.2 * np.exp(-r / 0.4) - 0.7 * np.exp(-r / 1.1),
         lambda r: -3.0 * np.exp(-r / 0.4) + 0.7 / 1.1 * np.exp(-r / 1.1), 0.0),
        (PowerLaws(3.0, 0.0, softening=0.2),
         lambda r: (r**2 + 0.04) ** 1.5 / 3 - np.log(r**2 + 0.04) / 2,
         lambda r: r * np.sqrt(r**2 + 0.04) - r / (r**2 + 0.04), 0.0),
        (Interaction(Gaussian(gauss), 1.5), lambda r: 1.5 * np.exp(-(r**2) / (2 * gauss**2)),
         lambda r: -1.5 * r / gauss**2 * np.exp(-(r**2) / (2 * gauss**2)), 9.0),
        (Interaction("1.7 - exp(-r**2)"), lambda r: 1.7 - np.exp(-(r**2)), lambda r: 2 * r * np.exp(-(r**2)), 0.0),
    ]  # fmt: skip
    for interaction, potential, slope, box in cases:

        def pairs(x: Floats) -> tuple[Floats, Floats]:
            between = x[:, None] - x[None]
            if box:  # noqa: B023
                between = between - box * np.round(np.real(between) / box)  # noqa: B023
            return between, np.sqrt((between**2).sum(axis=2) + np.eye(6))

        def force(x: Floats) -> Floats:
            between, r = pairs(x)
            return np.asarray(-((w * slope(r) / r)[:, :, None] * between).sum(axis=1) - 0.7 * (x - centre))  # noqa: B023

        def energy(x: Floats) -> float:
            values = w[:, None] * w * potential(pairs(x)[1])  # noqa: B023
            return float((values.sum() - np.trace(values)) / 2 + 0.35 * w @ ((x - centre) ** 2).sum(axis=1))

        given: dict[str, Any] = {"weights": w, "potential": trap(0.7, centre), "box": box or None}
        places = x + (np.arange(6) % 2 * box)[:, None]  # some of them beside the box
        flow = ParticleFlow(x, interaction, **given)
        found.velocity(flow, places, force)
        found.energy(flow.energy(places), energy(places))
        both = np.concatenate([places, v], axis=1)
        for friction, drag in ((0.0, 0.0), (0.8, 0.0), (-0.6, 0.6), (0.0, 0.3)):
            heavy = ParticleFlow(x, interaction, friction=friction, drag=drag, **given)

            def field(y: Floats) -> Floats:
                a, b = y[:, :2], y[:, 2:]
                resistance = friction + drag * (b**2).sum(axis=1, keepdims=True)  # noqa: B023
                return np.concatenate([b, force(a) - resistance * b], axis=1)

            found.velocity(heavy, both, field)
            found.energy(heavy.total_energy(both), energy(places) + float(w @ (v**2).sum(axis=1)) / 2)
            if interaction is cases[0][0] and drag:
                found.motion(heavy, both, field, StoermerVerlet, order=2)
            # Friction and drag alone are exact, and friction beside a constant force.
            free, constant = ParticleFlow(x, friction=friction, drag=drag), (drag == 0) * (0.3 - x)
            slowed = dop853(
                lambda b: constant - (friction + drag * (b**2).sum(axis=1, keepdims=True)) * b,  # noqa: B023
                v,
            )
            kicked = free.kicked(v, constant, END)
            found.motions = largest(found.motions, apart(kicked, slowed))

    alone = ParticleFlow(x, weights=w, potential=trap(0.7, centre), friction=0.8)

    def pulled(y: Floats) -> Floats:
        return np.concatenate([y[:, 2:], -0.7 * (y[:, :2] - centre) - 0.8 * y[:, 2:]], axis=1)

    found.velocity(alone, np.concatenate([x, v], axis=1), pulled)


def oscillators(found: Found, rng: np.random.Generator) -> None:
    """Hold means of what particles see, and phase oscillators, against sums."""
    x, data = rng.standard_normal((5, 2)), rng.standard_normal((8, 2))
    weights = rng.uniform(0.5, 1.5, 8)

    def seen(x: Floats, y: Floats, w: Floats, near: Any) -> Floats:
        k = w * near(((x[:, None] - y) ** 2).sum(axis=2))
        return np.asarray(k @ y / k.sum(axis=1, keepdims=True) - x)

    def bell(squared: Floats) -> Floats:
        return np.asarray(np.exp(-squared / (2 * 0.8**2)))

    shift = AveragingFlow(x, Gaussian(0.8), data=data, weights=weights)
    found.velocity(shift, x, lambda x: seen(x, data, weights, bell))
    k = bell(((x[:, None] - data) ** 2).sum(axis=2))
    found.energy(shift.energy(x), -(0.8**2) * float(np.log(k @ weights).mean()))
    found.motion(mean_shift(data, 0.8, x), x, lambda x: seen(x, data, np.ones(8), bell), RungeKutta(1e-10, 1e-11))
    found.velocity(AveragingFlow(x, TopHat(1.3)), x, lambda x: seen(x, x, np.ones(5), lambda s: s <= 1.3**2))
    theta, omega = rng.uniform(0, 9, 7), rng.standard_normal(7)

    def phases(theta: Floats) -> Floats:
        return np.asarray(omega + 1.4 / 7 * np.sin(theta - theta[:, None]).sum(axis=1))

    kuramoto = Kuramoto(omega, 1.4)
    found.velocity(kuramoto, theta, phases)
    found.motion(kuramoto, theta, phases, RungeKutta(1e-10, 1e-11))
    together = float(np.cos(theta - theta[:, None]).mean())  # r²
    found.energy(kuramoto.energy(theta), -1.4 * together / 2 - float((omega * theta).mean()))
    found.energy(kuramoto.order_parameter(theta)[0], float(np.sqrt(together)))


# ---- waves


def waves(found: Found, rng: np.random.Generator) -> None:
    """Hold waves with damping, densities, a fidelity and a reaction against matrices of sums and their exponentials."""
    n = 6
    k, w, f = rng.random((n, n)), rng.uniform(0.5, 1.5, n) / n, rng.standard_normal(n)
    u, v = rng.standard_normal((2, n))
    links = (k + k.T) * w
    matrix = np.diag(links.sum(axis=1)) - links + 0.7 * np.eye(n)
    weights = from_matrix(k, Points(np.zeros(n), weights=w))
    rho, gamma = rng.uniform(0.5, 2.0, n), rng.uniform(0.0, 1.5, n)
    plain = GradientFlow(E(weights, f, 0.7))

    def energy(u: Floats, v: Floats, rho: Any, fidelity: float = 0.7) -> float:
        apart = float(((links * w[:, None]) * (u - u[:, None]) ** 2).sum()) / 4
        return apart + float(w @ (rho * v**2 + fidelity * (u - f) ** 2)) / 2

    # Nodes of their own density and damping, with a reaction.
    pulled = WaveFlow(plain + AllenCahn(0.4, interval=(-4.0, 4.0)), damping=gamma, density=rho)

    def field(y: Floats) -> Floats:
        u, v = y[:, 0], y[:, 1]
        force = 0.7 * f - matrix @ u + 0.4 * (u - u**3)
        return np.stack([v, force / rho - gamma * v], axis=1)

    state = np.stack([u, v], axis=1)
    found.velocity(pulled, state, field)
    found.derivative(pulled, state, field)
    found.energy(pulled.energy(state), energy(u, v, rho) + 0.1 * float(w @ (u**2 - 1) ** 2))
    found.motion(pulled, state, field, RungeKutta(1e-10, 1e-11))
    found.motion(pulled, state, field, StoermerVerlet, order=2)
    uneven = WaveFlow(plain, density=rho)
    fastest = float(np.sqrt(eigvalsh(w[:, None] * matrix, np.diag(w * rho)).max()))
    found.energy(uneven.largest_frequency(), fastest)
    found.energy(StoermerVerlet(0.1).stability_limit(uneven), 2 / fastest)
    found.energy(WaveFlow(plain, density=1.3).largest_frequency() ** 2, np.linalg.eigvals(matrix).real.max() / 1.3)
    # Masses of degrees: those of K = k + k^T under the measure.
    heavy = WaveFlow(GradientFlow(J(weights), metric="degree"), density=rho)
    found.energy(heavy.energy(state), energy(u, 0 * v, rho, 0.0) + float((w * links.sum(axis=1) * rho) @ v**2) / 2)
    # A bound that costs nothing, by Gershgorin's circles.
    light = np.where(np.arange(n) == 2, 0.1, rho)
    highest = (2 * float(links.sum(axis=1).max()) + 0.7) / 0.1
    found.energy(WaveFlow(plain, density=light).surely_below() ** 2, highest)
    steep = WaveFlow(plain + AllenCahn(0.4), density=rho)  # slopes of s (u − u³) are at most 2s
    found.energy(steep.fastest() ** 2, fastest**2 + 0.8 / float(rho.min()))
    for at in (gamma, 0.0):
        # Strides are products with a matrix.
        stepped = WaveFlow(plain, damping=at, density=rho)
        many, one = (solve(stepped, state, t=END, integrator=StoermerVerlet(END / 24, stride)).final
                     for stride in (6, 1))  # fmt: skip
        found.velocities = largest(found.velocities, apart(many, np.asarray(one)))
    # A source that changes, beside one that does not: steps take it where they are.
    push = rng.standard_normal(n)
    pushed = plain + Source(0.4 * push) + Source(lambda t: (np.cos(4 * t) - 0.4) * push)
    driven = WaveFlow(pushed, damping=gamma, density=rho)
    exact = solve_ivp(
        lambda t, y: np.stack([y[n:], (0.7 * f + np.cos(4 * t) * push - matrix @ y[:n]) / rho - gamma * y[n:]]).ravel(),
        (0, END), state.T.ravel(), method="DOP853", rtol=1e-12, atol=1e-13,
    ).y[:, -1].reshape(2, n).T  # fmt: skip
    for stride in (1, 4):
        errors = [apart(solve(driven, state, t=END, integrator=StoermerVerlet(END / count, stride)).final, exact)
                  for count in (24, 48)]  # fmt: skip
        found.steps = largest(found.steps, abs(np.log2(errors[0] / errors[1]) - 2), errors[1] / 1e-2)
    # One step, from a time on: half a move, the kick of the middle, half a move.
    t, h = 0.3, 0.2
    half = u + h / 2 * v
    force = (0.7 * f + np.cos(4 * (t + h / 2)) * push - matrix @ half) / rho
    kicked = np.exp(-gamma * h) * v - np.expm1(-gamma * h) / gamma * force
    one = StoermerVerlet(h).step(driven.when(t), state, h)
    found.velocities = largest(found.velocities, apart(one, np.stack([half + h / 2 * kicked, kicked], axis=1)))
    # Held nodes, of values that are not 0, over strides too.
    held = WaveFlow(GradientFlow(E(weights, f, 0.7), constraint=Constraint([1, 4], [0.8, -0.5])), density=rho)
    rest = np.stack([np.where(np.isin(np.arange(n), (1, 4)), [0, 0.8, 0, 0, -0.5, 0], u), v], axis=1)
    rest[[1, 4], 1] = 0
    free = np.setdiff1d(np.arange(n), (1, 4))

    def between(y: Floats) -> Floats:
        force = (0.7 * f - matrix @ y[:, 0]) / rho
        change = np.stack([y[:, 1], force], axis=1)
        change[[1, 4]] = 0
        return change

    exact = dop853(between, rest)
    for stride in (1, 4):
        errors = [apart(solve(held, rest, t=END, integrator=StoermerVerlet(END / count, stride)).final[free],
                        exact[free]) for count in (24, 48)]  # fmt: skip
        found.steps = largest(found.steps, abs(np.log2(errors[0] / errors[1]) - 2), errors[1] / 1e-2)
    # One damping: exact at any time, for weak and strong damping.
    ring = Grid(12, spacing=0.1, boundary="periodic")
    circle = GradientFlow(J(affinity(Gaussian(0.15), ring)))
    rows = -np.stack([circle.velocity(row) for row in np.eye(12)], axis=1)
    turning = np.sin(2 * np.pi * ring.nodes[:, 0] / 1.2) + 0.3
    for flow, a, start, push in (
        (plain, matrix, state, 0.7 * f),
        (circle, rows, np.stack([turning, np.roll(turning, 2) - 0.3], axis=1), np.zeros(12)),
    ):
        size = len(a)
        for damping, times in ((0.0, (0.2, 7.0)), (0.4, (0.1, 3.0)), (6.0, (0.2, 4.0))):
            whole = np.zeros((2 * size + 1, 2 * size + 1))
            whole[:size, size : 2 * size] = np.eye(size)
            whole[size : 2 * size, :size], whole[size : 2 * size, -1] = -a / 1.3, push / 1.3
            whole[size : 2 * size, size : 2 * size] = -damping * np.eye(size)
            wave = WaveFlow(flow, damping=damping, density=1.3)
            for t in times:
                exact = (expm(t * whole) @ np.append(start.T.ravel(), 1.0))[:-1].reshape(2, size).T
                reached = solve(wave, start, t=t, integrator=WaveExponential()).final
                found.motions = largest(found.motions, apart(reached, exact))
    # Modes one by one, some nearly critical: the displacement and velocity of a push, and what a force of 1 does.
    for damping, t in ((0.0, 0.3), (0.9, 0.3), (0.9, 1.7), (6.0, 0.3), (6.0, 2.1)):
        responses = _Responses(t, damping)
        for gap in (-0.9e-8, -2e-9, 0.0, 3e-9, 0.9e-8, 0.4, 7.0, -0.07, -damping * damping / 4 * t * t):
            a = damping * damping / 4 + gap / t**2
            if a < 0:
                continue
            mode = expm(t * np.array([[0.0, 1.0, 0.0], [-a, -damping, 1.0], [0.0, 0.0, 0.0]]))
            told = [float(of(a)) for of in (responses.pushed, responses.coasting, responses.pulled)]
            found.modes = largest(found.modes, float(np.abs(told - mode[[0, 1, 0], [1, 1, 2]]).max()))


# ---- kinetics, moments within steps


def lone(reaction: Reaction) -> GradientFlow:
    """Return the flow of a reaction alone, at nodes without links."""
    return GradientFlow(J(Unlinked(Points(np.zeros(3)))), "degree", reaction=reaction)


def kinetics(found: Found, rng: np.random.Generator) -> None:
    """Hold reactions and their slopes against formulas written out."""
    u = rng.uniform(0.1, 0.9, (3, 2))

    def gray_scott(u: Floats) -> Floats:
        a, b = u.T
        return np.stack([-a * b**2 + 0.05 * (1 - a), a * b**2 - (0.05 + 0.06) * b], axis=1)

    def brusselator(u: Floats) -> Floats:
        a, b = u.T
        return np.stack([1.3 - 3.1 * a + a**2 * b, 2.1 * a - a**2 * b], axis=1)

    def nagumo(u: Floats) -> Floats:
        a, b = u.T
        return np.stack([a - a**3 / 3 - b + 0.3, 0.1 * (a + 0.7 - 0.8 * b)], axis=1)

    def predators(u: Floats) -> Floats:
        a, b = u.T
        eaten = a * b / (a + 0.4)
        return np.stack([1.2 * a * (1 - a) - eaten, 0.9 * eaten - 0.35 * b], axis=1)

    kinds = (
        (GrayScott(0.05, 0.06), gray_scott),
        (FitzHughNagumo(0.7, 0.8, 0.1, 0.3), nagumo),
        (Brusselator(1.3, 2.1), brusselator),
        (PredatorPrey(growth=1.2, saturation=0.4, conversion=0.9, mortality=0.35), predators),
        (GrayScott(0.05, 0.06) + FitzHughNagumo(0.7, 0.8, 0.1, 0.3), lambda u: gray_scott(u) + nagumo(u)),
    )
    for reaction, field in kinds:
        found.velocity(lone(reaction), u, field)
        found.derivative(lone(reaction), u, field)
    found.motion(lone(kinds[1][0]), u, nagumo, RungeKutta(1e-10, 1e-11))
    a = u[:, 0]
    for one, field in (
        (FisherKPP(1.3), lambda a: 1.3 * a * (1 - a)),
        (FisherKPP(1.3) + AllenCahn(0.4), lambda a: 1.3 * a * (1 - a) + 0.4 * (a - a**3)),
    ):
        found.velocity(lone(one), a, field)
        found.derivative(lone(one), a, field)
    potential: Any = (FisherKPP(1.3) + AllenCahn(0.4)).potential
    by_hand = 1.3 * (a**3 / 3 - a**2 / 2) + 0.1 * (a**2 - 1) ** 2
    found.energies = largest(found.energies, apart(potential(a), by_hand))
    # Competition with an average of the prey.
    k = rng.random((3, 3))
    k += k.T
    around = from_matrix(k, Points(np.zeros(3)))
    share = k / k.sum(axis=1, keepdims=True)

    def far(u: Floats) -> Floats:
        change = predators(u)
        change[:, 0] += 1.2 * u[:, 0] * (u[:, 0] - share @ u[:, 0])
        return change

    reaction = PredatorPrey(around, growth=1.2, saturation=0.4, conversion=0.9, mortality=0.35)
    flow = GradientFlow(J(around), "degree", reaction=reaction)
    found.velocity(flow, u, lambda u: far(u) + share @ u - u)
    found.derivative(flow, u, lambda u: far(u) + share @ u - u)


def moments(found: Found) -> float:
    """Return errors of events, and of signals within long steps: a pendulum against SciPy's events and its own."""
    swing = Reaction(lambda u: np.stack([u[..., 1], -np.sin(u[..., 0])], -1), (-3, 3), components=2, bound=2)
    flow = GradientFlow(J(Unlinked(Points([0.0]))), "degree", reaction=swing)
    start = np.array([[1.5, 0.3]])

    def field(y: Floats) -> Floats:
        return np.stack([y[..., 1], -np.sin(y[..., 0])], -1)

    def over(t: float, y: Floats) -> float:
        return float(y.ravel()[0] - 0.4)

    span, times = (0, 12.0), np.linspace(0, 12.0, 25)
    exact = solve_ivp(lambda t, y: field(y), span, start[0], method="DOP853", rtol=1e-12, atol=1e-13, events=over,
                      t_eval=times)  # fmt: skip
    both, falling = (Event(over, direction=d, name=f"over {d}") for d in (0, -1))
    kept = solve(flow, start, t_eval=times, integrator=RungeKutta(1e-10, 1e-11), trackers=[both, falling])
    found.motions = largest(found.motions, apart(kept.u[:, 0], exact.y.T))
    moments = np.array(exact.t_events[0])
    worst = float(np.abs(kept.records["over 0"]["t"] - moments).max())
    worst = largest(worst, float(np.abs(kept.records["over -1"]["t"] - moments[::2]).max()))
    return largest(worst, rising(), armed())


def rising() -> float:
    """Return errors of events of u' = 1: where g is 0 at a step's end, at the start, and between steps.

    Of a g that is linear the second trial is the place, and the next is half the tolerance beside it. One that is bent
    takes as many trials as the Illinois method (Dowell and Jarratt 1971, doi 10.1007/BF01934364), either way.
    """
    flow = lone(Reaction(lambda u: 1 + 0 * u, (-99, 99), bound=1.0))
    asked: list[float] = []

    def over(t: float, u: Floats) -> float:
        asked.append(t)
        return float(u[0]) - 0.7345

    events = {
        "end": Event(lambda t, u: u[0] - 1.0, name="end"),
        "turning": Event(lambda t, u: np.sin(t), name="turning"),
        "start": Event(lambda t, u: u[0] * (u[0] - 2.2), name="start"),
        "between": Event(over, tol=1e-3, name="between"),
    }
    found = solve(flow, np.zeros(3), t=3.5, integrator=ExplicitEuler(0.25), trackers=list(events.values()))
    worst = 0.0
    for name, expected in (("end", 1.0), ("turning", np.pi), ("start", 2.2), ("between", 0.7345)):
        times = found.records[name]["t"]
        allowed = {"between": 0.501e-3}.get(name, 1e-8) / 1e-8
        worst = largest(worst, float(len(times) != 1), abs(float(times[0]) - expected) / allowed)
    between = [t for t in asked if 0.5 < t < 0.75]
    beside = min(abs(abs(t - 0.7345) - 0.5e-3) for t in between)
    worst = largest(worst, float(len(between) > 4), beside)
    for place, bent in (
        (1.3, lambda u: np.exp(4 * u) - np.exp(5.2)),
        (1.45, lambda u: np.exp(5.2) - np.exp(11 - 4 * u)),
    ):
        for tol, most in ((1e-3, 5), (1e-5, 6), (1e-7, 7)):
            tried: set[float] = set()

            def curved(t: float, u: Floats) -> float:
                tried.add(t)  # noqa: B023
                return float(bent(u[0]))  # noqa: B023

            found = solve(flow, np.zeros(3), t=1.5, integrator=ExplicitEuler(0.25), trackers=[Event(curved, tol=tol)])
            (time,) = found.records["event"]["t"]
            inside = sum(1.25 < t < 1.5 for t in tried)
            worst = largest(worst, abs(time - place) / tol * 1e-8, float(inside > most))
    return worst


def armed() -> float:
    """Return errors of events of u' = c u: where g is 0 at the start and nodes move apart, and in nanoseconds.

    g = (u_0 - 2 u_1 - 1) (3/2 - ct) with u_0 = 3 e^ct and u_1 = e^ct is above 0 from the start on, and falls at 3/2c.
    """
    worst = 0.0
    for rate in (1.0, 1e9):
        flow = lone(Reaction(lambda u: rate * u, (-99, 99), bound=rate))  # noqa: B023
        falls = Event(lambda t, u: (u[0] - 2 * u[1] - 1) * (1.5 - rate * t))  # noqa: B023
        found = solve(flow, np.array([3.0, 1.0, 0.0]), t=2 / rate, integrator=RungeKutta(1e-10, 1e-11),
                      trackers=[falls])  # fmt: skip
        times = found.records["event"]["t"]
        worst = largest(worst, float(len(times) != 1), abs(rate * float(times[0]) - 1.5))
    return worst


def run(context: Context) -> Outcome:
    found, rng = Found(), np.random.default_rng(41)
    for part in (particles, oscillators, waves, kinetics):
        context.step(part.__name__)
        part(found, rng)
    late = moments(found)
    return Outcome([
        Check("velocities against sums written out, relative", found.velocities, 1e-12),
        Check("derivatives of velocities along a direction, relative", found.derivatives, 1e-12),
        Check("energies and frequencies, relative", found.energies, 1e-12),
        Check("motions against SciPy's DOP853, and waves against exponentials, relative", found.motions, 1e-8),
        Check("modes of waves, some nearly critical, against exponentials", found.modes, 1e-13),
        Check("order of Störmer and Verlet's steps, less 2; and their error over 1e-2", found.steps, 1.0),
        Check("moments of events against those of SciPy", late, 1e-8),
    ])  # fmt: skip


CLAIM = Claim(
    name="equations-of-motion",
    title="Particles, waves, oscillators and kinetics move as their equations say",
    statement=(
        "dx/dt = −Σ w ∇W − ∇V and with inertia dv/dt = −Σ w ∇W − ∇V − (γ + δ|v|²) v; ρ u'' = −∇E − ργ u'; means of "
        "what is seen less the place; dθ/dt = ω + K/N Σ sin(θ_j − θ_i); kinetics of Gray and Scott, Prigogine and "
        "Lefever, FitzHugh and Nagumo, Rosenzweig and MacArthur, Fisher: velocities, their derivatives and energies "
        "are sums written out, motions are those of SciPy's DOP853, waves of one damping are exponentials of matrices "
        "at any time. Events happen when SciPy's do."
    ),
    source=(
        "D'Orsogna et al. 2006, doi 10.1103/PhysRevLett.96.104302; Silling 2000, doi 10.1016/S0022-5096(99)00029-0; "
        "Cheng 1995, doi 10.1109/34.400568; Strogatz 2000, doi 10.1016/S0167-2789(00)00094-4; Hairer, Lubich and "
        "Wanner 2003, doi 10.1017/S0962492902000144"
    ),
    run=run,
)
