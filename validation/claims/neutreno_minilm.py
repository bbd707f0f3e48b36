"""The term switched on in a trained sentence encoder, without training: the larger λ̃, the more tokens differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nlflow.plotting import new_figure
from nlflow.plotting.base import MARKERS, PALETTE, finish
from validation.harness import PAPER, Check, Claim, Context, Outcome, largest, smallest
from validation.networks import embeddings, minilm, on_one_thread, passages, read, traced
from validation.plain_transformer import mean_cosine, plain_copy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

GRID = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
FIDELITY = 0.6  # of the experiments with single layers


def layer_sets(layers: int) -> dict[str, list[list[float]]]:
    """Return λ̃ of each layer: the term in one layer alone, and in all layers from the second up to one."""
    alone = [[FIDELITY if i == last else 0.0 for i in range(layers)] for last in range(layers)]
    up_to = [[FIDELITY if i <= last else 0.0 for i in range(layers)] for last in range(layers)]
    return {"in this layer alone": alone, "up to this layer": up_to}


@on_one_thread
def run(context: Context) -> Outcome:
    model = minilm()
    plain = plain_copy(model)
    sets = layer_sets(len(plain.layers))
    error, changed = 0.0, 0
    cosines: list[list[list[float]]] = []
    effects: dict[str, list[list[float]]] = {name: [] for name in sets}
    for number, inputs in passages(context):
        stock = traced(model, inputs)
        x = embeddings(stock)
        by_fidelity = []
        for fidelity in GRID:
            trace = traced(model, inputs, fidelity=fidelity)
            expected = plain.run(x, fidelity)
            for layer, block in zip(trace, expected, strict=True):
                error = largest(error, float(np.abs(layer.after[0].numpy() - block.after).max()))
            if fidelity == 0:
                changed += sum(not bool((a.after == b.after).all()) for a, b in zip(stock, trace, strict=True))
            by_fidelity.append([float(layer.quantities["mean_cosine"][0]) for layer in trace])
        cosines.append(by_fidelity)
        if number and context.quick:
            continue
        for name, strengths in sets.items():
            found = []
            for strength in strengths:
                last = plain.run(x, strength)[-1].after
                found.append(mean_cosine(last))
                if number == 0 and name == "up to this layer":
                    ours = traced(model, inputs, fidelity=strength)[-1].after[0].numpy()
                    error = largest(error, float(np.abs(ours - last).max()))
            effects[name].append(found)
    context.step("single precision")
    single, inputs = minilm("float32"), read(0)
    before, after = traced(single, inputs), traced(single, inputs, fidelity=0.0)
    changed += sum(not bool((a.after == b.after).all()) for a, b in zip(before, after, strict=True))
    table = np.array(cosines)
    falls = -np.diff(table[:, :, -1], axis=1)
    checks = [
        Check("last layer: least fall of the mean cosine from one λ̃ to the next, first passage",
              smallest(*falls[0]), 0, at_least=True),
        Check("the same, mean over passages", smallest(*falls.mean(axis=0)), 0, at_least=True),
        Check("last layer: largest rise from one λ̃ to the next, of all passages", -smallest(*falls.ravel()), 0.005),
        Check("last layer: mean cosine at λ̃ = 1 over that at 0, largest of all passages",
              largest(*(table[:, -1, -1] / table[:, 0, -1])), 0.5),
        Check("λ̃ = 0: layers whose states differ from those of the stock model in any bit", changed, 0),
        Check("hidden states against plain sums in float64", error, 1e-11),
    ]  # fmt: skip
    mean = table.mean(axis=0)
    details = {
        "mean cosine by layer, mean over passages": {
            f"λ̃ = {g:g}": list(row) for g, row in zip(GRID, mean, strict=True)
        },
        "last layer, each passage": [list(row) for row in table[:, :, -1]],
        f"last layer, λ̃ = {FIDELITY} in some layers": {
            name: list(np.mean(found, axis=0)) for name, found in effects.items()
        },
    }
    return Outcome(checks, {CAPTION: draw(mean, {k: np.mean(found, axis=0) for k, found in effects.items()})}, details)


def draw(mean: Floats, effects: dict[str, Floats]) -> Figure:
    figure = new_figure(10.4, 4.0, dpi=130)
    left, right = figure.subplots(1, 2)
    layers = np.arange(1, mean.shape[1] + 1)
    for number, (fidelity, row) in enumerate(zip(GRID, mean, strict=True)):
        shade = (0.04 + 0.16 * number, 0.33 - 0.02 * number, 0.58 - 0.08 * number)
        left.plot(layers, row, color=shade, marker="o", markersize=4.5, label=f"λ̃ = {fidelity:g}")
    finish(left, "the term in all layers", "layer", "mean cosine of two tokens")
    left.legend(fontsize=9, frameon=False)
    right.axhline(mean[0, -1], color="0.4", linestyle="--", linewidth=1, label="without")
    for number, (name, values) in enumerate(effects.items()):
        right.plot(
            layers[1:], values[1:], color=PALETTE[number], marker=MARKERS[number], markersize=5, label=f"term {name}"
        )
    finish(right, f"λ̃ = {FIDELITY} in some layers", "layer", "mean cosine after the last layer")
    right.set_xticks(layers[1:])
    right.legend(fontsize=9, frameon=False)
    return figure


CAPTION = (
    "all-MiniLM-L6-v2, mean over passages. Left: the mean cosine of two tokens after each layer, for λ̃ from 0 (blue) "
    "to 1 (red). Right: after the last layer, with the term in one layer alone, or in all layers up to one; the first "
    "layer never has a term."
)

CLAIM = Claim(
    name="neutreno-minilm",
    title="In a trained encoder the term makes tokens differ, without training",
    statement=(
        "all-MiniLM-L6-v2 was trained without the term λ̃ (v⁰ − v). Switched on in all layers, it lowers the mean "
        f"cosine of two tokens after the last layer with each step of λ̃ over {', '.join(f'{g:g}' for g in GRID)}, on "
        "the first passage and in the mean over passages, and to less than half on each of them (on single ones the "
        "last step may raise it by some thousandths). With λ̃ = 0 the model keeps all its bits. States are held against "
        "the encoder as plain sums in float64. The fall is a finding on this model; in the layers in the middle it is "
        "not monotone. Whether sentences are embedded better is another question, which this does not answer."
    ),
    source=f"{PAPER}, eq. 28 and Figure 1",
    run=run,
)
