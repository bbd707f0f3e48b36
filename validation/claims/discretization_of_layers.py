"""A trained head as one Euler step: sub-steps of it tend to the flow of its attention matrix with order 1."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import expm

from nlflow.plotting import new_figure
from nlflow.plotting.base import PALETTE, finish
from validation.harness import PAPER, Check, Claim, Context, Outcome, largest
from validation.networks import PASSAGES, embeddings, minilm, on_one_thread, read, traced
from validation.plain_transformer import Block, attention_matrix, mean_cosine, plain_copy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

SUBSTEPS = (1, 2, 4, 8, 16, 32, 64)
KINDS = ("q ≠ k", "q = k")


def courses(block: Block, kind: str) -> tuple[Floats, float]:
    """Return |u_m − u(1)| / |u(1) − v| of all heads together by dense matrices, and the leading term of m times it."""
    missed, way, leading = np.zeros(len(SUBSTEPS)), 0.0, 0.0
    for a, v in zip(block.a if kind == "q ≠ k" else attention_matrix(block.k, block.k), block.v, strict=True):
        identity = np.eye(len(v))
        exact = expm(a - identity) @ v
        for place, m in enumerate(SUBSTEPS):
            step = identity + (a - identity) / m
            missed[place] += ((np.linalg.matrix_power(step, m) @ v - exact) ** 2).sum()
        way += ((exact - v) ** 2).sum()
        # (1 + z/m)^m = exp(z − z²/(2m) + …)
        leading += (((a - identity) @ (a - identity) @ exact / 2) ** 2).sum()
    return np.sqrt(missed / way), float(np.sqrt(leading / way))


@on_one_thread
def run(context: Context) -> Outcome:
    from nlflow.attention import discretize, extrapolate

    model = minilm()
    plain = plain_copy(model)
    error = dict.fromkeys(KINDS, 0.0)
    orders: dict[str, list[float]] = {kind: [] for kind in (*KINDS, "evolving kernel")}
    constants, drawn = [], {}
    layers = context.pick(range(len(plain.layers)), (0, 3, 5))
    passages = context.pick(3, 1)
    for number in range(min(passages, len(PASSAGES))):
        trace = traced(model, read(number))
        blocks = plain.run(embeddings(trace))
        for layer in layers:
            context.step(f"passage {number + 1}, layer {layer + 1}")
            for kind in KINDS:
                expected, leading = courses(blocks[layer], kind)
                ours = discretize(trace[layer], substeps=SUBSTEPS, symmetric=kind == "q = k")
                error[kind] = largest(error[kind], float(np.abs(ours.distance / expected - 1).max()))
                orders[kind].append(ours.order)
                constants.append(abs(SUBSTEPS[-1] * ours.distance[-1] / leading - 1))
                if number == 0:
                    drawn.setdefault(kind, {})[layer + 1] = ours.distance
    context.step("evolving kernel")
    head = trace.head(layers[1], 0)
    orders["evolving kernel"].append(discretize(head, substeps=SUBSTEPS, evolving=True).order)
    context.step("depth")
    first, depth = blocks[0], len(blocks) - 1
    ahead = extrapolate(trace, 0)
    predicted = [
        mean_cosine(
            np.concatenate([np.linalg.matrix_power(a, n) @ v for a, v in zip(first.a, first.v, strict=True)], 1)
        )
        for n in range(depth + 1)
    ]
    checks = [
        *(Check(f"{kind}: package against dense matrices, relative", value, 1e-7) for kind, value in error.items()),
        *(
            Check(f"{kind}: order in 1/m, furthest from 1", _furthest(found), 0.05, expected=1)
            for kind, found in orders.items()
        ),
        Check(f"m = {SUBSTEPS[-1]}: m times the error against |(P−I)² u(1)| / 2, relative", max(constants), 0.05),
        Check("cosine predicted for more layers against powers of P",
              float(np.abs(ahead.cosine - predicted).max()), 1e-11),
    ]  # fmt: skip
    details = {
        "distance of the layer (m = 1) from the flow at time 1, over the way of the flow": {
            kind: {f"layer {layer}": float(found[0]) for layer, found in runs.items()} for kind, runs in drawn.items()
        },
        "mean cosine of values, chain of layer 1 repeated": list(ahead.cosine),
        "mean cosine of values, measured in the stack": list(ahead.measured_cosine),
    }
    return Outcome(checks, {CAPTION: draw(drawn, ahead.cosine, ahead.measured_cosine)}, details)


def _furthest(orders: list[float]) -> float:
    return max(orders, key=lambda order: abs(order - 1))


def draw(drawn: dict[str, dict[int, Floats]], predicted: Floats, measured: Floats) -> Figure:
    figure = new_figure(10.4, 3.9, dpi=130)
    left, right = figure.subplots(1, 2)
    for number, (kind, runs) in enumerate(drawn.items()):
        for place, found in enumerate(runs.values()):
            left.loglog(SUBSTEPS, found, color=PALETTE[number], marker="os"[number], markersize=4.5, alpha=0.8,
                        label=kind if place == 0 else None)  # fmt: skip
    start = max(max(found[-1] for found in runs.values()) for runs in drawn.values()) * 1.6
    left.loglog(SUBSTEPS, [start * SUBSTEPS[-1] / m for m in SUBSTEPS], color="0.5", linestyle="--", label="1/m")
    left.set_xticks(SUBSTEPS, [str(m) for m in SUBSTEPS])
    left.minorticks_off()
    finish(left, "the layer is m = 1", "m sub-steps", "distance from the flow, over its way")
    depth = np.arange(1, len(predicted) + 1)
    right.plot(depth, predicted, color=PALETTE[0], marker="o", label="chain of layer 1, repeated")
    right.plot(depth, measured, color=PALETTE[1], marker="s", label="the stack, measured")
    finish(right, "depth", "layer", "mean cosine of the tokens' values")
    for axis in (left, right):
        axis.legend(fontsize=9, frameon=False)
    return figure


CAPTION = (
    "Left: distance from the continuous flow at time 1, one curve a layer of all-MiniLM-L6-v2; the layer itself is one "
    "step. Right: the chain of the first layer repeated makes all values equal at once; the stack, with its weights, "
    "MLPs and residuals, does not."
)

CLAIM = Claim(
    name="discretization-of-layers",
    title="A trained layer is a coarse Euler step of a flow",
    statement=(
        "A head v ← Pv is one Euler step of length 1 of du/dt = Pu − u from u(0) = v. For the heads of "
        "all-MiniLM-L6-v2, m steps of length 1/m miss the flow at time 1 by an error of order 1 in 1/m, m times which "
        "tends to |(P − I)² u(1)| / 2, with the trained queries, with keys for queries, and with a kernel that "
        "evolves along with the values. The layer itself misses it by a large part of the way. Held against matrix "
        "exponentials (SciPy) and powers of dense matrices. What the chain of one layer predicts for the layers to "
        "come is drawn beside the stack."
    ),
    source=f"{PAPER}, Theorem 1; derived",
    run=run,
)
