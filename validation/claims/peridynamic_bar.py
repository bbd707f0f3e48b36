"""Waves in a peridynamic bar: their dispersion, and a million steps that lose no energy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import expm

from nlflow import (
    E,
    Gaussian,
    GradientFlow,
    Grid,
    J,
    Points,
    StoermerVerlet,
    WaveExponential,
    WaveFlow,
    affinity,
    from_matrix,
    solve,
)
from nlflow.kernels import Laplace
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

WIDTH = 0.05
SAMPLES = 200  # of the energy in a long run


def closed_form(kernel: str, wave: Floats) -> Floats:
    """Return ω² = 2 ∫ k(r) (1 − cos(κr)) dr of the bar on the line."""
    if kernel == "Gaussian":
        return np.asarray(2 * WIDTH * np.sqrt(2 * np.pi) * (1 - np.exp(-((wave * WIDTH) ** 2) / 2)))
    return np.asarray(4 * WIDTH * (wave * WIDTH) ** 2 / (1 + (wave * WIDTH) ** 2))


class Bar:
    """A ring of length 1, whose frequencies are sums written out."""

    def __init__(self, kernel: str, nodes: int) -> None:
        self.grid = Grid(nodes, spacing=1 / nodes, boundary="periodic")
        self.x = self.grid.nodes[:, 0]
        shape: Any = Gaussian(width=WIDTH) if kernel == "Gaussian" else Laplace(width=WIDTH)
        self.flow = WaveFlow(GradientFlow(J(affinity(shape, self.grid))))
        offset = np.arange(-40 * nodes // 10, 40 * nodes // 10 + 1) / nodes  # four rings each way
        self.offset, r = offset, np.abs(offset) / WIDTH
        self.k = np.exp(-(r**2) / 2) if kernel == "Gaussian" else np.exp(-r)

    def squares(self, number: Floats) -> Floats:
        """Return ω² of waves, 2 h Σ_r k(r) (1 − cos(2πnr))."""
        turns = 1 - np.cos(2 * np.pi * np.outer(number, self.offset))
        return np.asarray(2 / len(self.x) * turns @ self.k)

    def measured(self, number: int, integrator: Any, t: float) -> float:
        """Return the phase modulo a turn by which a standing wave has moved at time t."""
        mode = np.cos(2 * np.pi * number * self.x)
        omega = float(np.sqrt(self.squares(np.array([number]))[0]))
        end = solve(self.flow, self.flow.state(mode), t=t, integrator=integrator, energies=False).final
        u, v = (2 / len(mode) * (part @ mode) for part in (self.flow.displacement(end), self.flow.speed_of(end)))
        return float(np.arctan2(-v / omega, u))


def wrapped(phase: float) -> float:
    return float((phase + np.pi) % (2 * np.pi) - np.pi)


def dispersion(kernel: str, nodes: int) -> float:
    """Return the largest error of a frequency, relative, of waves that the exact solution shows."""
    bar, errors = Bar(kernel, nodes), []
    for number in range(1, 9):
        omega = float(np.sqrt(closed_form(kernel, np.array(2 * np.pi * number))))
        t = 40 / omega
        errors.append(abs(wrapped(bar.measured(number, WaveExponential(), t) - 40)) / 40)
    return max(errors)


class LongRun:
    """Many steps from a smooth start, looked at 200 times."""

    def __init__(self, bar: Bar, h: float, steps: int) -> None:
        n, stride = len(bar.x), steps // SAMPLES
        start = bar.flow.state(np.sin(2 * np.pi * bar.x) + 0.3 * np.cos(6 * np.pi * bar.x))
        times = h * stride * np.arange(SAMPLES + 1)
        found = solve(bar.flow, start, t_eval=times, integrator=StoermerVerlet(h, stride))
        squares = bar.squares(np.arange(n // 2 + 1))
        u, v = (np.fft.rfft(part, axis=1) for part in (bar.flow.displacement(found.u), bar.flow.speed_of(found.u)))
        self.success = found.success
        self.energy = np.sum(squares * np.abs(u) ** 2 + np.abs(v) ** 2, axis=1)
        self.energy /= self.energy[0]
        self.told = float(np.abs(found.energy / found.energy[0] - self.energy).max())
        # What the method conserves exactly, of each mode.
        kept = np.sum(squares * np.abs(u) ** 2 + (1 - h * h * squares / 4) * np.abs(v) ** 2, axis=1)
        self.modified = float(np.abs(kept / kept[0] - 1).max())

    @property
    def largest(self) -> float:
        return float(np.abs(self.energy - 1).max())

    @property
    def growth(self) -> float:
        """By how much the mean energy of the last half differs from that of the first."""
        half = len(self.energy) // 2
        return abs(float(self.energy[half:].mean() - self.energy[:half].mean()))


def phase_order(bar: Bar) -> tuple[float, float]:
    """Return the order of the phase error, and the largest distance of phases to 2 arcsin(hω/2) a step."""
    number, t = 3, 30.0
    omega = float(np.sqrt(bar.squares(np.array([number]))[0]))
    errors, off = [], 0.0
    for steps in (400, 800):
        phase = bar.measured(number, StoermerVerlet(t / steps, steps), t)
        errors.append(abs(wrapped(phase - omega * t)))
        h = t / steps
        turned = 2 * steps * np.arcsin(h * omega / 2)
        # The measured amplitude of v is ω√(1 − h²ω²/4)⁻¹ of what the phase of an exact mode takes it for.
        expected = np.arctan2(np.sin(turned) / np.sqrt(1 - (h * omega / 2) ** 2), np.cos(turned))
        off = max(off, abs(wrapped(phase - float(expected))))
    return float(np.log2(errors[0] / errors[1])), off


def damped(seed: int) -> tuple[float, float]:
    """Return the error of damped and driven waves, and of their energy, against SciPy's matrix exponential.

    ρ u'' = −(L + λ) u + λ f + g − ρ γ u', from slow to overdamped.
    """
    rng = np.random.default_rng([110, seed])
    n, fidelity, t = 24, 0.3, 3.0
    k, w = rng.random((n, n)), rng.uniform(0.5, 2.0, n) / n
    f, source, u, v = rng.standard_normal((4, n))
    both = (k + k.T) * w
    matrix = np.diag(both.sum(axis=1) + fidelity) - both
    off, energies = 0.0, 0.0
    weights = from_matrix(k, Points(np.zeros(n), weights=w))
    for damping in (0.0, 0.4, 2.0 * float(np.sqrt(fidelity)), 6.0):
        flow = WaveFlow(GradientFlow(E(weights, f, fidelity), source=source), damping=damping)
        found = solve(flow, flow.state(u, v), t=t, integrator=WaveExponential())
        rest = np.linalg.solve(matrix, fidelity * f + source)
        block = np.block([[np.zeros((n, n)), np.eye(n)], [-matrix, -damping * np.eye(n)]])
        exact = expm(t * block) @ np.concatenate([u - rest, v])
        here, speed = exact[:n] + rest, exact[n:]
        off = largest(off, float(np.abs(flow.displacement(found.final) - here).max()),
                      float(np.abs(flow.speed_of(found.final) - speed).max()))  # fmt: skip
        pairs = float(w @ (k * (here[:, None] - here) ** 2) @ w) / 2
        energy = pairs + float(w @ (speed**2 / 2 + fidelity * (here - f) ** 2 / 2 - source * here))
        energies = largest(energies, abs(found.energy[-1] / energy - 1))
    return off, energies


def run(context: Context) -> Outcome:
    off_damped, energies = damped(0)
    context.step("dispersion")
    exact = dispersion("Gaussian", 256)
    kinks = [dispersion("Laplace", n) for n in (512, 1024)]
    smooth = float(np.log2(kinks[0] / kinks[1]))
    bar = Bar("Gaussian", 64)
    fastest = float(np.sqrt(bar.squares(np.arange(33)).max()))
    steps = context.pick(10**6, 2 * 10**4)
    context.step(f"{steps} steps of hω = 5e-5 of the slowest wave")
    slow = LongRun(bar, 5e-5 / float(np.sqrt(bar.squares(np.array([1]))[0])), steps)
    context.step(f"{steps} steps of hω = 0.5 of the fastest wave")
    fast = LongRun(bar, 0.5 / fastest, steps)
    order, off = phase_order(bar)
    checks = [
        Check("frequencies against the closed form, Gaussian, relative", exact, 1e-10),
        Check("the same with a kink of k(r) r² at r = 0, order in the spacing", smooth, 0.1, expected=4),
        Check("energy of the package against Fourier sums, relative", largest(slow.told, fast.told), 1e-12),
        Check(f"{steps} steps of hω₁ = 5e-5: largest change of the energy, relative", slow.largest, 1e-8),
        Check("from the first half to the second", slow.growth, 1e-9),
        Check(f"{steps} steps of hω = 0.5: change of what the method conserves", fast.modified, 1e-11),
        Check("damped and driven waves against SciPy's matrix exponential", off_damped, 1e-9),
        Check("their energies against double sums, relative", energies, 1e-9),
        Check("order of the phase error", order, 0.1, expected=2),
        Check("phases against 2 arcsin(hω/2) a step", off, 1e-9),
    ]
    return Outcome(checks, {}, {"largest change of the energy at hω = 0.5": fast.largest, "dispersion, kinks": kinks})


CLAIM = Claim(
    name="peridynamic-bar",
    title="Waves in a peridynamic bar disperse as the formula says, and keep their energy",
    statement=(
        "Waves of u'' = −Lu have ω(κ)² = 2 ∫ k(r) (1 − cos κr) dr: 2 σ √(2π) (1 − exp(−κ² σ² / 2)) for a Gaussian, "
        "4 σ (κσ)² / (1 + (κσ)²) for a Laplace kernel, so short ones stand nearly still. In a million steps of the "
        "method of Störmer and Verlet the energy changes by at most (hω)² / 4, without growth, and ω² u² + (1 − h² ω² "
        "/ 4) v² of each mode not at all; phases are off by the order h². Frequencies and energies are sums written "
        "out here."
    ),
    source=(
        "S. A. Silling 2000, doi 10.1016/S0022-5096(99)00029-0; Hairer, Lubich and Wanner 2003, doi "
        "10.1017/S0962492902000144"
    ),
    run=run,
)
