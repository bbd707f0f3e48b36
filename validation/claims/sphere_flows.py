"""Tokens on the sphere: two of them against their scalar equation, energies that fall, orders of steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import expm

from nlflow import GeodesicEuler, GeodesicMidpoint, LayerStep, RungeKutta, SphereFlow, on_sphere, solve
from nlflow.plotting import new_figure
from nlflow.plotting.base import PALETTE, finish
from nlflow.studies.fits import regress
from validation.harness import Check, Claim, Context, Outcome, largest

Floats = NDArray[np.float64]

MODELS = {"softmax": "SA", "none": "USA", "sinkhorn": "Sinkhorn"}
TIMES = np.linspace(0.0, 4.0, 17)
STEPS = np.array([1 / 10, 1 / 20, 1 / 40, 1 / 80, 1 / 160])
EXACT = {"rtol": 1e-12, "atol": 1e-14}


def equal_angles(count: int, beta: float, normalization: str, start: float) -> Floats:
    """Return the cosine of any two of n tokens that begin with equal cosines, by SciPy's integrator.

    c' = 2 w (1 - c) (1 + (n - 1) c), w being the weight of another token: exp(beta c) over the sum of the row, or over
    n (arXiv 2312.10794, theorem 6.1; for n = 2 it is 2 w (1 - c^2)).
    """
    from scipy.integrate import solve_ivp

    def slope(t: float, c: Floats) -> Floats:
        row = np.exp(beta) + (count - 1) * np.exp(beta * c) if normalization == "softmax" else count
        return np.asarray(2 * np.exp(beta * c) / row * (1 - c) * (1 + (count - 1) * c))

    found = solve_ivp(slope, (0, TIMES[-1]), [start], t_eval=TIMES, method="DOP853", rtol=1e-13, atol=1e-13)
    return np.asarray(found.y[0])


def simplex(count: int, cosine: float) -> Floats:
    """Return n directions any two of which have this cosine."""
    gram = np.full((count, count), cosine) + (1 - cosine) * np.eye(count)
    return np.asarray(np.linalg.cholesky(gram + 1e-300 * np.eye(count)))


def one_step() -> float:
    """Return errors of one step of each integrator against rotations that are exponentials of matrices, and a layer."""
    rng, n, d, beta, dt = np.random.default_rng(3), 7, 3, 0.7, 0.4
    x, maps, worst = on_sphere(rng.standard_normal((n, d))), rng.standard_normal((3, d, d)) / 2, 0.0

    for normalization in ("softmax", "none"):

        def attention(x: Floats, sums: bool = normalization == "softmax") -> Floats:
            k = np.exp(beta * (x @ maps[0]) @ (x @ maps[1]).T)
            return np.asarray((k / k.sum(axis=1, keepdims=True) if sums else k / n) @ x @ maps[2])

        def spins(x: Floats) -> Floats:
            """Return v xᵀ − x vᵀ, with which the tokens of speed v = (I − x xᵀ) a turn."""
            v = attention(x)
            return v[:, :, None] * x[:, None] - x[:, :, None] * v[:, None]

        def turned(x: Floats, spins: Floats, t: float) -> Floats:
            return np.einsum("nij,nj->ni", np.stack([expm(t * spin) for spin in spins]), x)

        layer = x + dt * attention(x)
        wanted = {
            GeodesicEuler: turned(x, spins(x), dt),
            GeodesicMidpoint: turned(x, spins(turned(x, spins(x), dt / 2)), dt),
            LayerStep: layer / np.linalg.norm(layer, axis=1, keepdims=True),
        }
        flow = SphereFlow(x, beta, query_map=maps[0], key_map=maps[1], value_map=maps[2], normalization=normalization)
        for method, end in wanted.items():
            worst = largest(worst, float(np.abs(method(dt).step(flow, x, dt) - end).max()))
    return worst


def run(context: Context) -> Outcome:
    scalar: dict[str, float] = {}
    curves = {}
    for normalization in ("softmax", "none"):
        for count, start in ((2, -0.6), (5, 0.0)):
            off = []
            for beta in context.pick((0.5, 1.0, 4.0), (1.0, 4.0)):
                context.step(f"{MODELS[normalization]}, {count} tokens, beta = {beta:g}")
                x = on_sphere(simplex(count, start))
                found = solve(
                    SphereFlow(x, beta, normalization=normalization), x, t_eval=TIMES, integrator=RungeKutta(**EXACT)
                )
                cosines = np.einsum("td,td->t", found.u[:, 0], found.u[:, 1])
                exact = equal_angles(count, beta, normalization, start)
                off.append(float(np.abs(cosines - exact).max()))
                if count == 2 and normalization == "softmax":
                    curves[beta] = (cosines, exact)
            scalar[f"{MODELS[normalization]}, {count} tokens"] = largest(*off)
    x = on_sphere(np.random.default_rng(0).standard_normal((24, 3)))
    rises, balance, energies, lengths = 0, [], {}, []
    matrix = np.random.default_rng(1).standard_normal((3, 3))
    for normalization, name in MODELS.items():
        context.step(f"{name}: energy")
        for both in (np.eye(3), (matrix + matrix.T) / 2):
            for slope in context.pick((1.0, -0.5), (1.0,)):
                flow = SphereFlow(x, 2.0, query_map=both, value_map=slope * both, normalization=normalization)
                found = solve(flow, x, t_eval=np.linspace(0, 2, 21))
                rises += int((np.diff(found.energy) >= 0).sum())
                lengths.append(float(np.abs(np.linalg.norm(found.u, axis=-1) - 1).max()))
                balance += [_imbalance(flow, u) for u in found.u[:3]]
                if slope == 1.0 and both[0, 1] == 0:
                    energies[name] = found.energy
    maps = np.random.default_rng(2).standard_normal((3, 3, 3)) / 2
    rates = []
    for normalization in MODELS:
        flow = SphereFlow(x, 0.7, query_map=maps[0], key_map=maps[1], value_map=maps[2], normalization=normalization)
        bound = np.exp(0.7 * np.linalg.norm(maps[0] @ maps[1].T, 2)) if normalization == "none" else 1.0
        fastest = np.linalg.norm(maps[2], 2) * bound
        rates += [flow.rate / fastest - 1, GeodesicEuler(0.1).stability_limit(flow) * fastest / 2 - 1]
    orders: dict[str, float] = {}
    errors: dict[str, Floats] = {}
    for method in (GeodesicEuler, GeodesicMidpoint, LayerStep):
        for normalization, name in MODELS.items():
            context.step(f"{method.__name__}, {name}")
            flow = SphereFlow(x, 1.0, normalization=normalization)
            exact = solve(flow, x, t=1.0, integrator=RungeKutta(**EXACT)).final
            off = [np.abs(solve(flow, x, t=1.0, integrator=method(dt)).final - exact).max() for dt in STEPS]
            orders[f"{method.__name__}, {name}"] = regress(np.log(STEPS[1:]), np.log(off[1:])).slope
            if normalization == "softmax":
                errors[method.__name__] = np.array(off)
    declared = {"GeodesicEuler": 1.0, "GeodesicMidpoint": 2.0, "LayerStep": 1.0}
    checks = [
        *(Check(f"{name}: cosine against its scalar equation", value, 1e-8) for name, value in scalar.items()),
        Check("outputs at which an energy did not fall", rises, 0),
        Check("rate of the energy against -(1/N) sum r |dx/dt|^2, relative", largest(*balance), 1e-6),
        Check("bounds of rates and of steps against norms of matrices, relative", largest(*np.abs(rates)), 1e-12),
        Check("one step against exponentials of rotations, and a layer against its sum", one_step(), 1e-13),
        Check("length of a token less 1", largest(*lengths), 1e-14),
        *(Check(f"{name}: fitted order", order, 0.1, expected=declared[name.split(",")[0]])
          for name, order in orders.items()),
    ]  # fmt: skip
    return Outcome(checks, {CAPTION: draw(curves, energies, errors)}, {"orders": orders, "scalar equations": scalar})


def _imbalance(flow: SphereFlow, u: Any, step: float = 1e-5) -> float:
    """Return how far a central difference of the energy along the flow is from its formula, relatively."""
    v = flow.velocity(u)
    change = (flow.energy(on_sphere(u + step * v)) - flow.energy(on_sphere(u - step * v))) / (2 * step)
    mass = np.exp(flow.at(u).affinity.log_degree) if flow.normalization == "softmax" else 1.0
    slope = flow._slope or 0.0
    expected = -float((mass * (v**2).sum(axis=1)).mean())
    return abs(change - expected) / abs(expected) if slope else float("inf")


def draw(curves: Any, energies: Any, errors: Any) -> Any:
    figure = new_figure(11.4, 3.8, dpi=130)
    left, middle, right = figure.subplots(1, 3)
    for colour, (beta, (found, exact)) in zip(PALETTE, curves.items(), strict=False):
        left.plot(TIMES, exact, color=colour, linewidth=1.2, label=f"β = {beta:g}")
        left.plot(TIMES, found, "o", color=colour, markersize=3.5)
    finish(left, "two tokens (SA); lines: scalar equation", "t", "cosine of the angle")
    for colour, (name, energy) in zip(PALETTE, energies.items(), strict=False):
        middle.plot(np.linspace(0, 2, 21), energy, color=colour, marker=".", label=name)
    finish(middle, "energy of 24 tokens, β = 2", "t", "−E (E with Sinkhorn)")
    for colour, (name, off) in zip(PALETTE, errors.items(), strict=False):
        right.loglog(STEPS, off, color=colour, marker="o", markersize=4, label=name)
    for order, first in ((1, 0.03), (2, 4e-4)):
        right.loglog(STEPS, first * (STEPS / STEPS[0]) ** order, color="0.5", linewidth=0.8, linestyle="--")
    right.set_xticks(STEPS, [f"1/{round(1 / dt)}" for dt in STEPS])
    right.minorticks_off()
    finish(right, "error at t = 1; dashed: orders 1 and 2", "step", "largest error")
    for axis in (left, middle, right):
        axis.legend(fontsize=8, frameon=False)
    return figure


CAPTION = (
    "Left: two tokens on the sphere against the scalar equation of their angle. Middle: the energies that the three "
    "models descend. Right: errors of the steps that stay on the sphere."
)

CLAIM = Claim(
    name="sphere-flows",
    title="Self-attention with norm and residual is a gradient flow on the sphere",
    statement=(
        "Tokens with dx/dt = (I − xxᵀ) Σⱼ aᵢⱼ xⱼ W_V: two tokens, and five with equal angles, follow their scalar "
        "equation c' = 2w (1 − c)(1 + (n − 1)c), held against SciPy's DOP853. Where W_Q W_Kᵀ is symmetric and W_V a "
        "multiple of it, the energy falls in the models SA and USA, and with Sinkhorn's weights that of Sinkformers; "
        "its rate is −(1/N) Σ rᵢ |dxᵢ/dt|², with rᵢ = Σⱼ kᵢⱼ/N for SA and 1 otherwise. Steps along great circles have "
        "the orders 1 and 2, a layer with residual and norm has order 1, and all stay on the sphere."
    ),
    source="arXiv 2312.10794, sections 3 and 6; arXiv 2110.11773",
    run=run,
)
