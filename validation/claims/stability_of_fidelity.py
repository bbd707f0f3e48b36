"""Table 13: which fidelities a trained head can bear, when its layer is repeated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nlflow.plotting import new_figure
from nlflow.plotting.base import PALETTE, finish
from validation.harness import PAPER, Check, Claim, Context, Outcome, largest
from validation.networks import embeddings, minilm, on_one_thread, read, traced
from validation.plain_transformer import attention_matrix, plain_copy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

GRID = tuple(round(0.1 * i, 1) for i in range(1, 17))
CLOSE = 0.02  # |ρ − 1| below which the steps that are taken do not show what happens in the end


def growth(matrices: Floats, start: Floats, steps: int) -> Floats:
    """Return the measured growth of a disturbance a step, (heads, λ̃), over the second half of the steps.

    One column for each λ̃: a disturbance of u ← Pu + λ̃ (f − u) becomes P e − λ̃ e.
    """
    e, total, logs = start, np.zeros(start.shape[::2]), []
    for _ in range(steps):
        e = matrices @ e - e * np.array(GRID)
        size = np.linalg.norm(e, axis=1)
        total = total + np.log(size)
        logs.append(total)
        e = e / size[:, None]
    half = steps // 2
    return np.asarray(np.exp((logs[-1] - logs[half - 1]) / (steps - half)))


def distance_left(matrix: Floats, f: Floats, fidelity: float, steps: int) -> float:
    """Return |u − u*| / |f| after so many steps from u = f; u* solves (1 + λ̃) u − Pu = λ̃ f."""
    limit = np.linalg.solve((1 + fidelity) * np.eye(len(f)) - matrix, fidelity * f)
    u = f
    for _ in range(steps):
        u = matrix @ u + fidelity * (f - u)
    return float(np.linalg.norm(u - limit) / np.linalg.norm(f))


@on_one_thread
def run(context: Context) -> Outcome:
    steps = context.pick(3000, 600)
    inputs = read(0)
    model = minilm()
    trace = traced(model, inputs)
    blocks = plain_copy(model).run(embeddings(trace))
    layers = context.pick(range(6), (1, 3, 5))
    errors = {"ρ(P − λ̃I) of the package": 0.0, "limit of λ̃, q ≠ k": 0.0, "limit 1 + μ_min, q = k": 0.0}
    wrong, close, left, unstable = 0, 0, 0.0, 0
    stable: dict[str, Floats] = {}
    limits: dict[str, list[float]] = {"q ≠ k": [], "q = k": []}
    rng = np.random.default_rng(30)
    for kind in limits:
        shares = []
        for number in layers:
            context.step(f"{kind}, layer {number + 1}")
            block = blocks[number]
            matrices = block.a if kind == "q ≠ k" else attention_matrix(block.k, block.k)
            values = np.linalg.eigvals(matrices)
            radius = np.abs(values[:, None, :] - np.array(GRID)[:, None]).max(axis=-1)
            measured = growth(matrices, rng.standard_normal((*matrices.shape[:2], len(GRID))), steps)
            undecided = np.abs(radius - 1) < CLOSE
            close += int(undecided.sum())
            wrong += int(((radius < 1) != (measured < 1))[~undecided].sum())
            for h, (matrix, spectrum) in enumerate(zip(matrices, values, strict=True)):
                head = trace.head(number, h)
                if kind == "q ≠ k":
                    # |μ − λ̃| < 1 for all μ.
                    limit = float((spectrum.real + np.sqrt(1 - np.minimum(spectrum.imag**2, 1))).min())
                    errors["limit of λ̃, q ≠ k"] = largest(errors["limit of λ̃, q ≠ k"], abs(head.fidelity_limit - limit))
                    ours = np.array([head.spectral_radius(fidelity) for fidelity in GRID])
                    errors["ρ(P − λ̃I) of the package"] = largest(
                        errors["ρ(P − λ̃I) of the package"], float(np.abs(ours - radius[h]).max())
                    )
                else:
                    limit = 1 + float(spectrum.real.min())
                    keys = type(head)(head.k, head.k, head.v, head.scaling)
                    errors["limit 1 + μ_min, q = k"] = largest(
                        errors["limit 1 + μ_min, q = k"], abs(keys.fidelity_limit - limit)
                    )
                limits[kind].append(limit)
                unstable += limit < 1
                # All the way to the equilibrium, with a fidelity well within what the head can bear.
                slowest = float(np.abs(spectrum - 0.5 * limit).max())
                count = round(np.log(1e-9) / np.log(slowest)) + 20
                left = largest(left, distance_left(matrix, block.v[h], 0.5 * limit, count))
            shares.append((measured < 1).mean(axis=0))
        stable[kind] = np.array(shares)
    checks = [
        Check("(head, λ̃) whose disturbances grow or shrink otherwise than ρ(P − λ̃I) says", wrong, 0),
        Check("half of the limit: distance to the equilibrium over |f|, when ρ lets expect 1e-9", left, 1e-6),
        *(Check(f"{name}: error", value, 1e-8) for name, value in errors.items()),
        Check("q = k: least 1 + μ_min", min(limits["q = k"]), 1, at_least=True),
    ]
    details = {
        "heads": len(limits["q = k"]),
        f"(head, λ̃) left aside, |ρ − 1| < {CLOSE}": close,
        "limit of λ̃: least, median, largest": {
            kind: [min(found), float(np.median(found)), max(found)] for kind, found in limits.items()
        },
        "heads with q ≠ k that are stable": {
            f"λ̃ = {g:g}": share for g, share in zip(GRID, stable["q ≠ k"].mean(axis=0), strict=True)
        },
    }
    return Outcome(checks, {CAPTION: draw(stable, limits, list(layers))}, details)


def draw(stable: dict[str, Floats], limits: dict[str, list[float]], layers: list[int]) -> Figure:
    figure = new_figure(10.4, 3.9, dpi=130)
    left, right = figure.subplots(1, 2)
    for number, (kind, shares) in enumerate(stable.items()):
        left.plot(GRID, shares.mean(axis=0), color=PALETTE[number], marker="os"[number], markersize=4.5, label=kind)
        for row in shares:
            left.plot(GRID, row, color=PALETTE[number], linewidth=0.7, alpha=0.35)
        heads = len(limits[kind]) // len(layers)
        place = np.repeat(np.array(layers) + 1, heads) + 0.16 * (2 * number - 1)
        right.plot(place, limits[kind], color=PALETTE[number], marker="os"[number], linestyle="", alpha=0.5,
                   markersize=4.5, label=kind)  # fmt: skip
    left.axvline(1, color="0.5", linestyle="--", linewidth=1)
    right.axhline(1, color="0.5", linestyle="--", linewidth=1)
    finish(left, "measured", "λ̃", "share of heads whose steps converge")
    finish(right, "each head", "layer", "largest stable λ̃")
    right.set_xticks(np.array(layers) + 1)
    for axis in (left, right):
        axis.legend(fontsize=9, frameon=False)
    return figure


CAPTION = (
    "Heads of all-MiniLM-L6-v2 with their attention matrix frozen. Left: the share of heads whose repeated steps "
    "converge (thick: all layers, thin: each). Right: the largest stable λ̃ of each head. With q = k it is 1 or a "
    "little more, since P has no negative eigenvalue; with queries of their own it is often less."
)

CLAIM = Claim(
    name="stability-of-fidelity",
    title="How large a fidelity the heads of a trained model bear",
    statement=(
        "With the attention matrix P of a head frozen, u ← Pu + λ̃ (f − u) converges or diverges as ρ(P − λ̃I) < 1 or "
        f"> 1 says, for every head of all-MiniLM-L6-v2 and every λ̃ of {GRID[0]}, {GRID[1]}, … {GRID[-1]} that is not "
        "too near to the limit for so many steps. With q = k the limit is 1 + μ_min(P), at least 1; with the trained "
        "queries it is the smallest Re μ + √(1 − (Im μ)²), for many heads below 1. The paper's ablation (Table 13) "
        "has the accuracy collapse for λ̃ above 1. Limits and radii of the package are held against dense "
        "eigenvalues."
    ),
    source=f"{PAPER}, Table 13; derived",
    run=run,
)
