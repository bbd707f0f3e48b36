"""Nonlocal Allen-Cahn on a circle: pitchforks at the eigenvalues of I - P, and what branches from them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import root

from nlflow import Gaussian, GradientFlow, Grid, J, Points, affinity, from_matrix
from nlflow.affinities import Unlinked
from nlflow.equilibria import continue_equilibria, find_equilibria, find_equilibrium
from nlflow.equilibria.continuation import Continuation, Family
from nlflow.equilibria.eigenvalues import _all_pairs
from nlflow.equilibria.equations import Equations
from nlflow.equilibria.newton import Deflation
from nlflow.equilibria.tangents import Border, Tangent
from nlflow.flows import Reaction
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

WIDTHS = (0.15, 0.1)
UP_TO = 0.9


class Circle:
    """P on a circle by its row, written out, and the flows for each r."""

    def __init__(self, width: float, nodes: int) -> None:
        kernel = np.zeros(nodes)
        for turn in range(-6, 7):  # what comes round the circle
            kernel += np.exp(-((np.arange(nodes) / nodes + turn) ** 2) / (2 * width**2))
        self.row = kernel / kernel.sum()
        self.nodes = nodes
        angles = 2 * np.pi * np.arange(nodes) / nodes
        self.values = np.array([1 - float(self.row @ np.cos(k * angles)) for k in range(nodes // 2)])
        self.matrix = np.array([[self.row[(j - i) % nodes] for j in range(nodes)] for i in range(nodes)])
        grid = Grid(nodes, spacing=1 / nodes, boundary="periodic")
        self.weights = affinity(Gaussian(width=width), grid)

    def make_flow(self, r: float) -> GradientFlow:
        reaction = Reaction(lambda u: r * (u - u**3), (-2, 2), derivative=lambda u: r * (1 - 3 * u * u))
        return GradientFlow(J(self.weights), "degree", reaction=reaction)

    def velocity(self, u: Floats, r: float) -> Floats:
        return self.matrix @ u - u + r * (u - u**3)

    def growing(self, u: Floats, r: float) -> int:
        """Return how many eigenvalues are positive, but for that of the translation of a pattern."""
        jacobian = self.matrix - np.eye(self.nodes) + np.diag(r * (1 - 3 * u**2))
        values, vectors = np.linalg.eigh(jacobian)
        slope = np.roll(u, -1) - np.roll(u, 1)
        if np.ptp(u) > 1e-6:
            values = np.delete(values, np.argmax(np.abs(slope @ vectors)))
        return int(np.count_nonzero(values > 1e-12))


def told_of_fast() -> tuple[float, float]:
    """Return the largest misplacement of the pitchfork of du/dt = c (r u - u^3) at r = 0, and error that is told of it.

    Neither depends on the unit of time.
    """
    off, told = 0.0, 0.0
    for c in (1.0, 1e3, 1e6):

        def make_flow(r: float, c: float = c) -> GradientFlow:
            reaction = Reaction(lambda u: c * (r * u - u**3), (-2, 2), derivative=lambda u: c * (r - 3 * u * u))
            return GradientFlow(J(Unlinked(Points([0.0]))), "degree", reaction=reaction)

        (point,) = continue_equilibria(make_flow, np.zeros(1), -0.3, (-0.3, 0.5)).points
        off, told = largest(off, abs(point.parameter)), largest(told, point.error)
    return off, told


def several() -> float:
    """Return errors of equilibria of four nodes, by deflation and by transients, of the factor, and of its slope."""
    rng = np.random.default_rng(14)
    k, r = rng.random((4, 4)), 2.5
    k += k.T
    p = k / k.sum(axis=1, keepdims=True)
    reaction = Reaction(lambda u: r * (u - u**3), (-2, 2), derivative=lambda u: r * (1 - 3 * u * u))
    flow = GradientFlow(J(from_matrix(k, Points(np.zeros(4)))), "degree", reaction=reaction)

    def velocity(u: Floats) -> Floats:
        return np.asarray(p @ u - u + r * (u - u**3))

    exact: list[Floats] = []
    for start in np.stack(np.meshgrid(*[np.linspace(-1.1, 1.1, 4)] * 4), axis=-1).reshape(-1, 4):
        u = root(velocity, start, tol=1e-13).x
        if np.abs(velocity(u)).max() < 1e-11 and all(np.abs(u - other).max() > 1e-5 for other in exact):
            exact.append(u)
    found = find_equilibria(flow, [rng.uniform(-1, 1, 4) for _ in range(4)], most=9)
    apart = [[float(np.abs(one.u - other).max()) for other in exact] for one in found]
    worst = largest(max(min(row) for row in apart) / 1e-8, len(found) - len({int(np.argmin(row)) for row in apart}))
    worst = largest(worst, float(len(found) < 9))
    settled = find_equilibrium(flow, np.array([0.3, -0.2, 0.5, 0.1]), method="transient")
    worst = largest(worst, float(np.abs(velocity(np.asarray(settled.u))).max()) / 1e-8)
    # Along a Newton step of F the step of the deflated m F is shorter by 1 / (1 − slope of log m).
    known, x, step = [np.ones(4), -np.ones(4)], rng.uniform(-1, 1, 4), rng.standard_normal(4)
    size, w = 1.7, k.sum(axis=1) / k.sum()

    def log_m(s: float) -> float:
        return float(sum(np.log(1 / (w @ ((x + s * step - one) / size) ** 2) + 1) for one in known))

    deflation = Deflation(Equations(flow, "start", x), known, size)
    norm = deflation.equations.norm(np.ones(4))  # of which powers the measure is
    assert abs(norm - 1) < 1e-12
    slope = (8 * (log_m(1e-3) - log_m(-1e-3)) - log_m(2e-3) + log_m(-2e-3)) / 12e-3
    return largest(worst, abs(deflation.factor(x, step) * (1 - slope) - 1) / 1e-7,
                   abs(np.log(deflation.value(x)) - log_m(0.0)) / 1e-10)  # fmt: skip


def conditions() -> float:
    """Return errors of condition numbers of eigenvalues, |row of V⁻¹| |column of V|, relative."""
    matrix = np.random.default_rng(15).standard_normal((6, 6))
    values, vectors = np.linalg.eig(matrix)
    exact = np.linalg.norm(np.linalg.inv(vectors), axis=1) * np.linalg.norm(vectors, axis=0)
    found, _, told = _all_pairs(matrix, False)
    nearest = np.abs(found[:, None] - values).argmin(axis=1)
    in_order = (np.diff(found.real) <= 1e-12).all()  # the largest real part first
    return float(np.abs(told / exact[nearest] - 1).max()) if in_order else np.inf


def directions() -> float:
    """Return errors of dF/dp at ends of the range and between, and of a unit tangent of the branch u² = r, relative."""
    circle, rng = Circle(0.15, 16), np.random.default_rng(1)
    u, low, high = rng.uniform(-1, 1, 16), -0.1, 0.9

    def squared(r: float) -> GradientFlow:
        reaction = Reaction(lambda u: r**2 * (u - u**3), (-2, 2), derivative=lambda u: r**2 * (1 - 3 * u * u))
        return GradientFlow(J(circle.weights), "degree", reaction=reaction)

    def rooted(r: float) -> GradientFlow:
        reaction = Reaction(lambda u: r * u - u**3, (-2, 2), derivative=lambda u: r - 3 * u * u)
        return GradientFlow(J(circle.weights), "degree", reaction=reaction)

    family = Family(squared, Equations(squared(0.1), "u", u), (low, high))
    worst = largest(*(
        float(np.abs(family.slope(u, q) - 2 * (low + q) * (u - u**3)).max()) for q in (0.0, 0.3, 1.0)
    ))  # fmt: skip
    x = np.full(16, 0.6)
    family = Family(rooted, Equations(rooted(0.36), "u", x), (low, high))
    moved, share = Continuation(family, 0.6, 0.1, 0.5, 10, 3, 1e-10).tangent(x, family.place(0.36), (0 * x, 1.0))
    steep = 1 / (2 * 0.6)  # du/dr, where u is measured over its size and r over the range of 1
    wanted = np.append(x * 0 + steep, 1.0) / np.sqrt((steep / 0.6) ** 2 + 1)
    return largest(worst, float(np.abs(np.append(moved, share) - wanted).max()))


def systems() -> float:
    """Return errors of bordered systems, J v − s v + columns c = b, rows v + corner c = d, and of what helps with them.

    Solved as a matrix and by products. Their preconditioner is −(A + σ)⁻¹ on a ring and that of the diagonal elsewhere,
    σ being |s| and the steepest slope of the reaction, or 1 % of the largest rate. Relative.
    """
    rng, worst, n, s, border = np.random.default_rng(21), 0.0, 16, 0.3, 2
    circle = Circle(0.15, n)
    k, w = rng.random((n, n)), rng.uniform(0.5, 2.0, n) / n
    links = (k + k.T) * w
    lowered = np.diag(links.sum(axis=1)) - links
    nodes = from_matrix(k, Points(np.zeros(n), weights=w))
    x, (b, v) = rng.uniform(-1, 1, n), rng.standard_normal((2, n))
    for r in (0.7, 1e-5):
        reaction = Reaction(lambda u: r * (u - u**3), (-2, 2), derivative=lambda u: r * (1 - 3 * u * u))  # noqa: B023
        for flow, a in (
            (circle.make_flow(r), np.eye(n) - circle.matrix),
            (GradientFlow(J(nodes), "l2", reaction=reaction), lowered),
        ):
            columns, rows = rng.standard_normal((n, border)), rng.standard_normal((border, n))
            corner, d = rng.standard_normal((border, border)), rng.standard_normal(border)
            jacobian = np.diag(r * (1 - 3 * x**2)) - a
            exact = np.linalg.solve(np.block([[jacobian - s * np.eye(n), columns], [rows, corner]]), np.append(b, d))
            tangent = Tangent(Equations(flow, "u", x), x, s)
            lift = s + max(11 * r, 0.01 * flow.spectral_bounds()[1])  # |1 − 3 u²| is at most 11 up to 2
            helped = a if a is not lowered else np.diag(np.diag(lowered) + np.diag(links))
            worst = largest(worst, float(np.abs((helped + lift * np.eye(n)) @ tangent._preconditioner()(v) + v).max()))
            for dense in (True, False):
                tangent.dense = dense
                found = tangent.solve(b, Border(columns, rows, corner), d, rtol=1e-13)
                worst = largest(
                    worst, float(np.abs(np.append(found.v, found.c) - exact).max() / np.abs(exact).max()),
                    found.residual, float(found.singular),
                )  # fmt: skip
    # A pattern on a ring may be moved along it: of length 1 in the measure, whose sum is 1.
    circle, waves = Circle(0.15, 64), np.fft.fftfreq(64, 1 / 64)
    flow = circle.make_flow(0.45)
    pattern = np.asarray(find_equilibrium(flow, np.cos(2 * np.pi * np.arange(64) / 64)).u)
    neutral = Equations(flow, "u", pattern).neutral(pattern)
    slope = np.fft.ifft(1j * np.where(waves == -32, 0, waves) * np.fft.fft(pattern)).real
    told = neutral.columns[:, 0]
    return largest(worst, float(neutral.count != 1 or neutral.conserved),
                   float(np.abs(told - slope / np.sqrt(np.mean(slope**2))).max()))  # fmt: skip


def run(context: Context) -> Outcome:
    misplaced, uneven, missed, miscounted, bent = 0.0, 0.0, 0.0, 0, 0.0
    details: dict[str, Any] = {}
    for width in context.pick(WIDTHS, WIDTHS[:1]):
        circle = Circle(width, context.pick(128, 64))
        context.step(f"width {width}")
        zero = continue_equilibria(circle.make_flow, np.zeros(circle.nodes), -0.1, (-0.1, UP_TO))
        expected = circle.values[circle.values < UP_TO]
        found = [point for point in zero.points if point.kind == "pitchfork"]
        uneven = largest(uneven, abs(len(zero.points) - len(expected)), abs(len(found) - len(expected)))
        for point, value in zip(found, expected, strict=False):
            misplaced = largest(misplaced, abs(point.parameter - value))
        miscounted += sum(
            int(n != np.sum((r > expected) * np.r_[1, np.full(len(expected) - 1, 2)]))
            for r, n in zip(zero.parameter, zero.unstable, strict=True)
        )
        for number, point in enumerate(found[1:], start=1):
            branch = zero.switch(point)
            for r, u, n in zip(branch.parameter[1:], branch.u[1:], branch.unstable[1:], strict=True):
                missed = largest(missed, float(np.abs(circle.velocity(u, r)).max()))
                miscounted += int(n != circle.growing(u, r))
            amplitude = 2 / circle.nodes * np.abs(np.fft.rfft(branch.u[1])[number])
            law = (branch.parameter[1] - expected[number]) / (0.75 * expected[number] * amplitude**2)
            bent = largest(bent, abs(law - 1))
        details[f"width {width}"] = {"found": [point.parameter for point in found], "expected": expected.tolist()}
    off, told = told_of_fast()
    checks = [
        Check("one node at any speed: its pitchfork from r = 0", off, 1e-13),
        Check("the error that is told of that", told, 1e-13),
        Check("derivatives by the parameter, and a tangent, against formulas", directions(), 1e-8),
        Check("bordered systems, preconditioners and translations against dense ones, relative", systems(), 1e-8),
        Check("several equilibria by deflation against SciPy's, over what they may be off", several(), 1.0),
        Check("condition numbers of eigenvalues against the inverse of eigenvectors, relative", conditions(), 1e-9),
        Check("pitchforks against the eigenvalues of I − P, written out", misplaced, 1e-8),
        Check("pitchforks that are missing, or too many", uneven, 0),
        Check("|du/dt| of the patterns on branches, from the formula", missed, 1e-9),
        Check("points of branches with another number of growing directions than the matrix has", miscounted, 0),
        Check("r − A_k over 3/4 A_k a², a being the amplitude of a pattern: off 1 by", bent, 5e-3),
    ]
    return Outcome(checks, {}, details)


CLAIM = Claim(
    name="pitchforks",
    title="Patterns branch from 0 at the eigenvalues of the nonlocal operator",
    statement=(
        "The flow du/dt = Pu − u + r (u − u³) on a circle has the equilibrium 0 for all r. It loses stability in the "
        "mode cos kx at r = A_k, the eigenvalue of I − P, in a pitchfork (a circle of them for k > 0): patterns of "
        "amplitude a satisfy r = A_k + 3/4 A_k a² + O(a⁴). Continuation finds each of them, and the number of growing "
        "directions along branches is that of the matrix, the translation of a pattern left aside."
    ),
    source="P. W. Bates 2006; M. Crandall and P. Rabinowitz 1971, doi 10.1016/0022-1236(71)90015-2",
    run=run,
)
