"""Patterns grow from a homogeneous state at the rates of the linear theory, by nonlocal diffusion too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nlflow import ETD4RK, Gaussian, Grid, J, RungeKutta, TopHat, affinity, solve
from nlflow.flows import Brusselator, SystemFlow
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

A, DIFFUSIVITY = 1.5, (1.0, 8.0)
SMALL = 1e-7  # amplitudes beside the homogeneous state, whose squares are nothing


class Ring:
    """The Brusselator on a ring with a kernel for each channel, and its linear theory written out."""

    def __init__(self, nodes: int, widths: tuple[float, float], b: float) -> None:
        self.nodes, self.b = nodes, b
        self.rest = np.array([A, b / A])
        grid = Grid(nodes, boundary="periodic")
        functionals = [J(affinity(Gaussian(width), grid)) for width in widths]
        box = ((0.0, 4 * A), (0.0, 4 * b / A))
        one = functionals[0] if widths[0] == widths[1] else functionals
        self.flow = SystemFlow(one, DIFFUSIVITY, reaction=Brusselator(A, b, interval=box))
        offsets = np.arange(-40 * nodes, 40 * nodes)
        self.offsets, self.rows = offsets, [np.exp(-(offsets**2) / (2 * width**2)) for width in widths]

    def lost(self, k: int) -> Floats:
        """Return q_c(k), one minus the average of cos 2 pi k x / N over each kernel, by sums over all images."""
        waves = np.cos(2 * math.pi * k * self.offsets / self.nodes)
        return np.array([1 - float(row @ waves) / float(row.sum()) for row in self.rows])

    def matrix(self, k: int) -> Floats:
        """Return R'(u*) - diag(D_c q_c(k))."""
        slopes = np.array([[self.b - 1, A**2], [-self.b, -(A**2)]])
        return slopes - np.diag(np.array(DIFFUSIVITY) * self.lost(k))

    def rates(self) -> NDArray[np.complex128]:
        """Return the growth rates of all modes, the larger real part first, shape (N / 2 + 1, 2)."""
        found = [np.linalg.eigvals(self.matrix(k)) for k in range(self.nodes // 2 + 1)]
        return np.array([sorted(pair, key=lambda s: -s.real) for pair in found])

    def measured(self, k: int, integrator: Any, end: float) -> float:
        """Return by how much the growth of a mode in the flow differs from exp(t M) of the theory, relative."""
        from scipy.linalg import expm

        wave = np.cos(2 * math.pi * k * np.arange(self.nodes) / self.nodes)
        direction = np.array([1.0, -0.5])
        start = self.rest + SMALL * wave[:, None] * direction
        final = solve(self.flow, start, t=end, integrator=integrator, energies=False).final
        seen = 2 * (wave @ (final - self.rest)) / self.nodes / SMALL / (2 if 2 * k % self.nodes == 0 else 1)
        expected = expm(end * self.matrix(k)) @ direction
        return float(np.linalg.norm(seen - expected) / np.linalg.norm(expected))


def threshold(ring: Ring) -> float:
    """Return the b at which the first mode begins to grow: the least (1 + D_u q_u) (a^2 + D_v q_v) / (D_v q_v)."""
    q = np.array([ring.lost(k) for k in range(1, ring.nodes // 2 + 1)])
    first, second = DIFFUSIVITY
    return float(np.min((1 + first * q[:, 0]) * (A**2 + second * q[:, 1]) / (second * q[:, 1])))


def off_bound(nodes: int, width: float) -> tuple[float, float]:
    """Return the largest D q of a top hat over the bound that steps go by, and that over the loosest one, 2 D."""
    flow = SystemFlow(
        J(affinity(TopHat(width), Grid(nodes, boundary="periodic"))), DIFFUSIVITY, reaction=Brusselator(A, 3.0)
    )
    offsets = np.arange(-int(width), int(width) + 1)
    q = [1 - float(np.cos(2 * math.pi * k * offsets / nodes).mean()) for k in range(nodes)]
    return max(DIFFUSIVITY) * max(q) / flow.diffusion_bound(), flow.diffusion_bound() / (2 * max(DIFFUSIVITY))


def run(context: Context) -> Outcome:
    nodes = context.pick(96, 48)
    growth, operator, signs, steep = 0.0, 0.0, 0.0, 0.0
    pairs = ((2.0, 2.0), (1.5, 3.0))
    for widths in pairs:
        ring = Ring(nodes, widths, 3.0)
        rates = ring.rates()
        # The largest D q lies below the bound that steps go by, which is at most twice as large.
        largest_rate = max(float((np.array(DIFFUSIVITY) * ring.lost(k)).max()) for k in range(nodes // 2 + 1))
        for ratio in (largest_rate / ring.flow.diffusion_bound(), ring.flow.diffusion_bound() / largest_rate / 2):
            steep = largest(steep, ratio)
        context.step(f"widths {widths[0]:g} and {widths[1]:g}")
        for k in range(0, nodes // 2 + 1, context.pick(2, 6)):
            wave = np.cos(2 * math.pi * k * np.arange(nodes) / nodes)
            for unit in np.eye(2):
                rate = ring.flow.jacobian(np.broadcast_to(ring.rest, (nodes, 2)).copy(), wave[:, None] * unit)
                operator = largest(operator, float(np.abs(rate - wave[:, None] * (ring.matrix(k) @ unit)).max()))
            for integrator in (ETD4RK(0.01), RungeKutta(dt=0.01, adaptive=False)):
                growth = largest(growth, ring.measured(k, integrator, 2.0))
        # On either side of the threshold of the first mode, its sign.
        critical = threshold(ring)
        for share, sign in ((0.99, -1), (1.01, 1)):
            near = Ring(nodes, widths, share * critical).rates()[1:, 0].real.max()
            signs = largest(signs, -sign * float(near))
    selected = _selected(context, nodes)
    fastest = {f"{w}": int(np.argmax(Ring(nodes, w, 3.0).rates()[:, 0].real)) for w in pairs}
    for width in (1.0, 2.0, 5.0):  # no definite kernel: eigenvalues of I − P are above 1
        steep = largest(steep, *off_bound(nodes, width))
    checks = [
        Check("derivative of the velocity along waves, against R'(u*) − D q(k)", operator, 1e-12),
        Check("amplitudes of waves at t = 2, against exp(t M(k)), relative", growth, 2e-6),
        Check("largest D q(k) over the bound of the diffusion, and that over twice D q(k)", steep, 1.0 + 1e-12),
        Check("growth of the first mode, with the sign that it should not have", signs, 0.0),
        Check("the pattern from noise: its strongest wave, from that which grows fastest, in waves", selected, 2.0),
    ]
    return Outcome(checks, {}, {"fastest wave": fastest, "largest rate": float(rates[:, 0].real.max())})


def _selected(context: Context, nodes: int) -> float:
    """Return how far the strongest wave of a small pattern that grew from noise is from the one that grows fastest."""
    ring, off = Ring(nodes, (2.0, 2.0), 3.0), 0.0
    fastest = int(np.argmax(ring.rates()[:, 0].real))
    for seed in range(context.pick(5, 1)):
        noise = np.random.default_rng(seed).standard_normal((nodes, 2))
        final = solve(ring.flow, ring.rest + 1e-8 * noise, t=30.0, integrator=ETD4RK(0.1), energies=False).final
        spectrum = np.abs(np.fft.rfft(final[:, 0] - final[:, 0].mean()))
        off = largest(off, float(abs(int(np.argmax(spectrum)) - fastest)))
    return off


CLAIM = Claim(
    name="turing-instability",
    title="Patterns grow at the rates of the linear theory",
    statement=(
        "Beside a homogeneous state u* of du_c/dt = D_c (P_c u_c − u_c) + R_c(u) waves of number k grow as exp(t M), "
        "M = R'(u*) − diag(D_c q_c(k)), where q_c(k) is one minus the average of the wave over the kernel of the "
        "channel. Of the Brusselator, with one kernel and with two, velocities and flows do so to rounding and to the "
        "error of their steps; the first wave begins to grow at b = min (1 + D_u q_u) (a² + D_v q_v) / (D_v q_v), and "
        "patterns from noise have about the wave that grows fastest. All q are sums over images written out here."
    ),
    source="A. M. Turing 1952, doi 10.1098/rstb.1952.0012; I. Prigogine and R. Lefever 1968, doi 10.1063/1.1668896",
    run=run,
)
